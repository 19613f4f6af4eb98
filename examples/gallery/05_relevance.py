"""
Relevance propagation
=====================

Relevance propagation distributes the score back through the network, operation by
operation, to the pixels. A rule defines how each operation distributes it. This
tutorial shows the rules, and the contribution of single channels.
"""

# %%
# A composite is a set of rules for all operations of a network. ``lrp`` chooses one
# that suits the network. Others have names.

import sys
from pathlib import Path

import explain
from explain.methods import LRP
from explain.render.sheets import Tile, table

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer(crop="whole")
photo = assets / "chelsea.png"
composites = ["Gradient", "Epsilon", "EpsilonPlusFlat", "EpsilonGammaBox"]
found = {name: explainer(photo, LRP(name)) for name in composites}
table([[Tile(each.overlay("lrp")) for each in found.values()]], composites)

# %%
# ``Gradient`` and ``Epsilon`` are exact, and as noisy as the network's gradient. Rules
# for positive contributions only have little noise. Each result has the rule of each
# operation, and the relevance that biases and stabilisers absorb.

for name in ("Epsilon", "EpsilonPlusFlat"):
    a = found[name].results[0]["lrp"]
    taken = {cause: round(float(part), 2) for cause, part in a.coverage.taken.items()}
    print(f"{name}: score {float(a.score):.2f}, pixels {float(a.values.sum()):.2f}")
    print(f"  absorbed: {taken}; delta {float(a.delta):.1e}")

# %%
# ``layer=`` returns the relevance at a layer, and ranks its channels. ``concept`` lets
# relevance pass through one of these channels only, so each channel has its own map.
# Here are the five most relevant channels for another photo. One responds to the
# helmet, one to the flag and the rocket, one to the badge.

other = assets / "astronaut.png"
whole = explain.Explainer(crop="whole")
rules = "EpsilonGammaBox"
layer = "features.6"
ranking = whole(other, LRP(rules), layer=layer).results[0]["lrp"].channels
best = ranking.indices[0, :5].tolist()
shares = (ranking.values[0] / ranking.values[0].abs().sum())[:5].tolist()
maps = [whole(other, LRP(rules, concept=(layer, (channel,)))) for channel in best]
names = [f"channel {c}: {share:.1%}" for c, share in zip(best, shares, strict=True)]
table([[Tile(each.overlay("lrp")) for each in maps]], names)

# %%
# DeepLIFT propagates the difference from a baseline. Path methods integrate gradients
# from a baseline to the photo, to the same sum: on a straight path, on a path along
# small gradients, or from a blur. ``idgi`` distributes each step of such a path along
# the gradient only, and ``xrai`` ranks regions.

from explain.methods import (
    IDGI,
    XRAI,
    BlurIntegratedGradients,
    GuidedIntegratedGradients,
    IntegratedGradients,
)

steps = 12
paths = [
    "deeplift",
    IntegratedGradients(steps),
    BlurIntegratedGradients(steps),
    GuidedIntegratedGradients(steps),
    IDGI(BlurIntegratedGradients(steps)),
    XRAI(steps),
]
results = explainer(photo, paths)
results

# %%
# ``delta`` is the difference between the sum of the values and the sum that they should
# have. It falls with more steps. ``deeplift`` and ``idgi`` do not need more steps, and
# ``xrai`` has no known sum.

for name, a in results.results[0].items():
    if a.delta is not None:
        print(f"{name:26} {float(a.delta):+.3f} of {float(a.score):.2f}")

# %%
# In a transformer, attention has rules too. ``attnlrp`` differentiates its softmax, and
# ``CPLRP`` treats its weights as constants. ``cheferattribution`` multiplies the
# relevance of attention by its gradient, and combines all blocks.

transformer = explain.Explainer("tiny-transformer")
cat = transformer(photo, ["attnlrp", "cheferattribution", "gradientrollout", "legrad"])
constant = transformer(photo, LRP("CPLRP"))
pictures = [cat.overlay(name) for name in cat.methods] + [constant.overlay("lrp")]
table([[Tile(picture) for picture in pictures]], [*cat.methods, "CPLRP"])

# %%
# ``examples/lrp_by_hand.py`` shows every rule on a network of three neurons, with
# numbers that you can check by hand.
