"""Links of the pages that are tracked: each leads to a file that is there, and to a heading of it."""

import re
from pathlib import Path

from .test_package import ROOT, tracked

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
    return [path for path in tracked() if path.suffix == ".md"]


def test_every_link_leads_somewhere() -> None:
    found = [line for page in pages() for line in broken(page, page.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_the_readme_leads_to_every_page_and_example() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {match["to"].partition("#")[0] for match in LINK.finditer(FENCED.sub("", text))}
    written = {page.relative_to(ROOT).as_posix() for page in pages() if page.parent == ROOT / "docs"}
    assert written - linked == set()
    assert "examples" in linked


def test_a_link_that_leads_nowhere_is_seen() -> None:
    for link in ("docs/gone.md", "docs/install.md#gone", "#gone"):
        assert len(broken(ROOT / "README.md", f"## Here\n\n[a](#here) `[a](gone.md)` [a]({link})\n")) == 1
