"""Signals ``(N, C, L)``: maps of them are compared with plain computations in double precision."""

from __future__ import annotations

import warnings
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import explain
from explain import ExplainWarning, ImageError, LayerError, MethodError
from explain.methods import LRP, FeatureAblation, IntegratedGradients, Occlusion
from explain.methods.regions import GivenRegions
from explain.relevance import Composite, Epsilon, When
from tests.conftest import settled

X = torch.randn(3, 2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.double)


class Network(nn.Module):
    """A convolution with stride 2, and something behind it."""

    def __init__(self, behind: nn.Module | None = None, *, last: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 5, stride=2, padding=2)
        self.behind = behind or nn.Identity()
        self.last = last
        self.head = nn.Linear(6, 4)

    def scored(self, maps: Tensor) -> Tensor:
        """The scores from what the convolution gives ``(N, C, l)``."""
        states = self.behind(maps.relu().transpose(1, 2))
        states = states[0] if isinstance(states, tuple) else states
        return self.head(states[:, -1] if self.last else states.mean(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scored(self.conv(x))


def network_of(kind: str) -> Network:
    behind: dict[str, Any] = {
        "convolution": None,
        "lstm": nn.LSTM(6, 6, batch_first=True),
        "gru": nn.GRU(6, 3, bidirectional=True, batch_first=True),
        "transformer": nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        ),
    }
    network = settled(Network(behind[kind], last=kind == "lstm"), 5).double().eval()
    assert isinstance(network, Network)
    return network


def gradient(network: nn.Module, x: Tensor, target: int = 1) -> Tensor:
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(network(x)[:, target].sum(), x)
    return found


KINDS = pytest.mark.parametrize("kind", ["convolution", "lstm", "gru", "transformer"])


@KINDS
def test_gradients_and_paths_are_those_of_the_signal(kind: str) -> None:
    network = network_of(kind)
    maps = explain.attribute(
        network, X, ["inputxgradient", IntegratedGradients(steps=8, rule="midpoint")], target=1
    )
    torch.testing.assert_close(maps["inputxgradient"].values, X * gradient(network, X))
    steps = [(step + 0.5) / 8 for step in range(8)]
    mean = sum(gradient(network, X * step) for step in steps) / 8
    integrated = maps["integratedgradients"]
    torch.testing.assert_close(integrated.values, X * mean)
    summed = integrated.values.sum(1).abs()
    expected = (summed / summed.amax(1, keepdim=True)).float()
    torch.testing.assert_close(integrated.heatmap, expected)


@KINDS
def test_windows_of_occlusion_are_intervals(kind: str) -> None:
    network = network_of(kind)
    drops = torch.zeros(3, 24, dtype=torch.double)
    counts = torch.zeros(24)
    whole = network(X)[:, 2]
    for start in range(0, 24, 3):
        covered = X.clone()
        covered[..., start : start + 5] = 0
        drops[:, start : start + 5] += (whole - network(covered)[:, 2]).detach()[:, None]
        counts[start : start + 5] += 1
        if start + 5 >= 24:
            break
    found = explain.attribute(network, X, Occlusion(window=5, stride=(3,)), target=2)
    torch.testing.assert_close(found.values, drops / counts)


def test_given_regions_are_parts_of_the_signal() -> None:
    network = network_of("lstm")
    labels = torch.arange(24) // 6
    drops = []
    for part in range(4):
        covered = torch.where(labels == part, 0, X)
        drops.append((network(X) - network(covered))[:, 0].detach())
    expected = torch.stack(drops, 1).repeat_interleave(6, 1)
    for given in (labels, labels.expand(3, 24)):
        found = explain.attribute(network, X, FeatureAblation(GivenRegions(given)), target=0)
        torch.testing.assert_close(found.values, expected)


@KINDS
def test_gradcam_weights_maps_by_their_mean_gradients(kind: str) -> None:
    network = network_of(kind)
    maps = network.conv(X).detach().requires_grad_()
    (slopes,) = torch.autograd.grad(network.scored(maps)[:, 0].sum(), maps)
    expected = (slopes.mean(2, keepdim=True) * maps).sum(1).relu().detach()
    found = explain.attribute(network, X, "gradcam", target=0, layer="conv")
    torch.testing.assert_close(found.values, expected)
    assert found.heatmap.shape == (3, 24)
    assert found.size == (24,)
    alone = explain.attribute(network, X[1:2], "gradcam", target=0, layer="conv")
    torch.testing.assert_close(alone.values, found.values[1:2])


def test_lrp_epsilon_shares_out_by_the_rule() -> None:
    network = network_of("convolution")
    rules = ((When(("convolution", "dense")), Epsilon(1e-4, absolute=True)),)
    found = explain.attribute(network, X, LRP(Composite("e", rules)), target=3)

    def stabilised(z: Tensor) -> Tensor:
        return z + 1e-4 * torch.where(z < 0, -1.0, 1.0)

    z = network.conv(X).detach()
    means = z.relu().mean(2)
    scores = network.head(means).detach()
    of_means = means * network.head.weight[3] * (scores[:, 3] / stabilised(scores[:, 3]))[:, None]
    of_maps = of_means[..., None] * z.relu() / z.relu().sum(2, keepdim=True).clamp(min=1e-300)
    shares = of_maps / stabilised(z)
    back = F.conv_transpose1d(shares, network.conv.weight, stride=2, padding=2, output_padding=1)
    torch.testing.assert_close(found.values, (X * back).detach())


@KINDS
def test_relevance_and_what_was_taken_are_the_score_in_each_precision(kind: str) -> None:
    network = network_of(kind)
    found = explain.attribute(network, X, "lrp", target=1)
    taken = sum(found.coverage.taken.values())  # type: ignore[union-attr]
    total = found.values.sum((1, 2)) + taken
    torch.testing.assert_close(total, found.score, rtol=0.01, atol=1e-3)
    single = explain.attribute(network.float(), X.float(), "lrp", target=1)
    torch.testing.assert_close(single.values.double(), found.values, rtol=1e-3, atol=1e-4)


@KINDS
def test_cells_are_drawn_where_the_convolution_looks(kind: str) -> None:
    network = network_of(kind)
    nn.init.ones_(network.conv.weight)
    layer = "conv" if kind == "convolution" else "behind"
    found = explain.attribute(network, X, "hirescam", target=1, layer=layer)
    # a window of 5 with a padding of 2 and a stride of 2 is centred on each second value
    at_cells = found.on_input(with_sign=True)[:, ::2]
    assert found.values.shape == (3, 12)
    torch.testing.assert_close(at_cells.double(), found.values, rtol=1e-5, atol=1e-5)


def test_the_layer_is_the_last_map_and_methods_for_other_networks_refuse() -> None:
    network = nn.Sequential(
        nn.Conv1d(2, 5, 3),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(5, 6, 3, dilation=2),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )
    network = settled(network, 1).double().eval()
    assert explain.attribute(network, X, "hirescam", target=1).layer == "5"
    assert explain.attribute(network_of("lstm"), X, "hirescam", target=1).layer == "behind"
    with pytest.raises(MethodError, match="attention"):
        explain.attribute(network, X, "rollout", target=1)
    spectra = nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv2d(1, 3, 1), nn.Flatten())
    spectra = spectra.double()
    with pytest.raises(ImageError, match="layout"):
        explain.attribute(spectra, X, "saliency", target=1)
    values = explain.attribute(spectra, X, "saliency", target=1, layout="NCL").values
    torch.testing.assert_close(values, gradient(spectra, X).abs())
    with pytest.raises(LayerError, match="signal"):
        explain.attribute(spectra, X, "hirescam", target=1, layer="1", layout="NCL")
    with pytest.raises(ImageError, match="of one channel"):
        explain.attribute(network, X[:, 0], "saliency", target=1)


