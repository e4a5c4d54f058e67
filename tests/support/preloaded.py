"""What the server of `interpreters` has imported, and what it does once for all that it forks."""

import functools
import gc
import importlib.metadata
import subprocess
import weakref
from multiprocessing import forkserver

from . import interpreters

# Of which the launchers of torch and Lightning take it; and a program's own go to the server that forked it.
subprocess.Popen = interpreters.Popen  # type: ignore[misc]
forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
# Lightning asks for each Trainer what is installed.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
for name in (
    *("lightning.pytorch", "torchrec", "lightning_overlap", "lightning_overlap.apps.build", "hydra", "omegaconf"),
    *("torch.distributed.launcher.api", "torch.distributed.elastic.multiprocessing", "tensordict", "numpy"),
    *("lightning_overlap.data", "lightning_overlap.models", "matplotlib.figure", "pytest", "hypothesis"),
    *("tests.support.fits", "tests.support.reference", "tests.support.traces", "tests.laws.faults"),
):
    importlib.import_module(name)
for shared in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    shared.atexit = False  # of what all share
gc.collect()
gc.set_threshold(20_000)  # from 700: a sixth of the tests' CPU went into looking for cycles after so few objects
gc.freeze()  # a process that ends, or collects, would copy every page of what it shares with the server
