"""Which layer to explain by default."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from explain._utils import nested
from explain._utils.errors import LayerError
from explain._utils.rounding import all_cancel
from explain.data.inputs import Inputs, InputsLike, as_inputs
from explain.hooks import HookGroup, capturing, preserve
from explain.hooks.graph import ValueDroppedError, differentiate, graph
from explain.layers.calls import split_call
from explain.layers.frames import with_layout
from explain.layers.grids import grids_of
from explain.layers.layouts import MAPS, Size, has_aspect, to_spatial
from explain.layers.recording import ForwardGraph, ModuleCall, tensors_in
from explain.layers.stitched import Stitched
from explain.layers.summary import GRAPH, ForwardSummary, summary_of

T = TypeVar("T")
Score: TypeAlias = Callable[[Any], Tensor]
"""From a model's output to one score per image."""

CANDIDATES = 24  # whose gradients one pass computes
MOST = 6 * CANDIDATES
FEW = 5  # numbers: existence and class of a box, or its corners
_POOLING = re.compile("Pool(?!Former)|Upsample")
_WEIGHTED = re.compile("(Slow)?Conv|Mkldnn|Cudnn|Linear|((Add|B|Baddb)m|M)m|Mv|Scaled|Generated")
"""Nodes of operations with weights, or that mix channels or places in another way."""
_PRODUCT = re.compile("Mul|Div|Bmm|Mm|GridSampler|Generated")
"""Nodes of products; the registered operations are among them for deformable convolutions, which move a map."""
_ATTENTION = re.compile("(?!.*(?:Block|Layer))(?:.*[Aa]tt(?:ention|n)|[A-Z]*SA$|XCA$)")


def default_layer(
    model: nn.Module, x: InputsLike, score: Score | None = None, *, of_class: bool = False, refresh: bool = False
) -> str:
    """Name the layer to explain: the last feature map before pooling, or the tokens before the last attention.

    It depends on what is explained, lies before the answer, has several channels, which a gate has not, and reaches the
    score with a gradient that does not cancel over its places, as that of an attention's logits does.

    It is found by running the model on one image, and kept as long as the model has the same modules and inputs of the
    same size. A network that gives boxes or maps, or several tensors, instead of a row of scores has heads for many
    answers: there, and elsewhere with ``refresh``, what ``score`` depends on is computed each time, except that all
    classes (``of_class``) of a network that gives their scores share a layer.

    Raises:
        LayerError: no layer gives a spatial map.
    """
    inputs = as_inputs(x)
    if inputs.x.is_meta:
        raise LayerError("x must hold values for a layer to be found, got one on the meta device; load it first")
    inputs = with_layout(model, inputs)
    if isinstance(model, Stitched):
        return f"model.{default_layer(model.model, model.first(inputs), model.energy(inputs), refresh=refresh)}"
    summary = summary_of(model, inputs, with_graph=True)
    recorded = summary.chosen.pop(GRAPH, None)
    of_image = recorded if len(inputs) == 1 else None  # a score is of all images
    if score is not None and not summary.gives_scores:
        return _map_behind_answers(model, inputs, summary, score, of_image)
    if score is not None and (refresh or summary.outputs > 1):
        kept = of_class and not refresh
        return _once(summary, "class" if kept else None, lambda: _choose(model, inputs, summary, score, of_image))
    first = inputs.first() if summary.alone else inputs
    return _once(summary, "default", lambda: _choose(model, first, summary, recorded=recorded))


