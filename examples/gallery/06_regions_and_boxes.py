"""
Detection and segmentation
==========================

A detector finds boxes, and a segmenter predicts a class for every pixel. What is
explained is one box, or the class in one region.
"""

# %%
# The detector NanoDet comes with the package. It finds things of COCO's 80 classes.
# Without a target, the best detection is explained.

import sys
from pathlib import Path

import torch

import explain
from explain.models import Stitched
from explain.models.preprocessing import StretchedPhoto
from explain.targets import Detections

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"
photo = assets / "grace_hopper.jpg"

detector = explain.Explainer("nanodet")
explanation = detector(photo, ["layercam", "smoothgrad"], targets=["person", "tie"])
for found in explanation.detections:
    print(
        f"{found.label:8} {found.probability:.0%}", [round(edge) for edge in found.box]
    )
explanation.sheet()

# %%
# The tie is 2 % of the photo, and SmoothGrad shows that the score of its box depends on
# the collar and the jacket as well. What if they are covered? ``Detections`` is the
# target for ``explain.attribute`` and ``explain.evaluate``. The box is found again in
# each covered photo, by where it is and what it is.

x = detector.as_input(photo)
tie = Detections("tie")
maps = explain.attribute(
    detector.model,
    x,
    ["layercam", "occlusion(window=52, stride=26)"],
    target=tie,
    categories=detector.categories,
)
occlusion = maps["occlusion"]
fall = occlusion.values.amax() / occlusion.score[0]
print(f"covering a square takes up to {fall:.0%} of the score {occlusion.score[0]:.2f}")

# %%
# One side of a box can be explained too, and so can a box that was not found. Why is
# there no second tie at the ribbons?

ribbons = detector(photo, "layercam", "tie box 330,480,460,540")
print(ribbons.targets, f"{ribbons.boxes[0].probability:.1%}")
left_side = explain.attribute(
    detector.model,
    x,
    "saliency",
    target=Detections("tie", of="left"),
    categories=detector.categories,
)
print("the left side is at", round(left_side.score.item()), "of 416 pixels")
ribbons.overlay()

# %%
# The segmenter says for every pixel whether it belongs to a person. The target is the
# mean score in the region where it says so.

segmenter = explain.Explainer("person-segmenter")
astronaut = segmenter(assets / "astronaut.png", ["layercam", "smoothgrad"])
astronaut.sheet()

# %%
# It also takes the cat for a person. What is it in the cat? A point on the photo
# chooses the connected region around it.

cat = segmenter(assets / "chelsea.png", ["layercam", "smoothgrad"], "person@200,150")
with torch.no_grad():
    share = (segmenter.model(segmenter.as_input(assets / "chelsea.png")) > 0).float()
print(f"{share.mean():.0%} of the photo of the cat are a person to the model")
cat.sheet()

# %%
# A large photo is segmented in windows. ``Stitched`` stitches the scores, and the maps
# of a layer with the same weights. SmoothGrad shows the edges of the windows: what
# lies beyond them cannot change what the network says inside.

stitched = explain.Explainer(
    Stitched(segmenter.model, window=256),
    categories=["person"],
    preprocess=StretchedPhoto(512, (0.0,) * 3, (1.0,) * 3),
    activation="sigmoid",
)
stitched(assets / "astronaut.png", ["layercam", "smoothgrad"]).sheet()
