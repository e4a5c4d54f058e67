"""What the strategy sets up, and what it refuses before training starts, on every rank."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, get_args, get_type_hints

import pytest
import torch
from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from torchrec.distributed.types import ShardingType
from torchrec.optim import RowWiseAdagrad
from torchrec.streamable import Pipelineable

from lightning_overlap import MODES, Mode, OverlapEmbeddingStrategy, Schedule
from lightning_overlap.plugin.first_words import of_mode
from lightning_overlap.schedules import ModeName, StreamPolicy
from lightning_overlap.tables import check_fused_optimizer
from lightning_overlap.tables.sharding import ShardingName
from lightning_overlap.tuning import Auto

from ..support.cases import TABLE_WISE
from ..support.fits import fit
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from . import strategies


def test_module_without_tables_trains_as_with_ddp(two_ranks: Ranks) -> None:
    expected, actual = (two_ranks.run(strategies.dense_losses, overlap) for overlap in (False, True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


class Ids(Pipelineable):  # type: ignore[misc]
    def __init__(self, *copies: tuple[str, bool]) -> None:
        self.copies = copies

    def to(self, device: torch.device, non_blocking: bool = False) -> "Ids":
        return Ids(*self.copies, (str(device), non_blocking))

    def record_stream(self, stream: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class FrozenBatch:
    ids: Ids

    def to(self, device: torch.device) -> "FrozenBatch":
        return FrozenBatch(self.ids.to(device))


def test_ids_go_to_a_device_without_a_wait_of_the_host_but_not_out_of_a_frozen_dataclass() -> None:
    """A frozen dataclass moves itself: Lightning leaves it as it is."""
    strategy, device = OverlapEmbeddingStrategy(), torch.device("cuda", 0)
    assert strategy.batch_to_device({"ids": Ids()}, device)["ids"].copies[0] == ("cuda:0", True)
    assert strategy.batch_to_device(FrozenBatch(Ids()), device).ids.copies == (("cuda:0", False),)


def test_a_checkpoint_is_loaded_into_a_module_without_a_trainer() -> None:
    """The process that has spawned the ranks of a fit loads their weights."""
    strategy, module = OverlapEmbeddingStrategy(), strategies.Dense()
    strategy.connect(module)
    weights = {name: torch.full_like(weight, 2.0) for name, weight in module.state_dict().items()}
    strategy.load_model_state_dict({"state_dict": weights})
    assert module.layer.bias.item() == 2.0


DENSE = sorted(f"{module}.{kind}" for module in ("bottom.0", "top.0", "top.2") for kind in ("bias", "weight"))


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes", "options", "wrapped"),
    [
        (1, 1, {"timeout": timedelta(minutes=5), "start_method": "popen"}, False),
        (1, 1, {"find_unused_parameters": True}, True),
        (2, 1, {}, True),
        (2, 1, {"static_graph": True}, True),
        (2, 2, {"find_unused_parameters": True}, True),
    ],
    ids=str,
)
def test_dense_part_under_ddp_tables_not(
    get_ranks: Callable[..., Ranks], num_ranks: int, num_nodes: int, options: dict[str, Any], wrapped: bool
) -> None:
    """In groups of their own: what a backward sends first may differ by rank. One rank shares gradients with nobody."""
    for seen in get_ranks(num_ranks, num_nodes=num_nodes).run(strategies.what_it_wraps, **options):
        assert seen.get("reduced") == (DENSE if wrapped else None)
        if num_ranks > 1:
            assert (seen["tables"], seen["gradients"]) == ("tables", "default_pg")


@pytest.mark.parametrize("sharding", [None, "planner", {"t0": "table_wise"}], ids=str)
def test_a_planner_decides_alike_on_all_ranks(two_ranks: Ranks, sharding: Any) -> None:
    types, of_the_other = two_ranks.run(strategies.sharding_types, sharding)
    assert types == of_the_other
    if sharding != "planner":  # the user's own
        assert "data_parallel" not in types.values()  # that would drop the fused optimizer


def test_two_nodes_of_one_rank_each(get_ranks: Callable[..., Ranks], two_ranks: Ranks) -> None:
    nodes = get_ranks(2, num_nodes=2)
    for pipeline in ("base", "fused_sparse_dist"):
        expected, actual = (ranks.run(fit, TABLE_WISE, pipeline, num_steps=8) for ranks in (two_ranks, nodes))
        assert [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)] == [[], []]


def test_fused_optimizer_argument(two_ranks: Ranks) -> None:
    """It reaches the kernel, also of a collection under two names; the module's own choice beats it."""
    assert two_ranks.run(strategies.whose_optimizer) == [(True, False)] * 2


