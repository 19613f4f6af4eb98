"""Gradients watched during training, from layer to layer and step by step; units that learn nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from explain._utils.html import picture_html
from explain.render.figure import as_png, empty
from explain.training.parameters import OnParameters, Scaler, checked, factor, merged, values_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


@dataclass(frozen=True)
class Flow:
    """A layer's gradient at one step: its root mean square, its largest magnitude, and the share that is zero."""

    rms: float
    largest: float
    zero: float


class GradientFlow(OnParameters):
    """Watches the gradient of every parameter over training steps; each backward pass is a step.

    ``steps`` has a dictionary from parameter names to `Flow` for each. Use it in ``with``, or `remove` it. What sparse
    gradients leave out counts as zero.

    Args:
        model: its parameters that require gradients are watched.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does: its scale is taken out.

    Raises:
        HookError: ``scaler`` is not a scaler. During backward: a gradient has a layout that is neither dense nor sparse
            in coordinates.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> with GradientFlow(model) as flow:
    ...     for _ in range(3):
    ...         model(torch.ones(4, 2)).sum().backward()
    >>> len(flow.steps), sorted(flow.steps[0])
    (3, ['0.bias', '0.weight', '2.bias', '2.weight'])
    """

    def __init__(self, model: nn.Module, *, scaler: Scaler | None = None) -> None:
        self.steps: list[dict[str, Flow]] = []
        self._now: dict[str, Flow] = {}
        self._scaler = checked(scaler)
        super().__init__(model, self._note)

    def verdicts(
        self, *, vanishing: float = 1e-3, exploding: float = 1e3, last: int | None = None
    ) -> Mapping[str, str]:
        """Judge each parameter by its mean gradient, relative to that of the last layer, where backward begins.

        Args:
            vanishing: a mean that is smaller than this many times the last layer's is vanishing.
            exploding: one that is larger than this many times the last layer's is exploding.
            last: judge only the last so many steps; by default, all.

        Returns:
            For each parameter, from the first layer to the last, "dead" (always zero), "not finite", "vanishing",
            "exploding" or "ok".
        """
        means = self._means(last)
        sizes = {name: size for name, size in means.items() if 0 < size < float("inf")}
        weights = [size for name, size in sizes.items() if name.endswith("weight")] or list(sizes.values())
        reference = weights[-1] if weights else 0.0
        return {name: _verdict(size, reference, vanishing, exploding) for name, size in means.items()}

    def summary(self) -> dict[str, Flow]:
        """Return one `Flow` for each parameter, from the first layer to the last, for all steps.

        It has the mean of their root mean squares, their largest magnitude, and the mean share that is zero.
        """
        found = {}
        for name, rms in self._means().items():
            flows = [step[name] for step in self.steps if name in step]
            zero = sum(flow.zero for flow in flows) / len(flows)
            largest = float(torch.tensor([flow.largest for flow in flows], dtype=torch.float64).amax())  # NaN stays
            found[name] = Flow(rms, largest, zero)
        return found

    def __repr__(self) -> str:
        counts = Counter(self.verdicts().values())
        found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return f"GradientFlow({len(self.steps)} steps{f'; {found}' if found else ''})"

    def _repr_png_(self) -> bytes:
        return as_png(self.plot())

    def _repr_html_(self) -> str:
        return picture_html(self._repr_png_(), f"gradients of every layer over the steps: {self!r}")

    def plot(self) -> Figure:
        """Return a figure: each weight's gradient over the steps, and its mean from the first layer to the last.

        It shows itself in a notebook.
        """
        means, verdicts = self._means(), self.verdicts()
        names = [name for name in means if name.endswith("weight")] or list(means)
        drawn = empty((11, 4), f"gradients of every layer over the steps: {self!r}")
        over_steps, over_layers = drawn.subplots(1, 2)
        for i, name in enumerate(names):
            tone = i / max(1, len(names) - 1)
            values = [step[name].rms if name in step else float("nan") for step in self.steps]
            label = name if i in _spread(names) else None
            over_steps.plot(values, color=(0.9 - 0.8 * tone, 0.25, 0.15 + 0.75 * tone), linewidth=1.2, label=label)
        over_steps.set(xlabel="step", ylabel="root mean square of the gradient", yscale="log")
        over_steps.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        tones = {"ok": "#3b6fb6", "vanishing": "#c98a1b", "exploding": "#b3261e", "dead": "#888888"}
        sizes = [means[name] for name in names]
        over_layers.bar(range(len(names)), sizes, color=[tones.get(verdicts[n], "#b3261e") for n in names])
        over_layers.set(yscale="log" if any(sizes) else "linear", title="mean over the steps, first to last layer")
        ticks = _spread(names)
        over_layers.set_xticks(ticks, [names[i] for i in ticks], rotation=60, ha="right", fontsize=7)
        return drawn

    def _note(self, name: str, gradient: torch.Tensor) -> None:
        if not self._now or name in self._now:  # a pass that begins; the one before it may have failed halfway
            self._now = {}
            self._group.after_backward(self._end_step)
        self._now[name] = _flow(merged(name, gradient.detach()), factor(self._scaler))

    def _end_step(self) -> None:
        self.steps.append(self._now)
        self._now = {}

    def _means(self, last: int | None = None) -> dict[str, float]:
        """Return the mean size of each gradient, from the first layer to the last: backward came the other way."""
        steps = self.steps[-last:] if last else self.steps
        names = reversed(dict.fromkeys(name for step in steps for name in step))
        found = {name: [step[name].rms for step in steps if name in step] for name in names}
        return {name: sum(values) / len(values) for name, values in found.items()}


def _flow(gradient: torch.Tensor, scale: float) -> Flow:
    values, count = values_of(gradient).abs().double() / scale, gradient.numel()
    if not values.numel():
        return Flow(0.0, 0.0, 1.0)
    mean_square = values.square().sum() / count
    return Flow(mean_square.sqrt().item(), values.amax().item(), 1 - values.count_nonzero().item() / count)


def _spread(names: list[str], most: int = 20) -> list[int]:
    """Return the places of at most so many of the names, evenly spread."""
    return list(range(0, len(names), 1 + (len(names) - 1) // most))


def _verdict(size: float, reference: float, vanishing: float, exploding: float) -> str:
    if size == 0:
        return "dead"
    if not size < float("inf"):
        return "not finite"
    if size < vanishing * reference:
        return "vanishing"
    return "exploding" if size > exploding * reference else "ok"
