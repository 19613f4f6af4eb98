"""
Cover parts of the photo
========================

Some methods need nothing but scores: they cover parts of the photo, and see what the
model says then. How photos are cut and what covers them matters more than the formula.
"""

# %%
# Seven of them on one photo, with few runs. Below each map is its standard error, in
# shares of the largest value: how sure the estimate is. ``occlusion`` and
# ``partitionshap`` draw nothing at random, so they have none.

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
    """Draw on the grey photo: red is for, blue against; errors from dark to light."""
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
    draw(axes[0, column], a.values[0] / peak, f"{name}, {a.samples} runs")
    share = None if a.error is None else a.error[0] / peak
    title = "no error" if share is None else f"error up to {share.max():.0%}"
    draw(axes[1, column], share, title, error=True)
figure

# %%
# Where the error is as large as the values, the map says nothing yet: give more
# ``samples``, or ``tolerance=0.1``, which ends when the largest error is a tenth of the
# largest value. ``sobol`` and ``hsic`` have no sign: they say how much a place matters,
# and not for what.
#
# What a region is
# ----------------
#
# A method can only say how much *a region* counts. The same method, with four ways to
# cut the photo:

from explain.methods import Quadtree, Squares, region_values
from explain.metrics.segments import superpixels

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
# Squares that are too large hide what is in them. Small ones share what they do
# together, and each needs more runs. Superpixels follow edges, so their maps look
# convincing even where the values are noise.
#
# What covers it
# --------------
#
# A model that has never seen a grey square may say anything about one. With another
# baseline, another question is asked: what does the score lose, compared with *that*?

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
# What each baseline makes of the middle of the photo:

from explain.baselines.registry import get_baseline
from explain.data.images import load_image

photo = load_image(assets / "chelsea.png")
pictures = [
    Tile(get_baseline(baseline).picture(photo, explainer.preprocess))
    for baseline in baselines
]
table([pictures], baselines)

# %%
# How much do two maps agree? The correlation of their values, region by region:

labels = Squares()(x)
by_region = [region_values(a.values, labels)[0] for a in maps.values()]
agreement = torch.corrcoef(torch.stack(by_region))
for baseline, row in zip(baselines, agreement, strict=True):
    print(f"{baseline:>10}", " ".join(f"{value:5.2f}" for value in row))

# %%
# So report the regions and the baseline with the map; they are in its ``options``, in
# the record of a saved explanation.
#
# ``region_values`` gives one value for each region. Each pixel of a map has the whole
# value of its region, so the sum over *pixels* means nothing; the sum over *regions* is
# the difference between the score of the photo and that of the covered one, exactly.

a = maps["zero"]
print("sum over regions:", float(by_region[0].sum()))
blank = explainer.model(get_baseline("zero")(x, torch.zeros(1, 1, *x.shape[2:])))
print("difference:      ", float(a.score[0] - blank[0, a.target[0]].detach()))
