"""Modules that make their inputs from the batch inside `training_step`, in staged methods."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedJaggedTensor

from lightning_overlap import staged

from ..support.cases import NUM_ROWS, Batch, Case, Model


def hashed(kjt: KeyedJaggedTensor, salt: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(kjt.keys(), (kjt.values() * 7 + salt) % NUM_ROWS, lengths=kjt.lengths())


MADE: list[weakref.ref[KeyedJaggedTensor]] = []  # all that `Hashes` made; a module may not count them in itself


class Hashes(Model):
    """Hashes its ids, by a salt that is a buffer and stays."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.register_buffer("salt", torch.tensor(3), persistent=False)
        self.num_ids: list[int] = []

    @staged
    def make_input(self, batch: Batch) -> KeyedJaggedTensor:
        made = hashed(batch.inputs["sparse"][0], self.salt)
        MADE.append(weakref.ref(made))
        return made

    def embeddings(self, collection: str, batch: Batch) -> Any:
        return getattr(self, collection)(self.make_input(batch))


class Checkpointed(Hashes):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        look_up = super().embeddings
        return checkpoint(lambda: look_up(collection, batch).to_dict(), use_reentrant=False)


class SaltMoves(Hashes):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 3:
            self.salt += 1


class OtherArguments(Model):
    @staged
    def make_input(self, batch: Batch, salt: int) -> KeyedJaggedTensor:
        return hashed(batch.inputs["sparse"][0], salt)

    def embeddings(self, collection: str, batch: Batch) -> Any:
        return getattr(self, collection)(self.make_input(batch, batch.inputs["sparse"][1]))


class ChangesTheBatch(Hashes):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        kjt, index = batch.inputs["sparse"]
        if index >= 4:
            kjt.values().add_(1).remainder_(NUM_ROWS)
        return super().embeddings(collection, batch)


class OneRankChanges(ChangesTheBatch):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        changes = self.global_rank == 1
        return (super() if changes else super(ChangesTheBatch, self)).embeddings(collection, batch)


class Refused(Hashes):
    """Makes its input in a way that its place in the order matters for."""

    differ: Callable[[Any, Batch, KeyedJaggedTensor], Any]

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.weigh, self.generator = nn.Linear(1, 1), torch.Generator()

    @staged
    def make_input(self, batch: Batch) -> KeyedJaggedTensor:
        kjt = batch.inputs["sparse"][0]
        with torch.no_grad():
            self.differ(batch, kjt)
        return hashed(kjt, 0)


DIFFERENCES: dict[str, Callable[[Any, Batch, KeyedJaggedTensor], Any]] = {
    "DrawsNumbers": lambda self, batch, kjt: torch.randperm(3),
    "DrawsFromItsGenerator": lambda self, batch, kjt: torch.randperm(3, generator=self.generator),
    "ReadsTrainedWeights": lambda self, batch, kjt: self.weigh(torch.ones(1, 1)),
    "ReadsAllWeights": lambda self, batch, kjt: sum(weight.detach().sum() for weight in self.weigh.parameters()),
    "WritesABuffer": lambda self, batch, kjt: self.salt.add_(1),
    "Counts": lambda self, batch, kjt: self.num_ids.append(len(kjt.values())),
    "RemembersForTheStep": lambda self, batch, kjt: self.__setattr__("remembered", kjt),
    "WritesIds": lambda self, batch, kjt: kjt.values().clamp_(min=1),
    "LooksUp": lambda self, batch, kjt: self.ebc(kjt).to_dict(),
    "Logs": lambda self, batch, kjt: self.log("num_ids", float(len(kjt.values()))),
    # The epoch, which Lightning also reads from the trainer, may be asked for.
    "AsksTheTrainer": lambda self, batch, kjt: self.current_epoch + self.trainer.global_step,
}


class ReturnsAGraph(Hashes):
    @staged
    def make_input(self, batch: Batch) -> Any:
        return super().make_input(batch), torch.ones(2, requires_grad=True) * 2

    def embeddings(self, collection: str, batch: Batch) -> Any:
        return getattr(self, collection)(self.make_input(batch)[0])


class Fails(Hashes):
    """Raises for a batch, which may be staged or not by then."""

    @staged
    def make_input(self, batch: Batch) -> KeyedJaggedTensor:
        if batch.inputs["sparse"][1] == 3:
            raise RuntimeError("the user's own error")
        return super().make_input(batch)


REFUSED: dict[str, str] = {
    "DrawsNumbers": "draws random numbers",
    "DrawsFromItsGenerator": "changes its module (DrawsFromItsGenerator.generator)",
    "ReadsTrainedWeights": "reads 'weight' of Linear, which is trained",
    "ReadsAllWeights": "reads '_parameters' of Linear, which is trained",
    "WritesABuffer": "changes its module (WritesABuffer._buffers.salt)",
    "Counts": "changes its module (Counts.num_ids.",
    "RemembersForTheStep": "changes its module (RemembersForTheStep.remembered.",
    "WritesIds": "changes its arguments (at 0.0.inputs.sparse.0.values)",
    "LooksUp": "calls the sharded module 'ebc'",
    "Logs": "uses self.log",
    "AsksTheTrainer": "uses self.trainer",
    "ReturnsAGraph": "returns a tensor that requires grad",
}

STAGED: dict[str, type[Model]] = {
    "staged": Hashes,
    "staged_checkpointed": Checkpointed,
    "staged_salt_moves": SaltMoves,
    "staged_other_arguments": OtherArguments,
    "staged_changes_the_batch": ChangesTheBatch,
    "staged_fails": Fails,
    "staged_one_rank_changes": OneRankChanges,
    "ReturnsAGraph": ReturnsAGraph,
    **{name: type(name, (Refused,), {"differ": differ}) for name, differ in DIFFERENCES.items()},
}
