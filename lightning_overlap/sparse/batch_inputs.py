"""The KeyedJaggedTensors of a batch: where they are, and how many ids each feature has."""

from collections.abc import Iterable, Mapping
from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torch import num_writes
from ..runtime import Path, leaves, resolve
from ..tables import renew_counts, watch_lengths
from .misfits import wrong_lengths


def inputs_of(batch: Any) -> list[tuple[Path, KeyedJaggedTensor]]:
    """Return every KeyedJaggedTensor of a batch with the path that leads to it."""
    found = leaves(batch, lambda node: KeyedJaggedTensor in type(node).__mro__)  # `isinstance` is slow for this class
    return [(path, leaf) for path, leaf in found if KeyedJaggedTensor in type(leaf).__mro__]


def input_in(batch: Any, path: Path | None) -> KeyedJaggedTensor | None:
    """Return the input at a path of a batch; None if there is none."""
    try:
        kjt = resolve(batch, path or ())
    except LookupError:
        return None
    return kjt if isinstance(kjt, KeyedJaggedTensor) else None


def only_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the single argument of a call, or None."""
    values = [*args, *kwargs.values()]
    return values[0] if len(values) == 1 else None


def keyed_jagged_tensors(batch: Any) -> list[KeyedJaggedTensor]:
    """Return every KeyedJaggedTensor of a batch, in a fixed order."""
    return [kjt for _, kjt in inputs_of(batch)]


def note_lengths(kjts: Iterable[KeyedJaggedTensor]) -> None:
    """Cache the number of ids of each feature in inputs that are still on the host; later it would cost a host sync."""
    for kjt in kjts:
        if kjt.device().type == "cpu":
            renew_counts(kjt)  # a data loader may yield it again, with other lengths
            if wrong_lengths(kjt) is None:  # else the module that gets it refuses it by name
                kjt.sync()
            watch_lengths([kjt])


def count_anew(kjts: Iterable[KeyedJaggedTensor]) -> None:
    """Drop the numbers of `note_lengths` where lengths may have been written since; count again on the host."""
    for kjt in kjts:
        lengths = kjt.lengths()  # a copy on the device has no write yet, and an inference tensor counts none
        if kjt.device().type == "cpu" or lengths.is_inference() or num_writes(lengths):
            note_lengths([kjt.unsync()])
