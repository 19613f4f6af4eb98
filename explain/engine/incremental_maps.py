"""Feature maps that are known by the box in which a perturbation changed them: `BoxMaps`, a kind of
tensor.

A perturbed image equals the image outside of a box. Convolutions, poolings and operators on single
values are run on this box and what they need around it, as long as it is a small part of the
feature map; elsewhere, the feature map is that of the image, which is computed once. Any other
operator is given whole feature maps. The result is that of a whole pass but for rounding. PyTorch
hands every operator on `BoxMaps` over to them, whatever the model is.

After Nakandala et al., "Incremental and Approximate Inference for Faster Occlusion-based Deep CNN
Explanations", SIGMOD 2019.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from explain.recording.operations import known_operation
from explain.recording.torch_internals import facts_of, writes_of

LARGEST = 0.7
"""The share of a feature map up to which a box is computed on its own."""


@dataclass(eq=False)
class ChangedBox:
    """Feature maps of samples: ``values`` ``(B, C, *sides)`` in a box, elsewhere those of the
    images."""

    image_maps: Tensor
    """``(N, C, ...)``."""
    owners: Tensor
    """Which image each sample belongs to, ``(B,)``."""
    start: Tensor
    """Where the box of each sample begins, ``(B, d)``."""
    values: Tensor

    @property
    def sides(self) -> torch.Size:
        """The lengths of the box along each spatial dimension; the same for all samples."""
        return self.values.shape[2:]

    @property
    def map_sides(self) -> torch.Size:
        """The lengths of the whole feature maps along each spatial dimension."""
        return self.image_maps.shape[2:]

    def at(self, start: Tensor, sides: Sequence[int], outside: float = 0.0) -> Tensor:
        """The values ``(B, C, *sides)`` of samples' feature maps in other boxes, which begin at
        ``start`` ``(B, d)``; ``outside``, as padding is, where a box reaches beyond the map."""
        if start is self.start and tuple(sides) == self.sides:
            return self.values
        # the new boxes are filled with what the images have there, then with what changed: the
        # places of this box, seen from where the new ones begin, that lie in these
        image_rows, exists = _places(self.owners, start, sides, self.map_sides)
        filled_rows, is_kept = _places(
            torch.arange(len(start)), self.start - start, self.sides, sides
        )
        filled = _rows(self.image_maps).index_select(0, image_rows.flatten())
        if not exists.all():
            filled[~exists.flatten()] = outside
        if is_kept.all():  # all of this box lies in the new ones
            filled.index_copy_(0, filled_rows.flatten(), _rows(self.values))
        else:
            filled[filled_rows[is_kept]] = _rows(self.values)[is_kept.flatten()]
        return filled.reshape((len(start), *sides, -1)).movedim(-1, 1)

    def whole(self) -> Tensor:
        """The whole feature maps of the perturbed samples ``(B, C, *map_sides)``: the images' with
        the boxes put in."""
        return self.at(torch.zeros_like(self.start), self.map_sides)


def _places(
    images: Tensor, start: Tensor, sides: Sequence[int], map_sides: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The numbers of the places that boxes, which begin at ``start`` ``(B, d)``, cover in the
    feature maps of ``images`` ``(B,)``, and whether these exist: both ``(B, *sides)``."""
    place_numbers = images
    exists = torch.ones(len(images), dtype=torch.bool)
    for box_starts, side, map_side in zip(start.unbind(1), sides, map_sides, strict=True):
        # (side, B): the boxes stay the last dimension
        coordinates = torch.arange(side)[:, None] + box_starts
        exists = exists.unsqueeze(-2) & (coordinates >= 0) & (coordinates < map_side)
        # numbered through the maps of all images, in the order of `_rows`; a place beyond the edge
        # gets the number of the nearest one
        place_numbers = place_numbers.unsqueeze(-2) * map_side + coordinates.clamp(0, map_side - 1)
    return place_numbers.movedim(-1, 0), exists.movedim(-1, 0)


def _rows(maps: Tensor) -> Tensor:
    """Feature maps ``(N, C, ...)`` as ``(places, C)``; a view if their channels come last in
    memory. Boxes of incremental inference are read and written in such rows."""
    return maps.movedim(1, -1).reshape(-1, maps.shape[1])


def channels_last(maps: Tensor) -> Tensor:
    """The same feature maps ``(N, C, ...)``, laid out in memory with their channels last.
    Incremental inference reads single places, whose channels then lie side by side."""
    return maps.movedim(1, -1).contiguous().movedim(-1, 1) if maps.ndim > 2 else maps


def _is_small(sides: Sequence[int], map_sides: Sequence[int]) -> bool:
    """Whether a box is so small a part of the feature map that computing the box alone is faster
    than the whole map. If it is not, incremental inference computes the whole map."""
    return math.prod(sides) <= LARGEST * math.prod(map_sides)


