"""A training begins from its deltas alone: what was sent is there bit for bit, and the log names what is not."""

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_overlap.deltas import FileName, parse_names, read_header

from ..support.cases import ADAGRAD, ROWWISE_ADAGRAD, Case, TableSpec
from ..support.ranks import ROOT, Ranks, free_port
from .delta_fits import Windows, stragglers
from .histories import updated
from .restores import error_and_words, error_of, error_where_rank_1_cannot_read, train, validate

GetRanks = Callable[..., Ranks]
KINDS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
OPTIMIZERS = {"sgd": Case.optimizer, "adagrad": ADAGRAD.optimizer, "rowwise": ROWWISE_ADAGRAD.optimizer}
PLAIN = (torch.optim.SGD, {"lr": 0.2})  # a dense optimizer without state
STATES = {"optimizer_state": True}

plans = st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS))
num_ranks = st.integers(1, 2)
few = partial(settings, suppress_health_check=[HealthCheck.function_scoped_fixture])


def case_of(plan: Sequence[str], optimizer: str = "rowwise", dim: int = 16) -> Case:
    tables = tuple(TableSpec(f"t{n}", (f"f{n}",), sharding=one, dim=dim) for n, one in enumerate(plan))
    return Case("restored", tables, optimizer=OPTIMIZERS[optimizer], dense=PLAIN)


MIXED = case_of(["row_wise", "table_wise"])


def whole(of_ranks: Iterable[Windows]) -> dict[str, Tensor]:
    """Put the shards of all ranks together."""
    shards = [shard for windows in of_ranks for shard in windows.items()]
    ends: dict[str, tuple[int, int]] = {}
    for (name, row, column), values in shards:
        rows, columns = ends.get(name, (0, 0))
        ends[name] = max(rows, row + values.shape[0]), max(columns, column + values.shape[1])
    found = {name: torch.full(shape, float("nan")) for name, shape in ends.items()}
    for (name, row, column), values in shards:
        found[name][row : row + values.shape[0], column : column + values.shape[1]] = values
    return found


def names_in(folder: str | Path) -> list[FileName]:
    return parse_names(path.name for path in Path(folder).iterdir())


def lose(folder: str | Path, number: int, least: int | None = None) -> None:
    """Remove the newest files, as if a crash had left them unwritten; `least` stay, by default the first cut."""
    names = names_in(folder)
    least = sum(name.cut == names[0].cut for name in names) if least is None else least
    for name in names[max(least, len(names) - number) :]:
        Path(folder, str(name)).unlink()


def expected_states(sent: dict[str, Tensor], before: Sequence[str], then: Sequence[str], optimizer: str) -> Any:
    """Return what the fused states are that were sent: zero without any, and the mean over column shards."""
    found = {}
    for name, wide in sent.items():
        table = int(name.partition(".t")[2][0])
        if then[table] == "data_parallel":
            continue
        if optimizer == "rowwise" and before[table] == "column_wise" != then[table]:
            wide = (wide[:, :8].double() * 0.5 + wide[:, 8:].double() * 0.5).float().repeat(1, 2)
        found[name] = wide
    return found


@few(max_examples=8)
@example("fused_sparse_dist", (2, 3), (["table_wise", "row_wise"], ["row_wise", "row_wise"]), "adagrad", (1, 1), 2)
@example("semi_sync_deferred", (2, 1), (["column_wise", "row_wise"], ["row_wise", "table_wise"]), "rowwise", (1, 1), 0)
@given(
    pipeline=st.sampled_from(["fused_sparse_dist", "semi_sync_deferred", "async_lookup"]),
    ranks=st.tuples(num_ranks, num_ranks),
    plans=st.tuples(plans, plans),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    sends=st.tuples(st.booleans(), st.booleans()),
    lost=st.integers(0, 12),
)
def test_what_was_sent_is_there_under_any_plan(
    get_ranks: GetRanks, pipeline: str, ranks: Any, plans: Any, optimizer: str, sends: Any, lost: int
) -> None:
    (before, then), (dense, states) = plans, map(bool, sends)
    with tempfile.TemporaryDirectory() as folder:
        options = {"dense": dense, "optimizer_state": states}
        sent = get_ranks(ranks[0]).run(train, case_of(before, optimizer), pipeline, send_to=folder, deltas=options)
        newest = names_in(folder)[-1].cut
        lose(folder, lost)
        position = updated(None, folder).position
        assert position is not None
        begun = get_ranks(ranks[1]).run(
            train, case_of(then, optimizer), pipeline, ckpt_path=f"deltas://{folder}", max_epochs=2, num_steps=2
        )
    step, is_last = position.step, position.cut == newest
    then_was = [one.last if is_last else one.by_step.get(step, one.first) for one in sent]
    now_is = [one.first for one in begun]
    torch.testing.assert_close(
        whole(one.tables for one in now_is), whole(one.tables for one in then_was), rtol=0, atol=0
    )
    for one in now_is:
        torch.testing.assert_close(one.dense, then_was[0].dense if dense else sent[0].first.dense, rtol=0, atol=0)
    there = whole(one.states for one in then_was) if states else {}
    there = expected_states(there, before, then, optimizer)
    for name, values in whole(one.states for one in now_is).items():
        assert torch.equal(values, there.get(name, torch.zeros_like(values))), name
    epoch = step // 6  # those batches of an epoch that were trained are trained again
    assert [one.counts for one in begun] == [(epoch, step, step)] * ranks[1]
    assert {len(one.losses) for one in begun} == {2 * (2 - epoch)}
    assert f"step {step} (global step {step})" in begun[0].words


