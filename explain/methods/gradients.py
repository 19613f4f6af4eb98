"""The back-propagation family: gradients of the score in the pixels, plain or with another rule for
rectifiers."""

from functools import cached_property
from typing import Any, ClassVar

import torch

from explain.engine import Evidence, InputGradients, Need
from explain.engine.needs import GradientsBy, RuleCoverage
from explain.methods.base import GRADIENTS, Method, cam_map, register
from explain.methods.cam import GradCAM
from explain.relevance.gradient_rules import DeconvnetRule, GradientRule, GuidedRule


class GradientMethod(Method):
    """A method that is made of gradients in the pixels."""

    family = GRADIENTS


@register
class Saliency(GradientMethod):
    r"""Magnitude of the gradient in each pixel.

    Show how much each pixel would change the score: :math:`|\partial y/\partial x|`.

    Args:
        absolute: give magnitudes, as published; False keeps the sign of the gradient.
        gradients: "full_backward" takes the ``grad_input`` of a full-backward hook on the model, in
            one more pass. It is refused where that hook sees other gradients than autograd.

    Returns:
        ``(N, C, H, W)``, score per unit of the (preprocessed) input. The heatmap is the largest
        over the channels.

    Simonyan et al., "Deep Inside Convolutional Networks", 2013 (arXiv:1312.6034).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
    >>> explain.attribute(model, torch.rand(1, 3, 1, 1), Saliency(), target=0).values.shape
    torch.Size([1, 3, 1, 1])
    """

    absolute: bool = True
    gradients: GradientsBy = "autograd"

    style = "intensity"

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({InputGradients(gradients=self.gradients)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        gradient = evidence[InputGradients(gradients=self.gradients)]
        return gradient.abs() if self.absolute else gradient


@register
class InputXGradient(GradientMethod):
    r"""Input times gradient, signed.

    Multiply each input value with its gradient: :math:`x \cdot \partial y/\partial x`.

    In a network without biases whose activations are piecewise linear through zero, the values add
    up to the score.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive supports the target, negative
        opposes it.

    Shrikumar et al., "Not Just a Black Box", 2016 (arXiv:1605.01713).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2, bias=False))
    >>> a = explain.attribute(model, torch.rand(1, 3, 1, 1), InputXGradient(), target=0)
    >>> torch.allclose(a.values.sum(), a.score)
    True
    """

    style = "signed"
    needs = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence.inputs * evidence[InputGradients()]


class RuleGradientMethod(GradientMethod):
    """A method that gives the gradient under a rule for rectifiers."""

    style = "color"
    rule: ClassVar[GradientRule]

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({InputGradients(self.rule), RuleCoverage(self.rule)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[InputGradients(self.rule)]


@register
class GuidedBackprop(RuleGradientMethod):
    """Gradient that passes rectifiers only where positive.

    Send back only what is positive at every rectifier: which pixel patterns excite the units behind
    the score.

    A hook clamps the ``grad_input`` of every ReLU in the graph, a module's or a function's. Its
    smooth and leaky relatives (ReLU6, LeakyReLU, PReLU, ELU, SiLU, GELU, Hardswish, ...) are
    treated the same way, which the paper does not cover. A network without any of them gets a
    warning, since its guided gradient is the plain one.

    Args:
        gradients: "full_backward" clamps the ``grad_input`` in full-backward hooks on modules, in
            one more pass. It is refused where a rectifier is no module.

    Returns:
        ``(N, C, H, W)``. It hardly depends on the target: read it as "what is there";
        `GuidedGradCAM` says where.

    Springenberg et al., "Striving for Simplicity: The All Convolutional Net", 2014
    (arXiv:1412.6806).

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    >>> _ = [nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(model, torch.rand(1, 3, 3, 3), GuidedBackprop(), target=0).values.shape
    torch.Size([1, 3, 3, 3])
    """

    gradients: GradientsBy = "autograd"

    rule = GuidedRule()

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({InputGradients(self.rule, self.gradients), RuleCoverage(self.rule)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[InputGradients(self.rule, self.gradients)]


@register
class Deconvnet(RuleGradientMethod):
    """Gradient whose positive part alone passes rectifiers; depends on the photo by max pooling
    only.

    Send back only what arrives positive at every rectifier, no matter what it let through on the
    way forward.

    Rectifiers are found as for `GuidedBackprop`; at each, the gradient that arrives is clamped and
    passes on, for ReLU and for its smooth and leaky relatives alike.

    Returns:
        ``(N, C, H, W)``. It hardly depends on the target; and on the photo only through max
        pooling, which sends the gradient back to where the maxima were. A network without, such as
        the default model, gives the same picture for every photo.

    Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    >>> _ = [nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(model, torch.rand(1, 3, 3, 3), Deconvnet(), target=0).values.shape
    torch.Size([1, 3, 3, 3])
    """

    rule = DeconvnetRule()


@register
class GuidedGradCAM(GradientMethod):
    """Guided back-propagation times Grad-CAM.

    Multiply guided back-propagation with the Grad-CAM map: fine detail, where the target is.

    Args:
        cam: the class map to multiply with; any method that gives ``(N, h, w)``.

    Returns:
        ``(N, C, H, W)``; the map is drawn on the input, each cell where it looks.

    Selvaraju et al., ICCV 2017, section 3.1.

    >>> import explain, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    >>> _ = [nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(model, torch.rand(1, 3, 4, 4), GuidedGradCAM(), target=0).values.shape
    torch.Size([1, 3, 4, 4])
    """

    cam: Method = GradCAM()

    style = "color"

    @property
    def adds_up(self) -> bool:  # type: ignore[override]  # as of its cam
        return self.cam.adds_up

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return GuidedBackprop().needs | self.cam.needs

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        cam = evidence.on_photo(cam_map(self.name, self.cam, evidence)[:, None])
        return GuidedBackprop()(evidence) * cam
