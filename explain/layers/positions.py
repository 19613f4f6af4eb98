"""Where in the photo the values of tensors lie: followed from the pixels on, through the operations
of a recording.

The shape of a tensor does not tell which of its tokens are the photo's patches: there may be others
before, behind and among them, the patches may be in any order, and a sequence of something else may
be as long. What a network does with the pixels tells it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from explain._utils.signals import came_by_signal
from explain.recording import Step, Value
from explain.recording.moves import compact, fits, is_move, moved, values_moved

aten = torch.ops.aten
Positions: TypeAlias = tuple[Tensor, ...]
"""For each dimension of the photo, where along it the values of a tensor lie: from 0 to 1, the
centre of a pixel or patch, and 0 for values that lie nowhere. Each has the dimensions of the
tensor, of size 1 where it does not change."""


class Lost(Enum):
    """Why it is not said where the values of a tensor lie."""

    NOWHERE = "they do not come from the photo, or belong to something else, as queries do"
    EVERYWHERE = "they are made of the whole photo"
    UNKNOWN = "they were made in a way that is not seen or not known"


NOWHERE, EVERYWHERE, UNKNOWN = Lost
State: TypeAlias = Positions | Lost
StateOf: TypeAlias = Callable[[Value], State]

MOST = 2**25  # the most values of a tensor whose positions are moved, for the sake of memory


def positions_of(
    steps: Iterable[Step], x: Value, stays: Mapping[Value, Value] = MappingProxyType({})
) -> dict[Value, State]:
    """Follow where in a photo ``x`` ``(N, C, H, W)`` the values of a recording lie. What is not in
    the result does not come from the photo."""
    # What moves values moves their positions. What combines values has the mean of their positions:
    # a convolution that of the window that it sees, a linear layer that of its inputs. Rows of an
    # attention lie where their queries do, and the values in `stays` where those lie that they are
    # given with. Everything else leaves positions as they are.
    states: dict[Value, State] = {x: tuple(_pixels(x, dim) for dim in range(2, len(x.shape)))}

    def state_of(value: Value) -> State:
        """Where a value lies: nowhere, if it does not come from the photo."""
        return states.get(value, NOWHERE)

    for step in steps:
        results = step.outputs
        staying = stays.keys() & set(results)
        if staying:
            states |= dict.fromkeys(results, UNKNOWN)
            for result in staying:
                states[result] = _first([_mean(state_of(stays[result]), [-1])], result)
            continue
        if step.name.startswith("_fft"):
            states |= dict.fromkeys(results, _of_transform(step))
            continue
        if all(state_of(value) is NOWHERE for value in step.inputs):
            continue
        try:
            states |= _states_of(step, results, state_of)
        except Exception as error:  # operators may take arguments in unknown ways
            if came_by_signal(error):
                raise
            states |= dict.fromkeys(results, UNKNOWN)
    return states


def _states_of(step: Step, results: Sequence[Value], state_of: StateOf) -> Mapping[Value, State]:
    """Where the values of each result of a step lie, by the kind of operation."""
    operation = step.operation
    if operation.has("fills"):  # constants come from no photo
        return {}
    if is_move(step):
        return _moved(step, results, state_of)
    if operation.kind == "matrixproduct":
        return {results[0]: _of_product(step, results[0], state_of)}
    if operation.has("reduces"):
        # without dimensions, all values are reduced to one
        dims = next((part for part in step.args[1:2] if isinstance(part, (int, list))), None)
        state = EVERYWHERE if dims is None else _reduced(state_of(step.args[0]), dims, results[0])
        return dict.fromkeys(results, state)
    resample = _resampling(step)
    if resample is not None:
        state = _resampled(resample, state_of(step.args[0]), step.args[0], results[0])
        return dict.fromkeys(results, state)
    states = [state_of(value) for value in step.inputs]
    return {result: _first(states, result) for result in results}


def _of_transform(step: Step) -> State:
    """Where the result of a Fourier transform lies: coefficients belong to no place, but what is
    made up of them may."""
    is_inverse = step.name == "_fft_c2r" or (step.name == "_fft_c2c" and not step.args[3])
    return UNKNOWN if is_inverse and step.args[0].depends else NOWHERE


def _moved(step: Step, results: Sequence[Value], state_of: StateOf) -> dict[Value, State]:
    """The positions of each result of a step that moves values, by running it on positions, once
    for each axis. UNKNOWN if an argument's are, or are more than `MOST`."""
    sources = values_moved(step)
    states = [state_of(value) for value in sources]
    positions = [state for state in states if isinstance(state, tuple)]
    if UNKNOWN in states or any(value.numel > MOST for value in sources):
        return dict.fromkeys(results, UNKNOWN)
    if not positions:
        return dict.fromkeys(results, EVERYWHERE if EVERYWHERE in states else NOWHERE)
    of_results: dict[Value, list[Tensor]] = {result: [] for result in results}
    for axis in range(len(positions[0])):

        def position_of(value: Value, axis: int = axis) -> Tensor | None:
            """The positions of a value along one dimension; None if it lies nowhere."""
            state = state_of(value)
            return state[axis] if isinstance(state, tuple) else None

        for result, position in moved(step, position_of).items():
            of_results[result].append(position)
    return {
        result: tuple(of_result) if any(bool(p.any()) for p in of_result) else NOWHERE
        for result, of_result in of_results.items()
    }


