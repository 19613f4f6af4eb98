"""The fewest passes that gather what the methods asked for need.

`gather` runs the model **once** for all methods, layers and targets together:

* only layers needed: everything below the first of them runs without a graph, like plain inference;
* input gradients needed: the whole pass is recorded, and each rule for rectifiers is one more backward over it;
* each further target, and each further objective, is one more backward, never one more forward.

Hooks are on during the passes alone, and act only for the thread that put them there. Gradients are asked of autograd
for the tensors that need them, so no parameter's ``.grad`` or ``requires_grad`` is touched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

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
    legible,
)
from explain.engine.linear import Heads, bias_of, biased_modules, class_weights
from explain.engine.rules import apply_rule
from explain.engine.variants import Footprint, Precision, Variants, Work, autocast
from explain.errors import ExplainError, ImageError, LayerError, MethodError, ModelError, TargetError
from explain.hooks import Capture, HookGroup, Record, inspect, untouched
from explain.hooks.attention import attention, by_image
from explain.layers import to_spatial
from explain.targets import Objective, Target, find_logits, settle


def gather(
    model: nn.Module,
    inputs: torch.Tensor,
    needs: Collection[Need],
    targets: Sequence[Target],
    layers: Collection[str],
    work: Work | None = None,
    *,
    pooled: Collection[str] | None = None,
    precision: Precision = "full",
) -> list[list[Evidence]]:
    """Run ``model`` on ``inputs`` ``(N, C, H, W)`` and return the evidence for each target, and in it for each layer.

    Without layers (no need is about a layer), the inner lists hold one piece of evidence with ``layer=None``. Layers
    that `ClassWeights` are needed for are named in ``pooled``, if these are not all. ``precision`` is that of this
    pass; that of further runs is in ``work``.

    Raises:
        ExplainError: bad input, a target that does not fit, a layer that is never called or has no map, a score that
            is not finite or does not depend on what is asked for.
    """
    with alone(), untouched(model):
        run = _Pass(model, inputs, frozenset(needs), tuple(layers), work or Work(), precision)
        run.pooled = run.layers if pooled is None else pooled
        chosen = [run.choose(target) for target in targets]  # all of them fit before the first backward is run
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
    """One forward pass, and the backward passes over it."""

    def __init__(
        self,
        model: nn.Module,
        inputs: torch.Tensor,
        needs: frozenset[Need],
        layers: tuple[str, ...],
        work: Work,
        precision: Precision,
    ) -> None:
        self.model, self.needs, self.work = model, needs, work
        self.rules = {need.rule for need in needs if isinstance(need, InputGradients)}
        self.whole = bool(self.rules) or any(isinstance(need, (BiasTerms, Attention)) for need in needs)
        self.layers = layers if any(need.of_layer for need in needs) else ()
        self.inputs = inputs.detach()
        self.source = self.inputs.clone().requires_grad_() if self.whole else self.inputs
        self.footprint, self.heads = Footprint(), Heads()
        self.pooled: Collection[str] = self.layers
        with HookGroup(model) as group, torch.set_grad_enabled(self.whole), autocast(inputs, precision):
            differentiated = any(isinstance(need, (LayerGradients, LayerCurvature)) for need in needs)
            self.capture = Capture(group, self.layers, gradients=differentiated)
            self.biases = Capture(group, biased_modules(model) if BiasTerms() in needs else (), gradients=True)
            if ClassWeights() in needs:
                self.heads.watch(group, model)
            if any(isinstance(need, Reruns) for need in needs):
                self.footprint.watch(group, model, len(inputs))
            # The model gets a copy: one that works on its input in place must not reach the caller's tensor.
            self.output = model(self.source.clone())
            self.graph_is_on = torch.is_grad_enabled()
        self.records = {name: self._last_call(name) for name in self.layers}
        self.logits = self._logits()

    def _logits(self) -> torch.Tensor | None:
        try:
            logits = find_logits(self.output, len(self.inputs)).detach()
        except ModelError:
            return None  # not a classifier
        if torch.isnan(logits).any() or torch.isposinf(logits).any():
            raise self._not_finite(logits[torch.isnan(logits) | torch.isposinf(logits)])
        return legible(logits)

    def _not_finite(self, wrong: torch.Tensor) -> ModelError:
        """Run the model once more, looking at every layer: where it went wrong is what there is to say."""
        first = inspect(self.model, self.inputs.clone(), gradients=False).first_nonfinite
        where = "" if first is None else f", first in layer {first.name!r} ({first.type})" if first.name else ""
        return ModelError(
            f"model must give finite scores, got {wrong[0].item()}{where}; check its weights and the input's values"
        )

    def _last_call(self, name: str) -> Record:
        calls = [record for record in self.capture.records if record.layer == name]
        if not calls:
            called = sorted({record.layer for record in self.capture.records})
            raise LayerError(
                f"layer {name!r} was not called in the forward pass{f' ({called} were)' if called else ''}; "
                "choose one that the model uses for this input (--list-layers shows them)"
            )
        if len(calls[-1].activation) != len(self.inputs):
            raise LayerError(
                f"layer {name!r} must give a map for each of the {len(self.inputs)} images, got shape "
                f"{tuple(calls[-1].activation.shape)}; choose a layer that keeps the batch dimension first"
            )
        return calls[-1]

    def choose(self, target: Target) -> _Choice:
        with torch.set_grad_enabled(self.graph_is_on):
            settled = settle(target, self.output, len(self.inputs))
            score, classes = settled.pick(self.output, len(self.inputs))
            total = score.sum()
        if not torch.isfinite(score.detach()).all():
            raise self._not_finite(score.detach()[~torch.isfinite(score.detach())])
        return _Choice(target.name, settled, legible(score.detach()), total, classes)

    def explain(self, choice: _Choice, *, last: bool) -> list[Evidence]:
        jobs = self._jobs()
        for i, job in enumerate(jobs):
            job(choice, not last or i < len(jobs) - 1)
        self._no_backward_needed(choice)
        return [self._evidence(choice, name) for name in self.layers or (None,)]

    def _evidence(self, choice: _Choice, layer: str | None) -> Evidence:
        found = choice.found if layer is None else {**choice.found, **choice.of_layer[layer]}
        raw = None if layer is None else self.records[layer].activation
        variants = Variants(
            self.model, self.inputs, choice.target, choice.classes, layer, raw, self.footprint, self.work,
            partial(_gather_one, self.model), alone,
        )  # fmt: skip
        return Evidence(
            legible(self.inputs), choice.score, choice.classes, choice.name, layer, found, choice.rectifiers,
            variants, self.logits,
        )  # fmt: skip

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
        count = len(self.inputs)
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
            return objective(find_logits(self.output, len(self.inputs)), choice.classes).sum()

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
        modules = dict(self.model.named_modules())
        return tuple(bias_of(modules[record.layer], g) for record, g in pairs if g is not None)

    def _keep(self, choice: _Choice, name: str, need: Need, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            why = "does not use the layer" if choice.total.requires_grad else "was computed with gradients turned off"
            raise LayerError(
                f"layer {name!r} must influence the score of target {choice.name}, but the score {why}; choose "
                "a layer or target that depend on each other, without no_grad(), detach() or checkpoints between"
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
        return legible(gradient)

    def _spatial(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return legible(to_spatial(tensor, (int(self.inputs.shape[-2]), int(self.inputs.shape[-1])), name))


def _gather_one(
    model: nn.Module,
    inputs: torch.Tensor,
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


def check_inputs(model: nn.Module, inputs: torch.Tensor) -> None:
    """Refuse what cannot be explained before anything runs.

    Raises:
        ImageError: ``inputs`` is not a floating-point tensor ``(N, C, H, W)`` of finite values on the model's device.
        ModelError: ``model`` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(inputs, torch.Tensor):
        raise ImageError(
            f"x must be a tensor (N, C, H, W), got {type(inputs).__name__}; use explainer.preprocess(image)[None]"
        )
    if inputs.ndim != 4:
        remedy = "add the batch dimension with x[None]" if inputs.ndim == 3 else "use explainer.preprocess(image)[None]"
        raise ImageError(f"x must have the shape (N, C, H, W), got {tuple(inputs.shape)}; {remedy}")
    if inputs.numel() == 0:
        raise ImageError(f"x must hold at least one image, got shape {tuple(inputs.shape)}; leave empty batches out")
    if not inputs.is_floating_point():
        raise ImageError(
            f"x must be floating point, got {inputs.dtype}; use x.float() / 255 or the model's preprocessing"
        )
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device != inputs.device:
        raise ImageError(
            f"x must be on the model's device {parameter.device}, got {inputs.device}; use x.to('{parameter.device}')"
        )
    if any(p.is_inference() for p in model.parameters()):
        raise ModelError(
            "model must have weights made outside torch.inference_mode() for gradients to exist, got some made inside "
            "it; build or load it outside"
        )
    if not torch.isfinite(inputs).all():
        raise ImageError("x must hold finite values, got NaN or infinity; check the preprocessing")


_running = threading.local()


@contextmanager
def alone() -> Iterator[None]:
    """One explanation at a time in a thread: one begun inside another's hook would see the other's hooks."""
    if getattr(_running, "now", False):
        raise ExplainError(
            "an explanation was started from inside another one (in a hook or a target); run them in turn"
        )
    _running.now = True
    try:
        yield
    finally:
        _running.now = False


def _begin_child() -> None:
    _running.now = False  # the explanation that a process was forked in goes on in its parent only


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
