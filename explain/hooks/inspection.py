"""What happens in one pass: `inspect` gives a table of the calls of modules, `timeline` the order
of their hooks."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from explain._utils.errors import HookError, printable
from explain._utils.html import aligned, table_html
from explain._utils.nested import as_sources, first_tensor
from explain.hooks import preserve, unwrap
from explain.hooks.graph import differentiate
from explain.hooks.group import HookGroup
from explain.recording.modes import OperatorCalls


@dataclass
class CallRow:
    """One call of one module, in the order in which the calls began."""

    order: int
    name: str
    type: str
    depth: int
    inputs: list[list[int]]
    """The shapes of the tensors that it was given, those by keyword last."""
    output: list[int] | None = None
    parameters: int = 0
    seconds: float = 0.0
    """Including the modules inside, as `flops`."""
    flops: int = 0
    """Floating point operations of products and convolutions, two for each multiplication with its
    addition."""
    memory: int = 0
    """Bytes of its output."""
    dead: float | None = None
    """The share of a rectifier's units (channels, or features) that are zero for every input."""
    finite: bool = True
    """Whether the output holds no NaN or infinity."""
    gradient: float | None = None
    """The norm of the gradient that came back to the output; None where none did, or it is not
    finite."""
    gradient_finite: bool = True


HEADER = ("layer", "type", "output", "parameters", "flops", "memory", "ms", "dead", "gradient", "")


@dataclass(frozen=True, repr=False)
class Inspection:
    """What `inspect` found: ``rows``, a table as text (which a notebook shows), and JSON."""

    rows: list[CallRow]
    ended: list[CallRow]
    """The rows in the order in which their calls ended."""

    @property
    def first_nonfinite(self) -> CallRow | None:
        """The first call to end with NaN or infinity in its output: where to look for the cause."""
        return next((row for row in self.ended if not row.finite), None)

    def __repr__(self) -> str:
        """The number of calls, the model, and where NaN or infinity appeared first."""
        words = [f"{len(self.rows)} calls"]
        if self.rows:
            words.append(f"{self.rows[0].type}, {self.rows[0].parameters:,} parameters")
        if self.first_nonfinite is not None:
            words.append(f"NaN or infinity at {self.first_nonfinite.name!r}")
        return f"Inspection({', '.join(words)})"

    def _repr_html_(self) -> str:
        rows = [(row.name or "model", *_cells(row)[1:]) for row in self.rows]
        return table_html(HEADER, rows, caption=repr(self))

    def __str__(self) -> str:
        return "\n".join(
            aligned([HEADER, *map(_cells, self.rows)], to_the_right=(3, 4, 5, 6, 7, 8))
        )

    def to_json(self) -> str:
        """Return the rows as a JSON array, an object for each call."""
        return json.dumps([asdict(row) for row in self.rows], indent=2, allow_nan=False)


def inspect(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    score: Callable[[Any], torch.Tensor] | None = None,
    gradients: bool = True,
) -> Inspection:
    """Run a model and list, for every call of every module, what went in and out, and what it cost.

    The time is that of a second pass, in which nothing is counted.

    Args:
        model: any module; it is left as it was, and runs in evaluation mode.
        inputs, kwargs: what it takes; gradients are taken back to the former.
        score: a function of the output whose gradient is reported; by default, the sum of the
            output's largest values, one per sample.
        gradients: also run backward.

    Raises:
        HookError: ``score`` does not return a tensor to start from.

    >>> model = nn.Sequential(
    ...     nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(2, 3)
    ... )
    >>> found = inspect(model, torch.ones(1, 1, 3, 3))
    >>> [(row.name, row.output, row.parameters) for row in found.rows]
    [('', [1, 3], 29), ('0', [1, 2, 1, 1], 20), ('1', [1, 2, 1, 1], 0), ('2', [1, 2], 0), ('3', [1,
    3], 9)]
    """
    options = kwargs or {}
    hookable = unwrap.hookable(model)

    def run() -> tuple[Any, list[Any]]:
        """Run the model once; return its output, and the inputs that gradients are taken to."""
        # copies that require a gradient, so that one comes to every layer
        sources = as_sources(inputs) if gradients else list(inputs)
        return model(*sources, **options), sources

    with preserve.untouched(model, grad=gradients), HookGroup(model) as group:
        watch = _Watch(group, hookable, gradients)
        with OperatorCalls(watch.operations.run):
            output, sources = run()
        if gradients:
            _differentiate(output, score, sources)
    with preserve.untouched(model, grad=gradients), HookGroup(model) as group:
        _time_calls(group, hookable, watch.rows)
        run()
    return Inspection(watch.rows, watch.ended)


