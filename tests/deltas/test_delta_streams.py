"""The order of streams on a device: what gathers rows comes after their update, and before the next one."""

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap import MODES, EmbeddingDeltas
from lightning_overlap.schedules import StreamName
from lightning_overlap.testing import CheckedStreams, RaceError
from lightning_overlap.updated_rows import DeviceMarks, HostMarks
from lightning_overlap.updated_rows.copies import ALIGNED_TO, LARGER, DeviceCopy, KeptMemory, _gather_rows

from ..support.cases import ROWWISE_ADAGRAD, SEQUENCE, TWO_COLLECTIONS, Batch, MakesInput, Model
from ..support.pairs import pairwise
from ..testing.test_checked_streams import train
from .delta_fits import Files, apply_in_order
from .histories import assert_equal

CASES = {case.name: case for case in (ROWWISE_ADAGRAD, SEQUENCE, TWO_COLLECTIONS)}


def _train(name: str, pipeline: str, policy: str, folder: Path, module: type[Model] = Model) -> None:
    deltas = EmbeddingDeltas(Files(str(folder)), 1, optimizer_state=True)
    train(CASES[name], pipeline, policy, module, callbacks=[deltas])


@pytest.mark.parametrize(("name", "pipeline", "policy"), pairwise(CASES, MODES, ("current", "data_dist", "dedicated")))
def test_no_race_in_any_mode(tmp_path: Path, name: str, pipeline: str, policy: str) -> None:
    _train(name, pipeline, policy, tmp_path)
    assert len(apply_in_order(tmp_path)) > 2


class MakesAnInput(MakesInput):
    """Makes the input of one collection alone, which so runs in its own forward."""

    def embeddings(self, collection: str, batch: Batch) -> Any:
        return (Model if collection == "ebc" else MakesInput).embeddings(self, collection, batch)


def test_no_race_beside_a_collection_in_its_own_forward(tmp_path: Path) -> None:
    _train("two_collections", "fused_sparse_dist", "dedicated", tmp_path, MakesAnInput)
    assert len(apply_in_order(tmp_path)) > 2


@pytest.mark.parametrize("module", [Model, MakesInput])
def test_rows_are_not_gathered_before_their_update(tmp_path: Path, module: type[Model]) -> None:
    """All updates are on the lookup stream, also those of modules' own forwards; so rows are gathered there."""
    gather = DeviceCopy.__init__

    def elsewhere(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(CheckedStreams, "on_lookup", lambda streams: streams.on(StreamName.SIDE)):
            gather(*args, **kwargs)

    _train("two_collections", "semi_sync", "dedicated", tmp_path / "ordered", module)
    with mock.patch.object(DeviceCopy, "__init__", elsewhere), pytest.raises(RaceError):
        _train("two_collections", "semi_sync", "dedicated", tmp_path / "unordered", module)


def test_rows_are_gathered_on_the_lookup_stream_after_what_the_user_has_written() -> None:
    """Updates are on the lookup stream; code between two steps writes on the compute stream."""
    streams = mock.MagicMock()
    copied = DeviceCopy([], streams, None, states=False)
    assert streams.mock_calls[:2] == [mock.call.order(StreamName.COMPUTE, then=streams.lookup), mock.call.on_lookup()]
    assert copied.rows() == []


@pytest.mark.parametrize("name", CASES)
def test_flags_on_a_device_send_what_lists_on_a_host_do(tmp_path: Path, name: str) -> None:
    _train(name, "semi_sync", "dedicated", tmp_path / "device")
    with mock.patch.object(CheckedStreams, "is_async", False):
        _train(name, "semi_sync", "dedicated", tmp_path / "host")
    on_device, on_host = apply_in_order(tmp_path / "device"), apply_in_order(tmp_path / "host")
    assert_equal(on_device[max(on_device)], on_host[max(on_host)])


@given(st.data())
def test_marks_are_the_rows_of_the_ids(data: st.DataObject) -> None:
    """Flags and lists, whatever the tables, features, batch sizes and ids, of no row too: these count as row 0."""
    num_rows = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    table_of_feature = sorted(data.draw(st.lists(st.integers(0, len(num_rows) - 1), min_size=1, max_size=4)))
    expected: list[set[int]] = [set() for _ in num_rows]
    all_marks = [HostMarks(num_rows, table_of_feature), DeviceMarks(num_rows, table_of_feature, torch.device("cpu"))]
    for _ in range(data.draw(st.integers(0, 6))):
        varies = data.draw(st.booleans())
        sizes = [data.draw(st.integers(0 if varies else 2, 3 if varies else 2)) for _ in table_of_feature]
        bags = [[data.draw(st.lists(st.integers(-2, 45), max_size=3)) for _ in range(size)] for size in sizes]
        for table, of_feature in zip(table_of_feature, bags, strict=True):
            rows = [row for bag in of_feature for row in bag]
            expected[table] |= {row if 0 <= row < num_rows[table] else 0 for row in rows}
        flat = [bag for of_feature in bags for bag in of_feature]
        indices = torch.tensor([row for bag in flat for row in bag], dtype=torch.int64)
        offsets = torch.tensor([0, *itertools.accumulate(len(bag) for bag in flat)])
        for marks in all_marks:
            marks.add(indices, offsets, tuple(sizes) if varies else None)
    for marks in all_marks:
        assert [set(rows.tolist()) for rows in marks.rows()] == expected
        assert [rows.tolist() for rows in marks.rows()] == [sorted(rows) for rows in expected]


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from([4, 8])), min_size=1, max_size=4), st.data())
def test_rows_of_several_tables_are_gathered_at_once(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    in_a_row = data.draw(st.booleans())
    num_rows = [rows for rows, _ in shapes]
    sizes = [rows * (4 if in_a_row else width) for rows, width in shapes]
    flat = torch.randn(sum(sizes)).split(sizes)
    parts = [one.view(rows, -1) for one, rows in zip(flat, num_rows, strict=True)]
    if not in_a_row:
        parts = [part.clone() for part in parts]
    marks = DeviceMarks(num_rows, [0], torch.device("cpu"))
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, sum(num_rows) - 1)))), dtype=torch.int64)
    found = _gather_rows(parts, marks, rows)
    for position, row in enumerate(rows.tolist()):
        table = max(number for number, first in enumerate(marks.first_rows[:-1]) if first <= row)
        own = parts[table][row - marks.first_rows[table]]
        assert torch.equal(found[position, : own.numel()], own)


