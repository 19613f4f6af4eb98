"""The engine: the fewest passes that gather what the methods asked for need.

A method declares its needs (`Activations`, `LayerGradients`, `InputGradients`) and is otherwise a pure function of
`Evidence`. `gather` runs the model **once** for all methods, layers and targets together:

* only layers needed: everything below the first of them runs without a graph, like plain inference;
* input gradients needed: the whole pass is recorded, and each rule for rectifiers is one more backward over it;
* each further target is one more backward, never one more forward.

Hooks are on during the forward pass alone, and act only for the thread that put them there. Gradients are asked of
autograd for the tensors that need them, so no parameter's ``.grad`` or ``requires_grad`` is touched.

A new kind of evidence is one frozen class here and the lines of `_Pass` that gather it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from explain.errors import ExplainError, ImageError, LayerError, ModelError, TargetError
from explain.hooks import Capture, HookGroup, Record, graph, untouched
from explain.layers import to_spatial
from explain.targets import Target, find_logits


@dataclass(frozen=True)
class Activations:
    """The feature maps of the layer, ``(N, C, h, w)``."""


@dataclass(frozen=True)
class LayerGradients:
    """The gradient of the score with respect to the layer's feature maps, ``(N, C, h, w)``."""


@dataclass(frozen=True)
class InputGradients:
    """The gradient of the score with respect to the input, ``(N, C, H, W)``, under a rule for rectifiers."""

    rule: str = "plain"


Need = Activations | LayerGradients | InputGradients
LAYER_NEEDS = frozenset({Activations(), LayerGradients()})


@dataclass(frozen=True)
class Evidence:
    """All that a method gets to see: what was asked, what the model said, and the tensors that the method needs.

    Tensors are detached, and every one is per image: ``score`` ``(N,)``, ``classes`` ``(N,)`` or None, ``inputs``
    ``(N, C, H, W)``.
    """

    inputs: torch.Tensor
    score: torch.Tensor
    classes: torch.Tensor | None
    target: str
    layer: str | None
    found: Mapping[Need, torch.Tensor]
    rectifiers: Mapping[str, int]
    """For each rule, how many rectifiers it acted on."""
    logits: torch.Tensor | None = None
    """The class scores ``(N, K)``, where the model's output has them."""

    def __getitem__(self, need: Need) -> torch.Tensor:
        return self.found[need]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the input."""
        return int(self.inputs.shape[-2]), int(self.inputs.shape[-1])

    @property
    def activations(self) -> torch.Tensor:
        return self.found[Activations()]

    @property
    def gradients(self) -> torch.Tensor:
        return self.found[LayerGradients()]


Gradients = tuple[torch.Tensor | None, ...]


def _guided(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
    """Springenberg et al., 2014: what comes back through a rectifier keeps only its positive part."""
    first = grad_inputs[0]
    return (None if first is None else first.clamp(min=0), *grad_inputs[1:])


RULES: dict[str, Callable[[Gradients, Gradients], Gradients]] = {"guided": _guided}

# The Nodes that rectifiers leave in the graph, whether a module, a function or an in-place method put them there. Their
# names end in "Backward" and a number: 0, or 1 for some of the in-place variants.
RECTIFIERS = frozenset(
    f"{name}Backward"
    for name in [
        "Relu",
        "Threshold",
        "Hardtanh",
        "LeakyRelu",
        "Prelu",
        "PreluKernel",
        "RreluWithNoise",
        "Elu",
        "Celu",
        "Silu",
        "Gelu",
        "Hardswish",
        "Mish",
        "Softplus",
    ]
)


def gather(
    model: nn.Module,
    inputs: torch.Tensor,
    needs: Collection[Need],
    targets: Sequence[Target],
    layers: Collection[str],
) -> list[list[Evidence]]:
    """Run ``model`` on ``inputs`` ``(N, C, H, W)`` and return the evidence for each target, and in it for each layer.

    Without layers (no need is about a layer), the inner lists hold one piece of evidence with ``layer=None``.

    Raises:
        ExplainError: bad input, a target that does not fit, a layer that is never called or has no map, a score that
            is not finite or does not depend on what is asked for.
    """
    check_inputs(model, inputs)
    with _alone(), untouched(model):
        run = _Pass(model, inputs, frozenset(needs), tuple(layers))
        chosen = [run.choose(target) for target in targets]  # all of them fit before the first backward is run
        return [run.explain(choice, last=i == len(chosen) - 1) for i, choice in enumerate(chosen)]


@dataclass(frozen=True)
class _Choice:
    """A target of this pass: its name, the scores that it picked, and their classes."""

    target: str
    score: torch.Tensor
    total: torch.Tensor
    classes: torch.Tensor | None


class _Pass:
    """One forward pass, and the backward passes over it."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, needs: frozenset[Need], layers: tuple[str, ...]) -> None:
        self.needs = needs
        self.rules = {need.rule for need in needs if isinstance(need, InputGradients)}
        self.layers = layers if needs & LAYER_NEEDS else ()
        self.inputs = inputs.detach()
        self.source = self.inputs.clone().requires_grad_() if self.rules else self.inputs
        with HookGroup(model) as group, torch.set_grad_enabled(bool(self.rules)):
            self.capture = Capture(group, self.layers, gradients=LayerGradients() in needs)
            # The model gets a copy: one that works on its input in place must not reach the caller's tensor.
            self.output = model(self.source.clone())
            self.graph_is_on = torch.is_grad_enabled()
        self.records = {name: self._last_call(name) for name in self.layers}
        self.logits = self._logits()

    def _logits(self) -> torch.Tensor | None:
        try:
            logits = find_logits(self.output, len(self.inputs)).detach()
        except ModelError:
            return None  # not a classifier: only a callable can be its target
        if torch.isnan(logits).any() or torch.isposinf(logits).any():
            wrong = logits[torch.isnan(logits) | torch.isposinf(logits)][0].item()
            raise ModelError(
                f"model must give finite scores, got {wrong}; check its weights and the values of the input"
            )
        return logits

    def _last_call(self, name: str) -> Record:
        calls = [record for record in self.capture.records if record.layer == name]
        if not calls:
            called = sorted({record.layer for record in self.capture.records})
            raise LayerError(
                f"layer {name!r} was not called in the forward pass{f' ({called} were)' if called else ''}; "
                "choose one that the model uses for this input (--list-layers shows them)"
            )
        return calls[-1]

    def choose(self, target: Target) -> _Choice:
        with torch.set_grad_enabled(self.graph_is_on):
            score, classes = target.pick(self.output, len(self.inputs))
            total = score.sum()
        wrong = score.detach()[~torch.isfinite(score)]
        if len(wrong):
            raise ModelError(
                f"model must give finite scores, got {wrong[0].item()}; check its weights and the values of the input"
            )
        return _Choice(target.name, score.detach(), total, classes)

    def explain(self, choice: _Choice, *, last: bool) -> list[Evidence]:
        found, rectifiers = self._backward(choice, last)
        common = Evidence(
            self.inputs, choice.score, choice.classes, choice.target, None, found, rectifiers, self.logits
        )
        if not self.layers:
            return [common]
        return [replace(common, layer=name, found={**found, **self._of_layer(name, choice)}) for name in self.layers]

    def _backward(self, choice: _Choice, last: bool) -> tuple[dict[Need, torch.Tensor], dict[str, int]]:
        """Fill the captured layers' gradients, and return those of the input under each rule."""
        found: dict[Need, torch.Tensor] = {}
        rectifiers: dict[str, int] = {}
        modified = sorted(self.rules - {"plain"})
        if LayerGradients() in self.needs or "plain" in self.rules:
            also = (self.source,) if "plain" in self.rules else ()
            gradients = self.capture.backward(choice.total, also, retain_graph=not last or bool(modified))
            if also:
                found[InputGradients()] = _of_input(gradients[0], choice)
        for rule in modified:
            with self.capture.paused(), HookGroup() as group:
                nodes = [node for node in graph(choice.total) if node.name().rstrip("0123456789") in RECTIFIERS]
                for node in nodes:
                    group.node(node, RULES[rule])
                keep = not last or rule != modified[-1]
                found[InputGradients(rule)] = _of_input(_gradient(choice.total, self.source, keep), choice)
            rectifiers[rule] = len(nodes)
        return found, rectifiers

    def _of_layer(self, name: str, choice: _Choice) -> dict[Need, torch.Tensor]:
        record = self.records[name]
        size = int(self.inputs.shape[-2]), int(self.inputs.shape[-1])
        if len(record.activation) != len(self.inputs):
            raise LayerError(
                f"layer {name!r} must give a map for each of the {len(self.inputs)} images, got shape "
                f"{tuple(record.activation.shape)}; choose a layer that keeps the batch dimension first"
            )
        found: dict[Need, torch.Tensor] = {Activations(): to_spatial(record.activation, size, name)}
        if LayerGradients() in self.needs:
            if record.gradient is None:
                why = (
                    "does not use the layer" if choice.total.requires_grad else "was computed with gradients turned off"
                )
                raise LayerError(
                    f"layer {name!r} must influence the score of target {choice.target}, but the score {why}; choose a "
                    "layer or target that depend on each other, without no_grad(), detach() or checkpoints between"
                )
            found[LayerGradients()] = to_spatial(record.gradient, size, name)
        return found


