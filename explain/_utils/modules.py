"""The modules of a model, each with its name."""

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import nn

from explain._utils.signals import temporarily

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


def modules_of(model: nn.Module) -> dict[nn.Module, str]:
    """A model's modules, each with the first of its dotted names: those of ``named_modules()``,
    then `kept_modules`. Cached, since small models are walked over often: do not change it."""
    inserted = module_names.inserted.get(model)
    # ``walked`` may be from before the modules that are inserted now
    if model in module_names.walked and inserted is None:
        return module_names.walked[model]
    names: dict[nn.Module, str] = {}
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    # after all that torch sees, whose names come first
    kept: deque[tuple[str, nn.Module]] = deque()
    while waiting or kept:
        name, module = waiting.pop() if waiting else kept.popleft()
        if module in names:
            continue
        names[module] = name
        start = f"{name}." if name else ""
        children = module._modules
        if module is model and inserted is not None:
            children = {**children, **inserted}
        if children:
            # the last one waiting comes next
            for part, inner in reversed(children.items()):
                if inner is not None:
                    waiting.append((start + part, inner))
        # torch's own modules keep none elsewhere
        if not type(module).__module__.startswith("torch."):
            for part, inner in kept_modules(module).items():
                kept.append((start + part, inner))
    return names


def kept_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules in a module's attributes, lists, tuples and dictionaries, which torch does not
    see (Keras), by their own name, else by their position: ``blocks.0``."""
    modules: dict[str, nn.Module] = {}
    attributes = vars(module)
    for attribute in [name for name in attributes if name not in _OF_EVERY_MODULE]:
        value = attributes.get(attribute)
        if isinstance(value, nn.Module):
            modules[attribute] = value
        elif isinstance(value, (list, tuple, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if not isinstance(item, nn.Module):  # containers are of modules or of other things
                    break
                name = f"{attribute}.{key}"
                own_name = vars(item).get("name")
                if isinstance(own_name, str) and own_name and "." not in own_name:
                    is_taken = (
                        own_name in module._modules or modules.get(own_name, item) is not item
                    )
                    name = name if is_taken else own_name
                modules[name] = item
    return modules


class _ModuleNames(threading.local):
    """What this thread knows of models: the modules that are inserted (`inserting`), and those that
    it has walked over (kept while a call of this package has the model)."""

    def __init__(self) -> None:
        self.inserted: dict[nn.Module, dict[str, nn.Module]] = {}
        self.walked: dict[nn.Module, dict[nn.Module, str]] = {}


module_names = _ModuleNames()


def inserting(model: nn.Module, modules: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
    """Let modules that interventions insert into a model have names in it, such as ``layer3/sae``,
    inside the block. For this thread alone. Then layers inside them can be named and hooked.
    """
    names_outside = module_names.inserted
    return temporarily(
        module_names, inserted={**names_outside, model: {**names_outside.get(model, {}), **modules}}
    )


def submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a dotted name, as ``get_submodule`` does; also one that an intervention
    inserted, or that torch does not see.
    """
    for start, module in module_names.inserted.get(model, {}).items():
        if name == start or name.startswith(f"{start}."):
            return module.get_submodule(name[len(start) + 1 :])
    try:
        return model.get_submodule(name)
    except AttributeError:
        for module, its_name in modules_of(model).items():
            if its_name == name:
                return module
        raise


def floating_parameter(model: nn.Module) -> nn.Parameter | None:
    """The first floating-point parameter of a model, whose device and type inputs must have; None
    where there is none."""
    return next((part for part in parameters_of(model) if part.is_floating_point()), None)


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return a model's parameters, each once, as ``parameters()`` does, but faster: every
    explanation asks for them."""
    parameters: dict[nn.Parameter, None] = {}
    for module in modules_of(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters[parameter] = None
    return list(parameters)
