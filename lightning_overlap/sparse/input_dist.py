"""The input dist of all sharded modules: one exchange of sizes, then lengths, ids and weights in one all-to-all.

Between hosts ids travel in half their bytes. The sizes of the batch after it travel with them, where they are known by
then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import dist_data
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import (
    KJTListAwaitable,
    KJTSplitsAllToAllMeta,
    _set_sharding_context_intra_a2a,
)
from torchrec.sparse import jagged_tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..distributed import PackedExchange, Part
from ..runtime import InFlightBatch
from ..tables import ids_fit_32_bits, input_dists_of
from .input_sizes import Form, InputSizes, PartSizes, form_of, is_counted_on_device
from .module_context import ModuleContext, replaced

MAX_RECATS = 256
"""Orders of received features kept at most: one for each sharding of each module."""


@contextmanager
def splits_only(module: Any, group: dist.ProcessGroup | None, *, narrow: bool = False) -> Iterator[None]:
    """Make a module's input dist describe its all-to-all of sizes instead of starting it, so it can be fused.

    With `narrow` ids and lengths travel in 32 bits, if all of the module's ids fit. On one rank, without a group,
    nothing travels.
    """
    if group is None:
        yield
        return
    found = [getattr(input_dist, "_dist", None) for input_dist in input_dists_of(module)]
    all_to_alls = [one for one in found if isinstance(one, KJTAllToAll)]
    narrow = narrow and ids_fit_32_bits(module)
    for all_to_all in all_to_alls:
        vars(all_to_all)["forward"] = partial(_describe, all_to_all, group, narrow)  # not through nn.Module's search
    try:
        yield
    finally:
        for all_to_all in all_to_alls:
            del vars(all_to_all)["forward"]


def _describe(
    all_to_all: KJTAllToAll, group: dist.ProcessGroup, narrow: bool, kjt: KeyedJaggedTensor
) -> KJTSplitsAllToAllMeta:
    """Return what an all-to-all of sizes would exchange, on the host. Source: `KJTAllToAll.forward`, TorchRec 1.8."""
    splits = all_to_all._splits
    first = sum(splits[: group.rank()])
    with torch.no_grad():
        if is_counted_on_device(kjt):
            of_lengths = [kjt.stride() * num for num in splits]
            input_splits = [of_lengths if label == "lengths" else [0] * len(splits) for label in kjt.dist_labels()]
        else:
            input_splits = kjt.dist_splits(splits)
        batch_sizes = [] if kjt.variable_stride_per_key() else [[kjt.stride()] * group.size()]
        return KJTSplitsAllToAllMeta(
            pg=group,
            _input=kjt,
            splits=splits,
            splits_tensors=[*input_splits, *batch_sizes],
            input_splits=input_splits,
            input_tensors=_narrowed(kjt) if narrow else kjt.dist_tensors(),
            labels=kjt.dist_labels(),
            keys=kjt.keys()[first : first + splits[group.rank()]],
            device=kjt.device(),
            stagger=all_to_all._stagger,
        )


def _narrowed(kjt: KeyedJaggedTensor) -> list[Tensor]:
    """Return what travels, ids and lengths in 32 bits. An id that does not fit is of no row, and stays so."""
    limits = torch.iinfo(torch.int32)
    tensors = dict(zip(kjt.dist_labels(), kjt.dist_tensors(), strict=True))
    for label in ("lengths", "values"):
        if tensors[label].dtype is torch.int64:
            tensors[label] = tensors[label].clamp(limits.min, limits.max).int()
    return list(tensors.values())


class InputExchange:
    """Exchanges the inputs of all modules, batch by batch: sizes, in forms on which the ranks agree, then the ids."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._forms: dict[str, Form] = {}
        self._waiting: list[InputSizes] = []
        """Of batches whose ids have not been sent; the same on all ranks."""

    def forget(self) -> None:
        """Let go of sizes that nobody is going to read."""
        self._waiting.clear()

    def start_sizes(
        self, taking_part: list[str], modules: dict[str, ModuleContext], num_found: Mapping[str, int]
    ) -> InputSizes | None:
        """Start the exchange of sizes of these modules, whether or not this rank's batch has their inputs.

        They leave at once, or with the ids of an earlier batch if these have not been sent yet.

        Args:
            taking_part: The modules, the same on all ranks.
            modules: States of those that have an input in this rank's batch; one whose input has another form than
                the first one had is taken out, its own forward tells why.
            num_found: How many KeyedJaggedTensors of this rank's batch could be the input of each.

        Returns:
            The sizes of the modules whose form is known; None if there is no such module.
        """
        described = {name: form_of(state.splits_awaitable) for name, state in modules.items()}
        if any(name not in self._forms for name in taking_part):
            everyone: list[Mapping[str, Form]] = [{}] * self._group.size()
            dist.all_gather_object(everyone, described, group=self._group)
            for theirs in everyone:  # a rank may have no input for a module in its first batch
                self._forms = {**theirs, **self._forms}
        for name, form in described.items():
            if self._forms.get(name) != form:  # weighted unlike the first one, say
                del modules[name]
        forms = {name: self._forms[name] for name in taking_part if name in self._forms}
        if not forms:
            return None
        sizes = InputSizes(forms, modules, num_found, self._group)
        if not self._waiting:
            sizes.send()
        self._waiting.append(sizes)
        return sizes

    def start_data(self, inflight: InFlightBatch) -> None:
        """Read the sizes of a batch; start one all-to-all of what TorchRec would send in several, and still assembles.

        Of an input that some rank's batch lacks nothing is sent: its state is taken out.

        Source: `FusedKJTListSplitsAwaitable`, TorchRec 1.8.
        """
        sizes: InputSizes = inflight.sizes
        inflight.sizes = None
        if sizes in self._waiting:
            self._waiting.remove(sizes)
        coming: list[_Received] = []
        parts: list[Part] = []
        with replaced(dist_data, "_get_recat", partial(_kept_recat, dist_data._get_recat)):
            for name, (found, of_parts) in sizes.wait().items():
                if not all(found):
                    inflight.modules.pop(name, None)
                    inflight.missing |= {name} if any(found) else set()
                    continue
                state, of_each = inflight.modules[name], iter(of_parts)
                awaitables: list[Any] = []
                for described in state.splits_awaitable.awaitables:
                    if not isinstance(described, KJTSplitsAllToAllMeta):  # nothing of it travels
                        awaitables.append(described.wait())
                        continue
                    of_part = next(of_each)
                    coming.append(_Received(described, of_part, len(parts)))
                    awaitables.append(coming[-1])
                    parts += map(Part, described.input_tensors, described.input_splits, of_part.by_tensor)
                _set_sharding_context_intra_a2a(awaitables, state.context)
                state.tensors_awaitable, state.splits_awaitable = KJTListAwaitable(awaitables, state.context), None
                state.votes = max(found) > 1
        if parts:
            with_them = [later for later in self._waiting if not later.is_sent]
            device = parts[0].tensor.device  # the host's group may send what is on a GPU
            exchange = PackedExchange([*parts, *(later.part(device) for later in with_them)], self._group)
            for number, later in enumerate(with_them, len(parts)):
                later.travel_with(exchange, number)
            for received in coming:
                received.exchange = exchange


