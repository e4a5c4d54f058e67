"""The package as it is installed and as it is tracked: version, configs, lock files, and what no file may name."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_pins(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, flags=re.MULTILINE))


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if (ROOT / name).is_file()]


EXTRAS = "matplotlib", "hydra", "omegaconf", "pyarrow", "isal", "redis", "antlr4"
IMPORTS = f"""
import sys
import fsspec, torchmetrics, torchrec, lightning.pytorch  # they import matplotlib and isal where these are installed
before = set(sys.modules)
import lightning_overlap
new = sorted(set(sys.modules) - before)
print([name for name in new if name.split(".")[0] in {EXTRAS} or name.startswith("lightning_overlap.deltas")])
"""


@pytest.mark.slow
def test_an_import_imports_nothing_of_commands_and_extras() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_cpu_and_cuda_locks_differ_in_fbgemm_alone() -> None:
    cpu, cuda = read_pins("cpu.lock"), read_pins("cuda.lock")
    assert cpu.pop("fbgemm-gpu-cpu") == cuda.pop("fbgemm-gpu")
    assert cpu == cuda


# The package indexes are the installer's settings, and paths are the machine's: neither belongs in the repository.
FORBIDDEN = re.compile(
    r"-{2}extra-index-url\b|-{2}index-url\b(?! ADDRESS\b)|-{2}trusted-host\b|-{2}registry\b|https?://[^\s/]+/simple\b|https?://registry\."
    r"|(?<![\w.:/\-])/(?:work|tmp|root|home|opt)/\w"
)


def test_no_tracked_file_names_a_registry_host_or_machine_path() -> None:
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in tracked()}
    assert not [(path, match.group()) for path, text in texts.items() for match in FORBIDDEN.finditer(text)]
    assert FORBIDDEN.search("the venv of /" + "tmp/dev")
    assert FORBIDDEN.search("pip install --extra-" + "index-url somewhere torch")
    assert FORBIDDEN.search("pip install torch --index" + "-url somewhere")
    assert not FORBIDDEN.search("pip install torch --index-url ADDRESS")
