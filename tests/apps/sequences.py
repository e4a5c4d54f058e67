"""The program of docs/sequences.md on ranks, and the same with plain torch. Functions that ranks run."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_overlap import OverlapEmbeddingStrategy

from ..support.fits import make_trainer
from .pages import python_of

PAGE = "docs/sequences.md"
NUM_STEPS, BATCH_SIZE, RATE = 5, 8, 0.5


@cache
def page() -> SimpleNamespace:
    names: dict[str, Any] = {}
    for text in python_of(PAGE):
        exec(compile(text, PAGE, "exec"), names)
    return SimpleNamespace(**names)


def padded(index: int, rank: int) -> tuple[Tensor, Tensor]:
    """Histories of ids from 1 on, padded with 0 at their ends, and the items that came next."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    shape = BATCH_SIZE, page().MAX_LENGTH
    history_BL = torch.randint(1, page().NUM_ITEMS, shape, generator=generator)
    lengths_B = torch.randint(1, shape[1] + 1, (BATCH_SIZE,), generator=generator)
    history_BL[torch.arange(shape[1]) >= lengths_B.unsqueeze(1)] = 0
    return history_BL, torch.randint(1, page().NUM_ITEMS, (BATCH_SIZE,), generator=generator)


def batches(rank: int, *, with_padding: bool = False) -> list[dict[str, Any]]:
    """`with_padding`: as ids, each history of full length."""
    found = []
    for index in range(NUM_STEPS):
        history_BL, next_B = padded(index, rank)
        ids = page().as_ids(history_BL, next_B, padding=-1 if with_padding else 0)
        found.append({"ids": ids, "padded": history_BL, "next": next_B})
    return found


def saved_rows() -> Tensor:
    return torch.randn(page().NUM_ITEMS, page().DIM, generator=torch.Generator().manual_seed(3))


def make_module(kind: str = "NextItem", **options: Any) -> Any:
    """A module whose table has the saved rows, with zeros in row 0."""
    torch.manual_seed(0)
    module = {**vars(page()), **OWN}[kind](**options)
    weight = module.items.embeddings["item_table"].weight
    if not weight.is_meta:
        with torch.no_grad():
            weight.copy_(saved_rows())
            weight[0] = 0
    return module


class _AcrossRanks:
    """Negatives of all ranks; other samples with the same item are none."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        found = self.items(batch["ids"])
        gather = self.all_gather if self.trainer.world_size > 1 else None
        query = self.encode(found["history"])
        loss: Tensor = page().in_batch_loss(
            query, found["next"].values(), batch["next"], batch["next"].float() / 50, gather=gather
        )
        return loss


class _KeepsPadding:
    """Padding is among the ids, and `without_padding` takes it out."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        found = self.items(batch["ids"])
        ids = batch["ids"]["history"].values()
        states, _ = self.encoder(
            page().without_padding(found["history"].values(), ids).view(BATCH_SIZE, -1, page().DIM)
        )
        last = (batch["padded"] != 0).sum(1) - 1
        loss: Tensor = page().in_batch_loss(states[torch.arange(BATCH_SIZE), last], found["next"].values())
        return loss


def _of(mixin: type) -> Any:
    return lambda **options: type(mixin.__name__, (mixin, page().NextItem), {})(**options)


OWN: dict[str, Any] = {"AcrossRanks": _of(_AcrossRanks), "KeepsPadding": _of(_KeepsPadding)}


def fit(module: Any, *callbacks: Callback, sharding: str = "row_wise", rate: float = RATE, **options: Any) -> Any:
    data = batches(dist.get_rank(), with_padding=options.pop("with_padding", False))
    if options.pop("with_catalogue", False):
        data = [{**batch, "ids": page().with_catalogue(batch["ids"])} for batch in data]
    strategy = OverlapEmbeddingStrategy(sharding=sharding, fused_optimizer=(torch.optim.SGD, {"lr": rate}), **options)
    trainer = make_trainer(strategy, callbacks=list(callbacks))
    trainer.fit(module, DataLoader(data, batch_size=None))
    return trainer


def write_table(sharding: str) -> Tensor:
    """Return a table that was written whole as the fit began."""
    trainer = fit(make_module(), page().WriteTable(saved_rows() + 1), sharding=sharding, rate=0.0)
    table: Tensor = trainer.strategy.table("item_table")
    return table


