"""Processes started by `spawn` and `fork` give whole tables back, and trainers can be copied and pickled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_overlap import Mode, OverlapEmbeddingStrategy
from lightning_overlap.plugin.processes import own_memory

from ..support import reference
from ..support.cases import COLUMN_WISE, MIXED, Case
from ..support.ranks import Ranks
from ..support.reference import Result
from . import started


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a script finds that lets the strategy start its processes."""
    return started.run_script(tmp_path_factory.mktemp("started"))


def differing(whole: dict[str, Tensor], results: list[Result]) -> list[str]:
    """Name the parts of ranks that are not those of whole weights, and the weights that no rank has."""
    others, seen = [], set()
    for result in results:
        for key, value in {**result.tables, **result.dense}.items():
            table, _, offsets = key.partition(" ")
            [name] = [name for name in whole if name == key or name.split(".")[-2] == table]
            first = [int(offset) for offset in offsets.strip("[]").split(",")] if offsets else [0] * value.dim()
            window = tuple(slice(start, start + size) for start, size in zip(first, value.shape, strict=True))
            seen.add(name)
            if not torch.equal(whole[name][window], value):
                others.append(key)
    return others + sorted(whole.keys() - seen)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "case"), [("fork", MIXED), ("spawn", COLUMN_WISE)])
def test_the_parent_gets_the_weights_of_the_plain_loop(
    two_ranks: Ranks, found: dict[str, Any], method: str, case: Case
) -> None:
    results = two_ranks.run(reference.train, case, num_steps=started.NUM_STEPS)
    assert differing(found[method]["weights"], results) == []
    assert found[method]["metrics"].keys() == {"loss", "val_loss"}


@pytest.mark.slow
def test_the_parent_goes_on(two_ranks: Ranks, found: dict[str, Any]) -> None:
    """Evaluation answers from what was given back, a checkpoint from what was saved; another fit begins with it."""
    fork = found["fork"]
    assert fork["unsharded"]
    assert fork["best"].endswith(f"step={started.NUM_STEPS}.ckpt")
    [validated], [tested] = fork["validate"], fork["test"]
    assert validated["val_loss"] == tested["test_loss"] == fork["metrics"]["val_loss"].item()
    assert "NotImplementedError: Calling `trainer.fit()` twice" in fork["refused"]  # by Lightning, as ever
    assert differing(fork["second"], two_ranks.run(started.fit_from, MIXED, fork["before_second"])) == []
    assert fork["own_optimizers"] == [[torch.optim.SGD]] * len(started.COPIES)  # of a copied module's tables


@pytest.mark.slow
def test_a_module_without_tables_is_given_back_as_with_ddp(found: dict[str, Any]) -> None:
    (theirs, metrics), (ours, our_metrics) = found["dense"]
    assert metrics.keys() == our_metrics.keys()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


@pytest.mark.slow
def test_a_fault_on_one_rank_ends_the_fit(found: dict[str, Any]) -> None:
    """The error of rank 0 names it, and this process goes on, with the fits that come after it in the script."""
    assert found["fault"].startswith("ProcessRaisedException:")
    assert "Process 0 terminated" in found["fault"]
    assert "rank 0 was at backward of batch 1" in found["fault"]
    assert "rank 1 had failed at dense_forward of batch 1: ValueError: a fault of rank 1" in found["fault"]


@pytest.mark.slow
def test_tables_that_the_parent_has_not_are_refused(found: dict[str, Any]) -> None:
    assert "ebc.embedding_bags.t0.weight, " in found["made_later"]
    assert "Make all tables in the module's __init__" in found["made_later"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("on_meta", "ValueError: start_method='fork': ebc.t0, ebc.t1, ebc.t2 are on the meta device"),
        ("managed_collision", "ValueError: start_method='fork': managed collision modules cannot be given back"),
        ("several_nodes", "ValueError: start_method='fork': tables are given back on the first of several nodes only"),
    ],
)
def test_refused_before_processes_are_started(name: str, text: str) -> None:
    message = started.refuse(name)
    assert message.startswith(text)
    assert message.endswith(
        "start a process per rank: run the script itself (start_method='popen', the default), or torchrun."
    )


def test_refused_after_a_fit_in_this_process(get_ranks: Callable[..., Ranks]) -> None:
    [(sharded, fresh)] = get_ranks(1).run(started.refuse_after_a_fit)
    assert sharded.startswith("ValueError: start_method='fork': the module was sharded in this process")
    assert fresh.startswith("RuntimeError: start_method='fork': this process has a process group")


@pytest.mark.parametrize(
    ("name", "start_method"),
    [("overlap_embedding_spawn", "spawn"), ("overlap_embedding_fork", "fork"), ("overlap_embedding_notebook", "fork")],
)
def test_names_of_start_methods(name: str, start_method: str) -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy
    assert isinstance(strategy, OverlapEmbeddingStrategy)
    # What Lightning asks in a notebook.
    assert strategy.launcher is not None
    assert strategy.launcher.is_interactive_compatible == (start_method == "fork")


def test_an_unknown_start_method_is_refused_by_lightning() -> None:
    with pytest.raises(ValueError, match="'thread' is not available"):
        Trainer(accelerator="cpu", devices=2, strategy=OverlapEmbeddingStrategy(start_method="thread"), logger=False)


def test_memory_that_ranks_share_becomes_their_own() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).share_memory()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    own_memory(module)
    assert not any(tensor.is_shared() for tensor in (*module.parameters(), *module.buffers()))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


STASHED = Mode("semi_sync", stash_gradients=True)


@pytest.mark.parametrize(
    ("how", "tables", "pipeline"),
    [*((how, True, STASHED) for how in started.COPIES), ("deepcopy", False, STASHED), ("pickle", True, "auto")],
)
def test_a_copied_trainer_trains_as_the_original(two_ranks: Ranks, how: str, tables: bool, pipeline: Any) -> None:
    for found in two_ranks.run(started.copies_train_alike, how, tables, pipeline):
        assert found["of_a_run"] == [False] * 3
        assert all(torch.equal(copied, original) for copied, original in found["losses"])
        assert len(found["losses"]) == 3
        assert [bool(messages) for messages in found["said"]] == [False, tables, tables], found["said"]


def test_a_copied_module_says_that_its_shards_are_elsewhere(get_ranks: Callable[..., Ranks]) -> None:
    [message] = get_ranks(1).run(started.copied_module)
    assert "its ShardedEmbeddingBagCollection has no shards: shards stay with their process" in message


@pytest.mark.parametrize(
    ("fn", "name"),
    [("fit", "nothing.ckpt"), ("fit", "folder/nothing"), ("validate", "folder"), ("test", "a"), ("predict", "a.ckpt")],
)
def test_a_missing_checkpoint_is_told_in_lightnings_words(ranks: Ranks, tmp_path: Any, fn: str, name: str) -> None:
    path = str(tmp_path / name)
    for theirs, ours in ranks.run(started.missing_checkpoint, fn, path):
        assert theirs == ours == f"FileNotFoundError: Checkpoint file not found: {path}"
