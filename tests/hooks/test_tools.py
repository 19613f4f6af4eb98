from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from explain.errors import HookError, LayerError
from explain.hooks import (
    FeatureExtractor,
    GradientClipper,
    GradientFlow,
    HookGroup,
    capture,
    inspect,
    timeline,
)
from tests.conftest import TinyNet, settled, snapshot


def test_capture_records_feature_maps_and_gradients_around_ones_own_backward(net: TinyNet, x: torch.Tensor) -> None:
    before = snapshot(net)
    source = x.clone().requires_grad_()
    with capture(net, ["conv1", "layer2"]) as seen:
        score = net(source)[:, 1].sum()
    gradient = torch.autograd.grad(score, source)[0]
    assert set(seen.activations) == set(seen.gradients) == {"conv1", "layer2"}
    assert torch.equal(seen.activations["conv1"], net.conv1(x))
    assert gradient.abs().max() > 0
    with torch.no_grad(), capture(net, "layer2") as inside:
        assert not torch.is_grad_enabled()
        inside.backward(net(x)[:, 1].sum())
    assert not torch.is_inference_mode_enabled()
    torch.testing.assert_close(inside.gradients["layer2"], seen.gradients["layer2"])
    assert snapshot(net) == before


def test_an_extractor_gives_features_and_stops_behind_the_last(net: TinyNet, x: torch.Tensor) -> None:
    ran: list[str] = []
    for name in ("conv1", "layer1", "layer2", "fc"):
        net.get_submodule(name).register_forward_hook(lambda m, a, o, name=name: ran.append(name))
    before = snapshot(net)
    features = FeatureExtractor(net, ["layer1", "conv1"])(x)
    assert list(features) == ["layer1", "conv1"]
    assert ran == ["conv1", "layer1"]
    assert not any(f.requires_grad for f in features.values())
    assert snapshot(net) == before
    torch.testing.assert_close(features["conv1"], F.conv2d(x, net.conv1.weight, net.conv1.bias, padding=1))
    with_graph = FeatureExtractor(net, "layer1", graph=True)(x)["layer1"]
    assert with_graph.requires_grad
    torch.testing.assert_close(with_graph, features["layer1"])


def test_an_extractor_says_when_a_layer_is_missing_or_never_called(net: TinyNet, x: torch.Tensor) -> None:
    with pytest.raises(LayerError, match="did you mean 'layer1'"):
        FeatureExtractor(net, "layr1")
    with pytest.raises(LayerError, match="'unused' was not called"):
        FeatureExtractor(net, ["conv1", "unused"])(x)


def test_an_inspection_tells_shapes_parameters_dead_units_and_gradients(net: TinyNet, x: torch.Tensor) -> None:
    net.train()
    net.conv1.weight.data[:3] = 0
    net.conv1.bias.data[:3] = -1
    net.bn1.bias.data[:3] = -5
    before = snapshot(net)
    found = inspect(net, x)
    assert snapshot(net) == before
    rows = {row.name: row for row in found.rows}
    assert [row.order for row in found.rows] == list(range(len(found.rows)))
    assert rows["conv1"].output == [3, 6, 12, 10]
    assert rows["conv1"].inputs == [[3, 3, 12, 10]]
    assert rows["conv1"].parameters == 6 * 3 * 9 + 6
    assert rows[""].parameters == sum(p.numel() for p in net.parameters())
    assert rows["relu"].dead == 0.5
    assert rows["layer1.0"].depth == 2
    assert rows["fc"].gradient == pytest.approx(3**0.5)  # one for the largest class of each of three images
    assert found.first_nonfinite is None
    assert "unused" not in rows
    assert [r["name"] for r in json.loads(found.to_json())] == [row.name for row in found.rows]
    text = str(found).splitlines()
    assert len(text) == 1 + len(found.rows)
    assert "50%" in next(line for line in text if line.strip().startswith("relu"))


