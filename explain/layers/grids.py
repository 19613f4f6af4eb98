"""How the maps of a network lie on its input: the grids of its layers."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from torch import nn

from explain.data.inputs import Inputs
from explain.hooks.layer_names import LayerPlace, place_of
from explain.hooks.unwrap import modules_of, submodule
from explain.layers import layouts, stitched
from explain.layers.layouts import Grid, Grids, Layout, Size
from explain.layers.located import FOLDED, PLACES, _located, _Places, folded_by_time
from explain.layers.recording import CallKey, input_producers
from explain.layers.summary import summary_of

PRODUCERS = "which call gave what a module is given"


def grids_of(model: nn.Module, inputs: Inputs) -> Grids:
    """The grids of the tensors of a network for these inputs; how tokens lie is found by running it, once.

    Of a `Stitched` model, they are those of a window: the maps of all windows lie in the same way.
    """
    whole, of_whole = model, inputs
    if isinstance(whole, stitched.Stitched):
        model, inputs = whole.model, whole.first(of_whole)
    summary = cache(partial(summary_of, model, inputs))

    def in_window(layer: str) -> LayerPlace:
        place = place_of(layer, whole)
        if not isinstance(whole, stitched.Stitched):
            return place
        place, call = whole.inside(place), place.call
        count = _calls_in_window(whole, of_whole, place.module)
        return place if call is None else place._replace(call=call % count)

    @cache
    def layout(layer: str, shape: Size) -> Layout | None:
        return layouts.layout_of(submodule(model, in_window(layer).module), shape, tuple(inputs.x.shape[2:]))

    @cache
    def look(layer: str) -> tuple[Grid | None, str]:
        place = in_window(layer)
        name = modules_of(model)[submodule(model, place.module)]  # one that has several names was noted under its first
        found, number = summary(), place.call
        call = found.call_of(name, number)
        if place.part == "input":  # the call that returned it
            if PRODUCERS not in found.chosen:
                given = inputs.first() if found.alone else inputs
                found.chosen[PRODUCERS] = input_producers(model, given.detached())
            producers: dict[CallKey, CallKey] = found.chosen[PRODUCERS]
            numbers = [n for given, n in producers if given == name and number in (None, n)]
            call = found.call_of(*producers[name, max(numbers)]) if numbers else None
        if call is None:
            return None, ""
        grid = call.grid
        if grid is not None and grid.folded and len(inputs) > 1 and by_time(call.key):
            grid = replace(grid, folded="by time")
        return grid, call.doubt

    @cache
    def by_time(key: CallKey) -> bool:
        found = summary()
        if FOLDED not in found.chosen:
            found.chosen[FOLDED] = folded_by_time(model, inputs.detached(), found.calls)
        return key in found.chosen[FOLDED]

    def tokens(length: int) -> Grid | None:
        found = summary()
        if PLACES not in found.chosen:
            one = inputs.first() if found.alone else inputs
            found.chosen[PLACES] = _located(model, one.detached(), found.calls)
        located: _Places = found.chosen[PLACES]
        return located.of_tokens.get(length)

    size, of_text = tuple(inputs.x.shape[2:]), getattr(model, "joint_tokens", None)
    return Grids(size, len(inputs), look, layout, tokens, lambda: summary().sizes, of_text)


def grids_of_photo(model: nn.Module, inputs: Inputs) -> Callable[[str, int], Grid | None]:
    """From a layer, or a part of the attention in one, and the number of its tokens, to how these lie on the photo."""
    grids = grids_of(model, inputs.detached())

    def find(layer: str, length: int) -> Grid | None:
        assert grids.known is not None
        assert grids.tokens is not None
        place = place_of(layer, model)
        is_output = not place.of_attention and place.module in dict(model.named_modules())
        return grids.known(layer)[0] if is_output else grids.tokens(length)

    return find


def _calls_in_window(model: stitched.Stitched, inputs: Inputs, name: str) -> int:
    """How often a module of the segmenter is called for one window."""
    calls = summary_of(model.model, model.first(inputs)).calls
    return max(1, sum(call.name == name for call in calls))
