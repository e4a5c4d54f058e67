"""KeyedJaggedTensors: read and replace their tensors, which their public methods only return."""

import copy
from collections.abc import Callable, Mapping
from operator import attrgetter

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "KeyedJaggedTensor": ("_inverse_indices", "_jt_dict", "_lengths", "_values", "_weights"),
}

parts_of: Callable[[KeyedJaggedTensor], tuple[Tensor, Tensor | None, Tensor | None]] = attrgetter(
    "_values", "_lengths", "_weights"
)
"""Return the values, the lengths (None if only offsets are known) and the weights (None without)."""


def set_values(kjt: KeyedJaggedTensor, values: Tensor) -> None:
    """Replace the ids of an input by others of the same shape."""
    kjt._values = values


def set_lengths(kjt: KeyedJaggedTensor, lengths: Tensor) -> None:
    """Replace the lengths of an input by equal ones, perhaps of another type."""
    kjt._lengths = lengths


def set_weights(kjt: KeyedJaggedTensor, weights: Tensor) -> None:
    """Replace the weights of an input's ids by others of the same shape."""
    kjt._weights = weights


def set_inverse_indices(kjt: KeyedJaggedTensor, features: list[str], indices: Tensor) -> None:
    """Set which row of a feature belongs to each sample, `(features, B)`, if batch sizes vary by feature."""
    kjt._inverse_indices = features, indices


def shallow_copy(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return another object with the same tensors and caches; `copy.copy` takes 10 us."""
    new: KeyedJaggedTensor = object.__new__(type(kjt))
    vars(new).update(vars(kjt))
    return new


def without_weights(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return another object with the same ids and lengths, and without weights."""
    new = copy.copy(kjt)
    new._weights = new._jt_dict = None  # the dict of JaggedTensors has the weights, too
    return new
