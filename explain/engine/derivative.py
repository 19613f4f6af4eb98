"""Finds out whether a gradient is the derivative of the score, by moving along it; custom functions
may bring another gradient."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from explain.engine.forward import Forward, ResolvedTarget
from explain.hooks import Replace, intervene
from explain.hooks.graph import Reach, is_of_hooks
from explain.hooks.layer_names import name_of_call

_STEPS = (3e-4, 3e-5)
"""By what share of the scores steps along the gradient change them. Where a step meets a kink, its
change differs, and that of the smaller step less so; a wrong gradient's differs as much. The
smaller one alone would differ by rounding."""
_PYTHON_NODE: Any = torch.autograd.function.BackwardCFunction
_TOLERANCE = 0.05
"""By what share of itself a change of the score may differ from the gradient's: kinks and rounding
make 0.01 in float32."""


def custom_functions(nodes: Iterable[Node], sources: list[Any]) -> list[str]:
    """The model's functions with a backward of their own, between a score with these Nodes and the
    ``sources`` of gradients, by name."""
    custom = [node for node in nodes if isinstance(node, _PYTHON_NODE) and _is_of_model(node)]
    if not custom:
        return []
    tensors = [source for source in sources if isinstance(source, Tensor)]
    reach = Reach(tensors, [source.node for source in sources if not isinstance(source, Tensor)])
    names = [node.name().removesuffix("Backward") for node in custom if reach.of(node)]
    return list(dict.fromkeys(names))


def _is_of_model(node: Any) -> bool:
    """Whether a Node of a function that is written in Python is neither of the hooks here nor of
    torch."""
    if is_of_hooks(node):
        return False
    name = node.name()
    if name.startswith("GeneratedBackwardFor_"):  # an operator of a library's
        return not name.startswith("GeneratedBackwardFor_torchvision_")
    module = str(getattr(getattr(node, "_forward_cls", None), "__module__", ""))
    return module.split(".")[0] != "torch"


def is_derivative(
    forward: Forward, resolved: ResolvedTarget, layer: str | None, gradient: Tensor
) -> bool:
    """Whether the scores change along the gradient in the input, or in a layer, by as much as it
    says; True where that cannot be seen."""
    gradient = gradient.detach()
    images = torch.arange(forward.count, device=gradient.device)
    if (
        resolved.image is not None
        or len(gradient) != forward.count
        or gradient.dtype in (torch.float16, torch.bfloat16)
    ):
        return True
    size = gradient.flatten(1).norm(dim=1)
    scale = forward.scale(resolved).to(size).maximum(resolved.score.abs().to(size))
    wrong = size > 0
    for share in _STEPS:
        expected = share * scale
        step = torch.where(size > 0, expected / size.square(), 0)
        move = (gradient.movedim(0, -1) * step).movedim(-1, 0)
        with torch.no_grad():
            again, forth, back = [
                resolved.scores_in(images, _output(forward, layer, sign * move))
                for sign in (0, 1, -1)
            ]
        # scores also change where the model draws random numbers
        repeats = (again - resolved.score).abs() <= 0.01 * expected
        wrong &= repeats & (((forth - back) / 2 - expected).abs() > _TOLERANCE * expected)
        if not wrong.any():
            return True
    return False


def _output(forward: Forward, layer: str | None, move: Tensor) -> Any:
    """What the model gives where the input, or a layer's output, is moved."""
    inputs = forward.inputs
    if layer is None:
        return inputs.replaced(inputs.x + move).call(forward.model)
    record = forward.records[layer]
    moved = Replace(name_of_call(record.layer, record.call, forward.model), move.add)
    with intervene(forward.model, [moved]):
        return inputs.call(forward.model)
