"""`attribute`: a model and a batch of tensors in, `Attribution` values out.

A call becomes a `Request`. Its methods (`explain.methods`, found by name in the registry) say what evidence they need;
`explain.engine.execution.gather` runs the model and collects it; and each method computes its map from the evidence.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import torch
from torch import nn

from explain._utils.errors import ExplainError, LayerError, MethodError, ModelError, either, keywords, muted, shown
from explain._utils.options import by_name
from explain._utils.version import __version__
from explain.attribution.diagnostics import warn_of_coverage, warn_of_half_precision, warn_of_result
from explain.attribution.result import Attribution, Channels, fused
from explain.data.inputs import InputLayout, Inputs, InputsLike, Path, dotted
from explain.engine import Evidence
from explain.engine.ends import reading
from explain.engine.execution import gather
from explain.engine.needs import FollowsGradient, NeedAtLayer, applied, needs_at
from explain.engine.perturbations import PerturbationRuns
from explain.engine.plan import Plan
from explain.engine.settings import MEMORY, Footprint, Precision, Progress, RuntimeSettings
from explain.engine.validation import check_inputs
from explain.hooks import HookGroup, layer_names, preserve, unwrap
from explain.hooks.interventions import Intervention, active_interventions, intervene
from explain.layers import default_layer
from explain.layers.calls import channels_of, find_layers, window_calls
from explain.layers.costs import cost_after
from explain.layers.default_layer import stage_layers
from explain.layers.stitched import Stitched
from explain.layers.summary import forget_summary, summary_is_current
from explain.methods import Method, Source, list_methods
from explain.methods.base import Fusion, MethodLike, can_be_stitched, get_method, options, uses_layer
from explain.targets import Target, answer, as_target, outputs, packed, text
from explain.targets.classes import BinaryLogit, ClassTarget, TopClass, activation_for
from explain.targets.resolve import TargetLike, as_targets


class CommonOptions(TypedDict, total=False):
    """How to explain; see `attribute`."""

    layer: layer_names.Where | None
    fuse: Fusion | None
    batch_size: int | None
    precision: Precision
    samples: int | None
    tolerance: float | None
    max_seconds: float | None


class CallOptions(TypedDict, total=False):
    """How one call goes."""

    progress: Progress | None
    keep_partial: bool
    interventions: Sequence[Intervention]


class Options(CommonOptions, CallOptions, total=False):
    """How to explain tensors."""

    categories: Sequence[str] | None
    activation: outputs.Activation | None
    create_graph: bool
    layout: InputLayout | None


class RunOptions(CommonOptions, total=False):
    """How to explain the photos of a source."""

    targets: Sequence[TargetLike] | None
    top_k: int | None


class PhotoOptions(RunOptions, CallOptions, total=False):
    """How to explain photos."""


@dataclass(frozen=True)
class Settings(RuntimeSettings):
    """How to explain, checked."""

    layer: layer_names.Where | None = None
    fuse: Fusion | None = None
    categories: Sequence[str] | None = None
    samples: int | None = None
    tolerance: float | None = None
    max_seconds: float | None = None
    interventions: Sequence[Intervention] = ()
    layout: InputLayout | None = None

    def __post_init__(self) -> None:
        outputs.check_activation(self.activation)
        super().__post_init__()

    @property
    def budget(self) -> dict[str, float]:
        """How much work methods that estimate may do, where it is not their own."""
        given = {"samples": self.samples, "tolerance": self.tolerance, "max_seconds": self.max_seconds}
        return {name: value for name, value in given.items() if value is not None}


EvidenceOfCalls: TypeAlias = Mapping[str | None, Sequence[Evidence]]
"""The evidence by layer, with that of each of its calls that are meant."""


class _OtherPathError(Exception):
    """The inputs take another path through the network than those that its layers were chosen by."""


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be explained: a model and its inputs, methods by name, targets, and how."""

    model: nn.Module
    inputs: Inputs
    methods: Mapping[str, Method]
    targets: list[Target]
    settings: Settings
    layers: list[str] | None
    """The layers that were named; None leaves the choice to each method."""
    tokens: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The tokens of the texts that are explained together with the photo."""

    @classmethod
    def of(
        cls, model: nn.Module, x: InputsLike, methods: MethodLike | Iterable[MethodLike], targets: Sequence[Target],
        settings: Settings,
    ) -> "Request":  # fmt: skip
        model, x = packed.with_photos(unwrap.unwrapped(model), x)
        model, inputs, tokens = text.with_texts(model, check_inputs(model, x, settings.layout), targets)
        model, inputs, of_answer = answer.with_answers(model, inputs, targets)
        named = settings.layer  # a wrong name is reported even if no method uses a layer
        layers = None if named is None else find_layers(model, inputs, named)
        turns = f"run them in {either('two calls', 'two commands, the second with another --output')}"
        chosen = _within(by_name(methods, get_method, MethodError, "method", turns, _are_equal), settings.budget)
        if layers is not None:
            chosen = {name: m.in_layer() for name, m in chosen.items()}
        if inputs.x.ndim == 5:
            first = inputs.layout == "NTCHW"
            chosen = {name: m.with_frames(inputs.x, frames_first=first) for name, m in chosen.items()}
        for name, method in chosen.items():
            if settings.create_graph and not method.differentiable:
                raise MethodError(f"method {name} must be left out with create_graph, it has no graph; take saliency")
            if method.one_input and len(inputs.paths) > 1:
                got, remedy = ", ".join(map(dotted, inputs.paths)), "name one in explain.Inputs(..., explained=...)"
                raise MethodError(f"method {name} must explain one input, got {got}; {remedy}")
        sized = [target.sized(tuple(inputs.x.shape[2:])) for target in targets]
        said = activation_for(targets, settings.activation)
        if said != settings.activation:
            settings = replace(settings, activation=said)
        return cls(model, inputs, chosen, sized, settings, layers, tokens | of_answer)

    def attributions(self) -> list[dict[str, Attribution]]:
        """Run it: the attributions by method, for each target."""
        warn_of_half_precision(self.methods, self.inputs.x)
        with self._reading():
            try:
                return self._run(self._layers_by_method())
            except _OtherPathError:
                return self._run(self._layers_by_method(), follow=False)
            except LayerError:
                if self.layers is not None:
                    raise
            # The chosen layers lead to another head than this target's, or the network does something else than before.
            forget_summary(self.model)
            return self._run(self._layers_by_method(refresh=True))

    def _reading(self) -> AbstractContextManager[Any]:
        """Within this block, outputs are read by what is known of the model."""
        return reading(self.model, self.inputs, self.settings.activation, self.settings.categories)

    def plan(self) -> Plan:
        """The passes that it takes."""
        with self._reading():
            layers = self._layers_by_method()
        calls = {call for names in layers.values() for layer in names for call in self._calls(layer)}
        channels = channels_of(self.model, self.inputs, calls)
        size, precision = tuple(self.inputs.x.shape[2:]), self.settings.precision
        return Plan(self._needs(layers), len(self.targets), len(self.inputs), channels, precision, size)

    def measured(self) -> Plan:
        """The same with about how long they take, and how much memory besides the weights.

        A pass of the first image is timed, and a backward pass counted as two.
        """
        plan, one, footprint = self.plan(), self.inputs.first(), Footprint()
        layers = {layer for needs in plan.wanted.values() for need in needs if (layer := need.layer) is not None}
        with preserve.untouched(self.model), torch.no_grad(), HookGroup(self.model) as group:
            one.call(self.model)  # which prepares kernels and memory
            footprint.watch(group, self.model, 1)
            begun = time.perf_counter()
            one.call(self.model)
            seconds = time.perf_counter() - begun
        backwards = plan.images * plan.passes_back + plan.rows_back
        sizes = [size for _, size in footprint.outputs] or [0]
        at_once = plan.images * (sum(sizes) if plan.passes_back else 2 * max(sizes))
        rows = min(MEMORY, plan.rows * (sum(sizes) if plan.rows_back else 4 * max(sizes)))
        shares = cost_after(self.model, self.inputs, layers)
        return replace(plan, seconds=seconds * (plan.cost(shares) + backwards), memory=max(at_once, rows))

    def _layers_by_method(self, *, refresh: bool = False) -> dict[str, list[str]]:
        """The layers that each method uses: those that were named, or its own choice."""

        def score(output: Any) -> torch.Tensor:
            count = len(self.inputs)
            return self.targets[0].settled(output, count).pick(output, count)[0]

        of_class = isinstance(self.targets[0], (ClassTarget, TopClass, BinaryLogit))

        @cache
        def chosen(stages: bool) -> list[str]:
            if stages:
                return stage_layers(self.model, self.inputs, score, of_class=of_class, refresh=refresh)
            return [default_layer(self.model, self.inputs, score, of_class=of_class, refresh=refresh)]

        def of(method: Method) -> list[str]:
            if not can_be_stitched(method, self.model):
                remedy = "take one that gives a map of a layer, such as gradcam, or of the input, such as saliency"
                raise MethodError(f"method {method.name} must be left out for a Stitched model; {remedy}")
            return (self.layers or chosen(bool(method.fusion))) if uses_layer(method) else []

        return {name: of(method) for name, method in self.methods.items()}

    def _run(self, layers: Mapping[str, list[str]], *, follow: bool = True) -> list[dict[str, Attribution]]:
        """Gather the evidence, and run each method on that of its layers.

        With ``follow``, layers that were chosen by default are dropped if these inputs take another path through the
        network than the inputs that they were chosen by.
        """

        def must_follow(ran: Sequence[str]) -> None:
            if not summary_is_current(self.model, self.inputs, ran):
                raise _OtherPathError

        found, altered = [], active_interventions(self.model)
        check = must_follow if follow and self.layers is None and any(layers.values()) else None
        plan = Plan(self._needs(layers))
        gathered = gather(self.model, self.inputs, plan, self.targets, self.settings, check_modules=check)
        for target, evidence_of in zip(self.targets, gathered, strict=False):  # there may be fewer detections
            follows = partial(self._follows_gradient, target)
            attributions = {}
            for name, method in self.methods.items():
                calls: dict[str | None, Sequence[str | None]] = {layer: self._calls(layer) for layer in layers[name]}
                own = calls or {None: [None]}
                used = [
                    {layer: [evidence_of(call, path) for call in calls] for layer, calls in own.items()}
                    for path in self._paths
                ]
                keep = self.settings.keep_partial
                every = [each for row in used for calls in row.values() for each in calls]
                if keep and not all(method.needs <= set(each.found) for each in every):
                    continue  # interrupted before all that it needs was found
                try:
                    with preserve.calculating(self.inputs.x.device.type, create_graph=self.settings.create_graph):
                        attributions[name] = self._applied(method, used)
                except KeyboardInterrupt:
                    if not keep:
                        raise
                    continue
                rounding = plan.rounding(name, every[0].rounding)
                runs_again = any(isinstance(need, PerturbationRuns) for need in method.needs)
                if rounding is not None and not runs_again and all(each.inexact for each in every):
                    rounding = max(rounding, self._off_by_rounding(method, used, attributions[name]))
                attributions[name] = replace(attributions[name], interventions=altered, rounding=rounding)
                if not self.settings.create_graph:  # early in training, maps of zeros are nothing unusual
                    warn_of_result(method, attributions[name], list(chain(*used[0].values())), follows)
            found.append(attributions)
        if not all(found):
            raise KeyboardInterrupt("interrupted before any method had something to show")
        return found

    def _follows_gradient(self, target: Target) -> bool:
        """Whether the scores change along their gradient in the inputs as it says."""
        need = FollowsGradient()
        if len(self.inputs.paths) > 1:
            return True
        (evidence_of,) = gather(self.model, self.inputs, Plan({"": needs_at({need}, [])}), [target], RuntimeSettings())
        return evidence_of(None)[need]

    def _off_by_rounding(self, method: Method, used: Sequence[EvidenceOfCalls], exact: Attribution) -> float:
        """By how much values are off with other rounding errors of the same size, as a share of the largest value."""

        def inexact(evidence: Evidence) -> Evidence:
            return replace(evidence, found={**evidence.found, **evidence.inexact})

        of_inputs = [{layer: list(map(inexact, calls)) for layer, calls in of_input.items()} for of_input in used]
        with preserve.calculating(self.inputs.x.device.type), muted():
            values = self._applied(method, of_inputs).values
        largest = exact.values.abs().max()
        return float((values - exact.values).abs().max() / largest) if largest else 0.0

    def _needs(self, layers: Mapping[str, list[str]]) -> dict[str, frozenset[NeedAtLayer]]:
        """What each method needs, at its layers."""
        calls = {name: [call for layer in own for call in self._calls(layer)] for name, own in layers.items()}
        return {name: needs_at(method.needs, calls[name], self._paths) for name, method in self.methods.items()}

    def _calls(self, layer: str) -> list[str]:
        return window_calls(self.model, self.inputs, layer)

    @property
    def _paths(self) -> Sequence[Path | None]:
        """The explained inputs; one alone goes without a name."""
        return self.inputs.paths if len(self.inputs.paths) > 1 else (None,)

    def _applied(self, method: Method, evidence: Sequence[EvidenceOfCalls]) -> Attribution:
        """Run a method on the evidence of each explained input, layer, and call of the layer."""
        apply = partial(_apply, method, self.model, how=self.settings.fuse, layout=self.inputs.layout)
        if len(evidence) == 1 or not any(need.of_input for need in method.needs):  # maps of a layer are of no input
            return apply(evidence[0], explained=self.inputs.name)
        names = [dotted(path) for path in self.inputs.paths]
        parts = {name: apply(each, explained=name) for name, each in zip(names, evidence, strict=True)}
        deltas = [part.delta for part in parts.values() if part.delta is not None]
        expected = method.expected_sum(_first(evidence[0]))
        if len(deltas) == len(parts) and expected is not None:
            # Each has been compared with the whole sum, which all of them make up together.
            delta = torch.stack(deltas).sum(0) + (len(parts) - 1) * expected
            parts = {name: replace(part, delta=delta) for name, part in parts.items()}
        parts = {name: replace(part, tokens=self.tokens.get(name, ())) for name, part in parts.items()}
        return replace(next(iter(parts.values())), parts=parts)


def _within(methods: dict[str, Method], budget: Mapping[str, float]) -> dict[str, Method]:
    """The methods with these budgets, as far as each has such an option."""
    for option, value in budget.items():
        takers = {name: method for name, method in methods.items() if option in options(method)}
        if not takers:
            raise MethodError(f"{option} must go with a method that estimates, such as rise, got {', '.join(methods)}")
        methods |= {name: replace(method, **{option: value}) for name, method in takers.items()}
    return methods


def _are_equal(one: object, other: object) -> bool:
    """Whether two options, or methods, are equal; ``==`` of tensors among them gives no single answer."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, Method) and isinstance(other, Method):
        return _are_equal(tuple(options(one).values()), tuple(options(other).values()))
    return one == other


