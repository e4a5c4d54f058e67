"""The commands `overlap-train` and `overlap-bench`: configs, ranks, reports."""

__all__ = ["bench_worker", "build", "config_checks", "hydra_command", "launch", "train_report", "train_worker"]
