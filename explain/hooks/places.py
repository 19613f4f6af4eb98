"""The names of what goes into and comes out of layers: ``layer4``, ``layer4@0``, ``layer4:input``, ``layer4:input@0``.

A name alone stands for what the layer gives; with ``:input``, for the first tensor that it is given. ``@0`` is its
first call; without it, the last one is meant. A module that bears the whole name goes before both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from explain.hooks.select import Where, select

INPUT = ":input"


class Place(NamedTuple):
    """What a name means: the module, whether its input is meant, and which call, if it names one."""

    module: str
    of_input: bool = False
    call: int | None = None

    @property
    def layer(self) -> str:
        """The name without a call."""
        return self.module + INPUT if self.of_input else self.module


def place_of(name: str, model: nn.Module | None = None) -> Place:
    """Split a name into its parts; with a model, a module that has the whole name takes precedence over suffixes.

    >>> place_of("encoder.conv@0"), place_of("conv:input")
    (Place(module='encoder.conv', of_input=False, call=0), Place(module='conv', of_input=True, call=None))
    """
    if _is_module(name, model):
        return Place(name)
    start, at, number = name.rpartition("@")
    if at and number.isdecimal():
        inner = place_of(start, model)
        if inner.call is None:
            return inner._replace(call=int(number))
    elif name.endswith(INPUT):
        return Place(name.removesuffix(INPUT), True)
    return Place(name)


def select_places(model: nn.Module, where: Where) -> list[str]:
    """Name the places that ``where`` selects, in its order; names and patterns may have the suffixes.

    Raises:
        LayerError: a name or pattern matches nothing, or a module is not part of the model.

    >>> select_places(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), ["*:input", nn.ReLU])
    ['0:input', '1:input', '1']
    """
    items = [where] if isinstance(where, (str, nn.Module, type)) else where
    several = [*items] if isinstance(items, Iterable) else []
    if not several:
        return list(select(model, items))  # which says what is wrong with it
    found: dict[str, None] = {}
    for item in several:
        place = place_of(item, model) if isinstance(item, str) else None
        for module in select(model, item if place is None else place.module):
            found[module if place is None else name_of(place._replace(module=module))] = None
    return list(found)


def name_of(place: Place) -> str:
    """Join the parts of a name.

    >>> name_of(Place("conv", True, 2))
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
