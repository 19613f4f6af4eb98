"""Relevance propagation: rules, composites, and the backward pass that applies them; DeepLIFT's multipliers."""

from explain.relevance.composites import COMPOSITES, Composite, When, transformer_attribution
from explain.relevance.gradient_rules import Coverage, Deconvnet, Guided
from explain.relevance.linear_rules import AlphaBeta, Epsilon, Flat, Gamma, Gradient, WSquare, ZBox, ZPlus
from explain.relevance.rule import LinearRule, RelevanceRule

__all__ = [
    "COMPOSITES",
    "AlphaBeta",
    "Composite",
    "Coverage",
    "Deconvnet",
    "Epsilon",
    "Flat",
    "Gamma",
    "Gradient",
    "Guided",
    "LinearRule",
    "RelevanceRule",
    "WSquare",
    "When",
    "ZBox",
    "ZPlus",
    "transformer_attribution",
]
