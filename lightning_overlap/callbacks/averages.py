"""Averages of a model's weights: of the dense part at every sample, of fused tables row by row; swapped in place."""

from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..checkpoint import Piece, fill_from_whole, local_parts, map_shards
from ..runtime import TableAccess
from ..tables import (
    ShardedStateNames,
    caching_tbes,
    hands_out_rows,
    kernel_shards,
    ledger_of,
    next_version,
    processor_buffers,
    sharded_modules,
    table_names,
    weights_in_backward,
)
from ..text import check_known, some
from ..updated_rows import UpdateWatch, num_other_writes
from .row_averages import RowAverages, chunks, uncounted

VISITED_WHOLE = 2  # samples after a write by hand that visit all rows: code that has written once will write again

AskedTables: TypeAlias = bool | Collection[str]


class Averages:
    """The averages of one sharded module: `pieces` by name in its `state_dict`, sharded as the weights are.

    While the module has the averages, which its `Ledger` knows and decides, `pieces` have the trained weights.

    Raises:
        ValueError: A named table does not exist, or the rows of an asked table cannot be averaged: those of managed
            collision modules, in a cache, or with fewer than 32 bits.
    """

    def __init__(self, module: nn.Module, *, decay: float, tables: AskedTables, use_buffers: bool) -> None:
        self.num_samples = 0
        self.version = next_version()
        self._ledger = ledger_of(module)
        self._decay, self._move = decay, get_ema_multi_avg_fn(decay)
        asked, dense = _names(module, tables, use_buffers=use_buffers)
        managed = {name: one for name, one in sharded_modules(module).items() if hands_out_rows(one)}
        if wrong := sorted(name for name in asked if name.startswith(tuple(f"{outer}." for outer in managed))):
            raise ValueError(
                f"{some(wrong)}: managed collision modules assign these rows to ids during training, so the average of "
                "a row would be of several ids. Name the other tables, or none: ExponentialMovingAverage(tables=[...])."
            )
        # Rows that managed collision modules reset are no writes by hand.
        self._modules = [one for name, one in sharded_modules(module).items() if name not in managed]
        self.pieces: dict[str, Piece] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []  # this rank's tensors: weight, average
        self._kept: dict[int, Tensor] = {}  # weights of fewer bits than their averages, while these are swapped in
        of_shard: dict[tuple[str, int, int], Tensor] = {}  # name, first row, first column -> averages
        state = module.state_dict()
        with torch.no_grad(), torch.inference_mode(False):
            for name in sorted(asked | dense):
                self.pieces[name] = piece = _alike(state[name])
                weights, averages = local_parts(state[name]), local_parts(piece)
                for (window, weight), (_, average) in zip(weights, averages, strict=True):
                    self._pairs.append((uncounted(weight), average))
                    if len(window) == 2:
                        of_shard[name, window[0].start, window[1].start] = average
        self._rows = self._row_averages(module, asked, of_shard) if asked else []
        in_rows = {id(average) for _, rows in self._rows for average in rows.tensors}
        dense_pairs = [pair for pair in self._pairs if id(pair[1]) not in in_rows]
        self._moved = [pair for pair in dense_pairs if pair[1].is_floating_point() or pair[1].is_complex()]
        self._copied = [pair for pair in dense_pairs if not (pair[1].is_floating_point() or pair[1].is_complex())]
        self._watch: UpdateWatch | None = None
        self._access: TableAccess | None = None
        self._writes = 0  # by hand, until the last sample
        self.num_whole = 0  # further samples that visit all rows
        self._whole_at = 0  # the last sample after which all rows were up to date

    def _row_averages(
        self, module: nn.Module, asked: set[str], of_shard: dict[tuple[str, int, int], Tensor]
    ) -> list[tuple[Any, RowAverages]]:
        found = []
        cached = {id(tbe) for one in self._modules for tbe in caching_tbes(one)}
        for kernel in kernel_shards(module):
            own = {
                number: of_shard[shard.name, shard.first_row, shard.first_column]
                for number, shard in enumerate(kernel.shards)
                if kernel.is_fused and shard.name in asked and shard.weight.numel()
            }
            names = sorted({kernel.shards[number].name for number in own})
            if own and id(kernel.kernel) in cached:
                raise ValueError(
                    f"{some(names)}: the kernel keeps rows in a cache, so its tables cannot be averaged. Name the "
                    "other tables: ExponentialMovingAverage(tables=[...])."
                )
            if any(kernel.shards[number].weight.dtype.itemsize < 4 for number in own):
                raise ValueError(
                    f"{some(names)}: their rows have fewer than 32 bits, in which an average would stand still. Name "
                    "the other tables: ExponentialMovingAverage(tables=[...])."
                )
            if own:
                found.append((kernel, RowAverages(kernel, own, self._decay)))
        return found

    def watch(self, access: TableAccess | None) -> None:
        """Begin to follow the updates of rows, until `unwatch`."""
        self.unwatch()
        self._access = access
        self._writes = self._num_writes
        self._watch = UpdateWatch([kernel for kernel, _ in self._rows], self._before_update)
        if access is not None:
            access.give_to_updates([tensor for _, rows in self._rows for tensor in rows.tensors])

    def unwatch(self) -> None:
        """Stop to follow updates."""
        if self._watch is not None:
            self._watch.detach()
        self._watch = self._access = None

    @property
    def is_watched(self) -> bool:
        """Whether updates of rows are followed, as in a fit."""
        return self._watch is not None

    def _before_update(
        self, number: int, indices: Tensor, offsets: Tensor, batch_sizes: tuple[int, ...] | None
    ) -> None:
        self._ledger.check_trained("a backward would train averages")
        with torch.no_grad():
            self._rows[number][1].before_update(indices, offsets, batch_sizes)

    @property
    def is_swapped(self) -> bool:
        """Whether the module has these averages now, and `pieces` its trained weights."""
        return self._ledger.inside is self

    @property
    def _num_writes(self) -> int:
        return 0 if self._access is None else num_other_writes(self._modules, self._access)

    @property
    def visits_all(self) -> bool:
        """Whether the next sample visits all rows: for a while after the tables were written by hand."""
        return bool(self._rows) and (self.num_whole > 0 or self._num_writes != self._writes)

    @torch.no_grad()
    def sample(self) -> bool:
        """Move the averages by one sample of the weights; return whether rows were written by hand in between.

        Returns True only if such a write may have hidden older values of rows that were not up to date.
        """
        assert not self.is_swapped, "averages are sampled while they are swapped in"
        self.version = next_version()
        if not self.num_samples:
            for weight, average in self._pairs:
                average.copy_(weight)
            self.begin(1)
            self._writes = self._num_writes
            return False
        if self._moved:
            weights, averages = ([*side] for side in zip(*self._moved, strict=True))
            if any(weight.dtype != average.dtype for weight, average in self._moved):
                weights = [weight.to(average.dtype) for weight, average in self._moved]
            self._move(averages, weights, self.num_samples)
        for weight, average in self._copied:
            average.copy_(weight)
        whole, writes = self.visits_all, self._num_writes
        was_written, self._writes = writes != self._writes, writes
        is_late = was_written and self._whole_at != self.num_samples and bool(self._rows)
        self.num_whole = VISITED_WHOLE if was_written else max(0, self.num_whole - 1)
        self.num_samples += 1
        for _, rows in self._rows:
            rows.sample(visits_all=whole)
        if whole:
            self._whole_at = self.num_samples
        return is_late

    def begin(self, num_samples: int, num_whole: int = 0) -> None:
        """Take `pieces` as the averages after `num_samples` samples; the next `num_whole` samples visit all rows."""
        self.version = next_version()
        self.num_samples = self._whole_at = num_samples
        self.num_whole = num_whole
        for _, rows in self._rows:
            rows.begin(num_samples)

    @torch.no_grad()
    def bring_all(self) -> None:
        """Bring the averages of all rows up to date."""
        assert not self.is_swapped
        for _, rows in self._rows:
            rows.bring_all()
        self._whole_at = self.num_samples

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the module's weights and the averages, in place; the `Ledger` alone calls this."""
        if not self.is_swapped:
            self.bring_all()
        with torch.inference_mode(False):
            for number, (weight, average) in enumerate(self._pairs):
                if weight.dtype != average.dtype:
                    kept = self._kept.pop(number, None)
                    if kept is None:
                        self._kept[number] = weight.clone()
                    weight.copy_(average if kept is None else kept)
                    continue
                if not weight.dim():
                    self._exchange(weight, average)
                for rows in chunks(weight) if weight.dim() else ():
                    self._exchange(weight[rows], average[rows])

    def _exchange(self, weight: Tensor, average: Tensor) -> None:
        before = weight.clone()
        weight.copy_(average)
        average.copy_(before)

    @torch.no_grad()
    def fill(self, saved: dict[str, Tensor]) -> None:
        """Copy unsharded averages into the pieces of the same names."""
        fill_from_whole({name: self.pieces[name] for name in saved}, saved)

    @torch.no_grad()
    def take_weights(self, module: nn.Module, names: Collection[str]) -> None:
        """Let the averages of these names be the module's weights."""
        state = module.state_dict()
        for name in names:
            for (_, weight), (_, average) in zip(local_parts(state[name]), local_parts(self.pieces[name]), strict=True):
                average.copy_(weight)


def _alike(value: Any) -> Piece:
    """Return a copy of a weight as the memory of its averages; of floats with fewer than 32 bits in float32."""

    def copy(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor.clone()

    return map_shards(value, lambda shard: copy(shard.tensor)) if hasattr(value, "local_shards") else copy(value)


def _names(module: nn.Module, tables: AskedTables, *, use_buffers: bool) -> tuple[set[str], set[str]]:
    """Return the names of the asked tables that a backward updates, and of the dense part."""
    planned, fused = table_names(module), weights_in_backward(module)
    if not isinstance(tables, bool):
        known = sorted(set(planned.values()))
        for name in tables:
            check_known("table", name, known, "ExponentialMovingAverage(tables=...): ")
        asked = {name for name in fused if planned[name] in set(tables)}
    else:
        asked = fused if tables else set()
    parameters = dict(module.named_parameters())
    inside, processors = ShardedStateNames(module), processor_buffers(module) if use_buffers else {}
    dense = set()
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or name in fused:
            continue
        is_outside = name not in inside and (use_buffers or name in parameters)
        if name in planned or name in processors or is_outside:
            dense.add(name)
    return asked, dense
