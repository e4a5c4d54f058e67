"""Write docs/api.md: what a program imports, with signatures and docstrings as text.

Run `python docs/make_api.py` after a change of a public signature or docstring; `tests/house/test_docs.py` compares
the page with what this makes. The sources are read and not imported, so no package has to be installed.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
WIDTH = 100  # of a signature; a longer one gets a line for each argument


@dataclass(frozen=True)
class Name:
    """A public name, the file that defines it, and which of its methods the page has."""

    name: str
    file: str  # below the package
    members: Sequence[str] | None = None  # None: all public ones; each a method, or "FILE:CLASS.METHOD" of a base class


_READS = "plugin/table_reads.py:ReadsTables"
MODULES: dict[str, tuple[str, list[Name]]] = {
    "lightning_overlap": (
        "",
        [
            Name(
                "OverlapEmbeddingStrategy",
                "plugin/strategy.py",
                (
                    f"{_READS}.table",
                    f"{_READS}.table_chunks",
                    f"{_READS}.raw_ids",
                    "plugin/run.py:HasRun.tables_changed",
                ),
            ),
            Name("combined_optimizer", "tables/combined_optimizer.py"),
            Name("open_checkpoint", "checkpoint/opened.py"),
            Name("OverlapMonitor", "callbacks/monitor.py", ()),
            Name("OverlapTimeline", "callbacks/timeline.py", ()),
            Name(
                "ExponentialMovingAverage",
                "callbacks/moving_average.py",
                ("num_samples", "averaged", "trained_weights", "averaged_state_dict", "bring_up_to_date"),
            ),
            Name("AVERAGES", "checkpoint/parts.py"),
            Name("Balance", "balance/options.py", ()),
            Name("EmbeddingDeltas", "deltas/recording/callback.py", ()),
            Name("Replica", "deltas/serving/replica.py"),
            Name("Mode", "schedules/mode.py"),
            Name("MODES", "schedules/modes.py"),
            Name("STREAMS", "schedules/modes.py"),
            Name("Schedule", "schedules/schedule.py"),
            Name("Step", "schedules/schedule.py"),
            Name("Stage", "schedules/stages.py"),
            Name("StreamName", "schedules/stages.py"),
            Name("ScheduleError", "schedules/schedule.py"),
        ],
    ),
    "lightning_overlap.tuning": ("", [Name("Auto", "tuning/arms.py")]),
    "lightning_overlap.testing": (
        "",
        [
            Name("check_module", "testing/check_module.py"),
            Name("ModuleReport", "testing/check_module.py"),
            Name("Verdict", "testing/check_module.py"),
            Name("check_laws", "testing/check_schedule.py"),
            Name("CheckedStreams", "testing/checked_streams.py", ()),
            Name("RaceError", "testing/race_detector.py"),
        ],
    ),
    "lightning_overlap.deltas": (
        "Needs the extra `deltas`: `pip install 'lightning_overlap[deltas]'`. `Replica` is here, too.",
        [
            Name("DiskStore", "storage/disk_store.py", ()),
            Name("ObjectStore", "storage/object_store.py", ()),
            Name("RedisStore", "storage/redis_store.py", ()),
            Name("Store", "storage/store.py"),
            Name("prune", "deltas/files/sink.py"),
        ],
    ),
    "lightning_overlap.ray": (
        "Needs the extra `ray`: `pip install 'lightning_overlap[ray]'`.",
        [Name("RayOverlapStrategy", "ray.py", ())],
    ),
    "lightning_overlap.profiling": (
        "",
        [
            Name("read_trace", "profiling/torch_trace.py"),
            Name("summarize", "profiling/report.py"),
            Name("as_report", "profiling/report.py"),
            Name("write_png", "profiling/draw_png.py"),
            Name("write_trace", "profiling/trace_file.py"),
        ],
    ),
}
"""Module -> a remark, and its names in the order of the page."""

HEAD = """# Python API

