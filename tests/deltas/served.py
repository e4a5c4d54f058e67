"""A module whose tables are those of `histories.SHAPES`, and cuts that are written by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_overlap.deltas import Dense, Rows, encode

from .histories import SHAPES, Training


class Model(nn.Module):
    """The names of `SHAPES`, in a module; `others` are tables besides."""

    def __init__(self, others: tuple[str, ...] = (), device: str = "cpu") -> None:
        super().__init__()
        self.model = nn.Module()
        tables = {name.split(".")[-2]: shape for name, shape in SHAPES.items()} | dict.fromkeys(others, (3, 4))
        configs = [
            EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=columns)
            for name, (rows, columns) in tables.items()
        ]
        self.model.ebc = EmbeddingBagCollection(tables=configs, device=torch.device(device))
        self.model.top = nn.Linear(3, 1, bias=False)
        self.model.top.weight = nn.Parameter(torch.zeros(3))


def write(training: Training, rows: tuple[Rows, ...] = (), dense: tuple[Dense, ...] = (), **header: Any) -> str:
    """Write a cut of one rank by hand."""
    training.step += 1
    training.start(1, 0)
    changed = dataclasses.replace(training.header(), **header)
    training.sink.write(str(changed.name), encode(changed, rows, dense))
    return str(changed.name)
