"""What the checksums of a checkpoint cost: load it with and without comparing them.

    python benchmarks/checkpoints.py                # on one CPU rank; 2 tables of 100 MB each
    python benchmarks/checkpoints.py --rounds 9

A fit saves a checkpoint of each form; its last hook loads it with and without the comparison, in turns, from the
system's cache of files, where a load is fastest. A load is what `trainer.fit(ckpt_path=...)` does with the file:
reading, and copying into the tables and their optimizer. Wall clock and CPU time; medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import quiet

NUM_ROWS, DIM, NUM_TABLES = 390_000, 64, 2  # 100 MB each


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    quiet.be_quiet()
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint_format in ("sharded", "full"):
            path = Path(folder) / checkpoint_format
            times = measure(path, checkpoint_format, options.rounds)
            files = [path] if path.is_file() else list(path.iterdir())
            num_bytes = sum(file.stat().st_size for file in files)
            for index, clock in enumerate(("wall clock", "CPU")):
                medians = {
                    checks: statistics.median(both[index] for both in of_arm) for checks, of_arm in times.items()
                }
                more = medians[True] / medians[False] - 1
                print(
                    f"{checkpoint_format}, {num_bytes / 1e6:.0f} MB, {clock}: {1e3 * medians[True]:.1f} ms with "
                    f"checksums, {1e3 * medians[False]:.1f} ms without, {100 * more:+.1f} %"
                )


def measure(path: Path, checkpoint_format: str, rounds: int) -> dict[bool, list[tuple[float, float]]]:
    """Return, with and without the comparison, the seconds of each load: wall clock and CPU."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from lightning_overlap import OverlapEmbeddingStrategy
    from lightning_overlap.storage import Manifest
    from lightning_overlap.storage.sealed_file import Seal

    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    class Tables(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            tables = [
                EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], num_embeddings=NUM_ROWS, embedding_dim=DIM)
                for i in range(NUM_TABLES)
            ]
            self.ebc = EmbeddingBagCollection(tables=tables)
            self.dense = torch.nn.Linear(NUM_TABLES * DIM, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.dense(self.ebc(batch).values()).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for _, p in in_backward_optimizer_filter(self.named_parameters())], 0.1)

    def batches() -> Iterator[Any]:
        lengths = torch.ones(NUM_TABLES * 8, dtype=torch.int64)
        yield KeyedJaggedTensor([f"f{i}" for i in range(NUM_TABLES)], torch.arange(NUM_TABLES * 8), lengths=lengths)

    @contextmanager
    def unchecked(self: Manifest, name: str) -> Iterator[Path]:
        with self.store.on_disk(self.path(name)) as path:
            yield path

    class LoadsAtTheEnd(Callback):
        def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
            trainer.save_checkpoint(path)
            for number in range(rounds + 1):
                for checks in (True, False) if number % 2 else (False, True):
                    seconds = load(trainer, checks)
                    if number:  # the first one warms up
                        times[checks].append(seconds)

    def load(trainer: Trainer, checks: bool) -> tuple[float, float]:
        with ExitStack() as stack:
            if not checks:
                stack.enter_context(mock.patch.object(Seal, "check", return_value=None))
                stack.enter_context(mock.patch.object(Manifest, "checked", unchecked))
            start, start_cpu = time.perf_counter(), time.process_time()
            checkpoint = trainer.strategy.load_checkpoint(path)
            trainer.strategy.load_model_state_dict(checkpoint)
            trainer.strategy.load_optimizer_state_dict(checkpoint)
            return time.perf_counter() - start, time.process_time() - start_cpu

    strategy = OverlapEmbeddingStrategy(
        checkpoint_format=checkpoint_format, fused_optimizer=(torch.optim.SGD, {"lr": 0.1}), replicate_tables=False
    )
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, callbacks=[LoadsAtTheEnd()], **quiet.OPTIONS
    )
    data = torch.utils.data.DataLoader(list(batches()), batch_size=None)
    trainer.fit(Tables(), data)
    return times


if __name__ == "__main__":
    main()
