"""Metrics that ask the method again: robustness, randomisation, axioms; against loops over
`explain.attribute`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import ExplainWarning, MetricError
from explain.data.inputs import as_inputs
from explain.methods import GradCAM, InputXGradient, IntegratedGradients, Saliency, Smooth
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
from explain.metrics.maps import spearman
from explain.metrics.randomised import Randomised, grouped
from tests.conftest import TinyNet, snapshot
from tests.metrics.test_evaluation import Counting

CAM = "layer1"
TARGETS = [4, 0, 2]


def noises(radius: float, samples: int, seed: int) -> Iterator[torch.Tensor]:
    for sample in range(samples):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sample)
        yield radius * (2 * torch.rand(3, 12, 10, generator=generator) - 1).double()


def values_of(model: nn.Module, photo: torch.Tensor, method: Any, target: int) -> torch.Tensor:
    return explain.attribute(model, photo[None], method, target=target, layer=CAM).values[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_callers_who_switch_gradients_off_get_the_same(
    mode: Any, model: nn.Module, photos: torch.Tensor
) -> None:
    metrics = [
        MPRT(),
        EfficientMPRT(),
        RandomLogit(samples=2),
        Sensitivity(samples=2),
        InputInvariance(),
        ADCC(),
    ]
    expected = explain.evaluate(model, photos, "saliency", metrics, target=TARGETS)["saliency"]
    with mode():
        found = explain.evaluate(model, photos, "saliency", metrics, target=TARGETS)["saliency"]
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def test_methods_asked_again_together_look_where_each_of_them_looked(
    model: nn.Module, photos: torch.Tensor
) -> None:
    """Relevance of the pixels stays that, although it could be of the layer that others look at."""
    methods = ["gradcam", "lrp", "saliency"]
    metrics = [RandomLogit(samples=2), Sensitivity(samples=2)]
    together = explain.evaluate(model, photos, methods, metrics, target=TARGETS)
    for method in methods:
        apart = explain.evaluate(model, photos, method, metrics, target=TARGETS)[method]
        for metric in metrics:
            torch.testing.assert_close(together[method][metric.name], apart[metric.name])


def test_sensitivity_and_stability_by_their_formulas(
    model: nn.Module, photos: torch.Tensor
) -> None:
    around = {"radius": 0.3, "samples": 4, "seed": 2}
    metrics = [
        Sensitivity(**around),
        Sensitivity(of="mean", **around),
        LocalLipschitz(**around),  # type: ignore[arg-type]
        RelativeStability(**around),
        RelativeStability(by="output", floor=0.1, **around),  # type: ignore[arg-type]
    ]
    methods = [GradCAM(), Saliency(absolute=False)]
    table = explain.evaluate(model, photos, methods, metrics, target=TARGETS, layer=CAM)

    def relative(one: torch.Tensor, other: torch.Tensor, floor: float) -> float:
        return float(((one - other) / one.abs().clamp(min=floor * one.abs().max())).norm())

    for i, photo in enumerate(photos):
        for method in methods:
            own = values_of(model, photo, method, TARGETS[i])
            logits = model(photo[None])[0].detach()
            changes = []
            slopes = []
            inputs = []
            outputs = []
            for noise in noises(0.3, 4, 2):
                other = values_of(model, photo + noise, method, TARGETS[i])
                scores = model((photo + noise)[None])[0].detach()
                changes.append(float((other - own).norm() / own.norm()))
                slopes.append(float((other - own).norm() / noise.norm()))
                if scores.argmax() == logits.argmax():
                    inputs.append(relative(own, other, 0.01) / relative(photo, photo + noise, 0.01))
                    outputs.append(relative(own, other, 0.1) / float((scores - logits).norm()))
            found = {name: each[i].item() for name, each in table[method.name].items()}
            assert found["maxsensitivity"] == pytest.approx(max(changes), rel=1e-8)
            assert found["avgsensitivity"] == pytest.approx(sum(changes) / 4, rel=1e-8)
            assert found["locallipschitz"] == pytest.approx(max(slopes), rel=1e-8)
            assert found["relativeinputstability"] == pytest.approx(max(inputs), rel=1e-8)
            assert found["relativeoutputstability"] == pytest.approx(max(outputs), rel=1e-8)


def test_metrics_of_the_same_noisy_copies_share_them(
    model: nn.Module, photos: torch.Tensor
) -> None:
    counting = Counting(model)
    methods = ["gradcam", "saliency"]
    metrics = ["maxsensitivity", "avgsensitivity", "locallipschitz", "relativeinputstability"]
    explain.evaluate(counting, photos[:1], methods, metrics, layer="inner.layer1", target=1)
    assert len({row.numpy().tobytes() for row in counting.rows}) == 1 + 10
    # and the photo as it is for relative stability, and a look at layers
    assert len(counting.rows) <= 1 + 10 + 1 + 2


def test_continuity_shifts_the_photo_and_the_map_back(
    model: nn.Module, photos: torch.Tensor
) -> None:
    table = explain.evaluate(model, photos, Saliency(), Continuity((1, 2)), target=TARGETS)
    for i, photo in enumerate(photos):
        own = values_of(model, photo, Saliency(), TARGETS[i]).amax(0).numpy()
        found = []
        padded = np.pad(photo.numpy(), ((0, 0), (2, 2), (2, 2)), mode="edge")
        for by in (1, 2):
            for down, across in ((by, 0), (-by, 0), (0, by), (0, -by)):
                moved = torch.from_numpy(
                    padded[:, 2 - down : 14 - down, 2 - across : 12 - across].copy()
                )
                other = values_of(model, moved, Saliency(), TARGETS[i]).amax(0).numpy()
                pairs = [
                    (own[y, x], other[y + down, x + across])
                    for y in range(12)
                    for x in range(10)
                    if 0 <= y + down < 12 and 0 <= x + across < 10
                ]
                found.append(np.corrcoef(np.array(pairs).T)[0, 1])
        assert table.parts("saliency", "continuity")["shifts"][i].tolist() == pytest.approx(
            found, abs=1e-8
        )
        assert table["saliency"]["continuity"][i].item() == pytest.approx(np.mean(found), abs=1e-8)
    with pytest.raises(MetricError, match="photo"):
        explain.evaluate(model, photos, Saliency(), Continuity((5,)))


class WithToken(nn.Sequential):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.token = nn.Parameter(torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x * self.token.sum())
        return found


def test_parameters_are_randomised_on_a_copy_as_their_classes_do_it() -> None:
    model = WithToken(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(16)
    ).eval()
    model[1].running_mean.fill_(5.0)
    before = snapshot(model)
    state = torch.get_rng_state()
    x = as_inputs(torch.ones(1, 3, 4, 4))
    assert Randomised(model, x).layers == ["", "0", "1", "4"]
    other = Randomised(model, x).of(["", "0", "1"], 3)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3 * 1_000_003 + 1)
    expected = nn.Conv2d(3, 4, 3)
    assert torch.equal(other[0].weight, expected.weight)
    assert torch.equal(other[1].running_mean, torch.zeros(4))
    assert sorted(other.token.tolist()) == list(range(6))
    assert other.token.tolist() != list(range(6))
    again = Randomised(model, x).of(["0"], 3)
    assert torch.equal(again[0].weight, other[0].weight), "whatever other layers are randomised"
    assert torch.equal(again[1].running_mean, torch.full((4,), 5.0))
    assert not torch.equal(Randomised(model, x).of(["0"], 4)[0].weight, other[0].weight)
    assert grouped(list("abcdefg"), 3) == [["a", "b", "c"], ["d", "e"], ["f", "g"]]
    assert grouped(["a"], 3) == [["a"]]
    assert grouped(["a", "b"], None) == [["a"], ["b"]]


class Stubborn(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "made"):
            nn.init.zeros_(self.weight)
            raise RuntimeError("no")


def test_one_copy_in_several_states_is_in_each_what_a_new_copy_would_be() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2)
    ).eval()
    model[2].weight = model[0].weight  # one tensor of two layers
    model[1].running_mean.add_(3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = as_inputs(torch.ones(2, 4))
    copy = Randomised(model, x)
    for layers in (["3"], ["2", "3"], ["0"], [], ["0", "1", "2", "3"], ["1"], ["2"]):
        state = copy.of(layers, 5).state_dict()
        alone = Randomised(model, x).of(layers, 5).state_dict()
        assert all(torch.equal(state[name], alone[name]) for name in before), layers
        assert all(torch.equal(state[name], before[name]) for name in before) == (not layers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_that_cannot_be_randomised_are_named(photos: torch.Tensor) -> None:
    model = nn.Sequential(nn.Flatten(), Stubborn(360, 2)).double()
    model[1].made = True
    before = snapshot(model)
    copied = Randomised(model, as_inputs(photos))
    with pytest.raises(MetricError, match="layer '1' must"):
        explain.evaluate(model, photos, "saliency", "emprt")
    with pytest.raises(MetricError, match="layer '1' must"):
        copied.of(["1"])
    assert torch.equal(copied.of([])(photos), model(photos))
    assert snapshot(model) == before
    with pytest.raises(MetricError, match="model must"):
        explain.evaluate(nn.Flatten().double(), photos, "saliency", "mprt", target=0)


@pytest.mark.parametrize("order", ["top", "bottom", "independent"])
def test_parameter_randomisation_by_a_plain_loop(
    model: nn.Module, photos: torch.Tensor, order: Any
) -> None:
    metric = MPRT(order=order, steps=3, seed=1)
    methods = {"cam": GradCAM(relu=False), "gradient": Saliency()}
    table = explain.evaluate(model, photos, methods, metric, target=TARGETS, layer=CAM)
    groups = grouped(Randomised(model, as_inputs(photos)).layers, 3)
    states = groups
    if order != "independent":
        groups = groups[::-1] if order == "top" else groups
        states = [sum(groups[: k + 1], []) for k in range(3)]  # noqa: RUF017
    for name, method in methods.items():
        curve = table.curve(name, metric.name)[1]
        for k, state in enumerate(states):
            other = Randomised(model, as_inputs(photos)).of(state, 1)
            for i, photo in enumerate(photos):
                maps = [values_of(m, photo, method, TARGETS[i]) for m in (model, other)]
                flat = [m.amax(0)[None] if m.ndim == 3 else m[None] for m in maps]
                expected = spearman(*flat).item() if flat[1].max() > flat[1].min() else 0
                assert curve[i, k].item() == pytest.approx(expected, abs=1e-8)
        torch.testing.assert_close(table[name][metric.name], curve.mean(1))
        assert ("last" in table.parts(name, metric.name)) == (order != "independent")


def test_the_smooth_and_the_efficient_variant(model: nn.Module, photos: torch.Tensor) -> None:
    smooth = MPRT(samples=3, sigma=0.2, steps=2, seed=1)
    table = explain.evaluate(
        model, photos, {"gradient": Saliency()}, [smooth, EfficientMPRT()], target=TARGETS
    )
    averaged = explain.evaluate(
        model,
        photos,
        {"gradient": Smooth(Saliency(), samples=3, sigma=0.2, seed=1)},
        MPRT(steps=2, seed=1),
        target=TARGETS,
    )
    torch.testing.assert_close(table["gradient"]["smprt"], averaged["gradient"]["mprt"])
    other = Randomised(model, as_inputs(photos)).of(Randomised(model, as_inputs(photos)).layers, 0)
    for i, photo in enumerate(photos):
        entropies = []
        for m in (model, other):
            counts = np.histogram(
                values_of(m, photo, Saliency(), TARGETS[i]).amax(0).numpy(), bins=100
            )[0]
            entropies.append(-sum(c / 120 * math.log(c / 120) for c in counts if c))
        expected = (entropies[1] - entropies[0]) / entropies[0]
        assert table["gradient"]["emprt"][i].item() == pytest.approx(expected, abs=1e-8)


def test_a_map_that_turns_zero_has_changed_and_is_told(photos: torch.Tensor) -> None:
    class Dead(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)

    model = nn.Sequential(nn.Flatten(), Dead(360, 2)).double()
    nn.init.normal_(model[1].weight)
    with pytest.warns(ExplainWarning, match="saliency is zero"):
        table = explain.evaluate(model, photos, "saliency", "mprt")
    assert table["saliency"]["mprt"].tolist() == [0, 0, 0]
    assert (table.parts("saliency", "mprt")["zeros"] == 1).all()


def test_a_method_that_ignores_model_and_class_is_found_out(
    model: TinyNet, photos: torch.Tensor
) -> None:
    """Random weights of the maps depend on nothing but the maps; integrated gradients depend on
    both."""
    metrics = [MPRT(steps=2), RandomLogit()]
    table = explain.evaluate(
        model, photos, ["randomcam", IntegratedGradients(steps=4)], metrics, layer="conv1"
    )
    assert table["randomcam"]["randomlogit"].tolist() == pytest.approx([1, 1, 1])
    assert (table["integratedgradients"]["randomlogit"] < 0.9).all()


def test_random_logits_are_other_classes_and_the_same_steps_away_for_every_image(
    model: nn.Module, photos: torch.Tensor
) -> None:
    table = explain.evaluate(
        model, photos, InputXGradient(), RandomLogit(samples=9, seed=5), target=TARGETS
    )
    offsets = (torch.randperm(4, generator=torch.Generator().manual_seed(5)) + 1).tolist()
    assert sorted(offsets) == [1, 2, 3, 4]
    curve = table.curve("inputxgradient", "randomlogit")[1]
    for i, photo in enumerate(photos):
        own = values_of(model, photo, InputXGradient(), TARGETS[i]).sum(0)[None]
        others = [
            values_of(model, photo, InputXGradient(), (TARGETS[i] + k) % 5).sum(0)[None]
            for k in offsets
        ]
        assert curve[i].tolist() == pytest.approx(
            [spearman(own, other).item() for other in others], abs=1e-8
        )
    with pytest.raises(MetricError, match="target must"):
        explain.evaluate(
            model, photos, "saliency", "randomlogit", target=lambda output: output.sum(1)
        )


def test_contributions_add_up_where_they_should(photos: torch.Tensor) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(320, 3, bias=False)
    ).double()
    table = explain.evaluate(net, photos, ["inputxgradient", "saliency"], "completeness")
    assert table["inputxgradient"]["completeness"].abs().max() < 1e-12
    values = explain.attribute(net, photos, "saliency").values
    difference = (net(photos) - net(photos * 0)).amax(1)
    off = (values.sum((1, 2, 3)) - difference).abs()
    torch.testing.assert_close(table["saliency"]["completeness"], off.detach())
    relative = table.parts("saliency", "completeness")["relative"]
    torch.testing.assert_close(relative, (off / difference.abs()).detach())


def test_input_invariance_of_gradients_and_not_of_gradients_times_input(
    model: nn.Module, photos: torch.Tensor
) -> None:
    methods = ["saliency", "inputxgradient", "gradcam"]
    table = explain.evaluate(
        model, photos, methods, InputInvariance(0.7), layer=CAM, target=TARGETS
    )
    assert table["saliency"]["inputinvariance"].abs().max() < 1e-8
    assert table["gradcam"]["inputinvariance"].abs().max() < 1e-8
    a = explain.attribute(model, photos, "saliency", target=TARGETS)
    signed = explain.attribute(model, photos, Saliency(absolute=False), target=TARGETS).values
    length = (photos * signed).flatten(1).norm(dim=1)
    expected = (0.7 * a.values).flatten(1).norm(dim=1) / length
    torch.testing.assert_close(table["inputxgradient"]["inputinvariance"], expected)


@pytest.mark.parametrize("kind", ["second", "keyword", "in a mapping"])
def test_input_invariance_shifts_the_photo_wherever_the_model_takes_it(
    model: nn.Module, photos: torch.Tensor, kind: str
) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, beside: Any = None, photo: Any = None) -> torch.Tensor:
            if kind == "in a mapping":
                beside, photo = beside["beside"], beside["photo"]
            found: torch.Tensor = self.model(photo) + beside.square().mean()
            return found

    beside = torch.ones(1, 1, 2, 2).to(photos)
    x = {
        "second": explain.Inputs((beside, photos), explained=1, shared=[0]),
        "keyword": explain.Inputs(
            (), {"beside": beside, "photo": photos}, explained="photo", shared=["beside"]
        ),
        "in a mapping": explain.Inputs(
            ({"beside": beside, "photo": photos},), explained=(0, "photo"), shared=[(0, "beside")]
        ),
    }[kind]
    methods = ["saliency", "inputxgradient"]
    expected = explain.evaluate(model, photos, methods, InputInvariance(0.7), target=TARGETS)
    table = explain.evaluate(Wrapped().eval(), x, methods, InputInvariance(0.7), target=TARGETS)
    for name in methods:
        torch.testing.assert_close(
            table[name]["inputinvariance"], expected[name]["inputinvariance"]
        )


def test_adcc_by_its_formula(model: nn.Module, photos: torch.Tensor) -> None:
    table = explain.evaluate(model, photos, "gradcam", ADCC(), target=TARGETS, layer="conv1")

    def heat(photo: torch.Tensor, target: int) -> torch.Tensor:
        return (
            explain.attribute(model, photo[None], "gradcam", target=target, layer="conv1")
            .heatmap[0]
            .double()
        )

    for i, photo in enumerate(photos):
        own = heat(photo, TARGETS[i])
        behind = own * photo
        before, after = (model(p[None])[0].softmax(0)[TARGETS[i]].item() for p in (photo, behind))
        coherency = (1 + np.corrcoef(own.flatten(), heat(behind, TARGETS[i]).flatten())[0, 1]) / 2
        goods = [coherency, 1 - own.mean().item(), 1 - max(0, before - after) / before]
        expected = 3 / sum(1 / good for good in goods)
        # heatmaps are float32
        assert table["gradcam"]["adcc"][i].item() == pytest.approx(expected, abs=1e-5)
