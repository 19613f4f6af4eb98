"""Patterns of a layer's feature maps, by linear algebra and statistics: principal components, and
unusually strong activations.

- `EigenCAM`: the first principal component of A
- `EigenGradCAM`: the first principal component of A times G
- `KPCACAM`: the first component of A by kernel PCA
- `FEM`: the sum over channels of their means, where A stands out
- `LaFAM`: the mean over channels of the magnitudes of A

A are the feature maps, and G their gradients, ``(N, C, h, w)``; each gives a map ``(N, h, w)``. But
for `EigenGradCAM`, no class is asked for.
"""

import math
from typing import Any, Literal

import torch

from explain.engine import Activations, Evidence, LayerGradients
from explain.methods.base import PATTERNS, Method, register, spatial_dims


class FeatureMapPattern(Method):
    """A method that looks for a pattern of the feature maps."""

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

    needs = frozenset({Activations(), LayerGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return first_component(evidence.activations * evidence.gradients)


def first_component(maps: torch.Tensor) -> torch.Tensor:
    """Project the channels of feature maps ``(N, C, h, w)`` onto their first right-singular
    direction, with the sign of the sum over channels: ``(N, h, w)``.
    """
    rows = maps.flatten(2).transpose(1, 2).double()  # (N, places, C)
    places, channels = rows.shape[1:]
    # the smaller one of the two matrices of products, whose eigenvalues are the same
    if places <= channels:
        projected = leading_component(rows @ rows.transpose(1, 2))
    else:
        _, direction = largest_eigenvector(rows.transpose(1, 2) @ rows)
        projected = (rows @ direction[..., None])[..., 0]
    disagrees = (projected * rows.sum(2)).sum(1, keepdim=True) < 0
    projected = torch.where(disagrees, -projected, projected)
    return projected.reshape(maps.shape[:1] + maps.shape[2:]).to(maps.dtype)


def leading_component(matrices: torch.Tensor) -> torch.Tensor:
    """The eigenvector of the largest eigenvalue, times the square root of that: ``(N, D)``, of
    positive semidefinite matrices ``(N, D, D)``."""
    value, vector = largest_eigenvector(matrices)
    return vector * value.clamp(min=0).sqrt()


def largest_eigenvector(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest eigenvalue ``(N, 1)`` and eigenvector of symmetric matrices ``(N, D, D)``; NaN,
    which is traced to its layer, for one that is not finite, on which LAPACK fails.
    """
    finite = torch.isfinite(matrices).all(2).all(1)[:, None]
    values, vectors = torch.linalg.eigh(torch.where(finite[..., None], matrices, 0))
    value = values[:, -1:].masked_fill(~finite, math.nan)
    return value, vectors[..., -1].masked_fill(~finite, math.nan)


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
        """The map of `KPCACAM` ``(N, h, w)``: the first component of kernel PCA over the places of
        the feature maps, with its largest magnitude positive."""
        maps = evidence.activations
        rows = maps.flatten(2).transpose(1, 2).double()
        kernel = self._kernel(rows - rows.mean(1, keepdim=True))
        # of features that the kernel stands for, which are centred over places too
        mean = kernel.mean(1, keepdim=True)
        centred = kernel - mean - mean.transpose(1, 2) + kernel.mean((1, 2), keepdim=True)
        component = leading_component(centred)
        largest = component.gather(1, component.abs().argmax(1, keepdim=True))
        component = torch.where(largest < 0, -component, component)
        return component.reshape(maps.shape[:1] + maps.shape[2:]).to(maps.dtype)

    def _kernel(self, rows: torch.Tensor) -> torch.Tensor:
        """The kernel ``(N, places, places)`` of centred feature maps ``(N, places, C)``."""
        channels = rows.shape[2]
        # a number that was given, or one over the channels, which "scale" divides by the variance
        gamma: Any = self.gamma if isinstance(self.gamma, float) else 1 / channels
        if self.gamma == "scale":
            variance = rows.square().mean((1, 2), keepdim=True)
            gamma = gamma / torch.where(variance == 0, 1, variance)
        if self.kernel == "rbf":
            return torch.exp(-gamma * torch.cdist(rows, rows).square())
        products = rows @ rows.transpose(1, 2)
        if self.kernel == "cosine":
            lengths = products.diagonal(dim1=1, dim2=2).sqrt()
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
        """The map of `FEM` ``(N, h, w)``: the sum over channels of a map's mean, at the places
        where the map is more than ``k`` standard deviations above that mean."""
        a = evidence.activations
        dims = spatial_dims(a)
        mean = a.mean(dims, keepdim=True)
        rare = a > mean + self.k * a.std(dims, keepdim=True, correction=0)
        # a constant map has no rare value, though its mean may be off by a rounding error
        rare &= a.amax(dims, keepdim=True) > a.amin(dims, keepdim=True)
        return (mean * rare).sum(1)


@register
class LaFAM(FeatureMapPattern):
    r"""Mean magnitude of the feature maps.

    Average the magnitudes of the feature maps over the channels: :math:`\frac{1}{C}\sum_k |A^k|`.

    No class is asked for. The paper averages A itself, which is the same behind a ReLU. Times C, it
    is the activation-based attention map of Zagoruyko and Komodakis, "Paying More Attention to
    Attention", ICLR 2017.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations, never negative.

    Karjauv and Albayrak, "LaFAM: Unsupervised Feature Attribution with Label-free Activation Maps",
    2024 (arXiv:2407.06059).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), LaFAM(), layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence.activations.abs().mean(1)