def test_marks_without_cuts_take_bounded_memory() -> None:
    """Ids of one rank are copied, and their offsets: also of bags that are mostly empty."""
    marks = HostMarks([50], [0])
    for step in range(40):
        offsets = torch.zeros(31, dtype=torch.int64)
        offsets[-1] = 1
        marks.add(torch.tensor([step]), offsets, None)
        assert sum(lookup[1].numel() for lookup in marks._lookups) + sum(map(len, marks._rows[0])) <= 2 * 50
    assert marks.most == 40
    assert marks.take()[0].tolist() == list(range(40))
    assert (marks.most, marks.rows()[0].tolist()) == (0, [])


SIZES = st.lists(
    st.tuples(
        st.tuples(st.integers(1, 300), st.integers(1, 8)),
        st.sampled_from([torch.float32, torch.float16, torch.float64, torch.int8]),
    ),
    min_size=1,
    max_size=4,
)


@given(st.lists(st.tuples(SIZES, st.integers(0, 2)), max_size=8))
def test_lent_memory_is_nobody_elses_until_it_is_given_back(
    requests: list[tuple[list[tuple[tuple[int, int], torch.dtype]], int]],
) -> None:
    """It fits what is asked for; one piece is kept, the last that was given back."""
    kept, lent, at_rest, number = KeptMemory(), list[tuple[dict[int, torch.Tensor], torch.Tensor]](), [], 0
    for wanted, num_given_back in requests:
        tensors, memory = kept.lend(wanted)
        assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == wanted
        num_bytes = sum(-(-tensor.nbytes // ALIGNED_TO) * ALIGNED_TO for tensor in tensors)
        assert num_bytes <= memory.numel() <= LARGER * num_bytes
        if at_rest and num_bytes <= at_rest[-1].numel() <= LARGER * num_bytes:
            assert memory is at_rest[-1]
        lent.append(({number + place: tensor for place, tensor in enumerate(tensors)}, memory))
        for content, tensor in lent[-1][0].items():
            tensor.fill_(content)
        number += len(tensors)
        for of_loan, _ in lent:
            assert all(bool((tensor == content).all()) for content, tensor in of_loan.items())
        at_rest = [lent.pop()[1] for _ in range(min(num_given_back, len(lent)))]
        for memory in at_rest:
            kept.give_back(memory)
        assert len(kept._at_rest) == min(1, len(at_rest))
