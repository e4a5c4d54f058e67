"""A checkpoint from anywhere executes nothing, unless it is trusted."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_overlap.checkpoint.safe_metadata import SafeReader

from . import untrusted
from .untrusted import CHANGES, MARK

SAID = {
    "list": "none of it was executed: UnpicklingError: it names posix.mkdir",
    "in_list": "none of it was executed: UnpicklingError: it names posix.mkdir",
    "tensor": "its bottom.0.bias are objects, not tensors",
    "extra_state": "contains objects that load only if you trust the file",
    "elsewhere": "it has a tensor in '../",
    "meta.pt": "contains objects that load only if you trust the file",
    "file": "contains objects that load only if you trust the file",
}


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_is_executed(get_ranks: Any, what: str, tmp_path: Path) -> None:
    for fn, weights_only in (("validate", True), ("fit", None)):
        folder = tmp_path / fn
        [said] = get_ranks(1).run(untrusted.load_changed, str(folder), what, fn, weights_only)
        assert said.startswith("RuntimeError: ")
        assert SAID[what] in said
        assert not (folder / MARK).exists()


def test_what_is_trusted_is_loaded(get_ranks: Any, tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        told = get_ranks(num_ranks).run(untrusted.save_and_load_state, str(folder), trust=True)
        assert told == [("loaded", "kept")] * num_ranks
    for said, _ in get_ranks(2).run(untrusted.save_and_load_state, str(tmp_path / "_"), trust=False):
        assert "contains objects that load only if you trust the file" in said


def test_what_a_newer_torch_adds_to_a_list_is_left_out(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(3)}, checkpoint_id=tmp_path, no_dist=True)
    written = pickle.loads((tmp_path / ".metadata").read_bytes())
    for place in written.storage_data.values():
        vars(place)["newer"] = 1
    vars(written)["newer"] = 2
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written))
    read = SafeReader(tmp_path).read_metadata()
    assert read.state_dict_metadata == written.state_dict_metadata
    assert [place.relative_path for place in read.storage_data.values()] == ["__0_0.distcp"]
