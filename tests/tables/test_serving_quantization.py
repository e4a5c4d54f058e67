"""Quantization for serving: refused for sharded tables, which TorchRec would pass over; and the way that works."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torchrec.inference.modules import quantize_embeddings
from torchrec.quant import EmbeddingBagCollection as QuantEmbeddingBagCollection

from ..support.cases import NUM_STEPS, TABLE_WISE, Batches, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks


def _fitted(**options: Any) -> tuple[Model, Any]:
    model = Model(TABLE_WISE)
    trainer = make_trainer(make_strategy(model, **options))
    trainer.fit(model, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    return model, trainer


def refused(inplace: bool) -> tuple[str, bool]:
    """Return the error, and whether dense layers can be quantized by themselves, or beside tables that stay."""
    model, _ = _fitted()
    error = ""
    with warnings.catch_warnings(action="ignore"):
        try:
            quantize_embeddings(model, torch.qint8, inplace=inplace)
        except RuntimeError as err:
            error = str(err)
        dense = quantize_dynamic(model.top, {nn.Linear})
        model.ebc.qconfig = None  # PyTorch's word for a module that is to stay as it is
        quantize_embeddings(model, torch.qint8, inplace=True)
    return error, "quantized" in type(dense[0]).__module__


@pytest.mark.parametrize("inplace", [True, False])
def test_sharded_tables_are_not_passed_over(ranks: Ranks, inplace: bool) -> None:
    for error, dense in ranks.run(refused, inplace):
        assert "the tables of a ShardedEmbeddingBagCollection are sharded" in error
        assert "checkpoint_format='full'" in error
        assert dense


def served() -> tuple[str, float]:
    """Take the way that the error names; return the kind of the tables, and how far answers are off."""
    _, trainer = _fitted(checkpoint_format="full")
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    path = Path(folders[0]) / "full.ckpt"
    trainer.save_checkpoint(path)
    whole, quantized = Model(TABLE_WISE), Model(TABLE_WISE)
    for model in (whole, quantized):
        model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    with warnings.catch_warnings(action="ignore"):
        quantize_embeddings(quantized, torch.qint8, inplace=True)
    batch = make_batch(TABLE_WISE, 1000, 0)
    with torch.no_grad():
        answers = [model.embeddings("ebc", batch).values() for model in (whole, quantized)]
    kind = type(quantized.ebc)
    return kind.__module__ + "." + kind.__name__, (answers[0] - answers[1]).abs().max().item()


def test_the_way_that_the_error_names(ranks: Ranks) -> None:
    for kind, off in ranks.run(served):
        assert kind == f"{QuantEmbeddingBagCollection.__module__}.EmbeddingBagCollection"
        assert 0 < off < 0.1
