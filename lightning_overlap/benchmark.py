"""`overlap-bench`: our modes, plain Lightning and TorchRec's pipelines on one model, in interleaved rounds."""

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .apps import config_checks, hydra_command


def main() -> None:
    """Run `overlap-bench`."""
    hydra_command.main(_hydra_main)


@hydra.main(version_base="1.3", config_path="pkg://lightning_overlap.conf", config_name="bench")
def _hydra_main(composed: DictConfig) -> None:
    hydra_command.run_job(_job, composed)


def _job(config: dict[str, Any], folder: Path) -> None:
    about = f"{len(config_checks.arms(config))} arms, {config['rounds']} rounds of {config['steps']} steps"
    hydra_command.run_on_ranks(config, folder, "bench_worker", about)


if __name__ == "__main__":
    main()
