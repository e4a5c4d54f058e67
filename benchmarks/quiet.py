"""Benchmarks print their own numbers alone: no logs, no warnings, and a Trainer that prints and saves nothing."""

import logging
import warnings
from typing import Any

OPTIONS: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False
)
"""For the Trainer. The batches of a rank are its own."""


def be_quiet() -> None:
    """Show no warnings, and no messages of loggers but errors."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # levels would be set anew by libraries that are imported later
