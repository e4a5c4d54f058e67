"""Fits that read whole tables, whose exact values are known. Functions that ranks run."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchrec
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.types import DataType

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint import whole_tables

from ..checkpoint import collisions
from ..support import modules
from ..support.cases import Case
from ..support.fits import fit as train
from ..support.fits import make_trainer
from ..support.reference import Result
from ..tables.supported_modules import Batches as KindBatches
from ..tables.supported_modules import KindModel, make_plan

RATE, BATCH_SIZE = 0.5, 4
PLACES: dict[str, Callable[[int], Any]] = {
    "table_wise": modules.whole,
    "row_wise": modules.rows,
    "column_wise": lambda table: modules.halves(table, table + 1),
    "table_row_wise": lambda table: sharding_plan.table_row_wise(host_index=0),
    "grid_shard": lambda table: sharding_plan.grid_shard(host_indexes=[0]),
    "data_parallel": modules.copies,  # of the dense optimizer
    "replicated": modules.copies,
}


@dataclass(frozen=True)
class Table:
    sharding: str
    num_rows: int = 7
    dim: int = 8
    half: bool = False  # of 16 bits


@dataclass(frozen=True)
class Fit:
    tables: tuple[Table, ...]
    pipeline: str = "fused_sparse_dist"
    sequence: bool = False
    num_steps: int = 5


class Net(LightningModule):
    """Its loss is linear in the embeddings: every mode changes the tables alike, by numbers without rounding."""

    def __init__(self, fit: Fit, *, fused: bool = True) -> None:
        super().__init__()
        self.fit = fit
        self.ebc = _collection(fit)
        self.dense = nn.Linear(1, 1)
        self.factors = {f"f{at}": torch.arange(table.dim) % 5 / 8 - 0.25 for at, table in enumerate(fit.tables)}
        for at, weight in enumerate(_weights(self.ebc)):
            with torch.no_grad():
                weight.copy_((torch.arange(weight.numel()) % (11 + at) - 5).view_as(weight) / 16)
            if fused and fit.tables[at].sharding != "data_parallel":
                torch.distributed.optim._apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": RATE})

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        embeddings = self.ebc(batch)
        sums = [(self._values(embeddings[key]).float() * factor).sum() for key, factor in self.factors.items()]
        loss: Tensor = sum(sums) + self.dense(torch.ones(1, 1)).sum()  # type: ignore[assignment]
        return loss

    def _values(self, embeddings: Any) -> Tensor:
        return embeddings.values() if self.fit.sequence else torch.clone(embeddings)

    def validation_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> None:
        self.ebc(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in in_backward_optimizer_filter(self.named_parameters())], RATE)

    def train_dataloader(self) -> DataLoader[Any]:
        batches = [make_batch(self.fit, step, self.trainer.global_rank) for step in range(self.fit.num_steps)]
        return DataLoader(batches, batch_size=None)

    val_dataloader = train_dataloader


def _collection(fit: Fit) -> nn.Module:
    kind: Any = torchrec.EmbeddingConfig if fit.sequence else torchrec.EmbeddingBagConfig
    configs = [
        kind(
            name=f"t{at}",
            feature_names=[f"f{at}"],
            num_embeddings=table.num_rows,
            embedding_dim=table.dim,
            data_type=DataType.FP16 if table.half else DataType.FP32,
        )
        for at, table in enumerate(fit.tables)
    ]
    made = torchrec.EmbeddingCollection if fit.sequence else EmbeddingBagCollection
    return made(tables=configs)  # type: ignore[no-any-return]


def _weights(collection: nn.Module) -> list[Tensor]:
    return [weight for _, weight in sorted(collection.named_parameters())]


def make_batch(fit: Fit, step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 3, (len(fit.tables), BATCH_SIZE), generator=generator)
    ids = [
        torch.randint(table.num_rows, (int(of_feature.sum()),), generator=generator)
        for table, of_feature in zip(fit.tables, lengths, strict=True)
    ]
    keys = [f"f{at}" for at in range(len(fit.tables))]
    return KeyedJaggedTensor(keys, torch.cat(ids), lengths=lengths.flatten())


def unsharded_tables(fit: Fit, num_ranks: int) -> list[list[Tensor]]:
    """Return the tables before the first step and after each, of the unsharded module and torch's SGD."""
    net = Net(fit, fused=False)
    weights = _weights(net.ebc)
    after = [[weight.detach().clone() for weight in weights]]
    for step in range(fit.num_steps):
        loss = sum(net.training_step(make_batch(fit, step, rank), step) for rank in range(num_ranks)) / num_ranks
        loss.backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for weight in weights:
                weight -= RATE * weight.grad
                weight.grad = None
        after.append([weight.detach().clone() for weight in weights])
    return after


