"""Law 6: whatever fails, in whatever stage, batch and rank, all ranks end, the first cause is read, nothing is left."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap import MODES

from ..support.cases import MIXED
from ..support.pairs import HELD, in_turn
from ..support.ranks import Ranks
from ..support.reference import on_ranks
from . import faults
from .fault_runs import TIMEOUT_S, run_all, run_on_two_hosts, start_script
from .faults import NUM_BATCHES, Fault

BATCHES = {"first": 0, "second": 1, "middle": NUM_BATCHES // 2, "last": NUM_BATCHES - 1}


@pytest.fixture(autouse=True)
def _end_the_ranks(_pools: dict[Any, Ranks]) -> Iterator[None]:
    """Each run that failed leaves process groups, whose threads wake up all the time: the next test gets new ranks."""
    yield
    for pool in _pools.values():
        pool.close()


def _check(two_ranks: Ranks, pipeline: str, injected: list[Fault]) -> None:
    """All ranks meet the faults: each reads its own, nothing is left, and a later fit is as if nothing had been."""
    expected = on_ranks(two_ranks, MIXED, MODES[pipeline].staleness, num_steps=NUM_BATCHES)
    runs = two_ranks.run(faults.fail_and_fit, pipeline, injected)
    for (reports, actual), unharmed in zip(runs, expected, strict=True):
        for fault, (said, left) in zip(injected, reports, strict=True):
            if fault.place == "worker":
                assert re.match("RuntimeError: DataLoader worker .* exited unexpectedly", said)
            else:
                assert f"InjectedError: {fault}" in said
                assert " hid " not in said, fault
            assert left == [], fault
        assert actual.differences(unharmed) == []


@pytest.mark.parametrize(
    ("pipeline", "which"),
    [
        *((mode, which) for mode in HELD for which in BATCHES),
        *((mode, "first") for mode in MODES if mode not in HELD),
        *in_turn([mode for mode in MODES if mode not in HELD], ["second", "middle", "last"]),
    ],
)
def test_a_fault_in_a_stage_of_all_ranks(two_ranks: Ranks, pipeline: str, which: str) -> None:
    """Wherever a mode comes by in a batch; what it does not do for the first one yet, it does for a later one."""
    seen, _ = two_ranks.run_once(faults.places, pipeline)
    batch_of = {place: BATCHES[which] for place, batch in seen if batch == BATCHES[which]}
    if which == "first":
        batch_of |= {place: batch for place, batch in reversed(seen) if place not in batch_of}
    assert set(batch_of) == {place for place, _ in seen}
    assert set(batch_of) >= {f"issue {step.stage}" for step in MODES[pipeline]}
    _check(two_ranks, pipeline, [Fault(place, batch) for place, batch in batch_of.items()])


@pytest.mark.parametrize(
    ("whose", "pipeline"),
    [
        *((whose, pipeline) for whose in ("DATA", "HOOKS") for pipeline in ("base", "fused_sparse_dist", "semi_sync")),
        ("WORKER", "fused_sparse_dist"),
    ],
)
def test_a_fault_of_the_user_on_all_ranks(two_ranks: Ranks, whose: str, pipeline: str) -> None:
    _check(two_ranks, pipeline, list(getattr(faults, whose)))


PEER_GONE = re.compile("Connection closed by peer|Connection reset by peer|Broken pipe")


def _end(log: str) -> str:
    *_, last = re.finditer(r"^(\[rank\d\]: )?[\w.]+Error: ", log, re.MULTILINE)
    return log[last.start() :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "rank", "places"),
    [
        ("fused_sparse_dist", 0, ["issue input_splits_dist", "issue backward"]),
        ("fused_sparse_dist", 1, ["issue input_data_dist", "issue embedding_lookup"]),
        ("semi_sync", 1, ["issue input_splits_dist", "issue backward"]),
    ],
)
def test_a_fault_on_one_rank_ends_the_others(tmp_path: Path, pipeline: str, rank: int, places: list[str]) -> None:
    """Each process ends with exit code 1, not with SIGABRT; the others read who failed first, where its store lives."""
    runs = [{"place": place, "ranks": [rank], "pipeline": pipeline, "timeout_s": 20} for place in places]
    waited = []
    for place, ends in zip(places, run_all(tmp_path, *runs), strict=True):
        assert [end.code for end in ends] == [1, 1], ends
        raised, lost = ends[rank].log, ends[1 - rank].log
        assert f"InjectedError: {place} of batch 5" in _end(raised)
        assert f"rank {rank} was at" in _end(raised)
        if not PEER_GONE.search(_end(lost)):
            assert "Another rank did not answer within 20 s" in _end(lost), lost
            waited.append(place)
        if rank == 1:  # rank 0 keeps the store
            assert re.search(f"rank 1 had failed at .* InjectedError: {place} of batch 5", _end(lost))
    # A send that is being written while its connection ends is not told so (gloo's `Pair::signalException`), which
    # happens in one of some hundred runs: that rank waits for the timeout.
    assert len(waited) <= 1, waited


@pytest.mark.slow
def test_a_rank_that_fails_and_stays_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    [[lost, hung]] = run_all(tmp_path, {"place": "training_step", "callback": "hangs"})
    assert (lost.code, hung.code) == (1, 1)
    assert f"Another rank did not answer within {TIMEOUT_S} s" in _end(lost.log)
    assert "InjectedError: training_step of batch 5" in hung.log


@pytest.mark.slow
def test_a_rank_ends_though_the_store_does_not_answer(tmp_path: Path) -> None:
    """It has waited for the timeout, and then not for the store: the link is down for good, or rank 0 is stopped."""
    try:
        first, lost = run_on_two_hosts(tmp_path)
    except (OSError, subprocess.CalledProcessError):  # not root on Linux with iproute2
        [[_, lost]] = run_all(tmp_path, {"place": "training_step", "signum": signal.SIGSTOP, "ranks": [0]})
        ends = [lost]
    else:
        ends = [first, lost]
    for end in ends:
        assert end.code == 1, end
        assert f"Another rank did not answer within {TIMEOUT_S} s" in _end(end.log)
    assert "rank 1 was " in _end(lost.log)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_last_checkpoint_resumes(tmp_path: Path) -> None:
    last = "step=4.ckpt"
    killed = {"place": "training_step", "signum": signal.SIGKILL}
    runs = [{"callback": "lingers"}, killed, {"resume": str(tmp_path / "1" / last)}]
    whole, ends, resumed = run_all(tmp_path, *runs)
    for end in whole:  # the rank that keeps the store has ended long before the other one: nobody is told of it
        assert not re.search("TCPStore|Broken pipe|Connection|Error", end.log), end.log
    assert [[end.code for end in run] for run in (whole, ends, resumed)] == [[0, 0], [1, -signal.SIGKILL], [0, 0]]
    assert PEER_GONE.search(_end(ends[0].log))
    for rank in range(2):
        expected, actual = (torch.load(tmp_path / run / f"result_{rank}.pt", weights_only=False) for run in "02")
        expected.losses = expected.losses[4:]
        assert actual.differences(expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("callback", ["on_exception", "save_on_exception"])
def test_checkpoints_that_are_saved_on_exception(tmp_path: Path, callback: str) -> None:
    """Where all ranks fail, all save; where one does, it says that it could not and ends with its own error."""
    terminated, failed = run_all(
        tmp_path,
        {"place": "training_step", "callback": callback, "signum": signal.SIGTERM},
        {"place": "training_step", "callback": callback},
    )
    name = {"on_exception": "failed.ckpt", "save_on_exception": "saved.ckpt"}[callback]
    assert [end.code for end in terminated] == [0, 0]  # Lightning's SIGTERMException is a SystemExit without a code
    assert (tmp_path / "0" / name).is_dir()
    assert [end.code for end in failed] == [1, 1]
    assert not (tmp_path / "1" / name).exists()
    assert "InjectedError: training_step of batch 5" in _end(failed[1].log)
    for end in failed:
        assert "no checkpoint of it was saved: other ranks did not fail there within" in _end(end.log)
    assert re.search(r"rank 1 had failed at dense_forward of batch 5, in .*: InjectedError", _end(failed[0].log))


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    both, one = run_all(
        tmp_path,
        {"place": "training_step", "signum": signal.SIGINT, "ranks": [0, 1]},
        {"place": "training_step", "signum": signal.SIGINT},
    )
    assert [end.code for end in both] == [1, 1]  # Lightning's
    assert "Detected KeyboardInterrupt" in both[0].log
    assert [end.code for end in one] == [1, 1]
    assert re.search(r"rank 1 had failed at dense_forward of batch 5, in .*: KeyboardInterrupt", one[0].log)


def _is_gone(group: int) -> bool:
    """Whether no process of a group is left, not even a zombie."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_a_fault_under_lightnings_own_launcher(tmp_path: Path) -> None:
    """Rank 0 started the others and is what the shell waits for: its exit code and its last words count."""
    script = start_script(tmp_path, place="issue input_splits_dist")
    assert script.wait(timeout=300) == 1  # not 134
    log = (tmp_path / "log").read_text()
    told = _end(log)  # rank 1's, which comes after all that rank 0 says: cause and place, each once
    assert "InjectedError: issue input_splits_dist of batch 5" in told
    assert "rank 1 was at input_splits_dist of batch 5" in told
    assert log.count("InjectedError: issue input_splits_dist of batch 5") == 1
    assert _is_gone(script.pid)


@pytest.mark.slow
def test_ctrl_c_twice_in_a_terminal(tmp_path: Path) -> None:
    script = start_script(tmp_path, place="training_step", signum=signal.SIGINT, group=True)
    while script.poll() is None and "Detected KeyboardInterrupt" not in (tmp_path / "log").read_text():
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(script.pid, signal.SIGINT)
    # Lightning's; or the second one's own, when it comes before or after Lightning's ignoring it; or a kill: every five
    # seconds Lightning's observer of the other ranks ends rank 0 if rank 1 has ended.
    assert script.wait(timeout=300) in (1, -signal.SIGINT, -signal.SIGKILL)
    assert "Detected KeyboardInterrupt" in (tmp_path / "log").read_text()
    assert _is_gone(script.pid)
