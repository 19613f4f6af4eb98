"""How the maps of a network lie on its input: the grids of its layers."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from explain._utils.errors import warn
from explain._utils.modules import modules_of, submodule
from explain._utils.random_numbers import normal, seeded
from explain.data.inputs import Inputs
from explain.hooks.intervening import active_interventions
from explain.hooks.layer_names import LayerPlace, name_of_place, place_of
from explain.hooks.unwrap import sharded
from explain.layers.frames import with_layout
from explain.layers.layouts import (
    Grid,
    Grids,
    Layout,
    Size,
    find_grid,
    frames_in_batch,
    read_map,
    read_shape,
)
from explain.layers.located import (
    FOLDED,
    PLACES,
    Places,
    first_reads,
    folded_by_time,
    locate_tensors,
    other_random_numbers,
    record_calls,
    stays_in,
)
from explain.layers.placement import Placement, PlacementMode
from explain.layers.positions import UNKNOWN
from explain.layers.receptive_fields import Looks, centres, leading_to, receptive_fields
from explain.layers.recording import CallKey, ModuleCall
from explain.layers.seen import copy_of, seen_pixels
from explain.layers.stitched import Stitched
from explain.layers.summary import ForwardSummary, kept_places, summary_of
from explain.recording import Value
from explain.recording.recorder import PassRecorder
from explain.targets.answer import JointTokens


@dataclass(frozen=True)
class CellLooks:
    """Where the cells of a layer's map look; without a placement, ``behind`` says what hides it."""

    placement: Placement | None
    behind: str = ""
    lasts: bool = True
    """Whether it is the same for other photos and passes."""
    draws: bool = False
    """Whether the pass draws random numbers."""


@dataclass(frozen=True)
class _Weights:
    """The modules, weights and buffers of a network, as they were at some time."""

    modules: list[weakref.ref[nn.Module]]
    states: list[tuple[int, int]]

    @classmethod
    def of(cls, model: nn.Module) -> "_Weights":
        """The weights of a network as they are now."""
        modules = [weakref.ref(module) for module in modules_of(model)]
        return cls(modules, _states(modules))

    @property
    def are_the_same(self) -> bool:
        """Whether the parts are the same still, and nobody has written to the weights."""
        return _states(self.modules) == self.states


def _states(modules: list[weakref.ref[nn.Module]]) -> list[tuple[int, int]]:
    """Which parts some modules have, and how often each tensor of them was written to."""
    return [
        (id(part), part._version if isinstance(part, Tensor) and not part.is_inference() else 0)
        for reference in modules
        if (module := reference()) is not None
        for parts in (module._modules, module._parameters, module._buffers)
        for part in parts.values()
    ]


def share_places(model: nn.Module, copy: nn.Module) -> None:
    """Draw the cells of a copy's layers, whatever its weights, where those of ``model`` are known
    to look."""
    weights = _Weights.of(copy)
    for key, (_, placement) in kept_places(model).items():
        kept_places(copy)[key] = weights, placement


