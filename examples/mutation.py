"""Mutation: does some test notice a small change of the code?

    python examples/mutation.py --record contexts.sqlite
    python examples/mutation.py --contexts contexts.sqlite --count 200 --seed 0

The first call runs all tests and records which test function runs which line (some ten minutes; it
takes `coverage`). In the second, each of ``--count`` changes is drawn at random from the rooms
``--rooms``: a comparison, an operator, a number, a truth value or a condition becomes another, or a
call is left out. The tests that run the changed line are run until one of them fails: of a line
that runs at import, such as a default, those that run any line of the file, and the test of all
defaults. The script prints the changes that no test noticed, and the share that some test noticed.
Messages of errors, docstrings and ``strict=`` of `zip` are not changed.

A change is made in memory, in a process of its own: no file is written.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.machinery
import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parent.parent
OF_DEFAULTS = "tests/test_defaults.py"
FIRST_TESTS = (6, 40)
"""How many tests are collected and run first: most changes are noticed by few."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.USub: ast.UAdd,
}


@dataclass(frozen=True)
class Mutation:
    """One change: the node of the tree by its number in the order of `ast.walk`, its lines, and
    whether these run when the module is imported."""

    path: Path
    node: int
    line: int
    last_line: int
    at_import: bool


def skipped_nodes(tree: ast.AST) -> set[int]:
    """Return the nodes, by `id`, whose change says nothing: messages, annotations, overloads,
    and whether `zip` is strict."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Raise):
            parts = [node]
        elif isinstance(node, ast.AnnAssign | ast.arg):
            parts = [node.annotation]
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            parts = [node.value]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns, *node.decorator_list]
        elif isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            parts = [node]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            is_hint = node.value.id in ("Callable", "tuple", "list", "dict", "Sequence", "Mapping")
            parts = [node] if is_hint else []
        for part in parts:
            if part is not None:
                skipped.update(id(inner) for inner in ast.walk(part))
    return skipped


def can_change(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.UnaryOp):
        return type(node.op) in SWAPS or isinstance(node.op, ast.Not)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool | int | float)
    if isinstance(node, ast.If | ast.IfExp):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def changed(node: ast.AST) -> ast.AST:
    """Return the node that takes the place of one that `can_change`."""
    new = copy.copy(node)
    if isinstance(new, ast.Compare):
        new.ops = [SWAPS[type(new.ops[0])](), *new.ops[1:]]  # type: ignore[list-item]
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    elif isinstance(new, ast.BoolOp | ast.BinOp | ast.UnaryOp):
        new.op = SWAPS[type(new.op)]()  # type: ignore[assignment]
    elif isinstance(new, ast.Constant):
        is_truth = isinstance(new.value, bool)
        new.value = not new.value if is_truth else new.value + 1  # type: ignore[operator]
    elif isinstance(new, ast.If | ast.IfExp):
        new.test = ast.UnaryOp(ast.Not(), new.test)
    else:
        return ast.Pass()
    return new


class Replace(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST) -> None:
        self.old = old

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return ast.copy_location(changed(node), node)
        return self.generic_visit(node)


def mutations_of(path: Path) -> Iterator[Mutation]:
    tree = ast.parse(path.read_text("utf-8"))
    skipped = skipped_nodes(tree)
    in_functions = {
        id(inner)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for statement in function.body
        for inner in ast.walk(statement)
    }
    for number, node in enumerate(ast.walk(tree)):
        if can_change(node) and id(node) not in skipped:
            last_line = node.test.end_lineno if isinstance(node, ast.If) else node.end_lineno
            at_import = id(node) not in in_functions
            yield Mutation(path, number, node.lineno, last_line or node.lineno, at_import)


def code_of(mutation: Mutation) -> tuple[CodeType, str]:
    """Return the compiled module with the change, and the change in words."""
    tree = ast.parse(mutation.path.read_text("utf-8"))
    node = list(ast.walk(tree))[mutation.node]
    old_text = ast.unparse(node).splitlines()[0]
    new_text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(changed(node)))).splitlines()[0]
    new_tree = ast.fix_missing_locations(Replace(node).visit(tree))
    return compile(new_tree, str(mutation.path), "exec"), f"{old_text}  ->  {new_text}"


class Contexts:
    """Which test functions run which lines; those that run few lines are taken to be short."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path)
        self.file_ids = dict(self.connection.execute("SELECT path, id FROM file"))
        self.names = dict(self.connection.execute("SELECT id, context FROM context"))
        self.sizes = self._lines_by_context()

    def _lines_by_context(self) -> dict[int, int]:
        """Return how many arcs each context has: short tests run few lines."""
        query = "SELECT context_id, COUNT(*) FROM arc GROUP BY context_id"
        return dict(self.connection.execute(query))

    def tests_of(self, mutation: Mutation) -> list[str]:
        """Return the tests that run the lines, those of the same room and the shortest first."""
        file_id = self.file_ids.get(str(mutation.path))
        query = (
            "SELECT DISTINCT context_id FROM arc WHERE file_id = ?"
            " AND (tono BETWEEN ? AND ? OR fromno BETWEEN ? AND ?)"
        )
        lines = (mutation.line, mutation.last_line)
        rows = list(self.connection.execute(query, (file_id, *lines, *lines)))
        first = []
        if mutation.at_import:  # the first test that imports the module is one of many
            first = [OF_DEFAULTS]
            query = "SELECT DISTINCT context_id FROM arc WHERE file_id = ?"
            rows = list(self.connection.execute(query, (file_id,)))
        room = mutation.path.relative_to(ROOT / "explain").parts[0]
        context_ids = [row[0] for row in rows if self.names[row[0]]]
        ordered = sorted(
            context_ids,
            key=lambda i: (not self.names[i].startswith(f"tests.{room}."), self.sizes.get(i, 0)),
        )
        nodes = [*first, *(test_node(self.names[i]) for i in ordered)]
        return list(dict.fromkeys(node for node in nodes if node is not None))


