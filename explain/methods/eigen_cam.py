"""Maps from the statistics of the feature maps themselves: principal components, and what stands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from explain.engine import Activations, Evidence
from explain.methods.base import PATTERNS, Method, spatial_dims
from explain.methods.bibliography import cited
from explain.methods.cam import BOTH
from explain.methods.registry import register


@register
@dataclass(frozen=True)
class EigenCAM(Method):
    r"""Project the feature maps onto their first principal direction: :math:`A\,v_1` of :math:`A = U \Sigma V^T`.

    A is the layer's output with a row for each place, not centred, as published. The sign, which a decomposition leaves
    open, is chosen such that the map agrees with the sum of the feature maps. No class is asked for.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Muhammad and Yeasin, "Eigen-CAM", IJCNN 2020 (arXiv:2008.00299).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), EigenCAM(), layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    name = "eigencam"
    about = "first principal component of the feature maps"
    source = cited("muhammad2020eigencam")
    family = PATTERNS
    needs = frozenset({Activations()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return first_component(evidence.activations)


@register
@dataclass(frozen=True)
class EigenGradCAM(Method):
    """The first principal component of the products of feature maps and gradients: Eigen-CAM that knows the class.

    The sign is chosen such that the map agrees with HiResCAM, the sum of these products.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the score.

    Gildenblat, pytorch-grad-cam, 2021.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), EigenGradCAM(), layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    name = "eigengradcam"
    about = "first principal component of feature maps times gradients"
    source = cited("gildenblat2021pytorchgradcam")
    family = PATTERNS
    needs = BOTH

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return first_component(evidence.activations * evidence.gradients)


def first_component(maps: torch.Tensor) -> torch.Tensor:
    """Project maps ``(N, C, h, w)`` onto their first right-singular direction over places: ``(N, h, w)``."""
    rows = maps.flatten(2).transpose(1, 2).double()  # (N, places, C)
    if rows.shape[1] <= rows.shape[2]:
        values, vectors = eigenvectors(rows @ rows.transpose(1, 2))
        projected = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
    else:
        _, vectors = eigenvectors(rows.transpose(1, 2) @ rows)
        projected = (rows @ vectors[..., -1:])[..., 0]
    agrees = (projected * rows.sum(2)).sum(1, keepdim=True)
    projected = torch.where(agrees < 0, -projected, projected)
    return projected.reshape(len(maps), *maps.shape[2:]).to(maps.dtype)


def eigenvectors(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices ``(N, D, D)``; NaN for one that is not finite.

    LAPACK would say of it that it does not converge; as NaN, it is traced to the layer that it comes from.
    """
    finite = torch.isfinite(matrices).all(2).all(1)
    values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], matrices, 0))
    nan = float("nan")
    return values.masked_fill(~finite[:, None], nan), vectors.masked_fill(~finite[:, None, None], nan)


@register
@dataclass(frozen=True)
class KPCACAM(Method):
    r"""The first component of the feature maps by kernel PCA: Eigen-CAM that follows curved structure.

    Places are the samples, channels (centred over places) the features; K is the centred matrix of a kernel, and the
    map is :math:`\sqrt{\lambda_1}\,a_1` of its largest eigenvalue, its entry of largest magnitude taken as positive.

    Args:
        kernel: ``sigmoid`` :math:`\tanh(\gamma\langle x, y\rangle + 1)`, ``rbf`` :math:`\exp(-\gamma|x-y|^2)`, ``poly``
            :math:`(\gamma\langle x, y\rangle + 1)^3`, ``cosine`` or ``linear``.
        gamma: the scale: a number, or ``scale`` for one over the number of channels and the variance of the centred
            activations of the image, so that their units make no difference, or None for one over the number of
            channels alone, as pytorch-grad-cam has it.

    Returns:
        ``(N, h, w)`` at the layer's resolution.

    Karmani et al., "KPCA-CAM: Visual Explainability of Deep Computer Vision Models using Kernel PCA", 2024
    (arXiv:2410.00267).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), KPCACAM(), layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    kernel: Literal["sigmoid", "rbf", "poly", "cosine", "linear"] = "sigmoid"
    gamma: float | Literal["scale"] | None = "scale"

    name = "kpcacam"
    about = "first component of the feature maps by kernel PCA"
    source = cited("karmani2024kpcacam")
    family = PATTERNS
    minimums: ClassVar[Mapping[str, float]] = {"gamma": 0}
    needs = frozenset({Activations()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        maps = evidence.activations
        rows = maps.flatten(2).transpose(1, 2).double()
        kernel = self._kernel(rows - rows.mean(1, keepdim=True))
        mean = kernel.mean(1, keepdim=True)
        centred = kernel - mean - mean.transpose(1, 2) + kernel.mean((1, 2), keepdim=True)
        values, vectors = eigenvectors(centred)
        component = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
        largest = component.gather(1, component.abs().argmax(1, keepdim=True))
        component = torch.where(largest < 0, -component, component)
        return component.reshape(len(maps), *maps.shape[2:]).to(maps.dtype)

    def _kernel(self, rows: torch.Tensor) -> torch.Tensor:
        gamma: Any = 1 / rows.shape[2] if not isinstance(self.gamma, float) else self.gamma
        if self.gamma == "scale":
            variance = rows.square().mean((1, 2), keepdim=True)
            gamma = gamma / torch.where(variance == 0, 1, variance)
        products = rows @ rows.transpose(1, 2)
        squares = products.diagonal(dim1=1, dim2=2)
        if self.kernel == "rbf":
            return torch.exp(-gamma * (squares[:, :, None] + squares[:, None] - 2 * products).clamp(min=0))
        if self.kernel == "cosine":
            lengths = squares.sqrt()
            return products / (lengths[:, :, None] * lengths[:, None]).clamp(min=torch.finfo(products.dtype).tiny)
        if self.kernel == "sigmoid":
            return torch.tanh(gamma * products + 1)
        return (gamma * products + 1) ** 3 if self.kernel == "poly" else products


@register
@dataclass(frozen=True)
class FEM(Method):
    r"""Count where feature maps stand out: :math:`\sum_k \mu_k\,[A^k > \mu_k + k\sigma_k]`.

    :math:`\mu_k` and :math:`\sigma_k` are the mean and the standard deviation of a map over its places. No class is
    asked for.

    Args:
        k: how many standard deviations make an activation rare.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Fuad et al., "Features Understanding in 3D CNNs for Actions Recognition in Video" (FEM), IPTA 2020.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), FEM(k=1), layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    k: float = 2.0

    name = "fem"
    about = "positions where feature maps are unusually strong"
    source = cited("fuad2020fem")
    family = PATTERNS
    minimums: ClassVar[Mapping[str, float]] = {"k": 0}
    needs = frozenset({Activations()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        a = evidence.activations
        mean = a.mean(spatial_dims(a), keepdim=True)
        rare = a > mean + self.k * a.std(spatial_dims(a), keepdim=True, correction=0)
        dims = spatial_dims(a)
        rare &= a.amax(dims, keepdim=True) > a.amin(dims, keepdim=True)  # its mean may be off by a rounding
        return (mean * rare).sum(1)