class NetworkGrids(Grids):
    """The grids of the tensors of a network for these inputs; how tokens lie is found by running
    it, once. Of a `Stitched` model, they are those of a window."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        placement: PlacementMode = "cells",
        *,
        trains: bool = False,
    ) -> None:
        """Begin to tell how the tensors of a network (of a `Stitched` one, its segmenter on the
        first window) lie on these inputs; it is run when that is first needed."""
        self._whole = model
        """The model as the caller has it; of a `Stitched` one, ``_model`` is the segmenter."""
        self._whole_inputs = inputs
        if isinstance(model, Stitched):
            inputs = model.first(inputs)
            model = model.model
        super().__init__(tuple(inputs.x.shape[2:]), len(inputs))
        self._model = model
        self._inputs = inputs
        self._placement_mode = placement
        self._of_photos: dict[str, Placement | None] = {}
        """Of layers whose cells look elsewhere in each photo."""
        self._trains = trains
        """Whether weights change from call to call, which moves cells by little."""
        self._by_shape: dict[tuple[Size, str | None, int | None], Grid | None] = {}
        """The grids that were asked for: by shape, layer and storage of an added constant."""

    @cached_property
    def _summary(self) -> ForwardSummary:
        """The summary of the network's calls, in which what is found out is kept. Shared with other
        calls on inputs of the same size."""
        return summary_of(self._model, self._inputs)

    def of_layer(self, layer: str) -> Grid | None:
        """The grid that a layer's output covers the input with, as the network's summary has it;
        None if it is no map."""
        place = self._place(layer)
        if place.part == "input":
            return self._of_input(place)
        call = self._call(layer)
        grid = None if call is None else call.grid
        if call is None or grid is None or not grid.folded or self.count == 1:
            return grid
        # the summary is of one video: how the frames of several lie in the batch shows in a run of
        # two
        chosen = self._summary.chosen
        if FOLDED not in chosen:
            chosen[FOLDED] = folded_by_time(
                self._model, self._inputs.detached(), self._summary.calls
            )
        return replace(grid, folded="by time") if call.key in chosen[FOLDED] else grid

    def doubt_about(self, layer: str) -> str:
        """The layouts that a layer's output may have, in words, if that is unclear; else empty."""
        call = self._call(layer)
        return "" if call is None else call.doubt

    def of_tokens(self, length: int) -> Grid | None:
        """The grid on which sequences of ``length`` tokens lie in this network, or None."""
        return self._places.of_tokens.get(length)

    @property
    def _places(self) -> Places:
        """Where in the photo the network's values lie; found in one run, and kept in the summary.
        Shared by all calls on inputs of the same size."""
        summary = self._summary
        if PLACES not in summary.chosen:
            inputs = self._inputs.first() if summary.alone else self._inputs
            summary.chosen[PLACES] = locate_tensors(self._model, inputs.detached(), summary.calls)
        places: Places = summary.chosen[PLACES]
        return places

    def lines(self, layer: str) -> list[Tensor] | None:
        """Where along each axis of the photo the rows and columns of a layer's map lie, from 0 to
        1; None if they lie in no such order, or it is not known."""
        call = self._call(layer)
        grid = None if call is None else call.grid
        if call is None or grid is None:
            return None
        shape, positions = self._places.of_calls.get(call.key, (call.shape, UNKNOWN))
        if not isinstance(positions, tuple):
            return None
        lines = []
        for axis, position in enumerate(positions):
            # of the first image, the mean of all channels
            of_cells = grid.spread(position.expand(shape))[0].double().mean(0)
            # a row for each of the line's places, with the cells that should all have it
            cells_of_places = of_cells.movedim(axis, 0).flatten(1)
            line = cells_of_places.mean(1)
            off = (cells_of_places - line[:, None]).abs()
            # a thousandth of the photo is rounding
            if bool((line.diff() <= 0).any()) or bool((off > 1e-3).any()):
                return None
            lines.append(line)
        return lines

    def placement(self, layer: str | None) -> Placement | None:
        """Where the cells of a layer's map are drawn; found in one run, and kept in the summary as
        long as the weights are the same. Writes through ``weight.data`` are not seen."""
        if self._placement_mode == "even" or layer is None or len(self.size) != 2:
            return None
        if layer in self._of_photos:
            return self._of_photos[layer]
        # a summary has other arguments in its key, which may move what is looked at
        kept: dict[Any, Any] = (
            self._summary.chosen if self._inputs.name else kept_places(self._model)
        )
        key = layer, self.size, self._inputs.layout
        weights, placement = kept.get(key, (None, None))
        if active_interventions(self._model):  # which may move what passes through
            weights = None
        if weights is None or not (self._trains or weights.are_the_same):
            looks = self.look(layer) or CellLooks(None)
            placement = looks.placement and looks.placement.aligned
            if placement is None and looks.behind:
                warn(
                    f"cells of layer {layer} are drawn evenly, since it is not known where they "
                    f"look behind {looks.behind}; placement='even' takes that as given"
                )
            if looks.lasts and not active_interventions(self._model):
                kept[key] = _Weights.of(self._model), placement
            else:
                self._of_photos[layer] = placement
        return placement  # type: ignore[no-any-return]

    def look(self, layer: str, *, cut: bool = False) -> CellLooks | None:
        """Where the cells of a layer's map look, found in a run; None if it has none, or it is one
        of a video. ``cut`` says that there is nothing beyond the photo to look at."""
        inputs = self._inputs.detached()
        # noise, so that this depends on no photo (unless the photo decides: see below)
        # the same in each row: an image has its place whatever others are with it
        noise = normal((1, *inputs.x.shape[1:]), seeded(0)).to(inputs.x)
        rows = noise.repeat_interleave(len(inputs.x), 0)
        of_noise = inputs.replaced(rows) if inputs.x.is_floating_point() else inputs
        first = of_noise.first() if self._summary.alone else of_noise
        looks = self._look_once(layer, first, cut=cut)
        if looks is None or looks.lasts:
            return looks
        if not looks.draws:  # each photo has its own
            return self._look_once(layer, inputs, cut=cut)
        with other_random_numbers(inputs.x):
            other_looks = self._look_once(layer, first, cut=cut)
        other_placement = other_looks and other_looks.placement
        # random numbers may move cells by less than half a cell
        if looks.placement and other_placement and looks.placement.is_beside(other_placement):
            return replace(looks, lasts=True)
        return CellLooks(None, behind="random numbers", lasts=False)

    def _look_once(self, layer: str, inputs: Inputs, *, cut: bool) -> CellLooks | None:
        """Follow where the cells of a layer's map look in a run on these inputs."""
        place = self._place(layer)
        # calls are recorded under the first name of a module that has several
        place = place._replace(module=self._first_name(place))
        if sharded(self._model):  # weights are gone after the pass
            return CellLooks(None, behind="weights that FSDP shards")
        modules = modules_of(self._model).items()
        recurrent = {name for module, name in modules if isinstance(module, nn.RNNBase)}
        noted = recurrent | {place.module}  # what recurrent layers give is for `stays_in`
        recorder, photo, values = record_calls(self._model, inputs, of=noted, partly=True)
        try:
            return self._looks_in(recorder, photo, values, layer, place, cut=cut)
        finally:
            recorder.release()

    def _looks_in(
        self,
        recorder: PassRecorder,
        photo: Value,
        values: Mapping[CallKey, Value],
        layer: str,
        place: LayerPlace,
        *,
        cut: bool,
    ) -> CellLooks | None:
        """Follow where the cells of a layer's map look in a recorded pass."""
        if place.part == "input":  # of the first call, if none is named
            value = first_reads(recorder.steps).get((place.module, place.call or 0))
            grid = self._of_input(place)
        else:
            call = self._call(layer)
            value = None if call is None else values.get(call.key)
            grid = None if call is None else call.grid
        if grid is None or grid.frames is not None:
            return None
        if value is None:
            return CellLooks(None, behind="what cannot be recorded")
        steps = leading_to(value)
        stays = stays_in(self._model, recorder.steps, values)
        looks = receptive_fields(steps, photo, stays, cut=cut)
        copy = copy_of(steps, photo)
        cells_in_photo = _laid_out(looks, value, grid) if value in looks.fields else None
        in_and_of_copy: tuple[Placement, Placement] | None = None
        if copy is not photo and not (cut or looks.by_photo):
            size = (copy.shape[2], copy.shape[3])
            of_copy = Placement(self.size, _laid_out(looks, copy, Grid("NCHW", *size)))
            # a copy of the same pixels at the same places is the photo itself
            if size != self.size or not of_copy.is_even:
                # on a regular copy, cells lie where they do on the photo; else they are followed
                cells_in_copy = None if cells_in_photo is None else of_copy.cells_at(cells_in_photo)
                if cells_in_copy is None:
                    looks_at_copy = receptive_fields(steps, copy, stays)
                    if value in looks_at_copy.fields:
                        cells_in_copy = _laid_out(looks_at_copy, value, grid)
                if cells_in_copy is not None:
                    in_copy = Placement(size, cells_in_copy).aligned
                    in_and_of_copy = in_copy, of_copy
                    if cells_in_photo is None:  # what looks at both sides of a seam
                        cells_in_photo = of_copy.centres_at(in_copy.centres)
        if cells_in_photo is None:
            behind = ", ".join(looks.unknown) or "what it does with the photo"
            return CellLooks(None, behind=behind)
        seen = seen_pixels(steps, photo, looks)
        seen = None if seen is None else seen.cpu()
        placement = Placement(self.size, cells_in_photo, seen=seen, copy=in_and_of_copy)
        lasts = not (looks.by_photo or recorder.draws)
        return CellLooks(placement, lasts=lasts, draws=recorder.draws)

    @cached_property
    def joint(self) -> JointTokens | None:
        """Where the tokens of the photo are among those that a language model reads, without extra
        ones; or None."""
        joint: JointTokens | None = getattr(self._model, "joint_tokens", None)
        # queries that look at the photo lie nowhere on it: the size stays empty
        if joint is None or joint.size or self._places.lie_nowhere(len(joint.photo)):
            return joint
        # the photo's tokens are on a grid with its aspect ratio, behind extra tokens
        grid = find_grid((1, len(joint.photo), 1), self.size)  # images, tokens, channels
        return (
            None if grid is None else joint._replace(photo=joint.photo[grid.skip :], size=grid.size)
        )

    def grid(
        self, shape: Size, layer: str | None = None, constant: int | None = None
    ) -> Grid | None:
        """Tell how a tensor of this shape covers the input, as in the base class; each answer is
        kept."""
        key = (shape, layer, constant)
        if key not in self._by_shape:
            self._by_shape[key] = self._read(shape, layer, constant)
        return self._by_shape[key]

    def _read(self, shape: Size, layer: str | None, constant: int | None) -> Grid | None:
        """How a tensor of ``shape`` covers the input: by its layer, as frames, as tokens (also by
        the address of a ``constant`` added to them), or by its shape; None if not."""
        frames = frames_in_batch(shape, self.size, self.count) if len(self.size) == 3 else None
        if layer is not None:
            reading = read_map(shape, self.size)
            # of tokens, and where a shape leaves it open, the network shows it
            if len(shape) != len(self.size) + 2 or reading.open:
                return self.of_layer(layer)
            return reading.likeliest if shape[0] == self.count else None
        # a sequence that begins with its tokens may have as many as there are frames
        if frames and (constant is None or self.count not in shape[:2]):
            return self._of_frames(shape, frames)
        if len(shape) == 3:
            return self._places.of_sequence(shape, self.count, constant)
        return super().grid(shape)

    def _of_frames(self, shape: Size, frames: int) -> Grid | None:
        """The grid of a tensor whose batch holds the ``frames`` of videos as images; None if it
        fits no map of the network, channels first or last."""
        if len(shape) == 3:
            tokens = self.of_tokens(shape[1])
            return tokens if tokens is not None and tokens.folded else None
        layouts: tuple[Layout, Layout] = ("NCHW", "NHWC")
        for layout in layouts:
            grid = find_grid((1, *shape[1:]), self.size[1:], layout)
            if grid is not None and (frames, *grid.size) in self._summary.sizes:
                return grid.folded_from(frames)
        return None

    def _place(self, layer: str) -> LayerPlace:
        """The place of a layer in the network; of a `Stitched` model in the segmenter, with its
        call counted in one window."""
        place = place_of(layer, self._whole)
        if not isinstance(self._whole, Stitched):
            return place
        place = self._whole.place_in_segmenter(place)
        if place.call is None:
            return place
        return place._replace(
            call=place.call % calls_in_window(self._whole, self._whole_inputs, place.module)
        )

    def _call(self, layer: str) -> ModuleCall | None:
        """The call in the network's summary that a layer's name stands for; None if it did not
        run."""
        place = self._place(layer)
        return self._summary.call_of(place._replace(module=self._first_name(place)))

    def _first_name(self, place: LayerPlace) -> str:
        """The first name of a place's module, which its calls are recorded under."""
        return modules_of(self._model)[submodule(self._model, place.module)]

    def _of_input(self, place: LayerPlace) -> Grid | None:
        """The grid of the first tensor that a layer is given (``name:input``)."""
        places = self._places
        # the first call, if none is named
        at_input = places.of_inputs.get((self._first_name(place), place.call or 0))
        if at_input is None:
            return None
        shape, state = at_input
        frames = frames_in_batch(shape, self.size, places.rows)
        reading = read_shape((frames or 1, *shape[1:]), self.size)
        return places.grid_of(shape, state, reading.grids)


