"""Methods: frozen dataclasses whose fields are the options and whose call is the mathematics.

    base           what a method is
    checks         options of the right type, in their plain form
    cam            weighted sums of a layer's feature maps
    composed       CAMs made of another
    spectral       principal components and statistics of the feature maps
    backprop       gradients in the pixels, plain or with another rule for rectifiers
    perturbation   scores of masked inputs, and of feature maps taken away
    sampling       any method averaged over noise, flips and scales
    path           gradients added up from a baseline to the photo
    relevance      what inputs and biases add to the score
    lrp            relevance handed back from the score to the input
    deeplift       differences from a baseline, handed back
    expected       gradients between photos and random baselines
    attention      vision transformers
    families       which methods belong together
    sources        the papers to cite
    registry       names

To add one, write a class that satisfies `Method`, and `register` it; nothing else needs to know.
"""

from functools import partial

from explain.methods.attention import AttentionRollout, LeGrad
from explain.methods.backprop import Deconvnet, GuidedBackprop, GuidedGradCAM, InputXGradient, Saliency
from explain.methods.base import (
    Complete,
    Control,
    Demanding,
    Fusion,
    ManyLayers,
    Method,
    Movable,
    Promising,
    Ranking,
    Style,
    options,
    uses_layer,
)
from explain.methods.cam import (
    CAM,
    ElementWiseCAM,
    GradCAM,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    RandomCAM,
    ShapleyCAM,
    XGradCAM,
)
from explain.methods.composed import FinerCAM, RefineCAM
from explain.methods.deeplift import DeepLIFT
from explain.methods.expected import GradientSHAP
from explain.methods.families import FAMILIES, control, family
from explain.methods.lrp import LRP
from explain.methods.path import IntegratedGradients
from explain.methods.perturbation import ISCAM, SSCAM, AblationCAM, ScoreCAM
from explain.methods.registry import MethodLike, get_method, list_methods, register, register_wrapper
from explain.methods.relevance import FullGrad
from explain.methods.sampling import Augmented, Smooth, SmoothGradCAMPlusPlus
from explain.methods.sources import Source
from explain.methods.spectral import FEM, KPCACAM, EigenCAM, EigenGradCAM

_METHODS: list[Method] = [
    CAM(), GradCAM(), GradCAMPlusPlus(), SmoothGradCAMPlusPlus(), XGradCAM(), HiResCAM(), ElementWiseCAM(), LayerCAM(),
    EigenCAM(), EigenGradCAM(), KPCACAM(), FEM(), ShapleyCAM(), FinerCAM(), RefineCAM(), RandomCAM(),
    ScoreCAM(), SSCAM(), ISCAM(), AblationCAM(), FullGrad(), LeGrad(), AttentionRollout(),
    Saliency(), InputXGradient(), GuidedBackprop(), Deconvnet(), GuidedGradCAM(), IntegratedGradients(),
    LRP(), LRP("AttnLRP"), DeepLIFT(), GradientSHAP(),
    Smooth(), Smooth(statistic="square"), Smooth(statistic="variance"),
]  # fmt: skip
for _method in _METHODS:
    register(_method)
register_wrapper("smooth", Smooth)
register_wrapper("smoothsquare", partial(Smooth, statistic="square"))
register_wrapper("var", partial(Smooth, statistic="variance"))
register_wrapper("augmented", Augmented)

__all__ = [
    "CAM",
    "FAMILIES",
    "FEM",
    "ISCAM",
    "KPCACAM",
    "LRP",
    "SSCAM",
    "AblationCAM",
    "AttentionRollout",
    "Augmented",
    "Complete",
    "Control",
    "Deconvnet",
    "DeepLIFT",
    "Demanding",
    "EigenCAM",
    "EigenGradCAM",
    "ElementWiseCAM",
    "FinerCAM",
    "FullGrad",
    "Fusion",
    "GradCAM",
    "GradCAMPlusPlus",
    "GradientSHAP",
    "GuidedBackprop",
    "GuidedGradCAM",
    "HiResCAM",
    "InputXGradient",
    "IntegratedGradients",
    "LayerCAM",
    "LeGrad",
    "ManyLayers",
    "Method",
    "MethodLike",
    "Movable",
    "Promising",
    "RandomCAM",
    "Ranking",
    "RefineCAM",
    "Saliency",
    "ScoreCAM",
    "ShapleyCAM",
    "Smooth",
    "SmoothGradCAMPlusPlus",
    "Source",
    "Style",
    "XGradCAM",
    "control",
    "family",
    "get_method",
    "list_methods",
    "options",
    "register",
    "register_wrapper",
    "uses_layer",
]
