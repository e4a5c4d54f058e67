"""Which rows the files of a base have."""

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..files import Header, Rows


class TablesError(ValueError):
    """A file does not fit the tables of a replica."""


class Runs(NamedTuple):
    """Runs of consecutive rows that bases have of some columns of a table."""

    columns: range
    firsts: Tensor  # `(num_runs,)`, int64
    ends: Tensor  # `(num_runs,)`, int64; each is past the last row of its run


class CoveredRows:
    """Which rows the bases of a cut have; holds the ends of runs of rows, and no table of the header's size."""

    def __init__(self) -> None:
        self._runs: defaultdict[str, list[Runs]] = defaultdict(list)

    def add(self, entry: Rows) -> None:
        """Note the rows of a weight; they are distinct."""
        rows = entry.rows
        if not len(rows):
            return
        if not (rows[1:] > rows[:-1]).all():
            rows = rows.sort().values
        breaks = (rows.diff() != 1).nonzero().squeeze(1)
        firsts, ends = torch.cat([rows[:1], rows[breaks + 1]]), torch.cat([rows[breaks], rows[-1:]]) + 1
        columns = range(entry.first_column, entry.first_column + entry.values.shape[1])
        self._runs[entry.table].append(Runs(columns, firsts, ends))

    def check(self, header: Header, shapes: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Raise a TablesError unless every row of every table of the header is there once, in all columns.

        `shapes` are those of the tables, if not the header's.
        """
        of_bases = f"the bases of generation {header.generation}, step {header.step}"
        for table, shape in (header.tables if shapes is None else shapes).items():
            runs = self._runs[table]
            num_found = sum(int((one.ends - one.firsts).sum()) * len(one.columns) for one in runs)
            if num_found != prod(shape):
                raise TablesError(
                    f"{of_bases} have {num_found} values of {table}, which needs {prod(shape)}. Do all files come from "
                    "one training?"
                )
            # As many values as there are to be: if none is there twice, none is missing.
            for column in {one.columns.start for one in runs}:
                there = [one for one in runs if column in one.columns]
                firsts, order = torch.cat([one.firsts for one in there]).sort()
                ends = torch.cat([one.ends for one in there])[order]
                if (firsts[1:] < ends[:-1]).any():
                    raise TablesError(f"{of_bases} have some rows of {table} twice, and so lack others.")
