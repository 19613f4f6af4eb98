"""Drawing programs: `programs` is a strategy of hypothesis, and a `Sketch` the program that it adds
steps to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.programs import (
    ACTIVATIONS,
    METHODS,
    TAKES_INPLACE,
    Program,
    Shape,
    Step,
    closed_runs,
    legal,
    module_of,
    shape_after,
)

MOST_INPUTS = 3


IN_PLACE_TOO = ("module", "function_")


class Sketch:
    """A program in the making: steps, and the shapes of the values so far."""

    def __init__(self, draw: Any, inputs: Sequence[Shape]) -> None:
        self.draw = draw
        self.inputs = tuple(inputs)
        self.steps: list[Step] = []
        self.shapes: list[Shape] = list(inputs)

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def add(self, op: str, *of: int, options: tuple[Any, ...] = (), style: str = "module") -> int:
        return self.append(Step(op, of, options, style))

    def append(self, step: Step) -> int:
        self.shapes.append(shape_after(step, tuple(self.shapes[v] for v in step.of)))
        self.steps.append(step)
        return len(self.shapes) - 1

    def maps(self, like: Shape | None = None) -> list[int]:
        """The values that are maps, or are of the shape given; the latest first."""
        numbers = reversed(range(len(self.shapes)))
        return [i for i in numbers if len(self.shapes[i]) == 3 and like in (None, self.shapes[i])]

    def maybe(self, function: Callable[[int], int], of: int) -> int:
        return self.pick(function, lambda of: of)(of)

    def divisors(self, *numbers: int) -> list[int]:
        return [g for g in range(1, 4) if all(number % g == 0 for number in numbers)]

    def conv(self, of: int, out: int | None = None, *, keep: bool = False) -> int:
        channels, *sides = self.shapes[of]
        out = out or self.pick(4, 2, 3, 6, channels, 2 * channels)
        bias = self.pick(True, False)
        groups = self.pick(1, *self.divisors(channels, out), channels if out % channels == 0 else 1)
        if keep:
            side = self.pick(1, 3)
            options = (out, (side, side), 1, side // 2, 1, groups, bias)
            return self.add("conv", of, options=options)
        kernel = (self.pick(3, 1, 2), self.pick(3, 1, 2))
        dilation = self.pick(1, 1, 1, 2)
        padding = self.pick(1, 0, 2)
        reach = [dilation * (side - 1) - 2 * padding for side in kernel]
        if any(side <= least for side, least in zip(sides, reach, strict=True)):
            padding = dilation * max(kernel)
        options = (out, kernel, self.pick(1, 1, 2), padding, dilation, groups, bias)
        return self.add("conv", of, options=options)

    def act(self, of: int) -> int:
        kind = self.pick("relu", "relu", "relu", *ACTIVATIONS)
        if kind == "prelu":
            if len(self.shapes[of]) == 3:
                return self.add("act", of, options=(kind,))
            kind = "relu"
        styles = ["module", "function"]
        if kind in TAKES_INPLACE:
            styles += ["module_", "function_", "effect_"]
        if kind in METHODS:
            styles.append("method_")
        return self.add("act", of, options=(kind,), style=self.pick(*styles))

    def norm(self, of: int) -> int:
        channels, height, width = self.shapes[of]
        kinds = ["batch", "batch"]
        if height * width > 1:  # one place has no variance
            kinds += ["group", "instance"]
        if channels > 1:  # what is normalised over one channel is nothing but rounding errors
            kinds.append("layer")
        kind = self.pick(*kinds)
        groups = self.pick(1, *self.divisors(channels), channels)
        return self.add("norm", of, options=(kind, groups if kind == "group" else self.pick(1, 0)))

    def pool(self, of: int) -> int:
        _, height, width = self.shapes[of]
        kind = self.pick("max", "avg", "adaptive_avg", "adaptive_max")
        kernel = min(self.pick(2, 3), height, width)
        sizes: tuple[Any, ...] = (
            kernel,
            self.pick(*range(1, kernel + 1)),
            self.pick(0, kernel // 2),
        )
        if kind.startswith("adaptive"):
            sizes = ((self.pick(*range(1, height + 1)), self.pick(*range(1, width + 1))),)
        return self.add("pool", of, options=(kind, *sizes), style=self.pick("module", "function"))

    def again(self, of: int) -> int:
        """Call a module once more that was made for as many channels."""
        choices = [i for i in range(len(self.steps)) if self._fits(i, of)]
        if not choices:
            return self.act(of)
        i = self.pick(*choices)
        return self.append(replace(self.steps[i], of=(of,), again=i))

    def _fits(self, i: int, of: int) -> bool:
        step = self.steps[i]
        shape = self.shapes[of]
        first = self.shapes[step.of[0]]
        if step.op not in ("conv", "norm", "act", "pool") or step.again is not None:
            return False
        if step.style == "effect_" or module_of(step, first) is None:
            return False
        if len(first) != len(shape) or first[0] != shape[0]:
            return False
        if step.options[0] in ("instance", "group") and shape[1] * shape[2] < 2:
            return False
        try:
            return min(shape_after(step, (shape,))) > 0
        except RuntimeError:
            return False

    def join(self, of: int) -> int:
        """Add another value, put it beside, or multiply with it."""
        shape = self.shapes[of]
        beside = [
            i
            for i in self.maps()
            if self.shapes[i][1:] == shape[1:] and self.shapes[i][0] + shape[0] <= 12
        ]
        kind = self.pick("add", "add", "cat", "mul")
        if kind == "cat" and not beside:
            return of
        other = self.pick(*(beside if kind == "cat" else self.maps(shape)))
        pair = self.pick((of, other), (other, of))
        styles = {"cat": ("module",), "mul": IN_PLACE_TOO}
        all_styles = ("module", "function", "function_", "method_")
        return self.add(kind, *pair, style=self.pick(*styles.get(kind, all_styles)))

    def residual(self, of: int) -> int:
        """A convolution that keeps the shape, an activation, and the shortcut."""
        inner = self.conv(of, self.shapes[of][0], keep=True)
        inner = self.maybe(self.act, self.maybe(self.norm, inner))
        pair = self.pick((inner, of), (of, inner))
        return self.add("add", *pair, style=self.pick("function_", "module", "method_"))

    def shortcut(self, of: int) -> int:
        """An activation in place, a convolution of what it returns, and a shortcut from what it
        overwrote."""
        kind, style = self.pick(
            ("relu", "module_"), ("silu", "module_"), ("relu", "method_"), ("elu", "function_")
        )
        inner = self.add("act", of, options=(kind,), style=style)
        beside = self.conv(inner, self.shapes[of][0], keep=True)
        same = self.add("same", inner, of)
        return self.add("add", beside, same, style=self.pick(*IN_PLACE_TOO))

    def gate(self, of: int) -> int:
        """Squeeze and excite."""
        channels = self.shapes[of][0]
        if self.pick(True, False):
            style = self.pick("module", "function")
            inner = self.add("pool", of, options=("adaptive_avg", 1), style=style)
            inner = self.add("conv", inner, options=(channels, (1, 1), 1, 0, 1, 1, True))
        else:
            inner = self.add("mean", of, options=("mean",))
            inner = self.add("linear", inner, options=(channels, True))
        style = self.pick("module", "function", "method_")
        inner = self.add("act", inner, options=("sigmoid",), style=style)
        return self.add("mul", of, inner, style=self.pick(*IN_PLACE_TOO))

    def look_away(self, of: int) -> int:
        """Join what no gradient goes through: a value detached, or computed without."""
        if self.pick(True, False):
            aside = self.add("detach", self.pick(*self.maps(self.shapes[of])))
        else:
            options = (self.shapes[of][0], (3, 3), 1, 1, 1, 1, True)
            aside = self.add("conv", of, options=options, style="no_grad")
            style = self.pick("no_grad", "function")
            aside = self.add("act", aside, options=("tanh",), style=style)
        return self.add(self.pick("mul", "add"), of, aside, style=self.pick(*IN_PLACE_TOO))

    def other(self, of: int) -> int:
        """Views, shuffles, parts changed in place, sizes, and modules that do nothing."""
        channels, height, width = self.shapes[of]
        part = self.pick((0, channels, 2), (1, channels, 1), (0, channels // 2, 1))
        factor = self.pick(0.5, -1.0)
        size = (self.pick(height, 2 * height, max(1, height // 2)), self.pick(width, width + 1))
        kernel = self.pick(2, 3)
        options: dict[str, tuple[Any, ...]] = {
            "sequence": (),
            "scale": (factor, self.pick(0.0, 0.25)),
            "permute": (self.pick(0, *self.divisors(channels)[1:]),),
            "resize": (self.pick("nearest", "bilinear"), tuple(min(16, side) for side in size)),
            "identity": (self.pick("identity", "dropout", "dropout2d"),),
        }
        if channels > 1:
            options["slice"] = part
            options["half"] = (self.pick("relu", "scale"), *part)
            options["chunk"] = (self.pick(0, 1),)
        if max(height, width) <= 8:
            padding = self.pick(0, 0, 1) if min(height, width) > 1 else 0
            options["deconv"] = (
                self.pick(2, 4),
                kernel,
                self.pick(1, 2),
                padding,
                self.pick(True, False),
            )
        kind = self.pick(*options)
        if kind == "scale" and self.pick(True, False):
            style = self.pick("operator", "operator_")
            return self.add("scale", of, options=(factor, 0.0), style=style)
        style = self.pick(*IN_PLACE_TOO) if kind in ("scale", "half") else "module"
        return self.add(kind, of, options=options[kind], style=style)

    def step(self) -> None:
        often = [self.norm, self.pool, self.join, self.residual, self.again]
        kinds = [self.conv] * 5 + [self.act] * 4 + often * 2
        seldom = [self.gate, self.other, self.other] * 2 + [self.look_away, self.shortcut]
        of = self.pick(*self.maps()[:1] * 4, *self.maps()[:4])
        self.pick(*kinds * 2, *seldom)(of)

    def normalise_input(self) -> None:
        """Networks that bring the pixels into a range of their own now and then do so in place."""
        kind = self.pick("scale", "act", *[None] * 5) if len(self.inputs) == 1 else None
        if kind == "scale":
            self.add("scale", 0, options=(0.5, 0.25), style="function_")
        elif kind == "act":
            self.add("act", 0, options=("relu",), style="module_")

    def merge_inputs(self) -> None:
        """Bring every further input to the first one's size, or to a vector, and join it."""
        for i in range(1, len(self.inputs)):
            of = self.maps()[0]
            channels, *sides = self.shapes[of]
            if len(self.inputs[i]) == 1:
                other = self.add("linear", i, options=(channels, True))
                other = self.add("act", other, options=("sigmoid",))
                kind = "mul"
            else:
                other = self.conv(i, channels, keep=True)
                other = self.add("resize", other, options=("bilinear", tuple(sides)))
                kind = self.pick("add", "cat", "mul")
            style = "module" if kind == "cat" else self.pick(*IN_PLACE_TOO)
            self.add(kind, of, other, style=style)

    def head(self, classes: int) -> None:
        of = self.maps()[0]
        kind = self.pick("gap", "gap", "pool", "mlp", "conv", "max", "tokens")
        bias = self.pick(True, True, False)
        flatten = self.pick("module", "function", "view")
        if kind == "conv":
            of = self.add("conv", of, options=(classes, (1, 1), 1, 0, 1, 1, bias))
            self.add("mean", of, options=("mean",))
            return
        if kind == "pool":
            style = self.pick("module", "function")
            of = self.add("pool", of, options=("adaptive_avg", 1), style=style)
            of = self.add("flatten", of, style=flatten)
        elif kind == "tokens":
            of = self.add("tokens", of)
        elif kind == "mlp":
            of = self.add("flatten", of, style=flatten)
            of = self.act(self.add("linear", of, options=(4, True)))
        else:
            of = self.add("mean", of, options=("max" if kind == "max" else "mean",))
        self.add("linear", of, options=(classes, bias))


