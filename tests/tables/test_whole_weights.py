"""Once tables are sharded, nothing in the process holds the whole weights that they were made with."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import Tensor, nn
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import combined_optimizer

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import QUIET
from ..support.ranks import Ranks


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
        if way == "in __init__":
            self.made = dense_adagrad(self.named_parameters())
        if way == "combined in __init__":
            self.made = combined_optimizer(self, dense_adagrad(self.parameters()))

    def configure_optimizers(self) -> Any:
        if hasattr(self, "made"):
            return self.made
        return self.optimizer(p for _, p in in_backward_optimizer_filter(self.named_parameters()))

    @property
    def num_held(self) -> int:
        return sum(array() is not None for array in self.arrays)

    def on_train_start(self) -> None:
        self.num_in_fit = self.num_held


def made_before(way: str, *arguments: str) -> tuple[int, Tensor, str]:
    """Fit twice by LightningCLI; return how many whole tables are left, the losses, and warnings about optimizers."""
    options = {"sharding": "table_wise", "fused_optimizer": ["torch.optim.Adagrad", {"lr": 1.0}]}
    strategy = {"class_path": "lightning_overlap.OverlapEmbeddingStrategy", "init_args": options}
    defaults = {**QUIET, "accelerator": "cpu", "devices": 2, "max_epochs": 1, "strategy": strategy}
    args = [f"--model.way={way}", *arguments]
    gc.disable()
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
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
BY_CLI = ("--model.optimizer=torch.optim.Adagrad", "--model.optimizer.lr=0.1")
IN_THE_MODULE = ["Make it in configure_optimizers:"]


@pytest.mark.parametrize(
    ("way", "arguments", "words"),
    [
        ("given", CLI, ["`optimizer: OptimizerCallable`", "self.optimizer(dense)", " ".join(BY_CLI)]),
        ("given", BY_CLI, []),
        ("in __init__", (), IN_THE_MODULE),
        ("combined in __init__", (), [*IN_THE_MODULE, "combined_optimizer was called before"]),
    ],
)
def test_an_optimizer_that_was_made_before_lets_go_of_them(
    two_ranks: Ranks, way: str, arguments: tuple[str, ...], words: list[str]
) -> None:
    pytest.importorskip("jsonargparse")
    of_reference, of_ranks = two_ranks.run_once(made_before, "given"), two_ranks.run(made_before, way, *arguments)
    for rank, (expected, (num_held, losses, said)) in enumerate(zip(of_reference, of_ranks, strict=True)):
        assert (num_held, expected[0], expected[2]) == (0, 0, "")
        assert torch.equal(losses[:3], expected[1][:3])  # in the second fit the reference has an optimizer anew
        warned = [*words, "ebc.embedding_bags.t0.weight, ebc.embedding_bags.t1"] if words and rank == 0 else []
        assert said.count("Adagrad was made before") == bool(warned)
        assert [word for word in warned if word not in said] == []
        assert ("OptimizerCallable" in said) == (bool(warned) and arguments == CLI)
