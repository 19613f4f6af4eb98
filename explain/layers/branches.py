"""Branches that reach a score side by side, such as the members of an ensemble."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from explain.layers.grids import NetworkGrids
from explain.layers.influence import (
    CANDIDATES,
    LayerSearch,
    influences_of,
    is_product,
    mixes,
)
from explain.recording import Step, Value
from explain.recording.gradients import paths_to, reached_from

_APART = 0.75  # of a cell: how far apart the cells of maps may lie that are added up


@dataclass(frozen=True)
class Branches:
    """The layers that are explained together, and those of branches that see the image elsewhere
    (``left_out``), whose maps can't be added to theirs cell by cell."""

    layers: Sequence[str]
    left_out: Sequence[str] = ()
    placed: bool = False
    """Whether it is known where on the image the cells of all these layers look."""

    def within(self, name: str) -> "Branches":
        """The layers as those of a part of a network are named in it."""
        layers = [f"{name}.{layer}" for layer in self.layers]
        return Branches(layers, [f"{name}.{layer}" for layer in self.left_out])


@dataclass(frozen=True, eq=False)
class _Branch:
    """A layer in a recorded pass: its value, and the values through which it reaches what is
    read."""

    value: Value
    steps: Sequence[Step]
    leading: Collection[Value]

    @cached_property
    def upstream(self) -> set[Value]:
        """What the layer is computed from, and its own value."""
        return paths_to([self.value])

    @cached_property
    def downstream(self) -> set[Value]:
        """What is computed from the layer, on the path to what is read."""
        return reached_from(self.steps, [self.value]).intersection(self.leading) - {self.value}

    def is_apart(self, other: "_Branch", *, from_image: bool) -> bool:
        """Whether both reach what is read, and neither from the other; ``from_image``, nor do they
        share a feature map."""
        if not (self.downstream and other.downstream):
            return False
        if other.value in self.upstream or other.value in self.downstream:
            return False
        shared = self.upstream & other.upstream
        return not (from_image and any(mixes(value.step) for value in shared))

    def meets(self, other: "_Branch") -> bool:
        """Whether two branches meet in a sum, a mean or a concatenation. Where they meet in a
        product, either one accounts for all of the score."""
        # what lies on one of the two branches, before they meet
        alone = (self.downstream - other.downstream) | {self.value}
        other_alone = (other.downstream - self.downstream) | {other.value}
        for join in self.downstream & other.downstream:
            parents = join.step.inputs if join.step else []
            is_join = not alone.isdisjoint(parents) and not other_alone.isdisjoint(parents)
            if is_join and not is_product(join.step):
                return True
        return False


def branches_beside(
    search: LayerSearch,
    layer: str,
    candidates: Sequence[str],
    *,
    from_image: Collection[str] = (),
    least: int = 1,
) -> Branches:
    """Find the branches beside that of ``layer``, and in each the last of the ``candidates``
    (latest first) of which at ``least`` so many positions show where the score comes from."""
    # Those of `from_image` count only where they share no feature map with the layer, as the levels
    # of a feature pyramid do.
    candidates = _possible(search, layer, candidates, from_image)
    if not candidates:
        return Branches([layer])
    to_score = search.scored.to_score
    chosen = _branches(search, [layer], to_score).get(layer)
    if chosen is None:
        return Branches([layer])
    branches = {
        name: branch
        for name, branch in _branches(search, candidates, to_score).items()
        if chosen.is_apart(branch, from_image=name in from_image) and chosen.meets(branch)
    }
    attentions = set(search.scored.attentions.values()) if branches else set()
    grids = NetworkGrids(search.model, search.inputs)
    layers = [layer]
    while branches:
        names = [*branches][:CANDIDATES]  # whose gradients one pass computes
        influences = influences_of(search, names)
        for name in names:
            branch = branches.pop(name)
            influence = influences.get(name)
            if influence is None or not influence.shows or max(influence.positions) < least:
                continue
            # behind the last attention of their branch, the class token alone may count
            grid = grids.of_layer(name)
            are_tokens = grid is not None and not grid.is_map
            is_before_attention = not attentions.isdisjoint(branch.downstream)
            is_behind_attention = not attentions.isdisjoint(branch.upstream)
            if is_before_attention or not (are_tokens and is_behind_attention):
                layers.append(name)
                # those that are left must lie beside this one too
                branches = {
                    other_name: other
                    for other_name, other in branches.items()
                    if branch.is_apart(other, from_image=other_name in from_image)
                    and branch.meets(other)
                }
                break
    return _at_same_places(layers, grids)


