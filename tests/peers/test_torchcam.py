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
from tests.methods import plain, plain_masks
from tests.peers.common import LAYER, TARGET, agree, network, off, photo, random, resnet

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


def theirs(
    cam: type, layers: list[plain.Layer], x: torch.Tensor, layer: int = LAYER, **options: Any
) -> torch.Tensor:
    model = plain.module_of(layers)
    return raw(cam, model, model[layer], x[None].clone(), TARGET, **options)[0]


def ours(
    method: MethodLike, layers: list[plain.Layer], x: torch.Tensor, layer: int = LAYER
) -> torch.Tensor:
    return explain.attribute(
        plain.module_of(layers), x[None], method, target=TARGET, layer=str(layer)
    ).values[0]


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
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (
            torchvision.models.VisionTransformer(12, 4, 3, 2, 8, 12, num_classes=5).double().eval()
        )
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4)
    x = random(15, 2, 3, 12, 12)
    with peer.LeGrad(model, list(model.encoder.layers)) as extractor:
        found = extractor(2, model(x), normalized=False)[0].detach()
    assert agree(found, explain.attribute(model, x, "legrad", target=2).values)


# Where it computes something else


def test_torchcam_gradcampp_divides_a_copy() -> None:
    layers = network()
    x = photo()
    a, g = plain.look(layers, x, TARGET, LAYER)
    paper = plain.gradcampp(layers, x, TARGET, LAYER)
    undivided = plain.weighted(list((g**2 * g.clamp(min=0)).sum((1, 2))), a, relu=True)
    # alpha stays g^2, whatever the denominator is
    assert agree(theirs(peer.GradCAMpp, layers, x), undivided)
    assert off(undivided, paper) > 0.5
    assert agree(ours("gradcam++", layers, x), paper, 1e-10)


def test_torchcam_smoothgradcampp_multiplies_each_place_with_its_own_activation_instead_of_their_sum() -> (
    None
):
    """Without noise it has to be Grad-CAM++, and is, where all places have the same gradient."""
    layers = network()
    x = photo()
    for layer, same in ((7, True), (LAYER, False)):
        paper = plain.gradcampp(layers, x, TARGET, layer)
        found = theirs(
            peer.SmoothGradCAMpp, layers, x, layer=layer, num_samples=2, noise=Noise(0.0)
        )
        assert agree(found, paper) if same else off(found, paper) > 0.1
        assert agree(
            ours(SmoothGradCAMPlusPlus(samples=2, sigma=0), layers, x, layer=layer), paper, 1e-10
        )
    a, g = plain.look(layers, x, TARGET, LAYER)
    alpha = g**2 / (2 * g**2 + (a * g**3).sum((1, 2), keepdim=True))
    assert agree(found, plain.weighted(list((alpha * g.clamp(min=0)).sum((1, 2))), a, relu=True))


def test_torchcam_iscam_adds_up_the_steps_of_its_path_so_that_masks_exceed_one() -> None:
    layers = network()
    x = photo()
    found = theirs(peer.ISCAM, layers, x)
    paper = plain_masks.iscam(layers, x, TARGET, LAYER)
    steps = torch.arange(1, 11) / 10
    scales = steps.double().cumsum(0).tolist()
    assert scales[-1] == pytest.approx(5.5)
    assert agree(
        found, plain_masks.iscam(layers, x, TARGET, LAYER, scales=scales, enlarge_first=False)
    )
    assert off(found, paper) > 0.01
    assert agree(ours("iscam", layers, x), paper, 1e-8)


def test_torchcam_sscam_adds_noise_to_the_finished_mask() -> None:
    """Neither of the paper's two ways: noise of deviation 2 on a mask in [0, 1], which stays
    outside of it."""
    layers = network()
    x = photo()
    noise = Noise(2.0)
    found = theirs(peer.SSCAM, layers, x, num_samples=3, noise=noise)
    drawn = [each[0] for each in noise.drawn]
    assert agree(
        found,
        plain_masks.sscam(layers, x, TARGET, LAYER, noise=drawn, kind="mask", enlarge_first=False),
    )
    small = [random(i, *plain.forward(layers, x)[LAYER + 1].shape) for i in range(3)]
    for kind, of in ((1, small), (2, [random(i, *x.shape) for i in range(3)])):
        assert off(found, plain_masks.sscam(layers, x, TARGET, LAYER, noise=of, kind=kind)) > 0.01
