"""The data and the model of a random fit, and its sharding plan. Imports nothing of the package under test."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ..support.cases import make_collection, summed
from ..support.modules import copies, draw_weights, halves, plan_of, rows, whole
from .random_fits import ORDERED, Fit, Part

NUM_ROWS, NUM_DENSE, BATCH_SIZE = 40, 4, 6


class Batch(NamedTuple):
    dense: Tensor
    sparse: dict[str, KeyedJaggedTensor]
    labels: Tensor


def make_batch(fit: Fit, index: int, rank: int) -> Any:
    """Return batch `index` of a rank, made anew each time; its layout is the fit's."""
    generator = torch.Generator().manual_seed(fit.seed * 100_003 + rank * 7919 + index)
    size = BATCH_SIZE - ((index + rank) % 3 if fit.sizes == "by_rank" else 0)
    kjts = {name: _make_kjt(fit, name, index, size, generator) for name in fit.kjts}
    dense = torch.randn(size, NUM_DENSE, generator=generator)
    labels = torch.randint(0, 2, (size,), generator=generator).float()
    if fit.layout == "nested":
        return {"in": [dense, {"sparse": (kjts, index)}], "labels": labels}
    moved = {"either": index >= 3 and (index + rank) % 2, "by_rank": rank}.get(fit.layout, False)
    if moved:
        return {"dense": dense, **{f"other_{name}": kjt for name, kjt in kjts.items()}, "labels": labels}
    return {"dense": dense, **kjts, "labels": labels}


def opened(fit: Fit, batch: Any) -> Batch:
    if "in" in batch:
        dense, inner = batch["in"]
        return Batch(dense, inner["sparse"][0], batch["labels"])
    kjts = {name: batch[name] if name in batch else batch[f"other_{name}"] for name in fit.kjts}
    return Batch(batch["dense"], kjts, batch["labels"])


def _make_kjt(fit: Fit, name: str, index: int, size: int, generator: torch.Generator) -> KeyedJaggedTensor:
    keys = fit.kjts[name]
    lengths = torch.randint(0, 4, (len(keys), size), generator=generator)
    if fit.empty and index % 2:
        lengths[0 if index % 4 == 1 else slice(None)] = 0  # of one feature, or of all
    num = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.randint(0, NUM_ROWS, (num,), generator=generator),
        lengths=lengths.flatten(),
        weights=torch.rand(num, generator=generator) if fit.weighted and name == "x" else None,
    )


def order_of(fit: Fit, epoch: int) -> list[int]:
    """Return the numbers of the batches of an epoch, in order, as PyTorch's DistributedSampler documents it."""
    if not fit.shuffled:
        return list(range(fit.num_batches))
    generator = torch.Generator().manual_seed(fit.seed + epoch)
    return torch.randperm(fit.num_batches, generator=generator).tolist()  # type: ignore[no-any-return]


def seed_dropout(fit: Fit, rank: int) -> None:
    """Seed the generator that dropout draws from: another one on each rank."""
    torch.manual_seed(fit.seed * 1009 + rank)


class _Rank(Dataset[Any]):
    def __init__(self, fit: Fit, numbers: range) -> None:
        self.fit, self.numbers = fit, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: int) -> Any:
        return make_batch(self.fit, self.numbers[at], dist.get_rank())


class Data(LightningDataModule):
    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit = fit

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(range(self.fit.num_batches), shuffled=self.fit.shuffled)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(range(1000, 1002), shuffled=False)

    def _loader(self, numbers: range, *, shuffled: bool) -> DataLoader[Any]:
        batches = _Rank(self.fit, numbers)
        # All ranks have the same order. Lightning tells the sampler of each epoch.
        sampler = DistributedSampler(batches, 1, 0, seed=self.fit.seed) if shuffled else None
        # An iterator draws a seed for its workers: from its own generator, not from that of dropout.
        return DataLoader(batches, batch_size=None, sampler=sampler, generator=torch.Generator())


LookUp = Callable[[Part, KeyedJaggedTensor, int], Any]  # collection, its input and the batch -> what it answers


