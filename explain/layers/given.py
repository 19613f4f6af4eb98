"""Which call of a network returned the tensor that a module takes: both are laid out on the input in the same way."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn

from explain import nested
from explain.hooks import HookGroup, untouched
from explain.inputs import Inputs
from explain.layers.notes import CallKey

_KEEPING = (
    *(nn.Identity, nn.modules.dropout._DropoutNd, nn.LayerNorm, nn.modules.batchnorm._NormBase, nn.GroupNorm),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh),
)
"""Modules that lay out their output like their input."""


def givers(model: nn.Module, inputs: Inputs) -> dict[CallKey, CallKey]:
    """Run a network on these inputs; for each call of a module, return the call that gave its first tensor.

    A call that keeps the layout of its input stands for itself where that was computed between modules.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> givers(model, Inputs((torch.zeros(1, 3, 4, 4),)))
    {('1', 0): ('0', 0)}
    """
    found: dict[CallKey, CallKey] = {}
    last: dict[int, tuple[torch.Tensor, CallKey]] = {}  # the tensors too: while they are there, nothing has their ids
    called, returned = Counter[str](), Counter[str]()

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        _, tensor = nested.find((args, kwargs)) or ((), None)
        key = name, called[name]
        called[name] += 1
        if tensor is not None and id(tensor) in last:
            found[key] = last[id(tensor)][1]
        elif isinstance(module, _KEEPING):
            found[key] = key

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        _, tensor = nested.find(output) or ((), None)
        if tensor is not None:
            last[id(tensor)] = tensor, (name, returned[name])
            returned[name] += 1

    with untouched(model), HookGroup(model) as group:
        for name, _ in model.named_modules():
            if name:
                group.forward_pre(name, partial(enter, name), with_kwargs=True)
                group.forward(name, partial(leave, name))
        inputs.call(model)
    return found