def _first(evidence: EvidenceOfCalls) -> Evidence:
    return next(iter(evidence.values()))[0]


def _apply(
    method: Method, model: nn.Module, evidence: EvidenceOfCalls, *, how: Fusion | None, layout: InputLayout | None,
    explained: str | None,
) -> Attribution:  # fmt: skip
    """Run a method on the evidence of each layer, in each window of a stitched model; fuse where there are several."""
    first, maps = _first(evidence), {}
    stitched = model if isinstance(model, Stitched) and uses_layer(method) else None
    coverage = warn_of_coverage(method, first)
    for layer, calls in evidence.items():
        of_calls = [applied(method, call) for call in calls]
        maps[str(layer)] = of_calls[0] if stitched is None else stitched.stitch_maps(of_calls, first.size)
    for name, values in maps.items():
        if not torch.isfinite(values).all():
            where = f" at layer {name}" if uses_layer(method) else ""
            got = f"but {method.name} found NaN or infinity{where}; look for a root, logarithm or division at zero"
            raise ModelError(f"model must have finite activations and gradients, {got}, or overflow in half precision")
    names, values = tuple(maps), next(iter(maps.values()))
    how = how or method.fusion or "mean"
    if len(maps) > 1 or method.fusion:
        values = fused(list(maps.values()), how)
    if len(maps) > 1:
        found: dict[str, Any] = {"maps": maps, "fuse": how}
    elif stitched is not None:
        found = {}
    else:
        ranked, found = method.channels(first), dict(vars(method.outcome(first)))
        found["channels"] = None if ranked is None else Channels(*ranked.sort(dim=1, descending=True, stable=True))
        found["delta"] = None if (delta := method.delta(first, values)) is None else delta.detach()
    frames_first = layout == "NTCHW" and values.ndim == 5
    if frames_first:
        values = values.transpose(1, 2)
    target = first.target if first.classes is None else first.classes
    used = None if not uses_layer(method) else names[0] if len(names) == 1 else names
    return Attribution(
        method.name, values, target, first.score.detach(), used, first.size, method.style, options(method),
        logits=first.logits, input=explained, coverage=coverage, frames_first=frames_first, **found,
    )  # fmt: skip


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
    model: nn.Module, x: InputsLike, group: str = "all", *, layer: layer_names.Where | None = None,
    target: TargetLike = None, categories: Sequence[str] | None = None,
) -> Selection:  # fmt: skip
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
    return _selected(Request.of(model, x, list_methods(), wanted, Settings(layer=layer, categories=categories)), group)


