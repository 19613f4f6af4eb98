"""
Insight into many maps
======================

One map explains one prediction. A run over many photos shows what a model relies on:
where each class has its evidence, the causes of mistakes, and what channels respond
to.
"""

# %%
# The photos are parts of five pictures, 24 of each, in a folder for each class. Three
# of the five are classes of the model ``tiny``.

import sys
import tempfile
from pathlib import Path

import explain
from explain.data.images import load_image

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

shows = {
    "tabby cat": "chelsea.png",
    "espresso": "coffee.png",
    "military uniform": "grace_hopper.jpg",
    "astronaut": "astronaut.png",
    "rocket": "rocket.jpg",
}
folder = Path(tempfile.mkdtemp())
for label, name in shows.items():
    photo = load_image(assets / name)
    (folder / label).mkdir()
    for number in range(24):
        side = int(min(photo.size) * (0.75 if number % 2 else 0.55))
        left = (photo.width - side) * (number // 2 % 4) // 3
        top = (photo.height - side) * (number // 8) // 2
        part = photo.crop((left, top, left + side, top + side)).resize((96, 96))
        part.save(folder / label / f"{number:02}.png")

# %%
# A run explains all photos and stores the maps. ``insight`` analyses them. With the
# model, it also explains mistakes, channels and concepts.

explainer = explain.Explainer("tiny")
run = explain.run(folder, explainer, "gradcam", output=folder / "run.sqlite", workers=0)
found = run.insight(explainer=explainer, channels=4, concepts=5)
print("\n".join(found.lines(5)))

# %%
# Mistakes
# --------
#
# The target is the score of the wrong class minus the score of the right class, so the
# maps show the evidence for one *rather than* the other. The dark folds of the flag
# are taken for a gown, and the knot of the tie for a bow tie.

found.pictures()["mistakes"]

# %%
# Is it true? ``corrected`` covers a tenth of the pixels, those with the evidence for
# the wrong class, and counts how often the mistake is still made, compared with
# covering as much elsewhere. The gown disappears in more than half of its photos. The
# bow tie remains: here the map is misleading. No prediction becomes right: the next
# class is also wrong.

from explain.insight import RunPhotos, corrected, removed

photos = RunPhotos(run, explainer)
for pair in found.pairs[:3]:
    print(f"{pair.label} taken for {pair.prediction}:")
    print(" ", corrected(photos, pair, "gradcam"))

# %%
# Channels
# --------
#
# The channels that contribute most to the top class of each photo, with the patches
# that activate each channel most. Towers, collars, faces:

found.pictures()["channels"]

# %%
# Concepts that all photos share are factors of the layer. The second occurs in fur,
# wood and coffee: a texture.

found.pictures()["concepts"]

# %%
# Removing the evidence
# ---------------------
#
# If the maps are right, covering the tenth of the photo with the highest values changes
# more predictions than covering as much elsewhere.

keys = list(zip(found.maps.names, found.maps.targets, strict=True))
print(removed(photos, "gradcam", keys, as_predicted=True))

# %%
# Ten thousand photos
# -------------------
#
# The same analysis of all validation photos of Tiny-ImageNet, which may not be shown.
# The first results, and their test by blurring:

import json

from PIL import Image

tiny = json.loads((assets / "insight" / "tiny.json").read_text())
for look in [tiny["looks"][0], tiny["looks"][2]]:
    print(
        f"{look['target']}: {look['on_object']['mean']:.0%} of the evidence is on the "
        f"object; {look['object']['after']:.0%} of the predictions stay without it "
        f"({look['object']['control']:.0%} without as much elsewhere), "
        f"{look['evidence']['after']:.0%} without the tenth with most evidence "
        f"({look['evidence']['control']:.0%} without as much elsewhere)"
    )

# %%
# Volleyballs are recognised by something beside the ball: covering the evidence changes
# more than covering as much elsewhere. The ball itself is too small to be tested. Each
# point is a class: the more of its evidence is on the object, the fewer predictions
# stay when the object is blurred. See :doc:`/runs`.

Image.open(assets / "insight" / "tiny-objects.png")
