"""Stale rows as `OverlapMonitor` tells them, and as a count of its own finds them. Functions that ranks run."""

import contextlib
import io
from typing import Any

import torch

from lightning_overlap import OverlapMonitor

from ..callbacks.monitors import Kept
from ..support.cases import Batches, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer

PREFIX = "overlap/stale_rows/"


def count_raw_batches(case: Case, num_ranks: int, batch: int, unseen: range) -> dict[str, tuple[int, int]]:
    """Count rows read stale and rows read with sets, from what all ranks' loaders give."""

    def rows(table: Any, index: int) -> set[int]:
        found: set[int] = set()
        for rank in range(num_ranks):
            kjt = make_batch(case, index, rank).inputs["sparse"][0]
            for feature in table.features:
                found |= set(kjt[feature].values().tolist())
        return found

    counts = {}
    for table in case.tables:
        read = rows(table, batch)
        written = set().union(*(rows(table, index) for index in unseen))
        if table.sharding != "data_parallel" and read:
            counts[table.name] = len(read & written), len(read)
    return counts


def told(
    case: Case, num_steps: int, *, every_n_steps: int | None = 3, epochs: int = 1, **options: Any
) -> dict[str, Any]:
    """Train with and without a monitor; return the shares by logged step, the losses of both, and what was printed."""
    losses, logger, printed = [], Kept(), io.StringIO()
    monitor = OverlapMonitor(every_n_steps=every_n_steps, audit=False)
    for callbacks in ([], [monitor]):
        model = Model(case)
        strategy = make_strategy(model, **options)
        trainer = make_trainer(strategy, callbacks=callbacks, logger=logger if callbacks else False, max_epochs=epochs)
        with contextlib.redirect_stdout(printed):
            trainer.fit(model, datamodule=Batches(case, num_steps))
        losses.append(torch.stack(model.losses))
    shares = {step: values for values, step in logger.logged if any(name.startswith(PREFIX) for name in values)}
    return {
        "shares": {
            step: {name.removeprefix(PREFIX): share for name, share in one.items()} for step, one in shares.items()
        },
        "same_losses": torch.equal(*losses),
        "totals": monitor.stale_rows,
        "printed": printed.getvalue(),
        "names": {name for values, _ in logger.logged for name in values},
    }


class Keeps(OverlapMonitor):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.held: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        in_flight = trainer.strategy._executor.queue.in_flight.values()
        states = [state for batch in in_flight for state in batch.modules.values()]
        self.held.append(sum(state.ids is not None for state in states))
        super().on_train_batch_end(trainer, *args)


def held_ids(case: Case, num_steps: int, staleness: int, every_n_steps: int) -> tuple[list[int], list[int]]:
    """Return of how many batches the ids were held at the end of each step, and the steps that were counted."""
    logger, monitor = Kept(), Keeps(every_n_steps=every_n_steps, audit=False, table=False)
    model = Model(case)
    strategy = make_strategy(model, "async_lookup", staleness=staleness)
    make_trainer(strategy, callbacks=[monitor], logger=logger).fit(model, datamodule=Batches(case, num_steps))
    counted = [step for values, step in logger.logged if any(name.startswith(PREFIX) for name in values)]
    return monitor.held, [step for step in counted if step is not None]
