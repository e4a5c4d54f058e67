"""Gradients of the weights of ids that nobody reads: FBGEMM's backwards compute them for all weighted ids."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..compat.fbgemm import no_features
from ..compat.torch import never_compiled
from ..compat.torchrec import kernels_in, lookups_of
from ..tables import table_modules, takes_weights


def leave_out_unread_gradients(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Let the kernels of sharded modules compute no gradients of weights of ids that require none; return the hooks.

    Each call of a kernel is looked at: the weights of one call may be data, and those of another may be trained.
    """
    weighted = [one for module in modules for one in table_modules(module).values() if takes_weights(one)]
    kernels = [kernel for one in weighted for lookup in lookups_of(one) for _, kernel in kernels_in(lookup)]
    return [kernel.register_forward_pre_hook(_LeaveOut(), with_kwargs=True) for kernel in kernels]


class _LeaveOut:
    """Adds to a call of one kernel that no feature needs gradients of weights, if these weights require none."""

    def __init__(self) -> None:
        self._none: Tensor | None = None  # made by the first lookup, on its stream, where all others run

    @never_compiled
    def __call__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # TorchRec passes everything by name.
        weights = kwargs.get("per_sample_weights")
        if weights is None or weights.requires_grad or kwargs.get("feature_requires_grad") is not None:
            return None
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # there is no backward
            return None
        if self._none is None:
            self._none = no_features(kernel)
        return args, {**kwargs, "feature_requires_grad": self._none}
