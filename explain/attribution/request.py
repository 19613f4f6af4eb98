"""`Request`: a call, read once; it finds the layers, has the evidence gathered, and runs each method on its part."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from explain._utils.errors import LayerError, MethodError, ModelError, either, muted
from explain._utils.options import by_name
from explain.attribution.diagnostics import warn_of_coverage, warn_of_half_precision, warn_of_result
from explain.attribution.options import Settings
from explain.attribution.result import Attribution, Channels, fused
from explain.data.inputs import InputLayout, Inputs, InputsLike, Path, dotted
from explain.engine import Evidence
from explain.engine.ends import reading
from explain.engine.execution import gather
from explain.engine.needs import FollowsGradient, NeedAtLayer, applied, needs_at
from explain.engine.perturbations import PerturbationRuns
from explain.engine.plan import Plan
from explain.engine.settings import MEMORY, Footprint, RuntimeSettings
from explain.engine.validation import check_inputs
from explain.hooks import HookGroup, preserve, unwrap
from explain.hooks.intervening import active_interventions
from explain.layers import default_layer
from explain.layers.calls import channels_of, find_layers, window_calls
from explain.layers.costs import cost_after
from explain.layers.default_layer import stage_layers
from explain.layers.stitched import Stitched
from explain.layers.summary import forget_summary, summary_is_current
from explain.methods import Method
from explain.methods.base import Fusion, MethodLike, can_be_stitched, get_method, options, uses_layer
from explain.targets import Target, answer, packed, text
from explain.targets.classes import BinaryLogit, ClassTarget, TopClass, activation_for

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
