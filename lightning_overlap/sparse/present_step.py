"""The user's step that runs, and its backward: which batch it has, and what is kept until the backward is over."""

from collections.abc import Callable
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torch import call_after_backward, modes_watch
from ..runtime import Flight, Streams, tensors_in
from ..schedules import StreamName
from ..tables import SentInput


class PresentStep:
    """State of one step of the user's, from its begin to the end of its backward."""

    def __init__(self, streams: Streams, *, sends_within: bool) -> None:
        self._streams, self._sends_within = streams, sends_within
        self.number = 0  # steps begun
        self.current: Any = None  # the `SparseBatch` whose step runs, until the step returns
        self.awaiting_backward: Any = None  # the same batch, until its backward is over
        self._send_next: Callable[[], None] | None = None  # until it was called, and until the step returns
        # Answers that `checkpoint()` may ask for again until the backward is over, by module and `id` of the input.
        self.kept_answers: dict[tuple[str, int], tuple[SentInput, KeyedJaggedTensor, Any]] = {}
        self.held_gradients: list[torch.Tensor] = []  # of embeddings, until the backward is over

    def begin(self, flight: Flight, send_next: Callable[[], None]) -> None:
        """Begin the step of a batch; `send_next` sends sizes and ids of coming batches."""
        self.number += 1
        self._forget_kept()
        self.current = self.awaiting_backward = flight
        # A mode that watches operators (of a host-sync audit) would not see the read of the sizes within the step.
        self._send_next = send_next if self._sends_within and not modes_watch() else None

    def end(self) -> None:
        """End the step; its backward may follow."""
        self.current = self._send_next = None

    def end_backward(self, flight: Flight) -> None:
        """Let go of what only the backward of a batch has read."""
        self._forget_kept()
        if self.awaiting_backward is flight:
            self.awaiting_backward = None

    def abandon(self) -> None:
        """Forget the step."""
        self.current = self.awaiting_backward = self._send_next = None
        self._forget_kept()

    def _forget_kept(self) -> None:
        self.kept_answers.clear()
        self.held_gradients.clear()

    def send_next_if_idle(self) -> None:
        """Send sizes and ids of coming batches, once all early embeddings of the step have arrived."""
        send_next = self._send_next
        if send_next is None:
            return
        flights = self.current.modules.values()
        if all(one.embeddings is None or one.received is not None for one in flights):
            self._send_next = None
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                send_next()

    def order_backward(self, embeddings: Any, *, in_step: bool) -> None:
        """Order a backward through embeddings of the lookup stream with the compute stream.

        Autograd adds in place into a gradient that nobody else on the host holds. The lookup stream may still have to
        read it then: its node was launched, and has let go of the gradient. So gradients are held until the backward is
        over. Source: `can_accumulate_inplace`.

        With `in_step` False no walker sees that end: between two steps, in an evaluation, or if a module does its own
        fetching. Then the compute stream waits for the update of the tables at the end of the backward.
        """
        if not self._streams.is_async or self._streams.lookup is StreamName.COMPUTE:
            return
        for tensor in tensors_in(embeddings):
            if tensor.requires_grad:
                tensor.register_hook(self.held_gradients.append)
                if not in_step:
                    tensor.register_hook(self._end_after_backward)

    def _end_after_backward(self, gradient: torch.Tensor) -> None:
        call_after_backward(self._end_backward_outside_step)

    def _end_backward_outside_step(self) -> None:
        self.held_gradients.clear()
        self._streams.order(self._streams.lookup, then=StreamName.COMPUTE)
