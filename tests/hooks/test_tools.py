from __future__ import annotations

import json
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from explain import LayerError
from explain.hooks import FeatureExtractor, HookGroup, capture, inspect
from tests.conftest import TinyNet, settled, snapshot


def test_capture_records_feature_maps_and_gradients_around_ones_own_backward(
    net: TinyNet, x: torch.Tensor
) -> None:
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


def test_an_extractor_gives_features_and_stops_behind_the_last(
    net: TinyNet, x: torch.Tensor
) -> None:
    ran: list[str] = []
    for name in ("conv1", "layer1", "layer2", "fc"):
        net.get_submodule(name).register_forward_hook(lambda m, a, o, name=name: ran.append(name))
    before = snapshot(net)
    features = FeatureExtractor(net, ["layer1", "conv1"])(x)
    assert list(features) == ["layer1", "conv1"]
    assert ran == ["conv1", "layer1"]
    assert not any(f.requires_grad for f in features.values())
    assert snapshot(net) == before
    torch.testing.assert_close(
        features["conv1"], F.conv2d(x, net.conv1.weight, net.conv1.bias, padding=1)
    )
    with_graph = FeatureExtractor(net, "layer1", graph=True)(x)["layer1"]
    assert with_graph.requires_grad
    torch.testing.assert_close(with_graph, features["layer1"])


def test_an_extractor_says_when_a_layer_is_missing_or_never_called(
    net: TinyNet, x: torch.Tensor
) -> None:
    with pytest.raises(LayerError, match="did you mean 'layer1'"):
        FeatureExtractor(net, "layr1")
    with pytest.raises(LayerError, match="'unused' was not called"):
        FeatureExtractor(net, ["conv1", "unused"])(x)


def test_a_layer_that_attention_never_calls_says_why_it_has_nothing() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    with capture(model, "self_attn.out_proj") as seen:
        model(torch.rand(1, 3, 4, requires_grad=True)).sum().backward()
    for found in (
        lambda: seen.activations["self_attn.out_proj"],
        lambda: seen.gradients["self_attn.out_proj"],
        lambda: FeatureExtractor(model, "self_attn.out_proj")(torch.rand(1, 3, 4)),
    ):
        with pytest.raises(LayerError, match=r"'self_attn.out_proj' .*MultiheadAttention reads"):
            found()


def test_an_inspection_tells_shapes_parameters_dead_units_and_gradients(
    net: TinyNet, x: torch.Tensor
) -> None:
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
    # one for the largest class of each of three images
    assert rows["fc"].gradient == pytest.approx(3**0.5)
    assert found.first_nonfinite is None
    assert "unused" not in rows
    assert [r["name"] for r in json.loads(found.to_json())] == [row.name for row in found.rows]
    text = str(found).splitlines()
    assert len(text) == 1 + len(found.rows)
    assert "50%" in next(line for line in text if line.strip().startswith("relu"))


def test_the_time_of_an_inspection_is_that_of_a_pass_in_which_nothing_is_counted() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.3 if _len_torch_dispatch_stack() else 0.01)
            return super().forward(x)

    rows = inspect(nn.Sequential(Slow(4, 4), nn.ReLU()), torch.ones(1, 4)).rows
    assert [row.flops for row in rows] == [32, 32, 0]
    assert 0.01 < rows[1].seconds <= rows[0].seconds < 0.3


def test_an_inspection_names_the_first_layer_that_gives_nan(net: TinyNet, x: torch.Tensor) -> None:
    net.layer1[0].weight.data[0, 0, 0, 0] = float("nan")
    found = inspect(net, x)
    assert found.first_nonfinite is not None
    assert found.first_nonfinite.name == "layer1.0"
    assert "NaN" in str(found)
    assert json.loads(found.to_json())


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


def test_an_inspection_tells_the_shapes_of_keyword_tensors() -> None:
    class Scaled(nn.Module):
        def forward(
            self, x: torch.Tensor, *, scale: torch.Tensor, flag: bool = False
        ) -> torch.Tensor:
            return x * scale

    (row,) = inspect(Scaled(), torch.ones(2, 3), kwargs={"scale": torch.ones(3), "flag": True}).rows
    assert row.inputs == [[2, 3], [3]]
