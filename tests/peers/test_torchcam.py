"""Against torchcam."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import explain
from explain.methods import SmoothGradCAMPlusPlus
from explain.methods.base import MethodLike
from tests.conftest import settled
from tests.methods import plain, plain_masks
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

peer = pytest.importorskip("torchcam.methods", reason="torchcam comes with the extra 'peers'")


def raw(
    cam: type,
    model: nn.Module,
    layer: Any,
    x: torch.Tensor,
    target: int,
    *,
    noise: Any = None,
    **options: Any,
) -> torch.Tensor:
    """The map ``(N, h, w)`` that torchcam gives when told not to normalise it; ``noise`` is what it
    is to draw."""
    with cam(model, layer, input_shape=tuple(x.shape[1:]), **options) as extractor:
        if noise is not None:
            extractor._distrib = noise
        return extractor(target, model(x), normalized=False)[0].detach()


class Noise:
    """Draws for torchcam in double precision, and keeps what it drew."""

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        self.drawn: list[torch.Tensor] = []

    def sample(self, size: tuple[int, ...]) -> torch.Tensor:
        self.drawn.append(self.sigma * random(len(self.drawn), *size))
        return self.drawn[-1]


def theirs(cam: type, **options: Any) -> torch.Tensor:
    model = plain.module_of(LAYERS)
    return raw(cam, model, model[LAYER], X[None].clone(), TARGET, **options)[0]


def ours(method: MethodLike) -> torch.Tensor:
    model = plain.module_of(LAYERS)
    a = explain.attribute(model, X[None], method, target=TARGET, layer=str(LAYER), placement="even")
    return a.values[0]


# Where it follows the papers


SAME = {
    "GradCAM": "gradcam",
    "LayerCAM": "layercam",
    "XGradCAM": "xgradcam",
    "CAM": "cam",
    "FinerCAM": "finercam",
}


@pytest.mark.parametrize("name", SAME)
def test_maps_are_the_same_on_a_resnet(name: str) -> None:
    x = random(0, 1, 3, 96, 64)
    model = resnet()
    options = {"fc_layer": "fc"} if name == "CAM" else {}
    found = raw(getattr(peer, name), model, "layer4", x, 3, **options)
    assert agree(found, explain.attribute(model, x, SAME[name], target=3, layer="layer4").values)


def test_legrad_is_the_same() -> None:
    model = torchvision.models.VisionTransformer(12, 4, 3, 2, 8, 12, num_classes=5)
    settled(model).double().eval()
    x = random(15, 2, 3, 12, 12)
    with peer.LeGrad(model, list(model.encoder.layers)) as extractor:
        found = extractor(2, model(x), normalized=False)[0].detach()
    assert agree(found, explain.attribute(model, x, "legrad", target=2).values)


# Where it computes something else


def test_torchcam_gradcampp_divides_a_copy() -> None:
    """Alpha stays g^2, whatever the denominator is."""
    a, g = plain.look(LAYERS, X, TARGET, LAYER)
    undivided = plain.weighted(list((g**2 * g.clamp(min=0)).sum((1, 2))), a, relu=True)
    paper = plain.gradcampp(LAYERS, X, TARGET, LAYER)
    assert_mistaken(theirs(peer.GradCAMpp), undivided, paper, ours("gradcam++"), 0.5)


def test_torchcam_smoothgradcampp_multiplies_each_place_with_its_own_activation_instead_of_their_sum() -> (
    None
):
    """Without noise it has to be Grad-CAM++."""
    options: Any = {"num_samples": 2, "noise": Noise(0.0)}
    a, g = plain.look(LAYERS, X, TARGET, LAYER)
    alpha = g**2 / (2 * g**2 + (a * g**3).sum((1, 2), keepdim=True))
    mistake = plain.weighted(list((alpha * g.clamp(min=0)).sum((1, 2))), a, relu=True)
    paper = plain.gradcampp(LAYERS, X, TARGET, LAYER)
    found = ours(SmoothGradCAMPlusPlus(samples=2, sigma=0))
    assert_mistaken(theirs(peer.SmoothGradCAMpp, **options), mistake, paper, found, 0.1)


def test_torchcam_iscam_adds_up_the_steps_of_its_path_so_that_masks_exceed_one() -> None:
    scales = (torch.arange(1, 11) / 10).double().cumsum(0).tolist()
    assert scales[-1] == pytest.approx(5.5)
    mistake = plain_masks.iscam(LAYERS, X, TARGET, LAYER, scales=scales, enlarge_first=False)
    paper = plain_masks.iscam(LAYERS, X, TARGET, LAYER)
    assert_mistaken(theirs(peer.ISCAM), mistake, paper, ours("iscam"), 0.01)


def test_torchcam_sscam_adds_noise_to_the_finished_mask() -> None:
    """Neither of the paper's two ways: noise of deviation 2 on a mask in [0, 1], which stays
    outside of it."""
    noise = Noise(2.0)
    found = theirs(peer.SSCAM, num_samples=3, noise=noise)
    drawn = [each[0] for each in noise.drawn]
    mistake = plain_masks.sscam(
        LAYERS, X, TARGET, LAYER, noise=drawn, kind="mask", enlarge_first=False
    )
    assert agree(found, mistake)
    sizes = {1: plain.forward(LAYERS, X)[LAYER + 1].shape, 2: X.shape}
    for kind, size in sizes.items():
        of_paper = [random(i, *size) for i in range(3)]
        paper = plain_masks.sscam(LAYERS, X, TARGET, LAYER, noise=of_paper, kind=kind)
        assert off(found, paper) > 0.01
