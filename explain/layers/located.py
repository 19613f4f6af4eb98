"""Where in the photo the values of a network's tensors lie, where shapes leave it open."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from explain._utils.errors import LayerError
from explain._utils.modules import submodule
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.layers import layouts
from explain.layers.layouts import Grid, LayoutReading, Size
from explain.layers.positions import (
    EVERYWHERE,
    NOWHERE,
    UNKNOWN,
    Lost,
    Positions,
    State,
    positions_of,
)
from explain.layers.recording import CallKey, ModuleCall, RecordedCalls, run_noting_calls
from explain.recording import Step, Value
from explain.recording.images import image_numbers
from explain.recording.modes import Watcher
from explain.recording.recorder import PassRecorder
from explain.relevance.constants import storage_of

StateOfCalls: TypeAlias = Mapping[CallKey, tuple[Size, State]]
"""The shape of a tensor of each call, and where its values lie."""
PLACES = "where in the photo the values of tensors lie"


@dataclass(frozen=True)
class Places:
    """Where in the photo the values of tensors lie, as a run of so many ``rows`` (images) shows."""

    rows: int
    of_calls: StateOfCalls
    """The shape of what each call gives, and where its values lie."""
    of_inputs: StateOfCalls
    """The same of the first tensor that each call reads."""
    sequences: Mapping[Size, Sequence[Positions]]
    """The positions of sequences of tokens, by their shape."""
    added: Mapping[int, Sequence[tuple[Size, Positions]]]
    """The same of sequences that a constant is added to, by the address of the constant's
    memory."""

    @cached_property
    def of_tokens(self) -> dict[int, Grid | None]:
        """The grids on which a network's sequences of tokens lie on the photo, by length; None if
        such sequences differ. Sequences that modules give count before others of the same length.
        """
        module_sequences = [
            (shape, state) for shape, state in self.of_calls.values() if isinstance(state, tuple)
        ]
        grids = self._grids_of_all | self._grids(module_sequences)
        return {
            length: next(iter(grids_of_length)) if len(grids_of_length) == 1 else None
            for length, grids_of_length in grids.items()
        }

    @cached_property
    def _grids_of_all(self) -> dict[int, set[Grid]]:
        """The grids on which all sequences of tokens of the pass lie on the photo, by their number
        of tokens."""
        return self._grids(
            (shape, positions)
            for shape, all_positions in self.sequences.items()
            for positions in all_positions
        )

    def _grids(self, sequences: Iterable[tuple[Size, Positions]]) -> dict[int, set[Grid]]:
        """The grids on which sequences of tokens lie on the photo, by their number of tokens; where
        there are several, the number does not tell how tokens lie."""
        grids: dict[int, set[Grid]] = {}
        for shape, positions in sequences:
            grid = layouts.token_grid(positions, shape, self.rows) if len(shape) == 3 else None
            if grid is not None:
                grids.setdefault(shape[grid.of_tokens], set()).add(replace(grid, layout="tokens"))
        return grids

    def lie_nowhere(self, length: int) -> bool:
        """Whether sequences of ``length`` tokens are known to lie nowhere on the photo, such as
        queries; false where some of this length lie on it."""
        states = [
            state
            for shape, state in self.of_calls.values()
            if len(shape) == 3 and shape[1] == length
        ]
        return NOWHERE in states and not any(isinstance(state, tuple) for state in states)

    def of_constant(self, storage: int, length: int) -> set[Grid]:
        """The grids of those sequences of ``length`` tokens that a constant, such as a bias, with
        this address of its memory is added to; of an unknown one, those of all such sequences."""
        grids_by_length = self._grids(self.added.get(storage, ()))
        return grids_by_length.get(length) or self._grids_of_all.get(length, set())

    def grid_of(self, shape: Size, state: State, grids: Sequence[Grid]) -> Grid | None:
        """The grid on which the values of a tensor lie, of a map one of these ``grids``; None if
        they lie on none."""
        if isinstance(state, Lost):
            is_open = len(shape) == 3 and state is not NOWHERE
            return self.of_sequence(shape, self.rows) if is_open else None
        if len(shape) == 3:
            return layouts.token_grid(state, shape, self.rows)
        return layouts.map_grid(state, shape, grids)

    def of_sequence(self, shape: Size, rows: int, constant: int | None = None) -> Grid | None:
        """The grid of a sequence of tokens of ``rows`` images, None if it has no row for each. With
        ``constant``, that of the sequences that this is added to, which may lie otherwise."""
        if rows not in shape[:2]:
            return None
        tokens_first = shape[0] != rows
        length = shape[0] if tokens_first else shape[1]
        grid = self.of_tokens.get(length)
        if constant is not None:
            grids = self.of_constant(constant, length)
            if len(grids) > 1:
                raise LayerError(
                    f"tokens {shape} that the network adds a constant to must lie in one order, "
                    f"got {len(grids)}; use gradcam"
                )
            grid = next(iter(grids), grid)
        return replace(grid, layout="tokens first") if grid is not None and tokens_first else grid


def locate_tensors(
    model: nn.Module,
    inputs: Inputs,
    calls: Sequence[ModuleCall],
    recorded: RecordedCalls | None = None,
) -> Places:
    """Follow from where in the photo the values of a network's tensors come, in a run, or in the
    pass that was ``recorded`` if that is enough. Empty if it cannot be followed."""
    inputs_to_try = [inputs]
    # two copies of a single image tell its tokens from those of its windows
    if len(inputs) == 1 and any(len(call.shape) == 3 and call.shape[0] != 1 for call in calls):
        inputs_to_try = [inputs.rows(torch.zeros(2, dtype=torch.long, device="cpu")), inputs]
    # whether tokens are put in a random order shows in a second run
    elif recorded and recorded.recorder and not recorded.recorder.draws:
        states = _states_in(model, recorded.recorder, recorded.values)
        return _places_in(recorded.recorder, recorded.values, states, len(inputs))
    for images in inputs_to_try:
        try:
            return _locate_once(model, images)
        except Exception as error:  # the network may take only one image at a time
            if came_by_signal(error):
                raise
    return Places(len(inputs), of_calls={}, of_inputs={}, sequences={}, added={})


@contextmanager
def other_random_numbers(x: Tensor) -> Iterator[None]:
    """Within this block, draw other random numbers on the device of ``x`` than one would before and
    behind it."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.rand(1, device="cpu")
        torch.rand(1, device=x.device)
        yield


