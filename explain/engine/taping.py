"""Putting what lies before a layer on tape, in a forward pass that is run for its own sake or up to the layer only."""

from __future__ import annotations

from typing import Any

from torch import nn

from explain.engine.replay import Tape
from explain.hooks import HookGroup, Overwriting, first_tensor, place_of


class ReachedError(BaseException):
    """Ends a forward pass at the layer; no ``except Exception`` of the model catches it."""


class Taping:
    """Notes on ``tape`` what happens in a forward pass up to a call of a layer, while the group is alive.

    The pass has to run inside ``with taping.tape``. It ends at the layer, by `ReachedError`, if ``ends`` says so.

    >>> import torch
    >>> model, x = nn.Sequential(nn.ReLU(), nn.Sigmoid()), torch.ones(1)
    >>> with HookGroup(model) as group:
    ...     taping = Taping(group, model, "0")
    ...     with taping.tape:
    ...         output = model(x)
    >>> [getattr(func, "__name__", "") for func, _ in taping.tape.calls], taping.made(0) is taping.tape
    (['relu'], True)
    """

    def __init__(self, group: HookGroup, model: nn.Module, layer: str, *, ends: bool = False) -> None:
        self.layer, self.tape = layer, Tape()
        place = place_of(layer, model)
        self._name, self._call, self._ends = place.layer, place.call or 0, ends
        self._calls = 0
        self._overwrites = False
        self._overwriting = Overwriting()
        self._overwriting.watch(group, self._name)
        group.forward(self._name, self._reach)

    def made(self, call: int) -> Tape | None:
        """The tape up to this call of the layer; None where it was not reached, or cannot be replayed.

        Buffers that the network changed have to be as they were found by now; the tape knows them changed.
        """
        fits = self.tape.stopped and self.tape.fits and self.tape.is_intact() and not self._overwrites
        return self.tape if fits and call == self._call else None

    def _reach(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        overwrites = tensor is not None and self._overwriting.is_by(self._name, tensor)
        if self._calls == self._call:
            self.tape.stop()
            self._overwrites = overwrites
            if self._ends:
                raise ReachedError
        self._calls += 1
