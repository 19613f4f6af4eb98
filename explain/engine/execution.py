"""`gather`: run a plan, and return the evidence.

`_Passes` runs the forward pass, in which `explain.hooks.capturing.Capture` records the layers, and
then the backward passes for each target: `torch.autograd.grad` of the score, in the recorded layers
and the input; or, where something takes the place of gradients, a walk back over the recording of
the pass (`explain.engine.recorded_pass`):

* `explain.relevance.gradient_rules.walk_by_rule` for rules such as `GuidedRule`; where autograd's
  Nodes say what rectifies, hooks on these (`explain.engine.rectifying_nodes`) without a recording;
* `explain.relevance.composites.propagate` for LRP, whose formulas are in `linear_rules` and
  `nonlinear_rules`;
* `explain.relevance.deeplift.multipliers` for DeepLIFT.

Perturbed samples (masked images, points on a path) are run in batches by `explain.engine.reruns`.
The collectors turn what was recorded into the answers to each need.

Hooks are on during the passes alone, and act only for the thread that put them there. No
parameter's ``.grad`` or ``requires_grad`` is touched.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.hooks import RemovableHandle

from explain._utils import nested
from explain._utils.errors import LayerError, MethodError, note, warn
from explain.data.inputs import Inputs, Path
from explain.engine import collectors, needs, reruns
from explain.engine.blocks import explained_blocks
from explain.engine.derivative import custom_functions, follows_contrast, is_derivative
from explain.engine.forward import Forward, ResolvedTarget
from explain.engine.needs import (
    Backward,
    Concept,
    Evidence,
    EvidenceLookup,
    NeedAtLayer,
    SampleOrigin,
    at_least_float32,
)
from explain.engine.output_kinds import reading
from explain.engine.plan import Plan
from explain.engine.prefix import LayerPrefix, prefix_of
from explain.engine.recorded_pass import RecordedPass
from explain.engine.rectifying_nodes import Rectifiers, hook_rectifiers, rectifying_nodes
from explain.engine.rerun_context import RerunContext, RerunState
from explain.engine.searches import run_searches
from explain.engine.settings import (
    Footprint,
    RuntimeSettings,
    mixed_precision_now,
)
from explain.hooks import HookGroup
from explain.hooks.attention import AttentionRecord
from explain.hooks.capturing import Capture, Source, cut_where_allowed
from explain.hooks.graph import differentiate, graph, normalises_over_batch
from explain.hooks.layer_names import place_of
from explain.hooks.preserve import (
    findings_of,
    own_statistics,
    recording,
    start_over,
    untouched,
)
from explain.hooks.unwrap import has_hooks, scripted, sharded
from explain.layers.grids import NetworkGrids
from explain.layers.recording import executed_modules
from explain.recording import Value
from explain.recording.gradients import Gradients, paths_to, walk_back
from explain.relevance.composites import KeptChannels, propagate
from explain.relevance.deeplift import multipliers
from explain.relevance.gradient_rules import walk_by_rule
from explain.targets import Target, detector_outputs

_FOLLOWS = "gradients in the inputs are all that the scores do"
_IS_DOUBTED = "gradients may not be the derivative of the score"
_HIDES_RECTIFIERS = "Nodes do not say what rectifies"
Wanted: TypeAlias = Mapping[NeedAtLayer, Sequence[Source]]
"""Needs that one backward pass answers, and what it differentiates with respect to for each."""


def gather(
    model: nn.Module,
    inputs: Inputs,
    plan: Plan,
    targets: Sequence[Target],
    settings: RuntimeSettings | None = None,
    *,
    origin: SampleOrigin | None = None,
    check_modules: Callable[[Sequence[str]], None] | None = None,
) -> list[EvidenceLookup]:
    """Run the passes of ``plan`` on ``inputs``; return for each target a lookup that gives the
    `Evidence` by a layer's name (or None) and, if several are explained, an input's path."""
    # `origin` says which images the inputs are perturbed samples of. `check_modules` is called
    # after the forward pass with the names of the modules that ran, and may raise.
    settings = settings or RuntimeSettings()
    inputs = inputs if settings.create_graph else inputs.detached()
    if plan.looks_inside is not None:
        _must_be_open(model, plan.looks_inside)
    if sharded(model):
        _must_keep_weights(model, plan, len(targets), create_graph=settings.create_graph)
    statistics = own_statistics(model) if settings.create_graph else nullcontext()

    follow = check_modules is not None
    records = plan.walks_back
    if plan.hooks_nodes and not settings.create_graph:
        # Hooks on Nodes may take the place of a recording. Where Nodes turn out not to tell what
        # rectifies, the pass runs again, recorded; hooks of the caller must not see two passes.
        records = _HIDES_RECTIFIERS in findings_of(model) or has_hooks(model)

    def run(cut: bool) -> _Passes:
        """Run the forward pass, with ``cut`` at first; another attempt begins as that did."""
        if not cut:
            start_over()
        return _Passes(model, inputs, plan, settings, cut, follow=follow, records=records)

    with reading(model, inputs, settings.activation):
        with untouched(model, create_graph=settings.create_graph, alone=True), statistics:
            passes = cut_where_allowed(run)
            if plan.walks_back and not records and passes.rectifiers is None:
                findings_of(model)[_HIDES_RECTIFIERS] = True
                records = True
                passes = run(cut=False)
            if passes.cut and passes.forward.layers.missing:
                note(
                    "the pass is recorded from the input on: what a layer gives reaches the score "
                    "in more than one way"
                )
                passes = run(cut=False)
            if check_modules is not None:
                check_modules(passes.ran)
            # boxes of a detector are read from its output once for all targets
            has_boxes = passes.forward.logits is None
            with detector_outputs.reading_once() if has_boxes else nullcontext():
                # all targets are checked before the first backward
                resolved = passes.forward.resolve_all(targets)
                if origin is not None and origin.image is not None:
                    # a perturbed image among others of its batch, whose scores do not count
                    resolved = [
                        passes.forward.of_image(target, origin.image) for target in resolved
                    ]
            for target in resolved:
                passes.answer(target, last=target is resolved[-1])
            if passes.forward.whole is not None:
                passes.forward.whole.close()
        evidence = partial(_evidence, passes.forward, origin)
        if plan.reruns:
            context = RerunContext(
                forward=passes.forward,
                targets=resolved,
                evidence=evidence,
                footprint=passes.footprint,
                settings=settings,
                mixed_precision=mixed_precision_now(inputs.x.device),
                gather=partial(gather, model),
                look_at_gradients=partial(_look_at_gradients, model, settings),
                origin=origin,
                state=RerunState(prefixes=passes.prefixes()),
            )
            reruns.run_streams(plan, context)
            for target in resolved:
                for need in plan.searches:
                    if not context.state.interrupted:
                        run_searches(need, context, target)
            context.finish()
    return [partial(evidence, target) for target in resolved]


def _look_at_gradients(
    model: nn.Module,
    settings: RuntimeSettings,
    inputs: Inputs,
    plan: Plan,
    targets: Sequence[Target],
) -> None:
    """Warn if gradients in these inputs are not the derivative of the score, for methods that take
    those of perturbed samples alone; if all is well, looked at once for a model and its weights."""
    findings = findings_of(model)
    are_right = ("gradients are right", *plan.needs)
    # sharded models are run no more often than they must be
    if settings.create_graph or are_right in findings or sharded(model):
        return
    # `gather` warns itself
    gather(model, inputs, plan, targets, RuntimeSettings(activation=settings.activation))
    if _IS_DOUBTED not in findings:
        findings[are_right] = True


def _evidence(
    forward: Forward,
    origin: SampleOrigin | None,
    resolved: ResolvedTarget,
    layer: str | None,
    path: Path | None = None,
) -> Evidence:
    """The `Evidence` that a method reads: the answers on one target, ``layer`` and explained input,
    with those that are about no layer or no single input."""
    answers: dict[needs.Need[Any], Any] = {}
    for need, answer in resolved.answers.items():
        if need.layer in (None, layer) and need.input in (None, path):
            answers[need.kind] = answer
    return Evidence(
        inputs=at_least_float32(forward.inputs.tensor(path or forward.inputs.path)),
        score=resolved.score,
        classes=resolved.classes,
        target=resolved.name,
        grids=forward.grids,
        logits=forward.logits,
        layer=layer,
        answers=answers,
        origin=origin,
        find_outputs=(lambda: forward.outputs) if origin is None else origin.outputs,
        find_probability=resolved.target.probability,
    )


class _Passes:
    """One forward pass of the network, and the backward passes over it for each target, as a plan
    says. ``ran`` names the modules that ran, if ``follow``; what walks back needs a pass that
    ``records``, but for rules at ``rectifiers``, Nodes, if these are known."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        plan: Plan,
        settings: RuntimeSettings,
        cut: bool,
        *,
        follow: bool,
        records: bool,
    ) -> None:
        """Run the forward pass under the plan's hooks and recorders, which are gone when this
        returns; ``forward`` keeps the output, the records and the graph."""
        self.plan = plan
        self.cut = cut and not (plan.whole or settings.create_graph)
        self.footprint = Footprint()
        self._create_graph = settings.create_graph
        self._of_reference: dict[needs.Reference | None, RecordedPass] = {}
        """The recorded passes of DeepLIFT's references, while targets need them."""
        explained = {}
        for path in inputs.paths:
            tensor = inputs.tensor(path)
            explained[path] = tensor.clone().requires_grad_() if plan.whole else tensor
        # Perturbed maps are run one image at a time; what is noted would keep the graph of a pass
        # that is not cut; and hooks of others would see that not all is run.
        perturbs_layer = plan.perturbed_layer is not None
        notes_prefix = perturbs_layer and len(inputs) == 1 and self.cut and not has_hooks(model)
        blocks: Sequence[str] = ()
        if needs.BlockTokens in plan.kinds:
            blocks = explained_blocks(model, inputs)
            start_over(written=False)  # which may have run the model, and drawn random numbers
        with (
            HookGroup(model) as group,
            torch.set_grad_enabled(not self.cut),  # if cut, a hook at a layer begins the graph
            ExitStack() as stack,
        ):
            if settings.create_graph or needs.LayerCurvature in plan.kinds:
                # fused attention has no second derivative
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            layers = self._watch(group, model, inputs)
            seen = collectors.watch(plan.kinds, group, model, blocks)
            whole = None
            if plan.whole and (records or plan.reads_attention):
                noted_layers = self._recorded_layers(model) if records else ()
                whole = RecordedPass.begin(stack, group, model, inputs, explained, noted_layers)
            self.ran = executed_modules(group, model) if follow else []
            self._prefix: LayerPrefix | None = None
            """What lies before the layer whose maps are perturbed, if it is noted."""
            if notes_prefix:
                assert plan.perturbed_layer is not None
                place = place_of(plan.perturbed_layer, model)
                self._prefix_call = place.call or 0  # without a number, taken as the first
                self._prefix = prefix_of(group, model, place.layer, self._prefix_call)
            # unless they are copies, or turned from another layout, the explained tensors are those
            # of the inputs
            arguments = inputs
            if plan.whole or inputs.layout is not None:
                arguments = inputs.replaced(explained)
            # each hook that is registered, of any module, takes the next id
            handles_before = RemovableHandle.next_id
            with nullcontext() if self._prefix is None else self._prefix.passing():
                output = arguments.call(model)
            layers.end_pass()
            self.footprint.is_complete = True
            self._hooked = RemovableHandle.next_id > handles_before
            """Whether the model has registered hooks of its own during the pass."""
            # a model may switch gradients on or off itself
            graph_is_on = torch.is_grad_enabled() or any(
                tensor.requires_grad for _, tensor in nested.paths(output)
            )
        attention: Sequence[AttentionRecord] = ()
        if whole is not None:
            whole.finish(output, attention=plan.reads_attention)
            attention = whole.attention
        if whole is not None and records:
            if settings.create_graph:
                whole.keep_graph(explained)
            with torch.enable_grad():
                output = whole.begin_at(output)
        elif whole is not None:  # it was recorded for its attentions alone
            whole.close()
            whole = None
        self.rectifiers: Rectifiers | None = None
        """The Nodes that rules are hooked on; None where these do not tell what rectifies."""
        if plan.hooks_nodes and not records and not self._hooked:
            outputs = [tensor for _, tensor in nested.paths(output)]
            self.rectifiers = rectifying_nodes(outputs, explained.values())
        self.forward = Forward(
            model=model,
            inputs=inputs,
            sources=explained,
            grids=NetworkGrids(model, inputs, settings.placement, trains=settings.create_graph),
            layers=layers,
            output=output,
            graph_is_on=graph_is_on,
            whole=whole,
            attention=attention,
            activation=settings.activation,
            seen=seen,
        )
        for layer in (*plan.layers, *plan.watched):
            # a missing layer is an error before any backward pass
            self.forward.records[layer] = self.forward.record(layer)

    def _recorded_layers(self, model: nn.Module) -> list[str]:
        """The layers whose values the recording has to know: those that relevance is read at, and
        those of concepts."""
        concepts = [backward.concept for backward in self.plan.backwards]
        names = [concept.layer for concept in concepts if concept is not None]
        places = [place_of(name, model) for name in [*self.plan.layers, *names]]
        return list(dict.fromkeys(place.layer for place in places))

    def _watch(self, group: HookGroup, model: nn.Module, inputs: Inputs) -> Capture:
        """Hook the layers (gradients of ``plan.layers``, outputs alone of ``plan.watched``) and the
        sizes of outputs, which bound batches; return the capture of the layers."""
        plan = self.plan
        names = (*plan.layers, *plan.watched)
        layers = Capture(group, names, gradients=plan.layers, cut=self.cut, once=True)
        if plan.reruns:
            self.footprint = Footprint.of(group, model, inputs)
        return layers

    def prefixes(self) -> dict[str, LayerPrefix | None]:
        """What lies before the layer whose feature maps are perturbed, by the layer's name; empty
        if it was not noted."""
        layer = self.plan.perturbed_layer
        if self._prefix is None or layer is None or not self._prefix.is_known:
            return {}
        # a layer without the number of a call in its name may be recorded at a later one
        is_same_call = self.forward.records[layer].call == self._prefix_call
        return {layer: self._prefix} if is_same_call else {}

    def answer(self, resolved: ResolvedTarget, *, last: bool) -> None:
        """Run the backward passes for one target and write the answers to ``resolved.answers``; the
        ``last`` target's passes free the graph and DeepLIFT's references."""
        # gradients in the inputs may miss what the score does; for training, a graph is as it is
        if self.plan.whole and any(self.plan.wanted) and not self._create_graph:
            self._check_branches(resolved)
        # Needs without a backward pass come first, since the last backward pass frees the graph.
        without_backward = self.plan.needs_by_backward.get(None, ())
        sources_by_need: Wanted = dict.fromkeys(without_backward, ())
        with HookGroup() if self.plan.reads_attention else nullcontext() as group:
            if group is not None:
                _record_attention(sources_by_need, resolved, self.forward, group)
            _answer(sources_by_need, self.forward, resolved)
        for backward in self.plan.backwards:
            self._back(
                backward,
                resolved,
                keep=self._create_graph or not last or backward != self.plan.backwards[-1],
            )
            if last:  # only one reference's pass is in memory at a time
                self._drop(backward.reference)

    def _back(self, backward: Backward, resolved: ResolvedTarget, *, keep: bool) -> None:
        """Answer all needs that share one backward pass; ``keep`` leaves the graph. Where images
        change each other's scores, each has a pass of its own score."""
        forward = self.forward
        sources_by_need: dict[NeedAtLayer, Sequence[Source]] = {}
        for need in self.plan.needs_by_backward[backward]:
            sources_by_need[need] = collectors.sources(forward, need)
        total = forward.total(resolved, backward.objective)
        nodes = graph(total)
        if forward.count == 1 or resolved.image is not None or not normalises_over_batch(nodes):
            self._pass_back(backward, sources_by_need, resolved, total, nodes, keep=keep)
            return
        targets_by_image = [forward.of_image(resolved, image) for image in range(forward.count)]
        for image_target in targets_by_image:
            total = forward.total(image_target, backward.objective)
            keep_graph = keep or image_target is not targets_by_image[-1]
            self._pass_back(
                backward, sources_by_need, image_target, total, graph(total), keep=keep_graph
            )
        for need in sources_by_need:
            resolved.answers[need] = _own_results(
                [of_image.answers[need] for of_image in targets_by_image]
            )

    def _pass_back(
        self,
        backward: Backward,
        sources_by_need: Wanted,
        resolved: ResolvedTarget,
        total: Tensor,
        nodes: Sequence[Node],
        *,
        keep: bool,
    ) -> None:
        """Differentiate ``total`` once in the sources of each need, through the autograd ``nodes``
        behind it, and answer these needs; ``keep`` leaves the graph."""
        forward = self.forward
        with ExitStack() as stack:
            if self.plan.reads_attention:
                group = stack.enter_context(HookGroup())
                _record_attention(sources_by_need, resolved, forward, group)
            all_sources = list(chain.from_iterable(sources_by_need.values()))
            gradients: Sequence[Tensor | None] = (None,) * len(all_sources)
            # where nothing is recorded, hooks on Nodes follow a rule in a plain differentiation
            walks = forward.whole is not None and (
                backward.changes_gradients or any(need.kind.walks_back for need in sources_by_need)
            )
            if backward.rule is not None and self.rectifiers is not None:
                behind_score = set(nodes)
                rectifiers = {
                    node: rectifier
                    for node, rectifier in self.rectifiers.items()
                    if node in behind_score
                }
                group = stack.enter_context(HookGroup())
                coverage = hook_rectifiers(backward.rule, rectifiers, group)
                resolved.coverage[backward.rule] = coverage
            # a walk differentiates in values of the recording, in the place of the sources
            asked: Mapping[NeedAtLayer, Sequence[Any]] = sources_by_need
            if walks:
                asked, gradients = self._walk(backward, sources_by_need, resolved, total)
            elif all_sources and total.requires_grad:
                gradients = differentiate(
                    total,
                    all_sources,
                    retain_graph=keep,
                    create_graph=self._create_graph,
                    nodes=nodes,
                )
            remaining = iter(gradients)  # those of the first need, of the second, and so on
            gradients_by_need = {need: list(islice(remaining, len(asked[need]))) for need in asked}
            _answer(gradients_by_need, forward, resolved)
        # a warning names the methods, and passes inside of others have no names
        has_names = any(self.plan.wanted)
        if has_names and not (backward.changes_gradients or self._create_graph):
            if backward.objective is not None:
                resolved = forward.as_target(backward.objective, resolved)
            self._check_derivative(sources_by_need, resolved, gradients_by_need, nodes)

    def _check_derivative(
        self,
        sources_by_need: Wanted,
        resolved: ResolvedTarget,
        gradients: Mapping[NeedAtLayer, Sequence[Tensor | None]],
        nodes: Sequence[Node],
    ) -> None:
        """Warn if gradients in the input or a layer are not the derivative of the score, where
        custom functions or hooks of the model lie behind it."""
        for need, sources in sources_by_need.items():
            need_gradients = gradients[need]
            is_plain = (
                isinstance(need.kind, (needs.InputGradients, needs.LayerGradients))
                and not need.input
            )
            # `is_derivative` moves the image or what a layer returns, no parts as in "conv:input"
            is_part = ":" in (need.layer or "")
            if not is_plain or is_part:
                continue
            names = custom_functions(nodes, sources)
            # not with global hooks, which any module has, and which would fire again in the runs of
            # `is_derivative`
            if self._hooked and not has_hooks(nn.Identity()):
                names.append("a hook that the forward pass registers")
            methods = ", ".join(self.plan.names_of([need])) if names else ""
            # `is_derivative` steps along the gradient in one tensor
            reached = [gradient for gradient in need_gradients if gradient is not None]
            if not methods or len(reached) != 1:
                continue
            findings_of(self.forward.model)[_IS_DOUBTED] = True
            if not is_derivative(self.forward, resolved, need.layer, reached[0]):
                why = "whose backward is not the derivative: the score changes otherwise"
                warn(
                    f"{methods} takes gradients through {', '.join(names)}, {why}; take occlusion "
                    "or rise"
                )

    @property
    def _followers(self) -> str:
        """The names of the methods that take gradients of the inputs."""
        methods = [
            name
            for name, wanted in self.plan.wanted.items()
            if name and any(need.kind.whole for need in wanted)
        ]
        return ", ".join(methods)

    def _check_branches(self, resolved: ResolvedTarget) -> None:
        """Warn if gradients in the inputs leave out what the score does, as behind ``detach()``: as
        a recording names it, or found out once for a model and its weights."""
        forward = self.forward
        inputs = forward.inputs
        whole = forward.whole
        if whole is not None and whole.recording.unseen and self._followers:
            findings_of(forward.model)[_IS_DOUBTED] = True
            warn(
                f"{self._followers} cannot follow {', '.join(whole.recording.unseen)}: what "
                "comes back from there counts as a constant; take occlusion or rise"
            )
            return
        if not resolved.total.requires_grad or self._hooked:
            return
        findings = findings_of(forward.model)
        if _FOLLOWS not in findings:
            # a caller's own function of the output, or global hooks, which any module has, are
            # called no more often than they must be
            if resolved.classes is None or has_hooks(nn.Identity()):
                return
            # small changes are lost in the rounding of half precision
            halves = (torch.float16, torch.bfloat16)
            for node in graph(resolved.total):
                if any(result.dtype in halves for result in node._input_metadata):
                    return
            sources = [forward.source(path) for path in inputs.paths]
            try:
                gradients = differentiate(resolved.total, sources, retain_graph=True)
            except RuntimeError:  # the network overwrites what autograd needs
                return
            if all(gradient is None for gradient in gradients):
                return  # the method itself says so
            by_path = dict(zip(inputs.paths, gradients, strict=True))
            findings[_FOLLOWS] = follows_contrast(forward, resolved, by_path)
        if not findings[_FOLLOWS]:
            findings[_IS_DOUBTED] = True
            warn(
                f"{self._followers} takes gradients that are not the derivative of the score: "
                "it also changes without them (detach(), no_grad(), .data or NumPy in the model?); "
                "take occlusion or rise"
            )

    def _walk(
        self, backward: Backward, wanted: Wanted, resolved: ResolvedTarget, total: Tensor
    ) -> tuple[Wanted, Sequence[Tensor | None]]:
        """Walk back over the recording, by rules, differences from a reference, or derivatives.
        Returns the values that each need asks for, and their gradients in order."""
        forward = self.forward
        whole = forward.whole
        assert whole is not None
        steps = whole.recording.steps
        values_by_need: dict[NeedAtLayer, Sequence[Value]] = {}
        for need in wanted:
            values_by_need[need] = self._values(need, whole)
        values = list(chain.from_iterable(values_by_need.values()))
        if not total.requires_grad:
            return values_by_need, [None] * len(values)
        # records of attention take the gradients in its weights from this walk too
        attended = whole.attention_weights if resolved.attention else []
        asked = {*values, *attended}
        reference = None
        if backward.reference is not None:
            reference = self._reference(backward.reference, resolved.image)
        # rules run linear maps again, in the widest type of their inputs
        mixed_precision_off = torch.autocast(total.device.type, enabled=False)
        with mixed_precision_off, torch.set_grad_enabled(self._create_graph):
            gradients = whole.gradients_of(total, create_graph=self._create_graph)
            if backward.composite is not None:
                channels = None
                if backward.concept is not None:
                    channels = self._channels(backward.concept, resolved, whole, gradients)
                result = propagate(
                    backward.composite,
                    steps,
                    gradients,
                    sources=list(whole.sources.values()),
                    signals=whole.signals,
                    wanted=asked,
                    count=forward.count,
                    image_labels=whole.image_labels,
                    channels=channels,
                )
                resolved.propagated[backward] = result
                of_values = result.gradients
            elif backward.rule is not None:
                of_values, resolved.coverage[backward.rule] = walk_by_rule(
                    backward.rule, steps, gradients, whole.signals, asked
                )
            elif reference is not None:
                of_values = multipliers(
                    whole.recording,
                    reference.recording,
                    gradients,
                    signals=whole.signals,
                    reference_signals=reference.signals,
                    wanted=asked,
                )
            else:
                # plain derivatives, through all that depends on the input
                leading_to_score = paths_to(gradients)
                through = {value for value in leading_to_score if value.depends}
                of_values = walk_back(steps, gradients, asked, through)
        for record, value in zip(resolved.attention, attended, strict=True):
            record.note(of_values.get(value))
        return values_by_need, [of_values.get(value) for value in values]

    def _values(self, need: NeedAtLayer, whole: RecordedPass) -> Sequence[Value]:
        """The values of the recording whose gradients a need asks for."""
        if isinstance(need.kind, needs.BiasTerms):
            return [constant.result for constant in self.forward.constants]
        if need.layer:
            return [whole.of_layer(self.forward.records[need.layer])]
        return [whole.sources[need.input or self.forward.inputs.path]]

    def _reference(self, reference: needs.Reference, image: int | None) -> RecordedPass:
        """The recorded pass of the reference input of DeepLIFT, run once for all targets. With
        ``image``, only this image of the batch is replaced by its reference."""
        if reference in self._of_reference and image is None:
            return self._of_reference[reference]
        inputs = self.forward.inputs
        model = self.forward.model
        reference_inputs = {}
        for path in inputs.paths:
            reference_input = reference.of(inputs.tensor(path)).clone()
            if image is not None:
                is_other = (
                    torch.arange(len(reference_input), device=reference_input.device) != image
                )
                reference_input[is_other] = inputs.tensor(path)[is_other]
            reference_inputs[path] = reference_input.requires_grad_()
        start_over(written=False)  # the random numbers of the first pass
        with (
            recording(True),
            HookGroup(model) as group,
            ExitStack() as stack,
        ):
            whole = RecordedPass.begin(stack, group, model, inputs, reference_inputs)
            output = inputs.replaced(reference_inputs).call(model)
        whole.finish(output)
        if self._create_graph:
            whole.keep_graph(reference_inputs)
        if any(
            tensor.is_floating_point() and bool(tensor.isnan().any())
            for _, tensor in nested.paths(output)
        ):
            raise MethodError(
                "baseline must be one that the model has finite scores for, got NaN; choose another"
            )
        self._drop(reference)  # that with another image replaced
        self._of_reference[reference] = whole
        return whole

    def _drop(self, reference: needs.Reference | None) -> None:
        """Let go of the recorded pass of a reference, if there is one."""
        whole = self._of_reference.pop(reference, None)
        if whole is not None:
            whole.close()

    def _channels(
        self,
        concept: Concept,
        resolved: ResolvedTarget,
        whole: RecordedPass,
        gradients: Gradients,
    ) -> KeptChannels:
        """The channels of a concept's layer, that relevance passes through alone. The layer's name
        may have the number of a call; otherwise its last call is taken."""
        layer_place = place_of(concept.layer, self.forward.model)
        call_number = layer_place.call
        calls = whole.layers[layer_place.layer]
        must = "concept must name a layer that the score depends on"
        must = f"{must}, got {concept.layer!r}"
        if not calls or (call_number is not None and call_number >= len(calls)):
            raise LayerError(
                f"{must}, which was called {len(calls)} times; --list-layers shows them"
            )
        value = calls[-1 if call_number is None else call_number]
        if value not in paths_to(gradients):
            raise LayerError(
                f"{must}, which does not lead to target {resolved.name}; choose a layer on the "
                "path to it"
            )
        shape = value.shape
        # without a grid: second in maps with as many dimensions as the input, last in tokens
        grid = self.forward.grids.grid(shape)
        if grid is not None:
            dim = grid.of_channels % len(shape)
        else:
            dim = 1 if len(shape) == self.forward.inputs.x.ndim else len(shape) - 1
        if max(concept.channels) >= shape[dim]:
            raise MethodError(
                f"concept must have channels below {shape[dim]}, got {max(concept.channels)}; name "
                "less"
            )
        return KeptChannels(value, concept.channels, dim)


