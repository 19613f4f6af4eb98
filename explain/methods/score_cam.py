"""Methods that look at how the score answers: to masked inputs, and to feature maps taken away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from explain.engine import Activations, Evidence, Need, Perturbation, PerturbedRows
from explain.engine.perturbations import Scores, Unperturbed, ZeroInput
from explain.layers.feature_maps import enlarge
from explain.methods.base import ALTERED, Method, Style, over_all
from explain.methods.bibliography import cited
from explain.methods.cam import ratio, style_of, weighted
from explain.methods.registry import register
from explain.methods.wrappers import noise


@dataclass(frozen=True)
class MapMaskedInputs(Perturbation):
    """The photo behind each feature map: the map, enlarged and brought to [0, 1], masks it.

    With ``noise``, each mask or masked photo has ``samples`` noisy copies; with ``fading``, there are as many steps in
    which the mask fades in. Maps that are constant mask everything and have no rows.
    """

    samples: int = 1
    noise: Literal["none", "maps", "input"] = "none"
    sigma: float = 0.0
    seed: int = 0
    fading: bool = False

    needs = frozenset({Activations()})

    def __str__(self) -> str:
        seen = "the photo seen through each map"
        if self.fading:
            return f"{seen}, which fades in over {self.samples} steps"
        noisy = {"none": "", "maps": ", with noise in the map", "input": ", with noise"}[self.noise]
        return seen + noisy + (f", {self.samples} times" if self.samples > 1 else "")

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return channels * self.samples

    def seen(self, evidence: Evidence) -> torch.Tensor:
        """Which maps ``(N, C)`` have rows."""
        a = evidence.activations
        return torch.ones(a.shape[:2], dtype=torch.bool, device=a.device) if self.noise == "input" else _varies(a)

    def rows(self, evidence: Evidence) -> PerturbedRows:
        alive = self.seen(evidence).nonzero(as_tuple=True)
        image, channel = (index.repeat_interleave(self.samples) for index in alive)
        sample = torch.arange(self.samples, device=image.device).repeat(len(image) // self.samples)
        masked = self._masked(evidence)
        return PerturbedRows(image, lambda rows: masked(image[rows], channel[rows], sample[rows]))

    def _masked(self, evidence: Evidence) -> Callable[..., torch.Tensor]:
        a, x, size = evidence.activations, evidence.inputs, evidence.size
        noises = torch.zeros(0) if self.noise == "none" else self._noises(a[0, 0] if self.noise == "maps" else x[0])

        def plain(image: torch.Tensor, channel: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            return x[image] * masks(a[image, channel], size)

        def fading_in(image: torch.Tensor, channel: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            return plain(image, channel, sample) * over_all((sample + 1).to(x.dtype) / self.samples, x)

        def noisy_maps(image: torch.Tensor, channel: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            maps = a[image, channel]
            return x[image] * masks(maps + _span(maps) * noises[sample], size)

        def noisy_input(image: torch.Tensor, channel: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            return plain(image, channel, sample) + _span(x[image]) * noises[sample]

        if not size:  # an input beside the photo that is no picture
            return lambda image, channel, sample: x[image]
        if self.fading:
            return fading_in
        return {"none": plain, "maps": noisy_maps, "input": noisy_input}[self.noise]

    def _noises(self, like: torch.Tensor) -> torch.Tensor:
        return self.sigma * torch.stack([noise(self.seed, i, like) for i in range(self.samples)])


@dataclass(frozen=True)
class ChannelAblation(Perturbation):
    """A layer's feature maps with one of them set to zero; those that are zero already have no rows."""

    of_layer = True
    needs = frozenset({Activations()})

    def __str__(self) -> str:
        return "the layer's maps without one of them"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return channels

    def rows(self, evidence: Evidence) -> PerturbedRows:
        a = evidence.activations
        image, channel = _alive(a).nonzero(as_tuple=True)

        def ablated(rows: torch.Tensor) -> torch.Tensor:
            maps = a.index_select(0, image[rows])  # copies whole maps, where indexing copies value by value
            maps[torch.arange(len(rows), device=rows.device), channel[rows]] = 0
            return maps

        return PerturbedRows(image, ablated)


def score_needs(masked: MapMaskedInputs) -> frozenset[Need[Any]]:
    """What a method asks for that weighs feature maps by the scores of masked photos."""
    return frozenset({Activations(), Scores(masked), Scores(ZeroInput())})


def score_weighted(evidence: Evidence, masked: MapMaskedInputs) -> torch.Tensor:
    """Sum the feature maps with the softmax of their scores, and keep the positive part.

    A score is the mean over the samples of a map; maps that mask everything have that of a blank photo.
    """
    found, seen = evidence[Scores(masked)], masked.seen(evidence)
    scores = evidence[Scores(ZeroInput())][:, None].repeat(1, seen.shape[1])
    scores[seen] = found.reshape(-1, masked.samples).mean(1)
    return weighted(scores.softmax(1), evidence, relu=True)


