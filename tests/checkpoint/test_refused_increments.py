"""If one rank cannot have increments, no rank marks rows in later fits."""

from unittest import mock

import pytest
import torch.distributed as dist

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.compat.torchrec import kernels_in, lookups_of
from lightning_overlap.updated_rows import marked_rows

from ..support.cases import ROWWISE_ADAGRAD, Batches, Model
from ..support.fits import make_trainer
from ..support.ranks import Ranks


def refused_on_rank_one() -> tuple[list[int], list[int]]:
    """Return how many hooks the kernels have: after a fit that was refused, and after one without increments."""
    model, kernel_shards = Model(ROWWISE_ADAGRAD), marked_rows.kernel_shards
    found = []
    for checkpoint_format in ("incremental", "sharded"):
        strategy = OverlapEmbeddingStrategy(sharding="row_wise", checkpoint_format=checkpoint_format)
        refuses = dist.get_rank() == 1 and checkpoint_format == "incremental"
        said = ValueError("rows cannot be read by number")
        with mock.patch.object(marked_rows, "kernel_shards", side_effect=said if refuses else kernel_shards):
            if checkpoint_format == "incremental":
                with pytest.raises(ValueError, match="read by number"):
                    make_trainer(strategy).fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 3))
            else:
                make_trainer(strategy).fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 3))
        found.append([len(kernel._forward_hooks) for one in lookups_of(model.ebc) for _, kernel in kernels_in(one)])
    return found[0], found[1]


def test_kernels_have_no_hooks_of_increments_afterwards(two_ranks: Ranks) -> None:
    try:
        assert two_ranks.run(refused_on_rank_one) == [([0], [0])] * 2
    finally:
        two_ranks.close()  # an error of one rank may close connections of both
