"""What `overlap-bench` may be asked for, and what is answered before a rank starts."""

import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.modules.activation import SwishLayerNorm

from lightning_overlap import MODES
from lightning_overlap.apps import build, config_checks
from lightning_overlap.apps.bench_worker import own_batches
from lightning_overlap.data import SyntheticDataModule

from .test_conf import composed, names


def bench_config(*overrides: str) -> dict[str, object]:
    return composed(*overrides, command="bench")


@pytest.mark.parametrize("bench", names("bench"))
def test_each_bench_can_run(bench: str) -> None:
    config = bench_config(f"bench={bench}", "trainer=cpu")
    config_checks.check(config)
    assert config_checks.arms(config)[0] == "base"
    if bench != "sparse_nn":  # has tables of 40 GB
        build.check(config)


# A model of TorchRec's own benchmark: tables of 256 columns, to which one of
# 512 and one of 2048 are added; pooling; dense features; dense layers; over layers.
PUBLISHED = {
    "sparse_data_dist_base": (90 + 80, 30, 100, (128,) * 4, (1024,) * 6),
    "base_pipeline_light": (20 + 20, 10, 10, (8,), (16,) * 6),
}
DIVIDED_BY = {  # the tables; their columns and the pooling; the batch size; the layers. Rows: always by 10
    "sparse_data_dist_base": (2, 16, 32, 8),
    "base_pipeline_light": (1, 8, 16, 1),
}


@pytest.mark.parametrize("bench", PUBLISHED)
def test_a_bench_of_torchrec_has_the_published_sizes_over_the_stated_factors(bench: str) -> None:
    num_tables, pooling, num_dense, dense_layers, over_layers = PUBLISHED[bench]
    tables_by, columns_by, batch_by, layers_by = DIVIDED_BY[bench]
    config = bench_config(f"bench={bench}")
    data = build.build_data(config)
    assert isinstance(data, SyntheticDataModule)
    model = build.build_model(config, data)
    dims = [columns // columns_by for columns in (*[256] * (num_tables // tables_by), 512, 2048)]
    rows = [100_000 // 10] * (len(dims) - 1) + [1_000_000 // 10]
    found = [(table.num_embeddings, table.embedding_dim) for table in model.ebc.embedding_bag_configs()]
    assert found == list(zip(rows, dims, strict=True))
    assert data.model.pooling == pooling / columns_by
    assert (data.num_dense, data.batch_size) == (num_dense, 16_384 // batch_by)
    layers = [width // layers_by for width in (*dense_layers, *over_layers)]
    assert [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)] == [*layers, 1]
    assert sum(isinstance(layer, SwishLayerNorm) for layer in model.modules()) == len(over_layers)


def test_the_bench_for_a_gpu_has_40_gb_of_tables() -> None:
    config = bench_config("bench=sparse_nn", "trainer=cpu")
    model = build.build_model(config, build.build_data(config))
    assert sum(weight.numel() for weight in model.ebc.parameters()) * 4 == 200 * 100_000 * 512 * 4


TWO_HOSTS = Path(__file__).resolve().parents[2] / "benchmarks" / "two_hosts.sh"


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ((), {}, "error: which modes?"),
        (("--fast",), {}, "error: unknown option '--fast'"),
        (("base",), {"RATE": "fast"}, "error: RATE is like 50mbit or 1gbit, or unlimited, got 'fast'"),
    ],
)
def test_two_hosts_says_what_it_wants(arguments: tuple[str, ...], variables: dict[str, str], message: str) -> None:
    command, environment = [str(TWO_HOSTS), *arguments], {"PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert message in done.stderr


def test_every_name_has_an_arm_and_every_arm_a_name() -> None:
    config = bench_config("arms=['*']")
    assert config_checks.arms(config) == [*config_checks.our_arms(config), *config_checks.PEER_ARMS]
    for pipeline, options in list(config_checks.BY_HAND.values())[1:]:
        assert options.keys() <= inspect.signature(getattr(train_pipelines, pipeline)).parameters.keys()
    assert [name for name in config_checks.arms(config) if name in MODES] == list(MODES)


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        (
            "torchrec/sparse*,semi_sync",  # the reference is always trained first
            ["semi_sync", *("torchrec/sparse_dist" + more for more in ("", "/receives_first", "_lite"))],
        ),
        ("fused_sparse_dist/*", ["fused_sparse_dist/current", "fused_sparse_dist/dedicated"]),
        ("'*sparse_dist_lite+fp16',base+int8", ["torchrec/sparse_dist_lite+fp16", "base+int8"]),
        # TorchRec has no such tables.
        ("'*_sync+replicated','sparse*_dist+fp16+replicated'", ["semi_sync+replicated", "sparse_dist+fp16+replicated"]),
    ],
)
def test_arms(arms: str, expected: list[str]) -> None:
    config = bench_config(f"arms=[{arms}]")
    assert config_checks.arms(config) == ["base", *expected]
    build.check(config)


