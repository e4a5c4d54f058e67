"""Tell whether a wheel carries the package whole: its modules, `py.typed`, and every file of `conf/`.

Use: `.venv/bin/python requirements/check_wheel.py dist/lightning_overlap-*.whl`
"""

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def expected() -> set[str]:
    """Return the names that a wheel of this checkout must hold."""
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_overlap").rglob("*.py")}
    configs = {f"lightning_overlap/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    return modules | configs | {"lightning_overlap/py.typed", "lightning_overlap/conf/config.yaml"}


def main(wheel: str) -> int:
    """Print what the wheel lacks; return 1 if anything."""
    missing = sorted(expected() - set(zipfile.ZipFile(wheel).namelist()))
    print("\n".join(f"{wheel} lacks {name}" for name in missing) or f"{wheel}: complete, conf/ inside")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
