"""Feature maps that are known by the box in which a perturbation changed them: `BoxMaps`, a kind of
tensor.

A perturbed photo equals the photo outside of a box. Convolutions, poolings and operators on single
values are run on this box and what they need around it, as long as it is a small part of the
feature map; elsewhere, the feature map is that of the photo, which is computed once. Any other
operator is given whole feature maps. The result is that of a whole pass but for rounding. PyTorch
hands every operator on `BoxMaps` over to them, whatever the model is.

After Nakandala et al., "Incremental and Approximate Inference for Faster Occlusion-based Deep CNN
Explanations", SIGMOD 2019.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

LARGEST = 0.7
"""The share of a feature map up to which a box is computed on its own."""
_POINTWISE = """
    _prelu_kernel abs add celu clamp clamp_max clamp_min clone div elu exp gelu hardsigmoid
    hardswish hardtanh leaky_relu log maximum minimum mish mul neg pow relu rsub sigmoid silu
    softplus sqrt square sub tanh threshold
"""
"""Operators that take each place of feature maps alone, as `torch.ops.aten` calls them."""


@dataclass(eq=False)
class ChangedBox:
    """Feature maps of rows: ``values`` ``(B, C, *sides)`` in a box, elsewhere those of the photos.

    ``photo_maps`` ``(N, C, ...)`` are these, ``owners`` ``(B,)`` says which photo each row belongs
    to, and ``start`` ``(B, d)`` where its box begins.
    """

    photo_maps: Tensor
    owners: Tensor
    start: Tensor
    values: Tensor

    @property
    def sides(self) -> torch.Size:
        """The lengths of the box along each spatial dimension; the same for all rows."""
        return self.values.shape[2:]

    @property
    def map_sides(self) -> torch.Size:
        """The lengths of the whole feature maps along each spatial dimension."""
        return self.photo_maps.shape[2:]

    def at(self, start: Tensor, sides: Sequence[int], outside: float = 0.0) -> Tensor:
        """The values ``(B, C, *sides)`` of perturbed rows' feature maps in other boxes, which begin
        at ``start`` ``(B, d)``.

        Inside the changed box they are its values, elsewhere the photo's. Where a box reaches
        beyond the feature map, the value is the constant ``outside``, as padding is. Every operator
        on boxes reads its input through this. Part of incremental inference, in which only the
        changed boxes of feature maps are computed.
        """
        if start is self.start and tuple(sides) == self.sides:
            return self.values
        photo_rows, exists = _places(self.owners, start, sides, self.map_sides)
        filled_rows, is_kept = _places(
            torch.arange(len(start)), self.start - start, self.sides, sides
        )
        filled = _rows(self.photo_maps).index_select(0, photo_rows.flatten())
        if not exists.all():
            filled[~exists.flatten()] = outside
        if is_kept.all():
            filled.index_copy_(0, filled_rows.flatten(), _rows(self.values))
        else:
            filled[filled_rows[is_kept]] = _rows(self.values)[is_kept.flatten()]
        return filled.reshape((len(start), *sides, -1)).movedim(-1, 1)

    def whole(self) -> Tensor:
        """The whole feature maps of the perturbed rows ``(B, C, *map_sides)``: the photos' with the
        boxes put in.

        Incremental inference needs them for operators that cannot be computed in boxes.
        """
        return self.at(torch.zeros_like(self.start), self.map_sides)


def _places(
    images: Tensor, start: Tensor, sides: Sequence[int], map_sides: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The numbers of the places that boxes cover in the feature maps of ``images`` ``(B,)``, and
    whether these exist.

    Both are ``(B, *sides)``. Boxes begin at ``start`` ``(B, d)``. Places are numbered through the
    maps of all images, in the order of `_rows`; a place beyond the edge gets the number of the
    nearest one, and exists not. For incremental inference, which puts changed boxes into feature
    maps by these numbers.
    """
    place_numbers = images
    exists = torch.ones(len(images), dtype=torch.bool)
    for box_starts, side, map_side in zip(start.unbind(1), sides, map_sides, strict=True):
        # (side, B): the boxes stay the last dimension
        coordinates = torch.arange(side)[:, None] + box_starts
        exists = exists.unsqueeze(-2) & (coordinates >= 0) & (coordinates < map_side)
        place_numbers = place_numbers.unsqueeze(-2) * map_side + coordinates.clamp(0, map_side - 1)
    return place_numbers.movedim(-1, 0), exists.movedim(-1, 0)


