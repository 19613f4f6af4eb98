"""
Vision transformers
===================

A transformer has no feature maps, but tokens and attention. CAM methods work on its
tokens, and some methods are made for its attention.
"""

# %%
# The model ``tiny-transformer`` comes along: 8 × 8 tokens, five blocks, 200 everyday
# classes. Larger ones are downloads:
# ``explain.Explainer("timm:vit_small_patch16_224")`` takes one.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

photo = assets / "coffee.png"
explainer = explain.Explainer("tiny-transformer", crop="whole")
cup = explainer(photo, ["gradcam", "legrad", "rollout", "attnlrp"], "espresso")
print(cup.predictions[:3])
cup.figure()

# %%
# CAM methods find the tokens before the last attention by themselves, and lay them
# out on their grid. The class token is left out.

print(cup["gradcam"].layer, tuple(cup["gradcam"].values.shape))

# %%
# ``legrad`` asks how the score reacts to the attention of every block. ``rollout``
# follows attention through all blocks, and asks about no class. ``attnlrp`` hands the
# score back through the network, down to the pixels.
#
# So ``rollout`` gives the same map whatever you ask. The others do not:

import torch

two = explainer(
    photo, ["legrad", "rollout", "attnlrp"], targets=["espresso", "goldfish"]
)
for name in two:
    one, other = (result[name].heatmap.flatten() for result in two.results)
    alike = torch.corrcoef(torch.stack([one, other]))[0, 1]
    print(f"{name:8} the two maps correlate by {alike:.2f}")

# %%
# By the last block, attention has mixed the tokens. An earlier layer of a CAM keeps
# more of the place. ``explain.list_layers`` has the names.

x = explainer.as_input(photo)
blocks = [
    call.label
    for call in explain.list_layers(explainer.model, x)
    if call.kind == "LayerNorm"
]
print(blocks)
early = explainer(photo, "hirescam", "espresso", layer=blocks[0])
late = explainer(photo, "hirescam", "espresso")

from explain.render.sheets import Tile, table

table(
    [[Tile(each.overlay(caption=True)) for each in (early, late)]],
    ["before the first block", "before the last"],
    tile=420,
)
