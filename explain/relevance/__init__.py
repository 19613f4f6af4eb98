"""Relevance propagation on the recording of a forward pass; DeepLIFT's multipliers, and rules for
gradients.

    steps            the steps of a recording that rules act on: their kinds, signals and maps
    linear_maps      the linear maps among them: what is mapped, by which weights
    linear_rules     rules for linear maps: epsilon, gamma, alpha-beta, and those for the first map
    nonlinear_rules  rules for products, activations, softmaxes, normalisations, sums; passing on
    composites       which rule covers which step, and `propagate`, which walks back by them
    propagation      the relevance that flows back, and the rules' bases
    input_prefix     from the first map back to the pixels
    deeplift         DeepLIFT's multipliers, by the rescale rule
    constants        what the steps of a pass add that does not depend on the input, for FullGrad
    rectifiers       the rectifiers of a recording, in whatever words
    gradient_rules   rules for gradients at rectifiers (guided backpropagation, deconvnet)
"""

from explain.relevance.composites import COMPOSITES, Composite, When
from explain.relevance.linear_rules import (
    AlphaBeta,
    Epsilon,
    Flat,
    Gamma,
    Gradient,
    WSquare,
    ZBox,
    ZPlus,
)
from explain.relevance.propagation import LinearRule, RelevanceRule

__all__ = [
    "COMPOSITES",
    "AlphaBeta",
    "Composite",
    "Epsilon",
    "Flat",
    "Gamma",
    "Gradient",
    "LinearRule",
    "RelevanceRule",
    "WSquare",
    "When",
    "ZBox",
    "ZPlus",
]
