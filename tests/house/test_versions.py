"""What the user reads where a version is not supported; the strategy in the hands of the other Trainer class."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightning_overlap import OverlapEmbeddingStrategy, versions
from lightning_overlap.plugin import private_names
from lightning_overlap.tables import sharded_module
from lightning_overlap.tables.supported_modules import ModuleSpec

from .test_package import PROJECT, ROOT, read_pins


def test_the_same_versions_are_supported_everywhere() -> None:
    stated = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cuda"])]
    for name, supported in versions.SUPPORTED.items():
        assert [each.specifier for each in stated if each.name == name] == [Requirement(name + supported).specifier]


def test_each_pair_is_an_extra_for_a_cpu_and_one_for_cuda() -> None:
    torch = next(each.specifier for each in map(Requirement, PROJECT["dependencies"]) if each.name == "torch")
    for pair in versions.PAIRS:
        for extra, build in zip(pair.extras, ("fbgemm-gpu-cpu", "fbgemm-gpu"), strict=True):
            found = {each.name: each.specifier for each in map(Requirement, PROJECT["optional-dependencies"][extra])}
            torchrec = found.pop("torchrec", None)
            assert found == {"torch": SpecifierSet(f"=={pair.torch}.*"), build: SpecifierSet(f"=={pair.fbgemm}.*")}
            assert torchrec == (None if build.endswith("cpu") else SpecifierSet(pair.torchrec))
        assert Version(f"{pair.torch}.1") in torch
        assert versions.BUILT_FOR[pair.fbgemm] == pair.torch
    assert Version("2.12.1") not in torch
    assert Version("2.15.0") not in torch


def test_the_table_of_pairs_is_generated() -> None:
    """After a change of the pairs: paste what the assertion shows."""
    head = ("torch", "`fbgemm-gpu-cpu` or `fbgemm-gpu`", "torchrec", "extra for CPU, for CUDA", "tried")
    rows = [
        (pair.torch, pair.fbgemm, f"`{pair.torchrec}`", ", ".join(f"`{extra}`" for extra in pair.extras), pair.tried)
        for pair in versions.PAIRS
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *rows))
    assert table in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_fbgemm_says_the_same_of_the_torch_that_it_is_built_for() -> None:
    fbgemm = pytest.importorskip("fbgemm_gpu")
    theirs = re.findall(r'"(1\.\d+)": "(2\.\d+)"', Path(fbgemm.__file__).read_text(encoding="utf-8"))
    assert theirs
    assert {name: torch for name, torch in theirs if name in versions.BUILT_FOR}.items() <= versions.BUILT_FOR.items()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0"}, None),
        ({"torch": "2.13.1", "fbgemm-gpu": "1.8.0"}, None),
        ({"torch": "2.16.0", "fbgemm-gpu": "1.11.0"}, None),  # of later ones nothing is known
        ({"torch": "2.13.0+cpu", "fbgemm-gpu": "1.9.0", "fbgemm-gpu-cpu": "1.8.0"}, None),
        ({"fbgemm-gpu": "1.9.0"}, None),
        ({"torch": "2.13.0+cpu"}, None),
        (
            {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.9.0"},
            "fbgemm-gpu-cpu 1.9.0 is built for torch 2.14, and does not load with torch 2.13.0+cpu.",
        ),
        (
            {"torch": "2.13.0+cpu", "fbgemm-gpu": "1.8.0"},
            "pip uninstall fbgemm-gpu && pip install --no-deps fbgemm-gpu-cpu==1.8.0",
        ),
    ],
    ids=lambda value: (
        " ".join(f"{name}={version}" for name, version in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_what_cannot_load_is_refused(found: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: found)
    if said is None:
        versions.check_installed()
        return
    with pytest.raises(ImportError) as info:
        versions.check_installed()
    assert said in str(info.value)


def stderr_of(code: str) -> list[str]:
    """Run code that fails, in an interpreter of its own; return the lines of its error."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()


@pytest.mark.slow
def test_an_import_is_refused_with_the_pairs_that_work() -> None:
    code = """
        from importlib import metadata
        installed = metadata.version
        others = {"fbgemm-gpu-cpu": "1.9.0", "torch": "2.13.0"}
        metadata.version = lambda name: others.get(name) or installed(name)
        import lightning_overlap
    """
    *_, said, note = stderr_of(code)
    assert said == (
        "ImportError: fbgemm-gpu-cpu 1.9.0 is built for torch 2.14, and does not load with torch 2.13.0. "
        "Install an fbgemm that is built for your torch."
    )
    assert note.endswith(
        "Together: torch 2.14, fbgemm 1.9, torchrec>=1.9.2,<1.10; or torch 2.13, fbgemm 1.8, torchrec>=1.8,<1.10."
    )


