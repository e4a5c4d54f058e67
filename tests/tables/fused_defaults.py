"""Fused optimizers with keywords left out, beside the unsharded module and the class itself. Ranks run `compare`."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables.fused_arguments import (
    KERNEL_ARGUMENTS,
    KERNEL_RATE,
    ONLY_BY_GRADIENTS,
    READ_BY_KERNEL,
    keywords_of,
    kind_of,
    refused_keywords,
)

from ..support import modules
from ..support.fits import make_trainer

ON_CPU = ONLY_BY_GRADIENTS
_DECAYED = {"weight_decay": 0.5, "weight_decay_mode": WeightDecayMode.L2}
UPDATES: Mapping[str, dict[str, Any]] = {
    **{name: {name: 0.5} for name in ("eps", "momentum", "weight_decay", "eta", "beta1", "beta2", "max_norm")},
    "weight_decay_mode": _DECAYED,
    "gradient_clipping": {"gradient_clipping": True, "max_gradient": 0.1},
    "max_gradient": {"max_gradient": 0.1},
}
"""A keyword of an update -> FBGEMM's arguments with it."""

SGD, ADAGRAD, ROWWISE = torch.optim.SGD, torch.optim.Adagrad, torchrec.optim.RowWiseAdagrad
KEYWORDS: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (way, optimizer, kwargs)
    for optimizer, of_class in {
        SGD: [{}, {"lr": 0.5}, {"momentum": 0, "nesterov": False, "foreach": None}],
        ADAGRAD: [{}, {"lr": 0.5}, {"eps": 1e-9}, {"lr_decay": 0.0, "lr": 0.3}],
        ROWWISE: [{}, {"lr": 0.5}, {"eps": 1e-9, "maximize": False}],
    }.items()
    for kwargs in of_class
    for way in ("tuple", "partial", "applied")
]
PLACES = ("table_wise", "row_wise", "replicated", "row_wise sequences", "column_wise", "table_wise sequences")


def trained(kind: EmbOptimType, **arguments: Any) -> Tensor:
    """Train a table of a kernel for a CPU."""
    specs = [(6, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    kernel = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=kind, learning_rate=0.5, **arguments)
    [weight] = kernel.split_embedding_weights()
    weight.data.copy_(torch.linspace(0, 1, 24).view(6, 4))
    for _ in range(3):
        rows = kernel(torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 4]))
        (rows * torch.arange(1.0, 5)).sum().backward()
    return weight.detach().clone()


def documented(optimizer: type[torch.optim.Optimizer]) -> str:
    """Return the row of a class in docs/optimizers.md."""
    keywords = keywords_of(optimizer)
    package = "torch.optim" if optimizer.__module__.startswith("torch.optim") else "torchrec.optim"
    taken = [
        f"`{name}={one.default:g}`" if isinstance(one.default, float) else f"`{name}={one.default}`"
        for name, one in keywords.items()
        if name in ("lr", "eps", "betas")
    ]
    refused = [name for name in keywords if name in refused_keywords(optimizer, {name: True}, on_cpu=False)]
    where = "CPU, CUDA" if kind_of(optimizer) in ON_CPU else "CUDA"
    if not keywords:
        read = [
            name for name in READ_BY_KERNEL[kind_of(optimizer)] if isinstance(KERNEL_ARGUMENTS[name].default, float)
        ]
        of_kernel = {"lr": KERNEL_RATE, **{name: KERNEL_ARGUMENTS[name].default for name in read}}
        taken = [f"`{name}={default:g}`" for name, default in of_kernel.items()]
        return f"| `{package}.{optimizer.__name__}` | {where} | FBGEMM's: {', '.join(taken)} | any other of these |"
    only_zero = ", ".join(f"`{name}`" for name in refused)
    return f"| `{package}.{optimizer.__name__}` | {where} | {', '.join(taken)} | {only_zero} |"


class Scorer(LightningModule):
    def __init__(self, place: str, applied: tuple[Any, dict[str, Any]] | None) -> None:
        super().__init__()
        self.has_sequences = "sequences" in place
        self.tables = modules.sequences(2) if self.has_sequences else modules.bags(2)
        self.scale = nn.Parameter(torch.ones(()))
        modules.draw_weights(self.tables, 17, 0.4)
        if applied is not None:
            _apply_optimizer_in_backward(applied[0], self.tables.parameters(), applied[1])

    def training_step(self, ids: Any, batch_idx: int) -> Tensor:
        answer = self.tables(ids)
        parts = [answer[name] for name in ("f0", "f1")]
        rows = [part.values() if self.has_sequences else torch.clone(part) for part in parts]
        # Gradients of about 1e-9, so that `eps` decides, and another one in each column.
        return 1e-9 * self.scale * torch.stack([(part * torch.linspace(0.5, 1, 8)).sum() for part in rows]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.scale], 0.0)


def _batches(rank: int) -> list[Any]:
    return [modules.plain_ids(torch.Generator().manual_seed(7919 * rank + index)) for index in range(4)]


def _expected(place: str, optimizer: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Train the unsharded module by the class itself, on the batches of all ranks."""
    module = Scorer(place, None)
    made = optimizer(module.tables.parameters(), **kwargs)
    for batches in zip(*map(_batches, range(dist.get_world_size())), strict=True):
        made.zero_grad()
        (sum(module.training_step(ids, 0) for ids in batches) / len(batches)).backward()
        made.step()
    return {f"t{number}": weight.detach() for number, weight in enumerate(module.tables.parameters())}


def compare(cases: list[tuple[tuple[str, Any, dict[str, Any]], str]]) -> dict[str, list[str]]:
    """Return the tables that differ from the expected ones, or that no update has changed; by case."""
    found = {}
    for number, ((way, optimizer, kwargs), place) in enumerate(cases):
        # RowWiseAdagrad's state is a mean over the columns of a shard.
        place = "row_wise" if optimizer is ROWWISE and place == "column_wise" else place
        kind = place.partition(" ")[0]
        tuple_or_partial = functools.partial(optimizer, **kwargs) if way == "partial" else (optimizer, kwargs)
        options: dict[str, Any] = {"fused_optimizer": None if way == "applied" else tuple_or_partial}
        is_replicated = kind == "replicated"
        options |= (
            {"replicate_tables": ["t0", "t1"]} if is_replicated else {"sharding": kind, "replicate_tables": False}
        )
        module = Scorer(place, (optimizer, kwargs) if way == "applied" else None)
        before = Scorer(place, None).tables.state_dict()
        strategy = OverlapEmbeddingStrategy("fused_sparse_dist", **options)
        make_trainer(strategy).fit(module, DataLoader(_batches(dist.get_rank()), batch_size=None))
        wrong = []
        for (name, expected), start in zip(_expected(place, optimizer, kwargs).items(), before.values(), strict=True):
            change, ours = expected - start, strategy.table(name) - start
            least = change.abs().max() * 1e-3
            if not torch.allclose(ours, change, rtol=1e-3, atol=float(least)):
                wrong.append(f"{name}: {float((ours - change).abs().max() / change.abs().max())}")
        found[f"{number} {way} {optimizer.__name__} {kwargs} {place}"] = wrong
    return found
