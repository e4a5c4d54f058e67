"""Combinations of features: what is drawn, in pairs and triples, with a kind of module and a place to resume from.

`python -m tests.laws.combinations --num 200`, `--seed 17` to replay one that fails.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from lightning_overlap import MODES

from ..tables.supported_modules import CASES, OTHERS

Feature = tuple[str, Any]
KINDS = (*OTHERS, *CASES)
EXACT = tuple(name for name, mode in MODES.items() if not mode.staleness)
PLACES = ("on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end")
FORMATS = (
    *("full", "sharded", "sharded, asynchronous", "incremental", "incremental, asynchronous"),
    "incremental, renewed",
)

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "pipeline": EXACT,
    "stream": ("current", "dedicated"),
    "rate_per_table": (True,),
    "release_features": (True,),
    "copy_in_place": (True,),
    "max_queued_steps": (None, 1),
    "out_of_range_ids": ("warning", "fbgemm"),
    "observer": (True,),
    "checkpoint_format": ("full", "sharded", "incremental"),
    "async_checkpoint": (True,),
    "most_increments": (0, 10),
    "calm_libraries": (False,),
    "timeout": (50.0,),
    "sharding": ("table_wise", "row_wise", "column_wise", "data_parallel"),
    "fused_optimizer": ("SGD", "Adagrad", "RowWiseAdagrad"),
    "quantized_comms": ("bf16", "fp16"),
    "replicate_tables": (False, 1000, ("t0",)),
    "nonfinite": ("skip", "error"),
    "balance": (True,),
}
"""Options of the strategy, with values that are not their defaults."""
OF_MODE: Mapping[str, tuple[Any, ...]] = {
    "name": ("semi_sync", "async_lookup"),
    "staleness": (1, 3),
    "defer_update": (True,),
    "start_batch": (2,),
    "end_batch": (5,),
}
"""Options of a mode."""
AROUND: Mapping[str, tuple[Any, ...]] = {
    "frozen": (True,),
    "averages": (True,),
    "deltas": (1, 3),
    "monitor": (True,),
    "validation": (3,),
    "compiled": (True,),
    "accumulate": (2,),
    "manual": (True,),
    "rates": (True,),
    "none": (3,),
    "uneven": (True,),
    "bad_loss": (True,),
}
"""What is around the strategy: tables, callbacks, the Trainer's options, optimization, data."""
FEATURES = {**OPTIONS, **OF_MODE, **AROUND}
ALTERS = {
    *("sharding", "fused_optimizer", "quantized_comms", "replicate_tables", "balance", "name", "staleness"),
    *("start_batch", "end_batch", "frozen", "accumulate", "manual", "rates", "none", "uneven", "bad_loss"),
}
"""Features that change numbers, so the reference has them, too."""
BESIDE = {"averages", "validation"}
"""Features whose own numbers are compared: the reference has them as well."""
NOT_TOGETHER: tuple[tuple[set[str], set[str]], ...] = (
    ({"manual"}, {"accumulate"}),  # refused by Lightning, as with any strategy
    ({"accumulate"}, {"manual"}),
    ({"pipeline"}, {*OF_MODE}),
    ({*OF_MODE}, {"pipeline"}),
)
"""Features of the first set and of the second one are not drawn together."""


@dataclass(frozen=True)
class Combination:
    seed: int
    kind: str
    features: tuple[Feature, ...]
    stop: tuple[str, int, str] | None = None  # the hook that saves, at which time, in which format
    num_ranks: int = 2
    num_hosts: int = 1

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.features).get(name, default)

    def has(self, name: str) -> bool:
        return name in dict(self.features)

    @property
    def is_planned(self) -> bool:
        """Whether a plan places each table; else all are fused."""
        return not (self.has("sharding") or self.has("replicate_tables"))

    @property
    def stale(self) -> bool:
        return any(self.has(name) for name in OF_MODE)

    @property
    def reference(self) -> "Combination":
        """The same without what changes no numbers, in `base`; a stale mode stays, but not deferred."""
        kept = tuple(one for one in self.features if one[0] in ALTERS | BESIDE)
        return dataclasses.replace(self, features=kept, stop=None)


def cells(seed: int) -> list[Combination]:
    """Return combinations of one feature: each value of each, with a drawn kind; all kinds come equally often."""
    random = Random(seed)
    values = [(name, value) for name, values in FEATURES.items() for value in values]
    kinds = [*KINDS] * (-(-len(values) // len(KINDS)))
    random.shuffle(kinds)
    return [
        Combination(seed, kind, _completed({name: value})) for (name, value), kind in zip(values, kinds, strict=False)
    ]


def of_seed(seed: int) -> Combination:
    """Draw a kind of module and two or three features that can be together."""
    random = Random(seed)
    features: dict[str, Any] = {}
    for _ in range(random.choice((2, 3, 3))):
        names = [name for name in FEATURES if name not in features and _fits(name, features)]
        name = random.choice(names)
        features[name] = random.choice(FEATURES[name])
    stop = None
    if random.random() < 0.6:
        places = PLACES if "validation" in features else (PLACES[0], PLACES[3])
        place = random.choice(places)
        stop = place, random.randint(1, 2 if place != PLACES[0] else 6), random.choice(FORMATS)
    return Combination(seed, random.choice(KINDS), _completed(features), stop)


def _fits(name: str, features: Mapping[str, Any]) -> bool:
    return not any(name in some and features.keys() & others for some, others in NOT_TOGETHER)


def _completed(features: dict[str, Any]) -> tuple[Feature, ...]:
    """Add what an option needs: one of a stale mode that mode, `bad_loss` what is done about it."""
    if features.keys() & OF_MODE:
        features.setdefault("name", "async_lookup" if "staleness" in features else "semi_sync")
    if features.get("name") == "semi_sync":
        features.pop("staleness", None)
    if "bad_loss" in features:
        features["nonfinite"] = "skip"
    return tuple(sorted(features.items()))


def simpler(found: Combination) -> Iterator[Combination]:
    for at in range(len(found.features)):
        fewer = dict(found.features[:at] + found.features[at + 1 :])
        yield dataclasses.replace(found, features=_completed(fewer))
    if found.stop is not None:
        yield dataclasses.replace(found, stop=None)
        yield dataclasses.replace(found, stop=(found.stop[0], found.stop[1], "sharded"))
    if found.kind != KINDS[0]:
        yield dataclasses.replace(found, kind=KINDS[0])
    if found.num_ranks != 1:
        yield dataclasses.replace(found, num_ranks=1)


def main() -> int:
    from .combined_fits import REFUSED, differences  # which import this file
    from .fuzz import Runner, parse_seeds, search

    seeds, _ = parse_seeds(__doc__)
    return search(seeds, of_seed, Runner(differences, REFUSED), simpler, "make combinations", REFUSED)


if __name__ == "__main__":
    sys.exit(main())
