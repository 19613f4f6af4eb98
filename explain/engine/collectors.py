"""Answers each kind of need from what the passes recorded.

`watch` hooks what is read before the forward pass, `sources` says what a backward pass
differentiates with respect to, and `ANSWERS` has the function that answers a need for a target,
with the gradients in its sources.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.errors import (
    LayerError,
    MethodError,
    TargetError,
    UnusedLayerError,
    python_or_command,
)
from explain._utils.modules import modules_of
from explain.engine import needs
from explain.engine.blocks import attention_gradients
from explain.engine.derivative import follows_contrast, is_derivative
from explain.engine.forward import Forward, ResolvedTarget
from explain.engine.hooked_gradients import hooked_input_gradient, hooked_layer_gradient
from explain.engine.needs import NeedAtLayer, at_least_float32
from explain.hooks import HookGroup
from explain.hooks.attention import AttentionRecord, joined_heads
from explain.hooks.capturing import Source, read_outputs
from explain.hooks.graph import Reach, differentiate, graph
from explain.hooks.layer_names import name_of_call
from explain.hooks.preserve import detached
from explain.layers.layouts import Grid
from explain.layers.summary import independent_calls
from explain.recording.attention import heads_together
from explain.recording.gradients import paths_to
from explain.recording.images import summed
from explain.recording.moves import fits
from explain.relevance.constants import AddedConstant, uninspected
from explain.relevance.gradient_rules import Coverage, GradientRule
from explain.relevance.propagation import relevance_of
from explain.targets.detections import Detected

_CONVOLUTIONS = (nn.modules.conv._ConvNd, nn.Linear)
Gradients = Sequence[Tensor | None]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Means:
    """The means of maps over their positions ``(N, C)``, and the standard deviations."""

    values: Tensor
    spread: Tensor

    def agree(self, means: Tensor, rounding: float) -> bool:
        """Whether the means ``(N, C)`` of another tensor are these, up to ``rounding``: the epsilon
        of the coarsest type. A wrong yes would give wrong weights."""
        # a maximum is at least one deviation, divided by the root of the number of positions, from
        # the mean: a value much nearer than that is a mean
        slack = 1e-4 * self.spread + 4 * rounding * (self.values.abs() + self.spread)
        return means.shape == self.values.shape and bool(
            ((means - self.values).abs() <= slack).all()
        )


def _means(maps: Tensor, channels: int = 1) -> _Means:
    """The means and deviations of maps over their positions, in float32 or wider; ``channels`` is
    their dimension of channels."""
    by_channel = at_least_float32(maps.detach()).movedim(channels, 1)
    variances, values = torch.var_mean(by_channel[..., None].flatten(2), 2, correction=0)
    return _Means(values, variances.sqrt())


class HeadCandidates:
    """The layers of a network that may be its head: linear ones and convolutions of one position,
    as they were called."""

    def __init__(self, group: HookGroup, model: nn.Module) -> None:
        """Hook the linear layers and convolutions of a network until the group ends."""
        self.calls: list[tuple[Tensor, nn.Module, _Means]] = []
        """The means of the input ``(N, C)``, the layer, and the means of the output: a head may
        come before the average too, as the mean of its output is its output for the mean."""
        self.rounding = 0.0
        """The epsilon of the coarsest type in the network."""
        for kind in _CONVOLUTIONS:
            if any(isinstance(module, kind) for module in modules_of(model)):
                group.forward(kind, self._note, with_kwargs=True)

    def _note(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        """Keep the means ``(N, C)`` of a layer's input and output, if it mixes channels alone; no
        feature map stays in memory."""
        self.rounding = max(self.rounding, torch.finfo(output.dtype).eps)
        (input_maps,) = (*args, *kwargs.values())  # such layers take one argument
        if input_maps.ndim > 1 and _mixes_channels_alone(module):
            channels = -1 if isinstance(module, nn.Linear) else 1
            input_means = _means(input_maps, channels).values
            self.calls.append((input_means, module, _means(output, channels)))


def _mixes_channels_alone(module: Any) -> bool:
    """Whether a linear layer or convolution mixes channels at each place alone, so that the mean of
    its output is its output for the mean."""
    if isinstance(module, nn.Linear):
        return True
    is_plain = module.groups == 1 and not module.transposed and module.padding != "same"
    # the letters of "valid" are no padding
    is_padded = any(isinstance(side, int) and side != 0 for side in module.padding)
    return is_plain and not is_padded and {*module.kernel_size, *module.stride} == {1}


def watch(
    kinds: Container[type[needs.Need[Any]]],
    group: HookGroup,
    model: nn.Module,
    blocks: Sequence[str],
) -> dict[type[needs.Need[Any]], Any]:
    """Hook what some kinds of needs read of the forward pass; ``blocks`` are the transformer blocks
    that depend on the image. What it gives is `Forward.seen`."""
    seen: dict[type[needs.Need[Any]], Any] = {}
    if needs.ClassWeights in kinds:
        seen[needs.ClassWeights] = HeadCandidates(group, model)
    if needs.BlockTokens in kinds:
        seen[needs.BlockTokens] = read_outputs(group, blocks, lambda t: t.detach().clone())
    return seen


def sources(forward: Forward, need: NeedAtLayer) -> list[Source]:
    """The tensors or graph edges that the backward pass for a need differentiates with respect to;
    empty for needs that take no gradient from this pass."""
    kind = need.kind
    if kind.at_layer:
        # curvature is differentiated where it is answered
        return [] if kind.second else forward.layers.sources_of(forward.records[need.layer])
    # these read what a pass to the input brings on its way
    reads_on_the_way = (needs.RelevanceCoverage, needs.Attention, needs.AttentionRelevance)
    if not (kind.of_input or isinstance(kind, reads_on_the_way)):
        return []
    return [forward.source(need.input)]


def _activations(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensor:
    """The layer's feature maps ``(N, C, h, w)``, which the forward pass recorded. One of `ANSWERS`,
    which all take the same four arguments."""
    return forward.spatial(forward.records[need.layer].activation, need.layer)


def _layer_gradients(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensor:
    """The gradient of the score in the layer's feature maps, ``(N, C, h, w)``, by autograd or by
    hooks. One of `ANSWERS`; Grad-CAM and its relatives read it as ``evidence.gradients``."""
    layer = need.layer or ""
    gradient = forward.layers.joined(forward.records[layer], gradients)
    if gradient is not None and need.kind.hooked:
        gradient = hooked_layer_gradient(forward, resolved, layer, gradient)
    return _of_layer(gradient, forward, resolved, need)


def _layer_relevance(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensor:
    """The relevance of the layer's feature maps, ``(N, C, h, w)``: values times the gradients that
    LRP's rules made."""
    whole = forward.whole
    assert whole is not None
    if whole.of_layer(forward.records[need.layer or ""]) not in whole.signals:
        raise LayerError(
            f"layer {need.layer!r} must depend on the input through differentiable operations for "
            "its relevance, but does not; look for detach() or no_grad() before it, or use gradcam"
        )
    maps = _activations(forward, resolved, need, gradients)
    return _layer_gradients(forward, resolved, need, gradients) * maps


