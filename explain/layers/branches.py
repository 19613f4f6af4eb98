"""Branches that reach a score side by side, such as the members of an ensemble."""

from collections.abc import Collection, Mapping, Sequence
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
    ScoreInfluence,
    influences_of,
    is_product,
    mixes,
    total_score,
)
from explain.layers.recording import last_of_place, tensors_in

_APART = 0.75  # of a cell: how far apart the cells of maps may lie that are added up


@dataclass(frozen=True)
class Branches:
    """The layers that are explained together, and those of branches that see the photo elsewhere,
    whose maps can't be added to theirs."""

    layers: Sequence[str]
    left_out: Sequence[str] = ()

    def within(self, name: str) -> "Branches":
        """The layers as those of a part of a network are named in it."""
        layers = [f"{name}.{layer}" for layer in self.layers]
        return Branches(layers, [f"{name}.{layer}" for layer in self.left_out])


@dataclass(frozen=True, eq=False)
class _Branch:
    """A layer in the graph of a score: its Node, and the Nodes that read each Node."""

    node: Node
    readers: Mapping[Node, Collection[Node]]

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
            further = self.readers.get(waiting.pop(), ())
            waiting += [reader for reader in further if reader not in nodes]
            nodes.update(further)
        return frozenset(nodes)

    def is_apart(self, other: "_Branch", *, from_photo: bool) -> bool:
        """Whether both reach what is read, and neither from the other; ``from_photo``, nor do they
        share a feature map."""
        if not (self.downstream and other.downstream):
            return False
        if other.node in self.upstream or other.node in self.downstream:
            return False
        return not (from_photo and any(map(mixes, self.upstream & other.upstream)))

    def meets(self, other: "_Branch") -> bool:
        """Whether two branches meet in a sum, a mean or a concatenation.

        Where they meet in a product, either one accounts for all of the score.
        """
        alone = self.downstream - other.downstream | {self.node}
        other_alone = other.downstream - self.downstream | {other.node}
        for join in self.downstream & other.downstream:
            parents = {parent for parent, _ in join.next_functions}
            is_join = not alone.isdisjoint(parents) and not other_alone.isdisjoint(parents)
            if is_join and not is_product(join):
                return True
        return False


def branches_beside(
    search: LayerSearch,
    layer: str,
    candidates: Sequence[str],
    attentions: Sequence[str],
    *,
    from_photo: Collection[str] = (),
    least: int = 1,
) -> Branches:
    """Find the branches beside that of ``layer``, and the last layer in each of them that shows
    where the score comes from.

    ``candidates`` are the layers to choose from, the last ones first; of tokens, those before the
    last of ``attentions`` in their branch. Those of ``from_photo`` count only where they share no
    feature map with ``layer``, as the levels of a feature pyramid do. At ``least`` so many
    positions of a layer must count.
    """
    candidates = _possible(search, layer, candidates, from_photo)
    if not candidates:
        return Branches([layer])
    search = replace(search, recorded=search.graph)
    score = total_score(search.score, search.graph.output)
    readers = {} if score is None else consumers(score)
    chosen = _branches(search, [layer], readers).get(layer)
    if chosen is None:
        return Branches([layer])
    branches = {
        name: branch
        for name, branch in _branches(search, candidates, readers).items()
        if chosen.is_apart(branch, from_photo=name in from_photo) and chosen.meets(branch)
    }
    ends = {branch.node for branch in _branches(search, attentions, readers).values()}
    grids = NetworkGrids(search.model, search.inputs)
    layers = [layer]
    while branches:
        names = [*branches][:CANDIDATES]
        influences = influences_of(search, names)
        for name in names:
            branch = branches.pop(name)
            grid = grids.of_layer(name)
            is_last = grid is None or grid.is_map or not ends.isdisjoint(branch.downstream)
            influence = influences.get(name)
            if influence is None or not _shows(influence, least):
                continue
            if is_last or ends.isdisjoint(branch.upstream):
                layers.append(name)
                branches = {
                    other_name: other
                    for other_name, other in branches.items()
                    if branch.is_apart(other, from_photo=other_name in from_photo)
                    and branch.meets(other)
                }
                break
    return _in_place(layers, grids)


def _shows(influence: ScoreInfluence, least: int) -> bool:
    """Whether a layer shows where the score comes from, at so many positions."""
    return influence.shows and any(count >= least for count in influence.positions)


def _possible(
    search: LayerSearch, layer: str, candidates: Sequence[str], from_photo: Collection[str]
) -> Sequence[str]:
    """Those of the candidates that may be beside a layer for some score of the network: neither is
    computed from the other.

    Kept with the summary, so that a network with one branch is searched once.
    """
    key = ("beside", layer, *candidates, None, *from_photo)
    possible: list[str] | None = search.summary.chosen.get(key)
    if possible is None:
        readers: dict[Node, set[Node]] = {}
        for tensor in tensors_in(search.graph.output, most=None):
            for node, of_node in consumers(tensor).items():
                readers.setdefault(node, set()).update(of_node)
        chosen = _branches(search, [layer], readers).get(layer)
        branches = {} if chosen is None else _branches(search, candidates, readers)
        possible = [
            name
            for name, branch in branches.items()
            if chosen is not None and chosen.is_apart(branch, from_photo=name in from_photo)
        ]
        search.summary.chosen[key] = possible
    return possible


def _branches(
    search: LayerSearch, layers: Sequence[str], readers: Mapping[Node, Collection[Node]]
) -> dict[str, _Branch]:
    """The branches of layers in the graph of a search; those that have no Node are left out."""
    branches = {}
    for layer in layers:
        edge = last_of_place(search.graph.edges, place_of(layer, search.model))
        if edge is not None:
            branches[layer] = _Branch(edge.node, readers)
    return branches


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
        or any(
            _distance(line, of_even) > _APART * max(_spacing(line), _spacing(of_even))
            for line, of_even in zip(ordered[layer], ordered[even], strict=True)
        )
    ]
    return Branches([layer for layer in layers if layer not in left_out], left_out)


def _spacing(line: Tensor) -> float:
    """How far apart the cells of a map lie along one axis of the photo, as a share of it."""
    return float(line.diff().mean()) if len(line) > 1 else 1.0


def _distance(line: Tensor, other: Tensor | None) -> float:
    """How far apart the cells of two maps lie along one axis of the photo, as a share of it;
    without another, from cells that are spread evenly."""
    if other is None:
        other = (torch.arange(len(line), device=line.device) + 0.5).to(line) / len(line)
    cells = min(len(line), len(other))
    a, b = (F.interpolate(of_map[None, None], cells, mode="linear") for of_map in (line, other))
    return float((a - b).abs().max())
