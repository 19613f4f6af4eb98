"""What a method may ask for, and what it gets: needs, and the `Evidence` that answers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from explain.layers import Grids
from explain.targets import Objective

if TYPE_CHECKING:
    from explain.engine.variants import Variants


class Need(Protocol):
    """Some evidence that a method needs: a frozen value; ``of_layer`` says whether it is about a layer."""

    @property
    def of_layer(self) -> bool: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Activations:
    """The feature maps of the layer, ``(N, C, h, w)``."""

    of_layer: ClassVar[bool] = True


@dataclass(frozen=True)
class LayerGradients:
    """The gradient of the score, or of another objective, in the layer's feature maps: ``(N, C, h, w)``."""

    objective: Objective | None = None

    of_layer: ClassVar[bool] = True


@dataclass(frozen=True)
class LayerCurvature:
    """The Hessian of the score, or of another objective, in the feature maps, times these maps: ``(N, C, h, w)``."""

    objective: Objective | None = None

    of_layer: ClassVar[bool] = True


@dataclass(frozen=True)
class ClassWeights:
    """The weights of the target's class in a head that averages the feature maps and is linear: ``(N, C)``."""

    of_layer: ClassVar[bool] = True


@dataclass(frozen=True)
class InputGradients:
    """The gradient of the score in the input, ``(N, C, H, W)``, under a rule for rectifiers."""

    rule: str = "plain"

    of_layer: ClassVar[bool] = False


@dataclass(frozen=True)
class BiasTerms:
    """What every bias of the network adds to the score: a tuple of ``(N, C, h, w)``, or ``(N, K)`` without a map."""

    of_layer: ClassVar[bool] = False


@dataclass(frozen=True)
class Attention:
    """Every attention of the network, in order: a tuple of `AttentionMap`, with gradients of the score on request."""

    gradients: bool = False

    of_layer: ClassVar[bool] = False


@dataclass(frozen=True)
class Reruns:
    """Leave to run the model again on altered inputs, or, with ``of_layer``, with altered feature maps."""

    of_layer: bool = False


@dataclass(frozen=True)
class AttentionMap:
    """One attention: its weights ``(N, heads, queries, keys)``, and the gradient of the score in them, if asked for."""

    weights: torch.Tensor
    gradient: torch.Tensor | None = None


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Evidence in at least single precision: sums and quotients of half precision go astray."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@dataclass(frozen=True)
class Evidence:
    """All that a method gets to see: what was asked, what the model said, and the tensors that the method needs.

    Tensors are detached, and every one is per image: ``score`` ``(N,)``, ``classes`` ``(N,)`` or None, ``inputs``
    ``(N, C, H, W)``. A video has frames between channels and height, and so have its feature maps.
    ``variants`` runs the model again, for a method that needs `Reruns`.
    """

    inputs: torch.Tensor
    score: torch.Tensor
    classes: torch.Tensor | None
    target: str
    layer: str | None
    found: Mapping[Need, Any]
    rectifiers: Mapping[str, int]
    """For each rule, how many rectifiers it acted on."""
    variants: Variants
    logits: torch.Tensor | None = None
    """The class scores ``(N, K)``, where the model's output has them."""

    def __getitem__(self, need: Need) -> Any:
        return self.found[need]

    @property
    def grids(self) -> Grids:
        """What tensors of the network are laid out on."""
        return self.variants.grids

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width of the input; of a video, frames before them."""
        return tuple(self.inputs.shape[2:])

    @property
    def activations(self) -> torch.Tensor:
        found: torch.Tensor = self.found[Activations()]
        return found

    @property
    def gradients(self) -> torch.Tensor:
        found: torch.Tensor = self.found[LayerGradients()]
        return found
