"""Incremental inference: what a perturbation cannot change is not computed again.

A perturbed photo equals the photo outside of a box. Convolutions, poolings and operations on
single values are run on this box and what they need around it, as long as it is a small part of the feature map;
elsewhere, the feature map is that of the photo, which is computed once. Any other operation is given whole feature
maps. The result is that of a whole pass but for rounding.

After Nakandala et al., "Incremental and Approximate Inference for Faster Occlusion-based Deep CNN Explanations", SIGMOD
2019.
"""

import math
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from explain.data.inputs import Inputs
from explain.engine.replay import PAST_AUTOGRAD, accessed_name
from explain.engine.settings import raise_unless_of_network
from explain.hooks.tracer import Tracer
from explain.relevance.calls import Call, storage_of
from explain.relevance.table import operation_name

LARGEST = 0.7
"""The share of a feature map up to which a box is computed on its own."""
_POINTWISE = frozenset(["clone", "neg", "iadd", "imul", "itruediv", "maximum", "minimum"])
_POINTWISE_KINDS = frozenset(["rectifier", "activation", "sum", "product", "quotient"])
_ATTRIBUTES = frozenset(["shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_sparse"])
"""Attributes that a placeholder has as well."""


@dataclass(eq=False)
class Box:
    """Feature maps of rows: ``values`` ``(B, C, *sides)`` in a box, elsewhere those of the photos.

    ``known`` ``(N, C, ...)`` are these, ``owners`` ``(B,)`` says which photo each row belongs to, and ``start``
    ``(B, d)`` where its box begins.
    """

    known: Tensor
    owners: Tensor
    start: Tensor
    values: Tensor

    @property
    def sides(self) -> torch.Size:
        return self.values.shape[2:]

    @property
    def map_sides(self) -> torch.Size:
        return self.known.shape[2:]

    def at(self, start: Tensor, sides: Sequence[int], outside: float = 0.0) -> Tensor:
        """The values ``(B, C, *sides)`` in other boxes; a constant where these reach beyond the feature map."""
        if start is self.start and tuple(sides) == self.sides:
            return self.values
        place, exists = _places(self.owners, start, sides, self.map_sides)
        own_place, is_kept = _places(torch.arange(len(start)), self.start - start, self.sides, sides)
        filled = _rows(self.known).index_select(0, place.flatten())
        if not exists.all():
            filled[~exists.flatten()] = outside
        if is_kept.all():
            filled.index_copy_(0, own_place.flatten(), _rows(self.values))
        else:
            filled[own_place[is_kept]] = _rows(self.values)[is_kept.flatten()]
        return filled.reshape(len(start), *sides, -1).movedim(-1, 1)

    def whole(self) -> Tensor:
        """The whole feature maps of the rows ``(B, C, *map_sides)``."""
        return self.at(torch.zeros_like(self.start), self.map_sides)


