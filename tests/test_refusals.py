"""What cannot be explained is refused in one line that says why; what only looks so is
explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import explain
from explain import ImageError, LayerError, ModelError
from explain.layers import default_layer
from explain.methods import GradCAM
from tests.conftest import Made, settled

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIGNED = GradCAM(relu=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_traced_to_their_layer(bad: float) -> None:
    """The score is finite, since what is not is replaced behind the layer."""
    model = Made(
        lambda made, x: made.fc(made.conv(x).nan_to_num(0, 0, 0).mean((2, 3))),
        conv=nn.Conv2d(3, 4, 3),
        fc=nn.Linear(4, 5),
    ).double()
    nn.init.constant_(model.conv.bias, bad)
    with pytest.raises(ModelError, match="at layer conv"):
        explain.attribute(model, X, ["eigencam", "fem"], target=1, layer="conv")


def test_meta_tensors_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to("meta")
    x = torch.empty(1, 3, 8, 8, device="meta")
    with pytest.raises(ImageError, match="meta"):
        explain.attribute(model, x, "saliency", target=1)
    with pytest.raises(LayerError, match="meta"):
        default_layer(model, x)
    with pytest.raises(ModelError, match="model must hold values"):
        explain.attribute(model, torch.rand(1, 3, 8, 8), "saliency", target=1)
    assert [call.grid is None for call in explain.list_layers(model, x)] == [False, True, True]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize(
    "method", [SIGNED, "saliency", "guidedbackprop", "fullgrad", "integratedgradients"]
)
def test_reentrant_checkpoints_are_refused_and_others_explained(method: object) -> None:
    def forward(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
        maps = checkpoint(made.body, made.conv(x), use_reentrant=made.reentrant)
        return made.fc(maps.relu().mean((2, 3)))

    body = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3))
    model = settled(Made(forward, conv=nn.Conv2d(3, 4, 3), body=body, fc=nn.Linear(4, 5))).double()
    layer = "conv" if method is SIGNED else None

    def unchecked(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return made.fc(made.body(made.conv(x)).relu().mean((2, 3)))

    plain = Made(unchecked, conv=model.conv, body=model.body, fc=model.fc)
    expected = explain.attribute(plain, X, method, target=1, layer=layer)
    runs_no_backward_pass = method in ("guidedbackprop", "fullgrad")
    for reentrant in (True, False):
        model.reentrant = reentrant
        if reentrant and not runs_no_backward_pass:
            with pytest.raises(ModelError, match="re-entrant"):
                explain.attribute(model, X, method, target=1, layer=layer)
        else:
            attribution = explain.attribute(model, X, method, target=1, layer=layer)
            torch.testing.assert_close(attribution.values, expected.values)


def test_a_map_of_one_position_is_refused_with_the_reason() -> None:
    layers = [nn.Conv2d(3, 4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(4, 5)]
    model = settled(nn.Sequential(*layers)).double()
    for method in explain.list_methods("*cam*"):
        with pytest.raises(LayerError, match="one position"):
            explain.attribute(model, X, method, target=1, layer="1")
    with pytest.raises(LayerError, match="none of its layers gives a"):
        explain.attribute(model, X, "gradcam", target=1)


def test_a_network_for_a_fixed_number_of_images_is_looked_at_with_as_many() -> None:
    def forward(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 2, "Guard failed: x.size()[0] == 2"  # as torch.export leaves it
        return made.net(x)

    # whose second module gives a map that is probed: its channels may be first or last
    layers = [nn.Conv2d(3, 8, 2, 2), nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = settled(nn.Sequential(*layers, nn.Linear(8, 5))).double()
    fixed = Made(forward, net=net)
    expected = explain.attribute(net, X, SIGNED, target=1)
    attribution = explain.attribute(fixed, X, SIGNED, target=1)
    assert attribution.layer == f"net.{expected.layer}"
    torch.testing.assert_close(attribution.values, expected.values)
    # the model's own refusal, unchanged
    with pytest.raises(AssertionError, match="Guard failed"):
        explain.attribute(fixed, X[:1], SIGNED, target=1)


PHOTO = torch.rand(3, 16, 20, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("first", "x", "remedy", "mended"),
    [
        (nn.Conv2d(3, 4, 3), PHOTO, r"x\[None\]", PHOTO[None]),
        (nn.Conv2d(3, 4, 3), PHOTO.permute(1, 2, 0), "permute", PHOTO[None]),
        (nn.Conv2d(3, 4, 3), PHOTO.permute(1, 2, 0)[None], "movedim", PHOTO[None]),
        (nn.Conv2d(3, 4, 3), PHOTO.permute(1, 2, 0).numpy(), "from_numpy", PHOTO[None]),
    ],
)
def test_what_an_input_lacks_is_said_by_what_the_network_takes(
    first: nn.Module, x: Any, remedy: str, mended: torch.Tensor
) -> None:
    model = nn.Sequential(first, nn.Tanh(), nn.Flatten())
    with pytest.raises(ImageError, match=remedy):
        explain.attribute(model, x, "saliency", target=1)
    assert explain.attribute(model, mended, "saliency", target=1).values.shape == mended.shape


def test_data_sets_and_loaders_are_for_runs() -> None:
    data = torch.utils.data.TensorDataset(X)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double()
    for given in (torch.utils.data.DataLoader(data), data):
        with pytest.raises(ImageError, match=r"explain\.run"):
            explain.Explainer(model, preprocess=lambda image: X[0])(given, "saliency", target=1)
    with pytest.raises(ImageError, match=r"explain\.run"):
        explain.attribute(model, torch.utils.data.DataLoader(data), "saliency", target=1)


def test_a_wrapper_with_a_call_of_its_own_names_the_network_inside() -> None:
    class Predictor(nn.Module):
        """As ultralytics' YOLO: no forward, and a ``__call__`` that gives results."""

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double()

        def __call__(self, source: torch.Tensor) -> list[str]:
            with torch.inference_mode():
                return [str(row.argmax()) for row in self.model(source)]

    for method in ("saliency", "gradcam", "occlusion"):
        with pytest.raises(ModelError, match=r"model\.model"):
            explain.attribute(Predictor(), X, method, target=1)
    assert explain.attribute(Predictor().model, X, "saliency", target=1).values.shape == X.shape


def test_arguments_as_other_packages_call_them_are_translated() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double()
    for theirs, ours in {"target_layers": "layer", "target_category": "target"}.items():
        with pytest.raises(explain.ArgumentError, match=f"'{ours}'"):
            explain.attribute(model, X, "gradcam", **{theirs: 1})
    with pytest.raises(explain.ArgumentError, match="layer="):
        GradCAM(target_layers=[model[0]])


def test_levels_up_to_255_are_told_once_for_each_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double()
    levels = 255 * torch.rand(X.shape, generator=torch.Generator().manual_seed(3)).double()
    with pytest.warns(explain.ExplainWarning, match="255"):
        explain.attribute(model, levels, "saliency", target=1)
    explain.attribute(model, levels, "saliency", target=1)
    with pytest.warns(explain.ExplainWarning, match="255"):
        explain.attribute(nn.Sequential(model), levels, ["gradcam", "occlusion"], target=1)
    for others in (X, levels / 255, levels - 128, 1000 * levels, levels[:, :2]):  # scans, spectra
        first = nn.Conv2d(others.shape[1], 4, 3).double()
        explain.attribute(nn.Sequential(first, nn.Flatten()), others, "saliency", target=1)
