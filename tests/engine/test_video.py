"""Three-dimensional networks: maps in time, from every method that images have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.video.mvit import MSBlockConfig, MViT
from torchvision.models.video.swin_transformer import SwinTransformer3d

import explain
from explain.layers import default_layer
from explain.methods import Augmented, GradCAM, IntegratedGradients, Saliency, Smooth
from tests.conftest import ATTENDING, COVERING, settled, snapshot

FRAMES = 3
METHODS = sorted(set(explain.list_methods()) - COVERING - ATTENDING)
# noise differs from frame to frame
NOISY = {"sscam", "smoothgrad", "smoothgrad2", "vargrad", "smoothgradcam++"}
PLAIN = ["gradcam", "layercam", "saliency", "guidedbackprop", IntegratedGradients(steps=2)]


class Clip(nn.Module):
    """Two convolutions over time and place, and a linear layer on the mean."""

    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        around = (kernel // 2, 1, 1)
        self.conv1 = nn.Conv3d(3, 6, (kernel, 3, 3), padding=around)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv3d(6, 4, (kernel, 3, 3), stride=(1, 2, 2), padding=around)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.relu(self.conv2(self.relu(self.conv1(x)))).mean((2, 3, 4)))


class Still(nn.Module):
    """The same network for a single picture, of which every frame is a copy."""

    def __init__(self, clip: Clip) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Conv2d(6, 4, 3, stride=2, padding=1),
        )
        self.relu = nn.ReLU()
        self.fc = clip.fc
        for own, theirs in ((self.conv1, clip.conv1), (self.conv2, clip.conv2)):
            own.weight.data = theirs.weight.data[:, :, 0]
            own.bias.data = theirs.bias.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.relu(self.conv2(self.relu(self.conv1(x)))).mean((2, 3)))


@pytest.fixture
def clip() -> Clip:
    return settled(Clip()).double().eval()


@pytest.fixture
def video() -> torch.Tensor:
    return torch.randn(
        2, 3, FRAMES, 12, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_maps_in_time(method: str, clip: Clip, video: torch.Tensor) -> None:
    before = snapshot(clip)
    found = explain.attribute(clip, video, method, target=2)
    assert snapshot(clip) == before
    assert found.heatmap.shape == (2, FRAMES, 12, 10)
    assert found.signed.shape == (2, FRAMES, 12, 10)
    assert torch.isfinite(found.values).all()
    for i in range(2):  # a batch is its videos one by one
        alone = explain.attribute(clip, video[i : i + 1], method, target=2)
        torch.testing.assert_close(found.values[i], alone.values[0], rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@pytest.mark.parametrize("method", [name for name in METHODS if name not in NOISY])
def test_a_frozen_picture_is_explained_like_the_picture(method: str) -> None:
    """Kernels that reach over one frame see in every copy of a picture the picture."""
    moving = settled(Clip(kernel=1)).double().eval()
    still = Still(moving).eval()
    picture = torch.randn(
        1, 3, 12, 10, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    video = picture[:, :, None].repeat(1, 1, FRAMES, 1, 1)
    found, expected = (
        explain.attribute(m, x, method, target=2) for m, x in ((moving, video), (still, picture))
    )
    for frame in range(FRAMES):
        torch.testing.assert_close(found.heatmap[:, frame], expected.heatmap, rtol=1e-5, atol=1e-6)


def test_values_add_up_over_time(clip: Clip, video: torch.Tensor) -> None:
    found = explain.attribute(
        clip, video, ["fullgrad", IntegratedGradients(steps=200), "cam"], target=2
    )
    assert found["fullgrad"].delta.abs().max() < 1e-9
    assert (
        found["integratedgradients"].delta.abs().max()
        < 1e-3 * found["integratedgradients"].score.abs().max()
    )
    mean = found["cam"].values.flatten(1).mean(1) + clip.fc.bias[2]
    torch.testing.assert_close(mean.detach(), found["cam"].score)


def test_wrappers_and_fusion_work_in_time(clip: Clip, video: torch.Tensor) -> None:
    for method in (
        Augmented(GradCAM(relu=False)),
        Augmented(Saliency(), scales=(1.0, 1.2)),
        Smooth(GradCAM(relu=False)),
    ):
        assert explain.attribute(clip, video, method, target=2).heatmap.shape == (2, FRAMES, 12, 10)
    fused = explain.attribute(clip, video, GradCAM(relu=False), target=2, layer=["conv1", "conv2"])
    assert fused.values.shape == (2, FRAMES, 12, 10)
    concepts = explain.find_concepts(clip, video, 2, layer="relu")
    assert concepts.heatmaps.shape == (2, 2, FRAMES, 12, 10)
    flipped = explain.attribute(
        clip, video.flip(-1), Augmented(GradCAM(relu=False), scales=(1.0,)), target=2
    ).values
    same = explain.attribute(
        clip, video, Augmented(GradCAM(relu=False), scales=(1.0,)), target=2
    ).values
    torch.testing.assert_close(flipped.flip(-1), same)


def tiny_swin(weights: None, num_classes: int) -> nn.Module:
    return SwinTransformer3d([2, 4, 4], 8, [1, 1], [2, 2], [2, 3, 3], num_classes=num_classes)


def tiny_mvit(**options: Any) -> nn.Module:
    blocks = [
        MSBlockConfig(
            1,
            8,
            8,
            kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3],
            stride_q=[1, 1, 1],
            stride_kv=[1, 2, 2],
        ),
        MSBlockConfig(
            1,
            8,
            8,
            kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3],
            stride_q=[1, 2, 2],
            stride_kv=[1, 1, 1],
        ),
    ]
    kernel = (3, 7, 7)
    stride = (2, 4, 4)
    padding = (1, 3, 3)
    return MViT(
        (32, 48),
        4,
        blocks,
        False,
        False,
        False,
        False,
        patch_embed_kernel=kernel,
        patch_embed_stride=stride,
        patch_embed_padding=padding,
        num_classes=options["num_classes"],
    )


# random weights may have nothing to say
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@pytest.mark.parametrize(
    ("build", "size", "layer", "places"),
    [
        pytest.param(
            torchvision.models.video.r3d_18,
            (8, 32, 48),
            "layer4",
            (1, 2, 3),
            marks=pytest.mark.long,
        ),
        (tiny_swin, (4, 32, 48), "norm", (2, 4, 6)),
        (tiny_mvit, (4, 32, 48), "blocks.1.norm1", (2, 8, 12)),
    ],
    ids=["convolutions", "windows", "tokens"],
)
def test_torchvisions_video_networks(
    build: Callable[..., nn.Module], size: tuple[int, ...], layer: str, places: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = build(weights=None, num_classes=4).eval()
    x = torch.randn(1, 3, *size)
    assert default_layer(model, x) == layer
    found = explain.attribute(model, x, PLAIN, target=1)
    assert found["gradcam"].values.shape == (1, *places)
    for attribution in found.values():
        assert attribution.heatmap.shape == (1, *size)
        assert torch.isfinite(attribution.values).all()


def test_a_video_without_its_batch_is_taken_for_pictures_and_refused(
    clip: Clip, video: torch.Tensor
) -> None:
    with pytest.raises(explain.ExplainError, match="x must"):
        explain.attribute(clip, video[0, 0], "saliency", target=0)


def test_a_volume_with_one_channel_is_a_video() -> None:
    model = nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten())
    found = explain.attribute(
        settled(model).eval(), torch.rand(1, 1, 6, 7, 8), GradCAM(relu=False), target=0
    )
    assert found.heatmap.shape == (1, 6, 7, 8)
