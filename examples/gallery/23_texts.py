"""
A text as the target
====================

Image-text models such as CLIP and SigLIP say how similar a photo and a text are. Which
part of the photo makes it similar to this text, and which words of the text count?
"""

# %%
# The model ``tiny-clip`` is part of the package. It knows 200 everyday things, and the
# words of short descriptions of them. ``explain.targets.Text`` is the target.

import sys
from pathlib import Path

import matplotlib.pyplot as plt

import explain
from explain.targets import Text

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

photo = assets / "coffee.png"
explainer = explain.Explainer("tiny-clip")
coffee = Text("a cup of black coffee")
spoon = Text("a wooden spoon")
found = explainer(photo, ["gradcam", "legrad"], targets=[coffee, spoon])
found.figure()

# %%
# Any texts can be the classes (zero-shot classification). Metrics, the verdict and
# reports then work as for any classifier.

texts = ["a photo of coffee", "a photo of a dog", "a photo of a train"]
classes = explain.Explainer("tiny-clip", categories=texts)
print(classes(photo).predictions)

# %%
# A difference of two texts shows what speaks for one rather than for the other.

explainer(photo, "occlusion(window=16, stride=4)", coffee - spoon).figure()

# %%
# With ``words=True``, the words are explained in the same pass as the photo. Here
# "coffee" speaks for the photo. "Table" speaks against it: the model has learned it
# from photos of dining tables.

x = explainer.as_input(photo)
target = Text("a photo of black coffee on a table", words=True)
result = explain.attribute(explainer.model, x, "integratedgradients", target=target)
words, values = zip(*result.words[0], strict=True)
figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
colors = ["#b2182b" if value > 0 else "#2166ac" for value in values]
axes.bar(range(len(words)), values, color=colors)
axes.set_xticks(range(len(words)), words)
axes.set_ylabel("contribution")
axes.axhline(0, color="black", linewidth=0.8)
