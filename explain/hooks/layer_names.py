"""Which layers, calls, inputs and outputs a caller means: ``layer4@0``, ``layer4:input``, patterns, modules."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from torch import nn

from explain._utils.errors import LayerError, either
from explain._utils.spelling import close_to, did_you_mean

Where: TypeAlias = (
    "str | nn.Module | type[nn.Module] | Iterable[str | nn.Module | type[nn.Module]] | dict[str, nn.Module]"
)


def select(model: nn.Module, where: Where) -> dict[str, nn.Module]:
    """Return the modules of ``model`` that ``where`` selects, by dotted name, in the order given.

    ``where`` is a dotted name, a glob pattern (``"layer*.conv1"``), a module, a module class, or several of these; or
    what this function returned for the model before. The model itself is named ``""``.

    Raises:
        LayerError: a name or pattern matches nothing, a module is not part of the model, or the type is wrong.

    >>> list(select(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.ReLU))
    ['1']
    """
    if isinstance(where, (str, nn.Module, type)):
        return dict(_select_one(model, where))
    if isinstance(where, dict) and where:
        return where
    if not isinstance(where, Iterable):
        raise LayerError(
            f"layer must be a name, a pattern, a module, a module class or several of them, got {where!r}; "
            "explain.list_layers(model, x) shows the names"
        )
    chosen: dict[str, nn.Module] = {}
    for item in where:
        chosen.update(_select_one(model, item))
    if not chosen:
        raise LayerError("layer must name at least one layer, got an empty list; leave it out for the last feature map")
    return chosen


def _select_one(model: nn.Module, where: object) -> list[tuple[str, nn.Module]]:
    if isinstance(where, str):
        return _by_name(model, where)
    if isinstance(where, nn.Module):
        for name, module in model.named_modules():
            if module is where:
                return [(name, module)]
        raise LayerError(
            f"layer must be a part of the model, got a {type(where).__name__} that is not in it; give its name instead"
        )
    if isinstance(where, type) and issubclass(where, nn.Module):
        found = [(name, module) for name, module in model.named_modules() if isinstance(module, where)]
        if not found:
            raise LayerError(
                f"layer must select at least one module, but the model has no {where.__name__}; "
                "explain.list_layers(model, x) shows what it has"
            )
        return found
    raise LayerError(
        f"layer must be a name, a pattern, a module or a module class, got {where!r}; explain.list_layers(model, x) "
        "shows the names"
    )


def _by_name(model: nn.Module, where: str) -> list[tuple[str, nn.Module]]:
    try:
        return [(where, model.get_submodule(where))]  # a shared module has several names
    except AttributeError:
        names = {name: module for name, module in model.named_modules() if name}
    if any(sign in where for sign in "*?["):
        found = [(name, module) for name, module in names.items() if fnmatch.fnmatchcase(name, where)]
        if found:
            return found
    close = close_to(where, names)
    listed = either("explain.list_layers(model, x) lists them", "'explain layers PHOTO' lists them")
    hint = did_you_mean(where, names) if close or len(names) <= 8 else f"{did_you_mean(where, names)}; {listed}"
    raise LayerError(f"layer {where!r} is not in the model; {hint}")


INPUT = ":input"


class LayerPlace(NamedTuple):
    """What a name means: the module, whether its input is meant, and which call, if it names one."""

    module: str
    of_input: bool = False
    call: int | None = None

    @property
    def layer(self) -> str:
        """The name without a call."""
        return self.module + INPUT if self.of_input else self.module


def place_of(name: str, model: nn.Module | None = None) -> LayerPlace:
    """Split a name into its parts; with a model, a module that has the whole name takes precedence over suffixes.

    >>> place_of("encoder.conv@0"), place_of("conv:input")
    (LayerPlace(module='encoder.conv', of_input=False, call=0), LayerPlace(module='conv', of_input=True, call=None))
    """
    if _is_module(name, model):
        return LayerPlace(name)
    start, at, number = name.rpartition("@")
    if at and number.isdecimal():
        inner = place_of(start, model)
        if inner.call is None:
            return inner._replace(call=int(number))
    elif name.endswith(INPUT):
        return LayerPlace(name.removesuffix(INPUT), True)
    return LayerPlace(name)


def find_places(model: nn.Module, where: Where) -> dict[str, LayerPlace]:
    """Return the places that ``where`` selects by name, in its order; names and patterns may have the suffixes.

    Raises:
        LayerError: a name or pattern matches nothing, or a module is not part of the model.

    >>> list(find_places(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), ["*:input", nn.ReLU]))
    ['0:input', '1:input', '1']
    """
    items = [where] if isinstance(where, (str, nn.Module, type)) else where
    several = [*items] if isinstance(items, Iterable) else []
    if not several:
        select(model, where)  # which says what is wrong with it
    found: dict[str, LayerPlace] = {}
    for item in several:
        place = place_of(item, model) if isinstance(item, str) else None
        for module in select(model, item if place is None else place.module):
            named = LayerPlace(module) if place is None else place._replace(module=module)
            found[name_of(named)] = named
    return found


def select_places(model: nn.Module, where: Where) -> list[str]:
    """Name the places that ``where`` selects; see `find_places`."""
    return list(find_places(model, where))


def name_of(place: LayerPlace) -> str:
    """Join the parts of a name.

    >>> name_of(LayerPlace("conv", True, 2))
    'conv:input@2'
    """
    return place.layer if place.call is None else f"{place.layer}@{place.call}"


def _is_module(name: str, model: nn.Module | None) -> bool:
    if model is None:
        return False
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
