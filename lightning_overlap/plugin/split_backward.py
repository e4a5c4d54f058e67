"""The mode that splits the backward of the dense part: whether a fit can, and which layers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..dense import LateAllReduce, SplitLayers
from ..sparse import SparsePipeline
from ..tables import sharded_modules
from ..text import some
from .first_words import tell


def why_whole(
    module: LightningModule, optimizers: list[Optimizer], ddp_options: Mapping[str, Any], sparse: SparsePipeline
) -> str | None:
    """Return why a fit cannot split its backward, or None."""
    if not sparse.can_defer_updates:
        return "one rank on a CPU waits for nobody"
    if not module.automatic_optimization:
        return "with manual optimization a step may have several backwards"
    if type(module).backward is not LightningModule.backward:
        return "the module has a backward of its own"
    owners = [module, *module.trainer.callbacks]  # type: ignore[attr-defined]
    empty = (LightningModule.on_before_backward, Callback.on_before_backward)
    if any(type(one).on_before_backward not in empty for one in owners):
        return "on_before_backward may compute gradients"
    for option in ("static_graph", "find_unused_parameters"):
        if ddp_options.get(option):
            return f"{option}=True looks for weights in the graph of the loss, where those of split layers are not"
    if any(isinstance(getattr(one, "dense", one), torch.optim.LBFGS) for one in optimizers):  # combined too
        return "LBFGS runs several backwards in a step"
    if any(isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse for part in module.modules()):
        # DistributedDataParallel divides it in place, and it may be a view of a gradient that is needed later.
        return "an embedding of torch.nn has sparse gradients (sparse=True)"
    return None


def check_all_ranks(mode: str, whole: str | None, gather: Callable[[Any], list[Any]]) -> None:
    """Check that all ranks train in the same mode, and that all of them or none (`whole`: why) split the backward."""
    known = gather((mode, whole))
    if len({mode for mode, _ in known}) > 1:
        modes = ", ".join(f"rank {rank}: {mode!r}" for rank, (mode, _) in enumerate(known))
        raise RuntimeError(f"the ranks train in different modes ({modes}). Give every rank the same pipeline=.")
    if len({whole is None for _, whole in known}) > 1:
        reasons = ", ".join(f"rank {rank}: {whole}" for rank, (_, whole) in enumerate(known) if whole is not None)
        raise RuntimeError(
            f"some ranks can split the backward and others cannot ({reasons}). Give every rank the same module, "
            "callbacks and strategy, or use pipeline='fused_sparse_dist'."
        )


def split_layers(
    module: LightningModule, model: Any, comm_hook: object | None, gather: Callable[[Any], list[Any]]
) -> SplitLayers:
    """Return the layers whose backward is split, as all ranks agree; `model` is DistributedDataParallel, if used."""
    late = None  # waits for the all-reduce after the backward, unless DistributedDataParallel has to wait itself
    # On CUDA a stream waits, not the host.
    if isinstance(model, DistributedDataParallel) and comm_hook is None and model.device_type == "cpu":
        # Gradients that are views of buckets may be divided, others are multiplied: for 2^n ranks the same to the bit.
        num_ranks = model.process_group.size()
        if not model.gradient_as_bucket_view or num_ranks & (num_ranks - 1) == 0:
            late = LateAllReduce(model)

    def agree(whole: dict[str, str]) -> dict[str, str]:
        known = gather((whole, [layer.name for layer in layers.layers]))
        if any(names != known[0][1] for _, names in known):
            raise RuntimeError(
                "the ranks have other layers in the dense part, so the order of their gradients would differ. Make the "
                "same module on all ranks, or use pipeline='fused_sparse_dist'."
            )
        agreed = {name: why for of_rank, _ in reversed(known) for name, why in of_rank.items()}
        split = [layer.name for layer in layers.layers if layer.name not in agreed]
        inside = tuple(f"{name}." for name in split)
        named = [layer.name for layer in layers.layers if not isinstance(layer.module, torch.nn.Sequential)]
        left = [name for name in named if not f"{name}.".startswith(inside)]
        if module.global_rank == 0:
            tell(_in_words(split, {name: agreed[name] for name in left}))
        return agreed

    def sends_gradients() -> bool:
        return not isinstance(model, DistributedDataParallel) or model.require_backward_grad_sync

    layers = SplitLayers(module, sharded_modules(module).values(), agree, late, sends_gradients)
    return layers


def _in_words(split: list[str], whole: Mapping[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, why in whole.items():
        reasons.setdefault(why, []).append(name or "the module")
    words = f"weight gradients of {some(split)} come after the backward" if split else "no layer can be split"
    lines = [f"{some(names)}: whole, {why}" for why, names in reasons.items()]
    return "\n  ".join([f"split backward: {words}", *lines])
