"""Split the backward of layers into halves: gradients of inputs at once, gradients of weights, all-reduced, later."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..compat.torch import (
    call_with_hooks,
    changes_output,
    current_backward,
    has_backward_hooks,
    has_comm_hook,
    in_forward_ad,
    is_compiled,
    never_compiled,
    num_forward_hooks,
    num_writes,
    replace_calls,
    restore_calls,
)
from .graph import Uses, depend_on

SPLIT_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # exactly these: a subclass's forward may do anything


class SplitLayer:
    """A layer of `SPLIT_TYPES`, a chain of modules (`nn.Sequential`), or a module that is left whole."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.is_layer = type(module) in SPLIT_TYPES  # a chain is split only if its input needs no gradient
        self.weights = list(module.parameters())
        self.forward: Callable[..., Any] = module.forward  # replaces the module's own forward in a call within a step
        self.call = never_compiled(self._call)  # runs that forward in the place of the module's own, with its hooks
        self.why_whole: str | None = None  # why its backward is not split; None if it is
        [_, *self._parts] = module.modules()  # of a chain
        self._places = [
            (part, key, weight) for part in module.modules() for key, weight in part.named_parameters(recurse=False)
        ]
        self.num_first_hooks = self.num_hooks()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the forward of a step in the place of its own, unless a callback has given it one."""
        vars(self.module).setdefault("forward", self.forward)
        try:
            return call_with_hooks(self.module, *args, **kwargs)
        finally:
            if vars(self.module).get("forward") is self.forward:
                del vars(self.module)["forward"]

    def has_own_weights(self) -> bool:
        """Whether its present weights depend on its own alone: functional_call() gives it others for a while."""
        if all(getattr(part, key, None) is weight for part, key, weight in self._places):
            return True
        return depend_on(self.module.parameters(), self.weights)

    def num_hooks(self) -> int:
        """Return how many hooks parts of a chain have: hooks may bring in tensors outside of its backward."""
        return sum(num_forward_hooks(part) for part in self._parts)


class LateAllReduce:
    """A communication hook of DistributedDataParallel on a CPU: `wait` waits for all buckets, the backward does not."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group: Any = model.process_group
        self._factor = 1.0 / self._group.size()
        self._under_way: list[tuple[dist.Work, Any]] = []
        self.is_late = False  # whether `wait` waits for the gradients of the present step; else the backward does
        self._model: DistributedDataParallel | None = model  # until the hook is registered

    def register(self) -> None:
        """Register the hook before the first forward, unless the user has registered one, in `on_train_start` say."""
        model, self._model = self._model, None
        if model is not None and not has_comm_hook(model):
            model.register_comm_hook(self, lambda late, bucket: late.start(bucket))

    def start(self, bucket: Any) -> Future[Tensor]:
        """Start the all-reduce of a bucket; return the future for which DistributedDataParallel waits."""
        buffer = bucket.buffer()
        buffer.mul_(self._factor)
        work: Any = dist.all_reduce(buffer, group=self._group, async_op=True)
        if not self.is_late:
            return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]
        self._under_way.append((work, bucket))
        over: Future[Tensor] = Future()
        over.set_result(buffer)
        return over

    def wait(self) -> None:
        """Wait for the gradients of all ranks, and give them to the weights."""
        for work, bucket in self._under_way:
            work.wait()
            for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if weight.grad is not None:
                    weight.grad.copy_(gradient)
        self.forget()

    def forget(self) -> None:
        """Forget the all-reduces under way."""
        self._under_way.clear()


@dataclass(slots=True)
class _Call:
    layer: SplitLayer
    input: Tensor | None  # None if it needs no gradient
    output: Any  # the edge to its graph, until it is used; an activation may free the output itself
    gradient: Tensor | None = None


