"""Which layers, calls, inputs and outputs a caller means: ``layer4@0``, ``layer4:input``, patterns,
modules."""

import fnmatch
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, get_args

from torch import nn

from explain._utils.errors import LayerError, python_or_command
from explain._utils.modules import modules_of, submodule
from explain._utils.spelling import close_to, did_you_mean

Where: TypeAlias = str | nn.Module | type[nn.Module] | Iterable[str | nn.Module | type[nn.Module]]


def _items(where: Any) -> list[Any]:
    """The names, modules and classes that a caller's selection of layers consists of."""
    if isinstance(where, (str, nn.Module, type)) or not isinstance(where, Iterable):
        return [where]
    items = list(where)
    if not items:
        raise LayerError(
            "layer must name at least one layer, got an empty list; leave it out for the last "
            "feature map"
        )
    return items


def _selected(model: nn.Module, where: object) -> list[str]:
    """The names of the modules that one name, glob pattern, module or class selects."""
    if isinstance(where, str) and _is_module(where, model):
        return [where]  # a shared module has several names
    name_of_module = modules_of(model)
    if isinstance(where, str):
        names = [name for name in name_of_module.values() if name]  # all but the model itself
        matching = [name for name in names if fnmatch.fnmatchcase(name, where)]
        return matching or _unknown(where, names)
    if isinstance(where, nn.Module):
        if where in name_of_module:
            return [name_of_module[where]]
        raise LayerError(
            f"layer must be one of the model, got a {type(where).__name__} that is not in it; name "
            "it"
        )
    remedy = "explain.list_layers(model, x) shows the names"
    if not isinstance(where, type) or not issubclass(where, nn.Module):
        raise LayerError(
            f"layer must be a name, a pattern, a module or a module class, got {where!r}; {remedy}"
        )
    of_class = [name for module, name in name_of_module.items() if isinstance(module, where)]
    if not of_class:
        raise LayerError(
            f"layer must select a module, but the model has no {where.__name__}; {remedy}"
        )
    return of_class


def _unknown(where: str, names: list[str]) -> NoReturn:
    """Raise the `LayerError` for a name that no module has, with a similar one of all ``names``, or
    where to find them."""
    listed = python_or_command(
        "explain.list_layers(model, x) lists them", "'explain layers PHOTO' lists them"
    )
    more = "" if close_to(where, names) or len(names) <= 8 else f"; {listed}"
    raise LayerError(f"layer {where!r} is not in the model; {did_you_mean(where, names)}{more}")


Part: TypeAlias = Literal["", "input", "q", "k", "v", "pattern", "heads"]
"""What of a layer is meant: its output; the first tensor that it is given; or, of the attention in
it, the queries, keys and values ``(N, heads, tokens, d)``, the attention weights ``(N, heads,
queries, keys)``, or the result of each head ``(N, heads, tokens, d)``."""
PARTS: tuple[Part, ...] = get_args(Part)[1:]


class LayerPlace(NamedTuple):
    """What a name means: the module, which part of it, and which call, if it names one."""

    module: str
    part: Part = ""
    call: int | None = None

    @property
    def layer(self) -> str:
        """The name without a call: ``conv``, or ``conv:input`` where a part of it is meant."""
        return f"{self.module}:{self.part}" if self.part else self.module

    @property
    def of_attention(self) -> bool:
        """Whether the name means a part of the attention inside the module, such as its queries."""
        return self.part not in ("", "input")


def place_of(name: str, model: nn.Module | None = None) -> LayerPlace:
    """Split a layer's name into module, part and call: ``conv:input@1`` is the input of the second
    call of ``conv``. A module of the model that has the whole name takes precedence."""
    if not ("@" in name or ":" in name) or _is_module(name, model):
        return LayerPlace(name)
    start, at, number = name.rpartition("@")
    if at and number.isdecimal():
        inner = place_of(start, model)
        if inner.call is None:  # two calls, as in `conv@0@1`, are no suffix
            return inner._replace(call=int(number))
    start, _, part = name.rpartition(":")
    return LayerPlace(start, part) if part in PARTS else LayerPlace(name)


def find_places(model: nn.Module, where: Where) -> dict[str, LayerPlace]:
    """Return the places that ``where`` selects by name, in its order.

    ``where`` is a dotted name, a glob pattern (``"layer*.conv1"``), a module, a module class, or
    several of these. The model itself is named ``""``. Names and patterns may have the suffixes.

    >>> list(find_places(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), ["*:input", nn.ReLU]))
    ['0:input', '1:input', '1']
    """
    places: dict[str, LayerPlace] = {}
    for item in _items(where):
        # a name's part and call, which hold for each module that its pattern selects
        suffixes = place_of(item, model) if isinstance(item, str) else LayerPlace("")
        for module in _selected(model, suffixes.module if isinstance(item, str) else item):
            place = suffixes._replace(module=module)
            places[name_of_place(place, model)] = place
    return places


def select_places(model: nn.Module, where: Where) -> list[str]:
    """Name the places that ``where`` selects; see `find_places`."""
    return list(find_places(model, where))


def name_of_place(place: LayerPlace, model: nn.Module | None = None) -> str:
    """Join module, part and call to a layer's name, which `place_of` splits again. If a module has
    that very name, zeros before the call's number tell them apart: ``conv@00``."""
    if place.call is None:
        return place.layer
    number = str(place.call)
    while _is_module(f"{place.layer}@{number}", model):
        number = f"0{number}"
    return f"{place.layer}@{number}"


def name_of_call(layer: str, number: int, model: nn.Module) -> str:
    """The name of one call of a layer: ``conv@1`` is the second."""
    return name_of_place(place_of(layer, model)._replace(call=number), model)


def _is_module(name: str, model: nn.Module | None) -> bool:
    """Whether a module of the model has exactly this dotted name; False without a model."""
    if model is None:
        return False
    try:
        submodule(model, name)
    except AttributeError:
        return False
    return True
