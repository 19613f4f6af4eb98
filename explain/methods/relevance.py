"""Layer-wise relevance propagation, DeepLIFT, and FullGrad."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from explain._utils.errors import MethodError, did_you_mean, shown
from explain._utils.plugins import load_plugins
from explain.baselines.base import Baseline
from explain.baselines.replacements import to_unit
from explain.engine import Evidence, InputGradients, Need
from explain.engine.needs import (
    BiasTerms,
    Concept,
    LayerRelevance,
    Multipliers,
    Relevance,
    RelevanceCoverage,
    Uninspected,
)
from explain.layers.layouts import enlarge
from explain.methods import path
from explain.methods.base import RELEVANCE, Method, check_range, register
from explain.relevance import COMPOSITES, Composite


@register
class LRP(Method):
    r"""Hand the score back through the network; at each operation a rule shares out what arrives
    among its inputs.

    Which rule covers which operation is said by a composite. Operations are seen where they happen:
    in modules, functions and operators alike, added, concatenated or in place. A batch
    normalisation behind a linear map is one map with it. No weight is changed. ``coverage`` of the
    attribution says which operations each rule covered, and ``coverage.taken`` what biases,
    stabilisers and softmaxes took; by how much the relevance and what was taken miss the score is
    ``delta``. Operations without a rule (recurrent layers on a GPU, for one) hand on by the plain
    gradient; what they lose is in ``coverage.taken`` by their names, and those that lose more than
    a thousandth are named in a warning and in ``coverage.missed``. So are all operators that
    libraries register with torch, except those of torchvision, which are linear where their
    positions and masks are held constant, and gradients that the model itself takes. Of a
    `torch.autograd.Function` written by hand, what it loses is in ``delta`` alone. A ``delta`` of
    more than a twentieth of the score is warned of.

    Rules at the input (``Flat``, ``Box``) give relevance to what the first linear map is given. It
    goes back to the pixels through what is done to the photo before (flips, crops, zooms,
    normalisation), and to padding as to biases.

    Rules add epsilon times the mean size of a layer's denominators, image by image, so that the
    units of activations and scores make no difference; ``Epsilon(1e-6, absolute=True)`` and its
    relatives add epsilon as it is. Where stabilisers take more than a hundredth of the score, a
    warning says so.

    What no gradient leads from to the input (detached tensors, what an index finds) is a constant,
    and takes its share as biases do, whether or not the weights that it is made of are trained.

    Args:
        composite: a name, or an `explain.relevance.Composite` of your own. ``automatic`` takes
            ``AttnLRP`` for networks with attention, ``EpsilonPlusFlat`` for convolutional ones,
            ``Epsilon`` for others. ``Epsilon``, ``EpsilonPlus`` and ``EpsilonAlpha2Beta1`` may have
            ``Flat`` or ``Box`` behind them, the rule at the input; there are ``EpsilonGammaBox``,
            ``AttnLRP``, ``CPLRP``, ``ExcitationBackprop``, ``DeepTaylor``, and ``Gradient`` (LRP-0)
            too. ``Box``, ``EpsilonGammaBox`` and ``DeepTaylor`` need the range of the input.
        concept: a layer and some of its channels, such as ``("layer4", (3, 17))``: the pixels'
            relevance for the score through these channels alone. What passes beside the layer, as
            by a shortcut, is left out.
        of_layer: give the relevance of the layer that is named, and not of the input, as naming a
            layer does.

        low, high: the least and largest values that the input can have, for a composite that needs
            them: one value for each channel or one for all. None takes each image's own, channel by
            channel; an `Explainer` gives what its preprocessing makes of black and of white.

    Returns:
        ``(N, C, H, W)``, in units of the score: positive supports the target, negative
        opposes it. Of a layer, ``(N, h, w)``, added up over its channels, which ``channels`` ranks.

    Bach et al., "On Pixel-Wise Explanations for Non-Linear Classifier Decisions by Layer-Wise
    Relevance Propagation", PLOS ONE 2015. Achtibat et al., "AttnLRP", ICML 2024. Achtibat et al.,
    "From Attribution Maps to Human-Understandable Explanations through Concept Relevance
    Propagation", Nature Machine Intelligence 2023.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    ... )
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
        """Check the options together: a composite with a known name, a range only with an open
        `Box`, and a concept with channels, only for the relevance of the input."""
        super().__post_init__()
        is_named = not isinstance(self.composite, Composite)
        name = str(self.composite)
        if is_named and name not in COMPOSITES:  # an installed package may bring it
            load_plugins()
        if is_named and name not in COMPOSITES:
            suggestion = did_you_mean(name, COMPOSITES)
            raise MethodError(
                f"composite of lrp must be one of its names, got {shown(self.composite)}; "
                f"{suggestion}"
            )
        check_range("lrp", self.low, self.high)
        # is_open: it has a Box rule that is given no range
        if self.low is not None and not self._given.is_open:
            raise MethodError(
                f"low and high of lrp must go with a composite of Box, got {self._given.name}"
            )
        if self.concept is None:
            return
        _, channels = self.concept
        if not channels or min(channels) < 0:
            raise MethodError(
                f"concept of lrp must be like ('layer4', (3, 17)), got {shown(self.concept)}"
            )
        if self.of_layer:
            raise MethodError(
                "concept of lrp must be left out for the relevance of a layer; name no layer"
            )

    @property
    def name(self) -> str:
        return "attnlrp" if self._rules.name == "AttnLRP" else "lrp"

    @property
    def summary(self) -> str:
        plain = "relevance propagated back from layer to layer"
        return "relevance propagation with rules for attention" if self.name == "attnlrp" else plain

    def in_layer(self) -> "LRP":
        return self if self.concept is not None else replace(self, of_layer=True)

    @property
    def lacks_range(self) -> bool:
        return self._given.is_open and self.low is None

    @property
    def _given(self) -> Composite:
        """The composite that the option names or is, before ``low`` and ``high`` are put into its
        `Box` rule.
        """
        if isinstance(self.composite, Composite):
            return self.composite
        return COMPOSITES[self.composite]

    @property
    def _rules(self) -> Composite:
        """The composite by which relevance is propagated: with the input range ``low`` to ``high``
        in its `Box` rule, where these are named.
        """
        if self.low is None or self.high is None:
            return self._given
        return self._given.within(self.low, self.high)

    @property
    def _relevance_and_coverage(self) -> tuple[Need[torch.Tensor], RelevanceCoverage]:
        """The needs for the relevance of the input or layer (through the ``concept``'s channels
        alone, if any) and for what the rules covered and took, from one backward pass.
        """
        rules = self._rules
        through = None
        if self.concept is not None:
            layer, channels = self.concept
            through = Concept(layer, channels)
        relevance = LayerRelevance(rules) if self.of_layer else Relevance(rules, through)
        return relevance, RelevanceCoverage(rules, through)

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset(self._relevance_and_coverage)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        relevance = evidence[self._relevance_and_coverage[0]]
        return relevance.sum(1) if self.of_layer else relevance

    def channels(self, evidence: Evidence) -> torch.Tensor | None:
        if not self.of_layer:
            return None
        return evidence[self._relevance_and_coverage[0]].flatten(2).sum(2)

    def expected_sum(self, evidence: Evidence) -> torch.Tensor | None:
        """The score less what biases, stabilisers and operations without a rule took, ``(N,)``:
        what the relevance should add up to. None for a layer or a concept, which show a part of the
        relevance.
        """
        if self.of_layer or self.concept is not None:
            return None
        taken = evidence[self._relevance_and_coverage[1]].taken.values()
        parts = [part.to(evidence.score) for part in taken]
        return evidence.score - sum(parts, torch.zeros_like(evidence.score))


