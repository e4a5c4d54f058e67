"""Values that one rank alone has loaded, and what all ranks begin with. Functions that ranks run."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.distributed import alike_values
from lightning_overlap.tables.shards import kernel_shards, table_names

from ..support.cases import dense_optimizer, summed
from ..support.fits import make_trainer
from .supported_modules import Batches, KindModel, dense_kernels_without_pooling, make_plan

HOOKS = ("__init__", "setup", "configure_model", "data module", "callback")
ENTRIES = ("fit", "validate", "test", "predict")
FIRST = {"fit": "on_train_start", **{name: f"on_{name}_start" for name in ("test", "predict")}} | {
    "validate": "on_validation_start"
}


BY_USER = "other."
"""What names begin with of the module of `FOREIGN` that its user has sharded, and loads shard by shard."""


class _Watch(Callback):
    """Loads in its `setup` if asked, and compares as the first step is about to begin."""

    def __init__(self, load: Callable[[], None] | None, entry: str, expected: Mapping[str, Tensor]) -> None:
        self.found: list[str] | None = None
        self._load, self._expected = load, expected
        setattr(self, FIRST[entry], self._compare)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if self._load is not None:
            self._load()

    def _compare(self, trainer: Any, module: LightningModule) -> None:
        self.found = differing(module, self._expected)
        if isinstance(module, Tables):
            for path, name in table_names(module).items():
                self.found += _differs(f"table {name}", trainer.strategy.table(name), self._expected[path])


def differing(module: nn.Module, expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of this rank's shards and whole tensors whose values are not these, by the unsharded names."""
    found, seen = [], set()
    for kernel in kernel_shards(module):
        for shard in kernel.shards:
            if shard.name.startswith(BY_USER):
                continue
            rows, columns = shard.weight.shape
            whole = expected[shard.name][shard.first_row :][:rows, shard.first_column :][:, :columns]
            found += _differs(shard.name, shard.weight, whole)
            seen.add(shard.name)
    of_module = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in of_module.items():
        # Managed collisions begin without ids, each rank with its own part.
        is_foreign = name.startswith(BY_USER)
        is_whole = name in expected and name not in seen and value.shape == expected[name].shape
        if is_whole and not is_foreign and "managed" not in name:
            found += _differs(name, value, expected[name])
    return found


def _differs(name: str, actual: Tensor, expected: Tensor) -> list[str]:
    return [] if torch.equal(actual.detach(), expected.detach()) else [name]


def redraw(module: nn.Module, seed: int) -> None:
    """Draw every weight and every buffer of floating numbers anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, value in sorted([*module.named_parameters(), *module.named_buffers()]):
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in [*module.named_parameters(), *module.named_buffers()]}


def first_values(module: LightningModule, data: Any, strategy: Any, entry: str, hook: str) -> list[str]:
    """Run with other values on each rank, where rank 0 loads some in a hook; return what is not as rank 0 has it."""
    redraw(module, 5)
    expected = values_of(module)
    redraw(module, 100 + dist.get_rank())

    def load(**kwargs: Any) -> None:
        if dist.get_rank() == 0:
            redraw(module, 5)

    if hook == "__init__":
        load()
    elif hook == "data module":
        data.setup = load
    elif hook != "callback":
        setattr(module, hook, load)
    watch = _Watch(load if hook == "callback" else None, entry, expected)
    trainer = make_trainer(strategy, callbacks=[watch], num_sanity_val_steps=0, limit_train_batches=1)
    with warnings.catch_warnings(action="ignore"):
        getattr(trainer, entry)(module, datamodule=data)
    assert watch.found is not None
    return watch.found


class _KindData(Batches):
    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    predict_dataloader = test_dataloader


class _Kind(KindModel):
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)

    predict_step = test_step


@dense_kernels_without_pooling()
def of_kinds(cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], list[str]]:
    """Return what differs, by kind of module, entry and hook."""
    found = {}
    for name, entry, hook in cases:
        module = _Kind(name)
        strategy = OverlapEmbeddingStrategy(sharding=make_plan(module))
        found[name, entry, hook] = first_values(module, _KindData(module.case, 1), strategy, entry, hook)
    return found


NUM_IDS = 17  # of the smallest table


class Tables(LightningModule):
    """Tables of one collection, each with its rows, width and dtype, and a dense part that may be frozen."""

    def __init__(self, tables: list[dict[str, Any]], *, sequences: bool, frozen: bool) -> None:
        super().__init__()
        kind = EmbeddingConfig if sequences else EmbeddingBagConfig
        configs = [
            kind(
                name=f"t{number}",
                feature_names=[f"f{number}"],
                num_embeddings=table["rows"],
                embedding_dim=table["dim"],
                data_type=DataType.FP16 if table["half"] else DataType.FP32,
            )
            for number, table in enumerate(tables)
        ]
        self.sequences, self.num_tables = sequences, len(tables)
        self.ebc = EmbeddingCollection(tables=configs) if sequences else EmbeddingBagCollection(tables=configs)
        self.top = nn.Sequential(nn.Linear(sum(table["dim"] for table in tables), 4), nn.BatchNorm1d(4))
        self.top.requires_grad_(not frozen)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        out = self.ebc(kjt)
        columns = [summed(one) if self.sequences else one for one in (out[f"f{i}"] for i in range(self.num_tables))]
        return self.top(torch.cat([one.float() for one in columns], 1)).square().mean()

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        return self(batch)

    def validation_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Any:
        return self(batch)

    test_step = predict_step = validation_step

    def loader(self) -> DataLoader:
        num = self.num_tables
        lengths = torch.full((num * 4,), 2)
        kjt = KeyedJaggedTensor([f"f{i}" for i in range(num)], torch.arange(num * 8) % NUM_IDS, lengths=lengths)
        return DataLoader([kjt], batch_size=None)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

    def configure_optimizers(self) -> Any:
        parameters = [one for one in self.parameters() if one.requires_grad]
        return dense_optimizer(self) if parameters else None


def of_shardings(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Return what differs; pieces are so small that a table has several, some of them of fewer rows."""
    found = []
    for case in cases:
        module = Tables(case["tables"], sequences=case["sequences"], frozen=case["frozen"])
        kinds = {f"t{number}": table["sharding"] for number, table in enumerate(case["tables"])}
        strategy = OverlapEmbeddingStrategy(
            case["pipeline"],
            sharding={name: kind for name, kind in kinds.items() if kind != "replicated"},
            replicate_tables=[name for name, kind in kinds.items() if kind == "replicated"] or False,
            fused_optimizer=(torch.optim.SGD, {"lr": 0.1}),
        )
        with mock.patch.object(alike_values, "PIECE_BYTES", 200):
            found.append(first_values(module, None, strategy, case["entry"], case["hook"]))
    return found
