"""Functions with a derivative of their own: one step in the place of what they compute inside."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from explain.recording.values import Step, Value, tensors_of, with_tensors


@dataclass(eq=False)
class FunctionSteps:
    """A call of a `torch.autograd.Function`: its arguments as values, and the steps inside."""

    function: type[torch.autograd.Function]
    args: Any
    steps: list[Step] = field(default_factory=list)


def with_functions(
    functions: Iterable[FunctionSteps],
    steps: Sequence[Step],
    outputs: Iterable[Value],
    with_gradient: Collection[Value],
) -> list[Step]:
    """The steps of a pass, with one step for each call of a function with a derivative of its own,
    unless it computes something else when it is called again."""
    whole_calls: dict[Step, Step] = {}
    """The step of each call, by the first of the steps inside."""
    replaced: set[Step] = set()
    wanted = set(outputs)
    for call in functions:
        whole = _as_step(call, steps, wanted, with_gradient) if call.steps else None
        if whole is not None:
            whole_calls[call.steps[0]] = whole
            replaced |= set(call.steps)
    result: list[Step] = []
    for step in steps:
        if step in whole_calls:
            result.append(whole_calls[step])
        elif step not in replaced:
            result.append(step)
    return result


def _as_step(
    call: FunctionSteps,
    steps: Sequence[Step],
    outputs: set[Value],
    with_gradient: Collection[Value],
) -> Step | None:
    """A call of a function as one step; None if some inner value that the pass goes on with, in
    ``steps`` outside of it or as one of its ``outputs``, is not found among its results again."""
    inner_steps = set(call.steps)
    inner_values = {value for step in call.steps for value in step.outputs}
    leaving = inner_values & outputs
    for step in steps:
        if step not in inner_steps:
            leaving |= inner_values & set(step.inputs)
    # Its arguments are recorded, but not which of the inner values it returns, and in what order:
    # it is called again, and each result is the value with the same contents.
    args = with_tensors(call.args, lambda value: value.tensor.detach().clone())
    with torch.no_grad():
        again = list(tensors_of(call.function.apply(*args)))
    results = [_same(tensor, leaving) for tensor in again]
    if not leaving <= set(results):
        return None
    first = call.steps[0]
    # gradients are switched off inside, so the inner steps alone do not tell whether it has one
    has_gradient = first.has_gradient or any(value in with_gradient for value in leaving)
    step = Step(
        operator=call.function,
        args=call.args,
        kwargs={},
        module=first.module,
        call=first.call,
        has_gradient=has_gradient,
        results=tuple(results),
    )
    for value in leaving:
        value.step = step
    return step


def _same(tensor: Tensor, values: set[Value]) -> Value | None:
    """The value that has the contents of a tensor."""
    for value in sorted(values, key=lambda value: value.number):
        alike = value.shape == tuple(tensor.shape) and value.dtype == tensor.dtype
        if alike and torch.equal(value.tensor, tensor):
            return value
    return None
