"""The fewest passes that gather what the methods asked for need.

`gather` runs the model **once** for all methods, layers and targets together:

* only layers needed: everything below the first of them runs without a graph, like plain inference;
* input gradients needed: the whole pass is recorded, and each rule for rectifiers is one more backward over it;
* each further target, and each further objective, is one more backward, never one more forward.

Hooks are on during the passes alone, and act only for the thread that put them there. Gradients are asked of autograd
for the tensors that need them, so no parameter's ``.grad`` or ``requires_grad`` is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from explain.engine.entry import alone
from explain.engine.evidence import (
    Activations,
    Attention,
    AttentionMap,
    BiasTerms,
    ClassWeights,
    Evidence,
    InputGradients,
    LayerCurvature,
    LayerGradients,
    Need,
    Reruns,
    at_least_float32,
)
from explain.engine.linear import Heads, bias_of, biased_modules, class_weights
from explain.engine.rules import InSight, apply_rule
from explain.engine.variants import Footprint, Precision, Variants, Work, agree, asked_of, autocast, not_by_image
from explain.errors import LayerError, MethodError, ModelError, TargetError, UnusedLayerError
from explain.hooks import Capture, HookGroup, Record, cut_where_allowed, inspect, untouched
from explain.hooks.attention import attention, by_image
from explain.inputs import Inputs, InputsLike, as_inputs
from explain.layers import grids_of, of_other_images, split_call, to_spatial
from explain.targets import Objective, Target, find_logits, settle


def gather(
    model: nn.Module,
    inputs: InputsLike,
    needs: Collection[Need],
    targets: Sequence[Target],
    layers: Collection[str],
    work: Work | None = None,
    *,
    pooled: Collection[str] | None = None,
    precision: Precision = "full",
) -> list[list[Evidence]]:
    """Run ``model`` on ``inputs``, and return the evidence for each target, and in it for each layer.

    Without layers (no need is about a layer), the inner lists hold one piece of evidence with ``layer=None``. Layers
    that `ClassWeights` are needed for are named in ``pooled``, if these are not all. ``precision`` is that of this
    pass; that of further runs is in ``work``.

    Raises:
        ExplainError: bad input, a target that does not fit, a layer that is never called or has no map, a score that
            is not finite or does not depend on what is asked for.
    """
    layers = tuple(layers)
    pooled = layers if pooled is None else pooled
    with alone(), untouched(model):
        one_pass = partial(
            _Pass, model, as_inputs(inputs), frozenset(needs), layers, pooled, work or Work(), precision
        )  # fmt: skip
        run = cut_where_allowed(one_pass)
        if run.capture.misses and run.cut:
            run = one_pass(False)
        chosen = [run.choose(target) for target in targets]  # all of them fit before the first backward is run
        if any(isinstance(need, Reruns) for need in needs):
            run.must_stand_alone(chosen[0])
        return [run.explain(choice, last=i == len(chosen) - 1) for i, choice in enumerate(chosen)]


@dataclass
class _Choice:
    """A target of this pass, settled; the scores that it picked and their classes; and what was found for it so far."""

    name: str
    target: Target
    score: torch.Tensor
    total: torch.Tensor
    classes: torch.Tensor | None
    found: dict[Need, Any] = field(default_factory=dict)
    of_layer: dict[str, dict[Need, Any]] = field(default_factory=dict)
    rectifiers: dict[str, int] = field(default_factory=dict)


class _Pass:
    """One forward pass, and the backward passes over it.

    It is ``cut`` where nothing but layers is asked for: gradients are off until the first of them.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        needs: frozenset[Need],
        layers: tuple[str, ...],
        pooled: Collection[str],
        work: Work,
        precision: Precision,
        cut: bool,
    ) -> None:
        self.model, self.needs, self.pooled, self.work = model, needs, pooled, work
        self.rules = {need.rule for need in needs if isinstance(need, InputGradients)}
        self.whole = bool(self.rules) or any(isinstance(need, (BiasTerms, Attention)) for need in needs)
        self.cut = cut and not self.whole
        self.layers = layers if any(need.of_layer for need in needs) else ()
        self.inputs = inputs.detached()
        self.x = self.inputs.x
        self.source = self.x.clone().requires_grad_() if self.whole else self.x
        self.grids = grids_of(model, self.inputs)
        self.footprint, self.heads = Footprint(), Heads()
        with HookGroup(model) as group, torch.set_grad_enabled(not self.cut), autocast(self.x, precision):
            differentiated = any(isinstance(need, (LayerGradients, LayerCurvature)) for need in needs)
            hooked = dict.fromkeys(split_call(layer)[0] for layer in self.layers)
            self.capture = Capture(group, hooked, gradients=differentiated, cut=self.cut)
            biased = biased_modules(model) if BiasTerms() in needs else ()
            self.biases = Capture(group, biased, gradients=True, cut=self.cut)
            if ClassWeights() in needs:
                self.heads.watch(group, model)
            if any(isinstance(need, Reruns) for need in needs):
                self.footprint.watch(group, model, len(self.x))
            with InSight() if self.rules - {"plain"} else nullcontext():
                self.output = self.inputs.replaced(self.source).call(model)
            self.graph_is_on = torch.is_grad_enabled()
        self.records = {name: self._record(name) for name in self.layers}
        self.logits = self._logits()

    def _logits(self) -> torch.Tensor | None:
        try:
            logits = find_logits(self.output, len(self.x)).detach()
        except ModelError:
            return None  # not a classifier
        if torch.isnan(logits).any() or torch.isposinf(logits).any():
            raise self._not_finite(logits[torch.isnan(logits) | torch.isposinf(logits)])
        return at_least_float32(logits)

    def _not_finite(self, wrong: torch.Tensor) -> ModelError:
        """Run the model once more, looking at every layer: where it went wrong is what there is to say."""
        copies = self.inputs.copied()
        first = inspect(self.model, *copies.args, kwargs=copies.kwargs, gradients=False).first_nonfinite
        where = "" if first is None else f", first in layer {first.name!r} ({first.type})" if first.name else ""
        return ModelError(
            f"model must give finite scores, got {wrong[0].item()}{where}; check its weights and the input's values"
        )

    def _record(self, layer: str) -> Record:
        name, number = split_call(layer)
        record, last = self.capture.of_call(name, number), self.capture.of_call(name)
        if last is None:
            called = sorted({record.layer for record in self.capture.records})
            raise LayerError(
                f"layer {layer!r} was not called in the forward pass{f' ({called} were)' if called else ''}; "
                "choose one that the model uses for this input (--list-layers shows them)"
            )
        if record is None:
            raise LayerError(
                f"layer {layer!r} must name one of the calls of {name}, 0 to {last.call}, got {number}; without a "
                "number, it is the last"
            )
        shape = tuple(record.activation.shape)
        if len(self.x) not in shape[:1] and self.grids.grid(shape) is None:
            raise LayerError(
                f"layer {layer!r} must give a map for each of the {len(self.x)} images, got shape {shape}; choose a "
                "layer that keeps the batch dimension first"
            )
        return record

    def choose(self, target: Target) -> _Choice:
        with torch.set_grad_enabled(self.graph_is_on):
            settled = settle(target, self.output, len(self.x))
            score, classes = settled.pick(self.output, len(self.x))
            total = score.sum()
        if not torch.isfinite(score.detach()).all():
            raise self._not_finite(score.detach()[~torch.isfinite(score.detach())])
        return _Choice(target.name, settled, at_least_float32(score.detach()), total, classes)

    def must_stand_alone(self, choice: _Choice) -> None:
        """Refuse an input that seems to have a row for each image, but belongs to all of them.

        Altered images are given the rows of the images that they are made of; so the first image, with its rows alone,
        has to have the score that it has among the others.
        """
        rows = [way for way in self.inputs.others if self.inputs.goes_with_images(way)]
        if not rows or len(self.x) == 1:
            return
        asked = asked_of(choice.target, choice.classes, torch.zeros(1, dtype=torch.long, device=self.x.device))
        try:
            alone = asked.pick(self.inputs.first().call(self.model), 1)[0].detach()
        except Exception:  # whatever it is, the image alone does not go with what it was given
            alone = choice.score[:1] + float("nan")
        if not agree(at_least_float32(alone), choice.score[:1], self.x, self.work):
            raise not_by_image(rows)

    def explain(self, choice: _Choice, *, last: bool) -> list[Evidence]:
        jobs = self._jobs()
        for i, job in enumerate(jobs):
            job(choice, not last or i < len(jobs) - 1)
        self._no_backward_needed(choice)
        return [self._evidence(choice, name) for name in self.layers or (None,)]

    def _evidence(self, choice: _Choice, layer: str | None) -> Evidence:
        found = choice.found if layer is None else {**choice.found, **choice.of_layer[layer]}
        record = None if layer is None else self.records[layer]
        variants = Variants(
            self.model, self.inputs, self.grids, choice.target, choice.classes, layer, record, self._width,
            self.footprint, self.work, partial(_gather_one, self.model), alone,
        )  # fmt: skip
        return Evidence(
            at_least_float32(self.x), choice.score, choice.classes, choice.name, layer, found, choice.rectifiers,
            variants, self.logits,
        )  # fmt: skip

    @property
    def _width(self) -> int | None:
        return None if self.logits is None else self.logits.shape[1]

    def _jobs(self) -> list[Callable[[_Choice, bool], None]]:
        """The backward passes for one target; each is told whether the graph is needed after it."""
        jobs: list[Callable[[_Choice, bool], None]] = []
        objectives = {need.objective for need in self.needs if isinstance(need, LayerGradients)}
        if None in objectives or "plain" in self.rules or {BiasTerms(), Attention(gradients=True)} & self.needs:
            jobs.append(self._plain)
        elif Attention() in self.needs:
            jobs.append(self._attention)
        jobs += [partial(self._objective, objective) for objective in objectives if objective is not None]
        jobs += [partial(self._curvature, need) for need in self.needs if isinstance(need, LayerCurvature)]
        jobs += [partial(self._ruled, rule) for rule in sorted(self.rules - {"plain"})]
        return jobs

    def _plain(self, choice: _Choice, keep: bool) -> None:
        """One backward pass for all that the score's own gradient is needed for."""
        wanted = (self.source, *self.biases.sources) if self.whole else ()
        with self._watching_attention(choice):
            gradients = self.capture.backward(choice.total, wanted, retain_graph=keep)
        if "plain" in self.rules:
            choice.found[InputGradients()] = self._of_input(gradients[0], choice)
        if BiasTerms() in self.needs:
            choice.found[BiasTerms()] = self._bias_terms(gradients[1:])
        if LayerGradients() in self.needs:
            self._keep_layer_gradients(choice, LayerGradients())

    def _attention(self, choice: _Choice, keep: bool) -> None:
        with self._watching_attention(choice):
            pass  # the weights are there already; no gradient is asked for

    @contextmanager
    def _watching_attention(self, choice: _Choice) -> Iterator[None]:
        """Keep the weights of every attention, and the gradients that a backward pass within the block brings them."""
        wanted = [need for need in self.needs if isinstance(need, Attention)]
        with HookGroup() as group:
            records = attention(choice.total, group) if wanted else []
            yield
        count = len(self.x)
        maps = [(r.weights, r.gradient) for r in records]
        found = tuple(AttentionMap(by_image(w, count), None if g is None else by_image(g, count)) for w, g in maps)
        choice.found.update(dict.fromkeys(wanted, found))

    def _objective(self, objective: Objective, choice: _Choice, keep: bool) -> None:
        self.capture.backward(self._total(objective, choice), retain_graph=keep)
        self._keep_layer_gradients(choice, LayerGradients(objective))

    def _keep_layer_gradients(self, choice: _Choice, need: Need) -> None:
        for name, record in self.records.items():
            self._keep(choice, name, need, record.gradient)

    def _curvature(self, need: LayerCurvature, choice: _Choice, keep: bool) -> None:
        """The Hessian times the activations, by a second backward through the first: its matrix is never built."""
        total = choice.total if need.objective is None else self._total(need.objective, choice)
        for name, record in self.records.items():
            source = self.capture.sources[self.capture.records.index(record)]
            with self.capture.paused():
                product = _hessian_product(total, source, record.activation)
            self._keep(choice, name, need, product)

    def _ruled(self, rule: str, choice: _Choice, keep: bool) -> None:
        with self.capture.paused(), HookGroup() as group:
            choice.rectifiers[rule] = apply_rule(rule, group, choice.total)
            choice.found[InputGradients(rule)] = self._of_input(_gradient(choice.total, self.source, keep), choice)

    def _total(self, objective: Objective, choice: _Choice) -> torch.Tensor:
        if choice.classes is None:
            raise TargetError(
                f"target must be a class for a method that compares classes, got {choice.name}; give a class "
                "index or label"
            )
        with torch.set_grad_enabled(self.graph_is_on):
            return objective(find_logits(self.output, len(self.x)), choice.classes).sum()

    def _no_backward_needed(self, choice: _Choice) -> None:
        for name in self.layers:
            of_layer = choice.of_layer.setdefault(name, {})
            of_layer[Activations()] = self._spatial(self.records[name].activation, name)
            if ClassWeights() in self.needs and name in self.pooled:
                of_layer[ClassWeights()] = class_weights(
                    self.heads, of_layer[Activations()], self.logits, choice.classes, name
                )

    def _bias_terms(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        pairs = zip(self.biases.records, gradients, strict=True)
        modules, elsewhere = dict(self.model.named_modules()), of_other_images(self.model, self.inputs)
        terms = [(r, self._of_images(bias_of(modules[r.layer], g), r)) for r, g in pairs if g is not None]
        # What other images than the explained one bring adds to the score too, but lies nowhere on this one.
        return tuple(term.flatten(1) if (r.layer, r.call) in elsewhere else term for r, term in terms)

    def _of_images(self, term: torch.Tensor, record: Record) -> torch.Tensor:
        """A term laid out over the images, or where it is no map (it may be of windows), as rows of numbers."""
        count, shape = len(self.x), tuple(term.shape)
        grid = self.grids.grid(shape, f"{record.layer}@{record.call}") if term.ndim > 2 else None
        if grid is not None:
            return grid.spread(term)
        turned = term.ndim == 3 and len(term) != count and term.shape[1] == count
        if not turned and len(term) != count > 1 and self.inputs.others:
            raise MethodError(
                f"fullgrad must see layer {record.layer!r} give a row for each of the {count} images where there are "
                f"other inputs, got {len(term)} rows; explain one image at a time"
            )
        return (term.transpose(0, 1) if turned else term).reshape(count, -1)

    def _keep(self, choice: _Choice, name: str, need: Need, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            hidden = "" if choice.total.requires_grad else " in sight of gradients"
            raise UnusedLayerError(
                f"layer {name!r} must influence the score of target {choice.name}, but the score does not use "
                f"it{hidden}; choose a layer or target that depend on each other, without no_grad(), detach() or "
                "checkpoints between"
                f"{_without_gradients(self.model)}"
            )
        choice.of_layer.setdefault(name, {})[need] = self._spatial(gradient, name)

    def _of_input(self, gradient: torch.Tensor | None, choice: _Choice) -> torch.Tensor:
        if gradient is None:
            raise TargetError(
                f"target {choice.name} must depend on the input through differentiable operations, but it does not; "
                "look for .detach(), .data, no_grad() or rounding in the model or the target"
                f"{_without_gradients(self.model)}"
            )
        return at_least_float32(gradient)

    def _spatial(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return at_least_float32(to_spatial(tensor, self.grids, name))


def _gather_one(
    model: nn.Module,
    inputs: Inputs,
    needs: frozenset[Need],
    target: Target,
    layers: tuple[str, ...],
    work: Work,
) -> Evidence:
    return gather(model, inputs, needs, [target], layers, work, precision=work.precision)[0][0]


def _gradient(score: torch.Tensor, source: torch.Tensor, keep: bool) -> torch.Tensor | None:
    if not score.requires_grad:
        return None
    return torch.autograd.grad(score, source, retain_graph=keep, allow_unused=True)[0]


def _hessian_product(total: torch.Tensor, source: torch.Tensor, direction: torch.Tensor) -> torch.Tensor | None:
    if not total.requires_grad:
        return None
    gradient = torch.autograd.grad(total, source, create_graph=True, allow_unused=True)[0]
    if gradient is None:
        return None
    if not gradient.requires_grad:
        return torch.zeros_like(gradient)  # the score is linear in the layer
    try:
        product = torch.autograd.grad(gradient, source, direction, retain_graph=True, allow_unused=True)[0]
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        raise MethodError(
            f"shapleycam must have second derivatives behind the layer, but {str(error).split()[2]} has none; use "
            "gradcam, or put the call under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        ) from None
    return torch.zeros_like(gradient) if product is None else product.detach()


def _without_gradients(model: nn.Module) -> str:
    """What to add where a gradient is missing and the model has layers that never have one."""
    quantised = any("quantized" in type(module).__module__ for module in model.modules())
    remedy = (
        "quantised layers have no gradients: use scorecam, ablationcam or eigencam, or the model before quantisation"
    )
    return f" ({remedy})" if quantised else ""
