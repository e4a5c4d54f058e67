"""The host-device syncs of steps in the middle of a fit. Functions that ranks run."""

from typing import Any
from unittest import mock

import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_overlap.profiling.host_syncs import HostSync, record_host_syncs

from ..support.cases import TABLE_WISE, Batches, Case, Model
from ..support.fits import make_strategy, make_trainer

FIRST, NUM = 7, 3  # steps that are watched: steady state


class _Watch(Callback):
    """Notes the syncs from the start of one step to the start of another: all that the loop does in between."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.watched = record_host_syncs()
            self.found = self.watched.__enter__()
        if batch_idx == FIRST + NUM:
            self.watched.__exit__(None, None, None)


def of_steps(case: Case, pipeline: str | None) -> list[str]:
    """Return `operator: innermost call` of every sync, without reads of what is kept on the host in any case."""
    model = Model(case, fused_optimizer=pipeline is not None)
    strategy: Any = DDPStrategy() if pipeline is None else make_strategy(model, pipeline)
    watch = _Watch()
    make_trainer(strategy, callbacks=[watch]).fit(model, datamodule=Batches(case, FIRST + NUM + 4))
    return [f"{sync.operator}: {_innermost(sync)}" for sync in watch.found if not sync.reads_host]


def _innermost(sync: HostSync) -> str:
    frame = next(frame for frame in reversed(sync.stack) if _is_python_of_somebody(frame.filename))
    return f"{frame.filename.rsplit('/', 1)[-1]} {frame.name}"


def broadcasts_on_the_default_group(**kwargs: Any) -> int:
    """Return how many objects were broadcast among all ranks by the group of the gradients, in a fit."""
    model = Model(TABLE_WISE)
    trainer = make_trainer(make_strategy(model), **kwargs)
    original, groups = dist.broadcast_object_list, []

    def broadcast(objects: Any, src: int = 0, group: Any = None, **options: Any) -> None:
        if FIRST <= trainer.global_step < FIRST + NUM:
            groups.append(group)
        original(objects, src, group=group, **options)

    with mock.patch.object(dist, "broadcast_object_list", broadcast):
        trainer.fit(model, datamodule=Batches(TABLE_WISE, FIRST + NUM + 4))
    assert groups, "nothing was broadcast at all"
    return sum(group in (None, dist.group.WORLD) for group in groups)


def _is_python_of_somebody(file: str) -> bool:
    *folders, name = file.split("/")
    is_of_somebody = not {"lightning_overlap", "lightning", "torchrec", "tests"}.isdisjoint(folders)
    return is_of_somebody and name not in ("host_syncs.py", "types.py")
