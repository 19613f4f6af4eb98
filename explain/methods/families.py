"""Families of methods: what belongs together where many are shown."""

from __future__ import annotations

from explain.errors import MethodError
from explain.methods.base import ByScore, Control, Method
from explain.methods.registry import get_method

MAPS, PATTERNS, ALTERED = "class activation maps", "patterns of the feature maps", "altered inputs"
GRADIENTS, RELEVANCE, ATTENTION, OTHERS = "gradients", "relevance", "attention", "other methods"
FAMILIES = (MAPS, PATTERNS, ALTERED, GRADIENTS, RELEVANCE, ATTENTION, OTHERS)
"""In the order in which they are shown."""

_BY_MODULE = {
    "cam": MAPS, "composed": MAPS, "sampling": MAPS, "spectral": PATTERNS, "backprop": GRADIENTS, "path": GRADIENTS,
    "perturbation": ALTERED, "masking": ALTERED, "shapley": ALTERED, "surrogate": ALTERED, "partition": ALTERED,
    "dependence": ALTERED, "detection": ALTERED, "permutation": ALTERED, "relevance": RELEVANCE, "lrp": RELEVANCE,
    "deeplift": RELEVANCE, "attention": ATTENTION, "expected": GRADIENTS,
    "extremal": ALTERED, "tokens": ALTERED,
    "blurred": GRADIENTS, "guided": GRADIENTS, "idgi": GRADIENTS, "xrai": GRADIENTS, "chefer": ATTENTION,
}  # fmt: skip


def family(method: str | Method) -> str:
    """Return the family of a method, by the module that its class is in; one that wraps another has the other's.

    >>> family("gradcam"), family("smooth(saliency)"), family("my own")
    ('class activation maps', 'gradients', 'other methods')
    """
    try:
        found = get_method(method)
    except MethodError:
        return OTHERS
    inner = getattr(found, "method", None)
    if isinstance(inner, Method):
        return family(inner)
    package, _, module = type(found).__module__.rpartition(".")
    return _BY_MODULE.get(module, OTHERS) if package == __package__ else OTHERS


def control(method: str | Method) -> str:
    """Return what a method does that explains nothing and is there to compare with; "" for all others.

    >>> control("randomcam"), control("smooth(randomcam)"), control("gradcam")
    ('random weights', 'random weights', '')
    """
    try:
        found = get_method(method)
    except MethodError:
        return ""
    inner = getattr(found, "method", None)
    return found.control if isinstance(found, Control) else control(inner) if isinstance(inner, Method) else ""


def divides_by_score(method: str | Method) -> bool:
    """Whether a method divides by the score, so that a negative one reverses all signs.

    >>> divides_by_score("ablationcam"), divides_by_score("gradcam")
    (True, False)
    """
    try:
        return isinstance(get_method(method), ByScore)
    except MethodError:
        return False
