"""What a program means, without hooks, modules or anything in place: every value is a tensor of its
own.

A `Pure` network is asked about one image, as the plain methods of `tests.methods` ask: for all
values, for the gradients in all of them, and for what follows when one is replaced. Norms are
written out; all else is done by torch's functions, as `tests.fuzz.programs` does it out of place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.programs import ACTIVATIONS, Network, Program, Step, answer, run, scores_in, sees

SQUASHING = ("tanh", "sigmoid")
"""Activations that are no rectifiers."""


class Ruled(torch.autograd.Function):
    """A function whose gradient is rectified: what comes back ("guided"), or instead of it what
    arrives ("deconv")."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], rule: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        ctx.rule = rule
        return function(x)

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None, None]:
        if ctx.rule == "deconv":
            return arrived * (arrived > 0), None, None
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            back = torch.autograd.grad(ctx.function(x), x, arrived)[0]
        return back * (back > 0), None, None


def pure(step: Step, module: Any, args: Sequence[Tensor], rule: str) -> Tensor:
    """The value of a step, as a new tensor, from values that stay as they are."""
    x = args[0]
    if step.op == "act":
        value = _act(step.options[0], module, x, rule)
    elif step.op == "norm":
        value = _norm(step.options[0], module, x, rule)
    elif step.op == "half":
        value = _half(step.options, x, rule)
    elif step.op == "tokens":
        value = _tokens(x)
    elif step.op in ("identity", "sequence", "same"):
        value = x
    else:
        value = run(replace(step, style="plain"), module, args)
    return value.detach() if step.style == "no_grad" else value.clone()


def _act(kind: str, module: Any, x: Tensor, rule: str) -> Tensor:
    function: Function = ACTIVATIONS[kind][1]
    if kind == "prelu":
        slope = module.weight.detach().reshape(1, -1, *[1] * (x.ndim - 2))
        return rectified(lambda z: torch.where(z > 0, z, z * slope), x, rule)
    if rule == "relevance" and kind not in ("relu", "leaky_relu"):
        return _line(function, x)
    return function(x) if kind in SQUASHING else rectified(function, x, rule)


def _line(function: Function, x: Tensor) -> Tensor:
    """A function, and as its derivative the slope of the line from what it makes of zero."""
    zero = torch.zeros(1, dtype=x.dtype, requires_grad=True)
    with torch.enable_grad():
        start = function(zero)
        (at_zero,) = torch.autograd.grad(start, zero)
    place = x.detach()
    value = function(place)
    slope = torch.where(place == 0, at_zero, (value - start.detach()) / place)
    return value + slope * (x - place)


def rectified(function: Function, x: Tensor, rule: str) -> Tensor:
    return function(x) if rule in ("plain", "relevance") else Ruled.apply(x, function, rule)


def _norm(kind: str, module: Any, x: Tensor, rule: str) -> Tensor:
    """Written out, since torch's own gradients of one image depend on how it lies in memory."""

    def column(vector: Tensor) -> Tensor:
        return vector[None, :, None, None]

    if kind == "batch":
        mean = column(module.running_mean)
        variance = column(module.running_var)
        parts = x
    else:
        # a layer normalises the channels of each place
        dim = 1 if kind == "layer" else 2
        groups = x.shape[1] if kind == "instance" else getattr(module, "num_groups", 0)
        parts = x if kind == "layer" else x.reshape(len(x), groups, -1)
        mean = parts.mean(dim, keepdim=True)
        variance = ((parts - mean) ** 2).mean(dim, keepdim=True)
        variance = variance.detach() if rule == "relevance" else variance
    value = ((parts - mean) / (variance + module.eps).sqrt()).reshape(x.shape)
    return value if module.weight is None else value * column(module.weight) + column(module.bias)


def _half(options: tuple[Any, ...], x: Tensor, rule: str) -> Tensor:
    kind, *part = options
    changed = rectified(torch.relu, x, rule) if kind == "relu" else 0.5 * x
    numbers = torch.arange(x.shape[1])
    inside = torch.isin(numbers, numbers[slice(*part)])
    return torch.where(inside[:, None, None], changed, x)


def _tokens(x: Tensor) -> Tensor:
    places = torch.arange(1, 1 + x[0, 0].numel()).to(x).cos().reshape(x.shape[2:])
    return (x * places).sum((2, 3)) / (1 + x[0, 0].numel())


Function = Callable[[Tensor], Tensor]
Score = Callable[[Any], Tensor]


