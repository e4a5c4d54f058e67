"""Detect writes to inputs and tables of an early lookup by `Tensor._version`, which FBGEMM's updates do not change."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ..compat.fbgemm import memory_of
from ..compat.torch import call_after_backward, current_backward, tree_leaves
from ..compat.torch import num_writes as num_writes_of
from ..compat.torchrec import parts_of, same_slice, set_lengths, set_values, set_weights
from ..schedules import WeightOwner
from .parts import OfPart, find_parts, guard_sharded_tensors, set_data
from .replicas import replica_kernels
from .sharded_module import read_once, tbes
from .supported_modules import sharded_modules
from .table import NAME_BEFORE

_LENGTHS = 1  # their place in `parts_of`
_COUNTED_AT = "counted_at"  # attribute of an input: write count of its lengths when its ids were counted


class SentInput:
    """Values, lengths and weights of a KeyedJaggedTensor when its ids were sent, with their write counts."""

    __slots__ = ("_parts",)

    def __init__(self, kjt: KeyedJaggedTensor) -> None:
        kjt.lengths()  # computes them from the offsets, if needed
        parts = enumerate(parts_of(kjt))
        self._parts = [(place, weakref.ref(part), _version(part)) for place, part in parts if isinstance(part, Tensor)]

    def forget_ids(self) -> None:
        """Only compare lengths from now on, since the memory of values and weights is freed."""
        self._parts = [part for part in self._parts if part[0] == _LENGTHS]

    def is_unchanged(self, kjt: KeyedJaggedTensor) -> bool:
        """Return whether an input still has the sent tensors, unchanged."""
        parts = parts_of(kjt)
        for place, part, version in self._parts:
            now = parts[place]
            if now is not part() or _version(now) != version:
                return False
        return True


def _version(tensor: Any) -> int:
    return -1 if tensor.is_inference() else num_writes_of(tensor)


def count_writes(kjts: Iterable[KeyedJaggedTensor]) -> None:
    """Replace inference tensors in inputs, which do not count writes, by copies."""
    for kjt in kjts:
        for part, replace in zip(parts_of(kjt), (set_values, set_lengths, set_weights), strict=True):
            if isinstance(part, Tensor) and part.is_inference():
                with torch.inference_mode(False):
                    replace(kjt, part.clone())


def watch_lengths(kjts: Iterable[KeyedJaggedTensor]) -> None:
    """Let `renew_counts` find out whether the lengths of inputs are written from now on."""
    for kjt in kjts:
        vars(kjt)[_COUNTED_AT] = _version(kjt.lengths())


def renew_counts(kjt: KeyedJaggedTensor) -> None:
    """Drop the number of ids of each feature, which an input caches, if its lengths were written since."""
    before = vars(kjt).get(_COUNTED_AT)
    if before is not None and before != (now := _version(kjt.lengths())):
        kjt.unsync()
        vars(kjt)[_COUNTED_AT] = now


class _KeptAsMade:
    """Refuses to freeze or unfreeze the weight of a sharded table, whose kernel goes on as it was made."""

    __slots__ = ()
    name_in_model: str

    requires_grad = property(
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        lambda self, value: self.requires_grad_(value),
    )
    """Whether the weight needs a gradient."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad and not self.requires_grad:
            _refuse_to_unfreeze(self.name_in_model)
        if self.requires_grad and not requires_grad:
            _refuse_to_freeze(self.name_in_model)
        return self


class WatchedTable(_KeptAsMade, TableBatchedEmbeddingSlice):  # type: ignore[misc]
    """A table's weight whose `data` shares its write count; PyTorch's `data` has a separate count."""

    __slots__ = ()

    data = property(lambda self: self.detach(), set_data)
    """The weight without its graph, `(num_embeddings, embedding_dim)`."""

    @classmethod
    def like(cls, weight: TableBatchedEmbeddingSlice, *, frozen: bool) -> Self:
        """Return a weight with the memory of another one; the kernel's weight needs a gradient, frozen or not."""
        return same_slice(cls, weight, needs_gradient=not frozen)


class WatchedPart(OfPart, WatchedTable):
    """The weight of a table of which this rank has a part."""

    __slots__ = ()


class TableElsewhere(OfPart, _KeptAsMade, nn.Parameter):
    """The empty weight of a table without a shard on this rank: as `WatchedPart`, so that all ranks raise alike."""

    __slots__ = ()

    @classmethod
    def like(cls, weight: nn.Parameter, *, frozen: bool) -> Self:
        """Return an empty weight like another one."""
        return cls(weight.data, requires_grad=not frozen)


def _refuse_to_freeze(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} cannot be frozen (requires_grad=False) any more: the table is sharded, and its kernel trains every "
        "row that is looked up. Freeze it before fit, in __init__ or configure_model; to keep it constant for a while, "
        "schedule its learning rate with combined_optimizer."
    )


def _refuse_to_unfreeze(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} cannot be unfrozen (requires_grad=True) any more: the table was frozen when it was sharded, and "
        "nothing trains it. Make the module anew, with requires_grad=True before fit, and load a checkpoint; to train "
        "a table later, leave it unfrozen and schedule its learning rate with combined_optimizer."
    )


