"""`Request`: a call, read once; it finds the layers, has the evidence gathered, and applies each
method to its part."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from explain._utils.device_reads import read_together, reading_later
from explain._utils.errors import ExplainError, LayerError, MethodError, muted
from explain._utils.options import by_name
from explain._utils.rounding import likeness
from explain.attribution.applying import EvidenceOfCalls, apply_method, first_of
from explain.attribution.diagnostics import (
    not_finite,
    to_be_read,
    warn_of_half_precision,
    warn_of_result,
)
from explain.attribution.options import Settings
from explain.attribution.result import Attribution
from explain.data.inputs import Inputs, InputsLike, dotted
from explain.engine import Evidence
from explain.engine.execution import gather
from explain.engine.needs import EvidenceLookup, FollowsGradient, NeedAtLayer, needs_at
from explain.engine.output_kinds import reading
from explain.engine.perturbations import Searches
from explain.engine.plan import Plan, planned
from explain.engine.settings import MEMORY, Footprint, RuntimeSettings
from explain.engine.validation import check_inputs
from explain.hooks import HookGroup, preserve, unwrap
from explain.hooks.intervening import active_interventions
from explain.hooks.programs import is_program
from explain.hooks.unwrap import sharded
from explain.layers.costs import cost_after
from explain.layers.default_layer import branch_layers, layers_to_fuse
from explain.layers.grids import window_calls
from explain.layers.stitched import Stitched
from explain.layers.summary import channels_of, find_layers, forget_summary, summary_is_current
from explain.methods import Method
from explain.methods.base import (
    MethodLike,
    can_be_stitched,
    get_method,
    is_lasting,
    options,
    uses_layer,
)
from explain.targets import Target, answer, packed, text
from explain.targets.classes import BinaryLogit, ClassTarget, TopClass

_NUDGES = ((1e-6, 0), (3e-6, 1e-6), (5e-6, 2e-6), (7e-6, 3e-6), (9e-6, 4e-6), (9.5e-6, 4.5e-6))
"""By what share inputs and scores are made smaller, and what share of the largest value is added to
inputs, to get other rounding errors. Those from 0 to 1, or from -1 to 1, stay there, since models
may insist on it."""
_SAME = 0.99999
"""The cosine down to which maps say the same. Of real ones as small as rounding errors of the
score, it was 0.9999 at least."""
_OTHER = 0.88
"""The cosine from which on they say something else: a third of the map is rounding errors."""


@dataclass(frozen=True, eq=False)
class _Unchecked:
    """An attribution whose values have not been looked at yet, with the evidence on the first
    explained input."""

    target: Target
    method: Method
    attribution: Attribution
    evidence: Sequence[Evidence]


class _OtherPathError(Exception):
    """The inputs take another path through the network than those that its layers were chosen
    by."""


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
    finds_rounding: bool = True
    """Whether methods run again where values may be rounding errors, which become zero."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        x: InputsLike,
        methods: MethodLike | Iterable[MethodLike],
        targets: Sequence[Target],
        settings: Settings,
    ) -> "Request":
        """Check the arguments of `attribute`, and find methods (with budgets), targets and layers.
        Targets that need more than the output, such as texts, wrap the model and add inputs.
        """
        model = unwrap.unwrapped(model)
        if isinstance(x, Mapping):
            model, x = packed.with_photos(model, x)
        inputs = check_inputs(model, x, settings.layout)
        tokens: dict[str, tuple[str, ...]] = {}
        are_classes = {*map(type, targets)} <= {ClassTarget, TopClass}
        if not are_classes:  # texts and answers are further inputs of the model
            model, inputs, tokens = text.with_texts(model, inputs, targets)
            model, inputs, answer_tokens = answer.with_answers(model, inputs, targets)
            tokens = {**tokens, **answer_tokens}
        methods_by_name = by_name(methods, get_method, MethodError, "method", tell_apart=True)
        methods_by_name = _within(methods_by_name, settings)
        if is_program(model) and (
            settings.layer is not None or any(map(uses_layer, methods_by_name.values()))
        ):
            model = unwrap.with_layers(model)  # a program has no modules to hook
        layers = None
        if settings.layer is not None:  # a wrong name is reported even if no method uses a layer
            layers = find_layers(model, inputs, settings.layer)
        for name, method in methods_by_name.items():
            if layers is not None:  # some methods look at a layer only where one is named
                method = method.in_layer()
            if inputs.x.ndim == 5:
                method = method.with_frames(inputs.x, frames_first=inputs.layout == "NTCHW")
            methods_by_name[name] = method
            if settings.create_graph or len(inputs.paths) > 1:  # else nothing is refused
                _check_method(method, name, inputs, settings)
        if layers is not None and not any(map(uses_layer, methods_by_name.values())):
            raise MethodError(
                f"layer must go with a method that looks at a layer, such as gradcam, got "
                f"{', '.join(methods_by_name)}; leave it out"
            )
        sized_targets = list(targets)
        to_size = () if are_classes else targets  # classes need no size
        for number, target in enumerate(to_size):
            sized_targets[number] = target.for_input_size(tuple(inputs.x.shape[2:]))
            if settings.activation is None and target.activation is not None:
                settings = replace(settings, activation=target.activation)
        return cls(model, inputs, methods_by_name, sized_targets, settings, layers, tokens)

    def attributions(self) -> list[dict[str, Attribution]]:
        """Attributions by method for each target, in order (maybe fewer, as detections are).
        Default layers are chosen again if these inputs take another path through the network.
        """
        warn_of_half_precision(self.methods, self.inputs.x)
        with self.reading():
            try:
                return self._run(self._layers_by_method())
            except _OtherPathError:
                return self._run(self._layers_by_method(), follow=False)
            except LayerError:
                if self.layers is not None:
                    raise
            # The chosen layers lead to another head than this target's, or the network does
            # something else than before.
            forget_summary(self.model)
            return self._run(self._layers_by_method(refresh=True))

    def plan(self) -> Plan:
        """The plan of the passes that the request takes, without running them; for `explain.plan`
        and the choice of "all". The model may run on one image, to find layers.
        """
        with self.reading():
            layers = self._layers_by_method()
        layer_calls = {
            call for names in layers.values() for layer in names for call in self._calls(layer)
        }
        return Plan(
            self._needs(layers),
            targets=len(self.targets),
            images=len(self.inputs),
            channels=channels_of(self.model, self.inputs, layer_calls),
            size=tuple(self.inputs.x.shape[2:]),
        )

    def measured(self) -> Plan:
        """The plan with an estimate of seconds and of bytes besides the weights: a pass of the
        first image is timed and stands for all; a backward pass counts as two.
        """
        plan = self.plan()
        first_image = self.inputs.first()
        footprint = Footprint()
        with preserve.untouched(self.model), torch.no_grad(), HookGroup(self.model) as group:
            first_image.call(self.model)  # the first run prepares kernels and memory
            footprint.watch(group, self.model, 1)
            start = time.perf_counter()
            first_image.call(self.model)
            seconds = time.perf_counter() - start
        sizes = [size for _, size in footprint.outputs] or [0]
        # the cost has backward passes once
        passes = self.cost(plan) + plan.images * plan.passes_back + plan.rows_back
        # a graph keeps the outputs of all layers, other passes those of a few at a time: two, or
        # the four for which `Footprint.samples_at_once` leaves room in batches of samples
        bytes_of_images = plan.images * (sum(sizes) if plan.passes_back else 2 * max(sizes))
        bytes_of_samples = plan.rows * (sum(sizes) if plan.rows_back else 4 * max(sizes))
        return replace(
            plan,
            seconds=seconds * passes,
            memory=max(bytes_of_images, min(MEMORY, bytes_of_samples)),
        )

    def cost(self, plan: Plan) -> float:
        """How many passes of one image a plan takes, where passes that begin at a layer count for
        their share. "all" is chosen by it, so it must not run a method.
        """
        layers = {
            need.layer for needs in plan.wanted.values() for need in needs if need.layer is not None
        }
        return plan.cost(cost_after(self.model, self.inputs, layers))

    def reading(self) -> AbstractContextManager[Any]:
        """A block in which the model's outputs are read by one `OutputReader`, with the call's
        activation and categories."""
        return reading(self.model, self.inputs, self.settings.activation, self.settings.categories)

    def _layers_by_method(self, *, refresh: bool = False) -> dict[str, list[str]]:
        """The layers that each method uses, by its name: the call's, or a default by the first
        target (of each branch or resolution). ``refresh`` ignores a default that was kept. Methods
        that cannot explain a `Stitched` model are refused.
        """
        # all classes of a classifier share a default layer, which is kept for later calls; for
        # other targets, it is found by what their score depends on
        of_class = isinstance(self.targets[0], (ClassTarget, TopClass, BinaryLogit))

        def score(output: Any) -> torch.Tensor:
            target = self.targets[0].resolved(output, len(self.inputs))
            return target.pick(output, len(self.inputs))[0]

        @cache
        def default_layers(*, of_stages: bool) -> list[str]:
            """The layers for methods without named ones: one of each branch, or with ``of_stages``
            one of each resolution; found once."""
            of_branches = partial(branch_layers, placement=self.settings.placement)
            find = layers_to_fuse if of_stages else of_branches
            return find(self.model, self.inputs, score, of_class=of_class, refresh=refresh)

        layers: dict[str, list[str]] = {}
        for name, method in self.methods.items():
            if isinstance(self.model, Stitched) and not can_be_stitched(method, self.model):
                raise MethodError(
                    f"method {method.name} must be left out for a Stitched model; take one "
                    "that gives a map of a layer, such as gradcam, or of the input, such as "
                    "saliency"
                )
            layers[name] = []
            if uses_layer(method):
                layers[name] = self.layers or default_layers(of_stages=bool(method.fusion))
        return layers

    def _run(
        self, layers: Mapping[str, list[str]], *, follow: bool = True, checks: bool = True
    ) -> list[dict[str, Attribution]]:
        """Run the engine once and apply each method for each target; after an interrupt, unfinished
        methods are left out. ``follow`` raises `_OtherPathError` on a new path through the network.
        """
        interventions = active_interventions(self.model)
        plan = self._planned(layers)
        chosen_by_default = self.layers is None and any(layers.values())
        # only a choice can be made again, not what the caller has named
        check_modules = self._check_path if follow and chosen_by_default else None
        results: list[dict[str, Attribution]] = []
        unchecked: list[_Unchecked] = []
        with reading_later():
            lookups = gather(
                self.model,
                self.inputs,
                plan,
                self.targets,
                self.settings,
                check_modules=check_modules,
            )
            # of detections, there may be fewer than targets
            for target, lookup in zip(self.targets, lookups, strict=False):
                attributions = {}
                for name, method in self.methods.items():
                    evidence = self._evidence(lookup, layers[name])
                    attribution = self._attribution(name, evidence, plan)
                    if attribution is None:  # interrupted
                        continue
                    if interventions:
                        attribution = replace(attribution, interventions=interventions)
                    attributions[name] = attribution
                    evidence_on_first_input = list(chain(*evidence[0].values()))
                    unchecked.append(
                        _Unchecked(target, method, attribution, evidence_on_first_input)
                    )
                results.append(attributions)
            if checks:
                checked = iter(self._check(unchecked, layers))
                for attributions in results:  # each takes as many as it has
                    attributions.update(zip(list(attributions), checked, strict=False))
        if not all(results):
            raise KeyboardInterrupt("interrupted before any method had something to show")
        return results

    def _check(
        self, unchecked: Sequence["_Unchecked"], layers: Mapping[str, list[str]]
    ) -> list[Attribution]:
        """Refuse attributions that are not finite, warn of those that mean something else than
        expected, and return them, with zeros for rounding errors. All numbers are read together.
        """
        checked = []
        # early in training, maps of zeros are nothing unusual
        warns = not self.settings.create_graph
        to_read = [
            to_be_read(item.method, item.attribution, item.evidence, warns=warns)
            for item in unchecked
        ]
        numbers = iter(read_together(*chain.from_iterable(map(dict.values, to_read))))
        for item, tensors in zip(unchecked, to_read, strict=True):
            numbers_by_reason = dict(zip(tensors, numbers, strict=False))  # takes its own alone
            largest = numbers_by_reason.pop("largest")
            if not all(map(math.isfinite, largest)):
                raise not_finite(item.attribution, largest)
            doubtful = {
                reason: tensors[reason]
                for reason, values in numbers_by_reason.items()
                if any(values)
            }
            attribution = item.attribution
            tiny = doubtful.pop("tiny", None)
            if tiny is not None and self.finds_rounding:
                cancelled = self._cancelled(item, layers, tiny)
                doubtful["cancelled"] = cancelled
                values = attribution.values.clone()
                values[cancelled] = 0
                attribution = replace(attribution, values=values)
            checked.append(attribution)
            if warns:
                warn_of_result(
                    item.method,
                    attribution,
                    largest[: len(self.inputs)],  # of the first input, as the evidence is
                    doubtful,
                    item.evidence,
                    partial(self._follows_gradient, item.target),
                )
        return checked

    def _cancelled(
        self, item: "_Unchecked", layers: Mapping[str, list[str]], tiny: torch.Tensor
    ) -> torch.Tensor:
        """Which images ``(N,)`` with ``tiny`` values hold only rounding errors: their direction
        changes if inputs are scaled or shifted a little. Searches and timed methods are left out.
        """
        searches = any(isinstance(need, Searches) for need in item.method.needs)
        is_timed = getattr(item.method, "max_seconds", None) is not None
        # nor are sharded models run more often than they must be
        if searches or is_timed or sharded(self.model):
            return torch.zeros_like(tiny)
        request = replace(
            self,
            methods={item.attribution.method: item.method},
            targets=[item.target],
            settings=replace(self.settings, progress=None),
        )
        alike = []
        for less, share in _NUDGES:
            nudged = replace(request, inputs=self.inputs.nudged(1 - less, share))
            try:
                with muted():
                    by_target = nudged._run(layers, follow=False, checks=False)
            except ExplainError:  # such as a box that is detected no more
                return torch.zeros_like(tiny)
            (other,) = by_target[0].values()
            alike.append(likeness(item.attribution.values, other.values))
            tiny = tiny & (alike[0] < _SAME)  # else the first nudge says already that it is real
            if not tiny.any():
                break
        return tiny & (torch.stack(alike).amin(0) < _OTHER)

    def _check_path(self, ran: Sequence[str]) -> None:
        """Raise `_OtherPathError`, to choose the layers again, if the modules that ran are not
        those of the summary.
        """
        if not summary_is_current(self.model, self.inputs, ran):
            raise _OtherPathError

    def _planned(self, layers: Mapping[str, list[str]]) -> Plan:
        """The plan of the passes for one target, from a cache where the methods are lasting
        objects. Equal requests share a plan object, so a plan must never be changed.
        """
        methods = tuple(self.methods.values())
        # Calls of stitched windows depend on the model and the size of its input, which are not in
        # the key. Methods stand there by their ids, which must mean the same methods for good.
        if isinstance(self.model, Stitched) or not all(map(is_lasting, methods)):
            return Plan(self._needs(layers))
        method_ids = tuple(map(id, methods))
        key = (method_ids, tuple(map(tuple, layers.values())), self.inputs.paths)
        return planned(key, methods, partial(self._needs, layers))

    def _needs(self, layers: Mapping[str, list[str]]) -> dict[str, frozenset[NeedAtLayer]]:
        """The needs of each method at its layers and inputs, by the method's name.
        Dictionary order is that of the methods, in which plans list them.
        """
        needs = {}
        for name, method in self.methods.items():
            calls = [call for layer in layers[name] for call in self._calls(layer)]
            needs[name] = needs_at(method.needs, calls, self.inputs.places)
        return needs

    def _calls(self, layer: str) -> list[str]:
        """The names of the calls that a layer's name stands for: itself, or of a `Stitched` model
        its call in each window."""
        return (
            window_calls(self.model, self.inputs, layer)
            if isinstance(self.model, Stitched)
            else [layer]
        )

    def _evidence(self, lookup: EvidenceLookup, layers: Sequence[str]) -> list[EvidenceOfCalls]:
        """The evidence for a method on each explained input (and window, if `Stitched`): by layer,
        None for methods without one, of each call that the layer stands for.
        """
        evidence: list[EvidenceOfCalls] = []
        for path in self.inputs.places:
            evidence_by_layer: dict[str | None, Sequence[Evidence]] = {}
            for layer in layers:
                evidence_by_layer[layer] = [lookup(call, path) for call in self._calls(layer)]
            evidence.append(evidence_by_layer or {None: [lookup(None, path)]})
        return evidence

    def _attribution(
        self, name: str, evidence: Sequence[EvidenceOfCalls], plan: Plan
    ) -> Attribution | None:
        """The attribution of one method from its evidence; None if an interrupt left too little
        evidence."""
        method = self.methods[name]
        keep_partial = self.settings.keep_partial
        all_evidence: list[Evidence] = []
        for input_evidence in evidence:
            all_evidence += chain.from_iterable(input_evidence.values())
        if keep_partial and not all(method.needs <= set(item.answers) for item in all_evidence):
            return None
        try:
            with preserve.calculating(
                self.inputs.x.device.type, create_graph=self.settings.create_graph
            ):
                attribution = self._applied(method, evidence)
        except KeyboardInterrupt:
            if keep_partial:
                return None
            raise
        if name != attribution.method:
            attribution = replace(attribution, method=name)
        return attribution

    def _applied(self, method: Method, evidence: Sequence[EvidenceOfCalls]) -> Attribution:
        """Apply a method to its evidence on each explained input; of several inputs, the first
        one's with all as ``parts``. Maps of a layer belong to no input, so they are made once.
        """
        fuse = self.settings.fuse
        if fuse is None and self.layers is None:
            fuse = "stages" if method.fusion else "sum"  # of branches
        layout = self.inputs.layout
        if len(evidence) == 1 or not any(need.of_input for need in method.needs):
            return apply_method(method, self.model, evidence[0], fuse, layout, self.inputs.name)
        parts = {}
        for path, input_evidence in zip(self.inputs.paths, evidence, strict=True):
            name = dotted(path)
            part = apply_method(method, self.model, input_evidence, fuse, layout, name)
            parts[name] = replace(part, tokens=self.tokens.get(name, ()))
        deltas = [part.delta for part in parts.values() if part.delta is not None]
        expected_sum = method.expected_sum(first_of(evidence[0]))
        if len(deltas) == len(parts) and expected_sum is not None:
            # Each part's delta is to the whole sum, which only all parts together make up.
            delta = torch.stack(deltas).sum(0) + (len(parts) - 1) * expected_sum
            parts = {name: replace(part, delta=delta) for name, part in parts.items()}
        first_part = next(iter(parts.values()))
        return replace(first_part, parts=parts)

    def _follows_gradient(self, target: Target) -> bool:
        """Whether the scores change along their gradient in the inputs as it says; runs the model a
        few times. True without looking for several explained inputs.
        """
        if len(self.inputs.paths) > 1:
            return True
        need = FollowsGradient()
        plan = Plan({"": needs_at({need}, [])})
        (lookup,) = gather(self.model, self.inputs, plan, [target], RuntimeSettings())
        return lookup(None)[need]


