"""Which layer to explain by default."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from explain._utils import nested
from explain._utils.errors import LayerError
from explain._utils.rounding import all_cancel
from explain.data.inputs import Inputs, InputsLike, as_inputs
from explain.hooks import HookGroup, capturing, preserve
from explain.hooks.graph import ValueDroppedError, differentiate, graph
from explain.hooks.layer_names import place_of
from explain.layers.frames import with_layout
from explain.layers.grids import NetworkGrids
from explain.layers.layouts import MAPS, Grid, Size, has_aspect, to_spatial
from explain.layers.recording import ForwardGraph, ModuleCall, tensors_in
from explain.layers.stitched import Stitched
from explain.layers.summary import GRAPH, ForwardSummary, summary_of

Score: TypeAlias = Callable[[Any], Tensor]
"""From a model's output to one score per image."""

ALL_SCORES = "all scores"
CANDIDATES = 24  # whose gradients one pass computes
MOST = 6 * CANDIDATES
FEW = 5  # numbers: existence and class of a box, or its corners
_POOLING = re.compile("Pool(?!Former)|Upsample")
_WEIGHTED = re.compile("(Slow)?Conv|Mkldnn|Cudnn|Linear|((Add|B|Baddb)m|M)m|Mv|Scaled|Generated")
"""Nodes of operations with weights, or that mix channels or places in another way."""
_PRODUCT = re.compile("Mul|Div|Bmm|Mm|GridSampler|Generated")
"""Nodes of products; the registered operations are among them for deformable convolutions, which
move a map."""
_ATTENTION = re.compile("(?!.*(?:Block|Layer))(?:.*[Aa]tt(?:ention|n)|[A-Z]*SA$|XCA$)")


def default_layer(
    model: nn.Module,
    x: InputsLike,
    score: Score | None = None,
    *,
    of_class: bool = False,
    refresh: bool = False,
) -> str:
    """Name the layer to explain: the last feature map before pooling, or the tokens before the last
    attention.

    It depends on what is explained, lies before the answer, has several channels, which a gate has
    not, and reaches the score with a gradient that does not cancel over its places, as that of an
    attention's logits does.

    It is found by running the model on one image, and kept as long as the model has the same
    modules and inputs of the same size. A network that gives boxes or maps, or several tensors,
    instead of a row of scores has heads for many
    answers: there, and elsewhere with ``refresh``, what ``score`` depends on is computed each time,
    except that all classes (``of_class``) of a network that gives their scores share a layer.

    Raises:
        LayerError: no layer gives a spatial map.
    """
    inputs = as_inputs(x)
    if inputs.x.is_meta:
        raise LayerError(
            "x must hold values for a layer to be found, got one on the meta device; load it first"
        )
    if inputs.x.ndim == 5:
        inputs = with_layout(model, inputs)
    if isinstance(model, Stitched):
        of_window = default_layer(
            model.model, model.first(inputs), model.energy(inputs), refresh=refresh
        )
        return f"model.{of_window}"
    summary = summary_of(model, inputs, with_graph=True)
    shared_by = _shared_by(summary, score, of_class, refresh)
    if shared_by in summary.chosen:
        return summary.chosen[shared_by]  # type: ignore[no-any-return]
    search = _begin(model, inputs, summary, score, shared_by)
    if score is not None and not summary.gives_scores:
        return _map_behind_answers(search, score)
    layer, is_certain = _choose(search)
    if is_certain and shared_by is not None:
        summary.chosen[shared_by] = layer
    return layer


def stage_layers(
    model: nn.Module,
    x: InputsLike,
    score: Score | None = None,
    *,
    count: int = 4,
    of_class: bool = False,
    refresh: bool = False,
) -> list[str]:
    """Name the last layer that counts at each of the ``count`` coarsest resolutions, the finest
    first.

    >>> import torch
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1)
    ... )
    >>> stage_layers(model, torch.zeros(1, 3, 8, 8))
    ['1', '3']
    """
    inputs = with_layout(model, x)
    if isinstance(model, Stitched):
        energy = model.energy(inputs)
        inner = stage_layers(model.model, model.first(inputs), energy, count=count, refresh=refresh)
        return [f"model.{layer}" for layer in inner]
    summary = summary_of(model, inputs, with_graph=True)
    shared_by = _shared_by(summary, score, of_class, refresh)
    layers: list[str] | None = summary.chosen.get((shared_by, count))
    if layers is None:
        layers, is_certain = _stages(_begin(model, inputs, summary, score, shared_by), count)
        if is_certain and shared_by is not None:
            summary.chosen[shared_by, count] = layers
    return [*layers] or [default_layer(model, inputs, score, of_class=of_class, refresh=refresh)]


