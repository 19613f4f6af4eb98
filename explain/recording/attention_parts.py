"""Where the parts of an attention are read or made, and how they are laid out by image and head."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from explain.recording.attention import Factor, RecordedAttention, token_numbers
from explain.recording.images import Labels, labels_through
from explain.recording.moves import is_move, moved, values_moved
from explain.recording.values import Step, Value


@dataclass(frozen=True)
class HeadLayout:
    """How a tensor is shown as ``(N, heads, tokens, channels)``: these sizes, and the dimensions
    that they are of in the order in which the tensor has them."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    heads: Tensor | None = None
    """``(N, heads)``, the rows of each image, where the sizes are ``(rows, tokens, channels)``."""

    def shown(self, tensor: Tensor) -> Tensor:
        """The tensor by image and head."""
        laid_out = tensor.reshape([self.sizes[dim] for dim in self.order])
        shown = laid_out.permute([self.order.index(dim) for dim in range(len(self.order))])
        return shown if self.heads is None else shown[self.heads]

    def put_back(self, shown: Tensor, shape: Sequence[int]) -> Tensor:
        """What is shown of a tensor in its own ``shape``."""
        if self.heads is not None:
            shown = shown.flatten(0, 1)[self.heads.flatten().argsort()]
        return shown.permute(self.order).reshape(shape)


@dataclass(frozen=True)
class PartPlace:
    """Where a part of an attention is met: as an argument of a step, or as its result."""

    step: Step
    argument: int | None
    """None for the result."""
    layout: HeadLayout


def place_of_part(
    part: str, attention: RecordedAttention, steps: Sequence[Step], inputs: Iterable[Value]
) -> PartPlace | None:
    """Where queries ("q"), keys ("k"), values ("v"), weights ("pattern") or what each head gives
    ("heads") are met in a recorded pass; None if no tensor has them all."""
    factor, product = {
        "q": (attention.query, attention.scores),
        "k": (attention.key, attention.scores),
        "v": (attention.value, attention.result.value),
        "pattern": (attention.weights, None),
        "heads": (attention.result, None),
    }[part]
    # without heads, as `(M, tokens, channels)`, where it is not known which are of one image, as in
    # inputs of the pass
    numbers = _sequences(attention, steps, inputs).get(factor.value)
    heads = None if numbers is None else _by_sequence(factor.by_head(numbers).flatten())
    if product is None:  # taken as the result of the step that makes it
        layout = _layout(factor, _indices(factor.value), heads)
        step = factor.value.step
        return None if step is None or layout is None else PartPlace(step, None, layout)
    # a factor is taken as an argument; queries and keys before they are multiplied by a number
    for step, value, chain in _entrances(factor, product, steps):
        layout = _layout(factor, _moved_through(chain, value), heads)
        if layout is not None and value in step.args:
            return PartPlace(step, step.args.index(value), layout)
    return None


def _entrances(
    factor: Factor, product: Value, steps: Sequence[Step]
) -> list[tuple[Step, Value, list[Step]]]:
    """Where a factor can be replaced: the first step that multiplies it by a number, and the
    product; each with the value that it takes, and the steps from that to the factor."""
    reader = product.step
    assert reader is not None
    if factor.value not in reader.inputs:
        reader = reader.args[0].step  # written by hand as a sum, whose argument are the products
    entrances: list[tuple[Step, Value, list[Step]]] = [(reader, factor.value, [])]
    uses = Counter(value for step in steps for value in step.inputs)
    value = factor.value
    chain: list[Step] = []
    # back through steps that move all of the elements or scale them, if nothing else reads those
    while value.step is not None and uses[value] == 1 and not value.step.writes:
        step = value.step
        scales = step.name in ("mul", "div") and len(step.inputs) == 1
        sources = values_moved(step) if is_move(step) else step.inputs
        if not (scales or is_move(step)) or len(sources) != 1 or sources[0].numel != value.numel:
            break
        (value,) = sources
        chain = [step, *chain]
        if scales:
            entrances.insert(0, (step, value, chain))
    return entrances


def _indices(value: Value) -> Tensor:
    """The numbers of a value's elements in their order, from 0 on."""
    indices = torch.arange(value.numel, dtype=torch.float64, device="cpu")
    return indices.reshape(value.shape)


def _moved_through(chain: Iterable[Step], value: Value) -> Tensor:
    """The elements of a value by their numbers, as they lie after some steps."""
    indices = _indices(value)
    for step in chain:
        (result,) = [result for result in step.results if result is not None]
        if is_move(step):  # others scale them, and leave them where they are
            indices = moved(step, {value: indices}.get)[result].expand(result.shape)
        value = result
    return indices


