"""A model and its caller, left exactly as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every submodule in evaluation mode, and give each its own mode back at the end.

    The flags are set one by one rather than with ``model.eval()``: a network that overrides ``train`` to keep some
    part frozen would otherwise not come back as it was.
    """
    trained = [module for module in model.modules() if module.training]
    try:
        for module in trained:
            module.training = False
        yield
    finally:
        for module in trained:
            module.training = True


@contextmanager
def preserving_rng(devices: list[torch.device]) -> Iterator[None]:
    """Give the random generators of the CPU and of ``devices`` their state back at the end."""
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        yield


@contextmanager
def untouched(model: nn.Module, *, grad: bool = False) -> Iterator[None]:
    """Run a model for inspection: in evaluation mode, gradients as given, outside inference mode; then restore all.

    Parameters, buffers, ``.grad`` and ``requires_grad`` are not restored because nothing here ever writes to them.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(preserving_rng([p.device for p in model.parameters()]))
        stack.enter_context(evaluating(model))
        yield