def test_optimizers_of_two_classes_with_one_dict_of_arguments(two_ranks: Ranks) -> None:
    """TorchRec alone takes the class of the table that it shards first for all of them."""
    separate, shared = (two_ranks.run(strategies.train_two_classes, shared=shared) for shared in (False, True))
    for (mine, arguments), (theirs, _) in zip(shared, separate, strict=True):
        assert mine.differences(theirs) == []
        assert any("momentum" in key or "sum" in key for key in theirs.fused_state)
        assert arguments == {"lr": 1.0}


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "data_parallel"])
def test_a_table_without_gradient_is_not_trained(ranks: Ranks, sharding: str) -> None:
    moved = [name for of_rank in ranks.run(strategies.frozen_table, sharding) for name in of_rank]
    assert set(moved) == {"t0", "t2"}


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
@pytest.mark.parametrize(
    ("unfreezes", "said"),
    [
        (True, "ebc.embedding_bags.t1.weight cannot be unfrozen (requires_grad=True) any more"),
        (False, "ebc.embedding_bags.t0.weight cannot be frozen (requires_grad=False) any more"),
    ],
)
def test_a_table_stays_frozen_or_trained_between_two_fits(
    two_ranks: Ranks, unfreezes: bool, said: str, sharding: str
) -> None:
    """On every rank, also where the table has no shard."""
    for message in two_ranks.run(strategies.changed_between_two_fits, unfreezes, sharding):
        assert said in message
        assert "combined_optimizer" in message


def test_data_parallel_tables_are_the_same_on_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(strategies.data_parallel_tables)
    assert len(first) == 2
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_editors_know_all_names() -> None:
    assert set(get_args(ShardingName)) == {kind.value for kind in ShardingType}
    hints = get_type_hints(OverlapEmbeddingStrategy.__init__)
    assert hints["pipeline"] == ModeName | str | Mode | Schedule | Auto
    assert hints["stream"] == StreamPolicy


def test_registry_name() -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy="overlap_embedding", logger=False).strategy
    assert isinstance(strategy, OverlapEmbeddingStrategy)
    assert strategy.schedule.name == "fused_sparse_dist"


WHOLE = "'t0': 'data_parallel', 't1': 'data_parallel', 't2': 'data_parallel'"
NO_FUSED_OPTIMIZER = [
    "ValueError: no fused optimizer for these tables",
    "\n  self.ebc: t0, t1\n  self.second: u0, u1\nGive",
    "(RowWiseAdagrad, {'lr': 0.01}))  # in YAML: [torchrec.optim.RowWiseAdagrad, {lr: 0.01}]\n",
    "\n  apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {'lr': 0.01})\n",
    "begin with ten times its rate: 0.01 for 1e-3. If SGD or",
]
WAYS_OUT = [f"OverlapEmbeddingStrategy({option}=True)" for option in ("find_unused_parameters", "static_graph")]


