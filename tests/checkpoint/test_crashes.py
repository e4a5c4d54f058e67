"""Law 12: a crash at any instant of any save leaves the newest whole checkpoint where the next run looks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..support.ranks import RankError
from . import crashes
from .crashes import NUM_STEPS, Left

LAST: dict[str, dict[str, Any]] = {"last": {"save_last": True}, "link": {"save_last": "link"}}
MONITORED: dict[str, Any] = {"monitor": "loss", "save_top_k": 2}
NUM_INSTANTS = {"sharded": 50, "async": 50, "full": 15}


def check(left: list[Left], first: int = 0) -> None:
    """Every `*.ckpt` is whole, the newest is the last saved, and "last" is that, or for an instant the one before."""
    before = first, first
    for state in left:
        assert state.newest == state.whole, state
        assert state.last in {state.whole, max(first, state.whole - 1)}, state
        assert (state.last, state.newest) >= before, state
        assert state.last or not state.whole, state
        before = state.last, state.newest
    assert before == (left[-1].whole,) * 2
    behind = [state for state in left if state.last != state.whole]
    assert len(behind) <= 2 * (left[-1].whole - first), behind


@pytest.mark.parametrize("save_last", LAST)
@pytest.mark.parametrize("how", ["sharded", "full", "async"])
def test_a_crash_at_any_instant(get_ranks: Any, how: str, save_last: str, tmp_path: Path) -> None:
    [(left, names, began)] = get_ranks(1).run(crashes.fit_and_crash, str(tmp_path), how, LAST[save_last], num_resumed=2)
    check(left)
    assert len(left) > NUM_INSTANTS[how]
    assert names == ["last.ckpt", f"step={NUM_STEPS}.ckpt"]
    assert len(began) == 2
    assert all(began.values())


@pytest.mark.parametrize("save_last", LAST)
@pytest.mark.parametrize("how", ["sharded", "async"])
def test_a_file_system_that_cannot_swap_names(get_ranks: Any, how: str, save_last: str, tmp_path: Path) -> None:
    [(left, names, began)] = get_ranks(1).run(
        crashes.fit_and_crash, str(tmp_path), how, LAST[save_last], exchanges=False, num_resumed=3
    )
    check(left)
    assert names == ["last.ckpt", f"step={NUM_STEPS}.ckpt"]
    assert any("last.old.ckpt" in state.names for state in left) == (save_last == "last")
    assert all(began.values())


@pytest.mark.parametrize("exchanges", [True, False], ids=["swaps", "cannot_swap"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("full", LAST["last"]), ("sharded", LAST["last"])),
        (("sharded", LAST["last"]), ("full", LAST["link"])),
        (("async", LAST["link"]), ("sharded", LAST["last"])),
        (("full", LAST["link"] | MONITORED), ("async", LAST["link"] | MONITORED)),
    ],
    ids=["file-folder", "folder-link", "link-folder", "top_k"],
)
def test_another_format_in_the_same_folder(
    get_ranks: Any, first: Any, second: Any, exchanges: bool, tmp_path: Path
) -> None:
    [(left, names, _)] = get_ranks(1).run(
        crashes.fit_and_crash, str(tmp_path), *second, before=first, exchanges=exchanges
    )
    check(left, first=NUM_STEPS)
    assert {"last.ckpt", f"step={2 * NUM_STEPS}.ckpt"} <= set(names)
    assert not [name for name in names if not name.endswith(".ckpt") or name.count(".") > 1]


@pytest.mark.parametrize("how", ["sharded", "async"])
def test_a_rank_that_is_killed(get_ranks: Any, how: str, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        get_ranks(2).run(crashes.fit_until_killed, str(tmp_path), how, LAST["link"], 100)
    whole = max(int(path.stem.partition("=")[2]) for path in tmp_path.glob("step=*.ckpt"))
    for first, last in get_ranks(2).run(crashes.go_on, str(tmp_path), how, LAST["link"], 50):
        assert first in {whole, whole - 1}
        assert first > 0
        assert last == 50
