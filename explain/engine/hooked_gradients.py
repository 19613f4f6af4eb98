"""Gradients that full-backward hooks on modules bring: another way to what `torch.autograd.grad`
gives.

The model runs once more, with a full-backward hook on each call of the modules in question. The
hook of a layer keeps its ``grad_output``. That of the model keeps its ``grad_input``, which is the
gradient in the image. Those of rectifiers return another ``grad_input``, by the same rule as on the
default way.

Such hooks see modules alone, and nothing that leaves a module by another path than its output. So
what they bring is compared with what autograd gives, and refused where it is something else.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from explain._utils.errors import MethodError
from explain._utils.modules import submodule
from explain.data.inputs import Path, dotted
from explain.engine.forward import Forward, ResolvedTarget
from explain.hooks import HookGroup
from explain.hooks.graph import differentiate
from explain.hooks.preserve import recording, start_over
from explain.recording.gradients import paths_to
from explain.relevance.gradient_rules import GradientRule, GradientTuple
from explain.relevance.rectifiers import Operation, operations_of

INSTEAD = 'leave out gradients="full_backward"'
"""What to do where such hooks cannot be used: autograd needs none."""


def hooked_layer_gradient(
    forward: Forward, resolved: ResolvedTarget, layer: str, expected: Tensor
) -> Tensor:
    """The gradient of the scores in a layer's output by a full-backward hook, its ``grad_output``,
    in one more pass. It is compared with autograd's, which is ``expected``."""

    def of_output(grad_input: GradientTuple, grad_output: GradientTuple) -> Tensor | None:
        return next((gradient for gradient in grad_output if gradient is not None), None)

    return _hooked(forward, resolved, layer, of_output, {}, expected)


def hooked_input_gradient(
    forward: Forward,
    resolved: ResolvedTarget,
    path: Path | None,
    rule: GradientRule | None,
    expected: Tensor,
) -> Tensor:
    """The gradient of the scores in an input by the model's full-backward hook, its ``grad_input``.
    Under a rule, hooks of rectifiers return what the rule makes of theirs."""
    input_path = path or forward.inputs.path
    position = input_path[0]
    if len(input_path) > 1 or not isinstance(position, int):
        must = f"be a positional argument for full-backward hooks, got {dotted(input_path)}"
        raise MethodError(f"input must {must}; {INSTEAD}")
    rectifiers = {} if rule is None else _rectifiers(forward, resolved, rule)

    def of_input(grad_input: GradientTuple, grad_output: GradientTuple) -> Tensor | None:
        return grad_input[position]  # one for each positional argument

    return _hooked(forward, resolved, "", of_input, rectifiers, expected)


def _hooked(
    forward: Forward,
    resolved: ResolvedTarget,
    layer: str,
    read: Callable[[GradientTuple, GradientTuple], Tensor | None],
    rectifiers: Mapping[str, Callable[..., GradientTuple]],
    expected: Tensor,
) -> Tensor:
    """The gradient that the hook of a layer ("" is the model) is given, in a run of the model on
    fresh leaves, to which nothing is added; checked against ``expected``, that of autograd."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, grad_input: GradientTuple, grad_output: GradientTuple) -> None:
        gradient = read(grad_input, grad_output)
        if gradient is not None:
            seen.append(gradient.detach().clone())

    inputs = forward.inputs
    sources = {path: inputs.tensor(path).detach().clone().requires_grad_() for path in inputs.paths}
    with recording(True), HookGroup(forward.model) as group:
        group.backward(layer, keep)
        for name, hook in rectifiers.items():
            group.backward(name, hook)
        start_over(written=False)  # the random numbers of the first pass
        output = inputs.replaced(sources).call(forward.model)
        images = torch.arange(len(inputs), device=inputs.x.device)
        scores, _ = resolved.of_samples(images).pick(output, len(inputs))
        differentiate(scores.sum(), list(sources.values()))  # the hooks keep what passes by
    must = f"full-backward hooks must bring {layer or 'the input'} the gradient of autograd"
    if not seen:
        raise MethodError(f"{must}, but none fired; {INSTEAD}")
    hooked = seen[0]  # of several calls the last, whose hook fires first
    largest = expected.abs().max()
    rounding = torch.finfo(expected.dtype).eps ** 0.5
    if not torch.allclose(hooked, expected, rtol=0, atol=float(rounding * largest), equal_nan=True):
        off = float((hooked - expected).abs().max() / largest)
        raise MethodError(f"{must}, but it is off by {off:.0%} of the maximum; {INSTEAD}")
    return hooked


def _rectified(
    rule: GradientRule,
    operation: Operation,
    module: nn.Module,
    grad_input: GradientTuple,
    grad_output: GradientTuple,
) -> GradientTuple:
    """The full-backward hook of a rectifier's module: return the ``grad_input`` that a gradient
    rule makes of it."""
    return rule.backward(operation, grad_input, grad_output)


def _rectifiers(
    forward: Forward, resolved: ResolvedTarget, rule: GradientRule
) -> dict[str, Callable[..., GradientTuple]]:
    """The full-backward hooks for the modules that rectify, by name, under a gradient rule."""
    hooks: dict[str, Callable[..., GradientTuple]] = {}
    whole = forward.whole
    assert whole is not None
    steps = whole.recording.steps
    leading_to_score = paths_to(whole.gradients_of(resolved.total, create_graph=False))
    for step, operation in operations_of(steps, whole.signals, leading_to_score):
        if not rule.covers(operation):
            continue
        name = step.module
        # hooks of a module with parts would see what all of it does, not this operation
        if any(submodule(forward.model, name).children()):
            where = f"layer {name!r}" if name else "the model"
            got = f"got {operation.kind}() in {where}; write a module there, or {INSTEAD}"
            raise MethodError(f"rectifiers must be modules for full-backward hooks, {got}")
        hooks[name] = partial(_rectified, rule, operation)
    return hooks
