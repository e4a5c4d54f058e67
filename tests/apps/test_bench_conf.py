"""What `overlap-bench` may be asked for, and what is answered before a rank starts."""

import inspect
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.modules.activation import SwishLayerNorm

from lightning_overlap import MODES, STREAMS, Mode
from lightning_overlap.apps import build, config_checks
from lightning_overlap.data import SyntheticDataModule

from .test_conf import CONF, composed, names

TWO_HOSTS = Path(__file__).resolve().parents[2] / "benchmarks" / "two_hosts.sh"


def bench_config(*overrides: str) -> dict[str, object]:
    return composed(*overrides, command="bench")


@pytest.mark.parametrize("bench", [name for name in names("bench") if name != "sparse_nn"])
def test_each_bench_can_run_here(bench: str) -> None:
    config = bench_config(f"bench={bench}")
    config_checks.check(config)
    build.check(config)
    assert config_checks.arms(config)[0] == "base"


def test_the_gpu_bench_is_of_the_scale_that_it_is_named_for() -> None:
    config = bench_config("bench=sparse_nn", "trainer=cpu")
    config_checks.check(config)
    model = build.build_model(config, build.build_data(config))
    assert type(model).__name__ == "SparseNN"
    assert sum(weight.numel() for weight in model.ebc.parameters()) * 4 == 200 * 100_000 * 512 * 4


@dataclass(frozen=True)
class Published:
    """A model of TorchRec's benchmark, and by what this package's bench divides it."""

    num_tables: int  # of 256 columns; one of 512 and one of 2048 are added
    pooling: int
    num_dense: int
    dense_layers: tuple[int, ...]
    over_layers: tuple[int, ...]
    tables_by: int
    columns_and_pooling_by: int
    batch_size_by: int
    layers_by: int


PUBLISHED = {
    "sparse_data_dist_base": Published(90 + 80, 30, 100, (128,) * 4, (1024,) * 6, 2, 16, 32, 8),
    "base_pipeline_light": Published(20 + 20, 10, 10, (8,), (16,) * 6, 1, 8, 16, 1),
}


