"""The exchange of sizes before the input dist: one for all modules, and one read of it on the host.

And what then travels: lengths, ids and weights of all modules in one all-to-all, between hosts in half their bytes.
The sizes of the batch after it travel with them, where they are known by then.

TorchRec 1.8 reads what it sends back from the device, for an overflow check, and later the lengths of what it received,
feature by feature, which makes the host wait until the ids are there. Here the sizes go to the device in one copy from
pinned memory, and the lengths of the features travel with them: the host knows both from its one read. What a device
alone knows, how many ids of a row-wise table go to each rank, it adds itself, and the host reads it with the rest.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import dist_data
from torchrec.distributed.collective_utils import validate_collectives_enabled
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable, KJTSplitsAllToAllMeta
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse import jagged_tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..distributed import PackedExchange, Part
from ..tables import ids_fit_32_bits, input_dists_of
from .input_sizes import Form, ModuleInput, Sizes, form_of, is_counted_on_device, metas_of
from .module_context import ModuleContext, wait_for

MAX_RECATS = 256
"""Orders of received features kept at most: one for each sharding of each module."""


@contextmanager
def splits_only(module: Any, group: dist.ProcessGroup | None, *, narrow: bool = False) -> Iterator[None]:
    """Make a module's input dist describe its all-to-all of sizes instead of starting it, so it can be fused.

    Args:
        module: A sharded module.
        group: Of the input dist; None on one rank, where nothing travels.
        narrow: Whether ids and lengths are to travel in 32 bits, if all of the module's ids fit. The same on all ranks.
    """
    if group is None:
        yield
        return
    all_to_alls = [
        input_dist._dist
        for input_dist in input_dists_of(module)
        if isinstance(getattr(input_dist, "_dist", None), KJTAllToAll)
    ]
    narrow = narrow and ids_fit_32_bits(module) and not validate_collectives_enabled()
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
    splits, device = all_to_all._splits, kjt.device()
    first = sum(splits[: group.rank()])
    with torch.no_grad():
        if is_counted_on_device(kjt) and not validate_collectives_enabled():
            known = [kjt.stride() * num for num in splits]
            input_splits = [known if label == "lengths" else [0] * group.size() for label in kjt.dist_labels()]
        else:
            input_splits = kjt.dist_splits(splits)
        sizes = list(input_splits)
        if not kjt.variable_stride_per_key():
            sizes.append([kjt.stride()] * group.size())
        return KJTSplitsAllToAllMeta(
            pg=group,
            _input=kjt,
            splits=splits,
            splits_tensors=sizes,  # of which TorchRec takes the number
            input_splits=input_splits,
            input_tensors=_narrowed(kjt) if narrow else kjt.dist_tensors(),
            labels=kjt.dist_labels(),
            keys=kjt.keys()[first : first + splits[group.rank()]],
            device=device,
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


class KnownInput(NamedTuple):
    """What the ranks know of one module's input once the sizes are there."""

    data: Any
    """Awaits the ids, lengths and weights; None where a rank has no such input: then nothing of it is sent."""
    is_missing: bool
    """Whether some ranks' batches have such an input and others' have not."""
    is_ambiguous: bool
    """Whether the batch of any rank has several KeyedJaggedTensors that could be it."""


class SizeExchange:
    """Exchanges the sizes of all modules' inputs, batch by batch, in forms on which the ranks have agreed.

    Args:
        group: The process group of the input dist.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._forms: dict[str, Form] = {}
        self._waiting: list[InputSizes] = []

    def forget(self) -> None:
        """Let go of sizes that nobody is going to read."""
        self._waiting.clear()

    def start(
        self, taking_part: list[str], modules: dict[str, ModuleContext], num_found: Mapping[str, int]
    ) -> tuple[list[str], InputSizes] | None:
        """Start the exchange of sizes of these modules, whether or not this rank's batch has their inputs.

        They leave at once, or with the ids of an earlier batch if these have not been sent yet.

        Args:
            taking_part: The modules, the same on all ranks.
            modules: States of those that have an input in this rank's batch; one whose input has another form than
                the first one had is taken out, its own forward tells why.
            num_found: How many KeyedJaggedTensors of this rank's batch could be the input of each.

        Returns:
            The modules whose form is known, with their sizes under way; None if there is no such module.
        """
        described = {name: form_of(state.splits_awaitable) for name, state in modules.items()}
        if any(name not in self._forms for name in taking_part):
            self._agree_on_forms(described)
        for name, form in described.items():
            if self._forms.get(name) != form:  # weighted unlike the first one, say
                del modules[name]
        names = [name for name in taking_part if name in self._forms]
        inputs = [
            ModuleInput(self._forms[name], state.splits_awaitable, state.context, num_found[name])
            if (state := modules.get(name)) is not None
            else ModuleInput(self._forms[name])
            for name in names
        ]
        return (names, InputSizes(inputs, self._group, self._waiting)) if names else None

    def _agree_on_forms(self, described: Mapping[str, Form]) -> None:
        """Learn the forms of the modules' inputs from the ranks that have them in their first batch."""
        everyone: list[Mapping[str, Form]] = [{}] * self._group.size()
        dist.all_gather_object(everyone, dict(described), group=self._group)
        for theirs in everyone:
            for name, form in theirs.items():
                self._forms.setdefault(name, form)


