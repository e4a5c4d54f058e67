"""What a rank does once its batches to evaluate have ended, while other ranks have more: it joins their lookups.

A lookup of sharded tables needs all ranks. In an evaluation, as under DistributedDataParallel, each rank evaluates all
of its own batches, so a rank with fewer calls the sharded modules as in its last step, with inputs that have no ids.
Their batch size is that of its first batch: lookups without a backward take any.
"""

from collections.abc import Iterable, Mapping

from torchrec.distributed.types import Awaitable

from .module_flight import ModuleFlight
from .options import SparseOptions
from .watchers.last_calls import KnownCall


def repeat(calls: Iterable[KnownCall], sent: Mapping[str, ModuleFlight], options: SparseOptions) -> None:
    """Make the calls of the last step; raises a RuntimeError if an input is no KeyedJaggedTensor.

    `sent` has the modules whose inputs without ids were sent early; these are looked up, once.
    """
    for forward, kept in calls:
        early = sent.get(forward.name)
        kjt = early.kjt if early is not None and not early.served else kept
        if kjt is None:
            raise RuntimeError(
                f"rank {options.rank} has no further batch for {options.method}, other ranks have, and "
                f"it cannot take part in the lookup of {forward}, whose input is no KeyedJaggedTensor: samples of "
                "the other ranks would be lost. Give all ranks equally many batches (use_distributed_sampler=True "
                "with a sampler that pads), or evaluate on one rank."
            )
        found = forward.module(kjt)
        for answer in found if isinstance(found, tuple) else (found,):
            if isinstance(answer, Awaitable):
                answer.wait()


def without_batches(method: str) -> str:
    """Return the error about an evaluation in which only some ranks have batches; `method` is the user's step."""
    return (
        f"some ranks have no batch for {method}, others have: a rank without a batch does not know which lookups of "
        "sharded tables it has to take part in, and the samples of the others would be lost. Give each rank at least "
        "one batch (fewer ranks, smaller batches), or evaluate on one rank."
    )
