"""`FeatureExtractor`: a model cut off behind the last layer that somebody wants to see."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from explain.errors import LayerError
from explain.hooks.group import HookGroup
from explain.hooks.preserve import recording
from explain.hooks.select import Where, select
from explain.hooks.structure import rebuilt


class _SeenEnough(BaseException):
    """Ends a forward pass; no ``except Exception`` of the model catches it."""


class FeatureExtractor(nn.Module):
    """A module that returns the outputs of some layers of a model, and does not run what comes after the last of them.

    Args:
        model: any module; it is neither copied nor changed, and it has no hooks between calls.
        layers: names, patterns, modules or classes; see `select`.
        graph: keep the graph, to compute gradients through the features.

    Returns:
        A dictionary from layer names to outputs, detached unless ``graph`` is set. Of a layer that runs several times,
        it has the first output.

    Raises:
        LayerError: a layer is not in the model, or is never called.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(1, 1))
    >>> {name: tuple(f.shape) for name, f in FeatureExtractor(model, ["0", "1"])(torch.zeros(2, 3, 8, 8)).items()}
    {'0': (2, 4, 6, 6), '1': (2, 4, 6, 6)}
    """

    def __init__(self, model: nn.Module, layers: Where, *, graph: bool = False) -> None:
        super().__init__()
        self.model = model
        self.layers = list(select(model, layers))
        self.graph = graph

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        features: dict[str, Any] = {}
        with recording(self.graph), HookGroup(self.model) as group:
            for name in self.layers:
                group.forward(name, self._keeper(name, features))
            with suppress(_SeenEnough):
                self.model(*args, **kwargs)
        missing = [name for name in self.layers if name not in features]
        if missing:
            raise LayerError(f"layer {missing[0]!r} was not called in the forward pass; choose one that the model uses")
        return {name: features[name] for name in self.layers}

    def _keeper(self, name: str, features: dict[str, Any]) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # A copy of all but the last: what runs after may overwrite it.
            last = len(features) == len(self.layers) - 1 and name not in features
            features.setdefault(name, output if last else _copied(output))
            if last:
                raise _SeenEnough

        return keep


def _copied(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.clone()
    if isinstance(output, dict):
        return {key: _copied(value) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        return rebuilt(output, map(_copied, output))
    return output