def stage_layers(
    model: nn.Module,
    x: InputsLike,
    score: Score | None = None,
    *,
    count: int = 4,
    of_class: bool = False,
    refresh: bool = False,
) -> list[str]:
    """Name the last layer that counts at each of the ``count`` coarsest resolutions, the finest first.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1))
    >>> stage_layers(model, torch.zeros(1, 3, 8, 8))
    ['1', '3']
    """
    inputs = with_layout(model, x)
    if isinstance(model, Stitched):
        found = stage_layers(model.model, model.first(inputs), model.energy(inputs), count=count, refresh=refresh)
        return [f"model.{layer}" for layer in found]
    summary = summary_of(model, inputs, with_graph=True)
    recorded = summary.chosen.pop(GRAPH, None)
    if score is not None and (refresh or summary.outputs > 1 or not summary.gives_scores):
        kept = of_class and summary.gives_scores and not refresh
        key = f"class {count}" if kept else None
        of_image = recorded if len(inputs) == 1 else None
        found = _once(summary, key, lambda: _stages(model, inputs, summary, count, score, of_image))
    else:
        first = inputs.first() if summary.alone else inputs
        found = _once(summary, count, lambda: _stages(model, first, summary, count, recorded=recorded))
    return [*found] or [default_layer(model, inputs, score, of_class=of_class, refresh=refresh)]


def _once(summary: ForwardSummary, key: str | int | None, find: Callable[[], tuple[T, bool]]) -> T:
    """Compute something once for a summary, if the result is certain; without a key, each time."""
    found, certain = (summary.chosen[key], False) if key in summary.chosen else find()
    if certain and key is not None:
        summary.chosen[key] = found
    return found


