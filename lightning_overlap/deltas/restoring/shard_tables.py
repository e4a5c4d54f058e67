"""The sharded tables of a training, as what a replica writes: every rank its own rows, under any plan."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...checkpoint import (
    ITERATION,
    KERNEL_KINDS,
    Loading,
    Move,
    Piece,
    StateKey,
    counting_modules,
    fused_state,
    local_parts,
    move_ids,
    weight_of,
)
from ...compat.torchrec import SEGMENTS, first_row, hash_of, set_known_ids
from ...distributed import Group
from ...row_log import put_rows
from ...tables import ShardedStateNames, check_assigned_rows, kernel_shards, table_names
from ..files import EVICTED_ID, NO_ID, RAW_ID, WEIGHT, CutFile, Header, Rows
from ..serving import Tables, TablesError

_NO_STATE = (WEIGHT, RAW_ID, EVICTED_ID)
_OTHER = "Pass a sink of the same module's training."


class ShardTables(Tables):
    """Writes this rank's part of sharded tables, of their fused optimizers' state (with `states`), and the dense part.

    Raises a ValueError for tables whose rows cannot be read and written by their number.
    """

    whose = "this module"

    def __init__(self, model: nn.Module, *, states: bool, strict: bool) -> None:
        check_assigned_rows(model)
        kernel_shards(model)  # raises the ValueError for others
        self.state_dict = model.state_dict()  # shares the module's memory: filling it loads the module
        self._model, self._is_strict = model, strict
        sharded = ShardedStateNames(model)
        self._tables = {name: tuple(self.state_dict[name].size()) for name in table_names(model)}
        plain = {name for name, value in self.state_dict.items() if isinstance(value, Tensor) and name not in sharded}
        self._dense = plain - self._tables.keys()
        pieces = {name: self.state_dict[name] for name in (*self._tables, *self._dense)}
        like = {name: torch.empty(tuple(one.size()), dtype=one.dtype, device="meta") for name, one in pieces.items()}
        super().__init__(like, keeps_state=states)
        self.lacks_dense = "pass a sink of the same module's training" if strict else None
        self.sent_dense: set[str] = set()
        """Names of the dense tensors that were sent."""
        self.header: Header | None = None
        """Of the newest cut."""
        self._kinds: dict[str, list[str]] = {}  # of this rank's fused tables, in the order in which they are sent
        for key in fused_state(model) if states else ():
            kinds = self._kinds.setdefault(key.weight, [])
            if key.kind not in (*KERNEL_KINDS, *kinds):
                kinds.append(key.kind)
        self._listed: set[StateKey] = set()  # the state in the files of the base that was checked
        self._known: set[StateKey] = set()  # the state in the base that was written
        self._loading: Loading | None = None
        self._managed = {weight_of(model, name): (name, one) for name, one in counting_modules(model).items()}

    @override
    def check_header(self, header: Header) -> None:
        if header.tables != self._tables:
            sent, here = header.tables.items() - self._tables.items(), self._tables.items() - header.tables.items()
            raise TablesError(
                f"the run {header.run!r} has other tables than this module. Of the run: {_shapes(sent)}. Of this "
                f"module: {_shapes(here)}. {_OTHER}"
            )
        for table, (name, module) in self._managed.items():
            how, own = (header.raw_ids or {}).get(table), hash_of(module)
            of_run = None if how is None else (how.hash_size, how.is_hashed)
            if of_run != own:
                raise TablesError(
                    f"{name} gives rows to ids of {table}, with (input_hash_size, has an input_hash_func) = {own}; in "
                    f"the run {header.run!r} this is {of_run}. {_OTHER}"
                )
        if unmanaged := sorted((header.raw_ids or {}).keys() - self._managed.keys()):
            raise TablesError(
                f"the run {header.run!r} has managed collisions for {', '.join(unmanaged)}, this module has none. "
                f"{_OTHER}"
            )
        self.header = header

    @override
    def check(self, file: CutFile, name: str, *, begins: bool) -> None:
        super().check(file, name, begins=begins)
        keys = {self._key(entry, file.header) for entry in file.rows if entry.field not in _NO_STATE}
        if begins:
            self._listed |= keys
        elif unknown := keys - self._known:
            raise TablesError(f"{name} has {min(map(str, unknown))}, of which the base before it has nothing.")

    def _key(self, entry: Rows, header: Header) -> StateKey:
        """Return which piece of the fused state rows are of: its kind has a number when it is sent."""
        shape, columns = header.tables[entry.table], None
        width = entry.values.shape[1]
        if entry.shape != shape:
            columns = (0, shape[1])
        elif (entry.table, entry.field, entry.first_column, width) in (header.row_wise or ()):
            columns = (entry.first_column, entry.first_column + width)
        kinds, number = self._kinds.get(entry.table, []), entry.field.removeprefix("momentum")
        known = number.isdecimal() and 0 < int(number) <= len(kinds)
        return StateKey(entry.table, kinds[int(number) - 1] if known else entry.field, columns)

    @override
    def begin(self) -> None:
        self.sent_dense.clear()
        if not self._keeps_state:
            return
        self._known, self._listed = self._listed, set()
        keys = self._known | {StateKey(key.weight, ITERATION) for key in self._known}
        self._loading = Loading(self._model, map(str, keys), {}, warned=self._tables)

    @property
    def without_state(self) -> set[str]:
        """This rank's fused tables that have optimizer state, of which none was sent."""
        return {weight for weight, kinds in self._kinds.items() if kinds} - {key.weight for key in self._known}

    @override
    @torch.no_grad()
    def write(self, file: CutFile) -> None:
        pieces = {} if self._loading is None else self._loading.pieces
        for entry in file.rows:
            if entry.field == WEIGHT:
                _write_part(self.state_dict[entry.table], entry)
            elif entry.field not in _NO_STATE and (piece := pieces.get(str(self._key(entry, file.header)))) is not None:
                _write_part(piece, entry)
        for tensor in file.dense:
            self.sent_dense.add(tensor.name)
            if tensor.name in self._dense:
                self.state_dict[tensor.name].copy_(tensor.value)

    def place_ids(self, group: Group) -> None:
        """Give the raw ids to the modules of the ranks that look them up now, with their rows; all ranks call this."""
        assert self.header is not None
        segments: dict[str, Tensor] = {}
        for table, (name, module) in self._managed.items():
            known = self.known[table]
            first, own = first_row(module), module.get_buffer(SEGMENTS)
            rows = torch.arange(first, min(first + module.output_size(), len(known.id_of_row)))
            ids = known.id_of_row[rows]
            set_known_ids(module, ids[ids != NO_ID], rows[ids != NO_ID], self.header.step)
            segments[name] = torch.full_like(own, -1, device="cpu")
            segments[name][: len(known.described.segments)] = torch.tensor(known.described.segments)
        for move in move_ids(self._model, segments, group):
            self._apply(move)

    def _apply(self, move: Move) -> None:
        move.apply({move.weight: self.state_dict[move.weight]}, of_optimizers=False)
        move.apply({} if self._loading is None else self._loading.pieces, of_optimizers=True)

    def finish(self) -> None:
        """Write what is left of the state into the kernels; raise a TablesError if dense tensors were not sent."""
        assert self.header is not None
        if self._is_strict and self.sent_dense and (lacks := self._dense - self.sent_dense):
            raise TablesError(
                f"the run {self.header.run!r} sends a dense part without {', '.join(sorted(lacks))}. {_OTHER}"
            )
        if self._loading is None:
            return
        for name, piece in self._loading.pieces.items():
            if StateKey.parse(name).kind == ITERATION:
                assert isinstance(piece, Tensor)
                piece.fill_(self.header.step - self.header.num_pending)  # every batch has one lookup
        self._loading.finish()


def _write_part(piece: Piece, entry: Rows) -> None:
    """Write what this rank has of an entry's rows; a piece of one dimension has the value of all columns of a row."""
    here, there = piece.dtype, entry.values.dtype
    if here != there:
        raise TablesError(f"{entry.table} ({entry.field}) is of {there} in the sink, and of {here} in this module.")
    for window, part in local_parts(piece):
        put_rows(part, window, entry)


def _shapes(tables: set[tuple[str, tuple[int, int]]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in sorted(tables)) or "no other"