def _possible(
    search: LayerSearch, layer: str, candidates: Sequence[str], from_image: Collection[str]
) -> Sequence[str]:
    """Those of the candidates that may be beside a layer for some score of the network: neither is
    computed from the other. Kept in the summary, which the searches for all scores share."""
    key = ("beside", layer, *candidates, None, *from_image)  # None between the two lists
    possible: list[str] | None = search.summary.chosen.get(key)
    if possible is None:
        to_any_output = paths_to(search.scored.outputs)
        chosen = _branches(search, [layer], to_any_output).get(layer)
        branches = {} if chosen is None else _branches(search, candidates, to_any_output)
        possible = [
            name
            for name, branch in branches.items()
            if chosen is not None and chosen.is_apart(branch, from_image=name in from_image)
        ]
        search.summary.chosen[key] = possible
    return possible


def _branches(
    search: LayerSearch, layers: Sequence[str], leading: Collection[Value]
) -> dict[str, _Branch]:
    """The branches of layers in the pass of a search; those that did not run are left out."""
    branches = {}
    for layer in layers:
        value = search.value_of(layer)
        if value is not None:
            branches[layer] = _Branch(value, search.scored.steps, leading)
    return branches


def _at_same_places(layers: Sequence[str], grids: NetworkGrids) -> Branches:
    """Leave out the layers whose maps lie elsewhere on the image than those of the others, as those
    of a crop or of a mirrored copy do, or of which it is not known where they lie."""
    lines_by_layer = {layer: grids.lines(layer) for layer in layers}
    known_lines = {layer: lines for layer, lines in lines_by_layer.items() if lines is not None}
    if not known_lines:  # the layer that was chosen is the first
        return Branches(layers[:1], layers[1:])
    # a crop covers a part of the image: the map that is spread most evenly covers all of it
    most_even = min(known_lines, key=lambda layer: max(map(_unevenness, known_lines[layer])))
    left_out = [
        layer
        for layer in layers
        if layer not in known_lines
        or any(
            _distance(line, even_line) > _APART * max(_spacing(line), _spacing(even_line))
            for line, even_line in zip(known_lines[layer], known_lines[most_even], strict=True)
        )
    ]
    added_up = [layer for layer in layers if layer not in left_out]
    # Maps that are left out can't be added cell by cell, but can on the image, where all cells are
    # drawn at their places. To find these runs the network: not if nothing is left out.
    looks = (grids.look(layer) for layer in layers)
    placed = bool(left_out) and all(look and look.placement for look in looks)
    return Branches(added_up, left_out=left_out, placed=placed)


# A line has the place of each row of a map, or of each column, along one axis of the image: a share
# of it from 0 to 1.


def _spacing(line: Tensor) -> float:
    """How far apart the cells of a line are."""
    return float(line.diff().mean()) if len(line) > 1 else 1.0  # one cell covers the image


def _unevenness(line: Tensor) -> float:
    """How far the cells of a line are from where they would be if spread evenly over the image."""
    even_line = (torch.arange(len(line), device=line.device) + 0.5).to(line) / len(line)
    return _distance(line, even_line)


def _distance(line: Tensor, other: Tensor) -> float:
    """How far apart the cells of two lines are at most; the finer one is resized to the other."""
    cells = min(len(line), len(other))
    resized, other_resized = (
        F.interpolate(of_map[None, None], cells, mode="linear") for of_map in (line, other)
    )
    return float((resized - other_resized).abs().max())
