"""What starting a training and saving a checkpoint ask of rank 0 as ranks and tables grow; nothing is sent.

    python benchmarks/scale_start.py                       # all sizes, about five minutes
    python benchmarks/scale_start.py --ranks 1024 --tables 64 --sharding row_wise

Ranks are made up as in benchmarks/scale.py. Columns: TorchRec's planner, and the bytes of its plan, which rank 0 sends
to all; a fit up to the end of its third step, without the planner, and what rank 0 gets of the ranks' objects there;
the metadata of a sharded checkpoint: what rank 0 gets of all ranks, how long it takes to merge it, and the file's size.
Metadata are computed by torch's public functions from what each rank would write: nothing is saved.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from typing import Any

COLUMNS = (
    *("ranks", "tables", "sharding", "planner", "plan", "three steps", "objects", "pickled"),
    *("plans of a save", "merged in", ".metadata"),
)


def main() -> None:
    """Measure each size in a process of its own, or be one of these."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--tables", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--sharding", nargs="+", default=["table_wise", "row_wise"])
    parser.add_argument("--limit-s", type=int, default=240, help="seconds for one size")
    options = parser.parse_args()
    if "RANK" in os.environ:
        print(json.dumps(_measure(options)))
        return
    from tqdm import tqdm

    sizes = [(kind, ranks, tables) for kind in options.sharding for ranks in options.ranks for tables in options.tables]
    lines = []
    for kind, ranks, tables in tqdm(sizes, leave=False):
        cells = _in_new_process(kind, ranks, tables, options.limit_s)
        lines.append(f"| {' | '.join([f'{ranks:,}', str(tables), kind, *cells])} |")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    print("\n".join(lines))


def _in_new_process(kind: str, ranks: int, tables: int, limit_s: int) -> list[str]:
    from scale import environment

    sizes = ["--sharding", kind, "--ranks", str(ranks), "--tables", str(tables)]
    command = [sys.executable, os.path.abspath(__file__), *sizes]
    env = os.environ | environment(ranks)
    try:
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return [f"not within {limit_s} s", *[""] * 7]
    if ran.returncode != 0:
        sys.exit(ran.stderr)
    return list(json.loads(ran.stdout.splitlines()[-1]))


def _measure(options: argparse.Namespace) -> list[str]:
    import quiet
    import torch
    from scale import Arms, make_ranks

    [ranks], [tables], [kind] = options.ranks, options.tables, options.sharding
    quiet.be_quiet()
    torch.set_num_threads(1)
    counts = make_ranks(ranks)
    sizes = argparse.Namespace(batch_size=8, steps=0, sharding=kind)
    planner_s, plan_bytes = _planner(ranks, tables, kind)
    arms = Arms(sizes, ranks, tables, counts, num_steps=3)
    with _Objects() as objects:
        began = time.thread_time()
        arms.run_once("fused_sparse_dist")
        start_s = time.thread_time() - began
    plans_bytes, merged_s, metadata_bytes = _checkpoint(ranks, tables, kind)
    return [
        *(f"{planner_s:.2f} s", _size(plan_bytes), f"{start_s * 1e3:.0f} ms"),
        *(str(objects.num), _size(objects.num_bytes), _size(plans_bytes), f"{merged_s:.2f} s", _size(metadata_bytes)),
    ]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1024:,.0f} KiB"


class _Objects:
    """Counts what rank 0 gets from `all_gather_object`, `gather_object` and `broadcast_object_list`."""

    def __init__(self) -> None:
        self.num, self.num_bytes = 0, 0

    def __enter__(self) -> _Objects:
        import torch.distributed as dist

        self._gather = dist.all_gather_object

        def gather(values: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
            self.num += 1
            self.num_bytes += len(pickle.dumps(value)) * len(values)
            self._gather(values, value, *args, **kwargs)

        dist.all_gather_object = gather
        return self

    def __exit__(self, *error: object) -> None:
        import torch.distributed as dist

        dist.all_gather_object = self._gather


def _planner(ranks: int, tables: int, kind: str) -> tuple[float, int]:
    """Return the CPU seconds of TorchRec's planner, and the bytes of its plan."""
    import torch
    from scale import DIM, RANKS_PER_HOST, rows_of
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    names = [f"table_{number}" for number in range(tables)]
    configs = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows_of(ranks), embedding_dim=DIM)
        for name in names
    ]
    bags = EmbeddingBagCollection(configs, device=torch.device("meta"))
    topology = Topology(
        world_size=ranks, local_world_size=min(RANKS_PER_HOST, ranks), compute_device="cuda", hbm_cap=80 << 30
    )
    constraints = {name: ParameterConstraints(sharding_types=[kind], compute_kernels=["fused"]) for name in names}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    began = time.process_time()
    sharders: Any = [EmbeddingBagCollectionSharder()]
    plan = planner.plan(torch.nn.ModuleDict({"ebc": bags}), sharders)
    return time.process_time() - began, len(pickle.dumps(plan))


def _checkpoint(ranks: int, tables: int, kind: str) -> tuple[int, float, int]:
    """Return the bytes of all ranks' plans of a save, the CPU seconds of merging them, and the bytes of `.metadata`."""
    import torch
    from scale import DIM, rows_of
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    def item(table: int, first: int, num_rows: int, number: int) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([num_rows, DIM]))
        data = TensorWriteData(chunk, TensorProperties(), torch.Size([num_rows, DIM]))
        name = f"model.network.ebc.embedding_bags.table_{table}.weight"
        return WriteItem(MetadataIndex(name, chunk.offsets, number), WriteItemType.SHARD, tensor_data=data)

    num_rows = rows_of(ranks) // ranks * ranks
    by_rank: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for table in range(tables):
        if kind == "row_wise":
            for rank in range(ranks):
                by_rank[rank].append(item(table, num_rows // ranks * rank, num_rows // ranks, rank))
        else:
            by_rank[table % ranks].append(item(table, 0, num_rows, 0))
    plans = [SavePlan(items) for items in by_rank]
    num_bytes = sum(len(pickle.dumps(plan)) for plan in plans)
    began = time.process_time()
    _, metadata = create_default_global_save_plan(plans)
    return num_bytes, time.process_time() - began, len(pickle.dumps(metadata))


if __name__ == "__main__":
    main()