def _laid_out(looks: Looks, value: Value, grid: Grid) -> Tensor:
    """Where the cells of a map look ``(N, h, w, 2)``, of all images alike unless photos decide."""
    together = [grid.of_channels] if looks.by_photo else [grid.of_images, grid.of_channels]
    # a part of a field has size 1 where it is the same: a grid needs the sizes of the tensor
    shape = [*value.shape]
    for dim in together:
        shape[dim] = 1
    rows, columns = (
        along.summed(lambda part: grid.spread(part.mean(together, keepdim=True).expand(shape)))
        for along in looks.fields[value]
    )
    of_axes = centres((rows, columns))[:, :, 0]  # (2, N, h, w), without channels
    return of_axes.movedim(0, -1).float().cpu()


class PhotoGrids:
    """How tokens, and the cells of maps, lie on the photos of a network, for traces and for
    interventions, which name tokens and regions."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        """Begin to tell it of the layers of a network on these inputs."""
        self._model = model
        self._grids = NetworkGrids(model, with_layout(model, inputs).detached())

    @property
    def size(self) -> Size:
        """The height and width of the photos; of videos, frames before them."""
        return self._grids.size

    def __call__(self, place: LayerPlace, shape: Size) -> Grid | None:
        """The grid on which what a layer, or a part of an attention in it, gives lies on the photo;
        None if on none."""
        layer = self._name_of_layer(place)
        if layer is not None:
            # as of these inputs, however many samples the batch has
            return self._grids.grid((self._grids.count, *shape[1:]), layer)
        if place.of_attention or len(shape) == 3:
            return self._grids.of_tokens(shape[-2])
        reading = read_map((1, *shape[1:]), self.size)
        return None if reading.open else reading.likeliest

    def placement(self, place: LayerPlace) -> Placement | None:
        """Where the cells of a layer's map look in the photo; None for evenly."""
        return self._grids.placement(self._name_of_layer(place))

    def _name_of_layer(self, place: LayerPlace) -> str | None:
        """The name of a layer; None of a part of an attention, or of what an intervention
        inserts."""
        try:
            submodule(self._model, place.module)
        except AttributeError:
            return None
        return None if place.of_attention else name_of_place(place, self._model)


def window_calls(model: Stitched, inputs: Inputs, layer: str) -> list[str]:
    """The names of the calls that a layer's name stands for in a `Stitched` model: one in each
    window. In the order of the windows, in which `Stitched.stitch_maps` takes their maps."""
    place = place_of(layer, model)
    count = calls_in_window(model, inputs, model.place_in_segmenter(place).module)
    number = count - 1 if place.call is None else place.call
    windows = model.count(tuple(inputs.x.shape[2:]))
    return [
        name_of_place(place._replace(call=window * count + number), model)
        for window in range(windows)
    ]


def calls_in_window(model: Stitched, inputs: Inputs, name: str) -> int:
    """The number of calls of a module of the segmenter for one window of a `Stitched` model. At
    least 1, also for modules that did not run, whose names are refused elsewhere."""
    calls = summary_of(model.model, model.first(inputs)).calls
    return max(1, sum(call.name == name for call in calls))
