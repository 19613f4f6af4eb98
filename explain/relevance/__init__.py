"""Relevance propagation: rules, composites, and the backward pass that applies them; DeepLIFT's multipliers.

rule             `RelevanceRule` and `LinearRule`, the bases of all rules for relevance
linear_rules     rules for linear maps: epsilon, gamma, alpha-beta, and those for the first map
nonlinear_rules  rules for products, activations (a ReLU's rule, too), softmaxes, normalisations, sums
pass_through     pass-through rules, and those of the first transformer attribution
composites       which rule covers which step, and `propagate`, which attaches them
propagation      the relevance that flows back, and the linear maps in the graph
input_prefix     from the first map back to the pixels
gradient_rules   rules for gradients at rectifiers: guided backpropagation and deconvnet
deeplift, reveal_cancel  DeepLIFT's two rules
zero_leaves      a backward pass to attention that the input does not reach
"""

from explain.relevance.composites import COMPOSITES, Composite, When
from explain.relevance.linear_rules import AlphaBeta, Epsilon, Flat, Gamma, Gradient, WSquare, ZBox, ZPlus
from explain.relevance.rule import LinearRule, RelevanceRule

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
