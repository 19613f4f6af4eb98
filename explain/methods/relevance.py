"""Layer-wise relevance propagation, and DeepLIFT."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from explain._utils.errors import MethodError, shown
from explain._utils.spelling import did_you_mean
from explain.baselines.base import Baseline
from explain.engine import Evidence, Need
from explain.engine.needs import Concept, LayerRelevance, Multipliers, Relevance, RelevanceCoverage, RevealCancel
from explain.engine.perturbations import Scores
from explain.methods.base import RELEVANCE, Method, check_range
from explain.methods.bibliography import Source, cited
from explain.methods.expected_gradients import scores_of, several
from explain.methods.path import CompleteMethod, PathStart, path_baseline, score_of
from explain.methods.registry import register
from explain.relevance import COMPOSITES, Composite


def _concept(given: Any) -> tuple[str, tuple[int, ...]]:
    pair = given if isinstance(given, (tuple, list)) and len(given) == 2 else ("", ())
    layer, channels = pair[0], (pair[1],) if isinstance(pair[1], int) else pair[1]
    fits = isinstance(layer, str) and isinstance(channels, (tuple, list)) and len(channels) > 0
    if not fits or any(isinstance(c, bool) or not isinstance(c, int) or c < 0 for c in channels):
        raise MethodError(
            f"concept of lrp must be a layer's name and its channels, got {shown(given)}; give ('layer4', (3, 17))"
        )
    return layer, tuple(channels)


@register
@dataclass(frozen=True)
class LRP(Method):
    r"""Hand the score back through the network; at each operation a rule shares out what arrives among its inputs.

    Which rule covers which operation is said by a composite. Operations are seen where they happen: in modules,
    functions and operators alike, added, concatenated or in place. A batch normalisation behind a linear map is one map
    with it. No weight is changed. ``coverage`` of the attribution says which operations each rule covered, and
    ``coverage.taken`` what biases, stabilisers and softmaxes took; by how much the relevance and what was taken miss
    the score is ``delta``. Operations without a rule (recurrent layers, for one) hand on by the plain gradient; what
    they lose is in ``coverage.taken`` by their names, and those that lose more than a thousandth are named in a warning
    and in ``coverage.missed``. Of a `torch.autograd.Function` written by hand, what it loses is in ``delta`` alone.

    Rules at the input (``Flat``, ``Box``) give relevance to what the first linear map is given. It goes back to the
    pixels through what is done to the photo before (flips, crops, zooms, normalisation), and to padding as to biases.

    Rules add epsilon times the mean size of a layer's denominators, image by image, so that the units of activations
    and scores make no difference; ``Epsilon(1e-6, absolute=True)`` and its relatives add epsilon as it is. Where
    stabilisers take more than a hundredth of the score, a warning says so.

    What no gradient leads from to the input (detached tensors, what an index finds) is a constant, and takes its share
    as biases do, whether or not the weights that it is made of are trained.

    Args:
        composite: a name, or an `explain.relevance.Composite` of your own. ``automatic`` takes ``AttnLRP`` for networks
            with attention, ``EpsilonPlusFlat`` for convolutional ones, ``Epsilon`` for others. ``Epsilon``,
            ``EpsilonPlus`` and ``EpsilonAlpha2Beta1`` may have ``Flat`` or ``Box`` behind them, the rule at the input;
            there are ``EpsilonGammaBox``, ``AttnLRP``, ``CPLRP``, ``ExcitationBackprop``, ``DeepTaylor``, and
            ``Gradient`` (LRP-0) too. ``Box``, ``EpsilonGammaBox`` and ``DeepTaylor`` need the range of the input.
        concept: a layer and some of its channels, such as ``("layer4", (3, 17))``: the pixels' relevance for the score
            through these channels alone. What passes beside the layer, as by a shortcut, is left out.
        of_layer: give the relevance of the layer that is named, and not of the input, as naming a layer does.

        low, high: the least and largest values that the input can have, for a composite that needs them: one value for
            each channel or one for all. None takes each image's own, channel by channel; an `Explainer` gives what its
            preprocessing makes of black and of white.

    Returns:
        ``(N, C, H, W)``, in units of the score: positive speaks for the target, negative against it. Of a layer,
        ``(N, h, w)``, added up over its channels, and ``channels`` ranks them.

    Bach et al., "On Pixel-Wise Explanations for Non-Linear Classifier Decisions by Layer-Wise Relevance Propagation",
    PLOS ONE 2015. Achtibat et al., "AttnLRP", ICML 2024. Achtibat et al., "From Attribution Maps to
    Human-Understandable Explanations through Concept Relevance Propagation", Nature Machine Intelligence 2023.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    >>> a = explain.attribute(model, torch.rand(2, 3, 4, 4), LRP("Epsilon"), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 4, 4]), True)
    >>> a.coverage.by_rule["epsilon"], sorted(a.coverage.taken)
    ({'convolution': 1, 'dense': 1}, ['biases', 'stabiliser'])
    """

    composite: str | Composite = "automatic"
    concept: tuple[str, tuple[int, ...]] | None = None
    of_layer: bool = False
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    style = "signed"
    family = RELEVANCE
    layer_optional = True

    def __post_init__(self) -> None:
        if isinstance(self.composite, str):
            object.__setattr__(self, "composite", str(self.composite))
        if not isinstance(self.composite, Composite) and not (
            isinstance(self.composite, str) and self.composite in COMPOSITES
        ):
            known = did_you_mean(str(self.composite), COMPOSITES)
            raise MethodError(f"composite of lrp must be one of its names, got {shown(self.composite)}; {known}")
        if not isinstance(self.of_layer, (bool, np.bool_)):
            raise MethodError(f"of_layer of lrp must be True or False, got {shown(self.of_layer)}")
        object.__setattr__(self, "of_layer", bool(self.of_layer))
        for option in ("low", "high"):
            if isinstance(getattr(self, option), list):
                object.__setattr__(self, option, tuple(getattr(self, option)))
        check_range("lrp", self.low, self.high)
        if self.low is not None and not self._given.is_open:
            raise MethodError(
                f"low and high of lrp must be given with a composite that takes the range of the input, got "
                f"{self._given.name}; take one with Box, or leave them out"
            )
        if self.concept is not None:
            object.__setattr__(self, "concept", _concept(self.concept))
            if self.of_layer:
                raise MethodError("concept of lrp must be left out for the relevance of a layer; name no layer")

    @property
    def name(self) -> str:
        return "attnlrp" if self._rules.name == "AttnLRP" else "lrp"

    @property
    def about(self) -> str:
        if self.name == "attnlrp":
            return "relevance propagation with rules for attention"
        return "relevance propagated back from layer to layer"

    @property
    def source(self) -> Source:
        """What to cite."""
        return cited("achtibat2024attnlrp") if self.name == "attnlrp" else cited("bach2015lrp")

    def in_layer(self) -> LRP:
        return self if self.concept is not None else replace(self, of_layer=True)

    def within(self, low: tuple[float, ...], high: tuple[float, ...]) -> LRP:
        """The same, for inputs whose values lie between these; what is set already stays."""
        return replace(self, low=low, high=high) if self._given.is_open and self.low is None else self

    @property
    def _given(self) -> Composite:
        return self.composite if isinstance(self.composite, Composite) else COMPOSITES[self.composite]

    @property
    def _rules(self) -> Composite:
        ends = self.low, self.high
        return self._given if ends[0] is None or ends[1] is None else self._given.within(ends[0], ends[1])

    @property
    def _through(self) -> Concept | None:
        return None if self.concept is None else Concept(*self.concept)

    @property
    def _relevance(self) -> Need[torch.Tensor]:
        return LayerRelevance(self._rules) if self.of_layer else Relevance(self._rules, self._through)

    @property
    def _coverage(self) -> RelevanceCoverage:
        return RelevanceCoverage(self._rules, self._through)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self._relevance, self._coverage})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        found = evidence[self._relevance]
        return found.sum(1) if self.of_layer else found

    def channels(self, evidence: Evidence) -> torch.Tensor | None:
        return evidence[self._relevance].flatten(2).sum(2) if self.of_layer else None

    def expected_sum(self, evidence: Evidence) -> torch.Tensor | None:
        """The score less what biases and unsupported operations took; None where a part of the relevance is shown."""
        if self.of_layer or self.concept is not None:
            return None
        taken = evidence[self._coverage].taken.values()
        return evidence.score - sum((part.to(evidence.score) for part in taken), torch.zeros_like(evidence.score))


register(LRP("AttnLRP"))


@dataclass(frozen=True)
class ReferenceInput:
    """What the photo is compared with, as the engine takes it."""

    start: PathStart

    def __str__(self) -> str:
        return str(self.start)

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The baseline of each input."""
        return self.start.of(inputs)


