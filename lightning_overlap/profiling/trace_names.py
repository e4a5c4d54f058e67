"""The stages and categories of names in a torch.profiler trace: annotations, operators and kernels."""

import re
import sys
from collections.abc import Iterable
from functools import cache

from ..schedules import Stage
from .spans import Category

_ANNOTATIONS: tuple[tuple[str, Stage], ...] = (
    # Awaitables: TorchRec names the range of `wait()` after the class.
    (r"(splitsalltoall|(fused)?kjt\w*splits)awaitable wait\(\)", Stage.INPUT_SPLITS_DIST),
    (r"(fused)?kjt\w*awaitable wait\(\)|all2all_tw_data:wait|all2all_data:\w*_wait", Stage.INPUT_DATA_DIST),
    (r"(\w+awaitable|request|(early|lazy)embeddings) wait\(\)|forward:wait_all2all", Stage.EMBEDDING_LOOKUP),
    # Copies.
    (r"(inplace_)?copy_(batch_)?to_(gpu|device)|copy_batch", Stage.COPY_BATCH_TO_DEVICE),
    (r"next_batch|load[ _]batch|wait_for_batch|enumerate\(dataloader\)", Stage.COPY_BATCH_TO_DEVICE),
    # The input dist; names of one half come before names of both halves.
    (r"all2all_data:kjt splits|\[splits_dist\]|input_splits_dist", Stage.INPUT_SPLITS_DIST),
    (r"(start_)?sparse_data_dist|all2all_\w+:init|permute_id_(score_)?list_features", Stage.INPUT_SPLITS_DIST),
    (r"all2all_\w+:|input_data_dist|wait_sparse_data_dist", Stage.INPUT_DATA_DIST),
    (r"dist_init:recat|runtime_forward_assemble_kjt", Stage.INPUT_DATA_DIST),
    # Collectives of the backward, before collectives of the forward, whose patterns match them.
    (r"(all2all|reducescatter|allgather|variable_batch|alltoall|reduce_scatter)\w*_bwd?\b", Stage.BACKWARD),
    (r"alltoall_bwd_single|all2all_\w+_bwd", Stage.BACKWARD),
    # The lookup, and the all-to-all of embeddings.
    (r"(sharded_module_|_)?prefetch", Stage.PREFETCH),
    (r"\[lookup\]|sparse_forward|(start_)?embedding_lookup|uvm_lookup_prefetched_rows", Stage.EMBEDDING_LOOKUP),
    (r"\[output_dist\]|all2all|reducescatter|allgather|variable_batch|alltoall|reduce_scatter", Stage.EMBEDDING_LOOKUP),
    (r"embedding_update", Stage.EMBEDDING_UPDATE),
    (r"weight_gradients", Stage.WEIGHT_GRADIENTS),
    # The dense part.
    (r"emb_backward|backward", Stage.BACKWARD),
    (r"optimizer_step|optimizer( \d+)?$|optimizer\.step#", Stage.OPTIMIZER_STEP),
    (r"dense_forward|forward|distributeddataparallel\.forward", Stage.DENSE_FORWARD),
)  # fmt: skip
_OPERATORS: tuple[tuple[str, Stage], ...] = (
    # The backward of TorchRec's all-to-all request waits for gradients.
    (r"autograd::engine::evaluate_function", Stage.BACKWARD),
    (r"autograd::engine::\w+: (all2all|reducescatter|allgather|variable)\w*reqback", Stage.BACKWARD),
    (r"fbgemm::(split_embedding_codegen_lookup|dense_embedding_codegen_lookup)", Stage.EMBEDDING_LOOKUP),
    (r"fbgemm::(lxu_cache_(populate|lookup)|bounds_check_indices)", Stage.EMBEDDING_LOOKUP),
)  # fmt: skip

_BATCH = re.compile(r"## .*?[\s:](\d+)(?: on CPU)? ##$")
_SPARSE_KERNEL = re.compile(
    r"split_embedding|embedding_codegen|lxu_cache|permute_|bounds_check|block_bucketize|jagged|recat", re.IGNORECASE
)
_TABLE_UPDATE = re.compile(
    r"split_embedding\w*backward|embedding_backward|embedding_codegen\w*(backward|grad)", re.IGNORECASE
)
_COLLECTIVE_KERNEL = re.compile(r"nccl|rccl", re.IGNORECASE)
BLOCKING_CALL = re.compile(r"(cuda|hip)(Device|Stream|Event)Synchronize|(cuda|hip)Memcpy|cuMemcpy|cu\w+Synchronize")
"""Runtime calls that block the host."""
_INTERPRETER = {"torch", *sys.stdlib_module_names}
_LIBRARIES = {
    *("torchrec", "fbgemm_gpu", "torchmetrics"),
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
}


@cache
def of_annotation(name: str) -> Stage | None:
    """Return the stage of an annotation (`## forward 3 ##`); None if unknown."""
    return _first(_ANNOTATIONS, name.strip("# "))


@cache
def of_operator(name: str) -> Stage | None:
    """Return the stage of an operator; None for most."""
    return _first(_OPERATORS, name)


def _first(patterns: Iterable[tuple[str, Stage]], name: str) -> Stage | None:
    return next((stage for pattern, stage in patterns if re.match(pattern, name.lower())), None)


@cache
def split_batch(name: str) -> tuple[int | None, str]:
    """Split an annotation's batch from the rest: `## forward 3 ##` gives 3 and `## forward ##`."""
    found = _BATCH.match(name)
    return (None, name) if found is None else (int(found[1]), f"{name[: found.start(1)].rstrip(' :')} ##")


@cache
def kind_of_kernel(name: str) -> Category:
    """Return the category of a GPU kernel. The TBE backward, which updates the tables, is dense."""
    if _COLLECTIVE_KERNEL.match(name):
        return Category.COMMUNICATION
    if _SPARSE_KERNEL.search(name):
        return Category.DENSE if _TABLE_UPDATE.search(name) else Category.LOOKUP
    return Category.DENSE


@cache
def is_frame(name: str, *, of_library: bool = False) -> bool:
    """Return whether a Python frame is in a file outside PyTorch and Python; with `of_library`, in `_LIBRARIES`."""
    path = name.partition("(")[0]  # which Kineto mostly writes relative to `sys.path`
    package = path.rpartition("site-packages/")[2].partition("/")[0].removesuffix(".py")
    if not path or name.startswith(("<", "nn.Module:")) or package in _INTERPRETER:
        return False
    return package in _LIBRARIES or not of_library
