"""Which image each value of a tensor belongs to, where a network does not keep the images first.

Attention that has tokens before images and windows that are laid out beside each other make this hard to tell from a
shape alone: as many heads as images look like images that come second. So it is followed from call to call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from explain.engine.bytensor import ByTensor
from explain.engine.calls import Call

_TURNS = frozenset(["permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "t"])
_CUTS = frozenset(["getitem", "select", "narrow", "split", "chunk", "unbind", "tensor_split", "expand", "expand_as"])
_SHAPES = frozenset(["reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "unsqueeze", "squeeze",
                     "contiguous", "clone"])  # fmt: skip
"""Functions that keep the order of their first argument's values."""
_LAID_OUT = _TURNS | _CUTS | _SHAPES


class BatchLayout:
    """Follows which image the values of tensors belong to, for tensors whose images do not come first.

    What it tells is a tensor of image numbers, with as many dimensions and size 1 where the image does not change.

    >>> layout, x = BatchLayout(count=2), torch.zeros(2, 5, 3)
    >>> y = x.transpose(0, 1)
    >>> layout.see(Call(torch.transpose, "transpose", (x, 0, 1), {}), [0], y)
    >>> layout.of(x), layout.of(y).tolist()
    (None, [[[0], [1]]])
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._known: ByTensor[torch.Tensor] = ByTensor()
        self._seen_any = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The image of each value; None where the images come first, or it is not known."""
        return self._known.get(tensor) if self._seen_any else None

    def see(self, call: Call, dependent: Sequence[int], result: Any) -> None:
        """Note what a call has made of its arguments, of which those at the ``dependent`` places come of the images."""
        if self._count == 1 or not dependent:
            return
        given = call.flat[dependent[0]]
        if call.kind in _LAID_OUT:
            self._lay_out(call, given, result)
        elif self._seen_any and isinstance(result, torch.Tensor):
            alike = (tensor for i in dependent if (tensor := call.flat[i]).ndim == result.ndim)
            numbers = self.of(next(alike, given))
            self._note(result, numbers if numbers is not None and fits(numbers, result.shape) else None)

    def _lay_out(self, call: Call, given: torch.Tensor, result: Any) -> None:
        """Do the same with the numbers of the images."""
        known = self.of(given)
        if known is None and (call.kind not in _TURNS or given.ndim == 0 or len(given) % self._count):
            return
        numbers = first(self._count, given) if known is None else known
        numbers = numbers.expand(given.shape)
        made = numbers.reshape(result.shape) if call.kind in _SHAPES else call.made({0: numbers})
        pairs = [(result, made)] if isinstance(result, torch.Tensor) else zip(result, made, strict=True)
        for tensor, its in pairs:
            its = compact(its)
            comes_first = tensor.ndim > 0 and len(tensor) % self._count == 0 and its.shape[1:].numel() == 1
            plain = comes_first and torch.equal(its, compact(first(self._count, tensor)))
            self._note(tensor, None if plain else its)

    def _note(self, tensor: torch.Tensor, numbers: torch.Tensor | None) -> None:
        if numbers is None:
            self._known.discard(tensor)
        else:
            self._known[tensor], self._seen_any = numbers, True


def first(count: int, like: torch.Tensor) -> torch.Tensor:
    """The image numbers of a tensor that begins with the rows of the first image."""
    numbers = torch.arange(count, device=like.device, dtype=torch.int32)
    return numbers.repeat_interleave(len(like) // count).reshape(-1, *[1] * (like.ndim - 1))


def compact(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers, of size 1 along each dimension in which they do not change.

    >>> compact(torch.tensor([[0, 0], [1, 1]]))
    tensor([[0],
            [1]])
    """
    for d, (size, stride) in enumerate(zip(numbers.shape, numbers.stride(), strict=True)):
        one = numbers.narrow(d, 0, min(size, 1))
        if stride == 0 or bool((numbers == one).all()):
            numbers = one
    return numbers


def fits(numbers: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a tensor of some shape can belong to the images of these numbers."""
    return numbers.ndim == len(shape) and all(n in (1, size) for n, size in zip(numbers.shape, shape, strict=True))


def summed(values: torch.Tensor, numbers: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of the values of each image.

    >>> summed(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0, 1]]), 2)
    tensor([4., 6.])
    """
    alike = [d for d, size in enumerate(numbers.shape) if size == 1]
    rows = values.sum(alike, keepdim=True) if alike else values
    return rows.new_zeros(count).index_add_(0, numbers.flatten(), rows.flatten())


def spread(per_image: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """A value for each image, laid out as the numbers are."""
    return per_image[numbers.long()]
