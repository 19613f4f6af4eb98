"""Count lines of code: lines with a token that is no comment, docstring or blank.

python examples/benchmarks/code_lines.py            # the package, by room, and the tests
python examples/benchmarks/code_lines.py explain/engine
"""

from __future__ import annotations

import argparse
import ast
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTHING = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """Return how many lines of a file have code."""
    text = path.read_text("utf-8")
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:  # docstrings, also of constants
            value = getattr(statement, "value", None)
            if (
                isinstance(statement, ast.Expr)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                skipped |= set(
                    range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
                )
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in NOTHING and token.type != tokenize.ENCODING:
                lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - skipped)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="a folder to count by file")
    folder = parser.parse_args().folder
    if folder is not None:
        for path in sorted(folder.rglob("*.py")):
            print(f"{code_lines(path):6d}  {path}")
        return
    for part in ("explain", "tests"):
        total = 0
        files = 0
        for place in sorted((ROOT / part).iterdir()):
            paths = (
                [place]
                if place.suffix == ".py"
                else sorted(place.rglob("*.py"))
                if place.is_dir()
                else []
            )
            count = sum(map(code_lines, paths))
            if part == "explain" and paths:
                print(f"{count:6d}  {len(paths):4d} files  {place.name}")
            total = total + count
            files = files + len(paths)
        print(f"{total:6d}  {files:4d} files  {part} in all\n")


if __name__ == "__main__":
    main()
