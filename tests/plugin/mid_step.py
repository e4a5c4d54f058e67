"""Fits that save within `training_step`, before and after it changes a buffer. Functions that ranks run."""

from typing import Any

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from ..support.cases import NUM_DENSE, TABLE_WISE, Batch, Batches, Model
from ..support.fits import make_strategy, make_trainer

PLACES = ("start", "after_norm", "after_lookup")
BUFFERS = ("trained", "evaluated", "replaced", "on_one_rank", "none")  # what the forward does with its buffers
REFUSED = [(place, buffers) for place in PLACES[1:] for buffers in ("trained", "replaced", "on_one_rank")]


class Saves(Model):
    """Takes the statistics of its dense features before it looks up."""

    def __init__(self, place: str, buffers: str, path: str) -> None:
        super().__init__(TABLE_WISE)
        self.place, self.buffers, self.path, self.said = place, buffers, path, ""
        self.norm: Any = nn.Identity() if buffers == "none" else nn.BatchNorm1d(NUM_DENSE, affine=False)

    def _at(self, place: str) -> None:
        if self.path and place == self.place and self.trainer.global_step == 2:
            try:
                self.trainer.save_checkpoint(self.path)
            except RuntimeError as err:
                self.said = str(err)

    def embeddings(self, collection: str, batch: Batch) -> Any:
        self._at("start")
        if self.buffers in ("evaluated", "replaced", "on_one_rank"):
            self.norm.eval()
        if self.buffers == "on_one_rank" and self.global_rank == 1:
            self.norm.running_mean.add_(0.1)
        if self.buffers == "replaced":
            self.norm.running_mean = self.norm.running_mean + 0.1
        self.norm(batch.dense)
        self._at("after_norm")
        found = super().embeddings(collection, batch)
        self._at("after_lookup")
        return found


class StatefulBatches(Batches):
    def loader_of(self, indices: range) -> StatefulDataLoader:
        return StatefulDataLoader([*super().loader_of(indices).dataset], batch_size=None)


def resumed(place: str, buffers: str, folder: str) -> tuple[str, bool]:
    """Return what is said of the save, and whether a fit that resumes from it ends as the whole one."""
    path = f"{folder}/a.ckpt"
    whole = _fit(Saves(place, buffers, path), None)
    if whole.said:
        return whole.said, False
    rest = _fit(Saves(place, buffers, ""), path)
    found = rest.state_dict()
    same = [_equal(value, found[name]) for name, value in whole.state_dict().items()]
    return "", all(same) and len(same) == len(found)


def _fit(module: Saves, ckpt_path: str | None) -> Saves:
    trainer = make_trainer(make_strategy(module))
    trainer.fit(module, datamodule=StatefulBatches(TABLE_WISE, 5), ckpt_path=ckpt_path, weights_only=False)
    return module


def _equal(one: Any, other: Any) -> bool:
    if hasattr(one, "local_shards"):
        pairs = zip(one.local_shards(), other.local_shards(), strict=True)
        return all(torch.equal(mine.tensor, theirs.tensor) for mine, theirs in pairs)
    return torch.equal(one, other)
