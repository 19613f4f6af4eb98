"""
Cover parts of the photo
========================

Perturbation methods need only scores: they cover parts of the photo and run the model
again. The regions and the baseline matter more than the formula.
"""

# %%
# Seven of them on one photo, with few samples. Below each map is its standard error,
# relative to the largest value. ``occlusion`` and ``partitionshap`` use no random
# numbers, so they have none.

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

import explain
from explain.methods import (
    HSIC,
    LIME,
    RISE,
    KernelSHAP,
    Occlusion,
    PartitionSHAP,
    Sobol,
)

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer("tiny")
x = explainer.as_input(assets / "chelsea.png")
methods = [
    Occlusion(),
    RISE(300, centred=True),
    LIME(150),
    KernelSHAP(150),
    PartitionSHAP(150),
    Sobol(288, grid=4),
    HSIC(160),
]
found = explain.attribute(explainer.model, x, methods)


def draw(axis, values, title, *, error=False):
    """Draw on the grey photo: red is positive, blue negative; errors dark to light."""
    grey = x[0].mean(0)
    extent = (0, x.shape[3], x.shape[2], 0)
    axis.imshow(grey, cmap="gray", extent=extent)
    if values is not None:
        low, colors = (0, "magma") if error else (-1, "RdBu_r")
        axis.imshow(values, cmap=colors, vmin=low, vmax=1, alpha=0.75, extent=extent)
    axis.set_title(title, fontsize=9)
    axis.axis("off")


figure = Figure(figsize=(12, 3.6), layout="constrained")
axes = figure.subplots(2, len(found))
for column, (name, a) in enumerate(found.items()):
    peak = a.values.abs().max()
    draw(axes[0, column], a.values[0] / peak, f"{name}, {a.samples} samples")
    share = None if a.error is None else a.error[0] / peak
    title = "no error" if share is None else f"error up to {share.max():.0%}"
    draw(axes[1, column], share, title, error=True)
figure

# %%
# If the error is as large as the values, use more ``samples``, or ``tolerance=0.1``,
# which stops when the largest error is a tenth of the largest value. ``sobol`` and
# ``hsic`` have no sign: they show how much a place matters, not in which direction.
#
# Regions
# -------
#
# A method has one value for each region. The same method with four kinds of regions:

from explain.methods import Quadtree, Squares, region_values
from explain.metrics.faithfulness import superpixels

ways = {
    "4 x 4 squares": Squares(4),
    "7 x 7 squares": Squares(7),
    "a quadtree": Quadtree(49),
    "superpixels": superpixels(x, 49)[0],
}
figure = Figure(figsize=(12, 3.2), layout="constrained")
for axis, (name, regions) in zip(figure.subplots(1, 4), ways.items(), strict=True):
    a = explain.attribute(explainer.model, x, KernelSHAP(150, regions))
    draw(axis, a.values[0] / a.values.abs().max(), name)
figure

# %%
# Large squares hide detail. Small squares share the effect of an object, and need more
# samples. Superpixels follow edges, so their maps look convincing even if the values
# are noise.
#
# Baselines
# ---------
#
# A model that has never seen grey squares may respond to them in any way. The values
# are relative to the baseline:

from explain.render.sheets import Tile, table

baselines = ["zero", "mean", "blur", "noise", "neighbours"]
maps = {
    baseline: explain.attribute(explainer.model, x, KernelSHAP(150, baseline=baseline))
    for baseline in baselines
}
figure = Figure(figsize=(12, 3.2), layout="constrained")
for axis, (baseline, a) in zip(figure.subplots(1, 5), maps.items(), strict=True):
    draw(axis, a.values[0] / a.values.abs().max(), baseline)
figure

# %%
# The centre of the photo with each baseline:

from explain.baselines.replacements import get_baseline
from explain.data.images import load_image

photo = load_image(assets / "chelsea.png")
pictures = [
    Tile(get_baseline(baseline).picture(photo, explainer.preprocess))
    for baseline in baselines
]
table([pictures], baselines)

# %%
# How similar are the maps? The correlation of their values over the regions:

labels = Squares()(x)
by_region = [region_values(a.values, labels)[0] for a in maps.values()]
agreement = torch.corrcoef(torch.stack(by_region))
for baseline, row in zip(baselines, agreement, strict=True):
    print(f"{baseline:>10}", " ".join(f"{value:5.2f}" for value in row))

# %%
# So report the regions and the baseline with the map. The record of a saved explanation
# has both in its ``options``.
#
# ``region_values`` returns one value for each region. Each pixel of a map has the
# value of its whole region, so the sum over *pixels* has no meaning. The sum over
# *regions* is exactly the score of the photo minus the score of the covered photo.

a = maps["zero"]
print("sum over regions:", float(by_region[0].sum()))
blank = explainer.model(get_baseline("zero")(x, torch.zeros(1, 1, *x.shape[2:])))
print("difference:      ", float(a.score[0] - blank[0, a.target[0]].detach()))
