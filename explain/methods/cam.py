"""The CAM family: a weighted sum of a layer's feature maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from explain.engine import Activations, Evidence, LayerGradients, Need
from explain.methods.base import Style


@dataclass(frozen=True)
class GradCAM:
    r"""Weigh each feature map by the mean of its gradient, and keep where the sum speaks for the target.

    With activations :math:`A^k` and the score :math:`y`, the map is
    :math:`\mathrm{ReLU}\bigl(\sum_k \alpha_k A^k\bigr)` with
    :math:`\alpha_k = \frac{1}{hw}\sum_{ij}\partial y/\partial A^k_{ij}`.

    Args:
        relu: keep the positive part, as published; False gives the signed map.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the score.

    Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", ICCV 2017.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(2, 3, 8, 8), GradCAM(relu=False), target=1, layer="0").values.shape
    torch.Size([2, 6, 6])
    """

    relu: bool = True

    name: ClassVar[str] = "gradcam"
    about: ClassVar[str] = "feature maps weighted by their mean gradient"
    paper: ClassVar[str] = "Selvaraju et al., ICCV 2017"
    style: ClassVar[Style] = "heat"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Activations(), LayerGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        weights = evidence.gradients.mean(dim=(2, 3))
        cam = torch.einsum("nk,nkhw->nhw", weights, evidence.activations)
        return cam.clamp(min=0) if self.relu else cam