def make_fit(fit: Fit, *callbacks: Callback, **options: Any) -> tuple[Trainer, Net]:
    net = Net(fit)
    plan = {f"t{at}": PLACES[table.sharding](at) for at, table in enumerate(fit.tables)}
    replicated = [f"t{at}" for at, table in enumerate(fit.tables) if table.sharding == "replicated"]
    strategy = OverlapEmbeddingStrategy(
        fit.pipeline,
        sharding=ShardingPlan({"ebc": modules.plan_of(net.ebc, plan)}),
        replicate_tables=replicated or None,
        **options,
    )
    return make_trainer(strategy, callbacks=list(callbacks), val_check_interval=2), net


class Reads(Callback):
    """Reads tables in many hooks and holds them against the unsharded module's."""

    def __init__(self, fit: Fit, num_ranks: int) -> None:
        self.expected, self.names = unsharded_tables(fit, num_ranks), [f"t{at}" for at in range(len(fit.tables))]
        self.num_ranks, self.num_backwards, self.wrong, self.num_reads = num_ranks, 0, list[str](), 0

    def read(self, where: str, trainer: Any) -> None:
        for name, expected in zip(self.names, self.expected[self.num_backwards], strict=True):
            table = trainer.strategy.table(name)
            self.num_reads += 1
            # A third of a gradient is rounded: the mean of three ranks' losses, and the mean of their gradients.
            same = torch.equal if self.num_ranks <= 2 else partial(torch.allclose, rtol=0.0, atol=1e-6)
            if table.dtype != expected.dtype or not same(table, expected):
                self.wrong.append(f"{name} in {where} after {self.num_backwards} backwards")


