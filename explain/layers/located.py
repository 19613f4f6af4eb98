"""Where in the photo the values of a network's tensors lie, where shapes leave it open."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.hooks.unwrap import modules_of
from explain.layers import layouts
from explain.layers.layouts import Grid, LayoutReading, Size
from explain.layers.recording import CallKey, ModuleCall, _read, run_noting_calls
from explain.relevance.positions import EVERYWHERE, UNKNOWN, Positions, PositionTracer, State

PLACES = "where in the photo the values of tensors lie"


@dataclass(frozen=True)
class _Places:
    """Where in the photo the values of tensors lie: of what calls give, with its shape, and of sequences of tokens."""

    rows: int
    of_calls: Mapping[CallKey, tuple[Size, State]]
    sequences: Mapping[Size, Sequence[Positions]]

    @cached_property
    def of_tokens(self) -> dict[int, Grid | None]:
        """How so many tokens lie: those that modules give, or else all sequences of this length, if they lie alike."""
        of_modules = [(shape, state) for shape, state in self.of_calls.values() if isinstance(state, tuple)]
        others = [(shape, positions) for shape, several in self.sequences.items() for positions in several]
        return self._in_one_way(others) | self._in_one_way(of_modules)

    def _in_one_way(self, sequences: Iterable[tuple[Size, Positions]]) -> dict[int, Grid | None]:
        found: dict[int, set[Grid]] = {}
        for shape, positions in sequences:
            grid = layouts.token_grid(positions, shape, self.rows) if len(shape) == 3 else None
            if grid is not None:
                found.setdefault(shape[grid.of_tokens], set()).add(replace(grid, layout="tokens"))
        return {length: grids.pop() if len(grids) == 1 else None for length, grids in found.items()}

    def as_long(self, shape: Size) -> Grid | None:
        """How the tokens of a tensor lie, if they lie as all others of their number."""
        if shape[0] == self.rows:
            return self.of_tokens.get(shape[1])
        grid = self.of_tokens.get(shape[0]) if shape[1] == self.rows else None
        return None if grid is None else replace(grid, layout="tokens first")


def _located(model: nn.Module, inputs: Inputs, calls: Sequence[ModuleCall]) -> _Places:
    """Run a network, and follow where the values of its tensors lie.

    Two images tell the tokens of one image from single tokens of its windows.
    """
    several = len(inputs) == 1 and any(len(call.shape) == 3 and call.shape[0] != 1 for call in calls)
    for given in ([inputs.rows(torch.zeros(2, dtype=torch.long))] if several else []) + [inputs]:
        try:
            return _located_once(model, given)
        except Exception as error:  # it may take one image alone
            if came_by_signal(error):
                raise
    return _Places(len(inputs), {}, {})


FOLDED = "calls with the first frames of all videos after each other"


def folded_by_time(model: nn.Module, inputs: Inputs, calls: Iterable[ModuleCall]) -> frozenset[CallKey]:
    """The calls whose frames are folded into the batch by time: two videos are run, and the first of them alone."""
    folded = {call.key: call.shape[0] for call in calls if call.grid is not None and call.grid.folded}

    def keep(key: CallKey, tensor: Tensor) -> Any:
        return tensor.clone() if key in folded else None

    try:
        alone = _read(model, inputs.first(), keep)
        among = _read(model, inputs.rows(torch.tensor([0, 1])), keep)
    except Exception as error:  # it takes one video at a time, or as many as there are
        if came_by_signal(error):
            raise
        return frozenset()

    def is_by_time(key: CallKey, frames: int) -> bool:
        own, both = alone[key].double(), among[key].double()
        return bool((both[:frames] - own).abs().sum() > (both[::2] - own).abs().sum())

    ran = folded.keys() & alone.keys() & among.keys()
    return frozenset(key for key in ran if is_by_time(key, folded[key]))


def _located_once(model: nn.Module, inputs: Inputs) -> _Places:
    values = [value for module in modules_of(model) for value in vars(module).values() if isinstance(value, Tensor)]
    constants = [*model.parameters(), *model.buffers(), *values, *inputs.others.values()]
    found: dict[CallKey, tuple[Size, State]] = {}

    def note(key: CallKey, module: nn.Module, output: Any, tensor: Tensor) -> None:
        found[key] = tuple(tensor.shape), tracer.of(tensor)

    with PositionTracer(inputs.x, constants) as tracer:
        run_noting_calls(model, inputs.replaced(inputs.x), note)
    return _Places(len(inputs), found, tracer.sequences)


def _laid_out(call: ModuleCall, reading: LayoutReading | None, located: _Places) -> ModuleCall:
    """Decide how to read a call that its shape and class leave open; an unclear one gets a doubt instead of a grid."""
    if reading is None:
        return call
    shape, positions = located.of_calls.get(call.key, (call.shape, UNKNOWN))
    if len(shape) == 3 and positions in (EVERYWHERE, UNKNOWN):
        grid = located.as_long(shape)
        return replace(call, grid=grid, doubt="" if grid else "tokens in any order")
    known = positions if isinstance(positions, tuple) else ()
    if len(shape) == 3:
        return replace(call, grid=layouts.token_grid(known, shape, located.rows) if known else None)
    grid = layouts.map_grid(known, shape, reading.grids) if known else None
    grid = reading.likeliest if grid is None and reading.believed else grid
    return replace(call, grid=grid, doubt="" if grid else " or ".join(each.described for each in reading.grids))
