"""What a method may ask for: needs, each a frozen value that says what it costs; and asks, a need at a layer.

A need says whether it is about a layer, whether the graph must reach back to the input, and which backward
pass answers it. From that alone the plan is made; `collect` has a collector for each kind of need.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from explain.data.inputs import Path
from explain.relevance.composites import Composite
from explain.relevance.gradient_rules import Coverage, Rule
from explain.targets.functions import Objective

T = TypeVar("T")


@dataclass(frozen=True)
class Concept:
    """Channels of a layer, which relevance is to pass through: all else is held back there."""

    layer: str
    channels: tuple[int, ...]


@dataclass(frozen=True)
class Backward:
    """One backward pass over a forward pass: of the score or another objective, under a rule, a composite or none.

    ``second`` marks the pass through a gradient that is needed for curvature, ``concept`` what relevance goes through.
    """

    objective: Objective | None = None
    rule: Rule | None = None
    second: bool = False
    composite: Composite | None = None
    concept: Concept | None = None
    reference: Reference | None = None


class Reference(Hashable, Protocol):
    """What inputs are compared with: a frozen value that makes it."""

    def of(self, inputs: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Need(Generic[T]):
    """One kind of evidence; ``T`` is the type of the answer, ``evidence[need]``."""

    @property
    def of_layer(self) -> bool:
        """Whether it is about a layer."""
        return False

    @property
    def of_input(self) -> bool:
        """Whether it is about an explained input; of several, each one has its own."""
        return False

    @property
    def whole(self) -> bool:
        """Whether the graph must reach from the score back to the input."""
        return False

    @property
    def at_layer(self) -> bool:
        """Whether the graph must reach back to the layer."""
        return False

    @property
    def looks_inside(self) -> bool:
        """Whether it is about the operations of the network, which scripted modules keep to themselves."""
        return self.backward is not None and (
            self.backward.rule,
            self.backward.composite,
            self.backward.reference,
        ) != (None, None, None)

    @property
    def backward(self) -> Backward | None:
        """The backward pass that answers it, if one is needed."""
        return None

    @property
    def also(self) -> frozenset[Need[Any]]:
        """What must be gathered before it."""
        return frozenset()


@dataclass(frozen=True)
class Activations(Need[torch.Tensor]):
    """The feature maps of the layer, ``(N, C, h, w)``."""

    of_layer = True


@dataclass(frozen=True)
class LayerGradients(Need[torch.Tensor]):
    """The gradient of the score, or of another objective, in the layer's feature maps: ``(N, C, h, w)``."""

    objective: Objective | None = None

    of_layer = True
    at_layer = True

    @property
    def backward(self) -> Backward:
        return Backward(self.objective)


@dataclass(frozen=True)
class LayerCurvature(Need[torch.Tensor]):
    """The Hessian of the score, or of another objective, in the feature maps, times these maps: ``(N, C, h, w)``."""

    objective: Objective | None = None

    of_layer = True
    at_layer = True

    @property
    def backward(self) -> Backward:
        return Backward(self.objective, second=True)


@dataclass(frozen=True)
class ClassWeights(Need[torch.Tensor]):
    """The weights of the target's class in a head that averages the feature maps and is linear: ``(N, C)``."""

    of_layer = True

    @property
    def also(self) -> frozenset[Need[Any]]:
        return frozenset({Activations()})


@dataclass(frozen=True)
class InputGradients(Need[torch.Tensor]):
    """The gradient of the score in the input, ``(N, C, H, W)``, plain or under a rule for operations."""

    rule: Rule | None = None

    of_input = True
    whole = True

    @property
    def backward(self) -> Backward:
        return Backward(rule=self.rule)


@dataclass(frozen=True)
class RuleCoverage(Need[Coverage]):
    """Which operations between the input and the score a rule acted on, and which it should have but could not."""

    rule: Rule

    whole = True

    @property
    def backward(self) -> Backward:
        return Backward(rule=self.rule)


@dataclass(frozen=True)
class Relevance(Need[torch.Tensor]):
    """The relevance of the input under a composite, ``(N, C, H, W)``; with a ``concept``, what goes through it."""

    composite: Composite
    concept: Concept | None = None

    of_input = True
    whole = True

    @property
    def backward(self) -> Backward:
        return Backward(composite=self.composite, concept=self.concept)


