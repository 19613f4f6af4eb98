"""How layers reach a score: whether what a layer gives shows what the score comes from.

A layer that the score does not depend on shows nothing; nor does one whose gradient cancels out
over its places (the logits of an attention), the answer itself, and what only weighs another map
(gates, attention over places).
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from explain._utils import nested
from explain._utils.rounding import all_cancel
from explain.data.inputs import Inputs
from explain.hooks import HookGroup, capturing, preserve
from explain.hooks.graph import ValueDroppedError, differentiate, graph
from explain.hooks.layer_names import place_of
from explain.layers.grids import NetworkGrids
from explain.layers.layouts import to_spatial
from explain.layers.recording import ForwardGraph, last_of_place, record, tensors_in
from explain.layers.summary import KEPT, ForwardSummary

Score: TypeAlias = Callable[[Any], Tensor]
"""From a model's output to one score per image."""

CANDIDATES = 24  # whose gradients one pass computes
MAX_CANDIDATES = 6 * CANDIDATES
_WEIGHTED = re.compile("(Slow)?Conv|Mkldnn|Cudnn|Linear|((Add|B|Baddb)m|M)m|Mv|Scaled|Generated")
"""Nodes of operations with weights, or that mix channels or places in another way."""
_PRODUCT = re.compile("Mul|Div|Bmm|Mm|GridSampler|Generated")
"""Nodes of products; the registered operations are among them for deformable convolutions, which
move a map."""


@dataclass(frozen=True, eq=False)
class LayerSearch:
    """What a layer is looked for with; without a score, the model's best one counts."""

    model: nn.Module
    inputs: Inputs
    summary: ForwardSummary
    score: Score | None
    recorded: ForwardGraph | None
    """The graph of a pass of these inputs, if there is one: the model then does not run again."""

    @cached_property
    def graph(self) -> ForwardGraph:
        """The graph of a pass of these inputs, which is run if there is none."""
        if self.recorded is not None:
            return self.recorded
        recorder = record(self.model, self.inputs.detached(), KEPT)
        return ForwardGraph(recorder.output, recorder.edges)

    def influences_in_turn(self, layers: Sequence[str]) -> Iterator[dict[str, "ScoreInfluence"]]:
        """How layers reach the score, by layer, for a few dozen of them at a time; callers stop
        when one is right."""
        for start in range(0, min(len(layers), MAX_CANDIDATES), CANDIDATES):
            yield influences_of(self, layers[start : start + CANDIDATES])


@dataclass(frozen=True)
class ScoreInfluence:
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
        """Whether the layer shows where the score comes from, so that it can be explained by
        default."""
        return not (self.cancels or self.is_answer or self.is_factor)


def first_that_shows(layers: Iterable[str], influences: Mapping[str, ScoreInfluence]) -> str | None:
    """The first layer that shows where a score comes from, or else the first that reaches the
    score; None if none does.

    Layers are in the order of preference; `influences_of` gave the influences.
    """
    reaching = [
        layer for layer in layers if layer in influences and any(influences[layer].positions)
    ]
    return min(reaching, key=lambda layer: not influences[layer].shows, default=None)


@dataclass(frozen=True)
class _Backward:
    """A backward pass from a score: what it reached of some layers, by name."""

    score: Tensor | None
    output: Any
    gradients: Mapping[str, Tensor]
    nodes: Mapping[str, set[Node]]


def influences_of(search: LayerSearch, layers: Sequence[str]) -> dict[str, ScoreInfluence]:
    """How some layers reach the score, by layer; those that no gradient comes back to are left out.

    Takes one backward pass, in the recorded graph if there is one. The default layer is chosen by
    it, in the order of the candidates.
    """
    backward = _backward_in_graph(search, layers) or _run_backward(search, layers)
    grids = NetworkGrids(search.model, search.inputs)
    answers = set[Node]()
    if search.score is not None:
        answers = _nodes_of_answer(backward.score, backward.output)
    reached = {node for nodes in backward.nodes.values() for node in nodes}
    factors = _layers_that_weigh(backward.score, reached)
    influences = {}
    for layer, raw_gradient in backward.gradients.items():
        gradient = to_spatial(raw_gradient, grids, layer)
        nodes = backward.nodes[layer]
        means = gradient.flatten(2).mean(2)
        positions = (gradient != 0).any(1).flatten(1).sum(1)
        cancels_in_image = all_cancel(means, gradient) & (positions > 0)
        influences[layer] = ScoreInfluence(
            positions.tolist(),
            cancels=bool(cancels_in_image.any() and (cancels_in_image | (positions == 0)).all()),
            is_answer=not answers.isdisjoint(nodes),
            is_factor=factors.issuperset(nodes),
        )
    return influences


