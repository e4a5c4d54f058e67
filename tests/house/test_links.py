"""Links of the pages that are tracked: each leads to a file that is there, and to a heading of it."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\((?P<to>[^()\s]+)\)")
HEADING = re.compile(r"^#+ (?P<words>.+)$", flags=re.MULTILINE)


def anchors(text: str) -> set[str]:
    words = [match["words"].strip().lower() for match in HEADING.finditer(FENCED.sub("", text))]
    return {re.sub(r"[^\w\- ]", "", one).replace(" ", "-") for one in words}


def broken(page: Path, text: str) -> list[str]:
    found = []
    for match in LINK.finditer(CODE.sub("", FENCED.sub("", text))):
        to, _, anchor = match["to"].partition("#")
        if re.match(r"[a-z]+:", to):
            continue
        target = (page.parent / to) if to else page
        if not target.exists():
            found.append(f"{page.name}: {match['to']}: no such file")
        elif anchor and anchor not in anchors(text if not to else target.read_text(encoding="utf-8")):
            found.append(f"{page.name}: {match['to']}: no such heading")
    return found


def pages() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


def test_every_link_leads_somewhere() -> None:
    found = [line for page in pages() for line in broken(page, page.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_the_readme_leads_to_every_page_and_example() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {match["to"].partition("#")[0] for match in LINK.finditer(FENCED.sub("", text))}
    written = {page.relative_to(ROOT).as_posix() for page in pages() if page.parent == ROOT / "docs"}
    assert written - linked == set()
    assert "examples" in linked


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[a](docs/install.md)", None),
        ("[a](docs/install.md#on-a-cpu)", None),
        ("[a](#here-it-is)", None),
        ("[a](https://example.invalid/x)", None),
        ("`[a](gone.md)`", None),
        ("[a](docs/gone.md)", "no such file"),
        ("[a](docs/install.md#gone)", "no such heading"),
        ("[a](#gone)", "no such heading"),
    ],
)
def test_a_link_that_leads_nowhere_is_seen(link: str, problem: str | None) -> None:
    found = broken(ROOT / "README.md", f"## Here, it is\n\n{link}\n")
    assert (not found) if problem is None else (problem in found[0])
