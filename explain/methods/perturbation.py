"""Methods that look at how the score answers: to masked inputs, and to feature maps taken away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from explain.engine import Activations, Evidence, Need, Reruns
from explain.layers import enlarge
from explain.methods.base import Style, over_all
from explain.methods.cam import ratio, weighted
from explain.methods.checks import check_options
from explain.methods.sampling import noise


@dataclass(frozen=True)
class ScoreCAM:
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

    name: ClassVar[str] = "scorecam"
    about: ClassVar[str] = "feature maps weighted by the score of the photo seen through them"
    paper: ClassVar[str] = "Wang et al., CVPR Workshops 2020"
    style: ClassVar[Style] = "heat"
    needs: ClassVar[frozenset[Need]] = frozenset({Activations(), Reruns(of_layer=True)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        a, x = evidence.activations, evidence.inputs

        def masked(image: torch.Tensor, channel: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            return x[image] * masks(a[image, channel], evidence.size)

        return _score_weighted(evidence, 1, masked, _varies(a))


@dataclass(frozen=True)
class SSCAM:
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

    name: ClassVar[str] = "sscam"
    about: ClassVar[str] = "Score-CAM averaged over noise"
    paper: ClassVar[str] = "Wang et al., 2020"
    style: ClassVar[Style] = "heat"
    needs: ClassVar[frozenset[Need]] = frozenset({Activations(), Reruns(of_layer=True)})

    def __post_init__(self) -> None:
        check_options(self, samples=1, sigma=0)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        a, x = evidence.activations, evidence.inputs
        of_maps, of_input = self._noises(a[0, 0]), self._noises(x[0])

        def noisy_maps(image: torch.Tensor, channel: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            maps = a[image, channel]
            return x[image] * masks(maps + _span(maps) * of_maps[sample], evidence.size)

        def noisy_input(image: torch.Tensor, channel: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            seen = x[image]
            return seen * masks(a[image, channel], evidence.size) + _span(seen) * of_input[sample]

        make = noisy_maps if self.noise == "maps" else noisy_input
        alive = _varies(a) if self.noise == "maps" else torch.ones(a.shape[:2], dtype=torch.bool, device=a.device)
        return _score_weighted(evidence, self.samples, make, alive)

    def _noises(self, like: torch.Tensor) -> torch.Tensor:
        return self.sigma * torch.stack([noise(self.seed, i, like) for i in range(self.samples)])


@dataclass(frozen=True)
class ISCAM:
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

    name: ClassVar[str] = "iscam"
    about: ClassVar[str] = "Score-CAM averaged while the mask fades in"
    paper: ClassVar[str] = "Naidu et al., 2020"
    style: ClassVar[Style] = "heat"
    needs: ClassVar[frozenset[Need]] = frozenset({Activations(), Reruns(of_layer=True)})

    def __post_init__(self) -> None:
        check_options(self, steps=1)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        a, x = evidence.activations, evidence.inputs

        def fading_in(image: torch.Tensor, channel: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            share = over_all((sample + 1).to(x.dtype) / self.steps, x)
            return x[image] * masks(a[image, channel], evidence.size) * share

        return _score_weighted(evidence, self.steps, fading_in, _varies(a))


@dataclass(frozen=True)
class AblationCAM:
    r"""Weigh each feature map by what the score loses without it: :math:`w_k = (y - y_{\setminus k}) / y`.

    The network is run once up to the layer and, from there on, for all ablations together. A map that is zero is not
    run: it takes nothing away.

    Args:
        relu: keep the positive part, as published.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations. A negative score turns all signs round,
        as the formula says.

    Desai and Ramaswamy, "Ablation-CAM", WACV 2020.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), AblationCAM(), target=1, layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    relu: bool = True

    name: ClassVar[str] = "ablationcam"
    about: ClassVar[str] = "feature maps weighted by what the score loses without them"
    paper: ClassVar[str] = "Desai and Ramaswamy, WACV 2020"
    style: ClassVar[Style] = "heat"
    needs: ClassVar[frozenset[Need]] = frozenset({Activations(), Reruns(of_layer=True)})

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        a = evidence.activations
        alive = (a != 0).flatten(2).any(2)
        image, channel = alive.nonzero(as_tuple=True)

        def ablated(rows: torch.Tensor) -> torch.Tensor:
            maps = a[image[rows]]
            maps[torch.arange(len(rows), device=rows.device), channel[rows]] = 0
            return maps

        score = evidence.score[:, None]
        if evidence.variants.work.precision != "full":  # differences are taken between scores of one precision
            score = evidence.variants.scores_from_layer(torch.arange(len(a), device=a.device), lambda rows: a[rows])[
                :, None
            ]
        without = score.repeat(1, a.shape[1]).to(a.dtype)
        without[alive] = evidence.variants.scores_from_layer(image, ablated)
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


Masked = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _score_weighted(evidence: Evidence, samples: int, make: Masked, alive: torch.Tensor) -> torch.Tensor:
    """Sum the feature maps with the softmax of their scores; ``make`` builds inputs by image, channel and sample."""
    return weighted(_scores(evidence, samples, make, alive).softmax(1), evidence, relu=True)


def _scores(evidence: Evidence, samples: int, make: Masked, alive: torch.Tensor) -> torch.Tensor:
    """The mean score ``(N, C)`` over the samples of each channel; those that are not alive mask everything."""
    image, channel = (index.repeat_interleave(samples) for index in alive.nonzero(as_tuple=True))
    sample = torch.arange(samples, device=image.device).repeat(len(image) // samples)
    found = evidence.variants.scores(image, lambda rows: make(image[rows], channel[rows], sample[rows]))
    scores = found.new_zeros(alive.shape)
    if not alive.all():
        everyone = torch.arange(len(alive), device=image.device)
        blank = evidence.variants.scores(everyone, lambda rows: torch.zeros_like(evidence.inputs[rows]))
        scores += blank[:, None]
    scores[alive] = found.reshape(-1, samples).mean(1)
    return scores
