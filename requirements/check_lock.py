"""Tell whether the lock files describe the environment that runs this script, and describe it completely.

Use: `.venv/bin/python requirements/check_lock.py requirements/cpu.lock requirements/dev.lock`

Two things are checked: each locked version is the installed one, and each requirement of each locked package is met by
a locked package. Two exceptions are known: torchrec asks for fbgemm-gpu, and in a CPU install fbgemm-gpu-cpu stands in;
torchdata asks for what it downloads with, which is not used.
"""

import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

STANDS_FOR = {"fbgemm-gpu": "fbgemm-gpu-cpu"}
NOT_USED = {"torchdata": {"requests", "urllib3"}}  # for downloads; StatefulDataLoader does without


def read_lock(path: Path) -> dict[str, Requirement]:
    """Return the requirements of one lock file by canonical name."""
    lines = (line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def problems(locked: dict[str, Requirement]) -> list[str]:
    """Return one line for each package that is missing, differs from its pin, or needs what no lock names."""
    found = []
    for name, pin in sorted(locked.items()):
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            found.append(f"{pin}: locked, but not installed")
            continue
        if not pin.specifier.contains(distribution.version, prereleases=True):
            found.append(f"{pin}: locked, but {distribution.version} is installed")
        found += unmet(distribution, pin.extras, locked)
    return found


def unmet(distribution: metadata.Distribution, extras: set[str], locked: dict[str, Requirement]) -> list[str]:
    """Return one line for each requirement of `distribution` that the locked packages do not meet."""
    found = []
    for text in distribution.requires or []:
        needed = Requirement(text)
        if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        name = canonicalize_name(needed.name)
        if name in NOT_USED.get(distribution.name, ()):
            continue
        name = name if name in locked else STANDS_FOR.get(name, name)
        if name not in locked:
            if not name.startswith(("nvidia-", "cuda-", "triton")):  # a CUDA torch brings these itself
                found.append(f"{distribution.name} needs {needed}: in no lock file")
        else:
            pinned = next(iter(locked[name].specifier)).version
            if not needed.specifier.contains(pinned, prereleases=True):
                found.append(f"{distribution.name} needs {needed}: {pinned} is locked")
    return found


def main(paths: list[str]) -> int:
    """Print what is wrong; return 1 if anything is."""
    locked = {name: pin for path in paths for name, pin in read_lock(Path(path)).items()}
    found = problems(locked)
    print("\n".join(found) or f"{len(locked)} packages as locked, each requirement met")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
