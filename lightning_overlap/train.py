"""`overlap-train`: compose a config, check it, start the ranks, and hand a metric back to a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .apps import config_checks, hydra_command, launch


def main() -> None:
    """Run the command; this is the entry point `overlap-train`."""
    hydra_command.main(_hydra_main)


@hydra.main(version_base="1.3", config_path="pkg://lightning_overlap.conf", config_name="config")
def _hydra_main(composed: DictConfig) -> float | None:
    return hydra_command.run_job(_job, composed)


def _job(config: dict[str, Any], folder: Path) -> float | None:
    config_checks.check(config)
    modes = ", ".join(schedule.name for schedule in config_checks.modes(config))
    sharding = config["sharding"].get("type") or "planner"
    about = f"pipeline {modes}, stream {config['stream']['name']}, sharding {sharding}"
    hydra_command.run_on_ranks(config, folder, "train_worker", about)
    if launch.under_launcher() and launch.rank() != 0:
        return None
    from .apps import train_report  # numpy takes its time to import: wrong names have been answered by now

    return train_report.read_metric(folder)


if __name__ == "__main__":
    main()
