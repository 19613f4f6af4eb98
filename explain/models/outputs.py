"""What a model's outputs are, found out by the first photos and said once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from explain._utils.errors import LabelsError, either, warn
from explain.engine.output_activation import outputs_of
from explain.engine.validation import check_inputs
from explain.models.classifier import Classifier
from explain.targets.outputs import Activation, Outputs


def outputs_for(
    classifier: Classifier, x: torch.Tensor, logits: torch.Tensor, activation: Activation | None
) -> Outputs:
    """Say how a classifier's outputs become probabilities, of which ``logits`` ``(N, K)`` are those for ``x``.

    A warning says it where they are found to be probabilities already.
    """
    found = outputs_of(classifier.model, check_inputs(classifier.model, x), logits, activation)
    if activation is None and found.activation == "none":
        how = "add up to one" if found.exclusive else "lie between 0 and 1"
        warn(
            f"model {classifier.name!r} gives probabilities already (they {how}), so they are taken as they are; "
            f"{either('pass activation=', 'give --activation')} to say what they are"
        )
    return replace(found, temperature=classifier.temperature)


def check_labels(categories: Sequence[str] | None, classes: int) -> None:
    """Refuse labels that are more or fewer than the classes.

    Raises:
        LabelsError: they are.
    """
    if categories is not None and len(categories) != classes:
        raise LabelsError(
            f"{either('categories', '--labels')} must hold a label for each of the model's {classes} classes, got "
            f"{len(categories)}; give them all, in the order of the classes"
        )
