"""Combinations of features trained: with all of them, without those that change no numbers, and resumed.

Ranks run these functions.

A fit with features has to equal the same in `base` without those that change no numbers, bit for bit, and to rounding
the unsharded module trained by hand. What it saved on the way continues to the same end. Averages equal averages by
hand, and a replica equals the tables. Or it is refused, with an error that the docs name (`REFUSALS`).
"""

from __future__ import annotations

import datetime
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim import RowWiseAdagrad

from lightning_overlap import (
    Balance,
    EmbeddingDeltas,
    ExponentialMovingAverage,
    Mode,
    OverlapEmbeddingStrategy,
    OverlapMonitor,
)
from lightning_overlap.compat.lightning import accumulates
from lightning_overlap.deltas import Replica
from lightning_overlap.distributed import gather_objects

from ..callbacks.averaging import PlainAverage, parts_of
from ..deltas.delta_fits import differences as differences_from_tables
from ..deltas.delta_fits import shards_of
from ..support.cases import dense_optimizer
from ..support.fits import make_trainer
from ..support.ranks import ROOT
from ..tables.supported_modules import (
    Batch,
    KindModel,
    case_of,
    collect,
    dense_kernels_without_pooling,
    is_fused,
    make_batch,
    make_plan,
)
from .combinations import KINDS, Combination

EPOCH, EPOCHS = 5, 2
REFUSED = "refused: "
TOLERANCE = 1e-3  # of unsharded arithmetic, after steps at a rate of 2
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 2.0}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.5, "eps": 1e-2}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.5, "eps": 1e-2}),
}
_NO_UNSHARDED = ("managed", "variable_batch", "towers", "fused", "weighted_means", "half", "buffers", "mixed")

REFUSALS: dict[str, tuple[str, str]] = {
    "whose optimizer TorchRec would then run within": ("modules.md", "data-parallel tables are refused"),
    "cannot be sent by a CPU": ("communication.md", "FP8 and BF16 on a CPU"),
    "cannot be replicated: its weights are torch.float16": ("communication.md", "Tables in 16 bits"),
    "cannot be replicated: it has no fused optimizer": ("communication.md", "Tables without a fused optimizer"),
    "would train the data-parallel tables .* replicate": ("communication.md", "TorchRec looks them up together"),
    "async_checkpoint=True needs checkpoint_format='sharded'": ("checkpoints.md", 'with `"full"` is refused'),
    "cannot be replicated: it (belongs|is)": ("communication.md", "of feature-processed modules and of managed"),
    "RowWiseAdagrad cannot train tables of managed": ("modules.md", "`RowWiseAdagrad` is refused by name"),
    "batch sizes vary by feature, and .* kernels of one": ("modules.md", "tables of several kernels are refused"),
    "batch sizes vary by feature, and .* are data-parallel": ("modules.md", "those are refused by name at the first"),
    "batch sizes vary by feature, and .* have a kernel of": ("modules.md", "other optimizers than SGD, RowWiseAdagrad"),
    "buffers of feature processors differ by rank": ("modules.md", "a save is refused by name if such a buffer"),
    "with variable batch sizes .* share parts": ("balance.md", "variable batch sizes"),
    "but sharding makes it .*: remove one": ("communication.md", "applies to tables that `sharding` does not name"),
    "planner rejects most modules like": ("limits.md", 'managed collisions with `row_wise(compute_kernel="fused")`'),
    r"is not possible on cpu. Possible there: row_wise\.": ("limits.md", "managed collisions with `row_wise("),
    "no fused optimizer for these tables": ("optimizers.md", "A table without a fused optimizer is refused"),
    "managed collision modules? .*average": ("optimizers.md", "tables of managed collision modules"),
    "in which an average would stand still": ("optimizers.md", "tables with fewer than 32 bits per number"),
}
"""Pattern of an error -> page of the docs, and words of it that name the refusal."""


# -- a fit ------------------------------------------------------------------------------------------------------------


def num_ids(batch: Batch) -> Tensor:
    """Return the number of ids of each sample, as its cost."""
    if batch.kjt.variable_stride_per_key():
        return torch.arange(len(batch.labels))
    lengths: Tensor = batch.kjt.lengths().view(len(batch.kjt.keys()), -1).sum(0)
    return lengths


def observe(kind: str, stage: Any, batch: int) -> None:
    """Watch nothing."""


