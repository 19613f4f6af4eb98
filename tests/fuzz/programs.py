"""Random networks as printable values: a `Program` is a list of steps, and `Network` the module
that it describes.

Value 0 is the first input; the steps' results are numbered on behind the inputs. A step may work in
place, give a view, or call the module of an earlier step again. What a program means is said once
more, without anything in place, in `tests.fuzz.pure`.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]  # of one image's value: (C, h, w) or (D,)
Answer = namedtuple("Answer", ["logits", "features"])


@dataclass(frozen=True)
class Step:
    """One operation on earlier values: ``options`` are what its kind needs, ``again`` the step
    whose module it calls.

    ``style`` says how it is written: as a "module", a "function", an "operator" that a library has
    registered, one of them in place ("module_", "function_", "method_", "operator_"), in place for
    its effect alone ("effect_", whose result is read from the tensor that went in), or inside
    "no_grad".
    """

    op: str
    of: tuple[int, ...]
    options: tuple[Any, ...] = ()
    style: str = "module"
    again: int | None = None


@dataclass(frozen=True)
class Program:
    """A network: the shapes of its inputs, its steps, and how the last value goes out.

    ``blocks`` are runs of steps (start, stop, "tensor", "tuple" or "dict") in a container that
    gives one of these; ``twins`` are steps whose module has a second name. ``output`` is "tensor",
    "numbers" (N,), "tuple", "list", "dict", "scores" (a dict without known names) or "named", with
    ``extra``, a value, beside the scores.
    """

    inputs: tuple[Shape, ...]
    steps: tuple[Step, ...]
    output: str = "tensor"
    extra: int = 0
    blocks: tuple[tuple[int, int, str], ...] = ()
    twins: tuple[int, ...] = ()
    seed: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# Modules and operations

ACTIVATIONS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Tensor]]] = {
    "relu": (nn.ReLU, F.relu),
    "leaky_relu": (nn.LeakyReLU, F.leaky_relu),
    "elu": (nn.ELU, F.elu),
    "silu": (nn.SiLU, F.silu),
    "hardswish": (nn.Hardswish, F.hardswish),
    "relu6": (nn.ReLU6, F.relu6),
    "gelu": (nn.GELU, F.gelu),
    "tanh": (nn.Tanh, torch.tanh),
    "sigmoid": (nn.Sigmoid, torch.sigmoid),
    "softplus": (nn.Softplus, F.softplus),
    "prelu": (nn.PReLU, F.prelu),
}
TAKES_INPLACE = frozenset({"relu", "leaky_relu", "elu", "silu", "hardswish", "relu6"})
METHODS = frozenset({"relu", "tanh", "sigmoid"})  # x.relu_() and so on
IN_PLACE = frozenset({"module_", "function_", "method_", "effect_", "operator_"})
VIEWS = frozenset({"same", "slice", "chunk", "flatten", "identity", "detach", "permute"})
POOLS = {
    "max": nn.MaxPool2d,
    "avg": nn.AvgPool2d,
    "adaptive_avg": nn.AdaptiveAvgPool2d,
    "adaptive_max": nn.AdaptiveMaxPool2d,
}


def module_of(step: Step, shape: Shape) -> nn.Module | None:
    """The module that a step calls on values of ``shape``, if it calls one."""
    options = step.options
    if step.op == "conv":
        out, kernel, stride, padding, dilation, groups, bias = options
        return nn.Conv2d(shape[0], out, kernel, stride, padding, dilation, groups, bias)
    if step.op == "deconv":
        out, kernel, stride, padding, bias = options
        return nn.ConvTranspose2d(shape[0], out, kernel, stride, padding, bias=bias)
    if step.op == "linear":
        return nn.Linear(shape[0], options[0], bias=options[1])
    if step.op == "norm":
        return _norm(options, shape)
    if step.op == "act":
        return _activation(options[0], step.style, shape)
    if step.op == "pool" and step.style == "module":
        kind, *sizes = options
        return POOLS[kind](*sizes)
    if step.op == "identity" and step.style == "module":
        return {"identity": nn.Identity, "dropout": nn.Dropout, "dropout2d": nn.Dropout2d}[
            options[0]
        ]()
    return nn.Flatten() if step.op == "flatten" and step.style == "module" else None


def _norm(options: tuple[Any, ...], shape: Shape) -> nn.Module:
    kind, groups = options
    if kind == "batch":
        return nn.BatchNorm2d(shape[0], affine=bool(groups))
    if kind == "group":
        return nn.GroupNorm(groups, shape[0])
    return (
        nn.InstanceNorm2d(shape[0], affine=bool(groups))
        if kind == "instance"
        else nn.LayerNorm(shape[0])
    )


def _activation(kind: str, style: str, shape: Shape) -> nn.Module | None:
    if kind == "prelu":
        return nn.PReLU(shape[0])
    if style not in ("module", "module_", "no_grad", "effect_"):
        return None
    made = ACTIVATIONS[kind][0]
    return made(inplace=True) if style in ("module_", "effect_") else made()


def run(step: Step, module: Any, args: Sequence[Tensor]) -> Tensor:
    """Do what a step says, as it says it."""
    with torch.no_grad() if step.style == "no_grad" else nullcontext():
        done = _DO[step.op](step, module, *args)
    return args[0] if step.style == "effect_" else done


def _act(step: Step, module: Any, x: Tensor) -> Tensor:
    kind = step.options[0]
    if module is not None:
        return module(x)
    if step.style == "method_":
        return getattr(torch, f"{kind}_")(x)
    function = ACTIVATIONS[kind][1]
    return function(x, inplace=True) if step.style == "function_" else function(x)


def _norm_call(step: Step, module: Any, x: Tensor) -> Tensor:
    return (
        module(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if step.options[0] == "layer"
        else module(x)
    )


def _pool(step: Step, module: Any, x: Tensor) -> Tensor:
    if module is not None:
        return module(x)
    kind, *sizes = step.options
    return {
        "max": F.max_pool2d,
        "avg": F.avg_pool2d,
        "adaptive_avg": F.adaptive_avg_pool2d,
        "adaptive_max": F.adaptive_max_pool2d,
    }[kind](x, *sizes)


def _add(step: Step, module: Any, x: Tensor, y: Tensor) -> Tensor:
    if step.style == "method_":
        return x.add_(y)
    if step.style == "function_":
        x += y
        return x
    return torch.add(x, y) if step.style == "function" else x + y


def _mul(step: Step, module: Any, x: Tensor, y: Tensor) -> Tensor:
    y = y[:, :, None, None] if y.ndim < x.ndim else y
    if step.style in IN_PLACE:
        x *= y
        return x
    return x * y


_library = torch.library.Library("explain_fuzz", "FRAGMENT")
_library.define("scale(Tensor x, float factor) -> Tensor")
_library.define("scale_(Tensor(a!) x, float factor) -> Tensor(a!)")
# one with a kernel and a derivative of its own, and one that is composed of others
_library.impl("scale", lambda x, factor: x * factor, "CompositeExplicitAutograd")
_library.impl("scale_", lambda x, factor: x.mul_(factor), "CompositeImplicitAutograd")


def _keep_factor(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.factor = inputs[1]


torch.library.register_autograd(
    "explain_fuzz::scale",
    lambda context, gradient: (gradient * context.factor, None),
    setup_context=_keep_factor,
    lib=_library,
)


def _scale(step: Step, module: Any, x: Tensor) -> Tensor:
    factor, shift = step.options
    if step.style.startswith("operator"):  # of a library, without a shift
        operators = torch.ops.explain_fuzz
        return (
            operators.scale(x, factor) if step.style == "operator" else operators.scale_(x, factor)
        )
    return x.mul_(factor).add_(shift) if step.style in IN_PLACE else x * factor + shift


def _half(step: Step, module: Any, x: Tensor) -> Tensor:
    """A part of the channels, rectified or scaled through a view of them."""
    kind, start, stop, stride = step.options
    part = x[:, start:stop:stride]
    if step.style in IN_PLACE:
        part.relu_() if kind == "relu" else part.mul_(0.5)
        return x
    inside = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
    inside[start:stop:stride] = True
    return torch.where(inside[:, None, None], x.relu() if kind == "relu" else x * 0.5, x)


def _flatten(step: Step, module: Any, x: Tensor) -> Tensor:
    if module is not None:
        return module(x)
    return x.view(len(x), -1) if step.style == "view" else torch.flatten(x, 1)


def _slice(step: Step, module: Any, x: Tensor) -> Tensor:
    start, stop, stride = step.options
    return x[:, start:stop:stride]


def _permute(step: Step, module: Any, x: Tensor) -> Tensor:
    """Channels shuffled between groups, or a view that was turned round and back."""
    groups = step.options[0]
    if groups == 0:
        return x.permute(0, 2, 3, 1).permute(0, 3, 1, 2)
    n, c, h, w = x.shape
    return x.reshape(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


def _resize(step: Step, module: Any, x: Tensor) -> Tensor:
    mode, size = step.options
    extra = {} if mode == "nearest" else {"align_corners": False}
    return F.interpolate(x, size=size, mode=mode, **extra)


def _sequence(step: Step, module: Any, x: Tensor) -> Tensor:
    """A map through tokens whose sequence comes first, as transformers take them; it comes back in
    their layout."""
    return x.flatten(2).permute(2, 0, 1).contiguous().permute(1, 2, 0).reshape(x.shape)


def _tokens(step: Step, module: Any, x: Tensor) -> Tensor:
    """The mean of tokens, each with a weight by its place, behind a class token of zeros."""
    tokens = torch.cat([x.new_zeros(len(x), 1, x.shape[1]), x.flatten(2).transpose(1, 2)], 1)
    return (tokens * torch.arange(tokens.shape[1]).to(x).cos()[:, None]).mean(1)


def _mean(step: Step, module: Any, x: Tensor) -> Tensor:
    return x.amax((2, 3)) if step.options[0] == "max" else x.mean((2, 3))


_DO: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("conv", "deconv", "linear"), lambda step, module, x: module(x)),
    "norm": _norm_call,
    "act": _act,
    "pool": _pool,
    "add": _add,
    "mul": _mul,
    "scale": _scale,
    "half": _half,
    "slice": _slice,
    "permute": _permute,
    "resize": _resize,
    "flatten": _flatten,
    "mean": _mean,
    "sequence": _sequence,
    "tokens": _tokens,
    "cat": lambda step, module, *args: torch.cat(args, 1),
    "detach": lambda step, module, x: x.detach(),
    "chunk": lambda step, module, x: x.chunk(2, 1)[step.options[0]],
    "identity": lambda step, module, x: x if module is None else module(x),
    # what was overwritten, by the name that it had before
    "same": lambda step, module, new, old: old,
}


# ---------------------------------------------------------------------------------------------------------------------
# The module


class Part(nn.Module):
    """A container with steps of its own, which hands on the last one's value, alone or with another
    number."""

    def __init__(
        self, program: Program, start: int, stop: int, gives: str, modules: dict[int, nn.Module]
    ) -> None:
        super().__init__()
        self.program = program
        self.start = start
        self.stop = stop
        self.gives = gives
        self.called = modules
        first = len(program.inputs) + start
        inside = program.steps[start:stop]
        self.takes = sorted({value for step in inside for value in step.of if value < first})
        for i in range(start, stop):
            if i in modules and program.steps[i].again is None:
                self.add_module(f"m{i}", modules[i])

    def forward(self, *args: Tensor) -> Any:
        values = dict(zip(self.takes, args, strict=True))
        for i in range(self.start, self.stop):
            step = self.program.steps[i]
            values[len(self.program.inputs) + i] = run(
                step, self.called.get(i), [values[v] for v in step.of]
            )
        last = values[len(self.program.inputs) + self.stop - 1]
        return {"tensor": last, "tuple": (last, 1), "dict": {"size": 1, "map": last}}[self.gives]


class Network(nn.Module):
    """The module that a program describes, in float64, with weights by its seed."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.called = modules_of(program, shapes(program))
        self.blocks = {
            start: Part(program, start, *rest, self.called) for start, *rest in program.blocks
        }
        within = {i for start, stop, _ in program.blocks for i in range(start, stop)}
        for i, module in self.called.items():
            if i in self.blocks:
                self.add_module(f"b{i}", self.blocks[i])
            if i not in within and program.steps[i].again is None:
                self.add_module(f"m{i}", module)
        for i in sorted(set(self.blocks) - set(self.called)):
            self.add_module(f"b{i}", self.blocks[i])
        for i in program.twins:
            self.add_module(f"t{i}", self.called[i])
        fill(self, program.seed)

    def forward(self, *inputs: Tensor) -> Any:
        values: dict[int, Tensor] = dict(enumerate(inputs))
        i = 0
        count = len(inputs)
        while i < len(self.program.steps):
            if i in self.blocks:
                block = self.blocks[i]
                i = block.stop
                given = block(*[values[v] for v in block.takes])
                given = given["map"] if block.gives == "dict" else given
                values[count + i - 1] = given[0] if block.gives == "tuple" else given
                continue
            step = self.program.steps[i]
            values[count + i] = run(step, self.called.get(i), [values[v] for v in step.of])
            i += 1
        return answer(self.program, values[count + i - 1], values[self.program.extra])


