"""Which image each value of a tensor belongs to, where a network does not keep the images first.

Attention that has tokens before images, windows that are laid out beside each other, images that
are run one by one or twice make this hard to tell from a shape alone: as many heads as images look
like images that come second. So it is followed from call to call.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from explain.recording.moves import compact, fits
from explain.relevance.calls import Call, along


class BatchLayout:
    """Follows which image the values of tensors belong to, for tensors whose images do not come
    first.

    What it tells is a tensor of image numbers, with as many dimensions and size 1 where the image
    does not change.

    >>> layout, x = BatchLayout(count=2), torch.zeros(2, 5, 3)
    >>> y = x.transpose(0, 1)
    >>> layout.see(Call(torch.transpose, "transpose", (x, 0, 1), {}), [0], y)
    >>> layout.of(x), layout.of(y).tolist()
    (None, [[[0], [1]]])
    """

    def __init__(self, count: int) -> None:
        """Start a forward pass on ``count`` images; until `see` tells otherwise, tensors have the
        images first."""
        self._count = count
        self._known: Any = WeakIdKeyDictionary()
        self._seen_any = False

    def of(self, tensor: Tensor) -> Tensor | None:
        """The number of the image that each value of a tensor belongs to; None where the images
        come first, or it is not known.

        Relevance is added up for each image by it.
        """
        return self._known.get(tensor) if self._seen_any else None

    def note_same(self, tensor: Tensor, copy: Tensor) -> None:
        """Note that the values of ``copy`` belong to the images of those of ``tensor``."""
        numbers = self.of(tensor)
        if numbers is not None:
            self._known[copy] = numbers

    def see(self, call: Call, dependent: Sequence[int], result: Any) -> None:
        """Follow the image numbers through a call that has been made.

        The step recorder calls this for every call on the explained input, in the order of the
        forward pass. ``dependent`` are the places of the arguments that depend on the images; other
        arguments are constants.
        """
        if self._count == 1 or not dependent:
            return
        with torch._C.DisableTorchFunction():  # other recorders are not to see the numbers
            self._follow(call, dependent, result)

    def _follow(self, call: Call, dependent: Sequence[int], result: Any) -> None:
        """Note the image numbers of each result of a call."""
        source = call.flat[dependent[0]]
        if call.info.kind == "sampling" and isinstance(result, tuple):
            result = result[0]  # the pooled boxes; the other result is indices
        if call.info.has("joins"):
            self._note(result, self._joined(call, dependent))
        elif call.info.has("moves"):
            numbers = self._numbers(source) if dependent[0] == 0 else None
            if numbers is not None:  # move the image numbers as the values are moved
                results = [result] if isinstance(result, Tensor) else result
                labels = moved_labels(call, {0: numbers.expand(source.shape)})
                for tensor, image_numbers in zip(results, labels, strict=True):
                    self._note(tensor, image_numbers)
        elif isinstance(result, Tensor):
            self._note(result, self._computed(call, dependent, source, result))

    def _computed(
        self, call: Call, dependent: Sequence[int], source: Tensor, result: Tensor
    ) -> Tensor | None:
        """The image numbers of the result of a call that does not move values: it keeps their
        order, or computes each image's values from the same image's.

        ``source`` is the first argument that depends on the images. None where it is not known.
        """
        if call.info.has("reshapes"):
            if self.of(source) is None and result.ndim and len(result) % self._count == 0:
                return None  # the rows still come image by image
            numbers = self._numbers(source)
            return (
                None
                if numbers is None
                else compact(numbers.expand(source.shape).reshape(result.shape))
            )
        if call.name == "einsum":
            return self._of_einsum(call, dependent[0])
        if "rois" in call.info.arguments:  # column 0 of a box is the number of its image
            boxes: Tensor = call.named["rois"].detach()
            return boxes[:, 0].int().reshape(-1, 1, 1, 1)
        like_result = next(
            (call.flat[i] for i in dependent if call.flat[i].ndim == result.ndim), source
        )
        numbers = self.of(like_result)
        if numbers is not None and call.info.has("reduces"):
            numbers = numbers.expand(like_result.shape)
            dims = call.named.get("dim")
            numbers = compact(
                numbers if dims is None else numbers.amax(dims, keepdim=result.ndim == numbers.ndim)
            )
        return None if numbers is None else fitted(numbers, result.shape, self._count)

    def _joined(self, call: Call, dependent: Sequence[int]) -> Tensor | None:
        """The image numbers of the result of a concatenation or stack.

        A constant gets the numbers of the signal that it is joined with, if its shape allows. None
        where those of any part are not known.
        """
        first_numbers = self._numbers(call.flat[dependent[0]])
        numbers_by_place = {}
        for i in call.tensor_places:
            tensor = call.flat[i]
            is_constant = (
                i not in dependent
                and first_numbers is not None
                and fits(first_numbers, tensor.shape)
            )
            numbers = first_numbers if is_constant else self._numbers(tensor)
            if numbers is None:
                return None
            numbers_by_place[i] = numbers.expand(tensor.shape)
        return moved_labels(call, numbers_by_place)[0]

    def _of_einsum(self, call: Call, place: int) -> Tensor | None:
        """The image numbers of a result of `torch.einsum`, from those of the factor at ``place``.

        None where the formula sums over the images, or is not known.
        """
        formula = einsum_formula(call)
        numbers = self._numbers(call.flat[place])
        if formula is None or numbers is None:
            return None
        terms, kept = formula
        letters = zip(terms[place - 1], numbers.shape, strict=True)
        if any(size > 1 and letter not in kept for letter, size in letters):
            return None
        return einsum_labels(numbers, terms[place - 1], kept)

    def _numbers(self, tensor: Tensor) -> Tensor | None:
        """The image number of each value of a tensor, also where the images come first; None where
        it is not known."""
        numbers = self.of(tensor)
        if numbers is None and tensor.ndim and len(tensor) and len(tensor) % self._count == 0:
            return first(self._count, tensor)
        return numbers

    def _note(self, tensor: Tensor, numbers: Tensor | None) -> None:
        """Remember the image numbers of a tensor, unless the rows alone tell them."""
        self._known.pop(tensor, None)
        if numbers is None:
            return
        by_rows = self._numbers(tensor)
        if by_rows is None or not torch.equal(numbers, compact(by_rows)):
            self._known[tensor] = numbers
            self._seen_any = True


def moved_labels(call: Call, labels: Mapping[int, Tensor]) -> list[Tensor]:
    """The labels of a call's results: the call is made once more with labels in place of values.

    ``labels`` are by the place of the argument whose values the call moves: image numbers, or
    positions in a photo. Call it only for operations that move, repeat or select values.
    """
    results = call.make(labels)
    return list(map(compact, [results] if isinstance(results, Tensor) else results))


def einsum_formula(call: Call) -> tuple[list[str], str] | None:
    """The index letters of each factor and of the result, from the formula of an `torch.einsum`
    call.

    For ``"nc,kc->nk"`` they are ``(["nc", "kc"], "nk")``. None where the formula has dots or no
    ``->``.
    """
    terms, _, kept = str(call.flat[0]).replace(" ", "").partition("->")
    return None if not kept or "." in terms else (terms.split(","), kept)


def einsum_labels(labels: Tensor, letters: str, kept: str) -> Tensor:
    """The labels of an einsum's result, from those of one factor.

    ``letters`` are the factor's dimensions, ``kept`` the result's. ``labels`` must have size 1
    along dimensions that are summed over; the result has size 1 along those that the factor lacks.

    >>> einsum_labels(torch.tensor([[0], [1]]), "nc", "kn")
    tensor([[0, 1]])
    """
    sizes = dict(zip(letters, labels.shape, strict=True))
    order = sorted(range(labels.ndim), key=lambda dim: kept.find(letters[dim]))
    return labels.permute(order).reshape([sizes.get(letter, 1) for letter in kept])


def first(count: int, like: Tensor) -> Tensor:
    """The image numbers of a tensor whose rows come image by image: ``(len(like), 1, ...)``.

    ``count`` is the number of images; ``len(like)`` must be a multiple of it.
    """
    numbers = torch.arange(count, device=like.device, dtype=torch.int32)
    return along(numbers.repeat_interleave(len(like) // count), like.ndim)


def fitted(numbers: Tensor, shape: torch.Size, count: int) -> Tensor | None:
    """The image numbers of a result, from those of an operand whose shape differs from ``shape``.

    A single number is that of the whole result. Numbers that change along one dimension alone, in
    equal blocks, are spread in equal blocks along it. None where neither holds.

    >>> fitted(torch.tensor([[0, 0, 1, 1]]), torch.Size([1, 6]), 2).tolist()
    [[0, 0, 0, 1, 1, 1]]
    """
    if numbers.numel() == 1:
        return numbers.reshape([1] * len(shape))
    if numbers.ndim != len(shape):
        return None
    if fits(numbers, shape):
        return numbers
    d = max(range(numbers.ndim), key=lambda d: numbers.shape[d])
    blocks = [
        first(count, torch.empty(size, device=numbers.device))
        for size in (numbers.shape[d], shape[d])
    ]
    if (
        numbers.numel() != numbers.shape[d]
        or shape[d] % count
        or not torch.equal(numbers.flatten(), blocks[0])
    ):
        return None
    return along(blocks[1], len(shape), d)


def numbers_of(tensor: Tensor, count: int, images: Tensor | None) -> Tensor | None:
    """The image number of each value of a step's tensor: ``images`` where they broadcast to it,
    else by rows, of which each of the ``count`` images has one or several.

    None where it is not known.
    """
    if images is not None and fits(images, tensor.shape):
        return images
    if tensor.ndim and len(tensor) and len(tensor) % count == 0:
        return first(count, tensor)
    if tensor.ndim > 1 and tensor.shape[1] == count:
        return first(count, tensor[0]).unsqueeze(0)
    return None
