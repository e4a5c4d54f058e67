"""Losses that are not finite on some rank, with the strategy's option `nonfinite`: their backward trains nothing."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..compat.torch import num_writes
from ..distributed import Consensus
from ..sparse import LossGuard
from ..text import check_known, some
from .first_words import LOGGER

OnNonfinite: TypeAlias = Literal["skip", "error"]
Nonfinite: TypeAlias = OnNonfinite | None
"""What to do about a loss that is not finite; None: nothing."""


def check_nonfinite(nonfinite: Nonfinite) -> None:
    """Raise a ValueError about an unknown choice."""
    if nonfinite is not None:
        check_known("choice", nonfinite, get_args(OnNonfinite), "nonfinite: ")


class NonfiniteLosses:
    """Compares the losses of all ranks, and lets a backward train nothing if one of them is not finite.

    The ranks exchange a flag each before every backward. On a CPU the host then knows the answer. On CUDA it stays on
    the device, where it decides about the gradients that are sent to the tables' ranks, and the host reads it after it
    has issued the backward: by then only the forward need have ended.

    Gradients of dense weights are reduced as ever. Afterwards those of a backward that trains nothing are taken away:
    a weight that had none, or zeros of `zero_grad(set_to_none=False)`, has none, which every optimizer leaves alone;
    one that had gradients of earlier backwards, zeros as well, has got zeros on top.

    `consensus` has the messages between hosts; None on one rank, and for a module without tables.
    """

    def __init__(
        self, action: OnNonfinite, trainer: Trainer, device: torch.device, consensus: Consensus | None
    ) -> None:
        self._action, self._trainer, self._device, self._consensus = action, trainer, device, consensus
        self.guard = LossGuard()
        self.num_found = 0  # backwards of this fit that have trained nothing
        self._knows_late = device.type != "cpu"  # whether the host reads the flags after the backward was issued
        self._is_first = trainer.global_rank == 0
        self._flags: Tensor | None = None  # by rank, whether its loss is not finite: `(num_ranks,)`, int32
        self._work: dist.Work | None = None  # their exchange
        self._copy: tuple[Tensor, Any] | None = None  # the flags on their way to the host, and an event after them
        self._had_none: list[Tensor] = []  # dense weights without a gradient before the backward that runs
        self._hooks: list[RemovableHandle] = []  # of the others
        # Weight -> its gradient after the last backward that trained, and how often that was written by then: the same
        # gradient, not written since, is one that an optimizer has to see.
        self._trained: dict[Tensor, tuple[int, int]] = {}
        self._to_keep: list[Tensor] = []  # dense weights with such a gradient before the backward that runs
        self._has_ended = False

    def compare(self, loss: Tensor) -> None:
        """Start to compare the loss of the coming backward, a tensor of any shape; all ranks call this alike."""
        self.forget()
        is_bad = (~torch.isfinite(loss.detach())).any()
        if self._consensus is not None and self._device.type == "cpu":  # apart from the traffic of gradients
            self._flags, self._work = self._consensus.exchange([int(is_bad)])
            return
        self._flags = torch.zeros(self._trainer.world_size, dtype=torch.int32, device=self._device)
        self._flags[self._trainer.global_rank] = is_bad
        if self._trainer.world_size > 1:
            self._work = dist.all_reduce(self._flags, async_op=True)

    def begin_backward(self) -> None:
        """Prepare the backward, which runs on all ranks alike: it sends zeros if a loss is not finite."""
        assert self._flags is not None
        if self._work is not None:
            self._work.wait()  # on CUDA the compute stream waits, not the host
        if self._knows_late:
            self.guard.finite = ~self._flags.any()
            self._copy = _copy_to_host(self._flags)
        else:
            self.guard.finite = not self._flags.any()
            if self.guard.finite:
                return
        for weight in self._dense_weights():
            if weight.grad is None:
                self._had_none.append(weight)
                continue
            if self._trained.get(weight) == _state_of(weight.grad):
                self._to_keep.append(weight)
            if weight.requires_grad:
                self._hooks.append(weight.register_hook(self.guard.pass_on))

    def end_backward(self) -> None:
        """Take the gradients of a backward away if a loss is not finite; with "error" raise a RuntimeError instead."""
        flags = self._flags
        if flags is None:  # of a backward that the trainer does not know
            return
        if self._copy is not None:
            flags, event = self._copy
            if event is not None:
                event.synchronize()
        bad = [rank for rank, flag in enumerate(flags.tolist()) if flag]
        had_none, to_keep = self._had_none, self._to_keep
        self.forget()
        if not bad:
            self._note_trained(self._dense_weights())
            return
        if self._action == "error":
            raise RuntimeError(self._error(bad))
        for weight in had_none:
            weight.grad = None
        kept = set(to_keep)
        for weight in self._dense_weights():
            gradient = weight.grad
            if weight not in kept and gradient is not None and not gradient.is_sparse and not gradient.any():
                weight.grad = None  # zeroed by zero_grad(set_to_none=False)
        self._note_trained(to_keep)  # the zeros on top were written
        self._count(bad)

    def forget(self) -> None:
        """Forget a backward, which may have failed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._had_none, self._to_keep = [], [], []
        self.guard.finite = self._flags = self._work = self._copy = None

    def end(self) -> None:
        """End the fit: say on rank 0 how many backwards have trained nothing."""
        self.forget()
        if self.num_found and self._is_first and not self._has_ended:
            logging.getLogger(LOGGER).warning(
                "lightning_overlap: the loss of %d backward%s of this fit was not finite; %s trained nothing.",
                self.num_found,
                *(("", "it") if self.num_found == 1 else ("s", "they")),
            )
        self._has_ended = True

    def _note_trained(self, weights: Iterable[Tensor]) -> None:
        """Note the gradients of weights after a backward that trained."""
        self._trained = {weight: _state_of(weight.grad) for weight in weights if weight.grad is not None}

    def _dense_weights(self) -> Iterator[Tensor]:
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _count(self, bad: list[int]) -> None:
        self.num_found += 1
        if self._is_first and self.num_found & (self.num_found - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            text = "lightning_overlap: %s. It trains nothing (nonfinite='skip'); %d so far in this fit."
            logging.getLogger(LOGGER).warning(text, self._problem(bad), self.num_found)

    def _problem(self, bad: list[int]) -> str:
        ranks = f"rank{'s' * (len(bad) > 1)} {some(map(str, bad))}"
        trainer = self._trainer
        batch, epoch = trainer.fit_loop.epoch_loop.batch_idx, trainer.current_epoch
        place = f"batch {batch} of epoch {epoch} (global step {trainer.global_step})"
        return f"the loss of {place} is not finite on {ranks}"

    def _error(self, bad: list[int]) -> str:
        return (
            f"{self._problem(bad)}. Tables, dense weights and optimizers are as after the batch before. Look at that "
            "batch and at the learning rates. With nonfinite='skip' such a batch trains nothing and the fit goes on."
        )


def _state_of(gradient: Tensor) -> tuple[int, int]:
    """Return which tensor a gradient is, and how often it was written."""
    return id(gradient), num_writes(gradient)


def _copy_to_host(flags: Tensor) -> tuple[Tensor, Any]:
    """Start to copy flags to the host; return the copy and an event after it, None if it is there."""
    if not flags.is_cuda:
        return flags, None
    copy = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
    copy.copy_(flags, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copy, event
