"""Copies of a model, for code that must not share its modes and hooks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from explain.hooks.modes import own_mode


def copied(model: nn.Module, *, share: bool = False) -> nn.Module:
    """Copy a model, for a thread that explains it while another one trains it or switches its modes.

    The copy has modes, hooks and weights of its own. Hooks that the user has registered on the model go with it, since
    they may be part of what it computes; those of `HookGroup` do not. It is the model as it is now: copy it between
    two steps of training, and again when the weights have changed. Name its layers, since modules of the original are
    not part of it.

    Args:
        model: any module that ``copy.deepcopy`` can copy.
        share: share parameters and buffers with the model, which costs no memory and follows every change of them.
            This is for threads that switch modes, not for those that train: where weights change between an
            explanation's forward and backward pass, PyTorch raises a RuntimeError.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    >>> other = copied(model).eval()
    >>> model.training, other[0].weight is model[0].weight
    (True, False)
    >>> copied(model, share=True)[0].weight is model[0].weight
    True
    """
    while True:
        try:
            with torch.inference_mode(False):  # tensors made in that mode could never have gradients
                return _copied(model, share)
        except RuntimeError as error:
            if "during iteration" not in str(error):  # another thread was just registering hooks
                raise


def _copied(model: nn.Module, share: bool) -> nn.Module:
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for tensor in (tensor for module in modules for tensor in _tensors_of(module)):
        if share:
            memo[id(tensor)] = tensor
        elif not tensor.is_leaf:  # computed by a hook from parameters; deepcopy refuses it
            memo[id(tensor)] = tensor.detach().clone()
    made = copy.deepcopy(model, memo)
    for module in modules:
        twin = memo.get(id(module))
        if isinstance(twin, nn.Module) and twin is not module:
            own_mode(module, twin)
    return made


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that a module holds itself: parameters, buffers, and what its hooks compute from them."""
    held = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    return [value for value in held if isinstance(value, torch.Tensor)]
