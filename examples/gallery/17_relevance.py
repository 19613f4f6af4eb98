"""
Relevance propagation
=====================

A score can be propagated back through a network, operation by
operation, to the pixels. A rule says how each operation distributes it. This tutorial
shows the rules, and the contribution of single channels.
"""

# %%
# ``lrp`` takes rules that suit the network. A composite has rules for all its
# operations, and others are there by name.

import sys
from pathlib import Path

import explain
from explain.methods import LRP
from explain.render.sheets import Tile, table

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer, photo = explain.Explainer(crop="whole"), assets / "chelsea.png"
composites = ["Gradient", "Epsilon", "EpsilonPlusFlat", "EpsilonGammaBox"]
found = {name: explainer(photo, LRP(name)) for name in composites}
table([[Tile(each.overlay("lrp")) for each in found.values()]], composites)

# %%
# ``Gradient`` and ``Epsilon`` are exact, and as noisy as the network's gradient. Rules
# that hand on positive contributions alone are calm. Each result says which rule
# covered which operations, and what biases and stabilisers took out of the score.

for name in ("Epsilon", "EpsilonPlusFlat"):
    a = found[name].results[0]["lrp"]
    taken = {cause: round(float(part), 2) for cause, part in a.coverage.taken.items()}
    print(f"{name}: score {float(a.score):.2f}, pixels {float(a.values.sum()):.2f}")
    print(f"  taken by {taken}; unexplained {float(a.delta):.1e}")

# %%
# Naming a layer gives the relevance there, and ranks its channels. ``concept`` then
# lets relevance through one of these channels alone: so each has a map of its own. Here
# are the five channels that had most to do with the answer for another photo. One is
# about the helmet, one about the flag and the rocket, one about the badge.

other = assets / "astronaut.png"
whole, rules, layer = explain.Explainer(crop="whole"), "EpsilonGammaBox", "features.6"
ranking = whole(other, LRP(rules), layer=layer).results[0]["lrp"].channels
best = ranking.indices[0, :5].tolist()
shares = (ranking.values[0] / ranking.values[0].abs().sum())[:5].tolist()
maps = [whole(other, LRP(rules, concept=(layer, (channel,)))) for channel in best]
names = [f"channel {c}: {share:.1%}" for c, share in zip(best, shares, strict=True)]
table([[Tile(each.overlay("lrp")) for each in maps]], names)

# %%
# DeepLIFT hands back the difference from a baseline. Paths from a baseline to the
# photo come to the same sum: straight, guided to where the gradient is small, or from
# a blur. ``idgi`` shares out each step of one of these paths along the gradient alone,
# and ``xrai`` ranks regions.

from explain.methods import (
    IDGI,
    XRAI,
    BlurIntegratedGradients,
    GuidedIntegratedGradients,
    IntegratedGradients,
)

steps = 12
paths = [
    "deeplift", IntegratedGradients(steps), BlurIntegratedGradients(steps),
    GuidedIntegratedGradients(steps), IDGI(BlurIntegratedGradients(steps)), XRAI(steps),
]  # fmt: skip
results = explainer(photo, paths)
results

# %%
# By how much do the values miss what they should add up to? The more steps, the less;
# ``deeplift`` and ``idgi`` need no more steps for it, and ``xrai`` makes no promise.

for name, a in results.results[0].items():
    if a.delta is not None:
        print(f"{name:26} {float(a.delta):+.3f} of {float(a.score):.2f}")

# %%
# In a transformer, attention has rules too. ``attnlrp`` differentiates its softmax,
# and ``CPLRP`` takes its weights for constants. ``cheferattribution`` weighs the
# relevance of attention by its gradient, and follows it through all blocks.

transformer = explain.Explainer("tiny-transformer")
cat = transformer(photo, ["attnlrp", "cheferattribution", "gradientrollout", "legrad"])
constant = transformer(photo, LRP("CPLRP"))
pictures = [cat.overlay(name) for name in cat.methods] + [constant.overlay("lrp")]
table([[Tile(picture) for picture in pictures]], [*cat.methods, "CPLRP"])

# %%
# ``examples/lrp_by_hand.py`` works every rule out on a network of three neurons, with
# figures that can be checked on paper.
