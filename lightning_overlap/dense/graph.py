"""Find out from the graph of a loss whether only the module itself uses a module's weights."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..compat.torch import saving_is_hooked

UNSEEN = "the first step does not call it, or calls it inside of torch.compile or torch.func"


class Uses:
    """The calls of modules in one step; `whole` returns the modules whose backward cannot be split."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any]] = []  # module, node of its output, node of its input
        self._whole: dict[Any, str] = {}

    def note(self, layer: Any, output: Any, given: Tensor) -> None:
        """Note a call of a module."""
        if saving_is_hooked():
            self._whole[layer] = "its saved tensors are hooked (activation checkpointing)"
        if not isinstance(output, Tensor):
            self.leave(layer, "its output is not a tensor")
        elif output.requires_grad:
            self._calls.append((layer, output.grad_fn, get_gradient_edge(given).node if given.requires_grad else None))
            # Before `whole`, and so before the step's own backward.
            output.register_hook(lambda _: self.leave(layer, "its gradient is computed within the step"))

    def forget_calls(self) -> None:
        """Forget the calls, which hold the graph of their step: its hooks hold this object, and nothing frees it."""
        self._calls.clear()

    def leave(self, layer: Any, reason: str) -> None:
        """Leave a module whole."""
        self._whole[layer] = reason

    def whole(self, layers: Iterable[Any], loss: Tensor) -> dict[Any, str]:
        """Return the modules whose backward cannot be split, each with the reason."""
        users: dict[Any, set[Any]] = {node: set() for node in _between(loss.grad_fn, None)}
        for node in users:
            for following in _following(node):
                users[following].add(node)
        for layer in layers:
            calls = [call for call in self._calls if call[0] is layer]
            outputs = {output for _, output, _ in calls}
            own = {node for _, output, given in calls for node in _between(output, given)}
            leaves = {id(node.variable) for node in own if hasattr(node, "variable")}
            if not outputs:
                # A chain calls its layers itself, and comes before them.
                of_chain = [why for one, why in self._whole.items() if layer.name.startswith(f"{one.name}.")]
                self._whole.setdefault(layer, of_chain[0] if of_chain else UNSEEN)
            elif not outputs <= users.keys():
                self._whole.setdefault(layer, "the loss of the first step does not need it")
            elif any(not users[node] <= own for node in own - outputs):
                self._whole.setdefault(layer, "its weight is used outside of its forward")
            elif not leaves <= {id(weight) for weight in layer.weights}:
                self._whole.setdefault(layer, "its forward uses weights of others")
        return self._whole


def _following(node: Any) -> list[Any]:
    return [] if node is None else [following for following, _ in node.next_functions if following is not None]


def _between(output: Any, given: Any) -> set[Any]:
    """Return the nodes from an output's node down to the weights, without the node of a given input and below."""
    nodes, seen = [output], {output}
    while nodes:
        for following in _following(nodes.pop()):
            if following is not given and following not in seen:
                seen.add(following)
                nodes.append(following)
    return seen


def depend_on(tensors: Iterable[Tensor], weights: Iterable[Tensor]) -> bool:
    """Whether the gradients of tensors lead to these weights alone."""
    nodes = {
        node for tensor in tensors if tensor.requires_grad for node in _between(get_gradient_edge(tensor).node, None)
    }
    return {id(node.variable) for node in nodes if hasattr(node, "variable")} <= {id(weight) for weight in weights}