register(LRP("AttnLRP"))


@dataclass(frozen=True)
class OneOf:
    """One of several baselines, for all images."""

    baselines: torch.Tensor
    index: int

    def __str__(self) -> str:
        return f"baseline {self.index + 1} of {len(self.baselines)}"

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The baseline, for each input."""
        return path.several(self.baselines, inputs[0])[self.index].expand_as(inputs)


@register
class DeepLIFT(path.CompleteMethod):
    r"""Difference of the score from a baseline's, propagated back.

    Share the difference of the score from a baseline's out among the differences of the input.

    :math:`m_j (x_j - b_j)` with multipliers m that are handed back step by step. A function of one
    number hands on the slope between its two points; linear maps their weights; a product the mean
    of the other factor; a maximum goes to the place that made it rise or fall. Attention and
    normalisations are followed through these, step by step, and a softmax as the exponential of x -
    log(sum(exp(x))): its logarithm is shared out in proportion to its slopes. So the values add up
    to the difference of the scores (summation to delta), and what operations without a rule miss is
    the attribution's ``delta``. The network is run once more, on the baseline.

    Args:
        baseline: a value for every input, ``mean`` (each image's mean colour), ``blur`` (the image,
            blurred), or a tensor ``(C, H, W)``; 0 is what preprocessing makes of the training
            data's mean colour.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive supports the target, negative
        opposes it.

    Shrikumar et al., "Learning Important Features Through Propagating Activation Differences", ICML
    2017.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2)
    ... )
    >>> a = explain.attribute(model, torch.rand(2, 3, 4, 4), DeepLIFT(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 4, 4]), True)
    """

    baseline: float | str | torch.Tensor | Baseline = 0.0

    family = RELEVANCE

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({Multipliers(self.start), self.baseline_score})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        differences = evidence.inputs - self.start.perturbed(evidence)
        return evidence[Multipliers(self.start)] * differences


@register
class DeepLIFTSHAP(path.SeveralBaselines):
    r"""Difference of the score from several baselines', propagated back.

    Share the difference of the score from the mean of several baselines' out, as DeepLIFT does
    against each.

    The mean of `DeepLIFT` over the baselines, all of which are taken: nothing is drawn at random.
    The values add up to the score minus the mean score of the baselines. The network is run once
    more for each of them, forward and back.

    Args:
        baseline: a tensor ``(B, C, H, W)``, such as some photos of the training data; or a single
            baseline as for `DeepLIFT`, which makes it that.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive supports the target, negative
        opposes it.

    Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions", NeurIPS 2017 (Deep
    SHAP).

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2)
    ... )
    >>> photos = torch.rand(5, 3, 4, 4)
    >>> a = explain.attribute(model, photos[:2], DeepLIFTSHAP(photos[2:]), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 4, 4]), True)
    """

    baseline: float | str | torch.Tensor | Baseline = 0.0

    family = RELEVANCE

    @property
    def _references(self) -> list[OneOf | path.PathStart]:
        if not isinstance(self.baseline, torch.Tensor):
            return [self.start]
        return [OneOf(self.baseline, index) for index in range(len(self.baseline))]

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.baseline_score, *map(Multipliers, self._references)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The values of `DeepLIFTSHAP` ``(N, C, H, W)``: DeepLIFT's multipliers times the
        difference from the reference, averaged over the references."""
        x = evidence.inputs
        references = self._references
        contributions = (
            evidence[Multipliers(reference)] * (x - reference.of(x)) for reference in references
        )
        return sum(contributions, torch.zeros_like(x)) / len(references)


