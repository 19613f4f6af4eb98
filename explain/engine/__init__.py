"""The engine: the fewest passes that gather what the methods asked for need.

    entry       what is refused before anything runs
    evidence    what a method may ask for, and what it gets
    rules       what a backward pass may do to a gradient at a rectifier
    linear      what biases add, and a head's weights for a class
    blocks      transformer blocks, each read out on its own
    variants    the same question asked of altered inputs or feature maps
    passes      one forward pass, and the backward passes over it

A method declares its needs and is otherwise a function of `Evidence`. A new kind of evidence is one frozen class in
`evidence` and the lines of `passes` that gather it.
"""

from explain.engine.entry import check_inputs
from explain.engine.evidence import (
    Activations,
    Attention,
    AttentionMap,
    BiasTerms,
    ClassWeights,
    Evidence,
    InputGradients,
    LayerCurvature,
    LayerGradients,
    Need,
    Reruns,
)
from explain.engine.passes import gather
from explain.engine.variants import Precision, Progress, Variants, Work

__all__ = [
    "Activations",
    "Attention",
    "AttentionMap",
    "BiasTerms",
    "ClassWeights",
    "Evidence",
    "InputGradients",
    "LayerCurvature",
    "LayerGradients",
    "Need",
    "Precision",
    "Progress",
    "Reruns",
    "Variants",
    "Work",
    "check_inputs",
    "gather",
]
