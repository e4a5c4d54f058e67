"""Steps of TorchRec's pipeline in a hand-written loop, under torch.profiler. Run by ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.streamable import Pipelineable

from ..support.cases import TABLE_WISE, Batch, Model, dense_optimizer, make_batch, make_plan

NUM_PROFILED = 5


class _Batch(Pipelineable):
    """What TorchRec's pipeline wants of a batch; a model that FX can trace reads its attributes."""

    def __init__(self, batch: Batch) -> None:
        self.dense = batch.dense
        self.kjt = batch.inputs["sparse"][0]
        self.labels = batch.labels

    def to(self, device: torch.device, non_blocking: bool = False) -> _Batch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> _Batch:
        return self


class _Traceable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model(TABLE_WISE)

    def forward(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings = self.model.ebc(batch.kjt)
        merged = torch.cat([self.model.bottom(batch.dense), embeddings.values()], dim=1)
        logits = self.model.top(merged).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits


def _batches(first: int, num: int) -> Iterator[_Batch]:
    return (_Batch(make_batch(TABLE_WISE, index, dist.get_rank())) for index in range(first, first + num))


def torchrec_pipeline(folder: Path) -> None:
    module = _Traceable()
    plan = make_plan(TABLE_WISE, module.model, dist.get_world_size())
    plan.plan = {f"model.{name}": tables for name, tables in plan.plan.items()}
    dmp = DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"), plan=plan
    )
    pipeline = TrainPipelineSparseDist(dmp, dense_optimizer(module), torch.device("cpu"))
    batches = _batches(0, 2 + NUM_PROFILED + 2)
    for _ in range(2):
        pipeline.progress(batches)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(NUM_PROFILED):
            pipeline.progress(batches)
    profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))
