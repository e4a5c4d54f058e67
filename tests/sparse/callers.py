"""Modules that call their tables in ways that users do, and batches whose layout differs. Functions that ranks run."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedJaggedTensor

from ..support import cases
from ..support.cases import ROWWISE_ADAGRAD, TABLE_WISE, TWO_COLLECTIONS, Batch, ByHand, Case, Model, TableSpec
from . import caller_inputs, update_rates, variants
from .caller_inputs import kjt_of
from .variants import MadeInHook, Manual, TwoClosures, by_name, no_embeddings

NUM_STEPS = 8
SERVED = NUM_STEPS - 1  # all but the first batch, which shows what feeds what
ONE_TABLE = Case("one_table", (TableSpec("t0", ("f0",)),))  # on one of two ranks: the other cannot see who writes it
COPIES = Case("copies", tuple(TableSpec(f"d{at}", (f"f{at}",), "data_parallel") for at in range(3)))
BY_ROWS = Case("by_rows", tuple(TableSpec(f"t{at}", (f"f{at}",), "row_wise") for at in range(3)))


class NoGrad(Model):
    """A frozen teacher: looked up without gradients, used with them."""

    def embeddings(self, collection: str, batch: Batch) -> Any:
        with torch.no_grad():
            return getattr(self, collection)(kjt_of(batch))


class InferenceMode(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        with torch.inference_mode():
            found = getattr(self, collection)(kjt_of(batch)).to_dict()
        return {key: value.clone() for key, value in found.items()}


class DetachedSometimes(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        found = getattr(self, collection)(kjt_of(batch)).to_dict()
        return {key: value.detach() if batch.inputs["sparse"][1] % 3 == 1 else value for key, value in found.items()}


class LooksFirst(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        found = getattr(self, collection)(kjt_of(batch))
        with torch.no_grad():
            self.statistic = found["f0"].norm()
        return found


class ScalesInPlace(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        found = getattr(self, collection)(kjt_of(batch))
        found.values().mul_(0.5)
        return found


class CheckpointedStep(Model):
    def forward(self, batch: Batch, embeddings: Any = None) -> Tensor:
        return checkpoint(lambda: super(CheckpointedStep, self).forward(batch), use_reentrant=False)


class CheckpointedLookup(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        return checkpoint(lambda: getattr(self, collection)(kjt_of(batch)).to_dict(), use_reentrant=False)


class ReentrantLookup(Model):
    """The first call comes without gradients, the second one inside the backward."""

    def embeddings(self, collection: str, batch: Batch) -> Any:
        keys = sorted(kjt_of(batch).keys())

        def look_up(anchor: Tensor) -> tuple[Tensor, ...]:
            found = getattr(self, collection)(kjt_of(batch)).to_dict()
            return tuple(found[key] + 0 * anchor for key in keys)

        found = checkpoint(look_up, torch.zeros((), requires_grad=True), use_reentrant=True)
        return dict(zip(keys, found, strict=True))


class SecondPhase(ByHand, Model):
    """Calls its second collection once the backward and the step of the first one are over."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        losses = []
        for phase in ("ebc", "second"):
            embeddings = {
                name: self.embeddings(name, batch) if name == phase else no_embeddings(self.case, name, batch)
                for name in self.case.collections
            }
            loss = self.dense(batch, embeddings)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        self.losses.append(torch.stack(losses).sum())


class RecomputesInEveryClosure(ReentrantLookup, TwoClosures):
    """Each backward of an optimizer's closures looks up again."""


class PenalizesAll(Model):
    def forward(self, batch: Batch, embeddings: Any = None) -> Tensor:
        penalty = torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()
        return super().forward(batch, embeddings) + 0.1 * penalty


class TrainsWeights(Model):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def embeddings(self, collection: str, batch: Batch) -> Any:
        kjt = kjt_of(batch)
        weights = kjt.weights() * self.scale
        return getattr(self, collection)(
            KeyedJaggedTensor(kjt.keys(), kjt.values(), weights=weights, lengths=kjt.lengths())
        )


