"""docs/sequences.md says what is so: its program on one and two ranks, beside plain torch in one process."""

import inspect
from pathlib import Path

import pytest
import torch
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagConfig, EmbeddingConfig

from ..support.ranks import Ranks
from . import sequences
from .sequences import page

SHARDINGS = ("row_wise", "column_wise", "table_wise")


def test_configs_have_no_padding() -> None:
    for config in (EmbeddingConfig, EmbeddingBagConfig):
        assert not any("pad" in name for name in inspect.signature(config).parameters)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_padding_negatives_and_frozen_tables_are_those_of_plain_torch(ranks: Ranks, sharding: str) -> None:
    expected = {across: sequences.plain_table(ranks.world_size, across=across) for across in (False, True)}
    start = sequences.saved_rows()
    start[0] = 0
    for found in ranks.run(sequences.tables_after_fits, sharding):
        for kind, across in (("NextItem", False), ("AcrossRanks", True), ("KeepsPadding", False)):
            torch.testing.assert_close(found[kind], expected[across], rtol=1e-4, atol=1e-6)
            assert found[kind][0].eq(0).all()
            assert not torch.equal(found[kind], start)
        assert torch.equal(found["frozen"], start)
    assert not torch.allclose(expected[False], expected[True], atol=1e-3)  # or the test would see no difference


def test_padding_among_the_ids_trains_row_0() -> None:
    module, batch = sequences.make_module(), sequences.batches(0, with_padding=True)[0]
    module.training_step(batch, 0).backward()
    assert module.items.embeddings["item_table"].weight.grad[0].any()


def test_saved_rows_in_pieces(ranks: Ranks, tmp_path: Path) -> None:
    """Into the unsharded table, and into shards of one that was made on `meta`."""
    path = sequences.save_rows(tmp_path)
    weight = torch.nn.Parameter(torch.zeros(page().NUM_ITEMS, page().DIM))
    page().load_rows(weight, path, num_rows=7)
    assert torch.equal(weight, sequences.saved_rows())
    for sharding in SHARDINGS:
        for table in ranks.run(sequences.load_shards, path, sharding):
            assert torch.equal(table, sequences.saved_rows()), sharding


def test_a_table_is_written_whole(ranks: Ranks) -> None:
    for sharding in SHARDINGS:
        for table in ranks.run(sequences.write_table, sharding):
            assert torch.equal(table, sequences.saved_rows() + 1), sharding


def test_a_softmax_over_all_items_is_that_of_plain_torch(ranks: Ranks) -> None:
    expected = sequences.plain_table(ranks.world_size, catalogue=True)
    assert not torch.allclose(expected, sequences.plain_table(ranks.world_size), atol=1e-3)
    for sharding in SHARDINGS:
        for table in ranks.run(sequences.table_with_catalogue, sharding):
            torch.testing.assert_close(table, expected, rtol=1e-4, atol=1e-6)


def test_all_items_are_ranked(ranks: Ranks) -> None:
    rows = sequences.make_module().items.embeddings["item_table"].weight.detach()
    for sharding in SHARDINGS:
        for rank, (whole, chunks, query) in enumerate(ranks.run(sequences.rank_all, sharding, 5)):
            module = sequences.make_module()
            history = [module.items(batch["ids"])["history"] for batch in sequences.batches(rank)]
            expected = torch.cat([module.encode(one) for one in history]).detach()
            torch.testing.assert_close(query, expected)
            best = (query @ rows.T).topk(5).indices
            assert torch.equal(whole, best), sharding
            assert torch.equal(chunks, best), sharding


def test_a_metric_with_lists_counts_the_samples_of_all_ranks(ranks: Ranks) -> None:
    samples = [batch for rank in range(ranks.world_size) for batch in sequences.scored(rank)]
    metric = BinaryAUROC(thresholds=None)
    for batch in samples:
        metric.update(batch["scores"], batch["clicked"])
    assert ranks.run(sequences.metric_of_all_ranks) == [pytest.approx(float(metric.compute()))] * ranks.world_size
