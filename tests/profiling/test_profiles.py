"""Real traces of two gloo ranks: of TorchRec's own pipeline in a hand-written loop, and of our strategy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap.profiling.command import main
from lightning_overlap.profiling.report import summarize
from lightning_overlap.profiling.spans import HOST_LANE, Category, Span
from lightning_overlap.profiling.steps import find_steps
from lightning_overlap.profiling.torch_trace import read_trace
from lightning_overlap.schedules.stages import TRAINING_STAGES, Stage

from ..support.ranks import Ranks
from . import profiles

ALL_TO_ALLS = {Stage.INPUT_SPLITS_DIST: 1, Stage.INPUT_DATA_DIST: 2, Stage.EMBEDDING_LOOKUP: 1}
"""All-to-alls of one batch of one module in TorchRec's pipeline: sizes; lengths and ids; embeddings."""
PACKED = {**ALL_TO_ALLS, Stage.INPUT_DATA_DIST: 1}
"""In ours: lengths and ids in one."""


def collectives(spans: list[Span], batch: int, name: str = "gloo:all_to_all") -> dict[Stage, int]:
    found = [s for s in spans if s.kind is Category.COMMUNICATION and s.batch == batch and s.name == name]
    return {stage: sum(span.stage is stage for span in found) for stage in ALL_TO_ALLS}


def inside(spans: list[Span], name: str) -> Span:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_torchrecs_pipeline(two_ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks.run(profiles.torchrec_pipeline, tmp_path)
    traces = sorted(tmp_path.glob("*.json.gz"))
    for rank, path in enumerate(traces):
        ((found, spans),) = read_trace(path).items()
        assert found == rank
        assert {span.lane for span in spans} == {HOST_LANE, "gloo"}
        assert len(find_steps(spans)) == profiles.NUM_PROFILED - 1  # the last one has no next to end it
        # Batches 0 and 1 came before: the sizes of 3 are sent in the first step, it is looked up in the second.
        for batch in (4, 5):
            assert collectives(spans, batch) == ALL_TO_ALLS
        assert inside(spans, "start_sparse_data_dist 4").stage is Stage.INPUT_SPLITS_DIST
        waits = [span for span in spans if span.kind is Category.WAIT and span.stage is Stage.EMBEDDING_LOOKUP]
        assert {(wait.name, wait.lane, wait.batch) for wait in waits} == {
            ("embeddings: EmbeddingBagCollectionAwaitable wait()", HOST_LANE, batch)
            for batch in range(2, 2 + profiles.NUM_PROFILED)
        }
        kept = summarize(spans).breakdown
        # This pipeline issues the embeddings' all-to-all in the forward that waits for them.
        lookup = kept.stages[Stage.EMBEDDING_LOOKUP]
        assert 0 < kept.merge_wait_ms <= kept.blocked_ms < kept.step_ms
        assert 0 < lookup.exposed_ms <= lookup.busy_ms
    assert main([str(path) for path in traces]) == 0
    said = capsys.readouterr().out
    assert "EmbeddingBagCollectionAwaitable wait()" in said
    assert "under ## backward ##" in said  # where the all-to-all of gradients is waited for


@pytest.mark.parametrize(("num_nodes", "name"), [(1, "gloo:all_to_all"), (2, "gloo:recv")])
def test_our_strategy(
    get_ranks: Any, num_nodes: int, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    get_ranks(2, num_nodes=num_nodes).run(profiles.strategy, tmp_path, "fused_sparse_dist")
    traces = sorted(tmp_path.glob("*.json.gz"))
    for path in traces:
        (spans,) = read_trace(path).values()
        for batch in (2, 3):
            assert collectives(spans, batch, name) == PACKED  # one receive, from the other rank, in each
            # looked up before its own step, where the annotation says so
            lookup = inside(spans, f"embedding_lookup {batch}")
            assert (lookup.stage, lookup.batch, lookup.lane) == (Stage.EMBEDDING_LOOKUP, batch, HOST_LANE)
            trained = {name: inside(spans, f"{name} {batch}") for name in map(str, TRAINING_STAGES)}
            assert all((span.kind, str(span.stage)) == (Category.DENSE, name) for name, span in trained.items())
            assert lookup.end_ms <= trained["dense_forward"].start_ms
        assert len(find_steps(spans)) == profiles.NUM_PROFILED - 1
        looked_up = [span for span in spans if span.kind is Category.LOOKUP and span.batch in (2, 3)]
        assert {span.stage for span in looked_up} == {Stage.EMBEDDING_LOOKUP}
    assert main([str(path) for path in traces]) == 0
    # with Python's stacks a wait says whose line waits: the module's, where it merges the embeddings
    assert re.search(r"called from \S*support/cases\.py\(\d+\): \w+", capsys.readouterr().out)
