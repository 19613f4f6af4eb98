"""Models in evaluation mode while they are explained, and copies whose modes and hooks are their own."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from explain._utils.signals import signal_safe
from explain.hooks.unwrap import modules_of

_lock = threading.RLock()
_here = threading.local()


@dataclass(slots=True)
class _Use:
    """What a module that is held in evaluation mode gets back when the last holder has ended."""

    module: nn.Module
    training: bool
    method: Any
    """A ``train`` that the user put in the module itself, if any."""
    holders: int = 0
    disturbed: bool = False
    """Whether another thread has called ``train()`` meanwhile."""


_uses: dict[int, _Use] = {}


@signal_safe
def evaluating(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Put every submodule in evaluation mode, and give each its own mode back at the end.

    The flags are set one by one rather than with ``model.eval()``: a network that overrides ``train`` to keep some
    part frozen would otherwise not come back as it was. Threads may share modules: a mode comes back when the last of
    those that needed it changed has ended. If another thread calls ``train()`` or ``eval()`` of the model or a part of
    it meanwhile, that holds afterwards; the list that the block is given then names the modules put in training mode.

    >>> model = nn.Sequential(nn.Dropout())
    >>> with evaluating(model):
    ...     model[0].training
    False
    >>> model[0].training
    True
    """
    held: list[_Use] = []
    disturbed: list[nn.Module] = []
    _here.depth = _depth() + 1
    try:
        with _lock:
            for module in modules_of(model):
                use = _uses.get(id(module))
                if use is None:
                    use = _uses[id(module)] = _Use(module, module.training, vars(module).get("train"))
                    vars(module)["train"] = MethodType(_train, module)
                use.holders += 1
                held.append(use)
                if module.training:
                    module.training = False
        yield disturbed
    finally:
        with _lock:
            while held:
                use = held.pop()
                if use.disturbed:
                    disturbed.append(use.module)
                use.holders -= 1
                if not use.holders and _uses.pop(id(use.module), None) is use:  # a forked child has forgotten it
                    _release(use)
        _here.depth = max(0, _depth() - 1)


def own_mode(module: nn.Module, twin: nn.Module) -> None:
    """Give a copy the mode that its original has when it is not held."""
    with _lock:
        use = _uses.get(id(module))
        if use is None:
            return
        own = vars(twin).pop("train", None)
        if use.method is not None and own is not None:
            vars(twin)["train"] = use.method
        twin.training = use.training


def _depth() -> int:
    return getattr(_here, "depth", 0)


def _train(module: nn.Module, mode: bool = True) -> Any:
    """Replaces a module's ``train`` while it is held, to note what another thread wants."""
    with _lock:
        use = _uses.get(id(module))
        found = type(module).train(module, mode) if use is None or use.method is None else use.method(mode)
        if use is not None and not _depth():
            use.training = module.training
            use.disturbed |= module.training
    return found


_train.__name__ = "train"  # a module that is pickled meanwhile is given its own ``train`` when it is read


def _release(use: _Use) -> None:
    if use.method is not None:
        vars(use.module)["train"] = use.method
    else:
        vars(use.module).pop("train", None)
    if use.module.training != use.training:
        use.module.training = use.training


def _begin_child() -> None:
    """Give the modules of a process that has just been forked their own modes back."""
    for use in list(_uses.values()):
        _release(use)
    _uses.clear()
    _here.depth = 0
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)


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
