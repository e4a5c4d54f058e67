"""Weights that a user sets before a fit shards them, and loads into a module after that. Functions that ranks run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from lightning_overlap import OverlapEmbeddingStrategy

from ..plugin.table_reads import Fit, Net, make_fit
from ..support.fits import make_trainer
from .part_reads import key_of


def new_values(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), dtype=like.dtype).view_as(like)


def loads(fit: Fit, hook: str) -> list[str]:
    """Load each table of a fit by itself, as it is, in a hook; return what is not as it has to be."""
    wrong: list[str] = []
    keys = [key_of(fit, at) for at in range(len(fit.tables))]

    def load(trainer: Any, net: nn.Module, *args: Any) -> None:
        for at, key in enumerate(keys):
            before = [trainer.strategy.table(f"t{other}") for other in range(len(keys))]
            found = net.load_state_dict({key: new_values(before[at])}, strict=False)
            after = [trainer.strategy.table(f"t{other}") for other in range(len(keys))]
            before[at] = new_values(before[at])
            if not all(map(torch.equal, before, after)):
                wrong.append(f"tables after {key} was loaded")
            if sorted([key, *found.missing_keys]) != sorted(net.state_dict()) or found.unexpected_keys:
                wrong.append(f"{found} of {key}")

    trainer, net = make_fit(fit, LambdaCallback(**{hook: load}))
    trainer.fit(net)
    return wrong


def errors_of_loads(fit: Fit) -> dict[str, str]:
    """Return the errors of loading without one table, and of loading tables of other shapes; none changes a table."""
    trainer, net = make_fit(fit)
    trainer.fit(net)
    strategy: Any = trainer.strategy
    key, whole, found = key_of(fit, 0), strategy.table("t0"), {}
    for name, given in {"longer": torch.zeros(len(whole) + 1, 8), "part": torch.zeros(len(whole) // 2, 8)}.items():
        found[name] = error_of(partial(net.load_state_dict, {key: given}, strict=False))
    assert torch.equal(strategy.table("t0"), whole)
    state = net.state_dict()
    del state[key]
    found["missing"] = error_of(lambda: net.load_state_dict(state))
    return found


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as err:
        return f"{type(err).__name__}: {err}"
    return "no error"


def _tables(*, sequence: bool, device: str | None = None) -> Any:
    kind: Any = EmbeddingCollection if sequence else EmbeddingBagCollection
    config: Any = EmbeddingConfig if sequence else EmbeddingBagConfig
    tables = [config(name=f"t{at}", feature_names=[f"f{at}"], num_embeddings=12, embedding_dim=8) for at in range(2)]
    return kind(tables=tables, device=device)


def real_beside_meta(fit: Fit, device: str) -> bool:
    """Make the tables on a device, given by name, and one of them anew with values; return whether it keeps them."""
    net = Net(fit)
    net.ebc = collection = _tables(sequence=fit.sequence, device=device)
    place = collection.embeddings if fit.sequence else collection.embedding_bags
    values = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    place["t0"].weight = nn.Parameter(values.clone())
    if device == "cpu":
        place["t1"].weight = nn.Parameter(torch.empty(12, 8, device="meta"))
    trainer = _evaluate(net, fit.tables[0].sharding)
    return torch.equal(trainer.strategy.table("t0"), values) and bool(trainer.strategy.table("t1").isfinite().all())


def error_of_shape(fit: Fit, ranks: tuple[int, ...]) -> str:
    """Set a weight with fewer rows, on some ranks, in the place of one; return the error of an evaluation."""
    net = Net(fit)
    net.ebc = _tables(sequence=fit.sequence)
    if dist.get_rank() in ranks:
        weight = next(net.ebc.parameters())
        weight.data = weight.data[:5].clone()
    return error_of(lambda: _evaluate(net, fit.tables[0].sharding))


def _evaluate(net: Net, sharding: Any) -> Any:
    strategy = OverlapEmbeddingStrategy(sharding=sharding, fused_optimizer=(torch.optim.SGD, {"lr": 0.5}))
    trainer = make_trainer(strategy, limit_val_batches=1)
    trainer.validate(net, verbose=False)
    return trainer