@dataclass(frozen=True)
class LayerRelevance(Need[torch.Tensor]):
    """The relevance of the layer's feature maps under a composite, ``(N, C, h, w)``."""

    composite: Composite

    of_layer = True
    at_layer = True
    whole = True

    @property
    def backward(self) -> Backward:
        return Backward(composite=self.composite)


@dataclass(frozen=True)
class RelevanceCoverage(Need[Coverage]):
    """Which rule of a composite covered which operation, and what was taken out of the relevance by which cause."""

    composite: Composite
    concept: Concept | None = None

    whole = True

    @property
    def backward(self) -> Backward:
        return Backward(composite=self.composite, concept=self.concept)


@dataclass(frozen=True)
class Multipliers(Need[torch.Tensor]):
    """DeepLIFT's multipliers of the input, against a reference: ``(N, C, H, W)``."""

    reference: Reference

    of_input = True
    whole = True

    @property
    def backward(self) -> Backward:
        return Backward(reference=self.reference)


@dataclass(frozen=True)
class RevealCancel(Need[torch.Tensor]):
    """What each value of the input adds to the score, against a reference, by reveal-cancel: ``(N, C, H, W)``."""

    reference: Reference

    of_input = True
    looks_inside = True


@dataclass(frozen=True)
class BiasTerms(Need[tuple[torch.Tensor, ...]]):
    """What every bias of the network adds to the score: a tuple of ``(N, C, h, w)``, or ``(N, K)`` without a map."""

    whole = True
    looks_inside = True
    backward = Backward()


@dataclass(frozen=True)
class DetectionSimilarity(Need[torch.Tensor]):
    """How much the best detection in each image is like the one that is explained: ``(N,)``, from 0 to 1."""


@dataclass(frozen=True)
class AttentionMap:
    """One attention: its weights ``(N, heads, queries, keys)``, and the gradient of the score in them, if asked for."""

    weights: torch.Tensor
    gradient: torch.Tensor | None = None


@dataclass(frozen=True)
class Attention(Need[tuple[AttentionMap, ...]]):
    """Every attention of the network that the input reaches, in order, with gradients of the score on request.

    With ``beside``, also what it does not reach, such as attention among words alone.
    """

    gradients: bool = False
    beside: bool = False

    whole = True
    looks_inside = True

    @property
    def backward(self) -> Backward | None:
        return Backward() if self.gradients else None


@dataclass(frozen=True)
class AttentionRelevance(Need[tuple[AttentionMap, ...]]):
    """Every attention of the network, in order, with the gradients that a composite brings to its weights.

    The relevance of a weight is its value times that gradient.
    """

    composite: Composite

    whole = True

    @property
    def backward(self) -> Backward:
        return Backward(composite=self.composite)


@dataclass(frozen=True)
class BlockAttention(Need[list[torch.Tensor]]):
    """For each transformer block, the gradient in its attention of the score that the head reads off its output."""

    looks_inside = True


@dataclass(frozen=True)
class BlockTokens(Need[tuple[torch.Tensor, ...]]):
    """What each transformer block gives, laid out as maps without class tokens: ``(N, C, h, w)`` each."""

    looks_inside = True


@dataclass(frozen=True)
class NeedAtLayer:
    """A need, the layer that it is about, and the explained input; None for needs that are not about one.

    If only one input is explained, it is None too.
    """

    need: Need[Any]
    layer: str | None = None
    input: Path | None = None

    def before(self, need: Need[Any]) -> NeedAtLayer:
        """The ask for a need that this one rests on, about the same layer and input."""
        return NeedAtLayer(need, self.layer if need.of_layer else None, self.input if need.of_input else None)


def asks_of(
    needs: Iterable[Need[Any]], layers: Iterable[str], inputs: Iterable[Path | None] = (None,)
) -> frozenset[NeedAtLayer]:
    """What a method with these needs asks for at these layers, of these inputs."""
    where, which = tuple(layers), tuple(inputs)
    return frozenset(
        NeedAtLayer(need, layer, path)
        for need in needs
        for layer in (where if need.of_layer else (None,))
        for path in (which if need.of_input else (None,))
    )