def batch_of(found: Combination, index: int, rank: int) -> Batch | None:
    case = case_of(found.kind)
    if index == found.get("none"):
        return None
    batch = make_batch(case, index, rank)
    if found.has("bad_loss") and index == 2 and rank == found.num_ranks - 1:
        batch.dense[0, 0] = torch.inf
    return batch


def num_batches(found: Combination, rank: int) -> int:
    return EPOCH + (1 if found.has("uneven") and rank == 0 and found.num_ranks > 1 else 0)


@dataclass
class _Rows(Dataset):
    found: Combination
    rank: int
    first: int = 0

    def __len__(self) -> int:
        return 2 if self.first else num_batches(self.found, self.rank)

    def __getitem__(self, index: int) -> Any:
        return batch_of(self.found, self.first + index, self.rank)


def _as_it_is(batch: Any) -> Any:
    return batch


class Data(LightningDataModule):
    def __init__(self, found: Combination) -> None:
        super().__init__()
        self.found = found

    def train_dataloader(self) -> Any:
        rows = _Rows(self.found, self.trainer.global_rank)
        return StatefulDataLoader(rows, batch_size=None, collate_fn=_as_it_is)

    def val_dataloader(self) -> Any:
        rows = _Rows(self.found, self.trainer.global_rank, first=500)
        return StatefulDataLoader(rows, batch_size=None, collate_fn=_as_it_is)


class Net(KindModel):
    def __init__(self, found: Combination) -> None:
        applies = not found.has("fused_optimizer")
        super().__init__(found.kind, found.has("rates"), frozen=found.has("frozen"), applies=applies)
        self.found, self.automatic_optimization = found, not found.has("manual")
        if found.has("compiled"):
            self.top.compile(backend="eager")

    def on_train_epoch_start(self) -> None:
        """Draw on: a resumed fit does not come here in the middle of an epoch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.rates_move:
                self.lr_schedulers().step()  # type: ignore[union-attr]
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.append(self(batch).detach().clone())


class Saves(Callback):
    """Saves at the nth time that the trainer comes to a hook."""

    def __init__(self, hook: str, nth: int, path: str) -> None:
        self.left, self.path, self.num_losses = nth, path, 0
        setattr(self, hook, self._save)

    def _save(self, trainer: Trainer, module: Any, *_: Any, **__: Any) -> None:
        self.left -= 1
        # No checkpoint has the gradients of an accumulation that is under way.
        if self.left <= 0 and not self.num_losses and not accumulates(trainer):
            self.num_losses = len(module.losses)
            trainer.save_checkpoint(self.path)


@dataclass
class Outcome:
    losses: list[float]
    validated: list[float]
    state: dict[str, Tensor]
    averages: dict[str, Tensor] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    num_saved: int = 0  # losses before the save

    def differences(self, other: Outcome, what: str, *, losses: bool = True) -> list[str]:
        found = [] if not losses or _same(self.losses, other.losses) else ["losses"]
        if losses and not _same(self.validated, other.validated, _nearly if self.averages else _equal):
            found.append("validated losses")
        for mine, theirs, kind in ((self.state, other.state, ""), (self.averages, other.averages, "averages of ")):
            keys = mine.keys() & theirs.keys() if kind else mine.keys() | theirs.keys()
            # A row's average makes up for samples at once, at each save for example.
            same = _nearly if kind else _equal
            both = mine.keys() & theirs.keys()
            names = [key for key in sorted(keys) if key not in both or not same(mine[key], theirs[key])]
            found += [f"{kind}{name}" for name in names[:8]]
        return [f"{what}: {', '.join(found)}"] if found else []


def _nearly(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def _equal(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and torch.equal(mine.nan_to_num(nan=-7.5), theirs.nan_to_num(nan=-7.5))


def _same(mine: Sequence[float], theirs: Sequence[float], equal: Callable[[Tensor, Tensor], bool] = _equal) -> bool:
    return len(mine) == len(theirs) and equal(torch.tensor(mine), torch.tensor(theirs))


def options_of(found: Combination, module: Net) -> dict[str, Any]:
    """Return the strategy's options."""
    given: dict[str, Any] = {"sharding": make_plan(module), "timeout": datetime.timedelta(seconds=30)}
    named = dict(found.features)
    if not found.is_planned:
        given["sharding"] = named.pop("sharding", None)  # a plan would place each table
    for name in (
        "rate_per_table",
        "release_features",
        "copy_in_place",
        "max_queued_steps",
        "out_of_range_ids",
        "calm_libraries",
    ):
        given |= {name: named[name]} if name in named else {}
    for name in ("stream", "checkpoint_format", "async_checkpoint", "most_increments", "timeout", "quantized_comms"):
        given |= {name: named[name]} if name in named else {}
    given |= {"nonfinite": named["nonfinite"]} if "nonfinite" in named else {}
    if "bad_loss" in named:
        given["nonfinite"] = "skip"
    if "observer" in named:
        given["observer"] = observe
    if "fused_optimizer" in named:
        given["fused_optimizer"] = OPTIMIZERS[named["fused_optimizer"]]
    if "replicate_tables" in named:
        value = named["replicate_tables"]
        given["replicate_tables"] = list(value) if isinstance(value, tuple) else value
    if "balance" in named:
        given["balance"] = Balance(num_ids)
    if found.stop is not None:
        form, *how = found.stop[2].split(", ")
        given |= {"checkpoint_format": form, "async_checkpoint": "asynchronous" in how}
        given["most_increments"] = 0 if "renewed" in how else 10
    of_mode = {
        name: named[name] for name in ("name", "staleness", "defer_update", "start_batch", "end_batch") if name in named
    }
    given["pipeline"] = Mode(**of_mode) if of_mode else named.get("pipeline", "base")
    return given


