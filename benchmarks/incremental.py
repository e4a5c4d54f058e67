"""What incremental checkpoints write, how long training stands for them, and how long they load.

    python benchmarks/incremental.py                 # a table of 20 million rows of 32 columns; about 10 GB of disk
    python benchmarks/incremental.py --rows 2000000 --touched 0.05

One fit for each form, on one CPU rank: a checkpoint every ten steps, the first of them whole. "written": new
bytes on the disk, also as a part of the rows that changed, with their optimizer state. "stands": the time in
`trainer.save_checkpoint`, without waiting for an earlier save, also as a part of ten steps; "all": a save and the ten
steps after it, of ten steps without saves. "first": how long training stands for the first one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quiet

DIM, EVERY, NUM_SAVES, BAG = 32, 10, 5, 20
DELTAS = "deltas"  # a cut every ten steps in the place of a checkpoint
FORMS: dict[str, dict[str, Any]] = {
    "no checkpoint": {},
    "sharded": {"checkpoint_format": "sharded"},
    "sharded, asynchronous": {"checkpoint_format": "sharded", "async_checkpoint": True},
    "incremental": {"checkpoint_format": "incremental"},
    "incremental, asynchronous": {"checkpoint_format": "incremental", "async_checkpoint": True},
    DELTAS: {"optimizer_state": True},
}


@dataclass
class Measured:
    """What one form costs; a number for each save, except the last."""

    windows: list[float] = field(default_factory=list)  # seconds of a save and the ten steps after it
    stands: list[float] = field(default_factory=list)  # seconds
    num_bytes: list[int] = field(default_factory=list)  # new on the disk
    touched: list[int] = field(default_factory=list)  # bytes of rows that changed
    load: float = 0.0  # seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--touched", type=float, nargs="*", default=[0.001, 0.05], help="part of the rows, in a step")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS)[1:], default=list(FORMS)[1:])
    parser.add_argument("--folder", help="where checkpoints are written; the default is the system's")
    options = parser.parse_args()
    quiet.be_quiet()
    print(
        "| rows a step | form | written | of the touched rows | stands | of ten steps | all, of none | first | load |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for part in options.touched:
        without = 0.0
        for name, form in FORMS.items():
            if form and name not in options.forms:
                continue
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                found = measure(Path(folder), form, options.rows, part, deltas=name == DELTAS)
            all_steps = statistics.median(found.windows[1:])
            if not form:
                without = all_steps
                continue
            written, touched = (statistics.median(values[1:]) for values in (found.num_bytes, found.touched))
            stands = statistics.median(found.stands[1:])
            print(
                f"| {100 * part:g} % | {name} | {written / 1e6:.1f} MB | {written / touched:.2f} "
                f"| {1e3 * stands:.1f} ms | {100 * stands / without:.1f} % | {all_steps / without:.3f} "
                f"| {1e3 * found.stands[0]:.0f} ms | {found.load:.2f} s |",
                flush=True,
            )


def measure(folder: Path, form: dict[str, Any], num_rows: int, part: float, *, deltas: bool = False) -> Measured:
    """Train, save every ten steps, and load the newest checkpoint."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from lightning_overlap import EmbeddingDeltas, OverlapEmbeddingStrategy

    found = Measured()
    num_ids = int(num_rows * part)

    class Table(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingBagConfig(name="t", feature_names=["f"], num_embeddings=num_rows, embedding_dim=DIM)
            self.ebc = EmbeddingBagCollection(tables=[config])
            self.dense = torch.nn.Sequential(torch.nn.Linear(DIM, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.dense(self.ebc(batch).values()).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([p for _, p in in_backward_optimizer_filter(self.named_parameters())], 1e-3)

    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(EVERY * NUM_SAVES):
            ids = torch.randint(num_rows, (num_ids // BAG * BAG,), generator=generator)
            touched.append(ids)
            yield KeyedJaggedTensor(["f"], ids, lengths=torch.full((num_ids // BAG,), BAG))

    touched: list[Any] = []

    class Saves(Callback):
        start = 0.0

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            step = trainer.global_step
            if step % EVERY:
                return
            if step > EVERY:
                found.windows.append(time.perf_counter() - self.start)
            trainer.strategy.finish_save()  # saves are minutes apart, where they matter
            path = folder / f"{step}.ckpt"
            kept.append(bytes_in(folder))
            if found.touched:
                found.num_bytes.append(kept[-1] - kept[-2])
            ids = torch.cat(touched[step - EVERY : step]).unique()
            found.touched.append(len(ids) * (DIM + 1) * 4)
            self.start = time.perf_counter()
            if form:
                trainer.save_checkpoint(path)
            found.stands.append(cuts.take() if deltas else time.perf_counter() - self.start)
            if form and step == EVERY * NUM_SAVES:
                trainer.strategy.finish_save()
                start = time.perf_counter()
                loaded = trainer.strategy.load_checkpoint(path)
                trainer.strategy.load_model_state_dict(loaded)
                trainer.strategy.load_optimizer_state_dict(loaded)
                found.load = time.perf_counter() - start

    class Cuts(EmbeddingDeltas):
        spent = 0.0

        def on_train_batch_end(self, *args: Any) -> None:
            start = time.perf_counter()
            super().on_train_batch_end(*args)
            self.spent += time.perf_counter() - start

        def take(self) -> float:
            spent, self.spent = self.spent, 0.0
            return spent

    kept: list[int] = []  # bytes on the disk
    cuts, form = Cuts(folder, EVERY, **form if deltas else {}), {} if deltas else form
    callbacks: list[Callback] = [cuts, Saves()] if deltas else [Saves()]
    strategy = OverlapEmbeddingStrategy(
        fused_optimizer=(RowWiseAdagrad, {"lr": 0.1}), replicate_tables=False, sharding="table_wise", **form
    )
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **quiet.OPTIONS
    )
    trainer.fit(Table(), torch.utils.data.DataLoader(list(batches()), batch_size=None))
    return found


def bytes_in(path: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
