"""State of modules that is no tensor of fixed shape is loaded from every format as `torch.save` would bring it back."""

import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_overlap.consolidate import main
from lightning_overlap.storage import SHARED

from ..support.cases import TABLE_WISE
from ..support.ranks import Ranks
from ..support.saved import is_increment
from . import module_states
from .module_states import Modules, State, WithModules
from .test_consolidate import differences

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]
LAYOUTS: list[Callable[[Tensor], Tensor]] = [torch.clone, torch.clone, torch.clone, Tensor.to_sparse]


@pytest.fixture(autouse=True)
def _choose_about_sparse_tensors() -> Iterator[None]:
    """Else the first sparse tensor of a process warns that nobody has chosen."""
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        yield


@st.composite
def tensors(draw: Callable[..., Any]) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) + draw(st.integers(1, 9))
    return draw(st.sampled_from(LAYOUTS))(numbers.to(draw(st.sampled_from(DTYPES))))


names = st.text("ab.:/0 ", max_size=4)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names | tensors()
values = st.recursive(
    leaves,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.tuples(inside, inside)
        | st.dictionaries(names | st.integers(-2, 3), inside, max_size=3)
    ),
    max_leaves=8,
)
states = st.builds(
    State,
    values,
    st.lists(tensors(), max_size=3).map(tuple),
    st.none() | tensors(),
    st.dictionaries(st.sampled_from(["first", "second.third", "fourth"]), tensors()).map(lambda kept: (*kept.items(),)),
)
GROWN = State({"a": [1, {"b": torch.ones(2)}], 3: ()}, (torch.ones(2), torch.ones(3)), torch.ones(4))


def by_torch(saved: State, before: State) -> dict[str, Any]:
    """What modules have that were saved by `torch.save` and loaded by `torch.load`, as with DDPStrategy."""
    modules, again, file = Modules(), Modules(), io.BytesIO()
    modules.put(copy.deepcopy(saved))
    torch.save(modules.state_dict(), file)
    file.seek(0)
    again.put(copy.deepcopy(before))
    again.load_state_dict(torch.load(file, weights_only=True))
    return again.get()


def compare(get_ranks: Callable[..., Ranks], folder: Path, early: State, of_ranks: tuple[State, ...]) -> list[str]:
    for how in ("incremental", "sharded"):
        get_ranks(len(of_ranks)).run(module_states.save, str(folder), how, early, of_ranks)
    assert is_increment(folder / "incremental.ckpt")
    for path in (folder / "incremental.ckpt", folder / "sharded-asynchronous.ckpt"):
        assert main([str(path), f"{path}.consolidated"]) == 0
    paths = sorted(path for path in folder.iterdir() if path.name not in ("early.ckpt", SHARED))
    assert len(paths) == 6
    expected, found = by_torch(of_ranks[0], early), []
    for num_ranks in (1, 2):
        for rank, loaded in enumerate(get_ranks(num_ranks).run(module_states.load, paths, early, timeout_s=300)):
            for name, state in loaded.items():
                found += differences(state, expected, f"{name}, rank {rank} of {num_ranks}")
    for path in paths:
        if path.is_file():
            module: Any = WithModules.load_from_checkpoint(path, case=TABLE_WISE, weights_only=True)
            found += differences(module.modules_with_state.get(), by_torch(of_ranks[0], State()), path.name)
    return found


@pytest.mark.timeout(400)
def test_every_format_loads_what_torch_save_brings_back(get_ranks: Callable[..., Ranks]) -> None:
    @settings(max_examples=3)
    @given(early=states, of_ranks=st.tuples(states, states))
    @example(early=State(), of_ranks=(GROWN, State([3], kept=(("first", torch.ones(2)),))))
    @example(early=GROWN, of_ranks=(State(torch.zeros(2)), GROWN))
    def holds(early: State, of_ranks: tuple[State, ...]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            assert compare(get_ranks, Path(folder), early, of_ranks) == []

    holds()
