"""Which methods a network and a target can be explained with, and what each of them costs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Unpack

from torch import nn

from explain._utils.errors import ExplainError, LayerError, muted, python_or_command
from explain.attribution.options import DEFAULTS, AttributeOptions, Settings
from explain.attribution.request import Request
from explain.data.inputs import InputsLike
from explain.hooks import layer_names, unwrap
from explain.layers import default_layer
from explain.methods import Method, list_methods
from explain.methods.base import MethodLike, can_be_stitched, get_method, uses_layer
from explain.targets import as_target
from explain.targets.resolve import TargetLike, as_targets

MANY = 200
"""Passes from which on a method is not among "all", but only among "everything"."""


GROUPS = ("all", "everything")


@dataclass(frozen=True)
class Selection:
    """The methods that were chosen, and why others were not. ``costs`` has, for those that fit, the
    passes at default settings: a share for those from a layer on, infinity if unknown before."""

    methods: tuple[str, ...]
    costs: Mapping[str, float]
    unfit: tuple[str, ...]
    """Methods for other networks or targets."""

    @property
    def costly(self) -> dict[str, float]:
        """The methods that fit but were left out for their cost, with their numbers of passes."""
        return {name: cost for name, cost in self.costs.items() if name not in self.methods}

    @property
    def notes(self) -> list[str]:
        """The sentences that tell a user which methods were left out of "all", and why.
        The command line prints them as they are.
        """
        notes = []
        if self.unfit:
            names = ", ".join(self.unfit)
            notes.append(f"left out, as they are for other networks or targets: {names}")
        costly = [
            f"{name} ({cost:.0f})" if isfinite(cost) else name for name, cost in self.costly.items()
        ]
        if costly:
            how = python_or_command("'everything'", "--method everything")
            notes.append(
                f"left out, as they take {MANY} passes or more: {', '.join(costly)}; {how} takes "
                "them too"
            )
        return notes


def select(
    model: nn.Module,
    x: InputsLike,
    group: str = "all",
    *,
    layer: layer_names.Where | None = None,
    target: TargetLike = None,
    categories: Sequence[str] | None = None,
) -> Selection:
    """Choose methods for a network and a target: "all" that take fewer than 200 passes, or
    "everything". Methods for certain networks are tried out on ``x``."""
    wanted = [as_target(target, categories)]
    return _selected(
        Request.of(model, x, list_methods(), wanted, Settings(layer=layer, categories=categories)),
        group,
    )


def _selected(request: Request, group: str) -> Selection:
    """Choose the methods of a group from a request for all methods, with the cost of each.
    "all" keeps methods of fewer than `MANY` passes for one image.
    """
    fitting = _fit(request)
    costs = {}
    for name in fitting:
        one_method = _alone(request, get_method(name))
        costs[name] = one_method.cost(replace(one_method.plan(), images=1))
    chosen = tuple(name for name in fitting if group == "everything" or costs[name] < MANY)
    unfit = tuple(name for name in list_methods() if name not in fitting)
    return Selection(chosen, costs, unfit)


def requested(
    model: nn.Module,
    x: InputsLike,
    methods: MethodLike | Iterable[MethodLike],
    target: TargetLike,
    targets: Sequence[TargetLike] | None,
    top_k: int | None,
    **options: Unpack[AttributeOptions],
) -> Request:
    """Read the arguments of `attribute` or `plan` into a `Request`. For "all" or "everything", the
    model runs once or more to choose methods; else nothing runs yet.
    """
    settings = Settings(**options) if options else DEFAULTS
    all_targets = as_targets(target, targets, top_k, settings.categories)
    if isinstance(methods, str) and methods in GROUPS:
        # without budgets, so that costs are those at default settings
        layer_settings = Settings(layer=settings.layer, layout=settings.layout)
        all_methods = Request.of(model, x, list_methods(), all_targets[:1], layer_settings)
        methods = _selected(all_methods, methods).methods
    return Request.of(model, x, methods, all_targets, settings)


def _fit(request: Request) -> list[str]:
    """The names of the methods that fit the network and the target of a request for all methods, in
    its order."""
    try:
        has_maps = bool(request.layers) or bool(default_layer(request.model, request.inputs))
    except LayerError:
        has_maps = False
    return [
        name
        for name, method in request.methods.items()
        if (has_maps or not uses_layer(method)) and _fits(request, method)
    ]


def _fits(request: Request, method: Method) -> bool:
    """Whether a method fits the network and target; one for certain networks is tried with little
    work, and any `ExplainError` means that it does not.
    """
    # hooks see nothing inside scripted modules
    if any(need.looks_inside for need in method.needs) and unwrap.scripted(request.model):
        return False
    # a model that runs over windows cannot be read by every method
    if not can_be_stitched(method, request.model):
        return False
    # an objective compares classes, so that it fits class targets only: others refuse it
    has_objective = any(getattr(need, "objective", None) is not None for need in method.needs)
    if not (method.only_for or has_objective):
        return True
    try:
        with muted():
            _alone(request, method.tried()).attributions()
    except ExplainError:
        return False
    return True


def _alone(request: Request, method: Method) -> Request:
    """The request for one method and the first target alone, with the settings of a plain call, to
    try or cost it. Budgets and batch sizes of the call are left out, so that costs are comparable.
    """
    settings = Settings(layer=request.settings.layer)
    return replace(
        request, methods={method.name: method}, targets=request.targets[:1], settings=settings
    )
