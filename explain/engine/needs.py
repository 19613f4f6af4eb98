"""What a method may need, as frozen values; the evidence that answers it; and needs at a layer.

A need says whether it is about a layer, whether the graph must reach back to the input, and which
backward pass answers it. From that alone the plan is made; `collectors` has a function for each
kind of need.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    dataclass_transform,
)

import torch
from torch import Tensor

from explain.data.inputs import Path
from explain.layers.layouts import Grids
from explain.layers.placement import Placement, draw
from explain.relevance.composites import Composite
from explain.relevance.gradient_rules import Coverage, GradientRule
from explain.targets.functions import Objective
from explain.targets.outputs import Outputs

T = TypeVar("T")


GradientsBy: TypeAlias = Literal["autograd", "full_backward"]
"""What brings gradients: `torch.autograd.grad`, or full-backward hooks on modules."""


@dataclass(frozen=True)
class Concept:
    """Channels of a layer: relevance passes through these alone, and stops at the layer's
    others."""

    layer: str
    channels: tuple[int, ...]


@dataclass(frozen=True)
class Backward:
    """One backward pass over a forward pass, from the score or another ``objective``."""

    objective: Objective | None = None
    rule: GradientRule | None = None
    """Changes gradients on the path."""
    second: bool = False
    """Whether it goes through a gradient that is needed for curvature."""
    composite: Composite | None = None
    """Propagates relevance."""
    concept: Concept | None = None
    """The channels that relevance goes through alone."""
    reference: "Reference | None" = None
    """Propagates differences from what the network gives for it."""

    @property
    def propagates(self) -> bool:
        """Whether the backward pass propagates relevance (LRP), or differences from a reference
        (DeepLIFT)."""
        return self.composite is not None or self.reference is not None

    @cached_property
    def changes_gradients(self) -> bool:
        """Whether hooks change gradients on the path of this backward pass, so that it is not a
        plain one."""
        return self.rule is not None or self.propagates


_BACKWARD_FIELDS = {field.name for field in fields(Backward)}


class Reference(Hashable, Protocol):
    """A frozen value that makes the reference inputs, such as a black image."""

    def of(self, inputs: Tensor) -> Tensor: ...


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Need(Generic[T]):
    """One kind of evidence; ``T`` is the type of the answer, ``evidence[need]``."""

    differentiates: ClassVar[bool] = False
    """Whether a backward pass answers it, which the fields say that `Backward` has too."""
    of_layer: ClassVar[bool] = False
    """Whether it is about a layer."""
    of_input: ClassVar[bool] = False
    """Whether it is about an explained input; of several, each one has its own."""
    whole: ClassVar[bool] = False
    """Whether the graph must reach from the score back to the input."""
    at_layer: ClassVar[bool] = False
    """Whether the graph must reach back to the layer."""
    second: ClassVar[bool] = False
    """Whether the backward pass goes through a gradient."""
    detached: ClassVar[bool] = False
    """Whether the answer never keeps its graph."""
    walks_back: ClassVar[bool] = False
    """Whether its gradients come by a walk over the recording of the pass."""
    looks_inside: ClassVar[bool] = False
    """Whether modules are hooked that scripted ones hide."""
    also: "ClassVar[frozenset[Need[Any]]]" = frozenset()
    """What must be gathered before it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)

    @cached_property
    def hooked(self) -> bool:
        """Whether full-backward hooks on modules bring the gradient, in a pass of its own beside
        autograd's."""
        return getattr(self, "gradients", None) == "full_backward"

    @property
    def reads_weights(self) -> bool:
        """Whether the answer reads weights of the network after the forward pass, when sharded
        networks have freed theirs.

        `gather` refuses such needs for sharded networks.
        """
        backward = self.backward
        return backward is not None and (backward.changes_gradients or backward.second)

    @cached_property
    def backward(self) -> Backward | None:
        """The backward pass that answers this need, or None; needs with an equal one share the
        pass.

        Its options are those fields of the need that `Backward` has too.
        """
        if not self.differentiates:
            return None
        names = [field.name for field in fields(self) if field.name in _BACKWARD_FIELDS]
        return Backward(**{name: getattr(self, name) for name in names}, second=self.second)