class _Received(KJTAllToAllTensorsAwaitable):  # type: ignore[misc]
    """The ids of one all-to-all, whose lengths by feature are known before they are there.

    An exchange brings lengths, ids and weights, from the place `first` on.
    """

    exchange: PackedExchange

    def __init__(self, meta: KJTSplitsAllToAllMeta, sizes: PartSizes, first: int) -> None:
        kept = ("pg", "splits", "input_splits", "labels", "keys", "device", "stagger")
        varies = meta._input.variable_stride_per_key()
        super().__init__(
            **{name: getattr(meta, name) for name in kept},
            input=meta._input,
            input_tensors=[],  # it would send them
            output_splits=sizes.by_tensor if varies else sizes.by_tensor[:-1],
            stride_per_rank=None if varies else sizes.by_tensor[-1],
        )
        self._place = slice(first, first + len(meta.input_tensors))
        self._lengths = sizes.lengths

    def _wait_impl(self) -> KeyedJaggedTensor:
        self._output_tensors = self.exchange.take(self._place)
        with _lengths_known(self._lengths):
            kjt = super()._wait_impl()
        kjt._lengths = kjt.lengths().to(self._input.lengths().dtype)  # where they travelled in 32 bits
        kjt._values = kjt.values().to(self._input.values().dtype)
        return kjt


def _lengths_known(lengths: list[int] | None) -> AbstractContextManager[None]:
    """Have TorchRec take the lengths of the features it assembles from here, where they are of these ids."""
    own: Callable[..., list[int]] = jagged_tensor._maybe_compute_length_per_key

    def length_per_key(*args: Any, **of_kjt: Any) -> list[int]:
        if lengths is None or args or of_kjt["length_per_key"] is not None:
            return own(*args, **of_kjt)
        are_these = len(lengths) == len(of_kjt["keys"]) and sum(lengths) == of_kjt["values"].numel()
        return lengths if are_these else own(*args, **of_kjt)

    return replaced(jagged_tensor, "_maybe_compute_length_per_key", length_per_key)


def _kept_recat(
    own: Callable[..., Tensor | None], *, batch_size_per_rank: list[int] | None, **splits: Any
) -> Tensor | None:
    """Return the order of received features from a memory: TorchRec would copy the same one in every step."""
    if batch_size_per_rank and any(size != batch_size_per_rank[0] for size in batch_size_per_rank):
        return own(batch_size_per_rank=batch_size_per_rank, **splits)  # depends on the sizes
    return _recat(own, **splits)


@lru_cache(MAX_RECATS)
def _recat(own: Callable[..., Tensor | None], **splits: Any) -> Tensor | None:
    with torch.inference_mode(False):  # an evaluation may come first, training uses it too
        return own(**splits)
