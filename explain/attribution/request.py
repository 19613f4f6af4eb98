"""A request: a model, its inputs, methods and targets, and how to explain; and how it is answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from explain._utils.errors import LayerError, MethodError, ModelError, either
from explain.attribution.diagnostics import (
    warn_if_empty,
    warn_of_closed,
    warn_of_gaps,
    warn_of_half_precision,
    warn_of_missed,
    warn_of_signs,
    warn_of_stabilised,
)
from explain.attribution.options import Settings
from explain.attribution.result import Attribution, Channels, fused
from explain.data.inputs import Inputs, InputsLike, Path, dotted
from explain.engine import Evidence
from explain.engine.execution import gather
from explain.engine.needs import NeedAtLayer, RelevanceCoverage, RuleCoverage, asks_of
from explain.engine.plan import Plan
from explain.engine.validation import check_inputs
from explain.hooks.preserve import calculating
from explain.hooks.unwrap import unwrapped
from explain.layers import default_layer
from explain.layers.calls import channels_of, find_layers, forget_summary, summary_is_current
from explain.layers.default_layer import stage_layers
from explain.methods import Method
from explain.methods.base import Fusion, Outcome, options, uses_layer
from explain.methods.registry import MethodLike, get_method
from explain.targets import Target


class _OtherWayError(Exception):
    """The inputs take another way through the network than those that its layers were chosen by."""


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

    @classmethod
    def of(
        cls,
        model: nn.Module,
        x: InputsLike,
        methods: MethodLike | Iterable[MethodLike],
        targets: Sequence[Target],
        settings: Settings,
    ) -> Request:
        model = unwrapped(model)
        inputs = check_inputs(model, x)
        named = settings.layer  # a wrong name is reported even if no method looks at layers
        layers = None if named is None else find_layers(model, inputs, named)
        chosen = _within(_by_name(methods), settings.budget)
        if layers is not None:
            chosen = {name: m.in_layer() for name, m in chosen.items()}
        _must_take_them(chosen, inputs)
        return cls(model, inputs, chosen, list(targets), settings, layers)

    def answered(self) -> list[dict[str, Attribution]]:
        warn_of_half_precision(self.methods, self.inputs.x)
        try:
            return self._answered(self.layers_by_method())
        except _OtherWayError:
            return self._answered(self.layers_by_method(), follow=False)
        except LayerError:
            if self.layers is not None:
                raise
        # The chosen layers lead to another head than this target's, or the network does something else than before.
        forget_summary(self.model)
        return self._answered(self.layers_by_method(refresh=True))

    def plan(self, layers: Mapping[str, list[str]] | None = None) -> Plan:
        """Which passes answer it; ``layers`` are those that each method looks at."""
        looked_at = self.layers_by_method() if layers is None else layers
        wanted = self._asks(looked_at)
        channels = channels_of(self.model, self.inputs, {layer for names in looked_at.values() for layer in names})
        size = tuple(self.inputs.x.shape[2:])
        return Plan(wanted, len(self.targets), len(self.inputs), channels, self.settings.precision, size)

    def layers_by_method(self, *, refresh: bool = False) -> dict[str, list[str]]:
        """The layers that each method looks at: those asked for, or its own choice."""
        return {name: self._layers_of(method, refresh) for name, method in self.methods.items()}

    def _layers_of(self, method: Method, refresh: bool) -> list[str]:
        if not uses_layer(method):
            return []
        if self.layers:
            return self.layers
        find = stage_layers if method.fusion else default_layer
        found = find(self.model, self.inputs, self._score, refresh=refresh)
        return [found] if isinstance(found, str) else found

    def _score(self, output: Any) -> torch.Tensor:
        count = len(self.inputs)
        return self.targets[0].settled(output, count).pick(output, count)[0]

    def _answered(self, layers: Mapping[str, list[str]], *, follow: bool = True) -> list[dict[str, Attribution]]:
        """Gather the evidence, and run the methods on it, each on that of the layers that it looks at.

        With ``follow``, layers that were chosen by default are dropped if these inputs take another way through the
        network than the inputs that they were chosen by.
        """
        found = []
        chosen = self.layers is None and any(layers.values())
        told = self._must_follow if follow and chosen else None
        plan, work = Plan(self._asks(layers)), self.settings.work
        for evidence_of in gather(self.model, self.inputs, plan, self.targets, work, told=told):
            answers = {}
            for name, method in self.methods.items():
                looked_at: Sequence[str | None] = layers[name] or [None]
                used = [[evidence_of(layer, path) for layer in looked_at] for path in self._paths]
                if self.settings.keep_partial and not all(_answered(method, each) for row in used for each in row):
                    continue
                try:
                    with calculating(self.inputs.x.device.type):
                        answers[name] = self._applied(method, used)
                except KeyboardInterrupt:
                    if not self.settings.keep_partial:
                        raise
                    continue
                warn_of_signs(method, answers[name])
                warn_of_missed(method, answers[name], used[0][0])
                warn_of_stabilised(method, answers[name])
                warn_if_empty(method, answers[name], used[0])
            found.append(answers)
        if not all(found):
            raise KeyboardInterrupt("interrupted before any method had something to show")
        return found

    def _must_follow(self, ran: Sequence[str]) -> None:
        if not summary_is_current(self.model, self.inputs, ran):
            raise _OtherWayError

    def _asks(self, layers: Mapping[str, list[str]]) -> dict[str, frozenset[NeedAtLayer]]:
        """What each method asks for, at the layers that it looks at."""
        return {name: asks_of(method.needs, layers[name], self._paths) for name, method in self.methods.items()}

    @property
    def _paths(self) -> Sequence[Path | None]:
        """The explained inputs; one alone goes without a name."""
        return self.inputs.paths if len(self.inputs.paths) > 1 else (None,)

    def _applied(self, method: Method, evidence: Sequence[Sequence[Evidence]]) -> Attribution:
        """Run a method on the evidence of each explained input."""
        how = self.settings.fuse
        if len(evidence) == 1 or not any(need.of_input for need in method.needs):  # maps of a layer are of no input
            return _apply(method, evidence[0], how, self.inputs.name)
        names = [dotted(path) for path in self.inputs.paths]
        parts = {name: _apply(method, each, how, name) for name, each in zip(names, evidence, strict=True)}
        deltas = [part.delta for part in parts.values() if part.delta is not None]
        expected = method.expected_sum(evidence[0][0])
        if len(deltas) == len(parts) and expected is not None:
            # Each has been compared with the whole sum, which all of them make up together.
            delta = torch.stack(deltas).sum(0) + (len(parts) - 1) * expected
            parts = {name: replace(part, delta=delta) for name, part in parts.items()}
        first = next(iter(parts.values()))
        return replace(first, parts=parts)


def _by_name(methods: MethodLike | Iterable[MethodLike]) -> dict[str, Method]:
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        methods = [methods]
    chosen: dict[str, Method] = {}
    for given in methods:
        method = get_method(given)
        if not _are_equal(chosen.setdefault(method.name, method), method):
            raise MethodError(
                f"methods must have different names, got two of {method.name!r}; ask for them in two "
                f"{either('calls', 'commands, the second with another --output')}"
            )
    if not chosen:
        raise MethodError("methods must name at least one method, got none; see explain.list_methods()")
    return chosen


def _must_take_them(methods: Mapping[str, Method], inputs: Inputs) -> None:
    """Refuse several explained inputs for a method that takes one."""
    alone = [name for name, method in methods.items() if method.one_input]
    if alone and len(inputs.paths) > 1:
        raise MethodError(
            f"method {alone[0]} must explain one input, got {', '.join(map(dotted, inputs.paths))}; name one of them "
            "in explain.Inputs(..., explained=...), or take integratedgradients"
        )


def _within(methods: dict[str, Method], budget: Mapping[str, float]) -> dict[str, Method]:
    """The methods with these budgets, as far as each has such an option."""
    for option, value in budget.items():
        takers = {name: method for name, method in methods.items() if option in options(method)}
        if not takers:
            raise MethodError(
                f"{option} must be given with a method that estimates, got it with {', '.join(methods)}; leave it out, "
                "or take kernelshap or rise"
            )
        for name, method in takers.items():
            methods[name] = replace(method, **{option: value})
    return methods


def _answered(method: Method, evidence: Evidence) -> bool:
    """Whether all that a method needs was found before an interrupt."""
    return method.needs <= set(evidence.found)


def _are_equal(one: object, other: object) -> bool:
    """Whether two options, or methods, are equal; ``==`` of tensors among them gives no single answer."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, Method) and isinstance(other, Method):
        others = options(other)
        return all(_are_equal(value, others[name]) for name, value in options(one).items())
    return one == other


