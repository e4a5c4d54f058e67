"""Random fits: what is drawn. Imports nothing of the package under test."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

EXACT = (
    *("fused_sparse_dist", "split_backward", "sparse_dist", "fused_sparse_dist_after_optimizer", "prefetch"),
    *("auto", "base"),
)
STALE = ("semi_sync", "semi_sync_deferred", "async_lookup")
ORDERED = ("values", "to_dict")  # uses that see the order of columns
Choose = Callable[[Sequence[Any]], Any]  # takes one of several


@dataclass(frozen=True)
class Table:
    name: str
    features: tuple[str, ...]
    dim: int
    sharding: str
    place: int  # its rank, or that of its first shard
    pooling: str = "sum"


@dataclass(frozen=True)
class Part:
    name: str
    sequence: bool
    kjt: str
    tables: tuple[Table, ...]
    use: str = "by_name"
    calls: str = "once"
    checkpoint: str = ""

    @property
    def keys(self) -> list[str]:
        """Names of its answers in the order of the configs."""
        owners = [(table, feature) for table in self.tables for feature in table.features]
        read = [feature for _, feature in owners]
        return [name if read.count(name) == 1 else f"{name}@{table.name}" for table, name in owners]

    @property
    def width(self) -> int:
        return sum(table.dim * len(table.features) for table in self.tables)

    def num_calls(self, batch: int) -> int:
        return {"once": 1, "twice": 2, "skipped": 0}[self.calls] if batch % 4 == 2 else 1


@dataclass(frozen=True)
class Fit:
    seed: int
    num_ranks: int
    parts: tuple[Part, ...]
    pipeline: str
    options: tuple[tuple[str, Any], ...] = ()
    stream: str = "data_dist"
    weighted: bool = False
    layout: str = "dict"
    sizes: str = "alike"
    empty: bool = False
    change: str = ""
    optimizer: str = "sgd"
    num_batches: int = 7
    epochs: int = 1
    max_steps: int = -1
    accumulate: int = 1
    clip: float | None = None
    manual: bool = False
    validate_every: int = 0
    skips_steps: bool = False
    skips_losses: bool = False
    late_rank: int | None = None
    num_hosts: int = 1
    dropout: float = 0.0
    shuffled: bool = False

    @property
    def stale(self) -> bool:
        return self.pipeline in STALE

    @property
    def staleness(self) -> int:
        return int(dict(self.options).get("staleness", 2 if self.pipeline == "async_lookup" else self.stale))

    @property
    def delays_are_defined(self) -> bool:
        """Whether a loop can say which updates each lookup of a stale mode sees."""
        return (
            not self.manual
            and self.layout != "either"
            and not self.change
            and not {"start_batch", "end_batch"} & dict(self.options).keys()
            and all(part.calls == "once" and not part.checkpoint for part in self.parts)
            and all(table.sharding != "data_parallel" for part in self.parts for table in part.tables)
        )

    @property
    def is_plain_arithmetic(self) -> bool:
        """Whether an unsharded loop trains the same numbers, except for rounding."""
        # A kernel updates for each call. RowWiseAdagrad's state is a mean over the columns of a shard.
        once = all(part.calls != "twice" for part in self.parts)
        columns = any(table.sharding == "column_wise" for part in self.parts for table in part.tables)
        by_optimizer = {"sgd": True, "adagrad": once, "rowwise": once and not columns}
        return not self.stale and by_optimizer[self.optimizer]

    @property
    def kjts(self) -> dict[str, tuple[str, ...]]:
        read: dict[str, set[str]] = {}
        for part in self.parts:
            read.setdefault(part.kjt, set()).update(*(table.features for table in part.tables))
        return {name: tuple(sorted(features)) for name, features in sorted(read.items())}


def of_seed(seed: int, without: Collection[str] = ()) -> Fit:
    """Draw a fit without some choices; the seed is also that of its weights and data."""
    choose: Choose = Random(seed).choice

    def pick(*choices: Any) -> Any:
        return choose([choice for choice in choices if choice not in without or not isinstance(choice, str)])

    num_ranks = choose([2, 1, 2])
    pipeline = pick(*EXACT[:-1], *STALE, EXACT[-1])
    weighted = choose([False, False, True])
    change = pick("", "", "", "ids", *(["weights"] if weighted else []), "made")
    parts = tuple(_draw_part(pick, choose, at, weighted) for at in range(choose([1, 1, 2, 3])))
    manual = choose([False] * 4 + [True])
    accumulate = 1 if manual else choose([1, 1, 2, 3])
    # Lightning refuses a step without a loss above one rank, gloo a reduce-scatter of batches that differ in size.
    skips = "" if manual or accumulate > 1 else pick("", "", "", "steps", *(["losses"] if num_ranks == 1 else []))
    scatters = num_ranks > 1 and any(
        table.sharding == "row_wise" for part in parts if not part.sequence for table in part.tables
    )
    return Fit(
        seed=seed,
        num_ranks=num_ranks,
        parts=parts,
        pipeline=pipeline,
        options=_draw_options(choose, pipeline),
        stream=choose(["data_dist", "dedicated", "current"]),
        weighted=weighted,
        layout=pick("dict", "nested", "either"),
        sizes="alike" if scatters else choose(["alike", "by_rank"]),
        empty=choose([False, True]),
        change=change,
        optimizer=choose(["sgd", "adagrad", "rowwise"]),
        num_batches=choose([7, 8, 5]),
        epochs=choose([1, 1, 2]),
        max_steps=-1 if skips else choose([-1, -1, 5]),
        accumulate=accumulate,
        clip=None if manual else choose([None, None, 0.3]),
        manual=manual,
        validate_every=choose([0, 0, 3]),
        skips_steps=skips == "steps",
        skips_losses=skips == "losses",
        late_rank=choose([None, 0, 1]) if num_ranks > 1 else None,
        num_hosts=choose([1, 2]) if num_ranks > 1 else 1,
        dropout=choose([0.0, 0.0, 0.3]),
        shuffled=choose([False, False, True]),
    )


def _draw_part(pick: Choose, choose: Choose, at: int, weighted: bool) -> Part:
    kjt = choose(["x", "x", "y"])
    sequence = not (weighted and kjt == "x") and choose([False, False, True])
    dim = choose([4, 8])
    shardings = ["table_wise", "column_wise", "row_wise", *(["data_parallel"] if not sequence else [])]
    features = [("f0",), ("f1",), ("f0", "f1"), ("f2", "f3"), ("f3", "f0")]

    def draw_table(number: int) -> Table:
        own_dim = dim if sequence else choose([4, 8])
        pooling = choose(["sum", "mean"])
        if sequence or (weighted and kjt == "x"):  # an unsharded collection refuses means of weighted ids
            pooling = "sum"
        return Table(f"t{at}{number}", choose(features), own_dim, choose(shardings), choose([0, 1]), pooling)

    tables = tuple(draw_table(number) for number in range(choose([2, 1, 3])))
    # TorchRec wraps copies in DistributedDataParallel with a static graph: plain loops fail where calls differ.
    static = any(table.sharding == "data_parallel" for table in tables)
    uses = ["by_name", *ORDERED] if static else ["by_name", *ORDERED, "part", "detached", "no_grad", "statistic"]
    rest = ["", "", ""] if static else ["", "", "", "checkpoint", "checkpoint_reentrant"]
    use, again = pick(*uses), pick(*rest)
    calls = "once" if static or again else pick("once", "once", "once", "twice", "skipped")
    return Part(f"c{at}", sequence, kjt, tables, use, calls, again)


def _draw_options(choose: Choose, pipeline: str) -> tuple[tuple[str, Any], ...]:
    if pipeline not in STALE:
        return ()
    own = (("staleness", choose([1, 2, 3])),) if pipeline == "async_lookup" else ()
    return (*own, ("start_batch", 2), ("end_batch", 5)) if choose([False, False, True]) else own