def table_with_catalogue(sharding: str) -> Tensor:
    """Return the table after a fit whose loss has the scores of all items."""
    table: Tensor = fit(make_module("WholeCatalogue"), sharding=sharding, with_catalogue=True).strategy.table(
        "item_table"
    )
    return table


def tables_after_fits(sharding: str) -> dict[str, Tensor]:
    """Return the table after a fit of each kind of module."""
    found = {}
    for kind, options in (("NextItem", {}), ("AcrossRanks", {}), ("KeepsPadding", {"with_padding": True})):
        found[kind] = fit(make_module(kind), sharding=sharding, **options).strategy.table("item_table")
    frozen = make_module()
    frozen.items.embeddings["item_table"].weight.requires_grad_(False)
    found["frozen"] = fit(frozen, sharding=sharding).strategy.table("item_table")
    return found


def load_shards(path: str, sharding: str) -> Tensor:
    """Return a table that was made on `meta`, and filled as the fit began."""
    trainer = fit(make_module(device="meta"), page().LoadShards(path), sharding=sharding, rate=0.0)
    table: Tensor = trainer.strategy.table("item_table")
    return table


def rank_all(sharding: str, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the items that a validation ranks first, by the whole table and by chunks, and the queries."""
    module, found = make_module(), {}

    def validation_step(batch: Any, batch_idx: int) -> None:
        query = module.encode(module.items(batch["ids"])["history"])
        found.setdefault("query", []).append(query)
        found.setdefault("whole", []).append((query @ module.catalogue.T).topk(k).indices)

    def on_validation_epoch_end() -> None:
        found["query"] = torch.cat(found["query"])
        found["chunks"] = page().top_items(module.trainer.strategy, found["query"], k, num_rows=7)[1]

    module.validation_step, module.on_validation_epoch_end = validation_step, on_validation_epoch_end
    fused = OverlapEmbeddingStrategy(sharding=sharding, fused_optimizer=(torch.optim.SGD, {"lr": RATE}))
    trainer = make_trainer(fused, callbacks=[page().RankAll()])
    trainer.validate(module, DataLoader(batches(dist.get_rank()), batch_size=None), verbose=False)
    return torch.cat(found["whole"]), found["chunks"], found["query"]


def scored(rank: int) -> list[dict[str, Tensor]]:
    """Samples of a rank: ranks have different numbers of them in a batch."""
    generator = torch.Generator().manual_seed(rank)
    return [
        {
            "scores": torch.rand(4 + rank, generator=generator),
            "clicked": torch.randint(2, (4 + rank,), generator=generator),
        }
        for _ in range(3)
    ]


def metric_of_all_ranks() -> float:
    module = make_module("WithMetric")
    trainer = make_trainer(OverlapEmbeddingStrategy(fused_optimizer=(torch.optim.SGD, {"lr": RATE})))
    [metrics] = trainer.validate(module, DataLoader(scored(dist.get_rank()), batch_size=None), verbose=False)
    return float(metrics["val_auc"])


# -- plain torch ----------------------------------------------------------------------------------------------------


def plain_table(num_ranks: int, *, across: bool = False, catalogue: bool = False) -> Tensor:
    """Train torch.nn.Embedding on all ranks' batches in one process; return its weight.

    With `catalogue` the loss has the scores of all items, row 0 too; else row 0 is padding, which is not trained.
    """
    module = make_module()
    table = nn.Embedding(page().NUM_ITEMS, page().DIM, padding_idx=None if catalogue else 0)
    with torch.no_grad():
        table.weight.copy_(module.items.embeddings["item_table"].weight)
    dense = torch.optim.SGD(module.encoder.parameters(), lr=0.1)
    sparse = torch.optim.SGD(table.parameters(), lr=RATE)
    for index in range(NUM_STEPS):
        parts = [padded(index, rank) for rank in range(num_ranks)]
        if across:
            parts = [tuple(map(torch.cat, zip(*parts, strict=True)))]  # type: ignore[list-item]
        losses = []
        for history_BL, next_B in parts:
            states, _ = module.encoder(table(history_BL))
            query = states[torch.arange(len(states)), (history_BL != 0).sum(1) - 1]
            if catalogue:
                losses.append(nn.functional.cross_entropy(query @ table.weight.T, next_B))
                continue
            more = (next_B, next_B.float() / 50) if across else ()
            losses.append(page().in_batch_loss(query, table(next_B), *more))
        torch.stack(losses).mean().backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
    return table.weight.detach()


def save_rows(folder: Path) -> str:
    path = str(folder / "items.npy")
    np.save(path, saved_rows().numpy())
    return path
