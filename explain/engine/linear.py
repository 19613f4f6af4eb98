"""The parts of a network that are linear, or affine: what its biases add, and a head's weights for a class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from explain.engine.evidence import at_least_float32
from explain.errors import LayerError, TargetError
from explain.hooks import HookGroup

_CONVOLUTIONS = (nn.modules.conv._ConvNd, nn.Linear)
_NORMALISATIONS = (nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


def biased_modules(model: nn.Module) -> list[str]:
    """Name the modules that add a constant: those with a bias, and every batch normalisation."""
    return [name for name, module in model.named_modules() if name and _bias(module) is not None]


def _bias(module: nn.Module) -> torch.Tensor | None:
    """The constant ``(C,)`` that a module adds to what is otherwise linear in its input.

    For batch normalisation in evaluation mode it is ``beta - gamma mean / sqrt(var + eps)``: the shift by the running
    mean counts, which the ``bias`` parameter alone leaves out.
    """
    if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
        scale = (module.running_var.detach() + module.eps).rsqrt()
        if module.affine:
            return module.bias.detach() - module.weight.detach() * module.running_mean.detach() * scale
        return -module.running_mean.detach() * scale
    if isinstance(module, (*_CONVOLUTIONS, *_NORMALISATIONS)):
        bias = getattr(module, "bias", None)
        return None if bias is None else bias.detach()
    return None


def bias_of(module: nn.Module, gradient: torch.Tensor) -> torch.Tensor:
    """What a module's bias adds to the score at each place: the gradient in its output times the bias."""
    bias = _bias(module)
    assert bias is not None
    if isinstance(module, (nn.Linear, nn.LayerNorm)):
        return gradient * bias
    return gradient * bias.reshape(1, -1, *[1] * (gradient.ndim - 2))


@dataclass
class Heads:
    """The linear layers of a network, as they were called: inputs, modules and outputs."""

    calls: list[tuple[torch.Tensor, nn.Module, torch.Tensor]] = field(default_factory=list)

    def watch(self, group: HookGroup, model: nn.Module) -> None:
        if any(isinstance(module, nn.Linear) for module in model.modules()):
            group.forward(nn.Linear, self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        (given,) = (*args, *kwargs.values())
        self.calls.append((at_least_float32(given.detach()), module, at_least_float32(output.detach())))


def class_weights(
    heads: Heads,
    activations: torch.Tensor,
    logits: torch.Tensor | None,
    classes: torch.Tensor | None,
    layer: str,
) -> torch.Tensor:
    """The weights ``(N, C)`` with which the mean of each feature map enters the score of the target's class.

    Raises:
        TargetError: the target is not a class.
        LayerError: the scores are not a linear function of the means of the layer's maps.
    """
    if classes is None or logits is None:
        raise TargetError("target must be a class for cam, which reads the class's weights; use gradcam otherwise")
    means = activations.mean(tuple(range(2, activations.ndim)))
    if means.shape == logits.shape and torch.allclose(means, logits, rtol=1e-2, atol=1e-4):
        return nn.functional.one_hot(classes, logits.shape[1]).to(means)  # the maps are those of the classes already
    for given, module, scores in reversed(heads.calls):
        gives_scores = scores.shape == logits.shape and torch.equal(scores, logits)
        if gives_scores and given.shape == means.shape and torch.allclose(given, means, rtol=1e-2, atol=1e-4):
            found: torch.Tensor = at_least_float32(module.weight[classes].detach())  # type: ignore[index]
            return found
    raise LayerError(
        f"layer {layer!r} must be followed by an average over its maps and one linear layer for cam, but it is not; "
        "use gradcam or hirescam, which need no such head, or name the layer that is pooled"
    )
