"""Methods: frozen dataclasses whose fields are the options and whose call is the mathematics.

    base             what a method is: metadata, defaults, checked options
    registry         names, families and wrappers; ``@register``
    options          each option checked against the type of its field
    bibliography     the papers to cite
    cam, eigen_cam, score_cam
                     class activation maps: by gradients, by principal components, by masked inputs
    gradients, path, expected_gradients, blur_path, guided_path, xrai
                     gradients in the pixels, and along paths from a baseline
    occlusion, surrogate, shapley, partition_shap, sensitivity, extremal, token_masks
                     scores of perturbed photos
    masks, regions, coalitions, estimates, clustering
                     what these share
    relevance, fullgrad, attention
                     relevance propagation, bias terms, attention of transformers
    wrappers         any method averaged over noise, flips and scales

To add one, write a subclass of `Method` with ``@register`` above it; there is no list to edit.
"""

from __future__ import annotations

from explain.methods.attention import AttentionRollout, CheferAttribution, CheferBimodal, GradientRollout, LeGrad
from explain.methods.base import Method
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
from explain.methods.eigen_cam import FEM, KPCACAM, EigenCAM, EigenGradCAM
from explain.methods.expected_gradients import ExpectedGradients, GradientSHAP
from explain.methods.extremal import ExtremalPerturbation
from explain.methods.fullgrad import FullGrad
from explain.methods.gradients import Deconvnet, GuidedBackprop, GuidedGradCAM, InputXGradient, Saliency
from explain.methods.guided_path import IDGI, GuidedIntegratedGradients
from explain.methods.occlusion import DRISE, RISE, Occlusion
from explain.methods.partition_shap import PartitionSHAP
from explain.methods.path import IntegratedGradients
from explain.methods.regions import Felzenszwalb, Quadtree, Squares, Superpixels, region_values
from explain.methods.registry import list_methods, register
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
    "CheferAttribution",
    "CheferBimodal",
    "Deconvnet",
    "DeepLIFT",
    "DeepLIFTSHAP",
    "EigenCAM",
    "EigenGradCAM",
    "ElementWiseCAM",
    "ExpectedGradients",
    "ExtremalPerturbation",
    "FeatureAblation",
    "FeaturePermutation",
    "Felzenszwalb",
    "FinerCAM",
    "FullGrad",
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
    "Method",
    "Occlusion",
    "PartitionSHAP",
    "Quadtree",
    "RandomCAM",
    "RefineCAM",
    "Saliency",
    "ScoreCAM",
    "ShapleyCAM",
    "ShapleySampling",
    "Smooth",
    "SmoothGradCAMPlusPlus",
    "Sobol",
    "Source",
    "Squares",
    "Superpixels",
    "ViTCX",
    "XGradCAM",
    "list_methods",
    "region_values",
    "register",
]