class InputSizes:
    """The sizes of the input dists of all modules on their way to the other ranks.

    Args:
        inputs: By module, in an order that is the same on all ranks.
        group: The process group.
        waiting: The sizes of batches whose ids have not been sent; the same on all ranks. These are among them until
            they are read. If there are earlier ones, these travel with the ids of that batch, not in an all-to-all of
            their own.
    """

    def __init__(self, inputs: Sequence[ModuleInput], group: dist.ProcessGroup, waiting: list[InputSizes]) -> None:
        self._inputs, self._group, self._waiting = inputs, group, waiting
        self._tagged = validate_collectives_enabled()  # a debugging aid of TorchRec's: its tags travel with the sizes
        if not self._tagged:
            self._sizes = Sizes(inputs, group)
            if not waiting:
                self._sizes.send()
            waiting.append(self)
            return
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, [one.num_found for one in inputs], group=group)
        self._found = list(zip(*everyone, strict=True))
        kept = [one for one, found in zip(inputs, self._found, strict=True) if all(found)]
        for meta in (meta for one in kept for meta in metas_of(one.request)):
            meta.splits_tensors = [torch.tensor(sizes, device=meta.device) for sizes in meta.splits_tensors]
        self._fused = FusedKJTListSplitsAwaitable([one.request for one in kept], [one.context for one in kept], group)

    def wait(self) -> list[KnownInput]:
        """Read the sizes; start the all-to-alls of lengths, ids and weights of what all ranks have."""
        if self._tagged:
            found, started = self._found, self._fused.wait()
        else:
            if self in self._waiting:
                self._waiting.remove(self)
            known = self._sizes.wait()
            found = known.found
            kept = [one for one, num in zip(self._inputs, found, strict=True) if all(num)]
            fused = FusedKJTListSplitsAwaitable([one.request for one in kept], [one.context for one in kept], None)
            sizes = [one for one, num in zip(known.sizes, found, strict=True) if all(num)]
            if any(sizes):  # without a group it starts nothing by itself
                fused._splits_awaitable = NoWait([numbers for of_module in sizes for numbers in of_module])
            lengths = [one for one, num in zip(known.lengths, found, strict=True) if all(num)]
            started = self._start_packed(fused, sizes, [one for of_module in lengths for one in of_module])
        modules = iter(started)
        return [
            KnownInput(next(modules) if all(num) else None, min(num) == 0 < max(num), max(num) > 1) for num in found
        ]

    def _start_packed(
        self, fused: FusedKJTListSplitsAwaitable, sizes: list[list[list[int]]], lengths: list[list[int] | None]
    ) -> list[Any]:
        """Start one all-to-all of what TorchRec would send in several; it still assembles what comes."""
        described = list(fused._awaitables)
        metas = [one for one in described if isinstance(one, KJTSplitsAllToAllMeta)]
        tensors = [meta.input_tensors for meta in metas]
        for meta in metas:
            meta.input_tensors = []  # what it would send
        with _recats_kept():
            modules: list[Any] = fused.wait()
        if not metas:
            return modules
        received = iter([numbers for of_module in sizes for numbers in of_module])
        parts: list[Part] = []
        places: list[slice] = []
        for meta, own in zip(metas, tensors, strict=True):
            of_all = list(itertools.islice(received, len(meta.splits_tensors)))  # the last may be of no tensor: strides
            places.append(slice(len(parts), len(parts) + len(own)))
            parts += map(Part, own, meta.input_splits, of_all)
        with_them = [one._sizes for one in self._waiting if not one._sizes.is_sent]
        device = parts[0].tensor.device  # the host's group may send what is on a GPU
        exchange = PackedExchange([*parts, *(one.part(device) for one in with_them)], self._group)
        for number, later in enumerate(with_them, len(parts)):
            later.travel_with(exchange, number)
        every = iter(zip(metas, places, lengths, strict=True))
        flat = iter(described)
        for module in modules:
            for number, awaitable in enumerate(module.awaitables):
                if isinstance(next(flat), KJTSplitsAllToAllMeta):
                    meta, place, of_features = next(every)
                    dtypes = meta._input.lengths().dtype, meta._input.values().dtype
                    module.awaitables[number] = _Received(awaitable, exchange, place, of_features, dtypes)
        return modules