def _shared_by(
    summary: ForwardSummary, score: Score | None, of_class: bool, refresh: bool
) -> str | None:
    """Which scores a choice is made for, and kept with the summary; None where it is for this one
    alone."""
    if score is None or (summary.gives_scores and summary.outputs == 1 and not refresh):
        return ALL_SCORES
    return "all classes" if of_class and summary.gives_scores and not refresh else None


@dataclass(frozen=True, eq=False)
class _Search:
    """What a layer is looked for with; without a score, the model's best one counts."""

    model: nn.Module
    inputs: Inputs
    summary: ForwardSummary
    score: Score | None
    recorded: ForwardGraph | None
    """The graph of a pass of these inputs, if there is one: the model then does not run again."""

    def influences_in_turn(self, layers: Sequence[str]) -> Iterator[dict[str, "_Influence"]]:
        """How layers reach the score, some at a time."""
        for start in range(0, min(len(layers), MOST), CANDIDATES):
            yield _influences(self, layers[start : start + CANDIDATES])


def _begin(
    model: nn.Module,
    inputs: Inputs,
    summary: ForwardSummary,
    score: Score | None,
    shared_by: str | None,
) -> _Search:
    """A search on the first image, or where it depends on the score, on all images."""
    recorded = summary.chosen.pop(GRAPH, None)
    if shared_by == ALL_SCORES:
        return _Search(model, inputs.first() if summary.alone else inputs, summary, None, recorded)
    return _Search(model, inputs, summary, score, recorded if len(inputs) == 1 else None)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A tensor that may be the layer: the calls that returned it, one after the other."""

    number: int
    calls: list[ModuleCall]

    @property
    def name(self) -> str:
        """A module's last call rather than another, then the shortest path, then what returned
        last."""
        return min(
            reversed(self.calls), key=lambda call: (not call.last, call.name.count("."))
        ).label

    @property
    def grid(self) -> Grid | None:
        return self.calls[-1].grid

    @property
    def is_map(self) -> bool:
        return self.grid is not None and self.grid.layout in MAPS

    @property
    def is_pooling(self) -> bool:
        return any(_POOLING.search(call.kind) for call in self.calls)

    @property
    def is_tokens(self) -> bool:
        # What is pooled from tokens may have as many channels as there might be tokens.
        return (
            self.grid is not None
            and self.grid.layout in ("tokens", "tokens first")
            and not self.is_pooling
        )

    @property
    def is_gate(self) -> bool:
        """Whether a map has one channel, which says how much of other maps passes, and not what is
        there."""
        return self.grid is not None and self.calls[-1].shape[self.grid.of_channels] == 1


def _candidates(summary: ForwardSummary) -> list[_Candidate]:
    """The tensors that calls returned.

    Left out are those that returned it again later, those inside an attention, where heads and
    weights resemble maps, and those that saw only other images than what is explained.
    """
    calls = [call for call in summary.calls if call.depends] or summary.calls
    groups: list[list[ModuleCall]] = []
    for call in calls:
        if call.passes_on and groups:
            groups[-1].append(call)
        else:
            groups.append([call])
    attentions = tuple(f"{call.name}." for call in calls if _ATTENTION.match(call.kind))
    candidates: list[_Candidate] = []
    for group in groups:
        outside = [call for call in group if not call.name.startswith(attentions)]
        if outside and not group[0].again:
            candidates.append(_Candidate(len(candidates), outside))
    return candidates


def _covering(candidates: list[_Candidate], size: Size) -> list[_Candidate]:
    """The maps that cover the input, not pooled, if there are any."""
    maps = [candidate for candidate in candidates if candidate.is_map]
    covering = [
        candidate for candidate in maps if candidate.grid and has_aspect(candidate.grid.size, size)
    ] or maps
    return [candidate for candidate in covering if not candidate.is_pooling] or covering


def _before_attention(candidates: list[_Candidate]) -> list[_Candidate]:
    """The tokens that are followed by an attention, since after the last attention only the class
    token may count.

    The output of an attention may be a padded window of a smaller map.
    """
    tokens = [candidate for candidate in candidates if candidate.is_tokens]
    attentions = [
        each for each in candidates if any(_ATTENTION.match(call.kind) for call in each.calls)
    ]
    if not attentions:
        return tokens
    return [
        each for each in tokens if each.number < attentions[-1].number and each not in attentions
    ]


def _latest_first(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    return sorted(candidates, key=lambda candidate: -candidate.number)


def _stages(search: _Search, count: int) -> tuple[list[str], bool]:
    """The layers of stages, and whether they would be the same for another image."""
    by_size: dict[Size, list[_Candidate]] = {}
    for candidate in _latest_first(_candidates(search.summary)):
        if candidate.grid is not None and not candidate.is_pooling:
            by_size.setdefault(candidate.grid.size, []).append(candidate)
    coarsest = sorted(by_size, key=lambda size: size[-2] * size[-1])[:count]
    names_of_stages = []
    for size in coarsest:
        candidates = sorted(by_size[size], key=lambda candidate: candidate.is_gate)
        names_of_stages.append(
            [candidate.name for candidate in candidates[: CANDIDATES // len(coarsest)]]
        )
    influences = _influences(search, [name for names in names_of_stages for name in names])
    reached = []
    is_certain = True
    for names in reversed(names_of_stages):
        layer = _first_that_shows(names, influences)
        if layer is not None:
            reached.append(layer)
        elif any(name in influences for name in names):
            is_certain = False
    return [layer for layer in reached if influences[layer].shows] or reached, is_certain


def _choose(search: _Search) -> tuple[str, bool]:
    """The last feature map that the scores depend on; for tokens, the last ones that are followed
    by an attention.

    Also returns whether it would be the same for another image: a gradient that is zero everywhere
    says nothing.
    """
    candidates = _candidates(search.summary)
    maps = _covering(candidates, tuple(search.inputs.x.shape[2:]))
    tokens = [candidate for candidate in candidates if candidate.is_tokens]
    last_tokens = _before_attention(candidates)[-1:]
    latest = _latest_first([*maps[-1:], *last_tokens])[:1]
    if not latest:
        raise _no_map(search.model, len(search.summary.calls))
    other_maps = [
        candidate for candidate in candidates if candidate.is_map and candidate not in maps
    ]
    order = [*latest, *last_tokens, *_latest_first(maps + tokens), *_latest_first(other_maps)]
    names = list(
        dict.fromkeys(each.name for each in sorted(order, key=lambda candidate: candidate.is_gate))
    )
    influences: dict[str, _Influence] = {}
    for some in search.influences_in_turn(names):
        influences |= some
        if any(influence.shows for influence in influences.values()):
            break
    layer = _first_that_shows(names, influences)
    return layer or names[0], layer is not None


def _map_behind_answers(search: _Search, score: Score) -> str:
    """The last map, or tokens, that say something about one of many answers. The answers themselves
    do not count: neither the map of classes that the network gives, nor a map of which the score
    reads one position. Nor does a head that slides over the maps of several resolutions, of which
    each call is about one. They are taken only where the score depends on nothing else. A score
    that reads few numbers, as that of a box does, sees little of a fine map: of several
    resolutions, the coarsest is taken.
    """
    summary = search.summary
    candidates = _candidates(summary)
    shapes: dict[str, set[Size]] = {}
    for call in summary.calls:
        shapes.setdefault(call.name, set()).add(call.shape)

    def is_last_choice(candidate: _Candidate) -> bool:
        slides = any(len(shapes[call.name]) > 1 for call in candidate.calls)
        return slides or candidate.calls[-1].shape[1] in summary.answers or candidate.is_gate

    # Tokens made from a map; the queries of a detector may have a number that could be that of a
    # grid.
    tokens = [
        each
        for each in _before_attention(candidates)
        if each.grid and each.grid.size in summary.sizes
    ]
    covering = _latest_first(_covering(candidates, tuple(search.inputs.x.shape[2:])) + tokens)
    resized = _latest_first(
        candidate for candidate in candidates if candidate.is_map and not candidate.is_pooling
    )
    ordered = sorted(dict.fromkeys(covering + resized), key=is_last_choice)
    positions = {
        candidate.name: math.prod(candidate.grid.size) for candidate in ordered if candidate.grid
    }
    if not positions:
        raise _no_map(search.model, len(summary.calls))
    of_cell = False

    def noting_score(output: Any) -> Tensor:
        nonlocal of_cell
        scores = score(output)
        of_cell = _numbers_read(scores, output) <= FEW * len(search.inputs)
        return scores

    images = dict.fromkeys(positions, (0, 0))
    """For how many images each layer shows something; and for how many more than one of its
    positions counts."""
    for influences in replace(search, score=noting_score).influences_in_turn([*positions]):
        for name, influence in influences.items():
            several = sum(count > 1 for count in influence.positions)
            images[name] = (several if influence.shows else 0, several)
        if any(shown == len(search.inputs) for shown, _ in images.values()):
            break
    # the first of equals
    return max(positions, key=lambda name: (*images[name], -positions[name] if of_cell else 0))


def _numbers_read(score: Tensor, output: Any) -> int:
    """How many of the numbers in an output a score depends on."""
    tensors = [tensor for _, tensor in nested.paths(output) if tensor.requires_grad]
    gradients = (
        torch.autograd.grad(score.sum(), tensors, retain_graph=True, allow_unused=True)
        if tensors
        else ()
    )
    return sum(int((gradient != 0).sum()) for gradient in gradients if gradient is not None)


def _no_map(model: nn.Module, calls: int) -> LayerError:
    if any(
        isinstance(each, torch.jit.ScriptModule) or hasattr(each, "hidden_layers")
        for each in model.modules()
    ):
        made = (
            "of a network in Python, but this one is scripted, exported or ONNX, and its layers "
            "are hidden"
        )
        return LayerError(
            f"layer must be {made}; use a method without layers, such as occlusion or rise"
        )
    none = f"none of its layers gives a spatial map ({calls} calls seen)"
    return LayerError(
        f"layer must be given for this model: {none}; name one, or use saliency or occlusion"
    )


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
    reached = [
        layer for layer in layers if layer in influences and any(influences[layer].positions)
    ]
    return next((layer for layer in reached if influences[layer].shows), next(iter(reached), None))


@dataclass(frozen=True)
class _Backward:
    """A backward pass from a score: what it reached of some layers, by name."""

    score: Tensor | None
    output: Any
    gradients: Mapping[str, Tensor]
    nodes: Mapping[str, set[Node]]


def _influences(search: _Search, layers: Sequence[str]) -> dict[str, _Influence]:
    """How some layers reach the score; those that no gradient comes back to are left out."""
    score = search.score
    backward = (
        None
        if search.recorded is None
        else _backward_in(search.recorded, search.model, layers, score)
    )
    if backward is None:
        backward = _run_backward(search.model, search.inputs, layers, score)
    grids = NetworkGrids(search.model, search.inputs)
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


def _run_backward(
    model: nn.Module, inputs: Inputs, layers: Sequence[str], score: Score | None
) -> _Backward:
    """Run a model, and backward to some layers."""
    names = dict.fromkeys(place_of(layer, model).layer for layer in layers)

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
    """Run backward in the graph of a pass to some layers; None where it did not keep the values
    that this takes."""
    edges = {
        layer: edge
        for layer in layers
        if (edge := recorded.edge_of(place_of(layer, model))) is not None
    }
    with preserve.untouched(model, grad=True):
        total = _total(score, recorded.output)
        if total is None or not total.requires_grad or not edges:
            return _Backward(total, recorded.output, {}, {})
        try:
            results = differentiate(total, list(edges.values()), retain_graph=True)
        except ValueDroppedError:
            return None
    gradients = {
        layer: result for layer, result in zip(edges, results, strict=True) if result is not None
    }
    nodes = {layer: {edges[layer].node} for layer in gradients}
    return _Backward(total, recorded.output, gradients, nodes)


def _total(score: Score | None, output: Any) -> Tensor | None:
    return _best_score(output) if score is None else score(output).sum()


def _best_score(output: Any) -> Tensor | None:
    """The best score of a row of numbers, if a network gives any, or else the largest number of its
    first tensor."""
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
