"""Tables that follow a training: whole cuts are applied while others read."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..parts import TRAILER_SIZE, WEIGHT, Chain, CutError, Move, Part, PartError, PartName, as_words, part_of
from ..sinks import DeltaSink, resolve_sink
from .read_lock import ReadLock
from .served_tables import ServedTables, check_whole

_log = logging.getLogger(__name__)
_FORMAT = "embedding_deltas.replica"
_MOST_TIMES = 3
"""An update may come to the same cut so often, as when parts are written anew meanwhile; beyond that it is circling."""


class Position(NamedTuple):
    """What a replica has applied.

    Attributes:
        generation: Number of the fit that wrote the cut (see `parts/form.py`).
        step: Batches that had been trained at the cut.
        num_pending: How many of these had not yet updated the tables.
        global_step: Steps of the optimizers at the cut.
        time: When the training made the cut, in seconds since the Unix epoch.
    """

    generation: int
    step: int
    num_pending: int
    global_step: int
    time: float

    @property
    def cut(self) -> tuple[int, int]:
        """Generation and step."""
        return self.generation, self.step


class Lag(NamedTuple):
    """How far a replica lags behind its training.

    Attributes:
        steps: Batches from the cut that is applied to the newest whole one in the last listing of the sink.
        seconds: Time since the training made the cut that is applied.
        parts: Chunks of whole cuts in the last listing that are not applied yet.
    """

    steps: int
    seconds: float
    parts: int


class ReplicaError(RuntimeError):
    """A replica has nothing to read, or stopped following."""


class Replica:
    """Keeps unsharded tables equal to a training's, cut by cut.

    A cut is read and checked whole before the first row is written, and written while nobody reads. What was read
    between `with replica.reading()` and its end is therefore of one step of the training, byte for byte.

    Args:
        target: What to keep up to date: a module (the LightningModule that is trained, unsharded, on any device), a
            mapping of the names in its `state_dict` to tensors, or None: tables are made, see `state_dict`.
        sink: A sink, or its address (see `resolve_sink`).
        start: A file that `save` wrote, of this replica in an earlier process: nothing before it is read again.
        optimizer_state: Whether the state of the tables' optimizers is kept too, in `optimizer_state`.
        kept_bytes: Cuts up to this size are held in memory between check and write; larger ones are read twice.

    Raises:
        TablesError: What is given cannot be written.
        ReplicaError: `start` is no state of a replica.
    """

    def __init__(
        self,
        target: nn.Module | Mapping[str, Tensor] | None,
        sink: str | os.PathLike[str] | DeltaSink,
        *,
        start: str | os.PathLike[str] | None = None,
        optimizer_state: bool = False,
        kept_bytes: int = 256 << 20,
    ) -> None:
        self.sink = resolve_sink(sink)
        self._tables = ServedTables(target, optimizer_state)
        self._chain = Chain(self.sink)
        self._kept_bytes = kept_bytes
        self._lock = ReadLock()
        self._updating = threading.Lock()
        self._applied = threading.Condition()
        self.position: Position | None = None
        """The cut that is applied; None before the first one."""
        self._torn: BaseException | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        if start is not None:
            self._load(Path(start))

    # -- what is served ------------------------------------------------------------------------------------------------

    @property
    def lock(self) -> AbstractContextManager[None]:
        """A lock for `with replica.lock:`: within it the replica writes nothing, and nobody else is in `reading()`."""
        return self._lock.writing()

    @contextmanager
    def reading(self, *, after_error: bool = False) -> Iterator[Position]:
        """Hold the tables as they are; any number of threads may do so at once.

        On CUDA all rows of the cut are there. A thread that reads them on a stream of its own synchronizes it before it
        leaves: the next cut is written on the default stream, which does not wait for others.

        Args:
            after_error: Whether to read also after following has stopped with an error. The tables are then those of
                the last cut that was applied.

        Yields:
            The cut that is applied.

        Raises:
            ReplicaError: Nothing has been applied yet, or following has stopped with an error.
        """
        with self._lock.reading():
            if not after_error:
                self.check()
            yield self._whole()

    def check(self) -> None:
        """Raise the error that following has stopped with, if it has.

        Raises:
            ReplicaError: It has.
        """
        if self._error is not None:
            raise ReplicaError(
                f"this replica stopped following {self.sink!r} after {as_words(self.position and self.position.cut)}: "
                f"{type(self._error).__name__}: {self._error}\n  follow() tries again."
            ) from self._error

    @property
    def step(self) -> int | None:
        """Batches that had been trained at the cut that is applied; None while nothing is."""
        return None if self.position is None else self.position.step

    @property
    def generation(self) -> int | None:
        """Number of the fit that wrote the cut that is applied; None while nothing is."""
        return None if self.position is None else self.position.generation

    @property
    def run(self) -> str | None:
        """The training whose tables these are; None before the first cut."""
        return self._chain.run

    @property
    def lag(self) -> Lag:
        """How far this replica lags behind the last listing of the sink.

        Raises:
            ReplicaError: Nothing has been applied yet, or following has stopped with an error.
        """
        self.check()
        position = self._whole()
        newer = [cut for cut in self._chain.cuts if cut.is_whole and cut.at > position.cut]
        steps = max(newer[-1].at[1] - position.step, 0) if newer else 0
        return Lag(steps, max(time.time() - position.time, 0.0), sum(len(cut.names) for cut in newer))

    @property
    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Table -> field -> tensor; empty without `optimizer_state=True`.

        Row-wise state is `(rows, 1)`; where shards of columns have each their own, `(rows, columns)`, alike in the
        columns of a shard.
        """
        return self._tables.optimizer_state

    def state_dict(self) -> dict[str, Tensor]:
        """Return tables and dense tensors by their names in the LightningModule's `state_dict`; no copies."""
        return dict(self._tables.tensors)

    # -- how it follows ------------------------------------------------------------------------------------------------

    def update(self) -> int:
        """Apply every whole cut that the sink has and this replica has not; return how many.

        Raises:
            CutError: Parts are missing, out of order or of another run.
            PartError: A part is torn, of another schema, or not what its name says.
            TablesError: Parts do not fit the tables.
            SinkError: The sink cannot be read.
        """
        with self._updating:
            count, reached = 0, Counter[tuple[int, int]]()
            while self._update_once(lists=count == 0):
                count += 1
                assert self.position is not None
                at = self.position.cut
                reached[at] += 1
                if reached[at] > _MOST_TIMES:
                    raise CutError(
                        f"the sink leads to {as_words(at)} again and again: cuts of fits that know nothing of each "
                        "other are in it, as where lost parts have come back. Remove those of the fits that were given "
                        "up, or let the training write a base."
                    )
            self._error = None
            return count

    def follow(self, every_s: float = 0.5) -> None:
        """Apply cuts as they come, in a thread. An error ends the thread; `reading`, `lag` and `wait` then raise it.

        Args:
            every_s: Seconds between two listings of the sink.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self._error = None
        self._thread = threading.Thread(target=self._follow, args=(every_s,), name="replica", daemon=True)
        self._thread.start()

    def wait(self, step: int = 0, timeout: float | None = None) -> Position:
        """Wait until a cut at or after a step is applied; return the cut that is applied.

        Without `follow()` this calls `update()` until then.

        Args:
            step: Batches trained.
            timeout: In seconds; None waits for ever.

        Raises:
            TimeoutError: There was no such cut in time.
            ReplicaError: Following has stopped with an error.
            CutError, PartError, TablesError, SinkError: As in `update`, if nothing follows the sink.
        """
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            follows = self._thread is not None and self._thread.is_alive()
            if not follows:
                self.check()
                self.update()
            with self._applied:
                if self.position is not None and self.position.step >= step:
                    return self.position
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"step {step} was not there after {timeout:g} s; applied: "
                        f"{as_words(self.position and self.position.cut)}. Does the training still write into "
                        f"{self.sink!r}?"
                    )
                self._applied.wait(min(left, 0.5 if follows else 0.05))

    def close(self) -> None:
        """Stop following and let go of the sink; the tables stay as they are."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.sink.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- from one process to the next ----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tables and their position into a file, for `start` of a replica in another process.

        A crash leaves the file of before, or the new one.

        Raises:
            ReplicaError: Nothing has been applied yet.
        """
        with self.reading(after_error=True) as position:
            content = {
                "format": _FORMAT,
                "run": self.run,
                "fit": self._chain.fit,
                "position": tuple(position),
                "tensors": {name: tensor.detach() for name, tensor in self._tables.tensors.items()},
                "optimizer_state": self._tables.optimizer_state,
            }
            save_whole(content, Path(path))

    def _load(self, path: Path) -> None:
        try:
            saved: Any = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as err:  # torch.load and pickle have errors of many kinds for what is no such file
            raise ReplicaError(f"{path} is no state of a replica: {type(err).__name__}: {err}") from err
        if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
            raise ReplicaError(f"{path} is no state of a replica: give a file that `Replica.save` wrote.")
        self._tables.load(saved["tensors"], saved["optimizer_state"])
        self.position = Position(*saved["position"])
        self._chain.run, self._chain.fit = saved["run"], saved.get("fit", "")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _follow(self, every_s: float) -> None:
        while not self._stop.is_set():
            try:
                self.update()
            except Exception as err:
                self._error = err
                _log.warning("a replica has stopped following %r: %s", self.sink, err)
                with self._applied:
                    self._applied.notify_all()
                return
            self._stop.wait(every_s)

    def _update_once(self, *, lists: bool) -> bool:
        """Apply the next cut, if there is one; list the sink first, or only where the last listing has none.

        A listing is not taken at one instant: it may have a part and lack one that was written before it. And parts may
        be removed, and others written under their names, after it. What is wrong in three listings is wrong.
        """
        for is_listed in (not lists, False, False):
            try:
                if not is_listed:
                    self._chain.list_sink()
                move = self._chain.next(self.position and self.position.cut)
                if move is not None:
                    self._apply(move)
                    return True
                if not is_listed:
                    return False
                continue
            except KeyError as err:
                problem = CutError(f"{err.args[0]} was there and is not any more: parts are being removed.")
            except CutError as err:
                problem = err
            self._chain.forget()
        raise problem

    def _apply(self, move: Move) -> None:
        """Read and check all chunks, then write them while nobody reads."""
        header = move.chunks[-1][0].header
        self._tables.check_header(header)
        kept: dict[PartName, Part] = {}
        checksums: dict[PartName, bytes] = {}
        covered, size = Counter[str](), 0
        for head, name in move.chunks:
            data = self.sink.read(str(name))
            part = part_of(data, name, head)
            self._tables.check(part, str(name), begins=move.is_base)
            if part.header.is_base:
                for entry in part.rows:
                    covered[entry.table] += entry.values.numel() * (entry.field == WEIGHT)
            checksums[name] = data[-TRAILER_SIZE:]
            size += len(data)
            if size <= self._kept_bytes:
                kept[name] = part
        if move.is_base:
            check_whole(header, covered)
        with self._lock.writing():
            try:
                if move.is_base:
                    self._tables.optimizer_state.clear()  # it may have fields that are not sent any more
                for head, name in move.chunks:
                    if name in kept:
                        part = kept.pop(name)
                    else:
                        data = self.sink.read(str(name))
                        part = part_of(data, name, head)
                        if data[-TRAILER_SIZE:] != checksums[name]:
                            raise PartError(f"{name} was written anew with other content while it was being applied.")
                    self._tables.write(part)
                self._tables.wait_written()
            except BaseException as err:
                self.position, self._torn = None, err
                raise
            self._torn = None
            self._chain.run, self._chain.fit = header.run, header.fit
            self.position = Position(*(getattr(header, what) for what in Position._fields))
        with self._applied:
            self._applied.notify_all()

    def _whole(self) -> Position:
        if self._torn is not None:
            raise ReplicaError(
                "the last update ended while rows were being written, so the tables are of no step: update() begins "
                "again with the newest base."
            ) from self._torn
        if self.position is None:
            raise ReplicaError(
                f"nothing has been applied yet from {self.sink!r}: call update(), or follow() and wait()."
            )
        return self.position


def save_whole(content: Any, path: Path) -> None:
    """Write a file for `torch.load`, and its folder; a crash leaves the file of before, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