class Activations(Need[Tensor]):
    """The feature maps of the layer, ``(N, C, h, w)``."""

    of_layer = True


class LayerGradients(Need[Tensor]):
    """The gradient of the score, or of another objective, in the layer's feature maps: ``(N, C, h,
    w)``."""

    objective: Objective | None = None
    gradients: GradientsBy = "autograd"

    of_layer = at_layer = differentiates = True

    @property
    def detached(self) -> bool:  # type: ignore[override]
        return self.hooked


class LayerCurvature(Need[Tensor]):
    """The Hessian of the score, or of another objective, in the feature maps, times these maps:
    ``(N, C, h, w)``."""

    objective: Objective | None = None

    of_layer = at_layer = differentiates = second = True


class ClassWeights(Need[Tensor]):
    """The weights of the target's class in a head that averages the feature maps and is linear:
    ``(N, C)``."""

    of_layer = reads_weights = True
    also = frozenset({Activations()})


class InputGradients(Need[Tensor]):
    """The gradient of the score in the input, ``(N, C, H, W)``, plain or under a rule for
    operations."""

    rule: GradientRule | None = None
    gradients: GradientsBy = "autograd"

    of_input = whole = differentiates = True

    @property
    def detached(self) -> bool:  # type: ignore[override]
        return self.hooked


class FollowsGradient(Need[bool]):
    """Whether the scores change along the gradient in the input as it says."""

    of_input = whole = differentiates = detached = True


class RuleCoverage(Need[Coverage]):
    """Which operations between the input and the score a rule acted on, and which it should have
    but could not."""

    rule: GradientRule

    whole = differentiates = True


class Relevance(Need[Tensor]):
    """The relevance of the input under a composite, ``(N, C, H, W)``; with a ``concept``, what goes
    through it."""

    composite: Composite
    concept: Concept | None = None

    of_input = whole = differentiates = True


class LayerRelevance(Need[Tensor]):
    """The relevance of the layer's feature maps under a composite, ``(N, C, h, w)``."""

    composite: Composite

    of_layer = at_layer = whole = differentiates = True


class RelevanceCoverage(Need[Coverage]):
    """Which rule of a composite covered which operation, and what was taken out of the relevance by
    which cause."""

    composite: Composite
    concept: Concept | None = None

    whole = differentiates = True


class Multipliers(Need[Tensor]):
    """DeepLIFT's multipliers of the input, against a reference: ``(N, C, H, W)``."""

    reference: Reference

    of_input = whole = differentiates = True


class BiasTerms(Need[tuple[Tensor, ...]]):
    """What every bias of the network adds to the score: a tuple of ``(N, C, h, w)``, or ``(N, K)``
    without a map."""

    whole = reads_weights = differentiates = walks_back = True


class Uninspected(Need[Coverage]):
    """Which operations between the input and the score nobody can look into, as ``missed``."""

    whole = True


class DetectionSimilarity(Need[Tensor]):
    """How much the best detection in each image is like the one that is explained: ``(N,)``, from 0
    to 1."""

    detached = True


@dataclass(frozen=True)
class AttentionMap:
    """One attention: its weights ``(N, heads, queries, keys)``, the gradient of the score in them,
    if needed, and ``query`` and ``key`` ``(N, heads, tokens, d)``, if known."""

    weights: Tensor
    gradient: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None


class Attention(Need[tuple[AttentionMap, ...]]):
    """Every attention that the image reaches, in order, with gradients of the score on request;
    with ``unreached``, also others, such as attention among words alone."""

    gradients: bool = False
    unreached: bool = False

    whole = detached = True

    @property
    def differentiates(self) -> bool:  # type: ignore[override]
        return self.gradients

    @property
    def walks_back(self) -> bool:  # type: ignore[override]
        return self.unreached


class InputAttention(Attention):
    """The same for each explained input: every attention that it reaches."""

    of_input = True


