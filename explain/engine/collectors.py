"""One collector for each kind of evidence: what to watch, what to differentiate, and what to answer.

`COLLECTORS` says which collector answers which need. A collector is made for one forward pass, and learns before it
which asks it has to answer; afterwards it answers them for each target, with the gradients that it asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from explain._utils.errors import MethodError, TargetError, UnusedLayerError, either
from explain._utils.nested import first_tensor
from explain.engine.blocks import attention_gradients, explained_blocks, transformer_blocks
from explain.engine.evidence import at_least_float32
from explain.engine.forward import Forward, ResolvedTarget
from explain.engine.linear_head import HeadCandidates, class_weights
from explain.engine.needs import (
    Activations,
    Attention,
    AttentionMap,
    AttentionRelevance,
    BiasTerms,
    BlockAttention,
    BlockTokens,
    ClassWeights,
    DetectionSimilarity,
    InputGradients,
    LayerCurvature,
    LayerGradients,
    LayerRelevance,
    Multipliers,
    Need,
    NeedAtLayer,
    Relevance,
    RelevanceCoverage,
    RevealCancel,
    RuleCoverage,
)
from explain.engine.settings import RuntimeSettings, agree
from explain.hooks import HookGroup
from explain.hooks.attention import AttentionRecord, attention, by_image
from explain.hooks.preserve import recording
from explain.hooks.records import Source
from explain.layers.calls import independent_calls
from explain.relevance.propagation import sources_behind
from explain.relevance.reveal_cancel import RevealCancelTracer, joined
from explain.targets.regions import Detected
from explain.tracing.dependence import AddedConstant

Gradients = Sequence[torch.Tensor | None]


class Collector(ABC):
    """Answers asks of one kind; the defaults do nothing, as most kinds need."""

    def __init__(self, asks: Sequence[NeedAtLayer]) -> None:
        self.asks = asks

    def watch(self, group: HookGroup, model: nn.Module, *, cut: bool) -> None:  # noqa: B027 (not all need hooks)
        """Put up hooks before the forward pass."""

    def sources(self, forward: Forward, ask: NeedAtLayer) -> list[Source]:
        """What the backward pass of an ask differentiates with respect to."""
        return []

    @contextmanager
    def during(self, forward: Forward, choice: ResolvedTarget) -> Iterator[None]:
        """Watch a backward pass."""
        yield

    @abstractmethod
    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> Any:
        """Answer an ask with the gradients of its sources."""


class _Activations(Collector):
    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> torch.Tensor:
        return forward.spatial(forward.record(_layer(ask)).activation, _layer(ask))


class _LayerGradients(Collector):
    def sources(self, forward: Forward, ask: NeedAtLayer) -> list[Source]:
        return forward.sources_of(_layer(ask))

    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> torch.Tensor:
        return _of_layer(forward.joined(_layer(ask), gradients), forward, choice, ask)


class _LayerCurvature(Collector):
    """The Hessian times the activations, by a second backward through the first: its matrix is never built."""

    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> torch.Tensor:
        total = forward.total(choice, ask.need.objective)  # type: ignore[attr-defined]
        with forward.layers.paused():
            return _of_layer(_hessian_product(total, forward, _layer(ask)), forward, choice, ask)


class _ClassWeights(Collector):
    def __init__(self, asks: Sequence[NeedAtLayer]) -> None:
        super().__init__(asks)
        self._heads = HeadCandidates()

    def watch(self, group: HookGroup, model: nn.Module, *, cut: bool) -> None:
        self._heads.watch(group, model)

    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> torch.Tensor:
        maps = choice.found[ask.before(Activations())]
        return class_weights(self._heads, maps, forward.logits, choice.classes, _layer(ask))


class _Likeness(Collector):
    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> torch.Tensor:
        if not isinstance(choice.target, Detected):
            kind = either("a detected box, explain.targets.Detection,", "a detected box")
            raise TargetError(
                f"target must be {kind} for a method that compares detections, got "
                f"{choice.name if choice.classes is None else 'a class'}; drise is for detectors, so take rise"
            )
        return at_least_float32(choice.target.likeness(forward.output, forward.count).detach())


class _InputGradients(Collector):
    def sources(self, forward: Forward, ask: NeedAtLayer) -> list[Source]:
        return [forward.source(ask.input)]

    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> torch.Tensor:
        if gradients[0] is None:
            raise TargetError(_unused(forward, choice))
        return at_least_float32(gradients[0].detach())


class _RuleCoverage(Collector):
    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> Any:
        return choice.coverage[ask.need.rule]  # type: ignore[attr-defined]


class _Relevance(Collector):
    """Value times gradient, and what rules for the input gave it without one."""

    def sources(self, forward: Forward, ask: NeedAtLayer) -> list[Source]:
        return [forward.source(ask.input)]

    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> torch.Tensor:
        if gradients[0] is None:
            raise TargetError(_unused(forward, choice))
        source = forward.source(ask.input)
        found = source.detach() * gradients[0].detach()
        paths = list(forward.inputs.paths)
        place = paths.index(ask.input or forward.inputs.path)
        deposit = choice.propagated[ask.need.backward].flow.deposits.get(place)  # type: ignore[index]
        return at_least_float32(found if deposit is None else found + deposit.detach())


class _LayerRelevance(_LayerGradients):
    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> torch.Tensor:
        gradient = super().answer(forward, choice, ask, gradients)
        return gradient * forward.spatial(forward.record(_layer(ask)).activation, _layer(ask))


class _RelevanceCoverage(Collector):
    def sources(self, forward: Forward, ask: NeedAtLayer) -> list[Source]:
        return [forward.source(None)]  # for the backward pass to go through all of the network

    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> Any:
        return choice.propagated[ask.need.backward].coverage  # type: ignore[index]


class _BiasTerms(Collector):
    """What is added in the network, times the gradient where it is added."""

    def sources(self, forward: Forward, ask: NeedAtLayer) -> list[Source]:
        return [constant.edge for constant in forward.operations.constants]

    def answer(
        self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients
    ) -> tuple[torch.Tensor, ...]:
        elsewhere = independent_calls(forward.model, forward.inputs)
        terms = []
        for constant, gradient in zip(forward.operations.constants, gradients, strict=True):
            if gradient is not None:
                term = _of_images(_term(constant, gradient), constant, forward)
                # What other images than the explained one bring adds to the score too, but lies nowhere on this one.
                nowhere = not constant.lies_on_input or (constant.module, constant.call) in elsewhere
                terms.append(term.flatten(1) if nowhere else term)
        return tuple(terms)


class _Revealed(Collector):
    """Runs the network on three rows for each image; see `revealing`."""

    def answer(self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients) -> torch.Tensor:
        inputs, path = forward.inputs, ask.input or forward.inputs.path
        if len(inputs.paths) > 1:
            raise MethodError(
                "rule of deeplift must be rescale where several inputs are explained; name one of them, or take rescale"
            )
        x = inputs.tensor(path)
        with recording(True):
            base = ask.need.reference.of(x).detach()  # type: ignore[attr-defined]
            parts = [(x - base).clamp(min=0).requires_grad_(), (x - base).clamp(max=0).requires_grad_()]
            images = torch.arange(len(x), device=x.device)
            with RevealCancelTracer(forward.model) as mode:
                output = inputs.rows(images.repeat(3), {path: mode.begin(base, *parts)}).call(forward.model)
            score = choice.of_rows(images).pick(joined(output, 3 * len(x)), len(x))[0]
            found = torch.autograd.grad(score.sum(), parts, allow_unused=True)
        if None in found:
            raise TargetError(_unused(forward, choice))
        if not agree(at_least_float32(score.detach()), choice.score, x, RuntimeSettings(), forward.scale(choice)):
            raise MethodError(
                "rule of deeplift must be rescale for this network: reveal-cancel came to another score "
                "than the photo's; take rescale"
            )
        return at_least_float32(sum(part.detach() * g for part, g in zip(parts, found, strict=True)))


class _Attention(Collector):
    """Keeps the weights of every attention, and the gradients that a backward pass brings them."""

    _records: list[AttentionRecord]

    def sources(self, forward: Forward, ask: NeedAtLayer) -> list[Source]:
        # For the backward pass to go through all of the network.
        return [forward.source(None), *(forward.beside if getattr(ask.need, "beside", False) else ())]

    @contextmanager
    def during(self, forward: Forward, choice: ResolvedTarget) -> Iterator[None]:
        with HookGroup() as group:
            self._records = attention(choice.total, group)
            yield

    def answer(
        self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients
    ) -> tuple[AttentionMap, ...]:
        count = forward.count
        found = [(by_image(r.weights, count), r.gradient) for r in self._of(forward, ask)]
        return tuple(AttentionMap(w, None if g is None else by_image(g, count)) for w, g in found)

    def _of(self, forward: Forward, ask: NeedAtLayer) -> list[AttentionRecord]:
        """The records that are asked for: what the input does not reach may or may not have a graph."""
        if getattr(ask.need, "beside", False):
            return self._records
        sources = list(forward.sources.values())
        return [record for record in self._records if any(True for _ in sources_behind(record.node, sources))]


class _AttentionRelevance(_Attention):
    """The same under a composite; a fused kernel hands half of what arrives to the values, which comes before it."""

    def answer(
        self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients
    ) -> tuple[AttentionMap, ...]:
        found = super().answer(forward, choice, ask, gradients)
        halves = [0.5 if record.fused else 1.0 for record in self._of(forward, ask)]
        return tuple(
            AttentionMap(each.weights, None if each.gradient is None else each.gradient * half)
            for each, half in zip(found, halves, strict=True)
        )


class _BlockAttention(Collector):
    def answer(
        self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients
    ) -> list[torch.Tensor]:
        return attention_gradients(forward.model, forward.inputs, choice.of_rows)


class _BlockTokens(Collector):
    """Keeps what the blocks of a transformer give."""

    def watch(self, group: HookGroup, model: nn.Module, *, cut: bool) -> None:
        self._found: dict[str, torch.Tensor] = {}
        for name in transformer_blocks(model):
            group.forward(name, partial(self._take, name))

    def _take(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            self._found[name] = tensor.detach().clone()

    def answer(
        self, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer, gradients: Gradients
    ) -> tuple[torch.Tensor, ...]:
        explained = explained_blocks(forward.model, forward.inputs)
        return tuple(forward.spatial(tensor, name) for name, tensor in self._found.items() if name in explained)


COLLECTORS: dict[type[Need[Any]], type[Collector]] = {
    Activations: _Activations,
    LayerGradients: _LayerGradients,
    LayerCurvature: _LayerCurvature,
    ClassWeights: _ClassWeights,
    DetectionSimilarity: _Likeness,
    InputGradients: _InputGradients,
    RuleCoverage: _RuleCoverage,
    Relevance: _Relevance,
    LayerRelevance: _LayerRelevance,
    Multipliers: _InputGradients,
    RevealCancel: _Revealed,
    RelevanceCoverage: _RelevanceCoverage,
    BiasTerms: _BiasTerms,
    Attention: _Attention,
    AttentionRelevance: _AttentionRelevance,
    BlockAttention: _BlockAttention,
    BlockTokens: _BlockTokens,
}


def _unused(forward: Forward, choice: ResolvedTarget) -> str:
    return (
        f"target {choice.name} must depend on the input through differentiable operations, but it does not; look for "
        f".detach(), .data, no_grad() or rounding in the model or the target{_without_gradients(forward.model)}"
    )


def _layer(ask: NeedAtLayer) -> str:
    assert ask.layer is not None
    return ask.layer


def _of_layer(
    gradient: torch.Tensor | None, forward: Forward, choice: ResolvedTarget, ask: NeedAtLayer
) -> torch.Tensor:
    if gradient is None:
        hidden = "" if choice.total.requires_grad else ", or not through differentiable operations"
        raise UnusedLayerError(
            f"layer {ask.layer!r} must influence the score of target {choice.name}, but the score does not use "
            f"it{hidden}; choose a layer or target that depend on each other, without no_grad(), detach() or "
            f"checkpoints between{_without_gradients(forward.model)}"
        )
    return forward.spatial(gradient, _layer(ask))


def _term(constant: AddedConstant, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient times what was added; infinity, which masks add to what is not to count, adds nothing there."""
    term: torch.Tensor = gradient.detach() * constant.value
    return torch.where(gradient.detach() == 0, torch.zeros_like(term), term)


