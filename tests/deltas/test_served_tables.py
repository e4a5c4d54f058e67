"""What a replica refuses: other tables, rows that do not fit, bases that are not whole. Nothing is written then."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_overlap.deltas import CutError, PartError, Replica, Rows, TablesError, encode

from .histories import SHAPES, TOP, A, B, MemorySink, Model, Training, assert_equal, empty_tables, write

REFUSED: dict[str, tuple[Any, str]] = {
    "fewer_tables": (
        {A: torch.ones(7, 4)},
        rf"the run 'run' sends tables that this replica lacks: {B}.\n  The replica has: {A}.\n  Use the",
    ),
    "another_shape": (
        empty_tables() | {A: torch.ones(8, 4)},
        rf"{A} has the shape \(7, 4\) in the run 'run', and \(8, 4\) in this replica: use the same",
    ),
    "another_dtype": (
        empty_tables() | {A: torch.ones(7, 4, dtype=torch.float16)},
        rf"{A} is \(7, 4\) of torch.float32 in g000001-s\S+, and \(7, 4\) of torch.float16 in this replica: "
        "use tables of the same shape and dtype",
    ),
    "another_dense_shape": (
        empty_tables() | {TOP: torch.ones(4)},
        rf"{TOP} is \(3,\) of torch.float32 in g000001-s\S+, and \(4,\) of torch.float32 in this replica",
    ),
    "tables_besides": (
        Model(("c",)),
        r"the module has tables that the run 'run' does not send, .*: model.ebc.embedding_bags.c.weight.\n  The run ",
    ),
    "another_module": (nn.Linear(2, 2), r"lacks: .*\n  The replica has: none.\n  Use the trained LightningModule"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_tables_are_refused_before_anything_is_written(training: Training, what: str) -> None:
    target, said = REFUSED[what]
    tensors: dict[str, Tensor] = target.state_dict() if isinstance(target, nn.Module) else target
    before = {name: value.clone() for name, value in tensors.items()}
    replica = Replica(target, training.sink)
    with pytest.raises(TablesError, match=said):
        replica.update()
    assert replica.step is None
    assert_equal(tensors, before)


def test_a_module_without_the_dense_part_is_refused(training: Training) -> None:
    module = Model()
    del module.model.top
    with pytest.raises(TablesError, match=f"has a dense tensor {TOP} that the module lacks"):
        Replica(module, training.sink).update()


def test_tables_without_memory_are_refused(training: Training) -> None:
    with pytest.raises(TablesError, match=r"cannot write tables on `meta`.\n  got: model.ebc.embedding_bags.a.weight"):
        Replica(Model(device="meta"), training.sink)


def test_what_is_no_tensor_is_refused(training: Training) -> None:
    with pytest.raises(TablesError, match=r"a replica needs plain tensors.\n  got: a, a list"):
        Replica({"a": [1.0]}, training.sink)  # type: ignore[dict-item]


BAD_ROWS: dict[str, tuple[Rows, str]] = {
    "row": (Rows(A, "weight", (7, 4), 0, torch.tensor([7]), torch.ones(1, 4)), "outside of its shape"),
    "negative_row": (Rows(A, "weight", (7, 4), 0, torch.tensor([-1]), torch.ones(1, 4)), "outside of"),
    "column": (Rows(A, "weight", (7, 4), 2, torch.tensor([0]), torch.ones(1, 3)), "values (1, 3) from column 2"),
    "shape": (Rows(A, "weight", (6, 4), 0, torch.tensor([0]), torch.ones(1, 4)), "of a tensor (6, 4)"),
    "table": (Rows("c", "weight", (7, 4), 0, torch.tensor([0]), torch.ones(1, 4)), "has rows of c, which its header"),
    "state_columns": (Rows(A, "momentum", (7, 1), 2, torch.tensor([0]), torch.ones(1, 1)), "from column 2 on"),
    "state": (Rows(A, "momentum", (9, 1), 0, torch.tensor([8]), torch.ones(1, 1)), f"rows of {A} (momentum) outside"),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_rows_that_do_not_fit_are_refused(training: Training, what: str) -> None:
    entry, said = BAD_ROWS[what]
    good = Rows(B, "weight", SHAPES[B], 0, torch.tensor([0]), torch.full((1, 2), 9.0))
    replica = Replica(empty_tables(), training.sink, optimizer_state=True)
    replica.update()
    name = write(training, (good, entry))
    with pytest.raises(TablesError, match=re.escape(said)) as err:
        replica.update()
    assert str(err.value).startswith(name)
    assert_equal(replica.state_dict(), training.at_cut[1, 2])


def test_states_of_another_shape_are_refused_until_a_base_brings_them(training: Training) -> None:
    replica = Replica(empty_tables(), training.sink, optimizer_state=True)
    write(training, (Rows(A, "momentum1", (7, 1), 0, torch.tensor([3]), torch.ones(1, 1)),))
    replica.update()
    training.whole = (training.generation, training.step)
    wide = Rows(A, "momentum1", (7, 4), 0, torch.tensor([3]), torch.ones(1, 4))
    name = write(training, (wide,))
    with pytest.raises(TablesError, match=r"\(momentum1\) is \(7, 4\) of torch.float32 in .*, and \(7, 1\) of"):
        replica.update()
    training.sink.remove([name])
    base = [
        Rows(one, "weight", SHAPES[one], 0, torch.arange(SHAPES[one][0]), torch.ones(SHAPES[one])) for one in SHAPES
    ]
    write(training, (*base, wide), after=None)
    replica.update()
    assert replica.optimizer_state[A]["momentum1"].shape == (7, 4)


def test_a_base_that_is_not_the_whole_table_is_refused() -> None:
    training = Training(MemorySink())
    rows = [Rows(name, "weight", SHAPES[name], 0, torch.tensor([0]), torch.ones(1, SHAPES[name][1])) for name in SHAPES]
    write(training, tuple(rows), after=None)
    with pytest.raises(TablesError, match=rf"generation 1, step 1 have 4 values of {A}, which needs 28. Do all parts"):
        Replica(None, training.sink).update()


def test_parts_of_a_cut_that_differ_are_refused(training: Training) -> None:
    training.step += 1
    replica = Replica(None, training.sink)
    base = dataclasses.replace(training.header(), world_size=2)
    for change, expected in (
        ({"global_step": 9}, r"are of the same cut, but differ in global_step \(9 and 3\)"),
        ({"after": (1, 1)}, "they follow the cut of generation 1, step 1 and the cut of generation 1, step 2"),
    ):
        for rank, options in ((0, {}), (1, change)):
            header = dataclasses.replace(base, rank=rank, **options)
            training.sink.write(str(header.name), encode(header))
        with pytest.raises(CutError, match=expected):
            replica.update()
    for chunk, after in ((0, (1, 2)), (1, None)):
        header = dataclasses.replace(base, rank=1, chunk=chunk, num_chunks=2, after=after)
        training.sink.remove([str(base.name._replace(rank=1))])
        training.sink.write(str(header.name), encode(header))
    with pytest.raises(CutError, match="and the first chunk of its part follow different cuts"):
        replica.update()


def test_a_part_under_another_name_is_refused(training: Training) -> None:
    """Its first chunk is read for its header; of the others too the name and the content have to be one."""
    training.step += 1
    training.start(1, 0)
    names = []
    for chunk in range(3):
        header = training.header(chunk=chunk, num_chunks=3)
        names.append(str(header.name))
        training.sink.write(names[-1], encode(header))
    replica = Replica(None, training.sink)
    whole = dict(training.sink.parts)
    for one, other in ((0, 1), (2, 1)):
        training.sink.parts = whole | {names[one]: whole[names[other]]}
        with pytest.raises(PartError, match=f"{names[one]} has the header of {names[other]}: it was"):
            replica.update()