def _rows(maps: Tensor) -> Tensor:
    """Feature maps ``(N, C, ...)`` as ``(places, C)``; a view if their channels come last in
    memory.

    Boxes of incremental inference are read and written in such rows.
    """
    return maps.movedim(1, -1).reshape(-1, maps.shape[1])


def channels_last(maps: Tensor) -> Tensor:
    """The same feature maps ``(N, C, ...)``, laid out in memory with their channels last.

    Incremental inference reads single places, whose channels then lie side by side.
    """
    return maps.movedim(1, -1).contiguous().movedim(-1, 1) if maps.ndim > 2 else maps


def _is_small(sides: Sequence[int], map_sides: Sequence[int]) -> bool:
    """Whether a box is so small a part of the feature map that computing the box alone is faster
    than the whole map.

    If it is not, incremental inference computes the whole map.
    """
    return math.prod(sides) <= LARGEST * math.prod(map_sides)


def changed_box(of_photos: Tensor, owners: Tensor, perturbed: Tensor) -> ChangedBox | None:
    """The box of pixels in which perturbed rows ``(B, C, H, W)`` differ from their photos ``(N, C,
    H, W)``.

    ``owners`` ``(B,)`` is the photo of each row. None if the box is too large a part of the photo
    to pay. The start of incremental inference.

    >>> x, perturbed = torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8)
    >>> perturbed[:, :, 2:4, 5:6] = 1
    >>> box = changed_box(x, torch.tensor([0]), perturbed)
    >>> box.start.tolist(), tuple(box.sides)
    ([[2, 5]], (2, 1))
    """
    start, sides = _changed(of_photos, owners, perturbed)
    if not _is_small(sides, of_photos.shape[2:]):
        return None
    rows = torch.arange(len(owners))
    nothing = perturbed.narrow(2, 0, 0)
    return ChangedBox(
        of_photos,
        owners,
        start,
        ChangedBox(perturbed, rows, torch.zeros_like(start), nothing).at(start, sides),
    )


def _changed(of_photos: Tensor, owners: Tensor, perturbed: Tensor) -> tuple[Tensor, list[int]]:
    """Where the changed pixels begin in each row, ``(B, d)``, and the sides of a box that holds
    those of any row.

    Boxes are moved back from the edge, so that all of their pixels exist. The first step of
    incremental inference, on pixels.
    """
    changed = (perturbed != of_photos[owners]).any(1)
    starts = []
    sides = list[int]()
    for dim in range(1, changed.ndim):
        other_dims = [other for other in range(1, changed.ndim) if other != dim]
        is_changed = (changed.any(other_dims) if other_dims else changed).int()
        first_changed = is_changed.argmax(1)
        length = is_changed.shape[1]
        end = length - is_changed.flip(1).argmax(1)
        sides.append(int((end - first_changed).where(is_changed.any(1), 1).max()))
        starts.append(first_changed.clamp(max=length - sides[-1]))
    return torch.stack(starts, 1), sides


class OperatorResult(NamedTuple):
    """An operator, its arguments and what it gave for the photos ``(N, C, ...)``."""

    function: Any
    arguments: Sequence[Any]
    maps: Tensor

    def answers(self, function: Any, arguments: Sequence[Any]) -> bool:
        """Whether this is the result for a call: of the same operator, tensors and other arguments.

        Tensors are compared by identity: a weight that was replaced makes a new call. So
        incremental inference computes each operator on the photos once for all batches.
        """
        is_same = self.function == function and len(self.arguments) == len(arguments)
        return is_same and all(map(_same, self.arguments, arguments))


@dataclass(eq=False)
class PhotoPass:
    """One pass of rows, which reads what its operators give for the photos from the ``results`` of
    earlier passes.

    ``layout`` is how the network expects its feature maps ``(N, C, h, w)`` in memory, and ``count``
    how many operators the pass has come to.
    """

    results: list[OperatorResult]
    layout: torch.memory_format = torch.contiguous_format
    count: int = 0

    def result(
        self, function: Any, arguments: Sequence[Any], compute: Callable[[], Tensor]
    ) -> Tensor:
        """What the next operator of the pass gives for the unperturbed photos, ``(N, C, ...)``:
        remembered from earlier passes.

        The network calls its operators in the same order in each pass, so they are known by their
        number. At one that differs, the result is computed, and what was remembered from there on
        is forgotten. Incremental inference fills the places outside of changed boxes with it.
        """
        number = self.count
        self.count += 1
        if number < len(self.results) and self.results[number].answers(function, arguments):
            return self.results[number].maps
        maps = channels_last(compute())
        self.results[number:] = [OperatorResult(function, arguments, maps)]
        return maps


