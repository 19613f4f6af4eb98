"""Targets: from a model's output to the one number per image that is explained.

    base         what a target is; sums of targets; the tensor to read in an output
    classes      one score for a whole image: a class, a yes or no, a likeness, any function
    given        what a caller may give for a target: an index, a label, a callable; this rather than that
    places       a class within a region, and a detected box
    objectives   other numbers to differentiate than the score of the target's class

A target is a frozen value with a ``name`` and a ``pick`` that takes the model's output and gives the score ``(N,)`` and
what was picked: the class indices ``(N,)``, or None for scores that are not a class. Targets add up: ``a - b`` is one.
"""

from explain.targets.base import (
    Labelled,
    PerImage,
    Picked,
    Settles,
    Sum,
    Target,
    find_logits,
    find_tensor,
    for_rows,
    settle,
)
from explain.targets.classes import BinaryLogit, Category, ClassTarget, ScoreTarget, Similarity, TopClass
from explain.targets.given import Difference, TargetLike, as_target, find_label
from explain.targets.objectives import Contrast, Objective, ResidualSoftmax
from explain.targets.places import Detection, Segmentation

__all__ = [
    "BinaryLogit",
    "Category",
    "ClassTarget",
    "Contrast",
    "Detection",
    "Difference",
    "Labelled",
    "Objective",
    "PerImage",
    "Picked",
    "ResidualSoftmax",
    "ScoreTarget",
    "Segmentation",
    "Settles",
    "Similarity",
    "Sum",
    "Target",
    "TargetLike",
    "TopClass",
    "as_target",
    "find_label",
    "find_logits",
    "find_tensor",
    "for_rows",
    "settle",
]