def test_shards_of_the_dense_optimizer_are_not_clipped_by_hand_but_the_dense_part_is(two_ranks: Ranks) -> None:
    for message, num_clipped in two_ranks.run(strategies.clip_by_hand):
        assert "ebc.t0, ebc.t1, ebc.t2 have a dense kernel" in message
        assert num_clipped == 1


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("unknown_table", ["ValueError", "'t9'", "Did you mean 't", "Known: t0, t1, t2"]),
        ("impossible_type", ["ValueError", "'t0'", "'grid_shard' is not possible on cpu", "row_wise."]),
        ("planner_fails", ["ValueError", "these tables do not fit anywhere"]),
        ("no_fused_optimizer", NO_FUSED_OPTIMIZER),
        ("no_fused_optimizer_by_name", ["\n  self.ebc: t1, t2\n", "sharding={'t1': 'data_parallel', 't2':"]),
        ("adam_on_cpu", ["ValueError", "Adam is fused on CUDA only", "RowWiseAdagrad"]),
        ("momentum", ["SGD has no momentum=0.9", ", and ebc.t1, ebc.t2, ec.s0 as well.", f"sharding={{{WHOLE}}}."]),
        ("weight_decay", ["ValueError", "table ebc.t0: FBGEMM's fused RowWiseAdagrad has no weight_decay=0.1"]),
        ("sequences_as_bags", ["ec.s0", "makes bags on a CPU", f"sharding={{'s0': 'table_wise', {WHOLE}}}."]),
        ("owns_fused_tables", ["ValueError", "ebc.embedding_bags.t0.weight", "in_backward_optimizer_filter"]),
        ("owns_sequences", ["On a CPU tables of an EmbeddingCollection need a fused optimizer: ebc.embeddings.t0"]),
        (
            "nobody_trains_a_table",
            ["the weights of ebc.embedding_bags.t0.weight", "add them there", "sharding={'t0': 'table_wise', "],
        ),
        ("made_before", ["AdamW was made before the tables were sharded", "AdamW(dense, lr=0.001)"]),
        ("made_on_meta", ["no optimizer has the weights of bottom.0.weight", "AdamW was made before"]),
        ("16-mixed", ["ValueError", "16-mixed", "bf16-mixed"]),
        ("shares_a_weight", ["ebc.t0", "ebc.embedding_bags.t0.weight, output.weight", "would no longer be one"]),
        ("clips_shards_by_norm", ["ebc.t0, ebc.t1, ebc.t2", "gradient_clip_algorithm='value'"]),
        ("accumulates_static_graph", ["static_graph=True and accumulate_grad_batches=2", "find_unused_parameters"]),
        ("unused", ["got no gradient from the loss of training_step: unused.weight, unused.bias.", *WAYS_OUT]),
    ],
)
def test_refused_on_every_rank(two_ranks: Ranks, name: str, parts: list[str]) -> None:
    for message in two_ranks.run(strategies.refuse, name):
        assert "DDPStrategy" not in message
        assert [part for part in parts if part not in message] == [], message


def test_embeddings_of_sequences_that_a_step_changes_in_place_are_named(ranks: Ranks) -> None:
    ways = in_turn(strategies.IN_PLACE, ("fused_sparse_dist", "split_backward", "semi_sync", "base"))
    for messages in ranks.run(strategies.change_sequences, ways):
        for message in messages:
            assert "The embeddings of 'ebc' are such views" in message
            assert "embeddings[feature].values().clone()" in message


def test_the_remedy_offered_first_for_two_backwards_of_a_step_trains_both(two_ranks: Ranks) -> None:
    (losses, other), (_, other_of_rank_1) = two_ranks.run(strategies.two_backwards_as_told)
    assert losses[-1] < losses[0]
    assert torch.equal(other, other_of_rank_1)


