"""Steps that use split layers otherwise than the first step does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .test_split_layers import assert_exact


class Changes(nn.Module):
    """Has another forward from its second call on."""

    def __init__(self, later: Callable[[Changes, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.later, self.num_calls = later, 0
        self.hyper, self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        self.num_calls += 1
        found = self.layer(rows) if self.num_calls == 1 else self.later(self, rows)
        return self.out(found + self.hyper(rows)).square().mean()  # type: ignore[no-any-return]


def in_forward_mode(model: Changes, rows: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model.layer(forward_ad.make_dual(rows, torch.ones_like(rows))))
        return found.primal + found.tangent  # type: ignore[no-any-return]


def with_generated_weights(model: Changes, rows: Tensor) -> Tensor:
    weights = {"weight": model.layer.weight + model.hyper(rows)[:4], "bias": model.layer.bias}
    return torch.func.functional_call(model.layer, weights, (rows,))  # type: ignore[no-any-return]


def with_weights_of_its_own(model: Changes, rows: Tensor) -> Tensor:
    weights = {key: weight * 1.1 for key, weight in model.layer.named_parameters()}
    return torch.func.functional_call(model.layer, weights, (rows,)) + model.layer(rows)  # type: ignore[no-any-return]


def test_a_hook_that_a_later_step_gives_a_part_of_a_chain_sees_a_whole_backward() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.context, self.chain, self.num_calls = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), 0

        def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
            self.num_calls += 1
            context = self.context(rows)
            hook = self.chain[0].register_forward_hook(lambda _, given, out: out * context)
            if self.num_calls == 1:
                hook.remove()
            loss = (self.chain(dense) + context).square().mean()
            hook.remove()
            return loss  # type: ignore[no-any-return]

    assert_exact(Hooked, "context", "chain")


@pytest.mark.parametrize("later", [in_forward_mode, with_generated_weights, with_weights_of_its_own])
def test_gradients_are_those_of_a_whole_backward(later: Callable[[Changes, Tensor], Tensor]) -> None:
    assert_exact(lambda: Changes(later), "hyper", "layer", "out")