class Net(LightningModule):
    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit = fit
        self.automatic_optimization = not fit.manual
        self.losses: list[Tensor] = []
        self.look_up: LookUp = lambda part, kjt, batch: getattr(self, part.name)(kjt)
        for part in fit.parts:
            kind = {"sequence": part.sequence, "weighted": fit.weighted and part.kjt == "x"}
            self.add_module(part.name, make_collection(part.tables, NUM_ROWS, **kind))
        self.bottom = nn.Linear(NUM_DENSE, 6)
        self.top = nn.Linear(6 + sum(part.width for part in fit.parts), 1)
        draw_weights(self, fit.seed, 0.5)
        for part in fit.parts:
            weights = {name.split(".")[-2]: weight for name, weight in getattr(self, part.name).named_parameters()}
            for table in part.tables:
                if table.sharding != "data_parallel":
                    cls, kwargs = OPTIMIZERS[fit.optimizer]
                    _apply_optimizer_in_backward(cls, [weights[table.name]], dict(kwargs))

    def forward(self, batch: Any, index: int) -> Tensor:
        inside = opened(self.fit, batch)
        size = len(inside.labels)
        merged = [torch.relu(self.bottom(inside.dense))]
        for part in self.fit.parts:
            merged.append(self._answer(part, self._input(part, inside), index, size))
        kept = nn.functional.dropout(torch.cat(merged, dim=1), self.fit.dropout, self.training)
        logits = self.top(kept).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, inside.labels)

    def _input(self, part: Part, inside: Batch) -> KeyedJaggedTensor:
        kjt = inside.sparse[part.kjt]
        if self.fit.change != "made" or not self.training:
            return kjt
        weights = kjt.weights_or_none()
        return KeyedJaggedTensor(list(kjt.keys()), kjt.values(), weights, lengths=kjt.lengths())

    def _answer(self, part: Part, kjt: KeyedJaggedTensor, index: int, size: int) -> Tensor:
        def embeddings() -> Tensor:
            with torch.no_grad() if part.use == "no_grad" else nullcontext():
                answer = self.look_up(part, kjt, index)
            return _merged(part, answer)

        num = part.num_calls(index) if self.training else 1
        if not num:
            return torch.zeros(size, part.width)
        if part.checkpoint and self.training:
            if part.checkpoint == "checkpoint":
                return checkpoint(embeddings, use_reentrant=False)
            anchor = torch.zeros((), requires_grad=True)
            return checkpoint(lambda anchor: embeddings() + anchor, anchor, use_reentrant=True)
        answer = embeddings()
        return answer if num == 1 else answer + 0.5 * embeddings()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        fit = self.fit
        if fit.late_rank == dist.get_rank() and batch_idx % 3 == 1:
            time.sleep(0.01)
        for kjt in opened(fit, batch).sparse.values() if batch_idx % 3 == 2 else ():
            if fit.change == "ids":
                kjt.values().remainder_(NUM_ROWS // 2)
            if fit.change == "weights" and kjt.weights_or_none() is not None:
                kjt.weights().mul_(0.5)
        loss: Tensor = self(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        if fit.manual and self._fabric is None and self._trainer is not None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return None if fit.skips_losses and batch_idx % 4 == 3 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self(batch, 1000 + batch_idx).detach().clone())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.skips(batch_idx):
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def skips(self, batch_idx: int) -> bool:
        return self.fit.skips_steps and batch_idx % 3 == 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        own = [weight for _, weight in in_backward_optimizer_filter(self.named_parameters())]
        return torch.optim.SGD(own, 0.2, momentum=0.5)


# With a small `eps` Adagrad divides rounding by itself where gradients cancel out: a step of the rate's size.
OPTIMIZERS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1.0, "eps": 1e-2}),
    "rowwise": (RowWiseAdagrad, {"lr": 1.0, "eps": 1e-2}),
}


def _merged(part: Part, embeddings: Any) -> Tensor:
    def of_key(key: str) -> Tensor:
        return summed(embeddings[key]) if part.sequence else embeddings[key]

    if part.use == "statistic":
        with torch.no_grad():
            of_key(part.keys[0]).norm()
    if part.use == "values" and not part.sequence:
        return embeddings.values() * 1.0
    names = part.keys
    if part.use in ORDERED:
        names = list((embeddings if part.sequence else embeddings.to_dict()).keys())
    columns = [of_key(name) for name in names]
    if part.use == "part":
        columns[1:] = [torch.zeros_like(column) for column in columns[1:]]
    merged = torch.cat(columns, dim=1)
    return merged.detach() if part.use == "detached" else merged


def make_plan(fit: Fit, module: nn.Module) -> ShardingPlan:
    places: dict[str, Callable[[int], Any]] = {
        "column_wise": lambda place: halves(place, place + 1),
        **{"data_parallel": copies, "row_wise": rows, "table_wise": whole},
    }
    plans = {}
    for part in fit.parts:
        shardings = {table.name: places[table.sharding](table.place) for table in part.tables}
        plans[part.name] = plan_of(getattr(module, part.name), shardings)
    return ShardingPlan(plans)
