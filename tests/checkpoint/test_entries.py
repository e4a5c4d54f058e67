"""The package's entries of a checkpoint beside those of the user."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap.checkpoint.parts import ENTRIES, FUSED_CLASSES, LOADERS, rename_former_entries

from ..support.cases import ROWWISE_ADAGRAD, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks
from ..support.reference import Result, collect

OWN: dict[str, Any] = {
    **{
        "fused_optimizer": "mine",
        "fused_optimizer_classes": {"mine": 1},
        "table_optimizers": [2],
        "loader_states": [3],
    },
    "managed_collision_ranks": 4,
}


class HasEntries(Model):
    adds = True
    found: dict[str, Any]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.adds:
            assert not OWN.keys() & checkpoint.keys()
            checkpoint.update(OWN)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = {name: checkpoint[name] for name in OWN if name in checkpoint}


def _fit(epochs: int, *, adds: bool = True, **options: Any) -> tuple[HasEntries, Any]:
    model = HasEntries(ROWWISE_ADAGRAD)
    model.adds = adds
    trainer = make_trainer(make_strategy(model, **options.pop("strategy", {})), max_epochs=epochs)
    trainer.fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 4), **options)
    return model, trainer


def resume(path: Path, kind: str) -> tuple[dict[str, Any], Result, Result]:
    """Return the entries of the user's that a resumed fit finds, what came out of it, and of one without a stop."""
    strategy = {"checkpoint_format": "sharded" if kind == "sharded" else "full"}
    _, trainer = _fit(1, adds=kind != "former", strategy=strategy)
    trainer.save_checkpoint(path)
    if kind == "former" and trainer.is_global_zero:
        saved = torch.load(path, weights_only=True)
        assert {ENTRIES["fused_optimizer"], FUSED_CLASSES} <= saved.keys()
        torch.save({name.removeprefix("lightning_overlap_"): value for name, value in saved.items()}, path)
    trainer.strategy.barrier()
    model, trainer = _fit(2, ckpt_path=path)
    whole, uninterrupted = _fit(2)
    expected = collect(whole, uninterrupted.optimizers[0], whole.losses[4:])
    return model.found, collect(model, trainer.optimizers[0], model.losses), expected


@pytest.mark.parametrize("kind", ["sharded", "full", "former"])
def test_neither_takes_the_others(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """A `former` checkpoint has the package's entries without a prefix."""
    for found, resumed, whole in two_ranks.run(resume, tmp_path / "a.ckpt", kind):
        assert found == ({} if kind == "former" else OWN)
        assert resumed.differences(whole) == []


def test_entries_of_another_strategy_stay() -> None:
    """Only what is surely the package's is renamed."""
    checkpoint = {"state_dict": {}, "fused_optimizer": "mine", "loader_states": "mine"}
    rename_former_entries(checkpoint)
    assert checkpoint == {"state_dict": {}, "fused_optimizer": "mine", "loader_states": "mine"}
    in_words = {FUSED_CLASSES: {}, "fused_optimizer": {"a.b": "mine"}, "managed_collision_ranks": 4}
    rename_former_entries(in_words)
    assert in_words == {FUSED_CLASSES: {}, "fused_optimizer": {"a.b": "mine"}, "managed_collision_ranks": 4}
    former = {"fused_optimizer_classes": {}, "loader_states": [1]}
    rename_former_entries(former)
    assert former == {FUSED_CLASSES: {}, LOADERS: [1]}