def watch_tables(model: nn.Module) -> None:
    """Count writes to the `weight.data` of sharded tables; refuse to read parts, and to freeze or unfreeze tables.

    Weights of TorchRec's classes are replaced by weights of the classes above, with the same names and memory.
    """
    frozen = {
        id(weight)
        for module in sharded_modules(model).values()
        for name, weight in module.named_parameters()
        if name.rpartition(".")[0].rpartition(".")[2] in getattr(module, "frozen_tables", ())
    }
    parts = find_parts(model)
    guard_sharded_tensors(model, parts)
    for name, weight in list(model.named_parameters()):
        watched: nn.Parameter
        if type(weight) is TableBatchedEmbeddingSlice:
            with torch.inference_mode(False), torch.enable_grad():  # else the slice of a trained weight needs none
                kind = WatchedPart if name in parts else WatchedTable
                watched = kind.like(weight, frozen=id(weight) in frozen)
        elif type(weight) is nn.Parameter and name in parts and not weight.numel():
            watched = TableElsewhere.like(weight, frozen=id(weight) in frozen)
        else:
            continue
        vars(watched).update(vars(weight), name_in_model=name, place=parts.get(name))
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, watched)
        vars(weight)[NAME_BEFORE] = name  # an optimizer that the user made earlier may have it


def refuse_gradients(model: nn.Module) -> None:
    """Raise an error in a backward that gives the weights of sharded tables a gradient, which no step applies."""
    for module in sharded_modules(model).values():
        _refuse_gradients(module)


@read_once
def _fused_weights(module: Any) -> list[Tensor]:
    weights = [weight for tbe in tbes(module) for weight in memory_of(tbe)]
    return weights + [kernel.weights for kernel in replica_kernels(module) if kernel.weights.numel()]


@read_once
def dense_weights(module: Any) -> list[Tensor]:
    """Return a module's weights of the dense optimizer, which `num_fused_writes` excludes; not those of replicas."""
    return [weight for _, weight in in_backward_optimizer_filter(module.named_parameters())]


@read_once
def _refuse_gradients(module: Any) -> list[Any]:
    owner = weakref.ref(module)  # a strong reference in a hook would keep the module alive

    def check(weight: Tensor) -> None:
        module: Any = owner()
        trained = getattr(module, "trained_in_backward", None)
        in_backward = in_backward_optimizer_filter(module.named_parameters(), include=True)
        tables = {name.split(".")[-2]: part.grad for name, part in in_backward if part.grad is not None}
        lost = [name for name, grad in tables.items() if (trained is None or name in trained) and grad.any()]
        weight.grad = None
        if lost:
            backward = current_backward()
            if backward not in _lost_gradients:  # other kernels' gradients may follow in this backward
                call_after_backward(partial(_raise_lost_gradients, backward))
            _lost_gradients.setdefault(backward, []).extend(lost)
            return
        # Zero gradients mark parameters as used for DistributedDataParallel: check each kernel only once.
        handles.pop(id(weight)).remove()

    weights = [weight for weight in _fused_weights(module) if weight.requires_grad]
    handles = {id(weight): weight.register_post_accumulate_grad_hook(check) for weight in weights}
    return [handles]


# Backward -> tables whose weights got a gradient in it; those of a backward with another error stay.
_lost_gradients: dict[int, list[str]] = {}


def _raise_lost_gradients(backward: int) -> None:
    names = sorted(_lost_gradients.pop(backward))
    raise RuntimeError(
        f"the loss uses the weight of {', '.join(names)} directly, not by lookups, for example in a penalty on all "
        "parameters or a product with the whole table. Only lookups train a sharded table, and a rank may have "
        "only a part of it, so this gradient would be lost. Exclude tables "
        "(torchrec.optim.optimizers.in_backward_optimizer_filter returns the other parameters), penalize the "
        "looked-up embeddings, or look up the rows of the product."
    )


def num_fused_writes(module: Any) -> tuple[int, ...]:
    """Return the write count of each weight of a module's fused tables, without updates by the fused backward."""
    return tuple(map(num_writes_of, _fused_weights(module)))


def count_backwards(module: Any, answer: Any) -> None:
    """Count each backward of a module's answer outside of a training step: FBGEMM's kernels do not count its writes."""

    def count() -> None:
        _num_backwards(module)[0] += 1

    for tensor in answer_tensors(answer):
        tensor.register_hook(lambda _: call_after_backward(count))


def answer_tensors(answer: Any) -> list[Tensor]:
    """Return the tensors of a module's answer that the gradient of each of its parts passes, if it needs one."""
    # Gradients of single columns do not reach a ConfigOrderKeyedTensor's own `values()`.
    parts = tree_leaves(answer, is_leaf=lambda part: isinstance(part, KeyedTensor))
    tensors = (KeyedTensor.values(part) if isinstance(part, KeyedTensor) else part for part in parts)
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]


@read_once
def _num_backwards(module: Any) -> list[int]:
    return [0]


def num_writes(module: Any, owner: WeightOwner) -> tuple[int, ...]:
    """Return the counted backwards, then the write count of each weight that a lookup of this owner reads."""
    if owner is WeightOwner.LOOKUP:
        return ()
    dense = dense_weights(module) if owner is WeightOwner.DENSE_OPTIMIZER else ()
    return (*_num_backwards(module), *map(num_writes_of, _fused_weights(module)), *map(num_writes_of, dense))
