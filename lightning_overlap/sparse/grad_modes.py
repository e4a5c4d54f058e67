"""Contexts for a lookup and for the wait for its embeddings, whatever modes the caller has chosen."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..compat.torch import saving_is_hooked
from ..runtime import NOTHING


def keeping_saved() -> AbstractContextManager[Any]:
    """Within this context operators keep saved tensors until their backward, whatever hooks are active outside."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@contextmanager
def outside_inference_mode(*, grad: bool, keeps_saved: bool = False) -> Iterator[None]:
    """Within this context tensors are no inference tensors, and gradients are enabled or not."""
    with torch.inference_mode(False), torch.set_grad_enabled(grad), keeping_saved() if keeps_saved else NOTHING:
        yield


def own_graph() -> AbstractContextManager[Any]:
    """Within this context a wait connects embeddings to the graph of their lookup, whatever the caller's modes."""
    is_hooked = saving_is_hooked()
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not is_hooked:
        return NOTHING
    return outside_inference_mode(grad=True, keeps_saved=is_hooked)
