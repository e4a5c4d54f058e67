"""What the forkserver of rank processes imports once, so that each rank begins with it: eight seconds of a CPU."""

import gc
import importlib

for name in (
    *("lightning.pytorch", "torchrec", "lightning_overlap", "tensordict", "numpy", "pytest", "hypothesis"),
    *("lightning_overlap.data", "lightning_overlap.models"),
    *("tests.support.fits", "tests.support.reference", "tests.support.traces", "tests.laws.faults"),
):
    importlib.import_module(name)
gc.collect()
gc.set_threshold(20_000)  # from 700: a sixth of the tests' CPU went into looking for cycles after so few objects
gc.freeze()  # a rank that collects would copy every page of what it shares with the server
