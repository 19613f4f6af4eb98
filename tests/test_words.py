"""Words: names say what they hold, and no name has two meanings."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "explain"

EMPTY_WORDS = {
    "found",
    "given",
    "made",
    "own",
    "known",
    "each",
    "mine",
    "about",
    "before",
    "others",
    "inside",
    "told",
    "drawn",
}
"""Names that say nothing of what they hold."""

PUBLIC = {("explain/explanation/explainer.py", "each")}
"""Names that callers know."""


def names_in(tree: ast.AST) -> set[tuple[str, int]]:
    """Return the names that a file gives to variables, arguments, attributes and functions."""
    names: set[tuple[str, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add((node.id, node.lineno))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add((node.attr, node.lineno))
        elif isinstance(node, ast.arg):
            names.add((node.arg, node.lineno))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add((node.name, node.lineno))
    return names


def test_names_say_what_they_hold() -> None:
    empty = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, line in names_in(ast.parse(path.read_text("utf-8")))
        if name in EMPTY_WORDS and (path.relative_to(ROOT).as_posix(), name) not in PUBLIC
    ]
    assert not empty, "names that do not say what they hold: " + ", ".join(empty)


def test_no_class_has_the_name_of_another() -> None:
    homes: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(ROOT))
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not twice


SHARED = {
    "register": "a decorator, in each room for what the room lists",
    "load": "`explain.load` reads explanations, `explain.models.load` reads models",
    "film": "`explain.render.film` is of frames, `explain.training.film` of checkpoints",
}
"""Names of functions that users know in two rooms, with what each does."""


def functions_of(tree: ast.Module) -> list[str]:
    """Return the public functions of a module without the commands of the command line."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not node.name.startswith("_")
        and not any("commands.command(" in ast.unparse(line) for line in node.decorator_list)
    ]


def test_no_public_function_has_the_name_of_another() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in set(functions_of(ast.parse(path.read_text("utf-8")))):
            homes[name].append(path.relative_to(ROOT).as_posix())
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert set(twice) == set(SHARED), twice
