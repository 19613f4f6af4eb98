"""Hooks on the gradient of every parameter of a model, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import nn

from explain.hooks.group import HookGroup


class OnParameters:
    """A hook on the gradient of every parameter, in place until the block ends."""

    def __init__(self, model: nn.Module, hook: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        self._group = HookGroup(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._group.leaf(parameter, lambda gradient, name=name: hook(name, gradient))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks away."""
        self._group.remove()
