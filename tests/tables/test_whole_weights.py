"""Once tables are sharded, nothing in the process holds the whole weights that they were made with."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import QUIET, make_trainer
from ..support.ranks import Ranks

ADAGRAD: Any = (torch.optim.Adagrad, {"lr": 1.0})


def dense_adagrad(parameters: Any) -> torch.optim.Optimizer:
    """Has state of the size of the parameters from the beginning."""
    return torch.optim.Adagrad(parameters, lr=0.1)


class OnArrays(Model):
    """Has its tables in arrays, whose end shows when their memory is given back."""

    def __init__(self, way: str, optimizer: OptimizerCallable = dense_adagrad) -> None:
        super().__init__(TABLE_WISE, fused_optimizer=False)
        self.way, self.optimizer = way, optimizer
        self.arrays, self.num_in_fit = list[weakref.ref[Any]](), -1
        for bag in self.ebc.embedding_bags.values():
            array = bag.weight.detach().numpy().copy()
            self.arrays.append(weakref.ref(array))
            bag.weight = nn.Parameter(torch.from_numpy(array))
        if way == "applied":
            _apply_optimizer_in_backward(ADAGRAD[0], self.ebc.parameters(), ADAGRAD[1])
        if way == "in __init__":
            self.made = dense_adagrad(self.named_parameters())
        if way == "combined in __init__":
            self.made = combined_optimizer(self, dense_adagrad(self.parameters()))

    def setup(self, stage: str) -> None:
        if self.way == "in setup" and not hasattr(self, "made"):
            groups = [self.ebc, self.bottom, self.top]
            self.made = dense_adagrad([{"params": list(module.parameters())} for module in groups])

    def configure_optimizers(self) -> Any:
        if hasattr(self, "made"):
            return self.made
        return self.optimizer(p for _, p in in_backward_optimizer_filter(self.named_parameters()))

    @property
    def num_held(self) -> int:
        return sum(array() is not None for array in self.arrays)

    def on_train_start(self) -> None:
        self.num_in_fit = self.num_held


def held(way: str, sharding: str) -> tuple[int, int]:
    """Return how many whole tables are left in a fit, and after it."""
    model = OnArrays(way)
    fused = None if way == "applied" or sharding == "data_parallel" else ADAGRAD
    strategy = OverlapEmbeddingStrategy(sharding=sharding, fused_optimizer=fused)
    gc.disable()
    try:
        make_trainer(strategy).fit(model, datamodule=Batches(TABLE_WISE, 2))
        return model.num_in_fit, model.num_held
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("way", "sharding"),
    [("given", "table_wise"), ("applied", "table_wise"), ("applied", "column_wise"), ("given", "data_parallel")],
)
def test_nothing_holds_them(two_ranks: Ranks, way: str, sharding: str) -> None:
    assert two_ranks.run(held, way, sharding) == [(0, 0), (0, 0)]


def made_before(way: str, *arguments: str) -> tuple[int, Tensor, str]:
    """Fit twice by LightningCLI; return how many whole tables are left, the losses, and warnings about optimizers."""
    options = {"sharding": "table_wise", "fused_optimizer": ["torch.optim.Adagrad", {"lr": 1.0}]}
    strategy = {"class_path": "lightning_overlap.OverlapEmbeddingStrategy", "init_args": options}
    defaults = {**QUIET, "accelerator": "cpu", "devices": 2, "max_epochs": 1, "strategy": strategy}
    args = [f"--model.way={way}", *arguments]
    gc.disable()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cli = LightningCLI(OnArrays, args=args, run=False, save_config_callback=None, trainer_defaults=defaults)
            for _ in range(2):
                cli.trainer.fit_loop.epoch_progress.reset()
                cli.trainer.fit(cli.model, datamodule=Batches(TABLE_WISE, 3))
        [optimizer] = cli.trainer.optimizers
        for group in optimizer.param_groups:
            assert len(group.get("param_names", group["params"])) == len(group["params"])
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        assert set(map(id, optimizer.state)) == set(map(id, owned)) <= set(map(id, cli.model.parameters()))
        said = [str(one.message) for one in caught if "before the tables were sharded" in str(one.message)]
        return cli.model.num_in_fit + cli.model.num_held, torch.stack(cli.model.losses), "\n".join(said)
    finally:
        gc.enable()


CLI = ("--optimizer=torch.optim.Adagrad", "--optimizer.lr=0.1")


@pytest.mark.parametrize(
    ("way", "arguments"),
    [
        ("given", CLI),
        ("given", (*CLI, "--lr_scheduler=torch.optim.lr_scheduler.ConstantLR", "--lr_scheduler.factor=1.0")),
        ("given", ("--model.optimizer=torch.optim.Adagrad", "--model.optimizer.lr=0.1")),
        ("in __init__", ()),
        ("in setup", ()),
        ("combined in __init__", ()),
    ],
)
def test_an_optimizer_that_was_made_before_lets_go_of_them(
    two_ranks: Ranks, way: str, arguments: tuple[str, ...]
) -> None:
    pytest.importorskip("jsonargparse")
    of_reference, of_ranks = two_ranks.run_once(made_before, "given"), two_ranks.run(made_before, way, *arguments)
    for rank, (expected, (num_held, losses, said)) in enumerate(zip(of_reference, of_ranks, strict=True)):
        assert (num_held, expected[0], expected[2]) == (0, 0, "")
        assert torch.equal(losses[:3], expected[1][:3])  # in the second fit the reference has an optimizer anew
        seen = rank == 0 and "--model.optimizer=torch.optim.Adagrad" not in arguments
        assert said.count("Adagrad was made before") == seen
        assert ("ebc.embedding_bags.t0.weight, ebc.embedding_bags.t1" in said) == seen
        by_cli = "--optimizer=torch.optim.Adagrad" in arguments  # each way to write it where it helps, and there alone
        assert ("Make it in configure_optimizers:" in said) == (seen and not by_cli)
        assert ("`optimizer: OptimizerCallable`" in said) == (seen and by_cli)
        assert ("self.optimizer(dense)" in said) == (seen and by_cli)
        assert said.endswith("--model.optimizer=torch.optim.Adagrad --model.optimizer.lr=0.1") == (seen and by_cli)
        assert ("combined_optimizer was called before" in said) == (seen and way.startswith("combined"))