def _of_product(step: Step, result: Value, state_of: StateOf) -> State:
    """Where the rows of a matrix product lie: at the mean of a row of the first factor, or of a
    column of the second. Those of an attention belong to the first factor, the queries."""
    factors = step.args[1:3] if step.operation.has("adds to first") else step.args[:2]
    first_state, second_state = map(state_of, factors)
    if first_state in (UNKNOWN, EVERYWHERE):
        return first_state
    state = _first([_mean(first_state, [-1]), _mean(second_state, [-2])], result)
    is_of_constants = NOWHERE in (first_state, second_state)
    # two signals whose places are summed over give rows of something else, as of channels
    return NOWHERE if state is EVERYWHERE and not is_of_constants else state


def _pixels(x: Value, dim: int) -> Tensor:
    """The centres of a photo's pixels along dimension ``dim``, from 0 to 1, in the shape that
    broadcasts to ``x``."""
    count = x.shape[dim]
    shape = [1] * len(x.shape)
    shape[dim] = count
    return ((torch.arange(count, device="cpu") + 0.5) / count).reshape(shape)


def _first(states: Iterable[State], result: Value) -> State:
    """The first of some positions in the photo that broadcasts to ``result``; if none does, the
    reason, UNKNOWN before others."""
    reasons = {NOWHERE}
    for state in states:
        if isinstance(state, tuple) and (fitting := _spread(state, result)) is not None:
            return fitting
        reasons.add(UNKNOWN if isinstance(state, tuple) else state)
    return next(reason for reason in (UNKNOWN, EVERYWHERE, NOWHERE) if reason in reasons)


def _spread(state: Positions, result: Value) -> Positions | None:
    """The positions in the photo with leading dimensions added, to broadcast to ``result``; None if
    they do not fit."""
    fitting = []
    for position in state:
        missing_dims = len(result.shape) - position.ndim
        if missing_dims < 0:
            return None
        fitting.append(position.reshape([1] * missing_dims + [*position.shape]))
    shape = torch.Size(result.shape)
    return tuple(fitting) if all(fits(position, shape) for position in fitting) else None


def averaged(position: Tensor, dims: Iterable[int]) -> Tensor:
    """The mean position along some dimensions (kept at size 1), over the values that lie somewhere
    (> 0)."""
    averaged_dims = [dim for dim in dims if position.shape[dim] > 1]
    if not averaged_dims:
        return position
    return _quotient(
        position.double().sum(averaged_dims, keepdim=True),
        (position > 0).sum(averaged_dims, keepdim=True),
    )


def _mean(state: State, dims: Sequence[int]) -> State:
    """The mean positions in the photo along some dimensions, kept at size 1; EVERYWHERE if all
    values then share one."""
    if isinstance(state, Lost):
        return state
    means = tuple(averaged(position, dims) for position in state)
    return means if any(position.numel() > 1 for position in means) else EVERYWHERE


def _reduced(state: State, dims: int | Sequence[int], result: Value) -> State:
    """Where the values of a sum or mean over ``dims`` lie in the photo: the mean of what is added
    up. Those dimensions are dropped if ``result`` lacks them."""
    reduced_dims = [dims] if isinstance(dims, int) else list(dims)
    mean = _mean(state, reduced_dims)
    if isinstance(mean, Lost) or mean[0].ndim == len(result.shape):
        return mean
    return tuple(position.squeeze(reduced_dims) for position in mean)


def _resampled(
    resample: Callable[[Tensor], Tensor], state: State, x: Value, result: Value
) -> State:
    """Where the results of a convolution, pooling or interpolation of a map ``x`` ``(N, C, H, W)``
    lie: at the mean of what lies somewhere in each window."""
    mean = _mean(state, [1])
    if isinstance(mean, Lost):
        return mean
    resampled = []
    for position in mean:
        values = position.double().expand((len(position), 1, *x.shape[2:]))  # one channel
        centres = _quotient(resample(values), resample((values > 0).double()))
        # windows that all see the whole map have one mean: values of as many cells keep theirs
        keeps_positions = centres.numel() == 1 and result.shape[2:] == x.shape[2:]
        resampled.append(position if keeps_positions else centres)
    return _first([tuple(resampled)], result)


def _resampling(step: Step) -> Callable[[Tensor], Tensor] | None:
    """A function that sums or averages the values of one channel over each window of a step, in
    place of what the step does; None for steps without windows."""
    operation = step.operation
    if operation.kind == "convolution":
        weight: Value = step.args[1]
        ones = torch.ones((1, 1, *weight.shape[2:]), dtype=torch.float64, device="cpu")
        options = step.args[3:8]  # stride, padding, dilation, transposed, output padding
        bias = None
        groups = 1
        return lambda values: aten.convolution(values, ones, bias, *options, groups)
    if operation.has("pools") or operation.has("resizes"):
        return lambda values: next(_results(step.operator(values, *step.args[1:], **step.kwargs)))
    return None


def _results(result: Any) -> Iterator[Tensor]:
    """The tensors that an operator returns."""
    return iter([result] if isinstance(result, Tensor) else result)


def _quotient(sums: Tensor, counts: Tensor) -> Tensor:
    """Mean positions in the photo from sums and counts, rounded to single precision so that equal
    positions stay equal."""
    return compact((sums / torch.where(counts == 0, 1, counts)).float())