What a program imports; for commands see [commands](commands.md). `python docs/make_api.py` makes this page from the
docstrings.
"""

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_TITLES = {"Args": "Arguments"}
_ENTRY = re.compile(r"(?P<name>\*{0,2}\w+(?:, \w+)*): (?P<text>.*)")
Definition = ast.ClassDef | ast.FunctionDef


def page() -> str:
    """Return the text of docs/api.md."""
    parts = [HEAD]
    for module, (remark, names) in MODULES.items():
        listed = " · ".join(f"[{one.name}](#{one.name.lower()})" for one in names)
        parts += [f"## {module}", *filter(None, [remark]), listed]
        for one in names:
            parts += [f"### {one.name}", *_blocks(one)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _blocks(one: Name) -> Iterator[str]:
    node, text = _find(one.file, one.name)
    if isinstance(node, ast.expr):  # a constant
        yield from _docstring(text)
        return
    if isinstance(node, ast.FunctionDef):
        yield _signature(one.name, node)
        yield from _docstring(text)
        return
    yield from _class(one.name, node, text)
    members = one.members
    if members is None:
        members = [*_attributes(node), *(one.name for one in _methods(node) if not one.name.startswith("_"))]
    for member in members:
        file, _, path = member.rpartition(":")
        owner, method = path.split(".") if file else (one.name, member)
        yield from _method(one.name, file or one.file, owner, method)


def _class(name: str, node: ast.ClassDef, text: str) -> Iterator[str]:
    made = next((method for method in _methods(node) if method.name == "__init__"), None)
    values = _values(node)
    if made is not None:
        yield _signature(name, made, skip_self=True)
    elif any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        yield _called(
            name,
            [_field(one) for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in _annotation(one)],
        )
    yield from _docstring(text)
    if values and "Attributes:" not in text and "Args:" not in text:
        yield _list("Values" if not any(isinstance(one, ast.AnnAssign) for one in node.body) else "Attributes", values)


def _method(of_class: str, file: str, owner: str, method: str) -> Iterator[str]:
    node, _ = _find(file, owner)
    assert isinstance(node, ast.ClassDef)
    found = [one for one in _methods(node) if one.name == method]
    if not found:  # an attribute that `__init__` sets
        yield f"#### {of_class}.{method}"
        yield from _docstring(_attribute(node, method))
        return
    last = found[-1]  # behind its overloads
    yield f"#### {of_class}.{method}"
    is_property = any(
        ast.unparse(one).rpartition(".")[2] in ("property", "cached_property") for one in last.decorator_list
    )
    if is_property:
        yield f"```text\n{method}: {ast.unparse(last.returns) if last.returns else 'Any'}\n```"
    else:
        yield _signature(method, last, skip_self=True)
    yield from _docstring(ast.get_docstring(last) or "")


# -- what the sources have ------------------------------------------------------------------------------------------


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / "lightning_overlap" / file).read_text(encoding="utf-8"))


def _find(file: str, name: str) -> tuple[Definition | ast.expr, str]:
    """Return the definition of a name at the top of a file, and its docstring."""
    body = _tree(file).body
    for at, node in enumerate(body):
        if isinstance(node, Definition) and node.name == name:
            return node, ast.get_docstring(node) or ""
        if isinstance(node, ast.AnnAssign | ast.Assign) and name in map(ast.unparse, _targets(node)):
            assert node.value is not None
            return node.value, _text_behind(body, at)
    raise LookupError(f"{file} defines no {name}")


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [one for one in node.body if isinstance(one, ast.FunctionDef)]


def _targets(node: ast.AnnAssign | ast.Assign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _text_behind(body: Sequence[ast.stmt], at: int) -> str:
    """Return the string that stands behind an assignment, as its docstring."""
    behind = body[at + 1] if at + 1 < len(body) else None
    if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant) and isinstance(behind.value.value, str):
        return inspect.cleandoc(behind.value.value)
    return ""


def _comment(file_line: str) -> str:
    return file_line.partition("  # ")[2].strip()


def _values(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Return what a class body assigns, with the docstrings, or the comments of lines, behind it."""
    source = _source_of(node)
    found = []
    for at, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign | ast.Assign):
            text = _text_behind(node.body, at) or _comment(source[(one.end_lineno or one.lineno) - 1])
            found += [(name, text) for name in map(ast.unparse, _targets(one)) if not name.startswith("_")]
    return [(name, text) for name, text in found if text]


