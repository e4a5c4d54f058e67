"""What the user reads where a version is not supported; the strategy in the hands of the other Trainer class."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightning_overlap import OverlapEmbeddingStrategy, versions
from lightning_overlap.compat import lightning

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
            expected = {"torch": f"=={pair.torch}.*", build: f"=={pair.fbgemm}.*", "torchrec": pair.torchrec}
            if build.endswith("cpu"):  # torchrec depends on the CUDA build
                del expected["torchrec"]
            assert found == {name: SpecifierSet(text) for name, text in expected.items()}
        assert Version(f"{pair.torch}.1") in torch
        assert versions.BUILT_FOR[pair.fbgemm] == pair.torch


def test_fbgemm_says_the_same_of_the_torch_that_it_is_built_for() -> None:
    fbgemm = pytest.importorskip("fbgemm_gpu")
    theirs = dict(re.findall(r'"(1\.\d+)": "(2\.\d+)"', Path(fbgemm.__file__).read_text(encoding="utf-8")))
    known = {name: torch for name, torch in theirs.items() if name in versions.BUILT_FOR}
    assert known
    assert known.items() <= versions.BUILT_FOR.items()


@pytest.mark.parametrize("package", versions.SUPPORTED)
def test_smoke_takes_the_oldest_and_the_newest(package: str) -> None:
    supported = Requirement(package + versions.SUPPORTED[package]).specifier
    older, newer, usual = (Version(read_pins(lock)[package]) for lock in ("older.lock", "newer.lock", "cpu.lock"))
    assert older == next(Version(each.version) for each in supported if each.operator == ">=")
    assert newer in supported
    assert older <= usual <= newer


def test_the_table_of_pairs_is_generated() -> None:
    """After a change of the pairs: paste what the assertion shows."""
    head = ("torch", "`fbgemm-gpu-cpu` or `fbgemm-gpu`", "torchrec", "extra for CPU, for CUDA", "tried")
    rows = [
        (pair.torch, pair.fbgemm, f"`{pair.torchrec}`", ", ".join(f"`{extra}`" for extra in pair.extras), pair.tried)
        for pair in versions.PAIRS
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *rows))
    assert table in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"torch": "2.13.1", "fbgemm-gpu": "1.8.0"}, None),
        ({"torch": "2.16.0", "fbgemm-gpu": "1.11.0"}, None),  # of later ones nothing is known
        ({"torch": "2.13.0+cpu", "fbgemm-gpu": "1.9.0", "fbgemm-gpu-cpu": "1.8.0"}, None),
        ({"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.9.0"}, "fbgemm-gpu-cpu 1.9.0 is built for torch 2.14, and does "),
        ({"torch": "2.13.0+cpu", "fbgemm-gpu": "1.8.0"}, "&& pip install --no-deps fbgemm-gpu-cpu==1.8.0"),
    ],
    ids=str,
)
def test_what_cannot_load_is_refused(found: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: found)
    if said is None:
        versions.check_installed()
        return
    with pytest.raises(ImportError, match=re.escape(said)):
        versions.check_installed()


@pytest.mark.smoke
def test_a_missing_name_is_told_with_the_versions() -> None:
    names: Any = {"_TrainingEpochLoop": lightning.PRIVATE_NAMES["_TrainingEpochLoop"]}
    epoch_loop = SimpleNamespace(**dict.fromkeys(names["_TrainingEpochLoop"]))
    del epoch_loop._broadcast_sigterm_tensor
    said = r"lacks _TrainingEpochLoop\._broadcast_sigterm_tensor, which .* Supported: lightning>=2\.5\.2,<2\.7"
    with pytest.raises(ImportError, match=said):
        versions.check_names("lightning", names, {"_TrainingEpochLoop": epoch_loop})


# pytorch_lightning has classes of its own, with the same names.
def test_pytorch_lightning_trainer_names_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"invalid strategy name.*OverlapEmbeddingStrategy for lightning.pytorch.Trai"):
        importlib.import_module("pytorch_lightning").Trainer(strategy=OverlapEmbeddingStrategy())


def test_pytorch_lightning_trainer_does_not_know_the_name() -> None:
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='overlap_embedding'`"):
        importlib.import_module("pytorch_lightning").Trainer(strategy="overlap_embedding")


def test_a_module_of_pytorch_lightning_is_refused_by_lightning() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, strategy="overlap_embedding", logger=False)
    with pytest.raises(TypeError, match=r"a `pytorch_lightning` object \(LightningModule\) to a `lightning.pytorch`"):
        trainer.fit(importlib.import_module("pytorch_lightning").LightningModule())


NEEDED = "ModuleNotFoundError: lightning_overlap needs {}, which is not installed. For CUDA: "
GONE = "cannot import name '_PrefetchDataFetcher'.* Installed: lightning .* Supported: lightning>="


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("import sys; sys.modules['torchrec'] = None", NEEDED.format("torchrec")),
        ("import sys; sys.modules['fbgemm_gpu'] = None", NEEDED.format("fbgemm_gpu")),
        ("import lightning.pytorch.loops.fetchers as gone; del gone._PrefetchDataFetcher", GONE),
    ],
)
def test_an_import_says_what_is_missing(breaks: str, said: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", f"{breaks}; import lightning_overlap"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 1
    assert re.search(said, done.stderr.replace("\n", " "))
    assert "The above exception" not in done.stderr or said == GONE