class SplitLayers:
    """Computes the weight gradients of a model's layers after the backward that leaves the gradients of their outputs.

    The two halves are the whole backward, bit for bit. In the first step modules run whole, and its graph shows which
    can be split: those whose weights nothing else uses. `without` are the sharded modules. `agree` takes the modules
    that this rank cannot split, by name with the reason, and returns those that some rank cannot. `sends_gradients`
    tells whether gradients of the present step are sent to other ranks, not accumulated for a later step. Source of the
    idea: `delay_wgrad_compute` of TransformerEngine (PR 1653).
    """

    def __init__(
        self,
        model: nn.Module,
        without: Iterable[nn.Module] = (),
        agree: Callable[[dict[str, str]], Mapping[str, str]] = lambda whole: whole,
        all_reduce: LateAllReduce | None = None,
        sends_gradients: Callable[[], bool] = lambda: True,
    ) -> None:
        self.layers = list(_candidates(model, {id(part) for module in without for part in module.modules()}))
        self._agree, self._all_reduce, self._sends_gradients = agree, all_reduce, sends_gradients
        self._pending: dict[SplitLayer, list[_Call]] = {}  # calls of this step's backward, in its order
        self._uses: Uses | None = Uses()
        self._inside = False  # a larger module that is split as one
        self._in_backward = self._splits = False
        self._before: list[tuple[SplitLayer, Tensor, object]] = []  # each weight's gradient as the backward began
        self._watches: list[RemovableHandle] = []  # hooks of weights whose gradients are parts of buckets
        self._from_outside: set[SplitLayer] = set()  # layers whose weights these hooks have seen get a gradient
        self._split = [layer for layer in self.layers if layer.why_whole is None]
        for layer in self._split:
            layer.forward = _Forward(self._forward, layer, layer.module.forward)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules that are split; none before the first backward has shown which modules can be split."""
        return () if self._uses is not None else tuple(layer.name for layer in self._split)

    def detach(self) -> None:
        """Give all modules their own forwards back; forget what is pending."""
        self.end_forward()
        self._pending.clear()
        if self._all_reduce is not None:
            self._all_reduce.forget()
        self._in_backward = self._splits = False
        self._end_watches()
        if self._uses is not None:
            self._uses.forget_calls()

    def begin_step(self, *, splits: bool) -> None:
        """Begin the forward of a batch; with `splits` its backward is split."""
        self._splits = splits
        if self._all_reduce is not None:
            self._all_reduce.register()
        if self._uses is not None:
            self._uses.forget_calls()  # of a step without a backward
        for layer in self._split if splits else ():
            replace_calls(layer.module, layer.call)

    def end_forward(self) -> None:
        """End the forward: callbacks, evaluations and copies of modules find their own forwards."""
        for layer in self._split:
            restore_calls(layer.module, layer.call)

    def begin_backward(self, loss: Tensor) -> None:
        """Begin the backward whose weight gradients are computed later; `compute` ends it."""
        if self._splits and self._uses is not None and loss.requires_grad:
            # The first backward that sends gradients gives DistributedDataParallel the order of its buckets.
            if self._sends_gradients():
                self._discover(self._uses, loss)
            else:
                self._uses.forget_calls()
                self._uses = Uses()
        self._in_backward = self._splits
        self._end_watches()
        self._before.clear()
        self._from_outside.clear()
        for layer, weight in [(one, weight) for one in self._split for weight in one.weights]:
            # With `gradient_as_bucket_view` a gradient has its memory, and so its version, in common with others.
            if (gradient := weight.grad) is None or gradient.untyped_storage().nbytes() <= gradient.nbytes:
                self._before.append((layer, weight, _state(weight)))
            elif weight.requires_grad:
                self._watches.append(weight.register_hook(lambda _, layer=layer: self._from_outside.add(layer)))
        if self._all_reduce is not None:
            self._all_reduce.is_late = self._splits

    def compute(self) -> None:
        """Compute the weight gradients that the backward has left, in a backward of their own."""
        self._in_backward = False
        self._end_watches()
        outside = {layer for layer, weight, before in self._before if _state(weight) != before} | self._from_outside
        if outside & self._pending.keys():
            raise RuntimeError(
                "a weight got a gradient from outside of its layer, which the first step has not shown: its layer's "
                "backward cannot be split. Use pipeline='fused_sparse_dist'."
            )
        calls = [call for of_layer in self._pending.values() for call in of_layer]
        weights = [weight for layer in self._pending for weight in layer.weights if weight.requires_grad]
        self._pending.clear()
        if weights:
            torch.autograd.backward([call.output for call in calls], [call.gradient for call in calls], inputs=weights)
        for call in calls:  # the graph of the loss, which Lightning holds until after the step, holds the calls
            call.input = call.output = call.gradient = None

    def finish(self) -> None:
        """Wait for the all-reduce of gradients; afterwards they are complete."""
        if self._all_reduce is not None:
            self._all_reduce.wait()

    def _end_watches(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches.clear()

    def _discover(self, uses: Uses, loss: Tensor) -> None:
        self._uses = None
        reasons = uses.whole(self.layers, loss)
        uses.forget_calls()
        reasons |= {layer: "its forward was replaced" for layer in self.layers if "forward" in vars(layer.module)}
        whole = {layer.name: layer.why_whole or reasons.get(layer) for layer in self.layers}
        agreed = self._agree({name: why for name, why in whole.items() if why is not None})
        for layer in self.layers:
            layer.why_whole = agreed.get(layer.name)
        self._split = [layer for layer in self.layers if layer.why_whole is None]

    def _forward(self, layer: SplitLayer, forward: Callable[[Tensor], Any], *args: Any, **kwargs: Any) -> Any:
        [given] = (*args, *kwargs.values()) or (None,)
        if self._uses is not None and layer.is_layer and not torch.is_grad_enabled():
            self._uses.leave(layer, "it is called without gradients, as a reentrant checkpoint() does")
        if (
            self._inside
            or not torch.is_grad_enabled()
            or in_forward_ad()
            or current_backward() != -1  # a checkpoint() repeats the forward
            or not isinstance(given, Tensor)
            or (not layer.is_layer and given.requires_grad)
            or not layer.has_own_weights()
            or layer.num_hooks() != layer.num_first_hooks
        ):
            return forward(given)
        is_cut = self._uses is None and given.requires_grad
        own = given.detach().requires_grad_() if is_cut else given
        self._inside = not layer.is_layer
        try:
            output = forward(own)
        finally:
            self._inside = False
        if self._uses is not None:
            self._uses.note(layer, output, given)
            return output
        if not output.requires_grad:
            return output
        call = _Call(layer, own if is_cut else None, get_gradient_edge(output))
        # Without an input that needs a gradient autograd would not call the backward.
        start = given if is_cut else torch.empty(0, requires_grad=True)
        return _Halves.apply(start, output.detach(), call, self)  # type: ignore[no-untyped-call]

    def take(self, call: _Call, gradient: Tensor) -> Tensor | None:
        """Take the gradient of a call's output; return the gradient of its input."""
        if torch.is_grad_enabled() or not self._in_backward:
            how = "differentiated again (create_graph=True)" if torch.is_grad_enabled() else "computed within the step"
            raise RuntimeError(
                f"the gradient of {call.layer.name!r} is {how}, which its split backward cannot do and the first step "
                "has not shown. Use pipeline='fused_sparse_dist'."
            )
        call.gradient = gradient
        self._pending.setdefault(call.layer, []).append(call)
        if call.input is None:
            return None
        [found] = torch.autograd.grad(call.output, call.input, gradient, retain_graph=True)
        return found