def _of_images(term: torch.Tensor, constant: AddedConstant, forward: Forward) -> torch.Tensor:
    """A bias term laid out over the images, or where it is no map (it may be of windows), as rows of numbers."""
    count, shape = forward.count, tuple(term.shape)
    layer = None if constant.module is None else f"{constant.module}@{constant.call}"
    grid = forward.grids.grid(shape, layer) if term.ndim > 2 and constant.lies_on_input else None
    if layer is None and constant.channels_last and len(term) == count and len(forward.grids.size) == term.ndim - 2:
        return term.movedim(-1, 1)
    if grid is not None:
        return grid.spread(term)
    turned = term.ndim == 3 and len(term) != count and term.shape[1] == count
    if not turned and len(term) != count > 1 and (forward.inputs.others or len(term) % count):
        raise MethodError(
            f"fullgrad must see layer {constant.module!r} give a row for each of the {count} images (or several for "
            f"each, in their order), got {len(term)} rows; explain one image at a time"
        )
    return (term.transpose(0, 1) if turned else term).reshape(count, -1)


def _hessian_product(total: torch.Tensor, forward: Forward, layer: str) -> torch.Tensor | None:
    if not total.requires_grad:
        return None
    sources, direction = forward.sources_of(layer), forward.record(layer).activation
    gradient = forward.joined(layer, torch.autograd.grad(total, sources, create_graph=True, allow_unused=True))
    if gradient is None:
        return None
    if not gradient.requires_grad:
        return torch.zeros_like(gradient)  # the score is linear in the layer
    try:
        products = torch.autograd.grad(gradient, sources, direction, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        raise MethodError(
            f"shapleycam must have second derivatives behind the layer, but {str(error).split()[2]} has none; use "
            "gradcam, or put the call under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        ) from None
    product = forward.joined(layer, products)
    return torch.zeros_like(gradient) if product is None else product.detach()


def _without_gradients(model: nn.Module) -> str:
    """What to add where a gradient is missing and the model has layers that never have one."""
    quantised = any("quantized" in type(module).__module__ for module in model.modules())
    remedy = (
        "quantised layers have no gradients: use scorecam, ablationcam or eigencam, or the model before quantisation"
    )
    return f" ({remedy})" if quantised else ""