def _layer_curvature(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensor:
    """The Hessian of the score in the layer's feature maps times these maps, ``(N, C, h, w)``; by a
    backward pass through the gradient, so the matrix is never built."""
    total = forward.total(resolved, need.kind.objective)  # type: ignore[attr-defined]
    return _of_layer(_hessian_product(total, forward, need.layer), forward, resolved, need)


def _class_weights(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensor:
    """The weights ``(N, C)`` of the maps' means in the score of the class, for CAM: of the layer
    whose output is the logits, and whose input has these means."""
    maps: Tensor = resolved.answers[need.at_same_place(needs.Activations())]
    heads = forward.seen[needs.ClassWeights]
    logits = forward.logits
    classes = resolved.classes
    if classes is None or logits is None:
        raise TargetError(
            "target must be a class for cam, which reads the class's weights; use gradcam otherwise"
        )
    means = _means(maps)
    if means.agree(logits, heads.rounding):
        # the layer's maps are class maps already: their means are the scores
        return nn.functional.one_hot(classes, logits.shape[1]).to(maps)
    for input_means, module, scores in reversed(heads.calls):  # the head comes last
        if scores.agree(logits, heads.rounding) and means.agree(input_means, heads.rounding):
            return at_least_float32(detached(module.weight[classes])).flatten(1)
    must = "be followed by an average over its maps and one linear layer for cam, but is not"
    raise LayerError(
        f"layer {need.layer!r} must {must}; use gradcam, or name the layer that is pooled"
    )


def _similarity(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensor:
    """How much the best detection in each image is like the explained one, ``(N,)`` from 0 to 1,
    for D-RISE."""
    if not isinstance(resolved.target, Detected):
        kind = python_or_command("a detected box, explain.targets.Detections,", "a detected box")
        got = resolved.name if resolved.classes is None else "a class"
        raise TargetError(
            f"target must be {kind} for a method that compares detections, got {got}; drise is for "
            "detectors, so take rise"
        )
    return at_least_float32(resolved.target.likeness(forward.output, forward.count).detach())


def _input_gradients(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensor:
    """The gradient of the score in an explained input, ``(N, C, H, W)``, as the rules of this
    backward pass made it; also DeepLIFT's multipliers."""
    gradient = _of_input(gradients[0], forward, resolved)
    if need.kind.hooked:
        rule: GradientRule | None = need.kind.rule  # type: ignore[attr-defined]
        gradient = hooked_input_gradient(forward, resolved, need.input, rule, gradient)
    return at_least_float32(gradient)


def _follows_gradient(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> bool:
    """Whether the score changes along its gradient in the input as the gradient says; a few more
    runs of the model."""
    gradient = _of_input(gradients[0], forward, resolved)
    if not is_derivative(forward, resolved, layer=None, gradient=gradient):
        return False
    return follows_contrast(forward, resolved, {need.input or forward.inputs.path: gradient})


def _relevance(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensor:
    """The relevance of an explained input, ``(N, C, H, W)``: value times the gradient that LRP's
    rules made, and what rules at the input deposited."""
    relevance = detached(forward.source(need.input)) * _of_input(gradients[0], forward, resolved)
    assert forward.whole is not None
    source = forward.whole.sources[need.input or forward.inputs.path]
    deposit = resolved.propagated[need.kind.backward].flow.deposits.get(source)  # type: ignore[index]
    return at_least_float32(relevance if deposit is None else relevance + deposit)


def _bias_terms(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensors:
    """The contributions of all biases to the score, for FullGrad: each value times the gradient
    where it is added, as maps ``(N, C, h, w)``, or ``(N, K)`` off the image."""
    calls_elsewhere = independent_calls(forward.model, forward.inputs)
    terms = []
    for constant, gradient in zip(forward.constants, gradients, strict=True):
        if gradient is None:
            continue
        # masks add minus infinity where nothing should count; that adds nothing to the score
        products = torch.where(gradient == 0, 0, relevance_of(gradient, constant.value))
        term, beside = _of_images(products, constant, forward)
        # biases in calls that see other inputs alone add to the score, but have no place on the
        # image
        has_no_place = (
            not constant.lies_on_input or (constant.module, constant.call) in calls_elsewhere
        )
        terms.append(term.flatten(1) if has_no_place else term)
        if beside is not None:
            terms.append(beside)
    return tuple(terms)


def _uninspected(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Coverage:
    """The operations that FullGrad cannot look into."""
    whole = forward.whole
    assert whole is not None
    steps = whole.recording.steps
    return uninspected(steps, paths_to(whole.recording.outputs.values()))


def _attention(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> tuple[needs.AttentionMap, ...]:
    """The attention weights that the explained input reaches, one map for each attention in order,
    with their gradients. Of a language model, those over image and text."""
    records = resolved.attention
    count = forward.count
    joint = forward.grids.joint
    # attention that the input does not reach may or may not have a graph
    if not getattr(need.kind, "unreached", False):
        reach = Reach([forward.source(need.input)])
        records = [record for record in records if reach.of(record.node)]
    # attention of the language model: no query but the last token's sees the last token as a key
    if joint is not None:
        records = [
            record
            for record in records
            if record.weights.shape[-2:] == (joint.length, joint.length)
            and not bool(record.weights[..., :-1, -1].any())
        ]
    if records and joint is None and resolved.total.requires_grad and not need.kind.differentiates:
        length = records[-1].weights.shape[-1]
        grid = forward.grids.grid((count, length, 1))
        # Without a class token in front, methods see by the gradient in the last attention which
        # tokens the score is read from. This pass brings it: hooks put it into the records. So it
        # runs unless all tokens that are no patches come before the first patch.
        if grid is not None and min(grid.tokens) != length - len(grid.tokens):
            differentiate(resolved.total, [forward.source(need.input)], retain_graph=True)
    return tuple(_attention_map(heads, count) for heads in heads_together(records))


def _attention_map(heads: Sequence[AttentionRecord], count: int) -> needs.AttentionMap:
    """Join the records of one attention's heads into one map for ``count`` images: weights,
    gradient, queries and keys."""
    gradient = None
    if any(head.gradient is not None for head in heads):
        gradients = [
            torch.zeros_like(head.weights) if head.gradient is None else head.gradient
            for head in heads
        ]
        gradient = joined_heads(heads, gradients, count)
    is_by_head = all(len(head.query) == len(head.weights) == len(head.key) for head in heads)
    return needs.AttentionMap(
        weights=joined_heads(heads, [head.weights for head in heads], count),
        gradient=gradient,
        query=joined_heads(heads, [head.query for head in heads], count) if is_by_head else None,
        key=joined_heads(heads, [head.key for head in heads], count) if is_by_head else None,
    )


def _block_tokens(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Tensors:
    """The output of each transformer block as maps ``(N, C, h, w)``, without class tokens; blocks
    of text left out. One of `ANSWERS`. The order is that of the blocks."""
    seen = forward.seen[needs.BlockTokens]
    return tuple(forward.spatial(calls[-1], name) for name, calls in seen.items() if calls)


def _relevance_coverage(
    forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer, gradients: Gradients
) -> Any:
    """Which rules took the steps of a walk back, if a gradient leads back at all."""
    result = resolved.propagated.get(need.kind.backward)  # type: ignore[arg-type]
    return _of_input(None, forward, resolved) if result is None else result.coverage


ANSWERS: dict[
    type[needs.Need[Any]], Callable[[Forward, ResolvedTarget, NeedAtLayer, Gradients], Any]
] = {
    needs.Activations: _activations,
    needs.LayerGradients: _layer_gradients,
    needs.LayerCurvature: _layer_curvature,
    needs.ClassWeights: _class_weights,
    needs.DetectionSimilarity: _similarity,
    needs.InputGradients: _input_gradients,
    needs.FollowsGradient: _follows_gradient,
    needs.RuleCoverage: lambda _, resolved, need, __: resolved.coverage[need.kind.rule],  # type: ignore[attr-defined]
    needs.Relevance: _relevance,
    needs.LayerRelevance: _layer_relevance,
    needs.Multipliers: _input_gradients,
    needs.RelevanceCoverage: _relevance_coverage,
    needs.BiasTerms: _bias_terms,
    needs.Uninspected: _uninspected,
    needs.Attention: _attention,
    needs.InputAttention: _attention,
    needs.AttentionRelevance: _attention,
    needs.BlockAttention: lambda f, resolved, *_: attention_gradients(
        f.model, f.inputs, resolved.of_samples
    ),
    needs.BlockTokens: _block_tokens,
}


def _of_input(gradient: Tensor | None, forward: Forward, resolved: ResolvedTarget) -> Tensor:
    """The gradient in an explained input as it is; a `TargetError` if the score does not depend on
    the input."""
    if gradient is None:
        remedy = (
            "look for detach() or no_grad() on the path, or use "
            f"occlusion{_without_gradients(forward.model)}"
        )
        requirement = "depend on the input through differentiable operations"
        raise TargetError(f"target {resolved.name} must {requirement}, but it does not; {remedy}")
    return gradient


def _of_layer(
    gradient: Tensor | None, forward: Forward, resolved: ResolvedTarget, need: NeedAtLayer
) -> Tensor:
    """The gradient in a layer as maps ``(N, C, h, w)``; an error if the score does not depend on
    the layer."""
    if gradient is None:
        requirement = (
            f"influence the score of target {resolved.name}, but the score does not use it, or "
            "without a gradient"
        )
        remedy = (
            "choose another, without no_grad() or detach() "
            f"between{_without_gradients(forward.model)}"
        )
        raise UnusedLayerError(f"layer {need.layer!r} must {requirement}; {remedy}")
    return forward.spatial(gradient, need.layer)


def _of_images(
    term: Tensor, constant: AddedConstant, forward: Forward
) -> tuple[Tensor, Tensor | None]:
    """Lay a bias term, in the shape of the tensor that it was added to, out as maps ``(N, C, h,
    w)`` and what lies beside them ``(N, K)``; without a map, as ``(N, K)``."""
    count = forward.count
    whole = forward.whole
    # which image each element belongs to, where images do not come first
    labels = None if whole is None else whole.image_labels.get(constant.result)
    if labels is not None and not fits(labels, term.shape):
        labels = None
    # all of its numbers lie along the second dimension, if it has one
    has_images_second = labels is not None and labels.numel() == labels.shape[1:2].numel()
    if labels is not None and labels.numel() != len(labels) and not has_images_second:
        # they lie in another dimension than these two, or in several
        return summed(term, labels, count)[:, None], None
    if constant.attention is not None and term.ndim == 3:  # it has the tokens first
        grid = forward.grids.of_layer(constant.attention)
        # a single image has no numbers, but its dimension has size 1
        if has_images_second or (count == 1 and term.shape[1] == 1):
            term = term.transpose(0, 1)
        if grid is None:
            return term.flatten(1), None
        return _on_grid(term, replace(grid, layout="tokens"))
    # as many images as tokens, or several channels of each image, as instance normalisations have
    is_ambiguous = len(term) == 1 or (constant.module is None and len(term) == count)
    if labels is not None and has_images_second and is_ambiguous:
        term, labels = _images_first(term, labels, count)
    shape = tuple(term.shape)
    layer = None
    if constant.module is not None:
        layer = name_of_call(constant.module, constant.call, forward.model)
    # added outside of all modules to a map with its channels last, which no layer's grid tells
    if (
        layer is None
        and constant.channels_last
        and len(term) == count
        and len(forward.grids.size) == term.ndim - 2
    ):
        return term.movedim(-1, 1), None
    # what is added to tokens outside of all modules is known by its memory
    storage = constant.storage if layer is None else None
    has_map = term.ndim > 2 and constant.lies_on_input
    grid = forward.grids.grid(shape, layer, storage) if has_map else None
    if grid is not None:
        return _on_grid(term, grid)
    # no map: the values of an image must follow each other, as many of each image, unless the shape
    # shows images second; beside other inputs, more values than images may be of something else
    looks_second = term.ndim == 3 and len(term) != count and term.shape[1] == count
    if (
        not looks_second
        and len(term) != count > 1
        and (forward.inputs.other_tensors or len(term) % count)
    ):
        values_for = f"values for each of {count} images, got {len(term)}"
        raise MethodError(
            f"fullgrad must see layer {constant.module!r} give {values_for}; "
            "explain one image at a time"
        )
    if labels is not None:
        return summed(term, labels, count)[:, None], None
    return (term.transpose(0, 1) if looks_second else term).reshape(count, -1), None


def _images_first(term: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """A term with its images in the first dimension, if they lie along the second: one after the
    other, or several channels of each, as instance normalisations have them."""
    if labels.numel() == count:
        return term.transpose(0, 1), None
    one_after_other = torch.arange(count).repeat_interleave(labels.numel() // count)
    if len(term) == 1 and torch.equal(labels.flatten().cpu(), one_after_other.to(labels)):
        return torch.unflatten(term[0], 0, (count, -1)), None
    return term, labels


def _on_grid(term: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """Split a bias term by a grid: its maps ``(N, C, h, w)``, and what lies beside them ``(N, K)``,
    as of class tokens, or None."""
    beside = grid.beside(term)
    return grid.spread(term), beside if beside.numel() else None


def _hessian_product(total: Tensor, forward: Forward, layer: str | None) -> Tensor | None:
    """The Hessian of ``total`` in a layer's output, times this output; zeros if the score is linear
    in it, None if it does not depend on it."""
    if not total.requires_grad:
        return None
    layers = forward.layers
    record = forward.records[layer]
    layer_sources = layers.sources_of(record)
    gradient = layers.joined(record, differentiate(total, layer_sources, create_graph=True))
    if gradient is None:
        return None
    if not gradient.requires_grad:
        return torch.zeros_like(gradient)  # the score is linear in the layer
    create_graph = torch.is_grad_enabled()  # on where evidence keeps its graph
    if create_graph:
        _check_third_derivatives(total, layer_sources)
    try:
        products = differentiate(
            gradient, layer_sources, record.activation, retain_graph=True, create_graph=create_graph
        )
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        # "derivative for aten::name is not implemented"
        got = f"but {str(error).split()[2]} has none; use gradcam"
        raise MethodError(
            f"shapleycam must have second derivatives behind the layer, {got}"
        ) from None
    product = layers.joined(record, products)
    return torch.zeros_like(gradient) if product is None else product


def _check_third_derivatives(total: Tensor, layer_sources: Sequence[Source]) -> None:
    """Refuse a layer normalisation behind the layer, since PyTorch's third derivative of it is
    wrong (2.14). Only with ``create_graph``, which differentiates the curvature once more."""
    nodes = [
        source.grad_fn if isinstance(source, Tensor) else source.node for source in layer_sources
    ]
    reach = Reach((), [node for node in nodes if node is not None])
    if any(node.name().startswith("NativeLayerNorm") and reach.of(node) for node in graph(total)):
        must = (
            "have no layer_norm behind the layer with create_graph: PyTorch's third derivative "
            "of it is wrong"
        )
        raise MethodError(f"shapleycam must {must}; use gradcam")


def _without_gradients(model: nn.Module) -> str:
    """The end of an error message for a missing gradient: that quantised layers never have one, if
    there are any."""
    if not any("quantized" in type(module).__module__ for module in model.modules()):
        return ""
    return (
        " (quantised layers have no gradients: use scorecam or eigencam, or the model before "
        "quantisation)"
    )
