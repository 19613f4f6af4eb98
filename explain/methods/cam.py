"""Class activation maps: sums of feature maps, weighted by their gradients or by the weights of the
last layer, and statistics of feature maps: principal components and unusual activations.

Each method is a formula of `Evidence`: ``evidence.activations`` and ``evidence.gradients`` ``(N, C,
h, w)``. The engine gathers them: `explain.engine.execution` takes the gradients of the score by
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
    PATTERNS,
    Method,
    Style,
    cam_map,
    over_all,
    register,
    spatial_dims,
)
from explain.targets.functions import Contrast, ResidualSoftmax

BOTH: frozenset[Need[Any]] = frozenset({Activations(), LayerGradients()})


def weighted_maps(weights: torch.Tensor, evidence: Evidence, *, relu: bool) -> torch.Tensor:
    """The sum of the feature maps with weights ``(N, C)``, and of it the positive part if
    ``relu``."""
    maps = evidence.activations
    cam = torch.bmm(weights[:, None], maps.flatten(2)).reshape(len(maps), *maps.shape[2:])
    return cam.clamp(min=0) if relu else cam


def ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """A quotient that is zero where the denominator is; no epsilon, which would swamp small
    gradients."""
    return torch.where(
        below == 0, torch.zeros_like(above), above / torch.where(below == 0, 1, below)
    )


def unless_rounding(values: torch.Tensor, terms: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Means ``(N, ...)`` of terms ``(N, ...)``, or ``count`` times as much; zero for an image where
    all are rounding errors. Else a map of rounding errors would be as bright as any other.
    """
    means = values if count == 1 else values / count
    return values.masked_fill(over_all(all_cancel(means, terms), values), 0)


