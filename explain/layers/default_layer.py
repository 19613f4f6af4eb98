"""Which layer to explain by default."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from explain._utils import nested
from explain._utils.errors import LayerError
from explain.data.inputs import Inputs, InputsLike, as_inputs
from explain.hooks import HookGroup, capturing, preserve
from explain.layers.calls import ForwardSummary, ModuleCall, grids_of, split_call, summary_of, tensors_in
from explain.layers.frames import with_layout
from explain.layers.layouts import MAPS, Size, has_aspect, to_spatial
from explain.layers.stitched import Stitched

T = TypeVar("T")
Score: TypeAlias = Callable[[Any], Tensor]
"""From a model's output to one score per image."""

CANDIDATES = 24  # whose gradients one pass computes
MOST = 6 * CANDIDATES
FEW = 5  # numbers: existence and class of a box, or its corners
_POOLING = re.compile("Pool(?!Former)|Upsample")
_ATTENTION = re.compile("(?!.*(?:Block|Layer))(?:.*[Aa]tt(?:ention|n)|[A-Z]*SA$|XCA$)")


def default_layer(model: nn.Module, x: InputsLike, score: Score | None = None, *, refresh: bool = False) -> str:
    """Name the layer to explain: the last feature map before pooling, or the tokens before the last attention.

    It is found by running the model on one image, and summary_of as long as the model has the same modules and inputs
    of the same size. A network that gives boxes or maps instead of a row of scores has heads for many answers: there,
    and elsewhere with ``refresh``, what ``score`` depends on is computed each time.

    Raises:
        LayerError: no layer gives a spatial map.
    """
    inputs = as_inputs(x)
    if inputs.x.is_meta:
        raise LayerError("x must hold values for a layer to be found, got one on the meta device; load it first")
    inputs = with_layout(model, inputs)
    if isinstance(model, Stitched):
        return f"model.{default_layer(model.model, model.first(inputs), model.energy(inputs), refresh=refresh)}"
    summary = summary_of(model, inputs)
    if score is not None and not summary.gives_scores:
        return _map_behind_answers(model, inputs, summary, score)
    if score is not None and (refresh or summary.heads > 1):
        return _choose(model, inputs, summary, score)[0]
    return _once(summary, "default", lambda: _choose(model, inputs.first() if summary.alone else inputs, summary))


