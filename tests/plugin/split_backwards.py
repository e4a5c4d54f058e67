"""Fits in `split_backward`, beside the same fits in `base`. Functions that ranks run."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.dense.split_layers import LateAllReduce
from lightning_overlap.sparse import deferred_update, lookup
from lightning_overlap.sparse.deferred_update import DeferredUpdate

from ..support.cases import TABLE_WISE, Batch, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.reference import collect
from .first_words import OURS, logged

NUM_STEPS = 8


class Grads(Callback):
    """Keeps what hooks see of dense gradients, and of tables, between the backward and the step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.seen += [weight.grad.clone() for weight in pl_module.top.parameters()]
        self.seen += [
            shard.tensor.clone() for value in pl_module.ebc.state_dict().values() for shard in value.local_shards()
        ]


class Attends(nn.Module):
    """Has a layer of torch.nn that is not split, whose parts are not either."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, given: Tensor) -> Tensor:
        found, _ = self.attention(*[given.unflatten(0, (-1, 4))] * 3)
        return given + found.flatten(0, 1)


class Deep(Model):
    """Has more kinds of layers; `kind` adds what its backward does besides."""

    def __init__(self, kind: str = "") -> None:
        torch.manual_seed(3)
        super().__init__(TABLE_WISE)
        self.kind = kind
        width = self.top[0].in_features
        first, middle, last = nn.Linear(width, 12), nn.Linear(12, 12, bias=False), nn.Linear(12, 1)
        self.top = nn.Sequential(first, nn.BatchNorm1d(12), nn.ReLU(), middle, nn.GELU(), last)
        if kind == "attention":
            self.top[4] = Attends()
        if kind == "sparse":
            self.shift = nn.Embedding(4, width, sparse=True)
        if kind == "norms":
            parts = [nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)]
            self.top = nn.Sequential(*copy.deepcopy(parts), *copy.deepcopy(parts), *parts, nn.Linear(width, 1))
        if kind == "compiled":
            self.top[3] = torch.compile(self.top[3], backend="eager")
        if kind == "post_hook":
            self.num_hooked = 0
            self.top[0].weight.register_post_accumulate_grad_hook(self._count)
        if kind == "raises":
            self.top[0].weight.register_hook(self._raise)
        if kind == "kept_gradients":
            self.norm = nn.LayerNorm(width)
        if kind == "manual":
            self.automatic_optimization = False

    def _count(self, weight: Tensor) -> None:
        self.num_hooked += 1

    def _raise(self, gradient: Tensor) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 3:  # type: ignore[attr-defined]
            raise ArithmeticError("a hook of the user's in the second half")

    def on_train_start(self) -> None:
        if self.kind == "own_all_reduce":
            wrapped: Any = self.trainer.strategy.model
            wrapped.register_comm_hook(None, fp16_compress_hook)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.kind == "used_between_steps":
            copied = copy.deepcopy(self.top)
            copied(torch.ones(2, self.top[0].in_features)).sum().backward()
            assert all(weight.grad is not None for weight in copied.parameters())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self.kind == "own_gradients":
            [gradient] = torch.autograd.grad(loss, self.top[3].weight, retain_graph=True)
            loss = loss + gradient.square().sum().detach()
        if self.kind == "kept_gradients":
            loss = loss + self.top(self.norm(torch.ones(4, self.top[0].in_features))).square().mean()
        if self.kind == "sparse":
            loss = loss + self.top(self.shift(torch.arange(6) % 4)).square().mean()
        if self.kind == "tied":
            loss = loss + self.top[3].weight.square().mean()
        if self.kind != "manual":
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=self.kind != "kept_gradients")

    def configure_optimizers(self) -> Any:
        if self.kind.endswith("lbfgs"):
            lbfgs = torch.optim.LBFGS([*self.bottom.parameters(), *self.top.parameters()], lr=0.1, max_iter=2)
            return lbfgs if self.kind == "lbfgs" else combined_optimizer(self, lbfgs)
        if self.kind == "sparse":
            parts = self.bottom, self.top, self.shift
            return torch.optim.SGD([weight for part in parts for weight in part.parameters()], lr=0.1)
        return super().configure_optimizers()


def fit(kind: str, pipeline: str, options: dict[str, Any], hooks: bool, **kwargs: Any) -> tuple[Any, list[Tensor], str]:
    """Fit a `Deep`; return the result, what hooks have seen, and what was logged."""
    model, grads = Deep(kind), Grads()
    trainer = make_trainer(make_strategy(model, pipeline, **options), callbacks=[grads] if hooks else [], **kwargs)
    with logged(OURS) as words:
        trainer.fit(model, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    parts = [part for part in model.modules() if type(part) in (nn.Linear, nn.Sequential)]
    assert not any("forward" in vars(part) for part in parts)
    if kind == "post_hook":
        assert model.num_hooked == NUM_STEPS
    return collect(model, trainer.optimizers[0], model.losses), grads.seen, "\n".join(words)


def fit_noting_parts(pipeline: str) -> tuple[Any, list[str]]:
    """Fit; return the result, and in which order the parts of the sharded module were updated and looked up."""
    model, done = Deep(), []
    own_apply, own_go_on, own_look_up = DeferredUpdate._apply_sent, deferred_update._go_on, lookup._look_up_parts

    def go_on(cut: list[Any], *, retain_graph: bool) -> None:
        own_go_on(cut, retain_graph=retain_graph)
        done.append("went on")

    def apply(self: DeferredUpdate, cuts: list[Any], *, retain_graph: bool) -> None:
        own_apply(self, cuts, retain_graph=retain_graph)
        done[-1] = f"updated {', '.join(str(cut.part) for cut in cuts)}"

    def look_up(state: Any, parts: list[int]) -> None:
        own_look_up(state, parts)
        done.extend(f"looked up {part}" for part in parts)

    with (
        mock.patch.object(DeferredUpdate, "_apply_sent", apply),
        mock.patch.object(deferred_update, "_go_on", go_on),
        mock.patch.object(lookup, "_look_up_parts", look_up),
    ):
        trainer = make_trainer(OverlapEmbeddingStrategy(pipeline, sharding="table_wise"))
        trainer.fit(model, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    return collect(model, trainer.optimizers[0], model.losses), [one.replace("went on", "sent") for one in done]


def fit_counting_late_buckets() -> list[int]:
    """Return for each step of a fit how many all-reduces of dense gradients are left to wait for after the backward."""
    late: list[int] = []

    def counted(self: LateAllReduce, wait: Any = LateAllReduce.wait) -> None:
        late.append(len(self._under_way))
        wait(self)

    with mock.patch.object(LateAllReduce, "wait", counted):
        fit("", "split_backward", {}, False)
    return late


class _HooksBackward(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        pass


def fit_of_ranks_that_differ(pipelines: tuple[str, str], hooked: int | None) -> str:
    """Return the error, and after how many steps it came; each rank has its own mode, `hooked` one more callback."""
    rank, model = dist.get_rank(), Model(TABLE_WISE)
    callbacks = [_HooksBackward()] if rank == hooked else []
    trainer = make_trainer(make_strategy(model, pipelines[rank]), callbacks=callbacks)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(model, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    return f"{caught.value} after {trainer.global_step} steps"