class Pure:
    """A program about one image: ``beside`` are its other inputs, ``score`` a callable target, then
    class 0.

    With a generator as ``jitter``, the last digits of every value are noise.
    """

    jitter: torch.Generator | None = None

    def __init__(
        self,
        network: Network,
        image: Tensor,
        beside: Sequence[Tensor] = (),
        score: Score | None = None,
    ) -> None:
        self.program: Program = network.program
        self.called: Mapping[int, nn.Module] = network.called
        self.image = image
        self.beside = tuple(beside)
        self.score = score
        self.seeing = sees(network.program)

    def values(
        self, x: Tensor, rule: str = "plain", replaced: tuple[int, Tensor] | None = None
    ) -> Any:
        """Every value for an image ``(C, H, W)`` as a batch of one, the scores ``(1, K)`` last."""
        found = [x[None].clone(), *(other[None] for other in self.beside)]
        for i, step in enumerate(self.program.steps):
            value = pure(step, self.called.get(i), [found[v] for v in step.of], rule)
            if rule == "relevance" and step.op == "mul":
                value = self._shared(step, found)
            if replaced is not None and len(found) == replaced[0]:
                value = replaced[1][None].clone()
            if self.jitter is not None:
                shift = torch.randn(value.shape, generator=self.jitter, dtype=value.dtype)
                value = value * (1 + 1e-13 * shift)
            if torch.is_grad_enabled() and not value.requires_grad:
                value.requires_grad_()  # what comes behind a detached value still depends on it
            found.append(value)
        output = answer(self.program, found[-1].clone(), found[self.program.extra])
        return [*found, scores_in(output) if self.score is None else self.score(output)[:, None]]

    def _shared(self, step: Step, found: Sequence[Tensor]) -> Tensor:
        """A product whose factors get a half each; one that a sigmoid gave is a constant."""
        gates = [self._is_gate(v) for v in step.of]
        factors = [found[v] for v in step.of]
        if gates[0] != gates[1]:
            factors = [f.detach() if gate else f for f, gate in zip(factors, gates, strict=True)]
        value = run(replace(step, style="plain"), None, factors)
        halves = all(self._signals(v) for v in step.of) and gates[0] == gates[1]
        value = value.detach() + (value - value.detach()) * (0.5 if halves else 1)
        return value.detach() if step.style == "no_grad" else value

    def _signals(self, place: int) -> bool:
        """Whether the image leads to a value by a way that autograd sees."""
        if place < len(self.program.inputs):
            return place == 0
        step = self.program.steps[place - len(self.program.inputs)]
        return (
            step.style != "no_grad"
            and step.op != "detach"
            and any(self._signals(v) for v in _kept(step))
        )

    def _is_gate(self, place: int) -> bool:
        if place < len(self.program.inputs):
            return False
        step = self.program.steps[place - len(self.program.inputs)]
        if step.op == "act":
            return bool(step.options[0] == "sigmoid") and self._signals(place)
        through = ("identity", "slice", "chunk", "same", "flatten", "permute")
        return step.op in through and self._is_gate(step.of[0]) and self._signals(place)

    def forward(self, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [value[0] for value in self.values(x)]

    def backward(self, values: Sequence[Tensor], target: Any, rule: str = "plain") -> list[Tensor]:
        """The gradient in every value; zero where the score does not depend on one."""
        found = self.maybe_gradients(values[0], target, rule)
        return [torch.zeros_like(v) if g is None else g for g, v in zip(found, values, strict=True)]

    def maybe_gradients(self, x: Tensor, target: Any, rule: str = "plain") -> list[Tensor | None]:
        with torch.enable_grad():
            values = self.values(x.detach().clone().requires_grad_(), rule)
            slope = (
                target
                if isinstance(target, Tensor)
                else nn.functional.one_hot(torch.tensor(target), values[-1].shape[1]).to(x)
            )
            total = (values[-1][0] * slope).sum()
            if not total.requires_grad:
                return [None] * len(values)
            live = [value for value in values if value.requires_grad]
            grads = iter(torch.autograd.grad(total, live, allow_unused=True))
        found = [next(grads) if value.requires_grad else None for value in values]
        return [None if g is None else g[0] for g in found]

    def terms(self, x: Tensor, target: int) -> list[Tensor]:
        """FullGrad's: the input times its gradient, and every bias times the gradient where it was
        added."""
        gradients = self.backward(self.forward(x), target)
        found = [x * gradients[0]]
        for i, step in enumerate(self.program.steps):
            gradient = gradients[len(self.program.inputs) + i]
            bias = _constant(step, self.called.get(i))
            if bias is not None and gradient.ndim == 3 and gradient[0].numel() == 1:
                continue  # one place is no picture: it lies nowhere on the photo
            if len(self.program.inputs) + i not in self.seeing:
                continue  # nor does a picture of something else
            if step.style == "no_grad":
                continue  # to autograd, its bias adds nothing
            if bias is not None:
                found.append(bias.reshape(-1, *[1] * (gradient.ndim - 1)) * gradient)
        return found

    def __getitem__(self, part: slice) -> Head:
        return Head(self, part.start - 1)


def _kept(step: Step) -> Sequence[int]:
    return step.of[:1] if step.op == "same" else step.of


def _constant(step: Step, module: Any) -> Tensor | None:
    """What a module adds: its bias, and for batch normalisation the shift by the mean too."""
    if step.op == "norm" and step.options[0] == "batch":
        shift = module.running_mean / (module.running_var + module.eps).sqrt()
        return -shift if module.weight is None else (module.bias - module.weight * shift).detach()
    if step.op not in ("conv", "deconv", "linear", "norm") or module.bias is None:
        return None
    return module.bias.detach()


class Head:
    """What follows a value of one image: everything else, also what leads past it, stays as it
    is."""

    def __init__(self, whole: Pure, layer: int) -> None:
        self.whole = whole
        self.place = layer + 1

    def forward(self, value: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [value, self.whole.values(self.whole.image, replaced=(self.place, value))[-1][0]]

    def scores(self, value: Tensor) -> Tensor:
        """The scores ``(K,)``, for derivatives of any order."""
        return self.whole.values(self.whole.image, replaced=(self.place, value))[-1][0]
