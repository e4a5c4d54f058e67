"""Name batch sizes that gloo or TorchRec cannot handle: module, tables, ranks and what to do."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.types import ShardingType

from ..compat.torch import never_compiled
from ..compat.torchrec import kernels_in, lookups_of, output_dists_of
from ..text import some
from .supported_modules import holds_sequences, spec_of, tables_of


def refuse_other_batch_sizes(name: str, module: Any) -> list[RemovableHandle]:
    """Let backwards raise a RuntimeError if batch sizes differ by rank and the module has row-wise pooled tables.

    gloo gathers their gradients from all ranks, and can gather only equal sizes; other tables, and lookups without a
    backward, take any sizes. Returns handles that undo this.
    """
    if spec_of(module) is None:
        return []
    tables = tables_of(module)
    kinds = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
    by_rows = some(table for table, one in tables.module_sharding_plan.items() if one.sharding_type in kinds)
    hook = partial(_watch_sizes, f"the row-wise tables {by_rows} of {name!r}")
    dists = [one for one in output_dists_of(tables) if isinstance(one, RwPooledEmbeddingDist)]
    return [one.register_forward_hook(hook) for one in dists]


@never_compiled
def _watch_sizes(tables: str, output_dist: Any, args: tuple[Any, ...], awaitable: Any) -> None:
    context = args[1] if len(args) > 1 else None
    if context is None or context.variable_batch_per_feature:
        return
    sizes = list(context.batch_size_per_rank)
    if len(set(sizes)) > 1:
        awaitable.callbacks.append(partial(_refuse_backward, tables, sizes))


def _refuse_backward(tables: str, sizes: list[int], embeddings: Tensor) -> Tensor:
    if embeddings.requires_grad:
        embeddings.register_hook(_refusing(tables, sizes))
    return embeddings


def _refusing(tables: str, sizes: list[int]) -> Callable[[Tensor], NoReturn]:
    def refuse(gradient: Tensor) -> NoReturn:
        by_rank = some((f"{size} on rank {rank}" for rank, size in enumerate(sizes)), 8)
        raise RuntimeError(
            f"the batch sizes differ by rank ({by_rank}), and gloo gathers the gradients of {tables} only if they are "
            "equal. Give all ranks batches of one size (drop_last=True of the DataLoader, or samples without ids that "
            "do not count in the loss), or shard these tables table_wise or column_wise."
        )

    return refuse


_TAKE_VARYING_SIZES = {
    *(EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM, EmbOptimType.NONE),
    *(EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD, EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD),
}
"""Optimizers whose kernels take batch sizes that vary by feature. Source: FBGEMM 1.6 to 1.8, `_generate_vbe_metadata`.
"""


def why_not_varying_sizes(modules: Mapping[str, Any], *, on_cpu: bool) -> str | None:
    """Return why this rank cannot look up a batch whose sizes vary by feature, with the way out; None if it can.

    TorchRec lets several kernels of a sharding type write one output then, which FBGEMM has for CUDA only.
    """
    for name, module in modules.items():
        if spec_of(module) is None:
            continue
        plan = tables_of(module).module_sharding_plan.items()
        copied = [table for table, one in plan if one.sharding_type == ShardingType.DATA_PARALLEL.value]
        if copied and not holds_sequences(module):
            return (
                f"{some(copied)} of {name!r} are data-parallel, which TorchRec 1.8 cannot look up then. Shard these "
                "tables table_wise or column_wise, with replicate_tables=False"
            )
        for lookup in lookups_of(tables_of(module)):
            kernels = [([table.name for table in tables], kernel) for tables, kernel in kernels_in(lookup)]
            for tables, kernel in kernels:
                kind = getattr(kernel, "optimizer", EmbOptimType.NONE)
                if isinstance(kind, EmbOptimType) and kind not in _TAKE_VARYING_SIZES:
                    return (
                        f"{some(tables)} of {name!r} have a kernel of {kind.name}, which takes one size only. Train "
                        "them by SGD, RowWiseAdagrad or Adam"
                    )
            if on_cpu and len(kernels) > 1 and not holds_sequences(module):
                named = "; ".join(", ".join(tables) for tables, _ in kernels)
                return (
                    f"the tables of {name!r} have {len(kernels)} kernels of one sharding type ({named}), which FBGEMM "
                    "cannot look up together on a CPU. Tables share a kernel if they have the same optimizer, pooling "
                    "and data_type, and if none or all are frozen: make them alike, give them sharding types or ranks "
                    "of their own"
                )
    return None


def refuse_varying_sizes(by_rank: Sequence[str | None]) -> None:
    """Raise a ValueError with what `why_not_varying_sizes` returned on the first rank that cannot look them up."""
    rank, why = next(((rank, one) for rank, one in enumerate(by_rank) if one is not None), (0, None))
    if why is not None:
        raise ValueError(f"batch sizes vary by feature, and on rank {rank} {why}, or give the features one batch size.")


def no_samples(call: str) -> str:
    """Return the error about sequences of no samples, which TorchRec 1.8 cannot take apart."""
    return (
        f"{call} with an input of no samples (a batch size of 0), whose sequences TorchRec cannot return. Give it one "
        "sample without ids (lengths of zero) that does not count in the loss, or leave the batch out on all ranks."
    )
