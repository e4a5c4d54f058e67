"""Which versions of Lightning and TorchRec the package works with, said where one of them lacks a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata

SUPPORTED: Mapping[str, str] = {"lightning": ">=2.5.2,<2.7", "torchrec": ">=1.8,<1.10"}
"""As in `pyproject.toml`; the tests run with the oldest and the newest of each."""


_UNKNOWN = "of unknown version"


def what_is_supported() -> str:
    """Return a sentence that names the installed and the supported versions."""
    installed = ", ".join(f"{name} {_installed(name)}" for name in SUPPORTED)
    supported = ", ".join(name + versions for name, versions in SUPPORTED.items())
    return f"Installed: {installed}. Supported: {supported}."


NEEDED = ("torchrec", "fbgemm_gpu")
"""What no dependency of the package brings along on a CPU, by the name that is imported."""


def what_is_missing(name: str) -> str:
    """Return a sentence on how to install what is missing.

    Args:
        name: One of `NEEDED`.
    """
    return (
        f"lightning_overlap needs {name}, which is not installed. For CUDA: pip install 'lightning_overlap[cuda]'. For "
        "a CPU: pip install 'lightning_overlap[cpu]' && pip install --no-deps torchrec==1.8.0 (torchrec itself asks for"
        " the CUDA build of fbgemm)."
    )


def installed() -> dict[str, str]:
    """Return the versions of what a measurement depends on."""
    packages = ("torch", "lightning", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
    known = {package: _installed(package) for package in packages}
    return {package: version for package, version in known.items() if version != _UNKNOWN}


def check_names(package: str, names: Mapping[str, Iterable[str]], owners: Mapping[str, object]) -> None:
    """Raise if a package lacks a private name that is used of it.

    Args:
        package: Whose names they are.
        names: Names by the class that has them.
        owners: A live object, or the class itself, for each class to look at.

    Raises:
        ImportError: An object lacks a name.
    """
    for owner, thing in owners.items():
        for name in names[owner]:
            # The class first: a property may not have an answer yet.
            if not (hasattr(type(thing), name) or hasattr(thing, name)):
                raise ImportError(
                    f"{package} {_installed(package)} lacks {owner}.{name}, which lightning_overlap needs. "
                    f"{what_is_supported()}"
                )


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _UNKNOWN
