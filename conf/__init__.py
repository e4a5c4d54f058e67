"""Configs of `overlap-train`; this file lets Hydra find them as `pkg://lightning_overlap.conf`."""
