"""The CUDA streams themselves: who waits for whom, what the allocator is told."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_overlap import StreamName
from lightning_overlap.runtime.run_ahead import RunAhead
from lightning_overlap.runtime.streams import CudaStreams, make_streams
from lightning_overlap.schedules.modes import STREAMS
from lightning_overlap.sparse.packed_alltoall import Entry, PackedExchange

pytestmark = pytest.mark.gpu

BUSY_CYCLES = 50_000_000


@pytest.mark.parametrize("policy", STREAMS)
def test_a_waiting_stream_reads_what_the_other_wrote(policy: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    streams = make_streams(device, STREAMS[policy])
    streams.begin_step()
    value = torch.zeros(1, device=device)
    torch.cuda.synchronize()
    with streams.on(StreamName.DATA_DIST):
        torch.cuda._sleep(BUSY_CYCLES)
        value += 1
        event = streams.record(StreamName.DATA_DIST)
    streams.wait(StreamName.LOOKUP, event)
    with streams.on(StreamName.LOOKUP):
        seen = value * 2
    torch.cuda.synchronize()
    assert seen.item() == 2


def test_policies_name_physical_streams() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    current, data_dist, dedicated = (
        CudaStreams(device, STREAMS[name]) for name in ("current", "data_dist", "dedicated")
    )
    assert current[StreamName.LOOKUP] == torch.cuda.current_stream(device)
    assert data_dist[StreamName.LOOKUP] == data_dist[StreamName.DATA_DIST]
    own = {dedicated[name].cuda_stream for name in StreamName}
    assert len(own) == len(StreamName)


def test_memory_handed_over_is_not_used_again_too_early() -> None:
    """A batch made on one stream, read on another one, and dropped: its memory must not go to the next batch."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams = CudaStreams(device, StreamName.LOOKUP)
    wrong = 0
    for _ in range(20):
        with streams.on(StreamName.MEMCPY):
            kjt = KeyedJaggedTensor(
                keys=["f"],
                values=torch.full((1 << 16,), 7, device=device),
                lengths=torch.tensor([1 << 16], device=device),
            )
            event = streams.record(StreamName.MEMCPY)
        streams.wait(StreamName.COMPUTE, event)
        streams.record_stream({"sparse": [kjt]}, StreamName.COMPUTE)
        torch.cuda._sleep(BUSY_CYCLES // 10)
        total = kjt.values().sum()
        del kjt
        with streams.on(StreamName.MEMCPY):
            torch.full((1 << 16,), 0, device=device)
        wrong += int(total.item() != 7 * (1 << 16))
    assert wrong == 0


class _Over:
    """An all-to-all of a single rank, which needs no group."""

    def wait(self) -> None:
        pass


def _to_itself(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> _Over:
    received.copy_(sent)
    return _Over()


def test_sizes_are_read_on_another_stream_than_the_ids_that_they_came_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the ids' module was not called: its step lets go of them on the compute stream, after its own work."""
    monkeypatch.setattr(dist, "all_to_all_single", _to_itself)
    ids, sizes = (torch.arange(1, num + 1, device="cuda") for num in (1 << 16, 1))
    group: Any = None
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()), StreamName.LOOKUP)
    exchange = PackedExchange([Entry(ids, [len(ids)], [len(ids)]), Entry(sizes, [1], [1])], group, streams)
    torch.cuda.synchronize()
    with streams.on(StreamName.DATA_DIST):
        torch.cuda._sleep(BUSY_CYCLES)
        [taken] = exchange.take(slice(1))
    with streams.on(StreamName.MEMCPY):
        [seen] = exchange.take(slice(1, 2))
        assert seen.tolist() == [1]
    streams[StreamName.DATA_DIST].synchronize()
    assert torch.equal(taken, ids)


def test_the_host_waits_for_the_step_before_the_last() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    streams = CudaStreams(device, StreamName.LOOKUP)
    streams.begin_step()
    ahead, ends = RunAhead(streams, 2), []
    torch.cuda.synchronize()
    for _ in range(3):
        ahead.wait()
        torch.cuda._sleep(BUSY_CYCLES)
        ends.append(streams.record(StreamName.COMPUTE))
        ahead.end_step()
    ahead.wait()
    assert ends[1].query()
    torch.cuda.synchronize()


def test_leaves_that_are_held_belong_to_the_idle_stream() -> None:
    """A backward on a stream of its own then waits for nothing that the stream of the leaf's first use has queued."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams = CudaStreams(device, StreamName.LOOKUP)
    streams.begin_step()
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    with torch.inference_mode():
        held = streams.hold_leaves([weight], StreamName.IDLE)
    with streams.on(StreamName.LOOKUP):
        loss = _Lookup.apply(weight)
    torch.cuda._sleep(BUSY_CYCLES)
    with streams.on(StreamName.LOOKUP):
        loss.backward()
    after = streams.record(StreamName.LOOKUP)
    after.synchronize()
    assert not streams.record(StreamName.COMPUTE).query(), "the lookup stream has waited for the compute stream"
    torch.cuda.synchronize()
    assert held


class _Lookup(torch.autograd.Function):
    """Takes a table and returns no gradient for it, as FBGEMM's fused kernels do."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None
