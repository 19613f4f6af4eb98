"""Which image of a batch each value of a recording belongs to: followed through its steps.

A shape does not tell: as many heads as images look like images that come second, windows may be
laid out beside each other, and images run one by one.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor

from explain._utils.signals import came_by_signal
from explain.recording.moves import compact, is_move, moved, values_moved
from explain.recording.operations import KnownOperation
from explain.recording.values import Step, Value

Labels: TypeAlias = Tensor
"""For each element of a value the number of its image, from 1 on, or 0 if it is the same for all
images; of size 1 where it does not change."""
LabelsOf: TypeAlias = Callable[[Value], Labels]


def image_numbers(
    steps: Sequence[Step], inputs: Iterable[Value], count: int
) -> dict[Value, Tensor | None]:
    """Follow which image of a batch each element of a recording's values belongs to. A value gets
    numbers with its dimensions, -1 for no image; None if images are mixed in it."""
    # The inputs have the images first. An element belongs to an image if it changes with it:
    # through the values that are moved and computed with, not through the indices that choose among
    # them. Numbers have size 1 along dimensions in which they do not change. What depends on no
    # image is left out.
    if count == 1:  # all of it belongs to the only image, which has the number 0
        values = [*inputs, *(value for step in steps for value in step.outputs)]
        return {
            value: torch.zeros([1] * len(value.shape), dtype=torch.int32, device="cpu")
            for value in values
        }
    labels = labels_through(
        steps, {value: numbers_along(value, 0) for value in inputs if value.shape[:1] == (count,)}
    )
    # many values share the same labels, which are made numbers once
    numbers_of: dict[int, Tensor] = {}
    for of_value in labels.values():
        if of_value is not None and id(of_value) not in numbers_of:
            numbers_of[id(of_value)] = _filled(of_value) - 1
    numbers_by_value: dict[Value, Tensor | None] = {}
    for value, of_value in labels.items():
        numbers_by_value[value] = None if of_value is None else numbers_of[id(of_value)]
    for step in reversed(steps):
        if is_move(step):
            _fill_from_results(step, numbers_by_value)
    return {
        value: numbers
        for value, numbers in numbers_by_value.items()
        if numbers is None or bool((numbers >= 0).any())
    }


def images_elsewhere(
    numbers_by_value: Mapping[Value, Tensor | None], count: int
) -> dict[Value, Tensor]:
    """The image numbers of the values whose images do not come first, of all that `image_numbers`
    tells."""
    first = torch.arange(count, device="cpu")
    elsewhere: dict[Value, Tensor] = {}
    for value, numbers in numbers_by_value.items():
        if numbers is None or not numbers.ndim:
            continue
        is_first = numbers.numel() == len(numbers) and torch.equal(numbers.flatten(), first)
        if not is_first:
            elsewhere[value] = numbers
    return elsewhere


def _fill_from_results(step: Step, numbers_by_value: dict[Value, Tensor | None]) -> None:
    """Give elements that belong to no image the number of the image that a step moves them to."""
    for source in values_moved(step):
        numbers = numbers_by_value.get(source)
        if numbers is None or not bool((numbers < 0).any()):
            continue
        # each element of the source has its position, counted from 1, since padding is 0; a float,
        # since some operators take no integers
        positions = torch.arange(1.0, source.numel + 1, dtype=torch.float64, device="cpu").reshape(
            source.shape
        )
        moved_positions = moved(step, {source: positions}.get)
        filled = numbers.expand(source.shape).flatten().clone()
        for result, of_result in moved_positions.items():
            images = numbers_by_value.get(result)
            if images is not None:
                origins = of_result.expand(result.shape).flatten().long() - 1
                is_moved = origins >= 0  # all others are padding
                origins = origins[is_moved]
                images = images.expand(result.shape).flatten()[is_moved]
                filled[origins] = filled[origins].maximum(images)  # -1 where there is no image
        # labels count from 1 on, and numbers from 0
        numbers_by_value[source] = _filled(filled.reshape(source.shape) + 1) - 1


def labels_through(
    steps: Iterable[Step], labels: Mapping[Value, Labels]
) -> dict[Value, Labels | None]:
    """The labels of all values that are made of those that have some; None where elements of
    several are mixed, or it is not known."""
    of_values: dict[Value, Labels | None] = dict(labels)
    for step in steps:
        labelled = [value for value in step.inputs if value in of_values]
        if step.operation.has("overwrites"):  # nothing of its first argument stays
            labelled = [value for value in labelled if value is not step.args[0]]
        if not labelled:
            continue
        of_arguments: dict[Value, Labels] = {}
        for value in labelled:
            of_value = of_values[value]
            if of_value is not None:
                of_arguments[value] = of_value
        are_all_known = len(of_arguments) == len(set(labelled))
        of_results = follow(step, of_arguments) if are_all_known else {}
        of_values |= {value: of_results.get(value) for value in step.outputs}
    return of_values


def numbers_along(value: Value, dim: int | None) -> Labels:
    """Numbers along one dimension of a value, from 1 on; of None, the number 1."""
    sizes = [1] * len(value.shape)
    if dim is not None:
        sizes[dim] = value.shape[dim]
    return torch.arange(1, math.prod(sizes) + 1, dtype=torch.int32, device="cpu").reshape(sizes)


def summed(values: Tensor, numbers: Tensor, count: int) -> Tensor:
    """The sum of a tensor, such as relevance, over the values of each image ``(count,)``;
    ``numbers``, as `image_numbers` gives them, broadcast to it."""
    constant_dims = [d for d, size in enumerate(numbers.shape) if size == 1]
    summed_values = values.sum(constant_dims, keepdim=True) if constant_dims else values
    # the last one is for what belongs to no image: -1 becomes the last number
    sums = summed_values.new_zeros(count + 1)
    images = numbers.to(summed_values.device).flatten() % (count + 1)
    return sums.index_add_(0, images, summed_values.flatten())[:count]


def follow(step: Step, labels: Mapping[Value, Labels]) -> dict[Value, Labels]:
    """The labels of the results of a step, from those of the values among its arguments that have
    some; without the results in which elements of several labels are mixed, or it is not known."""

    def of_argument(value: Value) -> Labels:
        """The labels of an argument; one without any is the same for all."""
        return labels[value] if value in labels else _no_labels(value)

    try:
        return _labels_of_results(step, list(labels), step.outputs, of_argument)
    except Exception as error:  # operators may take arguments in unknown ways
        if came_by_signal(error):
            raise
        return {}


class MixedError(Exception):
    """Elements of several labels are mixed in a value."""


def _labels_of_results(
    step: Step, dependent: Sequence[Value], results: Sequence[Value], labels_of: LabelsOf
) -> dict[Value, Labels]:
    """The labels of each result of a step, by the kind of operation. Raises MixedError if labels
    are mixed in them."""
    operation = step.operation
    labels = [labels_of(value) for value in dependent]
    is_filled = operation.has("fills") or operation.kind == "activation"
    if step.is_pointwise or is_filled or operation.has("elementwise"):
        return dict.fromkeys(results, _joined(labels, results[0]))
    # index_put and scatter may add up what they move
    is_sum = step.options.get("accumulate") or step.options.get("reduce")
    if (is_move(step) and not is_sum) or step.name == "embedding":
        return _of_move(step, results, labels_of)
    boxes = step.options.get("rois")
    if boxes is not None:  # column 0 of a box is the number of its image
        return {value: _along_first(boxes.tensor[:, 0] + 1, value) for value in results}
    if operation.kind == "matrixproduct" and len(results[0].shape) > 1:
        return {results[0]: _of_product(step, results[0], labels_of)}
    if len(labels) == 1:
        dims = _mixed_dims(step)
        if dims is not None:
            mixed = mixed_along(labels[0], dims)
            return {value: _without_dims(mixed, dims, value) for value in results}
        if _treats_each_sample(operation) and _changes_along_first(labels[0]):
            by_sample = [value for value in results if value.shape[:1] == dependent[0].shape[:1]]
            return {value: _along_first(labels[0].flatten(), value) for value in by_sample}
    return _probed(step, dependent, results, labels_of)


def _of_move(step: Step, results: Sequence[Value], labels_of: LabelsOf) -> dict[Value, Labels]:
    """The labels of what a step moves; of what is chosen from constants, those of the indices."""
    values = values_moved(step)
    labels = [labels_of(value) for value in values]
    first = labels[0]
    if not any(bool(of_value.any()) for of_value in labels):
        return _of_index(step, results, labels_of)
    # all elements of all values have the same label, which is then that of the results
    if first.any() and all(of_value.flatten().tolist() == [first.max()] for of_value in labels):
        return {value: first.reshape([1] * len(value.shape)) for value in results}
    if step.operation.has("reshapes"):
        return {results[0]: _viewed(first, values[0].shape, results[0].shape)}
    # some take no integers, and some give complex numbers
    of_results = moved(step, lambda value: labels_of(value).float())
    return {value: of_value.real.int() for value, of_value in of_results.items()}


def _viewed(labels: Labels, old_shape: Sequence[int], new_shape: Sequence[int]) -> Labels:
    """Labels of a tensor that takes another shape. They stay of size 1 where they do not change,
    and are written out in dimensions that are split or joined with some in which they do."""
    # Both shapes are walked from their last dimensions on: the fewest old and new dimensions with
    # equally many elements are taken together, since they hold the same elements.
    old_sizes: list[int] = []
    new_sizes: list[int] = []
    old_left = list(old_shape)
    new_left = list(new_shape)
    while old_left or new_left:
        old_dims = [old_left.pop()] if old_left else []
        new_dims = [new_left.pop()] if new_left else []
        while math.prod(old_dims) != math.prod(new_dims):
            if math.prod(old_dims) < math.prod(new_dims):
                old_dims.append(old_left.pop())
            else:
                new_dims.append(new_left.pop())
        of_old_dims = labels.shape[len(old_left) : len(old_left) + len(old_dims)]
        changes = any(size > 1 for size in of_old_dims)
        old_sizes += old_dims if changes else [1] * len(old_dims)
        new_sizes += new_dims if changes else [1] * len(new_dims)
    return labels.expand(old_sizes[::-1]).reshape(new_sizes[::-1])


def _of_index(step: Step, results: Sequence[Value], labels_of: LabelsOf) -> dict[Value, Labels]:
    """The labels of what the first dimensions of indices choose, as from a table of vectors."""
    (index,) = [value for value in step.inputs if bool(labels_of(value).any())]
    result = results[0]
    # then the dimensions of the result begin with those of the index
    chooses_along_first = step.args[1] in (index, [index])
    if step.name == "gather" or (chooses_along_first and step.name in ("embedding", "index")):
        missing_dims = len(result.shape) - len(index.shape)
        labels = labels_of(index)
        return {result: labels.reshape([*labels.shape, *[1] * missing_dims])}
    raise MixedError


def _of_product(step: Step, result: Value, labels_of: LabelsOf) -> Labels:
    """The labels of a product of two matrices: of the rows of the first, and the columns of the
    second."""
    start = int(step.operation.has("adds to first"))  # behind what the product is added to
    left, right = map(labels_of, step.args[start : start + 2])
    added = [labels_of(value) for value in step.args[:start]]
    return _joined([mixed_along(left, [-1]), mixed_along(right, [-2]), *added], result)


def _mixed_dims(step: Step) -> list[int] | None:
    """The dimensions along which a step mixes the elements of its first argument; None if that is
    not in the table."""
    dims = range(len(step.args[0].shape)) if isinstance(step.args[0], Value) else range(0)
    if step.operation.has("reduces") or step.operation.has("mixes"):
        dim = step.options.get("dim")
        return [dim] if isinstance(dim, int) else list(dim or dims)
    if step.name == "native_layer_norm":
        return list(dims[-len(step.args[1]) :])
    if step.operation.kind == "batchnorm" and step.options.get("training"):
        return [dim for dim in dims if dim != 1]
    return None


def _treats_each_sample(operation: KnownOperation) -> bool:
    """Whether an operation treats each index of the first dimension by itself."""
    is_of_windows = operation.has("pools") or operation.has("resizes")
    return is_of_windows or operation.kind in ("batchnorm", "convolution", "deviation")


def _probed(
    step: Step, dependent: Sequence[Value], results: Sequence[Value], labels_of: LabelsOf
) -> dict[Value, Labels]:
    """The labels of the results of a step of any kind: where NaN arrives if that is put in the
    place of some images. Raises MixedError if that cannot tell, or images are mixed."""
    is_operator = isinstance(step.operator, torch._ops.OpOverload)
    # of a library: other arguments than the first may be used as addresses, and get no NaN
    if is_operator and step.operator.namespace != "aten":
        dependent = [value for value in dependent if value is step.args[0]]
    if not all(value.dtype.is_floating_point or value.dtype.is_complex for value in dependent):
        raise MixedError
    most = max(int(labels_of(value).max()) for value in dependent)
    of_results = {
        value: torch.zeros(value.shape, dtype=torch.int32, device="cpu") for value in results
    }
    # Labels are found bit by bit: one run with the images hidden whose number has the bit, and one
    # with those that lack it. What is NaN in both is made of several images.
    for bit in range(most.bit_length()):
        reached = []
        for has_bit in (1, 0):

            def with_nan(value: Value, bit: int = bit, has_bit: int = has_bit) -> Tensor:
                """An argument with NaN in the place of the images that have a bit, or lack it."""
                if value not in dependent:
                    return value.tensor
                labels = labels_of(value)
                is_hidden = (labels > 0) & ((labels >> bit) & 1 == has_bit)
                tensor = value.tensor.detach()
                return tensor.masked_fill(is_hidden.to(tensor.device), math.nan)

            reached.append({value: t.isnan() for value, t in step.run(with_nan).items()})
        for value, labels in of_results.items():
            has_bit_set, has_bit_clear = (hidden[value].cpu() for hidden in reached)
            if bool((has_bit_set & has_bit_clear).any()):
                raise MixedError
            labels += has_bit_set.int() << bit
    return {value: compact(labels) for value, labels in of_results.items() if bool(labels.any())}


def _no_labels(value: Value) -> Labels:
    """The labels of a value that depends on no image."""
    return torch.zeros([1] * len(value.shape), dtype=torch.int32, device="cpu")


def _changes_along_first(labels: Labels) -> bool:
    """Whether labels change along no other dimension than the first."""
    return labels.ndim > 0 and labels.numel() == len(labels)


def _along_first(labels: Labels, value: Value) -> Labels:
    """The labels ``(N,)`` of the first dimension of a value."""
    return labels.int().reshape([-1] + [1] * (len(value.shape) - 1))


def mixed_along(labels: Labels, dims: Sequence[int]) -> Labels:
    """The labels of what is made of all elements along some dimensions, of size 1 along these."""
    if not dims or labels.numel() < 2:
        return labels
    mixed = labels.amax(tuple(dims), keepdim=True)
    if bool(((labels != mixed) & (labels > 0)).any()):
        raise MixedError
    return mixed


def _without_dims(labels: Labels, dims: Sequence[int], result: Value) -> Labels:
    """Labels without some dimensions, of size 1, if a result lacks them."""
    return labels if labels.ndim == len(result.shape) else labels.squeeze(tuple(dims))


def _joined(labels: Sequence[Labels], result: Value) -> Labels:
    """The labels of what is made, element by element, of values that broadcast to a result."""
    joined = _no_labels(result)
    for part in labels:
        missing_dims = len(result.shape) - part.ndim
        if missing_dims < 0:
            raise MixedError
        aligned = part.reshape([1] * missing_dims + [*part.shape])
        differs = (joined != aligned) & (joined > 0) & (aligned > 0)
        if bool(differs.any()):
            raise MixedError
        joined = joined.maximum(aligned)
    return joined


def _filled(labels: Labels) -> Labels:
    """Labels shrunk to size 1 along dimensions in which they do not change, but for elements that
    belong to no image."""
    for dim in range(labels.ndim):
        with suppress(MixedError):
            labels = mixed_along(labels, [dim])
    return labels
