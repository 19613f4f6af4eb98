"""Which layer to explain by default."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from explain._utils.errors import LayerError, warn
from explain._utils.modules import parameters_of
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, InputsLike
from explain.hooks.preserve import copied
from explain.hooks.unwrap import with_layers
from explain.layers.branches import Branches, branches_beside
from explain.layers.frames import with_layout
from explain.layers.influence import (
    CANDIDATES,
    LayerSearch,
    Score,
    ScoreInfluence,
    first_that_shows,
    influences_of,
)
from explain.layers.layouts import Grid, Size, has_aspect
from explain.layers.placement import PlacementMode
from explain.layers.recording import ModuleCall, RecordedCalls, record
from explain.layers.stitched import Stitched
from explain.layers.summary import RECORDED, ForwardSummary, summary_of
from explain.recording import Step, Value
from explain.recording.moves import is_move

ALL_SCORES = "all scores"
MAX_NUMBERS_OF_BOX = 5  # numbers: existence and class of a box, or its corners


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

    The layer depends on what is explained, lies before the answer, and has several channels, which
    a gate has not. It reaches the score with a gradient that does not cancel over its places, as
    that of an attention's logits does.

    The model is run on one image to find it, and the choice is kept as long as the model has the
    same modules and inputs of the same size. A network that gives boxes or maps, or several
    tensors, instead of a row of scores has heads for many answers: there, and elsewhere with
    ``refresh``, what ``score`` depends on is computed each time, except that all classes
    (``of_class``) of a network that gives their scores share a layer.

    Raises:
        LayerError: no layer gives a spatial map.
    """
    model = with_layers(model)
    branches = _branches(model, x, score, _last_feature_maps, of_class=of_class, refresh=refresh)
    return branches.layers[0]


def branch_layers(
    model: nn.Module,
    x: InputsLike,
    score: Score | None = None,
    *,
    of_class: bool = False,
    refresh: bool = False,
    placement: PlacementMode = "cells",
) -> list[str]:
    """Name the layers to explain together: `default_layer`, and that of each branch beside it, as
    in an ensemble. Warns of branches that see the image elsewhere and cannot be drawn."""
    branches = _branches(model, x, score, _last_feature_maps, of_class=of_class, refresh=refresh)
    if branches.placed and placement == "cells":
        # maps that can't be added cell by cell are drawn where their cells look, and added there
        return [*branches.layers, *branches.left_out]
    if branches.left_out:
        warn(
            f"the map of layer {branches.layers[0]} leaves out branches that see the photo "
            f"elsewhere: {_some(branches.left_out)}; name one with layer=, take saliency or "
            "occlusion, or of a segmenter's windows explain.models.Stitched"
        )
    return [*branches.layers]


def _some(layers: Sequence[str]) -> str:
    """The first few of some layers' names."""
    return ", ".join(map(repr, layers[:4])) + ("…" if len(layers) > 4 else "")


def _branches(
    model: nn.Module,
    x: InputsLike,
    score: Score | None,
    choose: Callable[[LayerSearch], tuple[Branches, bool]],
    *,
    of_class: bool,
    refresh: bool,
) -> Branches:
    """The layers that ``choose`` finds for a score, and those that are left out; kept in the
    network's summary if other scores or images share them."""
    inputs = with_layout(model, x)
    if inputs.x.is_meta:
        raise LayerError(
            "x must hold values for a layer to be found, got one on the meta device; load it first"
        )
    if isinstance(model, Stitched):  # all windows share a layer, chosen in the first one
        energy = model.energy(inputs)
        first = model.first(inputs)
        inner = _branches(model.model, first, energy, choose, of_class=False, refresh=refresh)
        return inner.within("model")
    summary = summary_of(model, inputs, with_record=True)
    shared_by = _shared_with(summary, score, of_class, refresh)
    chosen: Branches | None = summary.chosen.get((shared_by, choose))
    if chosen is None:
        with _begin(model, inputs, summary, score, shared_by) as search:
            chosen, is_certain = choose(search)
        # a choice that another image might change is not kept
        if is_certain and shared_by is not None:
            summary.chosen[shared_by, choose] = chosen
    return chosen


