"""Whether anybody has hooks on a model, and whose they are."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks

from explain.hooks.guard import is_ours, name_of_function
from explain.hooks.registered import OnModule
from explain.hooks.unwrap import modules_of

_KINDS = ("forward_pre", "forward", "backward_pre", "backward")


def has_hooks(model: nn.Module) -> bool:
    """Whether a forward pass of this model calls hooks, of its modules or of every module.

    >>> model = nn.Sequential(nn.ReLU())
    >>> handle = model[0].register_forward_hook(lambda *given: None)
    >>> has_hooks(model), handle.remove(), has_hooks(model)
    (True, None, False)
    """
    everywhere = (global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks)
    return any(everywhere) or any(m._forward_hooks or m._forward_pre_hooks for m in modules_of(model))


def callers_hooks(model: nn.Module) -> list[str]:
    """Name the hooks that are not of this package, with the modules that they are on: they may alter what is computed.

    >>> model = nn.Sequential(nn.ReLU())
    >>> handle = model[0].register_forward_hook(print)
    >>> callers_hooks(model)
    ['print on layer 0 (forward)']
    """
    found = [
        f"{name} on every module ({kind})"
        for kind in _KINDS
        for name, kind in _names(getattr(global_hooks, f"_global_{kind}_hooks"), kind)
    ]
    for layer, module in model.named_modules():
        where = f"layer {layer}" if layer else "the model"
        for kind in _KINDS:
            found += [f"{name} on {where} ({own})" for name, own in _names(getattr(module, f"_{kind}_hooks"), kind)]
    return found


def _names(hooks: Any, kind: str) -> list[tuple[str, str]]:
    """The caller's functions among hooks of one kind, each with its kind: gates for gradients are hooks of another."""
    found = []
    for hook in list(hooks.values()):
        if isinstance(hook, OnModule):
            found += [(site.hook, site.direction) for site in hook.sites() if not site.trusted]
        elif not is_ours(hook):
            found.append((name_of_function(hook), kind.replace("_", "-")))
    return list(dict.fromkeys(found))
