"""What happens in one pass: `inspect` gives a table of the calls of modules, `timeline` the order of their hooks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from explain._utils.errors import HookError, printable
from explain._utils.html import table_html
from explain._utils.nested import as_sources, first_tensor
from explain.hooks.group import HookGroup
from explain.hooks.preserve import untouched
from explain.hooks.unwrap import hookable


@dataclass
class Row:
    """One call of one module, in the order in which the calls began.

    ``inputs`` are the shapes of the tensors that it was given, those by keyword last.
    ``seconds`` includes the modules inside. ``dead`` is the share of a rectifier's units (channels, or features) that
    are zero for every input. ``finite`` says whether the output holds no NaN or infinity. ``gradient`` is the norm of
    the gradient that came back to the output, or None where none did or it is not finite.
    """

    order: int
    name: str
    type: str
    depth: int
    inputs: list[list[int]]
    output: list[int] | None = None
    parameters: int = 0
    seconds: float = 0.0
    dead: float | None = None
    finite: bool = True
    gradient: float | None = None
    gradient_finite: bool = True


HEADER = ("layer", "type", "output", "parameters", "ms", "dead", "gradient", "")


@dataclass(frozen=True, repr=False)
class Inspection:
    """What `inspect` found: ``rows``, a table as text (which a notebook shows), and JSON."""

    rows: list[Row]
    ended: list[Row] = field(repr=False)
    """The rows in the order in which their calls ended."""

    @property
    def first_nonfinite(self) -> Row | None:
        """The first call that returned NaN or infinity: where to look for the cause."""
        return next((row for row in self.ended if not row.finite), None)

    def __repr__(self) -> str:
        first = self.rows[0] if self.rows else None
        what = "" if first is None else f", {first.type}, {first.parameters:,} parameters"
        trouble = self.first_nonfinite
        return f"Inspection({len(self.rows)} calls{what}{f', NaN or infinity at {trouble.name!r}' if trouble else ''})"

    def _repr_html_(self) -> str:
        rows = [(row.name or "model", *_cells(row)[1:]) for row in self.rows]
        return table_html(HEADER, rows, caption=repr(self))

    def __str__(self) -> str:
        lines = [HEADER, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
        left = {0, 1, 2, 7}
        return "\n".join(
            "  ".join(
                c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def to_json(self) -> str:
        """Return the rows as a JSON array."""
        return json.dumps([asdict(row) for row in self.rows], indent=2, allow_nan=False)


def inspect(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    score: Callable[[Any], torch.Tensor] | None = None,
    gradients: bool = True,
) -> Inspection:
    """Run a model once and list, for every call of every module, what went in and out, and what it cost.

    Args:
        model: any module; it is left as it was, and runs in evaluation mode.
        inputs, kwargs: what it takes; gradients are taken back to the former.
        score: a function of the output whose gradient is reported; by default, the sum of the output's largest values,
            one per sample.
        gradients: also run backward.

    Raises:
        HookError: ``score`` does not return a tensor to start from.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(2, 3))
    >>> found = inspect(model, torch.ones(1, 1, 3, 3))
    >>> [(row.name, row.output, row.parameters) for row in found.rows]
    [('', [1, 3], 29), ('0', [1, 2, 1, 1], 20), ('1', [1, 2, 1, 1], 0), ('2', [1, 2], 0), ('3', [1, 3], 9)]
    """
    watch = _Watch(model)
    sources = as_sources(inputs) if gradients else list(inputs)
    with untouched(model, grad=gradients), HookGroup(model) as group:
        for name in hookable(model):
            watch.put(group, name, gradients)
        output = model(*sources, **(kwargs or {}))
        if gradients:
            _differentiate(output, score, [x for x in sources if isinstance(x, torch.Tensor) and x.requires_grad])
    return Inspection(watch.rows, watch.ended)


class _Watch:
    """Fills the rows from hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[Row] = []
        self.ended: list[Row] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[tuple[Row, float]] = []
        self._finished: dict[str, list[Row]] = {}

    def put(self, group: HookGroup, name: str, gradients: bool) -> None:
        group.forward_pre(
            name, lambda module, args, kwargs: self._begin(name, module, (*args, *kwargs.values())), with_kwargs=True
        )
        if gradients:
            group.backward(name, lambda module, grad_input, grad_output: self._came_back(name, grad_output))
        group.forward(name, lambda module, args, output: self._end(module, output))

    def _begin(self, name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        shapes = [list(value.shape) for value in given if isinstance(value, torch.Tensor)]
        depth = 0 if name == "" else name.count(".") + 1
        count = sum(p.numel() for p in module.parameters())
        row = Row(len(self.rows), name, type(module).__name__, depth, shapes, parameters=count)
        self.rows.append(row)
        self._running.append((row, time.perf_counter()))

    def _end(self, module: nn.Module, output: Any) -> None:
        row, start = self._running.pop()
        row.seconds = time.perf_counter() - start
        tensor = first_tensor(output)
        if tensor is not None:
            row.output = list(tensor.shape)
            row.finite = not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
            if "ReLU" in row.type and tensor.ndim > 1 and tensor.numel():
                row.dead = (tensor == 0).transpose(0, 1).flatten(1).all(1).float().mean().item()
        self.ended.append(row)
        self._finished.setdefault(row.name, []).append(row)

    def _came_back(self, name: str, grad_output: Any) -> None:
        row = self._finished[name].pop()  # backward meets the calls of a module in reverse
        norms = [g.detach().double().norm().item() for g in grad_output if isinstance(g, torch.Tensor)]
        total = math.sqrt(sum(norm * norm for norm in norms))
        row.gradient_finite = math.isfinite(total)
        row.gradient = total if row.gradient_finite else None


def _differentiate(output: Any, score: Callable[[Any], torch.Tensor] | None, sources: list[torch.Tensor]) -> None:
    tensor = first_tensor(output) if score is None else score(output)
    if not isinstance(tensor, torch.Tensor):
        raise HookError(
            f"score must return a tensor, got {type(tensor).__name__}; give a function of the model's output"
        )
    total = tensor.flatten(1).amax(1).sum() if score is None and tensor.ndim > 1 else tensor.sum()
    if total.requires_grad and sources:
        torch.autograd.grad(total, sources, allow_unused=True)


def _cells(row: Row) -> tuple[str, ...]:
    label = "  " * row.depth + (row.name.rsplit(".", 1)[-1] or "model")
    output = "" if row.output is None else " x ".join(map(str, row.output))
    dead = "" if row.dead is None else f"{row.dead:.0%}"
    gradient = "" if row.gradient is None else f"{row.gradient:.3g}"
    note = "NaN or infinity" if not row.finite else "" if row.gradient_finite else "NaN or infinity in the gradient"
    return printable(label), row.type, output, f"{row.parameters:,}", f"{1e3 * row.seconds:.2f}", dead, gradient, note


@dataclass(frozen=True)
class Event:
    """One hook that fired: the kind of it, and the layer that it sat on."""

    kind: str
    layer: str
    type: str


class Timeline(list[Event]):
    """Events in the order in which they happened; printing it shows them by depth."""

    def __str__(self) -> str:
        lines = []
        for number, event in enumerate(self, start=1):
            depth = 0 if event.layer == "" else event.layer.count(".") + 1
            lines.append(f"{number:>4}  {'  ' * depth}{event.kind:<13} {event.layer or 'model'} ({event.type})")
        return "\n".join(lines)

    __repr__ = __str__


def timeline(model: nn.Module, *inputs: Any) -> Timeline:
    """Run a model forward, and its output's sum backward, and note every module hook as it fires.

    The model is left as it was; no gradient is accumulated.

    >>> print(timeline(nn.Sequential(nn.Linear(2, 1)), torch.ones(1, 2)))
       1  forward-pre   model (Sequential)
       2    forward-pre   0 (Linear)
       3    forward       0 (Linear)
       4  forward       model (Sequential)
       5  backward-pre  model (Sequential)
       6    backward-pre  0 (Linear)
       7    backward      0 (Linear)
       8  backward      model (Sequential)
    """
    events = Timeline()
    sources = as_sources(inputs)
    with untouched(model, grad=True), HookGroup(model) as group:
        for name, module in hookable(model).items():

            def note(kind: str, name: str = name, module: nn.Module = module) -> None:
                events.append(Event(kind, name, type(module).__name__))

            group.forward_pre(name, lambda m, args, note=note: note("forward-pre"))
            group.forward(name, lambda m, args, output, note=note: note("forward"))
            group.backward_pre(name, lambda m, grad_output, note=note: note("backward-pre"))
            group.backward(name, lambda m, grad_input, grad_output, note=note: note("backward"))
        output = first_tensor(model(*sources))
        wanted = [x for x in sources if isinstance(x, torch.Tensor) and x.requires_grad]
        if output is not None and output.requires_grad and wanted:
            torch.autograd.grad(output.sum(), wanted, allow_unused=True)
    return events
