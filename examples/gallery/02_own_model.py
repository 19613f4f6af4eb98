"""
Your own model
==============

Any ``nn.Module`` can be explained. This tutorial trains a small network on drawn
shapes, and shows what its predictions depend on.
"""

# %%
# The data: a circle or a square somewhere in the picture, on a noisy background.

import torch
import torch.nn.functional as F
from torch import nn

LABELS = ["circle", "square"]


def drawn(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (N, 3, 32, 32) from 0 to 1, and the class of each."""
    rows, columns = torch.meshgrid(
        torch.arange(32.0), torch.arange(32.0), indexing="ij"
    )
    shape = torch.randint(2, (count,), generator=generator)
    place = 8 + 16 * torch.rand(count, 2, 1, 1, generator=generator)
    down = (rows - place[:, 0]).abs()
    right = (columns - place[:, 1]).abs()
    circle = (down**2 + right**2).sqrt() < 7
    square = torch.maximum(down, right) < 6
    inside = torch.where(shape[:, None, None] == 0, circle, square)
    ground = 0.35 * torch.rand(count, 3, 32, 32, generator=generator)
    return ground + 0.6 * inside[:, None], shape


# %%
# The network, and a short training:

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 5, stride=2, padding=2),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, stride=2, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 2),
)
generator = torch.Generator().manual_seed(0)
optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
for _ in range(80):
    x, shape = drawn(48, generator)
    loss = F.cross_entropy(model(x), shape)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
x, shape = drawn(300, generator)
with torch.no_grad():
    print(
        f"accuracy on new pictures: {(model(x).argmax(1) == shape).float().mean():.0%}"
    )

# %%
# An ``Explainer`` takes the model, its labels, and a function that turns a photo into
# an input. The model stays as it is: weights, gradients, modes and hooks.

from PIL import Image
from torchvision.transforms.functional import to_pil_image, to_tensor

import explain


def preprocess(photo: Image.Image) -> torch.Tensor:
    return to_tensor(photo.resize((32, 32)))


explainer = explain.Explainer(model, LABELS, preprocess)
one_of_each = [shape.tolist().index(which) for which in (0, 1)]
photos = [
    to_pil_image(x[i]).resize((256, 256), Image.Resampling.NEAREST) for i in one_of_each
]
explanations = explainer(photos, ["gradcam", "layercam", "guidedbackprop"], layer="5")
for explanation, right in zip(explanations, LABELS, strict=True):
    label, probability = explanation.predictions[0]
    print(f"label: {right}, prediction: {label}, {probability:.1%}")

# %%

explanations[0]

# %%

explanations[1]

# %%
# ``explain.attribute`` takes a batch of tensors, and returns tensors, so statistics of
# many pictures are easy. How much of the evidence is on the shape?

batch, _ = drawn(100, generator)
heatmap = explain.attribute(model, batch, "layercam", layer="5").heatmap
on_shape = batch.amin(1) > 0.5
share = (heatmap * on_shape).sum((1, 2)) / heatmap.sum((1, 2))
print(f"on the shape: {share.mean():.0%} of the evidence")
print(f"on the shape: {on_shape.float().mean():.0%} of the area")
