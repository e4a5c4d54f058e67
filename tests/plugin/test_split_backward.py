"""`split_backward` under Lightning: every fit equals `base` bit for bit, split or whole, and says which."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.checkpoint import checkpoint

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.dense import LateAllReduce
from lightning_overlap.plugin.first_words import LOGGER
from lightning_overlap.sparse import deferred_update
from lightning_overlap.sparse.deferred_update import DeferredUpdate
from lightning_overlap.sparse.module_flight import ModuleFlight

from ..support import reference
from ..support.cases import TABLE_WISE, Batch, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.modules import own_parameters
from ..support.ranks import RankError, Ranks
from ..support.reference import collect
from .strategies import logged

NUM_STEPS = 8


class Grads(Callback):
    """Keeps what hooks see of dense gradients, and of tables, between the backward and the step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.seen += [weight.grad.clone() for weight in pl_module.top.parameters()]
        for table in pl_module.ebc.state_dict().values():
            self.seen += [shard.tensor.clone() for shard in table.local_shards()]


class Checkpointed(nn.Sequential):
    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, given, use_reentrant=False)
        return found


class Deep(Model):
    """Has more kinds of layers; `kind` adds what its backward does besides."""

    def __init__(self, kind: str = "") -> None:
        torch.manual_seed(3)
        super().__init__(TABLE_WISE)
        self.kind, self.automatic_optimization = kind, kind != "manual"
        width = self.top[0].in_features
        first, middle, last = nn.Linear(width, 12), nn.Linear(12, 12, bias=False), nn.Linear(12, 1)
        self.top = (Checkpointed if kind == "checkpointed" else nn.Sequential)(
            first, nn.BatchNorm1d(12), nn.ReLU(), middle, nn.GELU(), last
        )
        if kind == "norms":  # the gradients of their weights are not split, and come between those that are
            parts = [nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)]
            self.top = nn.Sequential(*copy.deepcopy(parts), *copy.deepcopy(parts), *parts, nn.Linear(width, 1))
        if kind == "sparse":
            self.shift = nn.Embedding(4, width, sparse=True)
        if kind == "compiled":
            self.top[3] = torch.compile(self.top[3], backend="eager")
        if kind == "raises":
            self.top[0].weight.register_hook(self._raise)

    def _raise(self, gradient: Tensor) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 3:  # type: ignore[attr-defined]
            raise ArithmeticError("a hook of the user's in the second half")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.kind == "sparse":
            loss = loss + self.top(self.shift(torch.arange(6) % 4)).square().mean()
        if self.kind == "tied":
            loss = loss + self.top[3].weight.square().mean()
        if self.kind == "manual":
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        if self.kind == "lbfgs":
            return combined_optimizer(self, torch.optim.LBFGS(own_parameters(self), lr=0.1))
        if self.kind == "manual":
            return [torch.optim.SGD(part.parameters(), lr=0.2) for part in (self.bottom, self.top)]
        return torch.optim.SGD(own_parameters(self), lr=0.2, momentum=0.0 if self.kind == "sparse" else 0.5)


