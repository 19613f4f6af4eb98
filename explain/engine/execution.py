"""`gather`: run a plan, and return the evidence.

Hooks are on during the passes alone, and act only for the thread that put them there. Gradients are asked of autograd
for the tensors that need them, so no parameter's ``.grad`` or ``requires_grad`` is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from explain._utils import nested
from explain._utils.errors import LayerError, MethodError, note
from explain.data.inputs import Inputs, InputsLike, Path, as_inputs
from explain.engine.collectors import COLLECTORS, Collector
from explain.engine.evidence import Evidence, RowOrigin, at_least_float32
from explain.engine.forward import Forward, ResolvedTarget
from explain.engine.needs import Attention, Backward, BiasTerms, Concept, Need, NeedAtLayer, Reference
from explain.engine.perturbations import PerturbationRuns
from explain.engine.plan import Plan
from explain.engine.replay import PrefixRecorder, Tape
from explain.engine.rerun_context import EvidenceLookup, RerunContext, check_inputs_beside
from explain.engine.reruns import PerturbationRunner, run_streams
from explain.engine.settings import Footprint, Precision, RuntimeSettings, autocast, mixed_precision_now
from explain.engine.validation import alone
from explain.hooks import Capture, HookGroup, untouched
from explain.hooks.preserve import recording
from explain.hooks.records import Source, cut_where_allowed
from explain.hooks.unwrap import has_hooks, scripted
from explain.layers.calls import grids_of, split_call
from explain.layers.outputs import ExecutedModules
from explain.relevance.composites import propagate
from explain.relevance.deeplift import StepComparison, propagate_differences
from explain.relevance.gradient_rules import apply_rule
from explain.relevance.propagation import Marks, RelevanceFlow, consumers, hold_back, hold_back_beside, node_of
from explain.relevance.zero_leaves import ZeroLeaves
from explain.targets import Target
from explain.targets.rows import must_follow_rows
from explain.tracing.operations import Operations, Recorder
from explain.tracing.steps import StepRecorder


def gather(
    model: nn.Module,
    inputs: InputsLike,
    plan: Plan,
    targets: Sequence[Target],
    work: RuntimeSettings | None = None,
    *,
    precision: Precision = "full",
    origin: RowOrigin | None = None,
    told: Callable[[Sequence[str]], None] | None = None,
) -> list[EvidenceLookup]:
    """Run a plan on ``inputs``; for each target, return a function from a layer or none, and an input, to evidence.

    ``precision`` is that of these passes; that of perturbed rows is in ``work``. ``told`` is called after the forward
    pass with the names of the modules that ran, and may raise.

    Raises:
        ExplainError: bad input, a target that does not fit, a layer that is never called or has no map, a score that
            is not finite or does not depend on what is asked for.
    """
    work, inputs = work or RuntimeSettings(), as_inputs(inputs).detached()
    _must_be_open(model, plan)
    with alone(), untouched(model):
        run = partial(_Passes, model, inputs, plan, work, precision, follow=told is not None)
        passes = cut_where_allowed(run)
        if passes.forward.layers.misses and passes.cut:
            note("the pass is recorded from the input on: what a layer gives reaches the score in more than one way")
            passes = run(False)
        if told is not None:
            told(passes.ran)
        choices = [passes.forward.choose(target) for target in targets]  # all of them fit before the first backward
        if plan.reruns:
            pieces = len(inputs) > 1 or work.batch_size != 1  # of other numbers of rows than there are images
            for choice in choices if pieces else ():
                must_follow_rows(choice.target, passes.forward.output, len(inputs))
            check_inputs_beside(passes.forward, choices[0], work)
        for choice in choices:
            passes.answer(choice, last=choice is choices[-1])
    evidence = partial(_evidence, passes.forward, origin)
    if plan.reruns:
        again = partial(gather, model, precision=work.precision)
        context = RerunContext(passes.forward, choices, evidence, passes.footprint, work, again, alone, passes.tapes())
        run_streams(plan, context)
        leave = [ask.need for ask in plan.asks if isinstance(ask.need, PerturbationRuns)]
        if leave:
            evidence = partial(_with_runner, evidence, leave, context, mixed_precision_now(inputs.x.device))
    return [partial(evidence, choice) for choice in choices]


def _evidence(
    forward: Forward, origin: RowOrigin | None, choice: ResolvedTarget, layer: str | None, path: Path | None = None
) -> Evidence:
    """What was found for a target that is about a layer or none, and of several explained inputs about one."""
    x = at_least_float32(forward.inputs.tensor(path or forward.inputs.path))
    outputs = (lambda: forward.outputs) if origin is None else origin.outputs
    mine = {a.need: v for a, v in choice.found.items() if a.layer in (None, layer) and a.input in (None, path)}
    about = x, choice.score, choice.classes, choice.name, forward.grids, forward.logits
    return Evidence(*about, layer, mine, origin, outputs)


def _with_runner(
    evidence_of: Callable[..., Evidence],
    leave: Sequence[PerturbationRuns],
    context: RerunContext,
    precision: torch.autocast,
    choice: ResolvedTarget,
    layer: str | None,
    path: Path | None = None,
) -> Evidence:
    """The evidence, with a runner for the needs that allow perturbed rows.

    It is made on demand: a runner among what was found would keep it, and all that it holds, alive in a circle.
    """
    evidence = evidence_of(choice, layer, path)
    runner = PerturbationRunner(context, choice, layer, precision)
    return replace(evidence, found={**evidence.found, **dict.fromkeys(leave, runner)})


@dataclass
class _Recorders:
    """What records operations during the forward pass, as far as a plan needs it; entered in this order."""

    zero_leaves: ZeroLeaves | None = None
    compared: StepRecorder | None = None
    steps: StepRecorder | None = None
    """After ``compared``, to see what a normalisation is given as it was made."""
    operations: Recorder | None = None

    @classmethod
    def of(cls, plan: Plan, model: nn.Module, sources: list[torch.Tensor], images: int) -> _Recorders:
        made, needs = cls(), [ask.need for ask in plan.answered_at_once]
        if any(isinstance(need, Attention) and need.beside for need in needs):
            made.zero_leaves = ZeroLeaves(sources)
        if any(backward.reference is not None for backward in plan.backwards):
            made.compared = StepRecorder(model, sources, values=True, images=images)
        composites = [backward.composite for backward in plan.backwards if backward.composite is not None]
        if composites:
            summands = any(composite.needs_summands for composite in composites)
            made.steps = StepRecorder(model, sources, summands=summands, images=images)
        rules = any(backward.rule is not None for backward in plan.backwards)
        constants = any(isinstance(need, BiasTerms) for need in needs)
        if rules or constants:
            made.operations = Recorder(model, rectifiers=rules, constants=constants)
        return made

    def enter(self, stack: ExitStack) -> None:
        for recorder in (self.zero_leaves, self.compared, self.steps, self.operations):
            if recorder is not None:
                stack.enter_context(recorder)


class _Passes:
    """One forward pass, and the backward passes over it.

    If only layers are needed, it is ``cut``: gradients are off until the first of them. ``ran`` names the modules that
    ran, if ``follow`` asks for them.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        plan: Plan,
        work: RuntimeSettings,
        precision: Precision,
        cut: bool,
        *,
        follow: bool,
    ) -> None:
        self.plan, self.cut, self.footprint = plan, cut and not plan.whole, Footprint()
        self._precision, self._marks = precision, Marks()
        by_kind: dict[type[Need[Any]], list[NeedAtLayer]] = {}
        for ask in plan.answered_at_once:
            by_kind.setdefault(type(ask.need), []).append(ask)
        self._collectors: dict[type[Need[Any]], Collector] = {kind: COLLECTORS[kind](a) for kind, a in by_kind.items()}
        sources = {path: inputs.tensor(path) for path in inputs.paths}
        if plan.whole:
            sources = {path: tensor.clone().requires_grad_() for path, tensor in sources.items()}
        taped = self._taped_layer(model, inputs, work)
        recorders = _Recorders.of(plan, model, list(sources.values()), len(inputs))
        with HookGroup(model) as group, recording(not self.cut), autocast(inputs.x, precision), ExitStack() as stack:
            layers, watched = self._watch(group, model, len(inputs))
            recorders.enter(stack)
            ran = ExecutedModules(group, model) if follow else None
            self._prefix = None if taped is None else PrefixRecorder(group, model, taped)
            given = inputs.replaced(sources)
            with nullcontext() if self._prefix is None else self._prefix.tape:
                output = given.call(model)
            graph_is_on = torch.is_grad_enabled() or any(tensor.requires_grad for _, tensor in nested.paths(output))
        self.ran = [] if ran is None else ran.names
        self.forward = Forward(
            model,
            inputs,
            sources,
            grids_of(model, inputs),
            layers,
            watched,
            output,
            graph_is_on,
            operations=Operations() if recorders.operations is None else recorders.operations.operations,
            steps=() if recorders.steps is None else recorders.steps.steps,
            compared=None if recorders.compared is None else StepComparison(recorders.compared.steps),
            beside=() if recorders.zero_leaves is None else recorders.zero_leaves.leaves,
            activation=work.activation,
        )
        for layer in (*plan.layers, *plan.watched):
            self.forward.record(layer)  # each exists, before any backward pass

    def _taped_layer(self, model: nn.Module, inputs: Inputs, work: RuntimeSettings) -> str | None:
        """The layer whose perturbed maps can use a tape of this pass, if there is one.

        They are run one image at a time and in the precision of ``work``; and hooks of others would see a replay.
        """
        if not self.cut or len(inputs) > 1 or self._precision != work.precision:
            return None
        layer = next((stream.layer for stream in self.plan.streams if stream.of.of_layer), None)
        return None if layer is None or has_hooks(model) else layer

    def _watch(self, group: HookGroup, model: nn.Module, images: int) -> tuple[Capture, Capture]:
        """Hook what the plan needs; return what captures the layers with gradients, and those without."""
        plan = self.plan
        with_gradients = dict.fromkeys(split_call(layer, model)[0] for layer in plan.layers)
        layers = Capture(group, with_gradients, gradients=True, cut=self.cut)
        others = dict.fromkeys(split_call(layer, model)[0] for layer in plan.watched)
        watched = Capture(group, [name for name in others if name not in with_gradients], gradients=False)
        for collector in self._collectors.values():
            collector.watch(group, model, cut=self.cut)
        if plan.reruns:
            self.footprint.watch(group, model, images)
        for layer in {split_call(b.concept.layer, model)[0] for b in plan.backwards if b.concept is not None}:
            self._marks.watch(group, layer)
        return layers, watched

    def tapes(self) -> dict[str, Tape]:
        """The operations before a layer whose maps are perturbed, to be replayed, if they were recorded."""
        prefix = self._prefix
        tape = None if prefix is None else prefix.made(self.forward.record(prefix.layer).call)
        return {} if prefix is None or tape is None else {prefix.layer: tape}

    def answer(self, choice: ResolvedTarget, *, last: bool) -> None:
        """Run the backward passes for one target, and answer all that is asked of it."""
        for ask in self.plan.answered_at_once:
            if ask.need.backward is None:  # first, while the graph is there to be read
                collector = self._collectors[type(ask.need)]
                with collector.during(self.forward, choice):
                    choice.found[ask] = collector.answer(self.forward, choice, ask, ())
        for i, backward in enumerate(self.plan.backwards):
            self._back(backward, choice, keep=not last or i < len(self.plan.backwards) - 1)
            if last and backward.reference is not None and self.forward.compared is not None:
                self.forward.compared.of_reference.pop(backward.reference)  # of many, one is in memory at a time

    def _back(self, backward: Backward, choice: ResolvedTarget, *, keep: bool) -> None:
        """Run one backward pass to all that asks for it."""
        asks = [ask for ask in self.plan.answered_at_once if ask.need.backward == backward]
        sources = {ask: self._collectors[type(ask.need)].sources(self.forward, ask) for ask in asks}
        wanted = [source for found in sources.values() for source in found]
        with ExitStack() as stack:
            stack.enter_context(self.forward.layers.paused())
            if backward.rule is not None:
                group = stack.enter_context(HookGroup())
                choice.coverage[backward.rule] = apply_rule(backward.rule, group, choice.total, self.forward.operations)
            for collector in {id(c): c for ask in asks if (c := self._collectors[type(ask.need)])}.values():
                stack.enter_context(collector.during(self.forward, choice))
            if backward.composite is not None:
                self._propagate(backward, choice, stack.enter_context(HookGroup()))
                stack.callback(choice.propagated[backward].flow.close)
            if backward.reference is not None:
                stack.callback(self._compare(backward.reference, choice, stack.enter_context(HookGroup())).close)
            found = _gradients(self.forward.total(choice, backward.objective), wanted, keep) if wanted else ()
            gradients = iter(found)
            for ask in asks:
                mine = [next(gradients) for _ in sources[ask]]
                choice.found[ask] = self._collectors[type(ask.need)].answer(self.forward, choice, ask, mine)

    def _run_reference(self, reference: Reference) -> None:
        """Run the model on what the photo is compared with."""
        inputs, compared = self.forward.inputs, self.forward.compared
        assert compared is not None
        made = {path: reference.of(inputs.tensor(path)).clone().requires_grad_() for path in inputs.paths}
        recorder = StepRecorder(self.forward.model, list(made.values()), values=True, images=len(inputs))
        with recording(True), autocast(inputs.x, self._precision), recorder:
            output = inputs.replaced(made).call(self.forward.model)
        if any(tensor.is_floating_point() and bool(tensor.isnan().any()) for _, tensor in nested.paths(output)):
            raise MethodError(
                "baseline must be one that the model has finite scores for, but they are NaN there (as where a photo "
                "of one colour is divided by its deviation); choose another baseline, or integratedgradients"
            )
        compared.of_reference[reference] = recorder.steps

    def _compare(self, reference: Reference, choice: ResolvedTarget, group: HookGroup) -> RelevanceFlow:
        """Make the backward pass that follows propagate differences from a reference."""
        compared = self.forward.compared
        assert compared is not None
        if reference not in compared.of_reference:
            self._run_reference(reference)
        others = compared.of_reference[reference]
        return propagate_differences(group, choice.total, compared.steps, others, self.forward.count)

    def _propagate(self, backward: Backward, choice: ResolvedTarget, group: HookGroup) -> None:
        """Make the backward pass that follows propagate relevance."""
        forward = self.forward
        assert backward.composite is not None
        sources = [forward.source(path) for path in forward.inputs.paths]
        concept = None if backward.concept is None else self._hold_back(backward.concept, choice, group)
        apart = [] if concept is None else [concept]
        layers = [ask.layer for ask in self.plan.answered_at_once if ask.layer and ask.need.backward == backward]
        apart += [node for layer in layers for each in forward.sources_of(layer) if (node := node_of(each)) is not None]
        choice.propagated[backward] = propagate(
            backward.composite, group, choice.total, forward.operations, forward.steps, sources, forward.count, apart
        )
        if concept is not None:
            hold_back_beside(group, concept, consumers(choice.total))

    def _hold_back(self, concept: Concept, choice: ResolvedTarget, group: HookGroup) -> Node:
        """Let relevance through some channels of a layer alone; return the Node that its output left."""
        name, number = split_call(concept.layer, self.forward.model)
        calls = self._marks.found[name]
        if not calls or (number is not None and number >= len(calls)):
            raise LayerError(
                f"concept must name a layer that the score depends on, got {concept.layer!r}, which was called "
                f"{len(calls)} times; --list-layers shows them"
            )
        node, output, shape = calls[-1 if number is None else number]
        if node not in consumers(choice.total):
            raise LayerError(
                f"concept must name a layer that the score depends on, got {concept.layer!r}, which does not lead to "
                f"target {choice.name}; choose a layer on the way from the input to the target"
            )
        dim = 1 if len(shape) == self.forward.inputs.x.ndim and not self._channels_last(shape) else len(shape) - 1
        if max(concept.channels) >= shape[dim]:
            raise MethodError(
                f"concept must name channels of {concept.layer}, 0 to {shape[dim] - 1}, got {max(concept.channels)}"
            )
        hold_back(group, node, output, concept.channels, dim)
        return node

    def _channels_last(self, shape: torch.Size) -> bool:
        grid = self.forward.grids.grid(tuple(shape))
        return grid is not None and shape[1:-1] == tuple(grid.size) and shape[2:] != tuple(grid.size)


def _gradients(total: torch.Tensor, wanted: Sequence[Source], keep: bool) -> Sequence[torch.Tensor | None]:
    if not total.requires_grad:
        return (None,) * len(wanted)
    return torch.autograd.grad(total, wanted, retain_graph=keep, allow_unused=True)


def _must_be_open(model: nn.Module, plan: Plan) -> None:
    """Refuse what needs to look into scripted modules: what they show depends on what they have run before."""
    looking = [name for name, asks in plan.wanted.items() if any(ask.need.looks_inside for ask in asks)]
    closed = scripted(model) if looking else []
    if closed:
        raise MethodError(
            f"{looking[0] or 'the method'} must see every operation of the model, but layer {closed[0]!r} is scripted; "
            "put the module that it was made from in its place, or use a method that does not look inside, such as "
            "saliency or gradcam"
        )
