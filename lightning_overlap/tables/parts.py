"""Weights of which this rank has a part only: an operator that would read a part as the whole table is an error.

The weight of a table that is sharded over ranks, and what shares or copies its memory (`detach()`, `data`, `clone()`,
`to()`), refuses all operators but those that read no element, or write the part in place, element by element. The error
comes on every rank, whatever the rank has of the table, so that none goes on alone. TorchRec, FBGEMM and optimizers
work on parts. This package reads parts by `local_part`, or by `local_shards()` of what a `state_dict` has.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torchrec.distributed.types import ShardedTensor

from ..compat.torch import ASKED_BY_APPLY, DYNAMO, as_plain_tensors, wrapper_of
from ..compat.torchrec import group_of
from ..text import some
from .supported_modules import DATA_PARALLEL, sharded_modules, spec_of, table_modules

Shard: TypeAlias = tuple[int, tuple[int, int], tuple[int, int]]  # rank, (first row, first column), (rows, columns)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ABOUT = {ASKED_BY_APPLY} | _names(
    "dim dim_order element_size get_device has_names is_complex is_conj is_contiguous is_floating_point is_inference "
    "is_neg is_pinned is_same_size is_set_to is_shared is_signed nelement ndimension new new_empty new_full new_ones "
    "new_tensor new_zeros numel register_hook register_post_accumulate_grad_hook retain_grad size storage_offset stride"
)
"""Operators that read no element."""

_COPIES = _names(
    "bfloat16 clone contiguous cpu cuda detach detach_ double empty_like float full_like half ones_like pin_memory "
    "rand_like randint_like randn_like requires_grad_ share_memory_ to type type_as zeros_like"
)
"""Operators whose result has an element for each element of a part: it is a part, too."""

_WRITES = _names(
    "__iadd__ __idiv__ __imul__ __ipow__ __isub__ __itruediv__ abs_ add_ addcdiv_ addcmul_ bernoulli_ cauchy_ ceil_ "
    "clamp_ clamp_max_ clamp_min_ clip_ constant_ copy_ div_ divide_ erfinv_ exp_ exponential_ fill_ floor_ fmod_ "
    "geometric_ lerp_ log_ log_normal_ masked_fill_ mul_ multiply_ nan_to_num_ neg_ negative_ normal_ pow_ random_ "
    "reciprocal_ relu_ remainder_ round_ rsqrt_ sigmoid_ sign_ sqrt_ square_ sub_ subtract_ tanh_ true_divide_ trunc_ "
    "uniform_ zero_"
)
"""Operators that write a tensor in place, each element by elements of the same place."""

_READING_ATTRIBUTES = frozenset(("H", "T", "imag", "mH", "mT", "real"))
_INITS_BY_SHAPE = ("xavier_uniform_", "xavier_normal_")  # of `torch.nn.init`; others, such as Kaiming's, are no writes
_WORK_ON_PARTS = ("torch.optim.", "torch.autograd.graph.", "torchrec.", "fbgemm_gpu.")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the parts of a table are; alike on all ranks, except for `rank`."""

    weight: str  # its name in the model
    table: str  # as `strategy.table` takes it
    sharding: str
    shape: tuple[int, int]  # of the whole table
    shards: tuple[Shard, ...]
    rank: int  # this one

    @property
    def mine(self) -> str:
        """What this rank has of the table, in words."""
        own = [(start, size) for rank, start, size in self.shards if rank == self.rank and 0 not in size]
        if not own:
            return "nothing of it"
        if own[0][1] == self.shape:
            return "all of it, and the other ranks nothing"
        return some((self._described(*shard) for shard in own), 3)

    def _described(self, start: tuple[int, int], size: tuple[int, int]) -> str:
        found = [
            f"{what} {first} to {first + num - 1} of {whole}"
            for what, first, num, whole in zip(("rows", "columns"), start, size, self.shape, strict=True)
            if num != whole
        ]
        return " in ".join(found)

    def is_alike(self, other: "Place") -> bool:
        """Whether two tables have the same elements at the same places, on all ranks."""
        return (self.shape, self.shards) == (other.shape, other.shards)

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape fits the part of each rank that has one, by broadcasting."""
        return all(_fits(shape, size) for _, _, size in self.shards if 0 not in size)


class OfPart:
    """What all tensors have that are a part of a table: operators that would read it as the whole are errors."""

    __slots__ = ()

    data = property(lambda self: self.detach(), lambda self, value: set_data(self, value))
    """The part without its graph, `(rows, columns)`; PyTorch's `data` has a write count of its own."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on a part, unless it would read the part as the whole table."""
        kwargs = kwargs or {}
        name = _name_of(func)
        target = args[0] if args else next(iter(kwargs.values()))
        if name in ("__repr__", "__format__"):
            return _text(target)
        if name in _WRITES and isinstance(target, OfPart) and "out" not in kwargs:
            return _write(func, target, args, kwargs)
        if name not in _ABOUT and name not in _COPIES and not _is_attribute(func) and not _works_on_parts():
            _refuse_to_read(place_of(_first(OfPart, (args, kwargs))), "compiled code" if _is_traced() else name)
        with as_plain_tensors():
            result = func(*_unwrapped(args), **_unwrapped(kwargs))
        is_copy = name in _COPIES and isinstance(target, OfPart) and isinstance(result, Tensor)
        if is_copy and not (name.endswith("_like") and _works_on_parts()):  # the states of an optimizer are its own
            return _as_part(result, place_of(target))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()  # type: ignore[attr-defined]
        return memo[id(self)]

    def __reduce_ex__(self, _: Any) -> NoReturn:
        _refuse_to_read(place_of(self), "a copy or pickle")


