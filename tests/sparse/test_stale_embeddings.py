"""The share of rows read stale, against a count with Python sets made from the raw batches of all ranks."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_overlap import MODES, OverlapMonitor
from lightning_overlap.sparse.watchers import stale_rows as counting

from ..callbacks.monitors import Kept
from ..support import cases, mutants
from ..support.cases import TABLE_WISE, Batches, Case, Model, TableSpec, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks
from ..support.reference import on_ranks
from ..testing.test_checked_streams import train

NUM_STEPS = 14
PREFIX = "overlap/stale_rows/"
_COPIED = TableSpec("c0", ("f1", "f2"), "data_parallel", "second")
COPIED_BESIDE = Case("copied_beside", (TableSpec("t0", ("f0",)), TableSpec("t1", ("f2",)), _COPIED))
ROW_WISE = Case("row_wise", (TableSpec("t0", ("f0",)), TableSpec("r0", ("f1",), "row_wise")))


@dataclass
class Told:
    losses: Tensor
    shares: dict[int, dict[str, float]]  # by logged step
    totals: dict[str, tuple[int, int]]
    printed: str


def _told(case: Case, num_steps: int, *, epochs: int = 1, **options: Any) -> Told:
    model, logger, printed = Model(case), Kept(), io.StringIO()
    monitor = OverlapMonitor(every_n_steps=3, audit=False)
    trainer = make_trainer(make_strategy(model, **options), callbacks=[monitor], logger=logger, max_epochs=epochs)
    with contextlib.redirect_stdout(printed):
        trainer.fit(model, datamodule=Batches(case, num_steps))
    shares: dict[int, dict[str, float]] = {}
    for values, step in logger.logged:
        found = {name.removeprefix(PREFIX): share for name, share in values.items() if name.startswith(PREFIX)}
        shares |= {step: found} if found else {}
    return Told(torch.stack(model.losses), shares, monitor.stale_rows, printed.getvalue())


def _count_raw_batches(case: Case, num_ranks: int, batch: int, unseen: range) -> dict[str, tuple[int, int]]:
    """Count rows read stale and rows read, with sets."""

    def rows(table: Any, index: int) -> set[int]:
        found: set[int] = set()
        for rank in range(num_ranks):
            kjt = make_batch(case, index, rank).inputs["sparse"][0]
            for feature in table.features:
                found |= set(kjt[feature].values().tolist())
        return found

    counts = {}
    for table in case.tables:
        read = rows(table, batch)
        written = set().union(*(rows(table, index) for index in unseen))
        if table.sharding != "data_parallel" and read:
            counts[table.name] = len(read & written), len(read)
    return counts


def _counts(ranks: Ranks, case: Case, staleness: int, step: int) -> dict[str, tuple[int, int]]:
    """Of the batch that was looked up in the step of a number; the step has that of the batch that it trained."""
    batch = step + staleness
    return _count_raw_batches(case, ranks.world_size, batch, range(step, batch))


def _expected(ranks: Ranks, case: Case, staleness: int, step: int) -> dict[str, float]:
    return {table: num / read for table, (num, read) in _counts(ranks, case, staleness, step).items()}


def _check(ranks: Ranks, case: Case, staleness: int, told: list[Told]) -> None:
    for rank, expected in zip(told, on_ranks(ranks, case, staleness, num_steps=NUM_STEPS), strict=True):
        assert torch.equal(rank.losses, expected.losses), "counting must not change a bit"
        assert rank.shares == told[0].shares
    assert len(told[0].shares) >= 3
    for step, shares in told[0].shares.items():
        assert shares == _expected(ranks, case, staleness, step)
        assert step + staleness < NUM_STEPS, "the last steps look nothing up"
    steps = [_counts(ranks, case, staleness, step) for step in told[0].shares]
    for table, totals in told[0].totals.items():
        counts = [step[table] for step in steps if table in step]
        assert totals == tuple(map(sum, zip(*counts, strict=True))), "each row once, however its table is cut"
    assert set(told[0].totals) == {table.name for table in case.tables if table.sharding != "data_parallel"}


@pytest.mark.parametrize(
    ("case", "staleness", "num_ranks"),
    [
        *((case, staleness, num) for case in (TABLE_WISE, cases.COLUMN_WISE) for staleness in (1, 3) for num in (1, 2)),
        *((case, 2, 2) for case in (ROW_WISE, cases.MIXED, cases.SEQUENCE, cases.WEIGHTED, cases.EMPTY_FEATURE)),
        *((case, 2, 2) for case in (cases.SHARED_FEATURE, cases.TWO_COLLECTIONS)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_equals_a_count_with_sets(get_ranks: Callable[..., Ranks], case: Case, staleness: int, num_ranks: int) -> None:
    """Cut by rows; of the dense optimizer, which are never stale and not listed; sequences; without any ids."""
    ranks = get_ranks(num_ranks)
    told = ranks.run(_told, case, NUM_STEPS, pipeline="async_lookup", staleness=staleness)
    _check(ranks, case, staleness, told)
    shares = [share for one in told[0].shares.values() for share in one.values()]
    assert 0 < min(shares) < max(shares) < 1, "neither all rows nor none, or a wrong count could look right"


@pytest.mark.parametrize(("staleness", "num_ranks"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("replicas", [["c0"], []], ids=["replicated", "of_the_dense_optimizer"])
def test_a_collection_that_is_never_stale_hides_no_other(
    get_ranks: Callable[..., Ranks], replicas: list[str], staleness: int, num_ranks: int
) -> None:
    """Its batches ahead are still to be looked up when those of the other collection are counted."""
    options = {"pipeline": "async_lookup", "staleness": staleness, "replicate_tables": replicas}
    if replicas:
        options["fused_optimizer"] = (torch.optim.SGD, {"lr": 2.0})
    told = get_ranks(num_ranks).run(_told, COPIED_BESIDE, NUM_STEPS, **options)
    assert set(told[0].totals) == {"t0", "t1"}
    assert len(told[0].shares) >= 2
    for rank in told:
        for step, shares in rank.shares.items():
            assert shares == _expected(get_ranks(num_ranks), COPIED_BESIDE, staleness, step)


@pytest.mark.parametrize("pipeline", MODES)
def test_every_mode_and_the_closing_table(two_ranks: Ranks, pipeline: str) -> None:
    """In an exact mode there is nothing to say."""
    told = two_ranks.run(_told, TABLE_WISE, NUM_STEPS, pipeline=pipeline)
    if MODES[pipeline].staleness == 0:
        assert [(rank.shares, rank.totals) for rank in told] == [({}, {})] * 2
        assert "read stale" not in told[0].printed
        return
    _check(two_ranks, TABLE_WISE, MODES[pipeline].staleness, told)
    printed = {" ".join(line.split()) for line in told[0].printed.splitlines()}
    for table, (num_stale, num_read) in told[0].totals.items():
        assert f"{table} {num_read} {num_stale} {num_stale / num_read:.1%}" in printed


@pytest.mark.parametrize(
    ("num_steps", "epochs", "staleness", "switches", "begun"),
    [(20, 1, 2, {"start_batch": 5, "end_batch": 11}, {0}), (9, 3, 3, {}, {0, 1, 2})],
    ids=["stale_part", "epochs"],
)
def test_only_the_stale_part_of_every_epoch_is_counted(
    two_ranks: Ranks, num_steps: int, epochs: int, staleness: int, switches: dict[str, int], begun: set[int]
) -> None:
    options = {"pipeline": "async_lookup", "staleness": staleness, "epochs": epochs, **switches}
    for rank in two_ranks.run(_told, TABLE_WISE, num_steps, **options):
        assert {step // num_steps for step in rank.shares} == begun
        for step, shares in rank.shares.items():
            assert switches.get("start_batch", 0) <= step < switches.get("end_batch", num_steps * epochs)
            assert shares == _expected(two_ranks, TABLE_WISE, staleness, step % num_steps)


class CountsEveryStep(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        self.rows, self.read = strategy.stale_rows(), dict[str, tuple[int, int]]()
        self.rows.keep_ids(True)

    def on_train_batch_end(self, *args: Any) -> None:
        counts = self.rows.count()
        self.read |= counts.read() if counts is not None else {}


def test_rows_are_counted_on_a_stream_of_their_own_after_the_lookup() -> None:
    """Without one of the statements the streams that follow each operator find a race."""

    def count() -> None:
        counts = CountsEveryStep()
        train(TABLE_WISE, "semi_sync", callbacks=[counts])
        assert all(0 < stale < read for stale, read in counts.read.values())
        assert counts.read

    count()
    statements = [*mutants.statements(counting)]
    assert [text.partition("(")[0] for _, text in statements] == ["self._streams.use"]
    for line, text in statements:
        with mutants.without(counting, line):
            assert mutants.races(count), text