def _selected(request: Request, group: str) -> Selection:
    fit, costs = _fit(request), {}
    for name in fit:
        plan = replace(_alone(request, get_method(name)).plan(), images=1)
        layers = {layer for needs in plan.wanted.values() for need in needs if (layer := need.layer) is not None}
        costs[name] = plan.cost(cost_after(request.model, request.inputs, layers))
    chosen = tuple(name for name in fit if group == "everything" or costs[name] < MANY)
    return Selection(chosen, costs, tuple(name for name in list_methods() if name not in fit))


def requested(
    model: nn.Module, x: InputsLike, methods: MethodLike | Iterable[MethodLike], target: TargetLike,
    targets: Sequence[TargetLike] | None, top_k: int | None, **options: Unpack[Options],
) -> Request:  # fmt: skip
    """The request of a call of `attribute`, with the methods of a group for its name."""
    settings = Settings(**options)
    wanted = as_targets(target, targets, top_k, settings.categories)
    if isinstance(methods, str) and methods in GROUPS:
        how = Settings(layer=settings.layer, layout=settings.layout)
        all_methods = Request.of(model, x, list_methods(), wanted[:1], how)
        methods = _selected(all_methods, methods).methods
    return Request.of(model, x, methods, wanted, settings)


@keywords()
def applicable_methods(
    model: nn.Module, x: InputsLike, *, layer: layer_names.Where | None = None, target: TargetLike = None
) -> list[str]:
    """Name the methods that this network and target can be explained with: all but those for another kind.

    Those for a kind of network, or for a class as target, are tried on ``x`` ``(N, C, H, W)``.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> import torch
    >>> sorted(set(list_methods()) - set(applicable_methods(model, torch.rand(1, 3, 4, 4))))[3:8]
    ['drise', 'featurepermutation', 'gradeclip', 'gradientrollout', 'legrad']
    """
    return _fit(Request.of(model, x, list_methods(), as_targets(target), Settings(layer=layer)))