FOLDED = "calls with the first frames of all videos after each other"


def folded_by_time(
    model: nn.Module, inputs: Inputs, calls: Iterable[ModuleCall]
) -> frozenset[CallKey]:
    """The calls in which the first frames of all videos come before the second ones in the batch,
    from a run of two videos. Empty if the network refuses two."""
    folded = {call.key for call in calls if call.grid is not None and call.grid.folded}
    try:
        of_two = inputs.rows(torch.tensor([0, 1], device="cpu"))
        recorder, videos, values = record_calls(model, of_two)
    except Exception as error:  # the network may take only one video, or a fixed number
        if came_by_signal(error):
            raise
        return frozenset()
    video_numbers = image_numbers(recorder.steps, [videos], 2)
    recorder.release()
    by_time = set()
    for key in folded & values.keys():
        of_call = video_numbers.get(values[key])
        # the second in the batch is of the second video
        if of_call is not None and of_call.flatten()[:2].tolist() == [0, 1]:
            by_time.add(key)
    return frozenset(by_time)


def record_calls(
    model: nn.Module, inputs: Inputs, *, of: Set[str] | None = None, partly: bool = False
) -> tuple[PassRecorder, Value, dict[CallKey, Value]]:
    """Record a pass of a network; return the record, the photo in it, and what each call of a
    module gives, or ``of`` some alone; ``partly``, as far as it can be recorded."""
    recorder = PassRecorder(model)
    photo = recorder.add_input(inputs.x)
    values: dict[CallKey, Value] = {}

    def note(key: CallKey, module: nn.Module, output: Any, tensor: Tensor) -> None:
        values[key] = recorder.value_of(tensor)

    try:
        with Watcher(recorder.watched), recorder:
            run_noting_calls(model, inputs.replaced(inputs.x), note, of=of)
    except Exception as error:  # operators that no recorder sees, or one image alone
        if not partly or came_by_signal(error):
            raise
    finally:
        recorder.close()
    return recorder, photo, values


def first_reads(steps: Iterable[Step]) -> dict[CallKey, Value]:
    """The first tensor that each call of a module reads, of those that are computed from the
    photo."""
    first: dict[CallKey, Value] = {}
    for step in steps:
        name = step.module
        read = [value for value in step.inputs if value.depends]
        while read and name:  # also for the modules that this one is in
            first.setdefault((name, step.call), read[0])
            name = name.rpartition(".")[0]
    return first


