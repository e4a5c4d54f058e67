"""Find out whether the input of an early lookup, or the tables that it read, were written since.

Every tensor counts its in-place writes (`Tensor._version`). FBGEMM's kernels do not raise that count of the tables when
they update them, so a higher count means that somebody else has written a table.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..schedules import WeightOwner
from ..text import some
from .columns import call_in_backward
from .replicas import replica_kernels
from .sharded_module import read_once, tbes
from .supported_modules import sharded_modules

_PARTS = ("_values", "_lengths", "_weights")


class SentInput:
    """The tensors of a KeyedJaggedTensor when its ids were sent, with their write counts: values, lengths, weights."""

    __slots__ = ("_parts",)

    def __init__(self, kjt: KeyedJaggedTensor) -> None:
        kjt.lengths()  # may only now be computed from the offsets
        parts = [(name, getattr(kjt, name)) for name in _PARTS]
        self._parts = [(name, weakref.ref(part), _version(part)) for name, part in parts if isinstance(part, Tensor)]

    def forget_ids(self) -> None:
        """Compare lengths only from now on: the memory of values and weights was freed, nobody can change them."""
        self._parts = [part for part in self._parts if part[0] == "_lengths"]

    def is_unchanged(self, kjt: KeyedJaggedTensor) -> bool:
        """Whether an input still holds the tensors that were sent, and nobody has written them since."""
        for name, part, version in self._parts:
            now = getattr(kjt, name)
            if now is not part() or _version(now) != version:
                return False
        return True


def _version(tensor: Any) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)


def count_writes(kjts: Iterable[KeyedJaggedTensor]) -> None:
    """Replace tensors of inputs that were made in inference mode, which count no writes, by copies that do."""
    for kjt in kjts:
        for name in _PARTS:
            part = getattr(kjt, name)
            if isinstance(part, Tensor) and part.is_inference():
                with torch.inference_mode(False):
                    setattr(kjt, name, part.clone())


class WatchedTable(TableBatchedEmbeddingSlice):  # type: ignore[misc]
    """A table's weight whose `data` shares its write count; PyTorch's own `data` has a separate count."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """The weight without its graph, `(num_embeddings, embedding_dim)`."""
        shared: Tensor = self.detach()
        return shared

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


def watch_tables(model: nn.Module) -> None:
    """Let writes to `weight.data` of a sharded model's tables raise the count of the weight, too.

    A gradient of a fused table's weight itself is an error from now on: nobody would apply it.
    """
    for parameter in model.parameters():
        if type(parameter) is TableBatchedEmbeddingSlice:
            parameter.__class__ = WatchedTable
    for module in sharded_modules(model).values():
        _refuse_gradients(module)


@read_once
def _fused_weights(module: Any) -> list[Tensor]:
    weights = [weight for tbe in tbes(module) for weight in (tbe.weights_host, tbe.weights_dev, tbe.weights_uvm)]
    weights += [kernel.weights for kernel in replica_kernels(module)]
    return [weight for weight in weights if weight.numel()]


@read_once
def _dense_weights(module: Any) -> list[Tensor]:
    return [weight for _, weight in in_backward_optimizer_filter(module.named_parameters())]


@read_once
def _refuse_gradients(module: Any) -> list[Any]:
    def check(weight: Tensor) -> None:
        trained = getattr(module, "trained_in_backward", None)
        in_backward = in_backward_optimizer_filter(module.named_parameters(), include=True)
        tables = {name.split(".")[-2]: part.grad for name, part in in_backward if part.grad is not None}
        lost = [name for name, grad in tables.items() if (trained is None or name in trained) and grad.any()]
        weight.grad = None
        if lost:
            raise RuntimeError(
                f"the loss has a gradient for the weight of {some(lost)} itself, not by lookups: by a penalty on all "
                "parameters, say, or a product with the whole table. A sharded table is trained by its lookups alone, "
                "and a rank may have a part of it only: this gradient would be lost. Leave tables out (of all "
                "parameters torchrec.optim.optimizers.in_backward_optimizer_filter gives the others), penalize the "
                "embeddings that were looked up, or look up the rows to multiply with."
            )
        for handle in handles:  # zeros, which show DistributedDataParallel that a parameter is used: looked at once
            handle.remove()

    weights = [weight for weight in _fused_weights(module) if weight.requires_grad]
    handles = [weight.register_post_accumulate_grad_hook(check) for weight in weights]
    return handles


def num_fused_writes(module: Any) -> tuple[int, ...]:
    """Return the write count of each weight of a module's fused tables: writes by anybody but the fused backward."""
    return tuple(weight._version for weight in _fused_weights(module))


def has_dense_weights(module: Any) -> bool:
    """Whether a module has weights of the dense optimizer, which `num_fused_writes` leaves out. Replicas are none."""
    return bool(_dense_weights(module))


def count_backwards(module: Any, answer: Any) -> None:
    """Count each backward of an answer that a module has given outside of a training step, once it has written tables.

    What it writes FBGEMM's kernels do not count, and no step's end shows it.
    """

    def count() -> None:
        _num_backwards[module] = _num_backwards.get(module, 0) + 1

    queue = torch.autograd.Variable._execution_engine.queue_callback
    call_in_backward(answer, lambda: queue(count))


_num_backwards: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Sharded module -> backwards of `count_backwards`."""


def fused_writes(model: nn.Module) -> int:
    """Return the sum of the write counts of all fused tables of a sharded model."""
    return sum(write for module in sharded_modules(model).values() for write in num_fused_writes(module))


def num_writes(module: Any, owner: WeightOwner) -> tuple[int, ...]:
    """Return the write count of each weight that a lookup reads.

    Args:
        module: The sharded module.
        owner: The last writer of the tables that were looked up. For the dense optimizer the counts of its own weights
            are there too: it has written them before the lookup.

    Returns:
        The backwards of `count_backwards`, then one count for each weight; nothing for `WeightOwner.LOOKUP`, which
        looks up where the module is called.
    """
    if owner is WeightOwner.LOOKUP:
        return ()
    dense = _dense_weights(module) if owner is WeightOwner.DENSE_OPTIMIZER else []
    return (_num_backwards.get(module, 0), *num_fused_writes(module), *(weight._version for weight in dense))
