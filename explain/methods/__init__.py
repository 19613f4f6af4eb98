"""Methods: frozen dataclasses whose fields are the options and whose call is the mathematics.

To add one, write a class that satisfies `Method`, and `register` it; nothing else needs to know.
"""

from explain.methods.backprop import GuidedBackprop, GuidedGradCAM, InputXGradient, Saliency
from explain.methods.base import Method, Style, options
from explain.methods.cam import GradCAM
from explain.methods.registry import MethodLike, get_method, list_methods, register

for _method in (GradCAM, Saliency, InputXGradient, GuidedBackprop, GuidedGradCAM):
    register(_method)

__all__ = [
    "GradCAM",
    "GuidedBackprop",
    "GuidedGradCAM",
    "InputXGradient",
    "Method",
    "MethodLike",
    "Saliency",
    "Style",
    "get_method",
    "list_methods",
    "options",
    "register",
]
