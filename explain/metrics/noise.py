"""Infidelity: does the map foretell what noise does to the score?"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from explain.fills import Cover, Fill
from explain.metrics.base import Better, Case, Judged, Reading, check
from explain.metrics.rows import Ask, Make
from explain.random_numbers import normal


@dataclass(frozen=True, eq=False)
class Noisy:
    """Photos less normal noise ``I``, drawn for each pixel and the same for all channels, images and methods."""

    size: tuple[int, int]
    samples: int
    sigma: float
    seed: int

    @property
    def count(self) -> int:
        return self.samples

    def keys(self, image: int) -> list[Hashable]:
        return [("noisy", self.sigma, self.seed, sample) for sample in range(self.samples)]

    def noise(self, sample: int) -> torch.Tensor:
        """``(H, W)`` float64; each sample is drawn for itself, so that none has to be kept."""
        generator = torch.Generator("cpu").manual_seed((self.seed * 1_000_003 + sample) % 2**63)
        return self.sigma * normal(self.size, generator).double()

    def make(self, images: torch.Tensor, cover: Callable[[Fill], Cover]) -> Make:
        def make(owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            drawn = torch.stack([self.noise(sample) for sample in numbers.tolist()])
            return images[owners] - drawn[:, None].to(images)

        return make


@dataclass(frozen=True)
class Infidelity:
    r"""By how much the map fails to foretell what noise takes from the score.

    :math:`\mathbb E_I\bigl[(I^\top a - (f(x) - f(x - I)))^2\bigr]`, where the noise I is normal, and the same for the
    channels of a pixel, so that maps without channels have an answer too: a is added up over them. Less is better.

    Args:
        samples: of the noise.
        sigma: its standard deviation in the units of the input.
        scaled: multiply the map by the factor that serves it best,
            :math:`\beta = \mathbb E[I^\top a\,\Delta]/\mathbb E[(I^\top a)^2]`, as maps without units need it. In
            ``parts``, "plain" and "scaled" are both there. A map of zeros foretells no change at all, in both.
        reading: the "score" itself, or "probability".
        seed: of the noise.

    Yeh et al., "On the (In)fidelity and Sensitivity of Explanations", NeurIPS 2019.

    >>> import explain, torch
    >>> linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)).double()
    >>> gradient = explain.methods.Saliency(absolute=False)
    >>> table = explain.evaluate(linear, torch.rand(1, 3, 4, 4).double(), gradient, Infidelity(samples=9))
    >>> table["saliency"]["infidelity"].item() < 1e-12
    True
    """

    samples: int = 64
    sigma: float = 0.2
    scaled: bool = True
    reading: Reading = "score"
    seed: int = 0

    name: ClassVar[str] = "infidelity"
    about: ClassVar[str] = "mean square by which the map misses what noise takes from the score"
    paper: ClassVar[str] = "Yeh et al., NeurIPS 2019"
    units: ClassVar[str] = "square of the score"
    better: ClassVar[Better] = "less"

    def __post_init__(self) -> None:
        check(self, samples=1, sigma=1e-12)

    def _noisy(self, case: Case) -> Noisy:
        return Noisy(case.size, self.samples, self.sigma, self.seed)

    def asks(self, case: Case) -> Sequence[Ask]:
        return [Ask(self._noisy(case), self.reading)]

    def __call__(self, case: Case, scores: Sequence[torch.Tensor]) -> Judged:
        noisy, maps = self._noisy(case), case.maps.of_inputs.flatten(1)
        drawn = [noisy.noise(sample).flatten().to(maps) for sample in range(self.samples)]
        told = torch.stack([maps @ noise for noise in drawn], 1)
        lost = case.original(self.reading)[:, None] - scores[0]
        squares = told.square().mean(1)
        factor = torch.where(squares > 0, (told * lost).mean(1) / torch.where(squares > 0, squares, 1), 0)
        plain = (told - lost).square().mean(1)
        best = (factor[:, None] * told - lost).square().mean(1)
        value = (best if self.scaled else plain).to(case.score.dtype)
        return Judged(value, parts={"plain": plain, "scaled": best, "factor": factor})