def _stages(
    model: nn.Module,
    inputs: Inputs,
    summary: ForwardSummary,
    count: int,
    score: Score | None = None,
    recorded: ForwardGraph | None = None,
) -> tuple[list[str], bool]:
    """The layers of stages, and whether they would be the same for another image."""
    by_size: dict[Size, list[list[ModuleCall]]] = {}
    for group in reversed(_groups(summary)):
        grid = group[-1].grid
        if grid is not None and not _is_pooling(group):
            by_size.setdefault(grid.size, []).append(group)
    coarsest = sorted(by_size, key=lambda size: size[-2] * size[-1])[:count]
    candidates = []
    for size in coarsest:
        groups = sorted(by_size[size], key=_is_gate)
        candidates.append([_outermost(group) for group in groups[: CANDIDATES // len(coarsest)]])
    influences = _influences(model, inputs, [name for names in candidates for name in names], score, recorded)
    layers = [_first_that_shows(names, influences) for names in reversed(candidates)]
    reached = [layer for layer in layers if layer is not None]
    showing = [layer for layer in reached if influences[layer].shows]
    left_out = [name for names in candidates if not set(names) & set(reached) for name in names]
    return showing or reached, not any(name in influences for name in left_out)


def _groups(summary: ForwardSummary) -> list[list[ModuleCall]]:
    """Calls that returned one and the same tensor, together.

    Left out are those that returned it again later, those inside an attention, where heads and weights resemble maps,
    and those that saw only other images than what is explained.
    """
    calls = [call for call in summary.calls if call.depends] or summary.calls
    groups: list[list[ModuleCall]] = []
    for call in calls:
        if call.passes_on and groups:
            groups[-1].append(call)
        else:
            groups.append([call])
    attentions = tuple(f"{call.name}." for call in calls if _ATTENTION.match(call.kind))
    found = [[call for call in group if not call.name.startswith(attentions)] for group in groups if not group[0].again]
    return [group for group in found if group]


def _is_pooling(group: list[ModuleCall]) -> bool:
    return any(_POOLING.search(call.kind) for call in group)


def _is_gate(group: list[ModuleCall]) -> bool:
    """Whether a map has one channel, which says how much of other maps passes, and not what is there."""
    call = group[-1]
    return call.grid is not None and call.shape[call.grid.of_channels] == 1


def _choose(
    model: nn.Module, inputs: Inputs, summary: ForwardSummary, score: Score | None = None,
    recorded: ForwardGraph | None = None,
) -> tuple[str, bool]:  # fmt: skip
    """The last feature map that the scores depend on; for tokens, the last ones that are followed by an attention.

    Also returns whether it would be the same for another image: a gradient that is zero everywhere says nothing.
    """
    groups, size = _groups(summary), tuple(inputs.x.shape[2:])
    maps, tokens = _indices_of_maps(groups, size), _indices_of_tokens(groups)
    latest = sorted([*maps[-1:], *_before_attention(groups, tokens)[-1:]], reverse=True)
    if not latest:
        raise _no_map(model, len(summary.calls))
    pooled = [i for i, group in enumerate(groups) if _is_map(group) and i not in maps]
    order = [latest[0], *_before_attention(groups, tokens)[-1:], *sorted(maps + tokens, reverse=True), *pooled[::-1]]
    order = sorted(order, key=lambda i: _is_gate(groups[i]))
    names = list(dict.fromkeys(_outermost(groups[i]) for i in order))
    influences: dict[str, _Influence] = {}
    for start in range(0, min(len(names), MOST), CANDIDATES):
        influences |= _influences(model, inputs, names[start:], score, recorded)
        if any(influence.shows for influence in influences.values()):
            break
    layer = _first_that_shows(names, influences)
    return layer or names[0], layer is not None


def _map_behind_answers(
    model: nn.Module, inputs: Inputs, summary: ForwardSummary, score: Score, recorded: ForwardGraph | None
) -> str:
    """The last map, or tokens, that say something about one of many answers. The answers themselves do not count:
    neither the map of classes that the network gives, nor a map of which the score reads one position. Nor does a head
    that slides over the maps of several resolutions, of which each call is about one. They are taken only where the
    score depends on nothing else. A score that reads few numbers, as that of a box does, sees little of a fine map: of
    several resolutions, the coarsest is taken.
    """
    groups, size = _groups(summary), tuple(inputs.x.shape[2:])
    shapes: dict[str, set[Size]] = {}
    for call in summary.calls:
        shapes.setdefault(call.name, set()).add(call.shape)
    tokens = _before_attention(groups, _indices_of_tokens(groups))
    # Tokens made from a map; the queries of a detector may have a number that could be that of a grid.
    of_maps = [i for i in tokens if (grid := groups[i][-1].grid) and grid.size in summary.sizes]
    covering = sorted(_indices_of_maps(groups, size) + of_maps, reverse=True)
    resized = [i for i in reversed(range(len(groups))) if _is_map(groups[i]) and not _is_pooling(groups[i])]
    indices = list(dict.fromkeys(covering + resized))
    slides = {i for i in indices if any(len(shapes[call.name]) > 1 for call in groups[i])}
    answers = {i for i in indices if groups[i][-1].shape[1] in summary.answers}
    ordered = sorted(indices, key=lambda i: i in slides | answers or _is_gate(groups[i]))
    names = {_outermost(groups[i]): math.prod(grid.size) for i in ordered if (grid := groups[i][-1].grid)}
    if not names:
        raise _no_map(model, len(summary.calls))
    of_cell = False

    def noted(output: Any) -> Tensor:
        nonlocal of_cell
        found = score(output)
        of_cell = _numbers_read(found, output) <= FEW * len(inputs)
        return found

    images = dict.fromkeys(names, (0, 0))
    """For how many images each layer shows something; and for how many more than one of its positions counts."""
    for start in range(0, min(len(names), MOST), CANDIDATES):
        for name, influence in _influences(model, inputs, [*names][start:], noted, recorded).items():
            several = sum(count > 1 for count in influence.positions)
            images[name] = several if influence.shows else 0, several
        if any(shown == len(inputs) for shown, _ in images.values()):
            break
    return max(names, key=lambda name: (*images[name], -names[name] if of_cell else 0))  # the first of equals


def _numbers_read(score: Tensor, output: Any) -> int:
    """How many of the numbers in an output a score depends on."""
    tensors = [tensor for _, tensor in nested.paths(output) if tensor.requires_grad]
    gradients = torch.autograd.grad(score.sum(), tensors, retain_graph=True, allow_unused=True) if tensors else ()
    return sum(int((gradient != 0).sum()) for gradient in gradients if gradient is not None)


def _no_map(model: nn.Module, calls: int) -> LayerError:
    if any(isinstance(each, torch.jit.ScriptModule) or hasattr(each, "hidden_layers") for each in model.modules()):
        made = "of a network in Python, but this one is scripted, exported or ONNX, and its layers are hidden"
        return LayerError(f"layer must be {made}; use a method without layers, such as occlusion or rise")
    none = f"none of its layers gives a spatial map ({calls} calls seen)"
    return LayerError(f"layer must be given for this model: {none}; name one, or use saliency or occlusion")


def _indices_of_maps(groups: list[list[ModuleCall]], size: Size) -> list[int]:
    """Where maps are: those that cover the input, not pooled, if there are any."""
    grids = [(i, grid) for i, group in enumerate(groups) if (grid := group[-1].grid) and _is_map(group)]
    maps = [i for i, grid in grids if has_aspect(grid.size, size)] or [i for i, _ in grids]
    return [i for i in maps if not _is_pooling(groups[i])] or maps


def _indices_of_tokens(groups: list[list[ModuleCall]]) -> list[int]:
    # What is pooled from tokens may have as many channels as there might be tokens.
    grids = [(i, group[-1].grid) for i, group in enumerate(groups) if not _is_pooling(group)]
    return [i for i, grid in grids if grid is not None and grid.layout in ("tokens", "tokens first")]


def _is_map(group: list[ModuleCall]) -> bool:
    grid = group[-1].grid
    return grid is not None and grid.layout in MAPS


def _before_attention(groups: list[list[ModuleCall]], tokens: list[int]) -> list[int]:
    """The tokens that are followed by an attention, since after the last attention only the class token may count.

    The output of an attention may be a padded window of a smaller map.
    """
    attention = [i for i, group in enumerate(groups) if any(_ATTENTION.match(call.kind) for call in group)]
    return [i for i in tokens if i < attention[-1] and i not in attention] if attention else tokens


@dataclass(frozen=True)
class _Influence:
    """How a layer reaches the score of each image."""

    positions: list[int]
    """At how many positions of its map the score of each image changes with it."""
    cancels: bool
    """Whether its gradient adds up to nothing over the positions, but for rounding errors."""
    is_answer: bool
    """Whether no operation with weights lies between it and the score."""
    is_factor: bool
    """Whether it only says how another map, from which it is computed, is weighed."""

    @property
    def shows(self) -> bool:
        """Whether it shows what the score comes from."""
        return not (self.cancels or self.is_answer or self.is_factor)


def _first_that_shows(layers: Iterable[str], influences: Mapping[str, _Influence]) -> str | None:
    """The first layer that shows something, or else the first one that reaches the score."""
    reached = [layer for layer in layers if layer in influences and any(influences[layer].positions)]
    return next((layer for layer in reached if influences[layer].shows), next(iter(reached), None))


@dataclass(frozen=True)
class _Backward:
    """A backward pass from a score: what it reached of some layers, by name."""

    score: Tensor | None
    output: Any
    gradients: Mapping[str, Tensor]
    nodes: Mapping[str, set[Node]]


def _influences(
    model: nn.Module, inputs: Inputs, layers: Sequence[str], score: Score | None = None,
    recorded: ForwardGraph | None = None,
) -> dict[str, _Influence]:  # fmt: skip
    """How the first of some layers reach the score; those that no gradient comes back to are left out.

    Without a score, the model's best one is used. Where ``recorded`` is the graph of a pass of these inputs, the model
    does not run again.
    """
    backward = None if recorded is None else _backward_in(recorded, model, layers[:CANDIDATES], score)
    if backward is None:
        backward = _run_backward(model, inputs, layers[:CANDIDATES], score)
    grids = grids_of(model, inputs)
    answers = set() if score is None else _unweighted(backward.score, backward.output)
    factors = _factors(backward.score, set().union(*backward.nodes.values()))
    influences = {}
    for layer, of_layer in backward.gradients.items():
        gradient = to_spatial(of_layer, grids, layer)
        nodes = backward.nodes[layer]
        means = gradient.flatten(2).mean(2)
        positions = (gradient != 0).any(1).flatten(1).sum(1)
        rounding = all_cancel(means, gradient) & (positions > 0)
        influences[layer] = _Influence(
            positions.tolist(),
            cancels=bool(rounding.any() and (rounding | (positions == 0)).all()),
            is_answer=not answers.isdisjoint(nodes),
            is_factor=factors.issuperset(nodes),
        )
    return influences


def _run_backward(model: nn.Module, inputs: Inputs, layers: Sequence[str], score: Score | None) -> _Backward:
    """Run a model, and backward to some layers."""
    names = dict.fromkeys(split_call(layer, model)[0] for layer in layers)

    def run(cut: bool) -> tuple[capturing.Capture, Tensor | None, Any]:
        with preserve.untouched(model, grad=not cut), HookGroup(model) as group:
            capture = capturing.Capture(group, names, gradients=True, cut=cut)
            output = inputs.detached().call(model)
            total = _total(score, output)
            if total is not None:
                capture.backward(total, roughly=True)
        return capture, total, output

    capture, total, output = capturing.cut_where_allowed(run)
    capture, total, output = run(False) if capture.misses else (capture, total, output)
    gradients: dict[str, Tensor] = {}
    nodes: dict[str, set[Node]] = {}
    for layer in layers:
        record = capture.of(layer)
        if record is not None and record.gradient is not None:
            gradients[layer] = record.gradient
            nodes[layer] = set(capture.nodes_of(record))
    return _Backward(total, output, gradients, nodes)


def _backward_in(
    recorded: ForwardGraph, model: nn.Module, layers: Sequence[str], score: Score | None
) -> _Backward | None:
    """Run backward in the graph of a pass to some layers; None where it did not keep the values that this takes."""
    edges = {layer: edge for layer in layers if (edge := recorded.edge_of(*split_call(layer, model))) is not None}
    with preserve.untouched(model, grad=True):
        total = _total(score, recorded.output)
        if total is None or not total.requires_grad or not edges:
            return _Backward(total, recorded.output, {}, {})
        try:
            results = differentiate(total, list(edges.values()), retain_graph=True)
        except ValueDroppedError:
            return None
    gradients = {layer: result for layer, result in zip(edges, results, strict=True) if result is not None}
    nodes = {layer: {edges[layer].node} for layer in gradients}
    return _Backward(total, recorded.output, gradients, nodes)


def _total(score: Score | None, output: Any) -> Tensor | None:
    return _best_score(output) if score is None else score(output).sum()


def _best_score(output: Any) -> Tensor | None:
    """The best score of a row of numbers, if a network gives any, or else the largest number of its first tensor."""
    tensors = sorted(tensors_in(output), key=lambda tensor: tensor.ndim != 2)
    return tensors[0].float().amax() if tensors else None


def _unweighted(score: Tensor | None, output: Any) -> set[Node]:
    """The Nodes from which no way to a score leads through an operation with weights.

    A row of scores is where they end: there is no map that would be the answer.
    """
    rows = {tensor.grad_fn for tensor in tensors_in(output) if tensor.ndim <= 2}

    def ends(node: Node) -> bool:
        return node in rows or _has_weights(node)

    near = {*graph(score, until=ends)}
    sources = {parent for node in near if ends(node) for parent, _ in node.next_functions}
    return near.difference(*(graph(source) for source in sources))


def _has_weights(node: Node) -> bool:
    return _WEIGHTED.match(node.name()) is not None


def _factors(score: Tensor | None, layers: AbstractSet[Node]) -> set[Node]:
    """The layers that reach a score only as a factor of a map from which they are computed.

    These are gates, attention over places, and the offsets of deformable convolutions. Of layers
    that are multiplied side by side, none is such a factor.
    """

    def ends(node: Node) -> bool:
        return node in layers or _has_weights(node)

    factors = set[Node]()
    for product in graph(score):
        parents = {parent for parent, _ in product.next_functions if parent is not None}
        if len(parents) < 2 or not _PRODUCT.match(product.name()):
            continue
        for factor in parents:
            others = parents - {factor}
            weighed = layers & {node for other in others for node in graph(other, until=ends)}
            if weighed and not weighed.isdisjoint(graph(factor)):
                elsewhere = {*graph(score, until=partial(operator.is_, product))}
                factors |= layers - elsewhere.union(*(graph(other) for other in others))
    return factors


def _outermost(group: list[ModuleCall]) -> str:
    """Choose among the names of one tensor: a module's last call rather than another, then the shortest path.

    Among equals, it is the one that returned last.
    """
    return min(reversed(group), key=lambda call: (not call.last, call.name.count("."))).label
