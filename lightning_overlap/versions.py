"""The supported versions of torch, FBGEMM, TorchRec and Lightning, and checks of the installed ones."""

import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

SUPPORTED: Mapping[str, str] = {"lightning": ">=2.5.2,<2.7", "torchrec": ">=1.8,<1.10"}
"""As in `pyproject.toml`; the tests run with the oldest and the newest version of each."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Versions that work together; torch and fbgemm as major.minor."""

    torch: str
    fbgemm: str
    torchrec: str
    tried: str  # what has been run with these versions
    extras: tuple[str, str]  # of `pip install 'lightning_overlap[...]'`, for a CPU and for CUDA


_TORCH_2_14 = "cpu-torch-2-14", "cuda-torch-2-14"
PAIRS = (
    Pair("2.14", "1.9", ">=1.9.2,<1.10", "CPU: the tests of the laws and most others", _TORCH_2_14),
    Pair("2.13", "1.8", ">=1.8,<1.10", "CPU: all tests", ("cpu", "cuda")),
)
"""Newest first. The CUDA builds have not been run; they contain the same Python code."""

BUILT_FOR: Mapping[str, str] = {"1.5": "2.10", "1.6": "2.11", "1.7": "2.12", "1.8": "2.13", "1.9": "2.14"}
"""FBGEMM -> the torch that it is built for, from FBGEMM's documentation. It does not load with another torch."""

_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")

NEEDED = ("torchrec", "fbgemm_gpu")  # imported, but on a CPU not installed as dependencies


def check_needed() -> None:
    """Raise a ModuleNotFoundError with instructions if one of `NEEDED` is missing, before slow imports."""
    for name in NEEDED:
        if (sys.modules[name] if name in sys.modules else find_spec(name)) is None:
            raise ModuleNotFoundError(
                f"lightning_overlap needs {name}, which is not installed. For CUDA: pip install "
                "'lightning_overlap[cuda]'. For a CPU: pip install 'lightning_overlap[cpu]' && pip install --no-deps "
                "torchrec==1.8.0 (torchrec depends on the CUDA build of fbgemm).",
                name=name,
            )


def check_installed() -> None:
    """Raise an ImportError if the installed FBGEMM is built for another torch, or for CUDA and torch is not."""
    found = installed()
    torch, builds = found.get("torch", ""), {name: found[name] for name in _FBGEMM if name in found}
    built_for = {name: BUILT_FOR.get(_two_numbers(version), _two_numbers(torch)) for name, version in builds.items()}
    if torch and builds and _two_numbers(torch) not in built_for.values():  # both builds install the same files
        raise ImportError(
            " and ".join(f"{name} {builds[name]} is built for torch {built}" for name, built in built_for.items())
            + f", and does not load with torch {torch}. Install an fbgemm that is built for your torch."
        )
    if set(builds) == {"fbgemm-gpu"} and torch.endswith("+cpu"):
        raise ImportError(
            f"fbgemm-gpu {builds['fbgemm-gpu']} is built for CUDA and does not load with torch {torch}; installing "
            "torchrec without --no-deps installs it. For a CPU: "
            f"pip uninstall fbgemm-gpu && pip install --no-deps fbgemm-gpu-cpu=={builds['fbgemm-gpu']}"
        )


def _two_numbers(version: str) -> str:
    return ".".join(re.findall(r"\d+", version)[:2])


def what_is_supported() -> str:
    """Return a text on the installed and the supported versions, and on versions that work together."""
    found = ", ".join(f"{name} {version}" for name, version in installed().items())
    supported = ", ".join(name + versions for name, versions in SUPPORTED.items())
    pairs = "; or ".join(f"torch {pair.torch}, fbgemm {pair.fbgemm}, torchrec{pair.torchrec}" for pair in PAIRS)
    return f"Installed: {found}. Supported: {supported}. Together: {pairs}."


def installed() -> dict[str, str]:
    """Return the versions of the installed packages that results depend on."""
    found = {}
    for package in (*SUPPORTED, "torch", *_FBGEMM):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def check_names(package: str, names: Mapping[str, Iterable[str]], owners: Mapping[str, object]) -> None:
    """Raise an ImportError if one of `owners` (a class's name -> the class or an object) lacks one of its `names`."""
    for owner, thing in owners.items():
        for name in names[owner]:
            # The class first: a property of the object may still raise.
            if not (hasattr(type(thing), name) or hasattr(thing, name)):
                version = installed().get(package, "of unknown version")  # slow, so only here
                raise ImportError(
                    f"{package} {version} lacks {owner}.{name}, which lightning_overlap needs. {what_is_supported()}"
                )
