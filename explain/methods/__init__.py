"""Methods: frozen dataclasses whose fields are the options and whose call is the mathematics.

    base             what a method is: metadata, defaults, papers to cite; methods by name,
                     ``@register``
    cam, score_cam   class activation maps: by gradients, by masked inputs; token masks
    patterns         principal components and statistics of feature maps
    gradients, path, path_variants
                     gradients in the pixels, and along paths from a baseline
    occlusion, surrogate, shapley, extremal
                     scores of perturbed images
    evidence         the smallest sets of regions that are enough for an answer, or that it needs
    regions, masking, estimates, coalitions
                     what these share: parts of images, images of which a part is covered, maps
                     from their scores, values of regions
    relevance, attention
                     relevance propagation, DeepLIFT and FullGrad; attention of transformers
    wrappers         any method averaged over noise, flips and scales
    certified        which places of a map no small change of the image can move

To add one, write a subclass of `Method` with ``@register`` above it. A module of its own has to be
imported here; there is no other list to edit.
"""

from explain.methods.attention import (
    AttentionRollout,
    CheferAttribution,
    CheferBimodal,
    GradientRollout,
    LeGrad,
)
from explain.methods.base import Citation, Method, list_methods, register
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
from explain.methods.certified import Certified
from explain.methods.evidence import Necessary, Sufficient
from explain.methods.extremal import ExtremalPerturbation
from explain.methods.gradients import (
    Deconvnet,
    GuidedBackprop,
    GuidedGradCAM,
    InputXGradient,
    Saliency,
)
from explain.methods.occlusion import DRISE, RISE, Occlusion
from explain.methods.path import (
    BlurIntegratedGradients,
    ExpectedGradients,
    GradientSHAP,
    IntegratedGradients,
)
from explain.methods.path_variants import IDGI, XRAI, GuidedIntegratedGradients
from explain.methods.patterns import FEM, KPCACAM, EigenCAM, EigenGradCAM, LaFAM
from explain.methods.regions import Quadtree, Squares, Superpixels, region_values
from explain.methods.relevance import LRP, DeepLIFT, DeepLIFTSHAP, FullGrad
from explain.methods.score_cam import ISCAM, SSCAM, TIS, AblationCAM, ScoreCAM, ViTCX
from explain.methods.shapley import FaithSHAP, KernelSHAP, PartitionSHAP, ShapleySampling
from explain.methods.surrogate import HSIC, LIME, FeatureAblation, FeaturePermutation, Sobol
from explain.methods.wrappers import Augmented, Smooth, SmoothGradCAMPlusPlus

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
    "Certified",
    "CheferAttribution",
    "CheferBimodal",
    "Citation",
    "Deconvnet",
    "DeepLIFT",
    "DeepLIFTSHAP",
    "EigenCAM",
    "EigenGradCAM",
    "ElementWiseCAM",
    "ExpectedGradients",
    "ExtremalPerturbation",
    "FaithSHAP",
    "FeatureAblation",
    "FeaturePermutation",
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
    "LaFAM",
    "LayerCAM",
    "LeGrad",
    "Method",
    "Necessary",
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
    "Squares",
    "Sufficient",
    "Superpixels",
    "ViTCX",
    "XGradCAM",
    "list_methods",
    "region_values",
    "register",
]
