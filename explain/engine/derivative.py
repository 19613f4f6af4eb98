"""Whether a gradient is the derivative of the score, seen by moving along it; custom functions may
say otherwise."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from explain.engine.forward import Forward, ResolvedTarget
from explain.hooks import Replace, intervene
from explain.hooks.graph import Reach, is_of_hooks
from explain.hooks.layer_names import name_of_call

_STEP = 3e-4
"""By what share of the scores a step along the gradient changes them."""
_PYTHON_NODE: Any = torch.autograd.function.BackwardCFunction
_OFF = 0.05
"""By how much of what the gradient says the change may be off: kinks and rounding make 0.01 in
float32."""


def custom_functions(nodes: Iterable[Node], sources: list[Any]) -> list[str]:
    """The functions with a backward of their own, of the model's, among the Nodes of a score, on
    the way to sources of gradients."""
    custom = [node for node in nodes if isinstance(node, _PYTHON_NODE) and _is_of_model(node)]
    if not custom:
        return []
    tensors = [source for source in sources if isinstance(source, Tensor)]
    reach = Reach(tensors, [source.node for source in sources if not isinstance(source, Tensor)])
    return list(
        dict.fromkeys(node.name().removesuffix("Backward") for node in custom if reach.of(node))
    )


def _is_of_model(node: Any) -> bool:
    """Whether a Node of a function that is written in Python is neither of the hooks here nor of
    torch."""
    if is_of_hooks(node):
        return False
    if node.name().startswith("GeneratedBackwardFor_"):  # an operator of a library's
        return not node.name().startswith("GeneratedBackwardFor_torchvision_")
    module = str(getattr(getattr(node, "_forward_cls", None), "__module__", ""))
    return module.split(".")[0] != "torch"


def is_derivative(
    forward: Forward, resolved: ResolvedTarget, layer: str | None, gradient: Tensor
) -> bool:
    """Whether the scores change along the gradient in the input, or in a layer, as it says; True
    where unsure."""
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
    step = torch.where(size > 0, _STEP * scale / size.square(), 0)
    move = step.reshape(-1, *[1] * (gradient.ndim - 1)) * gradient
    with torch.no_grad():
        ends = [
            resolved.scores_in(images, _output(forward, layer, sign * move)) for sign in (0, 1, -1)
        ]
    # not where it draws random numbers
    same = (ends[0] - resolved.score).abs() <= 0.01 * _STEP * scale
    off = ((ends[1] - ends[2]) / 2 - _STEP * scale).abs() > _OFF * _STEP * scale
    return not bool((off & same & (size > 0)).any())


def _output(forward: Forward, layer: str | None, move: Tensor) -> Any:
    """What the model gives where the input, or a layer's output, is moved."""
    inputs = forward.inputs
    if layer is None:
        return inputs.replaced(inputs.x + move).call(forward.model)
    record = forward.records[layer]
    moved = Replace(name_of_call(record.layer, record.call, forward.model), move.add)
    with intervene(forward.model, [moved]):
        return inputs.call(forward.model)
