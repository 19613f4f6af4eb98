"""
Your own method
===============

A method is a small frozen dataclass. It declares the evidence that it needs, and
computes values from it. It never sees the model: the engine takes care of hooks, passes
and batches.
"""

# %%
# This one weights each channel of a layer by its largest gradient.

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

import explain
from explain.engine import Activations, Evidence, LayerGradients
from explain.methods import Method

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"


@dataclass(frozen=True)
class PeakCAM(Method):
    """Weight each feature map by its largest gradient."""

    relu: bool = True

    name: ClassVar[str] = "peakcam"
    summary: ClassVar[str] = "feature maps weighted by their largest gradient"
    paper: ClassVar[str] = "this tutorial"
    needs: ClassVar[frozenset] = frozenset({Activations(), LayerGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        weights = evidence.gradients.flatten(2).amax(2)
        cam = torch.einsum("nk,nk...->n...", weights, evidence.activations)
        return cam.clamp(min=0) if self.relu else cam


# %%
# It can be used at once, and together with other methods. The plan shows that it adds
# no pass to those of Grad-CAM.

explainer = explain.Explainer()
x = explainer.as_input(assets / "chelsea.png")
print(explain.plan(explainer.model, x, ["gradcam", PeakCAM()]))

# %%

explainer(assets / "chelsea.png", ["gradcam", PeakCAM()])

# %%
# A registered method has a name, which also works in ``smooth(...)`` and
# ``augmented(...)``.

explain.methods.register(PeakCAM())
print(explain.list_methods("p*"))
explainer(assets / "chelsea.png", "augmented(peakcam)").overlay()
