"""Weights of ids that are not finite, which a backward leaves out where a loss that is not finite trains nothing."""

import copy

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torchrec import set_weights


def with_finite_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids whose weights are all finite, 0 in the place of others; the same object if the host knows they are.

    A kernel's backward multiplies gradients by the weights of ids, and zero times NaN is NaN. On CUDA the host cannot
    see whether there is such a weight, and always gets a new object.
    """
    weights = features.weights_or_none()
    if weights is None or (not weights.is_cuda and bool(torch.isfinite(weights).all())):
        return features
    mended = copy.copy(features)
    with torch.no_grad():
        own = torch.where(torch.isfinite(weights), weights, 0.0)
    set_weights(mended, own.requires_grad_(weights.requires_grad))
    return mended