def changed_box(of_images: Tensor, owners: Tensor, perturbed: Tensor) -> ChangedBox | None:
    """The box of pixels in which perturbed samples ``(B, C, H, W)`` differ from their images
    ``(N, C, H, W)``; None if it is too large a part of the image to pay."""
    start, sides = _changed(of_images, owners, perturbed)
    if not _is_small(sides, of_images.shape[2:]):
        return None
    # The values in the box are cut out of the samples by `at`, which cuts boxes out of maps: here
    # the samples are the maps, each of its own, and nothing is changed in them, in an empty box.
    unchanged_samples = ChangedBox(
        image_maps=perturbed,
        owners=torch.arange(len(owners)),
        start=torch.zeros_like(start),
        values=perturbed.narrow(2, 0, 0),
    )
    return ChangedBox(of_images, owners, start, unchanged_samples.at(start, sides))


def _changed(of_images: Tensor, owners: Tensor, perturbed: Tensor) -> tuple[Tensor, list[int]]:
    """Where the changed pixels begin in each sample, ``(B, d)``, and the sides of a box that holds
    those of any sample, moved back from the edge."""
    changed = (perturbed != of_images[owners]).any(1)  # in any channel: (B, *sides)
    starts = []
    sides = list[int]()
    for dim in range(1, changed.ndim):
        other_dims = [other for other in range(1, changed.ndim) if other != dim]
        is_changed = (changed.any(other_dims) if other_dims else changed).int()
        # argmax gives the first of the largest
        first_changed = is_changed.argmax(1)
        length = is_changed.shape[1]
        end = length - is_changed.flip(1).argmax(1)
        # a sample that equals its image gets the smallest box
        sides.append(int((end - first_changed).where(is_changed.any(1), 1).max()))
        starts.append(first_changed.clamp(max=length - sides[-1]))
    return torch.stack(starts, 1), sides


@dataclass(eq=False)
class ImagePass:
    """One pass of samples, which reads what its operators give for the images from the ``results``
    of earlier passes."""

    results: list[tuple[list[Any], Any, Tensor]]
    """Each call of an operator: what it is known by, its arguments, and what it gave for the
    images."""
    layout: torch.memory_format = torch.contiguous_format
    """How the network expects its feature maps ``(N, C, h, w)`` in memory."""
    count: int = 0
    """How many operators the pass has come to."""

    def result(self, operator: Any, arguments: Any) -> Tensor:
        """What the next operator of the pass gives for the images, ``(N, C, ...)``: remembered from
        earlier passes, or computed."""
        # Operators come in the same order in each pass, so they are known by their number. At one
        # that differs, as by a weight that was replaced, all remembered from there on is forgotten.
        # Tensors are known by their ids, which stay theirs, since the arguments are kept.
        key = [operator, *tree_leaves(tree_map_only(Tensor, id, arguments))]
        remembered = self.results[self.count : self.count + 1]  # empty where no pass has come yet
        if [call[0] for call in remembered] != [key]:
            maps = channels_last(_first(operator, arguments))
            self.results[self.count :] = [(key, arguments, maps)]
        self.count += 1
        return self.results[self.count - 1][-1]


def _first(operator: Any, arguments: Any) -> Tensor:
    """What an operator gives for plain tensors: the first of its results, such as the maps of a
    pooling that gives indices too."""
    args, kwargs = arguments
    result = operator(*args, **kwargs)
    first: Tensor = result[0] if isinstance(result, tuple) else result
    return first


