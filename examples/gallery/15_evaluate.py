"""
How good is a map?
==================

A convincing map can be wrong. Metrics test it: does the score fall when the marked
pixels are covered?
"""

# %%
# ``explain.evaluate`` runs methods and metrics on a batch, and returns a table.
# ``deletion`` covers the marked pixels first, so the probability should fall fast;
# ``insertion`` uncovers them first, so it should rise fast. ``pointinggame`` tests
# whether the maximum is in a box: here around the cup, and around the cat's face.

import sys
from pathlib import Path

import torch

import explain
from explain.metrics import Deletion, Insertion

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer("tiny")
photos = [assets / "coffee.png", assets / "chelsea.png"]
x = torch.cat([explainer.as_input(photo) for photo in photos])
found = explain.evaluate(
    explainer.model,
    x,
    ["gradcam", "saliency", "randomcam"],
    [Deletion(steps=10), Insertion(steps=10), "pointinggame"],
    boxes=torch.tensor([[15, 5, 65, 75], [10, 5, 75, 75]]),
)
print(found)

# %%
# ``randomcam`` has random weights. A method that is not better has not found the
# evidence.
#
# Every value is available for each photo:

print(found["gradcam"]["deletion"])

# %%
# A baseline defines what replaces covered pixels. ``picture`` shows it on a photo.

from explain.baselines import Blur, Mean, Neighbours
from explain.data.images import load_image
from explain.render.sheets import Tile, table

photo = load_image(photos[0])
baselines = [Mean(), Blur(), Neighbours()]
shown = [Tile(baseline.picture(photo)) for baseline in baselines]
table([shown], [baseline.name for baseline in baselines])

# %%
# With another baseline, the same metric may give another result. Report which one you
# used.

mean = Deletion(steps=10, baseline=Mean())
blurred = Deletion(steps=10, baseline=Blur())
for metric in (mean, blurred):
    result = explain.evaluate(explainer.model, x, ["gradcam", "randomcam"], [metric])
    print("covered by", metric.baseline.name)
    print(result)
