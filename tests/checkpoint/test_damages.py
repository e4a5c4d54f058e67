"""Law 15: what was saved together loads together; anything else is refused, with the name of the file."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_overlap.checkpoint import write_file
from lightning_overlap.checkpoint.safe_metadata import SafeReader, _are_apart
from lightning_overlap.storage import (
    MARKER,
    DamagedError,
    DiskStore,
    Manifest,
    checksum_of,
    place_at,
    read_seal,
    sealed_file,
)

from ..support.cases import ADAGRAD, TABLE_WISE
from ..support.ranks import Ranks
from ..support.saved import files_of, manifest_of
from . import checkpoints, damages


@pytest.mark.parametrize("checkpoint_format", ["sharded", "full", "incremental"])
def test_a_flipped_bit_is_refused_or_harmless(get_ranks: Any, checkpoint_format: str, tmp_path: Path) -> None:
    [(num_refused, num_harmless)] = get_ranks(1).run(damages.flip_bits, str(tmp_path), checkpoint_format, 100)
    assert num_refused > 9 * num_harmless


def test_files_of_two_saves_are_refused(get_ranks: Any, tmp_path: Path) -> None:
    [num_refused] = get_ranks(1).run(damages.mix, str(tmp_path), 60)
    assert num_refused > 30


@pytest.mark.parametrize("checkpoint_format", ["sharded", "incremental"])
@pytest.mark.parametrize("how", ["missing", "empty", "truncated"])
def test_a_lost_file_is_named(two_ranks: Ranks, how: str, checkpoint_format: str, tmp_path: Path) -> None:
    first, second = two_ranks.run(damages.lose_each, str(tmp_path), checkpoint_format, how)
    assert first == second
    assert any(name.startswith("__1_") for name in first)
    for file, said in first.items():
        name = file.removesuffix(" of the base")
        assert said.startswith(("DamagedError: ", "ValueError: ")), (file, said)
        assert name in said, (file, said)
        if (name, how) != (MARKER, "missing"):  # in the words for what is no checkpoint
            assert f"its {name} is {how}" in said, (file, said)


@pytest.mark.parametrize("at", [0, 1500, 5000, -1])
def test_all_ranks_refuse_a_damaged_file(two_ranks: Ranks, at: int, tmp_path: Path) -> None:
    """Each reads some pieces of it, of about 1 KiB."""
    first, second = two_ranks.run(damages.damage_full_file, str(tmp_path), at)
    assert first == second
    assert first.startswith("DamagedError: ")
    assert "other bytes than were saved, by their checksum" in first


def test_what_others_read_of_a_full_file(tmp_path: Path) -> None:
    path, content = tmp_path / "a.ckpt", {"state_dict": {"a": torch.arange(1000.0)}, "epoch": 3}
    write_file(content, place_at(path), None)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert torch.equal(loaded["state_dict"]["a"], content["state_dict"]["a"])
    torch.save(loaded, tmp_path / "other.ckpt")
    assert read_seal(tmp_path / "other.ckpt") is None


@settings(max_examples=50)
@given(
    num_bytes=st.integers(0, 200),
    writes=st.lists(st.integers(0, 60)),
    smallest=st.integers(1, 40),
    num_parts=st.integers(1, 4),
)
def test_pieces_are_all_of_a_file(
    tmp_path_factory: Any, num_bytes: int, writes: list[int], smallest: int, num_parts: int
) -> None:
    """Wherever a piece ends, also among the two bytes of the comment's length: each byte is in a piece of some part."""
    path = tmp_path_factory.getbasetemp() / "pieces"
    content = bytes(num_bytes) + b"PK\x05\x06" + bytes(18)
    with pytest.MonkeyPatch.context() as patch, path.open("wb") as file:
        patch.setattr(sealed_file, "_SMALLEST_PIECE", smallest)
        patch.setattr(sealed_file, "_OF_ONE_SIZE", 2)
        sealed, rest = sealed_file.SealedFile(file), content
        for size in [*writes, len(content)]:
            sealed.write(rest[:size])
            rest = rest[size:]
        sealed.seal()
        file.flush()
        _check_parts(path, num_parts)
        # Not in the signature of the last record: without it nothing can be read.
        for at in {*range(0, num_bytes, 17), len(content) - 3, len(content) - 1}:
            changed = bytearray(path.read_bytes())
            changed[at] ^= 1
            other = path.with_name("changed")
            other.write_bytes(changed)
            with pytest.raises(DamagedError):
                _check_parts(other, num_parts)


