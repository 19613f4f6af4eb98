"""Writes the pages of the reference: one for each room of the package, and one for the command
line.

What a room offers is its ``__all__``, or, where it has none, every public class and function that
it defines. New names and rooms are found by themselves; a room that people use in their own code is
entered in `USED`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import explain
import explain.cli.program  # with all commands
from explain.cli.commands import commands
from explain.methods.base import FAMILIES, get_method, innermost_method
from explain.metrics import get_metric
from explain.metrics.evaluation import ARROWS

COSTS = Path(__file__).resolve().parents[1] / "assets" / "tables" / "methods.md"
sys.path.append(str(COSTS.parents[2] / "examples" / "benchmarks"))

from tables import cells_of  # noqa: E402
from tables import line as row_of  # noqa: E402

USED = [
    "hooks",
    "recording",
    "training",
    "distributed.communication",
    "distributed.packaging",
    "methods",
    "targets",
    "baselines",
    "metrics",
    "layers",
    "models",
    "data.inputs",
    "data.images",
    "data.boxes",
    "render",
    "explanation.explainer",
    "explanation.figure",
    "explanation.loading",
    "explanation.coco",
    "runs",
    "runs.trackers",
    "insight",
    "testing",
    "attribution.encoding",
    "attribution.records",
    "_utils.errors",
]
"""Rooms that people use in their own code, in the order of the reference."""

LEFT_OUT = {"cli"}
"""The command line has a page of its own."""


def rooms() -> list[str]:
    """All rooms that have a page: those that people use, and then what these are made of."""
    there = [name for name in USED if _exists(name)]
    return there + sorted(set(explain._ROOMS) - set(there) - LEFT_OUT)


def _exists(name: str) -> bool:
    return name.split(".")[0] in explain._ROOMS


def public(module: types.ModuleType) -> list[str]:
    """The names that a module offers, without those that are modules with pages of their own.

    >>> public(explain.data.inputs)
    ['Inputs', 'InputsLike']
    """
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if _is_own(name, value, module)]
    return [name for name in names if not isinstance(getattr(module, name), types.ModuleType)]


def _is_own(name: str, value: Any, module: types.ModuleType) -> bool:
    if name.startswith("_"):
        return False
    made_here = getattr(value, "__module__", None) == module.__name__
    return (made_here and callable(value)) or name in _aliases(module)


def _aliases(module: types.ModuleType) -> set[str]:
    """The type aliases that a module defines, but for those that would be taken for a class of
    Python's own."""
    return set(re.findall(r"^(\w+): TypeAlias = ", inspect.getsource(module), re.MULTILINE)) - {
        "Path"
    }


def write(folder: Path) -> None:
    """Write all pages; a page that is there and would not change is left alone, so that it is not
    read again."""
    folder.mkdir(exist_ok=True)
    described: dict[int, str] = {}
    pages = {"explain": _page("explain", described)}
    pages |= {room: _page(f"explain.{room}", described) for room in rooms()}
    inside = (
        _title("Internals")
        + "Subpackages that the package is made of. What is written here may change.\n\n"
    )
    inside += _toctree("Subpackages", [room for room in rooms() if room not in USED])
    pages |= {"index": _index(), "inside": inside, "command-line": "".join(_command_line())}
    files = {f"{name}.rst": text for name, text in pages.items()}
    # what other pages include
    files |= {"methods.txt": methods_table(), "metrics.txt": metrics_table()}
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
    for path in folder.glob("*.rst"):
        if path.stem not in pages:
            path.unlink()


def _title(text: str, under: str = "=") -> str:
    return f"{text}\n{under * len(text)}\n\n"