@st.composite
def programs(draw: Any, most_steps: int = 9) -> Program:
    """Draw a network; the simplest is one convolution, averaged and classified."""
    sizes = st.integers(5, 16)
    vectors = st.tuples(st.integers(1, 5))
    pictures = st.tuples(st.integers(1, 3), sizes, sizes)
    beside = st.lists(st.one_of(vectors, pictures), max_size=MOST_INPUTS - 1)
    inputs = ((draw(st.integers(1, 4)), draw(sizes), draw(sizes)), *draw(beside))
    sketch = Sketch(draw, inputs)
    length = draw(st.integers(0, most_steps))
    early = draw(st.booleans())
    sketch.normalise_input()
    sketch.conv(sketch.maps()[0] if len(inputs) == 1 else 0)
    if early:
        sketch.merge_inputs()
    for _ in range(length):
        sketch.step()
    if not early:
        sketch.merge_inputs()
    output = sketch.pick(*["tensor"] * 5, "numbers", "tuple", "list", "dict", "scores", "named")
    sketch.head(1 if output == "numbers" else sketch.pick(3, 2, 5, 1))
    program = Program(inputs, tuple(sketch.steps), output, sketch.pick(*sketch.maps()))
    gives = st.sampled_from(["tensor", "tensor", "tuple", "dict"])
    closed = closed_runs(program)
    blocks = draw(st.lists(st.tuples(st.sampled_from(closed), gives), max_size=3)) if closed else []
    owners = [
        i
        for i, step in enumerate(program.steps)
        if step.op in ("conv", "norm") and step.again is None
    ]
    return legal(
        replace(
            program,
            blocks=tuple((*run, kind) for run, kind in blocks),
            twins=sketch.pick(*[()] * 9, (sketch.pick(*owners),)),
            seed=draw(st.integers(0, 999)),
        )
    )
