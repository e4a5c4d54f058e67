"""Fits with managed collision modules, and what such modules know of ids. Functions that ranks run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchrec
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan
from torchrec.modules import mc_embedding_modules, mc_modules

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint.moved_ids import counting_modules
from lightning_overlap.checkpoint.table_state import KERNEL_KINDS, fused_state, local_parts
from lightning_overlap.compat.torchrec import ranks_of, seen_ids
from lightning_overlap.distributed import gather_objects
from lightning_overlap.plugin import unsupported

from ..support.cases import dense_optimizer
from ..support.fits import make_trainer
from ..support.modules import draw_weights, plan_by_place, rows
from ..tables.supported_modules import Batches as KindBatches
from ..tables.supported_modules import KindModel, collect, make_plan
from .resumes import SaveSteps

EPOCH, EPOCHS, BATCH_SIZE, DIM = 6, 2, 6, 8
EMPTY = torch.iinfo(torch.int64).max
POLICIES = {
    "lfu": mc_modules.LFU_EvictionPolicy,
    "lru": mc_modules.LRU_EvictionPolicy,
    "distance": mc_modules.DistanceLFU_EvictionPolicy,
    "threshold": lambda: mc_modules.DistanceLFU_EvictionPolicy(
        threshold_filtering_func=lambda counts: mc_modules.probabilistic_threshold_filter(counts, 0.4)
    ),
}


@dataclass(frozen=True)
class Setting:
    """A model of two tables, and its data."""

    policy: str = "distance"
    interval: int = 2  # between evictions, in batches
    num_rows: tuple[int, int] = (41, 24)
    num_ids: int = 90
    hash_size: int = 1000  # 0: any ids, spread over the ranks by their remainder
    sequences: bool = False
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adagrad
    hashed: bool = False  # whether a function maps ids before they get rows

    def hash(self, ids: Tensor) -> Tensor:
        """Return what the module gives rows to; not what the function would return for that."""
        return scrambled(ids, self.hash_size) if self.hashed else ids


def drawn_settings(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        policy=st.sampled_from(sorted(POLICIES)),
        interval=st.integers(1, 5),
        num_ids=st.sampled_from([20, 90]),
        hash_size=st.sampled_from([0, 1000]),
        sequences=st.booleans(),
        **more,
    )


def scrambled(ids: Tensor, hash_size: int) -> Tensor:
    """An `input_hash_func`."""
    return (ids * 31 + 17) % (hash_size or 7919)


class Model(LightningModule):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        kind = torchrec.EmbeddingConfig if setting.sequences else torchrec.EmbeddingBagConfig
        configs: list[Any] = [
            kind(name=f"t{table}", feature_names=[f"f{table}"], num_embeddings=num, embedding_dim=DIM)
            for table, num in enumerate(setting.num_rows)
        ]
        managed = mc_modules.ManagedCollisionCollection(
            {
                config.name: mc_modules.MCHManagedCollisionModule(
                    zch_size=config.num_embeddings,
                    device=torch.device("cpu"),
                    eviction_interval=setting.interval,
                    eviction_policy=POLICIES[setting.policy](),
                    input_hash_size=setting.hash_size,
                    input_hash_func=scrambled if setting.hashed else None,
                )
                for config in configs
            },
            configs,
        )
        if setting.sequences:
            tables: Any = EmbeddingCollection(tables=configs)
            self.mc: Any = mc_embedding_modules.ManagedCollisionEmbeddingCollection(tables, managed)
        else:
            tables = EmbeddingBagCollection(tables=configs)
            self.mc = mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(tables, managed)
        self.top = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * DIM, 1))
        draw_weights(self, 5, 0.4)
        self.losses: list[Tensor] = []
        for _, weight in tables.named_parameters():
            _apply_optimizer_in_backward(setting.optimizer, [weight], {"lr": 0.5})

    def embeddings(self, kjt: KeyedJaggedTensor) -> Tensor:
        """(B, 2 * DIM); a sample has one id of each feature."""
        found, _ = self.mc(kjt)
        return torch.cat([found[name].values() if self.setting.sequences else found[name] for name in ("f0", "f1")], 1)

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        loss = self.top(self.embeddings(batch)).square().mean()
        self.losses.append(loss.detach().clone())
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> None:
        self.embeddings(batch)

    def configure_optimizers(self) -> Any:
        return dense_optimizer(self)


def plan_of(model: Model) -> ShardingPlan:
    return plan_by_place(model, lambda _: rows)


@dataclass
class Batches(Dataset):
    setting: Setting
    rank: int

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(100 * self.rank + index)
        # Few ids come often, many seldom.
        share = torch.rand(2 * BATCH_SIZE, generator=generator) ** 2
        return KeyedJaggedTensor(
            ["f0", "f1"], (share * self.setting.num_ids).long() * 7, lengths=torch.ones(2 * BATCH_SIZE).int()
        )


def loader(setting: Setting) -> Any:
    return StatefulDataLoader(Batches(setting, dist.get_rank()), batch_size=None)


class Run(NamedTuple):
    """What a fit leaves behind on one rank."""

    losses: list[float]
    state: dict[str, Tensor]

    def differences(self, other: Run) -> list[str]:
        """Names of what differs from a run that has begun earlier."""
        found = [key for key in self.state.keys() | other.state.keys() if not _equal(self, other, key)]
        return found if self.losses == other.losses[len(other.losses) - len(self.losses) :] else ["losses", *found]


def _equal(one: Run, other: Run, key: str) -> bool:
    return key in one.state and key in other.state and torch.equal(one.state[key], other.state[key])


def fit(
    setting: Setting,
    folder: str,
    load: str | None = None,
    save_at: tuple[int, ...] = (),
    pipeline: str = "fused_sparse_dist",
    checkpoint_format: str | None = None,
    seed: int = 3,
    epochs: int = EPOCHS,
    num_val: int = 0,
    async_checkpoint: bool = False,
) -> Run:
    torch.manual_seed(seed + dist.get_rank())
    model = Model(setting)
    forms: dict[str, Any] = {"checkpoint_format": checkpoint_format, "async_checkpoint": async_checkpoint}
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=plan_of(model), most_increments=10, **forms)
    options: dict[str, Any] = {"max_epochs": epochs, "limit_val_batches": num_val, "num_sanity_val_steps": 0}
    trainer = make_trainer(strategy, callbacks=[SaveSteps(folder, save_at)], **options)
    with warnings.catch_warnings(action="ignore"):
        path = None if load is None else f"{folder}/{load}.ckpt"
        trainer.fit(model, loader(setting), loader(setting) if num_val else None, ckpt_path=path)
    return Run([float(loss) for loss in model.losses], state_of(model, trainer))


def state_of(model: Model, trainer: Any) -> dict[str, Tensor]:
    state = collect(model, trainer.optimizers[0])
    for name, module in counting_modules(model).items():
        seen = seen_ids(module)
        state |= {f"{name} ids": seen.ids.clone(), f"{name} numbers": torch.tensor(seen[:2])}
        state |= {f"{name} {kind}": values.clone() for kind, values in seen.metadata.items()}
    return state


class SavesBoth(Callback):
    """Saves a folder at each step, and a full file beside it at one step."""

    def __init__(self, folder: str, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step <= self.step:
            trainer.save_checkpoint(f"{self.folder}/folder={trainer.global_step}.ckpt")
        if trainer.global_step == self.step:
            trainer.strategy.checkpoint_format = "full"
            trainer.save_checkpoint(f"{self.folder}/full.ckpt")


def save_both(setting: Setting, folder: str, form: str, step: int) -> dict[str, Any]:
    """Fit, save a folder and a full file, and return how ids are looked up in the end, at that step."""
    torch.manual_seed(3 + dist.get_rank())
    model = Model(setting)
    strategy = OverlapEmbeddingStrategy(sharding=plan_of(model), checkpoint_format=form, most_increments=10)
    options: dict[str, Any] = {"max_epochs": EPOCHS, "max_steps": step, "limit_val_batches": 0}
    trainer = make_trainer(strategy, callbacks=[SavesBoth(folder, step)], **options)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(model, loader(setting))
    return answers(model, {table: sorted(rows) for table, rows in known(model, []).rows.items()})


def refused_increments() -> tuple[str, int]:
    """Return the error of a fit of MPZCH, which is not refused for the CPU's sake here, and the steps before it."""
    model = KindModel("hashed")
    strategy = OverlapEmbeddingStrategy(sharding=make_plan(model), checkpoint_format="incremental")
    trainer = make_trainer(strategy, limit_val_batches=0)
    with mock.patch.object(unsupported, "HashZchManagedCollisionModule", ()), pytest.raises(ValueError) as caught:  # noqa: PT011
        trainer.fit(model, datamodule=KindBatches(model.case, 3))
    return str(caught.value), len(model.losses)


HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_batch_start")
HOOKS += ("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end")
IN_STEP = "training_step"
MID_STEP = (IN_STEP, "on_before_backward", "on_after_backward", "on_before_optimizer_step")


class SavesIn(Callback):
    """Saves in a hook, the nth time that it is called, and says what was refused."""

    def __init__(self, hook: str, nth: int, path: str) -> None:
        self.hook, self.left, self.path, self.said = hook, nth, path, ""
        setattr(self, hook, self.save)

    def save(self, trainer: Any, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            try:
                trainer.save_checkpoint(self.path)
            except RuntimeError as err:
                self.said = str(err)


class SavesInStep(Model):
    """Saves within its step, once its lookups are made."""

    saves: SavesIn | None = None

    def embeddings(self, kjt: KeyedJaggedTensor) -> Tensor:
        found = super().embeddings(kjt)
        if self.saves is not None and self.trainer.training:
            self.saves.save(self.trainer)
        return found


def resume_from_hook(setting: Setting, folder: str, hook: str, nth: int, form: str, pipeline: str) -> list[str]:
    """Save in a hook of a fit with validations, and say where a fit that resumes from there differs."""
    path = f"{folder}/a.ckpt"
    whole, said = _fit_with(SavesIn(hook, nth, path), setting, form, pipeline)
    assert said == ""
    rest, _ = _fit_with(None, setting, form, pipeline, load=path)
    return rest.differences(whole)


def refused_in_step(setting: Setting, folder: str, hook: str, form: str) -> tuple[str, bool]:
    """Return what is said of a save in the middle of a step, and whether there is a file."""
    path = f"{folder}/a.ckpt"
    _, said = _fit_with(SavesIn(hook, 3, path), setting, form, "fused_sparse_dist")
    return said, Path(path).exists()


def _fit_with(
    saves: SavesIn | None, setting: Setting, form: str, pipeline: str, load: str | None = None
) -> tuple[Run, str]:
    torch.manual_seed((3 if load is None else 44) + dist.get_rank())
    model: Any = SavesInStep(setting)
    if saves is not None and saves.hook == IN_STEP:
        model.saves = saves
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=plan_of(model), checkpoint_format=form)
    options: dict[str, Any] = {"max_epochs": EPOCHS, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    callbacks = [] if saves is None else [saves]
    trainer = make_trainer(strategy, callbacks=callbacks, val_check_interval=3, **options)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(model, loader(setting), loader(setting), ckpt_path=load)
    return Run([float(loss) for loss in model.losses], state_of(model, trainer)), "" if saves is None else saves.said


def resume_differs(setting: Setting, folder: str, stop: int, **options: Any) -> list[str]:
    """Fit at once and from `stop` batches on, 0: from the first epoch's end; with saves until two batches later."""
    whole = fit(setting, folder, save_at=tuple(range((stop or EPOCH) + 3)), **options)
    rest = fit(setting, folder, load=f"step={stop}" if stop else "epoch=0", seed=44, **options)
    return rest.differences(whole)


class Known(NamedTuple):
    """What all ranks know of ids together, by table and id."""

    rows: dict[str, dict[int, list[float]]]  # of weights and of optimizer states
    metadata: dict[str, dict[int, list[int]]]
    seen: dict[str, list[tuple[int, ...]]]  # since the last eviction, with their metadata, in any order
    numbers: dict[str, tuple[int, int]]
    places: dict[str, list[tuple[int, int]]]  # (rank, id) of each id
    unknown: dict[str, list[list[float]]]  # by rank: the row for unknown ids, of the weight and the states
    warned: list[str]


def known(model: Model, warned: list[str]) -> Known:
    """All ranks call this."""
    rank, mine = dist.get_rank(), []
    weights, states = model.state_dict(), fused_state(model)
    for name, module in counting_modules(model).items():
        table = name.rpartition(".")[2]
        [weight] = [value for key, value in weights.items() if key.endswith(f".{table}.weight")]
        columns = [weight, *(piece for key, piece in sorted(states.items()) if _is_state(key, table))]
        raw, rows = module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping - module._output_global_offset
        assert raw.tolist() == sorted(raw.tolist())
        assert sorted(rows.tolist()) == list(range(module.output_size()))
        assert raw[-1] == EMPTY
        assert rows[-1] == module.output_size() - 1
        is_id = raw != EMPTY
        values = torch.cat([local_parts(one)[0][1].view(len(rows), -1) for one in columns], 1)
        unknown, values = values[-1].tolist(), values[rows[is_id]]
        metadata = torch.stack([values[is_id] for _, values in sorted(module._mch_metadata.items())], 1)
        seen = seen_ids(module)
        assert set(ranks_of(module, seen.ids, dist.get_world_size()).tolist()) <= {rank}
        past = torch.stack([seen.ids, *seen.metadata.values()], 1)
        ids = raw[is_id].tolist()
        mine.append((rank, table, ids, values.tolist(), metadata.tolist(), past.tolist(), seen[:2], unknown))
    found = Known({}, {}, {}, {}, {}, {}, warned)
    for other, table, ids, values, metadata, past, numbers, unknown in (
        one for many in gather_objects(mine) for one in many
    ):
        found.rows.setdefault(table, {}).update(zip(ids, values, strict=True))
        found.metadata.setdefault(table, {}).update(zip(ids, metadata, strict=True))
        found.seen.setdefault(table, []).extend(map(tuple, past))
        found.unknown.setdefault(table, []).append(unknown)
        found.numbers.setdefault(table, numbers)
        assert found.numbers[table] == numbers
        found.places.setdefault(table, []).extend((other, one) for one in ids)
    for past in found.seen.values():
        past.sort()
    return found


def _is_state(key: Any, table: str) -> bool:
    return key.weight.endswith(f".{table}.weight") and key.kind not in KERNEL_KINDS


def answers(model: Model, ids: Mapping[str, list[int]]) -> dict[str, dict[int, list[float]]]:
    """Look ids up, in evaluation mode; all ranks call this alike. They may be of an unsharded model."""
    most = max(map(len, ids.values()))
    padded = [torch.tensor((ids[table] + [0] * most)[:most]) for table in ("t0", "t1")]
    model.eval()
    kjt = KeyedJaggedTensor(["f0", "f1"], torch.cat(padded), lengths=torch.ones(2 * most).int())
    with torch.no_grad():
        found = model.embeddings(kjt).split(DIM, 1)
    return {
        table: dict(zip(ids[table], values.tolist(), strict=False))
        for table, values in zip(("t0", "t1"), found, strict=True)
    }


class AsLoaded(Callback):
    """Takes what is known as a resumed fit begins."""

    known: Known | None = None

    def __init__(self, warned: list[Any]) -> None:
        self.warned = warned

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.known = known(pl_module, [str(one.message) for one in self.warned])


def save(setting: Setting, folder: str, form: str, steps: int = EPOCH + 2) -> tuple[Known, dict[str, Any]]:
    """Fit, save "step=8.ckpt", and return what is known then, and how ids are looked up."""
    torch.manual_seed(3 + dist.get_rank())
    model = Model(setting)
    strategy = OverlapEmbeddingStrategy(sharding=plan_of(model), checkpoint_format=form, most_increments=10)
    options: dict[str, Any] = {"max_epochs": EPOCHS, "max_steps": steps, "limit_val_batches": 0}
    trainer = make_trainer(strategy, callbacks=[SaveSteps(folder, (steps - 5, steps - 1, steps))], **options)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(model, loader(setting))
    found = known(model, [])
    return found, answers(model, {table: sorted(rows) for table, rows in found.rows.items()})


def load(
    setting: Setting, folder: str, form: str, name: str = "step=8", again: str = "two"
) -> tuple[Known, dict[str, Any]]:
    """Resume a fit, without a step, save `again`, and return what is known and looked up; also that it can train on."""
    torch.manual_seed(77)
    model = Model(setting)
    strategy = OverlapEmbeddingStrategy(sharding=plan_of(model), checkpoint_format=form)
    with warnings.catch_warnings(record=True, action="always") as warned:
        as_loaded = AsLoaded(warned)
        more = SavesAtOnce(f"{folder}/{again}.ckpt")
        trainer = make_trainer(strategy, max_epochs=EPOCHS, callbacks=[as_loaded, more], limit_val_batches=0)
        trainer.fit(model, loader(setting), ckpt_path=f"{folder}/{name}.ckpt")
    assert as_loaded.known is not None
    assert all(torch.isfinite(loss) for loss in model.losses)
    assert model.losses
    evaluated = Model(setting)
    strategy = OverlapEmbeddingStrategy(sharding=plan_of(evaluated))
    trainer = make_trainer(strategy, limit_val_batches=1)
    with warnings.catch_warnings(action="ignore"):
        trainer.validate(evaluated, loader(setting), ckpt_path=f"{folder}/{name}.ckpt", verbose=False)
    return as_loaded.known, answers(evaluated, {table: sorted(rows) for table, rows in as_loaded.known.rows.items()})


def load_unsharded(setting: Setting, path: str, ids: Mapping[str, list[int]]) -> dict[str, Any]:
    """Return how the unsharded module looks ids up, from a full file."""
    model = Model(setting)
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["state_dict"])
    return answers(model, ids)


class SavesAtOnce(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)
