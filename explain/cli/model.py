"""The model that the options name, with its labels."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from explain.arguments import UsageError
from explain.cli.answer import Answer, notes
from explain.errors import ExplainError, ModelError, raised

if TYPE_CHECKING:
    from explain.explainer import Explainer


def load_explainer(options: argparse.Namespace, answer: Answer) -> Explainer:
    """Load the model.

    Raises:
        UsageError: it, its weights or its labels cannot be used.
        ExplainError: code of the user's own raised something.
    """
    from explain.explainer import Explainer

    labels = None if options.labels is None else _read_labels(options.labels)
    with notes(answer), blaming(options.model):
        try:
            return Explainer(
                options.model,
                categories=labels,
                weights=options.weights,
                activation=options.activation,
                size=options.size,
                crop=options.crop,
                mean=options.mean,
                std=options.std,
                interpolation=options.interpolation,
                device=options.device,
            )
        except ModelError as error:  # there is no such model, or not with these options
            raise UsageError(str(error)) from error


@contextmanager
def blaming(model: str | None) -> Iterator[None]:
    """Say in one line what a factory or module of the user's own raises; it may be anything."""
    try:
        yield
    except (ExplainError, MemoryError):
        raise
    except Exception as error:
        raise ExplainError(f"{'the default model' if model is None else f'model {model!r}'} {raised(error)}") from error


def _read_labels(path: str) -> list[str]:
    try:
        labels = [line.strip() for line in Path(path).read_text("utf-8-sig").rstrip().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"labels {path!r} cannot be read: {reason}; give a text file with a label a line") from None
    if "" in labels:
        line = labels.index("") + 1
        raise UsageError(f"labels {path!r} must have a label on every line, but line {line} is empty; fill it")
    return labels
