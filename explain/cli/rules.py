"""The rules that ``--composite`` names, for those of the methods that take rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from explain.methods import Method


def with_rules(methods: Iterable[Method], composite: str | None) -> list[Method]:
    """Give ``lrp`` the composite that was named, if one was; ``attnlrp`` has its own.

    Raises:
        MethodError: there is no composite of this name.

    >>> from explain.methods import get_method
    >>> [getattr(m, "composite", None) for m in with_rules(map(get_method, ["lrp", "attnlrp", "fem"]), "EpsilonBox")]
    ['EpsilonBox', 'AttnLRP', None]
    """
    from explain.methods import LRP

    if composite is None:
        return list(methods)
    LRP(composite)  # the name is checked also where no method takes it
    automatic = LRP().composite
    return [replace(m, composite=composite) if isinstance(m, LRP) and m.composite == automatic else m for m in methods]