def answer(program: Program, scores: Tensor, extra: Tensor) -> Any:
    """The output that a program gives its scores ``(N, K)`` in."""
    if program.output == "numbers":
        return scores[:, 0]
    made: dict[str, Callable[[], Any]] = {
        "tensor": lambda: scores,
        "tuple": lambda: (scores, extra),
        "list": lambda: [scores, None],
        "dict": lambda: {"features": extra, "logits": scores},
        "scores": lambda: {"scores": scores},
        "named": lambda: Answer(scores, extra),
    }
    return made[program.output]()


def scores_in(output: Any) -> Tensor:
    """The scores ``(N, K)`` in the output of a `Network`, found by its form alone."""
    if isinstance(output, dict):
        output = output.get("logits", output.get("scores"))
    output = output[0] if isinstance(output, (tuple, list)) else output
    return output[:, None] if output.ndim == 1 else output


@lru_cache(maxsize=64)
def shapes(program: Program) -> tuple[Shape, ...]:
    """The shape of every value of one image, without numbers."""
    found = list(program.inputs)
    for step in program.steps:
        found.append(shape_after(step, tuple(found[v] for v in step.of)))
    return tuple(found)


def sees(program: Program, *, by_gradient: bool = False) -> set[int]:
    """The values that depend on the explained image, or those that a gradient leads from."""
    count = len(program.inputs)
    found = {0}
    for place, step in enumerate(program.steps, start=count):
        cut = by_gradient and (step.op == "detach" or step.style == "no_grad")
        if found & set(step.of) and not cut:
            found.add(place)
    return found