def stage_layers(model: nn.Module, x: InputsLike) -> list[str]:
    """Name a layer of each resolution for methods that fuse layers, the finest first: the last that
    counts at each of the four coarsest, of each branch beside others; else `default_layer`."""
    return [*_stages(model, x, None, of_class=False, refresh=False).layers]


def layers_to_fuse(
    model: nn.Module,
    x: InputsLike,
    score: Score | None = None,
    *,
    of_class: bool = False,
    refresh: bool = False,
) -> list[str]:
    """Name the layers that a method fuses, as `stage_layers` does. Warns of branches that their
    product leaves out or mixes: they see the image elsewhere, or have other resolutions."""
    stages = _stages(model, x, score, of_class=of_class, refresh=refresh)
    if stages.left_out:
        warn(
            f"the product of the maps of layers {_some(stages.layers)} does not add up branches "
            f"beside them: {_some(stages.left_out)}; name the layers of one with layer=, or take "
            "gradcam"
        )
    return [*stages.layers]


_STAGES = 4
"""How many resolutions are fused."""


def _stages(
    model: nn.Module, x: InputsLike, score: Score | None, *, of_class: bool, refresh: bool
) -> Branches:
    """The layers of `stage_layers`, and branches beside them whose maps can't be added."""
    stages = _branches(model, x, score, _last_of_each_size, of_class=of_class, refresh=refresh)
    if stages.layers:
        return stages
    return Branches([default_layer(model, x, score, of_class=of_class, refresh=refresh)])


def _shared_with(
    summary: ForwardSummary, score: Score | None, of_class: bool, refresh: bool
) -> str | None:
    """The name of the scores that share a choice of layer, which is kept under it in the network's
    summary; None if it is not kept."""
    if score is None or (summary.gives_scores and summary.outputs == 1 and not refresh):
        return ALL_SCORES
    return "all classes" if of_class and summary.gives_scores and not refresh else None


@contextmanager
def _begin(
    model: nn.Module,
    inputs: Inputs,
    summary: ForwardSummary,
    score: Score | None,
    shared_by: str | None,
) -> Iterator[LayerSearch]:
    """A search for the layer on the first image, or on all if it is for one score; in the pass that
    the summary recorded, if that is left, which is let go of at the end."""
    recorded: RecordedCalls | None = summary.chosen.pop(RECORDED, None)
    # the summary is that of the first image, or of all where the network refuses one
    is_of_these_inputs = shared_by == ALL_SCORES or len(inputs) == 1
    if shared_by == ALL_SCORES:  # the model's best score then stands for all
        score = None
        inputs = inputs.first() if summary.alone else inputs
    precise = _in_single_precision(model, inputs)
    if recorded is not None and (precise is not None or not is_of_these_inputs):
        recorded.release()
        recorded = None
    model, inputs = precise or (model, inputs)
    recorded = recorded or record(model, inputs.detached())
    try:
        yield LayerSearch(model, inputs, summary, score, recorded)
    finally:
        recorded.release()


