"""Branches that reach a score side by side, such as the members of an ensemble."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from explain.hooks.graph import consumers, graph
from explain.hooks.layer_names import place_of
from explain.layers.grids import NetworkGrids
from explain.layers.influence import (
    CANDIDATES,
    LayerSearch,
    influences_of,
    is_product,
    total_score,
)
from explain.layers.recording import ForwardGraph, last_of_place, record
from explain.layers.summary import KEPT

_APART = 0.75  # of a cell: how far apart the cells of maps may lie that are added up


@dataclass(frozen=True)
class Branches:
    """The layers that are explained together, and those of branches that see the photo elsewhere,
    whose maps can't be added to theirs."""

    layers: Sequence[str]
    left_out: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class _Branch:
    """A layer in the graph of a score: its Node, and the Nodes that read each Node."""

    node: Node | None
    readers: dict[Node, list[Node]]

    @cached_property
    def upstream(self) -> frozenset[Node]:
        """What the layer is computed from, and its own Node."""
        return frozenset(graph(self.node))

    @cached_property
    def downstream(self) -> frozenset[Node]:
        """What is computed from the layer, on the way to the score."""
        nodes = set[Node]()
        waiting = [self.node]
        while waiting:
            node = waiting.pop()
            further = [] if node is None else self.readers.get(node, [])
            waiting += [reader for reader in further if reader not in nodes]
            nodes.update(further)
        return frozenset(nodes)

    def is_beside(self, other: "_Branch") -> bool:
        """Whether both reach the score, neither from the other, and meet in a sum, a mean or a
        concatenation.

        Where they meet in a product, either one accounts for all of the score.
        """
        if other.node in self.upstream or other.node in self.downstream:
            return False
        alone = self.downstream - other.downstream | {self.node}
        other_alone = other.downstream - self.downstream | {other.node}
        for join in self.downstream & other.downstream:
            parents = {parent for parent, _ in join.next_functions}
            is_join = not alone.isdisjoint(parents) and not other_alone.isdisjoint(parents)
            if is_join and not is_product(join):
                return True
        return False


def branches_beside(
    search: LayerSearch, layer: str, candidates: Sequence[str], attentions: Sequence[str]
) -> Branches:
    """Find the branches beside that of ``layer``, and the last layer in each of them that shows
    where the score comes from.

    ``candidates`` are the layers to choose from, the last ones first; of tokens, those before the
    last of ``attentions`` in their branch.
    """
    recorded = search.recorded
    if recorded is None:
        recorder = record(search.model, search.inputs.detached(), KEPT)
        recorded = ForwardGraph(recorder.output, recorder.edges)
        search = replace(search, recorded=recorded)
    score = total_score(search.score, recorded.output)
    if score is None:
        return Branches([layer])
    readers = consumers(score)

    def branch_of(name: str) -> _Branch:
        edge = last_of_place(recorded.edges, place_of(name, search.model))
        return _Branch(None if edge is None else edge.node, readers)

    chosen = branch_of(layer)
    branches = {name: branch_of(name) for name in candidates}
    branches = {name: branch for name, branch in branches.items() if chosen.is_beside(branch)}
    if not branches:
        return Branches([layer])
    ends = {branch_of(name).node for name in attentions}
    grids = NetworkGrids(search.model, search.inputs)
    layers = [layer]
    while branches:
        names = [*branches][:CANDIDATES]
        influences = influences_of(search, names)
        for name in names:
            branch = branches.pop(name)
            grid = grids.of_layer(name)
            is_last = grid is None or grid.is_map or not ends.isdisjoint(branch.downstream)
            if name not in influences or not influences[name].shows:
                continue
            if is_last or ends.isdisjoint(branch.upstream):
                layers.append(name)
                branches = {n: other for n, other in branches.items() if branch.is_beside(other)}
                break
    return _in_place(layers, grids)


def _in_place(layers: Sequence[str], grids: NetworkGrids) -> Branches:
    """Sort out the layers whose maps lie elsewhere on the photo than those of the others, as those
    of a crop or of a mirrored copy do."""
    lines = {layer: grids.lines(layer) for layer in layers}
    ordered = {layer: axes for layer, axes in lines.items() if axes is not None}
    if not ordered:
        return Branches(layers[:1], layers[1:])
    even = min(ordered, key=lambda layer: max(_distance(line, None) for line in ordered[layer]))
    left_out = [
        layer
        for layer in layers
        if layer not in ordered
        or any(_distance(a, b) > _APART for a, b in zip(ordered[layer], ordered[even], strict=True))
    ]
    return Branches([layer for layer in layers if layer not in left_out], left_out)


def _distance(line: Tensor, other: Tensor | None) -> float:
    """How far apart the cells of two maps lie along one axis of the photo, in cells of the coarser
    map; without another, from cells that are spread evenly."""
    if other is None:
        other = (torch.arange(len(line), device=line.device) + 0.5).to(line) / len(line)
    cells = min(len(line), len(other))
    a, b = (F.interpolate(of_map[None, None], cells, mode="linear") for of_map in (line, other))
    return float((a - b).abs().max()) * cells
