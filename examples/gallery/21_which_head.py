"""
Which head reads which part?
============================

A transformer reads a photo with many attention heads. Their weights show where each one
looks, and patching shows which ones matter for an answer.
"""

# %%
# The small transformer of the package cuts a photo into 8 x 8 patches, with one token
# for each, behind a class token. ``layers.*.self_attention:pattern`` stands for the
# attention weights of all blocks, whatever computes them.
# It is wrong about this photo: it takes the cat for a golden retriever. That is the
# answer that is looked into here.

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image

import explain
from explain import lens, trace
from explain.hooks import Ablate, capture, intervene

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer("tiny-transformer", crop="whole")
model = explainer.model
names = explainer.categories
cat = explainer.as_input(assets / "chelsea.png")
cup = explainer.as_input(assets / "coffee.png")

weights = "layers.*.self_attention:pattern"
with torch.no_grad(), capture(model, weights, gradients=False) as seen:
    scores = model(cat).softmax(1)[0]
patterns = [weights[0] for weights in seen.activations.values()]
blocks = len(patterns)
heads = len(patterns[0])
print(f"{names[scores.argmax()]}, {float(scores.max()):.0%}")
print(f"{blocks} blocks, weights (heads, queries, keys):", tuple(patterns[0].shape))

# %%
# Where each head looks
# ---------------------
#
# The class token, which the answer is read from, attends to the patches with these
# weights. Each row is a block, each column a head.


def show(axes, weights):
    grey = cat[0].mean(0)
    axes.imshow(grey, cmap="gray", extent=(0, 8, 8, 0))
    square = weights.reshape(8, 8)
    axes.imshow(square, cmap="inferno", alpha=0.7, extent=(0, 8, 8, 0))
    axes.set_xticks([])
    axes.set_yticks([])


figure, grid = plt.subplots(blocks, heads, figsize=(6, 7.4), layout="constrained")
for block, weights in enumerate(patterns):
    for head in range(heads):
        show(grid[block, head], weights[head, 0, 1:])
        grid[block, head].set_title(f"block {block}, head {head}", fontsize=8)

# %%
# Which heads matter
# ------------------
#
# Attention says where a head looks, not whether anybody uses what it sees. ``trace``
# gives one head after the other the result that it has for the cat, while the network
# is run on the cup.

effects = trace(model, cat, cup, "heads", categories=names)
print(effects)
effects.figure()

# %%
# The other way round: take the head with the largest effect out of the cat's own pass,
# then one with a small effect.

order = sorted(effects.rows(), key=lambda row: -row["effect"])
for row in (order[0], order[len(order) // 2]):
    ablated = Ablate(row["layer"], by="mean", heads=[row["unit"]])
    with intervene(model, [ablated]), torch.no_grad():
        found = model(cat).softmax(1)[0, scores.argmax()]
    print(f"{ablated}: {float(scores.max()):.0%} becomes {float(found):.0%}")

# %%
# What if it looks elsewhere?
# ---------------------------
#
# Attention weights can be replaced as well. Here the class token of each block in turn
# attends to all tokens alike.

target = int(scores.argmax())
for block in range(blocks):
    layer = f"layers.{block}.self_attention:pattern"
    alike = torch.full_like(patterns[0][None], 1 / patterns[0].shape[-1])
    patch = explain.hooks.Patch(layer, alike, tokens=[0], from_input=False)
    with intervene(model, [patch]), torch.no_grad():
        print(f"block {block}: {float(model(cat).softmax(1)[0, target]):.0%}")

# %%
# When does the answer form?
# --------------------------
#
# The logit lens lets the last layers read each block, and each token alone. The picture
# shows the score of the answer that each patch would give after each block.
# The patches of the padding score highest at every depth. The head has learnt to read
# the class token only: what it says of other tokens is a reading, no evidence.

found = lens(model, cat, tokens=True, categories=names)
print(found)

figure, several = plt.subplots(1, blocks + 1, figsize=(9, 1.9), layout="constrained")
several[0].imshow(Image.open(assets / "chelsea.png").resize((64, 64)))
several[0].axis("off")
for axes, layer, tokens in zip(several[1:], found.layers, found.tokens, strict=True):
    show(axes, tokens[0, 1:, target])
    axes.set_title(layer, fontsize=8)