def _run_backward(search: LayerSearch, layers: Sequence[str]) -> _Backward:
    """Run a model on the search's inputs, and backward from the score to some layers.

    For searches without a graph that was kept; the model is left as it was. For the choice of the
    default layer.
    """
    model = search.model
    names = dict.fromkeys(place_of(layer, model).layer for layer in layers)

    def run(cut: bool) -> tuple[capturing.Capture, Tensor | None, Any]:
        with preserve.untouched(model, grad=not cut), HookGroup(model) as group:
            capture = capturing.Capture(group, names, gradients=True, cut=cut)
            output = search.inputs.detached().call(model)
            total = total_score(search.score, output)
            if total is not None:
                capture.backward(total, roughly=True)
        return capture, total, output

    capture, total, output = capturing.cut_where_allowed(run)
    capture, total, output = run(False) if capture.missing else (capture, total, output)
    gradients: dict[str, Tensor] = {}
    nodes: dict[str, set[Node]] = {}
    for layer in layers:
        record = capture.of(layer)
        if record is not None and record.gradient is not None:
            gradients[layer] = record.gradient
            nodes[layer] = set(capture.nodes_of(record))
    return _Backward(total, output, gradients, nodes)


def _backward_in_graph(search: LayerSearch, layers: Sequence[str]) -> _Backward | None:
    """Run backward in the recorded graph to some layers; None without a graph, or if it dropped
    values that this takes.

    The graph is retained, so further layers can be asked for. For the choice of the default layer.
    """
    recorded = search.recorded
    if recorded is None:
        return None
    edges = {
        layer: edge
        for layer in layers
        if (edge := last_of_place(recorded.edges, place_of(layer, search.model))) is not None
    }
    with preserve.untouched(search.model, grad=True):
        total = total_score(search.score, recorded.output)
        if total is None:
            return _Backward(total, recorded.output, {}, {})
        if not total.requires_grad:  # behind a `detach()`: the graph must begin at a layer
            return None
        if not edges:
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


def total_score(score: Score | None, output: Any) -> Tensor | None:
    """The number that is differentiated: the sum of a search's scores, or, without a score, the
    best one."""
    return _best_score(output) if score is None else score(output).sum()


def _best_score(output: Any) -> Tensor | None:
    """The best score in a model's output: the largest number of its first row of scores, or else of
    its first tensor.

    Only for searches without a target's score: any answer that depends on the whole network would
    do.
    """
    tensors = sorted(tensors_in(output), key=lambda tensor: tensor.ndim != 2)
    return tensors[0].float().amax() if tensors else None


def _nodes_of_answer(score: Tensor | None, output: Any) -> set[Node]:
    """The autograd Nodes between a score and the last operations with weights: tensors there are
    the answer itself.

    Such layers are not explained by default, since no map there shows where the answer comes from.
    A row of scores is where they end: there is no map that would be the answer.
    """
    rows = {tensor.grad_fn for tensor in tensors_in(output) if tensor.ndim <= 2}

    def ends(node: Node) -> bool:
        """Whether a walk back from the score ends at this Node."""
        return node in rows or mixes(node)

    near = {*graph(score, until=ends)}
    sources = {parent for node in near if ends(node) for parent, _ in node.next_functions}
    return near - {node for source in sources for node in graph(source)}


def mixes(node: Node) -> bool:
    """Whether a Node is of an operation with weights, or that mixes channels or places in another
    way.

    Behind the last such operation, tensors are the answer itself and no default layer.
    """
    return _WEIGHTED.match(node.name()) is not None


def is_product(node: Node) -> bool:
    """Whether a Node is of an operation that may multiply two computed tensors."""
    return _PRODUCT.match(node.name()) is not None


def _layers_that_weigh(score: Tensor | None, layers: AbstractSet[Node]) -> set[Node]:
    """The layers that reach a score only as a factor of a map from which they are computed
    themselves.

    Layers are given and returned as their Nodes. These are gates, attention over places, and the
    offsets of deformable convolutions. Of layers that are multiplied side by side, none is such a
    factor. The default layer is none of them, since they say how much passes, and not what is
    there.
    """

    def ends(node: Node) -> bool:
        """Whether a walk back from a factor ends at this Node: at a layer, or an operation with
        weights."""
        return node in layers or mixes(node)

    factors = set[Node]()
    for product in graph(score):
        parents = {parent for parent, _ in product.next_functions if parent is not None}
        if len(parents) < 2 or not is_product(product):
            continue
        for factor in parents:
            cofactors = parents - {factor}
            weighed_layers = layers & {
                node for cofactor in cofactors for node in graph(cofactor, until=ends)
            }
            if weighed_layers and not weighed_layers.isdisjoint(graph(factor)):
                elsewhere = graph(score, until=partial(operator.is_, product))
                nodes_of_cofactors = {node for cofactor in cofactors for node in graph(cofactor)}
                factors |= layers - nodes_of_cofactors.union(elsewhere)
    return factors


def numbers_read(score: Tensor, output: Any) -> int:
    """How many numbers of a model's output a score depends on, by its gradient.

    Tells boxes, which read few numbers, from masks and maps.
    """
    tensors = [tensor for _, tensor in nested.paths(output) if tensor.requires_grad]
    gradients = (
        torch.autograd.grad(score.sum(), tensors, retain_graph=True, allow_unused=True)
        if tensors and score.requires_grad
        else ()
    )
    return sum(int((gradient != 0).sum()) for gradient in gradients if gradient is not None)