def test_another_stream_makes_other_names() -> None:
    config = bench_config("arms=[semi_sync/*]", "stream=dedicated")
    assert config_checks.arms(config) == ["base", "semi_sync/current", "semi_sync/data_dist"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("arms=[semi_sink]", "unknown arm 'semi_sink'. Did you mean 'semi_sync'"),
        ("arms=[torchrec/semisync]", "unknown arm 'torchrec/semisync'. Did you mean 'torchrec/semi_sync'"),
        ("arms=[base+fp61]", "unknown precision 'fp61'. Did you mean 'fp16'"),
        ("arms=[base+bf16]", "by a CPU"),
        ("rounds=0", "rounds must be an integer >= 1, got 0"),
        ("steps=many", "steps must be an integer >= 2, got 'many'"),
        ("latency.all_to_all_mz=3", "unknown latency 'all_to_all_mz'. Did you mean 'all_to_all_ms'"),
        ("latency.step_ms=-1", "latency.step_ms must be milliseconds >= 0, got -1"),
    ],
)
def test_bad_words_are_answered_before_a_rank_starts(override: str, message: str) -> None:
    config = bench_config("bench=virtual_latency", override)
    check = build.check if "base+" in override else config_checks.check
    with pytest.raises(ValueError, match=re.escape(message)):
        check(config)


class _Rows(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


@pytest.mark.parametrize(
    ("target", "trainer", "loader", "dealt_out"),
    [
        ("lightning.pytorch.LightningDataModule", {}, DataLoader(range(12), batch_size=2), True),
        ("lightning.pytorch.LightningDataModule", {"use_distributed_sampler": False}, DataLoader(range(12), 2), False),
        ("lightning_overlap.data.SyntheticDataModule", {}, DataLoader(range(12), batch_size=2), False),
        ("lightning.pytorch.LightningDataModule", {}, DataLoader(_Rows(), batch_size=2), False),
        (
            "lightning.pytorch.LightningDataModule",
            {},
            DataLoader(range(12), 2, sampler=DistributedSampler(range(12), 1, 0, shuffle=False)),
            False,
        ),
    ],
    ids=["a loader of all rows", "told otherwise", "the package's", "an iterable dataset", "a loader of own rows"],
)
def test_each_rank_measures_rows_of_its_own(target: str, trainer: dict[str, Any], loader: Any, dealt_out: bool) -> None:
    config = {"data": {"_target_": target}, "trainer": trainer, "num_batches": 2}
    first, second = ([one.tolist() for one in own_batches(config, loader, rank, 2)] for rank in range(2))
    expected = ([[0, 1], [4, 5]], [[2, 3], [6, 7]]) if dealt_out else ([[0, 1], [2, 3]],) * 2
    assert (first, second) == expected


def test_a_rank_without_a_batch_is_refused() -> None:
    config = {"data": {"_target_": "lightning.pytorch.LightningDataModule"}, "trainer": {}, "num_batches": 2}
    with pytest.raises(ValueError, match=r"has 1 batches for 2 ranks.*data\.batch_size smaller"):
        list(own_batches(config, DataLoader(range(12), batch_size=12), 0, 2))
