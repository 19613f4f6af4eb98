"""
One photo, several answers
==========================

A map belongs to a question. Ask about another class, and you get another map of the
same photo.
"""

# %%
# The photo shows an astronaut in front of a model of a space shuttle. With
# ``crop="whole"``, the model sees all of it, and not only the square in the middle.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer(crop="whole")
answers = ["space shuttle", "football helmet"]
explanation = explainer(assets / "astronaut.png", targets=answers)
for label, probability in explanation.predictions:
    print(f"{label:20} {probability:.0%}")

# %%
# Here are the maps of the two answers that we asked about.

explanation

# %%
# The model has no class for astronauts, so no answer can be right. The maps show
# where the wrong ones come from.
#
# ``top_k`` takes the model's best answers instead of named ones.

best = explainer(assets / "coffee.png", top_k=3)
best.targets

# %%
# "Why this and not that?" is a question of its own. The target is a difference of two
# scores. A CAM of it marks what speaks more for the first class than for the second.

from explain.targets import Difference

rather = Difference("Egyptian cat", "tabby cat")
explain.explain(assets / "chelsea.png", "gradcam", target=rather).overlay()

# %%
# Any function of the model's output can be a target, as long as it gives one number
# for each image.

import torch

names = ["tabby cat", "tiger cat", "Egyptian cat"]
cats = [explainer.categories.index(name) for name in names]


def any_cat(output: torch.Tensor) -> torch.Tensor:
    return output[:, cats].logsumexp(1)


explain.explain(assets / "chelsea.png", "gradcam", target=any_cat).overlay()
