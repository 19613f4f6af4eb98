"""What cannot be explained is refused in one line that says why; what only looks so is
explained."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import explain
from explain import ImageError, LayerError, ModelError
from explain.layers import default_layer
from explain.methods import GradCAM
from tests.conftest import settled

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIGNED = GradCAM(relu=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["eigencam", "fem"])
def test_activations_that_are_not_finite_are_traced_to_their_layer(method: str, bad: float) -> None:
    class Mended(nn.Module):
        """Its score is finite, since what is not is replaced behind the layer."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.fc = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.conv(x).nan_to_num(0, 0, 0).mean((2, 3)))

    model = settled(Mended()).double().eval()
    with torch.no_grad():
        model.conv.bias[0] = bad
    with pytest.raises(ModelError, match="at layer conv"):
        explain.attribute(model, X, method, target=1, layer="conv")


@pytest.mark.parametrize("method", ["gradcam", "saliency"])
def test_meta_tensors_are_refused(method: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to("meta")
    with pytest.raises(ImageError, match="meta"):
        explain.attribute(model, torch.empty(1, 3, 8, 8, device="meta"), method, target=1)
    with pytest.raises(LayerError, match="meta"):
        default_layer(model, torch.empty(1, 3, 8, 8, device="meta"))
    assert [
        call.grid is None
        for call in explain.list_layers(model, torch.empty(1, 3, 8, 8, device="meta"))
    ] == [
        False,
        True,
        True,
    ]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.conv2 = nn.Conv2d(4, 4, 3)
        self.fc = nn.Linear(4, 5)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = checkpoint(self.body, self.conv1(x), use_reentrant=self.reentrant)
        return self.fc(maps.relu().mean((2, 3)))

    def body(self, maps: torch.Tensor) -> torch.Tensor:
        return self.conv2(maps.relu())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize(
    "method", [SIGNED, "saliency", "guidedbackprop", "fullgrad", "integratedgradients"]
)
def test_reentrant_checkpoints_are_refused_and_others_explained(method: object) -> None:
    reentrant, other = (
        settled(Checkpointed(reentrant=flag)).double().eval() for flag in (True, False)
    )
    with pytest.raises(ModelError, match="re-entrant"):
        explain.attribute(reentrant, X, method, target=1, layer="conv1")
    assert explain.attribute(other, X, method, target=1, layer="conv1").heatmap.shape == (2, 16, 16)


def test_a_map_of_one_position_is_refused_with_the_reason() -> None:
    model = (
        settled(nn.Sequential(nn.Conv2d(3, 4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(4, 5)))
        .double()
        .eval()
    )
    for method in explain.list_methods("*cam*"):
        with pytest.raises(LayerError, match="one position"):
            explain.attribute(model, X, method, target=1, layer="1")
    with pytest.raises(LayerError, match="none of its layers gives a"):
        explain.attribute(model, X, "gradcam", target=1)


def test_a_network_for_a_fixed_number_of_images_is_looked_at_with_as_many() -> None:
    class Fixed(nn.Module):
        """As torch.export leaves it."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert len(x) == 2, "Guard failed: x.size()[0] == 2"
            return self.net(x)

    usual = settled(convolutions()).double().eval()
    fixed = Fixed(usual)
    expected = explain.attribute(usual, X, SIGNED, target=1)
    attribution = explain.attribute(fixed, X, SIGNED, target=1)
    assert attribution.layer == f"net.{expected.layer}"
    torch.testing.assert_close(attribution.values, expected.values)
    # the model's own refusal, unchanged
    with pytest.raises(AssertionError, match="Guard failed"):
        explain.attribute(fixed, X[:1], SIGNED, target=1)


def convolutions() -> nn.Module:
    """Its second module gives a map that is probed: its channels may be first or last."""
    layers = (
        nn.Conv2d(3, 8, 2, 2),
        nn.Softplus(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return nn.Sequential(*layers)