@pytest.mark.parametrize("package", versions.SUPPORTED)
def test_smoke_takes_the_oldest_and_the_newest(package: str) -> None:
    supported = Requirement(package + versions.SUPPORTED[package]).specifier
    older, newer, usual = (Version(read_pins(lock)[package]) for lock in ("older.lock", "newer.lock", "cpu.lock"))
    assert older == next(Version(each.version) for each in supported if each.operator == ">=")
    assert newer in supported
    assert older <= usual <= newer


@pytest.mark.smoke
def test_a_missing_name_is_told_with_the_versions() -> None:
    names: Any = {"_TrainingEpochLoop": private_names.PRIVATE_NAMES["_TrainingEpochLoop"]}
    epoch_loop = SimpleNamespace(**dict.fromkeys(names["_TrainingEpochLoop"]))
    del epoch_loop._broadcast_sigterm_tensor
    with pytest.raises(ImportError) as info:
        versions.check_names("lightning", names, {"_TrainingEpochLoop": epoch_loop})
    assert " lacks _TrainingEpochLoop._broadcast_sigterm_tensor, which lightning_overlap needs." in str(info.value)
    assert "Supported: lightning>=2.5.2,<2.7, torchrec>=1.8,<1.10." in str(info.value)


@pytest.mark.smoke
@pytest.mark.slow
def test_a_class_that_is_gone_is_told_with_the_versions() -> None:
    code = """
        import lightning.pytorch.loops.fetchers as fetchers
        del fetchers._PrefetchDataFetcher
        import lightning_overlap
    """
    stderr = "\n".join(stderr_of(code))
    assert "cannot import name '_PrefetchDataFetcher'" in stderr
    assert "Installed: lightning " in stderr
    assert "Supported: lightning>=2.5.2,<2.7" in stderr


def test_a_sharded_module_without_a_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_module, "SUPPORTED_MODULES", {SimpleNamespace: ModuleSpec()})
    monkeypatch.setattr(sharded_module, "PRIVATE_NAMES", {"SimpleNamespace": ("_lookups",)})
    with pytest.raises(ImportError, match=r"torchrec \S+ lacks SimpleNamespace\._lookups"):
        sharded_module.check_torchrec(SimpleNamespace())  # type: ignore[arg-type]


# pytorch_lightning has classes of its own, with the same names.
BOTH = """
import json, traceback
import lightning.pytorch as new, pytorch_lightning as old
import lightning_overlap as overlap

def said(function):
    try:
        function()
    except Exception as err:
        return traceback.format_exception(err)[-1].strip().splitlines()[-1]

def fit():
    new.Trainer(accelerator="cpu", devices=1, strategy="overlap_embedding", logger=False).fit(old.LightningModule())

print(json.dumps({
    "strategy": said(lambda: old.Trainer(strategy=overlap.OverlapEmbeddingStrategy())),
    "name": said(lambda: old.Trainer(strategy="overlap_embedding")),
    "module": said(fit),
}))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Ends of messages in a process of its own, where both packages are imported."""
    command = [sys.executable, "-W", "ignore", "-c", BOTH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    answers: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_repr_names_the_trainer() -> None:
    assert repr(OverlapEmbeddingStrategy("semi_sync")) == (
        "<OverlapEmbeddingStrategy for lightning.pytorch.Trainer: pipeline='semi_sync', stream='data_dist'>"
    )


@pytest.mark.slow
def test_pytorch_lightning_trainer_names_the_right_one(said: dict[str, str]) -> None:
    told = said["strategy"]
    assert told.startswith("ValueError: You selected an invalid strategy name")
    assert "OverlapEmbeddingStrategy for lightning.pytorch.Trainer" in told


@pytest.mark.slow
def test_pytorch_lightning_trainer_does_not_know_the_name(said: dict[str, str]) -> None:
    assert "invalid strategy name: `strategy='overlap_embedding'`" in said["name"]
    assert "`pytorch_lightning.strategies.Strategy`" in said["name"]


@pytest.mark.slow
def test_a_module_of_pytorch_lightning_is_refused_by_lightning(said: dict[str, str]) -> None:
    assert said["module"].startswith(
        "TypeError: You passed a `pytorch_lightning` object (LightningModule) to a `lightning.pytorch`"
    )


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["torchrec", "fbgemm_gpu"])
def test_a_package_that_is_missing_is_answered_with_how_to_install_it(missing: str) -> None:
    lines = stderr_of(f"import sys; sys.modules[{missing!r}] = None; import lightning_overlap")
    said = f"ModuleNotFoundError: lightning_overlap needs {missing}, which is not installed. For CUDA: "
    assert lines[-1].startswith(said)
    assert "The above exception" not in "\n".join(lines)
