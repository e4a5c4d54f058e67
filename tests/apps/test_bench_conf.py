"""What `overlap-bench` may be asked for, and what is answered before a rank starts."""

import inspect
import re
import subprocess
from pathlib import Path

import pytest
from torchrec.distributed.train_pipeline import train_pipelines

from lightning_overlap import MODES, STREAMS
from lightning_overlap.apps import build, config_checks

from .test_conf import composed, names

TWO_HOSTS = Path(__file__).resolve().parents[2] / "benchmarks" / "two_hosts.sh"


def bench_config(*overrides: str) -> dict[str, object]:
    return composed(*overrides, command="bench")


@pytest.mark.parametrize("bench", names("bench"))
def test_each_bench_can_run(bench: str) -> None:
    config = bench_config(f"bench={bench}", "trainer=cpu")
    config_checks.check(config)
    assert config_checks.arms(config)[0] == "base"
    if bench != "sparse_nn":  # has tables of 40 GB
        build.check(config)


def test_every_name_has_an_arm_and_every_arm_a_name() -> None:
    config = bench_config("arms=['*']")
    assert config_checks.arms(config) == [*config_checks.our_arms(config), *config_checks.PEER_ARMS]
    for pipeline, options in list(config_checks.BY_HAND.values())[1:]:
        assert options.keys() <= inspect.signature(getattr(train_pipelines, pipeline)).parameters.keys()
    ahead = [name for name in config_checks.arms(config) if name.partition("/")[0] == "semi_sync"]
    assert ahead == ["semi_sync", *(f"semi_sync/{stream}" for stream in STREAMS if stream != "data_dist")]
    assert [name for name in config_checks.arms(config) if name in MODES] == list(MODES)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["arms=[torchrec/sparse*,semi_sync]"],  # the reference is always trained first
            ["semi_sync", *("torchrec/sparse_dist" + more for more in ("", "/receives_first", "_lite"))],
        ),
        (
            ["arms=[semi_sync/*]", "stream=dedicated"],  # another stream makes other names
            ["semi_sync/data_dist", "semi_sync/current"],
        ),
        (
            ["arms=['*_sync+replicated','sparse*_dist+fp16+replicated']"],  # TorchRec has no such tables
            ["semi_sync+replicated", "sparse_dist+fp16+replicated"],
        ),
    ],
)
def test_arms(overrides: list[str], expected: list[str]) -> None:
    assert config_checks.arms(bench_config(*overrides)) == ["base", *expected]


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