class AttentionRelevance(Need[tuple[AttentionMap, ...]]):
    """Every attention of the network, in order, with the gradients that a composite brings to its
    weights. The relevance of a weight is its value times that gradient."""

    composite: Composite

    whole = differentiates = detached = True


class BlockAttention(Need[list[Tensor]]):
    """For each transformer block, the gradient in its attention of the score that the head reads
    off its output."""

    looks_inside = detached = True


class BlockTokens(Need[tuple[Tensor, ...]]):
    """What each transformer block gives, laid out as maps without class tokens: ``(N, C, h, w)``
    each."""

    looks_inside = detached = True


@dataclass(frozen=True)
class NeedAtLayer:
    """A kind of evidence, and the layer and the explained input that it is about; None where it is
    not about one. If only one input is explained, ``input`` is None too."""

    kind: Need[Any]
    layer: str | None = None
    input: Path | None = None

    def at_same_place(self, kind: Need[Any]) -> "NeedAtLayer":
        """A need of another kind at the same layer and explained input, as far as that kind is
        about them."""
        return NeedAtLayer(
            kind, self.layer if kind.of_layer else None, self.input if kind.of_input else None
        )


def needs_at(
    needs: Iterable[Need[Any]], layers: Iterable[str], inputs: Iterable[Path | None] = (None,)
) -> frozenset[NeedAtLayer]:
    """A method's needs at each of the layers and for each explained input, where they are about
    these; once, with None, where they are not."""
    layer_names = tuple(layers)
    paths = tuple(inputs)
    at_layers = set()
    for need in needs:
        for layer in layer_names if need.of_layer else (None,):
            for path in paths if need.of_input else (None,):
                at_layers.add(NeedAtLayer(need, layer, path))
    return frozenset(at_layers)


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in single precision if it was in half precision: sums and quotients of evidence
    need it. Float32 and float64 stay the same tensor."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@dataclass(frozen=True)
class SampleOrigin:
    """Where perturbed samples come from: ``count`` images of the caller."""

    count: int
    carry: Callable[[Tensor], Tensor]
    """Brings a tensor with a value for each of these images to the perturbed samples."""
    outputs: Callable[[], Outputs] = Outputs
    image: int | None = None
    """The number of the sample that counts, where a perturbed image is run among the others of its
    batch."""