def _time_calls(group: HookGroup, names: Iterable[str], rows: Sequence[CallRow]) -> None:
    """Hook the named modules so that the next pass notes the ``seconds`` of each row. The pass must
    make the calls of ``rows`` again, in the same order."""
    remaining_rows = iter(rows)
    running_rows: list[CallRow] = []

    def begin(module: nn.Module, args: Any) -> None:
        """Start the clock of the row whose call begins."""
        row = next(remaining_rows, replace(rows[-1]))  # a call too many has a row of its own
        row.seconds = -time.perf_counter()  # `end` adds the time at the end
        running_rows.append(row)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        """Stop the clock of the row whose call ends."""
        running_rows.pop().seconds += time.perf_counter()

    group.forward_pre(names, begin)
    group.forward(names, end)


class _Operations:
    """Counts floating point operations, by PyTorch's own formulas."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry, sdpa_flop_count  # slow to load

        self._flops_of_operator: Any = flop_registry
        self._flops_of_attention: Any = sdpa_flop_count
        self.count = 0

    def run(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and add its floating point operations to ``count``."""
        result = operator(*args, **kwargs)
        formula = self._flops_of_operator.get(operator.overloadpacket)
        if formula is not None:
            self.count += formula(*args, **kwargs, out_val=result)
        elif "scaled_dot_product" in str(operator):  # a kernel without a formula, as that of CPUs
            query, key, value = args[:3]
            self.count += self._flops_of_attention(query.shape, key.shape, value.shape)
        return result


