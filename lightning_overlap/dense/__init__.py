"""The dense part's backward in two halves: gradients of inputs in the backward, gradients of weights after it."""

from .split_layers import LateAllReduce, SplitLayers
