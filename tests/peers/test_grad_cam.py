"""Against pytorch-grad-cam."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import methods
from explain.methods.base import MethodLike
from tests.methods import plain, plain_factors, plain_masks, plain_paths
from tests.peers.common import (
    LAYER,
    TARGET,
    agree,
    network,
    off,
    photo,
    random,
    resnet,
)

WHY = "pytorch-grad-cam comes with the extra 'peers'"
peer = pytest.importorskip("pytorch_grad_cam", reason=WHY)
objectives = pytest.importorskip("pytorch_grad_cam.utils.model_targets", reason=WHY)


def recording(cam: type) -> type:
    """The same, which remembers its maps ``(N, h, w)`` before they are rectified, shifted, scaled
    and enlarged."""

    class Recorder(cam):
        maps: torch.Tensor

        def get_cam_image(self, *args: Any, **kwargs: Any) -> np.ndarray:
            found = super().get_cam_image(*args, **kwargs)
            Recorder.maps = torch.as_tensor(found)
            return found

    return Recorder


def raw(
    cam: type, model: nn.Module, layer: nn.Module, x: torch.Tensor, target: Any
) -> torch.Tensor:
    recorder = recording(cam)
    recorder(model, [layer])(x.clone(), [target] * len(x))
    return recorder.maps


def theirs(
    cam: type, layers: list[plain.Layer], x: torch.Tensor, layer: int = LAYER, objective: Any = None
) -> torch.Tensor:
    model = plain.module_of(layers)
    return raw(
        cam, model, model[layer], x[None], (objective or objectives.ClassifierOutputTarget)(TARGET)
    )[0]


def ours(
    method: MethodLike, layers: list[plain.Layer], x: torch.Tensor, layer: int = LAYER
) -> torch.Tensor:
    return explain.attribute(
        plain.module_of(layers), x[None], method, target=TARGET, layer=str(layer)
    ).values[0]


# Where it follows the papers


SAME = {
    "GradCAM": methods.GradCAM(relu=False),
    "HiResCAM": "hirescam",
    "GradCAMElementWise": methods.ElementWiseCAM(),
    "LayerCAM": "layercam",
    "XGradCAM": methods.XGradCAM(relu=False),
}


@pytest.mark.parametrize("name", SAME)
def test_maps_are_the_same_on_a_resnet(name: str) -> None:
    x = random(0, 1, 3, 96, 64)
    model = resnet()
    found = raw(getattr(peer, name), model, model.layer2, x, objectives.ClassifierOutputTarget(3))
    found = found.clamp(min=0) if name == "LayerCAM" else found
    assert agree(found, explain.attribute(resnet(), x, SAME[name], target=3, layer="layer2").values)


def test_kpcacam_is_the_same() -> None:
    layers = network()
    x = photo()
    assert agree(theirs(peer.KPCA_CAM, layers, x), ours(methods.KPCACAM(gamma=None), layers, x))


def test_randomcam_is_the_same_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = network()
    x = photo()
    weights = torch.rand(5, generator=torch.Generator().manual_seed(0)) * 2 - 1
    monkeypatch.setattr(np.random, "uniform", lambda low, high, size: weights.numpy().reshape(size))
    assert agree(theirs(peer.RandomCAM, layers, x), ours(methods.RandomCAM(relu=False), layers, x))


def test_shapleycam_is_the_same_when_told_its_objective() -> None:
    layers = network()
    x = photo()
    found = theirs(peer.ShapleyCAM, layers, x, objective=objectives.ClassifierOutputReST)
    assert agree(found.clamp(min=0), ours("shapleycam", layers, x))


WEIGHTED = methods.FinerCAM(methods.GradCAM(relu=False), objective="weighted", alpha=1.0)


def finer(model: nn.Module, layer: nn.Module, x: torch.Tensor, target: int) -> torch.Tensor:
    recorder = recording(peer.GradCAM)
    peer.FinerCAM(model, [layer], base_method=recorder)(x.clone(), target_idx=target)
    return recorder.maps


def test_finercam_is_the_same_with_the_weighted_objective() -> None:
    layers = network()
    x = photo()
    model = plain.module_of(layers)
    assert agree(finer(model, model[LAYER], x[None], TARGET)[0], ours(WEIGHTED, layers, x))


def test_refinecam_is_the_same_where_minima_are_zero_and_nothing_is_enlarged() -> None:
    layers = network()
    x = photo()
    model = plain.module_of(layers)
    target = objectives.ClassifierOutputTarget(TARGET)
    found = peer.RefineCAM(model, [model[0], model[2]], base_method=peer.GradCAM)(x[None], [target])
    both = explain.attribute(
        model, x[None], methods.RefineCAM(methods.GradCAM()), target=TARGET, layer=["0", "2"]
    )
    assert all(values.min() == 0 for values in both.maps.values())
    assert agree(found, both.heatmap)


# Where it computes something else


def test_grad_cam_gradcampp_adds_an_epsilon_that_swamps_small_gradients() -> None:
    x = random(0, 1, 3, 224, 224)
    model = resnet()
    target = objectives.ClassifierOutputTarget(3)
    small = explain.attribute(
        model, x, methods.GradCAMPlusPlus(relu=False), target=3, layer="layer4"
    ).values
    assert off(raw(peer.GradCAMPlusPlus, model, model.layer4, x, target), small) > 0.3
    with torch.no_grad():
        # an epsilon of 1e-6 is then nothing beside the squares of the gradients
        model.fc.weight *= 1e6
    large = explain.attribute(
        model, x, methods.GradCAMPlusPlus(relu=False), target=3, layer="layer4"
    ).values
    assert agree(raw(peer.GradCAMPlusPlus, model, model.layer4, x, target), large)
    layers = network()
    x = photo()
    assert agree(ours("gradcam++", layers, x), plain.gradcampp(layers, x, TARGET, LAYER), 1e-10)


def test_grad_cam_fem_adds_up_activations_where_the_paper_counts_them() -> None:
    layers = network()
    x = photo()
    a = plain.forward(layers, x)[LAYER + 1]
    mean = a.mean((1, 2), keepdim=True)
    deviation = a.std((1, 2), keepdim=True, correction=0)
    rare = (a > mean + 2 * deviation).double()
    found = theirs(peer.FEM, layers, x)
    paper = plain_factors.fem(layers, x, TARGET, LAYER)
    # of the channels that have rare places, all
    assert agree(found, (rare.mean((1, 2), keepdim=True) * a).sum(0))
    assert off(found, paper) > 0.1
    assert agree(ours("fem", layers, x), paper, 1e-10)


def test_grad_cam_scorecam_stretches_masks_to_the_corners() -> None:
    layers = network()
    x = photo()
    a = plain.forward(layers, x)[LAYER + 1]
    stretched = F.interpolate(a[None], x.shape[1:], mode="bilinear", align_corners=True)[0]
    masks = torch.stack([plain.unit(mask, shift=True) for mask in stretched])
    weights = plain.module_of(layers)(masks[:, None] * x)[:, TARGET].softmax(0).detach()
    found = theirs(peer.ScoreCAM, layers, x)
    paper = plain_masks.scorecam(layers, x, TARGET, LAYER)
    assert agree(found, torch.einsum("k,khw->hw", weights, a))  # nothing else differs
    assert off(found, paper) > 1e-3
    assert agree(ours("scorecam", layers, x), paper, 1e-8)


def test_grad_cam_ablationcam_writes_minus_ten_million_where_the_paper_writes_zero() -> None:
    """Before a mean and a linear layer, a channel's weight has to be ``w_k mean(A_k) / y``."""
    layers = [*network()[:7], *network()[8:]]
    x = photo()
    last = 6
    *_, a, _, logits = plain.forward(layers, x)
    identity = torch.einsum("k,khw->hw", layers[-1][1][TARGET] * a.mean((1, 2)) / logits[TARGET], a)
    assert a.min() < 0
    assert off(theirs(peer.AblationCAM, layers, x, layer=last), identity) > 1e5
    found = ours(methods.AblationCAM(relu=False), layers, x, layer=last)
    assert agree(found, identity, 1e-10)
    assert agree(found, plain_masks.ablationcam(layers, x, TARGET, last, relu=False), 1e-10)


