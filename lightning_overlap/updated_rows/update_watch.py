"""Tell a listener which rows a fused backward is about to update."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..compat.torch import never_compiled
from ..tables import KernelShards

BeforeUpdate: TypeAlias = Callable[[int, Tensor, Tensor, tuple[int, ...] | None], None]
"""Called with the kernel's number, the ids `(N,)`, feature by feature, the starts of bags, and features' batch sizes
(None: equal), on the kernel's device."""


class UpdateWatch:
    """Calls `before_update` right before each backward that updates rows of these kernels, in every mode.

    A forward hook of each kernel gets the ids of a lookup, and a hook of its output's autograd node runs right before
    the backward that updates these rows, on the stream of the update. A lookup without a backward tells nothing.
    """

    def __init__(self, kernels: Sequence[KernelShards], before_update: BeforeUpdate) -> None:
        self._before_update = before_update
        self._handles = [
            kernel.kernel.register_forward_hook(self._watch(number), with_kwargs=True)
            for number, kernel in enumerate(kernels)
        ]

    def detach(self) -> None:
        """Stop telling."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _watch(self, kernel: int) -> Callable[..., None]:
        def looked_up(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], answer: Any) -> None:
            node = answer.grad_fn if isinstance(answer, Tensor) else None
            if node is not None:
                node.register_prehook(lambda _: self._tell(kernel, args, kwargs))

        return never_compiled(looked_up)

    def _tell(self, kernel: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        indices = kwargs["indices"] if "indices" in kwargs else args[0]
        offsets = kwargs["offsets"] if "offsets" in kwargs else args[1]
        sizes = kwargs.get("batch_size_per_feature_per_rank")
        batch_sizes = None if sizes is None else tuple(sum(of_feature) for of_feature in sizes)
        self._before_update(kernel, indices, offsets, batch_sizes)
