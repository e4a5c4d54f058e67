"""`Tuner`: tries arms during training, makes the same choice on all ranks, and keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..profiling import timestamps_of
from ..runtime import BatchSource, CudaStreams, FetchedBatch, StageTimer, Streams
from ..schedules import STREAMS, Schedule
from .arms import BRIDGE, TRIED, Arm, modes_on, streams_of
from .auto import Auto
from .trial import FEWEST, Trial, as_fast, choose, table, times_of


class TimedSource:
    """Wraps a source of batches and adds the time of `fetch` to `waited_ms`."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self.waited_ms = 0.0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped source."""
        return getattr(self._source, name)

    def fetch(self, index: int, timer: StageTimer | None) -> FetchedBatch | None:
        """Return a batch of the wrapped source."""
        start = time.perf_counter()
        fetched = self._source.fetch(index, timer)
        self.waited_ms += (time.perf_counter() - start) * 1e3
        return fetched


class Tuner:
    """Chooses a mode and a stream during training; an implementation of the executor's `Schedules`.

    Like `SequentialSchedule`, it keeps batches in flight when it switches, so all losses are exact. It first tries
    modes on one stream, then, on CUDA, all streams with the chosen mode. All ranks choose from the gathered
    measurements of all ranks.

    Args:
        auto: The options of the trial.
        stream: The stream of early lookups while modes are tried: a name of `STREAMS`.
    """

    depth = max(arm.schedule.depth for arm in modes_on("current"))
    """The largest number of batches in flight at once."""

    def __init__(self, auto: Auto, stream: str) -> None:
        self._auto, self._first_stream = auto, stream
        self.forget()

    def forget(self) -> None:
        """Forget the choice, for another module."""
        self.arm = Arm(TRIED[0], self._first_stream)
        """The current arm."""
        self.schedule = self.arm.schedule
        """The current table: the arm's, or `BRIDGE` for one batch between two streams."""
        self.has_chosen = False
        self._tried: list[str] = []
        self._trial: Trial | None = None
        self._source: TimedSource | None = None
        self._streams: CudaStreams | None = None
        self._next: Arm | None = None
        self._num_left = 0
        self._num_before = 0  # batches before this trial

    def at(self, batch: int) -> Schedule:
        """Return the table for the next batch's iteration; all ranks switch after the same batch."""
        return self.schedule

    # -- a fit --------------------------------------------------------------------------------------------------------

    def begin(
        self,
        device: torch.device,
        streams: Streams,
        gather: Callable[[Any], list[Any]],
        tell: Callable[[str], None],
        *,
        per_step: int = 1,
        moves_lookups: bool = True,
        splits: bool = True,
    ) -> None:
        """Begin a fit: try arms, unless a choice has been made.

        Args:
            device: The device of the fit.
            streams: The streams of the fit.
            gather: Returns the values of all ranks, by rank.
            tell: Logs a message.
            per_step: Batches per optimizer step.
            moves_lookups: Whether there are model-parallel tables, whose lookups run on the lookup stream.
            splits: Whether the fit can split its backward; otherwise `split_backward` is not tried.
        """
        self._gather, self._tell, self._per_step = gather, tell, per_step
        self._streams = streams if moves_lookups and isinstance(streams, CudaStreams) else None
        self._move_lookups(self.arm.stream)  # an earlier fit may have moved them
        if not self.has_chosen:
            self._num_left = self._num_before = self._auto.warm_up
            self._trial = Trial(modes_on(self.arm.stream, splits=splits), self._auto, timestamps_of(device), per_step)
            self._walk(self._trial.arm)

    def finish(self) -> None:
        """Log that no arm was chosen, if training ended before the choice."""
        if self._trial is not None:
            trial, (num_rounds, num_blocks) = self._trial, self._trial.num_over
            what = "a mode" if self._tries_modes else f"a stream for {trial.arm.mode}"
            num_over = num_rounds * len(trial.arms) + num_blocks
            least = self._num_before + trial.num_batches
            text = (
                f"pipeline='auto': training ended before {what} was chosen. A choice takes {least} batches of a fit, "
                f"or up to {least + trial.num_batches} if evaluations, saves, ends of epochs or data loading disturb "
                f"blocks. {num_over} blocks of {trial.block} batches were finished, {trial.num_void} of them "
                "disturbed. Smaller values in pipeline=Auto(block=..., rounds=...) need fewer batches. All losses are "
                "exact."
            )
            self._tell("\n".join([text, *self._tried]))

    @property
    def first_words(self) -> str:
        """The description of the mode in a fit's first log line."""
        if self.has_chosen:
            return f"auto (chose {self.arm.mode})"
        assert self._trial is not None
        num_batches = self._num_before + self._trial.num_batches
        return f"auto (tries {len(self._trial.arms)} exact modes, chooses after at least {num_batches} batches)"

    @property
    def _tries_modes(self) -> bool:
        return self._trial is not None and len({arm.mode for arm in self._trial.arms}) > 1

    def stop(self) -> None:
        """End a fit; drop the measurements of an unfinished trial."""
        self._trial = self._source = self._streams = None
        if self._next is not None:
            self._walk(self._next)

    def timed(self, source: BatchSource) -> BatchSource:
        """Return a source of the same batches, timed if arms are tried."""
        if self._trial is None:
            return source
        self._source = TimedSource(source)
        return self._source

    def void(self, why: str) -> None:
        """Exclude the current block from the comparison; `why` is the reason."""
        if self._trial is not None and not self._num_left:
            self._trial.void(why)

    def step(self) -> None:
        """Count a trained batch; all ranks call this at the same point.

        The last batch of a round waits for the other ranks, and on CUDA for the device.
        """
        trial = self._trial
        if self._next is not None:  # after the batch of BRIDGE no lookup is ahead
            self._walk(self._next)
        elif trial is None:
            return
        elif self._num_left:
            self._num_left -= 1
        elif trial.step(0.0 if self._source is None else self._source.waited_ms):
            num_rounds, num_blocks = trial.num_over
            if not num_blocks and num_rounds >= self._auto.rounds:
                self._compare(trial, may_go_on=num_rounds < 2 * self._auto.rounds)
            if self._trial is not None:
                self._turn_to(self._trial.arm)

    # -- switches -----------------------------------------------------------------------------------------------------

    def _turn_to(self, arm: Arm) -> None:
        """Switch to an arm at the next batch; if its stream differs, after one batch of `BRIDGE`."""
        if arm.stream == self.arm.stream:
            self._walk(arm)
        else:
            self._next, self.schedule = arm, BRIDGE

    def _walk(self, arm: Arm) -> None:
        if arm.stream != self.arm.stream:
            self._move_lookups(arm.stream)
        self.arm, self.schedule, self._next = arm, arm.schedule, None

    def _move_lookups(self, stream: str) -> None:
        if self._streams is not None:
            self._streams.move_lookups(STREAMS[stream])

    # -- the choice ---------------------------------------------------------------------------------------------------

    def _compare(self, trial: Trial, *, may_go_on: bool) -> None:
        """Choose an arm; then try its streams or end the trial.

        With `may_go_on` there is another round instead if an arm has fewer than `FEWEST` blocks.
        """
        found = times_of(self._gather(trial.blocks()))
        if may_go_on and any(len(times) < FEWEST for times in found.values()):
            return
        chosen = choose(found, self._auto.tie)
        self._tried.append(table(found, chosen))
        streams = [] if chosen is None or self._streams is None else streams_of(chosen)
        if len(streams) > 1 and self._tries_modes:
            self._num_before += trial.num_over[0] * trial.num_batches // self._auto.rounds
            self._trial = Trial(streams, self._auto, trial.clock, self._per_step)
            return
        why = "it is the fastest"
        if len(as_fast(found, self._auto.tie)) > 1:
            why = (
                f"no other is more than {self._auto.tie:.0%} faster; among equally fast modes it uses the least memory"
            )
        if chosen is None:
            why = "no choice was made, because evaluations, saves, ends of epochs or data loading disturbed every block"
        self._trial, self.has_chosen = None, chosen is not None
        arm = chosen or trial.arms[0]
        self._turn_to(arm)
        self._tell("\n".join([f"pipeline='auto': {arm.mode}, stream {arm.stream}: {why}.", *self._tried]))

    # -- in a checkpoint ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the choice; empty before there is one."""
        arm = self._next or self.arm
        return {"mode": arm.mode, "stream": arm.stream, "tried": [*self._tried]} if self.has_chosen else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adopt a checkpoint's choice before the first batch of a fit; ignore an unknown choice."""
        mode, stream = state.get("mode"), state.get("stream")
        if mode not in TRIED or stream not in STREAMS:
            return
        self._trial, self.has_chosen, self._tried = None, True, [*state["tried"]]
        self._walk(Arm(str(mode), str(stream)))
        self._tell(
            "\n".join([f"pipeline='auto': {mode}, stream {stream}, chosen before the checkpoint.", *self._tried])
        )
