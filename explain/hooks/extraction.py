"""`FeatureExtractor`: a model cut off after the last layer of interest."""

from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from explain._utils import nested
from explain._utils.errors import LayerError
from explain.hooks import preserve
from explain.hooks.capturing import why_not_called
from explain.hooks.group import HookGroup
from explain.hooks.layer_names import Where, place_of, select_places


class _AllCaptured(BaseException):
    """Ends a forward pass; no ``except Exception`` of the model catches it."""


class FeatureExtractor(nn.Module):
    """A module that returns the outputs of some layers of a model, and does not run what comes
    after the last of them.

    Args:
        model: any module; it is neither copied nor changed, and it has no hooks between calls.
        layers: names, patterns, modules or classes; see `find_places`. ``conv@1`` is the second
            call of a layer that runs several times, and ``conv:input`` the first tensor that it is
            given.
        graph: keep the graph, to compute gradients through the features.

    Returns:
        A dictionary from names to outputs, detached unless ``graph`` is set. A name without a call
        stands for the first one here, since what comes after it does not run.

    Raises:
        LayerError: a layer is not in the model, or the call that is named never comes.

    >>> import torch
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(1, 1)
    ... )
    >>> {
    ...     name: tuple(f.shape)
    ...     for name, f in FeatureExtractor(model, ["0", "1"])(torch.zeros(2, 3, 8, 8)).items()
    ... }
    {'0': (2, 4, 6, 6), '1': (2, 4, 6, 6)}
    """

    def __init__(self, model: nn.Module, layers: Where, *, graph: bool = False) -> None:
        """Choose the layers, by name; hooks are registered only while `forward` runs."""
        super().__init__()
        self.model = model
        self.layers = select_places(model, layers)
        self.graph = graph

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model up to the last of the layers, and return their outputs by name."""
        features: dict[str, Any] = {}
        calls = Counter[str]()

        def copy_output(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            """Copy the output of a layer when its call is the one that is named; end the pass after
            the last one."""
            named_call = place_of(name, self.model).call
            # a name without a call stands for the first one
            if calls[name] == (0 if named_call is None else named_call):
                # a copy, before in-place operations change the output
                features[name] = nested.replace(output, lambda path, tensor: tensor.clone())
            calls[name] += 1
            if len(features) == len(self.layers):
                raise _AllCaptured

        with preserve.recording(self.graph), HookGroup(self.model) as group:
            for name in self.layers:
                group.forward(place_of(name, self.model).layer, partial(copy_output, name))
            with suppress(_AllCaptured):
                self.model(*args, **kwargs)
        for name in self.layers:
            if name not in features:
                raise LayerError(why_not_called(self.model, name, calls[name]))
        return {name: features[name] for name in self.layers}
