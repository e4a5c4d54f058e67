"""The package as it is installed and as it is tracked: version, configs, lock files, and what no file may name."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_pins(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, flags=re.MULTILINE))


def test_version_is_that_of_the_installed_package() -> None:
    try:
        installed = metadata.version("lightning_overlap")
    except metadata.PackageNotFoundError:
        pytest.skip("lightning_overlap runs from a checkout, not installed")
    import lightning_overlap

    assert lightning_overlap.__version__ == installed


def test_type_marker_is_beside_the_package() -> None:
    assert (files("lightning_overlap") / "py.typed").is_file()


IMPORTS = """
import sys
import fsspec, torchmetrics, torchrec  # they import matplotlib and isal where these are installed
import lightning.pytorch, lightning.pytorch.strategies, lightning.pytorch.callbacks, lightning.pytorch.loops

def seen():
    modules = {name: module for name, module in list(sys.modules.items()) if name.split(".")[0] == "lightning"}
    of_classes = {
        f"{kind.__module__}.{kind.__qualname__}.{name}": id(value)
        for module in modules.values()
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__.startswith("lightning")
        for name, value in vars(kind).items()
        if callable(value) or isinstance(value, (classmethod, staticmethod, property))
    }
    of_modules = {
        f"{name}.{attribute}": id(value)
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if callable(value)
    }
    return of_classes | of_modules

before, modules = seen(), set(sys.modules)
import lightning_overlap
after = seen()
print(sorted(name for name, what in before.items() if after.get(name) != what))
print(sorted(name for name in set(sys.modules) - modules if name.split(".")[0] in ("matplotlib", "hydra", "omegaconf",
    "pyarrow", "isal", "redis", "antlr4") or name.startswith("lightning_overlap.deltas")))
"""


@pytest.mark.slow
def test_an_import_changes_one_thing_in_lightning_and_imports_nothing_of_commands_and_extras() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=True)
    changed, imported = done.stdout.splitlines()[-2:]
    assert changed == "['lightning.pytorch.core.module._load_from_checkpoint']"
    assert imported == "[]"


def test_the_locks_have_what_the_commands_and_all_extras_need() -> None:
    pins, extras = read_pins("cpu.lock"), PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *extras["plot"], *extras["deltas"], *extras["cpu"]):
        needed = Requirement(text)
        assert needed.specifier.contains(pins[needed.name]), text


def test_classifiers_come_once_and_say_what_the_package_says() -> None:
    classifiers = PROJECT["classifiers"]
    assert classifiers == sorted(set(classifiers))
    for kind in ("Development Status", "Intended Audience", "Operating System", "Programming Language", "Topic"):
        assert any(one.startswith(f"{kind} :: ") for one in classifiers)
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in classifiers
    assert not any(one.startswith("License ::") for one in classifiers), "license = says it, and both are refused"


def test_cpu_and_cuda_locks_differ_in_fbgemm_alone() -> None:
    cpu, cuda = read_pins("cpu.lock"), read_pins("cuda.lock")
    assert cpu.pop("fbgemm-gpu-cpu") == cuda.pop("fbgemm-gpu")
    assert cpu == cuda


def test_locks_pin_each_package_once() -> None:
    cpu, dev, docs = read_pins("cpu.lock"), read_pins("dev.lock"), read_pins("docs.lock")
    assert not cpu.keys() & dev.keys()
    assert not (cpu | dev).keys() & docs.keys()
    for lock in ("cpu.lock", "cuda.lock", "dev.lock", "docs.lock"):
        lines = (ROOT / "requirements" / lock).read_text(encoding="utf-8").splitlines()
        assert len(read_pins(lock)) == sum(bool(line) and not line.startswith("#") for line in lines), lock


# The package indexes are the installer's settings, and paths are the machine's: neither belongs in the repository.
FORBIDDEN = re.compile(
    r"-{2}(?:extra-)?index-url\b|-{2}trusted-host\b|-{2}registry\b|https?://[^\s/]+/simple\b|https?://registry\."
    r"|(?<![\w.:/\-])/(?:work|tmp|root|home|opt)/\w"
)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("pip install --extra-" + "index-url somewhere torch", True),
        ("torch @ https://an.index" + "/simple/torch", True),
        ("the venv of /" + "tmp/dev", True),
        ("see https://example.invalid/home/item", False),
        ("lightning_overlap/home/x.py, ./opt/x and outputs/tmp/x", False),
    ],
)
def test_what_counts_as_a_registry_host_or_machine_path(line: str, named: bool) -> None:
    assert bool(FORBIDDEN.search(line)) == named


def test_no_tracked_file_names_a_registry_host_or_machine_path() -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if FORBIDDEN.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)
