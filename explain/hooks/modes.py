"""Models in evaluation mode while they are looked at.

A mode belongs to a module, not to a thread. Two threads may explain one model together; but a thread that trains it
would find its batch normalisation in evaluation mode while another explains, so the other one has to explain a copy
(`copied`). What another thread asks for meanwhile is kept: its ``model.eval()`` or ``model.train()`` holds afterwards.
While a module is held, a ``train`` of ours in the module notes such calls, and does what its own would.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from explain.hooks.unwrap import modules_of
from explain.interrupts import Unsplit

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


class Evaluating(Unsplit[None]):
    """See `evaluating`; ``disturbed`` says whether another thread has put some module in training mode meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: list[_Use] = []
        self._counted = False
        self.disturbed = False

    def begin(self) -> None:
        modules = list(modules_of(self._model))
        _here.depth = _depth() + 1
        self._counted = True
        with _lock:
            for module in modules:
                use = _uses.get(id(module))
                if use is None:
                    use = _uses[id(module)] = _Use(module, module.training, vars(module).get("train"))
                    vars(module)["train"] = MethodType(_train, module)
                use.holders += 1
                self._held.append(use)
                if module.training:
                    module.training = False

    def end(self, error: BaseException | None) -> None:
        with _lock:
            while self._held:
                use = self._held.pop()
                self.disturbed |= use.disturbed
                use.holders -= 1
                if not use.holders and _uses.pop(id(use.module), None) is use:  # a forked child has forgotten it
                    _release(use)
        if self._counted:
            _here.depth, self._counted = max(0, _depth() - 1), False


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Put every submodule in evaluation mode, and give each its own mode back at the end.

    The flags are set one by one rather than with ``model.eval()``: a network that overrides ``train`` to keep some
    part frozen would otherwise not come back as it was. Threads may share modules: a mode comes back when the last of
    those that needed it changed has ended. If another thread calls ``train()`` or ``eval()`` of the model or a part of
    it meanwhile, that holds afterwards.

    >>> model = nn.Sequential(nn.Dropout())
    >>> with evaluating(model):
    ...     model[0].training
    False
    >>> model[0].training
    True
    """
    return Evaluating(model)


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
