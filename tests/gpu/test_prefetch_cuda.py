"""Tables in UVM with a small cache on the device: prefetched, they train as in the plain loop, bit for bit."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed.types import CacheParams, ShardingPlan

from lightning_overlap import STREAMS, OverlapEmbeddingStrategy

from ..sparse.variants import Variant
from ..support import cases, reference
from ..support.cases import NUM_STEPS, SEQUENCE, TABLE_WISE, Case, Model
from ..support.fits import make_trainer
from ..support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CACHE = CacheParams(algorithm=CacheAlgorithm.LRU, load_factor=0.3, prefetch_pipeline=True)
"""Fewer rows than a batch or two need, so that rows are evicted all the time."""


def _cached_plan(case: Case, module: Model, world_size: int, device_type: str) -> ShardingPlan:
    plan = cases.make_plan(case, module, world_size, device_type)
    for module_plan in plan.plan.values():
        for parameter in module_plan.values():
            parameter.compute_kernel, parameter.cache_params = "fused_uvm_caching", CACHE
    return plan


def _host_mapped(init: Any = SplitTableBatchedEmbeddingBagsCodegen.__init__) -> Any:
    """Have kernels take pinned memory of the host: managed memory may hang a machine."""

    def init_mapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "uvm_host_mapped": True})

    return mock.patch.object(SplitTableBatchedEmbeddingBagsCodegen, "__init__", init_mapped)


def _train(case: Case) -> reference.Result:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with _host_mapped(), mock.patch.object(reference, "make_plan", _cached_plan):
        return reference.train(case, device_type="cuda")


def _fit(case: Case, stream: str, **trainer_kwargs: Any) -> tuple[reference.Result, int, list[str]]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    prefetched = 0

    def observe(kind: str, stage: Any, batch: int) -> None:
        nonlocal prefetched
        prefetched += (kind, str(stage)) == ("issue", "prefetch")

    model = Model(case)
    plan = _cached_plan(case, model, dist.get_world_size(), "cuda")
    strategy = OverlapEmbeddingStrategy(pipeline="prefetch", stream=stream, sharding=plan, observer=observe)
    with _host_mapped(), warnings.catch_warnings(record=True, action="always") as caught:
        trainer = make_trainer(strategy, "cuda", **{"limit_val_batches": 0, **trainer_kwargs})
        trainer.fit(model, datamodule=Variant(case, "dataclass", NUM_STEPS))
    result = reference.collect(model, trainer.optimizers[0], model.losses)
    return result, prefetched, [str(w.message) for w in caught if "not overlapped" in str(w.message)]


@pytest.mark.parametrize("case", [TABLE_WISE, SEQUENCE], ids=lambda case: case.name)
@pytest.mark.parametrize("stream", STREAMS)
def test_cached_tables_equal_the_plain_loop(gpus: Ranks, case: Case, stream: str) -> None:
    expected = gpus.run(_train, case)
    for mine, theirs in zip(gpus.run(_fit, case, stream), expected, strict=True):
        result, prefetched, messages = mine
        assert result.differences(theirs) == []
        assert prefetched == NUM_STEPS - 1  # all but the first batch, which shows what feeds what
        assert messages == []


def test_validation_between_a_lookup_and_its_backward_leaves_the_cache_right(gpus: Ranks) -> None:
    expected = gpus.run(_train, TABLE_WISE)
    actual = gpus.run(_fit, TABLE_WISE, "data_dist", limit_val_batches=2, val_check_interval=3)
    for (result, _, _), theirs in zip(actual, expected, strict=True):
        assert result.differences(theirs) == []