def _layout(factor: Factor, indices: Tensor, heads: Tensor | None) -> HeadLayout | None:
    """How a tensor is shown whose elements, by their ``indices``, are those of a factor with the
    rows ``heads`` ``(N, heads)`` of each image; None if it would be copied element by element."""
    rows = factor.by_head(indices)
    by_image_and_head = None if heads is None else _regular(rows[heads])
    if by_image_and_head is not None:
        return by_image_and_head
    by_row = _regular(rows)
    return None if by_row is None else replace(by_row, heads=heads)


def _regular(indices: Tensor) -> HeadLayout | None:
    """The layout of elements that lie in memory by their dimensions in some order; None if they
    don't."""
    # the stride of each dimension is that between its first two elements; `expected` are the
    # indices if it is the same between all others
    strides = []
    expected = torch.zeros((), dtype=indices.dtype, device="cpu")
    for dim, size in enumerate(indices.shape):
        first_two = indices.movedim(dim, 0).flatten(1)[:2, 0]
        strides.append(int(first_two[-1] - first_two[0]))
        sizes = [size if d == dim else 1 for d in range(indices.ndim)]
        expected = expected + strides[-1] * torch.arange(size, device="cpu").reshape(sizes)
    order = sorted(range(indices.ndim), key=strides.__getitem__, reverse=True)
    length_inside = 1
    for dim in reversed(order):
        if indices.shape[dim] > 1 and strides[dim] != length_inside:
            return None  # with gaps, or elements that are shared
        length_inside *= indices.shape[dim]
    is_regular = torch.equal(indices, expected.expand(indices.shape))
    return HeadLayout(tuple(indices.shape), tuple(order)) if is_regular else None


def _sequences(
    attention: RecordedAttention, steps: Sequence[Step], inputs: Iterable[Value]
) -> Mapping[Value, Labels | None]:
    """Which sequence of tokens (of an image, or a window) each row of the parts of an attention
    belongs to: heads of one image have the same tokens. Empty if it is not known."""
    query = attention.query
    key = attention.key
    value = attention.value
    unknown = list(inputs)
    tokens = {factor: token_numbers(factor, unknown) for factor in (query, key)}
    known_numbers = [numbers for numbers in tokens.values() if numbers is not None]
    if not known_numbers:
        return {}
    labels: dict[Value, Labels] = {}
    row_counts = {math.prod(factor.batch_sizes) for factor in (query, key)}
    pair_up = len(row_counts) == 1
    for factor, numbers in tokens.items():
        # rows that pair up are of one sequence if both have the same tokens
        of_rows = torch.cat(known_numbers, 1) if pair_up else numbers
        if of_rows is not None:
            labels[factor.value] = _distinct(of_rows).reshape(factor.batch_sizes)
    # what is made of queries and keys belongs to the same sequences
    last_step = attention.result.value.step
    assert last_step is not None
    of_values = labels_through(steps[: steps.index(last_step) + 1], labels)
    of_result = of_values.get(attention.result.value)
    if math.prod(value.batch_sizes) == math.prod(attention.result.batch_sizes):
        # row by row, the values belong to what is made of them
        if of_result is not None:
            of_rows = attention.result.by_head(of_result)[:, 0, 0]
            of_values[value.value] = of_rows.reshape(value.batch_sizes)
    else:  # such as values that several heads share: by their own tokens
        numbers = token_numbers(value, unknown)
        if numbers is not None:
            of_values[value.value] = _distinct(numbers).reshape(value.batch_sizes)
    return of_values


def _distinct(rows: Tensor) -> Labels:
    """Numbers from 1 on, the same for rows that are the same."""
    numbers: Tensor = torch.unique(rows, dim=0, return_inverse=True)[1]
    return numbers.int() + 1


def _by_sequence(numbers: Tensor) -> Tensor | None:
    """The rows ``(N, heads)`` of each sequence, by the number of its sequence for each row; None if
    some have more rows than others."""
    positions = torch.arange(len(numbers), device="cpu")
    _, sequence, counts = torch.unique(numbers, return_inverse=True, return_counts=True)
    if bool((counts != counts[0]).any()):
        return None
    # sequences in the order of their first rows, and the rows of each in their own
    first_rows = positions.new_full((len(counts),), len(numbers))
    first_rows = first_rows.scatter_reduce(0, sequence, positions, "amin")
    order = (first_rows[sequence] * len(numbers) + positions).argsort()
    return order.reshape(len(counts), -1)