class BoxMaps(Tensor):
    """Feature maps that are known as a box. Operators that take places alone give such maps again.

    Any other operator is given whole feature maps. Where it overwrites them, or returns another
    name of their memory, they stay whole.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
    >>> x = torch.rand(1, 3, 16, 16)
    >>> perturbed = x.repeat(2, 1, 1, 1)
    >>> perturbed[1, :, 4:6, 4:6] = 0
    >>> box = changed_box(x, torch.tensor([0, 0]), perturbed)
    >>> with torch.no_grad():
    ...     output = model(BoxMaps(box, PhotoPass([])))
    >>> torch.allclose(output, model(perturbed), atol=1e-6)
    True
    """

    box: ChangedBox | None
    _whole: Tensor | None
    _photos: PhotoPass

    @staticmethod
    def __new__(cls, box: ChangedBox, photos: PhotoPass) -> "BoxMaps":
        """Make a tensor that stands for whole feature maps ``(B, C, ...)`` of perturbed rows, but
        holds their changed box alone.

        ``photos`` is the pass that remembers the results for the unperturbed photos. Networks ask
        the tensor for its shape, strides, type and device, so these are those of whole feature
        maps. Such tensors go through the network in incremental inference.
        """
        shape = (len(box.owners), *box.photo_maps.shape[1:])
        layout = photos.layout if len(shape) == 4 else torch.contiguous_format
        strides = torch.empty(shape, device="meta", memory_format=layout).stride()
        values = box.values
        maps: BoxMaps = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=values.dtype, device=values.device
        )
        maps.box = box
        maps._whole = None
        maps._photos = photos
        return maps

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data = property(Tensor.detach)
    """Cannot be set: that would not be dispatched."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator that PyTorch dispatches on these feature maps: on their boxes if it can,
        else on whole maps.

        An operator that overwrites, such as ``relu_``, is run as its form that does not, and the
        result put into its first argument. PyTorch calls it below autograd, so hooks and modules of
        the model run as always. All of incremental inference happens here.
        """
        schema = function._schema
        name = function.overloadpacket.__name__
        maps = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, BoxMaps)]
        photos = maps[0]._photos
        is_in_place = name.endswith("_") and schema.is_mutable and args[0] is maps[0]
        if is_in_place:
            out_of_place = getattr(torch.ops.aten, name[:-1], None)
            function_of_box = getattr(out_of_place, function._overloadname, None)
        else:
            function_of_box = function
        box = None
        if function_of_box is not None and all(map_.box is not None for map_ in maps):
            box = _Operator(function_of_box, args, kwargs or {}, photos).result()
        if box is None:
            return _on_whole_maps(function, args, kwargs or {}, maps)
        if is_in_place:
            maps[0]._become(box)
            return maps[0]
        result = BoxMaps(box, photos)
        # further results of normalisations are for training only
        empty_results = len(schema.returns) - 1
        return (result, *[None] * empty_results) if empty_results else result

    def whole(self) -> Tensor:
        """The whole feature maps of the rows, ``(B, C, ...)``, as a plain tensor; made once.

        Operators may overwrite the result; the box is dropped before that.
        """
        if self._whole is None:
            assert self.box is not None
            self._whole = self.box.whole().contiguous(memory_format=self._photos.layout)
        return self._whole

    def _become(self, box: ChangedBox) -> None:
        """Take the result of an operator that overwrites these feature maps in place; they keep
        their type.

        Other names of this tensor in the model see the new values, as with plain tensors. So
        networks with operators in place can be run incrementally.
        """
        self.box = ChangedBox(
            box.photo_maps.to(self.dtype), box.owners, box.start, box.values.to(self.dtype)
        )
        self._whole = None


