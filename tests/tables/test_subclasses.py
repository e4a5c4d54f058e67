"""Subclasses of TorchRec's collections, which nothing shards, are named; options that name their tables are refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables import check_named_tables, collections_left_whole

from ..support import modules
from ..support.fits import make_trainer
from ..support.ranks import Ranks

SHARDED = {"t0": "table_wise"}
PLAN_OF_OTHERS = ShardingPlan({"own": {"t9": None}})


class OwnBags(EmbeddingBagCollection):
    pass


class ScaledBags(EmbeddingBagCollection):
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        found = super().forward(features)
        return KeyedTensor(found.keys(), found.length_per_key(), 2 * found.values())


class OwnSequences(EmbeddingCollection):
    pass


class OwnProcessed(FeatureProcessedEmbeddingBagCollection):
    pass


class OwnManaged(ManagedCollisionEmbeddingBagCollection):
    pass


def as_kind(kind: type, module: Any) -> Any:
    """Return a collection as one of a subclass, which TorchRec could have made likewise."""
    module.__class__ = kind
    return module


def own_bags(kind: type = OwnBags) -> Any:
    configs = modules.bags(2).embedding_bag_configs()
    for config in configs:
        config.name = f"own_{config.name}"
    return kind(tables=configs)


class Beside(LightningModule):
    """A collection, and one of a subclass, or that one alone."""

    def __init__(self, beside: bool = True) -> None:
        super().__init__()
        self.ebc = modules.bags() if beside else None
        self.own = own_bags()
        self.top = nn.Linear((5 if beside else 2) * modules.DIM, 1)
        self.losses: list[Tensor] = []
        modules.draw_weights(self, 5, 0.5)

    def training_step(self, kjt: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        found = [module(kjt).values() for module in (self.ebc, self.own) if module is not None]
        loss = self.top(torch.cat(found, dim=1)).square().mean()
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, kjt: KeyedJaggedTensor, batch_idx: int) -> None:
        self.training_step(kjt, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The same rule for all tables, by whomever.
        return torch.optim.SGD(modules.own_parameters(self), 0.5)


def _loader() -> DataLoader[Any]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    batches = [modules.plain_ids(torch.Generator().manual_seed(31 * rank + at)) for at in range(6)]
    return DataLoader(batches, batch_size=None)


def train(beside: bool, ddp: bool = False) -> tuple[list[Tensor], list[str]]:
    """Fit and validate; return the losses and what was said of subclasses."""
    module = Beside(beside)
    options: dict[str, Any] = {"fused_optimizer": (torch.optim.SGD, {"lr": 0.5}), "sharding": "row_wise"}
    strategy: Any = DDPStrategy() if ddp else OverlapEmbeddingStrategy(**options, replicate_tables=False)
    with warnings.catch_warnings(record=True, action="always") as said:
        trainer = make_trainer(strategy)
        trainer.fit(module, _loader(), _loader())
        trainer.validate(module, _loader())
    return module.losses, [str(one.message) for one in said if "subclass" in str(one.message)]


@pytest.mark.parametrize("beside", [True, False])
def test_said_once_and_trained_as_by_the_dense_optimizer(two_ranks: Ranks, beside: bool) -> None:
    expected = two_ranks.run(train, beside, True)
    found = two_ranks.run(train, beside)
    for (mine, _), (theirs, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs))
    (_, [said]), (_, said_by_another) = found
    assert said_by_another == []
    for part in ("own is a OwnBags, a subclass of EmbeddingBagCollection", "own_t0, own_t1", "sharding=", "Make it a"):
        assert part in said


def _model(**parts: nn.Module) -> nn.Module:
    return nn.ModuleDict(parts)


def test_sequences_are_named_too() -> None:
    [found] = collections_left_whole(_model(ec=as_kind(OwnSequences, modules.sequences(2)), ebc=modules.bags()))
    assert (found.name, found.tables) == ("ec", ("t0", "t1"))
    assert "a subclass of EmbeddingCollection" in found.message


def _processed(inner: Any) -> nn.Module:
    module: Any = modules.position_weighted()
    module._embedding_bag_collection = inner
    return module


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: as_kind(OwnProcessed, modules.position_weighted()),
            r"fp is a OwnProcessed, a subclass of FeatureProcessedEmbeddingBagCollection\..* would shard "
            r"fp\._embedding_bag_collection alone",
        ),
        (lambda: as_kind(OwnManaged, modules.managed_bags()), r"fp is a OwnManaged, .* fp\._embedding_module alone"),
        (
            lambda: _processed(as_kind(ScaledBags, modules.bags(weighted=True))),
            r"_embedding_bag_collection is a ScaledBags, .* forward of its own, inside of fp",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collections_left_whole(_model(fp=build()))


def test_a_subclass_without_a_forward_of_its_own_inside_of_another_collection_is_sharded() -> None:
    assert collections_left_whole(_model(fp=_processed(as_kind(OwnBags, modules.bags(weighted=True))))) == []


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ({"own": own_bags}, {"sharding": {"own_t0": "row_wise"}}, "sharding: table 'own_t0' .* own is a OwnBags"),
        (
            {"own": own_bags, "ebc": modules.bags},
            {"replicate_tables": ["own_t1"]},
            "replicate_tables: table 'own_t1' .* own is a OwnBags",
        ),
        ({"top": lambda: nn.Linear(1, 1)}, {"sharding": SHARDED}, "sharding: table 't0' .* no table that is sharded"),
        ({"ebc": modules.bags}, {"sharding": {"t00": "row_wise"}}, "sharding: unknown table 't00'. Did you mean"),
        ({"own": own_bags, "ebc": modules.bags}, {"sharding": PLAN_OF_OTHERS}, "module 'own' .* own is a OwnBags"),
        ({"ebc": modules.bags}, {"sharding": PLAN_OF_OTHERS}, "sharding: unknown module 'own'.* Known: ebc"),
        (
            {"ebc": modules.bags},
            {"sharding": ShardingPlan({"ebc": {"t9": None}})},
            "sharding, module 'ebc': unknown table 't9'",
        ),
    ],
)
def test_an_option_that_names_what_nothing_shards_is_an_error(
    parts: dict[str, Callable[[], nn.Module]], options: dict[str, Any], message: str
) -> None:
    model = _model(**{name: build() for name, build in parts.items()})
    with pytest.raises(ValueError, match=message):
        check_named_tables(model, options.get("sharding"), options.get("replicate_tables"))


def test_names_of_tables_that_are_sharded_pass() -> None:
    model = _model(ebc=modules.bags(), own=own_bags())
    for sharding in (None, "row_wise", SHARDED, ShardingPlan({"ebc": {"t0": None}})):
        check_named_tables(model, sharding, None)
    check_named_tables(model, None, ["t1"])
    check_named_tables(nn.Linear(1, 1), "row_wise", 100)
