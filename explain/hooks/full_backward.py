"""Full-backward hooks that survive in-place operations on either side of the layer.

PyTorch's own passes a module's inputs and outputs through an identity function that makes views of them, and an
in-place operation on such a view is an error: a hooked ``ReLU(inplace=True)``, or one behind a hooked convolution,
breaks the forward pass. Here the two ends are gates that hand on aliases: the same memory and version counter, which
autograd does not take for views, so that nothing is copied and anything may overwrite them. When a module has
overwritten its input, the input is made to go on from there, as it would have without hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from explain import nested

FullHook = Callable[[nn.Module, Any, Any], Any]
PreHook = Callable[[nn.Module, Any], Any]
Gradients = tuple[torch.Tensor | None, ...]


class _Gate(torch.autograd.Function):
    """Hands on aliases (of leaves, copies); in backward, hands ``act`` the gradients, and on what it returns."""

    @staticmethod
    def forward(ctx: Any, act: Callable[[Gradients], Gradients], *tensors: torch.Tensor) -> Gradients:
        ctx.act = act
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() if tensor.is_leaf else tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (None, *ctx.act(gradients))


class _Overwritten(torch.autograd.Function):
    """Gives a tensor the history of the alias through which it was overwritten."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient


class FullBackward:
    """Full-backward hooks and pre-hooks of modules that call `enter` before their forward and `leave` after it.

    Each call has a record of its own: a module that runs three times in one forward pass meets its hook three times in
    backward, each time with the gradients of that call.
    """

    def __init__(self) -> None:
        self.hooks: list[FullHook] = []
        self.pre_hooks: list[PreHook] = []
        self._open: list[_Call] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        call = _Call(self, module)
        self._open.append(call)
        return call.enter(args)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        while self._open:
            call = self._open.pop()
            if call.module is module:  # those above it never returned: their forward raised
                return call.leave(output)
        return None

    def remove(self) -> None:
        """From now on gradients pass, also those of forward passes that are already done."""
        self.hooks.clear()
        self.pre_hooks.clear()
        self._open.clear()


class _Call:
    """One call of one module: what came in at the output gate is kept until the input gate knows the rest."""

    def __init__(self, owner: FullBackward, module: nn.Module) -> None:
        self.owner, self.module = owner, module
        self.inputs = 0
        self._where: list[int] = []
        self.grad_output: Gradients | None = None

    def enter(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self.inputs = len(args)
        passed, self._where = _through(self._at_inputs, args)
        self._lent = [(args[i], passed[i], passed[i].grad_fn) for i in self._where if not args[i].is_leaf]
        return tuple(passed) if self._where else None

    def leave(self, output: Any) -> Any:
        lone = isinstance(output, torch.Tensor)
        values = [output] if lone else [value for _, value in nested.items(output)]
        passed, self._out = _through(self._at_outputs, values)
        self.outputs = len(values)
        self._settle(values, passed)
        if lone:
            return passed[0]
        return nested.with_items(output, passed) if values else None

    def _settle(self, values: Sequence[Any], passed: list[Any]) -> None:
        """Let the inputs that the module has overwritten go on from what it made of them; returned, they are it."""
        for tensor, alias, node in self._lent:
            if alias.grad_fn is node:
                continue
            place = next((i for i, value in enumerate(values) if value is alias), None)
            with _unsafe_preserve_version_counter(tensor):  # its values are not touched once more
                _Overwritten.apply(tensor, alias if place is None else passed[place])
            if place is not None:
                passed[place] = tensor
        self._lent = []

    def _at_outputs(self, gradients: Gradients) -> Gradients:
        given = _spread(gradients, self._out, self.outputs)
        for pre in self.owner.pre_hooks:
            changed = pre(self.module, given)
            given = given if changed is None else changed
        if self._where:
            self.grad_output = given
        else:  # no input requires a gradient: this is all there is to know
            for hook in self.owner.hooks:
                hook(self.module, (None,) * self.inputs, given)
        return tuple(given[i] for i in self._out)

    def _at_inputs(self, gradients: Gradients) -> Gradients:
        grad_output, self.grad_output = self.grad_output, None
        if grad_output is None:  # nothing came through the outputs
            return gradients
        given = _spread(gradients, self._where, self.inputs)
        for hook in self.owner.hooks:
            changed = hook(self.module, given, grad_output)
            given = given if changed is None else changed
        return tuple(given[i] for i in self._where)


def _through(act: Callable[[Gradients], Gradients], values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Pass the tensors among ``values`` that are part of a graph through one gate; return all, and where those were."""
    passed = list(values)
    where = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad]
    if not where or not torch.is_grad_enabled():
        return passed, []
    for i, tensor in zip(where, _Gate.apply(act, *(values[i] for i in where)), strict=True):
        passed[i] = tensor
    return passed, where


def _spread(gradients: Gradients, where: list[int], count: int) -> Gradients:
    """Put gradients at the places of their tensors, and None at the others."""
    found: list[torch.Tensor | None] = [None] * count
    for i, gradient in zip(where, gradients, strict=True):
        found[i] = gradient
    return tuple(found)
