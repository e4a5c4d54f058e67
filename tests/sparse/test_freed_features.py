"""`release_features` gives ids back once they are sent; nothing else changes, and who reads them is told."""

import weakref
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_overlap import MODES

from ..checkpoint.resumes import Rows
from ..support import cases
from ..support.cases import MIXED, NUM_STEPS, TABLE_WISE, Batch, Case, Model
from ..support.fits import fit, make_strategy, make_trainer
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from ..support.reference import differences, on_ranks
from ..tables import supported_modules
from ..tables.supported_modules import CASES
from . import caller_fits

RELEASES = {"release_features": True}
EXACT = [name for name, mode in MODES.items() if mode.has_sparse_stages and mode.staleness == 0]


KINDS = [TABLE_WISE, cases.COLUMN_WISE, cases.TWO_COLLECTIONS, cases.SEQUENCE, cases.WEIGHTED]


@pytest.mark.parametrize(
    ("pipeline", "case"),
    [*((pipeline, MIXED) for pipeline in MODES), *(("fused_sparse_dist", case) for case in KINDS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_mode_and_kind_of_table_trains_the_same(ranks: Ranks, pipeline: str, case: Case) -> None:
    actual = ranks.run(fit, case, pipeline, options=RELEASES)
    assert differences(actual, on_ranks(ranks, case, MODES[pipeline].staleness)) == [[]] * ranks.world_size


@pytest.mark.parametrize(("name", "pipeline"), in_turn(CASES, EXACT))
def test_every_kind_of_module_trains_the_same(two_ranks: Ranks, name: str, pipeline: str) -> None:
    """Also modules whose lookup is their own, in the call, with ids that were sent early (managed collisions)."""
    actual = two_ranks.run(supported_modules.fit, name, pipeline, options=RELEASES)
    assert differences(actual, two_ranks.run_once(supported_modules.train, name)) == [[]] * 2


class Watching(Model):
    """Counts the batches whose ids are in memory as a step begins; reads lengths, which stay."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.alive: list[int] = []
        self._ids: list[weakref.ref[Tensor]] = []

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self._ids.append(weakref.ref(batch.inputs["sparse"][0].values()))
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.alive.append(sum(ids() is not None for ids in self._ids))
        kjt = batch.inputs["sparse"][0]
        assert kjt.lengths().numel() == len(kjt.keys()) * kjt.stride()
        return super().training_step(batch, batch_idx)


def _alive(case: Case, pipeline: str, release_features: bool) -> list[int]:
    """Train batches that nothing but the training holds."""
    module = Watching(case)
    trainer = make_trainer(make_strategy(module, pipeline, release_features=release_features))
    trainer.fit(module, DataLoader(Rows(case, NUM_STEPS, dist.get_rank()), batch_size=None))
    return module.alive


@pytest.mark.parametrize(("pipeline", "held", "released"), [("fused_sparse_dist", 3, 2), ("async_lookup", 4, 1)])
def test_ids_are_in_memory_until_they_are_sent(two_ranks: Ranks, pipeline: str, held: int, released: int) -> None:
    """As a step begins: without it the ids of every batch in flight, with it of those that are not sent yet."""
    for releases, num in ((False, held), (True, released)):
        for by_step in two_ranks.run(_alive, TABLE_WISE, pipeline, releases):
            assert set(by_step[4 : NUM_STEPS - held]) == {num}


def test_who_reads_ids_is_told(ranks: Ranks) -> None:
    for text in ranks.run(caller_fits.fails, "reads_ids", "fused_sparse_dist", **RELEASES):
        assert "release_features=True has given their memory back" in text
        assert "train with release_features=False" in text


@pytest.mark.parametrize(
    ("model", "num_epochs", "message"),
    [
        ("made_in_step", 1, "makes the input of 'ebc' itself"),
        ("takes_own_class", 2, "no copy of them is made"),  # a loader's own objects keep their values
    ],
)
def test_what_is_not_released(get_ranks: Any, model: str, num_epochs: int, message: str) -> None:
    args = (caller_fits.train, model, "fused_sparse_dist", RELEASES)
    [outcome] = get_ranks(1).run(*args, max_epochs=num_epochs)
    assert [message in text for text in outcome.messages if "release_features" in text] == [True]
    assert len(outcome.result.losses) == num_epochs * caller_fits.NUM_STEPS
