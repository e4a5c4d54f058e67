"""Fits with managed collisions whose rows and raw ids are sent, and what replicas make of them."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_overlap import EmbeddingDeltas, Mode, OverlapEmbeddingStrategy
from lightning_overlap.checkpoint import counting_modules
from lightning_overlap.deltas import NO_ID, Replica, ReplicaServer, decode, parse_names
from lightning_overlap.plugin import unsupported
from lightning_overlap.plugin.first_words import LOGGER
from lightning_overlap.updated_rows import touched_rows
from lightning_overlap.updated_rows.copies import copy_on_host

from ..checkpoint.collisions import EPOCH, EPOCHS, Model, Setting, answers, loader, plan_of
from ..checkpoint.resumes import SaveSteps
from ..plugin.strategies import logged
from ..support.fits import make_trainer
from ..tables.supported_modules import Batches, KindModel, make_plan
from .delta_fits import Files, Windows, differences, shards_of
from .histories import MemorySink
from .test_command import ask

TABLES = ("t0", "t1")
# Known to most trainings; never seen; outside of the range of ids, on either side.
PROBES = [*range(0, 7 * 90, 7), *range(1, 999, 83), 999, 1000, 1001, 123_456_789_012_345, -1, -2, -1000]


def weight_of(table: str, setting: Setting) -> str:
    return f"mc._embedding_module.{'embeddings' if setting.sequences else 'embedding_bags'}.{table}.weight"


def ids_of_probes(setting: Setting) -> list[int]:
    """Return what the module gives rows to in the place of each probe."""
    ids: list[int] = setting.hash(torch.tensor(PROBES)).tolist()
    return ids


class At(NamedTuple):
    """What a rank has at a step, and what all ranks answer in evaluation."""

    tables: Windows
    ids: dict[str, list[tuple[int, int]]]  # table -> (id, row) of this rank's shard
    answers: dict[str, dict[int, list[float]]]


def now(module: Any) -> At:
    """All ranks call this."""
    was_training = module.training
    ids = {}
    for name, one in counting_modules(module).items():
        pairs = zip(one._mch_sorted_raw_ids.tolist(), one._mch_remapped_ids_mapping.tolist(), strict=True)
        ids[name.rpartition(".")[2]] = [(each, row) for each, row in pairs if each != NO_ID]
    found = At(shards_of(module), ids, answers(module, dict.fromkeys(TABLES, PROBES)))
    module.train(was_training)
    return found


@dataclass
class Steps(Callback):
    by_step: dict[int, At] = field(default_factory=dict)
    first: At | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.first = now(module)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.by_step[trainer.fit_loop.epoch_loop.total_batch_idx + 1] = now(module)


class Fit(NamedTuple):
    by_step: dict[int, At]
    first: At | None
    words: str
    losses: list[Tensor]


def train(
    setting: Setting,
    folder: str,
    pipeline: str = "fused_sparse_dist",
    *,
    every_n_steps: int = 1,
    steps: int = EPOCH * EPOCHS,
    ckpt_path: str | None = None,
    save_at: Sequence[int] = (),
    delay_s: float = 0,
    deltas: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    looks: bool = True,
    sends: bool = True,
    slow_copy_s: float = 0,
) -> Fit:
    """Train; look at every step, which the sending must not need: lookups wait for copies of rows."""
    torch.manual_seed(3 + dist.get_rank())
    model, seen = Model(setting), Steps()
    if pipeline == "async_lookup":
        strategy = OverlapEmbeddingStrategy(Mode(pipeline, staleness=2), sharding=plan_of(model))
    else:
        strategy = OverlapEmbeddingStrategy(pipeline, sharding=plan_of(model))
    senders = [EmbeddingDeltas(Files(folder, delay_s), every_n_steps, **(deltas or {}))] * sends
    trainer = make_trainer(
        strategy,
        max_epochs=9,
        max_steps=steps,
        limit_val_batches=0,
        callbacks=[*callbacks, *senders, *([seen] if looks else []), SaveSteps(f"{folder}-saved", tuple(save_at))],
    )

    def copy_slowly(*args: Any) -> Any:
        time.sleep(slow_copy_s)
        return copy_on_host(*args)

    patch = mock.patch.object(touched_rows, "copy_on_host", copy_slowly) if slow_copy_s else nullcontext()
    with warnings.catch_warnings(action="ignore"), logged(LOGGER) as words, patch:
        trainer.fit(model, loader(setting), ckpt_path=ckpt_path)
    return Fit(seen.by_step, seen.first, "\n".join(words), model.losses)


def refused(folder: str) -> dict[str, str]:
    """Return what is said to deltas of MPZCH, by what was tried; a fit of it is not refused for the CPU's sake here."""
    said, losses = {}, []

    def attempt(what: str, do: str, **options: Any) -> None:
        model = KindModel("hashed")
        senders = [EmbeddingDeltas(f"{folder}/own")] if do == "fit" else []
        trainer = make_trainer(OverlapEmbeddingStrategy(sharding=make_plan(model)), callbacks=senders)
        try:
            getattr(trainer, do)(model, datamodule=Batches(model.case, 3), **options)
        except ValueError as err:
            said[what] = str(err)
        losses.extend(model.losses)

    with mock.patch.object(unsupported, "HashZchManagedCollisionModule", ()), warnings.catch_warnings(action="ignore"):
        attempt("a fit", "fit")
        attempt("a restore", "validate", ckpt_path=f"deltas://{folder}")
    assert not losses
    return said