def _record_attention(
    needs_of_pass: Iterable[NeedAtLayer],
    resolved: ResolvedTarget,
    forward: Forward,
    group: HookGroup,
) -> None:
    """Hook the attention weights of the graph if a need asks for their gradients; the records go to
    ``resolved.attention``."""
    if any(
        isinstance(need.kind, (needs.Attention, needs.AttentionRelevance)) for need in needs_of_pass
    ):
        resolved.attention = forward.attention
        for record in forward.attention:
            record.watch(group)


def _answer(
    gradients: Mapping[NeedAtLayer, Sequence[Any]], forward: Forward, resolved: ResolvedTarget
) -> None:
    """Answer needs by the functions in `collectors.ANSWERS`, in the order of ``gradients``, since
    one may read the answer to an earlier one."""
    for need, of_sources in gradients.items():
        answer = collectors.ANSWERS[type(need.kind)]
        resolved.answers[need] = answer(forward, resolved, need, of_sources)


def _own_results(evidence_by_pass: Sequence[Any]) -> Any:
    """Join evidence on images that were differentiated one by one, all of the same structure:
    number i of each tensor is that of pass i."""
    tensors_by_pass = [dict(nested.paths(value)) for value in evidence_by_pass]
    return nested.replace(
        evidence_by_pass[0],
        lambda path, tensor: torch.stack(
            [
                tensors_of_pass.get(path, tensor)[image]
                for image, tensors_of_pass in enumerate(tensors_by_pass)
            ]
        ),
    )


