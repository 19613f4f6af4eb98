"""Gradients during training: clipped as they flow, watched from layer to layer, and units that get
none."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import nn

from explain._utils.errors import HookError
from explain._utils.html import picture_html
from explain._utils.signals import SignalSafe
from explain.hooks.group import HookGroup
from explain.render.figures import as_picture, empty
from explain.render.sheets import evenly_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Scaler: TypeAlias = torch.amp.GradScaler


def check_scaler(scaler: Scaler | None) -> Scaler | None:
    """Return the gradient scaler of a training with mixed precision, or None where it is switched
    off.
    """
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise HookError(
            f"scaler must be a GradScaler, got {type(scaler).__name__}; pass the one that scales "
            "the loss"
        )
    return scaler if getattr(scaler, "is_enabled", lambda: True)() else None


def factor(scaler: Scaler | None) -> float:
    """Return the scale that the scaler has put on the loss, 1.0 without one. It changes from step
    to step: ask in the backward pass whose gradients are meant."""
    return 1.0 if scaler is None else float(scaler.get_scale())


class OnParameters(SignalSafe[Any]):
    """A hook on the gradient of every parameter, in place until the block ends; gradients must be
    dense."""

    def __init__(
        self, model: nn.Module, hook: Callable[[str, torch.Tensor], torch.Tensor | None]
    ) -> None:
        """Place ``hook`` on each parameter's gradient before it is accumulated: called with the
        name and gradient, it returns what takes its place, or None to leave it.
        """

        def watched(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
            if gradient.layout != torch.strided:
                raise HookError(
                    f"the gradient of {name!r} must be dense, got {gradient.layout}; make it so, "
                    "or freeze it"
                )
            return hook(name, gradient)

        self._group = HookGroup(model)
        try:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    self._group.leaf(parameter, partial(watched, name))
        except BaseException:  # an interrupt, for one: nothing else could remove this group
            self._group.remove()
            raise

    def on_enter(self) -> Self:
        return self

    def on_exit(self, error: BaseException | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hooks from the model's parameters; also after a block, where it does
        nothing."""
        self._group.remove()


