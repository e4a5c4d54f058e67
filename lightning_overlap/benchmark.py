"""`overlap-bench`: our modes, plain Lightning and TorchRec's pipelines on one model, in interleaved rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .apps import config_checks, hydra_command, launch


def main() -> None:
    """Run the command; this is the entry point `overlap-bench`."""
    hydra_command.main(_hydra_main)


@hydra.main(version_base="1.3", config_path="pkg://lightning_overlap.conf", config_name="bench")
def _hydra_main(composed: DictConfig) -> None:
    hydra_command.run_job(_job, composed)


def _job(config: dict[str, Any], folder: Path) -> None:
    config_checks.check_bench(config)
    from .apps import build, train_worker  # torch takes seconds to import: wrong names have been answered by now

    build.check(config)
    config = build.complete(config)
    if launch.rank() == 0:
        train_worker.write_config(config, folder)
    if launch.under_launcher():
        from .apps import bench_worker

        bench_worker.run(config, folder)
        return
    num_ranks = build.num_ranks(config)
    print(_headline(config, num_ranks), flush=True)
    launch.run_ranks(num_ranks, "lightning_overlap.apps.bench_worker", folder)


def _headline(config: dict[str, Any], num_ranks: int) -> str:
    model, data = (config[group]["_target_"].rpartition(".")[2] for group in ("model", "data"))
    return (
        f"overlap-bench: {model} on {data}, {num_ranks} ranks, {len(config_checks.arms(config))} arms, "
        f"{config['rounds']} rounds of {config['steps']} steps"
    )


if __name__ == "__main__":
    main()