def _places(images: Tensor, start: Tensor, sides: Sequence[int], map_sides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where the places of boxes are among all places of feature maps ``(B, *sides)``, and whether they are there."""
    place = images
    exists = torch.ones(len(images), dtype=torch.bool)
    for dim, (side, map_side) in enumerate(zip(sides, map_sides, strict=True)):
        along = start[:, dim].reshape(-1, *[1] * dim, 1) + torch.arange(side)
        exists = exists.unsqueeze(-1) & (along >= 0) & (along < map_side)
        place = place.unsqueeze(-1) * map_side + along.clamp(0, map_side - 1)
    return place, exists


def _rows(maps: Tensor) -> Tensor:
    """Feature maps as ``(places, C)``; no copy if their channels come last."""
    return maps.movedim(1, -1).reshape(-1, maps.shape[1])


def _channels_last(maps: Tensor) -> Tensor:
    return maps.movedim(1, -1).contiguous().movedim(-1, 1) if maps.ndim > 2 else maps


def _is_small(sides: Sequence[int], map_sides: Sequence[int]) -> bool:
    return math.prod(sides) <= LARGEST * math.prod(map_sides)


def changed_box(known: Tensor, owners: Tensor, perturbed: Tensor) -> Box | None:
    """The box of pixels in which perturbed rows differ from their photos; None where it is too large to be of use.

    >>> x, perturbed = torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8)
    >>> perturbed[:, :, 2:4, 5:6] = 1
    >>> box = changed_box(x, torch.tensor([0]), perturbed)
    >>> box.start.tolist(), tuple(box.sides)
    ([[2, 5]], (2, 1))
    """
    start, sides = _changed(known, owners, perturbed)
    if not _is_small(sides, known.shape[2:]):
        return None
    rows = torch.arange(len(owners))
    nothing = perturbed.narrow(2, 0, 0)
    return Box(known, owners, start, Box(perturbed, rows, torch.zeros_like(start), nothing).at(start, sides))


def _changed(known: Tensor, owners: Tensor, perturbed: Tensor) -> tuple[Tensor, list[int]]:
    """Where the pixels that changed begin in each row, and the sides of a box that holds them in any row."""
    changed = (perturbed != known[owners]).any(1)
    starts = []
    sides = list[int]()
    for dim in range(1, changed.ndim):
        others = [other for other in range(1, changed.ndim) if other != dim]
        along = (changed.any(others) if others else changed).int()
        first = along.argmax(1)
        length = along.shape[1]
        last = length - along.flip(1).argmax(1)
        sides.append(int((last - first).where(along.any(1), 1).max()))
        starts.append(first.clamp(max=length - sides[-1]))
    return torch.stack(starts, 1), sides


class CannotFollowError(BaseException):
    """Ends an incremental pass in which a change would not be seen; no ``except Exception`` of the model catches it."""


class IncrementalPass(Tracer):
    """Runs a forward pass without gradients on ``x`` ``(B, C, ...)``, whose rows differ from their photos in a box.

    The model is given placeholders for what is known as a box, and every operation on them is seen here. ``results``
    keeps what the operations gave for the photos, from one pass to the next.

    A placeholder has no memory that others could share. So nothing may be overwritten that shares its memory with
    another tensor of the model.

    Raises:
        CannotFollowError: the model does so, or takes another way to a tensor's memory.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
    >>> x = torch.rand(1, 3, 16, 16)
    >>> perturbed = x.repeat(2, 1, 1, 1)
    >>> perturbed[1, :, 4:6, 4:6] = 0
    >>> box = changed_box(x, torch.tensor([0, 0]), perturbed)
    >>> with torch.no_grad(), IncrementalPass(box, perturbed, []) as tracer:
    ...     output = model(perturbed)
    >>> torch.allclose(output, model(perturbed), atol=1e-6)
    True
    """

    def __init__(self, box: Box, x: Tensor, results: list[tuple[Any, list[Any], Any]]) -> None:
        self._results = results
        self._count = 0
        self._boxes: Any = WeakIdKeyDictionary()
        """The boxes that placeholders stand for."""
        self._whole: Any = WeakIdKeyDictionary()
        """The whole feature maps of placeholders, where they were needed."""
        self._shared = set[int]()
        """The memory of whole feature maps that the model has under other names, too."""
        self._boxes[x] = box
        self._whole[x] = x
        self._contiguous = x.ndim != 4 or x.is_contiguous()

    def fill(self) -> None:
        """Put the values into all placeholders that are left, when the pass is over."""
        for tensor in [*self._boxes, *self._whole]:
            tensor.data = self._as_whole(tensor)

    def _as_whole(self, tensor: Tensor) -> Tensor:
        if tensor not in self._whole:
            whole = self._boxes[tensor].whole()
            self._whole[tensor] = whole.contiguous() if self._contiguous else whole
        found: Tensor = self._whole[tensor]
        return found

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(func, operation_name(func), args, kwargs)
        if call.name == "dropout" and args and args[-1] is False:
            return args[0]  # the same tensor
        tensors = {i: t for i, t in enumerate(call.flat) if isinstance(t, Tensor)}
        self._refuse_unseen(call, tensors.values())
        is_attribute = call.name == "get"
        if call.info.has("query") and (not is_attribute or getattr(func.__self__, "__name__", "") in _ATTRIBUTES):
            return call.made()
        boxes = {i: self._boxes[t] for i, t in tensors.items() if t in self._boxes}
        box = self._as_box(call, boxes, tensors) if boxes else None
        return self._on_whole_maps(call, tensors) if box is None else self._placeholder(call, box)

    def _on_whole_maps(self, call: Call, tensors: Mapping[int, Tensor]) -> Any:
        """Run an operation on whole feature maps in place of the placeholders."""
        replaced = {i: self._as_whole(t) for i, t in tensors.items() if t in self._boxes or t in self._whole}
        memory = {storage_of(t) for t in replaced.values()}
        result = call.made(replaced)
        if call.in_place and 0 in replaced:  # the model goes on with what it has
            if replaced[0].shape != tensors[0].shape:
                raise CannotFollowError
            self._boxes.pop(tensors[0], None)
            return tensors[0] if result is replaced[0] else result
        if memory:
            self._shared |= memory & {storage_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _refuse_unseen(self, call: Call, tensors: Collection[Tensor]) -> None:
        """Refuse to overwrite what the model has under several names, of which one may be a placeholder."""
        memory = [storage_of(self._whole.get(tensor, tensor)) for tensor in tensors]
        if call.in_place and memory[0] in self._shared:
            raise CannotFollowError
        writes_several = call.in_place and len(tree_leaves(call.args[0])) > 1
        if writes_several or "out" in call.kwargs or accessed_name(call.function) in PAST_AUTOGRAD:
            stands_in = any(tensor in self._boxes or tensor in self._whole for tensor in tensors)
            if stands_in or not self._shared.isdisjoint(memory):
                raise CannotFollowError

    def _placeholder(self, call: Call, box: Box) -> Tensor:
        """Give the model a placeholder for a box; of an in-place operation, the one that it has."""
        placeholder: Tensor
        if call.in_place:
            placeholder = call.flat[0]
            self._whole.pop(placeholder, None)
        else:
            placeholder = box.known.new_zeros(()).expand(len(box.owners), *box.known.shape[1:])
        self._boxes[placeholder] = box
        return placeholder

    def _of_photos(self, call: Call, boxes: Mapping[int, Box]) -> Any:
        """What an operation gives for the photos, computed in the first pass that comes to it."""
        given = [boxes[i].known if i in boxes else value for i, value in enumerate(call.flat)]
        number = self._count
        self._count += 1
        for function, before, result in self._results[number : number + 1]:
            if function == call.function and len(before) == len(given) and all(map(_same, before, given)):
                return result
        result = tree_map_only(Tensor, _channels_last, call.made({i: box.known for i, box in boxes.items()}))
        self._results[number:] = [(call.function, given, result)]
        return result

    def _as_box(self, call: Call, boxes: Mapping[int, Box], tensors: Mapping[int, Tensor]) -> Box | None:
        """The result of an operation as a box; None where it needs whole feature maps."""
        if any(t in self._whole and t not in self._boxes for t in tensors.values()):
            return None
        run: Call | None = call
        if call.in_place:  # out of place, the result might have another type
            is_cast = any(t.dtype != tensors[0].dtype for t in tensors.values())
            run = None if is_cast or 0 not in boxes else call.out_of_place()
        if run is None:
            return None
        name = call.name
        arguments = call.named
        others = [tensor for i, tensor in tensors.items() if i not in boxes]
        first = next(iter(boxes.values()))
        dims = len(first.sides)
        of_first_alone = list(boxes) == [0]
        if name.rstrip("123d") in ("conv", "max_pool", "avg_pool"):
            return self._windowed(run, first) if of_first_alone and dims == int(name[-2]) else None
        if name == "pad":
            return self._padded(run, first)
        if name == "batch_norm":
            by_own_statistics = arguments.get("training") or arguments.get("running_mean") is None
            takes_places_alone = of_first_alone and not by_own_statistics
        elif name == "prelu":
            takes_places_alone = of_first_alone
        elif name == "cat":
            takes_places_alone = arguments.get("dim") in (1, -dims - 1) and not others
        else:
            is_pointwise = name in _POINTWISE or (call.info.kind in _POINTWISE_KINDS and name != "rrelu")
            are_constants = all(_is_constant(tensor, dims) for tensor in others)
            takes_places_alone = is_pointwise and are_constants and "out" not in call.kwargs
        return self._each_value(run, boxes) if takes_places_alone else None

    def _each_value(self, call: Call, boxes: Mapping[int, Box]) -> Box | None:
        """An operation that takes each place of the feature maps alone, in the box that holds all boxes."""
        start, sides = _around(list(boxes.values()))
        one = next(iter(boxes.values()))
        if any(box.map_sides != one.map_sides for box in boxes.values()) or not _is_small(sides, one.map_sides):
            return None
        known = self._of_photos(call, boxes)
        values = call.made({i: box.at(start, sides) for i, box in boxes.items()})
        return Box(known, one.owners, start, values)

    def _padded(self, call: Call, box: Box) -> Box | None:
        pads, *more = call.args[1:]
        mode = call.kwargs.get("mode", more[0] if more else "constant")
        if mode != "constant" or min(pads) < 0 or len(pads) > 2 * len(box.sides):
            return None
        before = [*pads[::2], *[0] * (len(box.sides) - len(pads) // 2)][::-1]
        return Box(self._of_photos(call, {0: box}), box.owners, box.start + torch.tensor(before), box.values)

    def _windowed(self, call: Call, box: Box) -> Box | None:
        """A convolution or pooling, of the windows that reach into the box."""
        arguments = call.named
        if call.name.startswith("avg"):
            counts_padding = arguments.get("count_include_pad", True)
            if arguments.get("ceil_mode") or not counts_padding:
                return None
        dims = len(box.sides)
        is_pool = "pool" in call.name
        kernel = _each(arguments["kernel_size"] if is_pool else arguments["weight"].shape[2:], dims)
        stride = _each(arguments.get("stride") or (kernel.tolist() if is_pool else 1), dims)
        reach = _each(arguments.get("dilation", 1), dims) * (kernel - 1)
        named = {"same": reach // 2, "valid": 0 * reach}
        padding = arguments.get("padding", 0)
        padding = named[padding] if isinstance(padding, str) else _each(padding, dims)
        if not (reach + padding + stride - 1).any():
            return self._each_value(call, {0: box})
        known = self._of_photos(call, {0: box})
        map_sides = torch.tensor(known.shape[2:])
        sides = map_sides.minimum((torch.tensor(box.sides) - 1 + reach) // stride + 1)
        if not _is_small(sides.tolist(), known.shape[2:]):
            return None
        first = -((reach - padding - box.start) // stride)
        start = first.clamp(min=0).minimum(map_sides - sides)
        around = (sides - 1) * stride + reach + 1
        outside = -torch.inf if call.name.startswith("max") else 0.0
        values = box.at(start * stride - padding, around.tolist(), outside)
        return Box(known, box.owners, start, call.function(**{**arguments, "input": values, "padding": 0}))


_is_faster: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()
"""Of networks, by the kind of rows, whether incremental inference is right and faster."""
FEW = 4
"""Rows that are run as a whole in a trial."""
WORTH_A_TRIAL = 12 * FEW  # rows from which on a trial costs little


class IncrementalInference:
    """Runs perturbed rows incrementally where a trial shows that it is faster, and gives the same scores."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self._model = model
        self._is_faster = _is_faster.setdefault(model, {})
        self._photos = _channels_last(x)
        self._results = list[tuple[Any, list[Any], Any]]()

    def is_faster(self, owners: Tensor, inputs: Inputs, agree: Callable[[Any, Any], bool]) -> bool:
        """Whether it is right and faster for rows like these of the photos ``owners``, which are run in a trial.

        ``agree`` compares an output with that for the first `FEW` of the rows.
        """
        box = changed_box(self._photos, owners, inputs.x)
        if box is None:
            return False
        kind = _kind(box)
        if kind not in self._is_faster:
            self._is_faster[kind] = self._try(box, inputs, agree)
        return self._is_faster[kind]

    def output(self, owners: Tensor, inputs: Inputs) -> Any:
        """What the network gives for perturbed rows of the photos ``owners``."""
        box = changed_box(self._photos, owners, inputs.x)
        output = None
        if box is not None and self._is_faster.get(_kind(box)):
            output = self._follow(box, inputs)
        return inputs.call(self._model) if output is None else output

    def _try(self, box: Box, inputs: Inputs, agree: Callable[[Any, Any], bool]) -> bool:
        if self._follow(box, inputs) is None:  # which also computes what is known of the photos
            return False
        count = min(FEW, len(box.owners))
        few = inputs.rows(torch.arange(count))
        began = time.perf_counter()
        output = self._follow(box, inputs)
        between = time.perf_counter()
        expected = few.call(self._model)
        ended = time.perf_counter()
        is_faster = (between - began) / len(box.owners) < (ended - between) / count
        return is_faster and output is not None and agree(output, expected)  # some code cannot be seen, as of scripts

    def _follow(self, box: Box, inputs: Inputs) -> Any:
        """The output, computed incrementally; None where that fails for any reason."""
        try:
            with IncrementalPass(box, inputs.x, self._results) as tracer:
                output = inputs.call(self._model)
            tracer.fill()
        except (Exception, CannotFollowError) as error:
            raise_unless_of_network(error)
            return None
        return output


