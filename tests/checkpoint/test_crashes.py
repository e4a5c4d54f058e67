"""Law 12: a crash at any instant of any save leaves the newest whole checkpoint where the next run looks for it."""

import random
from pathlib import Path
from typing import Any

import pytest

from ..support.ranks import RankError
from .crashes import NUM_STEPS, check, fit_and_crash, fit_until_killed, go_on

NUM_INSTANTS = {"sharded": 50, "async": 50, "full": 12, "incremental": 50, "renewed, async": 50}


@pytest.mark.parametrize("save_last", [True, "link"], ids=["last", "link"])
@pytest.mark.parametrize("how", ["sharded", "full", "async", "incremental", "renewed, async"])
def test_a_crash_at_any_instant(get_ranks: Any, how: str, save_last: Any, tmp_path: Path) -> None:
    [(left, names, began)] = get_ranks(1).run(fit_and_crash, str(tmp_path), how, save_last, num_resumed=2)
    check(left)
    assert len(left) > NUM_INSTANTS[how]
    assert names == ["last.ckpt", f"step={NUM_STEPS}.ckpt"]
    assert len(began) == 2
    assert all(began.values())


@pytest.mark.parametrize("save_last", [True, "link"], ids=["last", "link"])
@pytest.mark.parametrize("how", ["sharded", "async"])
def test_a_file_system_that_cannot_swap_names(get_ranks: Any, how: str, save_last: Any, tmp_path: Path) -> None:
    [(left, names, began)] = get_ranks(1).run(
        fit_and_crash, str(tmp_path), how, save_last, exchanges=False, num_resumed=3
    )
    check(left)
    assert names == ["last.ckpt", f"step={NUM_STEPS}.ckpt"]
    assert all(began.values())


@pytest.mark.parametrize(
    ("first", "second", "exchanges"),
    [
        (("full", True), ("sharded", True), True),
        (("sharded", True), ("full", "link"), False),
        (("async", "link"), ("sharded", True), False),
        (("full", "link"), ("async", "link"), True),
        (("sharded", True), ("incremental", "link"), True),
    ],
    ids=["file-folder", "folder-link", "link-folder", "link-link", "folder-increments"],
)
def test_another_format_in_the_same_folder(
    get_ranks: Any, first: tuple[str, Any], second: tuple[str, Any], exchanges: bool, tmp_path: Path
) -> None:
    """A file takes the place of a folder, or a folder of a link: also then a crash leaves the newest checkpoint."""
    [(left, names, _)] = get_ranks(1).run(fit_and_crash, str(tmp_path), *second, before=first, exchanges=exchanges)
    check(left, NUM_STEPS)
    assert {"last.ckpt", f"step={2 * NUM_STEPS}.ckpt"} <= set(names)
    assert not [name for name in names if not name.endswith(".ckpt") or name.count(".") > 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rank"),
    [("sharded", 0), ("sharded", 1), ("async", 1), ("full", 0), ("incremental", 0), ("renewed, async", 0)],
)
def test_a_rank_that_is_killed_in_a_save(get_ranks: Any, how: str, rank: int, tmp_path: Path) -> None:
    """The other rank ends with it; the next run goes on from the newest whole checkpoint, also on three ranks."""
    num = random.Random(f"{how} {rank}").randint(30, 90)  # in the second save or later
    num += 60 * (how in ("incremental", "renewed, async"))  # in an increment
    with pytest.raises(RankError):
        get_ranks(2).run(fit_until_killed, str(tmp_path), how, rank, num)
    whole = max(int(path.stem.partition("=")[2]) for path in tmp_path.glob("step=*.ckpt"))
    assert 0 < whole < 50
    for first, last in get_ranks(3 if how == "sharded" else 2).run(go_on, str(tmp_path), how, whole + 2):
        assert first in {whole, whole - 1}
        assert last == whole + 2