def _apply(method: Method, evidence: Sequence[Evidence], how: Fusion | None, explained: str | None) -> Attribution:
    """Run a method on the evidence of each layer; fuse where there are several."""
    first = evidence[0]
    coverage = next((first[need] for need in method.needs if isinstance(need, RuleCoverage)), None)
    if coverage is not None:
        warn_of_gaps(method, coverage)
    propagated = next((first[need] for need in method.needs if isinstance(need, RelevanceCoverage)), None)
    if propagated is not None:
        coverage = propagated
        warn_of_closed(method, propagated)
    maps = {str(item.layer): method(item) for item in evidence}
    for name, values in maps.items():
        if not torch.isfinite(values).all():
            where = f" at layer {name}" if uses_layer(method) else ""
            raise ModelError(
                f"model must have finite activations and gradients, but {method.name} found NaN or infinity{where}; "
                "look for a square root, logarithm or division at zero, or for an overflow in half precision"
            )
    names = tuple(maps)
    values = next(iter(maps.values()))
    outcome = method.outcome(first) if len(maps) == 1 else Outcome()
    if len(maps) > 1 or method.fusion:
        how = how or method.fusion or "mean"
        values = fused(list(maps.values()), how)
    ranked = method.channels(first) if len(maps) == 1 else None
    return Attribution(
        method=method.name,
        values=values,
        target=first.target if first.classes is None else first.classes,
        score=first.score,
        layer=None if not uses_layer(method) else names[0] if len(names) == 1 else names,
        size=first.size,
        style=method.style,
        options=options(method),
        maps=maps if len(maps) > 1 else {},
        logits=first.logits,
        delta=method.delta(first, values) if len(maps) == 1 else None,
        fuse=how if len(maps) > 1 else None,
        input=explained,
        coverage=coverage,
        channels=None if ranked is None else Channels.ranked(ranked),
        error=outcome.error,
        spent=outcome.samples,
        planned=outcome.planned,
        finished=outcome.finished,
        r2=outcome.r2,
        neutral=outcome.neutral,
    )