class ChannelsLast(nn.Module):
    """A network that takes signals as ``(N, L, C)``."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = self.first(x)
        states = states[0] if isinstance(states, tuple) else states
        return self.head(states.tanh().mean(1))


@pytest.mark.parametrize("first", [nn.LSTM(2, 5, batch_first=True), nn.Linear(2, 5)])
def test_channels_may_come_last(first: nn.Module) -> None:
    network = ChannelsLast(first).double()
    x = X.mT.contiguous()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExplainWarning)
        found = explain.attribute(network, x, "inputxgradient", target=1)
    assert [issubclass(one.category, ExplainWarning) for one in caught] == (
        [True] if isinstance(first, nn.Linear) else []
    )
    torch.testing.assert_close(found.values, (x * gradient(network, x)).mT)
    assert found.heatmap.shape == (3, 24)


def test_metrics_take_signals_and_their_maps() -> None:
    class OfImages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network_of("convolution")

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x.squeeze(2))

    of_images = OfImages()
    metrics = ["deletion", "sparseness", "completeness"]
    of_signals = explain.evaluate(
        of_images.network, X, ["saliency", "occlusion"], metrics, target=1
    )
    tables = [
        explain.evaluate(of_images, X[:, :, None], ["saliency", "occlusion"], metrics, target=1),
        explain.evaluate(
            of_images.network,
            X,
            {
                name: explain.attribute(of_images.network, X, name, target=1).values
                for name in ("saliency", "occlusion")
            },
            metrics[:1],
            target=1,
        ),
    ]
    torch.testing.assert_close(
        of_signals["saliency"]["deletion"], tables[0]["saliency"]["deletion"]
    )
    for metric in metrics:
        torch.testing.assert_close(of_signals["occlusion"][metric], tables[0]["occlusion"][metric])
    torch.testing.assert_close(
        of_signals["occlusion"]["deletion"], tables[1]["occlusion"]["deletion"]
    )


def test_a_plot_shows_each_channel_over_its_map() -> None:
    signal = torch.linspace(0, 3, 20).sin()
    heatmap = torch.zeros(20)
    heatmap[4:8] = 1
    figure = explain.render.plot(torch.stack([signal, -signal]), heatmap, names=["I", "II"])
    assert isinstance(figure, matplotlib.figure.Figure)
    assert [axes.get_ylabel() for axes in figure.axes] == ["I", "II"]
    np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), -signal)
    beneath = np.asarray(figure.axes[0].images[0].get_array())[0]
    assert (beneath[:, 3] > 0).tolist() == (heatmap > 0).tolist()
    both = explain.render.plot(signal, torch.linspace(-1, 1, 20))
    colors = np.asarray(both.axes[0].images[0].get_array())[0].astype(int)
    assert colors[2, 0] < colors[2, 2]  # blue against
    assert colors[-2, 0] > colors[-2, 2]
    for wrong in (heatmap * 3, heatmap[None, None], torch.zeros(3, 20), torch.zeros(21), "a"):
        with pytest.raises(ImageError):
            explain.render.plot(torch.stack([signal, signal]), wrong)
    with pytest.raises(ImageError, match="names"):
        explain.render.plot(signal, heatmap, names=["I", "II"])
