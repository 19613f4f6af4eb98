"""Class activation maps: sums of feature maps, weighted by their gradients or by the weights of the
last layer.

Each method is a formula of `Evidence`: the feature maps A, ``evidence.activations``, and the
gradients G of the score in them, ``evidence.gradients``, both ``(N, C, h, w)``. Most of them are
sums of A with a weight for each channel (`weighted_maps`):

- `CAM`: the class's weights in the last layer
- `GradCAM`: the mean of G
- `GradCAMPlusPlus`: the sum of relu(G) / (2 + G sum(A))
- `XGradCAM`: sum(A G) / sum(A)
- `ShapleyCAM`: the mean of G - H A / 2, with the Hessian H
- `RandomCAM`: random numbers

The others work place by place, and add up over the channels:

- `HiResCAM`: A G
- `ElementWiseCAM`: relu(A G)
- `LayerCAM`: relu(G) A

`FinerCAM` and `RefineCAM` are made of other maps: those of what sets classes apart, and those of
several layers. Maps by masks are in `score_cam`, and patterns of A alone in `patterns`.

The engine gathers the evidence: `explain.engine.execution` takes the gradients of the score by
`torch.autograd.grad`, in the outputs of layers that `explain.hooks.capturing.Capture` records.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch

from explain._utils.errors import MethodError
from explain._utils.random_numbers import seeded, uniform
from explain._utils.rounding import all_cancel, rounding_error
from explain.engine import Activations, Evidence, LayerGradients, Need
from explain.engine.needs import ClassWeights, GradientsBy, LayerCurvature
from explain.methods.base import (
    MAPS,
    Method,
    Style,
    cam_map,
    over_all,
    ratio,
    register,
    spatial_dims,
)
from explain.targets.functions import Contrast, ResidualSoftmax

BOTH: frozenset[Need[Any]] = frozenset({Activations(), LayerGradients()})


def weighted_maps(weights: torch.Tensor, evidence: Evidence, *, relu: bool) -> torch.Tensor:
    """The sum over channels of feature maps with ``weights`` ``(N, C)``: a class activation map
    ``(N, h, w)``; its positive part with ``relu``. The higher of two precisions counts.
    """
    dtype = torch.promote_types(weights.dtype, evidence.activations.dtype)
    maps = evidence.activations.to(dtype)
    cam = torch.bmm(weights[:, None].to(dtype), maps.flatten(2)).reshape(
        maps.shape[:1] + maps.shape[2:]
    )
    return cam.clamp(min=0) if relu else cam


def unless_rounding(values: torch.Tensor, terms: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Set an image's ``values`` ``(N, ...)``, means of ``terms`` ``(N, ...)`` times ``count``, to
    zero where all are rounding errors: drawn, they would be as bright as any map.
    """
    means = values if count == 1 else values / count
    return values.masked_fill(over_all(all_cancel(means, terms), values), 0)


class ClassActivationMap(Method):
    """What class activation maps share: they need feature maps and gradients of one layer, and the
    map is signed where an option ``relu`` is False."""

    family = MAPS

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return BOTH

    @property
    def style(self) -> Style:
        return "heat" if getattr(self, "relu", True) else "signed"