def _on_whole_maps(function: Any, args: Any, kwargs: Any, maps: Sequence[BoxMaps]) -> Any:
    """Run an operator on whole feature maps, where it cannot be computed in boxes alone.

    Maps that it may overwrite or alias stay whole from now on, since a box would not know of what
    is written. Results that are such maps are returned as the model's own objects. Incremental
    inference is right for any network by this, if not fast.
    """
    schema = function._schema
    if schema.is_mutable or any(value.alias_info is not None for value in schema.returns):
        for map_ in maps:  # a box would not know of what is written
            map_.whole()
            map_.box = None
    whole_args, whole_kwargs = tree_map_only(BoxMaps, BoxMaps.whole, (args, kwargs))
    result = function(*whole_args, **whole_kwargs)
    if any(map_.whole().shape != map_.shape for map_ in maps):
        raise RuntimeError(f"{function} changes the shape of feature maps")
    maps_of_model = {id(map_.whole()): map_ for map_ in maps}
    return tree_map_only(Tensor, lambda tensor: maps_of_model.get(id(tensor), tensor), result)


@dataclass(eq=False)
class _Operator:
    """A call of an operator with feature maps that are known as boxes."""

    function: Any
    args: Any
    kwargs: Any
    photos: PhotoPass

    def __post_init__(self) -> None:
        """Collect the tensors among the arguments of a network's operator, and the changed boxes of
        those that are feature maps.

        For incremental inference: `result` and the methods for kinds of operators read both lists.
        """
        self.tensors = [
            leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)
        ]
        self.boxes: list[Any] = [
            tensor.box for tensor in self.tensors if isinstance(tensor, BoxMaps)
        ]

    def result(self) -> ChangedBox | None:
        """The result of a network's operator on changed boxes of feature maps, as a box; None if it
        needs whole maps.

        Known are windows (convolution, pooling), constant padding, and operators on each place
        alone. An operator that is missing here is slower, not wrong; one that is here must be exact
        in the box.
        """
        name = self.function.overloadpacket.__name__
        plain_tensors = [tensor for tensor in self.tensors if not isinstance(tensor, BoxMaps)]
        takes_one = len(self.boxes) == 1 and isinstance(self.args[0], BoxMaps)
        dims = len(self.boxes[0].sides)
        if takes_one and name.partition("_with")[0].rstrip("123d") in (
            "convolution",
            "max_pool",
            "avg_pool",
        ):
            return self._windowed()
        if name == "constant_pad_nd":
            return self._padded()
        if name == "native_batch_norm":
            mean = self.args[3]
            training = self.args[5]
            takes_places_alone = takes_one and mean is not None and not training
        elif name == "cat":
            takes_places_alone = self.args[1:] in ((1,), (-dims - 1,)) and not plain_tensors
        else:
            takes_places_alone = name in _POINTWISE.split() and all(
                _is_constant(tensor, dims) for tensor in plain_tensors
            )
        return self._each_value() if takes_places_alone else None

    def _of_photos(self) -> Tensor:
        """The operator's result for the photos alone, ``(N, C, ...)``, remembered for all batches
        of perturbed rows.

        Called at most once for each operator of a pass, as `PhotoPass.result` counts these calls.
        For incremental inference, whose results are these outside of the changed box.
        """
        photos = self._of_boxes(lambda box: box.photo_maps)
        return self.photos.result(self.function, tree_leaves(photos), lambda: self._run(photos))

    def _of_boxes(self, tensor_of: Callable[[Any], Tensor]) -> Any:
        """The operator's arguments, with a plain tensor in the place of each tensor that is known
        as a box.

        For incremental inference: ``tensor_of`` chooses the photos' maps or the values in a box.
        """
        return tree_map_only(BoxMaps, lambda maps: tensor_of(maps.box), (self.args, self.kwargs))

    def _run(self, arguments: Any) -> Tensor:
        """Run the operator on plain tensors, and return its first result.

        For incremental inference, in which operators run on boxes or on photos.
        """
        args, kwargs = arguments
        return _first(self.function(*args, **kwargs))

    def _each_value(self) -> ChangedBox | None:
        """The box of an operator that takes each place of feature maps alone, around the boxes of
        all arguments.

        None if that box is no small part of the maps, or they differ in size. Only for operators of
        which each value depends on the same place alone. For incremental inference, as of ReLU or
        of batch norm in evaluation mode.
        """
        start, sides = _around(self.boxes)
        first_box = self.boxes[0]
        if any(box.map_sides != first_box.map_sides for box in self.boxes) or not _is_small(
            sides, first_box.map_sides
        ):
            return None
        values = self._run(self._of_boxes(lambda box: box.at(start, sides)))
        return ChangedBox(self._of_photos(), first_box.owners, start, values)

    def _padded(self) -> ChangedBox | None:
        """The box after a padding of feature maps with a constant, which only moves the box; None
        for one that crops.

        Also None for padding of other dimensions. The padded border is the same for all photos, so
        the box does not grow. For incremental inference.
        """
        (box,) = self.boxes
        pads = self.args[1]
        if min(pads) < 0 or len(pads) > 2 * len(box.sides):
            return None
        first_pads = [*pads[::2], *[0] * (len(box.sides) - len(pads) // 2)][::-1]
        return ChangedBox(
            self._of_photos(), box.owners, box.start + torch.tensor(first_pads), box.values
        )

    def _windowed(self) -> ChangedBox | None:
        """The box of a convolution or pooling: all windows that reach into the box, computed from
        what they cover.

        None for transposed convolutions, for averages that count padding apart, and if the box is
        no small part. Padding is done by `ChangedBox.at` with the pooling's or convolution's own
        value, so the operator itself gets none. The core of incremental inference: only these
        windows are computed again.
        """
        names = [argument.name for argument in self.function._schema.arguments]
        named = dict(zip(names, self.args, strict=False))
        is_pool = "kernel_size" in names
        is_average = "count_include_pad" in names
        cuts_padding = is_average and (
            named.get("ceil_mode") or not named.get("count_include_pad", True)
        )
        if cuts_padding or named.get("transposed"):
            return None
        (box,) = self.boxes
        dims = len(box.sides)
        kernel = _each(named["kernel_size"] if is_pool else named["weight"].shape[2:], dims)
        stride = _each(named.get("stride") or kernel.tolist(), dims)
        window_reach = _each(named.get("dilation", 1), dims) * (kernel - 1)
        padding = _each(named.get("padding", 0), dims)
        if not (window_reach + padding + stride - 1).any():
            return self._each_value()
        of_photos = self._of_photos()
        map_sides = torch.tensor(of_photos.shape[2:])
        sides = map_sides.minimum((torch.tensor(box.sides) - 1 + window_reach) // stride + 1)
        if not _is_small(sides.tolist(), of_photos.shape[2:]):
            return None
        first_window = -((window_reach - padding - box.start) // stride)
        start = first_window.clamp(min=0).minimum(map_sides - sides)
        input_sides = (sides - 1) * stride + window_reach + 1
        outside = -torch.inf if is_pool and not is_average else 0.0
        named[names[0]] = box.at(start * stride - padding, input_sides.tolist(), outside)
        if "padding" in named:
            named["padding"] = [0] * dims
        return ChangedBox(of_photos, box.owners, start, _first(self.function(**named)))


def _each(value: Any, dims: int) -> Tensor:
    """A number for each of ``dims`` spatial dimensions, from a list of them or a single one, as
    operators take both.

    For the windows of incremental inference.
    """
    return torch.tensor(value).expand(dims)


def _is_constant(tensor: Tensor, dims: int) -> bool:
    """Whether a tensor has one value for all rows and places (it may differ by channel), so that
    boxes may use it.

    A tensor that differs by place would have to be cut to the box first.
    """
    is_one_place = all(side == 1 for side in tensor.shape[-dims:])
    return is_one_place and (tensor.ndim < dims + 2 or len(tensor) == 1)


def _first(result: Any) -> Tensor:
    """An operator's result, or the first of several, such as the maps of a pooling that gives
    indices too.

    For incremental inference, which follows feature maps alone.
    """
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments of an operator are the same tensor, or equal values that are no
    tensors.

    So incremental inference knows whether it may reuse a result.
    """
    return one is other or (
        not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)
    )


def _around(boxes: Sequence[ChangedBox]) -> tuple[Tensor, Sequence[int]]:
    """The smallest boxes, one for each row, that hold several boxes of the row: starts ``(B, d)``
    and common sides.

    Boxes of one row are merged, never rows with each other. For operators on several feature maps
    in incremental inference, such as sums of branches.
    """
    first_box = boxes[0]
    if all(box.start is first_box.start and box.sides == first_box.sides for box in boxes):
        return first_box.start, first_box.sides
    start = torch.stack([box.start for box in boxes]).amin(0)
    ends = torch.stack([box.start + torch.tensor(box.sides) for box in boxes]).amax(0)
    sides = [int(side) for side in (ends - start).amax(0)]
    return torch.minimum(start, torch.tensor(first_box.map_sides) - torch.tensor(sides)), sides
