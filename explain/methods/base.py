"""What a method is: a frozen value with a name, a need for evidence, and the mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch

from explain._utils.errors import KnownOptions, MethodError, shown
from explain.engine import Evidence, Need
from explain.methods.bibliography import Source
from explain.methods.options import check_options

Style = Literal["heat", "intensity", "signed", "color"]
"""How an attribution is read: heat over the photo, brightness, positive against negative, or a colour picture."""

Fusion = Literal["mean", "max", "product"]
"""How the maps of several layers become one, each divided by its largest magnitude."""


MAPS, PATTERNS, ALTERED = "class activation maps", "patterns of the feature maps", "altered inputs"
GRADIENTS, RELEVANCE, ATTENTION, OTHERS = "gradients", "relevance", "attention", "other methods"
FAMILIES = (MAPS, PATTERNS, ALTERED, GRADIENTS, RELEVANCE, ATTENTION, OTHERS)
"""In the order in which they are shown."""


@dataclass(frozen=True)
class Outcome:
    """How an estimate went.

    ``error`` has the error of each value, in their shape; ``samples`` ``(N,)`` how many altered photos each image was
    run with, and ``planned`` ``(N,)`` how many there would be without an early end; ``finished`` ``(N,)`` false where
    an interrupt cut it short; ``r2`` ``(N,)`` how much of the variance of the scores a surrogate explains; ``neutral``
    ``(N,)`` the value of a place that makes no difference, where it is not zero.
    """

    error: torch.Tensor | None = None
    samples: torch.Tensor | None = None
    finished: torch.Tensor | None = None
    r2: torch.Tensor | None = None
    planned: torch.Tensor | None = None
    neutral: torch.Tensor | None = None


@dataclass(frozen=True)
class Method(KnownOptions):
    """A way to attribute a score: a frozen dataclass whose fields are its options.

    A method of your own is a subclass with a ``name``, its ``needs`` and ``__call__``; all else has a default. When an
    object is made, each option is checked against the type of its field, and against ``minimums``.

    ``needs`` says which evidence the engine has to gather. Calling the method with that evidence gives the raw
    attribution: ``(N, h, w)`` at the layer's resolution, or ``(N, C, H, W)`` in pixels. ``about`` and ``paper`` are
    what a list of methods prints, ``source`` what `explain.cite` gives, and ``style`` is how the map is drawn.
    """

    family: ClassVar[str] = OTHERS
    """With which methods it is listed: one of `FAMILIES`."""
    minimums: ClassVar[Mapping[str, float]] = {}
    """By name of an option, the smallest number that it may be."""
    only_for: ClassVar[str] = ""
    """Which networks or inputs it can explain, where not all."""
    control: ClassVar[str] = ""
    """What it does instead of explaining, for a method that others are compared with."""
    one_input: ClassVar[bool] = False
    """Whether it takes one explained input only, and cannot tell what several of them do together."""
    by_score: ClassVar[bool] = False
    """Whether it divides by the score, so that a negative one reverses all signs."""
    layer_optional: ClassVar[bool] = False
    """Whether it explains the input, or a layer where one is named: ``in_layer`` is then the method for the layer."""
    fusion: ClassVar[Fusion | None] = None
    """How it fuses the maps of several layers; where no layer is named, it gets one of each resolution."""

    @property
    def name(self) -> str:
        return ""

    @property
    def about(self) -> str:
        return ""

    @property
    def paper(self) -> str:
        return "" if self.source is None else self.source.shorthand

    @property
    def source(self) -> Source | None:
        return None

    @property
    def style(self) -> Style:
        return "heat"

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset()

    def __post_init__(self) -> None:
        check_options(self, **self.minimums)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        raise NotImplementedError

    def expected_sum(self, evidence: Evidence) -> torch.Tensor | None:
        """What the contributions of all explained inputs should add up to, ``(N,)``; None where it is not known."""
        return None

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor | None:
        """The convergence delta: by how much the values miss their expected sum, ``(N,)`` in units of the score."""
        expected = self.expected_sum(evidence)
        return None if expected is None else values.flatten(1).sum(1) - expected

    def outcome(self, evidence: Evidence) -> Outcome:
        """How the estimate went, for a method that runs the model on altered photos."""
        return Outcome()

    def channels(self, evidence: Evidence) -> torch.Tensor | None:
        """What each channel of the layer contributes: ``(N, C)``; None where these options are about no layer."""
        return None

    def in_layer(self) -> Method:
        """The method for a named layer."""
        return self

    def within(self, low: tuple[float, ...], high: tuple[float, ...]) -> Method:
        """The same for inputs whose values lie between these, one for each channel; what is set already stays."""
        return self

    def tried(self) -> Method:
        """The method with as little work as it takes to see whether a network suits it."""
        return replace(self, samples=2) if "samples" in options(self) else self  # type: ignore[call-arg]


def options(method: Method) -> dict[str, Any]:
    """Return the fields of a method and their values: with its name, enough to make it again.

    >>> from explain.methods import GradCAM
    >>> options(GradCAM(relu=False))
    {'relu': False}
    """
    return {field.name: getattr(method, field.name) for field in fields(method)}


def uses_layer(method: Method) -> bool:
    """Whether a method looks at a layer."""
    return any(need.of_layer for need in method.needs)


def over_all(per_image: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Give one number for each image ``(N,)`` the shape in which it meets every value of ``like`` ``(N, ...)``."""
    return per_image.reshape(-1, *[1] * (like.ndim - 1))