def _index() -> str:
    names = [name for name in explain.__all__ if not name.startswith("_")]
    errors = [
        name
        for name in names
        if isinstance(getattr(explain, name), type) and _is_error(getattr(explain, name))
    ]
    links = ", ".join(f":py:obj:`~explain.{name}`" for name in errors)
    return (
        _title("Reference")
        + "What ``import explain`` gives:\n\n"
        + _table([name for name in names if name not in errors])
        + f"Errors and warnings: {links}.\n\n"
        + _toctree(
            "All pages",
            ["explain", "command-line", *(room for room in rooms() if room in USED), "inside"],
        )
    )


def _is_error(kind: type) -> bool:
    return issubclass(kind, BaseException)


def _table(names: list[str]) -> str:
    """Names of the top level, each with the first line of its docstring."""
    rows = []
    for name in names:
        first = (inspect.getdoc(getattr(explain, name)) or "").split("\n\n")[0]
        rows.append(f"   * - :py:obj:`~explain.{name}`\n     - {' '.join(first.split())}\n")
    return f".. list-table::\n   :widths: 25 75\n\n{''.join(rows)}\n"


def methods_table() -> str:
    """All methods in Markdown, as their classes describe them, with the costs that were
    measured."""
    measured = map(cells_of, COSTS.read_text("utf-8").splitlines())
    costs = {row[0]: row[1] for row in measured if len(row) == 2}
    rows = [("name", "what it shows", "cost", "paper"), ("---",) * 4]
    methods = [get_method(name) for name in explain.list_methods()]
    for family in FAMILIES:
        members = [method for method in methods if innermost_method(method).family == family]
        if members:
            rows.append((f"**{family}**", "", "", ""))
        for method in members:
            name = f"`{method.name}`"
            limit = f"; for {method.only_for}" if method.only_for else ""
            rows.append((name, method.summary + limit, costs.get(name, "–"), method.paper))
    return "".join(f"{row_of(row)}\n" for row in rows)


def metrics_table() -> str:
    """All metrics in Markdown, as their classes describe them."""
    rows = [("name", "better", "what it measures", "units", "paper"), ("---",) * 5]
    for metric in map(get_metric, explain.list_metrics()):
        arrow = ARROWS[metric.better]
        rows.append((f"`{metric.name}`", arrow, metric.summary, metric.units, metric.paper))
    return "".join(f"{row_of(row)}\n" for row in rows)


def _toctree(caption: str, pages: list[str]) -> str:
    entries = "".join(f"   {page}\n" for page in pages)
    return f"{_title(caption, '-')}.. toctree::\n   :maxdepth: 1\n\n{entries}\n"


def _page(name: str, described: dict[int, str]) -> str:
    """The page of a module; what an earlier page has described is named, with a link to it."""
    module = importlib.import_module(name)
    things = {f"{name}.{each}": getattr(module, each) for each in public(module)}
    again = [
        full for full, thing in things.items() if id(thing) in described and _has_identity(thing)
    ]
    opening = f".. automodule:: {name}\n\n"
    if name == "explain":  # its docstring is a map of the rooms, for those who work on them
        opening = (
            ".. py:module:: explain\n\nThe names of the top level, as ``explain.attribute``.\n\n"
        )
    parts = [_title(name), opening]
    if again:
        links = ", ".join(f":py:obj:`{described[id(things[full])]}`" for full in again)
        parts.append(f"Also here, and described elsewhere: {links}.\n\n")
    for full, thing in things.items():
        if full not in again:
            described[id(thing)] = full
            parts.append(_entry(name, full.rpartition(".")[2], thing))
    return "".join(parts)


def _has_identity(thing: Any) -> bool:
    return isinstance(thing, type | types.FunctionType)


def _entry(module: str, name: str, value: Any) -> str:
    if isinstance(value, type):
        errors = issubclass(value, BaseException)
        inherited = "" if errors else "   :inherited-members:\n" * _is_ours_alone(value)
        return (
            f".. auto{'exception' if errors else 'class'}:: {module}.{name}\n   "
            f":members:\n{inherited}\n"
        )
    if isinstance(value, types.FunctionType):
        return f".. autofunction:: {module}.{name}\n\n"
    return f".. py:data:: {name}\n\n   {_about(value)}\n\n"