def _gradient(score: torch.Tensor, source: torch.Tensor, keep: bool) -> torch.Tensor | None:
    if not score.requires_grad:
        return None
    return torch.autograd.grad(score, source, retain_graph=keep, allow_unused=True)[0]


def _of_input(gradient: torch.Tensor | None, choice: _Choice) -> torch.Tensor:
    if gradient is None:
        raise TargetError(
            f"target {choice.target} must depend on the input through differentiable operations, but it does not; "
            "look for .detach(), .data, no_grad() or rounding in the model or the target"
        )
    return gradient


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
            f"x must be a tensor (N, C, H, W), got {type(inputs).__name__}; use explainer.preprocess(image)"
        )
    if inputs.ndim != 4:
        remedy = "; add the batch dimension with x[None]" if inputs.ndim == 3 else ""
        raise ImageError(f"x must have the shape (N, C, H, W), got {tuple(inputs.shape)}{remedy}")
    if inputs.numel() == 0:
        raise ImageError(f"x must hold at least one image, got shape {tuple(inputs.shape)}")
    if not inputs.is_floating_point():
        raise ImageError(
            f"x must be floating point, got {inputs.dtype}; use x.float() / 255 or the model's preprocessing"
        )
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device != inputs.device:
        raise ImageError(f"x must be on the model's device {parameter.device}, got {inputs.device}; use x.to(...)")
    if any(p.is_inference() for p in model.parameters()):
        raise ModelError("model must be built or loaded outside torch.inference_mode() for gradients to exist; do so")
    if not torch.isfinite(inputs).all():
        raise ImageError("x must hold finite values, got NaN or infinity; check the preprocessing")


_running = threading.local()


@contextmanager
def _alone() -> Iterator[None]:
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
