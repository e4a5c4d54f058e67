"""What `make docs` does with the pages: links, and what a page may load."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hooks() -> dict[str, Any]:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    return runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))


def test_links_lead_where_they_lead_in_the_repository(hooks: dict[str, Any]) -> None:

    def led(text: str, uri: str) -> str:
        page = type("Page", (), {"file": type("File", (), {"src_uri": uri})})
        return str(hooks["on_page_markdown"](text, page=page))

    assert led("[a](docs/memory.md#measured) ![b](docs/timeline.png)", "index.md") == (
        "[a](memory.md#measured) ![b](timeline.png)"
    )
    assert (
        led("[a](../benchmarks/RESULTS.md) [b](../README.md#use)", "memory.md") == "[a](results.md) [b](index.md#use)"
    )
    assert (
        led("[a](../examples/torchrun) [b](modules.md)", "clusters.md") == "[a](examples/torchrun.md) [b](modules.md)"
    )
    assert led("[the license](LICENSE), `[x](y)`", "index.md") == "the license, `[x](y)`"
    with pytest.raises(Exception, match=r"has a link to gone\.md, and there is no docs/gone\.md"):
        led("[a](gone.md)", "memory.md")


@pytest.mark.parametrize(
    ("output", "loads"),
    [
        ('<script src="https://a.cdn/x.js">', True),
        ('<link rel="stylesheet" href="https://fonts.invalid/css">', True),
        ('<img src="timeline.png"><a href="https://semver.org">', False),
    ],
)
def test_a_page_that_loads_from_elsewhere_is_refused(output: str, loads: bool, hooks: dict[str, Any]) -> None:
    assert bool(hooks["LOADED"].search(output)) == loads
