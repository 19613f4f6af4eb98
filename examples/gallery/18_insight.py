"""
What all maps say together
==========================

One map says why one photo got its answer. A run over many photos says what a model
looks at: which classes it mistakes and why, what its channels see, and whether that is
true.
"""

# %%
# The photos here are parts of five pictures, 24 of each, in a folder for each class.
# Three of the five are classes of the small model.

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
# A run explains them all and keeps the maps. ``insight`` reads what they say together;
# with the model, it also explains mistakes, and says more where it is asked to.

explainer = explain.Explainer("tiny")
run = explain.run(folder, explainer, "gradcam", output=folder / "run.sqlite", workers=0)
found = run.insight(explainer=explainer, channels=4, concepts=5)
print("\n".join(found.lines(5)))

# %%
# Mistakes
# --------
#
# The target is the difference of the scores of the wrong and the right class, so the
# maps show what speaks for the one *rather than* the other. The dark folds of the flag
# are read as a gown, and the knot of the tie as a bow tie.

found.pictures()["mistakes"]

# %%
# Is it true? ``corrected`` covers what spoke for the wrong class, a tenth of the
# pixels, and counts how often the mistake is still made, beside as much covered
# elsewhere. The gown goes away in more than half of its photos. The bow tie stays: here
# the map alone would have convinced us. And no answer becomes right: what comes next is
# another wrong class.

from explain.insight import RunPhotos, corrected, removed

photos = RunPhotos(run, explainer)
for pair in found.pairs[:3]:
    print(f"{pair.label} taken for {pair.prediction}:")
    print(" ", corrected(photos, pair, "gradcam"))

# %%
# What channels see
# -----------------
#
# The channels that do most for the best class of each photo, with the parts of photos
# that excite each one most. Towers, collars, faces:

found.pictures()["channels"]

# %%
# Concepts that all photos share are parts of the layer that are there or not. The
# second is found in fur, wood and coffee alike: a texture.

found.pictures()["concepts"]

# %%
# Removing the evidence
# ---------------------
#
# If the maps are right, covering a tenth of the photo where they are highest changes
# more answers than covering as much elsewhere.

keys = list(zip(found.maps.names, found.maps.targets, strict=True))
print(removed(photos, "gradcam", keys, as_predicted=True))

# %%
# Ten thousand photos
# -------------------
#
# The same was done with all validation photos of Tiny-ImageNet, which may not be shown.
# What it found first, and what blurring said of it:

import json

from PIL import Image

tiny = json.loads((assets / "insight" / "tiny.json").read_text())
for look in [tiny["looks"][0], tiny["looks"][2]]:
    print(
        f"{look['target']}: {look['on_object']['mean']:.0%} of the evidence is on the "
        f"object; {look['object']['after']:.0%} of the answers stay without it, and "
        f"{look['evidence']['after']:.0%} without the tenth with most evidence"
    )

# %%
# Volleyballs are read from players, net and hall. Each point is a class: the more of
# its evidence is on the object, the fewer answers stay when the object is blurred. The
# page on insight says more.

Image.open(assets / "insight" / "tiny-objects.png")