@few(max_examples=4)
@example((2, 1), (["column_wise", "table_wise"], ["row_wise", "row_wise"]), "rowwise")
@given(ranks=st.tuples(num_ranks, num_ranks), plans=st.tuples(plans, plans), optimizer=st.sampled_from([*OPTIMIZERS]))
def test_with_states_it_goes_on_as_from_a_checkpoint(
    get_ranks: GetRanks, ranks: Any, plans: Any, optimizer: str
) -> None:
    before, then = (case_of(plan, optimizer) for plan in plans)
    with tempfile.TemporaryDirectory() as folder:
        sink, saved = f"{folder}/sink", f"{folder}/saved.ckpt"
        get_ranks(ranks[0]).run(train, before, send_to=sink, deltas=STATES, save=saved)
        one, other = (
            get_ranks(ranks[1]).run(train, then, ckpt_path=path, max_epochs=2) for path in (saved, f"deltas://{sink}")
        )
    for from_file, from_deltas in zip(one, other, strict=True):
        assert from_file.counts == from_deltas.counts == (1, 6, 6)
        for mine, theirs in ((from_file.first, from_deltas.first), (from_file.last, from_deltas.last)):
            for state in (mine, theirs):  # other kernels count nothing, nor did the dense optimizer's
                counted = [f".t{n}." for n, kind in enumerate(plans[0]) if kind != "data_parallel"]
                state.counts = {
                    name: count
                    for name, count in state.counts.items()
                    if optimizer == "rowwise" and any(table in name for table in counted)
                }
            torch.testing.assert_close(vars(mine), vars(theirs), rtol=0, atol=0)
        assert torch.equal(torch.stack(from_file.losses), torch.stack(from_deltas.losses))


@pytest.mark.parametrize("lost", [0, 3])
def test_the_same_sink_gets_a_new_generation(two_ranks: Ranks, tmp_path: Path, lost: int) -> None:
    """Wherever a replica of the old fit has stopped, it ends as the tables."""
    sink = tmp_path / "sink"
    two_ranks.run(train, MIXED, send_to=str(sink), deltas=STATES, every_n_steps=2)
    lose(sink, lost)
    newest = updated(None, sink).position
    assert newest is not None
    begun = two_ranks.run(train, MIXED, ckpt_path=f"deltas://{sink}", send_to=str(sink), deltas=STATES, max_epochs=3)
    first = next(name for name in names_in(sink) if name.generation == 2)
    header = read_header((sink / str(first)).read_bytes())
    assert (header.after, header.step) == (newest.cut, newest.step)
    assert stragglers(sink, [one.last.tables for one in begun]) == {}


@pytest.mark.parametrize(("max_steps", "place"), [(5, (0, 5)), (6, (1, 0)), (8, (1, 2))])
def test_a_stop_within_an_epoch_does_not_end_it(
    get_ranks: GetRanks, tmp_path: Path, max_steps: int, place: tuple[int, int]
) -> None:
    """The cut that is made as training ends has the place of the others."""
    get_ranks(1).run(train, MIXED, send_to=str(tmp_path), every_n_steps=7, max_steps=max_steps, max_epochs=3)
    header = read_header((tmp_path / str(names_in(tmp_path)[-1])).read_bytes())
    assert (header.step, header.epoch, header.batch) == (max_steps, *place)
    [begun] = get_ranks(1).run(train, MIXED, ckpt_path=f"deltas://{tmp_path}", max_epochs=place[0] + 1)
    assert len(begun.losses) == 6


def test_an_empty_sink_gets_a_base_and_another_run_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    two_ranks.run(train, MIXED, send_to=old)
    begun = two_ranks.run(train, MIXED, ckpt_path=f"deltas://{old}", send_to=new, max_epochs=2)
    assert stragglers(Path(new), [one.last.tables for one in begun]) == {}
    two_ranks.run(train, MIXED, send_to=str(tmp_path / "another"))
    for options, words in (
        ({"send_to": str(tmp_path / "another")}, "has files of run"),
        ({"send_to": old, "deltas": {"dense": False}}, "dense=False would leave an old dense part"),
    ):
        for error in two_ranks.run(error_of, MIXED, ckpt_path=f"deltas://{old}", max_epochs=2, **options):
            assert words in error