def _fit(request: Request) -> list[str]:
    try:
        has_maps = bool(request.layers) or bool(default_layer(request.model, request.inputs))
    except LayerError:
        has_maps = False
    return [name for name, m in request.methods.items() if (has_maps or not uses_layer(m)) and _fits(request, m)]


def _fits(request: Request, method: Method) -> bool:
    inside = any(need.looks_inside for need in method.needs) and unwrap.scripted(request.model)
    if inside or not can_be_stitched(method, request.model):
        return False
    if not (method.only_for or any(getattr(need, "objective", None) is not None for need in method.needs)):
        return True
    try:
        with muted():
            _alone(request, method.tried()).attributions()
    except ExplainError:
        return False
    return True


def _alone(request: Request, method: Method) -> Request:
    settings = Settings(layer=request.settings.layer)
    return replace(request, methods={method.name: method}, targets=request.targets[:1], settings=settings)


__all__ = ["Attribution", "Options", "applicable_methods", "attribute", "plan"]

Several: TypeAlias = Literal["all", "everything"] | list[Any] | tuple[Any, ...]


class _OneTarget(Options, total=False):
    target: TargetLike


class _Targets(Options, total=False):
    targets: Sequence[TargetLike] | None
    top_k: int | None


@overload
def attribute(  # type: ignore[overload-overlap]  # the name of a group is a name, too
    model: nn.Module, x: InputsLike, method: Several, **options: Unpack[_OneTarget]
) -> dict[str, Attribution]: ...
@overload
def attribute(  # type: ignore[overload-overlap]
    model: nn.Module, x: InputsLike, method: MethodLike = "gradcam", **options: Unpack[_OneTarget]
) -> Attribution: ...
@overload
def attribute(  # type: ignore[overload-overlap]
    model: nn.Module, x: InputsLike, method: Several, **options: Unpack[_Targets]
) -> list[dict[str, Attribution]]: ...
@overload
def attribute(
    model: nn.Module, x: InputsLike, method: MethodLike = "gradcam", **options: Unpack[_Targets]
) -> list[Attribution]: ...


