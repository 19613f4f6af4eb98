"""What a method is: a frozen value with a name, a need for evidence, and the mathematics."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from explain._utils.errors import MethodError, shown
from explain.engine import Evidence, Need

Style = Literal["heat", "intensity", "signed", "color"]
"""How an attribution is read: heat over the photo, brightness, positive against negative, or a colour picture."""

Fusion = Literal["mean", "max", "product"]
"""How the maps of several layers become one, each divided by its largest magnitude."""


@runtime_checkable
class Method(Protocol):
    """A way to attribute a score.

    ``needs`` says which evidence the engine has to gather; calling the method with that evidence gives the raw
    attribution: ``(N, h, w)`` at the layer's resolution, or ``(N, C, H, W)`` in pixels. ``about`` and ``paper`` are
    what a list of methods prints.
    """

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    @property
    def paper(self) -> str: ...

    @property
    def style(self) -> Style: ...

    @property
    def needs(self) -> frozenset[Need[Any]]: ...

    def __call__(self, evidence: Evidence) -> torch.Tensor: ...


@runtime_checkable
class Complete(Protocol):
    """A method whose values should add up to something known."""

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor | None:
        """By how much ``(N,)`` they miss it, in units of the score; None where these options promise nothing."""
        ...


@runtime_checkable
class Promising(Complete, Protocol):
    """A method that says what its values should add up to, so that several inputs can be added up together."""

    def promised(self, evidence: Evidence) -> torch.Tensor:
        """What the contributions of the explained inputs should add up to: ``(N,)``."""
        ...


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


@runtime_checkable
class Estimated(Protocol):
    """A method that runs the model on altered photos, and says how that went."""

    def outcome(self, evidence: Evidence) -> Outcome: ...


@runtime_checkable
class ManyLayers(Protocol):
    """A method that looks at one layer of each resolution where none is named, and fuses their maps in its own way."""

    fusion: ClassVar[Fusion]


@runtime_checkable
class Movable(Protocol):
    """A method that explains the input, or a layer where one is named."""

    def in_layer(self) -> Method: ...


@runtime_checkable
class Ranking(Protocol):
    """A method that says how much each channel of its layer counts."""

    def channels(self, evidence: Evidence) -> torch.Tensor | None:
        """What each channel counts for: ``(N, C)``; None where these options are about no layer."""
        ...


@runtime_checkable
class Demanding(Protocol):
    """A method that only some networks can be explained with; ``only_for`` says which."""

    only_for: ClassVar[str]


@runtime_checkable
class Tried(Protocol):
    """A method for some networks only, of which a small piece of work shows whether a network is one of them."""

    def tried(self) -> Method: ...


@runtime_checkable
class OneInput(Protocol):
    """A method that looks at one explained input, and cannot tell what several of them do together."""

    one_input: ClassVar[bool]


@runtime_checkable
class ByScore(Protocol):
    """A method that divides by the score, so that a negative one reverses all signs."""

    by_score: ClassVar[bool]


@runtime_checkable
class Bounded(Protocol):
    """A method that has a use for the least and largest values that its input can have, one for each channel."""

    def within(self, low: tuple[float, ...], high: tuple[float, ...]) -> Method:
        """The same, for inputs whose values lie between these; what is set already stays."""
        ...


@runtime_checkable
class Control(Protocol):
    """A method that explains nothing, for others to be compared with; ``control`` says what it does instead."""

    control: ClassVar[str]


def options(method: Method) -> dict[str, Any]:
    """Return the fields of a method and their values: with its name, enough to make it again.

    >>> from explain.methods import GradCAM
    >>> options(GradCAM(relu=False))
    {'relu': False}
    """
    return {field.name: getattr(method, field.name) for field in fields(method)}  # type: ignore[arg-type]


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
    if isinstance(inner, ManyLayers):
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
