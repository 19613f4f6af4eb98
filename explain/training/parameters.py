"""Hooks on the gradient of every parameter of a model, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from explain.hooks.group import HookGroup
from explain.interrupts import Unsplit


class OnParameters(Unsplit[Any]):
    """A hook on the gradient of every parameter, in place until the block ends."""

    def __init__(self, model: nn.Module, hook: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        self._group = HookGroup(model)
        try:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    self._group.leaf(parameter, lambda gradient, name=name: hook(name, gradient))
        except BaseException:  # an interrupt, for one: nothing else could remove this group
            self._group.remove()
            raise

    def begin(self) -> Self:
        return self

    def end(self, error: BaseException | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks away."""
        self._group.remove()