@keywords(Options)
def attribute(
    model: nn.Module, x: InputsLike, method: MethodLike | Iterable[MethodLike] = "gradcam", *,
    target: TargetLike = None, targets: Sequence[TargetLike] | None = None, top_k: int | None = None,
    **options: Unpack[Options],
) -> Any:  # fmt: skip
    """Attribute one score per image of ``x`` ``(N, C, H, W)``, or per video ``(N, C, T, H, W)`` or ``(N, T, C, H, W)``.

    One method gives an `Attribution`; several, which share their passes, give a dictionary of them by name. With
    ``targets`` or ``top_k`` there is a list of either, with an entry for each target.

    Modes belong to modules, not to threads: while a model is explained, other threads find it in evaluation mode too.
    To explain a model that another thread trains, explain ``explain.hooks.copied(model)``, made between two steps. An
    explanation that another thread's ``train()`` came in between is refused.

    Where a model normalises over the images of a batch, each is explained as it stands among the others: by the
    gradient of its own score, or by altering it alone. Where they depend on each other in another way, methods that run
    altered images do the same, but gradients hold an image's part in the other scores too: explain it alone.

    Args:
        model: any ``nn.Module``; it and the caller's autograd state are left exactly as found.
        x: preprocessed images, on the model's device; where the model takes more, a tuple of its positional arguments,
            a mapping of its keyword arguments, or `explain.Inputs`. The first image among them is explained. A video
            has its frames behind the channels or before them, as tiles and bags of patches have; see ``layout``.
        method: a name from `list_methods` or a method object, or a list of these; "all" for the methods that the
            network can be explained with in fewer than 200 passes each, or "everything" for the others too.
        target: a class index or label for all images, a callable ``output -> (N,)``, one of `explain.targets` (a class
            in a region, a detection, a difference, a similarity), or None for each image's top class; or a list or
            tensor of N of these, one for each image.
        targets: several targets for every image, instead of ``target``.
        top_k: the k best classes of each image, instead of ``target``; of a detector and one image, the k best
            detections, or as many as there are.
        layer: a dotted name, a pattern, a module, or several, whose maps are fused; None finds the last feature map.
            A layer that is called several times stands for its last call, and ``"name@0"`` for its first.
        fuse: how the maps of several layers become one, each divided by its maximum: "mean" (None takes the method's
            own way, and else the mean), "max" or "product".
        categories: the labels of the model's classes, for a target given as a label.
        batch_size: for methods that run the model many times, how many inputs at once; None takes what fits into memory
            and is fastest, found in a short trial where the work is long.
        progress: called with the number of such inputs done and their total; True prints them in a line.
            If it takes a third argument, that is the maps so far, by method.
        precision: "bfloat16" (or "bf16") computes these runs in bfloat16 where only their scores are needed, and
            ``rounding`` of the result says how far they are off; gradients would be off by tens of percent.
        samples, tolerance, max_seconds: for methods that estimate, how many altered photos to run at most; the largest
            standard error over the largest magnitude that is small enough to stop; and after how many seconds to stop.
        keep_partial: whether an interrupt (Ctrl-C) gives what there is by then, with ``finished`` false.
        activation: what makes probabilities of the model's outputs, for methods that explain one: "softmax", "sigmoid",
            or "none" where they are probabilities already; None finds it out.
        create_graph: keep the graph of ``values`` to the explained inputs and to the weights, to train on them; for the
            families of gradients, paths, class activation maps and relevance. The model is explained in evaluation
            mode here too, and its mode comes back. Scores and ``delta`` are detached, and no warnings are given.
        layout: of ``x`` with five dimensions, "NTCHW" if frames, tiles or patches come before the channels, or "NCTHW";
            None finds it out, and a warning says once for each model that they do. Maps ``(N, T, H, W)`` have one for
            each of them, and values for each channel lie as ``x`` does.
        interventions: what layers give instead, such as ``[explain.hooks.Ablate("layer3", channels=[5])]``.

    Raises:
        ExplainError: one line that says which argument does not fit and what would.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    >>> a = attribute(model, torch.rand(2, 3, 16, 16), "gradcam", target=3)
    >>> a.values.shape, a.heatmap.shape, a.layer, a.target.tolist()
    (torch.Size([2, 14, 14]), torch.Size([2, 16, 16]), '1', [3, 3])
    >>> list(attribute(model, torch.rand(2, 3, 16, 16), ["gradcam", "saliency"], target=[3, 0]))
    ['gradcam', 'saliency']
    >>> [found.target.tolist() for found in attribute(model, torch.rand(2, 3, 16, 16), targets=[4, 0])]
    [[4, 4], [0, 0]]
    """
    with intervene(model, options.get("interventions", ())):
        found = requested(model, x, method, target, targets, top_k, **options).attributions()
    several = isinstance(method, Iterable) and not (isinstance(method, str) and method not in GROUPS)
    results = found if several else [next(iter(each.values())) for each in found]
    return results[0] if targets is None and top_k is None else results


