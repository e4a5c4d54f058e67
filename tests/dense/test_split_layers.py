"""The two halves of a backward are the whole backward, bit for bit; what cannot be split is left whole and says why."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_overlap.dense import SplitLayers

NUM_STEPS = 3


class Dense(nn.Module):
    """Two linear layers over what stands for embeddings, between norms; `also` changes what the loss is."""

    def __init__(self, also: Callable[[Dense, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.also, self.num_calls = also, 0
        self.bottom = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.LayerNorm(4))
        self.first = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 4, bias=False)
        self.out = nn.Linear(4, 1)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        self.num_calls += 1
        found = torch.cat([self.bottom(dense), rows], dim=-1)
        found = self.norm(self.first(found).relu())
        loss = self.out(self.second(found).tanh()).square().mean()
        return loss if self.also is None else loss + self.also(self, found, rows)


def one_more_call(model: Dense, found: Tensor, rows: Tensor) -> Tensor:
    return model.second(found * 2).mean()


def weight_in_a_product(model: Dense, found: Tensor, rows: Tensor) -> Tensor:
    return nn.functional.linear(found, model.second.weight).mean()


def weight_of_a_part(model: Dense, found: Tensor, rows: Tensor) -> Tensor:
    return model.bottom[3].weight.square().sum()


def gradient_penalty(model: Dense, found: Tensor, rows: Tensor) -> Tensor:
    scores = model.out(model.second(found))
    [gradient] = torch.autograd.grad(scores.sum(), rows, create_graph=True)
    return gradient.square().sum()


def gradient_without_graph(model: Dense, found: Tensor, rows: Tensor) -> Tensor:
    [gradient] = torch.autograd.grad(model.second(found).sum(), rows, retain_graph=True)
    return (gradient * rows).sum()


def checkpointed(use_reentrant: bool) -> Callable[[Dense, Tensor, Tensor], Tensor]:
    def loss(model: Dense, found: Tensor, rows: Tensor) -> Tensor:
        return checkpoint(model.second, found, use_reentrant=use_reentrant).mean()  # type: ignore[no-any-return]

    return loss


def train(model: nn.Module, split: SplitLayers | None, **context: Any) -> list[Tensor]:
    """Return the gradients of embeddings and all weights over some steps, split or not."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        dense, rows = (torch.randn(5, *size, generator=random) for size in context.get("sizes", ((3,), (4,))))
        rows.requires_grad_()
        optimizer.zero_grad()
        if split is not None:
            split.begin_step(splits=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=context.get("autocast", False)):
            loss = model(dense, rows)
        if split is not None:
            split.end_forward()
            split.begin_backward(loss)
        loss.backward()
        assert rows.grad is not None
        found.append(rows.grad)
        if split is not None:
            split.compute()
            split.finish()
        found += [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        optimizer.step()
    if split is not None and context.get("detaches", True):
        split.detach()
        own = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        assert all("forward" not in vars(module) for module in own)
    return found


def assert_exact(make_model: Callable[[], nn.Module], *names: str, **context: Any) -> None:
    """Assert that the modules of these names are split, and that gradients are those of a whole backward."""
    expected, model = train(make_model(), None, **context), make_model()
    layers = SplitLayers(model)
    actual = train(model, layers, **context)
    assert layers.names == names
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def begin(model: nn.Module, split: SplitLayers, *inputs: Tensor, splits: bool = True) -> Tensor:
    """Return the loss of a step that is to make its backward."""
    split.begin_step(splits=splits)
    loss: Tensor = model(*inputs)
    split.end_forward()
    split.begin_backward(loss)
    return loss


def own_weights_later(model: Dense, found: Tensor, rows: Tensor) -> Tensor:
    """Use a layer otherwise than the first step does."""
    loss = model.second(found).mean()
    if model.num_calls > 1:
        loss = loss + torch.func.functional_call(model.second, {"weight": model.second.weight * 1.1}, (found,)).mean()
    return loss


ALL = ["bottom", "first", "second", "out"]


@pytest.mark.parametrize(
    ("also", "context", "split"),
    [
        (None, {}, ALL),
        (None, {"autocast": True}, ALL),
        (None, {"sizes": ((2, 3), (2, 4))}, ALL),
        (one_more_call, {}, ALL),
        (one_more_call, {"autocast": True}, ALL),
        (lambda model, found, rows: model.second.weight.square().sum(), {}, ["bottom", "first", "out"]),
        (weight_in_a_product, {}, ["bottom", "first", "out"]),
        (weight_in_a_product, {"autocast": True}, ["bottom", "first", "out"]),
        (weight_of_a_part, {}, ["first", "second", "out"]),
        (gradient_penalty, {}, ["bottom"]),
        (gradient_without_graph, {}, ["bottom", "out"]),
        (checkpointed(False), {}, ["bottom", "first", "out"]),
        (checkpointed(True), {}, ["bottom", "first", "out"]),
        (own_weights_later, {}, ALL),
    ],
    ids=[
        *("layers", "autocast", "more_dimensions", "called_twice", "called_twice_under_autocast", "penalty", "product"),
        *("product_under_autocast", "weight_of_a_part", "create_graph", "gradient_without_graph"),
        *("checkpoint", "reentrant_checkpoint", "own_weights_later"),
    ],
)
def test_both_halves_are_the_whole_backward(
    also: Callable[[Dense, Tensor, Tensor], Tensor] | None, context: dict[str, Any], split: list[str]
) -> None:
    assert_exact(lambda: Dense(also), *split, **context)


class Changes(nn.Module):
    """Uses its layer otherwise from the second step on."""

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


@pytest.mark.parametrize("later", [in_forward_mode, with_generated_weights])
def test_a_step_that_uses_a_layer_otherwise_has_the_whole_backwards_gradients(
    later: Callable[[Changes, Tensor], Tensor],
) -> None:
    assert_exact(lambda: Changes(later), "hyper", "layer", "out")


class Convolved(nn.Module):
    def __init__(self, kind: type[nn.Module], num_dims: int) -> None:
        torch.manual_seed(5)
        super().__init__()
        self.shape = (-1, 1, *[1] * (num_dims - 1), 4)
        self.conv, self.out = kind(1, 2, (*[1] * (num_dims - 1), 3)), nn.Linear(4, 1)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        return self.out(self.conv(rows.view(self.shape)).relu().flatten(1)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "num_dims"), [(nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)])
