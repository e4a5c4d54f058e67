"""What FBGEMM's private names of device memory and of the cache of tables in UVM have to mean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm, EmbeddingLocation

from lightning_overlap.compat import fbgemm

from ..compat.kernels import DIM, ROWS, fused, look_up, train
from ..compat.meanings import Meanings

pytestmark = pytest.mark.gpu
meanings = Meanings()
FUSED = "SplitTableBatchedEmbeddingBagsCodegen"


def of(*names: str) -> Callable[[Any], Any]:
    return meanings.of(*(f"{FUSED}.{name}" for name in names))


def cached(*, locks: bool = True) -> Any:
    """Return a kernel whose tables are in pinned memory of the host, with a cache on the device."""
    options = {"cache_algorithm": CacheAlgorithm.LRU, "cache_load_factor": 1.0, "uvm_host_mapped": True}
    return fused(places=(EmbeddingLocation.MANAGED_CACHING,) * len(ROWS), prefetch_pipeline=locks, **options)


def prefetch(kernel: Any, *ids: int) -> None:
    offsets = torch.tensor([0, len(ids) - 1, len(ids)], device="cuda")
    kernel.prefetch(torch.tensor(ids, device="cuda"), offsets)


def tables(kernel: Any) -> list[list[float]]:
    kernel.flush()
    return [table.flatten().tolist() for table in kernel.split_embedding_weights()]


@of("weights_dev", "weights_uvm")
@pytest.mark.parametrize("place", [EmbeddingLocation.DEVICE, EmbeddingLocation.MANAGED])
def test_the_memory_of_a_kernel_is_that_of_its_tables(place: EmbeddingLocation) -> None:
    kernel = fused(places=(place,) * len(ROWS), uvm_host_mapped=True)
    [memory] = fbgemm.memory_of(kernel)
    assert memory.numel() >= DIM * sum(ROWS)
    before = look_up(kernel, 1, 2)
    memory.data.mul_(2)
    assert torch.equal(look_up(kernel, 1, 2), 2 * before)


@of("lxu_cache_weights", "prefetch_pipeline", "lxu_cache_locking_counter")
def test_rows_are_locked_until_their_backward() -> None:
    assert fbgemm.has_cache(cached())
    for locks in (True, False):
        kernel = cached(locks=locks)
        assert fbgemm.locks_rows(kernel) is locks
        if locks:
            prefetch(kernel, 1, 2)
            assert kernel.lxu_cache_locking_counter.sum().item() == 2
            train(kernel, 1, 2)
            assert not kernel.lxu_cache_locking_counter.any()


@of("lxu_cache_locations_list", "timesteps_prefetched", "prefetched_info_list", "prefetch_stream")
def test_what_is_forgotten_is_looked_up_anew() -> None:
    kernel, expected = cached(), cached()
    with torch.cuda.stream(torch.cuda.Stream()):
        offsets = torch.tensor([0, 1, 2], device="cuda")
        kernel.prefetch(torch.tensor([3, 1], device="cuda"), offsets, forward_stream=torch.cuda.default_stream())
    torch.cuda.synchronize()
    fbgemm.forget_prefetched([kernel])
    assert not kernel.lxu_cache_locking_counter.any()
    assert kernel.prefetch_stream is None
    for one in (kernel, expected):
        train(one, 1, 2)  # with what was prefetched, these ids would be updated at the places of others
    assert tables(kernel) == tables(expected)


@of("lxu_cache_locations", "_indices", "_offsets", "_vbe_B_offsets", "_vbe_max_B")
def test_a_lookup_without_a_backward_leaves_that_of_another_right() -> None:
    kernel, expected = cached(), cached()
    embeddings = look_up(kernel, 1, 2)
    with fbgemm.without_backward([kernel]), torch.no_grad():
        look_up(kernel, 0, 3, 4, 1)
    embeddings.sum().backward()
    train(expected, 1, 2)
    assert tables(kernel) == tables(expected)
    assert not kernel.lxu_cache_locking_counter.any()
