"""Begin a training from its deltas, `ckpt_path="deltas://..."`: the package's face gives this to the strategy."""

from .read_deltas import read_deltas
