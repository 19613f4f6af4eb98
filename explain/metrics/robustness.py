"""Robustness: how much the map changes when the image changes a little."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from explain._utils.errors import MetricError
from explain._utils.random_numbers import seeded, uniform
from explain.engine import Evidence
from explain.engine.perturbations import OneForEach
from explain.methods.base import over_all
from explain.metrics.base import CONSTANT, ZERO, MetricInput, MetricResult, register
from explain.metrics.maps import Sign, correlation
from explain.metrics.variants import ModelContext, ReattributionMetric, Variant, VariantResult, norm


@dataclass(frozen=True)
class UniformNoise(OneForEach):
    """Images with noise between -radius and radius for each value, the same for every image."""

    radius: float
    seed: int
    sample: int

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        """The images ``(N, C, H, W)`` plus uniform noise up to ``radius`` in the units of the
        input, the same for every image; each ``sample`` has its own."""
        x = evidence.inputs
        noise = uniform(x.shape[1:], seeded(self.seed, self.sample))
        return x + self.radius * (2 * noise - 1).to(x)


@dataclass(frozen=True)
class _NoisyCopies(ReattributionMetric):
    """The base of metrics that run the method on noisy copies of the image, the same ones for all
    of them."""

    radius: float = 0.02
    samples: int = 10
    seed: int = 0

    better = "less"
    minimums: ClassVar = {"radius": 1e-12, "samples": 1}

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        for sample in range(self.samples):
            yield Variant(UniformNoise(self.radius, self.seed, sample))


@register(of="mean")
@register
class Sensitivity(_NoisyCopies):
    r"""By how much the map changes, relative to its length, at most or on average over noisy copies
    of the photo.

    :math:`\max_{\|\delta\|_\infty \le r} \frac{\|\Phi(x + \delta) - \Phi(x)\|_2}{\|\Phi(x)\|_2}`
    over random
    :math:`\delta`, of the raw values. Less is better. Not defined for a map of zeros.

    Args:
        radius: r, in the units of the input.
        samples: how many copies; the largest change is that of these, and grows with their number.
        seed: of the noise.
        of: "max" or "mean".

    Yeh et al., "On the (In)fidelity and Sensitivity of Explanations", NeurIPS 2019.

    >>> Sensitivity().name, Sensitivity(of="mean").name
    ('maxsensitivity', 'avgsensitivity')
    """

    of: Literal["max", "mean"] = "max"

    units = "relative change"

    def described(self) -> Mapping[str, str]:
        """The name and the summary for the largest ("maxsensitivity") or the mean change
        ("avgsensitivity")."""
        name, which = {"mean": ("avg", "mean"), "max": ("max", "largest")}[self.of]
        summary = f"{which} change of the map, relative to its norm, over noisy copies of the photo"
        return {"name": f"{name}sensitivity", "summary": summary}

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        value = numbers.amax(1) if self.of == "max" else numbers.mean(1)
        return MetricResult(data.undefined(self, value, data.maps.zero, ZERO))


@register
class LocalLipschitz(_NoisyCopies):
    r"""Largest change of the map divided by the change of the photo, over noisy copies.

    It is a local Lipschitz estimate.

    :math:`\max_{x'} \|\Phi(x) - \Phi(x')\|_2 / \|x - x'\|_2`, of the raw values. Less is better.
    Not defined for a map of zeros.

    Args:
        radius, samples, seed: as for `Sensitivity`.

    Alvarez-Melis and Jaakkola, "On the Robustness of Interpretability Methods", 2018
    (arXiv:1806.08049).

    >>> LocalLipschitz().better
    'less'
    """

    units = "map by input"

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        return norm(variant.maps.values - data.maps.values) / norm(variant.images - data.images)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        return MetricResult(data.undefined(self, numbers.amax(1), data.maps.zero, ZERO))


@register(by="output")
@register
class RelativeStability(_NoisyCopies):
    r"""The largest relative change of the map by that of the input (RIS) or of the class scores
    (ROS).

    :math:`\max_{x'} \frac{\|(\Phi(x) - \Phi(x')) / \Phi(x)\|_2}{\max(\|(x - x') / x\|_2,
    \epsilon)}`, for the output with :math:`\|h(x) - h(x')\|_2` below, h being the logits; over the
    copies for which the model still names the same class. Divisors are taken element by element;
    where one is smaller than ``floor`` times the largest magnitude of its map or photo, it is taken
    as large as that, since maps are zero in many places. Less is better. Not defined for a map of
    zeros, nor where no copy keeps its class.

    Args:
        radius, samples, seed: as for `Sensitivity`.
        by: "input" or "output".
        floor: see above.

    Agarwal et al., "Rethinking Stability for Attribution-based Explanations", 2022
    (arXiv:2203.06877).

    >>> RelativeStability().name, RelativeStability(by="output").name
    ('relativeinputstability', 'relativeoutputstability')
    """

    by: Literal["input", "output"] = "input"
    floor: float = 1e-2

    units = "relative change by relative change"
    minimums: ClassVar = {"radius": 1e-12, "samples": 1, "floor": 1e-12}

    def described(self) -> Mapping[str, str]:
        """The name and the summary for changes relative to those of the photo (``by`` "input") or
        of the class scores."""
        what = "photo" if self.by == "input" else "class scores"
        summary = (
            f"largest relative change of the map divided by that of the {what}, over noisy copies"
        )
        return {"name": f"relative{self.by}stability", "summary": summary}

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        yield Variant()
        yield from super().variants(context, data)

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        """What `RelativeStability` keeps of one noisy copy ``(N, 2 + K)``: the relative change of
        the map, that of the photo, and the class scores, which `__call__` takes apart. The first
        variant is the photo itself."""
        if variant.logits is None:
            raise MetricError(
                f"model must give class scores for {self.name}, got none; use maxsensitivity"
            )
        map_change = norm(self._relative(data.maps.values, variant.maps.values))
        image_change = norm(self._relative(data.images, variant.images))
        return torch.cat([torch.stack([map_change, image_change], 1), variant.logits], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """The largest ratio ``(N,)`` of relative changes of the map and of the photo or scores,
        over noisy copies that keep their class; ``numbers`` has ``(N, 1 + samples, 2 + K)``."""
        # the photo itself comes first; of each, changes of map and photo, then the class scores
        logits = numbers[:, 0, 2:]
        noisy = numbers[:, 1:]
        map_change = noisy[..., 0]
        denominators = noisy[..., 1]
        noisy_logits = noisy[..., 2:]
        keeps_class = noisy_logits.argmax(2) == logits.argmax(1, keepdim=True)
        unit = torch.ones_like(denominators)  # changes of the input are relative
        if self.by == "output":
            denominators = (noisy_logits - logits[:, None]).norm(dim=2)
            unit = logits.norm(dim=1, keepdim=True)
        # the formula's epsilon, in units of what is compared
        floor = (1e-6 * unit).clamp(min=torch.finfo(unit.dtype).tiny)
        ratios = map_change / torch.maximum(denominators, floor)
        largest = torch.where(keeps_class, ratios, -torch.inf).amax(1)
        value = data.undefined(self, largest, data.maps.zero, ZERO)
        why = "no noisy copy keeps its class"
        return MetricResult(data.undefined(self, value, ~keeps_class.any(1), why))

    def _relative(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The difference of two tensors ``(N, ...)`` as a share, value by value, of the magnitudes
        of ``one``; small magnitudes are raised to ``floor`` times the image's largest."""
        sizes = one.abs()
        least = self.floor * over_all(sizes.flatten(1).amax(1), one)
        return (one - other) / torch.maximum(sizes, torch.where(least > 0, least, 1))