def test_an_inspection_names_the_first_layer_that_gives_nan(net: TinyNet, x: torch.Tensor) -> None:
    net.layer1[0].weight.data[0, 0, 0, 0] = float("nan")
    found = inspect(net, x)
    assert found.first_nonfinite is not None
    assert found.first_nonfinite.name == "layer1.0"
    assert "NaN" in str(found)
    assert json.loads(found.to_json())


def test_gradients_are_clipped_by_value_and_by_norm() -> None:
    model, x = settled(TinyNet()).eval(), torch.randn(2, 3, 8, 8)
    for limit in ({"value": 0.05}, {"norm": 0.5}):
        model.zero_grad()
        model(x).sum().backward()
        plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        with GradientClipper(model, **limit) as clipper:
            model(x).sum().backward()
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            if "value" in limit:
                expected = plain[name].clamp(-0.05, 0.05)
            else:
                expected = plain[name] * min(1.0, 0.5 / plain[name].norm().item())
            torch.testing.assert_close(p.grad, expected)
        assert set(clipper.clipped) == {
            n for n, g in plain.items() if (g.abs().max() > 0.05 if "value" in limit else g.norm() > 0.5)
        }
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.fc.weight.grad, plain["fc.weight"])


@pytest.mark.parametrize("options", [{}, {"value": 1.0, "norm": 1.0}, {"value": 0.0}, {"norm": -1.0}])
def test_a_clipper_needs_one_positive_limit(options: dict[str, float]) -> None:
    with pytest.raises(HookError, match=r"exactly one of|must be positive"):
        GradientClipper(TinyNet(), **options)


def test_gradient_flow_judges_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with GradientFlow(model) as flow:
        for _ in range(5):
            y = model[1](model[0](torch.ones(2, 4)) * 1e-9)
            y = model[3](model[2](y))
            (y * torch.tensor([1.0, 1, 1, 1])).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert len(flow.steps) == 5
    verdicts = flow.verdicts()
    assert verdicts["0.weight"] == "vanishing"
    assert verdicts["3.bias"] == "ok"
    assert flow.steps[0]["3.bias"].rms == pytest.approx(2.0)
    figure = flow.plot()
    figure.canvas.draw()
    assert len(figure.axes) == 2


def test_a_timeline_lists_what_fires_when() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True))
    before = snapshot(model)
    events = timeline(model, torch.ones(1, 1, 4, 4))
    assert snapshot(model) == before
    forward = ["forward-pre ", "forward-pre 0", "forward 0", "forward-pre 1", "forward 1", "forward "]
    backward = ["backward-pre ", "backward-pre 1", "backward 1", "backward-pre 0", "backward 0", "backward "]
    assert [f"{event.kind} {event.layer}" for event in events] == forward + backward
    assert str(events).count("\n") == 11


@pytest.mark.parametrize("inplace", [False, True])
def test_full_backward_hooks_on_every_module_change_nothing(inplace: bool) -> None:
    model = settled(TinyNet()).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(model(x)[:, 0].sum(), x)[0]
    seen: list[str] = []
    with HookGroup(model) as group:
        for name, _ in model.named_modules():
            group.backward(name, lambda m, gi, go, name=name: seen.append(name))
        found = torch.autograd.grad(model(x.clone() if inplace else x)[:, 0].sum(), x)[0]
    assert torch.equal(found, expected)
    assert set(seen) == {name for name, _ in model.named_modules()} - {"unused"}


def test_gradient_flow_goes_from_the_first_layer_to_the_last_and_survives_a_failed_pass() -> None:
    model = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(4, 4), nn.Sigmoid())), nn.Linear(4, 1))
    with GradientFlow(model) as flow:
        model(torch.ones(2, 4)).sum().backward()
        hidden = model[:10](torch.ones(2, 4))
        hidden.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[10:](hidden).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
    assert len(flow.steps) == 2
    verdicts = flow.verdicts()
    assert next(iter(verdicts)).startswith("0.")
    assert verdicts["0.weight"] == "vanishing"
    assert verdicts["18.weight"] == verdicts["16.weight"] == "ok"
    assert flow.verdicts(last=1)["18.weight"] == "ok"