def test_convolutions_are_split(kind: type[nn.Module], num_dims: int) -> None:
    assert_exact(lambda: Convolved(kind, num_dims), "conv", "out")


@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_later_use_of_a_weight_outside_of_its_layer_is_an_error(in_bucket: bool) -> None:
    """Also where gradients are views of DistributedDataParallel's buckets, which have one version together."""
    model = Dense(lambda model, found, rows: model.second.weight.square().sum() if uses else rows.sum())
    layers, uses = SplitLayers(model), False
    train(model, layers, detaches=False)
    for _ in range(2):
        if in_bucket:
            bucket = torch.zeros(sum(weight.numel() for weight in model.parameters()))
            sizes = [weight.numel() for weight in model.parameters()]
            for weight, part in zip(model.parameters(), bucket.split(sizes), strict=True):
                weight.grad = part.view_as(weight)
        begin(model, layers, torch.randn(5, 3), torch.randn(5, 4, requires_grad=True)).backward()
        if uses:
            with pytest.raises(RuntimeError, match="a weight got a gradient from outside of its layer"):
                layers.compute()
        else:
            layers.compute()
        uses = True
    assert not any(weight._backward_hooks for weight in model.parameters())


class Layers(nn.Module):
    """Linear layers with activations over an input that needs a gradient; notes what the layers return."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.activation = nn.ReLU(inplace=inplace)
        self.outputs: list[StorageWeakRef] = []

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            rows = layer(rows)
            self.outputs.append(_storage(rows))
            rows = self.activation(rows)
        return self.out(rows).square().mean()  # type: ignore[no-any-return]


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def test_outputs_are_freed_with_the_activation_and_inputs_with_the_weight_gradients() -> None:
    """Lightning holds the loss until the optimizer has made its step."""
    model = Layers(inplace=False)
    split = SplitLayers(model)
    inputs: list[StorageWeakRef] = []
    model.activation.register_forward_hook(lambda _, given, out: inputs.append(_storage(out)))
    for _ in range(2):
        loss = begin(model, split, torch.randn(5, 3), torch.randn(5, 4, requires_grad=True))
        assert [output.expired() for output in model.outputs[-2:]] == [True, True]
        loss.backward()
        split.compute()
        assert [given.expired() for given in inputs[-2:]] == [True, True]
    assert all(layer.why_whole is None for layer in split.layers)


@pytest.mark.parametrize("sends", [True, False], ids=["sent", "accumulated"])
def test_the_graph_of_a_step_is_freed_with_the_loss(sends: bool) -> None:
    """The first one, too, which shows the uses of weights."""
    kept: list[StorageWeakRef] = []

    def noted(model: Dense, found: Tensor, rows: Tensor) -> Tensor:
        kept.append(_storage(seen := torch.ones(())))
        return model.second(found * seen).mean()  # type: ignore[no-any-return]

    model = Dense(noted)
    train(model, SplitLayers(model, sends_gradients=lambda: sends))
    gc.collect()
    assert [one.expired() for one in kept] == [True] * NUM_STEPS


def test_an_activation_in_place_gets_the_whole_backwards_gradients() -> None:
    assert_exact(lambda: Layers(inplace=True), "first", "second", "out")


class OwnLinear(nn.Linear):
    """Its forward may do anything."""


class Around(nn.Module):
    """Adds to embeddings what a part answers."""

    def __init__(self, part: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.call, self.out = part(), call, nn.Linear(4, 1)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        return self.out(self.call(self.part, dense) + rows).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("part", "call"),
    [
        (lambda: nn.LazyLinear(4), nn.Module.__call__),
        (lambda: OwnLinear(3, 4), nn.Module.__call__),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 4)), lambda part, dense: part(dense)[0]),
        (lambda: nn.Sequential(nn.LSTM(3, 4)), lambda part, dense: part(nn.utils.rnn.pack_sequence([dense]))[0].data),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU())), nn.Module.__call__),
    ],
    ids=["lazy", "own_type", "returns_a_tuple", "takes_a_packed_sequence", "torchscript"],
)
def test_a_part_that_cannot_be_split_is_left_whole(part: Any, call: Any) -> None:
    """A lazy layer comes on one rank only: DistributedDataParallel takes none."""
    assert_exact(lambda: Around(part, call), "out")


class Holds(nn.Module):
    """Modules of other types than those that are split, with matrices of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(3, 4))
        self.lstm = nn.LSTM(4, 4)
        self.own = OwnLinear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Embedding(3, 4).requires_grad_(False)
        self.layer = nn.TransformerEncoderLayer(4, 2)


