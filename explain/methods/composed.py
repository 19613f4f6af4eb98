"""CAMs made of another: of what sets the target apart, and over layers of several resolutions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from explain.engine import Evidence, LayerGradients, Need
from explain.errors import MethodError
from explain.methods import sources
from explain.methods.base import Fusion, Method, Style, map_of
from explain.methods.cam import GradCAM, GradCAMPlusPlus
from explain.methods.checks import check_options
from explain.methods.sources import Source
from explain.targets import Contrast


@dataclass(frozen=True)
class FinerCAM:
    r"""Any CAM of what sets the target apart from the classes that score most like it.

    Args:
        cam: the CAM to compute; a method that needs activations and gradients.
        objective: ``mean`` explains :math:`y_c - \alpha\,\frac1T\sum_t y_{d_t}`; ``weighted`` averages
            :math:`y_c - \alpha\,y_{d_t}` with the probabilities of the classes :math:`d_t`.
        alpha: how much of the others is taken away.
        references: the number T of classes compared with.

    Returns:
        What ``cam`` returns.

    Zhang et al., "Finer-CAM: Spotting the Difference Reveals Finer Details for Visual Explanation", CVPR 2025.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> explain.attribute(model, torch.rand(1, 3, 8, 8), FinerCAM(), target=1, layer="0").values.shape
    torch.Size([1, 6, 6])
    """

    cam: Method = field(default_factory=GradCAM)
    objective: Literal["mean", "weighted"] = "mean"
    alpha: float = 0.6
    references: int = 3

    name: ClassVar[str] = "finercam"
    about: ClassVar[str] = "Grad-CAM of the target against similar classes"
    paper: ClassVar[str] = "Zhang et al., CVPR 2025"
    source: ClassVar[Source] = sources.FINERCAM

    def __post_init__(self) -> None:
        check_options(self, references=1)
        if LayerGradients() not in self.cam.needs:
            raise MethodError(f"cam of {self.name} must be one of gradients, such as gradcam, got {self.cam.name}")

    @property
    def style(self) -> Style:
        return self.cam.style

    @property
    def contrast(self) -> LayerGradients:
        return LayerGradients(Contrast(self.objective, self.alpha, self.references))

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return self.cam.needs - {LayerGradients()} | {self.contrast}

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        found = {**evidence.found, LayerGradients(): evidence[self.contrast]}
        return self.cam(replace(evidence, found=found))


@dataclass(frozen=True)
class RefineCAM:
    """Multiply the maps of one layer of each resolution: fine where all of them agree.

    Each map is divided by its maximum and enlarged to the finest (the authors subtract the minimum first). Where no
    layers are named, the last of each of the four coarsest resolutions are taken.

    Args:
        cam: the CAM of each layer.

    Returns:
        ``(N, h, w)`` at the finest layer's resolution, between 0 and 1.

    Domeniconi et al., "How to Evaluate and Refine your CAM", 2026 (arXiv:2605.14641).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 4, 2), torch.nn.Flatten(2))
    >>> target = lambda output: output.sum((1, 2))
    >>> explain.attribute(model, torch.rand(1, 3, 9, 9), RefineCAM(), target=target, layer=["0", "1"]).values.shape
    torch.Size([1, 7, 7])
    """

    cam: Method = field(default_factory=GradCAMPlusPlus)

    name: ClassVar[str] = "refinecam"
    about: ClassVar[str] = "product of the maps of all stages"
    paper: ClassVar[str] = "Domeniconi et al., 2026"
    source: ClassVar[Source] = sources.REFINECAM
    style: ClassVar[Style] = "heat"
    fusion: ClassVar[Fusion] = "product"

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return self.cam.needs

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return map_of(self.name, self.cam, evidence)
