"""`Tuner`: tries arms during training, makes the same choice on all ranks, and keeps it."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..profiling import timestamps_of
from ..runtime import BatchSource, CudaStreams, FetchedBatch, StageTimer, Streams
from ..schedules import STREAMS, Schedule
from .arms import BRIDGE, FEWEST, TRIED, Arm, Auto, Block, choose, modes_on, reason, streams_of, table, times_of


class TimedSource:
    """Adds the time of a source's `fetch` to `waited_ms`."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self.waited_ms = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def fetch(self, index: int, timer: StageTimer | None) -> FetchedBatch | None:
        """Return a batch of the wrapped source."""
        start = time.perf_counter()
        fetched = self._source.fetch(index, timer)
        self.waited_ms += (time.perf_counter() - start) * 1e3
        return fetched


class Tuner:
    """The `Schedules` of a run that chooses a mode during training and then, on CUDA, a stream for its lookups."""

    depth = max(arm.schedule.depth for arm in modes_on("current"))

    def __init__(self, auto: Auto, stream: str) -> None:
        self._auto, self._first_stream = auto, stream
        self.forget()

    def forget(self) -> None:
        """Forget the choice, for another module."""
        self.arm = Arm(TRIED[0], self._first_stream)  # the current arm
        self.schedule = self.arm.schedule  # the current table: `BRIDGE` for one batch between two streams
        self.has_chosen = False
        self._tried: list[str] = []  # the tables of the trials, for the log
        self._trial: Iterator[None] | None = None
        self._arms: Sequence[Arm] = ()  # that are being tried
        self._source: TimedSource | None = None
        self._streams: CudaStreams | None = None
        self._next: Arm | None = None  # after the batch of `BRIDGE`

    def at(self, batch: int) -> Schedule:
        """Return the table for the next batch's iteration; all ranks switch after the same batch."""
        return self.schedule

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

        `gather` returns the values of all ranks, `tell` logs. A block has whole steps of `per_step` batches.
        `moves_lookups`: there are model-parallel tables; `splits`: the fit can split its backward.
        """
        self._gather, self._tell = gather, tell
        self._streams = streams if moves_lookups and isinstance(streams, CudaStreams) else None
        self._move_lookups(self.arm.stream)  # an earlier fit may have moved them
        if not self.has_chosen:
            self._clock: Any = timestamps_of(device)
            self._num_timed = -(-self._auto.block // per_step) * per_step
            self._block = self._auto.settle + self._num_timed  # batches of a block, including untimed batches
            self._num_before = self._auto.warm_up
            self._arms = modes_on(self.arm.stream, splits=splits)
            self._over: list[tuple[Arm, Any, Any, float, str]] = []
            self._walk(self._arms[0])
            self._trial = self._try()
            next(self._trial)

    def finish(self) -> None:
        """Log that no arm was chosen, if training ended before the choice."""
        if not self._arms:
            return
        modes = {arm.mode for arm in self._arms}
        what = "a mode" if len(modes) > 1 else f"a stream for {modes.pop()}"
        least, num_void = self._num_before + self._num_batches, sum(bool(void) for *_, void in self._over)
        text = (
            f"pipeline='auto': training ended before {what} was chosen. A choice takes {least} batches of a fit, "
            f"or up to {least + self._num_batches} if evaluations, saves, ends of epochs or data loading disturb "
            f"blocks. {len(self._over)} blocks of {self._block} batches were finished, {num_void} of them "
            "disturbed. Smaller values in pipeline=Auto(block=..., rounds=...) need fewer batches. All losses are "
            "exact."
        )
        self._tell("\n".join([text, *self._tried]))

    @property
    def first_words(self) -> str:
        """The description of the mode in a fit's first log line."""
        if self.has_chosen:
            return f"auto (chose {self.arm.mode})"
        least = self._num_before + self._num_batches
        return f"auto (tries {len(self._arms)} exact modes, chooses after at least {least} batches)"

    @property
    def _num_batches(self) -> int:
        """Batches to try the arms, without the rounds added to replace blocks that do not count."""
        return self._auto.rounds * len(self._arms) * self._block

    def stop(self) -> None:
        """End a fit; drop the measurements of an unfinished trial."""
        self._trial = self._source = self._streams = None
        self._arms, self._over, self._clock = (), [], None  # a trainer can be copied after a fit, but no event of CUDA
        if self._next is not None:
            self._walk(self._next)

    def timed(self, source: BatchSource) -> BatchSource:
        """Return a source of the same batches, timed if arms are tried."""
        if self._arms:
            source = self._source = TimedSource(source)
        return source

    def void(self, why: str) -> None:
        """Exclude the current block from the comparison; `why` is the reason."""
        self._void = why

    def step(self) -> None:
        """Count a trained batch on all ranks alike; a round's last batch waits for them, on CUDA for its device too."""
        if self._trial is not None:
            next(self._trial, None)

    # -- the trial: a generator, in which each `yield` is a trained batch ----------------------------------------------

    def _try(self) -> Iterator[None]:
        """Try the modes, then the streams of the chosen mode; tell the choice and turn to it."""
        for _ in range(self._auto.warm_up):
            yield
        while True:
            arms = self._arms
            found = yield from self._measure(arms)
            chosen = choose(found, self._auto.tie)
            self._tried.append(table(found, chosen))
            streams = [] if chosen is None or self._streams is None else streams_of(chosen)
            if len(streams) < 2 or len({arm.mode for arm in arms}) == 1:
                break
            self._num_before += len(self._over) * self._block
            self._arms, self._over = streams, []
        why = reason(found, self._auto.tie)
        arm = chosen or arms[0]
        self._arms, self.has_chosen = (), chosen is not None
        self._tell("\n".join([f"pipeline='auto': {arm.mode}, stream {arm.stream}: {why}.", *self._tried]))
        yield from self._turn_to(arm)

    def _measure(self, arms: Sequence[Arm]) -> Generator[None, None, dict[Arm, list[float]]]:
        """Return the times of arms after the rounds of `Auto`, or after up to twice as many if too few blocks count."""
        found: dict[Arm, list[float]] = {}
        for number in range(1, 2 * self._auto.rounds + 1):
            for place in range(len(arms)):  # round r begins with arm r, so that an arm follows different arms
                yield from self._time(arms[(number - 1 + place) % len(arms)])
            if number >= self._auto.rounds:
                self._clock.wait()
                ms: Callable[[Any], float] = self._clock.ms
                blocks = [
                    Block(arm, (ms(end) - ms(begin)) / self._num_timed, data_ms, void)
                    for arm, begin, end, data_ms, void in self._over
                ]
                found = times_of(self._gather(blocks))
                if all(len(times) >= FEWEST for times in found.values()):
                    break
        return found

    def _time(self, arm: Arm) -> Iterator[None]:
        self._void = ""
        yield from self._turn_to(arm)
        for _ in range(self._auto.settle):
            yield
        assert self._source is not None  # batches have come through it
        begin, waited_ms = self._clock.mark(), self._source.waited_ms
        for _ in range(self._num_timed):
            yield
        data_ms = (self._source.waited_ms - waited_ms) / self._num_timed
        self._over.append((arm, begin, self._clock.mark(), data_ms, self._void))

    def _turn_to(self, arm: Arm) -> Iterator[None]:
        """Switch to an arm at the next batch; to another stream after one batch of `BRIDGE`, without lookups ahead."""
        if arm.stream != self.arm.stream:
            self._next, self.schedule = arm, BRIDGE
            yield
        self._walk(arm)

    def _walk(self, arm: Arm) -> None:
        if arm.stream != self.arm.stream:
            self._move_lookups(arm.stream)
        self.arm, self.schedule, self._next = arm, arm.schedule, None

    def _move_lookups(self, stream: str) -> None:
        if self._streams is not None:
            self._streams.move_lookups(STREAMS[stream])

    def state_dict(self) -> dict[str, Any]:
        """Return the choice; empty before there is one."""
        arm = self._next or self.arm
        return {"mode": arm.mode, "stream": arm.stream, "tried": [*self._tried]} if self.has_chosen else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adopt a checkpoint's choice before the first batch of a fit; ignore an unknown choice."""
        mode, stream = state.get("mode"), state.get("stream")
        if mode not in TRIED or stream not in STREAMS:
            return
        self._trial, self._arms, self.has_chosen, self._tried = None, (), True, [*state["tried"]]
        self._walk(Arm(str(mode), str(stream)))
        self._tell(
            "\n".join([f"pipeline='auto': {mode}, stream {stream}, chosen before the checkpoint.", *self._tried])
        )