@dense_kernels_without_pooling()
def fit(found: Combination, folder: str, *, by_hand: bool = False, load: str | None = None) -> Outcome:
    torch.manual_seed(11)
    module = Net(found)
    callbacks: list[Callback] = []
    average, plain = ExponentialMovingAverage(0.8, tables=True), PlainAverage(0.8)
    if found.has("averages"):
        callbacks += [average, plain] if by_hand else [average]
    sink = str(Path(folder) / "deltas")
    if found.has("deltas"):
        callbacks.append(EmbeddingDeltas(sink, found.get("deltas"), dense=False))
    if found.has("monitor"):
        callbacks.append(OverlapMonitor(every_n_steps=3))
    saves = None
    if found.stop is not None and load is None:
        saves = Saves(found.stop[0], found.stop[1], str(Path(folder) / "saved.ckpt"))
        callbacks.append(saves)
    if load is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
    validates = found.has("validation")
    with warnings.catch_warnings(action="ignore"):
        trainer = make_trainer(
            OverlapEmbeddingStrategy(**options_of(found, module)),
            callbacks=callbacks,
            max_epochs=EPOCHS,
            accumulate_grad_batches=found.get("accumulate", 1),
            num_sanity_val_steps=0,
            limit_val_batches=2 if validates else 0,
            val_check_interval=found.get("validation", 1.0),
        )
        torch.manual_seed(23 + dist.get_rank())
        trainer.fit(module, datamodule=Data(found), ckpt_path=load)
        outcome = Outcome(
            [float(loss) for loss in module.losses],
            [float(loss) for loss in module.validated],
            collect(module, trainer.optimizers[0]),
        )
        if found.has("averages"):
            with average.averaged():
                outcome.averages = parts_of(module.state_dict())
            if by_hand and (off_by := plain.off_by(outcome.averages)) > 1e-5:
                outcome.wrong.append(f"averages are {off_by} off")
        if found.has("deltas"):
            of_ranks = gather_objects(shards_of(module))
            outcome.wrong += [f"the replica's {name}" for name in _replica_differences(sink, of_ranks)]
    outcome.num_saved = 0 if saves is None else saves.num_losses
    return outcome


def _replica_differences(sink: str, of_ranks: Any) -> list[str]:
    with Replica(None, sink) as replica:
        replica.update()
        state = replica.state_dict()
        of_tables = [{key: one for key, one in shards.items() if key[0] in state} for shards in of_ranks]
        if not any(of_tables):
            return ["tables are missing"]
        return differences_from_tables(state, of_tables)


# -- by hand ----------------------------------------------------------------------------------------------------------


def has_unsharded(found: Combination) -> bool:
    """Whether the loop below trains the same numbers, to rounding."""
    others = (
        found.has("rates") or found.has("quantized_comms") or found.stale or found.get("sharding") == "data_parallel"
    )
    # Its state is a mean over the columns of a shard.
    columns = found.get("fused_optimizer") == "RowWiseAdagrad" and found.get("sharding") == "column_wise"
    return not others and not columns and not any(word in found.kind for word in _NO_UNSHARDED)


