"""What a step of each mode takes on many GPUs, computed from sizes and bandwidths: nothing is measured.

    python benchmarks/scale_model.py
    python benchmarks/scale_model.py --gpus 8 64 --dense-ms 5 --network 12.5

docs/scale.md explains the formulas. All times are in milliseconds, bandwidths in GB/s for each GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

MODES = ("base", "sparse_dist", "fused_sparse_dist", "split_backward")


@dataclass(frozen=True)
class Sizes:
    """A model, one GPU's share of its batch, and the GPUs."""

    batch_size: int = 2048  # samples of a GPU
    tables: int = 512  # table-wise, spread evenly
    dim: int = 128
    ids: int = 10  # of a feature in a sample
    dense_bytes: float = 2e8
    dense_ms: float = 20.0  # forward and backward of the dense part; a third of it gives the weights' gradients
    optimizer_ms: float = 2.0  # of the dense part
    per_host: int = 8
    inside: float = 300.0  # GB/s between GPUs of one host
    network: float = 40.0  # GB/s between hosts
    memory: float = 2000.0  # GB/s of the tables' memory
    copy: float = 25.0  # GB/s from the host to the GPU
    start_us: float = 20.0  # of a collective
    peer_us: float = 0.5  # for each other GPU in it


@dataclass(frozen=True)
class Parts:
    """The parts of a step, in milliseconds."""

    copy: float
    ids: float
    lookup: float
    rows: float  # also their gradients on the way back
    update: float
    reduce: float


def main() -> None:
    """Print the parts and the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 1024])
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    all_gpus = options.pop("gpus")
    sizes = Sizes(**options)
    columns = ["GPUs", "copy", "ids", "lookup", "rows, each way", "update", "all-reduce"]
    names = [*columns, *(f"`{mode}`" for mode in MODES)]
    print(f"| {' | '.join(names)} |")
    print("|---" * len(names) + "|")
    for gpus in all_gpus:
        parts = parts_of(sizes, gpus)
        times = [*vars(parts).values(), *(step_of(mode, parts, sizes) for mode in MODES)]
        print(f"| {gpus:,} | " + " | ".join(f"{time:.1f}" for time in times) + " |")


def parts_of(sizes: Sizes, gpus: int) -> Parts:
    """Return the parts of a step on so many GPUs."""
    num_bags = sizes.batch_size * sizes.tables  # a GPU's own samples in all tables, and all samples in its own tables
    id_bytes = num_bags * (sizes.ids * 8 + 4)  # and the lengths
    row_bytes = num_bags * sizes.dim * 4
    looked_up = num_bags * sizes.ids * sizes.dim * 4
    return Parts(
        copy=id_bytes / sizes.copy / 1e6,
        ids=_all_to_all(id_bytes, sizes, gpus),
        lookup=looked_up / sizes.memory / 1e6,
        rows=_all_to_all(row_bytes, sizes, gpus),
        update=3 * looked_up / sizes.memory / 1e6,  # the gradients and the rows are read, the rows written
        reduce=_start(sizes, gpus) + _all_reduce(sizes, gpus),
    )


def step_of(mode: str, parts: Parts, sizes: Sizes) -> float:
    """Return the time of a step, if nothing but what is named waits."""
    weights = sizes.dense_ms / 3
    reduce_left = max(0.0, parts.reduce - weights)  # DDP's reducer runs beside the backward
    ahead = max(0.0, parts.copy + parts.ids - sizes.dense_ms)  # of copy and ids, what the dense part does not hide
    tables = parts.lookup + parts.rows
    back = parts.rows + parts.update
    if mode == "base":
        return parts.copy + parts.ids + tables + sizes.dense_ms + reduce_left + back + sizes.optimizer_ms
    if mode == "sparse_dist":
        return ahead + tables + sizes.dense_ms + reduce_left + back + sizes.optimizer_ms
    if mode == "fused_sparse_dist":
        return ahead + sizes.dense_ms + reduce_left + back + max(sizes.optimizer_ms, tables)
    # split_backward: the rows' gradients are sent first, then the dense gradients; both share the link.
    reduced = max(weights, parts.rows + parts.reduce)
    looked_up = max(back + parts.lookup, parts.rows + parts.reduce) + parts.rows
    return ahead + sizes.dense_ms - weights + max(reduced + sizes.optimizer_ms, looked_up)


def _start(sizes: Sizes, gpus: int) -> float:
    return (sizes.start_us + sizes.peer_us * (gpus - 1)) / 1e3


def _all_to_all(num_bytes: float, sizes: Sizes, gpus: int) -> float:
    here = min(gpus, sizes.per_host)
    inside = num_bytes * (here - 1) / gpus / sizes.inside
    between = num_bytes * (gpus - here) / gpus / sizes.network
    return _start(sizes, gpus) + max(inside, between) / 1e6


def _all_reduce(sizes: Sizes, gpus: int) -> float:
    bandwidth = sizes.inside if gpus <= sizes.per_host else sizes.network
    return 2 * (gpus - 1) / gpus * sizes.dense_bytes / bandwidth / 1e6


if __name__ == "__main__":
    main()
