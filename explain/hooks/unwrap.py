"""From what people wrap around a model to the module that they mean, and whether it has hooks."""

import sys
from typing import Any

import torch
from torch import nn
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]
from torch.nn.modules import module as global_hooks
from torch.nn.parallel import DataParallel, DistributedDataParallel

from explain._utils.errors import ModelError, warn
from explain._utils.modules import kept_modules, modules_of
from explain.hooks.guard import is_ours, name_of_function
from explain.hooks.handles import Registered
from explain.hooks.programs import OpenProgram, is_program


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module in ``DataParallel``, ``DistributedDataParallel`` or ``torch.compile`` (with
    a warning that this one is slower), a scripted one as `OpenProgram`, else the model itself."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {_description(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        return OpenProgram(model)
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        return unwrapped(model.module)
    has_forward = getattr(model.forward, "__func__", None) is not nn.Module.forward
    # a wrapper around a network, which a call of its own runs, as ultralytics' YOLO
    if type(model).__call__ is not nn.Module.__call__ and not has_forward:
        parts = [f"model.{name}" for name, _ in model.named_children()]
        raise ModelError(
            f"model must have a forward, got {type(model).__name__} without one; give the network "
            f"in it, {' or '.join(parts[:3])}"
        )
    # what torch.compile keeps; its class has no public name
    inner = model._modules.get("_orig_mod")
    if isinstance(inner, nn.Module):
        warn(
            f"model is compiled; it is explained through the original {type(inner).__name__}, at "
            "its speed"
        )
        return unwrapped(inner)
    return model


def with_layers(model: nn.Module) -> nn.Module:
    """Return a model as a module with layers that take hooks, if it is a program without."""
    return OpenProgram(model) if is_program(model) else model


def hookable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that take hooks, by dotted name: all but scripted ones and the modules in
    them."""
    modules: dict[str, nn.Module] = {}
    closed: tuple[str, ...] = ()  # how names begin of modules inside something scripted
    for module, name in modules_of(model).items():
        if closed and name.startswith(closed):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            closed = (*closed, f"{name}.")
        # its own layers take hooks; the name of the model itself is empty
        if isinstance(module, OpenProgram):
            closed = (*closed, f"{name}.program".removeprefix("."))
        if not isinstance(module, RecursiveScriptModule):  # as a traced one, which takes hooks
            modules[name] = module
    return modules


_OF_PARAMETERS = (nn.ParameterDict, nn.ParameterList)


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without submodules that take hooks, by dotted name, without the model
    itself and containers of parameters."""
    modules: dict[str, nn.Module] = {}
    for name, module in hookable(model).items():
        parts = [*module._modules.values(), *kept_modules(module).values()]
        holds_modules = any(part and not isinstance(part, _OF_PARAMETERS) for part in parts)
        if name and not holds_modules and not isinstance(module, _OF_PARAMETERS):
            modules[name] = module
    return modules


def runs_in_order(module: nn.Module) -> bool:
    """Whether a module only runs its children one after the other: an `nn.Sequential` whose
    ``forward`` is PyTorch's."""
    forward = getattr(type(module), "forward", None)
    return forward is nn.Sequential.forward and "forward" not in vars(module)


def scripted(model: nn.Module) -> list[str]:
    """The names of the modules of a model that are scripted or traced; hooks cannot see inside
    them."""
    return [
        name
        for module, name in modules_of(model).items()
        if isinstance(module, torch.jit.ScriptModule)
    ]


def sharded(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model, by name, whose weights FSDP keeps in shards while they do not run.
    ``FullyShardedDataParallel`` shards nothing if it is told so, or in a single process."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # FSDP was never loaded, so no module uses it
        return {}
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    whole = fsdp.ShardingStrategy.NO_SHARD
    return {
        name: module
        for module, name in modules_of(model).items()
        if isinstance(module, kinds) and getattr(module, "sharding_strategy", None) is not whole
    }


def _description(value: object) -> str:
    """What was given in place of a model, and what to give instead: the end of an error message."""
    if isinstance(value, str):
        return f"the name {value!r}; explain.Explainer({value!r}) takes names"
    if isinstance(value, type):
        return f"the class {value.__name__}; make an instance of it"
    return f"{type(value).__name__}; give the network itself, or a module whose forward calls it"


_KINDS = ("forward_pre", "forward", "backward_pre", "backward")


def has_hooks(model: nn.Module) -> bool:
    """Whether a forward pass of this model calls hooks, of its modules or of every module."""
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return True
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in modules_of(model)]
    return any(hooks)


def callers_hooks(model: nn.Module) -> list[str]:
    """The names of all hooks on a model that are not of this package, with their layers, as ``print
    on layer 0 (forward)``: they may alter what is computed."""
    owners: list[tuple[str, Any, str]] = [("every module", global_hooks, "_global_{}_hooks")]
    owners += [
        (f"layer {name}" if name else "the model", module, "_{}_hooks")
        for module, name in modules_of(model).items()
    ]
    names: dict[str, None] = {}
    for where, owner, attribute in owners:
        for kind in _KINDS:
            for hook in list(getattr(owner, attribute.format(kind)).values()):
                names |= {
                    f"{name} on {where} ({direction})": None
                    for name, direction in _of_caller(hook, kind)
                }
    return list(names)


def _of_caller(hook: Any, kind: str) -> list[tuple[str, str]]:
    """The names and directions of the user's hooks behind one hook object of PyTorch; empty for
    those of this package. ``kind`` is the kind of hook as PyTorch's attributes name it."""
    if isinstance(hook, Registered):  # gates for gradients are hooks of another kind
        return [(fn.name, fn.direction) for fn in hook.hooks]
    of_torch = str(getattr(hook, "__module__", "")).startswith("torch.export.")  # checks of inputs
    return [] if of_torch or is_ours(hook) else [(name_of_function(hook), kind.replace("_", "-"))]