class BoxMaps(Tensor):
    """Feature maps that are known as a box. Operators that take places alone give such maps again;
    any other is given whole maps, which stay whole where it overwrites or aliases them."""

    box: ChangedBox | None  # None once the whole maps may have been written to
    _whole: Tensor | None  # what `whole` has made
    _images: ImagePass

    @staticmethod
    def __new__(cls, box: ChangedBox, images: ImagePass) -> "BoxMaps":
        """Make a tensor with the shape, strides, type and device of whole feature maps ``(B, C,
        ...)`` of perturbed samples, which holds their changed box alone."""
        shape = (len(box.owners), *box.image_maps.shape[1:])
        layout = images.layout if len(shape) == 4 else torch.contiguous_format
        strides = torch.empty(shape, device="meta", memory_format=layout).stride()
        values = box.values
        maps: BoxMaps = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=values.dtype, device=values.device
        )
        maps.box = box
        maps._whole = None
        maps._images = images
        return maps

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data = property(Tensor.detach)
    """Cannot be set: that would not be dispatched."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the boxes of these feature maps if it can, else on whole maps. One
        that overwrites runs as its form that does not, and the result is put in."""
        kwargs = kwargs or {}
        maps = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, BoxMaps)]
        images = maps[0]._images
        facts = facts_of(operator)
        writes = writes_of(facts, args)
        is_in_place = writes == (0,) and args[0] is maps[0]
        # other writes cannot be run on boxes
        on_boxes = None if writes else operator
        if is_in_place:  # the name in its facts is that without the end of the in-place form
            out_of_place = getattr(torch.ops.aten, facts.name, None)
            on_boxes = getattr(out_of_place, operator._overloadname, None)
        box = None
        if on_boxes is not None and all(map_.box is not None for map_ in maps):
            box = _box_of(_BoxCall(on_boxes, args, kwargs, images))
        if box is None:
            return _on_whole_maps(operator, args, kwargs, maps)
        if is_in_place:
            maps[0]._become(box)
            return maps[0]
        result = BoxMaps(box, images)
        # further results of normalisations are for training only
        empty_results = len(operator._schema.returns) - 1
        return (result, *[None] * empty_results) if empty_results else result

    def whole(self) -> Tensor:
        """The whole feature maps of the samples, ``(B, C, ...)``, as a plain tensor; made once.
        Operators may overwrite the result; the box is dropped before that."""
        if self._whole is None:
            assert self.box is not None
            self._whole = self.box.whole().contiguous(memory_format=self._images.layout)
        return self._whole

    def _become(self, box: ChangedBox) -> None:
        """Take the result of an operator that overwrites these feature maps in place; they keep
        their type."""
        self.box = replace(
            box, image_maps=box.image_maps.to(self.dtype), values=box.values.to(self.dtype)
        )
        self._whole = None


def _on_whole_maps(function: Any, args: Any, kwargs: Any, maps: Sequence[BoxMaps]) -> Any:
    """Run an operator on whole feature maps, where it cannot be computed in boxes alone. Results
    that are such maps are returned as the model's own objects."""
    schema = function._schema
    if schema.is_mutable or any(value.alias_info is not None for value in schema.returns):
        for map_ in maps:  # a box would not know of what is written
            map_.whole()
            map_.box = None
    whole_args, whole_kwargs = tree_map_only(BoxMaps, BoxMaps.whole, (args, kwargs))
    result = function(*whole_args, **whole_kwargs)
    # `BoxMaps` have the shape that they were made with, whatever is done to their whole maps
    if any(map_.whole().shape != map_.shape for map_ in maps):
        raise RuntimeError(f"{function} changes the shape of feature maps")
    maps_of_model = {id(map_.whole()): map_ for map_ in maps}
    return tree_map_only(Tensor, lambda tensor: maps_of_model.get(id(tensor), tensor), result)


class _BoxCall:
    """A call of an operator with feature maps that are known as boxes."""

    def __init__(self, operator: Any, args: Any, kwargs: Any, images: ImagePass) -> None:
        self.operator = operator
        self.args = args
        self._kwargs = kwargs
        self._images = images
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.boxes: list[Any] = [map_.box for map_ in tensors if isinstance(map_, BoxMaps)]
        self.plain_tensors = [tensor for tensor in tensors if not isinstance(tensor, BoxMaps)]

    def on(self, tensor_of: Callable[[Any], Tensor]) -> Any:
        """The operator's arguments, with a plain tensor in the place of each box."""
        arguments = self.args, self._kwargs
        return tree_map_only(BoxMaps, lambda maps: tensor_of(maps.box), arguments)

    def of_images(self) -> Tensor:
        """What the operator gives for the images ``(N, C, ...)``, remembered for all batches of
        perturbed samples; asked for once in each pass."""
        return self._images.result(self.operator, self.on(lambda box: box.image_maps))


def _box_of(call: _BoxCall) -> ChangedBox | None:
    """The result of an operator on changed boxes of feature maps, as a box; None if it needs whole
    maps. One that is missing here is slower, not wrong."""
    facts = facts_of(call.operator)
    operation = known_operation(facts.name)
    dims = len(call.boxes[0].sides)
    # its feature maps are known as a box, and weights are plain
    takes_one = len(call.boxes) == 1 and isinstance(call.args[0], BoxMaps)
    if takes_one and (operation.kind == "convolution" or operation.has("pools")):
        return _windows(call)
    if facts.name == "constant_pad_nd":
        return _padded(call)
    if operation.kind == "batchnorm":  # with running statistics, not those of the batch
        mean = call.args[3]
        training = call.args[5]
        is_by_value = takes_one and mean is not None and not training
    elif facts.name == "cat":  # along channels, counted from either end
        is_by_value = call.args[1:] in ((1,), (-dims - 1,)) and not call.plain_tensors
    else:
        has_tag = torch.Tag.pointwise in call.operator.tags
        is_activation = operation.kind in ("activation", "rectifier")
        is_by_value = (has_tag or is_activation) and not facts.is_random
        is_by_value &= all(_is_constant(tensor, dims) for tensor in call.plain_tensors)
    return _values(call) if is_by_value else None