class _Forward(partial[Any]):
    """The forward of a module within a step; a copy of the module that is made there has its own."""

    def __reduce__(self) -> Any:
        return getattr, (self.args[0].module, "forward")


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, output: Tensor, call: _Call, layers: SplitLayers) -> Tensor:
        ctx.call, ctx.layers = call, layers
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        return ctx.layers.take(ctx.call, gradient), None, None, None


def _state(weight: Tensor) -> object:
    """Return a value that changes when a gradient is added to a weight's gradient."""
    return None if weight.grad is None else (id(weight.grad), num_writes(weight.grad))


def _candidates(model: nn.Module, without: set[int]) -> Iterator[SplitLayer]:
    """Yield the modules that may be split, and those left whole that multiply by weights of their own (no norms)."""
    holders = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    compiled = {id(part) for one in model.modules() if is_compiled(one) for part in one.modules()}
    parts_of_left: set[int] = set()
    for name, module in model.named_modules():
        layer = SplitLayer(name, module)
        trained = any(weight.requires_grad for weight in layer.weights)
        if not trained or any(id(part) in without for part in module.modules()):
            continue
        if any(map(nn.parameter.is_lazy, layer.weights)):  # has no shape before the first forward
            continue
        if layer.is_layer:
            layer.why_whole = _why_whole(layer, compiled, holders)
            yield layer
        elif _is_plain(module) and _why_whole(layer, compiled, holders) is None:
            yield layer
        elif id(module) not in parts_of_left:
            own = {key: weight for key, weight in module.named_parameters(recurse=False) if weight.requires_grad}
            if any(weight.dim() > 1 for weight in own.values()):
                layer.why_whole = (
                    f"{type(module).__name__} uses {', '.join(own)} itself; only weights of Linear, Conv1d, Conv2d and "
                    "Conv3d are split"
                )
                parts_of_left |= {id(part) for part in module.modules()} if _is_of_torch(module) else set()
                yield layer


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a chain of torch.nn's own modules: its output depends on its one input alone."""
    [_, *parts] = module.modules()
    return type(module) is nn.Sequential and all(_is_of_torch(part) and not changes_output(part) for part in parts)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules")


def _why_whole(layer: SplitLayer, compiled: set[int], holders: Mapping[int, int]) -> str | None:
    module = layer.module
    if any(id(part) in compiled for part in module.modules()):
        return "it is compiled"
    if "forward" in vars(module):
        return "its forward was replaced"
    if has_backward_hooks(module):
        return "it has backward hooks"
    if layer.is_layer and "weight" not in dict(module.named_parameters(recurse=False)):
        return "its weight is computed"
    own = [id(weight) for part in module.modules() for weight in part.parameters(recurse=False)]
    if any(holders[weight] > own.count(weight) for weight in own):
        return "another module has its weight"
    return None
