"""A forward pass recorded as operations and steps; relevance propagation on them, and DeepLIFT's
multipliers.

    table            what is known of PyTorch's operations (operations.csv)
    calls            one call of an operation; the linear map that it is
    operations       the rectifiers of a pass, for rules on gradients
    steps            the steps of a pass, for rules on relevance
    constants        what the steps of a pass add that does not depend on the input, for FullGrad
    batch_layout     which rows of a tensor belong to which image
    positions        which pixels a place of a tensor stands for
    linear_rules     rules for linear maps: epsilon, gamma, alpha-beta, and those for the first map
    nonlinear_rules  rules for products, activations, softmaxes, normalisations, sums; passing on
    composites       which rule covers which step, and `propagate`, which attaches them
    propagation      the relevance that flows back, the linear maps in the graph, the rules' bases
    input_prefix     from the first map back to the pixels
    gradient_rules   rules for gradients at rectifiers (guided backpropagation, deconvnet); zero
                     leaves at attention
    deeplift         DeepLIFT's multipliers, by the rescale rule
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
