"""The options of a call: how to explain, and how the call goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from explain.data.inputs import InputLayout
from explain.engine.settings import Progress, RuntimeSettings
from explain.hooks import layer_names
from explain.hooks.interventions import Intervention
from explain.layers.placement import PlacementMode
from explain.methods.base import Fusion
from explain.targets import outputs
from explain.targets.resolve import TargetLike


class CommonOptions(TypedDict, total=False):
    """How to explain; see `attribute`."""

    layer: layer_names.Where | None
    fuse: Fusion | None
    batch_size: int | None
    samples: int | None
    tolerance: float | None
    max_seconds: float | None
    placement: PlacementMode


class CallOptions(TypedDict, total=False):
    """How one call goes."""

    progress: Progress | None
    keep_partial: bool
    interventions: Sequence[Intervention]


class AttributeOptions(CommonOptions, CallOptions, total=False):
    """How to explain tensors."""

    categories: Sequence[str] | None
    activation: outputs.Activation | None
    create_graph: bool
    layout: InputLayout | None


class RunOptions(CommonOptions, total=False):
    """How to explain the photos of a source."""

    targets: Sequence[TargetLike] | None
    top_k: int | None


class PhotoOptions(RunOptions, CallOptions, total=False):
    """How to explain photos."""


@dataclass(frozen=True)
class Settings(RuntimeSettings):
    """How to explain, checked."""

    layer: layer_names.Where | None = None
    fuse: Fusion | None = None
    categories: Sequence[str] | None = None
    samples: int | None = None
    tolerance: float | None = None
    max_seconds: float | None = None
    interventions: Sequence[Intervention] = ()
    layout: InputLayout | None = None

    def __post_init__(self) -> None:
        if self.activation is not None:
            outputs.check_activation(self.activation)
        super().__post_init__()


DEFAULTS = Settings()
"""How a call without options explains."""
