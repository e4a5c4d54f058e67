"""Embeddings that are waited for at their first use, not where the module is called."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from typing_extensions import override

from ..compat.torch import never_compiled, outside_function_transforms
from ..compat.torchrec import LazyResult


class LazyEmbeddings(LazyResult):
    """Embeddings that `receive` waits for at their first use, in the grad mode of the call, not of that use."""

    def __init__(self, receive: Callable[[], Any]) -> None:
        super().__init__()
        self._receive, self._mode = receive, _grad_mode()

    # Methods of an EmbeddingCollection's dict that TorchRec's awaitables lack.
    @never_compiled
    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    @never_compiled
    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    @never_compiled
    def __len__(self) -> int:
        return len(self.keys())

    @override
    def result(self) -> Any:
        with outside_function_transforms():  # the graph of a lookup is no part of one
            if _grad_mode() == self._mode:
                return self._receive()
            grad, inference = self._mode
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return self._receive()


class EarlyEmbeddings(LazyEmbeddings):
    """Embeddings of an early lookup; a bottom MLP that runs before their first use overlaps with the all-to-all."""


def _grad_mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()
