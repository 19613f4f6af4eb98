"""`FeatureExtractor`: a model cut off after the last layer that is wanted."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from torch import nn

from explain._utils import nested
from explain._utils.errors import LayerError
from explain.hooks.group import HookGroup
from explain.hooks.layer_names import LayerPlace, Where, place_of, select_places
from explain.hooks.preserve import recording


class _SeenEnough(BaseException):
    """Ends a forward pass; no ``except Exception`` of the model catches it."""


class FeatureExtractor(nn.Module):
    """A module that returns the outputs of some layers of a model, and does not run what comes after the last of them.

    Args:
        model: any module; it is neither copied nor changed, and it has no hooks between calls.
        layers: names, patterns, modules or classes; see `select`. ``conv@1`` is the second call of a layer that runs
            several times, and ``conv:input`` the first tensor that it is given.
        graph: keep the graph, to compute gradients through the features.

    Returns:
        A dictionary from names to outputs, detached unless ``graph`` is set. A name without a call stands for the
        first one here, since what comes after it does not run.

    Raises:
        LayerError: a layer is not in the model, or the call that is named never comes.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(1, 1))
    >>> {name: tuple(f.shape) for name, f in FeatureExtractor(model, ["0", "1"])(torch.zeros(2, 3, 8, 8)).items()}
    {'0': (2, 4, 6, 6), '1': (2, 4, 6, 6)}
    """

    def __init__(self, model: nn.Module, layers: Where, *, graph: bool = False) -> None:
        super().__init__()
        self.model = model
        self.layers = select_places(model, layers)
        self.graph = graph

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        features: dict[str, Any] = {}
        calls = Counter[str]()
        with recording(self.graph), HookGroup(self.model) as group:
            by_layer: dict[str, dict[str, LayerPlace]] = {}  # several calls of a layer may be named
            for name in self.layers:
                place = place_of(name, self.model)
                by_layer.setdefault(place.layer, {})[name] = place
            for layer, names in by_layer.items():
                group.forward(layer, self._recorder(names, features, calls))
            with suppress(_SeenEnough):
                self.model(*args, **kwargs)
        for name in self.layers:
            if name not in features:
                count = calls[place_of(name, self.model).layer]
                why = f"name one of its calls, 0 to {count - 1}, got one that never came; choose one of these"
                raise LayerError(
                    f"layer {name!r} must {why}"
                    if count
                    else f"layer {name!r} was not called in the forward pass; choose one that the model uses"
                )
        return {name: features[name] for name in self.layers}

    def _recorder(self, names: dict[str, LayerPlace], features: dict[str, Any], calls: Counter[str]) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for name, place in names.items():
                if (place.call or 0) != calls[place.layer]:
                    continue
                # A copy of all but the last: what runs after may overwrite it.
                last = len(features) == len(self.layers) - 1
                features[name] = output if last else nested.replace(output, lambda path, tensor: tensor.clone())
            calls[next(iter(names.values())).layer] += 1
            if len(features) == len(self.layers):
                raise _SeenEnough

        return keep
