"""Which versions of torch, FBGEMM, TorchRec and Lightning the package works with, said where others are installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

SUPPORTED: Mapping[str, str] = {"lightning": ">=2.5.2,<2.7", "torchrec": ">=1.8,<1.10"}
"""As in `pyproject.toml`; the tests run with the oldest and the newest of each."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Versions that go together: of torch and of the fbgemm built for it the first two numbers."""

    torch: str
    fbgemm: str
    torchrec: str
    tried: str
    """What has been run with it."""
    extras: tuple[str, str]
    """What `pip install 'lightning_overlap[...]'` takes for it, on a CPU and on CUDA."""


_TORCH_2_14 = "cpu-torch-2-14", "cuda-torch-2-14"
PAIRS = (
    Pair("2.14", "1.9", ">=1.9.2,<1.10", "CPU: the tests of the laws and most others", _TORCH_2_14),
    Pair("2.13", "1.8", ">=1.8,<1.10", "CPU: all tests", ("cpu", "cuda")),
)
"""Newest first. The CUDA builds have not been run; they come with the same Python code."""

BUILT_FOR: Mapping[str, str] = {"1.5": "2.10", "1.6": "2.11", "1.7": "2.12", "1.8": "2.13", "1.9": "2.14"}
"""The torch that each FBGEMM is built for, as FBGEMM's own table has it. It loads with no other."""

_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")


NEEDED = ("torchrec", "fbgemm_gpu")
"""What no dependency of the package brings along on a CPU, by the name that is imported."""


def check_needed() -> None:
    """Raise if one of `NEEDED` is missing, before seconds of imports come to it.

    Raises:
        ModuleNotFoundError: It says how to install it.
    """
    for name in NEEDED:
        if (sys.modules[name] if name in sys.modules else find_spec(name)) is None:
            raise ModuleNotFoundError(
                f"lightning_overlap needs {name}, which is not installed. For CUDA: pip install "
                "'lightning_overlap[cuda]'. For a CPU: pip install 'lightning_overlap[cpu]' && pip install --no-deps "
                "torchrec==1.8.0 (torchrec itself asks for the CUDA build of fbgemm).",
                name=name,
            )


def check_installed() -> None:
    """Raise if the installed torch and FBGEMM cannot work together; what is not installed is not looked at.

    Raises:
        ImportError: FBGEMM is built for another torch, or for CUDA while torch is not.
    """
    found = installed()
    torch, builds = found.get("torch"), {name: found[name] for name in _FBGEMM if name in found}
    if torch is None:
        return
    built_for = {name: BUILT_FOR.get(_two_numbers(version), _two_numbers(torch)) for name, version in builds.items()}
    if builds and _two_numbers(torch) not in built_for.values():  # of two, nobody knows whose files are there
        raise ImportError(
            " and ".join(f"{name} {builds[name]} is built for torch {built}" for name, built in built_for.items())
            + f", and does not load with torch {torch}. Install an fbgemm and a torch that go together."
        )
    if set(builds) == {"fbgemm-gpu"} and torch.endswith("+cpu"):
        raise ImportError(
            f"fbgemm-gpu {builds['fbgemm-gpu']} is a build for CUDA and does not load with torch {torch}; torchrec "
            "brings it along where it is installed without --no-deps. For a CPU: "
            f"pip uninstall fbgemm-gpu && pip install --no-deps fbgemm-gpu-cpu=={builds['fbgemm-gpu']}"
        )


def _two_numbers(version: str) -> str:
    return ".".join(re.findall(r"\d+", version)[:2])


def what_is_supported() -> str:
    """Return what is installed, which versions are supported, and which go together."""
    found = ", ".join(f"{name} {version}" for name, version in installed().items())
    supported = ", ".join(name + versions for name, versions in SUPPORTED.items())
    pairs = "; or ".join(f"torch {pair.torch}, fbgemm {pair.fbgemm}, torchrec{pair.torchrec}" for pair in PAIRS)
    return f"Installed: {found}. Supported: {supported}. Together: {pairs}."


def installed() -> dict[str, str]:
    """Return the versions of what a measurement depends on."""
    found = {}
    for package in (*SUPPORTED, "torch", *_FBGEMM):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def check_names(package: str, names: Mapping[str, Iterable[str]], owners: Mapping[str, object]) -> None:
    """Raise if a package lacks a private name that is used of it.

    The names are listed by the class that has them; for each class to look at there is a live object, or itself.

    Raises:
        ImportError: An object lacks a name.
    """
    for owner, thing in owners.items():
        for name in names[owner]:
            # The class first: a property may not have an answer yet.
            if not (hasattr(type(thing), name) or hasattr(thing, name)):
                version = installed().get(package, "of unknown version")  # here alone: it reads many files
                raise ImportError(
                    f"{package} {version} lacks {owner}.{name}, which lightning_overlap needs. {what_is_supported()}"
                )