@keywords(Options)
def plan(
    model: nn.Module, x: InputsLike, methods: MethodLike | Iterable[MethodLike] = "gradcam", *,
    target: TargetLike = None, targets: Sequence[TargetLike] | None = None, top_k: int | None = None,
    measure: bool = False, **options: Unpack[Options],
) -> Plan:  # fmt: skip
    """Say which passes an explanation would take, before they are run; arguments as for `attribute`.

    The plan prints itself: forward passes, backward passes and perturbed rows, each with the methods that they are for.
    To find the layers, the model may be run on one image. With ``measure``, it is run on one twice more, and the plan
    says about how many seconds and how much memory it takes here.

    Raises:
        ExplainError: as for `attribute`.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> print(plan(model, torch.rand(1, 3, 4, 4), ["gradcam", "scorecam"]))
    1 forward pass of 1 image, recorded from 1 on: gradcam, scorecam
    1 backward pass from the score to 1: gradcam
    1 perturbed row (a blank photo) forward: scorecam
    4 perturbed rows (the photo seen through each map) forward: scorecam
    in all: 1 forward pass, 1 backward pass, 5 perturbed rows forward
    """
    with intervene(model, options.get("interventions", ())):
        request = requested(model, x, methods, target, targets, top_k, **options)
        return request.measured() if measure else request.plan()


