"""Words: names say what they hold, and no name has two meanings."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.conftest import ROOT
from tests.test_house import FILES, parsed

EMPTY_WORDS = {
    *("found", "given", "made", "own", "known", "each", "mine", "about", "before", "others"),
    *("inside", "told", "drawn"),
}
"""Names that say nothing of what they hold."""

PUBLIC = {("explain/explanation/explainer.py", "each")}
"""Names that callers know."""


NAMED = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.FunctionDef: "name",
    ast.ClassDef: "name",
}
"""Where the nodes that give a name hold it."""


def test_names_say_what_they_hold() -> None:
    empty = []
    for path in FILES.values():
        for node in ast.walk(parsed(path)):
            name = getattr(node, NAMED.get(type(node), ""), None)
            is_used = isinstance(getattr(node, "ctx", None), ast.Load)
            home = path.relative_to(ROOT).as_posix()
            if name in EMPTY_WORDS and not is_used and (home, name) not in PUBLIC:
                empty.append(f"{home}:{node.lineno}: {name}")
    assert empty == []


def test_no_class_and_no_public_function_has_the_name_of_another() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for module, path in FILES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                homes[f"class {node.name}"].add(f"{module}:{node.lineno}")
        for name in functions_of(parsed(path)):
            homes[name].add(module)
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert set(twice) == set(SHARED), twice


SHARED = {
    "record": "`explain.hooks.record` leaves the model as it was, `explain.recording.record` does not",
    "class Step": "that of `explain.recording` is an operation, that of `explain.relevance` has rules",
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