class TwoBackwards(Manual):
    def go_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)


class RaisesAfterTheStep(Model):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            raise ValueError("the user's own error")


class RaisesBeforeTheStep(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx == 5:
            raise ValueError("the user's own error")


class Clamps(Model):
    first_batch = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.first_batch:
            self.write()

    def write(self) -> None:
        with torch.no_grad():
            for weight in self.ebc.parameters():
                weight.clamp_(-0.3, 0.3)


class ClampsData(Clamps):
    """Does so by `weight.data`, which PyTorch does not count as a write."""

    def write(self) -> None:
        for weight in self.ebc.parameters():
            weight.data.clamp_(-0.3, 0.3)


class ClampsState(Clamps):
    def write(self) -> None:
        for value in self.ebc.state_dict().values():
            for shard in value.local_shards():
                shard.tensor.detach().clamp_(-0.3, 0.3)


class ClampsBeforeTheStep(Clamps):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.write()


class TrainsBetween(Clamps):
    """Makes a backward of its own at the end of every batch, which writes its tables."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        found = self.ebc(kjt_of(cases.make_batch(self.case, 50 + batch_idx, dist.get_rank())))
        torch.stack([found[key].square().mean() for key in ("f0", "f2")]).sum().backward()


class RatesByHand(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.ebc.fused_optimizer.param_groups:
            group["lr"] = 2.0 / (1 + batch_idx % 3)
        self.ebc.fused_optimizer.zero_grad()  # hands it to the kernels


class ClampsReleased(MadeInHook, Clamps):
    """Of a batch of its own copies, whose ids may be released."""


class ClampsLater(Clamps):
    first_batch = 4


class ClampsLaterAndSaysSo(ClampsLater):
    def write(self) -> None:
        super().write()
        self.trainer.strategy.tables_changed()


CASES = {  # where it is not `TABLE_WISE`
    **dict.fromkeys(("scales_in_place", "checkpointed_step", "checkpointed_lookup"), ROWWISE_ADAGRAD),
    **dict.fromkeys(("reentrant_lookup", "two_backwards"), ROWWISE_ADAGRAD),
    **dict.fromkeys(("weighs_in_place", "trains_weights", "no_weights"), cases.WEIGHTED),
    **dict.fromkeys(("clamps_one_of_two", "not_always_called", "second_phase"), TWO_COLLECTIONS),
    **dict.fromkeys(("takes_parts", "makes_an_empty_part"), TWO_COLLECTIONS),
    **dict.fromkeys(("mixed", "manual", "scheduled", "unscheduled"), cases.MIXED),
    "keyword": cases.SEQUENCE,
    "types_differ_later_replicated": COPIES,
    "clamps_before_the_step": ONE_TABLE,
    "too_large_by_rows": BY_ROWS,
    "too_few_ids_by_rows": BY_ROWS,
    "too_few_weights": cases.WEIGHTED,
    "half_weights": Case("weighted_by_rows", BY_ROWS.tables, weighted=True),
}
_CLASSES = {
    **dict.fromkeys(("plain", "mixed", "types_change", "types_differ", "types_differ_later"), Model),
    **dict.fromkeys(("too_large", "too_large_by_rows", "negative", "row_0", "floating", "no_weights"), Model),
    **dict.fromkeys(("too_few_ids", "too_few_ids_by_rows", "too_few_lengths", "one_length_less"), Model),
    **dict.fromkeys(("too_few_weights", "half_weights", "types_differ_later_replicated"), Model),
    **by_name(vars(caller_inputs)),
    **by_name(vars(variants)),
    **by_name(vars(update_rates)),
    **by_name(globals()),
    "made_in_step": cases.MakesInput,
    "hashes_raw_ids": caller_inputs.HashesInPlace,
    "two_tasks_at_once": caller_inputs.OneOfTwoTasks,
    "clamps_one_of_two": Clamps,
}
MODELS = {name: (cls, CASES.get(name, TABLE_WISE)) for name, cls in _CLASSES.items()}
