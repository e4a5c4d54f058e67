"""`OverlapTimeline`: draws a few steps of every rank as a picture and a Perfetto trace."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from .. import profiling
from ..plugin import OverlapEmbeddingStrategy, first_words
from ..profiling import Category, Span
from .recording import Recording, join, watched_strategy

STEPS_LANE = "steps"  # where steps are marked; not drawn
AHEAD = 1  # steps recorded before the first drawn step, which uses what they issue


class OverlapTimeline(Callback):
    """Draws a few steps: a lane per stream or thread, a colour per batch, exposed waits marked.

    After these steps rank 0 writes `timeline.png` and `timeline.json.gz` (for Perfetto, chrome://tracing and
    `overlap-timeline`) with the spans of all ranks; the other ranks wait for it. On a CPU the host's clock times each
    stage. On CUDA torch.profiler does, and each rank also writes its trace, `timeline_rank<rank>.json.gz`. The log then
    names the files. At the end of the fit, after the table of `OverlapMonitor`, rank 0 prints a page for each rank:
    what the drawn steps did, and where they waited.

    Args:
        dirpath: Folder for the files; None: the first logger's folder, else the Trainer's `default_root_dir`.
        first_step: Number of steps before the first drawn step; more than the schedule looks ahead.
        num_steps: Steps to draw.

    Raises:
        ValueError: `first_step` is below 2, or `num_steps` below 1.
        ImportError: matplotlib is not installed; the extra `plot` installs it.
    """

    def __init__(self, dirpath: str | Path | None = None, first_step: int = 8, num_steps: int = 3) -> None:
        if first_step <= AHEAD or num_steps < 1:
            raise ValueError(
                f"first_step must be at least {AHEAD + 1} and num_steps at least 1, got {first_step} and {num_steps}."
            )
        profiling.check_matplotlib()  # now, not after the steps
        self.dirpath = dirpath
        self._first, self._last = first_step - AHEAD, first_step + num_steps
        self.recorded = range(self._first, self._last + 1)  # numbers, from 1 on, of the steps whose end is recorded
        self.drawn = self.recorded[1 + AHEAD :]  # numbers of the drawn steps
        self.files: list[Path] = []  # the written files, on rank 0
        self._pages = ""  # what is printed at the end
        self._num_steps = 0
        self._strategy: OverlapEmbeddingStrategy | None = None
        self._recording: Recording | None = None
        self._profiler: torch.profiler.profile | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._num_steps = 0
        self._strategy = watched_strategy(trainer, self)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = self._strategy
        if strategy is None:
            return
        self._num_steps += 1
        if self._profiler is not None:
            self._profiler.step()
        if self._recording is not None:
            self._recording.step(self._num_steps)
        if self._num_steps == self._first and strategy.root_device.type == "cuda":
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()
        elif self._num_steps == self._first:
            self._recording = join(strategy, pl_module, self)
            self._recording.step(self._num_steps)
        elif self._num_steps == self._last and (self._recording or self._profiler) is not None:
            self._finish(trainer, strategy)

    def _finish(self, trainer: Trainer, strategy: OverlapEmbeddingStrategy) -> None:
        log_dir = trainer.logger.log_dir if trainer.logger is not None else None
        folder = Path(strategy.broadcast(str(self.dirpath or log_dir or trainer.default_root_dir)))
        if self._profiler is not None:
            torch.cuda.synchronize(strategy.root_device)  # running kernels belong to the steps
            self._profiler.stop()
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"timeline_rank{strategy.global_rank}.json.gz"
            with tempfile.TemporaryDirectory() as scratch:  # if the profiler fails, it leaves a file behind
                written = Path(scratch) / path.name
                self._profiler.export_chrome_trace(str(written))
                path.write_bytes(written.read_bytes())
            spans = next(iter(profiling.read_trace(path).values()))
        else:
            assert self._recording is not None
            window = self._recording.window
            (begin, _), (_, end) = window(self._first + 1), window(self._last)
            spans = [one for one in self._recording.recorder.spans() if one.end_ms > begin and one.start_ms < end]
            # A step lasts from the end of a batch to the end of the next, as for `OverlapMonitor`.
            marks = {f"ProfilerStep#{number - 1}": window(number) for number in self.drawn}
            spans += [Span(*step, Category.HOST, STEPS_LANE, name) for name, step in marks.items()]
            self._recording.leave(self)
        self._profiler = self._recording = None
        spans = profiling.with_mode(spans, profiling.overlapped_by(strategy.schedule))
        ranks = dict(enumerate(strategy.gather(spans)))
        if trainer.is_global_zero:
            try:
                self._write(folder, strategy, ranks)
            except OSError as err:  # a missing picture must not end the training
                warnings.warn(f"OverlapTimeline could not write into {folder}: {err}", stacklevel=2)

    def _write(self, folder: Path, strategy: OverlapEmbeddingStrategy, ranks: dict[Any, list[Span]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{strategy.schedule.name}, stream {strategy.stream}, {len(ranks)} ranks"
        picture, trace = (folder / f"timeline.{suffix}" for suffix in ("png", "json.gz"))
        profiling.write_png(picture, ranks, num_steps=len(self.drawn), title=title)
        profiling.write_trace(trace, ranks)
        self.files = [picture, trace]
        report = profiling.as_report({rank: profiling.summarize(spans) for rank, spans in ranks.items()})
        self._pages = f"{report}\nTimeline: {picture}, {trace}"
        first_words.tell(f"OverlapTimeline has drawn steps {self.drawn[0]} to {self.drawn[-1]}: {picture}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._strategy is not None and self._num_steps < self._last:
            warnings.warn(
                f"OverlapTimeline drew nothing: it needs {self._last} steps, training had {self._num_steps}. "
                "Lower first_step or num_steps.",
                stacklevel=2,
            )
        self._forget()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print()  # here every callback has had its `on_train_end`, in which OverlapMonitor prints

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._forget()
        self._print()

    def _print(self) -> None:
        if self._pages:
            print(self._pages, flush=True)
        self._pages = ""

    def _forget(self, **__: Any) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        if self._recording is not None:
            self._recording.leave(self)
        self._profiler = self._recording = None
