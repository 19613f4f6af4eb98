"""Rules for the steps of a network that are no linear maps: products, activations, softmax, normalisations, sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from explain.relevance.propagation import Gradients, RelevanceFlow
from explain.relevance.rule import RelevanceRule
from explain.tracing.steps import Step


@dataclass(frozen=True)
class Uniform(RelevanceRule):
    """Factors get equal shares (Achtibat et al., 2024); gates and denominators are constants (Arras et al., 2017).

    So are the weights of attention, if they are ``constant``.
    """

    constant: bool = True

    name: ClassVar[str] = "uniform"

    def fits(self, step: Step) -> bool:
        return bool(self._scales(step)) or len(step.dependent) > 1

    def _scales(self, step: Step) -> frozenset[int]:
        return frozenset(i for i, scale in step.scales.items() if self.constant or scale != "weights")

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        scales = self._scales(step)
        factor = 1 / max(1, len(step.dependent) - len(scales))

        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            for i in scales & step.entrances.keys():
                flow.give(step.entrances[i], _nothing)
            return gradient * factor if factor != 1 else gradient

        flow.arriving(step, arrived)
        if scales and not step.entrances:
            flow.at(step, lambda given, _: tuple(_nothing(g) if i in scales else g for i, g in enumerate(given)))


def _nothing(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else torch.zeros_like(gradient)


@dataclass(frozen=True)
class Identity(RelevanceRule):
    """An activation passes on what it gets (Bach et al., 2015): the gradient is that of the line from zero.

    What it makes of zero is a bias, and takes its share.
    """

    name: ClassVar[str] = "identity"

    def fits(self, step: Step) -> bool:
        return tuple(step.dependent) == (0,)

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        def after(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
            arrived, plain = grad_outputs[step.output], grad_inputs[0]
            if arrived is None or plain is None:
                return grad_inputs
            if step.offset is not None:
                flow.take("activations", arrived * step.offset)
            return (_along_line(step, arrived, plain), *grad_inputs[1:])

        flow.at(step, after)


def _along_line(step: Step, arrived: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """What arrives, times the slope of the line from zero; at zero, the plain gradient."""
    if step.slope is not None:
        sent = torch.where(step.slope.isnan(), plain, arrived * step.slope)
    else:
        x, y = (step.values[i].tensor for i in (0, 1))
        line = torch.div(y if step.offset is None else y - step.offset, x)
        sent = torch.where(x == 0, plain, line.mul_(arrived) if line.dtype == arrived.dtype else line * arrived)
    if not bool(sent.sum().isfinite()):  # of a value that is infinite, nothing is sent where nothing arrives
        sent = torch.where(arrived == 0, 0, sent)
    return sent


@dataclass(frozen=True)
class ConstantWeights(RelevanceRule):
    """The weights of attention are constants (Ali et al., 2022): nothing goes on through the softmax."""

    name: ClassVar[str] = "constant"

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        if step.kind == "softmax":

            def kept_back(gradient: torch.Tensor) -> torch.Tensor:
                """Nothing goes on; what arrives where it is no factor is lost here."""
                if step.result is not None and bool(gradient.any()):
                    flow.take("softmax", gradient * step.result.tensor)
                return torch.zeros_like(gradient)

            flow.arriving(step, kept_back)
            return

        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            for i in {0, 1, 3} & step.entrances.keys():
                flow.give(step.entrances[i], _nothing)
            return gradient

        flow.arriving(step, arrived)


@dataclass(frozen=True)
class Taylor(RelevanceRule):
    """The softmax by its first derivative (Achtibat et al., 2024): R_i = x_i (R_i - s_i sum_j R_j).

    It is the plain gradient, and does not conserve: what is missing is taken by the softmax. In attention, the two
    products share equally between their factors.
    """

    name: ClassVar[str] = "taylor"

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        if step.kind == "softmax":
            flow.at(step, partial(self._softmax, step, flow))
        else:
            self._attention(step, flow)

    def _softmax(self, step: Step, flow: RelevanceFlow, grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        arrived, sent = grad_outputs[step.output], grad_inputs[0]
        if arrived is not None and sent is not None and step.result is not None:
            s = step.result.tensor
            # The gradients of a row add up to zero, so log s does for x, which differs by the same number in a row.
            of_x = torch.where(s > 0, s, 1).log() * sent
            flow.take("softmax", s * arrived - of_x)
        return grad_inputs

    def _attention(self, step: Step, flow: RelevanceFlow) -> None:
        assert step.result is not None
        result = step.result

        def sent(place: int, factor: float, gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:
                return None
            changed = gradient * factor
            if place in step.values:
                flow.take("softmax", -changed * step.values[place].tensor)
            return changed

        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            flow.take("softmax", gradient * result.tensor)
            # Half of it goes to the values; query and key share the other half.
            weights = 0.5 if 2 in step.entrances and len(step.entrances) > 1 else 1.0
            scores = weights * (0.5 if {0, 1} <= step.entrances.keys() else 1.0)
            factors = {0: scores, 1: scores, 2: 0.5 if weights < 1 else 1.0, 3: weights}
            for i, entrance in step.entrances.items():
                flow.give(entrance, partial(sent, i, factors[i]))
            return gradient

        flow.arriving(step, arrived)


@dataclass(frozen=True)
class ConstantDeviation(RelevanceRule):
    """Normalisations divide by a constant (Ali et al., 2022): the deviation is not differentiated, the mean is."""

    name: ClassVar[str] = "constant deviation"

    def fits(self, step: Step) -> bool:
        return bool(step.entrances) and tuple(step.dependent) == (0,) and step.linear is None

    def back(self, step: Step, gradient: torch.Tensor, flow: RelevanceFlow) -> torch.Tensor:
        weight, bias = (_laid(step, step.options.get(name)) for name in ("weight", "bias"))
        if bias is not None:
            flow.take("biases", gradient * bias)
        return _through(step, gradient if weight is None else gradient * weight)


def _laid(step: Step, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A weight or bias in the shape that meets the input."""
    if parameter is None:
        return None
    if step.function in ("layer_norm", "rms_norm"):
        return parameter.detach()
    return parameter.detach().reshape(-1, *[1] * (step.values[0].tensor.ndim - 2))