@dataclass(frozen=True)
class Evidence:
    """The target and its score, and for one layer or none, the answers to the needs of a method in
    ``answers``.

    Tensors are detached unless graphs are created, and every one has the images first.
    ``inputs`` ``(N, C, H, W)`` is what is explained (of a video ``(N, C, T, H, W)``), ``score``
    ``(N,)`` what the target picked, ``classes`` ``(N,)`` the class that it belongs to or None,
    ``target`` its name, ``logits`` ``(N, K)`` the class scores where the output has them, and
    ``grids`` how the tensors of the network are laid out.

    >>> from explain.layers.layouts import Grids
    >>> x = torch.zeros(1, 3, 4, 4)
    >>> answers = {Activations(): torch.ones(1, 2, 4, 4)}
    >>> Evidence(
    ...     x, torch.ones(1), None, "a score", Grids((4, 4)), layer="conv", answers=answers
    ... ).activations.shape
    torch.Size([1, 2, 4, 4])
    """

    inputs: Tensor
    score: Tensor
    classes: Tensor | None
    target: str
    grids: Grids
    logits: Tensor | None = None
    layer: str | None = None
    answers: Mapping[Need[Any], Any] = field(default_factory=dict)
    origin: SampleOrigin | None = None
    """For perturbed samples, the images that they were made of."""
    find_outputs: Callable[[], Outputs] = Outputs
    """Finds out how the class scores become probabilities."""
    find_probability: Callable[[Tensor], Tensor | None] = lambda probabilities: None
    """Finds the probability ``(N,)`` of the target, if it has one, from those ``(N, K)`` of all
    classes."""

    def __getitem__(self, need: Need[T]) -> T:
        return self.answers[need]  # type: ignore[no-any-return]

    @property
    def outputs(self) -> Outputs:
        """How the class scores become probabilities; for perturbed samples, as for the images that
        they were made of."""
        return self.find_outputs()

    @property
    def probability(self) -> Tensor | None:
        """The probability ``(N,)`` of the target, without temperature; None where it has none."""
        if self.logits is None:
            return None
        probabilities = replace(self.outputs, temperature=1.0).probabilities(self.logits)
        return None if probabilities is None else self.find_probability(probabilities)

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width of the explained input in pixels; of a video, the number of frames
        before them."""
        return tuple(self.inputs.shape[2:])

    @property
    def placement(self) -> Placement | None:
        """Where the cells of the layer's map look in the explained input; None for evenly."""
        placement: Placement | None = self.grids.placement(self.layer)
        return placement

    def on_photo(self, maps: Tensor) -> Tensor:
        """Draw maps ``(N, C, h, w)`` of the layer on the explained input: ``(N, C, H, W)``."""
        return draw(maps, self.size, self.placement)

    @property
    def activations(self) -> Tensor:
        return self[Activations()]

    @property
    def gradients(self) -> Tensor:
        return self[LayerGradients()]

    @property
    def images(self) -> int:
        """The number of the caller's images; perturbed samples are made of them, and may be
        more."""
        return len(self.inputs) if self.origin is None else self.origin.count

    def of_images(self, tensor: Tensor) -> Tensor:
        """Bring a tensor with a value for each of the caller's images, or one value for all, to the
        samples of this evidence.

        Methods call it with what belongs to an image, such as its baseline, since they may be
        applied to perturbed samples. Perturbed samples get the value of their image, moved as the
        image was moved.
        """
        of_images = tensor.expand(self.images, *tensor.shape[1:])
        return of_images if self.origin is None else self.origin.carry(of_images)

    def by_frame(self, frames: int, needs: Iterable[Need[Any]]) -> "Evidence":
        """Return evidence with the same answers in which each frame of a video is an image of its
        own.

        Only tensors that have the images first are taken over, and of ``needs`` alone; outputs and
        origin are left out. Tensors with a time axis before height and width are split along it,
        others repeated. `applied` puts the frames of the map back together.
        """

        def of_frames(tensor: Tensor) -> Tensor:
            if tensor.ndim >= 5:  # (N, C, T, h, w)
                return tensor.movedim(-3, 1).flatten(0, 1)
            return tensor.repeat_interleave(frames, 0)

        classes = None if self.classes is None else of_frames(self.classes)
        logits = None if self.logits is None else of_frames(self.logits)
        grids = Grids(self.size[1:], frames * len(self.inputs))
        answers = {need: of_frames(self[need]) for need in needs}
        return Evidence(
            inputs=of_frames(self.inputs),
            score=of_frames(self.score),
            classes=classes,
            target=self.target,
            grids=grids,
            logits=logits,
            layer=self.layer,
            answers=answers,
        )


def applied(method: Callable[[Evidence], Tensor], evidence: Evidence) -> Tensor:
    """Apply a method to evidence and return its map ``(N, h, w)``, or ``(N, T, h, w)`` of a
    video."""
    is_video = evidence.inputs.ndim == 5
    frames = evidence.grids.folded_frames(evidence.layer) if is_video else None
    needs: frozenset[Need[Any]] = getattr(method, "needs", frozenset())
    if frames is None or not any(need.of_layer for need in needs):
        return method(evidence)
    # Frame by frame, if the method reads only maps of a layer that takes each frame as an image.
    # Others, such as those that mask the whole video with a map, get the layer's maps in time.
    # Weights of classes have no place, and are the same for all frames.
    answers = [evidence[need] for need in needs if not isinstance(need, ClassWeights)]
    if not all(isinstance(answer, Tensor) and answer.ndim >= 5 for answer in answers):
        return method(evidence)
    values = method(evidence.by_frame(frames, needs))
    return values.reshape(-1, frames, *values.shape[1:]).movedim(1, -3)


EvidenceLookup: TypeAlias = Callable[..., Evidence]
"""From a layer or none, and of several explained inputs one, to the evidence about a target."""