class Part(OfPart, Tensor):
    """A tensor that shares or copies the memory of a part of a table, which it wraps: it has no memory of its own.

    So operators that do not ask `__torch_function__`, such as those of `torch.func` and collectives, cannot read it.
    """

    def __new__(cls, own: Tensor, place: Place) -> "Part":
        """Wrap a tensor, `(rows, columns)` of the table at `place`."""
        made = wrapper_of(cls, own)  # users see the attributes of `own`
        vars(made).update(own=own, place=place)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Refuse what `__torch_function__` has not seen."""
        _refuse_to_read(place_of(_first(Part, (args, kwargs or {}))), func.overloadpacket.__name__)


class ShardedTable(ShardedTensor):  # type: ignore[misc]
    """The weight of a table in a `state_dict`: what torch cannot compute with it is an error that tells a way out."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do as torch does, except for the text of an error, and for lookups, whose collectives few tables allow."""
        if func in (functional.embedding, functional.embedding_bag):
            _refuse_to_read(place_of(_first(ShardedTable, (args, kwargs))), _name_of(func))
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as err:
            table = _first(ShardedTable, (args, kwargs))
            if "not supported for ShardedTensor" in str(err) and "place" in vars(table):  # a copy has none
                _refuse_to_read(place_of(table), _name_of(func))
            raise


def place_of(part: Any) -> Place:
    """Return where the parts of a table are, of a part or a `ShardedTable`."""
    place: Place = vars(part)["place"]
    return place


def local_part(weight: Tensor) -> Tensor:
    """Return a weight without its graph, for code that works on parts; of a table it is what this rank has."""
    with as_plain_tensors():
        return _unwrapped((weight,))[0].detach()  # type: ignore[no-any-return]


