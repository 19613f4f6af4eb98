"""What is asked of autograd's graph, below the names of a network."""

from __future__ import annotations

import torch
from torch import nn

from explain._utils.modules import kept_modules, modules_of
from explain.hooks.graph import Reach, differentiate, graph, normalises_over_batch
from explain.hooks.guard import Edits
from explain.hooks.layer_names import LayerPlace, find_places, name_of_place, place_of
from explain.hooks.preserve import without_proxy
from explain.recording.modes import Watcher


def test_the_gradient_of_one_normalised_sample_is_at_its_pixel() -> None:
    x, norm = torch.ones(1, 2, 3, 3, requires_grad=True), nn.BatchNorm2d(2).eval()
    tokens = torch.cat([torch.zeros(1, 1, 2), norm(x).flatten(2).transpose(1, 2)], 1)
    (gradient,) = differentiate(tokens[0, 5, 1], [x])
    assert gradient is not None
    assert gradient.nonzero().tolist() == [[0, 1, 1, 1]]


def test_statistics_of_a_batch_join_its_samples() -> None:
    x, norm = torch.ones(2, 3, 4, 4, requires_grad=True), nn.functional.batch_norm
    of_batch = norm(x, None, None, training=True)
    stored = norm(x, torch.zeros(3), torch.ones(3))
    assert normalises_over_batch(graph(of_batch))
    assert not normalises_over_batch(graph(stored))


def test_a_graph_lists_its_nodes_nearest_first() -> None:
    x = torch.ones(2, requires_grad=True)
    names = [node.name() for node in graph(x.exp().sin() + x.relu())]
    assert names[0] == "AddBackward0"
    assert {*names[1:3]} == {"SinBackward0", "ReluBackward0"}
    assert {*names[3:]} == {"ExpBackward0", "torch::autograd::AccumulateGrad"}


def test_a_node_reaches_the_leaves_that_it_was_computed_from() -> None:
    x = torch.ones(2, requires_grad=True)
    other = torch.ones(1, requires_grad=True)
    reach = Reach([x])
    assert reach.of((x * 2).grad_fn)
    assert not reach.of(other.exp().grad_fn)


def test_an_edit_past_autograd_is_noticed() -> None:
    gradient = torch.ones(2)
    edits = Edits([gradient])
    with Watcher(edits.watched):
        gradient.data.mul_(3)
    assert edits.any()


def test_a_proxy_of_a_transform_shows_its_tensor() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    doubled = torch.vmap(lambda row: row * (1 + without_proxy(row).requires_grad))(x)
    assert doubled.sum().item() == 12


def test_names_of_places_are_split_and_joined() -> None:
    assert place_of("encoder.conv@0") == LayerPlace("encoder.conv", "", 0)
    assert place_of("conv:input") == LayerPlace("conv", "input")
    assert name_of_place(LayerPlace("conv", "input", 2)) == "conv:input@2"
    modules = nn.ModuleDict({"conv": nn.ReLU(), "conv@0": nn.ReLU()})
    name = name_of_place(LayerPlace("conv", "", 0), modules)
    assert place_of(name, modules) == LayerPlace("conv", "", 0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    assert list(find_places(model, ["*:input", nn.ReLU])) == ["0:input", "1:input", "1"]


def test_modules_have_the_first_of_their_names() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [nn.ReLU(), nn.Tanh()]

    layer = nn.Linear(2, 2)
    shared = nn.Sequential(layer, nn.Sequential(nn.ReLU(), layer))
    assert list(modules_of(shared).values()) == ["", "0", "1", "1.0"]
    assert list(kept_modules(Keeps())) == ["blocks.0", "blocks.1"]
