"""Finds out whether a gradient is the derivative of the score, by moving along it; custom functions
may bring another gradient."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from explain.data.inputs import Path
from explain.engine.forward import Forward, ResolvedTarget
from explain.hooks import Replace
from explain.hooks.capturing import Source
from explain.hooks.graph import Reach
from explain.hooks.layer_names import name_of_call
from explain.hooks.preserve import start_over
from explain.layers.intervening import intervene

_STEPS = (3e-4, 3e-5)
"""By what share of the scores steps along the gradient change them. Where a step meets a kink, its
change differs, and that of the smaller step less so; a wrong gradient's differs as much. The
smaller one alone would differ by rounding."""
_PYTHON_NODE: Any = torch.autograd.function.BackwardCFunction
_TOLERANCE = 0.05
"""By what share of itself a change of the score may differ from the gradient's: kinks and rounding
make 0.01 in float32."""


def custom_functions(nodes: Iterable[Node], sources: Sequence[Source]) -> list[str]:
    """The names of the model's own autograd functions among ``nodes``, between the score and the
    ``sources`` of its gradients. Their backward may not be the derivative."""
    custom = [node for node in nodes if isinstance(node, _PYTHON_NODE) and _is_of_model(node)]
    if not custom:
        return []
    # a source is a tensor, or an edge of the graph, which has its Node
    tensors = [source for source in sources if isinstance(source, Tensor)]
    ends = [source.node for source in sources if not isinstance(source, Tensor)]
    reach = Reach(tensors, ends)
    names = [node.name().removesuffix("Backward") for node in custom if reach.of(node)]
    return list(dict.fromkeys(names))


def _is_of_model(node: Any) -> bool:
    """Whether a Node of a Python autograd function belongs to the model, not to this package or
    torch: by names. A wrong yes costs a few runs, a wrong no a warning."""
    name = node.name()
    if name.startswith("GeneratedBackwardFor_"):  # an operator that a library has registered
        return not name.startswith("GeneratedBackwardFor_torchvision_")
    module = str(getattr(getattr(node, "_forward_cls", None), "__module__", ""))
    return module.split(".")[0] not in ("torch", "explain")


def is_derivative(
    forward: Forward, resolved: ResolvedTarget, layer: str | None, gradient: Tensor
) -> bool:
    """Whether the scores change along a ``gradient``, in the input or a layer, by as much as it
    says: two small steps are run. True also where that cannot be seen (half precision)."""
    gradient = gradient.detach()
    images = torch.arange(forward.count, device=gradient.device)
    # such a gradient is of one score alone, and a step changes all
    is_of_one_image = resolved.image is not None and forward.count > 1
    # such as windows of the images
    is_not_by_image = len(gradient) != forward.count
    # small changes are lost in its rounding
    is_half = gradient.dtype in (torch.float16, torch.bfloat16)
    if is_of_one_image or is_not_by_image or is_half:
        return True
    # a step along the gradient that changes each score by its scale, if the gradient is right
    squares = gradient.flatten(1).square().sum(1)
    scale = forward.scale(resolved).to(squares).maximum(resolved.score.abs().to(squares))
    expected = torch.where(squares > 0, scale, 0)
    factors = (expected / squares).nan_to_num(0)  # one for each image; 0 where the gradient is 0
    step = (gradient.movedim(0, -1) * factors).movedim(-1, 0)

    def scores(share: float) -> Tensor:
        """The score of each image with a share of the step added to the input or the layer."""
        return resolved.scores_in(images, _output(forward, layer, share * step))

    return _are_expected(
        scores, _STEPS, resolved.score.detach(), expected, lambda change: _TOLERANCE * expected
    )


def _are_expected(
    scores: Callable[[float], Tensor],
    shares: Sequence[float],
    unchanged: Tensor,
    expected: Tensor,
    allowed: Callable[[Tensor], Tensor],
) -> bool:
    """Whether ``scores`` change with the share of a step by about as much as ``expected``: by a
    difference that is ``allowed`` at one of the ``shares``, or where they change by themselves."""
    is_unlike = torch.ones_like(expected, dtype=torch.bool)
    with torch.no_grad():
        for share in shares:
            change = (scores(share) - scores(-share)) / (2 * share)
            difference = (change - expected).abs()
            is_unlike &= difference > allowed(change)
            if not is_unlike.any():
                return True
        # where the model draws random numbers, or keeps something between its passes
        by_itself = (scores(0.0) - unchanged).abs()
    # if by far less than the last of the steps changed them
    repeats = by_itself <= 0.01 * share * torch.maximum(difference, expected.abs())
    return not (is_unlike & repeats).any()


_CONTRASTS = (0.03, 0.003, 0.0003)
"""By what share of itself the contrast of an input changes, to see what the score does. Between
many kinks the first ones may say something else than the gradient."""
_UNSEEN = 0.25
"""The share of a change of the score from which on gradients leave something out."""
_ROUNDING = 1000
"""Changes up to so many last bits of the number one are none where all scores are near 0."""


def follows_contrast(
    forward: Forward, resolved: ResolvedTarget, gradients: Mapping[Path, Tensor | None]
) -> bool:
    """Whether the scores change with the contrast of the inputs by about as much as the
    ``gradients`` in them say; true also where nothing can be seen. Runs two to seven passes."""
    inputs = forward.inputs
    images = torch.arange(forward.count, device=inputs.x.device)
    if forward.logits is None or inputs.x.dtype in (torch.float16, torch.bfloat16):
        return True
    # A step along the gradient, as in `is_derivative`, cannot tell: where a branch has none (behind
    # detach() or in NumPy), the gradient leads past it. So contrast grows to the right and below.
    moves = {}
    expected = torch.zeros((), dtype=resolved.score.dtype, device=inputs.x.device)
    for path in inputs.paths:
        x = inputs.tensor(path).detach()
        rows = torch.linspace(0, 1, x.shape[-2], dtype=x.dtype, device=x.device)
        columns = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype, device=x.device)
        moves[path] = x * (rows[:, None] + columns) / 2
        gradient = gradients[path]
        if gradient is not None:
            expected += (gradient.detach() * moves[path]).sum()
    explained = slice(None) if resolved.image is None else resolved.image
    score = resolved.score.detach()[explained]
    magnitude = score.abs().sum()
    rounding_near_zero = _ROUNDING * torch.finfo(magnitude.dtype).eps

    def total(share: float) -> Tensor:
        """The sum of the scores with another contrast."""
        start_over(written=False)
        moved = {path: inputs.tensor(path).detach() + share * moves[path] for path in moves}
        output = inputs.replaced(moved).call(forward.model)
        return resolved.scores_in(images, output)[explained].sum()

    def allowed(change: Tensor) -> Tensor:
        """How far a change may be from the expected one."""
        # by a share of the change, or of the scores, since changes far below these tell nothing
        largest = torch.maximum(change.abs(), expected.abs())
        return torch.maximum(_UNSEEN * largest, 0.1 * magnitude).clamp(min=rounding_near_zero)

    return _are_expected(total, _CONTRASTS, score.sum(), expected, allowed)


def _output(forward: Forward, layer: str | None, move: Tensor) -> Any:
    """The model's output with ``move`` added to the input, or to a layer's output. The model's own
    hooks run as before."""
    start_over(written=False)
    inputs = forward.inputs
    if layer is None:
        return inputs.replaced(inputs.x + move).call(forward.model)
    record = forward.records[layer]
    moved = Replace(name_of_call(record.layer, record.call, forward.model), move.add)
    with intervene(forward.model, [moved]):
        return inputs.call(forward.model)