def set_data(weight: Tensor, value: Tensor) -> None:
    """Give the weight of a sharded table other memory, for `nn.Module.to()` and the like; for users it is an error."""
    first = next(_callers()).f_globals.get("__name__", "")
    if not f"{first}.".startswith(("torch.", "torchrec.", "fbgemm_gpu.")):
        name = getattr(weight, "name_in_model", None) or place_of(weight).weight
        raise RuntimeError(
            f"{name}.data cannot be exchanged any more: the table is sharded, and its kernel goes on with its own "
            "memory. Give the table its values before fit (in __init__, setup or configure_model), or write into it: "
            "load_state_dict(..., strict=False) takes whole tables, and mul_, clamp_ and the like write every element."
        )
    with as_plain_tensors():
        Tensor.data.__set__(weight, _unwrapped((value,))[0])  # type: ignore[attr-defined]


def _unwrapped(values: Any) -> Any:
    """Return nested tuples, lists and dicts with the tensors that parts wrap in the place of the parts."""
    if isinstance(values, Part):
        return vars(values)["own"]
    if isinstance(values, Mapping):
        return {key: _unwrapped(value) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(map(_unwrapped, values))
    return values


def find_parts(model: nn.Module) -> dict[str, Place]:
    """Return the name of a weight -> its place, of the tables of which a rank may have a part; alike on all ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    known_as = _names_for_users(model)
    found = {}
    for path, module in table_modules(model).items():
        group = group_of(module)
        is_alone = group is None or group.size() == 1
        for key, _ in module.named_parameters(path):
            table = key.split(".")[-2]
            how = module.module_sharding_plan.get(table)
            if how is None or how.sharding_type == DATA_PARALLEL or how.sharding_spec is None:
                continue
            shards = tuple(map(_shard, how.sharding_spec.shards))
            if is_alone and len(shards) == 1:
                continue
            found[key] = Place(key, known_as[path, table], how.sharding_type, _whole_shape(shards), shards, rank)
    return found


def guard_sharded_tensors(model: nn.Module, places: Mapping[str, Place]) -> None:
    """Let the ShardedTensors of tables, in `state_dict()` and in fused optimizers, tell how to read the whole table."""
    for path, module in table_modules(model).items():
        for key, value in (*module.state_dict().items(), *module.fused_optimizer.params.items()):
            place = places.get(f"{path}.{key}")
            if place is not None and type(value) is ShardedTensor:
                value.__class__ = ShardedTable  # TorchRec makes these objects once, and compares them by identity
                vars(value)["place"] = place


def _text(part: Any) -> str:
    place, tensor = place_of(part), local_part(part)
    about = f"shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device}"
    return f"{type(part).__name__}({place.weight}, {place.sharding}: this rank has {place.mine}; {about})"


def _as_part(tensor: Tensor, place: Place) -> Any:
    if isinstance(tensor, OfPart):  # the operator has returned its argument
        return tensor
    return Part(tensor, place)


def _names_for_users(model: nn.Module) -> dict[tuple[str, str], str]:
    """Return (path of a collection, table) -> the name by which `strategy.table` finds the table."""
    found = {}
    for outer_name, outer in sharded_modules(model).items():
        for inner_name, module in table_modules(outer).items():
            path = f"{outer_name}.{inner_name}" if inner_name else outer_name
            for table in module.module_sharding_plan:
                found[path, table] = f"{path if spec_of(outer) is None else outer_name}.{table}"
    tables = [table for _, table in found]
    return {key: key[1] if tables.count(key[1]) == 1 else name for key, name in found.items()}


def _shard(shard: Any) -> Shard:
    (row, column), (num_rows, num_columns) = shard.shard_offsets, shard.shard_sizes
    return shard.placement.rank(), (row, column), (num_rows, num_columns)


def _whole_shape(shards: Iterable[Shard]) -> tuple[int, int]:
    ends = [(row + num_rows, column + num_columns) for _, (row, column), (num_rows, num_columns) in shards]
    return max(row for row, _ in ends), max(column for _, column in ends)


def _name_of(func: Any) -> str:
    """Return the name of an operator, or of the attribute that it reads."""
    return str(getattr(func.__self__ if _is_getter(func) else func, "__name__", func))


def _is_getter(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def _is_attribute(func: Any) -> bool:
    """Whether an operator reads or writes an attribute that says what a tensor is."""
    if _is_getter(func):
        return _name_of(func) not in _READING_ATTRIBUTES
    return getattr(func, "__name__", "") == "__set__"


def _write(func: Any, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write a part element by element; raise a RuntimeError for operands that do not fit the parts of all ranks."""
    place, own = place_of(target), local_part(target).shape
    if _initializes_by_shape():
        _refuse_to_read(place, "an initialization by the weight's shape")
    operands = [operand for operand in (*args, *kwargs.values()) if isinstance(operand, Tensor)]
    for operand in operands:
        if isinstance(operand, OfPart):
            fits = place.is_alike(place_of(operand)) and local_part(operand).shape == own
        else:
            fits = operand.shape == own or place.takes(operand.shape)
        if not fits:
            _refuse_operand(place, _name_of(func), operand)
    if any(not _fits(operand.shape, own) for operand in operands):
        return target  # this rank has nothing of the table: others write it
    with as_plain_tensors():
        func(*_unwrapped(args), **_unwrapped(kwargs))
    return target


def _fits(shape: tuple[int, ...], size: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(size), strict=False)
    return len(shape) <= len(size) and all(of_shape in (1, of_size) for of_shape, of_size in pairs)


def _first(kind: type, values: Any) -> Any:
    """Return the first object of a kind in tuples, lists and dicts within each other, or None."""
    if isinstance(values, kind):
        return values
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return None
    return next((found for value in values if (found := _first(kind, value)) is not None), None)


def _callers() -> Iterator[FrameType]:
    """Yield the frames that have called an operator: those of torch, and the first one outside of it.

    A `TorchFunctionMode`, which passes operators on, calls none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and frame.f_code.co_name != "__torch_function__":
            yield frame
            if not module.startswith("torch."):
                return
        frame = frame.f_back


def _works_on_parts() -> bool:
    """Whether an optimizer, TorchRec or FBGEMM calls: what they compute is right on any part.

    So does `torch.autograd.graph`, which makes views to find nodes of graphs.
    """
    for frame in _callers():
        if f"{frame.f_globals.get('__name__')}.".startswith(_WORK_ON_PARTS):
            return True
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
    return False


def _is_traced() -> bool:
    return any(str(frame.f_globals.get("__name__")).startswith(DYNAMO) for frame in _callers())


def _initializes_by_shape() -> bool:
    return any(frame.f_code.co_name in _INITS_BY_SHAPE for frame in _callers())


def _refuse_to_read(place: Place, what: str) -> NoReturn:
    raise RuntimeError(
        f"{place.weight}: {what} would take a part of the table for the whole. The table is sharded "
        f"({place.sharding}), and rank {place.rank} has {place.mine}. Read the whole table by "
        f"trainer.strategy.table({place.table!r}), or its rows in pieces by table_chunks, which all ranks call. In a "
        "loss, look up the rows, and leave tables out of penalties (in_backward_optimizer_filter of "
        "torchrec.optim.optimizers returns the other parameters). Allowed are writes in place that treat all elements "
        "alike (mul_, clamp_, zero_, ...)."
    )


def _refuse_operand(place: Place, name: str, operand: Any) -> NoReturn:
    if isinstance(operand, OfPart):
        given = f"a part of {place_of(operand).weight}, which has other rows or columns"
    else:
        given = f"a tensor of shape {tuple(operand.shape)}"
    raise RuntimeError(
        f"{place.weight}: {name} got {given}. The table is sharded ({place.sharding}), and rank {place.rank} has "
        f"{place.mine}. Write it from numbers, or from a tensor that fits each part, such as one of a table that is "
        "sharded alike. To write whole tables use load_state_dict; trainer.strategy.table"
        f"({place.table!r}) reads them."
    )