def fit(kind: str, pipeline: str, options: dict[str, Any], hooks: bool, **kwargs: Any) -> tuple[Any, list[Tensor], str]:
    """Fit a `Deep`; return the result, what hooks have seen, and what was logged."""
    model, grads = Deep(kind), Grads()
    trainer = make_trainer(make_strategy(model, pipeline, **options), callbacks=[grads] if hooks else [], **kwargs)
    with logged(LOGGER) as words:
        trainer.fit(model, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    parts = [part for part in model.modules() if type(part) in (nn.Linear, nn.Sequential)]
    assert not any("forward" in vars(part) for part in parts)
    return collect(model, trainer.optimizers[0], model.losses), grads.seen, "\n".join(words)


def fit_noting_parts(pipeline: str) -> tuple[Any, list[str]]:
    """Fit; return the result, and in which order the parts of the sharded module were updated and looked up."""
    model, done = Deep(), []
    own_apply, own_go_on = DeferredUpdate._apply_sent, deferred_update._go_on
    own_look_up = ModuleFlight._look_up_parts

    def go_on(cuts: list[Any], **kwargs: Any) -> None:
        own_go_on(cuts, **kwargs)
        done.append("sent")

    def apply(self: DeferredUpdate, cuts: list[Any], **kwargs: Any) -> None:
        own_apply(self, cuts, **kwargs)
        done[-1] = f"updated {', '.join(str(cut.part) for cut in cuts)}"

    def look_up(self: ModuleFlight, parts: list[int]) -> None:
        own_look_up(self, parts)
        done.extend(f"looked up {part}" for part in parts)

    with (
        mock.patch.object(DeferredUpdate, "_apply_sent", apply),
        mock.patch.object(deferred_update, "_go_on", go_on),
        mock.patch.object(ModuleFlight, "_look_up_parts", look_up),
    ):
        trainer = make_trainer(OverlapEmbeddingStrategy(pipeline, sharding="table_wise"))
        trainer.fit(model, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    return collect(model, trainer.optimizers[0], model.losses), done


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
    def on_before_backward(self, *args: Any) -> None:
        pass


def fit_of_ranks_that_differ(pipelines: tuple[str, str], hooked: int | None) -> str:
    """Return the error, and after how many steps it came; each rank has its own mode, `hooked` one more callback."""
    rank, model = dist.get_rank(), Model(TABLE_WISE)
    callbacks = [_HooksBackward()] if rank == hooked else []
    trainer = make_trainer(make_strategy(model, pipelines[rank]), callbacks=callbacks)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(model, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    return f"{caught.value} after {trainer.global_step} steps"


SPLIT = "split backward: weight gradients of bottom, top.0, top.3, top.5 come after the backward"
SPLIT_NORMS = "split backward: weight gradients of bottom, top.0, top.3, top.6, top.9 come after the backward"
WHOLE = "the backward runs whole: "
FITS: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any], str]] = {
    "split": ("", {}, False, {}, SPLIT),
    "hooks": ("", {}, True, {}, SPLIT),
    "small_buckets": ("", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}, True, {}, SPLIT),
    "accumulated_and_clipped": ("", {}, True, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, SPLIT),
    "autocast": ("", {}, False, {"precision": "bf16-mixed"}, SPLIT),
    "tied": ("tied", {}, False, {}, "top.3: whole, its weight is used outside of its forward"),
    "compiled": ("compiled", {}, False, {}, "top.3._orig_mod: whole, it is compiled"),
    "own_all_reduce": ("", {"ddp_comm_hook": fp16_compress_hook}, True, {}, SPLIT),
    "lbfgs": ("lbfgs", {}, False, {}, f"{WHOLE}LBFGS runs several backwards in a step"),
    "manual_with_two_optimizers": ("manual", {}, False, {}, f"{WHOLE}with manual optimization"),
    "checkpointed": ("checkpointed", {}, False, {}, "top.0, top.3, top.5: whole, its saved tensors are hooked"),
    "sparse_gradients": ("sparse", {}, False, {}, f"{WHOLE}an embedding of torch.nn has sparse gradients"),
    "static_graph": ("", {"static_graph": True}, False, {}, f"{WHOLE}static_graph=True"),
    "find_unused_parameters": ("", {"find_unused_parameters": True}, False, {}, f"{WHOLE}find_unused_parameters=True"),
    "one_rank": ("", {"bucket_cap_mb": 0.001}, False, {}, f"{WHOLE}one rank on a CPU waits for nobody"),
    # DistributedDataParallel's buckets are those of a whole backward: the sums of three ranks round alike.
    "three_ranks": ("", {"bucket_cap_mb": 0.001}, False, {}, SPLIT),
    # Their order comes from the first backward that sends gradients, which therefore runs whole.
    "three_ranks_accumulated": ("norms", {"bucket_cap_mb": 0.002}, False, {"accumulate_grad_batches": 2}, SPLIT_NORMS),
}
NUM_RANKS = {"one_rank": 1, "three_ranks": 3, "three_ranks_accumulated": 3}


@pytest.mark.parametrize("name", FITS)
def test_a_fit_equals_base(get_ranks: Callable[..., Ranks], name: str) -> None:
    """Also what hooks see between the backward and the step: whole gradients, updated tables."""
    (kind, options, hooks, kwargs, words), ranks = FITS[name], get_ranks(NUM_RANKS.get(name, 2))
    expected = ranks.run(fit, kind, "base", options, hooks, **kwargs)
    actual = ranks.run(fit, kind, "split_backward", options, hooks, **kwargs)
    for (mine, seen, told), (theirs, seen_in_base, _) in zip(actual, expected, strict=True):
        assert reference.differences([mine], [theirs]) == [[]]
        assert len(seen) == len(seen_in_base)
        assert all(torch.equal(a, b) for a, b in zip(seen, seen_in_base, strict=True))
        assert words in told or told == ""
    assert words in actual[0][2]


def test_between_hosts_a_part_is_looked_up_before_the_next_part_is_updated(get_ranks: Callable[..., Ranks]) -> None:
    """Gradients are sent in the same order, so those of the second part travel while the first part is looked up."""
    ranks = get_ranks(2, num_nodes=2)
    expected, actual = (ranks.run(fit_noting_parts, mode) for mode in ("base", "split_backward"))
    assert reference.differences([result for result, _ in actual], [result for result, _ in expected]) == [[], []]
    for _, done in actual:
        in_a_step = ["sent", "sent", "updated 0", "looked up 0", "updated 1", "looked up 1"]
        assert done[-len(in_a_step) * 3 - 4 : -4] == in_a_step * 3
        assert done[-4:] == [*in_a_step[:3], "updated 1"]  # no batch follows the last one


def test_the_dense_all_reduce_is_waited_for_after_the_backward(two_ranks: Ranks) -> None:
    """In every step; DistributedDataParallel would wait for it within the backward of the weights."""
    for late in two_ranks.run(fit_counting_late_buckets):
        assert len(late) == NUM_STEPS
        assert all(late)


def test_a_hook_that_raises_in_the_second_half_ends_all_ranks(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="a hook of the user's in the second half"):
        two_ranks.run(fit, "raises", "split_backward", {}, False)


@pytest.mark.parametrize(
    ("of_rank_1", "hooked", "message"),
    [
        ("fused_sparse_dist", None, "rank 0: 'split_backward', rank 1: 'fused_sparse_dist'"),
        ("split_backward", 1, "others cannot (rank 1: on_before_backward may compute gradients)"),
    ],
)
def test_ranks_that_differ_are_an_error_before_the_first_step(
    two_ranks: Ranks, of_rank_1: str, hooked: int | None, message: str
) -> None:
    for text in two_ranks.run(fit_of_ranks_that_differ, ("split_backward", of_rank_1), hooked):
        assert message in text
        assert text.endswith("after 0 steps")