def cuts(folder: str | Path) -> Iterator[tuple[tuple[int, int], dict[str, bytes]]]:
    """Yield the cuts of a folder, with their files."""
    names = parse_names(path.name for path in Path(folder).iterdir())
    for cut, of_cut in groupby(names, key=lambda name: name.cut):
        yield cut, {str(name): Path(folder, str(name)).read_bytes() for name in of_cut}


def wrong_in(replica: Replica, model: Model | None, setting: Setting, of_ranks: Sequence[At]) -> list[str]:
    """Name what a replica has otherwise than the ranks: tables, raw ids, and answers to raw ids, bit for bit."""
    found = differences(replica.state_dict(), [at.tables for at in of_ranks])
    for table in TABLES:
        weight = weight_of(table, setting)
        pairs = pairs_of(of_ranks, table)
        id_of_row = replica.raw_ids[weight].tolist()
        if {each: row for row, each in enumerate(id_of_row) if each != NO_ID} != pairs:
            found.append(f"ids of {table}")
        ids = ids_of_probes(setting)
        rows, known = replica.look_up(weight, torch.tensor(ids), hashed=setting.hashed)
        if dict(zip(PROBES, rows.tolist(), strict=True)) != of_ranks[0].answers[table]:
            found.append(f"answers of {table}")
        if known.tolist() != [each in pairs for each in ids]:
            found.append(f"known of {table}")
    if model is not None and answers(model, dict.fromkeys(TABLES, PROBES)) != of_ranks[0].answers:
        found.append("answers of the module")
    return found


def wrong_over_http(server: ReplicaServer, setting: Setting, of_ranks: Sequence[At]) -> list[str]:
    """Name the tables for whose raw ids a server answers otherwise than the ranks; it knows no function of ids."""
    found = []
    for table in TABLES:
        status, answer = ask(
            f"http://127.0.0.1:{server.port}/lookup", {"table": weight_of(table, setting), "ids": PROBES}
        )
        pairs, position = pairs_of(of_ranks, table), server.replica.position
        if setting.hashed:
            if status != 400 or "maps ids of mc." not in answer or "input_hash_func" not in answer:
                found.append(f"no refusal of {table} over HTTP")
        elif (status, answer) != (
            200,
            {
                "generation": position.cut[0],
                "step": position.cut[1],
                "rows": [of_ranks[0].answers[table][each] for each in PROBES],
                "known": [each in pairs for each in PROBES],
            },
        ):
            found.append(f"answers of {table} over HTTP")
    return found