class _Watch:
    """Fills the rows from hooks."""

    def __init__(self, group: HookGroup, modules: Mapping[str, nn.Module], gradients: bool) -> None:
        """Hook all ``modules`` (by name) of a model, to fill the table of `inspect`; ``gradients``
        adds backward hooks."""
        self.rows: list[CallRow] = []
        self.ended: list[CallRow] = []
        self.operations = _Operations()
        self._running: list[tuple[CallRow, int]] = []
        """The rows of calls that have begun, each with the flops that were counted before it."""
        self._awaiting: dict[nn.Module, list[CallRow]] = {}
        """The calls of each module whose gradients have not come back yet."""
        self._names = {module: name for name, module in modules.items()}
        group.forward_pre(modules, self._begin, with_kwargs=True)
        if gradients:
            group.backward(modules, self._came_back)
        group.forward(modules, self._end)

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Add the row of a call that begins, with its input shapes and parameters: a forward-pre
        hook."""
        name = self._names[module]
        shapes = [
            list(value.shape)
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.Tensor)
        ]
        row = CallRow(
            order=len(self.rows),
            name=name,
            type=type(module).__name__,
            depth=_depth(name),
            inputs=shapes,
            parameters=sum(p.numel() for p in module.parameters()),
        )
        self.rows.append(row)
        self._running.append((row, self.operations.count))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Complete the row of a call that ends: output, flops, memory, dead units, finiteness. A
        forward hook."""
        row, flops_before = self._running.pop()
        row.flops = self.operations.count - flops_before
        tensor = first_tensor(output)
        if tensor is not None:
            row.output = list(tensor.shape)
            row.memory = tensor.nbytes
            row.finite = not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
            if "ReLU" in row.type and tensor.ndim > 1 and tensor.numel():
                # units are in the second dimension, as channels and features are
                is_zero_by_unit = (tensor == 0).transpose(0, 1).flatten(1)
                row.dead = is_zero_by_unit.all(1).float().mean().item()
        self.ended.append(row)
        self._awaiting.setdefault(module, []).append(row)

    def _came_back(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        """Write the norm of the gradient that came back to a module's latest call into its row of
        `inspect`: a backward hook."""
        row = self._awaiting[module].pop()  # backward meets the calls of a module in reverse
        norm = math.hypot(
            *(g.detach().double().norm().item() for g in grad_output if g is not None)
        )
        row.gradient_finite = math.isfinite(norm)
        row.gradient = norm if row.gradient_finite else None


def _differentiate(
    output: Any, score: Callable[[Any], torch.Tensor] | None, inputs: list[Any]
) -> None:
    """Run backward from a score (or the sum of each sample's largest value) to those ``inputs``
    that require a gradient, so that backward hooks fire."""
    tensor = first_tensor(output) if score is None else score(output)
    if not isinstance(tensor, torch.Tensor):
        raise HookError(
            f"score must return a tensor, got {type(tensor).__name__}; give a function of the "
            "output"
        )
    has_samples = score is None and tensor.ndim > 1
    total = tensor.flatten(1).amax(1).sum() if has_samples else tensor.sum()
    sources = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if total.requires_grad and sources:
        differentiate(total, sources)


def _cells(row: CallRow) -> tuple[str, ...]:
    """The texts of a row of the table of `inspect`, one for each column of `HEADER`."""
    note = ""
    if not row.finite:
        note = "NaN or infinity"
    elif not row.gradient_finite:
        note = "NaN or infinity in the gradient"
    return (
        printable("  " * row.depth + (row.name.rpartition(".")[2] or "model")),
        row.type,
        "" if row.output is None else " x ".join(map(str, row.output)),
        f"{row.parameters:,}",
        _short(row.flops),
        f"{_short(row.memory)}B" if row.memory else "",
        f"{1e3 * row.seconds:.2f}",
        "" if row.dead is None else f"{row.dead:.0%}",
        "" if row.gradient is None else f"{row.gradient:.3g}",
        note,
    )


def _depth(name: str) -> int:
    """How deep a layer is nested in the model, by its dotted name: 0 for the model itself."""
    return name.count(".") + 1 if name else 0


def _short(count: int) -> str:
    """A count with three digits and a prefix, as ``3.63 G``; empty for 0."""
    power = next((power for power in (4, 3, 2, 1) if count >= 1000**power), 0)
    return f"{count / 1000**power:.3g} {' kMGT'[power].strip()}" if count else ""


@dataclass(frozen=True)
class Event:
    """One hook that fired: the kind of it, and the layer that it sat on."""

    kind: str
    layer: str
    type: str


class Timeline(list[Event]):
    """Events in the order in which they happened; printing it shows them by depth."""

    def __str__(self) -> str:
        """The events as numbered lines, indented by the depth of their layers."""
        lines = []
        for number, event in enumerate(self, start=1):
            indent = "  " * _depth(event.layer)
            lines.append(
                f"{number:>4}  {indent}{event.kind:<13} {event.layer or 'model'} ({event.type})"
            )
        return "\n".join(lines)

    __repr__ = __str__


def timeline(model: nn.Module, *inputs: Any) -> Timeline:
    """Run a model forward and backward, and note every module hook as it fires.

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
    modules = unwrap.hookable(model)
    names = {module: name for name, module in modules.items()}

    def note(kind: str, module: nn.Module, *values: Any) -> None:
        """Add the event of a hook that fired; ``values`` are its other arguments."""
        events.append(Event(kind, names[module], type(module).__name__))

    with preserve.untouched(model, grad=True), HookGroup(model) as group:
        group.forward_pre(modules, partial(note, "forward-pre"))
        group.forward(modules, partial(note, "forward"))
        group.backward_pre(modules, partial(note, "backward-pre"))
        group.backward(modules, partial(note, "backward"))
        # copies that require a gradient, so that one comes to the hooks of every layer
        sources = as_sources(inputs)
        output = model(*sources)
        _differentiate(output, score=None, inputs=sources)
    return events
