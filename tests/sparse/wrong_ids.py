"""Batches with ids that an unsharded module refuses, on the last rank. Functions that ranks run."""

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from ..support.cases import NUM_ROWS, TABLE_WISE, WEIGHTED, Batch, Case, Model, TableSpec
from ..support.fits import make_strategy, make_trainer
from .caller_inputs import HashesInPlace, fresh, kjt_of

NUM_STEPS, WRONG = 6, 3  # how many batches there are, and which one is wrong
ROWS = Case("rows", tuple(TableSpec(f"t{at}", (f"f{at}",), "row_wise") for at in range(3)))
CASES = {"no_weights": WEIGHTED, "too_large_by_rows": ROWS}


def _batch(case: Case, index: int, what: str) -> Batch:
    rank = dist.get_rank()
    batch = fresh(case, index, rank)
    if index != WRONG or rank != dist.get_world_size() - 1:
        return batch
    kjt, number = batch.inputs["sparse"]
    values, weights = kjt.values(), kjt.weights_or_none()
    first_of_f1 = kjt.length_per_key()[0]
    if what.startswith("too_large"):
        values[first_of_f1] = 1000
    elif what == "negative":
        values[first_of_f1] = -1
    elif what == "row_0":
        values[first_of_f1] = 0
    elif what == "floating":
        values = values.float()
    else:
        weights = None
    own = KeyedJaggedTensor(kjt.keys(), values, weights, kjt.lengths())
    return dataclasses.replace(batch, inputs={"sparse": (own, number)})


def fit(what: str, pipeline: str, **options: Any) -> tuple[list[Tensor], list[str]]:
    case = CASES.get(what, TABLE_WISE)
    model = Model(case)
    trainer = make_trainer(make_strategy(model, pipeline, **options))
    loader = DataLoader([_batch(case, index, what) for index in range(NUM_STEPS)], batch_size=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader)
    return model.losses, [text for one in caught if "has id" in (text := str(one.message))]


class _HashesRawIds(HashesInPlace):
    """Its batches have ids of no row, which the step makes numbers of rows."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        kjt_of(batch).values().add_(1000 * NUM_ROWS)
        return batch


def fit_raw_ids(pipeline: str) -> list[Tensor]:
    model = _HashesRawIds(TABLE_WISE)
    batches = [fresh(TABLE_WISE, index, dist.get_rank()) for index in range(NUM_STEPS)]
    trainer = make_trainer(make_strategy(model, pipeline))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not overlapped
        trainer.fit(model, DataLoader(batches, batch_size=None))
    return model.losses


def kjt_of_kinds(seed: int) -> tuple[KeyedJaggedTensor, dict[str, int]]:
    """Return an input with ids around the ends of its tables, and the rows of each feature that a table reads."""
    generator = torch.Generator().manual_seed(seed)
    keys = [f"f{index}" for index in range(4)]
    rows = {key: int(torch.randint(3, 9, (), generator=generator)) for key in keys[:3]}
    lengths = torch.randint(0, 3, (8,), generator=generator)
    values = torch.randint(-1 if seed % 3 == 0 else 0, 8, (int(lengths.sum()) + seed % 2,), generator=generator)
    return KeyedJaggedTensor(keys, values.int() if seed % 4 < 2 else values, lengths=lengths), rows
