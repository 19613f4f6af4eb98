"""
One photo, several classes
==========================

A map explains one class. For another class, the same photo has another map.
"""

# %%
# The photo shows an astronaut in front of a model of a space shuttle. With
# ``crop="whole"``, the model sees all of it, not only the central square.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer(crop="whole")
targets = ["space shuttle", "football helmet"]
explanation = explainer(assets / "astronaut.png", targets=targets)
for label, probability in explanation.predictions:
    print(f"{label:20} {probability:.0%}")

# %%
# The maps of the two classes:

explanation

# %%
# The model has no class for astronauts, so no prediction can be right. The maps show
# where the wrong ones come from.
#
# ``top_k`` explains the best classes instead of named ones.

best = explainer(assets / "coffee.png", top_k=3)
best.targets

# %%
# Why this class and not that one? The target is the difference of two scores. Its CAM
# marks the evidence that is stronger for the first class than for the second.

from explain.targets import Difference

rather = Difference("Egyptian cat", "tabby cat")
explain.explain(assets / "chelsea.png", "gradcam", target=rather).overlay()

# %%
# Any function of the model's output can be a target if it returns one number for each
# image.

import torch

names = ["tabby cat", "tiger cat", "Egyptian cat"]
cats = [explainer.categories.index(name) for name in names]


def any_cat(output: torch.Tensor) -> torch.Tensor:
    return output[:, cats].logsumexp(1)


explain.explain(assets / "chelsea.png", "gradcam", target=any_cat).overlay()
