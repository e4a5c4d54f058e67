"""What FBGEMM's private names have to mean. Those of its caches and of its memory on a device: `tests/gpu/`."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import nn

from lightning_overlap.compat import fbgemm

from ..gpu.test_fbgemm_cuda import meanings as on_device
from .kernels import DIM, ROWS, dense, fused, look_up, train
from .meanings import Meanings

pytestmark = pytest.mark.smoke
meanings = Meanings()
FUSED, DENSE = "SplitTableBatchedEmbeddingBagsCodegen", "DenseTableBatchedEmbeddingBagsCodegen"


@meanings.of(f"{FUSED}.weights_host")
def test_the_memory_of_a_kernel_is_that_of_its_tables() -> None:
    kernel = fused()
    [memory] = fbgemm.memory_of(kernel)
    assert memory.numel() == DIM * sum(ROWS)
    before = look_up(kernel, 1, 2)
    memory.data.mul_(2)
    assert torch.equal(look_up(kernel, 1, 2), 2 * before)


@meanings.of(f"{FUSED}.use_cpu", f"{DENSE}.use_cpu")
def test_kernels_of_a_cpu_are_known() -> None:
    assert fbgemm.runs_on_cpu(fused())
    assert fbgemm.runs_on_cpu(dense())
    assert not fbgemm.runs_on_cpu(nn.Linear(1, 1))  # in the place of a kernel


@meanings.of(f"{DENSE}.embedding_specs")
def test_the_rows_of_a_dense_kernel_are_those_that_have_gradients() -> None:
    kernel = dense()
    last = [num_rows - 1 for num_rows in fbgemm.rows_of(kernel)]
    train(kernel, *last)
    assert kernel.weights.grad.view(-1, DIM).nonzero()[:, 0].unique().tolist() == [last[0], last[0] + 1 + last[1]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        look_up(kernel, last[0], last[1] + 1)


@meanings.of(f"{FUSED}.D_offsets", f"{DENSE}.D_offsets")
@pytest.mark.parametrize("kernel_of", [fused, dense])
def test_a_lookup_without_gradients_of_weights_trains_the_same_rows(kernel_of: Any) -> None:
    updated = []
    for leaves_out in (False, True):
        kernel = kernel_of(feature_table_map=[0, 1, 1])
        none = fbgemm.no_features(kernel)
        assert (none.tolist(), none.dtype) == ([0, 0, 0], torch.int32)
        weights = torch.tensor([0.3, 0.7, 0.1, 0.9]).requires_grad_()
        masks = {"feature_requires_grad": none} if leaves_out else {}
        found = kernel(torch.tensor([1, 4, 2, 1]), torch.tensor([0, 2, 3, 4]), weights, **masks)
        found.square().sum().backward()
        assert bool(weights.grad.any()) is not leaves_out
        tables = [weight.tolist() for weight in kernel.split_embedding_weights()]
        gradients = [one.grad.tolist() for one in kernel.parameters() if one.grad is not None]
        updated.append((found.tolist(), tables, gradients))
    assert updated[0] == updated[1]


@meanings.of(f"{FUSED}.optimizer_args")
@pytest.mark.parametrize("clips", [False, True])
def test_what_clips_moves_rows_less(clips: bool) -> None:
    kernel = fused(gradient_clipping=clips, max_gradient=0.25)
    assert fbgemm.clips_gradients(kernel) is clips
    before = look_up(kernel, 1, 2).detach().clone()
    train(kernel, 1, 2, gradient=8.0)
    moved = before - look_up(kernel, 1, 2)
    assert torch.equal(moved, torch.full_like(moved, 0.5 * (0.25 if clips else 8.0)))


@meanings.of(f"{DENSE}.weights")
def test_a_kernel_shares_the_parameter_of_another_and_looks_up_in_a_leaf() -> None:
    """A leaf stands in for one call: the graph of each call ends at its own leaf, and none at the parameter."""
    first = dense()
    kernel = fbgemm.SharingKernel(first)
    assert kernel.weights is first.weights
    assert torch.equal(look_up(kernel, 1, 4, 2), look_up(first, 1, 4, 2))
    leaves = [(first.weights.detach() + number).requires_grad_() for number in range(2)]
    for leaf in leaves:
        offsets = torch.tensor([0, 1, 2])
        embeddings = kernel.look_up_in(leaf, torch.tensor([1, 2]), offsets)
        assert embeddings[0, 0] == leaf[DIM]
        embeddings.sum().backward()
    assert [leaf.grad.sum().item() for leaf in leaves if leaf.grad is not None] == [2 * DIM, 2 * DIM]
    assert first.weights.grad is None
    with pytest.raises(RuntimeError):
        kernel.look_up_in(leaves[0], torch.tensor([99, 0]), torch.tensor([0, 1, 2]))
    assert kernel.weights is first.weights


@pytest.mark.parametrize(
    "options",
    [{"pooling_mode": PoolingMode.MEAN}, {"weights_precision": SparseType.FP16}, {"output_dtype": SparseType.BF16}],
    ids=lambda options: next(iter(options)),
)
def test_a_kernel_that_shares_looks_up_as_the_other(options: dict[str, Any]) -> None:
    first = dense(**options)
    kernel = fbgemm.SharingKernel(first)
    ours, theirs = look_up(kernel, 1, 4, 2), look_up(first, 1, 4, 2)
    assert ours.dtype is theirs.dtype
    assert torch.equal(ours, theirs)


@meanings.of(f"{FUSED}.iter", f"{FUSED}.iter_cpu")
def test_lookups_are_counted_twice_and_taken_back_from_both() -> None:
    """A checkpoint has the count on the device; an update takes the one on the host, unless that is 0."""
    kernels = [fused(EmbOptimType.EXACT_ROWWISE_ADAGRAD), fused(EmbOptimType.EXACT_ROWWISE_ADAGRAD)]
    for _ in range(3):
        look_up(kernels[0], 1, 2)
    with torch.no_grad():
        look_up(kernels[1], 1, 2)  # a lookup without a backward counts, too
    assert fbgemm.lookup_counts(kernels) == [fbgemm.count_on_device(kernel).item() for kernel in kernels] == [3, 1]
    fbgemm.uncount(kernels, [2, 0])
    assert fbgemm.lookup_counts(kernels) == [fbgemm.count_on_device(kernel).item() for kernel in kernels] == [1, 1]
    fbgemm.set_count(kernels[0], 7)
    look_up(kernels[0], 1, 2)
    assert fbgemm.lookup_counts(kernels) == [8, 1]
    fbgemm.set_count(kernels[0], 0)
    fbgemm.count_on_device(kernels[0]).fill_(4)
    look_up(kernels[0], 1, 2)
    assert fbgemm.lookup_counts(kernels[:1]) == [5]


@meanings.of(f"{FUSED}.learning_rate_tensor")
def test_the_memory_of_a_rate_is_what_the_next_lookup_updates_by() -> None:
    kernel = fused()
    memory = fbgemm.memory_of_rate(kernel)
    assert float(memory) == 0.5
    kernel.set_learning_rate(0.25)
    assert float(memory) == kernel.get_learning_rate() == 0.25  # the same memory, without another call
    before = look_up(kernel, 1, 2).detach().clone()
    train(kernel, 1, 2)
    assert torch.equal(before - look_up(kernel, 1, 2), torch.full((1, 2 * DIM), 0.25))


@meanings.of(f"{FUSED}.lxu_cache_weights", f"{FUSED}.prefetch_pipeline")
def test_tables_in_host_memory_have_no_cache() -> None:
    kernel = fused()
    assert not fbgemm.has_cache(kernel)
    assert not fbgemm.locks_rows(kernel)


def test_each_listed_name_has_a_test() -> None:
    meanings.tested |= on_device.tested
    assert meanings.without_test(fbgemm.PRIVATE_NAMES) == set()