@register
@dataclass(frozen=True)
class ScoreCAM(Method):
    r"""Weigh each feature map by the score of the photo seen through it.

    The map, enlarged to the input and brought to [0, 1], masks the input; the softmax over all channels of the scores
    that result are the weights: :math:`\mathrm{ReLU}\bigl(\sum_k \mathrm{softmax}_k(y(x \odot M_k))\,A^k\bigr)`. (The
    paper subtracts the score of a black image from each, which a softmax does not see.) A map that is constant masks
    everything. The cost is one forward pass for each channel.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Wang et al., "Score-CAM: Score-Weighted Visual Explanations", CVPR Workshops 2020 (arXiv:1910.01279).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), ScoreCAM(), target=1, layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    name = "scorecam"
    about = "feature maps weighted by the score of the photo masked by them"
    source = cited("wang2020scorecam")
    family = ALTERED
    needs = score_needs(MapMaskedInputs())

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return score_weighted(evidence, MapMaskedInputs())


@register
@dataclass(frozen=True)
class SSCAM(Method):
    """Score-CAM with each score averaged over noise, in the feature map or in the masked input.

    Args:
        noise: where it is added: ``maps`` before they are enlarged and normalised, or ``input`` behind the mask.
        samples: how many; the paper takes 35.
        sigma: its standard deviation relative to the range of the map or input. The paper's is 2 in absolute terms,
            which means something else for every network.
        seed: of the noise; every image and channel gets the same.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Wang et al., "SS-CAM: Smoothed Score-CAM for Sharper Visual Feature Localization", 2020 (arXiv:2006.14255).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), SSCAM(samples=2), target=1, layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    noise: Literal["maps", "input"] = "maps"
    samples: int = 10
    sigma: float = 0.15
    seed: int = 0

    name = "sscam"
    about = "Score-CAM averaged over noise"
    source = cited("wang2020sscam")
    family = ALTERED
    minimums: ClassVar[Mapping[str, float]] = {"samples": 1, "sigma": 0}

    @property
    def masked(self) -> MapMaskedInputs:
        return MapMaskedInputs(self.samples, self.noise, self.sigma, self.seed)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return score_needs(self.masked)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return score_weighted(evidence, self.masked)


@register
@dataclass(frozen=True)
class ISCAM(Method):
    r"""Score-CAM with each score averaged while the mask fades in.

    The score of a channel is :math:`\frac1n\sum_{i=1}^n y(\tfrac in\,x \odot M_k)`.

    Args:
        steps: the number n of masks.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Naidu et al., "IS-CAM: Integrated Score-CAM for axiomatic-based explanations", 2020 (arXiv:2010.03023).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), ISCAM(steps=2), target=1, layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    steps: int = 10

    name = "iscam"
    about = "Score-CAM averaged while the mask fades in"
    source = cited("naidu2020iscam")
    family = ALTERED
    minimums: ClassVar[Mapping[str, float]] = {"steps": 1}

    @property
    def masked(self) -> MapMaskedInputs:
        return MapMaskedInputs(self.steps, fading=True)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return score_needs(self.masked)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return score_weighted(evidence, self.masked)


@register
@dataclass(frozen=True)
class AblationCAM(Method):
    r"""Weigh each feature map by what the score loses without it: :math:`w_k = (y - y_{\setminus k}) / y`.

    The network is run once up to the layer and, from there on, for all ablations together. A map that is zero is not
    run: it takes nothing away.

    Args:
        relu: keep the positive part, as published.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations. A negative score reverses all signs, as
        the formula says, and is warned of: what speaks for the target is then negative.

    Desai and Ramaswamy, "Ablation-CAM", WACV 2020.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), AblationCAM(), target=1, layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    relu: bool = True

    name = "ablationcam"
    about = "feature maps weighted by the drop of the score without them"
    source = cited("desai2020ablationcam")
    family = ALTERED
    by_score = True
    needs = frozenset({Activations(), Scores(ChannelAblation()), Scores(Unperturbed(of_layer=True))})

    @property
    def style(self) -> Style:
        return style_of(self.relu)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        a = evidence.activations
        score = evidence[Scores(Unperturbed(of_layer=True))][:, None]  # differences are taken in one precision
        without = score.repeat(1, a.shape[1]).to(a.dtype)
        without[_alive(a)] = evidence[Scores(ChannelAblation())].to(a.dtype)
        return weighted(ratio(score - without, score.expand_as(without)), evidence, relu=self.relu)


def masks(maps: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Enlarge maps ``(b, h, w)`` to ``size`` and bring each to [0, 1]: ``(b, 1, H, W)``; one that is constant is 0."""
    large = enlarge(maps[:, None], size)
    least, most = (over_all(ends, large) for ends in large.flatten(1).aminmax(dim=1))
    return large.sub_(least).mul_(ratio(torch.ones_like(most), most - least))  # in place: there are many of them


def _span(values: torch.Tensor) -> torch.Tensor:
    """The range of each row, in a shape that multiplies it."""
    least, most = values.flatten(1).aminmax(dim=1)
    return over_all(most - least, values)


def _varies(maps: torch.Tensor) -> torch.Tensor:
    """Which feature maps ``(N, C)`` are not constant."""
    least, most = maps.flatten(2).aminmax(dim=2)
    return most > least


def _alive(maps: torch.Tensor) -> torch.Tensor:
    """Which feature maps ``(N, C)`` are not zero everywhere."""
    return (maps != 0).flatten(2).any(2)
