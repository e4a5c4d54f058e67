"""The tables of a replica: check files against them, and write rows."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...row_log import write_rows
from ..files import EVICTED_ID, RAW_ID, WEIGHT, CutFile, Header, Rows
from .covered_rows import TablesError
from .raw_ids import KnownIds, Remap, rows_of

_TABLE = re.compile(r"(.*\.)?(embedding_bags|embeddings)\.[^.]+\.weight")  # a table's weight in TorchRec's collections


class Tables(ABC):
    """What a replica writes; `tensors` have the shape and dtype of each table and dense tensor that there is."""

    whose = "this replica"  # for messages
    lacks_dense: str | None = None  # what to do about a dense tensor that is not in `tensors`; None: it is not needed

    def __init__(self, tensors: dict[str, Tensor], *, keeps_state: bool) -> None:
        self.tensors, self._keeps_state = tensors, keeps_state
        self.optimizer_state: dict[str, dict[str, Tensor]] = {}
        self.known: dict[str, KnownIds] = {}
        """Table -> the raw ids of its rows, of tables under managed collisions."""

    @abstractmethod
    def check_header(self, header: Header) -> None:
        """Raise a TablesError if the run's tables and these tables differ."""

    def check(self, file: CutFile, name: str, *, begins: bool) -> None:
        """Raise a TablesError if a file of this name does not fit; with `begins` optimizer state may change shape."""
        for entry in file.rows:
            self._check_rows(entry, file.header, name, begins=begins)
        for tensor in file.dense:
            if (have := self.tensors.get(tensor.name)) is not None:
                like = tensor.value.shape, tensor.value.dtype
                _check_alike(tensor.name, *like, name, have, self.whose, "use the trained module")
            elif self.lacks_dense is not None:
                raise TablesError(f"{name} has a dense tensor {tensor.name} that the module lacks: {self.lacks_dense}.")

    def begin(self) -> None:
        """Forget the optimizer state: files that have all of it, of a base, are written next."""
        self.optimizer_state.clear()  # may have kinds that are not sent any more

    @abstractmethod
    def write(self, file: CutFile) -> None:
        """Write a checked file."""

    def set_known(self, known: dict[str, KnownIds]) -> None:
        """Take the raw ids of a move, whose files have been written."""
        self.known = known

    def wait_written(self) -> None:
        """Wait until the device has written everything, since readers' streams do not wait for this stream."""
        for device in {tensor.device for tensor in self.tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _check_rows(self, entry: Rows, header: Header, name: str, *, begins: bool) -> None:
        if entry.table not in header.tables:
            raise TablesError(
                f"{name} has rows of {entry.table}, which its header does not list: {', '.join(header.tables)}."
            )
        is_weight, is_id = entry.field == WEIGHT, entry.field in (RAW_ID, EVICTED_ID)
        if not is_weight and not is_id and not self._keeps_state:
            return
        what, shape = entry.table if is_weight else f"{entry.table} ({entry.field})", header.tables[entry.table]
        fits = (
            (entry.shape == shape or (entry.shape == (shape[0], 1) and not is_weight))
            and 0 <= entry.first_column <= entry.shape[1] - entry.values.shape[1]
            and len(entry.rows) == len(entry.values)
            and not ((entry.rows < 0) | (entry.rows >= entry.shape[0])).any()
        )
        if not fits:
            raise TablesError(
                f"{name} has rows of {what} outside of its shape {shape}: {len(entry.rows)} rows, values "
                f"{tuple(entry.values.shape)} from column {entry.first_column} on, of a tensor {entry.shape}."
            )
        have, advice = self.tensors.get(entry.table), "use tables of the same shape and dtype"
        if have is None and not begins:
            raise TablesError(f"{name} has rows of {entry.table}, of which {self.whose} has had no base.")
        if is_id:
            return
        if not is_weight:
            have = None if begins else self.optimizer_state.get(entry.table, {}).get(entry.field)
            advice = "a change of shape or dtype needs a base first"
        if have is not None:
            _check_alike(what, entry.shape, entry.values.dtype, name, have, self.whose, advice)


class ServedTables(Tables):
    """Writes rows and dense tensors by name; arguments and errors as for `Replica`. New tables are on the host."""

    def __init__(self, target: nn.Module | Mapping[str, Tensor] | None, optimizer_state: bool = False) -> None:
        self._module = target if isinstance(target, nn.Module) else None
        self._makes = target is None
        given = target.state_dict() if isinstance(target, nn.Module) else dict(target or {})
        super().__init__(_plain(given), keeps_state=optimizer_state)
        if self._module is not None:
            self.lacks_dense = "use the trained LightningModule, or a mapping of tables"
        self._not_plain = given.keys() - self.tensors.keys()
        if self._not_plain and self._module is None:
            name = min(self._not_plain)
            raise TablesError(f"a replica needs plain tensors.\n  got: {name}, a {type(given[name]).__name__}")
        if on_meta := [name for name, value in self.tensors.items() if value.is_meta]:
            raise TablesError(
                f"a replica cannot write tables on `meta`.\n  got: {', '.join(on_meta[:3])}\n  Build the module on "
                "another device, for example with table_device='cpu'."
            )

    @override
    def check_header(self, header: Header) -> None:
        if self._makes:
            return
        self._check_managed(header)
        if self._module is not None:  # it may have been moved to another device
            self.tensors = _plain(self._module.state_dict())
        sent = header.tables
        if lacks := sorted(sent.keys() - self.tensors.keys()):
            whole = " (it is sharded or quantized: use the unsharded module)" if self._not_plain & set(lacks) else ""
            raise TablesError(
                f"the run {header.run!r} sends tables that this replica lacks{whole}: {', '.join(lacks)}.\n"
                f"  The replica has: {', '.join(sorted(self._tables())) or 'none'}.\n"
                "  Use the trained LightningModule, or a mapping from names in its state_dict to tensors."
            )
        for name, shape in sent.items():
            if (have := tuple(self.tensors[name].shape)) != shape:
                raise TablesError(
                    f"{name} has the shape {shape} in the run {header.run!r}, and {have} in this replica: use the same "
                    "tables."
                )
        if self._module is not None and (unsent := sorted(self._tables() - sent.keys())):
            raise TablesError(
                f"the module has tables that the run {header.run!r} does not send, so they would never change: "
                f"{', '.join(unsent)}.\n  The run sends: {', '.join(sorted(sent))}.\n"
                "  Use a mapping from names to tensors to update only the tables that are sent."
            )

    @override
    def check(self, file: CutFile, name: str, *, begins: bool) -> None:
        super().check(file._replace(dense=[]) if self._makes else file, name, begins=begins)

    @override
    @torch.no_grad()
    def write(self, file: CutFile) -> None:
        for entry in file.rows:
            tensors, name = self.tensors, entry.table
            if entry.field in (RAW_ID, EVICTED_ID):
                continue
            if entry.field != WEIGHT:
                if not self._keeps_state:
                    continue
                tensors, name = self.optimizer_state.setdefault(entry.table, {}), entry.field
            if name not in tensors:
                tensors[name] = torch.zeros(entry.shape, dtype=entry.values.dtype)
            write_rows(tensors[name], entry.rows, entry.first_column, entry.values)
        for tensor in file.dense:
            if self._makes:
                self.tensors[tensor.name] = tensor.value
            elif tensor.name in self.tensors:
                self.tensors[tensor.name].copy_(tensor.value)

    def _check_managed(self, header: Header) -> None:
        """Raise a TablesError if a module gives ids rows in another way than the trained one."""
        described = header.raw_ids or {}
        if self._module is None:
            return
        buffers = dict(self._module.named_buffers())
        for table, one in described.items():
            module = dict(self._module.named_modules()).get(one.module)
            like = (one.segments[-1],), torch.int64
            found = [buffers.get(name) for name in (one.sorted_ids, one.rows_of_ids)]
            if module is None or any(value is None or (tuple(value.shape), value.dtype) != like for value in found):
                raise TablesError(
                    f"the run {header.run!r} has {table} under managed collisions by {one.module}, which this "
                    "replica's module lacks, or has of another size: use the trained module."
                )
            hash_size = getattr(module, "input_size", int)()
            if hash_size != one.hash_size:
                raise TablesError(
                    f"{one.module} has input_hash_size={hash_size}, and {one.hash_size} in the run {header.run!r}: use "
                    "the trained module."
                )
            if _has_hash_func(module) != one.is_hashed:
                has = "no input_hash_func, and the run" if one.is_hashed else "an input_hash_func, and the run"
                raise TablesError(
                    f"{one.module} has {has} {header.run!r} has {'one' if one.is_hashed else 'none'}: use the trained "
                    "module."
                )

    @override
    @torch.no_grad()
    def set_known(self, known: dict[str, KnownIds]) -> None:
        for table, one in known.items():
            if self._module is not None:
                managed = self._module.get_submodule(one.described.module)
                vars(managed)["remap"] = Remap(managed, one.described)
            if self.known.get(table) is one:
                continue
            for name, values in (
                (one.described.sorted_ids, one.sorted_ids),
                (one.described.rows_of_ids, one.rows_of_ids),
            ):
                if name in self.tensors:
                    self.tensors[name].copy_(values)
        super().set_known(known)

    def rows_of(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each id, `(N,)`, int64, on the host, and whether it is known; row numbers are ids else."""
        known = self.known.get(table)
        num_rows = len(self.tensors[table])
        if known is not None:
            return rows_of(ids, known.sorted_ids, known.rows_of_ids, known.described)
        is_row = (ids >= 0) & (ids < num_rows)
        if not is_row.all():
            raise ValueError(f"{table} has rows 0 to {num_rows - 1}, got {int(ids[~is_row][0])}")
        return ids, is_row

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], optimizer_state: dict[str, dict[str, Tensor]]) -> None:
        """Load tensors that `Replica.save` wrote; raise a TablesError if one is missing, or of other shape or dtype."""
        if self._makes:
            self.tensors = {name: torch.empty_like(value) for name, value in tensors.items()}
        for name, value in tensors.items():
            have = self.tensors.get(name)
            _check_alike(name, value.shape, value.dtype, "the saved state", have, self.whose, "use the same tables")
        for name, value in tensors.items():
            self.tensors[name].copy_(value)
        if self._keeps_state:
            self.optimizer_state = optimizer_state

    def _tables(self) -> set[str]:
        names = self.tensors.keys() | self._not_plain
        return names if self._module is None else set(filter(_TABLE.fullmatch, names))


def _plain(given: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: value for name, value in given.items() if type(value) in (Tensor, nn.Parameter) and not value.is_quantized
    }


def _check_alike(
    name: str, shape: Sequence[int], dtype: torch.dtype, where: str, have: Tensor | None, whose: str, advice: str
) -> None:
    if have is None or (have.shape, have.dtype) != (shape, dtype):
        like = "missing" if have is None else f"{tuple(have.shape)} of {have.dtype}"
        raise TablesError(f"{name} is {tuple(shape)} of {dtype} in {where}, and {like} in {whose}: {advice}.")


def _has_hash_func(module: nn.Module) -> bool:
    """Return whether a managed collision module maps ids by a function first: else `preprocess` returns its input."""
    features: dict[str, Any] = {}
    return getattr(module, "preprocess", lambda same: same)(features) is not features
