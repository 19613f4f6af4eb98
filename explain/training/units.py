"""Units that learn nothing: those whose weights get no gradient, step after step."""

from __future__ import annotations

import torch
from torch import nn

from explain.training.parameters import OnParameters
from explain.training.sparse import merged, values_of

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


class DeadUnits(OnParameters):
    """Finds units of linear layers and convolutions whose weights got no gradient so far; use it in ``with``.

    A unit is an output of a linear layer, or an output channel of a convolution. One behind which a ReLU is off for
    every input of every step gets no gradient, and neither does one whose output is not used: they learn nothing. What
    counts is the gradient, so that it makes no difference whether rectifiers are modules or functions. A unit that is
    alive for one input of one step is alive. Layers that got no gradient at all, such as unused ones, are left out.

    Args:
        model: its linear layers and convolutions whose weights require gradients are watched.

    Raises:
        HookError: during backward, a gradient has a layout that is neither dense nor sparse in coordinates.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> model[0].weight.data, model[0].bias.data = torch.ones(3, 2), torch.tensor([0.0, -9.0, 0.0])
    >>> with DeadUnits(model) as units:
    ...     model(torch.ones(4, 2)).sum().backward()
    >>> units.dead(), units.counts()
    ({'0': [1], '2': []}, {'0': 3, '2': 1})
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, _LAYERS)]
        layers = {id(module.weight): (name, module) for name, module in reversed(modules)}  # the first of shared ones
        self._owners = {name: layers[id(p)] for name, p in model.named_parameters() if id(p) in layers}
        self._alive: dict[str, torch.Tensor] = {}
        super().__init__(model, self._note)

    def dead(self) -> dict[str, list[int]]:
        """Return, for each layer from the first to the last, the numbers of its units without any gradient."""
        return {name: (~alive).nonzero()[:, 0].tolist() for name, alive in self._in_order()}

    def counts(self) -> dict[str, int]:
        """Return, for each layer from the first to the last, how many units it has."""
        return {name: len(alive) for name, alive in self._in_order()}

    def __repr__(self) -> str:
        dead, total = sum(map(len, self.dead().values())), sum(self.counts().values())
        return f"DeadUnits({dead} of {total} units get no gradient)"

    def _in_order(self) -> list[tuple[str, torch.Tensor]]:
        names = [name for name, _ in self._owners.values()]
        return [(name, self._alive[name]) for name in names if name in self._alive]

    def _note(self, parameter: str, gradient: torch.Tensor) -> None:
        if parameter not in self._owners:
            return
        name, layer = self._owners[parameter]
        alive = _units(layer, values_of(merged(parameter, gradient.detach())) != 0)
        before = self._alive.get(name)  # it stays on the device: reading it would wait for the device in every step
        self._alive[name] = alive if before is None else before | alive


def _units(layer: nn.Module, moved: torch.Tensor) -> torch.Tensor:
    """Return for each unit whether any of its weights has a gradient."""
    if isinstance(layer, _TRANSPOSED):  # (in, out of one group, ...)
        moved = moved.reshape(layer.groups, -1, *moved.shape[1:]).transpose(1, 2).flatten(0, 1)
    return moved.flatten(1).any(1)