def _check_method(method: Method, name: str, inputs: Inputs, settings: Settings) -> None:
    """Refuse a method that has no graph with ``create_graph``, or that explains one input where
    there are several. Before anything runs, so that no time is lost.
    """
    if settings.create_graph and not method.differentiable:
        raise MethodError(
            f"method {name} must be left out with create_graph, it has no graph; take saliency"
        )
    if method.one_input and len(inputs.paths) > 1:
        names = ", ".join(map(dotted, inputs.paths))
        raise MethodError(
            f"method {name} must explain one input, got {names}; name one in "
            "explain.Inputs(..., explained=...)"
        )


def _within(methods: dict[str, Method], settings: Settings) -> dict[str, Method]:
    """The methods with the budgets of a call (``samples``, ``tolerance``, ``max_seconds``) where
    they have the option. One that no method has is refused: it would silently do nothing.
    """
    for option in ("samples", "tolerance", "max_seconds"):
        value = getattr(settings, option)
        if value is None:
            continue
        takers = {name: method for name, method in methods.items() if option in options(method)}
        if not takers:
            raise MethodError(
                f"{option} must go with a method that estimates, such as rise, got "
                f"{', '.join(methods)}"
            )
        methods |= {name: replace(method, **{option: value}) for name, method in takers.items()}
    return methods
