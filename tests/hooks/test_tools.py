from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from explain.hooks import FeatureExtractor, inspect
from tests.conftest import TinyNet, snapshot


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
    assert_close(features["conv1"], F.conv2d(x, net.conv1.weight, net.conv1.bias, padding=1))
    with_graph = FeatureExtractor(net, "layer1", graph=True)(x)["layer1"]
    assert with_graph.requires_grad
    assert_close(with_graph, features["layer1"])


def test_an_inspection_tells_shapes_parameters_dead_units_and_gradients(
    net: TinyNet, x: torch.Tensor
) -> None:
    net.train()
    net.conv1.weight.data[:3] = 0
    net.conv1.bias.data[:3] = -1
    net.bn1.bias.data[:3] = -5
    before = snapshot(net)
    with torch.inference_mode():  # its inputs get gradients all the same
        found = inspect(net, x.clone())
    assert snapshot(net) == before
    rows = {row.name: row for row in found.rows}
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
    assert [r["name"] for r in json.loads(found.to_json())] == [*rows]
    assert "50%" in next(line for line in str(found).splitlines() if "relu" in line)
