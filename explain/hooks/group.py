"""`HookGroup`: hooks that live as long as a ``with`` block and act only for the thread that made them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node

from explain.errors import HookError
from explain.hooks.select import Where, select

ForwardPreHook = Callable[[nn.Module, tuple[Any, ...]], Any]
ForwardHook = Callable[[nn.Module, tuple[Any, ...], Any], Any]
Gradients = tuple[torch.Tensor | None, ...]
NodeHook = Callable[[Gradients, Gradients], Gradients | None]
NodePreHook = Callable[[Gradients], Gradients | None]
TensorHook = Callable[[torch.Tensor], torch.Tensor | None]
TapHook = Callable[[torch.Tensor], torch.Tensor | None]


class Handle(Protocol):
    """What PyTorch returns for a registered hook."""

    def remove(self) -> None: ...


class Tap(nn.Module):
    """A pass-through module that carries a full-backward hook in place of the layer whose output it is given.

    A full-backward hook turns the tensors that it watches into views, and an in-place operation on such a view is an
    error. A hook on the layer itself would therefore break every network whose next step is ``ReLU(inplace=True)`` or
    ``x += shortcut``. The tap takes the hook, and hands on a copy that anything may overwrite.
    """

    def __init__(self, fn: TapHook) -> None:
        super().__init__()

        def full_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            changed = fn(grad_output[0])
            return None if changed is None else (changed,)

        self.register_full_backward_hook(full_backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x`` whose gradient passes through the hook on its way back."""
        copy: torch.Tensor = self(x).clone()
        return copy


class HookGroup:
    """Registers hooks, and removes all of them when the block ends, whatever ended it.

    Hooks on modules also fire for calls that other threads make of the same model; those calls pass through untouched.
    Hooks on tensors and Nodes belong to one graph and need no such guard.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> shapes = []
    >>> with HookGroup(model) as group:
    ...     _ = group.forward(nn.ReLU, lambda module, args, output: shapes.append(tuple(output.shape)))
    ...     _ = model(torch.ones(1, 2))
    >>> shapes, len(model[1]._forward_hooks)
    ([(1, 2)], 0)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._handles: list[Handle] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> HookGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __len__(self) -> int:
        return len(self._handles)

    def remove(self) -> None:
        """Remove every hook of the group, the latest first; calling it again does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def forward_pre(self, where: Where, fn: ForwardPreHook) -> None:
        """Call ``fn(module, args)`` before the forward of each selected module; what it returns replaces ``args``."""

        def guarded(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return fn(module, args) if self._is_own_call() else None

        for module in self._modules(where).values():
            self._handles.append(module.register_forward_pre_hook(guarded))

    def forward(self, where: Where, fn: ForwardHook) -> None:
        """Call ``fn(module, args, output)`` after each selected module; what it returns replaces ``output``."""

        def guarded(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return fn(module, args, output) if self._is_own_call() else None

        for module in self._modules(where).values():
            self._handles.append(module.register_forward_hook(guarded))

    def tensor(self, tensor: torch.Tensor, fn: TensorHook) -> None:
        """Call ``fn(gradient)`` when the gradient of ``tensor`` has been computed; what it returns replaces it."""
        if not tensor.requires_grad:
            raise HookError(
                "tensor must require a gradient to be hooked, got one that does not; enable gradients first"
            )
        self._handles.append(tensor.register_hook(fn))  # type: ignore[no-untyped-call]

    def node(self, node: Node, fn: NodeHook) -> None:
        """Call ``fn(grad_inputs, grad_outputs)`` after a Node has run; what it returns replaces ``grad_inputs``."""
        self._handles.append(node.register_hook(fn))

    def node_pre(self, node: Node, fn: NodePreHook) -> None:
        """Call ``fn(grad_outputs)`` before an autograd Node runs; what it returns replaces ``grad_outputs``."""
        self._handles.append(node.register_prehook(fn))

    def _modules(self, where: Where) -> dict[str, nn.Module]:
        if self._model is None:
            raise HookError(
                "HookGroup() without a model can hook only tensors and Nodes; pass the model to hook layers"
            )
        return select(self._model, where)

    def _is_own_call(self) -> bool:
        return threading.get_ident() == self._thread