class Consumer:
    """Another program that keeps id -> row of tables, from the fields of the files alone."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, int]] = {}

    def apply(self, files: dict[str, bytes]) -> None:
        decoded = [decode(data, name) for name, data in files.items()]
        entries = [entry for one in decoded for entry in one.rows]
        for one in decoded:
            if one.header.is_base:
                for table, how in (one.header.raw_ids or {}).items():
                    begin, end = how.segments[one.header.rank : one.header.rank + 2]
                    mine = self.rows.setdefault(table, {})
                    for each in [each for each, row in mine.items() if begin <= row < end]:
                        del mine[each]
        for entry in entries:
            if entry.field == "evicted_id":
                for row, each in zip(entry.rows.tolist(), entry.values.squeeze(1).tolist(), strict=True):
                    assert self.rows[entry.table].pop(each) == row
        for entry in entries:
            if entry.field == "raw_id":
                mine = self.rows.setdefault(entry.table, {})
                for row, each in zip(entry.rows.tolist(), entry.values.squeeze(1).tolist(), strict=True):
                    if each != NO_ID:
                        mine[each] = row


class Found(NamedTuple):
    """What replicas of a fit had otherwise than the ranks, by cut; and how much there was to see."""

    wrong: dict[object, list[str]]
    num_cuts: int
    num_evicted: int


def compare(setting: Setting, folder: str | Path, by_step: dict[int, list[At]]) -> Found:
    """Let replicas and a consumer of one fit follow, cut by cut; one replica goes on from its file at each cut."""
    sink, model, wrong = MemorySink(), Model(setting), {}
    consumer, num_cuts, num_evicted = Consumer(), 0, 0
    saved, served = None, Replica(model, sink)
    with TemporaryDirectory() as states, ReplicaServer(served) as server:
        for cut, files in cuts(folder):
            sink.files |= files
            consumer.apply(files)
            entries = [entry for name, data in files.items() for entry in decode(data, name).rows]
            num_evicted += sum(len(entry.rows) for entry in entries if entry.field == "evicted_id")
            alone = server.replica = Replica(None, sink, start=saved)
            for replica in (alone, served):
                replica.update()
                assert replica.position is not None
                assert replica.position.cut == cut
            saved = f"{states}/state"
            alone.save(saved)
            if (of_ranks := by_step.get(cut[1])) is None:
                continue
            num_cuts += 1
            found = wrong_in(alone, None, setting, of_ranks) + wrong_in(served, model, setting, of_ranks)
            found += wrong_over_http(server, setting, of_ranks)
            pairs = {weight_of(table, setting): pairs_of(of_ranks, table) for table in TABLES}
            if consumer.rows != pairs:
                found.append("the consumer's ids")
            if found:
                wrong[cut] = found
    return Found(wrong, num_cuts, num_evicted)


def pairs_of(of_ranks: Sequence[At], table: str) -> dict[int, int]:
    """Return id -> row of a whole table."""
    return dict(pair for at in of_ranks for pair in at.ids[table])


def by_step(fits: Sequence[Fit]) -> dict[int, list[At]]:
    return {step: [fit.by_step[step] for fit in fits] for step in fits[0].by_step}


def stragglers(setting: Setting, folder: str | Path, of_ranks: Sequence[At]) -> dict[object, list[str]]:
    """Return the replicas, stopped at any cut or begun now, that do not end as the ranks."""
    all_cuts = [((0, 0), dict[str, bytes]()), *cuts(folder)]
    wrong: dict[object, list[str]] = {}
    for number, (stop, _) in enumerate(all_cuts):
        sink, model = MemorySink(), Model(setting)
        replica = Replica(model, sink)
        for part in (all_cuts[: number + 1], all_cuts[number + 1 :]):
            for _, files in part:
                sink.files |= files
            replica.update()
        if found := wrong_in(replica, model, setting, of_ranks):
            wrong[stop] = found
    return wrong