def relative_error(values: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The largest standard error over the largest magnitude ``(N,)``.

    It is infinite where all values are zero and an error is not, and NaN where no error is known.

    >>> relative_error(torch.tensor([[1.0, -4.0]]), torch.tensor([[0.2, 0.1]]))
    tensor([0.0500])
    """
    largest, peak = error.flatten(1).amax(1), values.abs().flatten(1).amax(1)
    return torch.where(largest == 0, largest, largest / peak)


def spatial_dims(maps: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of places: height and width, and frames of a video."""
    return tuple(range(2, maps.ndim))


def at_least(method: str, option: str, value: float, least: float, *, whole: bool = False) -> None:
    """Refuse an option that is too small.

    Raises:
        MethodError: ``value`` is below ``least``, infinite or no number, or no whole number where it has to be.
    """
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < float("inf"):
        raise MethodError(f"{option} of {method} must be a {'whole ' * whole}number from {least}, got {shown(value)}")


def one_layer(method: str, inner: object, option: str = "method") -> None:
    """Refuse to wrap anything but a method that looks at one layer at a time.

    Raises:
        MethodError: ``inner`` cannot be wrapped.
    """
    if isinstance(inner, type) or not isinstance(inner, Method):
        raise MethodError(f"{option} of {method} must be a method object or a name, got {shown(inner)}")
    if inner.fusion is not None:
        raise MethodError(
            f"{option} of {method} must look at one layer, got {inner.name}; wrap the method that it fuses"
        )


def map_of(method: str, cam: Method, evidence: Evidence) -> torch.Tensor:
    """The map ``(N, h, w)`` of the CAM that a method is made of.

    Raises:
        MethodError: ``cam`` gives something for each pixel and channel instead.
    """
    values = cam(evidence)
    if values.ndim != len(evidence.size) + 1:
        raise MethodError(
            f"cam of {method} must give a map (N, h, w), got {cam.name} with values of shape {tuple(values.shape)}; "
            "take a class map such as gradcam"
        )
    return values


def check_range(method: str, low: object, high: object) -> None:
    """Refuse ends of a range that are no numbers, or of which one is missing.

    Raises:
        MethodError: they are not as many numbers, each low one below its high one.
    """
    if low is None and high is None:
        return
    ends = [each if isinstance(each, tuple) else () for each in (low, high)]
    numbers = all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < float("inf") for v in sum(ends, ())
    )
    if not numbers or not ends[0] or len(ends[0]) != len(ends[1]) or any(a >= b for a, b in zip(*ends, strict=True)):
        raise MethodError(
            f"low and high of {method} must be tuples of as many numbers, one for each channel or one for all, each of "
            f"low below that of high, got {shown(low)} and {shown(high)}; give both, such as (0.0,) and (1.0,), or none"
        )


def one_of(method: str, option: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse an option that is not among the known ones.

    Raises:
        MethodError: ``value`` is unknown.
    """
    if not isinstance(value, str) or value not in known:
        raise MethodError(f"{option} of {method} must be one of {', '.join(known)}, got {shown(value)}")