def _source_of(node: ast.ClassDef) -> list[str]:
    for _, names in MODULES.values():
        for one in names:
            if node in _tree(one.file).body:
                return (ROOT / "lightning_overlap" / one.file).read_text(encoding="utf-8").splitlines()
    raise LookupError(node.name)


def _attributes(node: ast.ClassDef) -> list[str]:
    """Return the names of the public attributes that `__init__` sets and describes."""
    found = []
    for made in (method for method in _methods(node) if method.name == "__init__"):
        for at, one in enumerate(made.body):
            if isinstance(one, ast.AnnAssign | ast.Assign) and _text_behind(made.body, at):
                names = [name.removeprefix("self.") for name in map(ast.unparse, _targets(one))]
                found += [name for name in names if not name.startswith("_")]
    return found


def _attribute(node: ast.ClassDef, name: str) -> str:
    for function in [node, *_methods(node)]:
        for at, one in enumerate(function.body):
            if isinstance(one, ast.AnnAssign | ast.Assign) and f"self.{name}" in map(ast.unparse, _targets(one)):
                return _text_behind(function.body, at)
    raise LookupError(f"{node.name} has no {name}")


# -- signatures -----------------------------------------------------------------------------------------------------


def _annotation(one: ast.AnnAssign) -> str:
    return ast.unparse(one.annotation)


def _field(one: ast.AnnAssign) -> str:
    default = "" if one.value is None else f" = {ast.unparse(one.value)}"
    return f"{ast.unparse(one.target)}: {_annotation(one)}{default}"


def _signature(name: str, node: ast.FunctionDef, *, skip_self: bool = False) -> str:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [_argument(one, default) for one, default in zip(positional, defaults, strict=True)]
    parts = parts[1:] if skip_self else parts
    if arguments.vararg is not None:
        parts.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None:
        parts.append(f"**{_argument(arguments.kwarg, None)}")
    returned = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    return _called(name, parts, returned)


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    annotation = "" if one.annotation is None else f": {ast.unparse(one.annotation)}"
    return one.arg + annotation + ("" if default is None else f" = {ast.unparse(default)}")


def _called(name: str, parts: Sequence[str], returned: str = "") -> str:
    line = f"{name}({', '.join(parts)}){returned}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"
    return f"```text\n{line}\n```"


# -- docstrings -----------------------------------------------------------------------------------------------------


def _docstring(text: str) -> Iterator[str]:
    """Yield a docstring's paragraphs, its code, and its sections as lists."""
    section, lines = "", []
    for line in [*text.splitlines(), "End:"]:
        title = _SECTION.fullmatch(line)
        if title is None and line != "End:":
            lines.append(line)
            continue
        if section:
            yield _list(_TITLES.get(section, section), _entries(lines))
        else:
            yield from _paragraphs(lines)
        section, lines = title[1] if title else "", []


def _paragraphs(lines: Sequence[str]) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n(?=\S)|\n\s*\n(?=    )", "\n".join(lines).strip("\n")):
        if paragraph.startswith("    "):
            yield f"```text\n{textwrap.dedent(paragraph)}\n```"
        elif paragraph:
            yield paragraph


def _entries(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, text) of a section's entries; the name is "" for a text without one."""
    found: list[tuple[str, str]] = []
    for line in inspect.cleandoc("\n".join(["", *lines])).splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry is not None:
            found.append((entry["name"], entry["text"]))
        elif found and (line.startswith(" ") or not found[-1][0]):  # goes on
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}".strip())
        elif line:
            found.append(("", line))
    return found


def _list(title: str, entries: Sequence[tuple[str, str]]) -> str:
    texts = [(name, " ".join(text.split())) for name, text in entries]
    lines = [f"- `{name}`: {text}" if name else f"- {text}" for name, text in texts]
    return "\n".join([f"**{title}**", "", *lines])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