def unsharded(found: Combination) -> tuple[list[float], dict[str, Tensor]]:
    """Train the batches of all ranks by one backward of the mean of their losses; each rank does this alone."""
    module = Net(found)
    if found.has("fused_optimizer"):
        cls, kwargs = OPTIMIZERS[found.get("fused_optimizer")]
        for part in (one for one in module.modules() if isinstance(one, (EmbeddingBagCollection, EmbeddingCollection))):
            for name, weight in part.named_parameters():
                table = int(name.split(".")[-2].removeprefix("t"))
                if weight.requires_grad and (not found.is_planned or is_fused(module.part_of(part), table)):
                    _apply_optimizer_in_backward(cls, [weight], kwargs)
    optimizer = dense_optimizer(module)
    every, losses = found.get("accumulate", 1), []
    length = min(num_batches(found, rank) for rank in range(found.num_ranks))
    for _ in range(EPOCHS):
        number = 0
        for index in range(length):
            batches = [batch_of(found, index, rank) for rank in range(found.num_ranks)]
            if batches[0] is None:
                continue
            if index % every == 0:
                optimizer.zero_grad()
            own = [KindModel.forward(module, batch) for batch in batches if batch is not None]
            losses.append(float(own[dist.get_rank()]) if not found.has("balance") else torch.nan)
            number = index + 1
            if all(torch.isfinite(loss) for loss in own):
                (torch.stack(own).mean() / every).backward()
                if number % every == 0 or number == length:
                    optimizer.step()
            else:
                optimizer.zero_grad()
    return losses, {name: weight.detach() for name, weight in module.named_parameters()}


def differences_from_unsharded(found: Combination, outcome: Outcome) -> list[str]:
    losses, weights = unsharded(found)
    wrong = [] if found.has("balance") or _close(torch.tensor(outcome.losses), torch.tensor(losses)) else ["losses"]
    for key, mine in outcome.state.items():
        name, _, place = key.partition(" ")
        if name not in weights or not torch.is_tensor(mine):
            continue
        row, column = map(int, place.strip("[]").split(",")) if place else (0, 0)
        theirs = weights[name]
        if theirs.dim() == 2:
            theirs = theirs[row : row + mine.shape[0], column : column + mine.shape[1]]
        wrong += [] if mine.shape == theirs.shape and _close(mine, theirs) else [key]
    return [f"not as unsharded: {', '.join(wrong[:4])}"] if wrong else []


def _close(mine: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(mine.float(), theirs.float(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


# -- what is compared -------------------------------------------------------------------------------------------------


def differences(found: Combination) -> list[str]:
    """Return what is wrong with a combination; `REFUSED` and the error if it is refused as the docs say."""
    for name in ("lightning_overlap", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    [folder] = gather_objects(tempfile.mkdtemp())[:1]
    try:
        return _differences(found, folder)
    except Exception as err:
        if (page := named_in_docs(str(err))) is not None:
            return [f"{REFUSED}{page}: {type(err).__name__}: {err}"]
        raise


def _differences(found: Combination, folder: str) -> list[str]:
    trained = fit(found, folder)
    expected = fit(found.reference, f"{folder}/reference", by_hand=True)
    wrong = trained.wrong + expected.wrong + trained.differences(expected, "not as the reference")
    if has_unsharded(found):
        wrong += differences_from_unsharded(found, trained)
    if found.stop is not None and trained.num_saved and not found.stale:  # else the first lookups are fresher
        rest = fit(found, folder, load=str(Path(folder) / "saved.ckpt"))
        wrong += rest.wrong + rest.differences(trained, "resumed", losses=False)
        if not _same(rest.losses, trained.losses[len(trained.losses) - len(rest.losses) :]):
            wrong.append("resumed: losses")
    return wrong


def named_in_docs(error: str) -> str | None:
    """Return the page that names a refusal; None if there is none."""
    for pattern, (page, words) in REFUSALS.items():
        if re.search(pattern, error, re.DOTALL) and words in " ".join((ROOT / "docs" / page).read_text().split()):
            return page
    return None


def sharded_kinds() -> list[str]:
    """Return the classes of sharded modules that `KINDS` become."""
    found: set[str] = set()
    for kind in KINDS:
        sharded = {sharder.module_type for sharder in get_default_sharders()}
        found |= {f"Sharded{type(one).__name__}" for one in KindModel(kind).modules() if type(one) in sharded}
    return sorted(found)
