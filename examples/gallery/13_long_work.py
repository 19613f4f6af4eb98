"""
Plan long computations
======================

Some methods run the model hundreds of times. ``explain.plan`` shows their cost before
they run.
"""

# %%
# ``explain.plan`` lists the passes of an explanation. Methods that need the same
# evidence share a pass.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer("tiny")
x = explainer.as_input(assets / "chelsea.png")
print(explain.plan(explainer.model, x, ["gradcam", "layercam", "saliency"]))

# %%
# Score-CAM runs the model once for each channel of the layer:

print(explain.plan(explainer.model, x, "scorecam"))

# %%
# ``progress`` is called with the number of finished inputs and the total.
# ``batch_size`` is the number of inputs in a batch; the default is a fast size that
# fits into memory.

calls = []
a = explain.attribute(
    explainer.model,
    x,
    "integratedgradients",
    batch_size=10,
    progress=lambda done, total: calls.append((done, total)),
)
print(calls)

# %%
# ``each`` explains many photos. It keeps no results in memory, and continues after a
# broken file.

photos = [assets / "chelsea.png", b"not a photo", assets / "coffee.png"]
for result in explainer.each(photos, "gradcam"):
    print(result if isinstance(result, Exception) else result.predictions[0])
