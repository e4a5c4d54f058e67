"""Copies of rows take turns in memory that is kept: nobody writes it while a sink reads, and it does not grow."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lightning_overlap.deltas import PartError, Piece, parse_names
from lightning_overlap.deltas.recording.copies import HostCopy, KeptMemory
from lightning_overlap.deltas.recording.row_marks import HostMarks

from ..support.ranks import Ranks
from .delta_fits import Files, fit_with_deltas
from .test_deltas import ALL, wrong


def fit_in_pieces(*args: Any, **kwargs: Any) -> Any:
    """Train with a sink that reads the memory of the values after a while; what is given back is overwritten."""
    give_back = KeptMemory.give_back

    def write_pieces(self: Files, name: str, pieces: list[Piece]) -> None:
        time.sleep(0.02)
        self.write(name, b"".join(pieces))

    def written_by_the_next(self: KeptMemory, memory: torch.Tensor) -> None:
        memory.fill_(255)
        give_back(self, memory)

    with (
        mock.patch.object(Files, "write_pieces", write_pieces, create=True),
        mock.patch.object(KeptMemory, "give_back", written_by_the_next),
    ):
        return fit_with_deltas(*args, **kwargs)


def fit_giving_back_early(*args: Any, **kwargs: Any) -> Any:
    """Train so that the next cut may have the memory before this one is written."""
    rows = HostCopy.rows

    def early(self: HostCopy) -> Any:
        copied = rows(self)
        self.give_back()
        return copied

    with mock.patch.object(HostCopy, "rows", early):
        return fit_in_pieces(*args, **kwargs)


def test_a_sink_reads_values_that_nobody_writes(two_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = two_ranks.run(fit_in_pieces, ALL, "fused_sparse_dist", str(tmp_path), num_steps=30)
    assert wrong(tmp_path, of_ranks) == {}
    assert len({name.step for name in parse_names(path.name for path in tmp_path.iterdir())}) > 3


def test_memory_that_is_given_back_early_is_noticed(two_ranks: Ranks, tmp_path: Path) -> None:
    """By the checksum, where it is written after that was made."""
    of_ranks = two_ranks.run(fit_giving_back_early, ALL, "fused_sparse_dist", str(tmp_path), num_steps=30)
    with suppress(PartError):
        assert wrong(tmp_path, of_ranks) != {}


def lent(kept: KeptMemory, num_bytes: int) -> torch.Tensor:
    _, memory = kept.lend([((num_bytes,), torch.uint8)])
    return memory


def test_one_piece_of_memory_is_kept_at_most_and_fits_what_is_asked_for() -> None:
    kept = KeptMemory()
    first, second = lent(kept, 1000), lent(kept, 1000)
    kept.give_back(second)
    kept.give_back(first)
    assert lent(kept, 1000).data_ptr() == first.data_ptr()
    assert lent(kept, 1000).data_ptr() not in (first.data_ptr(), second.data_ptr())
    assert not kept._at_rest
    for num_bytes in (1000, 100_000, 1000):
        memory = lent(kept, num_bytes)
        assert num_bytes <= memory.numel() <= 4 * num_bytes
        kept.give_back(memory)


def test_tensors_in_lent_memory_are_apart() -> None:
    wanted = [((3, 5), torch.float16), ((7,), torch.float64), ((0, 4), torch.float32), ((2, 2), torch.int8)]
    tensors, _ = KeptMemory().lend(wanted)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [1], [], [3]]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == wanted


def test_marks_without_cuts_take_bounded_memory() -> None:
    """Ids of one rank are copied, and their offsets: also of bags that are mostly empty."""
    marks = HostMarks([50], [0])
    for step in range(40):
        offsets = torch.zeros(31, dtype=torch.int64)
        offsets[-1] = 1
        marks.add(torch.tensor([step]), offsets, None)
        assert sum(lookup[1].numel() for lookup in marks._lookups) + sum(map(len, marks._rows[0])) <= 2 * 50
    assert marks.rows()[0].tolist() == list(range(40))
    assert marks.most == 40
    assert marks.take()[0].tolist() == list(range(40))
    assert (marks.most, marks.rows()[0].tolist()) == (0, [])