@register
class Continuity(ReattributionMetric):
    """Correlation of the map with that of the shifted photo, shifted back.

    It is the mean over shifts to all four sides.

    The photo is shifted by a few pixels, its edge repeated, and the map shifted back; Pearson's
    correlation with the original map is taken over the pixels that both have. More is better. Not
    defined for a constant map; if only that of a shifted photo is constant, the similarity is 0.

    Args:
        pixels: how far, on each side.
        sign: how values become one number for each pixel, see `explain.metrics.maps.Sign`.

    Montavon et al., "Methods for interpreting and understanding deep neural networks", DSP 2018,
    for continuity as a demand; shifts as in Quantus (Hedström et al., JMLR 2023).

    >>> Continuity(pixels=(1, 2)).pixels
    (1, 2)
    """

    pixels: tuple[int, ...] = (2, 4)
    sign: Sign = "own"

    units = "correlation"
    below: ClassVar = {"pixels": torch.inf}

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        if max(self.pixels) * 2 >= min(data.size[-2:]):
            raise MetricError(
                f"pixels of continuity must be less than half of the image, got {self.pixels} "
                f"for {data.size[-2:]}; take fewer"
            )
        for by in self.pixels:
            for shift in ((by, 0), (-by, 0), (0, by), (0, -by)):
                yield Variant(ShiftedImages(shift))

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        """What `Continuity` keeps of one shift: the correlation ``(N,)`` of the map with that of
        the shifted photo, moved back, over the pixels that stay on the photo; NaN where one does
        not vary."""
        assert isinstance(variant.of.images, ShiftedImages)
        down, across = variant.of.images.by
        kept_pixels = pixels_kept_by_shift(data.maps.per_pixel(self.sign), down, across)
        shifted_pixels = pixels_kept_by_shift(variant.maps.per_pixel(self.sign), -down, -across)
        return correlation(kept_pixels, shifted_pixels)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """The figure of `Continuity`: the mean correlation ``(N,)`` over the shifts, each also in
        ``parts``; NaN counts as 0, and constant maps are not defined."""
        by_shift = numbers.nan_to_num(0)
        value = data.undefined(self, by_shift.mean(1), data.maps.constant, CONSTANT)
        return MetricResult(value.to(data.maps.values.dtype), parts={"shifts": by_shift})


@dataclass(frozen=True)
class ShiftedImages(OneForEach):
    """Images, slices or frames shifted down and to the right by so many pixels, with the edge
    repeated."""

    by: tuple[int, int]

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        """The images ``(N, C, H, W)`` moved down and to the right by ``by`` pixels; the edge is
        repeated where nothing comes in.
        """
        x = evidence.inputs
        down, across = self.by
        height, width = x.shape[-2:]
        rows = (torch.arange(height, device=x.device) - down).clamp(0, height - 1)
        columns = (torch.arange(width, device=x.device) - across).clamp(0, width - 1)
        return x[..., rows[:, None], columns]


def pixels_kept_by_shift(maps: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """The pixels ``(N, K)`` of maps ``(N, H, W)`` that stay on an image shifted ``down`` and
    ``across``: the same places in its map and, with the opposite shift, the shifted one's.
    """
    height, width = maps.shape[-2:]
    rows = slice(max(0, -down), height - max(0, down))
    columns = slice(max(0, -across), width - max(0, across))
    return maps[..., rows, columns].flatten(1)
