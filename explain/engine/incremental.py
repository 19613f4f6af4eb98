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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from explain.engine.replay import PAST_AUTOGRAD, accessed_name
from explain.engine.settings import raise_unless_of_network
from explain.hooks.tracer import Tracer
from explain.relevance.calls import Call, storage_of
from explain.relevance.table import operation_name

T = TypeVar("T")
LARGEST = 0.7
"""The share of a feature map up to which a box is computed on its own."""
_POINTWISE = frozenset(["clone", "contiguous", "detach", "to", "float", "neg", "iadd", "imul", "itruediv", "maximum",
                        "minimum"])  # fmt: skip
_POINTWISE_KINDS = frozenset(["rectifier", "activation", "sum", "product", "quotient"])
_BY_CHANNEL = frozenset(["batch_norm", "prelu"])
_CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
_MAY_SHARE = frozenset([*_CASTS, "detach", "contiguous", "chunk", "split", "reshape", "reshape_as", "flatten"])
"""What may return a tensor in the memory of its input; for some of it, this depends on the layout."""
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
    changed, starts, sides = (perturbed != known[owners]).any(1), [], []
    for dim in range(1, changed.ndim):
        others = [other for other in range(1, changed.ndim) if other != dim]
        along = (changed.any(others) if others else changed).int()
        first, length = along.argmax(1), along.shape[1]
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
        self._results, self._count = results, 0
        self._boxes: Any = WeakIdKeyDictionary()
        self._whole: Any = WeakIdKeyDictionary()
        self._derived: Any = WeakIdKeyDictionary()
        self._sharing: Any = WeakIdKeyDictionary()
        """Placeholders and others that may share their memory."""
        self._boxes[x], self._whole[x] = box, x
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
        tensors = {i: t for i, t in enumerate(call.flat) if isinstance(t, Tensor)}
        boxes = {i: self._boxes[t] for i, t in tensors.items() if t in self._boxes}
        if call.name == "dropout" and call.args and call.args[-1] is False:
            return call.args[0]  # the same tensor
        self._refuse_unseen(call, tensors.values())
        is_attribute = call.name == "get"
        if call.info.has("query") and (not is_attribute or getattr(func.__self__, "__name__", "") in _ATTRIBUTES):
            return call.made()
        found = self._of_boxes(call, boxes, tensors) if boxes else None
        if found is not None:
            placed = self._placed(call, found)
            if call.name in _MAY_SHARE:
                self._note_sharing([*(tensors[i] for i in boxes), placed])
            return placed
        replaced = {i: self._as_whole(t) for i, t in tensors.items() if t in self._boxes or t in self._whole}
        memory = {storage_of(t) for t in (*replaced.values(), *(t for t in tensors.values() if t in self._sharing))}
        result = call.made(replaced)
        if replaced or any(t in self._derived for t in tensors.values()):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._derived[leaf] = True
                    shares = memory and (call.name in _MAY_SHARE or storage_of(leaf) in memory)
                    if shares and not call.in_place:
                        self._note_sharing([*(tensors[i] for i in replaced), leaf])
        if call.in_place and 0 in replaced:  # the model goes on with what it has
            if replaced[0].shape != tensors[0].shape:
                raise CannotFollowError
            self._boxes.pop(tensors[0], None)
            return tensors[0] if result is replaced[0] else result
        return result

    def _refuse_unseen(self, call: Call, tensors: Iterable[Tensor]) -> None:
        """Refuse to overwrite what shares its memory with another tensor."""
        stands_for_others = any(t in self._whole or t in self._boxes or t in self._sharing for t in tensors)
        if not stands_for_others:
            return
        written = tree_leaves(call.args[0]) if call.in_place else []
        is_shared = any(isinstance(leaf, Tensor) and leaf in self._sharing for leaf in written)
        if is_shared or len(written) > 1 or "out" in call.kwargs or accessed_name(call.function) in PAST_AUTOGRAD:
            raise CannotFollowError

    def _note_sharing(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            self._sharing[leaf] = True

    def _placed(self, call: Call, found: Box | Sequence[Box]) -> Any:
        """Give the model a placeholder for each box; of an in-place operation, the one that it has."""
        if isinstance(found, Box):
            if call.in_place:
                placeholder = call.flat[0]
                self._whole.pop(placeholder, None)
            else:
                placeholder = found.known.new_zeros(()).expand(len(found.owners), *found.known.shape[1:])
            self._boxes[placeholder] = found
            return placeholder
        return tuple(self._placed(call, each) for each in found)

    def _of_photos(self, call: Call, boxes: Mapping[int, Box]) -> Any:
        """What an operation gives for the photos, computed in the first pass that comes to it."""
        given = [boxes[i].known if i in boxes else value for i, value in enumerate(call.flat)]
        number, self._count = self._count, self._count + 1
        for function, before, result in self._results[number : number + 1]:
            if function == call.function and len(before) == len(given) and all(map(_same, before, given)):
                return result
        result = tree_map_only(Tensor, _channels_last, call.made({i: box.known for i, box in boxes.items()}))
        self._results[number:] = [(call.function, given, result)]
        return result

    def _of_boxes(
        self, call: Call, boxes: Mapping[int, Box], tensors: Mapping[int, Tensor]
    ) -> Box | Sequence[Box] | None:
        """The result of an operation as boxes; None where it needs whole feature maps."""
        if any(t in self._derived or (t in self._whole and t not in self._boxes) for t in tensors.values()):
            return None
        run = call.out_of_place() if call.in_place and 0 in boxes else call
        if run is None or (call.in_place and 0 not in boxes):
            return None
        if call.in_place and any(t.dtype != tensors[0].dtype for t in tensors.values()):
            return None  # out of place, the result might have another type
        name, first, given = call.name, next(iter(boxes.values())), call.named
        dims, others = len(first.sides), [t for i, t in tensors.items() if i not in boxes]
        if name.rstrip("123d") in ("conv", "max_pool", "avg_pool") and list(boxes) == [0] and dims == int(name[-2]):
            return self._windowed(run, first)
        if name == "batch_norm" and (given.get("training") or given.get("running_mean") is None):
            return None
        if name == "pad":
            return self._padded(run, first)
        if name in _BY_CHANNEL:
            takes_places_alone = list(boxes) == [0]
        elif name == "cat":
            takes_places_alone = given.get("dim") in (1, -dims - 1) and not others
        elif name in ("chunk", "split"):
            takes_places_alone = (*call.args[2:], call.kwargs.get("dim"))[0] in (1, -dims - 1)
        else:
            takes_places_alone = name in _POINTWISE or (call.info.kind in _POINTWISE_KINDS and name != "rrelu")
            takes_places_alone &= all(_is_constant(t, dims) for t in others) and "out" not in call.kwargs
        return self._each_value(run, boxes) if takes_places_alone else None

    def _each_value(self, call: Call, boxes: Mapping[int, Box]) -> Box | Sequence[Box] | None:
        """An operation that takes each place of the feature maps alone, in the box that holds all boxes."""
        start, sides = _around(list(boxes.values()))
        one = next(iter(boxes.values()))
        if any(box.map_sides != one.map_sides for box in boxes.values()) or not _is_small(sides, one.map_sides):
            return None
        known = self._of_photos(call, boxes)
        values = call.made({i: box.at(start, sides) for i, box in boxes.items()})
        if isinstance(values, Tensor):
            return Box(known, one.owners, start, values)
        return [Box(k, one.owners, start, v) for k, v in zip(known, values, strict=True)]

    def _padded(self, call: Call, box: Box) -> Box | None:
        pads, *more = call.args[1:]
        mode = call.kwargs.get("mode", more[0] if more else "constant")
        if mode != "constant" or min(pads) < 0 or len(pads) > 2 * len(box.sides):
            return None
        before = [*pads[::2], *[0] * (len(box.sides) - len(pads) // 2)][::-1]
        return Box(self._of_photos(call, {0: box}), box.owners, box.start + torch.tensor(before), box.values)

    def _windowed(self, call: Call, box: Box) -> Box | None:
        """A convolution or pooling, of the windows that reach into the box."""
        given, dims = call.named, len(box.sides)
        is_pool = "pool" in call.name
        kernel = _each(given["kernel_size"], dims) if is_pool else given["weight"].shape[2:]
        stride = _each(given.get("stride") or (kernel if is_pool else 1), dims)
        dilation, padding = _each(given.get("dilation", 1), dims), given.get("padding", 0)
        if call.name.startswith("avg") and (given.get("ceil_mode") or not given.get("count_include_pad", True)):
            return None
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if isinstance(padding, str):
            padding = [each // 2 if padding == "same" else 0 for each in reach]
        padding = _each(padding, dims)
        if not any(reach) and set(stride) == {1} and not any(padding):
            return self._each_value(call, {0: box})  # type: ignore[return-value]
        known = self._of_photos(call, {0: box})
        starts, sides, around = [], [], []
        for dim, (s, p, r, side) in enumerate(zip(stride, padding, reach, known.shape[2:], strict=True)):
            count = min(side, (box.sides[dim] - 1 + r) // s + 1)
            starts.append(torch.clamp(-((r - p - box.start[:, dim]) // s), 0, side - count))
            sides.append(count)
            around.append((count - 1) * s + r + 1)
        if not _is_small(sides, known.shape[2:]):
            return None
        start = torch.stack(starts, 1)
        outside = -torch.inf if call.name.startswith("max") else 0.0
        values = box.at(start * torch.tensor(stride) - torch.tensor(padding), around, outside)
        found = call.function(**{**given, "input": values, "padding": 0})
        return Box(known, box.owners, start, found)


_is_faster: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()
"""Of networks, by the kind of rows, whether incremental inference is faster; None: it cannot be used."""
_FEW = 4  # rows that are run as a whole in a trial
_WORTH_A_TRIAL = 12 * _FEW  # rows from which on a trial costs little


class IncrementalInference:
    """Runs perturbed rows incrementally where a trial shows that it is faster, and gives the same scores."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self._is_faster = _is_faster.setdefault(model, {})
        self._known = _channels_last(x)
        self._results = list[tuple[Any, list[Any], Any]]()
        self._trials = Counter[Any]()

    def run(
        self, owners: Tensor, x: Tensor, run: Callable[[int | None], T], agree: Callable[[T, T], bool], *, total: int
    ) -> T:
        """Run rows ``x`` ``(B, C, ...)`` of the photos ``owners``; ``run`` runs all of them, or only so many.

        There is no trial where it would cost much of the ``total`` number of rows.
        """
        kinds = self._is_faster
        worth_it = total >= _WORTH_A_TRIAL * (1 + self._trials.total())
        box = changed_box(self._known, owners, x) if None not in kinds else None
        if box is None:
            return run(None)
        share = math.prod(box.sides) / math.prod(box.map_sides)
        kind = (x.shape[1:], x.dtype, torch.get_num_threads(), math.ceil(8 * share))
        if not kinds.get(kind, worth_it):
            return run(None)
        began = time.perf_counter()
        try:
            with IncrementalPass(box, x, self._results) as tracer:
                result = run(None)
            tracer.fill()
        except (Exception, CannotFollowError) as error:
            raise_unless_of_network(error)
            kinds[None] = False
            return run(None)  # which raises again what is the model's
        if kind in kinds:
            return result
        between = time.perf_counter()
        few = min(_FEW, len(x))
        whole = run(few)
        if not agree(result, whole):  # some of it cannot be seen, such as scripted code
            kinds[None] = False
            return run(None)
        is_faster = (between - began) / len(x) < (time.perf_counter() - between) / few
        self._trials[kind] += 1
        if is_faster or self._trials[kind] == 2:  # the first trial also computes what is known of the photos
            kinds[kind] = is_faster
        return result


def _each(value: Any, dims: int) -> list[int]:
    found = list(value) if isinstance(value, Sequence) else [value]
    return found * dims if len(found) == 1 else found


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
