"""From what people wrap around a model to the module that they mean."""

from __future__ import annotations

import torch
from torch import nn
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]
from torch.nn.parallel import DataParallel, DistributedDataParallel

from explain.errors import ModelError, warn


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module in ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile``, or the model itself.

    A compiled model is explained through the module that it was compiled from, which computes the same; a warning says
    so, since it takes longer.

    Raises:
        ModelError: the model is scripted, or is not a module: there is nothing to hook.

    >>> layer = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(layer)) is layer
    True
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {_told(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"model must be a module of Python code, got a scripted one ({model.original_name}); pass the module that "
            "it was made from"
        )
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)  # what torch.compile keeps; its class has no public name
    if isinstance(inner, nn.Module):
        warn(f"model is compiled; it is explained through the original {type(inner).__name__}, at its speed")
        return unwrapped(inner)
    return model


def modules_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return a model's modules, each with the first of its dotted names: what ``named_modules()`` gives, but faster.

    Every explanation walks over its model several times, which is a part of its cost where the model is small.

    >>> layer = nn.Linear(2, 2)
    >>> list(modules_of(nn.Sequential(layer, nn.Sequential(nn.ReLU(), layer))).values())
    ['', '0', '1', '1.0']
    """
    found = {model: ""}
    _add_parts(found, model, "")
    return found


def _add_parts(found: dict[nn.Module, str], parent: nn.Module, start: str) -> None:
    for name, module in parent._modules.items():
        if module is not None and module not in found:
            found[module] = start + name
            _add_parts(found, module, f"{start}{name}.")


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return a model's parameters, each once, as ``parameters()`` does, but faster."""
    return list(dict.fromkeys(p for module in modules_of(model) for p in module._parameters.values() if p is not None))


def hookable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that take hooks, by dotted name: all but scripted ones and what is in them."""
    found = {
        name: module for module, name in modules_of(model).items() if not isinstance(module, RecursiveScriptModule)
    }
    closed = tuple(f"{name}." for name in found if isinstance(found[name], torch.jit.ScriptModule))
    return {name: module for name, module in found.items() if not name.startswith(closed)}


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without parts that take hooks, by dotted name; the model itself is not among them."""
    return {name: module for name, module in hookable(model).items() if name and not any(module._modules.values())}


def scripted(model: nn.Module) -> list[str]:
    """Name the modules of a model that are scripted or traced, so that hooks cannot see inside them."""
    return [name for module, name in modules_of(model).items() if isinstance(module, torch.jit.ScriptModule)]


def _told(given: object) -> str:
    """What was given for a model, and what to do about it."""
    if isinstance(given, str):
        return f"the name {given!r}; explain.Explainer({given!r}) takes names"
    if isinstance(given, type):
        return f"the class {given.__name__}; make an instance of it"
    if callable(given):
        return f"{type(given).__name__}; give the network itself, or a module whose forward calls it"
    return f"{type(given).__name__}; give the network itself"