def _in_single_precision(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs] | None:
    """A network in half precision, and its inputs, in float32, where rounding decides nothing; None
    for other networks, and if it can't be copied or run so."""
    tensors = [inputs.x, *parameters_of(model)]
    if not any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors):
        return None
    try:
        precise_model = copied(model).float()
        precise_inputs = inputs.in_single_precision()
        summary_of(precise_model, precise_inputs)  # which runs it
    except Exception as error:  # the network may fix a precision, or be too large
        if came_by_signal(error):
            raise
        return None
    return precise_model, precise_inputs


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A tensor that may be the layer: the calls that returned it, one after the other."""

    number: int
    calls: list[ModuleCall]
    value: Value | None
    """The tensor in the recorded pass of the search."""

    @property
    def name(self) -> str:
        """The layer's name for this tensor, among the calls that returned it. A module's last call
        comes first, then the shortest path, then what returned last."""
        return min(
            reversed(self.calls), key=lambda call: (not call.last, call.name.count("."))
        ).label

    @property
    def grid(self) -> Grid | None:
        """How the tensor covers the input; None if it is no map."""
        return self.calls[-1].grid

    @property
    def is_map(self) -> bool:
        """Whether the tensor is laid out as a map, and not as tokens."""
        return self.grid is not None and (self.grid.is_map or self.grid.is_line)

    @cached_property
    def is_pooling(self) -> bool:
        """Whether the tensor comes from a pooling, or a map that was resized."""
        step = _behind_moves(self.value)
        return step is not None and (step.operation.has("pools") or step.operation.has("resizes"))

    @cached_property
    def is_tokens(self) -> bool:
        """Whether the tensor is a sequence of tokens that lie on the image. What is pooled is none,
        though it may have as many channels as there might be tokens."""
        if self.grid is None or self.grid.layout not in ("tokens", "tokens first"):
            return False
        step = _behind_moves(self.value)
        return not self.is_pooling and not (step and step.operation.has("reduces"))

    @property
    def is_gate(self) -> bool:
        """Whether the tensor is a map with one channel, which says how much of other maps passes,
        and not what is there."""
        return self.grid is not None and self.calls[-1].shape[self.grid.of_channels] == 1


def _behind_moves(value: Value | None) -> Step | None:
    """The step that has computed a value, before its elements were moved."""
    step = None if value is None else value.step
    while step is not None and is_move(step):
        step = step.inputs[0].step
    return step


def _candidates(search: LayerSearch) -> list[_Candidate]:
    """The tensors that may be the layer, in the order of the pass: none that is returned again
    later, is inside an attention, or saw other images than the explained one."""
    summary = search.summary
    # if none is seen to depend on the explained image, all may
    calls = [call for call in summary.calls if call.depends] or summary.calls
    calls_by_tensor: list[list[ModuleCall]] = []
    for call in calls:  # those that return the same tensor follow each other
        if call.passes_on and calls_by_tensor:
            calls_by_tensor[-1].append(call)
        else:
            calls_by_tensor.append([call])
    attentions = tuple(f"{name}." for name in search.scored.attentions)
    candidates: list[_Candidate] = []
    for calls_of_tensor in calls_by_tensor:
        outside = [call for call in calls_of_tensor if not call.name.startswith(attentions)]
        value = search.scored.values.get(calls_of_tensor[-1].key)  # all of them have the same
        # in a program without modules (""), no name says what is inside an attention
        is_of_heads = "" in search.scored.attentions and value in search.scored.of_heads
        # whose first call returns it again: it may be handed on unused, and has a candidate already
        is_handed_on = calls_of_tensor[0].again
        if outside and not is_of_heads and not is_handed_on:
            candidates.append(_Candidate(number=len(candidates), calls=outside, value=value))
    return candidates


def _maps_as_the_input(search: LayerSearch, candidates: list[_Candidate]) -> list[_Candidate]:
    """The candidates that are maps with the input's aspect ratio, not pooled; if there are none,
    all maps. In the order of the pass. The default layer of convolutional networks is among them.
    """
    size = tuple(search.inputs.x.shape[2:])
    maps = [candidate for candidate in candidates if candidate.is_map]
    covering = [
        candidate for candidate in maps if candidate.grid and has_aspect(candidate.grid.size, size)
    ] or maps
    return [candidate for candidate in covering if not candidate.is_pooling] or covering


def _before_attention(search: LayerSearch, candidates: list[_Candidate]) -> list[_Candidate]:
    """The candidates that are tokens with an attention after them, since of later ones the class
    token alone may count. The outputs of attentions themselves are left out."""
    tokens = [candidate for candidate in candidates if candidate.is_tokens]
    attentions = search.scored.attentions
    if not attentions:
        return tokens
    last = max(weights.number for weights in attentions.values())
    return [
        token
        for token in tokens
        if token.value is not None
        and token.value.number < last
        # the output of an attention may be a padded window of a smaller map
        and attentions.keys().isdisjoint(call.name for call in token.calls)
    ]


def _latest_first(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """The candidates in the reverse order of the pass. The default layer is the last that fits."""
    return sorted(candidates, key=lambda candidate: -candidate.number)


def _last_of_each_size(search: LayerSearch) -> tuple[Branches, bool]:
    """The layers of the stages, from fine to coarse, with branches beside them, and whether they'd
    be the same for another image: no gradient is zero everywhere."""
    all_candidates = _candidates(search)
    by_size: dict[Size, list[_Candidate]] = {}
    for candidate in _latest_first(all_candidates):
        if candidate.grid is not None and not candidate.is_pooling:
            by_size.setdefault(candidate.grid.size, []).append(candidate)
    coarsest = sorted(by_size, key=lambda size: size[-2] * size[-1])[:_STAGES]
    names_of_stages = []
    for size in coarsest:
        candidates = sorted(by_size[size], key=lambda candidate: candidate.is_gate)  # gates last
        # one pass computes the gradients of all stages
        names_of_stages.append(
            [candidate.name for candidate in candidates[: CANDIDATES // len(coarsest)]]
        )
    influences = influences_of(search, [name for names in names_of_stages for name in names])
    stages: dict[str, list[str]] = {}
    """The candidates of each stage that the score depends on, by the layer that stands for it."""
    is_certain = True
    for names in reversed(names_of_stages):  # from fine to coarse
        layer = first_that_shows(names, influences)
        if layer is not None:
            stages[layer] = names
        elif any(name in influences for name in names):
            is_certain = False  # a gradient that is zero everywhere
    # a stage of which no layer shows anything is left out, unless none does
    layers = [layer for layer in stages if influences[layer].shows] or [*stages]
    layers_of_branches: list[str] = []
    left_out: dict[str, None] = {}
    for layer in layers:
        same_size = branches_beside(search, layer, stages[layer])
        layers_of_branches += same_size.layers
        left_out |= dict.fromkeys(same_size.left_out)
        # a product of the stages of two branches is not the sum of their products
        other_layers = [name for name in layers if name != layer]
        other_size = branches_beside(search, layer, other_layers, from_image=other_layers)
        _, *beside = other_size.layers  # without the layer itself
        left_out |= dict.fromkeys([*beside, *other_size.left_out])
    return Branches(layers_of_branches, [*left_out]), is_certain


def _last_feature_maps(search: LayerSearch) -> tuple[Branches, bool]:
    """The last feature map that the scores depend on, in each branch; of transformers, the last
    tokens with an attention after them. Also whether it is the same for other images."""
    if search.score is not None and not search.summary.gives_scores:
        return _maps_of_one_answer(search), False
    candidates = _candidates(search)
    maps = _maps_as_the_input(search, candidates)
    tokens = [candidate for candidate in candidates if candidate.is_tokens]
    last_tokens = _before_attention(search, candidates)[-1:]
    # the later one of the last map and the last tokens
    latest = _latest_first([*maps[-1:], *last_tokens])[:1]
    if not latest:
        raise _no_map(search.model, search.summary.calls)
    other_maps = [
        candidate for candidate in candidates if candidate.is_map and candidate not in maps
    ]
    # others are taken where the first shows nothing, and gates where all others do
    order = [*latest, *last_tokens, *_latest_first(maps + tokens), *_latest_first(other_maps)]
    order.sort(key=lambda candidate: candidate.is_gate)
    names = list(dict.fromkeys(candidate.name for candidate in order))
    influences: dict[str, ScoreInfluence] = {}
    for some_influences in search.influences_in_turn(names):
        influences |= some_influences
        if any(influence.shows for influence in influences.values()):
            break
    layer = first_that_shows(names, influences)
    if layer is None:
        # a gradient that is zero everywhere says nothing: another image may have another layer
        return Branches(names[:1]), False
    alike = maps + tokens
    if all(candidate.name != layer for candidate in alike):  # it is one of the other maps
        alike = alike + other_maps
    of_branches = [candidate.name for candidate in _latest_first(alike) if not candidate.is_gate]
    return branches_beside(search, layer, of_branches), True


def _maps_of_one_answer(search: LayerSearch) -> Branches:
    """The last map, or tokens, that show where one of many answers, such as a detected box, comes
    from, in each branch."""
    summary = search.summary
    candidates = _candidates(search)
    shapes: dict[str, set[Size]] = {}
    for call in summary.calls:
        shapes.setdefault(call.name, set()).add(call.shape)

    # The answers themselves show nothing: neither the map of classes that the network gives, nor a
    # map of which the score reads one position. Nor does a head that slides over the maps of
    # several resolutions, each call of which is about one.
    def is_last_choice(candidate: _Candidate) -> bool:
        slides = any(len(shapes[call.name]) > 1 for call in candidate.calls)
        return slides or candidate.calls[-1].shape[1] in summary.answers or candidate.is_gate

    # Tokens made from a map; the queries of a detector may have a number that could be that of a
    # grid.
    tokens_of_map = [
        candidate
        for candidate in candidates
        if candidate.is_tokens and candidate.grid and candidate.grid.size in summary.sizes
    ]
    before_attention = set(_before_attention(search, candidates))
    tokens = [candidate for candidate in tokens_of_map if candidate in before_attention]
    covering = _latest_first(_maps_as_the_input(search, candidates) + tokens)
    all_maps = _latest_first(
        candidate for candidate in candidates if candidate.is_map and not candidate.is_pooling
    )
    ordered = sorted(dict.fromkeys(covering + all_maps), key=is_last_choice)
    cells = {
        candidate.name: math.prod(candidate.grid.size) for candidate in ordered if candidate.grid
    }
    """How many cells each map has."""
    if not cells:
        raise _no_map(search.model, summary.calls)
    # such a score, as that of a box, sees little of a fine map: the coarsest is taken
    reads_few_numbers = search.numbers_read() <= MAX_NUMBERS_OF_BOX * len(search.inputs)
    image_counts = dict.fromkeys(cells, (0, 0))
    """For how many images each layer shows something; and for how many more than one of its cells
    counts."""
    for influences in search.influences_in_turn([*cells]):
        for name, influence in influences.items():
            with_many_cells = sum(count > 1 for count in influence.positions)
            image_counts[name] = (with_many_cells if influence.shows else 0, with_many_cells)
        if any(shown == len(search.inputs) for shown, _ in image_counts.values()):
            break
    # of equals, the first is taken
    layer = max(
        cells, key=lambda name: (*image_counts[name], -cells[name] if reads_few_numbers else 0)
    )
    sizes = {
        candidate.name: candidate.grid.size
        for candidate in dict.fromkeys(covering + all_maps + _latest_first(tokens_of_map))
        if candidate.grid and not is_last_choice(candidate)
    }
    of_branches = [*sizes]
    if reads_few_numbers:
        of_branches.sort(key=lambda name: math.prod(sizes[name]))
    # the levels of a feature pyramid share feature maps: they are no branches beside each other
    other_sizes = [name for name in of_branches if sizes[name] != sizes.get(layer)]
    # a map that the score reads one cell of is the answer itself
    return branches_beside(search, layer, of_branches, from_image=other_sizes, least=2)


def _no_map(model: nn.Module, calls: Sequence[ModuleCall]) -> LayerError:
    """The error for a model none of whose layers gives a map, after these calls of modules; it
    names what helps. Callers of `default_layer` catch it to leave out methods that need a layer.
    """
    is_graph = isinstance(model, torch.fx.GraphModule)
    hides_layers = (is_graph and not calls) or any(
        isinstance(module, torch.jit.ScriptModule) or hasattr(module, "hidden_layers")
        for module in model.modules()
    )
    if hides_layers:
        return LayerError(
            "layer must be of a network in Python, but this one is scripted, exported or ONNX, and "
            "its layers are hidden; use a method without layers, such as occlusion"
        )
    inner = [f"model.{name}" for name, module in model.named_children() if any(module.children())]
    if inner and not calls:
        return LayerError(
            f"model must run its own modules, but {type(model).__name__} ran none of them; give "
            f"the network in it ({', '.join(inner)})"
        )
    sample_counts = {call.shape[0] for call in calls if len(call.shape) > 3}
    if inner and sample_counts and 1 not in sample_counts:
        return LayerError(
            "model must give one sample for each image in its layers, got "
            f"{min(sample_counts)} for one, as of crops or windows; give the network in it "
            f"({', '.join(inner)}), for windows within explain.models.Stitched"
        )
    return LayerError(
        "layer must be given for this model: none of its layers gives a spatial map "
        f"({len(calls)} calls seen); name one, or use saliency or occlusion"
    )
