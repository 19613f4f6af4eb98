"""Drawing programs: `programs` is a strategy of hypothesis, and a `Sketch` the program that it adds
steps to."""

from __future__ import annotations

from collections.abc import Sequence
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


class Sketch:
    """A program in the making: steps, and the shapes of the values so far."""

    def __init__(self, draw: Any, inputs: Sequence[Shape]) -> None:
        self.draw = draw
        self.inputs = tuple(inputs)
        self.steps: list[Step] = []
        self.shapes: list[Shape] = list(inputs)

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def add(self, step: Step) -> int:
        self.shapes.append(shape_after(step, tuple(self.shapes[v] for v in step.of)))
        self.steps.append(step)
        return len(self.shapes) - 1

    @property
    def last(self) -> int:
        return len(self.shapes) - 1

    def maps(self, like: Shape | None = None) -> list[int]:
        """The values that are maps, or are of the shape given; the latest first."""
        return [
            i
            for i in reversed(range(len(self.shapes)))
            if len(self.shapes[i]) == 3 and (like is None or self.shapes[i] == like)
        ]

    def conv(self, of: int, out: int | None = None, *, keep: bool = False) -> int:
        channels, height, width = self.shapes[of]
        kernel = (
            (1, 1)
            if keep and self.draw(st.booleans())
            else (self.pick(3, 1, 2), self.pick(3, 1, 2))
        )
        kernel = (3, 3) if keep and kernel != (1, 1) else kernel
        dilation = 1 if keep else self.pick(1, 1, 1, 2)
        padding = kernel[0] // 2 if keep else self.pick(1, 0, 2)
        room = all(
            size + 2 * padding > dilation * (k - 1)
            for size, k in zip((height, width), kernel, strict=True)
        )
        stride = 1 if keep else self.pick(1, 1, 2)
        out = out or self.pick(4, 2, 3, 6, channels, 2 * channels)
        groups = self.pick(*[g for g in (1, 1, channels, 2) if channels % g == 0 and out % g == 0])
        options = (
            out,
            kernel,
            stride,
            padding if room else dilation * max(kernel),
            dilation,
            groups,
        )
        return self.add(Step("conv", (of,), (*options, self.draw(st.booleans()))))

    def act(self, of: int) -> int:
        kind = self.pick("relu", "relu", "relu", *ACTIVATIONS)
        if len(self.shapes[of]) == 1 and kind == "prelu":
            kind = "relu"
        styles = ["module"] if kind == "prelu" else ["module", "function"]
        styles += ["module_", "function_", "effect_"] * (kind in TAKES_INPLACE) + ["method_"] * (
            kind in METHODS
        )
        return self.add(Step("act", (of,), (kind,), self.pick(*styles)))

    def norm(self, of: int) -> int:
        channels = self.shapes[of][0]
        several = channels > 1  # what is normalised over one channel is nothing but rounding errors
        kind = self.pick("batch", "batch", "group", "instance", "layer" if several else "batch")
        if kind in ("instance", "group") and self.shapes[of][1] * self.shapes[of][2] < 2:
            kind = "batch"  # one place has no variance
        groups = self.pick(*[g for g in (1, 2, channels) if channels % g == 0])
        return self.add(Step("norm", (of,), (kind, groups if kind == "group" else self.pick(1, 0))))

    def pool(self, of: int) -> int:
        _, height, width = self.shapes[of]
        kind = self.pick("max", "avg", "adaptive_avg", "adaptive_max")
        if kind.startswith("adaptive"):
            options: tuple[Any, ...] = (
                kind,
                (self.pick(*range(1, height + 1)), self.pick(*range(1, width + 1))),
            )
        else:
            kernel = min(self.pick(2, 3), height, width)
            options = (kind, kernel, self.pick(*range(1, kernel + 1)), self.pick(0, kernel // 2))
        return self.add(Step("pool", (of,), options, self.pick("module", "function")))

    def again(self, of: int) -> int:
        """Call a module once more that was made for as many channels."""
        choices = [
            i
            for i, step in enumerate(self.steps)
            if step.op in ("conv", "norm", "act", "pool")
            and step.again is None
            and step.style != "effect_"
            and self._fits(i, of)
        ]
        if not choices:
            return self.act(of)
        i = self.pick(*choices)
        return self.add(replace(self.steps[i], of=(of,), again=i))

    def _fits(self, i: int, of: int) -> bool:
        step = self.steps[i]
        shape = self.shapes[of]
        before = self.shapes[step.of[0]]
        if module_of(step, before) is None or len(before) != len(shape) or before[0] != shape[0]:
            return False
        if (
            step.op == "norm"
            and step.options[0] in ("instance", "group")
            and shape[1] * shape[2] < 2
        ):
            return False
        try:
            return min(shape_after(step, (shape,))) > 0
        except RuntimeError:
            return False

    def join(self, of: int) -> int:
        """Add another value, put it beside, or multiply with it."""
        same = self.maps(self.shapes[of])
        beside = [i for i in self.maps() if self.shapes[i][1:] == self.shapes[of][1:]]
        kind = self.pick("add", "add", "cat", "mul")
        if kind == "cat" and sum(self.shapes[i][0] for i in (of, beside[0])) <= 12:
            other = self.pick(*beside)
            pair = (of, other) if self.draw(st.booleans()) else (other, of)
            return (
                self.add(Step("cat", pair))
                if self.shapes[other][0] + self.shapes[of][0] <= 12
                else of
            )
        other = self.pick(*same)
        pair = (of, other) if self.draw(st.booleans()) else (other, of)
        styles = (
            ("module", "function", "function_", "method_")
            if kind != "mul"
            else ("module", "function_")
        )
        return self.add(Step("mul" if kind == "mul" else "add", pair, (), self.pick(*styles)))

    def residual(self, of: int) -> int:
        """A convolution that keeps the shape, an activation, and the shortcut."""
        inner = self.conv(of, self.shapes[of][0], keep=True)
        inner = self.norm(inner) if self.draw(st.booleans()) else inner
        inner = self.act(inner) if self.draw(st.booleans()) else inner
        pair = (inner, of) if self.draw(st.booleans()) else (of, inner)
        return self.add(Step("add", pair, (), self.pick("function_", "module", "method_")))

    def shortcut(self, of: int) -> int:
        """An activation in place, a convolution of what it returns, and a shortcut from what it
        overwrote."""
        kind, style = self.pick(
            ("relu", "module_"), ("silu", "module_"), ("relu", "method_"), ("elu", "function_")
        )
        inner = self.add(Step("act", (of,), (kind,), style))
        beside = self.conv(inner, self.shapes[of][0], keep=True)
        same = self.add(Step("same", (inner, of)))
        return self.add(Step("add", (beside, same), (), self.pick("module", "function_")))

    def gate(self, of: int) -> int:
        """Squeeze and excite."""
        channels = self.shapes[of][0]
        if self.draw(st.booleans()):
            inner = self.add(
                Step("pool", (of,), ("adaptive_avg", 1), self.pick("module", "function"))
            )
            inner = self.add(Step("conv", (inner,), (channels, (1, 1), 1, 0, 1, 1, True)))
        else:
            inner = self.add(Step("mean", (of,), ("mean",)))
            inner = self.add(Step("linear", (inner,), (channels, True)))
        inner = self.add(
            Step("act", (inner,), ("sigmoid",), self.pick("module", "function", "method_"))
        )
        return self.add(Step("mul", (of, inner), (), self.pick("function_", "module")))

    def look_away(self, of: int) -> int:
        """Join what no gradient goes through: a value detached, or computed without."""
        if self.draw(st.booleans()):
            aside = self.add(Step("detach", (self.pick(*self.maps(self.shapes[of])),)))
        else:
            channels = self.shapes[of][0]
            aside = self.add(Step("conv", (of,), (channels, (3, 3), 1, 1, 1, 1, True), "no_grad"))
            aside = self.add(Step("act", (aside,), ("tanh",), self.pick("no_grad", "function")))
        return self.add(
            Step(self.pick("mul", "add"), (of, aside), (), self.pick("module", "function_"))
        )

    def other(self, of: int) -> int:
        """Views, shuffles, parts changed in place, sizes, and modules that do nothing."""
        channels, height, width = self.shapes[of]
        kind = self.pick(
            "identity", "slice", "half", "scale", "permute", "resize", "chunk", "deconv", "sequence"
        )
        if kind == "sequence":
            return self.add(Step("sequence", (of,)))
        if kind in ("slice", "half") and channels > 1:
            start, stop, stride = self.pick(
                (0, channels, 2), (1, channels, 1), (0, channels // 2, 1)
            )
            if kind == "slice":
                return self.add(Step("slice", (of,), (start, stop, stride)))
            options = (self.pick("relu", "scale"), start, stop, stride)
            return self.add(Step("half", (of,), options, self.pick("function_", "module")))
        if kind == "scale":
            factor = self.pick(0.5, -1.0)
            shift = self.pick(0.0, 0.25)
            style = self.pick("function_", "module", "operator", "operator_")
            return self.add(
                Step(
                    "scale", (of,), (factor, 0.0 if style.startswith("operator") else shift), style
                )
            )
        if kind == "permute":
            return self.add(
                Step("permute", (of,), (self.pick(0, *[g for g in (2, 3) if channels % g == 0]),))
            )
        if kind == "resize":
            size = (self.pick(height, 2 * height, max(1, height // 2)), self.pick(width, width + 1))
            return self.add(
                Step(
                    "resize",
                    (of,),
                    (self.pick("nearest", "bilinear"), tuple(min(16, s) for s in size)),
                )
            )
        if kind == "chunk" and channels > 1:
            return self.add(
                Step("chunk", (of,), (self.pick(0, 1) if channels > 2 or channels == 2 else 0,))
            )
        if kind == "deconv" and max(height, width) <= 8:
            options = (
                self.pick(2, 4),
                self.pick(2, 3),
                self.pick(1, 2),
                self.pick(0, 0, 1),
                self.draw(st.booleans()),
            )
            fits = (min(height, width) - 1) * options[2] + options[1] > 2 * options[3]
            return self.add(Step("deconv", (of,), options)) if fits else of
        name = self.pick("identity", "dropout", "dropout2d")
        return self.add(Step("identity", (of,), (name,)))

    def step(self) -> None:
        of = self.pick(*self.maps()[:1] * 4, *self.maps()[:4])
        kinds = (
            [self.conv] * 5
            + [self.act] * 4
            + [self.norm, self.pool, self.join, self.residual, self.again] * 2
        )
        self.pick(
            *kinds * 2, *[self.gate, self.other, self.other] * 2, self.look_away, self.shortcut
        )(of)

    def normalise_input(self) -> None:
        """Networks that bring the pixels into a range of their own now and then do so in place."""
        kind = self.pick(
            *[None] * 5,
            Step("scale", (0,), (0.5, 0.25), "function_"),
            Step("act", (0,), ("relu",), "module_"),
        )
        if kind is not None and len(self.inputs) == 1:
            self.add(kind)

    def merge_inputs(self) -> None:
        """Bring every further input to the first one's size, or to a vector, and join it."""
        for i in range(1, len(self.inputs)):
            of = self.maps()[0]
            channels, height, width = self.shapes[of]
            if len(self.inputs[i]) == 1:
                vector = self.add(Step("linear", (i,), (channels, True)))
                vector = self.add(Step("act", (vector,), ("sigmoid",)))
                self.add(Step("mul", (of, vector), (), self.pick("function_", "module")))
                continue
            other = self.conv(i, channels, keep=True)
            other = self.add(Step("resize", (other,), ("bilinear", (height, width))))
            kind = self.pick("add", "cat", "mul")
            self.add(
                Step(
                    kind,
                    (of, other),
                    (),
                    "module" if kind == "cat" else self.pick("function_", "module"),
                )
            )

    def head(self, classes: int) -> None:
        of = self.maps()[0]
        kind = self.pick("gap", "gap", "mlp", "conv", "max", "tokens")
        if kind == "conv":
            of = self.add(
                Step("conv", (of,), (classes, (1, 1), 1, 0, 1, 1, self.draw(st.booleans())))
            )
            self.add(Step("mean", (of,), ("mean",)))
            return
        if kind == "gap" and self.draw(st.booleans()):
            of = self.add(Step("pool", (of,), ("adaptive_avg", 1), self.pick("module", "function")))
            of = self.add(Step("flatten", (of,), (), self.pick("module", "function", "view")))
        elif kind == "tokens":
            of = self.add(Step("tokens", (of,)))
        elif kind in ("gap", "max"):
            of = self.add(Step("mean", (of,), ("max" if kind == "max" else "mean",)))
        else:
            of = self.add(Step("flatten", (of,), (), self.pick("function", "module", "view")))
            of = self.act(self.add(Step("linear", (of,), (4, True))))
        self.add(Step("linear", (of,), (classes, self.pick(True, True, False))))


@st.composite
def programs(draw: Any, most_steps: int = 9, most_inputs: int | None = None) -> Program:
    """Draw a network; the simplest is one convolution, averaged and classified."""
    count = draw(st.integers(1, most_inputs or MOST_INPUTS))
    sizes = st.integers(5, 16)
    inputs: list[Shape] = [(draw(st.integers(1, 4)), draw(sizes), draw(sizes))]
    vectors = st.tuples(st.integers(1, 5))
    pictures = st.tuples(st.integers(1, 3), sizes, sizes)
    inputs += draw(st.lists(st.one_of(vectors, pictures), min_size=count - 1, max_size=count - 1))
    sketch = Sketch(draw, inputs)
    length = draw(st.integers(0, most_steps))
    early = draw(st.booleans())
    sketch.normalise_input()
    sketch.conv(sketch.maps()[0] if count == 1 else 0)
    if early:
        sketch.merge_inputs()
    for _ in range(length):
        sketch.step()
    if not early:
        sketch.merge_inputs()
    output = draw(
        st.sampled_from(["tensor"] * 5 + ["numbers", "tuple", "list", "dict", "scores", "named"])
    )
    sketch.head(1 if output == "numbers" else draw(st.sampled_from([3, 2, 5, 1])))
    steps = tuple(sketch.steps)
    extra = draw(st.sampled_from(sketch.maps()))
    closed = closed_runs(Program(tuple(inputs), steps, output, extra))
    gives = st.sampled_from(["tensor", "tensor", "tuple", "dict"])
    blocks = (
        tuple((*draw(st.sampled_from(closed)), draw(gives)) for _ in range(draw(st.integers(0, 3))))
        if closed
        else ()
    )
    owners = [
        i for i, step in enumerate(steps) if step.op in ("conv", "norm") and step.again is None
    ]
    twins = (draw(st.sampled_from(owners)),) if draw(st.integers(0, 9)) == 9 else ()
    return legal(
        Program(tuple(inputs), steps, output, extra, blocks, twins, draw(st.integers(0, 999)))
    )
