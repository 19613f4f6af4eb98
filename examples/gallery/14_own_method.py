"""
A method of your own
====================

A method is a small frozen dataclass. It says what evidence it needs, and computes
values from this evidence. It never sees the model: hooks, passes and batches are not
its business.
"""

# %%
# This one weighs each map of a layer by the largest gradient anywhere in it.

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
    """Weigh each feature map by its largest gradient."""

    relu: bool = True

    name: ClassVar[str] = "peakcam"
    about: ClassVar[str] = "feature maps weighted by their largest gradient"
    paper: ClassVar[str] = "this tutorial"
    needs: ClassVar[frozenset] = frozenset({Activations(), LayerGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        weights = evidence.gradients.flatten(2).amax(2)
        cam = torch.einsum("nk,nk...->n...", weights, evidence.activations)
        return cam.clamp(min=0) if self.relu else cam


# %%
# It can be used at once, and together with all others. The plan shows that it costs
# nothing more than Grad-CAM.

explainer = explain.Explainer()
x = explainer.as_input(assets / "chelsea.png")
print(explain.plan(explainer.model, x, ["gradcam", PeakCAM()]))

# %%

explainer(assets / "chelsea.png", ["gradcam", PeakCAM()])

# %%
# Once it is registered, it has a name, on the command line of this process too, and
# within ``smooth(...)``.

explain.methods.register(PeakCAM())
print(explain.list_methods("p*"))
explainer(assets / "chelsea.png", "augmented(peakcam)").overlay()