def _must_be_open(model: nn.Module, method: str) -> None:
    """Refuse a method that hooks the blocks of a network if the model has scripted modules, which
    hide theirs. Called before anything runs; ``method`` is the name for the message."""
    closed = scripted(model)
    if closed:
        must = f"see the blocks of the model, but layer {closed[0]!r} is scripted"
        raise MethodError(
            f"{method or 'the method'} must {must}; use what it was made from, or attnlrp"
        )


def _must_keep_weights(model: nn.Module, plan: Plan, targets: int, *, create_graph: bool) -> None:
    """Refuse needs that read weights after the forward pass, which sharded modules (FSDP) have
    freed by then, and a second backward pass of old-style FSDP."""
    needs_by_method = plan.wanted.items()
    methods_reading_late = [
        name
        for name, needs in needs_by_method
        if create_graph or any(need.kind.reads_weights for need in needs)
    ]
    if methods_reading_late:
        must = "read weights after the forward pass, but FSDP has freed them by then"
        remedy = "explain a plain model with its full state dict, or use gradcam or saliency"
        raise MethodError(f"{methods_reading_late[0] or 'the method'} must {must}; {remedy}")
    # modules of the old style have this attribute
    if len(plan.backwards) * targets > 1 and any(
        hasattr(module, "sharding_strategy") for module in sharded(model).values()
    ):
        must = "run backward once for each forward pass, got several methods or targets"
        raise MethodError(
            f"FullyShardedDataParallel must {must}; ask for one at a time, or use fully_shard"
        )