def _check_parts(path: Path, num_parts: int) -> None:
    seal = read_seal(path)
    assert seal is not None
    for part in range(num_parts):
        seal.check(part, num_parts)


@st.composite
def boxes(draw: Any) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], tuple[int, ...]]:
    """Boxes in a small tensor, mostly within it."""
    size = draw(st.lists(st.integers(1, 4), max_size=2).map(tuple))
    box = st.tuples(*[st.tuples(st.integers(-1, 3), st.integers(1, 4)) for _ in size])
    found = draw(st.lists(box, max_size=4))
    return [tuple(zip(*one, strict=True)) or ((), ()) for one in found], size


@given(boxes())
def test_boxes_are_apart_if_no_element_is_in_two(drawn: Any) -> None:
    found, size = drawn
    count = np.zeros([most + 10 for most in size], int)
    for offsets, sizes in found:
        count[tuple(slice(start + 2, start + 2 + length) for start, length in zip(offsets, sizes, strict=True))] += 1
    inside = count[tuple(slice(2, most + 2) for most in size)]
    assert _are_apart(found, size) == (inside.sum() == count.sum() and count.max() <= 1)


def _leave_out_a_chunk(path: Path) -> str:
    path = files_of(path)[".metadata"]
    metadata = pickle.loads(path.read_bytes())
    name, entry = next(
        (name, entry)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and len(entry.chunks) > 1
    )
    entry.chunks.pop()
    path.write_bytes(pickle.dumps(metadata))
    return str(name)


def test_a_list_that_leaves_rows_out(two_ranks: Ranks, tmp_path: Path) -> None:
    """Also with right checksums."""
    path = Path(two_ranks.run(checkpoints.train, ADAGRAD, str(tmp_path), plan="rw rw")[0].checkpoint)
    name = _leave_out_a_chunk(path)
    for change in (lambda: None, lambda: damages.remake_manifest(path)):
        change()
        first, second = two_ranks.run(checkpoints.load_from, ADAGRAD, str(path))
        assert first == second
        assert first.startswith(f"DamagedError: {path} is a damaged checkpoint: its .metadata ")
    assert f"elements of {name}" in first


def test_a_folder_without_a_marker_is_no_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    two_ranks.run(checkpoints.save_to, str(path))
    (path / MARKER).rename(tmp_path / MARKER)
    for said in two_ranks.run(checkpoints.load_from, TABLE_WISE, str(path)):
        assert said.startswith(
            f"ValueError: {path} is a folder without {MARKER}: a copy of a checkpoint that lacks files"
        )
    (tmp_path / MARKER).rename(path / MARKER)
    assert two_ranks.run(checkpoints.load_from, TABLE_WISE, str(path)) == ["loaded"] * 2


def test_a_folder_of_a_former_version_loads_and_is_replaced(two_ranks: Ranks, tmp_path: Path) -> None:
    """It has its files beside the marker, and another kind of identity."""
    path, former = tmp_path / "a.ckpt", "0" * 32
    two_ranks.run(checkpoints.save_to, str(path))
    manifest = manifest_of(path)
    rest = torch.load(path / manifest.save / "meta.pt", weights_only=True)
    torch.save({**rest, "lightning_overlap_save": former}, path / manifest.save / "meta.pt")
    for file in (path / manifest.save).iterdir():
        file.rename(path / file.name)
    (path / manifest.save).rmdir()
    contents = {name: (path / name).read_bytes() for name in manifest.files}
    files = {name: [len(content), checksum_of(content)] for name, content in contents.items()}
    told = {"save": former, "files": files}
    marker = {**told, "checksum": checksum_of(json.dumps(told, sort_keys=True).encode())}
    (path / MARKER).write_text(json.dumps(marker, indent=0))
    assert two_ranks.run(checkpoints.load_from, TABLE_WISE, str(path)) == ["loaded"] * 2
    two_ranks.run(checkpoints.save_to, str(path))
    assert {one.name for one in path.iterdir()} == {MARKER, manifest_of(path).save}
    assert two_ranks.run(checkpoints.load_from, TABLE_WISE, str(path)) == ["loaded"] * 2


def test_the_checksums_of_the_largest_file_fit_its_comment() -> None:
    most = sealed_file._OF_ONE_SIZE * sealed_file._SIZES * (len(checksum_of(b"")) + 1)
    assert most + 1000 < sealed_file._MOST_COMMENT  # what else is in it


def test_what_a_reader_gets_without_a_list(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"its \.metadata is not of this save"):
        SafeReader(Manifest(DiskStore(tmp_path), "a.ckpt", "", {})).read_metadata()
