"""A snapshot is what `torch.save` would have written when it was made, whatever becomes of the objects afterwards."""

import io
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_overlap.checkpoint.snapshot import Snapshot


class Pair(NamedTuple):
    """A class that a snapshot does not know."""

    first: Any
    second: Any


@st.composite
def states(draw: Callable[..., Any]) -> dict[str, Any]:
    """Nested containers and tensors, some in several places, some views of the same memory."""
    memory, noted = torch.arange(12.0), torch.ones(1)
    noted.note = "an attribute"  # type: ignore[attr-defined]
    tensors = [
        memory,
        memory[3:9].view(2, 3),
        memory.view(3, 4).t(),
        torch.tensor([1, 2]),
        torch.tensor(True),
        torch.empty(0),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, dtype=torch.bfloat16),
        torch.zeros(2, requires_grad=True) * 2,
        torch.ones(2, 2).to_sparse(),
        noted,
    ]
    words = st.sampled_from([None, True, 1, 2.5, "a", b"b", torch.float32, torch.Size([2]), int, Path("c"), len])
    ones: Any = words | st.sampled_from(tensors) | st.sampled_from([{"is": ["shared"]}, [3]])
    wholes: Any = st.recursive(
        ones,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc") | st.integers(0, 2), inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict)
            | st.tuples(inner, inner)
            | st.builds(Pair, inner, inner)
            | st.sets(st.integers(0, 3))
            | st.builds(Counter, st.just("aab"))
        ),
        max_leaves=12,
    )
    state: dict[str, Any] = draw(st.dictionaries(st.sampled_from("abcdef"), wholes, max_size=4))
    if draw(st.booleans()):
        state["module"] = nn.Linear(2, 1).state_dict()  # has an attribute `_metadata`
    if draw(st.booleans()):
        state["itself"] = state
    return state


def shape_of(value: Any, seen: dict[Any, int]) -> Any:
    """Return all that can be seen of a loaded value: kinds, contents, what is shared, and which memory."""
    if isinstance(value, Tensor):
        numbers = value.detach().to_dense().float().tolist()
        looks: list[Any] = [type(value), value.dtype, value.requires_grad, value.layout, numbers, vars(value)]
        if value.layout == torch.strided:
            storage = value.untyped_storage()
            memory = seen.setdefault(("memory", storage.data_ptr()), len(seen)) if storage.nbytes() else -1
            looks += [memory, storage.nbytes(), value.stride(), value.storage_offset()]
        return [seen.setdefault(id(value), len(seen)), *looks]
    if isinstance(value, list | tuple | dict | set):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
        is_dict = isinstance(value, dict)
        parts = [
            [shape_of(one, seen) for one in (entry if is_dict else [entry])]
            for entry in (value.items() if is_dict else value)
        ]
        return [type(value), parts, shape_of(getattr(value, "__dict__", None), seen)]
    return value


def loaded(content: Any) -> Any:
    keep = torch.load(io.BytesIO(content), weights_only=False)
    return shape_of(keep, {})


def change(value: Any) -> None:
    """Change everything that can be."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            value.detach().zero_()
    elif isinstance(value, dict | list):
        entries = list(value.values() if isinstance(value, dict) else value)
        value.clear()
        for one in entries:
            change(one)
    elif isinstance(value, tuple):
        for one in value:
            change(one)


@settings(max_examples=150)
@given(state=states())
def test_a_snapshot_is_what_torch_would_save(state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    snapshot = Snapshot()
    save = snapshot.saver_of(state)
    snapshot.begun()
    change(state)
    assert loaded(save()) == loaded(buffer.getvalue())
