"""Relevance propagation: rules, composites, and the backward pass that applies them; DeepLIFT's multipliers.

linear_rules     rules for linear maps: epsilon, gamma, alpha-beta, and those for the first map
nonlinear_rules  rules for products, activations (a ReLU's rule, too), softmaxes, normalisations, sums; passing on
composites       which rule covers which step, and `propagate`, which attaches them
propagation      the relevance that flows back, the linear maps in the graph, and the bases of all rules
input_prefix     from the first map back to the pixels
gradient_rules   rules for gradients at rectifiers (guided backpropagation, deconvnet); zero leaves at attention
deeplift         DeepLIFT's two rules, rescale and reveal-cancel
"""

from explain.relevance.composites import COMPOSITES, Composite, When
from explain.relevance.linear_rules import AlphaBeta, Epsilon, Flat, Gamma, Gradient, WSquare, ZBox, ZPlus
from explain.relevance.propagation import LinearRule, RelevanceRule

__all__ = [
    "COMPOSITES", "AlphaBeta", "Composite", "Epsilon", "Flat", "Gamma", "Gradient", "LinearRule", "RelevanceRule",
    "WSquare", "When", "ZBox", "ZPlus",
]  # fmt: skip