class GradientClipper(OnParameters):
    """Clips the gradient of every parameter before it is accumulated; use it in ``with``, or
    `remove` it.

    Each gradient is clipped on its own, in each backward pass, and in each process before processes
    exchange theirs.

    Gradients with infinite or NaN elements give what torch's ``clip_grad_norm_`` and
    ``clip_grad_value_`` give: by ``norm``, an infinity becomes NaN and the rest of that gradient
    zero, and one NaN makes all of it NaN; by ``value``, infinities are clamped and NaN stays. With
    a ``scaler``, infinities are not clamped: the scaler must see them to skip the step.

    Args:
        model: its parameters that require gradients are clipped.
        value: clamp every element to [-value, value], or
        norm: scale each gradient whose norm is larger down to this norm.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does. Limits hold for
            gradients without its scale, as its ``unscale_`` or ``step`` leaves them.
        error_if_nonfinite: raise for a gradient with infinite or NaN elements.

    Attributes:
        clipped: how often the finite gradient of a parameter exceeded the limit.
        nonfinite: how often it had infinite or NaN elements.

    Raises:
        HookError: not exactly one of ``value`` and ``norm`` is given, it is not positive, or
            ``scaler`` is not a scaler. During backward: a gradient is not finite
            (``error_if_nonfinite``), or is sparse.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with GradientClipper(model, value=0.5) as clipper:
    ...     model(torch.tensor([[3.0, 0.1]])).sum().backward()
    >>> model.weight.grad, clipper.clipped
    (tensor([[0.5000, 0.1000]]), {'weight': 1})
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        value: float | None = None,
        norm: float | None = None,
        scaler: Scaler | None = None,
        error_if_nonfinite: bool = False,
    ) -> None:
        if (value is None) == (norm is None):
            raise HookError("GradientClipper must be given exactly one of value= and norm=")
        self._by_norm = value is None
        limit = norm if value is None else value
        # NaN is not above 0 either
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise HookError(
                f"{'norm' if self._by_norm else 'value'} must be positive, got {limit!r}; give "
                "another"
            )
        self._limit = float(limit)
        self._scaler = check_scaler(scaler)
        self._error_if_nonfinite = error_if_nonfinite
        self.clipped: dict[str, int] = {}
        self.nonfinite: dict[str, int] = {}
        super().__init__(model, self._clip)

    def _clip(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient, clipped by its 2-norm or largest magnitude; None leaves it.
        Counts clipped and not finite ones; limit and size are with the scaler's scale.
        """
        if not gradient.numel():
            return None
        order = 2.0 if self._by_norm else math.inf
        # in float64, in which the squares of large elements do not overflow
        size = torch.linalg.vector_norm(gradient.detach(), order, dtype=torch.float64).item()
        limit = self._limit * factor(self._scaler)
        if not math.isfinite(size):
            self._note_nonfinite(name, gradient)
            # a scaler skips a step with infinities: clamped, they would hide from it
            if not self._by_norm and self._scaler is not None:
                return None
        elif size <= limit:
            return None
        else:
            self.clipped[name] = self.clipped.get(name, 0) + 1
        if self._by_norm:  # by an infinite norm, all becomes zero, but infinities NaN, as in torch
            scaled: torch.Tensor = gradient * (limit / size)
            return scaled
        # with the scale, the limit may be more than the gradient's type holds
        largest = min(limit, torch.finfo(gradient.dtype).max)
        return gradient.clamp(-largest, largest)

    def _note_nonfinite(self, name: str, gradient: torch.Tensor) -> None:
        """Count a parameter's gradient with infinite or NaN elements; with ``error_if_nonfinite``,
        raise a `HookError` during backward."""
        self.nonfinite[name] = self.nonfinite.get(name, 0) + 1
        if self._error_if_nonfinite:
            count = int((~gradient.isfinite()).sum())
            raise HookError(
                f"the gradient of {name!r} must be finite, got {count} of {gradient.numel()} "
                "elements that are infinite or NaN; lower the learning rate"
            )


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


