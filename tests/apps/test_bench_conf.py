"""What `overlap-bench` may be asked for, and what is answered before a rank starts."""

import inspect
import re

import pytest
from torchrec.distributed.train_pipeline import train_pipelines

from lightning_overlap import MODES
from lightning_overlap.apps import build, config_checks

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
