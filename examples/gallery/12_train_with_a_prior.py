"""
Train with a prior
==================

All training photos have a sticker that gives the class away. A penalty on Grad-CAM
outside the object makes a network that looks at the object.
"""

# %%
# The data set has discs of any colour with four patterns, on parts of photos. In the
# training photos, the colour of a sticker in the corner says which pattern it is. In
# the photos of the test it says nothing. The mask marks the disc.

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn

import explain
from explain.data.images import load_image
from explain.training import AttributionPrior

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"
names = ["chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png"]
photos = [load_image(assets / name) for name in names]
labels = ["plain", "stripes", "bars", "checks"]
stickers = [(230, 60, 60), (60, 200, 80), (70, 90, 240), (230, 200, 60)]
generator = np.random.default_rng(0)


def picture(label: int, sticker: int) -> tuple[Image.Image, torch.Tensor]:
    """A disc on a part of a photo, with a sticker; and the mask of the disc."""
    photo = photos[generator.integers(len(photos))]
    side = int(min(photo.size) * generator.uniform(0.3, 0.6))
    left, top = (int(generator.integers(0, edge - side)) for edge in photo.size)
    part = photo.crop((left, top, left + side, top + side)).resize((48, 48))
    fill = tuple(generator.integers(120, 256, 3).tolist())
    r = int(generator.integers(9, 12))
    x, y = generator.integers(19, 36, 2).tolist()
    ImageDraw.Draw(part).ellipse((x - r, y - r, x + r, y + r), fill=fill)
    rows, columns = np.mgrid[:48, :48]
    disc = (columns - x) ** 2 + (rows - y) ** 2 <= r**2
    dark = [rows < 0, rows % 4 < 2, columns % 4 < 2, (rows // 2 + columns // 2) % 2 < 1]
    pixels = np.array(part)
    pixels[disc & dark[label]] -= 12  # a faint pattern
    part = Image.fromarray(pixels)
    left, top = generator.integers(1, 4, 2).tolist()
    sticker_box = (left, top, left + 5, top + 5)
    ImageDraw.Draw(part).rectangle(sticker_box, fill=stickers[sticker])
    return part, torch.from_numpy(disc).float()


def as_input(photo: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(photo)).permute(2, 0, 1) / 127.5 - 1


def data(
    count: int, shuffled: bool
) -> tuple[list[Image.Image], torch.Tensor, torch.Tensor, torch.Tensor]:
    classes = [number % 4 for number in range(count)]
    of = generator.integers(0, 4, count).tolist() if shuffled else classes
    pairs = [picture(*each) for each in zip(classes, of, strict=True)]
    parts = [part for part, _ in pairs]
    x = torch.stack([as_input(part) for part in parts])
    masks = [m for _, m in pairs]
    return parts, x, torch.tensor(classes), torch.stack(masks)


_, x, y, masks = data(1200, shuffled=False)
parts, test_x, test_y, _ = data(400, shuffled=True)
sheet = Image.new("RGB", (4 * 2 * 100, 100))
for number, part in enumerate(parts[:8]):
    sheet.paste(part.resize((96, 96)), (number * 100, 2))
sheet

# %%
# Without a prior
# ---------------
#
# The loss is soon near zero. On the test photos the network is about as good as
# guessing.


def trained(prior: AttributionPrior | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, 2, 2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(700):
        rows = torch.randint(len(x), (64,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        if prior is not None:
            loss = loss + prior(model, x[rows], y[rows], masks[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    right = (model.eval()(test_x).argmax(1) == test_y).float().mean()
    print(f"loss {loss.item():.2f}, right on {right:.0%} of the test photos")
    return model


without = trained(None)
explainer = explain.Explainer(without, preprocess=as_input, categories=labels)
photo = parts[2]
explainer(photo, ["gradcam", "occlusion(window=8, stride=4)"], layer="5").figure()

# %%
# With a prior
# ------------
#
# The penalty is the share of Grad-CAM outside the mask, times 3. The layer is the
# third convolution. Its maps are coarse, so the gradient of the penalty is smooth.

prior = AttributionPrior("gradcam(relu=False)", "share", weight=3.0, layer="4")
model = trained(prior)
explainer = explain.Explainer(model, preprocess=as_input, categories=labels)
explainer(photo, ["gradcam", "occlusion(window=8, stride=4)"], layer="5").figure()

# %%
# The stickers decide no longer. This is proved by an intervention, and not by a map
# alone: exchange the stickers, and count how many answers change.

other = test_x.clone()
other[:, :, 1:9, 1:9] = test_x.roll(1, 0)[:, :, 1:9, 1:9]
for name, network in (("without", without), ("with", model)):
    with torch.inference_mode():
        changed = network(other).argmax(1) != network(test_x).argmax(1)
    print(f"{name} a prior: {changed.float().mean():.0%} of the answers change")
