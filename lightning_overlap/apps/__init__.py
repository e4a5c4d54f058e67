"""The commands `overlap-train` and `overlap-bench`: configs, ranks, reports.

They use what users use: the public names of the package, and Hydra.
"""

__all__ = ["bench_worker", "build", "config_checks", "hydra_command", "launch", "train_report", "train_worker"]
