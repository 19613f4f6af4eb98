"""Gradients at random places between the photo and baselines, multiplied with the difference of the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from explain.engine import Attributions, Collected, Evidence, Need, Rows
from explain.errors import MethodError
from explain.methods import sources
from explain.methods.backprop import Saliency
from explain.methods.base import Style, at_least
from explain.methods.checks import check_options
from explain.methods.sources import Source


@dataclass(frozen=True)
class RandomPoints:
    """Random points between the photo, with noise, and baselines drawn at random."""

    samples: int
    baselines: float | torch.Tensor
    sigma: float
    seed: int

    of_layer: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __str__(self) -> str:
        return "random points between the photo and baselines"

    def count(self, channels: int) -> int:
        return self.samples

    def rows(self, evidence: Evidence) -> Rows:
        x = evidence.inputs
        owners = torch.arange(len(x), device=x.device).repeat_interleave(self.samples)

        def make(rows: torch.Tensor) -> torch.Tensor:
            made = []
            for row in rows.tolist():
                start, end, share = self.drawn(x[row // self.samples], row % self.samples)
                made.append(torch.lerp(start, end, share))
            return torch.stack(made)

        return Rows(owners, make)

    def drawn(self, x: torch.Tensor, sample: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The baseline, the photo with noise, and how far from one to the other, of one sample of one photo.

        Each photo has the same draws, whichever stand beside it.
        """
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + sample)
        which, share = torch.rand(2, generator=g).tolist()
        end = x + self.sigma * (x.max() - x.min()) * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x)
        if not isinstance(self.baselines, torch.Tensor):
            return torch.full_like(x, float(self.baselines)), end, share
        known = self.baselines.detach().to(x)
        known = known[None] if known.ndim == x.ndim else known
        if known.shape[1:] != x.shape:
            raise MethodError(
                f"baselines of gradientshap must have the shape (B, {', '.join(map(str, x.shape))}), got "
                f"{tuple(self.baselines.shape)}; give it inputs that the model would take"
            )
        return known[min(int(which * len(known)), len(known) - 1)], end, share


@dataclass(frozen=True)
class Differences:
    """Averages gradients times the difference that each was drawn from."""

    of: RandomPoints

    def begin(self, evidence: Evidence) -> Collected:
        return _Mean(self.of, evidence.inputs)


class _Mean:
    def __init__(self, of: RandomPoints, x: torch.Tensor) -> None:
        self._of, self._x, self._total = of, x, torch.zeros_like(x)

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        for image, number, value in zip(images.tolist(), numbers.tolist(), values, strict=True):
            start, end, _ = self._of.drawn(self._x[image], number % self._of.samples)
            self._total[image] += value.to(self._total) * (end - start) / self._of.samples

    def enough(self) -> bool:
        return False

    def result(self) -> torch.Tensor:
        return self._total


@dataclass(frozen=True)
class GradientSHAP:
    r"""Average :math:`(x - b) \odot \nabla y\bigl(b + t(x - b)\bigr)` over random baselines b and places t in [0, 1].

    With one baseline and no noise it is integrated gradients with random points, and its values add up to
    :math:`y(x) - y(b)` as the samples grow; with several, to the mean of that (expected gradients).

    Args:
        samples: the number of points.
        baselines: a value for every input, or a tensor ``(B, C, H, W)`` of photos to draw from, such as some of the
            training data.
        sigma: standard deviation of noise on the photo, as a share of its range.
        seed: of baselines, places and noise; each photo has the same draws, whichever stand beside it.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Erion et al., "Improving Performance of Deep Learning Models with Axiomatic Attribution Priors and Expected
    Gradients", Nature Machine Intelligence 2021; the noise as in Lundberg and Lee's implementation.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> x = torch.rand(1, 3, 2, 2)
    >>> a = explain.attribute(model, x, GradientSHAP(samples=4), target=0)
    >>> torch.allclose(a.values.sum(), model(x)[:, 0] - model(0 * x)[:, 0], atol=1e-5)
    True
    """

    samples: int = 20
    baselines: float | torch.Tensor = 0.0
    sigma: float = 0.0
    seed: int = 0

    name: ClassVar[str] = "gradientshap"
    about: ClassVar[str] = "gradients at random points between the photo and baselines"
    paper: ClassVar[str] = "Erion et al., 2021"
    source: ClassVar[Source] = sources.GRADIENTSHAP
    style: ClassVar[Style] = "signed"

    def __post_init__(self) -> None:
        check_options(self, samples=1, sigma=0, seed=0)
        at_least(self.name, "samples", self.samples, 1, whole=True)

    @property
    def _gradients(self) -> Attributions:
        points = RandomPoints(self.samples, self.baselines, self.sigma, self.seed)
        return Attributions(points, Saliency(absolute=False), Differences(points))

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self._gradients})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        found: torch.Tensor = evidence[self._gradients]
        return found
