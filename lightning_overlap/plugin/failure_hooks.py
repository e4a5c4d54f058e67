"""The hooks of a strategy when a rank fails: each rank reports the first error, and no rank waits for a lost one."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ..compat.lightning import tear_down
from ..distributed import (
    ANSWER_S,
    CALLS,
    Consensus,
    FirstCause,
    default_store,
    groups,
    print_last,
    remember_sockets,
    timed_out,
)
from ..tables import holds_sequences, sharded_modules
from ..text import some
from .checkpoint_hooks import SavesShards

SAVE_TIMEOUT_S = 20  # how long a rank that failed waits for the others to fail before it saves with them


class FailsTogether(SavesShards):
    """The hooks of a strategy around errors, and around the work of callbacks that handle an error."""

    @override
    def forget_run(self) -> None:
        super().forget_run()
        self._default_group: dist.ProcessGroup | None = None  # of the newest run
        self._first_cause: FirstCause | None = None  # the ranks' messages about the first error, in the store
        self._all_failed = False  # in the same place

    @override
    def setup_environment(self) -> None:
        with remember_sockets(), groups.destroyed_at_exit():
            try:
                super().setup_environment()
            except dist.DistStoreError as err:
                err.add_note(
                    f"The processes did not find each other within timeout={self.timeout_s:g} s, which includes their "
                    "start (imports, and loading on a busy machine). Give the strategy a larger timeout, or see "
                    "whether all processes were started."
                )
                raise
        if (world := dist.group.WORLD if dist.is_initialized() else None) is not self._default_group:
            self.leave_groups()  # a Trainer is used again in a new process group
            self._default_group = world
        # All ranks come here, so their messages begin anew with each run.
        store = default_store(ANSWER_S)
        self._first_cause = None if store is None else FirstCause(store, self.global_rank, store.next_number("runs"))
        self._all_failed = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        _name_unused_parameters(exception, self.model, type(self).__name__)
        _name_sequences_in_place(exception, self.lightning_module)
        super().on_exception(exception)
        self.note_cause(exception)
        walker = self._walker
        if walker is not None and (missing := walker.updates.settle(SAVE_TIMEOUT_S)) is not None:
            exception.add_note(f"{missing}, the dense part has it: resume from a checkpoint")
        if self._first_cause is not None:
            print_last(exception, self._first_cause)
        self.stop_run()
        groups.forget()
        self.finish_save(exception)
        if self._first_cause is not None:
            self._first_cause.put_last(exception)

    def note_cause(self, exception: BaseException) -> None:
        """Add to an error where in the training this rank was, and the error of the rank that failed first."""
        if timed_out(exception):
            exception.add_note(
                f"Another rank did not answer within {self.timeout_s:g} s: see its last message. If it is only slow, "
                "pass a longer timeout= to the strategy."
            )
        walker = self._walker
        place = "outside of training" if walker is None else walker.place
        if self._waits_in is not None:
            place += f", where it {CALLS[self._waits_in]}"
        if walker is not None:
            exception.add_note(f"rank {self.global_rank} was {place}")
        if self._first_cause is not None:
            self._first_cause.note(exception, place)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        self._first_error_first("no checkpoint of it was saved", save)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._save_together_or_not()
        if self.world_size == 1:
            return obj
        # `Trainer(max_time=...)` broadcasts for every batch: with NCCL the host would wait for the device each time.
        group = self._consensus
        if self._interrupted and self.checkpoint_group is not None:
            self.finish_save(sys.exception())  # the saving thread uses `checkpoint_group` until then
            group = Consensus(self.checkpoint_group)  # in the group of the run's consensus, polls may be under way
        broadcast = super().broadcast if group is None else group.broadcast
        return self._first_error_first("a broadcast that followed it failed", partial(broadcast, obj, src))

    def _save_together_or_not(self) -> None:
        """Let callbacks save in `on_exception` only if all ranks failed in one place; else raise the run's error."""
        first = sys.exception()
        if first is None or self._first_cause is None or self._all_failed or not self._interrupted:
            return
        # Shorter than the group's timeout: a rank that fails because it has waited for this one does not count.
        timeout_s = min(SAVE_TIMEOUT_S, self.timeout_s / 2)
        walker = self._walker
        place = "" if walker is None else f"{walker.place} of {walker.batches.num_fetched}"
        self._all_failed = self._first_cause.all_failed(self.world_size, place, timeout_s)
        if not self._all_failed:
            first.add_note(f"no checkpoint of it was saved: other ranks did not fail there within {timeout_s:g} s")
            raise self._torn_down(first)

    def _first_error_first(self, what: str, action: Callable[[], Any]) -> Any:
        """Return `action()`; if it fails while a run's error is handled, raise that error with a note (`what`)."""
        first = sys.exception() if self._interrupted else None
        try:
            return action()
        except Exception as err:
            if first is None or err is first:
                raise
            first.add_note(f"{what}: {type(err).__name__}: {err}")
        raise self._torn_down(first)

    def _torn_down(self, first: BaseException) -> BaseException:
        """Do what Lightning does after the callbacks' `on_exception`; return the run's error."""
        trainer = self.running_trainer
        self.on_exception(first)
        if trainer is not None:
            tear_down(trainer)
        return first


def _name_sequences_in_place(exception: BaseException, module: nn.Module | None) -> None:
    """Tell what to do instead in autograd's error about embeddings of sequences that a step has changed in place."""
    text = str(exception.args[0]) if exception.args else ""
    if module is None or "Such functions do not allow the output views to be modified inplace" not in text:
        return
    if names := [name for name, one in sharded_modules(module).items() if holds_sequences(one)]:
        exception.args = (
            f"a step has changed a view in place that autograd allows nobody to change. The embeddings of "
            f"{some(map(repr, names))} are such views: a collection of sequences cuts the embeddings of all features "
            "out of one tensor. Change a copy, such as embeddings[feature].values().clone(), or take an operator that "
            f"is not in place (x * 2 for x.mul_(2), masked_fill for x[mask] = 0). PyTorch's error: {text}",
        )


def _name_unused_parameters(exception: BaseException, model: Any, strategy: str) -> None:
    """Reword DistributedDataParallel's error about parameters without a gradient: Lightning would name DDPStrategy."""
    if not any("Expected to have finished reduction in the prior iteration" in str(arg) for arg in exception.args):
        return
    without = []
    if isinstance(model, DistributedDataParallel):
        named = [(name, p) for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore]
        if any(p.grad is not None for _, p in named):  # else the step's gradients are gone
            without = [name for name, p in named if p.requires_grad and p.grad is None]
    which = f": {some(without)}" if without else ", here or on another rank"
    exception.args = (
        f"some dense parameters got no gradient from the loss of training_step{which}. If this is intended, or if a "
        f"step has several backwards, give the strategy DistributedDataParallel's argument {strategy}"
        "(find_unused_parameters=True), which looks for them in every backward. "
        f"{strategy}(static_graph=True) is faster, but needs steps of one backward in which every batch of every rank "
        "uses the same parameters (DistributedModelParallel's default). Or set requires_grad=False.",
    )
