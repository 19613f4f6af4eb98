"""The options that `attribute`, `evaluate`, an `Explainer`, runs and the command line have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from explain._utils.errors import MethodError, shown
from explain.engine.settings import Precision, Progress, RuntimeSettings
from explain.hooks.layer_names import Where
from explain.methods.base import Fusion, one_of
from explain.targets.outputs import Activation, check_activation
from explain.targets.resolve import TargetLike


class CommonOptions(TypedDict, total=False):
    """How to explain; see `attribute`."""

    layer: Where | None
    fuse: Fusion | None
    batch_size: int | None
    precision: Precision
    samples: int | None
    tolerance: float | None
    max_seconds: float | None


class Options(CommonOptions, total=False):
    """How to explain tensors."""

    progress: Progress | None
    keep_partial: bool
    categories: Sequence[str] | None
    activation: Activation | None


class RunOptions(CommonOptions, total=False):
    """How to explain the photos of a source."""

    targets: Sequence[TargetLike] | None
    top_k: int | None


class PhotoOptions(RunOptions, total=False):
    """How to explain photos."""

    progress: Progress | None
    keep_partial: bool


@dataclass(frozen=True)
class Settings:
    """How to explain, checked."""

    layer: Where | None = None
    fuse: Fusion | None = None
    categories: Sequence[str] | None = None
    batch_size: int | None = None
    progress: Progress | None = None
    precision: Precision = "full"
    samples: int | None = None
    tolerance: float | None = None
    max_seconds: float | None = None
    keep_partial: bool = False
    activation: Activation | None = None

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if self.fuse is not None:
            one_of("attribute", "fuse", self.fuse, ("mean", "max", "product"))
        if not isinstance(self.keep_partial, bool):
            raise MethodError(f"keep_partial of attribute must be True or False, got {shown(self.keep_partial)}")

    @property
    def work(self) -> RuntimeSettings:
        return RuntimeSettings(self.batch_size, self.progress, self.precision, self.keep_partial, self.activation)

    @property
    def budget(self) -> dict[str, float]:
        """How much work methods that estimate may do, where it is not their own."""
        given = {"samples": self.samples, "tolerance": self.tolerance, "max_seconds": self.max_seconds}
        return {name: value for name, value in given.items() if value is not None}