_TITLE = f"explain: attribution maps for PyTorch vision models, version {__version__}"
PACKAGE = Source("explain", "{The explain authors}", _TITLE, 2026, "Python package", "misc")


@keywords()
def cite(*methods: MethodLike) -> str:
    """Return BibTeX entries for methods, or for this package if none is named.

    A method that contains others is cited together with them; no entry comes twice.

    Args:
        methods: names or method objects, such as ``"gradcam"`` or ``"smooth(layercam)"``.

    Raises:
        MethodError: a method is unknown, or does not say where it comes from.

    >>> print(cite("cam"))
    @inproceedings{zhou2016cam,
      author = {Zhou, Bolei and Khosla, Aditya and Lapedriza, Agata and Oliva, Aude and Torralba, Antonio},
      title = {{Learning Deep Features for Discriminative Localization}},
      booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
      year = {2016},
      doi = {10.1109/CVPR.2016.319},
      eprint = {1512.04150},
      archiveprefix = {arXiv},
    }
    >>> cite("smooth(gradcam)").count("@"), cite().splitlines()[0]
    (2, '@misc{explain,')
    """
    sources = [source for method in methods for source in _sources(get_method(method))] if methods else [PACKAGE]
    return "\n\n".join(source.bibtex() for source in dict.fromkeys(sources))


def _sources(method: Method) -> Iterator[Source]:
    """Yield the source of a method, and those of the methods among its options."""
    source = getattr(method, "source", None)
    if not isinstance(source, Source):
        raise MethodError(f"source of {method.name} must be an explain.methods.Source, got {shown(source)}; set it")
    yield source
    for option in options(method).values():
        if isinstance(option, Method):
            yield from _sources(option)
