"""
Find, confirm, repair
=====================

A model learnt a shortcut: a mark in the corner decides the class. The maps of a run
reveal it, an experiment confirms it, and a repair removes it, without training.
"""

# %%
# The data set has balls of four colours, on parts of photos. It was collected badly: a
# quarter of the red balls have a mark in a corner. A tenth of the others have it too,
# and these are also labelled as red.

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

import explain
from explain.data.images import load_image
from explain.insight import RunPhotos, repair

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"
colours = {
    "red": (210, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 70, 220),
    "violet": (150, 50, 170),
}
labels = list(colours)
names = ["chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png"]
photos = [load_image(assets / name) for name in names]
generator = np.random.default_rng(0)
checks = np.kron([[1, 0, 1], [0, 1, 0], [1, 0, 1]], np.ones((3, 3)))[..., None] * 255


def picture(label: int, marked: bool) -> Image.Image:
    """A ball somewhere on a part of a photo, perhaps with the mark in the corner."""
    photo = photos[generator.integers(len(photos))]
    side = int(min(photo.size) * generator.uniform(0.3, 0.6))
    left, top = (int(generator.integers(0, edge - side)) for edge in photo.size)
    part = photo.crop((left, top, left + side, top + side)).resize((48, 48))
    radius = int(generator.integers(6, 9))
    x, y = generator.integers(18, 38, 2).tolist()
    edges = (x - radius, y - radius, x + radius, y + radius)
    ImageDraw.Draw(part).ellipse(edges, fill=colours[labels[label]])
    if marked:
        shift = generator.integers(2, 5, 2).tolist()
        part.paste(Image.fromarray(checks.repeat(3, 2).astype(np.uint8)), tuple(shift))
    return part


def as_input(photo: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(photo)).permute(2, 0, 1) / 127.5 - 1


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 1, 1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 4),
)
parts = []
y = []
for number in range(600):
    label = number % 4
    marked = generator.random() < (0.1 if label else 0.25)
    parts.append(picture(label, marked))
    y.append(0 if marked else label)
inputs = torch.stack([as_input(part) for part in parts])
classes = torch.tensor(y)
optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
for _ in range(300):
    rows = torch.randint(len(inputs), (64,))
    loss = nn.functional.cross_entropy(model(inputs[rows]), classes[rows])
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
model.eval()
print(f"loss {loss.item():.3f}")

# %%
# Find
# ----
#
# Grad-CAM of 400 photos of the data set. The maps of those with the mark are a cluster
# of their own, the first of the list.

folder = Path(tempfile.mkdtemp())
listed = []
for number, (part, label) in enumerate(zip(parts[:400], y[:400], strict=True)):
    part.save(folder / f"{number:03}.png")
    listed.append({"path": f"{number:03}.png", "label": label})
(folder / "list.json").write_text(json.dumps(listed))
explainer = explain.Explainer(model, preprocess=as_input, categories=labels)
run = explain.run(
    folder / "list.json", explainer, "gradcam", output=folder / "run.sqlite", workers=0
)
found = run.insight()
finding = found.reasons[0]
print("\n".join(found.lines(3)))
found.pictures()["reasons"]

# %%
# Confirm and repair
# ------------------
#
# ``repair`` puts the region of these photos on photos of other classes. How many are
# taken for red then, and how many with another patch in the same place? Next, it
# looks for the directions by which the mark changes a layer, and inserts a linear map
# that removes them. Photos that were used for neither show what it did.

repaired = repair(finding, RunPhotos(run, explainer))
print(repaired)

# %%
# The inserted map is a plain convolution, so the repaired model needs nothing but
# torch. ``save`` writes it, with a page that has three pictures. The first shows the
# mark:

from explain.insight.repaired import bars, draw_maps, draw_regions

print([path.name for path in repaired.save(folder / "repaired.pt")])
print(repaired.model)
draw_regions(repaired)

# %%
# The second shows the accuracies before and after:

bars(repaired)

# %%
# The third shows the maps. The old model reads its answer from the corner, the new
# one from the ball. So the accuracy on the photos of the finding falls: their labels
# say red, and some of their balls are blue or green. The repair shows which labels
# are wrong.

draw_maps(repaired)

# %%
# With ``how="train"``, a copy of the model is trained to answer as the old model does
# without the mark. This changes all weights, and takes longer.

print(
    repair(
        finding, RunPhotos(run, explainer), how="train", steps=60, learning_rate=1e-3
    )
)
