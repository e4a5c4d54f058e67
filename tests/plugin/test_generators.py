"""Every rank's generators of random numbers stand where DDPStrategy would leave them, in each hook of every run."""

import hashlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tuning import Auto

from ..support.fits import make_trainer
from ..support.ranks import Ranks

NUM_ROWS, DIM, BATCH_SIZE, FEATURES = 40, 8, 8, ("f0", "f1", "f2")
STRATEGIES: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "tables, and one replica": {"sharding": {"t0": "table_wise", "t1": "row_wise"}, "replicate_tables": ["t2"]},
    "planner": {"pipeline": "semi_sync", "replicate_tables": False, "checkpoint_format": "full"},
    "base": {"pipeline": "base", "sharding": "column_wise", "checkpoint_format": "sharded"},
    "auto": {"pipeline": Auto(warm_up=0, settle=1, block=1, rounds=1), "sharding": "table_wise"},
}


def digests() -> dict[str, str]:
    """Return a digest of each generator of this process."""
    keys, position = np.random.get_state()[1:3]  # type: ignore[index]
    states = {"python": repr(random.getstate()), "numpy": repr((keys.tolist(), position))}  # type: ignore[union-attr]
    states["torch"] = repr(torch.get_rng_state().tolist())
    for device in range(torch.cuda.device_count()):
        states[f"cuda:{device}"] = repr(torch.cuda.get_rng_state(device).tolist())
    return {name: hashlib.md5(state.encode()).hexdigest()[:8] for name, state in states.items()}


class NotesGenerators(Callback):
    """Notes the generators in each of Lightning's hooks."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, str]]] = []

    def note(self, hook: str) -> None:
        self.notes.append((hook, digests()))

    def state_dict(self) -> dict[str, Any]:
        self.note("state_dict")
        return {}


def _noting(hook: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self.note(hook)


for _hook in (name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")):
    if _hook != "on_load_checkpoint":  # sharded tables are loaded after the set-up, as by FSDPStrategy
        setattr(NotesGenerators, _hook, _noting(_hook))


class TossesCoins(LightningModule):
    """Draws from every generator in each step, from torch's by dropout."""

    def __init__(self, *, fused: bool, device: str = "cpu") -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{at}", feature_names=[name], num_embeddings=NUM_ROWS, embedding_dim=DIM)
            for at, name in enumerate(FEATURES)
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device(device))
        self.dropout, self.dense = nn.Dropout(0.5), nn.Linear(len(FEATURES) * DIM, 1)
        self.fused = fused
        self.losses: list[float] = []

    def forward(self, batch: dict[str, Any]) -> Tensor:
        logits = self.dense(self.dropout(self.ebc(batch["ids"]).values())).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self(batch) * (1 + random.random()) * (1 + np.random.random())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.item() * torch.rand(()).item())
        return loss

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = self.named_parameters()
        return torch.optim.SGD([p for _, p in in_backward_optimizer_filter(named)] if self.fused else self.parameters())


def batches(num: int) -> list[dict[str, Any]]:
    made = []
    for index in range(num):
        generator = torch.Generator().manual_seed(index)
        lengths = torch.randint(0, 4, (len(FEATURES) * BATCH_SIZE,), generator=generator)
        ids = torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator)
        labels = torch.randint(0, 2, (BATCH_SIZE,), generator=generator).float()
        made.append({"ids": KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths), "labels": labels})
    return made


def run_all(name: str, folder: str) -> tuple[list[tuple[str, dict[str, str]]], list[float], dict[str, Tensor]]:
    """Make runs of every kind; return the generators in each hook, all losses, and weights of the dense part."""
    options, notes = STRATEGIES[name], NotesGenerators()
    strategy: Any = DDPStrategy if options is None else OverlapEmbeddingStrategy
    own = {} if options is None else {"fused_optimizer": (torch.optim.SGD, {"lr": 1e-3}), **options}
    loaders = DataLoader(batches(6), batch_size=None, shuffle=True), DataLoader(batches(3), batch_size=None)
    losses = []

    def call(entry: str, module: LightningModule, *data: Any, path: str | None = None, saves: str = "") -> None:
        notes.note(f"{entry} from {path is not None}")
        callbacks = [notes, *[ModelCheckpoint(f"{folder}/{saves}", "{epoch}", save_top_k=-1)] * bool(saves)]
        options = {"enable_checkpointing": bool(saves), "max_epochs": 2, "num_sanity_val_steps": 2}
        trainer = make_trainer(strategy(**own), callbacks=callbacks, **options)
        getattr(trainer, entry)(module, *data, ckpt_path=path)
        trainer.strategy.barrier()
        notes.note(f"after {entry}")

    seed_everything(5, verbose=False)
    for made in range(2):
        module = TossesCoins(fused=options is not None)
        path = None if made == 0 else f"{folder}/first/epoch=0.ckpt"
        call("fit", module, *loaders, path=path, saves="second" if made else "first")
        call("fit", module, loaders[0])
        for entry in ("validate", "test", "predict"):
            call(entry, module, loaders[1])
            call(entry, module, loaders[1], path=f"{folder}/first/epoch=1.ckpt")
        losses += module.losses
    return notes.notes, losses, {key: value.detach().clone() for key, value in module.dense.named_parameters()}


def shards_made_anew(sharding: str) -> tuple[list[Tensor], bool]:
    """Return this rank's shards of tables on `meta`, and whether the generators stand where they stood before."""
    seed_everything(5, verbose=False)
    module, notes = TossesCoins(fused=True, device="meta"), NotesGenerators()
    strategy = OverlapEmbeddingStrategy(fused_optimizer=(torch.optim.SGD, {"lr": 0.0}), sharding=sharding)
    make_trainer(strategy, callbacks=[notes]).fit(module, DataLoader(batches(1), batch_size=None))
    states = dict(notes.notes)
    shards = [shard.tensor for weight in module.ebc.state_dict().values() for shard in weight.local_shards()]
    return [shard.detach().clone() for shard in shards], states["on_fit_start"] == states["setup"]


@pytest.mark.parametrize("name", [name for name, options in STRATEGIES.items() if options is not None])
def test_generators_of_ddp(ranks: Ranks, name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / f"ddp_on_{ranks.world_size}"
    expected = ranks.run_once(run_all, "ddp", str(folder))
    for (mine, losses, weights), (theirs, of_ddp, weights_of_ddp) in zip(
        ranks.run(run_all, name, str(tmp_path)), expected, strict=True
    ):
        for number, (note, other) in enumerate(zip(mine, theirs, strict=True)):
            assert note == other, f"note {number}"
        assert losses == pytest.approx(of_ddp, rel=1e-3, abs=1e-4)
        for key, weight in weights.items():
            torch.testing.assert_close(weight, weights_of_ddp[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_shards_made_anew_differ(two_ranks: Ranks, sharding: str) -> None:
    (mine, stood), (theirs, stood_too) = two_ranks.run(shards_made_anew, sharding)
    assert stood
    assert stood_too
    assert len(mine) == len(theirs) == len(FEATURES)
    shards = [*mine, *theirs]
    assert all(shard.std() > 0 for shard in shards)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(shards, 2))