def _kind(box: Box) -> Any:
    """What decides how long rows take in a network: the size of photos, and of the boxes in which they changed."""
    share = math.prod(box.sides) / math.prod(box.map_sides)
    return box.known.shape[1:], box.known.dtype, torch.get_num_threads(), math.ceil(8 * share)


def _each(value: Any, dims: int) -> Tensor:
    """A value for each dimension: the numbers themselves, or the only one for all."""
    return torch.tensor(value).expand(dims)


def _is_constant(tensor: Tensor, dims: int) -> bool:
    """Whether a tensor has the same value for all rows and places."""
    along = all(side == 1 for side in tensor.shape[-dims:])
    return along and (tensor.ndim < dims + 2 or len(tensor) == 1)


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other))


def _around(boxes: Sequence[Box]) -> tuple[Tensor, Sequence[int]]:
    """The smallest boxes that hold some boxes of each row: where they begin, and their sides."""
    one = boxes[0]
    if all(box.start is one.start and box.sides == one.sides for box in boxes):
        return one.start, one.sides
    start = torch.stack([box.start for box in boxes]).amin(0)
    ends = torch.stack([box.start + torch.tensor(box.sides) for box in boxes]).amax(0)
    sides = [int(side) for side in (ends - start).amax(0)]
    return torch.minimum(start, torch.tensor(one.map_sides) - torch.tensor(sides)), sides
