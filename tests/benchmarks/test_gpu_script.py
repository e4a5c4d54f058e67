"""`benchmarks/gpu.sh`, which has to run in one go on a lent GPU: its commands name what there is."""

import os
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_overlap.apps import build, config_checks
from lightning_overlap.apps.hydra_command import add_or_override

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"
CONFIGS = {"lightning_overlap.benchmark": "bench", "lightning_overlap.train": "config"}


def printed(folder: Path, *options: str, **environment: str) -> list[list[str]]:
    """Return the commands that the script prints, as lists of words."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PARTS", "TWO_BATCH", "OUT")}
    command = ["bash", str(SCRIPT), "--print", *options, str(folder / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**clean, **environment})
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not (folder / "out").exists()
    return [shlex.split(line) for line in ran.stdout.splitlines()]


def composed(command: list[str]) -> dict[str, Any]:
    """Return the config of a command, checked as the command itself does before it starts ranks."""
    python, flag, module, *overrides = command
    assert (python, flag) == ("python", "-m")
    assert find_spec(module) is not None
    own = [one for one in overrides if not one.startswith("hydra.")]
    assert len(overrides) == len(own) + 1, "every command has a run folder"
    with initialize_config_module("lightning_overlap.conf", version_base="1.3"):
        found = compose(CONFIGS[module], list(map(add_or_override, own)))
    config: Any = OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    config_checks.check(config)
    build.check({**config, "trainer": {**config["trainer"], "accelerator": "cpu"}})  # a GPU is not looked for
    return dict(config)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_command_composes_with_options_that_its_classes_take(device: str, tmp_path: Path) -> None:
    commands = printed(tmp_path, "--device", device)
    configs = [composed(command) for command in commands]
    assert all(config["trainer"]["accelerator"] == device for config in configs)
    *benches, first, second = configs
    assert [first["pipeline"]["name"], second["pipeline"]["name"]] == ["fused_sparse_dist", "split_backward"]
    assert first["callbacks"]["timeline"]["dirpath"] != second["callbacks"]["timeline"]["dirpath"]
    arms = [config_checks.arms(config) for config in benches]
    assert all("fused_sparse_dist" in of_part or "split_backward/dedicated" in of_part for of_part in arms)
    assert [config["strategy"].get("max_queued_steps", "none given") for config in benches[2:5]] == [2, 3, None]
    assert benches[-2] == benches[-1], "two ranks, alike"
    assert benches[-1]["trainer"]["num_nodes"] == 2


def test_one_part_alone(tmp_path: Path) -> None:
    [command] = printed(tmp_path, PARTS="device")
    assert composed(command)["data"]["batch_size"] == 16384
