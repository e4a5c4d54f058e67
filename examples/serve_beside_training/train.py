"""Two ranks train, a third process serves the tables seconds later: both score the validation set at the same steps.

python examples/serve_beside_training/train.py --data adult.data.gz
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_overlap import EmbeddingDeltas, OverlapEmbeddingStrategy
from lightning_overlap.data import AdultDataModule, SyntheticDataModule
from lightning_overlap.deltas import Replica
from lightning_overlap.models import DLRM
from lightning_overlap.models.dlrm import BinnedAUC

try:
    from matplotlib.figure import Figure
except ImportError as err:
    raise ImportError(f"the picture needs matplotlib ({err}): pip install 'lightning_overlap[plot]'") from err

NUM_RANKS, NUM_STEPS, CUT_EVERY, VALIDATE_EVERY = 2, 150, 10, 50


def make(data_path: str | None, **model_options: Any) -> tuple[Any, DLRM]:
    """The same data and model for the training and for the server."""
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    data = (
        AdultDataModule(data_path, batch_size=128)
        if data_path
        else SyntheticDataModule(num_tables=6, rows_per_table=2000, batch_size=128, num_batches=NUM_STEPS)
    )
    return data, DLRM(data.table_sizes, data.num_dense, table_learning_rate=0.05, **model_options)


class Watch(Callback):
    """Keeps when each step ended, and the AUC of each validation by its step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.auc: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps.append((time.time(), trainer.global_step))

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self.auc[trainer.global_step] = float(module.val_auc.compute())


def serve(data_path: str | None, sink: str, answers: Path, ready: Any) -> None:
    """Follow the deltas; note the lag, and score the validation set at every step at which the training does."""
    data, model = make(data_path, table_device="cpu")
    batches = []
    for rank in range(NUM_RANKS):  # the batches of the training's ranks
        data.trainer = SimpleNamespace(global_rank=rank, world_size=NUM_RANKS, current_epoch=0)
        data.setup("validate")
        batches += list(data.val_dataloader())
    model.eval()
    auc: dict[int, float] = {}
    lags: list[tuple[float, int, float]] = []
    with Replica(model, sink) as replica:
        replica.follow(every_s=0.02)
        ready.set()
        replica.wait(timeout=120)
        until = time.monotonic() + 120
        while NUM_STEPS not in auc and time.monotonic() < until:
            with replica.reading() as position, torch.no_grad():
                lags.append((time.time(), position.step, time.time() - position.time))
                if position.step % VALIDATE_EVERY == 0 and position.step not in auc:
                    metric = BinnedAUC()
                    for batch in batches:
                        metric.update(model(batch), batch.labels)
                    auc[position.step] = float(metric.compute())
            time.sleep(0.01)
    answers.write_text(json.dumps({"auc": auc, "lags": lags}))


TRAINED, SERVED, MUTED = "#7d86c9", "#a8b545", "#666666"


def draw(path: Path, steps: list[tuple[float, int]], lags: list[tuple[float, int, float]]) -> None:
    """Draw the trained and the served step, and below how old the served tables were."""
    figure = Figure(figsize=(10, 5), dpi=120, layout="constrained", facecolor="white")
    figure.suptitle("Served beside training", x=0.01, ha="left", fontsize=13, fontweight="bold")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    begin = steps[0][0]
    times, served, ages = zip(*((at - begin, step, age) for at, step, age in lags), strict=True)
    trained = [at - begin for at, _ in steps], [step for _, step in steps]
    above.step(*trained, where="post", color=TRAINED, linewidth=2.2, label="trained")
    above.step(times, served, where="post", color=SERVED, linewidth=2.2, label="served")
    above.set_title("step", loc="left", fontsize=9)
    below.fill_between(times, ages, color=SERVED, linewidth=0)
    below.set_title("age of what is served, seconds", loc="left", fontsize=9)
    below.set_xlabel("seconds of training", fontsize=8, color=MUTED, loc="right")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.set_facecolor("#f5f6f8")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=8, left=False)
        axes.grid(axis="y", color="white", linewidth=1.2)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    above.legend(loc="upper left", frameon=False, fontsize=9)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="adult.data, plain or .gz (default: synthetic data)")
    parser.add_argument("--sink", help="a folder or redis://host:port/0?key=name (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("lag.png"), help="the picture (default: %(default)s)")
    options = parser.parse_args()
    data, model = make(options.data)
    is_first = "LOCAL_RANK" not in os.environ  # Lightning starts this script again for the other rank
    folder = Path(tempfile.mkdtemp(prefix="deltas-")) if is_first else Path()
    sink = options.sink or os.environ.setdefault("EXAMPLE_SINK", str(folder / "parts"))
    if is_first:
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Event()
        server = spawn.Process(target=serve, args=(options.data, sink, folder / "served.json", ready), daemon=True)
        server.start()
        ready.wait(120)
    watch = Watch()
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=OverlapEmbeddingStrategy(),
        callbacks=[watch, EmbeddingDeltas(sink, every_n_steps=CUT_EVERY)],
        max_steps=NUM_STEPS,
        val_check_interval=VALIDATE_EVERY,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    if not is_first:
        return
    server.join(150)
    served = json.loads((folder / "served.json").read_text())
    served_auc = {int(step): auc for step, auc in served["auc"].items()}
    for step in sorted(served_auc.keys() & watch.auc.keys()):
        same = "equal" if served_auc[step] == watch.auc[step] else "DIFFERENT"
        print(f"step {step}: validation AUC trained {watch.auc[step]:.6f}, served {served_auc[step]:.6f}: {same}")
    ages = sorted(lag for *_, lag in served["lags"])
    print(f"age of the served tables: median {ages[len(ages) // 2]:.2f} s, at most {ages[-1]:.2f} s; see {options.out}")
    draw(options.out, watch.steps, served["lags"])


if __name__ == "__main__":
    main()