@dataclass(frozen=True)
class OneOf:
    """One of several baselines, for all photos."""

    baselines: torch.Tensor
    index: int

    def __str__(self) -> str:
        return f"baseline {self.index + 1} of {len(self.baselines)}"

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The baseline, for each input."""
        known = several(self.baselines, inputs[0], "deepliftshap")
        return known[self.index].expand_as(inputs)


@register
@dataclass(frozen=True)
class DeepLIFT(CompleteMethod):
    r"""Share the difference of the score from a baseline's out among the differences of the input.

    :math:`m_j (x_j - b_j)` with multipliers m that are handed back step by step. A function of one number hands on the
    slope between its two points; linear maps their weights; a product the mean of the other factor; a maximum goes to
    the place that made it rise or fall. Attention and normalisations are followed through these, step by step, and a
    softmax as the exponential of x - log(sum(exp(x))): its logarithm is shared out in proportion to its slopes.
    So the values add up to the difference of the scores (summation to delta), and what operations without a rule miss
    is the attribution's ``delta``. The network is run once more, on the baseline.

    By the second rule, reveal-cancel, what is added to each value and what is taken away are followed apart, and each
    part's effect on a function of one number is the mean of what it does alone and beside the other: so two inputs of
    which either would do share what they bring. It applies to networks of linear maps, functions of one number, sums
    and averages, and is refused elsewhere. The network is run on three rows for each image.

    Args:
        baseline: a value for every input, ``mean`` (each image's mean colour), ``blur`` (the image, blurred), or a
            tensor ``(C, H, W)``; 0 is what preprocessing makes of the training data's mean colour.
        rule: ``rescale``, or ``revealcancel`` where it applies.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Shrikumar et al., "Learning Important Features Through Propagating Activation Differences", ICML 2017.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2))
    >>> a = explain.attribute(model, torch.rand(2, 3, 4, 4), DeepLIFT(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 4, 4]), True)
    """

    baseline: float | str | torch.Tensor | Baseline = 0.0
    rule: Literal["rescale", "revealcancel"] = "rescale"

    name = "deeplift"
    about = "difference of the score from a baseline's, propagated back"
    source = cited("shrikumar2017deeplift")
    family = RELEVANCE

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "baseline", path_baseline(self.name, self.baseline))

    @property
    def _start(self) -> PathStart:
        return PathStart(self.baseline, self.name)

    @property
    def _multipliers(self) -> Multipliers:
        return Multipliers(ReferenceInput(self._start))

    @property
    def _revealed(self) -> RevealCancel:
        return RevealCancel(ReferenceInput(self._start))

    @property
    def baseline_score(self) -> Scores:
        return score_of(self.baseline, self.name)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self._revealed if self.rule == "revealcancel" else self._multipliers, self.baseline_score})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        if self.rule == "revealcancel":
            return evidence[self._revealed]
        return evidence[self._multipliers] * (evidence.inputs - self._start.perturbed(evidence))


@register
@dataclass(frozen=True)
class DeepLIFTSHAP(CompleteMethod):
    r"""Share the difference of the score from the mean of several baselines' out, as DeepLIFT does against each.

    The mean of `DeepLIFT` over the baselines, all of which are taken: nothing is drawn at random. The values add up to
    the score minus the mean score of the baselines. The network is run once more for each of them, forward and back.

    Args:
        baseline: a tensor ``(B, C, H, W)``, such as some photos of the training data; or a single baseline as for
            `DeepLIFT`, which makes it that.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions", NeurIPS 2017 (Deep SHAP).

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2))
    >>> photos = torch.rand(5, 3, 4, 4)
    >>> a = explain.attribute(model, photos[:2], DeepLIFTSHAP(photos[2:]), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 4, 4]), True)
    """

    baseline: float | str | torch.Tensor | Baseline = 0.0

    name = "deepliftshap"
    about = "difference of the score from several baselines', propagated back"
    source = cited("lundberg2017shap")
    family = RELEVANCE

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "baseline", path_baseline(self.name, self.baseline))

    @property
    def _references(self) -> list[OneOf | ReferenceInput]:
        if not isinstance(self.baseline, torch.Tensor):
            return [ReferenceInput(PathStart(self.baseline, self.name))]
        return [OneOf(self.baseline, index) for index in range(len(self.baseline))]

    @property
    def baseline_score(self) -> Scores:
        return scores_of(self.baseline, self.name)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.baseline_score, *map(Multipliers, self._references)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        x, references = evidence.inputs, self._references
        return sum((evidence[Multipliers(r)] * (x - r.of(x)) for r in references), torch.zeros_like(x)) / len(
            references
        )
