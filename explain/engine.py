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

# The Nodes that rectifiers leave in the graph, whether a module, a function or an in-place method put them there.
RECTIFIERS = frozenset(
    f"{name}Backward0"
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
    layers: Mapping[str, nn.Module],
) -> list[list[Evidence]]:
    """Run ``model`` on ``inputs`` ``(N, C, H, W)`` and return the evidence for each target, and in it for each layer.

    Without layers (no need is about a layer), the inner lists hold one piece of evidence with ``layer=None``.

    Raises:
        ExplainError: bad input, a target that does not fit, a layer that is never called or has no map, a score that
            is not finite or does not depend on what is asked for.
    """
    check_inputs(model, inputs)
    with _alone(), untouched(model):
        run = _Pass(model, inputs, frozenset(needs), dict(layers))
        return [run.explain(target, last=i == len(targets) - 1) for i, target in enumerate(targets)]


class _Pass:
    """One forward pass, and the backward passes over it."""

    def __init__(
        self, model: nn.Module, inputs: torch.Tensor, needs: frozenset[Need], layers: dict[str, nn.Module]
    ) -> None:
        self.needs = needs
        self.rules = {need.rule for need in needs if isinstance(need, InputGradients)}
        self.layers = layers if needs & LAYER_NEEDS else {}
        self.inputs = inputs.detach()
        self.source = self.inputs.clone().requires_grad_() if self.rules else self.inputs
        with HookGroup(model) as group, torch.set_grad_enabled(bool(self.rules)):
            self.capture = Capture(group, self.layers, gradients=LayerGradients() in needs)
            # The model gets a copy: one that works on its input in place must not reach the caller's tensor.
            self.output = model(self.source.clone())
            self.graph_is_on = torch.is_grad_enabled()
        self.records = {name: self._last_call(name) for name in self.layers}
        try:
            self.logits: torch.Tensor | None = find_logits(self.output, len(inputs)).detach()
        except ModelError:
            self.logits = None  # not a classifier: only a callable can be its target

    def _last_call(self, name: str) -> Record:
        calls = [record for record in self.capture.records if record.layer == name]
        if not calls:
            called = sorted({record.layer for record in self.capture.records})
            raise LayerError(
                f"layer {name!r} was not called in the forward pass{f' ({called} were)' if called else ''}; "
                "choose one that the model uses for this input (--list-layers shows them)"
            )
        return calls[-1]

    def explain(self, target: Target, *, last: bool) -> list[Evidence]:
        with torch.set_grad_enabled(self.graph_is_on):
            score, classes = target.pick(self.output, len(self.inputs))
            total = score.sum()
        wrong = score.detach()[~torch.isfinite(score)]
        if len(wrong):
            raise ModelError(
                f"model must give finite scores, got {wrong[0].item()}; check its weights and the values of the input"
            )
        found, rectifiers = self._backward(total, target, last)
        common = Evidence(self.inputs, score.detach(), classes, target.name, None, found, rectifiers, self.logits)
        if not self.layers:
            return [common]
        return [replace(common, layer=name, found={**found, **self._of_layer(name, target)}) for name in self.layers]

    def _backward(
        self, total: torch.Tensor, target: Target, last: bool
    ) -> tuple[dict[Need, torch.Tensor], dict[str, int]]:
        """Fill the captured layers' gradients, and return those of the input under each rule."""
        found: dict[Need, torch.Tensor] = {}
        rectifiers: dict[str, int] = {}
        modified = sorted(self.rules - {"plain"})
        if LayerGradients() in self.needs or "plain" in self.rules:
            also = (self.source,) if "plain" in self.rules else ()
            gradients = self.capture.backward(total, also, retain_graph=not last or bool(modified))
            if also:
                found[InputGradients()] = _of_input(gradients[0], target)
        for rule in modified:
            with HookGroup() as group:
                nodes = [node for node in graph(total) if node.name() in RECTIFIERS]
                for node in nodes:
                    group.node(node, RULES[rule])
                keep = not last or rule != modified[-1]
                found[InputGradients(rule)] = _of_input(_gradient(total, self.source, keep), target)
            rectifiers[rule] = len(nodes)
        return found, rectifiers

    def _of_layer(self, name: str, target: Target) -> dict[Need, torch.Tensor]:
        record = self.records[name]
        size = int(self.inputs.shape[-2]), int(self.inputs.shape[-1])
        found: dict[Need, torch.Tensor] = {Activations(): to_spatial(record.activation, size, name)}
        if LayerGradients() in self.needs:
            if record.gradient is None:
                raise LayerError(
                    f"layer {name!r} must influence the score of target {target.name}, but it does not; choose another "
                    "layer, or a target that depends on it"
                )
            found[LayerGradients()] = to_spatial(record.gradient, size, name)
        return found


def _gradient(score: torch.Tensor, source: torch.Tensor, keep: bool) -> torch.Tensor | None:
    if not score.requires_grad:
        return None
    return torch.autograd.grad(score, source, retain_graph=keep, allow_unused=True)[0]


def _of_input(gradient: torch.Tensor | None, target: Target) -> torch.Tensor:
    if gradient is None:
        raise TargetError(
            f"target {target.name} must depend on the input through differentiable operations, but it does not; "
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