def test_shards_of_the_dense_optimizer_are_clipped_by_value(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(strategies.clip_values_of_dense_shards)
    assert torch.equal(one, other)


def test_options_that_a_sharded_module_does_not_follow_are_named(two_ranks: Ranks) -> None:
    said, by_the_other = two_ranks.run(strategies.other_options)
    assert said[:2] == by_the_other[:2] == [[], []]
    assert "fused_optimizer=, sharding= of this strategy has no effect on ebc" in said[2][0]


def test_a_rank_that_is_late_is_not_left_alone_by_one_that_fails_first(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(strategies.refused_while_rank_0_is_late, timeout_s=60)
    assert "is not possible on cpu" in one
    assert one == other


@pytest.mark.parametrize(
    ("kwargs", "word"), [({"accumulate_grad_batches": 2}, "accumulates"), ({"gradient_clip_val": 1.0}, "clips")]
)
def test_said_once(two_ranks: Ranks, kwargs: dict[str, Any], word: str) -> None:
    [said], of_the_other = two_ranks.run(strategies.warnings_of, kwargs)
    assert word in said
    assert of_the_other == []


def test_nothing_is_said_of_clipping_where_the_kernels_clip(two_ranks: Ranks) -> None:
    optimizer = RowWiseAdagrad, {"lr": 1.0, "gradient_clipping": True, "max_gradient": 0.1}
    case = dataclasses.replace(TABLE_WISE, optimizer=optimizer)
    assert two_ranks.run(strategies.warnings_of, {"gradient_clip_val": 1.0}, case) == [[], []]


def test_libraries_speak_where_they_are_asked_to(two_ranks: Ranks) -> None:
    seen, _ = two_ranks.run(strategies.first_words, True, calm_libraries=False)
    assert any("The topology was constructed directly" in text for text in seen)
    assert any("HeuristicalStorageReservation" in text for text in seen)


@pytest.mark.parametrize("combined", [False, True])
def test_the_first_words_name_tables_optimizers_and_rates(two_ranks: Ranks, combined: bool) -> None:
    seen, others = two_ranks.run(strategies.first_words, combined)
    [block] = {text for text in seen if text.startswith("lightning_overlap: ")}
    owner, rate = "Adam", "constant: the scheduler does not move it (see combined_optimizer)"
    if combined:
        owner, rate = "Adam (in combined_optimizer)", "moved by the scheduler"
    assert sorted(block.splitlines()) == [
        f"  dense part: trained by {owner}, lr 0.001",
        f"  ebc: d0, d1: data_parallel, trained by {owner} of configure_optimizers",
        f"  ebc: t0, t1: table_wise, trained by SGD in the backward, lr 2, {rate}",
        "lightning_overlap: fused_sparse_dist, stream data_dist, 2 ranks",
    ]
    assert not any(text.startswith("lightning_overlap: ") for text in others)  # rank 0 speaks
    known = ["The topology was constructed directly", "HeuristicalStorageReservation", "LeafSpec", "Sharding spec"]
    assert not [line for line in seen + others if any(text in line for text in known)]


def test_the_first_words_name_the_batches_that_train_exactly() -> None:
    exact = "fused_sparse_dist before batch 1 and from batch 2 on"
    assert of_mode(Mode("semi_sync", start_batch=1, end_batch=2)) == f"semi_sync, staleness 1 ({exact})"


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
        ({"fused_optimizer": ["torch.optim.SDG", {"lr": 1}]}, TypeError, "'SDG'. Did you mean 'SGD'"),
        ({"fused_optimizer": {"class_path": "torch.nowhere.SGD"}}, TypeError, "'torch.nowhere.SGD' names no class"),
        ({"fused_optimizer": ["sgd", {"lr": 0.3}]}, TypeError, "'sgd' names .* Did you mean 'torch.optim.SGD'"),
        ({"piepline": "base"}, TypeError, "unknown argument 'piepline'. Did you mean 'pipeline'"),
        ({"staleness": 3}, TypeError, OPTION_OF_A_MODE),
        ({"mode": "base"}, TypeError, "unknown argument 'mode'. Did you mean 'pipeline'"),
        ({"find_unused_parameter": True}, TypeError, "Did you mean 'find_unused_parameters'"),  # DDP's
        ({"sharding": "rowwise"}, ValueError, "unknown sharding type 'rowwise'. Did you mean 'row_wise'"),
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


def test_a_device_without_kernels_is_refused(get_ranks: Callable[..., Ranks]) -> None:
    [said] = get_ranks(1).run(strategies.fit_on_a_device_without_kernels)
    assert said.startswith("sharded tables cannot be on 'mps': TorchRec and FBGEMM have kernels for CPUs and CUDA.")
