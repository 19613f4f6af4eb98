"""Which methods a network can be explained with, and what each of them costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from explain._utils.errors import ExplainError, LayerError, keywords, muted
from explain.attribution.options import Settings
from explain.attribution.request import Request
from explain.data.inputs import InputsLike
from explain.hooks.layer_names import Where
from explain.hooks.unwrap import scripted
from explain.layers import default_layer
from explain.layers.calls import cost_after
from explain.methods import Method, list_methods
from explain.methods.base import uses_layer
from explain.methods.registry import MethodLike, get_method
from explain.targets import Target, as_target
from explain.targets.resolve import TargetLike, as_targets

MANY = 200
"""Passes from which on a method is not among "all", but only among "everything"."""
GROUPS = ("all", "everything")


@dataclass(frozen=True)
class Selection:
    """The methods that were chosen, and why others were not.

    ``costs`` has for each method that the network can be explained with how many passes it takes at its default
    settings: those that begin at a layer count for their share, and infinity stands for what depends on the evidence.
    """

    methods: tuple[str, ...]
    costs: Mapping[str, float]
    unfit: tuple[str, ...]
    """Methods for other networks or targets."""

    @property
    def costly(self) -> dict[str, float]:
        """The methods that were left out on account of their cost."""
        return {name: cost for name, cost in self.costs.items() if name not in self.methods}


def select(
    model: nn.Module,
    x: InputsLike,
    group: str = "all",
    *,
    layer: Where | None = None,
    target: TargetLike = None,
    categories: Sequence[str] | None = None,
) -> Selection:
    """Choose methods for a network and a target: "all" that take fewer than 200 passes, or "everything".

    >>> model = nn.Sequential(nn.Conv2d(3, 400, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(400, 5))
    >>> import torch
    >>> chosen = select(model, torch.rand(1, 3, 4, 4))
    >>> chosen.costs["gradcam"], chosen.costs["integratedgradients"], chosen.costs["scorecam"]
    (2.0, 102.0, 402.0)
    >>> sorted(name for name in chosen.costly if "cam" in name), chosen.unfit[:4]
    (['iscam', 'scorecam', 'sscam'], ('cheferattribution', 'cheferbimodal', 'drise', 'featurepermutation'))
    """
    wanted = [as_target(target, categories)]
    request = Request.of(model, x, list_methods(), wanted, Settings(layer=layer, categories=categories))
    fit = _fit(request)
    costs = {name: _cost(request, get_method(name)) for name in fit}
    chosen = tuple(name for name in fit if group == "everything" or costs[name] < MANY)
    return Selection(chosen, costs, tuple(name for name in list_methods() if name not in fit))


def chosen(
    model: nn.Module,
    x: InputsLike,
    methods: MethodLike | Iterable[MethodLike],
    targets: Sequence[Target],
    settings: Settings,
) -> MethodLike | Iterable[MethodLike]:
    """Return the methods of a group for its name, and others as they are."""
    if not isinstance(methods, str) or methods not in GROUPS:
        return methods
    request = Request.of(model, x, list_methods(), targets, settings)
    return select(model, x, methods, layer=request.layers, target=request.targets[0]).methods


@keywords()
def applicable_methods(
    model: nn.Module, x: InputsLike, *, layer: Where | None = None, target: TargetLike = None
) -> list[str]:
    """Name the methods that this network and target can be explained with: all but those that ask for another kind.

    Those that ask for a kind of network, or for a class as target, are tried on ``x`` ``(N, C, H, W)``.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> import torch
    >>> sorted(set(list_methods()) - set(applicable_methods(model, torch.rand(1, 3, 4, 4))))[3:7]
    ['drise', 'featurepermutation', 'gradientrollout', 'legrad']
    """
    return _fit(Request.of(model, x, list_methods(), as_targets(target), Settings(layer=layer)))


def _fit(request: Request) -> list[str]:
    try:
        has_maps = bool(request.layers) or bool(default_layer(request.model, request.inputs))
    except LayerError:
        has_maps = False
    candidates = [method for method in request.methods.values() if has_maps or not uses_layer(method)]
    return [method.name for method in candidates if _fits(request, method)]


def _fits(request: Request, method: Method) -> bool:
    if any(need.looks_inside for need in method.needs) and scripted(request.model):
        return False
    compares = any(getattr(need, "objective", None) is not None for need in method.needs)
    if not compares and not method.only_for:
        return True
    try:
        with muted():
            _alone(request, method.tried()).answered()
    except ExplainError:
        return False
    return True


def _alone(request: Request, method: Method) -> Request:
    settings = Settings(layer=request.settings.layer)
    return replace(request, methods={method.name: method}, targets=request.targets[:1], settings=settings)


def _cost(request: Request, method: Method) -> float:
    plan = replace(_alone(request, method).plan(), images=1)
    layers = {layer for asks in plan.wanted.values() for ask in asks if (layer := ask.layer) is not None}
    return plan.cost(cost_after(request.model, request.inputs, layers))