class _Received(Awaitable[KeyedJaggedTensor]):  # type: ignore[misc]
    """The ids of one all-to-all, whose lengths by feature are known before they are there.

    Args:
        awaitable: Assembles them.
        exchange: Brings lengths, ids and weights.
        place: Where in it they are.
        lengths: Of each feature, summed up; None where they are not known.
        dtypes: Of lengths and of ids, as they were before they travelled.
    """

    def __init__(
        self,
        awaitable: KJTAllToAllTensorsAwaitable,
        exchange: PackedExchange,
        place: slice,
        lengths: list[int] | None,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        super().__init__()
        self._awaitable, self._exchange, self._place = awaitable, exchange, place
        self._lengths, self._dtypes = lengths, dtypes

    def _wait_impl(self) -> KeyedJaggedTensor:
        self._awaitable._output_tensors = self._exchange.take(self._place)
        with _lengths_known(self._lengths):
            kjt = wait_for(self._awaitable)
        of_lengths, of_values = self._dtypes
        kjt._lengths, kjt._values = kjt.lengths().to(of_lengths), kjt.values().to(of_values)
        return kjt


class _Replaced:
    """Has TorchRec call another function in the place of one of its own. Where it lacks that, it does as it does.

    Args:
        place: The module of TorchRec's that has it, and calls it.
        name: Its name there.
        function: Called with TorchRec's own first.
    """

    __slots__ = ("_function", "_name", "_own", "_place")

    def __init__(self, place: ModuleType, name: str, function: Callable[..., Any]) -> None:
        self._place, self._name, self._function = place, name, function
        self._own = getattr(place, name, None)

    def __enter__(self) -> None:
        if self._own is not None:
            setattr(self._place, self._name, partial(self._function, self._own))

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            setattr(self._place, self._name, self._own)


def _lengths_known(lengths: list[int] | None) -> _Replaced:
    """Have TorchRec take the lengths of the features it assembles from here, where they are of these ids."""

    def length_per_key(own: Callable[..., list[int]], *args: Any, **of_kjt: Any) -> list[int]:
        if lengths is None or args or of_kjt["length_per_key"] is not None:
            return own(*args, **of_kjt)
        if len(lengths) == len(of_kjt["keys"]) and sum(lengths) == of_kjt["values"].numel():
            return lengths
        return own(*args, **of_kjt)

    return _Replaced(jagged_tensor, "_maybe_compute_length_per_key", length_per_key)


def _recats_kept() -> _Replaced:
    """Let TorchRec take the order of received features from a memory: it would copy the same one in every step."""
    return _Replaced(dist_data, "_get_recat", _kept_recat)


def _kept_recat(
    own: Callable[..., torch.Tensor | None],
    local_split: int,
    num_splits: int,
    stagger: int = 1,
    device: torch.device | None = None,
    batch_size_per_rank: list[int] | None = None,
) -> torch.Tensor | None:
    if batch_size_per_rank and any(size != batch_size_per_rank[0] for size in batch_size_per_rank):
        return own(local_split, num_splits, stagger, device, batch_size_per_rank)  # depends on the sizes
    return _recat(own, local_split, num_splits, stagger, device)


@functools.lru_cache(MAX_RECATS)
def _recat(
    own: Callable[..., torch.Tensor | None],
    local_split: int,
    num_splits: int,
    stagger: int,
    device: torch.device | None,
) -> torch.Tensor | None:
    with torch.inference_mode(False):  # an evaluation may come first, training uses it too
        return own(local_split, num_splits, stagger, device)
