"""Deltas of tables under managed collisions: raw ids, evictions, and what replicas answer for ids."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torchrec.modules import mc_modules

from lightning_overlap.compat.torchrec import ranks_of
from lightning_overlap.deltas import DiskStore, Replica, ReplicaServer, TablesError
from lightning_overlap.deltas.files import FileName
from lightning_overlap.deltas.serving.raw_ids import shards_of

from ..checkpoint.collisions import Model, Setting, drawn_settings
from ..support.draws import few
from ..support.ranks import Ranks
from . import raw_ids
from .delta_fits import differences
from .test_command import ask
from .test_restoring import whole

GetRanks = Callable[..., Ranks]

SETTINGS = drawn_settings(hashed=st.booleans())
MODES = ("base", "fused_sparse_dist", "split_backward", "semi_sync", "semi_sync_deferred", "async_lookup")


def test_replicas_answer_for_raw_ids(get_ranks: GetRanks) -> None:
    """Tables, ids and answers are those of a training that sends nothing, at the step of each cut, bit for bit."""

    @few(max_examples=3)
    @given(
        setting=SETTINGS,
        mode=st.sampled_from(MODES),
        every=st.integers(1, 4),
        size=st.integers(1, 2),
        delay_s=st.sampled_from([0, 0.05]),
        optimizer_state=st.booleans(),
    )
    @example(setting=Setting(interval=1), mode="async_lookup", every=1, size=2, delay_s=0, optimizer_state=True)
    @example(
        setting=Setting("lru", hash_size=0), mode="semi_sync", every=3, size=2, delay_s=0.05, optimizer_state=False
    )
    @example(setting=Setting(hashed=True), mode="fused_sparse_dist", every=2, size=2, delay_s=0, optimizer_state=False)
    def holds(setting: Setting, mode: str, every: int, size: int, delay_s: float, optimizer_state: bool) -> None:
        with TemporaryDirectory() as folder:
            plain = get_ranks(size).run(raw_ids.train, setting, folder, mode, sends=False)
            sink = f"{folder}/sink"
            options = {"every_n_steps": every, "delay_s": delay_s, "deltas": {"optimizer_state": optimizer_state}}
            sent = get_ranks(size).run(raw_ids.train, setting, sink, mode, looks=False, slow_copy_s=0.03, **options)
            found = raw_ids.compare(setting, sink, raw_ids.by_step(plain))
            last = raw_ids.stragglers(setting, sink, raw_ids.by_step(plain)[12])
            other = Replica(Model(replace(setting, hashed=not setting.hashed)), DiskStore(sink))
            with pytest.raises(TablesError, match=r"_managed_collision\S+ has (an|no) input_hash_func, and the run"):
                other.update()
        assert [fit.losses for fit in sent] == [fit.losses for fit in plain]
        assert (found.wrong, last) == ({}, {})
        assert found.num_cuts >= 2  # more unless the disk is slow
        if setting == Setting(interval=1):
            assert found.num_evicted

    holds()


def test_replicas_follow_a_training_that_resumes(get_ranks: GetRanks) -> None:
    """From a checkpoint, on as many ranks and on others, where ids have other rows."""

    @few(max_examples=3)
    @given(setting=SETTINGS, sizes=st.tuples(st.integers(1, 2), st.integers(1, 2)), stop=st.integers(1, 8))
    @example(setting=Setting(interval=1), sizes=(2, 2), stop=5)
    @example(setting=Setting(interval=2), sizes=(2, 1), stop=4)
    def holds(setting: Setting, sizes: tuple[int, int], stop: int) -> None:
        before, after = map(get_ranks, sizes)
        with TemporaryDirectory() as folder:
            sink = f"{folder}/sink"
            before.run(raw_ids.train, setting, sink, steps=10, save_at=(stop,), looks=False)
            path = f"{sink}-saved/step={stop}.ckpt"
            fits = after.run(raw_ids.train, setting, sink, ckpt_path=path)
            assert raw_ids.stragglers(setting, sink, [fit.by_step[12] for fit in fits]) == {}

    holds()


def test_a_training_begins_from_its_deltas(get_ranks: GetRanks) -> None:
    """Ids have their rows and optimizer states; on other ranks those that fit. The log says what is not there."""

    @few(max_examples=3)
    @given(setting=SETTINGS, sizes=st.tuples(st.integers(1, 2), st.integers(1, 2)), every=st.integers(1, 3))
    @example(setting=Setting(interval=1), sizes=(2, 2), every=1)
    @example(setting=Setting(interval=2), sizes=(1, 2), every=2)
    def holds(setting: Setting, sizes: tuple[int, int], every: int) -> None:
        before, after = map(get_ranks, sizes)
        with TemporaryDirectory() as folder:
            sink = f"{folder}/sink"
            sends = {"every_n_steps": every, "deltas": {"optimizer_state": True}}
            fits = before.run(raw_ids.train, setting, sink, steps=7, **sends)
            sent = [fit.by_step[7] for fit in fits]
            begun = after.run(raw_ids.train, setting, sink, ckpt_path=f"deltas://{sink}", **sends)
            found = [fit.first for fit in begun]
            for table in raw_ids.TABLES:
                were, are = raw_ids.pairs_of(sent, table), raw_ids.pairs_of(found, table)
                rows, rows_now = (one[0].answers[table] for one in (sent, found))
                assert are.keys() <= were.keys()
                ids = raw_ids.ids_of_probes(setting)
                kept = [each for each, its_id in zip(raw_ids.PROBES, ids, strict=True) if its_id in are]
                assert {each: rows_now[each] for each in kept} == {each: rows[each] for each in kept}
                if sizes[0] == sizes[1]:
                    assert (are, rows_now) == (were, rows)
                    assert not differences(whole(one.tables for one in sent), [one.tables for one in found])
                assert len(are) > len(were) / 2
            assert "what eviction policies know of ids" in begun[0].words
            assert raw_ids.stragglers(setting, sink, [fit.by_step[12] for fit in begun]) == {}

    holds()


def test_wrong_raw_ids_are_answered(get_ranks: GetRanks, tmp_path: Path) -> None:
    """Ids of 64 bits are known or not; what is no such number is an error with its reason."""
    setting, sink, unheard = Setting(), f"{tmp_path}/sink", [2**63 - 1, -(2**63), 10**18]
    [fit] = get_ranks(1).run(raw_ids.train, setting, sink, steps=3)
    with ReplicaServer(replica := Replica(None, DiskStore(sink))) as server:
        replica.update()
        table = raw_ids.weight_of("t0", setting)

        def look_up(ids: list[object]) -> tuple[int, Any]:
            return ask(f"http://127.0.0.1:{server.port}/lookup", {"table": table, "ids": ids})

        status, answer = look_up([*unheard, *unheard])
        assert (status, answer["step"], answer["known"]) == (200, 3, [False] * 6)
        assert answer["rows"] == [fit.by_step[3].answers["t0"][-1]] * 6  # of any unknown id, on one rank
        assert look_up([])[1]["rows"] == look_up([])[1]["known"] == []
        for wrong in (2**63, -(2**63) - 1):
            assert look_up([7, wrong]) == (400, f"ids are 64-bit integers, got {wrong}")
        for strange in (1.5, "7", True, None, [7]):
            status, said = look_up([7, strange])
            assert (status, said[:24]) == (400, 'a request must be {"tabl')


def test_hashed_ids_are_refused_before_the_first_step(two_ranks: Ranks, tmp_path: Path) -> None:
    """MPZCH, in a fit that sends deltas and in one that begins from them."""
    (tmp_path / str(FileName(1, 3, 0, 2, 0, 1))).touch()
    for said in two_ranks.run(raw_ids.refused, str(tmp_path)):
        assert sorted(said) == ["a fit", "a restore"]
        for text in said.values():
            assert re.match(r"'mc' gives rows to ids by HashZch\w+\. Only the ids of MCHManagedCollisionModule", text)


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 1010), min_size=1, max_size=30),
    hash_size=st.sampled_from([0, 7, 1000, 2**63 - 1]) | st.integers(0, 2**63 - 1),
    num=st.integers(1, 5),
)
def test_shards_are_those_that_fbgemm_finds(ids: list[int], hash_size: int, num: int) -> None:
    policy = mc_modules.LRU_EvictionPolicy()
    module = mc_modules.MCHManagedCollisionModule(
        9, torch.device("cpu"), policy, eviction_interval=1, input_hash_size=hash_size, buckets=num
    )
    values = torch.tensor(ids)
    assert shards_of(values, hash_size, num).tolist() == ranks_of(module, values, num).tolist()