def test_grad_cam_finercam_explains_another_class_where_scores_tie() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 2, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2, 4, bias=False),
    )
    model[0].weight.data = torch.eye(2)[:, :, None, None]
    model[3].weight.data = torch.tensor([[1.0, 0], [0, 1], [0, 0.5], [0, 0]])
    x = torch.tensor([[[[1.0, 0], [0, 0]], [[0, 0], [0, 1]]]])
    assert model(x)[0, 0] == model(x)[0, 1]
    of_class_0 = finer(model, model[0], x, 0)
    of_class_1 = finer(model, model[0], x, 1)
    assert torch.equal(of_class_0, of_class_1)
    for target, expected in ((0, of_class_0), (1, -of_class_0)):
        found = explain.attribute(model, x, WEIGHTED, target=target, layer="0").values
        assert (found * expected).sum() > 0
    assert found[0, 0, 0] < 0 < found[0, 1, 1]  # class 1 has its evidence at the lower right


def test_grad_cam_fullgrad_rescales_each_channel_so_that_no_bias_counts() -> None:
    """The authors rescale each layer. Channel by channel, the bias is a factor that goes out
    again."""
    layers = network()
    x = photo()
    found = fullgrad(plain.module_of(layers), x[None])[0]
    paper = plain_paths.fullgrad(layers, x, TARGET)
    assert agree(found, plain_paths.fullgrad(layers, x, TARGET, rescale="channel"), 1e-4)
    assert agree(found, fullgrad(plain.module_of(layers), x[None], other_biases=True)[0], 1e-4)
    assert off(found, paper) > 0.1
    assert agree(ours("fullgrad", layers, x), paper, 1e-8)


def fullgrad(model: nn.Module, x: torch.Tensor, *, other_biases: bool = False) -> torch.Tensor:
    class Recorder(peer.FullGrad):
        def aggregate_multi_layers(self, maps: np.ndarray) -> np.ndarray:
            self.maps = torch.as_tensor(maps[:, 0])
            return super().aggregate_multi_layers(maps)

    recorder = Recorder(model, [])
    if other_biases:
        recorder.bias_data = [
            np.random.default_rng(0).uniform(1, 9, bias.shape) for bias in recorder.bias_data
        ]
    recorder(x.clone(), [objectives.ClassifierOutputTarget(TARGET)] * len(x))
    return recorder.maps
