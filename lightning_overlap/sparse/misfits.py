"""Inputs whose lengths, ids and weights do not fit each other, told from numbers that the host has."""

from itertools import accumulate

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..tables import num_ids
from ..text import some


def wrong_lengths(kjt: KeyedJaggedTensor) -> str | None:
    """Return what is wrong with the number of lengths of an input, or None; reads no memory of a device."""
    keys, num = kjt.keys(), kjt.lengths().numel()
    if kjt.variable_stride_per_key():
        sizes = dict(zip(keys, kjt.stride_per_key(), strict=True))
        return None if num == sum(sizes.values()) else f"it has {num} lengths for batch sizes of {_numbers(sizes)}"
    if num == len(keys) * kjt.stride():
        return None
    return f"it has {num} lengths, which is no multiple of its {len(keys)} features ({some(keys)})"


def misfit(kjt: KeyedJaggedTensor) -> str | None:
    """Return how the parts of an input do not fit each other, naming features; None if they fit or are not known.

    What only a device knows is not read. Not seen: lengths below zero, and lengths whose sum fits by chance.
    """
    if kjt.length_per_key_or_none() is None:
        if (wrong := wrong_lengths(kjt)) is not None:
            return wrong
        if kjt.device().type != "cpu":
            return None
    counts, num, weights = num_ids(kjt), kjt.values().numel(), kjt.weights_or_none()
    if (total := sum(counts)) != num:
        keys, ends = kjt.keys(), [*accumulate(counts)]
        where = f"{num - total} are left after the last feature, {keys[-1]!r}" if num > total else ""
        if not where:
            where = f"they end within feature {next(key for key, end in zip(keys, ends, strict=True) if end > num)!r}"
        sums = _numbers(dict(zip(keys, counts, strict=True)))
        return f"its lengths sum up to {total} ids ({sums}), but it has {num}: {where}"
    if weights is not None and weights.dim() == 1 and len(weights) != num:
        return f"it has {len(weights)} weights for {num} ids (features {some(kjt.keys())})"
    return None


def _numbers(of_features: dict[str, int]) -> str:
    return some(f"{key}: {number}" for key, number in of_features.items())