@pytest.mark.parametrize("bench", PUBLISHED)
def test_a_bench_of_torchrec_has_the_published_sizes_over_the_stated_factors(bench: str) -> None:
    of, config = PUBLISHED[bench], bench_config(f"bench={bench}")
    data = build.build_data(config)
    assert isinstance(data, SyntheticDataModule)
    model = build.build_model(config, data)
    dims = [512 // of.columns_and_pooling_by, 2048 // of.columns_and_pooling_by]
    dims = [256 // of.columns_and_pooling_by] * (of.num_tables // of.tables_by) + dims
    rows = [100_000 // 10] * (len(dims) - 1) + [1_000_000 // 10]
    assert [(table.num_embeddings, table.embedding_dim) for table in model.ebc.embedding_bag_configs()] == list(
        zip(rows, dims, strict=True)
    )
    assert data.model.pooling == of.pooling / of.columns_and_pooling_by
    assert (data.num_dense, data.batch_size) == (of.num_dense, 16_384 // of.batch_size_by)
    dense, over = ([width // of.layers_by for width in widths] for widths in (of.dense_layers, of.over_layers))
    assert [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)] == [*dense, *over, 1]
    assert sum(isinstance(layer, SwishLayerNorm) for layer in model.modules()) == len(over)
    strategy = build.build_strategy(config, Mode("base"), model)
    assert isinstance(strategy.sharding, dict)
    by_columns = [name for name, kind in strategy.sharding.items() if kind == "column_wise"]
    assert by_columns == [model.ebc.embedding_bag_configs()[-1].name]
    page = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    assert f"| {16_384 // of.batch_size_by} | {of.batch_size_by} |" in page


@pytest.mark.parametrize("bench", PUBLISHED)
def test_a_bench_of_torchrec_runs_the_arms_of_the_other_benches(bench: str) -> None:
    chosen = config_checks.arms(bench_config(f"bench={bench}"))
    others = {
        arm for other in ("two_cpu_ranks", "two_hosts") for arm in config_checks.arms(bench_config(f"bench={other}"))
    }
    others = {arm for arm in others if not arm.startswith("fused_sparse_dist/")}
    assert others | {"split_backward", "semi_sync_deferred", "loop_dmp"} <= set(chosen)


def test_every_name_has_an_arm_and_every_arm_a_name() -> None:
    config = bench_config("arms=['*']")
    assert config_checks.arms(config) == [*config_checks.our_arms(config), *config_checks.PEER_ARMS]
    for pipeline, options in list(config_checks.BY_HAND.values())[1:]:
        assert options.keys() <= inspect.signature(getattr(train_pipelines, pipeline)).parameters.keys()
    ahead = [name for name in config_checks.arms(config) if name.partition("/")[0] == "semi_sync"]
    assert ahead == ["semi_sync", *(f"semi_sync/{stream}" for stream in STREAMS if stream != "data_dist")]
    assert [name for name in config_checks.arms(config) if name in MODES] == list(MODES)
    words = (CONF / "bench.yaml").read_text(encoding="utf-8").split()
    assert {name for name in config_checks.PEER_ARMS if name.count("/") < 2} <= set(words)


def test_the_reference_is_always_trained_first() -> None:
    chosen = config_checks.arms(bench_config("arms=[torchrec/sparse*,semi_sync]"))
    torchrecs = ["torchrec/sparse_dist", "torchrec/sparse_dist/receives_first", "torchrec/sparse_dist_lite"]
    assert chosen == ["base", "semi_sync", *torchrecs]


def test_another_stream_makes_other_names() -> None:
    assert "semi_sync/data_dist" in config_checks.arms(bench_config("arms=[semi_sync/*]", "stream=dedicated"))


def test_arms_of_ours_can_replicate_small_tables() -> None:
    config = bench_config("arms=['*_sync+replicated','*sparse_dist+fp16+replicated']")
    found = set(config_checks.arms(config))
    assert {"semi_sync+replicated", "sparse_dist+fp16+replicated"} < found
    assert not [name for name in found if name.startswith("torchrec/")], "TorchRec has no such tables"
    assert config_checks.split_arm("sparse_dist+fp16+replicated") == ("sparse_dist", "fp16", True)


def test_a_precision_is_part_of_a_name() -> None:
    config = bench_config("arms=[fused_*,'*sparse_dist+fp16',base+int8]")
    chosen = config_checks.arms(config)
    build.check(config)
    assert [name for name in chosen if "+" in name] == [
        *("sparse_dist+fp16", "fused_sparse_dist+fp16"),
        *("torchrec/sparse_dist+fp16", "torchrec/fused_sparse_dist+fp16", "base+int8"),
    ]
    for arm, message in (("base+fp61", "unknown precision 'fp61'. Did you mean 'fp16'"), ("base+bf16", "by a CPU")):
        with pytest.raises(ValueError, match=re.escape(message)):
            build.check(bench_config(f"arms=[{arm}]"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("arms=[semi_sink]", "unknown arm 'semi_sink'. Did you mean 'semi_sync'"),
        ("arms=[torchrec/semisync]", "unknown arm 'torchrec/semisync'. Did you mean 'torchrec/semi_sync'"),
        ("rounds=0", "rounds must be an integer >= 1, got 0"),
        ("steps=many", "steps must be an integer >= 2, got 'many'"),
        ("latency.all_to_all_mz=3", "unknown latency 'all_to_all_mz'. Did you mean 'all_to_all_ms'"),
        ("latency.step_ms=-1", "latency.step_ms must be milliseconds >= 0, got -1"),
    ],
)
def test_bad_words_are_answered_before_a_rank_starts(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_checks.check(bench_config("bench=virtual_latency", override))


def test_two_hosts_is_a_script() -> None:
    assert subprocess.run(["bash", "-n", str(TWO_HOSTS)], check=False).returncode == 0
    assert TWO_HOSTS.stat().st_mode & 0o100


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ((), {}, "error: which modes?"),
        (("--fast",), {}, "error: unknown option '--fast'"),
        (("base",), {"RATE": "fast"}, "error: RATE is like 50mbit or 1gbit, or unlimited, got 'fast'"),
    ],
)
def test_two_hosts_says_what_it_wants(arguments: tuple[str, ...], variables: dict[str, str], message: str) -> None:
    command, environment = ["bash", str(TWO_HOSTS), *arguments], {"PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert message in done.stderr