def stage_layers(
    model: nn.Module, x: InputsLike, score: Score | None = None, *, count: int = 4, refresh: bool = False
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
    summary = summary_of(model, inputs)
    if score is not None and (refresh or summary.heads > 1 or not summary.gives_scores):
        found = _stages(model, inputs, summary, count, score)[0]
    else:
        first = inputs.first() if summary.alone else inputs
        found = _once(summary, count, lambda: _stages(model, first, summary, count))
    return [*found] or [default_layer(model, inputs, score, refresh=refresh)]


def _once(summary: ForwardSummary, key: str | int, find: Callable[[], tuple[T, bool]]) -> T:
    """Compute something once for a summary, if the result is certain."""
    found, certain = (summary.chosen[key], False) if key in summary.chosen else find()
    if certain:
        summary.chosen[key] = found
    return found


def _stages(
    model: nn.Module, inputs: Inputs, summary: ForwardSummary, count: int, score: Score | None = None
) -> tuple[list[str], bool]:
    """The layers of stages, and whether they would be the same for another image."""
    by_size: dict[Size, list[str]] = {}
    for group in reversed(_groups(summary)):
        grid = group[-1].grid
        if grid is not None and not _is_pooling(group):
            by_size.setdefault(grid.size, []).append(_outermost(group))
    coarsest = sorted(by_size, key=lambda size: size[-2] * size[-1])[:count]
    candidates = [by_size[size][: CANDIDATES // len(coarsest)] for size in coarsest]
    reached = _positions_reached(model, inputs, [name for names in candidates for name in names], score)
    counting = [names for names in candidates if any(any(reached.get(name, ())) for name in names)]
    left_out = [name for names in candidates if names not in counting for name in names]
    found = [next(name for name in names if any(reached.get(name, ()))) for names in reversed(counting)]
    return found, not any(name in reached for name in left_out)


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


def _choose(model: nn.Module, inputs: Inputs, summary: ForwardSummary, score: Score | None = None) -> tuple[str, bool]:
    """The last feature map that the scores depend on; for tokens, the last ones that are followed by an attention.

    Also returns whether it would be the same for another image: a gradient that is zero everywhere says nothing.
    """
    groups, size = _groups(summary), tuple(inputs.x.shape[2:])
    maps = _indices_of_maps(groups, size)
    # What is pooled from tokens may have as many channels as there might be tokens.
    grids = [(i, group[-1].grid) for i, group in enumerate(groups) if not _is_pooling(group)]
    tokens = [i for i, grid in grids if grid is not None and grid.layout in ("tokens", "tokens first")]
    latest = sorted([*maps[-1:], *_before_attention(groups, tokens)[-1:]], reverse=True)
    if not latest:
        raise _no_map(model, len(summary.calls))
    pooled = [i for i, group in enumerate(groups) if _is_map(group) and i not in maps]
    order = [latest[0], *_before_attention(groups, tokens)[-1:], *sorted(maps + tokens, reverse=True), *pooled[::-1]]
    names = list(dict.fromkeys(_outermost(groups[i]) for i in order))
    reached = _positions_reached(model, inputs, names, score)
    found = [name for name in names if any(reached.get(name, ()))]
    return (found or names)[0], bool(found)


def _map_behind_answers(model: nn.Module, inputs: Inputs, summary: ForwardSummary, score: Score) -> str:
    """The last map that says something about one of many answers. The answers themselves do not count: neither the map
    of classes that the network gives, nor a map of which the score reads one position. Nor does a head that slides over
    the maps of several resolutions, of which each call is about one. They are taken only where the score depends on
    nothing else. A score that reads few numbers, as that of a box does, sees little of a fine map: of several
    resolutions, the coarsest is taken.
    """
    groups, size = _groups(summary), tuple(inputs.x.shape[2:])
    shapes: dict[str, set[Size]] = {}
    for call in summary.calls:
        shapes.setdefault(call.name, set()).add(call.shape)
    covering = _indices_of_maps(groups, size)[::-1]
    resized = [i for i in reversed(range(len(groups))) if _is_map(groups[i]) and not _is_pooling(groups[i])]
    indices = list(dict.fromkeys(covering + resized))
    slides = {i for i in indices if any(len(shapes[call.name]) > 1 for call in groups[i])}
    answers = {i for i in indices if groups[i][-1].shape[1] in summary.answers}
    ordered = sorted(indices, key=lambda i: i in slides | answers)
    names = {_outermost(groups[i]): math.prod(grid.size) for i in ordered if (grid := groups[i][-1].grid)}
    if not names:
        raise _no_map(model, len(summary.calls))
    images, of_cell = dict.fromkeys(names, 0), False

    def noted(output: Any) -> Tensor:
        nonlocal of_cell
        found = score(output)
        of_cell = _numbers_read(found, output) <= FEW * len(inputs)
        return found

    for start in range(0, min(len(names), MOST), CANDIDATES):
        reached = _positions_reached(model, inputs, [*names][start:], noted)
        images |= {name: sum(count > 1 for count in counts) for name, counts in reached.items()}
        if len(inputs) in images.values():
            break
    return max(names, key=lambda name: (images[name], -names[name] if of_cell else 0))  # the first of equals


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


def _is_map(group: list[ModuleCall]) -> bool:
    grid = group[-1].grid
    return grid is not None and grid.layout in MAPS


def _before_attention(groups: list[list[ModuleCall]], tokens: list[int]) -> list[int]:
    """The tokens that are followed by an attention, since after the last attention only the class token may count.

    The output of an attention may be a padded window of a smaller map.
    """
    attention = [i for i, group in enumerate(groups) if any(_ATTENTION.match(call.kind) for call in group)]
    return [i for i in tokens if i < attention[-1] and i not in attention] if attention else tokens


def _positions_reached(
    model: nn.Module, inputs: Inputs, layers: Sequence[str], score: Score | None = None
) -> dict[str, list[int]]:
    """For each of some layers, at how many positions of its map each image's score changes with it.

    Without a score, the model's best one is used. Layers that no gradient reaches are left out.
    """
    names = dict.fromkeys(split_call(layer, model)[0] for layer in layers[:CANDIDATES])

    def run(cut: bool) -> capturing.Capture:
        with preserve.untouched(model, grad=not cut), HookGroup(model) as group:
            capture = capturing.Capture(group, names, gradients=True, cut=cut)
            output = inputs.detached().call(model)
            # A row of numbers, if the network gives one.
            tensors = sorted(tensors_in(output), key=lambda tensor: tensor.ndim != 2) if score is None else []
            scores = [tensors[0].float().amax()] if tensors else [] if score is None else [score(output).sum()]
            for each in scores:
                capture.backward(each, roughly=True)
        return capture

    capture = capturing.cut_where_allowed(run)
    capture = run(False) if capture.misses else capture
    grids, found = grids_of(model, inputs), {}
    for layer in layers[:CANDIDATES]:
        record = capture.of(layer)
        if record is not None and record.gradient is not None:
            found[layer] = (to_spatial(record.gradient, grids, layer) != 0).any(1).flatten(1).sum(1).tolist()
    return found


def _outermost(group: list[ModuleCall]) -> str:
    """Choose among the names of one tensor: a module's last call rather than another, then the shortest path.

    Among equals, it is the one that returned last.
    """
    return min(reversed(group), key=lambda call: (not call.last, call.name.count("."))).label
