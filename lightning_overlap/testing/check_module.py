"""`check_module`: checks the laws of the package on a user's module and data."""

import itertools
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from torch import nn

from ..distributed import gather_objects
from ..plugin import first_words
from ..schedules import Mode, Schedule, resolve_mode
from ..text import some
from .delayed_lookups import DelayedLookups
from .progress import Progress
from .race_detector import RaceError
from .unsharded import compare_with_unsharded, num_short_steps
from .watched_fit import NUM_WATCHED_STEPS, Data, ModuleFactory, Setting, Watched, fit, make_trainer, process_group

_SIZES = "/lightning_overlap/sparse/input_sizes.py"  # has a step's only host sync, the read of the split sizes


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking one law.

    Attributes:
        law: The law.
        problem: How it is broken, or "".
        compared: What was compared, if it holds.
    """

    law: str
    problem: str
    compared: str


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """The result of `check_module`; `str()` returns it as a table.

    Attributes:
        schedule: The table of the checked mode.
        num_steps: Steps of each fit.
        num_ranks: Ranks of each fit.
        verdicts: The result for each law.
        early: Module -> share of batches, after the first, with embeddings from an early lookup.
        plain: Module that ran its own forward -> the reason.
        host_syncs: Place in the code -> syncs per step, without the read of sizes.
        trained: Weight of a table -> whether training has changed any row of it.
        split: Modules whose weight gradients came after the backward; None if the mode does not split the backward.
    """

    schedule: Schedule
    num_steps: int
    num_ranks: int
    verdicts: tuple[Verdict, ...]
    early: Mapping[str, float]
    plain: Mapping[str, str]
    host_syncs: Mapping[str, float]
    trained: Mapping[str, bool]
    split: tuple[str, ...] | None = None

    @property
    def holds(self) -> bool:
        """Whether all laws hold."""
        return not any(verdict.problem for verdict in self.verdicts)

    def __str__(self) -> str:
        head = (
            f"{self.schedule.name}: staleness {self.schedule.staleness}, {self.num_steps} steps, "
            f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        )
        if self.split is not None:
            whole = "; the backward ran whole: the log of a fit says why" + (
                ", and one rank on a CPU waits for nobody: check on two ranks, under torchrun" * (self.num_ranks == 1)
            )
            head += f"; weight gradients of {some(self.split)} came after the backward" if self.split else whole
        width = max(len(verdict.law) for verdict in self.verdicts)
        lines = [
            f"  {'BROKEN' if each.problem else 'holds':6s}  {each.law:{width}s}  {each.problem or each.compared}"
            for each in self.verdicts
        ]
        return "\n".join([head, *lines])


def check_module(
    make_module: ModuleFactory,
    data: Data,
    pipeline: str | Mode | Schedule = "fused_sparse_dist",
    *,
    num_steps: int = 12,
    seed: int = 0,
    accelerator: str = "cpu",
    must_overlap: bool = True,
    max_host_syncs: float | None = None,
    trainer_options: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    **strategy_options: Any,
) -> ModuleReport:
    """Train your module in a mode and check that the laws hold for it; `docs/testing.md` explains each.

    Runs fits of new modules from the same seed, on the same batches: two in the mode (on one CPU rank, if it looks up
    early, a third one on simulated streams) and one as a reference, `pipeline="base"`, whose lookups read equally old
    tables; and for law 10 two short fits, in the mode and unsharded. If these two change different weights, the
    unsharded module is trained once more in 64 bits.

    Without a process group this makes a temporary group of one rank. With a process group (for example under torchrun)
    call this on every rank; all ranks raise together. Ranks make the module with one seed and train with several.

    Use few rows (about 100) and a table learning rate of 1 or more: only a row that is looked up again can be stale.

    Args:
        make_module: The class of your module, or a function that returns a new, untrained module.
        data: A LightningDataModule, a data loader, or batches; on several ranks, this rank's batches.
        pipeline: A mode's name, a `Mode`, or a schedule.
        num_steps: Batches to train; fewer if the data has fewer.
        seed: Seeds Python, NumPy and torch before each fit.
        accelerator: `cpu` or `gpu`; on a GPU the kernels must be deterministic.
        must_overlap: Whether a module that runs its own forward breaks a law; otherwise it is only reported.
        max_host_syncs: Number of host syncs that a step may make besides the read of sizes; None: only report them.
        trainer_options: More arguments of `Trainer`.
        progress: Whether rank 0 shows on stderr which fit runs, how far the check is and how much time is left; None:
            if stderr is a terminal, so not where pytest captures it.
        **strategy_options: More arguments of `OverlapEmbeddingStrategy`: `sharding`, `stream`, `fused_optimizer`...

    Raises:
        AssertionError: A law is broken; the message names the law, the step, and the weight or module.
        TypeError: `make_module` is a module; each fit needs a new module, because a fit shards it.
        ValueError: The data has fewer than two batches.
    """
    if isinstance(make_module, nn.Module):
        raise TypeError(
            f"make_module must make a new module for each fit, got a {type(make_module).__name__}: pass its class, or "
            "`lambda: MyModule(...)`."
        )
    mode = resolve_mode(pipeline)
    schedule = mode.schedule
    overlaps = schedule.has_sparse_stages
    first_words.calm_libraries(strategy_options.get("calm_libraries", True))  # before making data and modules
    with process_group(accelerator), ExitStack() as closed:
        datamodule = data if isinstance(data, LightningDataModule) else None
        setting = Setting(make_module, (), datamodule, accelerator, seed, trainer_options or {}, strategy_options)
        setting = replace(setting, batches=_first_batches(setting, data, num_steps))
        num, races = len(setting.batches), overlaps and accelerator == "cpu" and dist.get_world_size() == 1
        num_short = num_short_steps(num, schedule.staleness)
        shown = progress if dist.get_rank() == 0 else False
        bar = closed.enter_context(Progress((3 + races) * num + 2 * num_short, shown))
        setting = replace(setting, also=(bar,))
        first, again = Watched(), Watched(every_state=False, syncs=True)
        with bar.of(f"{schedule.name}, first fit", num):
            fit(setting, pipeline, first)
        with bar.of(f"{schedule.name}, second fit", num):
            fit(setting, pipeline, again)
        at_least = not first.automatic or mode.start_batch > 0 or mode.end_batch is not None
        staleness = schedule.staleness
        lookups = _early_lookups(first, staleness)
        delays = {at: (len(seen if at_least else due), modules) for at, (modules, seen, due) in lookups.items()}
        plain = DelayedLookups(delays if staleness else {})
        with bar.of("base", num):
            fit(setting, "base", plain)
        race = "", "only checked in one CPU process, in modes with early lookups"
        if races:
            with bar.of(f"{schedule.name}, on simulated streams", num):
                race = _race(setting, pipeline)
        with bar.of("unsharded", 2 * num_short):
            as_unsharded = compare_with_unsharded(setting, pipeline, schedule.staleness)
        reference = f"plain training with updates delayed by {staleness}" if staleness else "base"
        syncs, *verdict_of_syncs = _host_syncs(again, max_host_syncs)
        trained = _of_any_rank(first.changed_tables)
        most = first.most_in_flight
        compared = f"{len(first.losses)} losses, {len(first.states[max(first.states)])} weights and states"
        too_many = f"{most} batches in flight, the depth is {first.depth}" if most > first.depth else ""
        others = f"trained {first.batches} of {num}" if first.batches != list(range(num)) else ""
        verdicts = (
            Verdict(f"law 1: equal to {reference}, bit for bit", _first_difference(first, plain), compared),
            Verdict(f"law 2: lookups see updates {staleness} batches late", *_seen(lookups, staleness, at_least)),
            Verdict("law 2: every run alike", _first_difference(again, first), "two fits are the same to the bit"),
            Verdict("law 2: no row is read while it is written", *race),
            Verdict("modules are served from early lookups", *_served(first, must_overlap and overlaps)),
            Verdict("law 5: the same collectives in the same order on all ranks", *_same_order(first)),
            Verdict("law 6: no more batches in flight than the depth", too_many, f"{most} at once"),
            Verdict("nothing left patched or in flight", "; ".join(first.left), "all put back"),
            Verdict("law 7: each batch is trained once, in order", others, f"{num} batches"),
            Verdict("law 9: no host sync but the read of sizes", *verdict_of_syncs),
            Verdict("law 10: computes what the unsharded module computes", *as_unsharded),
            Verdict("law 11: a gradient reaches the tables that are to be trained", *_trained(first, trained)),
        )
        report = ModuleReport(
            schedule,
            num_steps=num,
            num_ranks=dist.get_world_size(),
            verdicts=_together(verdicts),
            early=_shares(first),
            plain=first.plain_reasons if overlaps else {},
            host_syncs=syncs,
            trained=trained,
            split=first.split if schedule.splits_backward else None,
        )
    broken = [f"{verdict.law}: {verdict.problem}" for verdict in report.verdicts if verdict.problem]
    assert not broken, "\n".join([*broken, str(report)])
    return report


def _first_batches(setting: Setting, data: Any, num_steps: int) -> list[Any]:
    if isinstance(data, LightningDataModule):
        if getattr(data, "trainer", None) is None:
            data.trainer = make_trainer(setting, "auto" if dist.get_world_size() == 1 else "ddp")
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    batches = list(itertools.islice(data, num_steps))
    if len(batches) < 2:
        raise ValueError(f"check_module needs two batches or more, got {len(batches)}: use more data.")
    return batches


def _together(verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    everyone = gather_objects([verdict.problem for verdict in verdicts])
    if len(everyone) == 1:
        return verdicts
    return tuple(
        replace(verdict, problem="; ".join(f"rank {rank}: {one}" for rank, one in enumerate(problems) if one))
        for verdict, *problems in zip(verdicts, *everyone, strict=True)
    )


# -- the laws: each function returns the problem, or '', and what was compared --------------------------------------


def _first_difference(mine: Watched, theirs: Watched) -> str:
    """Describe the first step at which the losses, or the states that both have, differ; '' if none does."""
    for step, (one, other) in enumerate(itertools.zip_longest(mine.losses, theirs.losses)):
        problems = []
        if one is None or other is None or not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            problems.append(f"the loss is {_number(one)}, not {_number(other)}")
        if step in mine.states and step in theirs.states:
            ours, others = mine.states[step], theirs.states[step]
            problems += [name for name in ours | others if ours.get(name) != others.get(name)]
        if problems:
            return f"at step {step}: {some(problems, 4)}"
    return ""


def _number(loss: torch.Tensor | None) -> str:
    return "missing" if loss is None else f"{loss.mean().item():.9g}"


_Lookup = tuple[frozenset[str], tuple[int, ...], tuple[int, ...]]
"""Modules with an early lookup of a batch; the batches whose updates it saw; those whose updates it must see."""


def _early_lookups(watched: Watched, staleness: int) -> dict[int, _Lookup]:
    """Return the early lookups of a fit by batch; tables of the dense optimizer are never stale."""
    found = {}
    for batch, seen in sorted(watched.seen.items()):
        modules = frozenset(name for name, early in watched.early.get(batch, {}).items() if early)
        late = 0 if watched.fused.isdisjoint(modules) else staleness
        found[batch] = modules, seen, tuple(update for update in watched.updates if update < batch - late)
    return found


def _seen(lookups: Mapping[int, _Lookup], staleness: int, at_least: bool) -> tuple[str, str]:
    for batch, (modules, seen, expected) in lookups.items():
        wrong = not set(expected) <= set(seen) if at_least else seen != expected
        if modules and wrong:
            problem = (
                f"the lookup of batch {batch} ({', '.join(sorted(modules))}) was issued after the updates of batches "
                f"{list(seen)}; with a staleness of {staleness} it must see {list(expected)}"
            )
            return problem, ""
    return "", f"{len(lookups)} early lookups"


def _race(setting: Setting, pipeline: str | Mode | Schedule) -> tuple[str, str]:
    try:
        fit(setting, pipeline, Watched(every_state=False), races=True)
    except RaceError as err:
        return str(err), ""
    return "", "streams order every operator of another fit"


def _served(watched: Watched, must_overlap: bool) -> tuple[str, str]:
    shares, plain = _shares(watched), watched.plain_reasons
    compared = ", ".join(f"{name} {share:.0%} of batches" for name, share in shares.items())
    compared = compared or "no sharded module was called"
    compared += "".join(f"; {name} runs in its own forward: {reason}" for name, reason in plain.items())
    problems = [
        f"{name!r} ran in its own forward: {plain.get(name, 'its embeddings were not there')}"
        for name, share in shares.items()
        if share < 1
    ]
    return "; ".join(problems) if must_overlap else "", compared


def _shares(watched: Watched) -> dict[str, float]:
    """Return module -> share of batches served early, without the first batch, which shows how modules are fed."""
    names = sorted({name for modules in watched.early.values() for name in modules})
    later = [modules for batch, modules in watched.early.items() if batch > 0]
    return {
        name: sum(modules.get(name, False) for modules in later) / max(1, sum(name in modules for modules in later))
        for name in names
    }


def _of_any_rank(changed: Mapping[str, bool]) -> dict[str, bool]:
    everyone = gather_objects(changed)
    return {name: any(theirs.get(name, False) for theirs in everyone) for name in sorted(set().union(*everyone))}


def _trained(watched: Watched, trained: Mapping[str, bool]) -> tuple[str, str]:
    changed, constant = ([name for name, is_changed in trained.items() if is_changed is what] for what in (True, False))
    compared = f"rows changed of {some(changed)}" if changed else "no sharded table changed"
    compared += f"; no row changed of {some(constant)}" if constant and changed else ""
    return "; ".join(watched.without_gradient.values()), compared


def _same_order(watched: Watched) -> tuple[str, str]:
    for at, issued in enumerate(itertools.zip_longest(*gather_objects(watched.collectives))):
        if len(set(issued)) > 1:
            each = ["missing" if one is None else f"{one[1]} of group {one[2]!r} at batch {one[0]}" for one in issued]
            return f"number {at} is {' and '.join(each)}", ""
    return "", f"{len(watched.collectives)} of the main thread"


def _host_syncs(watched: Watched, most: float | None) -> tuple[dict[str, float], str, str]:
    places, num_reads = Counter[str](), 0
    for sync in watched.syncs:
        if any(frame.filename.endswith(_SIZES) for frame in sync.stack):
            num_reads += 1
        elif not sync.reads_host:
            places[f"{sync.operator} in {sync.source().removeprefix(', ')}"] += 1
    others, num_sizes = {at: num / NUM_WATCHED_STEPS for at, num in places.items()}, num_reads / NUM_WATCHED_STEPS
    listed = ", ".join(f"{place} ({num:g} a step)" for place, num in others.items())
    problems = [f"{num_sizes:g} reads of sizes a step"] if num_sizes > 1 else []
    if most is not None and sum(others.values()) > most:
        problems.append(listed)
    compared = f"{num_sizes:g} a step" + (f"; other syncs, not judged: {listed}" if listed else "")
    return others, "; ".join(problems), compared
