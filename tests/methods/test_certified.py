"""Certified maps: the level of the test on fields whose law is known, the radius where it is known,
and what pictures, records and batches make of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explain
from explain.engine import Evidence
from explain.methods import Certified, GradCAM, Method
from explain.methods.base import Outcome
from explain.methods.certified import Votes, chances, decided
from tests.conftest import ROOT

SIDE = 8
TRIALS = 600


@dataclass(frozen=True)
class Pixels(Method):
    """The values of the input, as a map of pixels."""

    constant: bool = False

    def __call__(self, evidence: Evidence) -> Tensor:
        values = evidence.inputs.sum(1)
        return torch.ones_like(values) if self.constant else values


class Score(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(1, keepdim=True).repeat(1, 2)


def independent(uniform: Tensor) -> Tensor:
    return uniform


def alike(uniform: Tensor) -> Tensor:
    return uniform[..., :1, :1].expand_as(uniform)


def in_squares(uniform: Tensor) -> Tensor:
    corners = uniform[..., ::4, ::4]
    return corners.repeat_interleave(4, -2).repeat_interleave(4, -1)


def opposed(uniform: Tensor) -> Tensor:
    return torch.where(torch.arange(SIDE) % 2 == 0, alike(uniform), 1 - alike(uniform))


@pytest.mark.parametrize("field", [independent, alike, in_squares, opposed])
@pytest.mark.parametrize("share_at_border", [1.0, 0.5])
def test_wrong_answers_are_as_rare_as_stated_however_places_depend(
    field: Any, share_at_border: float
) -> None:
    """At the border a share of exactly three quarters agrees, so that any answer is wrong."""
    generator = torch.Generator().manual_seed(0)
    method = Certified(Pixels(), samples=48, confidence=0.8, agreement=0.75)
    at_border = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) < share_at_border * SIDE**2
    wrong = 0
    right = 0.0
    for trial in range(TRIALS):
        uniform = field(torch.rand(48, SIDE, SIDE, generator=generator))
        agrees = uniform < torch.where(at_border, 0.75, 0.995)
        in_top = agrees if trial % 2 else ~agrees
        votes = Votes(method)
        while not votes.decided:
            votes.take(votes.taken, in_top[votes.taken : votes.next_look])
        wrong += bool(votes.answers[at_border].any())
        if not bool(at_border.all()):
            right += float((votes.answers[~at_border] == (1 if trial % 2 else -1)).float().mean())
    error = 1 - method.confidence
    assert wrong / TRIALS <= error + 3 * math.sqrt(error * (1 - error) / TRIALS)
    assert share_at_border == 1 or right / TRIALS > 0.9


def test_chances_are_those_of_binomials() -> None:
    copies, agreement, places = 21, 0.7, 5
    for most, chance in enumerate(chances(copies, agreement, places).tolist()):
        below = [math.comb(copies, k) for k in range(most + 1)]
        false = sum(ways * 0.3**k * 0.7 ** (copies - k) for k, ways in enumerate(below))
        opposite = sum(ways * 0.7**k * 0.3 ** (copies - k) for k, ways in enumerate(below))
        assert chance == pytest.approx(false + 6 * opposite, rel=1e-10)


def test_squares_that_agree_are_decided_with_more_dissent_than_single_places() -> None:
    copies, agreement, error = 400, 0.75, 1e-3
    places = 64 * 64
    alone = int((chances(copies, agreement, places) <= error / places).sum())
    against = torch.full((64, 64), alone)
    assert not bool((against < alone).any())
    assert bool(decided(against, copies, agreement, error, (1, 4)).all())
    against[::4, ::4] = copies // 2  # one place of each square disagrees
    assert not bool(decided(against, copies, agreement, error, (1, 4)).any())


def two_rivals(gap: float) -> Tensor:
    """One pixel is always in the top half, and one never; of two others, the second is larger."""
    return torch.tensor([[[[10000.0, 100.0], [5000.0, 5000.0 + gap]]]], dtype=torch.float64)


def test_answers_hold_within_the_radius_and_no_further() -> None:
    """The rivals change places at a distance of their gap over the root of two, exactly."""
    sigma = 1e-4
    for gap, is_certain in ((0.6, False), (0.9, False), (2.5, True), (-0.9, False), (-2.5, True)):
        method = Certified(Pixels(), sigma=sigma, samples=1000)
        x = two_rivals(gap)
        a = explain.attribute(Score().double(), x, method, target=0)
        noise = sigma * float(x.max() - x.min())
        assert a.radius is not None
        assert a.certified is not None
        assert float(a.radius) == pytest.approx(noise * NormalDist().inv_cdf(0.75), rel=1e-12)
        assert (abs(gap) / math.sqrt(2) > float(a.radius)) == is_certain
        side = int(math.copysign(1, gap)) * is_certain
        assert a.certified.tolist() == [[[1, -1], [-side, side]]]
        assert a.values.dtype == torch.float64


@dataclass(frozen=True)
class Raised(Pixels):
    """The same values around another neutral one, for each image its own."""

    def __call__(self, evidence: Evidence) -> Tensor:
        return super().__call__(evidence) + 5

    def outcome(self, evidence: Evidence) -> Outcome:
        return Outcome(neutral=evidence.inputs.new_full((len(evidence.inputs),), 5))


def test_what_makes_no_difference_is_in_no_top_share() -> None:
    x = torch.randn(1, 1, 6, 6, dtype=torch.float64)
    plain, raised = (
        explain.attribute(Score().double(), x, Certified(method, share=0.5), target=0)
        for method in (Pixels(), Raised())
    )
    assert plain.values.unique().tolist() == [-1, 0, 1]
    assert torch.equal(plain.values, raised.values)


def test_no_place_of_a_constant_map_is_in_its_top_share() -> None:
    x = torch.rand(2, 1, 6, 5)
    a = explain.attribute(Score(), x, Certified(Pixels(constant=True), share=0.9), target=0)
    assert a.certified is not None
    assert a.spent is not None
    assert a.certified.tolist() == (-torch.ones(2, 6, 5).int()).tolist()
    assert a.spent.tolist() == [100, 100]  # decided at the first look
    assert a.stopped == ""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 4, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).double()


@pytest.mark.long
@pytest.mark.parametrize(
    "inner", ["gradcam", "saliency", "lrp", "occlusion(window=6)", "kernelshap(samples=30)"]
)
def test_answers_do_not_depend_on_batches_and_are_for_each_pixel(inner: str) -> None:
    torch.manual_seed(1)
    x = torch.rand(2, 3, 12, 12, dtype=torch.float64)
    method = explain.methods.base.get_method(f"certified({inner}, samples=80, confidence=0.9)")
    layer: dict[str, Any] = {"layer": "3"} if inner == "gradcam" else {}
    together = explain.attribute(network(), x, method, target=1, **layer)
    assert together.certified is not None
    assert together.certified.shape == (2, 12, 12)
    assert together.certified.abs().float().mean() > 0.05
    for image in range(2):
        alone = explain.attribute(
            network(), x[image : image + 1], method, target=1, batch_size=7, **layer
        )
        assert torch.equal(alone.values[0], together.values[image])
        assert alone.radius is not None
        assert together.radius is not None
        assert alone.radius[0] == together.radius[image]


def test_answers_are_those_of_the_copies_one_by_one() -> None:
    """Grad-CAM of each noisy copy by itself, counted."""
    torch.manual_seed(2)
    x = torch.rand(1, 3, 12, 12, dtype=torch.float64)
    method = Certified(GradCAM(), samples=60, share=0.25, confidence=0.95)
    a = explain.attribute(network(), x, method, target=0, layer="3")
    noise = explain.methods.wrappers.noises(0, torch.arange(60), x[0])
    copies = x + 0.15 * (x.max() - x.min()) * noise
    maps = explain.attribute(network(), copies, "gradcam", target=0, layer="3").heatmap
    ranks = (maps.flatten(1)[:, :, None] <= maps.flatten(1)[:, None]).sum(2)  # itself counts
    votes = (ranks <= 36).sum(0).reshape(12, 12)
    answers = a.values[0]
    assert a.samples == 60
    assert bool((votes[answers == 1] > 45).all())
    assert bool((votes[answers == -1] < 15).all())
    assert bool((answers[votes == 60] == 1).all())
    assert bool((answers[votes == 0] == -1).all())


def test_names_options_and_refusals() -> None:
    read = explain.methods.base.get_method("certified(gradcam, share=0.2)")
    assert read == Certified(GradCAM(), share=0.2)
    assert read.name == "certified(gradcam)"
    assert read.paper == "Anani et al., ICML 2025"
    for options in ("agreement=0.4", "agreement=1", "share=1", "confidence=1", "samples=0"):
        with pytest.raises(explain.ExplainError, match=options.split("=")[0]):
            explain.methods.base.get_method(f"certified(gradcam, {options})")


def test_pictures_and_records_keep_the_radius(tmp_path: Any) -> None:
    explainer = explain.Explainer("tiny")
    method = "certified(gradcam, samples=60)"
    explanation = explainer(ROOT / "assets" / "chelsea.png", methods=[method])
    attribution = explanation["certified(gradcam)"]
    legend = explanation.layout().groups[-1].tiles[-1].legend
    assert legend is not None
    assert attribution.radius is not None
    assert f"{float(attribution.radius):.2g}" in legend.meaning
    assert len(set(legend.colors)) == 3
    explanation.save(tmp_path)
    (path,) = tmp_path.glob("*.json")
    saved = explain.load(path).attribution
    assert saved.certified is not None
    assert attribution.certified is not None
    assert torch.equal(saved.certified, attribution.certified)
    assert float(saved.radius) == pytest.approx(float(attribution.radius))
    with pytest.raises(explain.ExplainError, match="certified"):
        explainer(ROOT / "assets" / "chelsea.png", methods=["gradcam"]).overlay(
            "gradcam", style="certified"
        )
