"""Configs of `overlap-train` and `overlap-bench`; this file lets Hydra find them as `pkg://lightning_overlap.conf`."""
