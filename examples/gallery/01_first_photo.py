"""
A first photo
=============

A model classifies a photo. Which parts of the photo led to its prediction?
"""

# %%
# The default model is EfficientNet-Lite0. It knows the 1,000 classes of ImageNet. It
# is installed with the package, so nothing is downloaded here.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explanation = explain.explain(assets / "chelsea.png")
for label, probability in explanation.predictions:
    print(f"{label:20} {probability:.0%}")

# %%
# ``explain.explain`` explains the top class with Grad-CAM. Warm colours mark the places
# that raise its score.

explanation.overlay("gradcam")

# %%
# The values are available too. ``values`` is the raw map of the method. ``heatmap`` is
# the map as it is drawn: from 0 to 1, at the resolution of the model's input.

attribution = explanation.results[0]["gradcam"]
print(attribution.values.shape, attribution.heatmap.shape)
print("layer:", attribution.layer, " score:", round(float(attribution.score), 2))

# %%
# ``save`` writes three files: the overlay, the raw values, and a record of how they
# were made. ``explain.load`` reads them without a model.

import tempfile

with tempfile.TemporaryDirectory() as folder:
    paths = explanation.save(folder)
    saved = explain.load(paths[2])
print([path.name for path in paths])
print(saved.label, saved.record["versions"])

# %%
# A map explains one class. For another class, the same photo has another map. This one
# shows an astronaut in front of a model of a space shuttle. With ``crop="whole"``, the
# model sees all of it, not only the central square. It has no class for astronauts, and
# the maps show where its predictions come from.

explainer = explain.Explainer(crop="whole")
targets = ["space shuttle", "football helmet"]
explainer(assets / "astronaut.png", targets=targets)

# %%
# Why this class and not that one? The target is the difference of two scores. Its CAM
# marks the evidence that is stronger for the first class than for the second.

from explain.targets import Difference

rather = Difference("Egyptian cat", "tabby cat")
explain.explain(assets / "chelsea.png", "gradcam", target=rather).overlay()