def stays_in(
    model: nn.Module, steps: Sequence[Step], values: Mapping[CallKey, Value]
) -> dict[Value, Value]:
    """What recurrent layers give, ``(..., C)``, and what they are given: each of their states
    belongs to the place of its input, whatever it remembers of others."""
    recurrent = [key for key in values if isinstance(submodule(model, key[0]), nn.RNNBase)]
    inputs = first_reads(steps) if recurrent else {}
    return {values[key]: inputs[key] for key in recurrent if key in inputs}


def _locate_once(model: nn.Module, inputs: Inputs) -> Places:
    """Where in the photo the values of a network's tensors come from, in a run that leaves it as it
    was. Tokens that it puts in a random order lie elsewhere in another run, and so nowhere known.
    """
    recorder, _, values = record_calls(model, inputs)
    states = _states_in(model, recorder, values)
    if recorder.draws:
        with other_random_numbers(inputs.x):
            other_recorder, _, other_values = record_calls(model, inputs)
        other_states = _states_in(model, other_recorder, other_values)
        # values of both runs are matched by their numbers; since grids are asked for by shape,
        # nothing is known of any value with the shape of one that moved
        by_number = {value.number: state for value, state in other_states.items()}
        moved = {
            value.shape
            for value, state in states.items()
            if not _is_same(state, by_number.get(value.number))
        }
        states = {value: UNKNOWN if value.shape in moved else states[value] for value in states}
        other_recorder.release()
    places = _places_in(recorder, values, states, len(inputs))
    recorder.release()
    return places


def _is_same(state: State, other: State | None) -> bool:
    """Whether values lie at the same positions in two runs, or are lost in the same way."""
    if isinstance(state, tuple) and isinstance(other, tuple):
        return all(map(torch.equal, state, other))
    return state is other


def _states_in(
    model: nn.Module, recorder: PassRecorder, values: Mapping[CallKey, Value]
) -> dict[Value, State]:
    """Follow from where in the photo the values of a recorded pass come."""
    stays = stays_in(model, recorder.steps, values)
    return positions_of(recorder.steps, recorder.inputs[0], stays)


def _places_in(
    recorder: PassRecorder,
    values: Mapping[CallKey, Value],
    states: Mapping[Value, State],
    count: int,
) -> Places:
    """Where the calls of a recorded pass of ``count`` images, and its sequences, lie."""
    of_calls, of_inputs = (
        {key: (value.shape, states.get(value, NOWHERE)) for key, value in values_by_call.items()}
        for values_by_call in (values, first_reads(recorder.steps))
    )
    sequences: dict[Size, list[Positions]] = {}
    for value, state in states.items():
        if isinstance(state, tuple) and len(value.shape) == 3:
            of_shape = sequences.setdefault(value.shape, [])
            if not any(_is_same(state, other) for other in of_shape):
                of_shape.append(state)
    return Places(count, of_calls, of_inputs, sequences, _added_constants(states))


def _added_constants(states: Mapping[Value, State]) -> dict[int, list[tuple[Size, Positions]]]:
    """The shapes and positions of the sequences ``(N, T, C)`` that a constant was added to, by the
    storage of the constant."""
    added: dict[int, list[tuple[Size, Positions]]] = {}
    for value, state in states.items():
        step = value.step
        if step is None or not isinstance(state, tuple) or len(value.shape) != 3:
            continue
        # a linear layer adds its bias to a matrix, of which its result is a view
        if step.name == "view" and step.args[0].step is not None:
            step = step.args[0].step
        if step.operation.has("adds") or step.operation.has("biased"):
            for constant in step.inputs:
                if constant not in states:
                    storage = storage_of(constant.tensor)
                    added.setdefault(storage, []).append((value.shape, state))
    return added


def laid_out(call: ModuleCall, reading: LayoutReading | None, located: Places) -> ModuleCall:
    """Give a call of a module the grid on which its output covers the photo, of those that its
    shape allows (``reading``, None where nothing is open), or else a ``doubt`` in words."""
    if reading is None:
        return call
    shape, state = located.of_calls.get(call.key, (call.shape, UNKNOWN))
    grid = located.grid_of(shape, state, reading.grids)
    if grid is None and reading.channels_first:
        grid = next((possible for possible in reading.grids if possible.layout == "NCHW"), None)
    doubts = [possible.described for possible in reading.grids]
    if len(shape) == 3 and state in (EVERYWHERE, UNKNOWN):
        doubts = ["tokens in any order"]
    return replace(call, grid=grid, doubt="" if grid else " or ".join(doubts))
