"""`overlap-train`: compose a config, check it, start the ranks, and hand a metric back to a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from . import choices, command, launch


def main() -> None:
    """Run the command; this is the entry point `overlap-train`."""
    command.main(_hydra_main)


@hydra.main(version_base="1.3", config_path="pkg://lightning_overlap.conf", config_name="config")
def _hydra_main(composed: DictConfig) -> float | None:
    return command.run_job(_job, composed)


def _job(config: dict[str, Any], folder: Path) -> float | None:
    choices.check(config)
    from . import rank, recipe, report  # torch takes seconds to import: wrong names have been answered by now

    recipe.check(config)
    config = recipe.complete(config)
    if launch.rank() == 0:
        rank.write_config(config, folder)
    if launch.under_launcher():
        rank.train(config, folder)
        return report.read_metric(folder) if launch.rank() == 0 else None
    num_ranks = recipe.num_ranks(config)
    print(_headline(config, num_ranks), flush=True)
    launch.run_ranks(num_ranks, "lightning_overlap.rank", folder)
    return report.read_metric(folder)


def _headline(config: dict[str, Any], num_ranks: int) -> str:
    model, data = (config[group]["_target_"].rpartition(".")[2] for group in ("model", "data"))
    modes = [schedule.name for schedule in choices.modes(config)]
    sharding = config["sharding"].get("type") or "planner"
    return (
        f"overlap-train: {model} on {data}, {num_ranks} ranks, pipeline {', '.join(modes)}, "
        f"stream {config['stream']['name']}, sharding {sharding}"
    )


if __name__ == "__main__":
    main()
