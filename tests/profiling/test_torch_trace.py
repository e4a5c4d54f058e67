"""Traces of torch.profiler, made by hand and published ones, and the files that this package writes itself."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from lightning_overlap.apps.bench_arms import Network
from lightning_overlap.data import SyntheticDataModule
from lightning_overlap.models import DLRM
from lightning_overlap.profiling import trace_names
from lightning_overlap.profiling.report import summarize
from lightning_overlap.profiling.spans import HOST_LANE, Category, Span
from lightning_overlap.profiling.torch_trace import read_trace
from lightning_overlap.profiling.trace_file import TraceError, load, write_trace
from lightning_overlap.schedules.stages import TRAINING_STAGES, Stage
from lightning_overlap.sparse import EarlyEmbeddings

from ..support.ranks import Ranks

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
BACKWARD_THREAD, HOST_THREAD = 8, 9


def event(category: str, name: str, start: float, end: float, tid: int = HOST_THREAD, **args: Any) -> dict[str, Any]:
    on_device = category in ("kernel", "gpu_memcpy")
    args |= {"stream": tid, "device": 0} if on_device else {}
    return {
        **{"ph": "X", "cat": category, "name": name, "pid": 0 if on_device else 9, "tid": tid},
        **{"ts": 1000 + start, "dur": end - start, "args": args},
    }


def read(tmp_path: Path, *events: dict[str, Any], **about: Any) -> list[Span]:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": list(events), **about}))
    (spans,) = read_trace(path).values()
    return spans


#  us           0         100       200       300
#  host         forward 3 ------------|  start_sparse_data_dist 4 |  backward 3
#                launch 1              copy_: cudaMemcpyAsync 110..290
#  stream 7        gemm                            embedding
#  stream 9                  all-to-all ...........|
GPU = (
    event("user_annotation", "## forward 3 ##", 0, 100),
    event("cpu_op", "aten::linear", 5, 30),
    event("cuda_runtime", "cudaLaunchKernel", 10, 15, correlation=1),
    event("cuda_runtime", "cudaLaunchKernel", 90, 95, correlation=2),
    event("user_annotation", "## start_sparse_data_dist 4 ##", 100, 300),
    event("user_annotation", "## all2all_data:kjt splits ##", 101, 108),
    event("cuda_runtime", "cudaLaunchKernel", 102, 105, correlation=3),
    event("cpu_op", "aten::copy_", 108, 292),
    event("cuda_runtime", "cudaMemcpyAsync", 110, 290, correlation=4),
    event("user_annotation", "## backward 3 ##", 300, 400),
    event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 310, 390, BACKWARD_THREAD),
    event("cuda_runtime", "cudaLaunchKernel", 320, 325, BACKWARD_THREAD, correlation=5),
    event("cuda_runtime", "cudaDeviceSynchronize", 500, 900),  # the profiler's own
    event("kernel", "void cutlass::gemm<float>(int)", 20, 80, 7, correlation=1),
    event("kernel", "ncclKernel_SendRecv(x)", 105, 260, 9, correlation=3),
    event("kernel", "split_embedding_codegen_forward<float>(int)", 262, 280, 7, correlation=2),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 281, 289, 9, correlation=4),
    event("kernel", "split_embedding_backward_codegen_sgd<float>(int)", 330, 380, 7, correlation=5),
)


def test_a_kernel_belongs_to_the_annotation_of_its_launch(tmp_path: Path) -> None:
    spans = read(tmp_path, *GPU, distributedInfo={"rank": 5})
    assert list(read_trace(tmp_path / "trace.json")) == [5]
    assert {
        (s.name, s.lane, s.kind, s.stage, s.batch, round(s.duration_ms * 1e3))
        for s in spans
        if "stream" in s.lane and s.kind is not Category.WAIT
    } == {
        ("cutlass::gemm", "stream 7", Category.DENSE, Stage.DENSE_FORWARD, 3, 60),
        ("ncclKernel_SendRecv", "stream 9", Category.COMMUNICATION, Stage.INPUT_SPLITS_DIST, 4, 155),
        ("split_embedding_codegen_forward<float>", "stream 7", Category.LOOKUP, Stage.DENSE_FORWARD, 3, 18),
        ("Memcpy DtoH (Device -> Pageable)", "stream 9", Category.COPY, Stage.INPUT_SPLITS_DIST, 4, 8),
        # launched by another thread, which has no annotation; the update of the tables is part of backward
        ("split_embedding_backward_codegen_sgd<float>", "stream 7", Category.DENSE, Stage.BACKWARD, 3, 50),
    }


def test_the_host_waits_where_a_call_blocks_and_a_queued_kernel_for_what_ended_last(tmp_path: Path) -> None:
    assert {
        (s.name, s.lane, s.stage, s.detail, round(s.duration_ms * 1e3))
        for s in read(tmp_path, *GPU)
        if s.kind is Category.WAIT
    } == {
        ("aten::copy_", HOST_LANE, Stage.INPUT_SPLITS_DIST, "cudaMemcpyAsync under ## start_sparse_data_dist ##", 180),
        (
            "waits for ncclKernel_SendRecv",
            "stream 7",
            Stage.INPUT_SPLITS_DIST,
            "on stream 9",
            262 - 95,
        ),  # from the end of its launch
    }


def test_a_wait_names_the_innermost_line_and_the_users(tmp_path: Path) -> None:
    spans = read(
        tmp_path,
        event("python_function", "train.py(7): training_step", 0, 500),
        event("python_function", "train.py(90): begin", 5, 9),
        event("user_annotation", "## backward 3 ##", 7, 450),  # outlives the function that began it
        event("python_function", "torchrec/distributed/types.py(375): wait", 10, 400),
        event("python_function", "torch/_tensor.py(12): item", 20, 390),
        event("python_function", "<built-in method item>", 21, 389),
        event("cpu_op", "aten::item", 30, 380),
        event("cuda_runtime", "cudaStreamSynchronize", 40, 370, correlation=1),
        event("kernel", "gemm", 400, 405, 7),
    )
    (blocked,) = [span for span in spans if span.kind is Category.WAIT]
    place = "under ## backward ## at torchrec/distributed/types.py(375): wait, called from train.py(7): training_step"
    assert blocked.detail == f"cudaStreamSynchronize {place}"


def test_an_optimizer_step_around_a_forward_is_lightnings_closure(tmp_path: Path) -> None:
    spans = read(
        tmp_path,
        event("user_annotation", "Optimizer.step#SGD.step", 0, 400),
        event("user_annotation", "## dense_forward 2 ##", 10, 100),
        event("user_annotation", "Optimizer.step#Adam.step", 500, 600),
        event("cuda_runtime", "cudaLaunchKernel", 510, 520, correlation=1),
        event("kernel", "adam", 530, 520, 7, correlation=1),  # Kineto writes such durations
    )
    assert spans[-1].duration_ms == 0
    assert [(s.name, s.stage) for s in spans] == [
        ("dense_forward 2", Stage.DENSE_FORWARD),
        ("Optimizer.step#Adam.step", Stage.OPTIMIZER_STEP),
        ("adam", Stage.OPTIMIZER_STEP),
    ]


@pytest.mark.parametrize(
    ("name", "stage", "batch"),
    [
        ("## copy_batch_to_gpu 4 ##", Stage.COPY_BATCH_TO_DEVICE, 4),
        ("## start_sparse_data_dist 12 ##", Stage.INPUT_SPLITS_DIST, 12),
        ("## _prefetch_embeddings model.ebc: 3 ##", Stage.PREFETCH, 3),
        ("## sparse_forward 3 on CPU ##", Stage.EMBEDDING_LOOKUP, 3),
        ("## all2all_data:kjt splits ##", Stage.INPUT_SPLITS_DIST, None),
        ("## ReduceScatter_bwd ##", Stage.BACKWARD, None),
        ("## FusedKJTListSplitsAwaitable wait() ##", Stage.INPUT_SPLITS_DIST, None),
        # TorchRec names the range of an awaitable's wait after its class.
        (f"## {EarlyEmbeddings.__name__} wait() ##", Stage.EMBEDDING_LOOKUP, None),
        *((f"## {stage} 41 ##", stage, 41) for stage in Stage),
        ("my forward pass", None, None),  # a user's own
    ],
)
def test_names_of_stages(name: str, stage: Stage | None, batch: int | None) -> None:
    assert trace_names.of_annotation(name) is stage
    assert trace_names.split_batch(name)[0] == batch


def profile_torchrecs_pipeline(folder: Path) -> None:
    data = SyntheticDataModule(num_tables=3, num_batches=9, batch_size=16)
    data.setup("fit")
    model = DLRM(data.table_sizes, data.num_dense)
    network = DistributedModelParallel(Network(model), device=torch.device("cpu"))
    pipeline = TrainPipelineSparseDist(network, model.configure_optimizers(), torch.device("cpu"))
    batches = iter(data.train_dataloader())
    for _ in range(2):
        pipeline.progress(batches)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            pipeline.progress(batches)
    profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))


def test_torchrecs_own_ranges_have_their_stages(two_ranks: Ranks, tmp_path: Path) -> None:
    """Of a real run of its pipeline: what an upgrade renames shows here."""
    two_ranks.run(profile_torchrecs_pipeline, tmp_path)
    for rank in (0, 1):
        events = load(tmp_path / f"rank{rank}.json.gz")[0]
        ranges = {event.name for event in events if event.category == "user_annotation"}
        found = {(trace_names.of_annotation(name), trace_names.split_batch(name)[0]) for name in ranges}
        for stage in (Stage.COPY_BATCH_TO_DEVICE, Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST, *TRAINING_STAGES):
            assert {(stage, batch) for batch in (4, 5)} <= found
        assert "## EmbeddingBagCollectionAwaitable wait() ##" in ranges
        unknown = {name for name in ranges if name.startswith("##") and trace_names.of_annotation(name) is None}
        assert unknown == {"## zero_grad ##"}


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is absent: the published traces are not in the repository")
@pytest.mark.parametrize(
    ("name", "rank", "hidden_percent", "worst_ms", "where"),
    [
        # 5 steps on an A100: the host stands in a copy to the host, and hardly any communication is hidden.
        ("negative_queue_length_values_check_rank0", 0, 1.36, 725.7, "cudaMemcpyAsync under ## sparse_data_dist ##"),
        ("trace_diff_control_control", 3, 46.2, 34.5, "all2all_tw_data:wait"),
    ],
)
def test_a_published_trace(name: str, rank: int, hidden_percent: float, worst_ms: float, where: str) -> None:
    [(found, spans)] = read_trace(TRACES / f"{name}.json.gz").items()
    told = summarize(spans)
    assert found == rank
    assert 100 * told.categories[Category.COMMUNICATION].hidden_fraction == pytest.approx(hidden_percent, abs=0.05)
    assert told.blocks[0].total_ms == pytest.approx(worst_ms, abs=0.05)
    assert where in told.blocks[0].detail


ANY_SPAN = st.builds(
    lambda start, long, *rest: Span(start, start + long, *rest),
    st.floats(-1e9, 1e9, allow_nan=False),
    st.floats(0, 1e6),
    st.sampled_from(Category),
    st.sampled_from([HOST_LANE, "stream 7", "gloo"]),
    st.text(max_size=8),
    st.none() | st.sampled_from(Stage),
    st.none() | st.integers(0, 2**40),
    st.text(max_size=8),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
)


@given(
    st.dictionaries(st.integers(0, 99), st.lists(ANY_SPAN, min_size=1, max_size=6), min_size=1, max_size=3),
    st.sampled_from(["json", "json.gz"]),
)
def test_any_timeline_that_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, ranks: dict[int, list[Span]], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    write_trace(path, ranks)
    back = read_trace(path)
    assert {rank: sorted(map(repr, spans)) for rank, spans in back.items()} == {
        rank: sorted(map(repr, spans)) for rank, spans in ranks.items()
    }


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_written_trace_is_read_back_and_one_for_perfetto(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    one = Span(1.1, 5, Category.COMMUNICATION, "gloo", 'a "\u2192" \ud800', Stage.EMBEDDING_LOOKUP, 2**40, "\n", 7, 9)
    other = Span(2, 7, Category.COMMUNICATION, "gloo", "all_reduce")
    write_trace(path, {0: [other], 2: [one, other]})
    assert read_trace(path) == {0: [other], 2: [one, other]}
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if suffix == "json.gz" else content)["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 2"]
    assert [(lanes[e["pid"], e["tid"]], e["cat"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("gloo", "communication", "all_reduce", 2000, 5000),  # microseconds
        ("gloo", "communication", one.name, 1100, pytest.approx(3900)),
        ("gloo (2)", "communication", "all_reduce", 2000, 5000),  # what overlaps is on a row of its own
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its JSON is broken"),
        (b'{"traceEvents": [{"ph": "X", "na', r"its JSON is broken.\n  got:  .* column 30: '.*\"ph\": \"X\", \"na'"),
        (gzip.compress(b"[]" * 5000, mtime=0)[:-30], "damaged gzip file"),
        (b'{"lr": 1}', "got:  the keys lr"),
        (b'{"traceEvents": 3}', "has no list of traceEvents"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "holds nothing to draw"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "f", "ts": NaN, "dur": 1}]}', "nothing to draw"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "f", "ts": "soon", "dur": 1}]}', "nothing to draw"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as err:
        read_trace(path)
    assert str(path) in str(err.value)


def test_names_with_quotes_are_read(tmp_path: Path) -> None:
    """torch 2.13 does not escape them, so that its file is no JSON."""
    names = {'a "b".py', '"a"', '"'}
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for name in names:
            with record_function(name):
                torch.ones(2).sum()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert names <= {event.name for event in load(tmp_path / "trace.json")[0]}


def test_a_trace_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace.json holds no work of a GPU") as err:
        read(tmp_path, *(one for one in GPU if one["cat"] not in ("kernel", "gpu_memcpy")))
    assert "got:  6 cuda_runtime, 4 user_annotation, 3 cpu_op\n" in str(err.value)
    assert "callback OverlapTimeline" in str(err.value)
    assert "ProfilerActivity.CUDA" in str(err.value)


def test_a_changed_file_of_our_own_a_folder_and_a_missing_file_are_said(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    write_trace(path, {0: [Span(1, 2, Category.DENSE, HOST_LANE, "forward", Stage.DENSE_FORWARD)]})
    path.write_text(path.read_text().replace('"stage":"dense_forward"', '"stage":"sparse_forward"'))
    for wrong, message in (
        (path, "event 'forward' was not written by lightning_overlap timeline"),
        (tmp_path, r"is a folder, not a trace. Its traces: rank0\.json"),
        (tmp_path / "rank1.json", "does not exist"),
    ):
        with pytest.raises(TraceError, match=message):
            read_trace(wrong)
