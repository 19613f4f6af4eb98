from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from explain import HookError
from explain._utils import nested
from explain._utils.nested import replace_first
from tests.model_output import BaseModelOutputWithPooling

Pair = namedtuple("Pair", "left right")


class Attributed(dict[str, Any]):
    """A dictionary with an attribute of its own."""

    note = ""


@dataclass(frozen=True)
class Data:
    maps: torch.Tensor
    word: str = "text"


@dataclass
class Slotted:
    __slots__ = ("maps",)
    maps: torch.Tensor


def ones() -> torch.Tensor:
    return torch.ones(2)


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "tuple": ((ones(), 3), 0),
    "list": ([ones(), 3], 0),
    "named tuple": (Pair(3, ones()), 1),
    "dict": ({"maps": ones()}, "maps"),
    "default": (defaultdict(list, maps=ones()), "maps"),
    "dict subclass": (Attributed(maps=ones()), "maps"),
    "user dict": (UserDict(maps=ones()), "maps"),
    "dataclass": (Data(ones()), "maps"),
    "slots": (Slotted(ones()), "maps"),
    "hugging face": (
        BaseModelOutputWithPooling(last_hidden_state=ones(), pooler_output=ones()),
        "last_hidden_state",
    ),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_of_every_kind_are_walked_and_replaced_and_never_edited(kind: str) -> None:
    given, key = CONTAINERS[kind]
    if isinstance(given, Attributed):
        given.note = "kept"
    before = dict(nested.items(given))
    path, tensor = nested.find(given) or ((), None)
    assert path == (key,)
    assert tensor is before[key]
    new = torch.zeros(2)
    made = nested.replace(given, lambda way, old: new if way == (key,) else old)
    assert type(made) is type(given)
    assert dict(nested.items(made))[key] is new
    assert all(value is before[name] for name, value in nested.items(given))
    assert getattr(made, "note", "kept") == "kept"
    if isinstance(given, defaultdict):
        assert made["missing"] == []
    if isinstance(made, BaseModelOutputWithPooling):
        assert made.last_hidden_state is new
        assert made[0] is new


def test_a_container_that_cannot_be_made_with_other_contents_is_refused() -> None:
    class Stubborn(tuple[Any, ...]):
        def __new__(cls, first: Any, second: Any) -> Stubborn:
            return super().__new__(cls, (first, second))

    with pytest.raises(HookError, match="Stubborn"):
        replace_first(Stubborn(torch.zeros(1), 2), torch.ones(1))
