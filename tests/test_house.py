"""The shape of the package: imports go one way, importing is light, and hooks have one owner."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import explain
from explain.recording.operations import TABLE
from tests.conftest import ROOT

PACKAGE = ROOT / "explain"
ROOMS = re.findall(r"^    (\w+)/ ", explain.__doc__ or "", re.MULTILINE)


# Hooks that live as long as their owner, a wrapped model or the writer of an archive: no handle is
# left to remove.
KEPT_BY_THEIR_OWNER = {"distributed": r"register_(comm|intern|extern|mock)_hook"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
of_sources = pytest.mark.xdist_group("sources")
"""Tests that parse all files, in one process."""


def imported_names(path: Path) -> set[str]:
    """Return the modules of the package that import statements name: on top, in functions and for
    type checkers."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in FILES else str(node.module) for name in parts}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & set(FILES)


def named_in_texts(path: Path) -> set[str]:
    """Return the modules that texts name: for `import_module`, or in a table of names that are
    loaded when used.

    Of a name that is made at run time, as f"explain.cli.{name}", these are all that it may be.
    """
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and node.value in FILES:
            names.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            start = re.match(r"f['\"](explain\.(\w+\.)*)\{", ast.unparse(node))
            names |= {name for name in FILES if start and name.startswith(start[1])}
    return names


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a module, in the order of `ast.walk`."""
    return list(ast.walk(parsed(path)))


@cache
def imported_files(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, by whatever way."""
    # whose data files it opens
    own_package = {name for name in FILES if FILES[name] == path.parent / "__init__.py"}
    return imported_names(path) | (named_in_texts(path) - own_package)


FACES = {"explain", "explain.hooks"}
"""Packages that name for users, and load when asked, what stands in rooms below."""


@of_sources
def test_a_room_imports_only_from_rooms_above_it() -> None:
    wrong: list[str] = []
    for name, path in FILES.items():
        room = room_of(path)
        if name in FACES:
            continue
        above = {*ROOMS[: ROOMS.index(room)], room}
        imported = sorted(other for other in imported_files(path) if other != "explain")
        wrong += [
            f"{name} imports {other}" for other in imported if other.split(".")[1] not in above
        ]
    assert wrong == []


@of_sources
def test_no_room_imports_in_circles() -> None:
    """Commands and the like that are loaded by name, when they are used, may import what loads
    them."""
    files = FILES.keys() - FACES
    edges = {name: imported_names(FILES[name]) & files for name in files}
    # a circle raises a CycleError that names it
    order = list(TopologicalSorter(edges).static_order())
    assert set(order) == files


@of_sources
def test_a_name_is_given_once_in_a_module() -> None:
    """A second value for a constant would silently reach those who meant the first."""
    names = Counter(
        f"{module}.{ast.unparse(node.targets[0])}"
        for module, path in FILES.items()
        for node in parsed(path).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    )
    assert [name for name, count in names.items() if count > 1] == []


OF_OTHERS = {"_base", "_version"}
"""Private names of tensors, which PyTorch gives."""


def private_names(path: Path) -> set[str]:
    """Return the private names that a module gives to what it defines."""
    names = {getattr(node, NAMED.get(type(node), ""), None) for node in nodes_of(path)}
    return {name for name in names if name and name.startswith("_") and not name.endswith("__")}


NAMED = {
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.Name: "id",
}
"""Where the nodes that may define a name hold it."""


@of_sources
def test_no_room_uses_the_private_names_of_another() -> None:
    """What one room needs of another is public; methods of a base class in another room, too."""
    names: dict[str, set[str]] = {}
    for path in FILES.values():
        stored = {
            node.attr
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        names.setdefault(room_of(path), set()).update(stored | private_names(path))
    all_names = set().union(*names.values())
    wrong = []
    for module, path in FILES.items():
        own = names[room_of(path)]
        for node in nodes_of(path):
            used: list[str] = []
            if isinstance(node, ast.Attribute):
                used = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                used = [alias.name for alias in node.names if alias.name != "_utils"]
            foreign = {name for name in used if name.startswith("_") and not name.endswith("__")}
            is_ours = (foreign & all_names) - own - OF_OTHERS
            wrong += [f"{module}:{node.lineno} uses {name}" for name in is_ours]
    assert wrong == []


@of_sources
def test_three_classes_follow_the_calls_of_a_model() -> None:
    """The recorder of a pass, the watcher of what goes past it, and what counts or answers
    operators."""
    modes = {"TorchFunctionMode", "TorchDispatchMode"}
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for path in FILES.values()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    }
    following: set[str] = set()
    while new := {name for name in bases if bases[name] & (modes | following)} - following:
        following |= new
    assert following == {"PassRecorder", "Watcher", "OperatorCalls"}


def test_every_room_is_on_the_map() -> None:
    assert {room_of(path) for path in FILES.values()} - {"__init__"} == set(ROOMS)
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert len(names) <= 27


def test_no_hook_is_registered_outside_the_hooks_room() -> None:
    for path in FILES.values():
        if room_of(path) != "hooks":
            kept = KEPT_BY_THEIR_OWNER.get(room_of(path), "(?!)")
            registered = re.findall(r"register_\w*hook", path.read_text("utf-8"))
            assert all(re.fullmatch(kept, name) for name in registered), path


MODULES = [name for name in FILES if not name.endswith("__main__")]


@of_sources
def test_operations_are_listed_in_their_table_alone() -> None:
    """A function for each operation is no list of operations; two names are a comparison."""
    for path in FILES.values():
        for node in nodes_of(path):
            if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
                names = {getattr(element, "value", None) for element in node.elts}
                assert len(names) < 3 or not names <= set(TABLE), f"{path}:{node.lineno}"


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@pytest.mark.parametrize("name", MODULES)
# of random networks, which may have nothing to say
def test_the_examples_in_docstrings_are_right(name: str) -> None:
    torch.manual_seed(0)
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


def test_public_things_are_documented_with_examples() -> None:
    for name in explain.__all__:
        thing = getattr(explain, name)
        assert name in dir(explain)
        is_error = isinstance(thing, type) and issubclass(thing, Warning | Exception)
        if callable(thing) and not is_error:
            text = thing.__doc__ or ""
            assert len(text) > 100, name
            assert ">>> " in text or name in ("Attribution", "Concepts", "Explanation"), name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        explain.nonsense  # noqa: B018


def test_there_are_at_most_270_public_names() -> None:
    rooms = [importlib.import_module(f"explain.{room}") for room in ROOMS]
    names = {name for room in [explain, *rooms] for name in getattr(room, "__all__", ())}
    assert 150 < len(names) <= 270