class DeadUnits(OnParameters):
    """Finds units of linear layers and convolutions whose weights got no gradient so far; use it in
    ``with``.

    A unit is an output of a linear layer, or an output channel of a convolution. One behind which a
    ReLU is off for every input of every step gets no gradient, and neither does one whose output is
    not used: they learn nothing. What counts is the gradient, so that it makes no difference
    whether rectifiers are modules or functions. A unit that is alive for one input of one step is
    alive. Layers that got no gradient at all, such as unused ones, are left out.

    Args:
        model: its linear layers and convolutions whose weights require gradients are watched.

    Raises:
        HookError: during backward, a gradient is sparse.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> model[0].weight.data, model[0].bias.data = torch.ones(3, 2), torch.tensor([0.0, -9.0, 0.0])
    >>> with DeadUnits(model) as units:
    ...     model(torch.ones(4, 2)).sum().backward()
    >>> units.dead(), units.counts()
    ({'0': [1], '2': []}, {'0': 3, '2': 1})
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [
            (name, module) for name, module in model.named_modules() if isinstance(module, _LAYERS)
        ]
        # by weight: of layers that share one, the first, which is entered last
        layers = {id(module.weight): (name, module) for name, module in reversed(modules)}
        # by name of a weight, its layer's name and the layer
        self._owners = {
            name: layers[id(parameter)]
            for name, parameter in model.named_parameters()
            if id(parameter) in layers
        }
        # by layer, which of its units got a gradient so far
        self._alive: dict[str, torch.Tensor] = {}
        super().__init__(model, self._note)

    def dead(self) -> dict[str, list[int]]:
        """Return, for each layer from the first to the last, the numbers of its units without any
        gradient."""
        return {name: (~alive).nonzero()[:, 0].tolist() for name, alive in self._in_order()}

    def counts(self) -> dict[str, int]:
        """Return, for each layer from the first to the last, how many units it has."""
        return {name: len(alive) for name, alive in self._in_order()}

    def __repr__(self) -> str:
        """How many of the watched units got no gradient so far, as text."""
        dead = sum(map(len, self.dead().values()))
        total = sum(self.counts().values())
        return f"DeadUnits({dead} of {total} units get no gradient)"

    def _in_order(self) -> list[tuple[str, torch.Tensor]]:
        """The names of the watched layers, from the first to the last, each with which of its units
        got a gradient so far, ``(units,)``; layers without any gradient are left out."""
        names = [name for name, _ in self._owners.values()]
        return [(name, self._alive[name]) for name in names if name in self._alive]

    def _note(self, parameter_name: str, gradient: torch.Tensor) -> None:
        """Note which units got a gradient, by the first dimension of weights of linear layers and
        convolutions (the second of transposed ones); None leaves the gradient as it is.
        """
        if parameter_name not in self._owners:
            return
        name, layer = self._owners[parameter_name]
        has_gradient = gradient.detach() != 0
        if isinstance(layer, _TRANSPOSED):  # (in, out of one group, ...)
            # to (groups, in of one group, out of one group, ...), and then to (units, ...)
            by_group = torch.unflatten(has_gradient, 0, (layer.groups, -1))
            has_gradient = by_group.transpose(1, 2).flatten(0, 1)
        alive = has_gradient.flatten(1).any(1)
        # it stays on the device: reading it would wait for the device in every step
        alive_before = self._alive.get(name)
        self._alive[name] = alive if alive_before is None else alive_before | alive


@dataclass(frozen=True)
class Flow:
    """A layer's gradient at one step: its root mean square, its largest magnitude, and the share
    that is zero."""

    rms: float
    largest: float
    zero: float


class GradientFlow(OnParameters):
    """Watches the gradient of every parameter over training steps; each backward pass is a step.

    ``steps`` has a dictionary from parameter names to `Flow` for each. Use it in ``with``, or
    `remove` it.

    Args:
        model: its parameters that require gradients are watched.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does: its scale is taken
            out.

    Raises:
        HookError: ``scaler`` is not a scaler. During backward: a gradient is sparse.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> with GradientFlow(model) as flow:
    ...     for _ in range(3):
    ...         model(torch.ones(4, 2)).sum().backward()
    >>> len(flow.steps), sorted(flow.steps[0])
    (3, ['0.bias', '0.weight', '2.bias', '2.weight'])
    """

    def __init__(self, model: nn.Module, *, scaler: Scaler | None = None) -> None:
        self.steps: list[dict[str, Flow]] = []
        self._now: dict[str, Flow] = {}  # of the backward pass that runs
        self._scaler = check_scaler(scaler)
        super().__init__(model, self._note)

    def verdicts(
        self, *, vanishing: float = 1e-3, exploding: float = 1e3, last: int | None = None
    ) -> dict[str, str]:
        """Judge each parameter by its mean gradient, relative to that of the last layer, where
        backward begins.

        Args:
            vanishing: a mean that is smaller than this many times the last layer's is vanishing.
            exploding: one that is larger than this many times the last layer's is exploding.
            last: judge only the last so many steps; by default, all.

        Returns:
            For each parameter, from the first layer to the last, "dead" (always zero), "not
            finite", "vanishing", "exploding" or "ok".
        """
        means = self._means(last)
        sizes = {name: size for name, size in means.items() if 0 < size < float("inf")}
        weights = [size for name, size in sizes.items() if name.endswith("weight")] or list(
            sizes.values()
        )
        reference = weights[-1] if weights else 0.0  # that of the last layer
        return {
            name: _verdict(size, reference, vanishing, exploding) for name, size in means.items()
        }

    def summary(self) -> dict[str, Flow]:
        """Return one `Flow` for each parameter, from the first layer to the last, for all steps.

        It has the mean of their root mean squares, their largest magnitude, and the mean share that
        is zero.
        """
        mean_flows = {}
        for name, rms in self._means().items():
            flows = [step[name] for step in self.steps if name in step]
            zero = sum(flow.zero for flow in flows) / len(flows)
            # by torch: Python's max() may lose a NaN
            largest = float(
                torch.tensor([flow.largest for flow in flows], dtype=torch.float64).amax()
            )
            mean_flows[name] = Flow(rms, largest, zero)
        return mean_flows

    def __repr__(self) -> str:
        """How many backward passes were watched, and how many parameters got each verdict, as text;
        also the caption of the figure."""
        counts = Counter(self.verdicts().values())
        judged = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return f"GradientFlow({len(self.steps)} steps{f'; {judged}' if judged else ''})"

    def _repr_html_(self) -> str:
        return picture_html(
            as_picture(self.plot()), f"gradients of every layer over the steps: {self!r}"
        )

    def plot(self) -> "Figure":
        """Return a figure: each weight's gradient over the steps, and its mean from the first layer
        to the last.

        It shows itself in a notebook.
        """
        means = self._means()
        names = [name for name in means if name.endswith("weight")] or list(means)
        labelled = evenly_spread(len(names), 20)  # more names would cover each other
        figure = empty((9, 4), f"gradients of every layer over the steps: {self!r}")
        over_steps, over_layers = figure.subplots(1, 2)
        for number, name in enumerate(names):
            tone = number / max(1, len(names) - 1)  # from red, the first layer, to blue
            values = [step[name].rms if name in step else float("nan") for step in self.steps]
            label = name if number in labelled else None
            over_steps.plot(
                values,
                color=(0.9 - 0.8 * tone, 0.25, 0.15 + 0.75 * tone),
                linewidth=1.2,
                label=label,
            )
        over_steps.set(xlabel="step", ylabel="root mean square of the gradient", yscale="log")
        over_steps.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        verdicts = self.verdicts()
        sizes = [means[name] for name in names]
        over_layers.bar(range(len(names)), sizes, color=[_COLORS[verdicts[name]] for name in names])
        over_layers.set(
            yscale="log" if any(sizes) else "linear",
            title="mean over the steps, first to last layer",
        )
        over_layers.set_xticks(
            labelled, [names[number] for number in labelled], rotation=60, ha="right", fontsize=8
        )
        return figure

    def _note(self, name: str, gradient: torch.Tensor) -> None:
        """Note the size of a parameter's gradient, without the scaler's scale, in the order of
        backward: from the last layer to the first.
        """
        # a new pass: the first gradient, or a second one of a parameter, as after a failed pass
        if not self._now or name in self._now:
            self._now = {}
            self._group.after_backward(self._end_step)
        sizes = gradient.detach().abs().double() / factor(self._scaler)
        if sizes.numel():
            zero = 1 - sizes.count_nonzero().item() / sizes.numel()
            rms = sizes.square().mean().sqrt().item()
            self._now[name] = Flow(rms, largest=sizes.amax().item(), zero=zero)
        else:
            self._now[name] = Flow(rms=0.0, largest=0.0, zero=1.0)

    def _end_step(self) -> None:
        """Append the gradients of the backward pass that has just ended to ``steps``."""
        self.steps.append(self._now)
        self._now = {}

    def _means(self, last: int | None = None) -> dict[str, float]:
        """By parameter, from the first layer to the last, the mean over steps (the ``last`` ones)
        of its gradient's root mean square.
        """
        steps = self.steps[-last:] if last else self.steps
        names = reversed(dict.fromkeys(name for step in steps for name in step))
        sizes = {name: [step[name].rms for step in steps if name in step] for name in names}
        return {name: sum(values) / len(values) for name, values in sizes.items()}


_COLORS = {
    "ok": "#3b6fb6",
    "vanishing": "#c98a1b",
    "exploding": "#b3261e",
    "not finite": "#b3261e",
    "dead": "#888888",
}


def _verdict(size: float, reference: float, vanishing: float, exploding: float) -> str:
    """Judge a parameter's mean gradient ``size`` by ``reference``, the last layer's: "dead", "not
    finite", "vanishing", "exploding" or "ok", which files of trainings keep.
    """
    if size == 0:
        return "dead"
    if not size < float("inf"):  # NaN is neither
        return "not finite"
    if size < vanishing * reference:
        return "vanishing"
    return "exploding" if size > exploding * reference else "ok"