@register
class FullGrad(Method):
    r"""Contributions of the input and of every bias to the score.

    Divide the score among the input and every bias of the network, and add up where these parts
    lie.

    :math:`y = \nabla_x y \cdot x + \sum_l \nabla_{b_l} y \cdot b_l` holds exactly in a network of
    ReLUs, where b counts the shift of batch normalisation too; elsewhere, the attribution's
    ``delta`` is by how much it is missed. Of each term, the map takes the magnitude, brought to [0,
    1] for each layer as published, enlarged, and summed over channels. Biases that lie nowhere on
    the photo (those of the head) count for ``delta`` alone.

    Biases are counted wherever they are added: by modules, functions, or sums with parameters,
    buffers and what is made of them; so are constants that are concatenated with signals, such as a
    class token, or take their place by a mask. Numbers that are added count for ``delta`` alone, as
    do biases of class tokens. Those inside recurrent layers are not seen; nor are those of
    functions written by hand and of operators that libraries register, which are named in a warning
    and in ``coverage.missed``.

    Args:
        rescale: bring each layer to [0, 1]; False leaves all in units of the score.

    Returns:
        ``(N, H, W)`` at the input's resolution.

    Srinivas and Fleuret, "Full-Gradient Representation for Neural Network Visualization", NeurIPS
    2019.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    ... )
    >>> a = explain.attribute(model, torch.rand(1, 3, 4, 4), FullGrad(), target=0)
    >>> a.values.shape, bool(a.delta.abs() < 1e-5)
    (torch.Size([1, 4, 4]), True)
    """

    rescale: bool = True

    family = RELEVANCE
    needs = frozenset({InputGradients(), BiasTerms(), Uninspected()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map ``(N, H, W)`` of FullGrad: magnitudes of input times gradient, and of each bias
        times its gradient, enlarged to the photo and added up."""
        input_terms = evidence.inputs * evidence[InputGradients()]
        if not evidence.size:  # an input beside the image that is no picture
            return input_terms.abs()
        # biases ``(N, C)``, such as those of the head, lie nowhere
        bias_maps = (
            self._map(term, evidence.size) for term in evidence[BiasTerms()] if term.ndim > 2
        )
        return sum(bias_maps, self._map(input_terms, evidence.size))

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the contributions of input and biases miss the score, ``(N,)``. It is
        computed from the contributions, since the magnitudes in the map have no expected sum.
        """
        input_terms = evidence.inputs * evidence[InputGradients()]
        return input_terms.flatten(1).sum(1) - self.expected_sum(evidence)

    def expected_sum(self, evidence: Evidence) -> torch.Tensor:
        """The score less what the biases add to it ``(N,)``."""
        return evidence.score - sum(term.flatten(1).sum(1) for term in evidence[BiasTerms()])

    def _map(self, contributions: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        """The map ``(N, H, W)`` of one term's contributions ``(N, C, h, w)``: their magnitudes,
        brought to [0, 1] if ``rescale``, summed over channels and enlarged to ``size``.
        """
        sizes = contributions.abs()
        if self.rescale:
            sizes = to_unit(sizes)
        return enlarge(sizes.sum(1, keepdim=True), size)[:, 0]
