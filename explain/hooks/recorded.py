"""`record`: what a model computes, operation by operation."""

from typing import Any

from torch import nn

from explain.hooks.preserve import untouched
from explain.recording import Recording
from explain.recording import record as record_once


def record(model: nn.Module, *inputs: Any, gradients: bool = True, **kwargs: Any) -> Recording:
    """Run a model once, and list the operations that it computes: ATen operators, below Python.

    A function, a method, a module and an in-place method that compute the same give the same
    operations. The result is a table as text (which a notebook shows), with a `replay` on other
    inputs of the same shapes.

    Args:
        model: any module, a scripted, traced or exported one too; it is left as it was, and runs in
            evaluation mode.
        inputs, kwargs: what it takes. All tensors in them are inputs of the recording.
        gradients: whether the model runs with gradients on, which lead to its inputs then.

    Raises:
        HookError: a container in the output cannot be made with other contents.

    >>> import torch
    >>> layers = nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(2, 3)
    >>> recording = record(nn.Sequential(*layers), torch.ones(1, 1, 3, 3))
    >>> [(step.name, step.module) for step in recording.steps]
    [('convolution', '0'), ('relu', '1'), ('view', '2'), ('t', '3'), ('addmm', '3')]
    >>> recording.replay(torch.zeros(1, 1, 3, 3)).shape
    torch.Size([1, 3])
    """
    with untouched(model, grad=gradients):
        return record_once(model, *inputs, **kwargs)
