"""What `mkdocs build` calls: pages of the repository outside of `docs/`, and links between all of them.

A link on a page is written as the repository has it, so that it leads somewhere there too; here it is led to the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/README.md"))
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
    "examples": "examples/index.md",
    **{f"{example}/README.md": f"{example}.md" for example in EXAMPLES},
}
"""Where a page of the repository stands in the site; those of `docs/` stand at its top."""

LINK = re.compile(r"(?P<before>!?\[(?:[^\]`]|`[^`]*`)*\])\((?P<to>[^)\s]+)\)|`[^`\n]+`")
"""A link, or code, in which there is none."""

DRAWINGS = [ROOT / "docs" / name for name in ("steps.svg", "steps_narrow.svg")]
DRAWING = re.compile(r'<img\b[^>]*\bsrc="[^"]*steps\.svg"[^>]*>')
"""The picture that the README shows."""

LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc=[\"']?(?:https?:)?//"
    r"|<link\b[^>]*\srel=[\"']?(?:stylesheet|preload|preconnect)\b[^>]*//"
)


def on_config(config: Any) -> Any:
    """Put the examples into the navigation, behind their list."""
    for section in config.nav:
        for pages in section.values() if isinstance(section, dict) else ():
            if "examples/index.md" in pages:
                pages += [f"{example}.md" for example in EXAMPLES]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside of `docs/`."""
    for path, uri in PAGES.items():
        text = _list_of_examples() if path == "examples" else (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the site's pages; a link to a file that is no page becomes its text."""
    uri = page.file.src_uri
    here = posixpath.dirname({there: path for path, there in PAGES.items()}.get(uri, f"docs/{uri}"))
    here = "" if uri == "examples/index.md" else here
    return _outside_of_code(markdown, lambda text: LINK.sub(lambda link: _led(link, here, uri), text))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put the drawings of a step into the page itself, a wide and a narrow one: they take the page's colours."""
    return DRAWING.sub(lambda _: "".join(_drawing(path) for path in DRAWINGS), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads a script, style or picture from elsewhere."""
    found = LOADED.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {output[found.start() : found.start() + 120]}")
    return output


def _led(link: re.Match[str], here: str, uri: str) -> str:
    to, _, anchor = (link["to"] or "").partition("#")
    if "://" in to or not to:
        return link[0]
    path = posixpath.normpath(posixpath.join(here, to))
    path = path if path in PAGES or not (ROOT / path / "README.md").is_file() else f"{path}/README.md"
    if not (ROOT / path).exists():
        raise PluginError(f"{uri} has a link to {link['to']}, and there is no {path}")
    if path not in PAGES and not path.startswith("docs/"):
        return link["before"].removeprefix("[").removesuffix("]")
    there = posixpath.relpath(PAGES.get(path, path.removeprefix("docs/")), posixpath.dirname(uri) or ".")
    return f"{link['before']}({there}{'#' if anchor else ''}{anchor})"


def _drawing(path: Path) -> str:
    """Return an SVG without its own colours, which those of `site.css` replace."""
    return re.sub(r"<style>.*?</style>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL).replace("\n", "")


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def _list_of_examples() -> str:
    titles = [(ROOT / example / "README.md").read_text(encoding="utf-8").splitlines()[0] for example in EXAMPLES]
    lines = [f"- [{title.lstrip('# ')}]({example})" for title, example in zip(titles, EXAMPLES, strict=True)]
    return "\n".join(("# Examples", "", *lines, ""))
