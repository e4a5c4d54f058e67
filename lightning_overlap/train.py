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
    from .apps import (  # torch takes seconds to import: wrong names have been answered by now
        build,
        train_report,
        train_worker,
    )

    build.check(config)
    config = build.complete(config)
    if launch.rank() == 0:
        train_worker.write_config(config, folder)
    if launch.under_launcher():
        train_worker.train(config, folder)
        return train_report.read_metric(folder) if launch.rank() == 0 else None
    num_ranks = build.num_ranks(config)
    print(_headline(config, num_ranks), flush=True)
    launch.run_ranks(num_ranks, "lightning_overlap.apps.train_worker", folder)
    return train_report.read_metric(folder)


def _headline(config: dict[str, Any], num_ranks: int) -> str:
    model, data = (config[group]["_target_"].rpartition(".")[2] for group in ("model", "data"))
    modes = [schedule.name for schedule in config_checks.modes(config)]
    sharding = config["sharding"].get("type") or "planner"
    return (
        f"overlap-train: {model} on {data}, {num_ranks} ranks, pipeline {', '.join(modes)}, "
        f"stream {config['stream']['name']}, sharding {sharding}"
    )


if __name__ == "__main__":
    main()