@lru_cache(maxsize=4096)
def shape_after(step: Step, given: tuple[Shape, ...]) -> Shape:
    # A view of a view of nothing is as good as one of numbers; in place, expanded tensors would be
    # refused.
    with torch.device("meta"):
        module = module_of(step, given[0])
        module = None if module is None else module.eval()
        plainly = replace(step, style="module" if step.style in IN_PLACE else step.style)
        with torch.no_grad():
            return tuple(
                run(plainly, module, [torch.empty(1, *shape) for shape in given]).shape[1:]
            )


def modules_of(program: Program, found: Sequence[Shape]) -> dict[int, nn.Module]:
    """The module that each step calls: the same object where one is called again."""
    modules: dict[int, nn.Module] = {}
    for i, step in enumerate(program.steps):
        module = (
            modules.get(step.again)
            if step.again is not None
            else module_of(step, found[step.of[0]])
        )
        if module is not None:
            modules[i] = module.double()
    return modules


def fill(model: nn.Module, seed: int) -> None:
    """Random weights that keep the size of what passes through, and running statistics that are not
    the first ones."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, tensor in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]:
                if not tensor.is_floating_point():
                    continue
                drawn = torch.randn(tensor.shape, generator=g, dtype=tensor.dtype)
                fan_in = max(1, tensor[0].numel()) if tensor.ndim > 1 else 4
                normalises = tensor.ndim == 1 and name in ("weight", "running_var")
                tensor.copy_(0.5 + drawn.abs() if normalises else drawn * 1.5 / fan_in**0.5)


# ---------------------------------------------------------------------------------------------------------------------
# What a program may do in place


def legal(program: Program) -> Program:
    """The same program, with what may not happen in place done out of place, and without blocks
    that are none.

    A tensor is overwritten only when nobody reads it, or a view of it, any more; and not where
    autograd has kept it.
    """
    program = _with_blocks(_without_lost_values(program))
    while True:
        try:
            network = Network(program).eval()
            g = torch.Generator().manual_seed(1)
            given = [
                torch.randn(2, *shape, generator=g, dtype=torch.float64) for shape in program.inputs
            ]
            scores_in(network(*(x.requires_grad_().clone() for x in given))).sum().backward()
        except RuntimeError as error:
            if "inplace" not in str(error) and "in-place" not in str(error):
                if "view size is not" in str(error):
                    steps = [
                        replace(step, style="function") if step.style == "view" else step
                        for step in program.steps
                    ]
                    program = replace(program, steps=tuple(steps))
                    continue
                if "does not require grad" in str(error):
                    return program
                raise
            place = next(i for i, step in enumerate(program.steps) if step.style in IN_PLACE)
            program = _out_of_place(program, place)
        else:
            return program


def _out_of_place(program: Program, place: int) -> Program:
    steps = list(program.steps)
    steps[place] = replace(steps[place], style="module")
    value = len(program.inputs) + place
    for i, step in enumerate(steps):
        # now there are two tensors, and the new one is meant
        if step.op == "same" and step.of[0] == value:
            steps[i] = Step("identity", (value,), ("identity",), "function")
    # who calls the module of this step again would find another one
    for i, step in enumerate(steps):
        if step.again == place:
            steps[i] = replace(step, style="module")
    return replace(program, steps=tuple(steps))


def _without_lost_values(program: Program) -> Program:
    for i, step in enumerate(program.steps):
        if step.style in IN_PLACE and _is_read_later(program, i):
            program = _out_of_place(program, i if step.again is None else step.again)
    return program


def _is_read_later(program: Program, place: int) -> bool:
    """Whether a value that shares memory with what step ``place`` overwrites is read behind it."""
    count = len(program.inputs)
    memory = list(range(count))
    for i, step in enumerate(program.steps):
        shares = step.op in VIEWS or step.style in IN_PLACE
        memory.append(memory[step.of[0]] if shares else count + i)
    overwritten = memory[program.steps[place].of[0]]
    later = [
        value
        for step in program.steps[place + 1 :]
        for value in step.of[: 1 if step.op == "same" else None]
    ]
    if program.output in ("tuple", "dict", "named"):
        later.append(program.extra)
    # x *= x.mean() is fine, but a view of x beside it is asking for trouble
    others = program.steps[place].of[1:]
    return any(memory[v] == overwritten and v < count + place for v in later) or any(
        memory[v] == overwritten for v in others
    )


def closed_runs(program: Program) -> list[tuple[int, int]]:
    """The runs of steps of which nothing but the last value is used outside."""
    count = len(program.inputs)
    found = []
    for stop in range(1, len(program.steps) + 1):
        later = {v for step in program.steps[stop:] for v in step.of} | {program.extra}
        found += [
            (start, stop)
            for start in range(stop)
            if not later & set(range(count + start, count + stop - 1))
        ]
    return found


def _with_blocks(program: Program) -> Program:
    """Leave out blocks that a value other than the last leads out of, and those that overlap."""
    kept = []
    end = 0
    closed = closed_runs(program)
    for block in sorted(program.blocks):
        if end <= block[0] and block[:2] in closed:
            kept.append(block)
            end = block[1]
    return replace(program, blocks=tuple(kept))
