"""Whole tables for users: `strategy.table` and `strategy.table_chunks`, at any place of a run and after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, overload

from torch import Tensor
from typing_extensions import override

from ..checkpoint import FoundTable, TableReader, find_table
from ..distributed import Call, SharedCalls, default_store
from .failure_hooks import FailsTogether

_ADVICE = (
    "All ranks have to read the same rows at the same place, since each has a part of the table: call it on every "
    "rank, outside of `if trainer.is_global_zero:`. With rank=0 only rank 0 gets them."
)

_SAVE_ADVICE = (
    "All ranks have to save together, since each has a part of the tables: call trainer.save_checkpoint on every rank, "
    "outside of `if trainer.is_global_zero:`."
)


class ReadsTables(FailsTogether):
    """The methods of a strategy that read whole tables; its hooks note where in a run all ranks have to read alike."""

    @overload
    def table(self, name: str) -> Tensor: ...

    @overload
    def table(self, name: str, *, rank: int | None = None) -> Tensor | None: ...

    def table(self, name: str, *, rank: int | None = None) -> Tensor | None:
        """Return a copy of a whole table on the host; every rank has to call this at the same place.

        The rows of a managed collision module's table are in their own order: `raw_ids` has the id of each.

        It works in every hook and step from `on_fit_start` on, and after `fit`, `validate`, `test` or `predict`. The
        table has the update of every backward that has ended; training goes on as if it had not been read. An
        asynchronous save that is under way is waited for.

        Args:
            name: The `name` in the table's config; if several modules have such a table, with the module's name:
                "user_tower.item_table".
            rank: The only rank that gets the table. None: every rank.

        Returns:
            `(num_embeddings, embedding_dim)`, on the CPU, in the dtype of the table; None on other ranks than `rank`.

        Raises:
            ValueError: The name is unknown or not unique, or there is no such rank.
            RuntimeError: The tables are not sharded yet; or another rank reads something else, or reads nothing.
        """
        found = self._find_table(name, rank)
        with self._reading_together(f"table({name!r}, rank={rank})"):
            reader = TableReader(found.weight(), self.checkpoint_group, rank)
            return reader.read(0, reader.num_rows)

    @overload
    def raw_ids(self, name: str) -> Tensor: ...

    @overload
    def raw_ids(self, name: str, *, rank: int | None = None) -> Tensor | None: ...

    def raw_ids(self, name: str, *, rank: int | None = None) -> Tensor | None:
        """Return the raw id that each row of a table stands for now; every rank has to call this at the same place.

        For tables with `MCHManagedCollisionModule`. An `input_hash_func` has mapped the ids already.

        Args:
            name: As in `table`.
            rank: The only rank that gets the ids. None: every rank.

        Returns:
            `(num_embeddings,)`, int64, on the CPU: the largest int64 for a row that no id has, such as the last one of
            each shard, which unknown ids get. None on other ranks than `rank`.

        Raises:
            ValueError: As `table`, or the table has no `MCHManagedCollisionModule`.
            RuntimeError: As `table`.
        """
        found = self._find_table(name, rank)
        with self._reading_together(f"raw_ids({name!r}, rank={rank})"):
            reader = TableReader(found.raw_ids(), self.checkpoint_group, rank)
            ids = reader.read(0, reader.num_rows)
        return None if ids is None else ids.squeeze(1)

    def table_chunks(
        self, name: str, *, num_rows: int = 100_000, rank: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Iterate over a whole table, a few rows at a time, for a table that does not fit in the host's memory.

        Every rank has to iterate to the end, at the same place. With `rank`, the body of the loop runs on that rank
        alone. Between two chunks nothing may be trained. The rest is as in `table`.

        Args:
            name: As in `table`.
            num_rows: Rows of a chunk; the last chunk may have fewer.
            rank: The only rank that gets the rows. None: every rank.

        Yields:
            Number of the first row, and the rows: `(num_rows, embedding_dim)` on the CPU, in the dtype of the table.

        Raises:
            ValueError: As `table`, or `num_rows` is less than 1.
            RuntimeError: As `table`, or training has gone on since the last chunk.
        """
        found = self._find_table(name, rank)
        if not isinstance(num_rows, int) or isinstance(num_rows, bool):
            raise TypeError(f"num_rows is a number of rows, got {num_rows!r}.")
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {num_rows}.")
        return self._chunks(found, name, num_rows, rank)

    def _chunks(self, found: FoundTable, name: str, num_rows: int, rank: int | None) -> Iterator[tuple[int, Tensor]]:
        reader, first_row, place, weights = None, 0, self._num_stages_done, self._ledger.version
        while reader is None or first_row < reader.num_rows:
            if weights != self._ledger.version:
                raise RuntimeError(
                    f"the module has other weights than at the last chunk of table {name!r}, averages or trained ones: "
                    "its rows would be of both. Enter and leave ExponentialMovingAverage.averaged() around the whole "
                    "iteration."
                )
            if place != self._num_stages_done:
                raise RuntimeError(
                    f"training has gone on since the last chunk of table {name!r}: its rows would be of several steps. "
                    "Iterate to the end in one hook."
                )
            call = f"table_chunks({name!r}, num_rows={num_rows}, rank={rank}) at row {first_row}"
            reader, rows = self._read_chunk(call, found, reader, first_row, num_rows, rank)
            if rows is not None:
                yield first_row, rows
            first_row += num_rows

    def _read_chunk(
        self, call: str, found: FoundTable, reader: TableReader | None, first_row: int, num_rows: int, rank: int | None
    ) -> tuple[TableReader, Tensor | None]:
        with self._reading_together(call):
            reader = reader or TableReader(found.weight(), self.checkpoint_group, rank)
            return reader, reader.read(first_row, min(num_rows, reader.num_rows - first_row))

    def _find_table(self, name: str, rank: int | None) -> FoundTable:
        """Check the arguments of a read."""
        if not isinstance(name, str):
            raise TypeError(f"a table is named by a string, got {name!r}.")
        if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
            raise TypeError(f"rank is the number of a rank, or None for all, got {rank!r}.")
        if rank is not None and not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank}: this run has {self.world_size}, from 0 on.")
        if not self._is_sharded:
            raise RuntimeError(
                f"cannot read table {name!r}: this process has no sharded tables. `fit`, `validate`, `test` and "
                "`predict` shard them, before `on_fit_start` and the like. Until then, and in a process that has only "
                'started the ranks (start_method "spawn" or "fork"), read the `weight` of the collection.'
            )
        return find_table(self._module, name)

    @contextmanager
    def _reading_together(self, call: str) -> Iterator[None]:
        if self._shared_calls is not None:
            self._shared_calls.meet(f"strategy.{call}", _ADVICE)
        self.finish_save()  # its thread uses `checkpoint_group`
        with self.reading():
            yield

    def compare_reads(self) -> None:
        """Begin to compare the reads of all ranks in this run; ranks that still wait since the last one learn of it."""
        self._waits_in = None
        cause, before, store = self._first_cause, self._shared_calls, default_store(self.timeout_s)
        if cause is not None and store is not None and self.world_size > 1:
            if before is not None:
                before.end()
            key = f"{cause.key}/reads in the run"
            self._shared_calls = SharedCalls(store, key, self.global_rank, self.world_size, self.timeout_s)

    def compare_later_reads(self) -> None:
        """Begin to compare the reads after this run; ranks that still wait in the run learn of it."""
        # Without a call of the store that could fail: the rank that keeps it may have ended its process by now.
        cause, before = self._first_cause, self._shared_calls
        if cause is not None and before is not None:
            key = f"{cause.key}/reads after the run"
            if before.key != key:
                self._shared_calls = before.end_and_follow(key)

    # What follows is called on all ranks alike, which then wait for each other.

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._shared_calls is not None and self._is_sharded and not self._interrupted:
            self._shared_calls.meet("trainer.save_checkpoint", _SAVE_ADVICE)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._begin_shared_calls()
        return super().broadcast(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._meet("barrier")
        if self.world_size > 1:
            super().barrier(*args, **kwargs)

    @override
    def reduce(self, *args: Any, **kwargs: Any) -> Tensor:
        self._meet("reduce")
        return super().reduce(*args, **kwargs)

    @override
    def all_gather(self, *args: Any, **kwargs: Any) -> Tensor:
        self._meet("all_gather")
        return super().all_gather(*args, **kwargs)

    def _meet(self, call: Call) -> None:
        """Wait for the call of all ranks in a group of its own: gloo may end a process that gets data of another call.

        If a rank does not make it, the error says which one.
        """
        self._begin_shared_calls()
        if self._run is not None and self._consensus is not None and not self._interrupted:
            self._waits_in = call
            self._consensus.meet(call)
            self._waits_in = None