def _reading(hook: str) -> Any:
    def read(self: Reads, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.read(hook, trainer)

    return read


READ_IN = (
    *("on_fit_start", "on_train_start", "on_train_batch_start", "on_before_backward", "on_train_batch_end"),
    *("on_validation_start", "on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end"),
    *("on_sanity_check_start", "on_sanity_check_end", "on_fit_end"),
)
for _hook in READ_IN:
    setattr(Reads, _hook, _reading(_hook))


def reads_of_a_fit(fit: Fit) -> tuple[list[str], int]:
    """Train, read everywhere, and return what was read wrong, and the number of reads."""
    reads = Reads(fit, dist.get_world_size())

    class Counts(Callback):
        def on_before_optimizer_step(self, *args: Any) -> None:
            reads.num_backwards += 1

    trainer, net = make_fit(fit, reads, Counts())
    trainer.fit(net)
    reads.read("after the fit", trainer)
    trainer.validate(net)
    reads.read("after a validation", trainer)
    return reads.wrong, reads.num_reads


def last_tables(fit: Fit) -> list[Tensor]:
    """Return what every table is after a fit."""
    trainer, net = make_fit(fit)
    trainer.fit(net)
    return [trainer.strategy.table(f"t{at}") for at in range(len(fit.tables))]


def result_of_a_fit(case: Case, pipeline: str, *, reads: bool) -> Result:
    """Train with or without reads of all tables."""

    def read(trainer: Any, *args: Any) -> None:
        for table in case.tables:
            trainer.strategy.table(table.name, rank=0)

    hooks = ("on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_train_epoch_end")
    callbacks = [LambdaCallback(**dict.fromkeys(hooks, read))] if reads else []
    return train(case, pipeline, callbacks=callbacks)


def chunks(fit: Fit, num_rows: int, rank: int | None) -> list[tuple[int, Tensor]]:
    """Iterate over a table in a hook in the middle of a fit, with less sent at once than a chunk has."""
    found = []

    def read(trainer: Any, *args: Any) -> None:
        found.append([(first, rows.clone()) for first, rows in trainer.strategy.table_chunks("t0", **options)])

    options = {"num_rows": num_rows, "rank": rank}
    trainer, net = make_fit(fit, LambdaCallback(on_train_batch_end=read))
    with mock.patch.object(whole_tables, "BYTES_AT_ONCE", 100):
        trainer.fit(net)
    return found[1]


def read_on_one_rank_alone() -> list[bool]:
    """Return on which ranks there was a table."""
    trainer, net = make_fit(Fit((Table("row_wise"),)))
    trainer.fit(net)
    return [trainer.strategy.table("t0", rank=reader) is not None for reader in range(dist.get_world_size())]


def read_while_not_training() -> Tensor:
    """Train with a table that was read in a validation."""
    read = []

    def keep(trainer: Any, *args: Any) -> None:
        read.append(trainer.strategy.table("t0"))

    trainer, net = make_fit(Fit((Table("row_wise"),)), LambdaCallback(on_validation_batch_end=keep))
    trainer.validate(net)
    weight = torch.ones(8, requires_grad=True)
    (read[0] @ weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


Hook = Callable[[Any, int], Any]  # from the strategy and the rank


def _rank_0_alone(strategy: Any, rank: int) -> None:
    if rank == 0:
        strategy.table("t0")


def _leaves_chunks(strategy: Any, rank: int) -> None:
    for first_row, _ in strategy.table_chunks("t0", num_rows=2):
        if rank == 1 and first_row == 2:
            break


MISMATCHES: dict[str, Hook] = {
    "rank_0_alone": _rank_0_alone,
    "leaves_chunks": _leaves_chunks,
    "another_table": lambda strategy, rank: strategy.table(f"t{rank}"),
    "another_reader": lambda strategy, rank: strategy.table("t0", rank=rank),
}


def read_differently(way: str, hook: str) -> None:
    """Train; in the third call of a hook, or in its only one, each rank reads its own way."""
    num = 0

    def call(trainer: Any, *args: Any) -> None:
        nonlocal num
        num += 1
        if num == 3 or hook == "on_train_epoch_end":
            MISMATCHES[way](trainer.strategy, trainer.global_rank)

    trainer, net = make_fit(Fit((Table("row_wise"), Table("table_wise"))), LambdaCallback(**{hook: call}))
    trainer.fit(net)


def read_after_a_fit() -> None:
    """Rank 0 reads a table after a fit, the other rank begins another fit."""
    trainer, net = make_fit(Fit((Table("row_wise"),)))
    trainer.fit(net)
    if trainer.global_rank == 0:
        trainer.strategy.table("t0")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net)


def chunks_of_several_steps() -> str:
    """Train on between two chunks."""
    opened: list[Iterator[Any]] = []

    def read(strategy: Any, rank: int) -> None:
        opened.append(strategy.table_chunks("t0", num_rows=2))
        next(opened[0])

    def go_on(trainer: Any, *args: Any) -> None:
        if opened:
            next(opened[0])

    trainer, net = make_fit(
        Fit((Table("row_wise"),)),
        LambdaCallback(
            on_train_batch_start=go_on, on_train_batch_end=lambda trainer, *_: opened or read(trainer.strategy, 0)
        ),
    )
    try:
        trainer.fit(net)
    except RuntimeError as err:
        return str(err)
    return ""


def errors_of_names() -> dict[str, str]:
    """Return what is said about arguments that do not fit, by what is wrong."""

    class Two(Net):
        def __init__(self, fit: Fit) -> None:
            super().__init__(fit)
            self.other = _collection(fit)

    case = Fit((Table("row_wise"),))
    net = Two(case)
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=(torch.optim.SGD, {"lr": RATE}))
    said: dict[str, str] = {}

    def note(what: str, *args: Any, **kwargs: Any) -> None:
        chunked = "num_rows" in kwargs
        try:
            (strategy.table_chunks if chunked else strategy.table)(*args, **kwargs)
        except Exception as err:
            said[what] = f"{type(err).__name__}: {err}"

    note("before", "t0")
    trainer = make_trainer(strategy, callbacks=[LambdaCallback(setup=lambda *_, **__: note("setup", "t0"))])
    trainer.fit(net)
    note("typo", "ebc.t00")
    note("twice", "t0")
    note("named", "other.t0")
    note("no name", 3)
    note("no rank", "ebc.t0", rank=7)
    note("rank of another type", "ebc.t0", rank="cpu")
    note("no rows", "ebc.t0", num_rows=0)
    assert torch.equal(strategy.table("ebc.t0"), strategy.table("ebc.t0"))
    return said