def test_node(context: str) -> str | None:
    """Return pytest's name of a test function, from its name as coverage writes it."""
    parts = context.split(".")
    for count in range(len(parts) - 1, 0, -1):
        path = Path(*parts[:count]).with_suffix(".py")
        if (ROOT / path).is_file():
            return "::".join([path.as_posix(), *parts[count:]])
    return None


def record_contexts(path: Path) -> int:
    """Run all tests, write which test function runs which line, and return pytest's exit code."""
    import coverage
    import pytest

    recorder = coverage.Coverage(str(path), branch=True, source=["explain"], config_file=False)
    recorder.set_option("run:dynamic_context", "test_function")
    recorder.start()
    # chosen by a name that all have: all cases of each test are run
    exit_code = pytest.main(["-q", "-p", "no:cacheprovider", "-k", "test_"])
    recorder.stop()
    recorder.save()
    return int(exit_code)


def run_tests(mutation: Mutation, code: CodeType, tests: list[str]) -> int:
    """Run tests with the changed module until one fails; return pytest's exit code."""
    import pytest

    get_code = importlib.machinery.SourceFileLoader.get_code

    def get_changed_code(
        loader: importlib.machinery.SourceFileLoader, name: str
    ) -> CodeType | None:
        if Path(loader.path) == mutation.path:
            return code
        return get_code(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_changed_code  # type: ignore[method-assign]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    exit_code = 0
    for start, end in pairwise([0, *FIRST_TESTS, len(tests)]):
        if exit_code == 0 and tests[start:end]:
            exit_code = int(pytest.main([*options, *tests[start:end]]))
    return exit_code


def in_a_process(mutation: Mutation, code: CodeType, tests: list[str], seconds: float) -> str:
    """Return "noticed", "not noticed" or "took too long", from a process of its own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        status = 99
        with contextlib.suppress(BaseException):
            status = run_tests(mutation, code, tests)
        os._exit(0 if status == 0 else 1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return "noticed" if status else "not noticed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "took too long"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, help="run the tests and write this file")
    parser.add_argument("--contexts", type=Path, help="a file that --record wrote")
    parser.add_argument("--rooms", nargs="+", default=["methods", "relevance", "engine", "metrics"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=240, help="the longest time of a change")
    parser.add_argument(
        "--tests", type=int, default=400, help="the most test functions of a change"
    )
    parser.add_argument("--output", type=Path, help="a file of JSON lines, one a change")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    if args.record:
        sys.exit(record_contexts(args.record.resolve()))
    import numpy
    import pytest
    import torch  # loaded once, before the processes part

    assert numpy
    assert pytest
    torch.set_num_threads(1)
    contexts = Contexts(args.contexts)
    paths = [
        path for room in args.rooms for path in sorted((ROOT / "explain" / room).rglob("*.py"))
    ]
    candidates = [mutation for path in paths for mutation in mutations_of(path)]
    mutations = random.Random(args.seed).sample(candidates, args.count)
    outcomes: dict[str, int] = defaultdict(int)
    for mutation in mutations:
        code, words = code_of(mutation)
        tests = contexts.tests_of(mutation)
        outcome = "no test runs it"
        if tests:
            outcome = in_a_process(mutation, code, tests[: args.tests], args.seconds)
        outcomes[outcome] += 1
        place = f"{mutation.path.relative_to(ROOT)}:{mutation.line}"
        if outcome != "noticed":
            print(f"{outcome} ({len(tests)} tests): {place}: {words}", flush=True)
        if args.output:
            change = {"place": place, "change": words, "outcome": outcome, "tests": len(tests)}
            with args.output.open("a") as file:
                file.write(json.dumps(change) + "\n")
    total = sum(outcomes.values())
    noticed = outcomes["noticed"] + outcomes["took too long"]
    print(f"{noticed} of {total} changes noticed ({noticed / total:.1%}): {dict(outcomes)}")


if __name__ == "__main__":
    main()
