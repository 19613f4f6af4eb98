"""Gradients during training; `explain.hooks` offers the same names.

parameters    a hook on the gradient of every parameter
clipper       gradients clipped before they are accumulated
flow          gradients watched from layer to layer, step by step
units         units that get no gradient
"""

from explain.training.clipper import GradientClipper
from explain.training.film import Film, film
from explain.training.flow import DeadUnits, Flow, GradientFlow
from explain.training.lightning import callback
from explain.training.monitor import Monitor

__all__ = [
    "DeadUnits",
    "Film",
    "Flow",
    "GradientClipper",
    "GradientFlow",
    "Monitor",
    "callback",
    "film",
]
