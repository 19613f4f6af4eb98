"""The linear head of a network: its weights for a class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from explain._utils.errors import LayerError, TargetError
from explain.engine.evidence import at_least_float32
from explain.hooks import HookGroup

_CONVOLUTIONS = (nn.modules.conv._ConvNd, nn.Linear)


@dataclass(frozen=True)
class _Means:
    """The means of maps over their positions ``(N, C)``, and the standard deviations.

    A maximum is at least one deviation, divided by the root of the number of positions, from the mean; so a value that
    agrees with the mean much more closely than that is a mean.
    """

    values: torch.Tensor
    spread: torch.Tensor

    def agree(self, found: torch.Tensor, rounding: float) -> bool:
        """Whether the same means were found, but for rounding."""
        slack = 1e-4 * self.spread + 4 * rounding * (self.values.abs() + self.spread)
        return found.shape == self.values.shape and bool(((found - self.values).abs() <= slack).all())


def _means(maps: torch.Tensor, channels: int = 1) -> _Means:
    rows = at_least_float32(maps.detach()).movedim(channels, 1)
    variances, values = torch.var_mean(rows.reshape(*rows.shape[:2], -1), 2, correction=0)
    return _Means(values, variances.sqrt())


@dataclass
class HeadCandidates:
    """The layers of a network that may be its head: linear ones and convolutions of one position, as they were called.

    Such a layer may come before the average as well as after it: the mean of its output is its output for the mean. So
    only the means of its input and its output are kept.
    """

    calls: list[tuple[torch.Tensor, nn.Module, _Means]] = field(default_factory=list)
    rounding: float = 0.0
    """That of the coarsest type that the network computes in."""

    def watch(self, group: HookGroup, model: nn.Module) -> None:
        for kind in _CONVOLUTIONS:
            if any(isinstance(module, kind) for module in model.modules()):
                group.forward(kind, self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        self.rounding = max(self.rounding, torch.finfo(output.dtype).eps)
        (given,) = (*args, *kwargs.values())
        if given.ndim > 1 and _mixes_channels_alone(module):
            channels = -1 if isinstance(module, nn.Linear) else 1
            self.calls.append((_means(given, channels).values, module, _means(output, channels)))


def _mixes_channels_alone(module: nn.Module) -> bool:
    if not isinstance(module, nn.modules.conv._ConvNd):
        return isinstance(module, nn.Linear)
    alone = module.groups == 1 and not module.transposed and module.padding not in ("same",)
    moves = [*module.stride, *(1 + abs(each) for each in module.padding if isinstance(each, int))]
    return alone and set(module.kernel_size) == {1} and set(moves) == {1}


def class_weights(
    heads: HeadCandidates,
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
    means = _means(activations)
    if means.agree(logits, heads.rounding):
        return nn.functional.one_hot(classes, logits.shape[1]).to(activations)  # the maps are those of the classes
    for given, module, scores in reversed(heads.calls):
        if scores.agree(logits, heads.rounding) and means.agree(given, heads.rounding):
            found: torch.Tensor = at_least_float32(module.weight[classes].detach())  # type: ignore[index]
            return found.flatten(1)
    raise LayerError(
        f"layer {layer!r} must be followed by an average over its maps and one linear layer for cam, but it is not; "
        "use gradcam or hirescam, which need no such head, or name the layer that is pooled"
    )
