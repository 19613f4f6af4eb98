"""Layer-wise relevance propagation: the score, handed back from the output to the input, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from explain.engine import COMPOSITES, Composite, Concept, Evidence, LayerRelevance, Need, Relevance, RelevanceCoverage
from explain.errors import MethodError, did_you_mean, shown
from explain.methods import sources
from explain.methods.base import Style, check_range
from explain.methods.sources import Source


@dataclass(frozen=True)
class LRP:
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
        composite: a name, or an `explain.engine.Composite` of your own. ``automatic`` takes ``AttnLRP`` for networks
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

    style: ClassVar[Style] = "signed"

    def __post_init__(self) -> None:
        if isinstance(self.composite, str):
            object.__setattr__(self, "composite", str(self.composite))
        if not isinstance(self.composite, Composite) and not _is_known(self.composite):
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
            return "relevance handed back with rules for attention"
        return "relevance handed back from layer to layer"

    @property
    def paper(self) -> str:
        return "Achtibat et al., ICML 2024" if self.name == "attnlrp" else "Bach et al., PLOS ONE 2015"

    @property
    def source(self) -> Source:
        """What to cite."""
        return sources.ATTNLRP if self.name == "attnlrp" else sources.LRP

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

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor | None:
        """By how much the relevance of the input, and what was taken on the way, miss the score."""
        if self.of_layer or self.concept is not None:
            return None  # what is taken before a layer, or held back at a concept, is not told apart
        return values.flatten(1).sum(1) - self.promised(evidence)

    def promised(self, evidence: Evidence) -> torch.Tensor:
        """The score without what was taken on the way."""
        taken = evidence[self._coverage].taken.values()
        return evidence.score - sum((part.to(evidence.score) for part in taken), torch.zeros_like(evidence.score))


def _is_known(name: object) -> bool:
    return isinstance(name, str) and name in COMPOSITES


def _concept(given: Any) -> tuple[str, tuple[int, ...]]:
    pair = given if isinstance(given, (tuple, list)) and len(given) == 2 else ("", ())
    layer, channels = pair[0], (pair[1],) if isinstance(pair[1], int) else pair[1]
    fits = isinstance(layer, str) and isinstance(channels, (tuple, list)) and len(channels) > 0
    if not fits or any(isinstance(c, bool) or not isinstance(c, int) or c < 0 for c in channels):
        raise MethodError(
            f"concept of lrp must be a layer's name and its channels, got {shown(given)}; give ('layer4', (3, 17))"
        )
    return layer, tuple(channels)
