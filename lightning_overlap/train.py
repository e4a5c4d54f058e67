"""`overlap-train`: compose and check a config, start the ranks, and return a metric to a sweep."""

from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .apps import config_checks, hydra_command, launch, train_report


def main() -> None:
    """Run `overlap-train`."""
    _runs.clear()
    hydra_command.main(_hydra_main)
    if len(_runs) > 1 and launch.rank() == 0:
        print(f"\n{train_report.compare_runs(_runs)}", flush=True)


_runs: list[tuple[list[str], Path]] = []  # overrides and run folder of every run in this process


@hydra.main(version_base="1.3", config_path="pkg://lightning_overlap.conf", config_name="config")
def _hydra_main(composed: DictConfig) -> float | None:
    return hydra_command.run_job(_job, composed)


def _job(config: dict[str, Any], folder: Path) -> float | None:
    modes = ", ".join(mode.schedule.name for mode in config_checks.modes(config))
    sharding = config["sharding"].get("type") or "planner"
    about = f"pipeline {modes}, stream {config['stream']['name']}, sharding {sharding}"
    hydra_command.run_on_ranks(config, folder, "train_worker", about)
    if launch.under_launcher() and launch.rank() != 0:
        return None
    _runs.append((list(HydraConfig.get().overrides.task), folder))
    return train_report.read_metric(folder)


if __name__ == "__main__":
    main()