def _is_ours_alone(kind: type) -> bool:
    """Whether all that a class inherits is of this package, not the many methods of a dictionary or
    a module."""
    homes = {each.__module__.split(".")[0] for each in kind.__mro__}
    return homes <= {"explain", "builtins", "typing", "abc"} and not issubclass(
        kind, str | int | tuple | dict
    )


def _about(value: Any) -> str:
    """What a constant or an alias stands for."""
    if hasattr(value, "__origin__") or hasattr(value, "__args__"):
        return f"Stands for ``{_short(repr(value))}``."
    if isinstance(value, str):
        return f"``{_short(value)}``"
    if isinstance(value, int | float | tuple | list | dict | frozenset) and len(repr(value)) < 300:
        return f"``{value!r}``"
    return f"An object of type ``{type(value).__name__}``."


def _short(text: str) -> str:
    return re.sub(r"\b(typing|collections\.abc|torch\.nn\.modules\.module)\.", "", text)


# The command line


def _command_line() -> Iterator[str]:
    yield _title("The command line")
    yield "``explain --help`` prints the same. ``python -m explain.cli`` is the same command.\n\n"
    for words, command in all_commands():
        yield _title(f"``{words}``", "-")
        yield f"{_plain(command.help or '')}\n\n"
        yield from _options(words, command)


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """What is typed for each command, and the command with its options."""
    for name in sorted(commands.commands):
        yield f"explain {name}".rstrip(), commands.commands[name]


def _options(words: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=words)
    yield f".. program:: {words}\n\n"
    for param in command.params:
        if isinstance(param, click.Option):
            value = "" if param.is_flag else param.make_metavar(context)
            names = ", ".join(f"{name} {value}".strip() for name in param.opts)
            text = param.help or ""
        else:
            names = param.make_metavar(context)
            text = ""
        yield f".. option:: {names}\n\n   {_plain(text)}\n\n"


def _plain(text: str) -> str:
    """Words of a help as reStructuredText would have them."""
    return re.sub(r"([*`|\\])", r"\\\1", " ".join(text.split()))


# Docstrings


def resolved(app: Any, env: Any, node: Any, words: Any) -> Any:
    """Link a name in a docstring to the one thing in the reference that has it, wherever that
    is."""
    # here, since tests read this module without Sphinx too
    from sphinx.util.nodes import make_refnode

    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    wanted = str(node.get("reftarget"))
    named = [full for full, entry in domain.objects.items() if not entry.aliased]
    found = [full for full in named if full.split(".")[-1] == wanted or full == f"explain.{wanted}"]
    found = [full for full in found if not full.startswith("explain.engine.")] or found
    if not wanted.isidentifier() or len(found) != 1:
        return None
    entry = domain.objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, words, found[0])


def with_tables(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep tables in docstrings of modules as they are set: every paragraph whose lines have
    columns is a literal."""
    if what == "module":
        lines[:] = list(_literal(lines))


def without_ways_back(
    app: Any, page: str, template: str, context: dict[str, Any], tree: Any
) -> None:
    """Take links out of pages of source code: they lead to where a thing is defined, not to where
    it is offered."""
    if page == "_modules/index":
        context["body"] = re.sub(r'<li><a href="builtins.html">.*?</li>', "", context["body"])
    elif page.startswith("_modules/") and "body" in context:
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


def _literal(lines: list[str]) -> Iterator[str]:
    previous = ""
    for block in _blocks(lines):
        table = all(re.match(r"\s{4}|[\w/, -]+?\s{2,}\S", line) for line in block) and not block[
            0
        ].startswith(">>>")
        if table and not previous.rstrip().endswith("::"):
            yield from (".. code-block:: text", "")
            block = block if block[0].startswith("    ") else [f"    {line}" for line in block]
        yield from (*block, "")
        previous = block[-1]


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []
