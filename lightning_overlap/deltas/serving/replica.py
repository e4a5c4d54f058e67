"""Tables that follow a training: apply whole cuts while other threads read."""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...storage import SealedFile, Store, close_store, read_seal, whole_file
from ...text import check_known
from ..files import (
    TRAILER_SIZE,
    WEIGHT,
    Chain,
    CutError,
    CutFile,
    FileError,
    FileName,
    Head,
    Move,
    RawIds,
    as_store,
    as_words,
    file_of,
)
from .covered_rows import CoveredRows
from .raw_ids import ComingIds, KnownIds
from .served_tables import ServedTables, Tables

_log = logging.getLogger(__name__)
_FORMAT = "embedding_deltas.replica"
_WITH_RAW_IDS = "embedding_deltas.replica.2"
_MOST_TIMES = 3  # how often an update may reach one cut, as files may be rewritten; more is an endless loop


class Position(NamedTuple):
    """The last applied cut; its fields are those of `Header`."""

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
    """A replica's lag behind its training."""

    steps: int  # batches from the applied cut to the newest whole cut in the last listing of the sink
    seconds: float  # since the training made the applied cut
    files: int  # of newer whole cuts in the last listing


class ReplicaError(RuntimeError):
    """A replica has no tables yet, or stopped following."""


