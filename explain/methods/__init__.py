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
    blurred        gradients added up while a blurred photo becomes sharp
    guided         gradients added up along a path that the network lays
    xrai           regions ranked by gradients along two paths
    idgi           changes of the score along a path, shared out by the gradient
    relevance      what inputs and biases add to the score
    lrp            relevance handed back from the score to the input
    deeplift       differences from a baseline, handed back
    expected       gradients between photos and random baselines
    attention      vision transformers
    chefer         attention weighted by gradients and followed through all blocks
    families       which methods belong together
    sources        the papers to cite
    regions        parts of a photo that are covered as one
    segments       regions of similar colour
    masks          altered rows for masks
    estimates      maps that are read off scores as they come
    coalitions     regions switched off together
    masking        occlusion and random smooth masks
    shapley        Shapley values of regions
    pair_regression  Shapley values from coalitions and their opposites
    partition      Owen values along a hierarchy of cells
    surrogate      regions one at a time, and a linear model of the score
    dependence     variance and dependence for each cell of a grid
    detection      random masks for a detected box
    permutation    regions exchanged between images
    smooth_masks   masks from values on a lattice
    extremal       the best smooth mask of a given area
    clusters       rows of numbers that are alike, put together
    tokens         masks from a transformer's own tokens
    sources_of_masks, sources_of_paths
                   papers of some of these
    registry       names

To add one, write a class that satisfies `Method`, and `register` it; nothing else needs to know.
"""

from __future__ import annotations

from functools import partial

from explain.methods.attention import AttentionRollout, CheferAttribution, CheferBimodal, GradientRollout, LeGrad
from explain.methods.base import (
    Bounded,
    ByScore,
    Complete,
    Control,
    Demanding,
    Estimated,
    Fusion,
    ManyLayers,
    Method,
    Movable,
    OneInput,
    Outcome,
    Promising,
    Ranking,
    Style,
    options,
    uses_layer,
)
from explain.methods.bibliography import Source
from explain.methods.blur_path import BlurIntegratedGradients
from explain.methods.cam import (
    CAM,
    ElementWiseCAM,
    FinerCAM,
    GradCAM,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    RandomCAM,
    RefineCAM,
    ShapleyCAM,
    XGradCAM,
)
from explain.methods.drise import DRISE
from explain.methods.eigen_cam import FEM, KPCACAM, EigenCAM, EigenGradCAM
from explain.methods.expected_gradients import ExpectedGradients, GradientSHAP
from explain.methods.extremal import ExtremalPerturbation
from explain.methods.fullgrad import FullGrad
from explain.methods.gradients import Deconvnet, GuidedBackprop, GuidedGradCAM, InputXGradient, Saliency
from explain.methods.guided_path import IDGI, GuidedIntegratedGradients
from explain.methods.occlusion import RISE, Occlusion
from explain.methods.partition_shap import PartitionSHAP
from explain.methods.path import IntegratedGradients
from explain.methods.regions import Felzenszwalb, GivenRegions, Quadtree, Regions, Squares, Superpixels, region_values
from explain.methods.registry import (
    FAMILIES,
    MethodLike,
    control,
    divides_by_score,
    family,
    get_method,
    list_methods,
    register,
    register_wrapper,
)
from explain.methods.relevance import LRP, DeepLIFT, DeepLIFTSHAP
from explain.methods.score_cam import ISCAM, SSCAM, AblationCAM, ScoreCAM
from explain.methods.sensitivity import HSIC, Sobol
from explain.methods.shapley import KernelSHAP, ShapleySampling
from explain.methods.surrogate import LIME, FeatureAblation, FeaturePermutation
from explain.methods.token_masks import TIS, ViTCX
from explain.methods.wrappers import Augmented, Smooth, SmoothGradCAMPlusPlus
from explain.methods.xrai import XRAI

__all__ = [
    "CAM",
    "DRISE",
    "FAMILIES",
    "FEM",
    "HSIC",
    "IDGI",
    "ISCAM",
    "KPCACAM",
    "LIME",
    "LRP",
    "RISE",
    "SSCAM",
    "TIS",
    "XRAI",
    "AblationCAM",
    "AttentionRollout",
    "Augmented",
    "BlurIntegratedGradients",
    "Bounded",
    "ByScore",
    "CheferAttribution",
    "CheferBimodal",
    "Complete",
    "Control",
    "Deconvnet",
    "DeepLIFT",
    "DeepLIFTSHAP",
    "Demanding",
    "EigenCAM",
    "EigenGradCAM",
    "ElementWiseCAM",
    "Estimated",
    "ExpectedGradients",
    "ExtremalPerturbation",
    "FeatureAblation",
    "FeaturePermutation",
    "Felzenszwalb",
    "FinerCAM",
    "FullGrad",
    "Fusion",
    "GivenRegions",
    "GradCAM",
    "GradCAMPlusPlus",
    "GradientRollout",
    "GradientSHAP",
    "GuidedBackprop",
    "GuidedGradCAM",
    "GuidedIntegratedGradients",
    "HiResCAM",
    "InputXGradient",
    "IntegratedGradients",
    "KernelSHAP",
    "LayerCAM",
    "LeGrad",
    "ManyLayers",
    "Method",
    "MethodLike",
    "Movable",
    "Occlusion",
    "OneInput",
    "Outcome",
    "PartitionSHAP",
    "Promising",
    "Quadtree",
    "RandomCAM",
    "Ranking",
    "RefineCAM",
    "Regions",
    "Saliency",
    "ScoreCAM",
    "ShapleyCAM",
    "ShapleySampling",
    "Smooth",
    "SmoothGradCAMPlusPlus",
    "Sobol",
    "Source",
    "Squares",
    "Style",
    "Superpixels",
    "ViTCX",
    "XGradCAM",
    "control",
    "divides_by_score",
    "family",
    "get_method",
    "list_methods",
    "options",
    "region_values",
    "register",
    "register_wrapper",
    "uses_layer",
]

_METHODS: list[Method] = [
    CAM(), GradCAM(), GradCAMPlusPlus(), SmoothGradCAMPlusPlus(), XGradCAM(), HiResCAM(), ElementWiseCAM(), LayerCAM(),
    EigenCAM(), EigenGradCAM(), KPCACAM(), FEM(), ShapleyCAM(), FinerCAM(), RefineCAM(), RandomCAM(),
    ScoreCAM(), SSCAM(), ISCAM(), AblationCAM(), FullGrad(), LeGrad(), AttentionRollout(),
    GradientRollout(), CheferAttribution(), CheferBimodal(),
    Saliency(), InputXGradient(), GuidedBackprop(), Deconvnet(), GuidedGradCAM(), IntegratedGradients(),
    BlurIntegratedGradients(), GuidedIntegratedGradients(), IDGI(), XRAI(), GradientSHAP(), ExpectedGradients(),
    LRP(), LRP("AttnLRP"), DeepLIFT(), DeepLIFTSHAP(),
    Smooth(), Smooth(statistic="square"), Smooth(statistic="variance"),
    Occlusion(), FeatureAblation(), RISE(), LIME(), KernelSHAP(), ShapleySampling(), PartitionSHAP(), Sobol(), HSIC(),
    FeaturePermutation(), DRISE(), ExtremalPerturbation(), ViTCX(), TIS(),
]  # fmt: skip
for _method in _METHODS:
    register(_method)
register_wrapper("smooth", Smooth)
register_wrapper("smoothsquare", partial(Smooth, statistic="square"))
register_wrapper("var", partial(Smooth, statistic="variance"))
register_wrapper("augmented", Augmented)
