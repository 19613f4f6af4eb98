"""What hooks read and change of what modules take and give; see `explain.nested` for how containers are walked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from explain import nested
from explain.errors import HookError

rebuilt = nested.with_items


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of a module's output: the output itself, or the first in its containers."""
    found = nested.find(output)
    return None if found is None else found[1]


def replace_first(output: Any, new: torch.Tensor) -> Any:
    """Return ``output`` with its first tensor replaced by ``new``, wherever it is; containers stay the same objects.

    >>> replace_first((torch.zeros(1), "state"), torch.ones(1))
    (tensor([1.]), 'state')
    """
    old = first_tensor(output)
    if old is None:
        raise HookError(f"a module's output must be a tensor or hold one, got {type(output).__name__}")
    return nested.edit(output, lambda path, tensor: new if tensor is old else tensor)


class Lent:
    """Other tensors in what a module is given, for as long as its call lasts; ``pairs`` has the old ones and the new.

    Containers stay those of the caller, who may see there what the module has put in. `give_back` puts the old tensors
    back, wherever in these the module has left the new ones.

    >>> skips = [torch.zeros(1)]
    >>> lent = Lent((skips,), lambda tensor: tensor + 1)
    >>> lent.inputs[0].append("more")
    >>> print(skips)
    [tensor([1.]), 'more']
    >>> lent.give_back()
    >>> print(skips)
    [tensor([0.]), 'more']
    """

    def __init__(self, inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def lent(path: nested.Path, tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = tensor, change(tensor)
            return made[id(tensor)][1]

        self.inputs = nested.edit(inputs, lent)
        self.pairs = [(old, new) for old, new in made.values() if new is not old]

    def give_back(self) -> None:
        old = {id(new): old for old, new in self.pairs}
        nested.edit(self.inputs, lambda path, tensor: old.get(id(tensor), tensor))


class Loans:
    """What is lent to the calls of a module that are running, the last one last."""

    def __init__(self) -> None:
        self._running: list[Lent | None] = []

    def begin(self, lent: Lent | None) -> Any:
        """Return what the module is to be given instead of its inputs."""
        self._running.append(lent)
        return None if lent is None else lent.inputs

    def end(self) -> Lent | None:
        """Take back what was lent to the call that has just ended, and return it."""
        lent = self._running.pop() if self._running else None
        if lent is not None:
            lent.give_back()
        return lent

    def remove(self) -> None:
        """Take back what was lent to calls that raised, when the hooks go."""
        while self._running:
            self.end()


def as_sources(inputs: Iterable[Any]) -> list[Any]:
    """Return inputs with each floating-point tensor replaced by a leaf that requires a gradient."""
    return [x.detach().clone().requires_grad_() if _differentiable(x) else x for x in inputs]


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()
