"""Three-dimensional networks: maps in time, from every method that images have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import explain
from tests.conftest import ATTENDING, COVERING, settled

FRAMES = 3
METHODS = sorted(set(explain.list_methods()) - COVERING - ATTENDING)
# noise differs from frame to frame
NOISY = {"sscam", "smoothgrad", "smoothgrad2", "vargrad", "smoothgradcam++"}


class Clip(nn.Module):
    """Two convolutions of single frames, and a linear layer on the mean over time and place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(3, 6, (1, 3, 3), padding=(0, 1, 1))
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv3d(6, 4, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.relu(self.conv2(self.relu(self.conv1(x)))).mean((2, 3, 4)))


class Still(nn.Module):
    """The same network for a single picture, of which every frame is a copy."""

    def __init__(self, clip: Clip) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 4, 3, stride=2, padding=1)
        self.relu = nn.ReLU()
        self.fc = clip.fc
        for own, theirs in ((self.conv1, clip.conv1), (self.conv2, clip.conv2)):
            own.weight.data = theirs.weight.data[:, :, 0]
            own.bias.data = theirs.bias.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.relu(self.conv2(self.relu(self.conv1(x)))).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@pytest.mark.parametrize("method", [name for name in METHODS if name not in NOISY])
def test_a_frozen_picture_is_explained_like_the_picture(method: str) -> None:
    """Kernels that reach over one frame see in every copy of a picture the picture."""
    moving = settled(Clip()).double().eval()
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
