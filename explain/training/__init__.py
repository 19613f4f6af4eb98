"""Gradients during training; `explain.hooks` offers the same names.

parameters    a hook on the gradient of every parameter
clipper       gradients clipped before they are accumulated
flow          gradients watched from layer to layer, step by step
units         units that get no gradient
"""

from explain.training.clipper import GradientClipper
from explain.training.flow import Flow, GradientFlow
from explain.training.units import DeadUnits

__all__ = ["DeadUnits", "Flow", "GradientClipper", "GradientFlow"]