class Replica(AbstractContextManager["Replica"]):
    """Keeps unsharded tables equal to a training's tables, cut by cut.

    A cut is read and checked completely before the first row is written, and written while no thread reads. So tables
    inside `with replica.reading()` are those of one training step, byte for byte.

    Args:
        target: The tables to update: the trained LightningModule, unsharded, on any device; or a mapping from names in
            its `state_dict` to tensors; or None to make tables, see `state_dict`. (`Tables` write in their own way.)
        sink: A `Store`, or its address: a path, `redis://...`, or one that fsspec knows.
        start: A file written by `save`, to continue from.
        optimizer_state: Whether to also keep optimizer state, in `optimizer_state`.
        kept_bytes: Cuts up to this size stay in memory between check and write; larger cuts are read twice.

    Raises:
        TablesError: `target` cannot be written.
        ReplicaError: `start` is not a file of `save`.
    """

    def __init__(
        self,
        target: nn.Module | Mapping[str, Tensor] | Tables | None,
        sink: str | os.PathLike[str] | Store,
        *,
        start: str | os.PathLike[str] | None = None,
        optimizer_state: bool = False,
        kept_bytes: int = 256 << 20,
    ) -> None:
        self.sink = as_store(sink)
        self._tables = target if isinstance(target, Tables) else ServedTables(target, optimizer_state)
        self._chain = Chain(self.sink)
        self._kept_bytes = kept_bytes
        self._lock = _ReadLock()
        self._updating = threading.Lock()
        self.position: Position | None = None
        """The last applied cut; None before the first cut."""
        self._torn: BaseException | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        if start is not None:
            self._load(Path(start))

    @property
    def lock(self) -> AbstractContextManager[None]:
        """A lock for `with replica.lock:`: inside, the replica does not write, and no other thread reads."""
        return self._lock.writing()

    @contextmanager
    def reading(self, *, after_error: bool = False) -> Iterator[Position]:
        """Keep the tables unchanged inside this context, in any number of threads; yields the last applied cut.

        A thread that reads on another CUDA stream than the default stream synchronizes its stream before it leaves: the
        next cut is written on the default stream, without waiting. Raises a ReplicaError if no cut has been applied, or
        (without `after_error`) if following has stopped with an error.
        """
        with self._lock.reading():
            if not after_error:
                self.check()
            yield self._whole()

    def check(self) -> None:
        """Raise a ReplicaError if following has stopped with an error."""
        if self._error is not None:
            raise ReplicaError(
                f"this replica stopped following {self.sink!r} after {as_words(self.position and self.position.cut)}: "
                f"{type(self._error).__name__}: {self._error}\n  follow() tries again."
            ) from self._error

    @property
    def step(self) -> int | None:
        """The `step` of `position`; None before the first cut."""
        return self.position and self.position.step

    @property
    def generation(self) -> int | None:
        """The `generation` of `position`; None before the first cut."""
        return self.position and self.position.generation

    @property
    def run(self) -> str | None:
        """Identifies the training; None before the first cut."""
        return self._chain.run

    @property
    def lag(self) -> Lag:
        """The lag behind the last listing of the sink; raises a ReplicaError as `reading` does."""
        self.check()
        position = self._whole()
        newer = [cut for cut in self._chain.cuts if cut.is_whole and cut.at > position.cut]
        steps = max(newer[-1].at[1] - position.step, 0) if newer else 0
        return Lag(steps, max(time.time() - position.time, 0.0), sum(len(cut.names) for cut in newer))

    @property
    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Table -> kind of state -> tensor; empty without `optimizer_state=True`.

        Row-wise state is `(rows, 1)`; of a column-wise sharded table `(rows, columns)`, constant in a shard's columns.
        """
        return self._tables.optimizer_state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tables and dense tensors, without copies, by names in the LightningModule's `state_dict`."""
        return dict(self._tables.tensors)

    @property
    def raw_ids(self) -> dict[str, Tensor]:
        """Table -> the raw id that each of its rows stands for, `(rows,)`, int64, `NO_ID` for none; do not write them.

        Only tables under managed collisions are there.
        """
        return {table: one.id_of_row for table, one in self._tables.known.items()}

    def look_up(self, table: str, ids: Tensor, *, hashed: bool = False) -> tuple[Tensor, Tensor]:
        """Return copies of the rows of ids, `(N, columns)`, on the table's device, and which ids are known, `(N,)`.

        `ids`, `(N,)`, integers on the host, are raw ids in a table under managed collisions; an unknown or evicted one
        gets the row that the trained module gives to it in evaluation. In another table they are row numbers.
        `hashed`: the ids are those that the trained module's `input_hash_func` has returned, if it has one.

        Raises a ReplicaError as `reading` does, and a ValueError for an unknown table, a row that the table has not, or
        raw ids that have to be hashed.
        """
        with self.reading():
            assert isinstance(self._tables, ServedTables)
            check_known("table", table, {name for name, one in self._tables.tensors.items() if one.dim() == 2})
            known = self._tables.known.get(table)
            if known is not None and known.described.is_hashed and not hashed:
                raise ValueError(
                    f"the trained module maps ids of {table} by its input_hash_func before it gives them rows: pass "
                    "what that function returns, with hashed=True, or call the module."
                )
            rows, is_known = self._tables.rows_of(table, ids)
            tensor = self._tables.tensors[table].detach()
            return tensor[rows.to(tensor.device)], is_known

    def update(self) -> int:
        """Apply every new whole cut in the sink; return their number.

        Raises:
            CutError: Files are missing, out of order or of another run.
            FileError: A file is damaged, of another schema, or renamed.
            TablesError: Files do not fit the tables.
            StoreError: The sink cannot be read.
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
                        f"the sink leads to {as_words(at)} repeatedly: it has cuts of independent fits, for example "
                        "because lost files came back. Remove the cuts of abandoned fits, or let the training write a "
                        "base."
                    )
            self._error = None
            return count

    def follow(self, every_s: float = 0.5) -> None:
        """Apply new cuts every `every_s` s in a thread, until `close`; `reading`, `lag` and `wait` raise its error."""
        if self._follows:
            return
        self._stop.clear()
        self._error = None
        self._thread = threading.Thread(target=self._follow, args=(every_s,), name="replica", daemon=True)
        self._thread.start()

    @property
    def _follows(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, step: int = 0, timeout: float | None = None) -> Position:
        """Wait until a cut at or after `step` is applied; return the last applied cut.

        Without `follow()` this calls `update()`, and raises its errors.

        Raises:
            TimeoutError: There was no such cut in `timeout` seconds; None waits forever.
            ReplicaError: Following has stopped with an error.
        """
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            if not self._follows:
                self.check()
                self.update()
            position = self.position
            if position is not None and position.step >= step:
                return position
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"step {step} was not reached after {timeout:g} s; applied: "
                    f"{as_words(position and position.cut)}. Does the training still write into {self.sink!r}?"
                )
            time.sleep(min(left, 0.05))

    def close(self) -> None:
        """Stop following and close the sink; the tables stay."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        close_store(self.sink)

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tables and position into a file, atomically; raise a ReplicaError before the first cut."""
        with self.reading(after_error=True) as position:
            content = {
                "format": _WITH_RAW_IDS if self._tables.known else _FORMAT,
                "run": self.run,
                "fit": self._chain.fit,
                "position": tuple(position),
                "tensors": {name: tensor.detach() for name, tensor in self._tables.tensors.items()},
                "optimizer_state": self._tables.optimizer_state,
                "raw_ids": {table: (vars(one.described), one.id_of_row) for table, one in self._tables.known.items()},
            }
            save_whole(content, Path(path))

    def _load(self, path: Path) -> None:
        try:
            if (seal := read_seal(path)) is None:
                raise ValueError("it has no checksums at its end")
            seal.check()
            saved: Any = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as err:  # torch.load and pickle raise errors of many types
            raise ReplicaError(f"{path} is not a state of a replica: {type(err).__name__}: {err}") from err
        if not isinstance(saved, dict) or saved.get("format") not in (_FORMAT, _WITH_RAW_IDS):
            raise ReplicaError(f"{path} is not a state of a replica: pass a file that `Replica.save` wrote.")
        assert isinstance(self._tables, ServedTables)
        self._tables.load(saved["tensors"], saved["optimizer_state"])
        self._tables.set_known(
            {
                table: KnownIds.of(RawIds(**described), id_of_row)
                for table, (described, id_of_row) in saved.get("raw_ids", {}).items()
            }
        )
        self.position = Position(*saved["position"])
        self._chain.run, self._chain.fit = saved["run"], saved.get("fit", "")

    def _follow(self, every_s: float) -> None:
        try:
            while not self._stop.is_set():
                self.update()
                self._stop.wait(every_s)
        except Exception as err:
            self._error = err
            _log.warning("a replica stopped following %r: %s", self.sink, err)

    def _update_once(self, *, lists: bool) -> bool:
        """Apply the next cut, if any; without `lists` list the sink only if the last listing has no next cut."""
        # A listing may lack a file that was written before a file that it has, and files may be removed or rewritten
        # after it. So an error is raised only after three listings.
        for is_listed in (not lists, False, False):
            try:
                if not is_listed:
                    self._chain.list_sink()
                move = self._chain.next(self.position and self.position.cut)
                if move is not None:
                    self._apply(move)
                if move is not None or not is_listed:
                    return move is not None
            except (FileNotFoundError, CutError) as err:
                self._chain.forget()
                problem = err
                if isinstance(err, FileNotFoundError):
                    problem = CutError(f"a file was removed after it was listed: files are being removed ({err}).")
        raise problem

    def _apply(self, move: Move) -> None:
        header = move.files[-1][0].header
        self._tables.check_header(header)
        kept: dict[FileName, CutFile] = {}
        checksums: dict[FileName, bytes] = {}
        covered, size = CoveredRows(), 0
        coming = ComingIds(self._tables.known, begins=move.is_base)
        for head, name in move.files:
            file, data = self._read(head, name)
            self._tables.check(file, str(name), begins=move.is_base)
            for entry in file.rows:
                coming.add(entry)
            if file.header.is_base:
                for entry in file.rows:
                    if entry.field == WEIGHT:
                        covered.add(entry)
            checksums[name] = data[-TRAILER_SIZE:]
            size += len(data)
            if size <= self._kept_bytes:
                kept[name] = file
        if move.is_base:
            covered.check(header)
        known = coming.known(header)
        with self._lock.writing():
            try:
                if move.is_base:
                    self._tables.begin()
                for head, name in move.files:
                    if name in kept:
                        file = kept.pop(name)
                    else:
                        file, data = self._read(head, name)
                        if data[-TRAILER_SIZE:] != checksums[name]:
                            raise FileError(f"{name} was rewritten with other content while it was applied.")
                    self._tables.write(file)
                self._tables.set_known(known)
                self._tables.wait_written()
            except BaseException as err:
                self.position, self._torn = None, err
                raise
            self._torn = None
            self._chain.run, self._chain.fit = header.run, header.fit
            self.position = Position(*(getattr(header, what) for what in Position._fields))

    def _read(self, head: Head, name: FileName) -> tuple[CutFile, bytes]:
        data = self.sink.read(str(name))
        return file_of(data, name, head), data

    def _whole(self) -> Position:
        if self._torn is not None:
            raise ReplicaError(
                "the last update failed while it wrote rows, so the tables are inconsistent: call update(), which "
                "starts again from the newest base."
            ) from self._torn
        if self.position is None:
            raise ReplicaError(f"no cut of {self.sink!r} has been applied: call update(), or follow() and wait().")
        return self.position


def save_whole(content: Any, path: Path) -> None:
    """Write a file for `torch.load` atomically, with a checksum, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path.absolute()) as file:
        sealed = SealedFile(file)
        torch.save(content, cast(IO[bytes], sealed))
        sealed.seal()


class _ReadLock:
    """Allows many readers or one writer, reentrant; the writer may read. A waiting writer goes before new readers."""

    def __init__(self) -> None:
        self._gate = threading.RLock()  # held by the current or waiting writer; new readers pass through it
        self._changed = threading.Condition()
        self._readers: list[int] = []  # a thread as often as it reads

    @contextmanager
    def reading(self) -> Iterator[None]:
        own = threading.get_ident()
        with nullcontext() if own in self._readers else self._gate, self._changed:
            self._readers.append(own)
        try:
            yield
        finally:
            with self._changed:
                self._readers.remove(own)
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        if threading.get_ident() in self._readers:
            raise RuntimeError("a thread inside `reading()` cannot update the replica: leave `reading()` first.")
        with self._gate:
            with self._changed:
                self._changed.wait_for(lambda: not self._readers)
            yield
