"""Where in the photo the values of a network's tensors lie, where shapes leave it open."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.errors import LayerError
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.hooks.unwrap import modules_of
from explain.layers import layouts
from explain.layers.layouts import Grid, LayoutReading, Size
from explain.layers.recording import CallKey, ModuleCall, run_noting_calls
from explain.relevance.positions import EVERYWHERE, UNKNOWN, Positions, PositionTracer, State

PLACES = "where in the photo the values of tensors lie"


@dataclass(frozen=True)
class Places:
    """Where in the photo the values of tensors lie, as a run of so many ``rows`` (images) shows.

    ``of_calls`` has the shape of what each call gives, and where its values lie. ``sequences`` are
    the positions of sequences of tokens, by their shape, and ``added`` those of sequences that a
    constant is added to, by the storage of the constant.
    """

    rows: int
    of_calls: Mapping[CallKey, tuple[Size, State]]
    sequences: Mapping[Size, Sequence[Positions]]
    added: Mapping[int, Sequence[tuple[Size, Positions]]]

    @cached_property
    def of_tokens(self) -> dict[int, Grid | None]:
        """How so many tokens lie: those that modules give, or else all sequences of this length, if
        they lie alike."""
        of_modules = [
            (shape, state) for shape, state in self.of_calls.values() if isinstance(state, tuple)
        ]
        grids = self._grids_of_all | self._grids(of_modules)
        return {length: next(iter(g)) if len(g) == 1 else None for length, g in grids.items()}

    @cached_property
    def _grids_of_all(self) -> dict[int, set[Grid]]:
        """The grids on which all sequences lie, by their number of tokens."""
        return self._grids(
            (shape, positions) for shape, several in self.sequences.items() for positions in several
        )

    def _grids(self, sequences: Iterable[tuple[Size, Positions]]) -> dict[int, set[Grid]]:
        """The grids on which sequences lie, by their number of tokens."""
        grids: dict[int, set[Grid]] = {}
        for shape, positions in sequences:
            grid = layouts.token_grid(positions, shape, self.rows) if len(shape) == 3 else None
            if grid is not None:
                grids.setdefault(shape[grid.of_tokens], set()).add(replace(grid, layout="tokens"))
        return grids

    def of_constant(self, storage: int, length: int) -> set[Grid]:
        """The grids on which sequences of so many tokens lie that a constant is added to; of one
        that is not known, those of all sequences."""
        added = self._grids(self.added.get(storage, ()))
        return added.get(length) or self._grids_of_all.get(length, set())

    def of_sequence(self, shape: Size, rows: int, constant: int | None = None) -> Grid | None:
        """How the tokens of so many rows lie: as all of their number, or as those that a constant
        is added to, which may lie otherwise."""
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


def locate_tensors(model: nn.Module, inputs: Inputs, calls: Sequence[ModuleCall]) -> Places:
    """Run a network, and follow where the values of its tensors lie.

    Two images tell the tokens of one image from single tokens of its windows.
    """
    tries = [inputs]
    if len(inputs) == 1 and any(len(call.shape) == 3 and call.shape[0] != 1 for call in calls):
        tries = [inputs.rows(torch.zeros(2, dtype=torch.long)), inputs]
    for images in tries:
        try:
            return _locate_once(model, images)
        except Exception as error:  # it may take one image alone
            if came_by_signal(error):
                raise
    return Places(len(inputs), {}, {}, {})


FOLDED = "calls with the first frames of all videos after each other"


def folded_by_time(
    model: nn.Module, inputs: Inputs, calls: Iterable[ModuleCall]
) -> frozenset[CallKey]:
    """The calls whose frames are folded into the batch by time: two videos are run, and the first
    of them alone."""
    folded = {
        call.key: call.shape[0] for call in calls if call.grid is not None and call.grid.folded
    }

    def outputs_of(videos: Inputs) -> dict[CallKey, Tensor]:
        outputs: dict[CallKey, Tensor] = {}

        def note(key: CallKey, module: nn.Module, output: Any, tensor: Tensor) -> None:
            if key in folded:
                outputs[key] = tensor.detach().double()

        run_noting_calls(model, videos, note)
        return outputs

    try:
        alone = outputs_of(inputs.first())
        both = outputs_of(inputs.rows(torch.tensor([0, 1])))
    except Exception as error:  # it takes one video at a time, or as many as there are
        if came_by_signal(error):
            raise
        return frozenset()
    by_time = set()
    for key in folded.keys() & alone.keys() & both.keys():
        off_by_video = (both[key][: folded[key]] - alone[key]).abs().sum()
        off_by_time = (both[key][::2] - alone[key]).abs().sum()
        if off_by_video > off_by_time:
            by_time.add(key)
    return frozenset(by_time)


def _locate_once(model: nn.Module, inputs: Inputs) -> Places:
    """Run a network on these inputs, and follow where the values of its tensors lie."""
    values = [
        value
        for module in modules_of(model)
        for value in vars(module).values()
        if isinstance(value, Tensor)
    ]
    constants = [*model.parameters(), *model.buffers(), *values, *inputs.other_tensors.values()]
    states: dict[CallKey, tuple[Size, State]] = {}

    def note(key: CallKey, module: nn.Module, output: Any, tensor: Tensor) -> None:
        states[key] = tuple(tensor.shape), tracer.of(tensor)

    with PositionTracer(inputs.x, constants) as tracer:
        run_noting_calls(model, inputs.replaced(inputs.x), note)
    return Places(len(inputs), states, tracer.sequences, tracer.added)


def laid_out(call: ModuleCall, reading: LayoutReading | None, located: Places) -> ModuleCall:
    """Decide how to read a call that its shape and class leave open; an unclear one gets a doubt
    instead of a grid."""
    if reading is None:
        return call
    shape, positions = located.of_calls.get(call.key, (call.shape, UNKNOWN))
    if len(shape) == 3 and positions in (EVERYWHERE, UNKNOWN):
        grid = located.of_sequence(shape, located.rows)
        return replace(call, grid=grid, doubt="" if grid else "tokens in any order")
    grid = None
    if isinstance(positions, tuple):
        if len(shape) == 3:
            return replace(call, grid=layouts.token_grid(positions, shape, located.rows))
        grid = layouts.map_grid(positions, shape, reading.grids)
    elif len(shape) == 3:
        return call
    if grid is None and reading.believed:
        grid = reading.likeliest
    doubt = "" if grid else " or ".join(reading_grid.described for reading_grid in reading.grids)
    return replace(call, grid=grid, doubt=doubt)
