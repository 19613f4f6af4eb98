"""`Command`: what a word after ``explain`` does, as a value."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from explain.arguments import Option
from explain.cli.answer import Answer

Run = Callable[[argparse.Namespace, Answer], int]
"""Does what was asked for, says it, and returns the exit code."""


@dataclass(frozen=True)
class Command:
    """A command: its name, what it does in a few words, its options, and the function that does it.

    ``key`` is what the list of results is called in a JSON document. ``flag`` is the option of plain ``explain`` that
    means the same; what it takes goes to the option ``value``. ``needs_images`` says that a command that takes photos
    is of no use without. A command is one module with one such value, and one line in `explain.cli.commands`.
    """

    name: str
    about: str
    options: tuple[Option, ...]
    run: Run
    key: str = "results"
    flag: Option | None = None
    value: str = ""
    example: str = ""
    needs_images: bool = True
