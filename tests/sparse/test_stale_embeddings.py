"""The share of rows read stale, against a count with Python sets made from the raw batches of all ranks."""

from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_overlap import MODES
from lightning_overlap.sparse import stale_embeddings as counting

from ..support import mutants
from ..support.cases import (
    COLUMN_WISE,
    EMPTY_FEATURE,
    MIXED,
    SEQUENCE,
    SHARED_FEATURE,
    TABLE_WISE,
    TWO_COLLECTIONS,
    WEIGHTED,
    Case,
    TableSpec,
)
from ..support.ranks import Ranks
from ..testing.test_checked_streams import train
from . import stale_embeddings

NUM_STEPS = 14
ROW_WISE = Case("row_wise", (TableSpec("t0", ("f0",)), TableSpec("r0", ("f1",), "row_wise")))
OTHERS = (ROW_WISE, MIXED, SEQUENCE, WEIGHTED, EMPTY_FEATURE, SHARED_FEATURE, TWO_COLLECTIONS)


def _counts(ranks: Ranks, case: Case, staleness: int, step: int) -> dict[str, tuple[int, int]]:
    """Of the batch that was looked up in the step of a number; the step has that of the batch that it trained."""
    batch = step + staleness
    return stale_embeddings.count_raw_batches(case, ranks.world_size, batch, range(step, batch))


def _expected(ranks: Ranks, case: Case, staleness: int, step: int) -> dict[str, float]:
    return {table: num / read for table, (num, read) in _counts(ranks, case, staleness, step).items()}


def _check(ranks: Ranks, case: Case, staleness: int, told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["same_losses"], "counting must not change a bit"
        assert len(rank["shares"]) >= 3
        for step, shares in rank["shares"].items():
            assert shares == _expected(ranks, case, staleness, step)
            assert step + staleness < NUM_STEPS, "the last steps look nothing up"
    assert all(rank["shares"] == told[0]["shares"] for rank in told)
    steps = [_counts(ranks, case, staleness, step) for step in told[0]["shares"]]
    for table, totals in told[0]["totals"].items():
        counts = [step[table] for step in steps if table in step]
        assert totals == tuple(map(sum, zip(*counts, strict=True))), "each row once, however its table is cut"


@pytest.mark.parametrize("case", [TABLE_WISE, COLUMN_WISE], ids=lambda case: case.name)
@pytest.mark.parametrize("staleness", [1, 3])
def test_equals_a_count_with_sets(ranks: Ranks, case: Case, staleness: int) -> None:
    told = ranks.run(stale_embeddings.told, case, NUM_STEPS, pipeline="async_lookup", staleness=staleness)
    _check(ranks, case, staleness, told)
    shares = [share for one in told[0]["shares"].values() for share in one.values()]
    assert 0 < min(shares) < max(shares) < 1, "neither all rows nor none, or a wrong count could look right"


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_other_tables_and_shardings(two_ranks: Ranks, case: Case) -> None:
    """Cut by rows; of the dense optimizer, which are never stale and not listed; sequences; without any ids."""
    told = two_ranks.run(stale_embeddings.told, case, NUM_STEPS, pipeline="async_lookup", staleness=2)
    _check(two_ranks, case, 2, told)
    assert set(told[0]["totals"]) == {table.name for table in case.tables if table.sharding != "data_parallel"}


@pytest.mark.parametrize("pipeline", [name for name, mode in MODES.items() if mode.staleness])
def test_every_mode_with_a_staleness_and_the_closing_table(two_ranks: Ranks, pipeline: str) -> None:
    told = two_ranks.run(stale_embeddings.told, TABLE_WISE, NUM_STEPS, pipeline=pipeline)
    _check(two_ranks, TABLE_WISE, MODES[pipeline].staleness, told)
    assert told[1]["printed"] == ""
    [head] = [line for line in told[0]["printed"].splitlines() if line.startswith("rows in the steps counted")]
    assert head.split()[-4:] == ["read", "stale", "stale", "%"]
    for table, (num_stale, num_read) in told[0]["totals"].items():
        line = f"{table} {num_read} {num_stale} {num_stale / num_read:.1%}"
        assert line in {" ".join(line.split()) for line in told[0]["printed"].splitlines()}


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist", "split_backward"])
def test_an_exact_mode_has_none(two_ranks: Ranks, pipeline: str) -> None:
    for rank in two_ranks.run(stale_embeddings.told, TABLE_WISE, NUM_STEPS, pipeline=pipeline):
        assert rank["same_losses"]
        assert rank["totals"] == {}
        assert "overlap/step_ms" in rank["names"]
        assert not any("stale" in name for name in rank["names"])
        assert "read stale" not in rank["printed"]


def test_only_the_stale_part_of_a_run_is_counted(two_ranks: Ranks) -> None:
    options = {"pipeline": "async_lookup", "staleness": 2, "start_batch": 5, "end_batch": 11}
    for rank in two_ranks.run(stale_embeddings.told, TABLE_WISE, 20, **options):
        assert rank["same_losses"]
        assert rank["shares"]
        for step, shares in rank["shares"].items():
            assert 5 <= step < 11
            assert shares == _expected(two_ranks, TABLE_WISE, 2, step)


def test_every_epoch_is_counted(two_ranks: Ranks) -> None:
    told = two_ranks.run(stale_embeddings.told, TABLE_WISE, 9, pipeline="async_lookup", staleness=3, epochs=3)
    for rank in told:
        assert rank["same_losses"]
        assert {step // 9 for step in rank["shares"]} == {0, 1, 2}
        for step, shares in rank["shares"].items():
            assert shares == _expected(two_ranks, TABLE_WISE, 3, step % 9)


def test_ids_are_kept_for_the_lookups_that_are_counted(two_ranks: Ranks) -> None:
    staleness, every = 2, 10
    for held, counted in two_ranks.run(stale_embeddings.held_ids, TABLE_WISE, 30, staleness, every):
        assert len(counted) == 3
        assert max(held) == staleness + 1
        for step in counted[1:]:
            assert held[step - staleness : step + 1] == [1, 2, 3]
            assert held[step - staleness - 3 : step - staleness] == [0, 0, 0]


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
    assert [text.partition("(")[0] for _, text in statements] == ["self._streams.wait", "self._streams.record_stream"]
    for line, text in statements:
        with mutants.without(counting, line):
            assert mutants.races(count), text
