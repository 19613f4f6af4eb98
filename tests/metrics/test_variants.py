"""Metrics that run the method again: robustness, randomisation, axioms; against loops over
`explain.attribute`."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import ExplainWarning, MetricError
from explain.data.inputs import as_inputs
from explain.methods import Saliency, Smooth
from explain.metrics import (
    ADCC,
    MPRT,
    Continuity,
    EfficientMPRT,
    InputInvariance,
    LocalLipschitz,
    RandomLogit,
    RelativeStability,
    Sensitivity,
)
from explain.metrics.maps import Maps, spearman
from explain.metrics.randomised import Randomised, layer_groups
from explain.targets import Segmentation
from tests.conftest import Made, layer_for
from tests.metrics.conftest import Counting

CAM = "layer1"
TARGETS = [4, 0, 2]


def map_of(model: nn.Module, photo: torch.Tensor, method: Any, target: int) -> torch.Tensor:
    """The values of one photo; of values for each channel, the largest magnitudes."""
    values = explain.attribute(
        model, photo[None], method, target=target, layer=layer_for(method, CAM)
    ).values[0]
    return values.abs().amax(0) if values.ndim == 3 else values


def test_callers_who_switch_gradients_off_get_the_same(
    model: nn.Module, photos: torch.Tensor
) -> None:
    metrics: Any = [EfficientMPRT(), RandomLogit(samples=1), Sensitivity(samples=1), ADCC()]
    expected = explain.evaluate(model, photos, "saliency", metrics, target=TARGETS)["saliency"]
    with torch.inference_mode():
        table = explain.evaluate(model, photos, "saliency", metrics, target=TARGETS)
    for name, values in expected.items():
        assert torch.equal(table["saliency"][name], values), name


def test_each_method_looks_at_its_layer_whatever_runs_beside_it(
    model: nn.Module, photos: torch.Tensor
) -> None:
    """Relevance of the pixels stays that, although it could be of the layer of others."""
    methods = ["gradcam", "lrp", "saliency"]
    metrics = [RandomLogit(samples=2), Sensitivity(samples=2)]
    together = explain.evaluate(model, photos, methods, metrics, target=TARGETS)
    for method in methods:
        alone = explain.evaluate(model, photos, method, metrics, target=TARGETS)[method]
        for name, values in alone.items():
            torch.testing.assert_close(together[method][name], values)


def size(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).norm(dim=1)


def relative(one: torch.Tensor, other: torch.Tensor, floor: float) -> torch.Tensor:
    return size((one - other) / one.abs().clamp(min=floor * one.abs().amax((1, 2, 3), True)))


def test_sensitivity_and_stability_by_their_formulas(
    model: nn.Module, photos: torch.Tensor
) -> None:
    options: Any = {"radius": 0.3, "samples": 4, "seed": 2}
    metrics = [
        Sensitivity(**options),
        Sensitivity(of="mean", **options),
        LocalLipschitz(**options),
        RelativeStability(**options),
        RelativeStability(by="output", floor=0.1, **options),
    ]
    method = Saliency(absolute=False)
    table = explain.evaluate(model, photos, method, metrics, target=TARGETS)["saliency"]
    values = explain.attribute(model, photos, method, target=TARGETS).values
    logits = model(photos)
    samples = []
    for sample in range(4):
        generator = torch.Generator().manual_seed(2 * 1_000_003 + sample)
        noise = 0.3 * (2 * torch.rand(3, 12, 10, generator=generator) - 1).double()
        others = explain.attribute(model, photos + noise, method, target=TARGETS).values
        scores = model(photos + noise)
        change = size(others - values)
        same = scores.argmax(1) == logits.argmax(1)
        of_input = relative(values, others, 0.01) / relative(photos, photos + noise, 0.01)
        of_output = relative(values, others, 0.1) / size(scores - logits)
        of_map = change / size(values)
        rows = [of_map, of_map, change / noise.norm(), same * of_input, same * of_output]
        samples.append(torch.stack(rows, 1).detach())
    figures = torch.stack(samples)
    expected = figures.amax(0)
    expected[:, 1] = figures[..., 1].mean(0)
    for metric, column in zip(metrics, expected.unbind(1), strict=True):
        torch.testing.assert_close(table[metric.name], column, msg=metric.name)


def test_continuity_shifts_the_photo_and_the_map_back(
    model: nn.Module, photos: torch.Tensor
) -> None:
    table = explain.evaluate(model, photos[:1], Saliency(), Continuity((1, 2)), target=4)
    values = map_of(model, photos[0], Saliency(), 4)
    padded = torch.nn.functional.pad(photos[:1], (2, 2, 2, 2), mode="replicate")[0]
    expected = []
    for down, across in ((1, 0), (-1, 0), (0, 1), (0, -1), (2, 0), (-2, 0), (0, 2), (0, -2)):
        shifted = padded[:, 2 - down : 14 - down, 2 - across : 12 - across]
        back = map_of(model, shifted, Saliency(), 4).roll((-down, -across), (0, 1))
        rows = slice(max(0, -down), 12 - max(0, down))
        columns = slice(max(0, -across), 10 - max(0, across))
        pair = torch.stack([values[rows, columns], back[rows, columns]]).flatten(1)
        expected.append(pair.corrcoef()[0, 1].item())
    shifts = table.parts("saliency", "continuity")["shifts"][0]
    assert shifts.tolist() == pytest.approx(expected, abs=1e-8)
    assert table["saliency"]["continuity"].item() == pytest.approx(np.mean(expected), abs=1e-8)


@pytest.mark.parametrize("order", ["top", "bottom", "independent"])
def test_parameter_randomisation_by_a_plain_loop(
    model: nn.Module, photos: torch.Tensor, order: Any
) -> None:
    metric = MPRT(order=order, steps=3, seed=1)
    table = explain.evaluate(model, photos[:1], Saliency(), metric, target=4)
    curve = table.curve("saliency", metric.name)[1][0]
    randomised = Randomised(model, as_inputs(photos))
    first, second, third = layer_groups(randomised.layers, 3)
    states = {
        "top": [third, third + second, third + second + first],
        "bottom": [first, first + second, first + second + third],
        "independent": [first, second, third],
    }
    original = map_of(model, photos[0], Saliency(), 4)[None]
    expected = []
    for layers in states[order]:
        values = map_of(randomised.of(layers, 1), photos[0], Saliency(), 4)[None]
        expected.append(spearman(original, values).nan_to_num(0).item())
    assert curve.tolist() == pytest.approx(expected, abs=1e-8)
    assert table["saliency"][metric.name].item() == pytest.approx(np.mean(expected))
    assert ("last" in table.parts("saliency", metric.name)) == (order != "independent")


def test_maps_of_random_copies_are_drawn_where_the_cells_of_the_model_look(
    model: nn.Module, photos: torch.Tensor
) -> None:
    """Whatever the weights of a copy, its cells are compared with those at the same place."""
    metric = MPRT(steps=1, share=0.5)
    given = explain.attribute(model, photos, "gradcam", target=4, layer="layer2")
    table = explain.evaluate(model, photos, "gradcam", metric, target=4, layer="layer2")["gradcam"]
    randomised = Randomised(model, as_inputs(photos))
    copy = randomised.of(randomised.layers[-4:], 0)  # of seven
    of_copy = explain.attribute(copy, photos, "gradcam", target=4, layer="layer2")
    assert given.placement is not None
    there = Maps.of("copy", replace(of_copy, placement=given.placement), photos).per_pixel()
    alike = spearman(Maps.of("own", given, photos).per_pixel(), there).nan_to_num(0)
    torch.testing.assert_close(table[metric.name], alike, atol=1e-8, rtol=0)


@pytest.mark.parametrize("scale", [1, 1e-16])
def test_each_variant_runs_once_however_small_the_values(
    model: Any, photos: torch.Tensor, scale: float
) -> None:
    model.fc.weight.data *= scale
    counting = Counting(model)
    own = (Saliency(), explain.attribute(counting, photos, "saliency", target=4))
    counting.rows.clear()
    explain.evaluate(counting, photos, {"map": own}, Sensitivity(samples=7), target=4)
    noisy = [row for row in counting.rows if not any(torch.equal(row, x) for x in photos)]
    assert len(noisy) == 7 * len(photos)


def test_the_smooth_and_the_efficient_variant(model: nn.Module, photos: torch.Tensor) -> None:
    smooth: Any = {"samples": 3, "sigma": 0.2, "seed": 1}
    metrics = [MPRT(steps=2, **smooth), EfficientMPRT()]
    table = explain.evaluate(model, photos, {"map": Saliency()}, metrics, target=TARGETS)["map"]
    averaged = {"map": Smooth(Saliency(), **smooth)}
    expected = explain.evaluate(model, photos, averaged, MPRT(steps=2, seed=1), target=TARGETS)
    torch.testing.assert_close(table["smprt"], expected["map"]["mprt"])
    randomised = Randomised(model, as_inputs(photos))
    entropies = []
    for network in (model, randomised.of(randomised.layers, 0)):
        values = map_of(network, photos[0], Saliency(), TARGETS[0]).numpy()
        shares = torch.from_numpy(np.histogram(values, bins=100)[0] / 120)
        entropies.append(float(torch.special.entr(shares).sum()))
    rise = entropies[1] / entropies[0] - 1
    assert table["emprt"][0].item() == pytest.approx(rise, abs=1e-8)


def test_a_map_that_turns_zero_has_changed_and_is_told(
    photos: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(360, 2)).double()
    zero: Any = lambda layer: nn.init.zeros_(layer.weight)  # noqa: E731
    monkeypatch.setattr(nn.Linear, "reset_parameters", zero)
    with pytest.warns(ExplainWarning, match="saliency is zero"):
        table = explain.evaluate(model, photos, "saliency", "mprt")
    assert table["saliency"]["mprt"].tolist() == [0, 0, 0]


def test_random_logits_are_the_same_steps_away_for_every_image(
    model: nn.Module, photos: torch.Tensor
) -> None:
    metric = RandomLogit(samples=9, seed=5)
    table = explain.evaluate(model, photos, "saliency", metric, target=TARGETS)
    offsets = torch.randperm(4, generator=torch.Generator().manual_seed(5)) + 1
    curve = table.curve("saliency", "randomlogit")[1]
    for number, step in np.ndindex(3, 4):
        target = TARGETS[number]
        other = (target + int(offsets[step])) % 5
        pair = [map_of(model, photos[number], Saliency(), k)[None] for k in (target, other)]
        assert curve[number, step].item() == pytest.approx(spearman(*pair).item(), abs=1e-8)


def test_input_invariance_of_gradients_and_not_of_gradients_times_input(
    model: nn.Module, photos: torch.Tensor
) -> None:
    methods = ["saliency", "inputxgradient", "gradcam"]
    metric = InputInvariance(0.7)
    table = explain.evaluate(model, photos, methods, metric, layer=CAM, target=TARGETS)
    assert table["saliency"]["inputinvariance"].abs().max() < 1e-8
    assert table["gradcam"]["inputinvariance"].abs().max() < 1e-8
    gradients = explain.attribute(model, photos, Saliency(absolute=False), target=TARGETS).values
    length = (photos * gradients).flatten(1).norm(dim=1)
    expected = (0.7 * gradients).flatten(1).norm(dim=1) / length
    torch.testing.assert_close(table["inputxgradient"]["inputinvariance"], expected)
    wrapped = Made(lambda self, x: self.model(x["photo"]) + x["offset"].mean(), model=model).eval()
    arguments = {"offset": torch.ones(1, 1, 2, 2).to(photos), "photo": photos}
    x = explain.Inputs((arguments,), explained=(0, "photo"), shared=[(0, "offset")])
    table = explain.evaluate(wrapped, x, "inputxgradient", metric, target=TARGETS)
    torch.testing.assert_close(table["inputxgradient"]["inputinvariance"], expected)


def test_adcc_by_its_formula(model: nn.Module, photos: torch.Tensor) -> None:
    where: Any = {"target": 4, "layer": "conv1"}
    x = photos[:1]
    heatmap = explain.attribute(model, x, "gradcam", **where).heatmap
    masked = x * heatmap[:, None].double()
    of_masked = explain.attribute(model, masked, "gradcam", **where).heatmap
    whole, after = model(torch.cat([x, masked])).softmax(1)[:, 4].tolist()
    coherency = (1 + np.corrcoef(heatmap.flatten(), of_masked.flatten())[0, 1]) / 2
    parts = [coherency, 1 - heatmap.mean().item(), 1 - max(0, whole - after) / whole]
    expected = statistics.harmonic_mean(parts)
    table = explain.evaluate(model, x, "gradcam", ADCC(), **where)
    # heatmaps are float32
    assert table["gradcam"]["adcc"].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("metric", ["maxsensitivity", "continuity"])
def test_the_region_of_a_class_is_that_of_the_unperturbed_photo(
    metric: str, photos: torch.Tensor
) -> None:
    """As that of a `Segmentation`: a region that followed the noise would change the map."""
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)
    segmenter = nn.Sequential(*parts).double()
    of_class, of_region = (
        explain.evaluate(segmenter, photos[:1], "saliency", metric, target=target)
        for target in (1, Segmentation(1))
    )
    assert torch.equal(of_class["saliency"][metric], of_region["saliency"][metric])


def test_what_has_no_variant_is_refused(model: nn.Module, photos: torch.Tensor) -> None:
    with pytest.raises(MetricError, match="pixels"):
        explain.evaluate(model, photos, "saliency", Continuity((5,)))
    with pytest.raises(MetricError, match="target must"):
        explain.evaluate(model, photos, "saliency", "randomlogit", target=lambda out: out.sum(1))
    with pytest.raises(MetricError, match="model must"):
        explain.evaluate(nn.Flatten().double(), photos, "saliency", "mprt", target=0)
