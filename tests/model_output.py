"""An output as Hugging Face's models have it: theirs where it is installed, and else one that
behaves alike."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

try:
    from transformers.modeling_outputs import BaseModelOutputWithPooling
except ImportError:

    class BaseModelOutputWithPooling(OrderedDict):  # type: ignore[no-redef,type-arg]
        """A mapping whose items are attributes too, and go by their positions."""

        def __init__(self, *items: Any, **values: Any) -> None:
            super().__init__(*items, **values)

        def __getitem__(self, key: Any) -> Any:
            return [*self.values()][key] if isinstance(key, int) else super().__getitem__(key)

        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError:
                raise AttributeError(name) from None


__all__ = ["BaseModelOutputWithPooling"]