def _values(call: _BoxCall) -> ChangedBox | None:
    """The box of an operator that takes each place of feature maps alone, around the boxes of all
    arguments. None if that box is no small part of the maps, or they differ in size."""
    start, sides = _around(call.boxes)
    first_box = call.boxes[0]
    is_one_size = all(box.map_sides == first_box.map_sides for box in call.boxes)
    if not is_one_size or not _is_small(sides, first_box.map_sides):
        return None
    values = _first(call.operator, call.on(lambda box: box.at(start, sides)))
    return ChangedBox(call.of_images(), first_box.owners, start, values)


def _padded(call: _BoxCall) -> ChangedBox | None:
    """The box after a padding of feature maps with a constant, which only moves the box, since the
    border is the same for all images; None where it crops, or pads other dimensions."""
    (box,) = call.boxes
    pads = call.args[1]
    if min(pads) < 0 or len(pads) > 2 * len(box.sides):
        return None
    # pads come in pairs, before and after a dimension, from the last one on; some may be left out
    first_pads = [*pads[::2], *[0] * (len(box.sides) - len(pads) // 2)][::-1]
    start = box.start + torch.tensor(first_pads)
    return ChangedBox(call.of_images(), box.owners, start, box.values)


def _windows(call: _BoxCall) -> ChangedBox | None:
    """The box of a convolution or pooling: all windows that reach into the box, computed from what
    they cover. None where windows are no regular grid, and if the box is no small part."""
    names = [argument.name for argument in call.operator._schema.arguments]
    named = dict(zip(names, call.args, strict=False))
    is_pool = "kernel_size" in names
    is_average = "count_include_pad" in names
    cuts_padding = is_average and (
        named.get("ceil_mode") or not named.get("count_include_pad", True)
    )
    # transposed convolutions, no regular grid, averages that count padding apart
    if "stride" not in names or cuts_padding or named.get("transposed"):
        return None
    (box,) = call.boxes
    dims = len(box.sides)
    kernel = _each(named["kernel_size"] if is_pool else named["weight"].shape[2:], dims)
    stride = _each(named.get("stride") or kernel.tolist(), dims)
    # how far the last place of a window lies behind its first
    window_reach = _each(named.get("dilation", 1), dims) * (kernel - 1)
    padding = _each(named.get("padding", 0), dims)
    is_one_place = not (window_reach + padding + stride - 1).any()
    if is_one_place:  # such as a convolution of 1 x 1
        return _values(call)
    of_images = call.of_images()
    map_sides = torch.tensor(of_images.shape[2:])
    # as many windows reach into the box at most, and all of them into the map
    sides = map_sides.minimum((torch.tensor(box.sides) - 1 + window_reach) // stride + 1)
    if not _is_small(sides.tolist(), of_images.shape[2:]):
        return None
    # the first window whose last place is in the box: window i begins at i * stride - padding; with
    # the two signs, the quotient is rounded up
    first_window = -((window_reach - padding - box.start) // stride)
    start = first_window.clamp(min=0).minimum(map_sides - sides)
    input_sides = (sides - 1) * stride + window_reach + 1
    outside = -torch.inf if is_pool and not is_average else 0.0
    # padding is done here, with the operator's own value, and the operator itself gets none
    named[names[0]] = box.at(start * stride - padding, input_sides.tolist(), outside)
    if "padding" in named:
        named["padding"] = [0] * dims
    return ChangedBox(of_images, box.owners, start, _first(call.operator, ((), named)))


def _each(value: Any, dims: int) -> Tensor:
    """A number for each of ``dims`` spatial dimensions, from a list of them or a single one, as
    operators take both."""
    return torch.tensor(value).expand(dims)


def _is_constant(tensor: Tensor, dims: int) -> bool:
    """Whether a tensor has one value for all samples and places (it may differ by channel), so that
    boxes may use it."""
    channels = tensor.shape[-dims - 1] if tensor.ndim > dims else 1
    return tensor.numel() == channels


def _around(boxes: Sequence[ChangedBox]) -> tuple[Tensor, Sequence[int]]:
    """The smallest boxes, one for each sample, that hold several boxes of the sample: starts
    ``(B, d)`` and common sides."""
    first_box = boxes[0]
    if all(box.start is first_box.start and box.sides == first_box.sides for box in boxes):
        return first_box.start, first_box.sides
    start = torch.stack([box.start for box in boxes]).amin(0)
    ends = torch.stack([box.start + torch.tensor(box.sides) for box in boxes]).amax(0)
    sides = [int(side) for side in (ends - start).amax(0)]
    # moved back where the common sides would reach beyond the map
    latest_start = torch.tensor(first_box.map_sides) - torch.tensor(sides)
    return torch.minimum(start, latest_start), sides
