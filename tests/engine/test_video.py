"""Three-dimensional networks: maps in time, from every method that images have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explain
from tests.conftest import ATTENDING, COVERING, Made, settled

FRAMES = 3
# noise differs from frame to frame
NOISY = {"sscam", "smoothgrad", "smoothgrad2", "vargrad", "smoothgradcam++"}
METHODS = sorted(set(explain.list_methods()) - COVERING - ATTENDING - NOISY)


def network(conv: Any, kernel: Any, stride: Any, padding: Any) -> Any:
    """Two convolutions of single frames, and a linear layer on the mean over time and place."""

    def forward(net: Any, x: Tensor) -> Tensor:
        maps = net.relu(net.conv2(net.relu(net.conv1(x))))
        return net.fc(maps.flatten(2).mean(2))

    conv1 = conv(3, 6, kernel, padding=padding)
    conv2 = conv(6, 4, kernel, stride, padding)
    relu = nn.ReLU(inplace=True)
    return settled(Made(forward, conv1=conv1, relu=relu, conv2=conv2, fc=nn.Linear(4, 5)))


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_picture_is_explained_like_the_picture(method: str) -> None:
    """Kernels that reach over one frame see in every copy of a picture the picture."""
    moving = network(nn.Conv3d, (1, 3, 3), (1, 2, 2), (0, 1, 1)).double().eval()
    still = network(nn.Conv2d, 3, 2, 1).double().eval()
    for flat, deep in zip(still.parameters(), moving.parameters(), strict=True):
        flat.data = deep.data.reshape(flat.shape)
    g = torch.Generator().manual_seed(4)
    picture = torch.randn(1, 3, 12, 10, generator=g, dtype=torch.float64)
    video = picture[:, :, None].repeat(1, 1, FRAMES, 1, 1)
    a, expected = (
        explain.attribute(model, x, method, target=2, placement="even")  # as of videos
        for model, x in ((moving, video), (still, picture))
    )
    for frame in range(FRAMES):
        torch.testing.assert_close(a.heatmap[:, frame], expected.heatmap, rtol=1e-5, atol=1e-6)