@register
class CAM(ClassActivationMap):
    r"""Feature maps weighted by the class's weights in the last layer.

    Weigh each feature map by the weight that its mean has in the class's score: :math:`\sum_k w^c_k
    A^k`.

    For networks that end in an average over the maps and one linear layer, such as ResNet and
    DenseNet; where the maps are averaged into the scores directly (SqueezeNet), the map of the
    class is the answer.

    Returns:
        ``(N, h, w)``, signed as published; its mean plus the class's bias is the score.

    Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2, bias=False)
    ... )
    >>> a = explain.attribute(model, torch.rand(1, 3, 8, 8), CAM(), target=1, layer="0")
    >>> torch.allclose(a.values.mean(), a.score)
    True
    """

    style = "signed"
    only_for = "networks that average their last maps into one linear layer"
    needs = frozenset({Activations(), ClassWeights()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return weighted_maps(evidence[ClassWeights()], evidence, relu=False)


@register
class GradCAM(ClassActivationMap):
    r"""Feature maps weighted by their mean gradient.

    Weigh each feature map by the mean of its gradient, and keep where the sum supports the
    target.

    The map is :math:`\mathrm{ReLU}\bigl(\sum_k \alpha_k A^k\bigr)` with
    :math:`\alpha_k = \frac{1}{hw}\sum_{ij} G^k_{ij}`.

    Args:
        relu: keep the positive part, as published; False gives the signed map.
        gradients: "full_backward" takes them from a full-backward hook on the layer, in one more
            pass. It is refused where that hook sees other gradients than autograd.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the score.

    Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based
    Localization", ICCV 2017.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> explain.attribute(
    ...     model, torch.rand(2, 3, 8, 8), GradCAM(relu=False), target=1, layer="0"
    ... ).values.shape
    torch.Size([2, 6, 6])
    """

    relu: bool = True
    gradients: GradientsBy = "autograd"

    adds_up = True

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({Activations(), LayerGradients(gradients=self.gradients)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map ``(N, h, w)`` of Grad-CAM: each channel weighted by the mean of its gradient over
        places."""
        g = evidence[LayerGradients(gradients=self.gradients)]
        weights = unless_rounding(g.mean(spatial_dims(g)), g)
        return weighted_maps(weights, evidence, relu=self.relu)


@register
class GradCAMPlusPlus(ClassActivationMap):
    r"""Feature maps weighted by their positive gradients, pixel by pixel.

    Weigh each feature map by its positive gradients, each weighted by how much of the score it
    explains alone.

    :math:`w_k = \sum_{ij} \alpha^k_{ij}\,\mathrm{ReLU}(G^k_{ij})` with
    :math:`\alpha^k_{ij} = G^2 / \bigl(2 G^2 + \sum_{ab} A^k_{ab}\, G^3\bigr)`, which is
    :math:`1 / \bigl(2 + G \sum_{ab} A^k_{ab}\bigr)` and needs no epsilon, which would swamp small
    gradients. The paper takes the exponential of the score; it enters as one positive factor for
    each image, which is left out here.

    Args:
        relu: keep the positive part of the map, as published.

    Returns:
        ``(N, h, w)`` at the layer's resolution.

    Chattopadhay et al., "Grad-CAM++", WACV 2018 (arXiv:1710.11063), equations 10 and 19.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> _ = [torch.nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), GradCAMPlusPlus(), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """

    relu: bool = True

    name = "gradcam++"

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map ``(N, h, w)`` of Grad-CAM++: each channel weighted by its positive gradients,
        with coefficients from powers of the gradient."""
        g = evidence.gradients
        total = evidence.activations.sum(spatial_dims(evidence.activations), keepdim=True)
        weights = ratio(g.clamp(min=0), 2 + g * total).sum(spatial_dims(g))
        return weighted_maps(weights, evidence, relu=self.relu)


@register
class XGradCAM(ClassActivationMap):
    r"""Feature maps weighted by their gradient where they are active.

    Weigh each feature map by the mean of its gradient over where it is active.

    :math:`w_k = \sum_{ij} A^k_{ij} G^k_{ij} / \sum_{ij} A^k_{ij}`, and zero where the map adds up
    to zero but for rounding errors, as behind an instance normalisation.

    Args:
        relu: keep the positive part, as published.

    Returns:
        ``(N, h, w)`` at the layer's resolution. For a layer behind a ReLU; elsewhere a map may add
        up to almost nothing.

    Fu et al., "Axiom-based Grad-CAM", BMVC 2020 (arXiv:2008.02312).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> _ = [torch.nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), XGradCAM(), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """

    relu: bool = True

    adds_up = True

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map ``(N, h, w)`` of XGrad-CAM: each channel weighted by the sum of activation times
        gradient, over the sum of its activations; sums that are rounding errors count as zero."""
        a = evidence.activations
        places = spatial_dims(a)
        products = a * evidence.gradients
        cells = a[0, 0].numel()
        # the errors of rounding are known of means: sums are compared with so many times as much
        weighted_gradients = unless_rounding(products.sum(places), products, count=cells)
        totals = a.sum(places)
        totals = totals.masked_fill(totals.abs() <= cells * rounding_error(a, places), 0)
        return weighted_maps(ratio(weighted_gradients, totals), evidence, relu=self.relu)


@register
class HiResCAM(ClassActivationMap):
    r"""Feature maps times gradients, position by position.

    Multiply feature maps and gradients place by place, and add up: :math:`\sum_k G^k \odot A^k`.

    Where one linear layer follows, the map adds up to the score less its bias, so it shows exactly
    what was used.

    Args:
        relu: keep the positive part; the authors give the signed map.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the score.

    Draelos and Carin, "Use HiResCAM instead of Grad-CAM", 2020 (arXiv:2011.08891).

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2, bias=False)
    ... )
    >>> a = explain.attribute(model, torch.rand(1, 3, 4, 4), HiResCAM(), target=1, layer="1")
    >>> torch.allclose(a.values.sum(), a.score)
    True
    """

    relu: bool = False

    adds_up = True

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map ``(N, h, w)`` of HiResCAM: activation times gradient at each place, summed over
        channels."""
        cam = torch.einsum("nk...,nk...->n...", evidence.gradients, evidence.activations)
        products = evidence.gradients * evidence.activations
        cam = unless_rounding(cam, products, count=products.shape[1])
        return cam.clamp(min=0) if self.relu else cam


@register
class ElementWiseCAM(ClassActivationMap):
    r"""Positive products of feature maps and gradients.

    Add up the positive products of feature maps and gradients: :math:`\sum_k \mathrm{ReLU}(G^k
    \odot A^k)`.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the score, never negative.

    Gildenblat, pytorch-grad-cam, 2021; HiResCAM with the rectification before the sum.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> bool(
    ...     (
    ...         explain.attribute(model, torch.rand(1, 3, 8, 8), ElementWiseCAM(), layer="0").values
    ...         >= 0
    ...     ).all()
    ... )
    True
    """

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return (evidence.gradients * evidence.activations).clamp(min=0).sum(1)


@register
class LayerCAM(ClassActivationMap):
    r"""Feature maps times positive gradients, position by position.

    Weigh each place by its own positive gradient.

    The map is :math:`\mathrm{ReLU}\bigl(\sum_k \mathrm{ReLU}(G^k) \odot A^k\bigr)`.

    Sharp at early layers too, where gradients differ from place to place.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the score.

    Jiang et al., "LayerCAM: Exploring Hierarchical Class Activation Maps for Localization", IEEE
    TIP 2021.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> _ = [torch.nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), LayerCAM(), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return (evidence.gradients.clamp(min=0) * evidence.activations).sum(1).clamp(min=0)


@register
class ShapleyCAM(ClassActivationMap):
    r"""Grad-CAM with the curvature of the score.

    Grad-CAM to second order: weights :math:`\frac{1}{hw}\sum_{ij}\bigl(G - \tfrac12 H
    A\bigr)^k_{ij}`.

    H is the Hessian in the feature maps; only its product with them is computed. The objective is
    :math:`y + \log\mathrm{softmax}(y)`, without whose curvature a network of ReLUs would give
    Grad-CAM again.

    Args:
        residual_softmax: differentiate that objective, as published; False takes the score itself.

    Returns:
        ``(N, h, w)``, its positive part.

    Cai, "CAMs as Shapley Value-based Explainers", 2025 (arXiv:2501.06261).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> _ = [torch.nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), ShapleyCAM(), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """

    residual_softmax: bool = True

    only_for = "networks with second derivatives"
    adds_up = True

    @property
    def objective(self) -> ResidualSoftmax | None:
        """What of the score is differentiated; None is the score itself."""
        return ResidualSoftmax() if self.residual_softmax else None

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        gradients = LayerGradients(self.objective)
        return frozenset({Activations(), gradients, LayerCurvature(self.objective)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map ``(N, h, w)`` of ShapleyCAM: each channel weighted by the mean of its gradient
        less half the Hessian times the maps."""
        curvature = evidence[LayerCurvature(self.objective)]
        slope = evidence[LayerGradients(self.objective)] - 0.5 * curvature
        weights = unless_rounding(slope.mean(spatial_dims(slope)), slope)
        return weighted_maps(weights, evidence, relu=True)


@register
class RandomCAM(ClassActivationMap):
    """Feature maps with random weights: the null hypothesis.

    Weigh the feature maps at random, between -1 and 1: what every method has to be better than.

    Args:
        seed: of the weights; every image gets the same ones.
        relu: keep the positive part, as all CAMs do.

    Returns:
        ``(N, h, w)`` at the layer's resolution.

    Gildenblat, pytorch-grad-cam, 2021.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), RandomCAM(), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """

    seed: int = 0
    relu: bool = True

    control = "random weights"
    needs = frozenset({Activations()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map ``(N, h, w)`` with random channel weights between -1 and 1, the same for all
        images: a control that knows nothing of the class."""
        a = evidence.activations
        weights = uniform((a.shape[1],), seeded(self.seed)) * 2 - 1
        return weighted_maps(weights.to(a).expand(len(a), -1), evidence, relu=self.relu)


@register
class FinerCAM(ClassActivationMap):
    r"""Grad-CAM of the target against similar classes.

    Any CAM of what sets the target apart from the classes that score most like it.

    Args:
        cam: the CAM to compute; a method that needs activations and gradients.
        objective: ``mean`` explains :math:`y_c - \alpha\,\frac1T\sum_t y_{d_t}`; ``weighted``
            averages
            :math:`y_c - \alpha\,y_{d_t}` with the probabilities of the classes :math:`d_t`.
        alpha: how much of the others is taken away.
        references: the number T of classes compared with.

    Returns:
        What ``cam`` returns.

    Zhang et al., "Finer-CAM: Spotting the Difference Reveals Finer Details for Visual Explanation",
    CVPR 2025.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), FinerCAM(), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """

    cam: Method = GradCAM()
    objective: Literal["mean", "weighted"] = "mean"
    alpha: float = 0.6
    references: int = 3

    minimums = {"references": 1}

    def __post_init__(self) -> None:
        """Refuse a ``cam`` that does not read the gradients of the layer, which the contrast with
        similar classes is put into."""
        super().__post_init__()
        if LayerGradients() not in self.cam.needs:
            raise MethodError(
                f"cam of {self.name} must be one of gradients, such as gradcam, got {self.cam.name}"
            )

    @property
    def style(self) -> Style:
        return self.cam.style

    @property
    def adds_up(self) -> bool:  # type: ignore[override]  # as of its cam
        return self.cam.adds_up

    @property
    def contrast(self) -> LayerGradients:
        return LayerGradients(Contrast(self.objective, self.alpha, self.references))

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return self.cam.needs - {LayerGradients()} | {self.contrast}

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        answers = {**evidence.answers, LayerGradients(): evidence[self.contrast]}
        return self.cam(replace(evidence, answers=answers))


@register
class RefineCAM(ClassActivationMap):
    """Product of the maps of all stages.

    Multiply the maps of one layer of each resolution: fine where all of them agree.

    Each map is divided by its maximum and enlarged to the finest (the authors subtract the minimum
    first). Where no layers are named, the last of each of the four coarsest resolutions are taken.

    Args:
        cam: the CAM of each layer.

    Returns:
        ``(N, h, w)`` at the finest layer's resolution, between 0 and 1.

    Domeniconi et al., "How to Evaluate and Refine your CAM", 2026 (arXiv:2605.14641).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 4, 2), torch.nn.Flatten(2)
    ... )
    >>> _ = [torch.nn.init.uniform_(weight) for weight in model.parameters()]
    >>> target = lambda output: output.sum((1, 2))
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 9, 9), RefineCAM(), target=target, layer=["0", "1"]
    ... ).values.shape
    torch.Size([1, 7, 7])
    """

    cam: Method = GradCAMPlusPlus()

    fusion = "product"

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return self.cam.needs

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return cam_map(self.name, self.cam, evidence)