def read_kind(kind: str, name: str) -> Any:
    """Read a table of another kind of module after a fit; return whether it is the shards' values, or the error."""
    net = KindModel(kind)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding=make_plan(net)))
    trainer.fit(net, datamodule=KindBatches(net.case, 2))
    try:
        table = trainer.strategy.table(name)
    except ValueError as err:
        return str(err)
    ids = torch.arange(len(table))
    found = [shard.tensor for shard in shards_of(net, name)]
    return all(any(torch.equal(row, table[at]) for at in ids) for shard in found for row in shard)


def shards_of(net: nn.Module, name: str) -> list[Any]:
    module, _, table = name.rpartition(".")
    state = net.get_submodule(module).state_dict()
    [weight] = [value for key, value in state.items() if key.split(".")[-2] == table]
    return list(weight.local_shards())


def read_ids_of_a_fit(
    setting: collisions.Setting, pipeline: str, *, reads: bool = True
) -> tuple[list[str], int, list[float]]:
    """Train with managed collisions; return what was read wrong after a step, the number of ids read, and losses."""
    torch.manual_seed(3 + dist.get_rank())
    model = collisions.Model(setting)
    wrong, num_ids = list[str](), 0

    def read(trainer: Any, *args: Any) -> None:
        nonlocal num_ids
        strategy = trainer.strategy
        tables = {name: (strategy.table(name), strategy.raw_ids(name)) for name in ("t0", "t1")}
        alone = {name: strategy.raw_ids(name, rank=0) for name in tables}
        known = collisions.known(model, [])
        for name, (table, ids) in tables.items():
            found = {
                int(one): row.tolist()
                for one, row in zip(ids, table[:, : collisions.DIM], strict=True)
                if one != collisions.EMPTY
            }
            expected = {one: row[: collisions.DIM] for one, row in known.rows.get(name, {}).items()}
            if found != expected or (ids.dtype, len(ids)) != (torch.int64, len(table)):
                wrong.append(f"{name} at {trainer.global_step}")
            if (alone[name] is None) != bool(dist.get_rank()) or not (dist.get_rank() or torch.equal(alone[name], ids)):
                wrong.append(f"{name} of rank 0 at {trainer.global_step}")
            num_ids += len(found)

    strategy = OverlapEmbeddingStrategy(pipeline, sharding=collisions.plan_of(model))
    callbacks = [LambdaCallback(on_train_batch_end=read, on_fit_end=read)] if reads else []
    trainer = make_trainer(strategy, callbacks=callbacks, max_epochs=collisions.EPOCHS, limit_val_batches=0)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(model, collisions.loader(setting))
    return wrong, num_ids, [float(loss) for loss in model.losses]


def errors_of_raw_ids() -> list[str]:
    """Return what is said of ids of a table without managed collisions, and of MPZCH, whose rows can be read."""
    said = []
    for kind, name in (("managed_bags_beside_tables", "t2"), ("hashed", "t0")):
        net = KindModel(kind)
        trainer = make_trainer(OverlapEmbeddingStrategy(sharding=make_plan(net)))
        trainer.validate(net, datamodule=KindBatches(net.case, 2), verbose=False)
        assert trainer.strategy.table(name).shape[0] > 0
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            trainer.strategy.raw_ids(name)
        said.append(str(caught.value))
    return said
