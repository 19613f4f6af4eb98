"""Gradients during training; `explain.hooks` offers the same names.

parameters    a hook on the gradient of every parameter
clipper       gradients clipped before they are accumulated
flow          gradients watched from layer to layer, step by step
"""

from explain.training.clipper import GradientClipper
from explain.training.flow import Flow, GradientFlow

__all__ = ["Flow", "GradientClipper", "GradientFlow"]