def damage(folder: Path) -> None:
    path = folder / str(names_in(folder)[-1])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(folder: Path) -> None:
    (folder / str(names_in(folder)[5])).unlink()


def leave_alone(folder: Path) -> None:
    pass


WRONG: dict[str, tuple[Callable[[Path], None], Case, str]] = {
    "no files": (
        lambda folder: [path.unlink() for path in folder.iterdir()],
        MIXED,
        "has no files of embedding deltas",
    ),
    "a base that was not finished": (lambda folder: lose(folder, 99, least=1), MIXED, "no whole cut"),
    "a damaged file": (damage, MIXED, "its checksum is wrong"),
    "a file that is missing": (remove, MIXED, "lacks g000001-s"),
    "other shapes": (leave_alone, case_of(["row_wise", "table_wise"], dim=8), "t0.weight (120, 16)"),
    "other tables": (leave_alone, case_of(["row_wise"]), "t1.weight (120, 16). Of this module: no other"),
    "another optimizer": (
        leave_alone,
        case_of(["row_wise", "table_wise"], "adagrad"),
        "saved with momentum1 (row-",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_sink_that_does_not_fit_is_an_error_on_every_rank(two_ranks: Ranks, tmp_path: Path, what: str) -> None:
    change, case, words = WRONG[what]
    two_ranks.run(train, MIXED, send_to=str(tmp_path), deltas=STATES)
    change(tmp_path)
    one, other = two_ranks.run(error_of, case, ckpt_path=f"deltas://{tmp_path}")
    assert one == other
    assert words in one
    assert f"deltas://{tmp_path}" in one


def test_a_relative_address_begins_at_the_working_directory(get_ranks: GetRanks, tmp_path: Path) -> None:
    relative = os.path.relpath(tmp_path, ROOT)
    for error in get_ranks(3).run(error_of, MIXED, ckpt_path=f"deltas://{relative}/none"):
        assert f"ValueError: ckpt_path='deltas://{relative}/none' has no files" in error
        assert f"{str(tmp_path / 'none')!r} is no folder here" in error
    sent = get_ranks(2).run(train, MIXED, send_to=str(tmp_path))
    begun = get_ranks(3).run(train, MIXED, ckpt_path=f"deltas://{relative}", max_epochs=2)
    then_was, now_is = whole(one.last.tables for one in sent), whole(one.first.tables for one in begun)
    torch.testing.assert_close(now_is, then_was, rtol=0, atol=0)


def test_a_sink_that_one_rank_cannot_read_is_an_error_on_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(train, MIXED, send_to=str(tmp_path))
    for error in two_ranks.run(error_where_rank_1_cannot_read, MIXED, ckpt_path=f"deltas://{tmp_path}"):
        assert error.startswith("StoreError: this host has no such disk")


def test_no_message_shows_the_secrets_of_an_address(get_ranks: GetRanks) -> None:
    address = f"deltas://redis://me:hunter2@127.0.0.1:{free_port()}/0?key=ads"
    [(error, words)] = get_ranks(1).run(error_and_words, MIXED, ckpt_path=address)
    assert "StoreError" in error
    assert "Restoring states from the checkpoint path at deltas://redis:***@127.0.0.1" in words
    assert "hunter2" not in error + words


def test_the_log_names_what_is_missing(two_ranks: Ranks, tmp_path: Path) -> None:
    sink = str(tmp_path)
    two_ranks.run(train, MIXED, "semi_sync_deferred", send_to=sink, deltas={"dense": False})
    lose(sink, len([name for name in names_in(sink) if name.step > 3]))
    words = [one.words for one in two_ranks.run(train, MIXED, ckpt_path=f"deltas://{sink}")]
    assert words[1] == ""
    assert "epoch 0 begins at its first batch, 3 batches of it are trained again" in words[0]
    assert "the dense weights are the module's own" in words[0]
    assert "of ebc.embedding_bags.t0.weight, ebc.embedding_bags.t1.weight" in words[0]
    assert "the updates of the tables by the last 1 batches" in words[0]


def test_an_evaluation_gets_tables_and_dense_part(two_ranks: Ranks, tmp_path: Path) -> None:
    sent = two_ranks.run(train, MIXED, send_to=str(tmp_path))
    found = two_ranks.run(validate, MIXED, f"deltas://{tmp_path}")
    for one, other in zip(sent, found, strict=True):
        torch.testing.assert_close(other.tables, one.last.tables, rtol=0, atol=0)
        torch.testing.assert_close(other.dense, one.last.dense, rtol=0, atol=0)
