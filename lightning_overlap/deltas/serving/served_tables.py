"""The tables of a replica: check files against them, and write rows."""

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..files import WEIGHT, CutFile, Header, Rows

_TABLE = re.compile(r"(.*\.)?(embedding_bags|embeddings)\.[^.]+\.weight")  # a table's weight in TorchRec's collections
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TablesError(ValueError):
    """A file does not fit the tables of a replica."""


class Tables(ABC):
    """What a replica writes; `tensors` have the shape and dtype of each table and dense tensor that there is."""

    whose = "this replica"  # for messages
    lacks_dense: str | None = None  # what to do about a dense tensor that is not in `tensors`; None: it is not needed

    def __init__(self, tensors: dict[str, Tensor], *, keeps_state: bool) -> None:
        self.tensors, self._keeps_state = tensors, keeps_state
        self.optimizer_state: dict[str, dict[str, Tensor]] = {}

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

    def wait_written(self) -> None:
        """Wait until the device has written everything, since readers' streams do not wait for this stream."""
        for device in {tensor.device for tensor in self.tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _check_rows(self, entry: Rows, header: Header, name: str, *, begins: bool) -> None:
        if entry.table not in header.tables:
            raise TablesError(
                f"{name} has rows of {entry.table}, which its header does not list: {', '.join(header.tables)}."
            )
        is_weight = entry.field == WEIGHT
        if not is_weight and not self._keeps_state:
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


class Runs(NamedTuple):
    """Runs of consecutive rows that bases have of some columns of a table."""

    columns: range
    firsts: Tensor  # `(num_runs,)`, int64
    ends: Tensor  # `(num_runs,)`, int64; each is past the last row of its run


class CoveredRows:
    """Which rows the bases of a cut have; holds the ends of runs of rows, and no table of the header's size."""

    def __init__(self) -> None:
        self._runs: defaultdict[str, list[Runs]] = defaultdict(list)

    def add(self, entry: Rows) -> None:
        """Note the rows of a weight; they are distinct."""
        rows = entry.rows
        if not len(rows):
            return
        if not (rows[1:] > rows[:-1]).all():
            rows = rows.sort().values
        breaks = (rows.diff() != 1).nonzero().squeeze(1)
        firsts, ends = torch.cat([rows[:1], rows[breaks + 1]]), torch.cat([rows[breaks], rows[-1:]]) + 1
        columns = range(entry.first_column, entry.first_column + entry.values.shape[1])
        self._runs[entry.table].append(Runs(columns, firsts, ends))

    def check(self, header: Header) -> None:
        """Raise a TablesError unless every row of every table of the header is there once, in all columns."""
        of_bases = f"the bases of generation {header.generation}, step {header.step}"
        for table, shape in header.tables.items():
            runs = self._runs[table]
            num_found = sum(int((one.ends - one.firsts).sum()) * len(one.columns) for one in runs)
            if num_found != prod(shape):
                raise TablesError(
                    f"{of_bases} have {num_found} values of {table}, which needs {prod(shape)}. Do all files come from "
                    "one training?"
                )
            # As many values as there are to be: if none is there twice, none is missing.
            for column in {one.columns.start for one in runs}:
                there = [one for one in runs if column in one.columns]
                firsts, order = torch.cat([one.firsts for one in there]).sort()
                ends = torch.cat([one.ends for one in there])[order]
                if (firsts[1:] < ends[:-1]).any():
                    raise TablesError(f"{of_bases} have some rows of {table} twice, and so lack others.")


def write_rows(table: Tensor, rows_N: Tensor, first_column: int, values_ND: Tensor) -> None:
    """Write values of a table's dtype, bit for bit, into rows `(N,)`, int64, from a column on."""
    columns = _bits(table)[:, first_column : first_column + values_ND.shape[1]]
    columns.index_copy_(0, rows_N.to(table.device), _bits(values_ND).to(table.device))


def _bits(tensor: Tensor) -> Tensor:
    """Return a view as integers, so that writes keep every bit and `index_copy_` supports the dtype."""
    size = tensor.element_size()
    return tensor.detach().view(_SAME_SIZE[size]) if size in _SAME_SIZE else tensor.detach()


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
