"""
Patch a cat into a cup
======================

Which part of a network decides that a photo shows a cat? Run it on a cup of coffee, but
give one part the values that it has for a cat, and look at how much of the cat's score
comes back. This is activation patching.
"""

# %%
# The two photos, and what the network says of them.

import sys
from pathlib import Path

from PIL import Image

import explain
from explain import trace
from explain.hooks import Ablate, Patch, intervene
from explain.render.sheets import Tile, table

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer("tiny")
names = explainer.categories
photos = [assets / "chelsea.png", assets / "coffee.png"]
cat, cup = (explainer.as_input(photo) for photo in photos)


def answer(x):
    score, index = explainer.model(x).softmax(1)[0].max(0)
    return f"{names[index]}, {score.item():.0%}"


small = [Image.open(photo).convert("RGB").resize((300, 200)) for photo in photos]
table([[Tile(photo) for photo in small]], [answer(cat), answer(cup)])

# %%
# One patch: the cup's photo goes in, but ``layer3`` gives what it gives for the cat.
# All that follows sees a cat. In ``layer1`` a quarter of the channels is not enough.

for patch in [Patch("layer3", cat), Patch("layer1", cat, channels=range(32))]:
    with intervene(explainer.model, [patch]):
        print(patch, "->", answer(cup))

# %%
# ``trace`` makes such patches for many layers, in batches, and lists the effects. Here
# it takes the last layer inside each block. A shortcut leads past it, so that each
# restores only its own part. The last column is the fast estimate by the gradient,
# attribution patching.

inside = [
    f"layer{stage}.{i}.bn3"
    for stage, count in ((1, 2), (2, 3), (3, 4))
    for i in range(count)
]
effects = trace(explainer.model, cat, cup, at="layers", layers=inside, categories=names)
print(effects)

# %%
# The late layers decide: what they add to the shortcut is already about the class.

effects.figure()

# %%
# Where is it?
# ------------
#
# The same with squares of the photo, in three stages of the network. Red squares bring
# the cat back. Early on, no single square does: what a patch of 12 pixels shows is not
# a cat yet. In the last stage, the forehead with its stripes is enough for a tenth of
# the difference each.

stages = ["layer1", "layer2", "layer3"]
places = trace(explainer.model, cat, cup, "regions", layers=stages, categories=names)
places.figure()

# %%
# Which channels?
# ---------------
#
# The 512 channels of the last stage. Most do nothing, some do a lot, and here the
# estimate agrees with the effects almost perfectly, since little follows.

channels = trace(explainer.model, cat, cup, "channels", categories=names)
print(channels)

# %%
# If these channels carry the cat into the cup, does the cat's own photo need them? The
# 20 best are set to zero, and then 20 others, the next in the list.

layer = next(iter(channels.by_layer))
order = channels.by_layer[layer].argsort(descending=True).tolist()
for chosen in ([], order[:20], order[100:120]):
    ablated = [Ablate(layer, channels=chosen)] if chosen else []
    with intervene(explainer.model, ablated):
        print(f"{len(chosen):>2} channels without values: {answer(cat)}")

# %%
# The map of the altered network shows what is left of the evidence.

altered = [Ablate(layer, channels=order[:20])]
target = effects.target
before = explainer(photos[0], target=target)
after = explainer(photos[0], target=target, interventions=altered)
table(
    [[Tile(each.overlay("gradcam")) for each in (before, after)]],
    ["the network", "without 20 channels"],
)
