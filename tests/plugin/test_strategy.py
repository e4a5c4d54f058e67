"""What the strategy sets up, and what it refuses before training starts, on every rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from torchrec.distributed.types import ShardingType
from torchrec.optim import RowWiseAdagrad
from torchrec.streamable import Pipelineable

from lightning_overlap import MODES, STREAMS, Mode, OverlapEmbeddingStrategy, Schedule
from lightning_overlap.schedules.modes import ModeName, StreamPolicy
from lightning_overlap.tables import check_fused_optimizer
from lightning_overlap.tables.sharding import ShardingName
from lightning_overlap.tuning import Auto

from ..support.cases import TABLE_WISE
from ..support.fits import fit
from ..support.ranks import Ranks
from . import first_words, strategies


def test_module_without_tables_trains_as_with_ddp(two_ranks: Ranks) -> None:
    expected, actual = (two_ranks.run(strategies.dense_losses, overlap) for overlap in (False, True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


class Ids(Pipelineable):  # type: ignore[misc]
    def __init__(self, *copies: tuple[str, bool]) -> None:
        self.copies = copies

    def to(self, device: torch.device, non_blocking: bool = False) -> Ids:
        return Ids(*self.copies, (str(device), non_blocking))

    def record_stream(self, stream: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class FrozenBatch:
    ids: Ids

    def to(self, device: torch.device) -> FrozenBatch:
        return FrozenBatch(self.ids.to(device))


def test_ids_go_to_a_device_while_the_host_goes_on_but_out_of_a_frozen_dataclass() -> None:
    """Which moves itself, if it can: Lightning takes it as it is."""
    strategy, device = OverlapEmbeddingStrategy(), torch.device("cuda", 0)
    assert strategy.batch_to_device({"ids": Ids()}, device)["ids"].copies[0] == ("cuda:0", True)
    assert strategy.batch_to_device(FrozenBatch(Ids()), device).ids.copies == (("cuda:0", False),)


def test_a_checkpoint_is_loaded_into_a_module_without_a_trainer() -> None:
    """That of the process that has spawned the ranks of a fit."""
    strategy, module = OverlapEmbeddingStrategy(), strategies.Dense()
    strategy.connect(module)
    weights = {name: torch.full_like(weight, 2.0) for name, weight in module.state_dict().items()}
    strategy.load_model_state_dict({"state_dict": weights})
    assert module.layer.bias.item() == 2.0


def test_dense_part_under_ddp_tables_not(two_ranks: Ranks) -> None:
    for seen in two_ranks.run(strategies.what_it_wraps):
        assert seen["ddp"]
        assert seen["reduced"] == sorted(f"{m}.{p}" for m in ("bottom.0", "top.0", "top.2") for p in ("bias", "weight"))
        assert (seen["group"], seen["gradients"]) == ("tables", "default_pg")
        assert seen["stand_in"]
        assert seen["loop"] == "_FitLoopMixin"
        # and nothing is left of it afterwards, but for the sharded tables
        assert seen["after"] == (False, "_FitLoop", seen["fresh"])
        assert seen["sharded"]


@pytest.mark.parametrize(
    ("options", "wrapped"),
    [
        ({}, False),
        ({"timeout": timedelta(minutes=5), "start_method": "popen"}, False),
        ({"timeout": None}, False),
        ({"find_unused_parameters": True}, True),
    ],
    ids=str,
)
def test_one_rank_shares_gradients_with_nobody(
    get_ranks: Callable[..., Ranks], options: dict[str, Any], wrapped: bool
) -> None:
    [seen] = get_ranks(1).run(strategies.what_it_wraps, **options)
    assert seen["ddp"] == wrapped
    assert seen["stand_in"]
    assert seen["sharded"]


@pytest.mark.parametrize(
    ("pipeline", "num_nodes", "options"),
    [
        ("base", 1, {"find_unused_parameters": True}),
        ("base", 2, {}),
        ("fused_sparse_dist", 2, {}),
        ("fused_sparse_dist", 1, {"static_graph": True}),
    ],
    ids=str,
)
def test_gradients_and_tables_have_groups_of_their_own(
    get_ranks: Callable[..., Ranks], pipeline: str, num_nodes: int, options: dict[str, Any]
) -> None:
    """What a backward sends first depends on where a step first uses embeddings, which may differ by rank."""
    for seen in get_ranks(2, num_nodes=num_nodes).run(strategies.what_it_wraps, pipeline=pipeline, **options):
        assert (seen["group"], seen["gradients"]) == ("tables", "default_pg")


def test_tables_on_meta_come_to_life_as_shards(two_ranks: Ranks) -> None:
    for rank, seen in enumerate(two_ranks.run(strategies.shapes, "table_wise", True)):
        assert set(seen["types"].values()) == {"table_wise"}
        owned = {name for name, shapes in seen["local"].items() if shapes}
        assert owned < {"t0", "t1", "t2"}, f"rank {rank} holds every table"
        assert seen["losses"].isfinite().all()


@pytest.mark.parametrize("sharding", [None, "planner", {"t0": "table_wise"}, "column_wise", "data_parallel"])
def test_shardings(two_ranks: Ranks, sharding: Any) -> None:
    first, second = two_ranks.run(strategies.shapes, sharding)
    assert first["types"] == second["types"]
    if sharding is None or isinstance(sharding, dict):
        assert "data_parallel" not in first["types"].values()  # that would drop the fused optimizer
    elif sharding in ("column_wise", "data_parallel"):
        assert set(first["types"].values()) == {sharding}
    if sharding == "column_wise":
        assert first["local"]["t0"] == second["local"]["t0"] == [(120, 4)]


def test_two_nodes_of_one_rank_each(get_ranks: Callable[..., Ranks], two_ranks: Ranks) -> None:
    """As on one node: the same plan, the same losses."""
    nodes = get_ranks(2, num_nodes=2)
    for pipeline in ("base", "fused_sparse_dist"):
        expected, actual = (ranks.run(fit, TABLE_WISE, pipeline, num_steps=8) for ranks in (two_ranks, nodes))
        assert [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)] == [[], []]
    assert len(nodes.run(strategies.shapes, None)) == 2


def test_a_second_fit_and_a_plain_call_afterwards(two_ranks: Ranks) -> None:
    for first, second, embeddings in two_ranks.run(strategies.fit_twice_and_evaluate):
        assert len(first) == len(second) == 6
        assert not torch.equal(first, second)
        assert embeddings.isfinite().all()


def test_fused_optimizer_argument(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(strategies.rowwise_adagrad_given_to_the_strategy))


def test_optimizers_of_two_classes_with_one_dict_of_arguments(two_ranks: Ranks) -> None:
    """TorchRec alone takes the class of the table that it shards first for all of them."""
    separate, shared = (two_ranks.run(strategies.train_two_classes, shared=shared) for shared in (False, True))
    for (mine, arguments), (theirs, _) in zip(shared, separate, strict=True):
        assert mine.differences(theirs) == []
        assert any("momentum" in key or "sum" in key for key in theirs.fused_state)
        assert arguments == {"lr": 1.0}


def test_a_table_without_gradient_is_not_trained(ranks: Ranks) -> None:
    assert all(ranks.run(strategies.frozen_table))


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_data_parallel_tables_are_the_same_on_all_ranks(two_ranks: Ranks, pipeline: str) -> None:
    first, second = two_ranks.run(strategies.data_parallel_tables, pipeline)
    assert len(first) == 2
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_collection_under_two_names(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(strategies.two_names))


def test_registry_name() -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy="overlap_embedding", logger=False).strategy
    assert isinstance(strategy, OverlapEmbeddingStrategy)
    assert strategy.schedule.name == "fused_sparse_dist"


WHOLE = "'t0': 'data_parallel', 't1': 'data_parallel', 't2': 'data_parallel'"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("unknown_table", ["ValueError", "'t9'", "Did you mean 't", "Known: t0, t1, t2"]),
        ("impossible_type", ["ValueError", "'t0'", "'grid_shard' is not possible on cpu", "row_wise."]),
        ("unknown_type", ["ValueError", "unknown sharding type 'table_wize'", "Did you mean 'table_wise'"]),
        ("sharding_of_wrong_type", ["TypeError", "got int: 3"]),
        (
            "no_fused_optimizer",
            [
                "ValueError: no fused optimizer for these tables",
                "\n  self.ebc: t0, t1\n  self.second: u0, u1\nGive",
                "\n  from torchrec.optim import RowWiseAdagrad\n  OverlapEmbeddingStrategy(fused_optimizer=("
                "RowWiseAdagrad, {'lr': 0.01}))  # in YAML: [torchrec.optim.RowWiseAdagrad, {lr: 0.01}]\n",
                "\n  apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {'lr': 0.01})\n"
                "  apply_optimizer_in_backward(RowWiseAdagrad, self.second.parameters(), {'lr': 0.01})\nIf Adam",
                "begin with ten times its rate: 0.01 for 1e-3. If SGD or",
            ],
        ),
        ("no_fused_optimizer_planned", ["\n  self.ebc: t0, t1, t2\n", "sharding='data_parallel'"]),
        ("no_fused_optimizer_by_name", ["\n  self.ebc: t1, t2\n", "sharding={'t1': 'data_parallel', 't2':"]),
        ("adam_on_cpu", ["ValueError", "Adam is fused on CUDA only", "RowWiseAdagrad"]),
        ("momentum", ["ValueError", "table ebc.t0: FBGEMM's fused SGD has no momentum=0.9", "Leave it out"]),
        ("lr_decay", ["ValueError", "table ebc.t0: FBGEMM's fused Adagrad has no lr_decay=0.1", "Leave it out"]),
        ("weight_decay", ["ValueError", "table ebc.t0: FBGEMM's fused RowWiseAdagrad has no weight_decay=0.1"]),
        ("owns_fused_tables", ["ValueError", "ebc.embedding_bags.t0.weight", "in_backward_optimizer_filter"]),
        ("owns_sequences", ["On a CPU tables of an EmbeddingCollection need a fused optimizer: ebc.embeddings.t0"]),
        (
            "nobody_trains_a_table",
            [
                "no optimizer has the weights of ebc.embedding_bags.t0.weight",
                "add them there",
                "sharding={'t0': 'table_wise', ",
            ],
        ),
        (
            "made_before",
            ["ebc.embedding_bags.t0.weight", "AdamW was made before the tables were sharded", "AdamW(dense, lr=0.001)"],
        ),
        ("made_on_meta", ["no optimizer has the weights of bottom.0.weight", "AdamW was made before"]),
        ("16-mixed", ["ValueError", "16-mixed", "bf16-mixed"]),
        ("shares_a_weight", ["ebc.t0", "ebc.embedding_bags.t0.weight, output.weight", "would no longer be one"]),
        ("clips_shards_by_norm", ["ebc.t0, ebc.t1, ebc.t2", "gradient_clip_algorithm='value'"]),
        (
            "sequences_as_bags",
            ["ValueError", "ebc.t0, ebc.t1, ebc.t2", "makes bags on a CPU", "sharding={'t0': 'table_wise', "],
        ),
        ("sequences_as_bags_beside_bags", [f"a fused_optimizer: sharding={{'s0': 'table_wise', {WHOLE}}}."]),
        (
            "momentum_of_sequences",
            [
                "table ebc.t0: FBGEMM's fused SGD has no momentum=0.9; the table would be trained without, and ebc.t1, "
                "ebc.t2, ec.s0 as well. Leave it out",
                f"train t0, t1, t2, keep t0, t1, t2 whole on every rank: sharding={{{WHOLE}}}.",
            ],
        ),
        ("accumulates_static_graph", ["static_graph=True and accumulate_grad_batches=2", "find_unused_parameters"]),
        ("planner_fails", ["ValueError", "these tables do not fit anywhere"]),
    ],
)
def test_refused_on_every_rank(two_ranks: Ranks, name: str, parts: list[str]) -> None:
    for message in two_ranks.run(strategies.refuse, name):
        assert [part for part in parts if part not in message] == [], message


def test_dense_weights_without_a_gradient_are_named(two_ranks: Ranks) -> None:
    for message in two_ranks.run(strategies.train_without_a_gradient):
        assert "got no gradient from the loss of training_step: unused.weight, unused.bias." in message
        assert "OverlapEmbeddingStrategy(static_graph=True)" in message
        assert "OverlapEmbeddingStrategy(find_unused_parameters=True)" in message
        assert "DDPStrategy" not in message


def test_shards_of_the_dense_optimizer_are_clipped_by_value(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(strategies.clip_values_of_dense_shards)
    assert torch.equal(one, other)


def test_shards_of_the_dense_optimizer_are_not_clipped_by_hand_either(two_ranks: Ranks) -> None:
    """The dense part alone is."""
    for message, num_clipped in two_ranks.run(strategies.clip_by_hand):
        assert "ebc.t0, ebc.t1, ebc.t2 have a dense kernel" in message
        assert num_clipped == 1


def test_options_that_a_sharded_module_does_not_follow_are_named(two_ranks: Ranks) -> None:
    said, by_the_other = two_ranks.run(strategies.other_options)
    assert said[:2] == by_the_other[:2] == [[], []]
    assert "fused_optimizer=, sharding= of this strategy has no effect on ebc" in said[2][0]


def test_a_rank_that_is_late_is_not_left_alone_by_one_that_fails_first(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(strategies.refused_while_rank_0_is_late, timeout_s=60)
    assert one == other


@pytest.mark.parametrize(
    ("kwargs", "word"), [({"accumulate_grad_batches": 2}, "accumulates"), ({"gradient_clip_val": 1.0}, "clips")]
)
def test_said_once(two_ranks: Ranks, kwargs: dict[str, Any], word: str) -> None:
    first, second = two_ranks.run(strategies.warnings_of, kwargs)
    assert len(first) == 1
    assert word in first[0]
    assert second == []


def test_nothing_is_said_of_clipping_where_the_kernels_clip(two_ranks: Ranks) -> None:
    optimizer = RowWiseAdagrad, {"lr": 1.0, "gradient_clipping": True, "max_gradient": 0.1}
    case = dataclasses.replace(TABLE_WISE, optimizer=optimizer)
    assert two_ranks.run(strategies.warnings_of, {"gradient_clip_val": 1.0}, case) == [[], []]


@pytest.mark.parametrize("combined", [False, True])
def test_the_first_words_name_tables_optimizers_and_rates(two_ranks: Ranks, combined: bool) -> None:
    seen, others = two_ranks.run(first_words.first_words, combined)
    [block] = {text for text in seen if text.startswith("lightning_overlap: ")}
    owner, rate = "Adam", "constant: the scheduler does not move it (see combined_optimizer)"
    if combined:
        owner, rate = "Adam (in combined_optimizer)", "moved by the scheduler"
    assert sorted(block.splitlines()) == [
        f"  ebc: d0, d1: data_parallel, trained by {owner} of configure_optimizers",
        f"  ebc: t0, t1: table_wise, trained by SGD in the backward, lr 2, {rate}",
        "lightning_overlap: fused_sparse_dist, stream data_dist, 2 ranks",
    ]
    assert not any(text.startswith("lightning_overlap: ") for text in others)  # rank 0 speaks
    known = ["The topology was constructed directly", "HeuristicalStorageReservation", "LeafSpec", "Sharding spec"]
    assert not [line for line in seen + others if any(text in line for text in known)]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, ""),
        ({"start_batch": 1}, " (fused_sparse_dist before batch 1)"),
        ({"start_batch": 1, "end_batch": 2}, " (fused_sparse_dist before batch 1 and from batch 2 on)"),
        ({"end_batch": 2}, " (fused_sparse_dist from batch 2 on)"),
    ],
)
def test_the_first_words_name_the_batches_that_train_exactly(
    two_ranks: Ranks, limits: dict[str, int], words: str
) -> None:
    seen, _ = two_ranks.run(first_words.first_words, pipeline=Mode("semi_sync", **limits))
    [block] = {text for text in seen if text.startswith("lightning_overlap: ")}
    assert block.splitlines()[0] == f"lightning_overlap: semi_sync, staleness 1{words}, stream data_dist, 2 ranks"


def test_libraries_speak_where_they_are_asked_to(two_ranks: Ranks) -> None:
    seen, _ = two_ranks.run(first_words.first_words, calm_libraries=False)
    assert any("The topology was constructed directly" in text for text in seen)
    assert any("HeuristicalStorageReservation is known" in text for text in seen)


OPTION_OF_A_MODE = r"staleness is an option of a mode: pipeline=Mode\('fused_sparse_dist', staleness=...\)"


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"pipeline": "fused_sparse_dst"}, ValueError, "Did you mean 'fused_sparse_dist'"),
        ({"pipeline": "qqq"}, ValueError, f"unknown pipeline 'qqq'. Known: {', '.join(MODES)}, auto."),
        ({"pipeline": 3}, TypeError, r"pipeline must be a name \(base, .*, auto\), got 3"),
        ({"observer": 3}, TypeError, r"observer is called with \(kind, stage, batch\), got 3"),
        ({"stream": "dedicate"}, ValueError, "Did you mean 'dedicated'"),
        ({"fused_optimizer": "sgd"}, TypeError, "fused_optimizer is \\(class, kwargs\\)"),
        ({"fused_optimizer": (torch.optim.SGD, {"rate": 1})}, TypeError, "fused_optimizer: SGD does not take"),
        ({"fused_optimizer": (dict, {})}, TypeError, "fused_optimizer is \\(class, kwargs\\)"),
        ({"fused_optimizer": ["torch.optim.SDG", {"lr": 1}]}, TypeError, "'SDG'. Did you mean 'SGD'"),
        ({"fused_optimizer": {"class_path": "torch.nowhere.SGD"}}, TypeError, "'torch.nowhere.SGD' names no class"),
        ({"fused_optimizer": ["sgd", {"lr": 0.3}]}, TypeError, "'sgd' names .* Did you mean 'torch.optim.SGD'"),
        ({"piepline": "base"}, TypeError, "unknown argument 'piepline'. Did you mean 'pipeline'"),
        ({"staleness": 3}, TypeError, OPTION_OF_A_MODE),
        ({"mode": "base"}, TypeError, "unknown argument 'mode'. Did you mean 'pipeline'"),
        ({"find_unused_parameter": True}, TypeError, "Did you mean 'find_unused_parameters'"),  # DDP's
        ({"proces_group_backend": "gloo"}, TypeError, "Did you mean 'process_group_backend'"),  # DDPStrategy's
        ({"sharding": "rowwise"}, ValueError, "unknown sharding type 'rowwise'. Did you mean 'row_wise'"),
        ({"sharding": {"t": "tablewise"}}, ValueError, "Did you mean 'table_wise'"),
        ({"sharding": 3}, TypeError, "sharding is None, a sharding type"),
    ],
)
def test_refused_when_made(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        OverlapEmbeddingStrategy(**kwargs)


@pytest.mark.parametrize(
    "form",
    [
        (torch.optim.SGD, {"lr": 0.3}),
        functools.partial(torch.optim.SGD, lr=0.3),
        ["torch.optim.SGD", {"lr": 0.3}],
        {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.3}},
        {"_target_": "torch.optim.SGD", "lr": 0.3},
        OmegaConf.create({"fused": ["torch.optim.SGD", {"lr": 0.3}]}).fused,
    ],
    ids=str,
)
def test_forms_of_a_fused_optimizer(form: Any) -> None:
    taken = OverlapEmbeddingStrategy(fused_optimizer=form).fused_optimizer
    assert check_fused_optimizer(taken) == (torch.optim.SGD, {"lr": 0.3})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonargparse of LightningCLI's own calls
def test_lightning_cli_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    for form in ("[torch.optim.SGD, {lr: 0.3}]", "{class_path: torch.optim.SGD, init_args: {lr: 0.3}}"):
        (tmp_path / "config.yaml").write_text(
            "trainer: {accelerator: cpu, logger: false, strategy: {class_path: lightning_overlap."
            f"OverlapEmbeddingStrategy, init_args: {{pipeline: base, fused_optimizer: {form}}}}}}}\n",
            encoding="utf-8",
        )
        monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(tmp_path / "config.yaml")])
        cli = LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False)
        made = cli.trainer.strategy
        assert isinstance(made, OverlapEmbeddingStrategy)
        assert check_fused_optimizer(made.fused_optimizer) == (torch.optim.SGD, {"lr": 0.3})


def test_editors_know_all_names() -> None:
    assert set(get_args(ModeName)) == {*MODES, "auto"}
    assert set(get_args(StreamPolicy)) == set(STREAMS)
    assert set(get_args(ShardingName)) == {kind.value for kind in ShardingType}
    hints = get_type_hints(OverlapEmbeddingStrategy.__init__)
    assert hints["pipeline"] == ModeName | Mode | Schedule | Auto
    assert hints["stream"] == StreamPolicy
