"""
A first photo
=============

You have a photo, and a model says what is on it. Which part of the photo made it say
so?
"""

# %%
# The default model is EfficientNet-Lite0. It knows the 1,000 classes of ImageNet. It
# is installed along with the package, so nothing is downloaded here.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explanation = explain.explain(assets / "chelsea.png")
for label, probability in explanation.predictions:
    print(f"{label:20} {probability:.0%}")

# %%
# ``explain.explain`` takes the model's best answer and asks Grad-CAM about it. Warm
# colours mark the places that raised the score of this answer.

explanation.overlay("gradcam")

# %%
# The numbers behind the picture are there as well. ``values`` is the raw map, as the
# method gives it. ``heatmap`` is the same map as it is drawn: from 0 to 1, and as
# large as the model's input.

attribution = explanation.results[0]["gradcam"]
print(attribution.values.shape, attribution.heatmap.shape)
print("layer:", attribution.layer, " score:", round(float(attribution.score), 2))

# %%
# ``save`` writes three files: the overlay, the raw values, and a record of everything
# that was done. ``explain.load`` reads them back without a model.

import tempfile

with tempfile.TemporaryDirectory() as folder:
    paths = explanation.save(folder)
    saved = explain.load(paths[2])
print([path.name for path in paths])
print(saved.label, saved.record["versions"])
