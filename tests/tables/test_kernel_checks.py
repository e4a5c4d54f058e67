"""What FBGEMM's kernels lack is refused by table and name on every rank, before any table is sharded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor
from torchrec.distributed import embedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.types import DataType

from lightning_overlap import MODES, OverlapEmbeddingStrategy
from lightning_overlap.tables.kernel_checks import check_kernels_of_sharded

from ..support import modules
from ..support.fits import make_trainer
from ..support.ranks import Ranks

WITH_DENSE_KERNEL = "the plan's"


class OneCollection(LightningModule):
    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.tables = collection
        self.of_sequences = isinstance(collection, torchrec.EmbeddingCollection)
        self.of_sequences |= isinstance(collection, ManagedCollisionEmbeddingCollection)
        self.top = nn.Linear(1, 1)
        self.num_steps = 0

    def predict_step(self, kjt: KeyedJaggedTensor, batch_idx: int) -> None:
        self.tables(kjt)

    def training_step(self, kjt: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        answer = self.tables(kjt)
        columns = answer[0] if isinstance(answer, tuple) else answer
        column = columns["f0"]
        rows = column.values() if self.of_sequences else column
        return self.top(rows.sum(dim=1, keepdim=True)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.top.parameters(), 0.1)


def _config(kind: type, name: str, dim: int = 8, data_type: DataType = DataType.FP32, rows: int = 40) -> Any:
    feature = name.replace("t", "f")
    return kind(name=name, feature_names=[feature], num_embeddings=rows, embedding_dim=dim, data_type=data_type)


def bags(dim: int = 8, data_type: DataType = DataType.FP32, rows: int = 40) -> nn.Module:
    kind = torchrec.EmbeddingBagConfig
    return torchrec.EmbeddingBagCollection(tables=[_config(kind, "t0", dim, data_type, rows), _config(kind, "t1")])


def sequences(dim: int = 8, data_type: DataType = DataType.FP32, rows: tuple[int, int] = (40, 40)) -> nn.Module:
    configs = [_config(torchrec.EmbeddingConfig, f"t{at}", dim, data_type, rows[at]) for at in range(2)]
    return torchrec.EmbeddingCollection(tables=configs)


@contextmanager
def _deduplicating(wanted: bool) -> Iterator[None]:
    embedding.EC_INDEX_DEDUP = wanted
    try:
        yield
    finally:
        embedding.EC_INDEX_DEDUP = False


BUILD: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "six_columns": (lambda: bags(6), "table_wise"),
    "six_columns_by_rows": (lambda: bags(6), {"t0": "row_wise"}),
    "six_columns_of_sequences": (lambda: sequences(6), "table_wise"),
    "six_columns_whole": (lambda: bags(6), {"t0": "data_parallel", "t1": "table_wise"}),
    "bf16": (lambda: bags(data_type=DataType.BF16), "table_wise"),
    "bf16_whole": (lambda: bags(data_type=DataType.BF16), {"t0": "data_parallel"}),
    "bf16_sequences": (lambda: sequences(data_type=DataType.BF16), "row_wise"),
    "fp16": (lambda: bags(data_type=DataType.FP16), "table_wise"),
    "unique_ids": (sequences, "table_wise"),
    "one_row": (lambda: bags(rows=1), {"t0": "row_wise", "t1": "table_wise"}),
    "one_row_of_another_type": (lambda: bags(data_type=DataType.FP16, rows=1), "row_wise"),
    "one_row_of_sequences": (lambda: sequences(rows=(40, 1)), {"t0": "table_wise", "t1": "row_wise"}),
    "one_row_beside_others": (lambda: bags(rows=1), "row_wise"),
    "one_row_beside_other_sequences": (lambda: sequences(rows=(40, 1)), "row_wise"),
    "managed_by_the_planner": (modules.managed_bags, None),
    "managed_dense": (modules.managed_bags, WITH_DENSE_KERNEL),
    "managed_sequences_dense": (modules.managed_sequences, WITH_DENSE_KERNEL),
}


def attempt(name: str) -> str:
    """Return the error of a fit; '' if there is none."""
    build, sharding = BUILD[name]
    module = OneCollection(build())
    if sharding == WITH_DENSE_KERNEL:
        sharding = modules.plan_by_place(module, lambda _: lambda table: row_wise())
    if name == "six_columns_whole":  # the dense optimizer trains it
        module.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]
            [*module.top.parameters(), module.tables.embedding_bags["t0"].weight], 0.1
        )
    strategy = OverlapEmbeddingStrategy(
        sharding=sharding, fused_optimizer=(torch.optim.SGD, {"lr": 0.1}), replicate_tables=False
    )
    ids = {"num_ids": 1} if "one_row" in name else {}
    batches = [modules.plain_ids(torch.Generator().manual_seed(at), **ids) for at in range(3)]
    with _deduplicating(name == "unique_ids"):
        try:
            make_trainer(strategy).fit(module, DataLoader(batches, batch_size=None))
        except ValueError as err:
            return str(err)
    return ""


REFUSED = {
    "six_columns": ["tables.t0 (a shard with 6 columns): FBGEMM's fused kernels take multiples of 4", "data_parallel"],
    "six_columns_by_rows": ["tables.t0 (a shard with 6 columns)"],
    "six_columns_of_sequences": ["tables.t0 (a shard with 6 columns), tables.t1 (a shard with 6 columns)"],
    "bf16": ["tables.t0 (BF16): on a CPU FBGEMM looks up tables of DataType.FP32 and DataType.FP16 only"],
    "bf16_whole": ["tables.t0 (BF16)"],
    "bf16_sequences": ["tables.t0 (BF16), tables.t1 (BF16)"],
    "unique_ids": ["tables.t0, tables.t1: set_ec_index_dedup(True)", "Call set_ec_index_dedup(False) before fit"],
    "one_row": ["tables.t0 (1 rows, none on rank 1): too few rows", "sharding={'t0': 'table_wise'}"],
    "one_row_of_another_type": ["tables.t0 (1 rows, none on rank 1)"],
    "one_row_of_sequences": ["tables.t1 (1 rows, none on rank 1)", "sharding={'t1': 'table_wise'}"],
    "managed_by_the_planner": ["planner rejects most modules like tables", "row_wise(compute_kernel='fused')"],
    "managed_dense": ["tables.t0, tables.t1: the plan gives", "row_wise(compute_kernel='fused')"],
    "managed_sequences_dense": ["tables.t0, tables.t1: the plan gives"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(two_ranks: Ranks, name: str) -> None:
    for message in two_ranks.run(attempt, name):
        assert [part for part in REFUSED[name] if part not in message] == [], message
    # No advice that would be refused as well.
    assert ("data_parallel" in message) == (name in ("six_columns", "six_columns_by_rows"))


@pytest.mark.parametrize(
    "name", ["six_columns_whole", "fp16", "one_row_beside_others", "one_row_beside_other_sequences"]
)
def test_what_kernels_can_do_is_trained(two_ranks: Ranks, name: str) -> None:
    assert two_ranks.run(attempt, name) == ["", ""]


MANAGED = {"bags": modules.managed_bags, "sequences": modules.managed_sequences}


def fits_of_managed(kind: str, optimizer: type[torch.optim.Optimizer], applied: bool) -> list[tuple[str, int]]:
    """Return the error, and the steps before it, of a fit, and of a fit after an evaluation has sharded the module."""
    told = []
    for evaluates in (False, True):
        module = OneCollection(MANAGED[kind]())
        if applied:
            for name, weight in module.tables.named_parameters():
                if name.endswith("weight"):
                    _apply_optimizer_in_backward(optimizer, [weight], {"lr": 0.1})
        plan = modules.plan_by_place(module, lambda _: modules.rows)
        strategy = OverlapEmbeddingStrategy(
            sharding=plan, fused_optimizer=None if applied else (optimizer, {"lr": 0.1})
        )
        batches = DataLoader([modules.wide_ids(torch.Generator().manual_seed(at)) for at in range(8)], batch_size=None)
        trainer = make_trainer(strategy)
        if evaluates:
            trainer.predict(module, batches)
        try:
            trainer.fit(module, batches)
            told.append(("", 8))
        except ValueError as err:
            told.append((str(err), module.num_steps))
    return told


@pytest.mark.parametrize("kind", MANAGED)
@pytest.mark.parametrize("applied", [False, True], ids=["fused_optimizer", "applied"])
def test_rows_whose_state_no_kernel_resets_are_not_trained(two_ranks: Ranks, kind: str, applied: bool) -> None:
    """Before the first step, on a CPU; what needs no reset of a state is trained, and evaluations work."""
    for told in two_ranks.run(fits_of_managed, kind, RowWiseAdagrad, applied):
        for message, num_steps in told:
            assert "tables.t0, tables.t1: RowWiseAdagrad cannot train tables of managed collision modules" in message
            assert num_steps == 0
    for other in (torch.optim.SGD, torch.optim.Adagrad):
        assert two_ranks.run(fits_of_managed, kind, other, applied) == [[("", 8)] * 2] * 2


def _sharded_by_hand(collection: nn.Module, sharder: Any, kernel: str | None) -> str:
    model = nn.Module()
    model.tables = collection
    plan = modules.plan_by_place(model, lambda _: lambda table: row_wise(compute_kernel=kernel))
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    DistributedModelParallel(model, env, torch.device("cpu"), plan, [sharder], init_data_parallel=False)
    try:
        check_kernels_of_sharded(model, torch.device("cpu"))
    except ValueError as err:
        return str(err)
    return ""


def sharded_by_hand() -> list[str]:
    fused = "fused"
    return [
        _sharded_by_hand(sequences(), EmbeddingCollectionSharder(use_index_dedup=True), fused),
        _sharded_by_hand(sequences(data_type=DataType.BF16), EmbeddingCollectionSharder(), fused),
        _sharded_by_hand(modules.managed_bags(), ManagedCollisionEmbeddingBagCollectionSharder(), "dense"),
        _sharded_by_hand(modules.managed_bags(), ManagedCollisionEmbeddingBagCollectionSharder(), fused),
    ]


def test_modules_that_their_user_has_sharded_are_checked_too(two_ranks: Ranks) -> None:
    for unique, bf16, dense, fused in two_ranks.run(sharded_by_hand):
        assert "tables.t0, tables.t1: set_ec_index_dedup(True), or use_index_dedup=True of a sharder" in unique
        assert "tables.t0 (BF16), tables.t1 (BF16)" in bf16
        assert "tables.t0, tables.t1: the plan gives" in dense
        assert fused == ""


class _Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"].detach()))


def losses_of_few_rows(pipelines: list[str], of_sequences: bool) -> dict[str, list[float]]:
    """Train a table of 2 rows beside a larger one: by rows in each mode, and whole on one rank."""
    told: dict[str, list[float]] = {}
    for pipeline in ["table_wise", *pipelines]:
        torch.manual_seed(0)
        module = OneCollection(sequences(rows=(2, 40)) if of_sequences else bags(rows=2))
        sharding, mode = ("table_wise", "base") if pipeline == "table_wise" else ("row_wise", pipeline)
        strategy = OverlapEmbeddingStrategy(
            mode, sharding=sharding, fused_optimizer=(torch.optim.SGD, {"lr": 1.0}), replicate_tables=False
        )
        draw = torch.Generator().manual_seed(dist.get_rank())
        batches, losses = [modules.plain_ids(draw, num_ids=2) for _ in range(8)], _Losses()
        make_trainer(strategy, callbacks=[losses]).fit(module, DataLoader(batches, batch_size=None))
        told[pipeline] = losses.losses
    return told


@pytest.mark.parametrize("of_sequences", [False, True], ids=["bags", "sequences"])
def test_a_rank_without_rows_of_a_table(get_ranks: Any, of_sequences: bool) -> None:
    """Of three ranks the last has none; its kernel has rows of another table. All get what whole tables give."""
    exact = [name for name, mode in MODES.items() if mode.staleness == 0]
    for told in get_ranks(3).run(losses_of_few_rows, exact, of_sequences):
        assert len(set(told["base"])) == 8
        assert [name for name in exact if told[name] != told["base"]] == []
        assert told["base"] == pytest.approx(told["table_wise"], rel=1e-5)