def _through(step: Step, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in what a normalisation is given, its deviation held constant."""
    x = step.values[0].tensor
    options: Any = step.options
    if step.function == "rms_norm":
        dims = tuple(range(-len(options["normalized_shape"]), 0))
        epsilon = options.get("eps")
        epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
        return gradient * (x.square().mean(dims, keepdim=True) + epsilon).rsqrt()
    epsilon = options.get("eps", 1e-5)
    if step.function == "batch_norm":  # by the statistics of the batch
        places = (0, *range(2, x.ndim))
        deviation = (x.var(places, correction=0, keepdim=True) + epsilon).sqrt()
        return torch.div(gradient - gradient.mean(places, keepdim=True), deviation)
    rows, arrived, size = x, gradient, list(options.get("normalized_shape", ()))
    if step.function != "layer_norm":
        rows, arrived = (t.reshape(len(x), options.get("num_groups", x.shape[1]), -1) for t in (x, gradient))
        size = [rows.shape[-1]]
    dims = tuple(range(-len(size), 0))
    inverse: torch.Tensor = torch.native_layer_norm(rows, size, None, None, epsilon)[2]
    found: torch.Tensor = (arrived - arrived.mean(dims, keepdim=True)).mul_(inverse).reshape(x.shape)
    return found


@dataclass(frozen=True)
class NoRule(RelevanceRule):
    """An operation that no rule knows: the plain gradient, and an account of what is lost, by its name.

    Relevance is value times gradient. So what is lost is the result times the gradient that arrives, less what was
    given times the gradients that leave: nothing, where the operation is linear or a choice among values.
    """

    name: ClassVar[str] = "gradient"

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        def sent(place: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is not None:
                flow.take(step.function, -_relevance(gradient, step.values[place].tensor))
            return gradient

        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            assert step.result is not None
            part = _relevance(gradient, step.result.tensor)
            flow.take(step.function, part)
            flow.watch(step.function, part)
            for place, entrance in step.entrances.items():
                flow.give(entrance, partial(sent, place))
            return gradient

        flow.arriving(step, arrived)


def _relevance(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Value times gradient, of complex numbers too."""
    return (gradient.conj() * value).real if value.is_complex() else gradient * value


@dataclass(frozen=True)
class ConstantTerms(RelevanceRule):
    """What is added to a signal takes what belongs to it; the signals get theirs by the plain gradient."""

    name: ClassVar[str] = "gradient"

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        if not any(not isinstance(value, torch.Size) for value in step.shapes):
            return

        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            for part in _ADDED[step.kind](step, gradient):
                flow.take("biases", part)
            return gradient

        flow.arriving(step, arrived)


def _summands(step: Step, gradient: torch.Tensor) -> list[torch.Tensor]:
    found = []
    first_alone = step.function == "addcmul"  # the others are factors
    for place, value in enumerate(step.shapes[: 1 if first_alone else 2]):
        if isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, torch.Size):
            second = place == (0 if step.function == "rsub" else 1)
            sign = -1 if second and "sub" in step.function else 1
            term = gradient * (sign * (step.options.get("alpha", 1) if second else 1) * value)
            found.append(torch.where(gradient == 0, 0, term))  # masks add infinity to what is not to count
    return found


def _joined(step: Step, gradient: torch.Tensor) -> list[torch.Tensor]:
    parts = [value for value in step.shapes if isinstance(value, (torch.Size, torch.Tensor))]
    dim = step.options.get("dim", 0)
    if step.function == "stack":
        pieces = gradient.unbind(dim)
    else:
        pieces = torch.split(gradient, [(p.shape if isinstance(p, torch.Tensor) else p)[dim] for p in parts], dim)
    pairs = zip(pieces, parts, strict=True)
    return [piece * part for piece, part in pairs if isinstance(part, torch.Tensor)]


def _chosen(step: Step, gradient: torch.Tensor) -> list[torch.Tensor]:
    if step.function == "masked_fill":
        mask, value = step.options.get("mask", step.shapes[1]), step.shapes[2]
        return [torch.where(mask & (gradient != 0), gradient * value, 0)]
    mask = step.options["condition"]
    signals = [i for i, value in enumerate(step.shapes) if isinstance(value, torch.Size)]
    constants = [
        i
        for i, value in enumerate(step.shapes)
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dtype != torch.bool)
    ]
    if len(constants) != 1:
        return []
    chosen = ~mask if signals[0] < constants[0] else mask
    return [torch.where(chosen & (gradient != 0), gradient * step.shapes[constants[0]], 0)]


_ADDED = {"sum": _summands, "join": _joined, "choice": _chosen}
"""The gradient times each constant that was added, in the rows of the gradient, by the kind of step."""
