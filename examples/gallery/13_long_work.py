"""
Plan long work
==============

Some methods run the model hundreds of times. You can see what they will cost before
they run, and share work between them.
"""

# %%
# ``explain.plan`` says which passes an explanation takes. Methods that need the same
# thing share it.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer("tiny")
x = explainer.as_input(assets / "chelsea.png")
print(explain.plan(explainer.model, x, ["gradcam", "layercam", "saliency"]))

# %%
# Score-CAM scores the photo once for each map of the layer:

print(explain.plan(explainer.model, x, "scorecam"))

# %%
# ``progress`` is called with what is done and what there is to do. ``batch_size``
# sets how many inputs run at once; without it, a size is chosen that is fast and fits
# into memory.

seen = []
a = explain.attribute(
    explainer.model,
    x,
    "integratedgradients",
    batch_size=10,
    progress=lambda done, total: seen.append((done, total)),
)
print(seen)

# %%
# Many photos go one after the other with ``each``. It keeps none of them, and a
# broken file does not stop it.

photos = [assets / "chelsea.png", b"not a photo", assets / "coffee.png"]
for found in explainer.each(photos, "gradcam"):
    print(found if isinstance(found, Exception) else found.predictions[0])
