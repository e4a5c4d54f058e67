"""What TorchRec names to a profiler in a fit and in a plain loop. Functions that ranks run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torchrec import KeyedJaggedTensor
from torchrec.distributed import comm_ops, dist_data, types, utils

from lightning_overlap import OverlapEmbeddingStrategy

from ..support import reference
from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_trainer

FIRST, NUM_PROFILED, NUM_STEPS = 4, 4, 12


def _own() -> dict[str, Any]:
    names = {place.__name__: getattr(place, "record_function", None) for place in (comm_ops, dist_data, types, utils)}
    return {**names, "sync": KeyedJaggedTensor.sync}


class _Profiles(Callback):
    """Profiles some steps, and counts what is named in the others."""

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.num_named = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.profiler.start()
        counted = not FIRST <= batch_idx < FIRST + NUM_PROFILED
        for place in (comm_ops, dist_data, types, utils):
            self.num_named += counted and isinstance(place.record_function("## nothing ##"), record_function)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST + NUM_PROFILED - 1:
            self.profiler.stop()


def of_a_fit(pipeline: str) -> tuple[set[str], int, list[str]]:
    """Return the names in the profiled steps, how many there were in others, and what is not TorchRec's afterwards."""
    before, watching = _own(), _Profiles()
    strategy = OverlapEmbeddingStrategy(pipeline, sharding="table_wise", replicate_tables=False)
    make_trainer(strategy, callbacks=[watching]).fit(Model(TABLE_WISE), datamodule=Batches(TABLE_WISE, NUM_STEPS))
    after = _own()
    return _names(watching.profiler), watching.num_named, [name for name in before if after[name] is not before[name]]


def of_a_plain_loop() -> set[str]:
    """Return the names in some steps."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        reference.train(TABLE_WISE, num_steps=2)
    return _names(profiler)


def _names(profiler: Any) -> set[str]:
    """Return those of its collectives; the all-to-all of sizes and the order of features are the package's own."""
    names = {event.name for event in profiler.events()}
    return {name for name in names if "all2all" in name.lower() and not name.endswith(("splits ##", "permute_gen ##"))}
