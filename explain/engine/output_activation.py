"""What a network does last: whether its outputs have been through a softmax or sigmoid already."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ModelError
from explain.data.inputs import Inputs
from explain.hooks import untouched
from explain.targets.base import find_logits
from explain.targets.outputs import Activation, Outputs, outputs_like
from explain.tracing.table import operation_name
from explain.tracing.tracer import Tracer

_KINDS = frozenset(["softmax", "sigmoid", "expit", "hardsigmoid"])


def outputs_of(model: nn.Module, inputs: Inputs, logits: torch.Tensor, activation: Activation | None) -> Outputs:
    """Say how the outputs ``(N, K)`` that a model gave for these inputs become probabilities.

    Where values in [0, 1] leave open what they are, the model is run once more, and its operations are watched.
    """
    return outputs_like(logits, activation, partial(ends_in_probabilities, model, inputs))


def ends_in_probabilities(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a softmax or sigmoid gave a model's outputs, as they are or among what was made of them.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.Sigmoid())
    >>> x = Inputs((torch.rand(1, 3, 1, 1),))
    >>> ends_in_probabilities(model, x), ends_in_probabilities(model[:2], x)
    (True, False)
    """
    with untouched(model), torch.no_grad(), _Watch() as watch:
        output = inputs.copied().call(model)
    try:
        found = find_logits(output, len(inputs))
    except ModelError:
        return False
    return any(_gave(result, found) for result in watch.results)


def _gave(result: torch.Tensor, outputs: torch.Tensor) -> bool:
    """Whether outputs ``(N, K)`` are a result, or, of several classes, made of one for as many classes."""
    if result.numel() == outputs.numel() and torch.equal(result.reshape(-1), outputs.to(result.dtype).reshape(-1)):
        return True
    return outputs.shape[1] > 1 and result.shape[-2:] == outputs.shape


class _Watch(Tracer):
    """Keeps what softmaxes and sigmoids gave in this thread."""

    opens = False

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if operation_name(func) in _KINDS and isinstance(result, torch.Tensor):
            self.results.append(result)
        return result
