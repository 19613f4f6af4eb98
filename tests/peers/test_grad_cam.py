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
    LAYERS,
    TARGET,
    X,
    agree,
    assert_mistaken,
    off,
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


def theirs(cam: type, objective: Any = None) -> torch.Tensor:
    model = plain.module_of(LAYERS)
    target = (objective or objectives.ClassifierOutputTarget)(TARGET)
    return raw(cam, model, model[LAYER], X[None], target)[0]


def ours(method: MethodLike) -> torch.Tensor:
    model = plain.module_of(LAYERS)
    a = explain.attribute(model, X[None], method, target=TARGET, layer=str(LAYER), placement="even")
    return a.values[0]


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
    assert agree(theirs(peer.KPCA_CAM), ours(methods.KPCACAM(gamma=None)))


def test_randomcam_is_the_same_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.rand(5, generator=torch.Generator().manual_seed(0)) * 2 - 1
    monkeypatch.setattr(np.random, "uniform", lambda low, high, size: weights.numpy().reshape(size))
    assert agree(theirs(peer.RandomCAM), ours(methods.RandomCAM(relu=False)))


def test_shapleycam_is_the_same_when_told_its_objective() -> None:
    found = theirs(peer.ShapleyCAM, objective=objectives.ClassifierOutputReST)
    assert agree(found.clamp(min=0), ours("shapleycam"))


WEIGHTED = methods.FinerCAM(methods.GradCAM(relu=False), objective="weighted", alpha=1.0)


def finer(model: nn.Module, layer: nn.Module, x: torch.Tensor, target: int) -> torch.Tensor:
    recorder = recording(peer.GradCAM)
    peer.FinerCAM(model, [layer], base_method=recorder)(x.clone(), target_idx=target)
    return recorder.maps


def test_finercam_is_the_same_with_the_weighted_objective() -> None:
    model = plain.module_of(LAYERS)
    assert agree(finer(model, model[LAYER], X[None], TARGET)[0], ours(WEIGHTED))


def test_refinecam_is_the_same_where_minima_are_zero_and_nothing_is_enlarged() -> None:
    model = plain.module_of(LAYERS)
    target = objectives.ClassifierOutputTarget(TARGET)
    recorder = peer.RefineCAM(model, [model[0], model[2]], base_method=peer.GradCAM)
    method = methods.RefineCAM(methods.GradCAM())
    both = explain.attribute(
        model, X[None], method, target=TARGET, layer=["0", "2"], placement="even"
    )
    assert all(values.min() == 0 for values in both.maps.values())
    assert agree(recorder(X[None], [target]), both.heatmap)


# Where it computes something else


def test_grad_cam_gradcampp_adds_an_epsilon_that_swamps_small_gradients() -> None:
    x = random(0, 1, 3, 224, 224)
    model = resnet()
    target = objectives.ClassifierOutputTarget(3)
    where: Any = {"target": 3, "layer": "layer4"}
    signed = methods.GradCAMPlusPlus(relu=False)
    small = explain.attribute(model, x, signed, **where).values
    assert off(raw(peer.GradCAMPlusPlus, model, model.layer4, x, target), small) > 0.3
    # an epsilon of 1e-6 is then nothing beside the squares of the gradients
    model.fc.weight.data *= 1e6
    large = explain.attribute(model, x, signed, **where).values
    assert agree(raw(peer.GradCAMPlusPlus, model, model.layer4, x, target), large)


def test_grad_cam_fem_adds_up_activations_where_the_paper_counts_them() -> None:
    """It adds up all channels that have rare places."""
    a = plain.forward(LAYERS, X)[LAYER + 1]
    deviation = a.std((1, 2), keepdim=True, correction=0)
    rare = (a > a.mean((1, 2), keepdim=True) + 2 * deviation).double()
    mistake = (rare.mean((1, 2), keepdim=True) * a).sum(0)
    paper = plain_factors.fem(LAYERS, X, TARGET, LAYER)
    assert_mistaken(theirs(peer.FEM), mistake, paper, ours("fem"), 0.1)


def test_grad_cam_scorecam_stretches_masks_to_the_corners() -> None:
    a = plain.forward(LAYERS, X)[LAYER + 1]
    stretched = F.interpolate(a[None], X.shape[1:], mode="bilinear", align_corners=True)[0]
    masks = torch.stack([plain.unit(mask, shift=True) for mask in stretched])
    weights = plain.module_of(LAYERS)(masks[:, None] * X)[:, TARGET].softmax(0).detach()
    mistake = torch.einsum("k,khw->hw", weights, a)  # nothing else differs
    paper = plain_masks.scorecam(LAYERS, X, TARGET, LAYER)
    assert_mistaken(theirs(peer.ScoreCAM), mistake, paper, ours("scorecam"), 1e-3)


def test_grad_cam_ablationcam_writes_minus_ten_million_where_the_paper_writes_zero() -> None:
    """Before a ReLU; behind it, nothing is below zero."""
    layers = [*LAYERS[:7], *LAYERS[8:]]
    model = plain.module_of(layers)
    found = raw(
        peer.AblationCAM, model, model[6], X[None], objectives.ClassifierOutputTarget(TARGET)
    )
    paper = plain_masks.ablationcam(layers, X, TARGET, 6, relu=False)
    assert off(found[0], paper) > 1e5


def test_grad_cam_fullgrad_rescales_each_channel_so_that_no_bias_counts() -> None:
    """The authors rescale each layer. Channel by channel, the bias is a factor that goes out
    again."""

    class Recorder(peer.FullGrad):
        def aggregate_multi_layers(self, maps: np.ndarray) -> np.ndarray:
            self.maps = torch.as_tensor(maps[:, 0])
            return super().aggregate_multi_layers(maps)

    recorder = Recorder(plain.module_of(LAYERS), [])
    recorder(X[None].clone(), [objectives.ClassifierOutputTarget(TARGET)])
    mistake = plain_paths.fullgrad(LAYERS, X, TARGET, rescale="channel")
    paper = plain_paths.fullgrad(LAYERS, X, TARGET)
    assert agree(recorder.maps[0], mistake, 1e-4)
    assert off(recorder.maps[0], paper) > 0.1
    ours = explain.attribute(plain.module_of(LAYERS), X[None], "fullgrad", target=TARGET)
    assert agree(ours.values[0], paper, 1e-8)