class ClassActivationMap(Method):
    """What class activation maps share: feature maps and gradients of one layer, and a signed map
    without ``relu``."""

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

    Weigh each feature map by the mean of its gradient, and keep where the sum speaks for the
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
        g = evidence[LayerGradients(gradients=self.gradients)]
        return weighted_maps(unless_rounding(g.mean(spatial_dims(g)), g), evidence, relu=self.relu)


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
        a = evidence.activations
        places = spatial_dims(a)
        products = a * evidence.gradients
        count = a[0, 0].numel()
        gradients = unless_rounding(products.sum(places), products, count)
        totals = a.sum(places)
        totals = totals.masked_fill(totals.abs() <= count * rounding_error(a, places), 0)
        return weighted_maps(ratio(gradients, totals), evidence, relu=self.relu)


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
        cam = torch.einsum("nk...,nk...->n...", evidence.gradients, evidence.activations)
        products = evidence.gradients * evidence.activations
        cam = unless_rounding(cam, products, products.shape[1])
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

    only_for = "networks with second derivatives (no fused attention behind the layer)"
    adds_up = True

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        objective = ResidualSoftmax() if self.residual_softmax else None
        return frozenset({Activations(), LayerGradients(objective), LayerCurvature(objective)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        objective = ResidualSoftmax() if self.residual_softmax else None
        slope = evidence[LayerGradients(objective)] - 0.5 * evidence[LayerCurvature(objective)]
        return weighted_maps(
            unless_rounding(slope.mean(spatial_dims(slope)), slope), evidence, relu=True
        )


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
        images, channels = evidence.activations.shape[:2]
        weights = uniform((channels,), seeded(self.seed)) * 2 - 1
        return weighted_maps(
            weights.to(evidence.activations).expand(images, -1), evidence, relu=self.relu
        )


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
        return self.cam(
            replace(
                evidence, answers={**evidence.answers, LayerGradients(): evidence[self.contrast]}
            )
        )


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


class FeatureMapPattern(Method):
    """A method that looks for a pattern of the feature maps, without gradients if it does not say
    otherwise."""

    family = PATTERNS
    needs = frozenset({Activations()})


@register
class EigenCAM(FeatureMapPattern):
    r"""First principal component of the feature maps.

    Project the feature maps onto their first principal direction: :math:`A\,v_1` of :math:`A = U
    \Sigma V^T`.

    A is the layer's output with a row for each place, not centred, as published. The sign, which a
    decomposition leaves open, is chosen such that the map agrees with the sum of the feature maps.
    No class is asked for.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Muhammad and Yeasin, "Eigen-CAM", IJCNN 2020 (arXiv:2008.00299).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), EigenCAM(), layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return first_component(evidence.activations)


@register
class EigenGradCAM(FeatureMapPattern):
    """First principal component of feature maps times gradients.

    The first principal component of the products of feature maps and gradients: Eigen-CAM that
    knows the class.

    The sign is chosen such that the map agrees with HiResCAM, the sum of these products.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the score.

    Gildenblat, pytorch-grad-cam, 2021.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), EigenGradCAM(), layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    needs = BOTH

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return first_component(evidence.activations * evidence.gradients)


def first_component(maps: torch.Tensor) -> torch.Tensor:
    """Project maps ``(N, C, h, w)`` onto their first right-singular direction over places: ``(N, h,
    w)``."""
    rows = maps.flatten(2).transpose(1, 2).double()  # (N, places, C)
    if rows.shape[1] <= rows.shape[2]:
        values, vectors = eigenvectors(rows @ rows.transpose(1, 2))
        projected = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
    else:
        _, vectors = eigenvectors(rows.transpose(1, 2) @ rows)
        projected = (rows @ vectors[..., -1:])[..., 0]
    projected = torch.where(
        (projected * rows.sum(2)).sum(1, keepdim=True) < 0, -projected, projected
    )
    return projected.reshape((len(maps), *maps.shape[2:])).to(maps.dtype)


def eigenvectors(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices ``(N, D, D)``; NaN for one that is not
    finite.

    LAPACK would say of it that it does not converge; as NaN, it is traced to the layer that it
    comes from.
    """
    finite = torch.isfinite(matrices).all(2).all(1)
    values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], matrices, 0))
    nan = float("nan")
    return values.masked_fill(~finite[:, None], nan), vectors.masked_fill(
        ~finite[:, None, None], nan
    )


@register
class KPCACAM(FeatureMapPattern):
    r"""First component of the feature maps by kernel PCA.

    The first component of the feature maps by kernel PCA: Eigen-CAM that follows curved structure.

    Places are the samples, channels (centred over places) the features; K is the centred matrix of
    a kernel, and the map is :math:`\sqrt{\lambda_1}\,a_1` of its largest eigenvalue, its entry of
    largest magnitude taken as positive.

    Args:
        kernel: ``sigmoid`` :math:`\tanh(\gamma\langle x, y\rangle + 1)`, ``rbf``
            :math:`\exp(-\gamma|x-y|^2)`, ``poly``
            :math:`(\gamma\langle x, y\rangle + 1)^3`, ``cosine`` or ``linear``.
        gamma: the scale: a number, or ``scale`` for one over the number of channels and the
            variance of the centred activations of the image, so that their units make no
            difference, or None for one over the number of channels alone, as pytorch-grad-cam has
            it.

    Returns:
        ``(N, h, w)`` at the layer's resolution.

    Karmani et al., "KPCA-CAM: Visual Explainability of Deep Computer Vision Models using Kernel
    PCA", 2024 (arXiv:2410.00267).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), KPCACAM(), layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    kernel: Literal["sigmoid", "rbf", "poly", "cosine", "linear"] = "sigmoid"
    gamma: float | Literal["scale"] | None = "scale"

    minimums = {"gamma": 0}

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        maps = evidence.activations
        rows = maps.flatten(2).transpose(1, 2).double()
        kernel = self._kernel(rows - rows.mean(1, keepdim=True))
        mean = kernel.mean(1, keepdim=True)
        values, vectors = eigenvectors(
            kernel - mean - mean.transpose(1, 2) + kernel.mean((1, 2), keepdim=True)
        )
        component = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
        largest = component.gather(1, component.abs().argmax(1, keepdim=True))
        component = torch.where(largest < 0, -component, component)
        return component.reshape((len(maps), *maps.shape[2:])).to(maps.dtype)

    def _kernel(self, rows: torch.Tensor) -> torch.Tensor:
        gamma: Any = 1 / rows.shape[2] if not isinstance(self.gamma, float) else self.gamma
        if self.gamma == "scale":
            variance = rows.square().mean((1, 2), keepdim=True)
            gamma = gamma / torch.where(variance == 0, 1, variance)
        products = rows @ rows.transpose(1, 2)
        squares = products.diagonal(dim1=1, dim2=2)
        if self.kernel == "rbf":
            return torch.exp(
                -gamma * (squares[:, :, None] + squares[:, None] - 2 * products).clamp(min=0)
            )
        if self.kernel == "cosine":
            lengths = squares.sqrt()
            return products / (lengths[:, :, None] * lengths[:, None]).clamp(
                min=torch.finfo(products.dtype).tiny
            )
        if self.kernel == "sigmoid":
            return torch.tanh(gamma * products + 1)
        return (gamma * products + 1) ** 3 if self.kernel == "poly" else products


@register
class FEM(FeatureMapPattern):
    r"""Positions where feature maps are unusually strong.

    Count where feature maps stand out: :math:`\sum_k \mu_k\,[A^k > \mu_k + k\sigma_k]`.

    :math:`\mu_k` and :math:`\sigma_k` are the mean and the standard deviation of a map over its
    places. No class is asked for.

    Args:
        k: how many standard deviations make an activation rare.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Fuad et al., "Features Understanding in 3D CNNs for Actions Recognition in Video" (FEM), IPTA
    2020.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), FEM(k=1), layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    k: float = 2.0

    minimums = {"k": 0}

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        a = evidence.activations
        dims = spatial_dims(a)
        mean = a.mean(dims, keepdim=True)
        rare = a > mean + self.k * a.std(dims, keepdim=True, correction=0)
        # its mean may be off by a rounding
        rare &= a.amax(dims, keepdim=True) > a.amin(dims, keepdim=True)
        return (mean * rare).sum(1)