def test_modules_of_other_types_are_named_once_with_their_weights() -> None:
    """Norms are not, nor what takes part of a module of torch.nn that is named."""
    layers = SplitLayers(Holds()).layers
    assert [layer.name for layer in layers if layer.why_whole is None] == ["layer.linear1", "layer.linear2"]
    whole = {layer.name: layer.why_whole.split(" itself")[0] for layer in layers if layer.why_whole is not None}
    assert whole == {
        "": "Holds uses position",
        "lstm": "LSTM uses weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0",
        "own": "OwnLinear uses weight, bias",
        "layer.self_attn": "MultiheadAttention uses in_proj_weight, in_proj_bias",
    }


def test_the_reason_of_a_layer_without_a_call_of_its_own_is_true() -> None:
    reasons = []
    for also in (weight_of_a_part, lambda model, found, rows: torch.vmap(model.mapped)(rows).sum()):
        model = Dense(also)
        model.mapped = nn.Linear(4, 1)
        split = SplitLayers(model)
        begin(model, split, torch.randn(2, 3), torch.randn(2, 4))
        reasons.append({layer.name: layer.why_whole for layer in split.layers})
    assert reasons[0]["bottom.0"] == reasons[0]["bottom"] == "its weight is used outside of its forward"
    assert reasons[1]["mapped"] == "the first step does not call it, or calls it inside of torch.compile or torch.func"


def test_a_first_step_without_a_loss_shows_nothing() -> None:
    """As where `training_step` returns None."""
    model = Dense()
    layers = SplitLayers(model)
    layers.begin_step(splits=True)
    model(torch.randn(5, 3), torch.randn(5, 4, requires_grad=True))
    layers.end_forward()
    train(model, layers)
    assert list(layers.names) == ALL


@pytest.mark.parametrize("first", [0, 1])
def test_a_forward_that_a_callback_gives_a_layer_is_called_and_stays(first: int) -> None:
    """Before the first step or later: in `on_train_start`, say."""

    def trained(splits: bool) -> list[Tensor]:
        model = Dense()
        layers = SplitLayers(model) if splits else None
        found = train(model, layers, detaches=False) if first else []
        own = model.second.forward
        model.second.forward = lambda given: own(given) * 2  # type: ignore[method-assign]
        patched = model.second.forward
        found += train(model, layers, detaches=False)
        assert vars(model.second)["forward"] is patched
        return found

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_layers_that_are_frozen_in_the_middle_of_a_run_get_no_gradients() -> None:
    model = Dense()
    layers = SplitLayers(model)
    train(model, layers)
    assert list(layers.names) == ALL
    frozen = [weight for layer in layers.layers for weight in layer.weights]
    before = [weight.detach().clone() for weight in frozen]
    for weight in frozen:
        weight.requires_grad_(False)
    train(model, layers)
    assert all(weight.grad is None and torch.equal(weight, old) for weight, old in zip(frozen, before, strict=True))


def test_a_copy_that_is_made_within_a_step_is_not_split() -> None:
    """As a module makes it that copies itself as its teacher in the first `training_step`."""
    teachers: list[nn.Module] = []

    def distilled(model: Dense, found: Tensor, rows: Tensor) -> Tensor:
        if not teachers:
            teachers.append(copy.deepcopy(model.second))
        return teachers[0](found).mean()  # type: ignore[no-any-return]

    def make_model() -> Dense:
        teachers.clear()
        return Dense(distilled)

    assert_exact(make_model, *ALL)
    assert vars(teachers[0]).get("forward", teachers[0].forward).__self__ is teachers[0]


def test_a_hook_that_a_later_step_gives_a_part_of_a_chain_sees_a_whole_backward() -> None:
    class Hooked(Dense):
        def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
            hook = self.bottom[0].register_forward_hook(lambda _, given, out: out * rows.sum())
            if self.num_calls == 0:
                hook.remove()
            loss = super().forward(dense, rows)
            hook.remove()
            return loss

    assert_exact(Hooked, *ALL)
