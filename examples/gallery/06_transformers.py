"""
Vision transformers
===================

A transformer has tokens and attention instead of feature maps. CAM methods work on its
tokens, and other methods use its attention.
"""

# %%
# The model ``tiny-transformer`` is part of the package: 8 × 8 tokens, five blocks, 200
# everyday classes. Larger ones are downloaded, such as
# ``explain.Explainer("timm:vit_small_patch16_224")``.

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
# By default, CAM methods use the tokens before the last attention, arranged on their
# grid. The class token is left out.

print(cup["gradcam"].layer, tuple(cup["gradcam"].values.shape))

# %%
# ``legrad`` uses the gradient of the score with respect to the attention of every
# block. ``rollout`` multiplies the attention of all blocks, and does not depend on
# the class. ``attnlrp`` propagates the score back through the network to the pixels.
#
# So ``rollout`` returns the same map for every target. The others do not:

import torch

two = explainer(
    photo, ["legrad", "rollout", "attnlrp"], targets=["espresso", "goldfish"]
)
for name in two:
    one, other = (result[name].heatmap.flatten() for result in two.results)
    alike = torch.corrcoef(torch.stack([one, other]))[0, 1]
    print(f"{name:8} correlation of the two maps: {alike:.2f}")

# %%
# In the last block, attention has mixed the tokens. A CAM of an earlier layer keeps
# more of their positions. ``explain.list_layers`` has the names.

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
