"""Rules for the steps of a network that are no linear maps: products, activations, softmax, normalisations, sums.

Relevance is value times gradient: where a pass-through rule passes on, place by place, what a step gets, the gradient
that leaves is the one that arrives, times what the step gave over what it was given. These rules are of the first
transformer attribution.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from explain._utils.errors import MethodError
from explain.hooks.attention_parts import fused_scores
from explain.relevance.batch_layout import numbers_of
from explain.relevance.propagation import (
    Gradients,
    RelevanceFlow,
    RelevanceRule,
    relevance_of,
    send_always,
    send_nothing,
)
from explain.relevance.steps import Step


@dataclass(frozen=True)
class Uniform(RelevanceRule):
    """Factors get equal shares (Achtibat et al., 2024); gates and denominators are constants (Arras et al., 2017).

    So are the weights of attention, if they are ``constant``.
    """

    constant: bool = True

    def fits(self, step: Step) -> bool:
        return bool(self._scales(step)) or len(step.dependent) > 1

    def _scales(self, step: Step) -> frozenset[int]:
        return frozenset(i for i, scale in step.scales.items() if self.constant or scale != "weights")

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        scales = self._scales(step)
        factor = 1 / max(1, len(step.dependent) - len(scales))

        def arrived(gradient: Tensor) -> Tensor:
            for i in scales & step.entrances.keys():
                flow.give(step.entrances[i], send_nothing)
            return gradient * factor

        def stop(given: Gradients, _: Gradients) -> Gradients:
            return tuple(send_nothing(g) if i in scales else g for i, g in enumerate(given))

        flow.arriving(step, arrived)
        if scales and not step.entrances:
            flow.group.node(step.node, stop)


class ActivationPassThrough(RelevanceRule):
    """An activation passes relevance on unchanged (Bach et al., 2015): its slope is that of the line from zero.

    Where f(0) is not zero, f(0) counts as a bias and absorbs its share of the relevance.
    """

    name: ClassVar[str] = "identity"

    def fits(self, step: Step) -> bool:
        return tuple(step.dependent) == (0,)

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        def from_zero(arrived: Tensor, plain: Tensor) -> Tensor:
            """What arrives, times the slope of the line from zero; at zero, the plain gradient."""
            if step.offset is not None:
                flow.take("activations", arrived * step.offset)
            if step.slope is not None:
                sent = along_line(step.slope, arrived, plain)
            else:
                x, y = (step.values[i].tensor for i in (0, 1))
                line = torch.div(y if step.offset is None else y - step.offset, torch.where(x == 0, 1, x))
                sent = torch.where(x == 0, plain, line.mul_(arrived) if line.dtype == arrived.dtype else line * arrived)
            if not bool(sent.sum().isfinite()):  # of a value that is infinite, nothing is sent where nothing arrives
                sent = torch.where(arrived == 0, 0, sent)
            return sent

        flow.replacing(step, from_zero)


def along_line(slope: Tensor, arrived: Tensor, plain: Tensor) -> Tensor:
    """What arrives, times the slope of a line; the plain gradient where the slope is NaN, since it is that of a point.

    Nothing is multiplied by NaN: the choice below would hide that from the values, and not from their derivative.
    """
    of_point = slope.isnan()
    return torch.where(of_point, plain, arrived * slope.masked_fill(of_point, 0))


class ConstantWeights(RelevanceRule):
    """The weights of attention are constants (Ali et al., 2022): nothing goes on through the softmax."""

    name: ClassVar[str] = "constant"

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        def arrived(gradient: Tensor) -> Tensor:
            if step.kind == "softmax":  # what arrives where it is no factor is lost here
                if step.result is not None and bool(gradient.any()):
                    flow.take("softmax", gradient * step.result.tensor)
                return torch.zeros_like(gradient)
            for i in {0, 1, 3} & step.entrances.keys():
                flow.give(step.entrances[i], send_nothing)
            return gradient

        flow.arriving(step, arrived)


class Taylor(RelevanceRule):
    """The softmax by its first derivative (Achtibat et al., 2024): R_i = x_i (R_i - s_i sum_j R_j).

    It is the plain gradient, and does not conserve: what is missing is taken by the softmax. In attention, the two
    products share equally between their factors.
    """

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        assert step.result is not None
        result = step.result

        def at_softmax(arrived: Tensor, plain: Tensor) -> Tensor:
            s = result.tensor
            # The gradients of a row add up to zero, so log s does for x, which differs by the same number in a row.
            flow.take("softmax", s * arrived - torch.where(s > 0, s, 1).log() * plain)
            return plain

        if step.kind == "softmax":
            flow.replacing(step, at_softmax)
            return

        def sent(place: int, factor: float, gradient: Tensor | None) -> Tensor | None:
            changed = None if gradient is None else gradient * factor
            if changed is not None and place in step.values:
                flow.take("softmax", -changed * step.values[place].tensor)
            return changed

        def arrived(gradient: Tensor) -> Tensor:
            flow.take("softmax", gradient * result.tensor)
            # Half of it goes to the values; query and key share the other half.
            weights = 0.5 if 2 in step.entrances and len(step.entrances) > 1 else 1.0
            scores = weights * (0.5 if {0, 1} <= step.entrances.keys() else 1.0)
            factors = {0: scores, 1: scores, 2: 0.5 if weights < 1 else 1.0, 3: weights}
            for i, entrance in step.entrances.items():
                flow.give(entrance, partial(sent, i, factors[i]))
            return gradient

        flow.arriving(step, arrived)


def attention_scores(step: Step, query: Tensor, key: Tensor) -> tuple[Tensor, float]:
    """The scores of a fused attention, lowest where the mask keeps keys from queries; and what they are scaled by."""
    given = step.options.get("scale")
    mask = step.options.get("attn_mask")
    scale: float = query.shape[-1] ** -0.5 if given is None else given
    causal = bool(step.options.get("is_causal"))
    return fused_scores(query, key, mask, causal, scale, torch.finfo(query.dtype).min), scale


class ConstantDeviation(RelevanceRule):
    """Normalisations divide by a constant (Ali et al., 2022): the deviation is not differentiated, the mean is."""

    name: ClassVar[str] = "constant deviation"

    def fits(self, step: Step) -> bool:
        return bool(step.entrances) and tuple(step.dependent) == (0,) and step.linear is None

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Tensor:
        weight = parameter_of(step, "weight")
        bias = parameter_of(step, "bias")
        if bias is not None:
            flow.take("biases", gradient * bias)
        return _through(step, gradient if weight is None else gradient * weight)


def parameter_of(step: Step, name: str) -> Tensor | None:
    """The weight or bias of a normalisation, in the shape that meets the input."""
    found: Tensor | None = step.options.get(name)
    if found is None or step.function in ("layer_norm", "rms_norm"):
        return found
    return found.reshape(-1, *[1] * (step.values[0].tensor.ndim - 2))


def normalised_rows(step: Step, x: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """The shape in which a normalisation sees a tensor, and the dimensions that it normalises over."""
    if step.function in ("layer_norm", "rms_norm"):
        return x.shape, tuple(range(-len(step.options["normalized_shape"]), 0))
    groups = step.options.get("num_groups", x.shape[1])
    return torch.Size((len(x), groups, x.numel() // len(x) // groups)), (-1,)


def epsilon_of(step: Step, x: Tensor) -> float:
    """What a normalisation adds to the variance."""
    epsilon: float | None = step.options.get("eps", None if step.function == "rms_norm" else 1e-5)
    return torch.finfo(x.dtype).eps if epsilon is None else epsilon


def _through(step: Step, gradient: Tensor) -> Tensor:
    """The gradient in what a normalisation is given, its deviation held constant."""
    x = step.values[0].tensor
    epsilon = epsilon_of(step, x)
    if step.function == "batch_norm":  # by the statistics of the batch
        places = (0, *range(2, x.ndim))
        deviation = (x.var(places, correction=0, keepdim=True) + epsilon).sqrt()
        return torch.div(gradient - gradient.mean(places, keepdim=True), deviation)
    shape, dims = normalised_rows(step, x)
    if step.function == "rms_norm":
        return gradient * (x.square().mean(dims, keepdim=True) + epsilon).rsqrt()
    rows = x.reshape(shape)
    arrived = gradient.reshape(shape)
    inverse = _inverse_deviation(rows, dims, epsilon)
    found: Tensor = (arrived - arrived.mean(dims, keepdim=True)).mul_(inverse).reshape(x.shape)
    return found


def _inverse_deviation(rows: Tensor, dims: tuple[int, ...], epsilon: float) -> Tensor:
    """One over the deviation: of PyTorch's kernel, or where a graph is created, of a formula.

    The kernel's is a constant to autograd.
    """
    if torch.is_grad_enabled():
        return (rows.var(dims, correction=0, keepdim=True) + epsilon).rsqrt()
    return torch.native_layer_norm(rows, [rows.shape[d] for d in dims], None, None, epsilon)[2]


class NoRule(RelevanceRule):
    """An operation that no rule knows: the plain gradient, and an account of what is lost, by its name.

    Relevance is value times gradient. So what is lost is the result times the gradient that arrives, less what was
    given times the gradients that leave: nothing, where the operation is linear or a choice among values.
    """

    name: ClassVar[str] = "gradient"

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        def sent(place: int, gradient: Tensor | None) -> Tensor | None:
            if gradient is not None:
                flow.take(step.function, -relevance_of(gradient, step.values[place].tensor))
            return gradient

        if not step.entrances:
            return  # there is nothing to compare

        def arrived(gradient: Tensor) -> Tensor:
            assert step.result is not None
            part = relevance_of(gradient, step.result.tensor)
            flow.take(step.function, part)
            flow.watch(step.function, part)
            for place, entrance in step.entrances.items():
                flow.give(entrance, partial(sent, place))
            return gradient

        flow.arriving(step, arrived)


class ConstantTerms(RelevanceRule):
    """What is added to a signal takes what belongs to it; the signals get theirs by the plain gradient."""

    name: ClassVar[str] = "gradient"

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        def arrived(gradient: Tensor) -> Tensor:
            for part in _ADDED[step.kind](step, gradient):
                flow.take("biases", part)
            return gradient

        if not all(isinstance(value, torch.Size) for value in step.shapes):
            flow.arriving(step, arrived)


def _summands(step: Step, gradient: Tensor) -> list[Tensor]:
    found = []
    for place, value in enumerate(step.shapes[: 1 if step.function == "addcmul" else 2]):  # the others are factors
        if isinstance(value, (int, float, Tensor)) and not isinstance(value, torch.Size):
            second = place == (0 if step.function == "rsub" else 1)
            sign = -1 if second and "sub" in step.function else 1
            term = gradient * (sign * (step.options.get("alpha", 1) if second else 1) * value)
            found.append(torch.where(gradient == 0, 0, term))  # masks add infinity to what is not to count
    return found


def _joined(step: Step, gradient: Tensor) -> list[Tensor]:
    # An empty tensor of one dimension, such as a cache at its start, joins anything.
    parts = [v for v in step.shapes if isinstance(v, torch.Size) or (isinstance(v, Tensor) and v.numel())]
    dim = step.options.get("dim", 0)
    if step.function == "stack":
        pieces = gradient.unbind(dim)
    else:
        pieces = torch.split(gradient, [(p.shape if isinstance(p, Tensor) else p)[dim] for p in parts], dim)
    return [piece * part for piece, part in zip(pieces, parts, strict=True) if isinstance(part, Tensor)]


def _chosen(step: Step, gradient: Tensor) -> list[Tensor]:
    if step.function == "masked_fill":
        mask = step.options.get("mask", step.shapes[1])
        value = step.shapes[2]
        return [torch.where(mask & (gradient != 0), gradient * value, 0)]
    mask = step.options["condition"]
    signals = [i for i, value in enumerate(step.shapes) if isinstance(value, torch.Size)]
    kinds = [getattr(value, "dtype", type(value)) for value in step.shapes]
    constants = [i for i, kind in enumerate(kinds) if kind not in (torch.bool, torch.Size)]
    if len(constants) != 1:
        return []
    chosen = ~mask if signals[0] < constants[0] else mask
    return [torch.where(chosen & (gradient != 0), gradient * step.shapes[constants[0]], 0)]


_ADDED = {"sum": _summands, "join": _joined, "choice": _chosen}
"""The gradient times each constant that was added, in the rows of the gradient, by the kind of step."""


class ElementwisePassThrough(RelevanceRule):
    """The pass rule: each element of the input gets the relevance of the element of the output at its position.

    For activations, normalisations of a photo and softmaxes, whose output has the shape of their input. Attention is
    two products with a softmax between: the factors of each product share equally. Relevance that would go to an input
    of zero is absorbed, since value times gradient cannot express it.
    """

    name: ClassVar[str] = "pass"

    def fits(self, step: Step) -> bool:
        if step.kind == "attention":
            return len(step.values) == 3 and len({each.tensor.shape[:-2] for each in step.values.values()}) == 1
        enters = bool(step.entrances) or step.kind in ("activation", "softmax")
        return enters and step.kind in ("activation", "softmax", "deviation") and tuple(step.dependent) == (0,)

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        if step.kind != "attention":
            super().attach(step, flow)
            return

        def arrived(gradient: Tensor) -> Tensor:
            """Half of it goes to the values, the rest through the softmax to query and key alike."""
            q, k, v = (step.values[i].tensor for i in range(3))
            scores, scale = attention_scores(step, q, k)
            weights = scores.softmax(-1)
            of_scores = flow.per_value(gradient @ v.transpose(-2, -1) / 2 * weights, scores) * scale / 2
            sent = {0: of_scores @ k, 1: of_scores.transpose(-2, -1) @ q, 2: weights.transpose(-2, -1) @ gradient / 2}
            for place, found in sent.items():
                flow.give(step.entrances[place], partial(send_always, found))
            return gradient / 2  # what the weights get, where the kernel is one of several Nodes

        flow.arriving(step, arrived)

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Tensor:
        if step.slope is not None:  # what it was given is overwritten, and the line from its value at zero is known
            if step.offset is not None:
                flow.take("activations", gradient * step.offset)
            return gradient * torch.where(step.slope.isnan() | (gradient == 0), 0, step.slope)
        given = step.result if step.kind == "softmax" else step.values.get(1)
        y = _normalised(step) if step.kind == "deviation" or given is None else given.tensor
        return flow.per_value(gradient * y, step.values[0].tensor)


def _normalised(step: Step) -> Tensor:
    """What a normalisation gave, which is computed once more."""
    x = step.values[0].tensor
    options = dict(step.options)
    shape = () if step.function in ("group_norm", "instance_norm") else (options.pop("normalized_shape"),)
    groups = (options.pop("num_groups"),) if step.function == "group_norm" else ()
    found: Tensor = getattr(F, step.function)(x, *shape, *groups, **options)
    return found


class Balanced(RelevanceRule):
    """A sum of two signals, such as a shortcut and what it leads past (Chefer et al., CVPR 2021).

    The plain gradient of a sum (the norm rule) gives each of them a share, and large shares of opposite signs cancel
    out. Here each signal's shares are scaled, for each image, so that both together keep what arrived, in proportion to
    the magnitudes of their sums.
    """

    def fits(self, step: Step) -> bool:
        return step.function in ("add", "iadd", "sub", "isub") and len(step.values) == 2

    def attach(self, step: Step, flow: RelevanceFlow) -> None:
        def after(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
            one, other = grad_inputs[:2]
            if one is None or other is None:
                return grad_inputs
            sums = [flow.by_image(g * step.values[i].tensor) for i, g in enumerate((one, other))]
            whole = sums[0] + sums[1]
            sizes = sums[0].abs() + sums[1].abs()
            factors = (torch.where(s == 0, 0, s.sign() * whole / torch.where(sizes == 0, 1, sizes)) for s in sums)
            scaled = ((g * spread(f, g)).to(g.dtype) for g, f in zip((one, other), factors, strict=True))
            return (*scaled, *grad_inputs[2:])

        def spread(factors: Tensor, like: Tensor) -> Tensor:
            """A number for each image, in the shape that meets a tensor with values of all of them."""
            numbers = numbers_of(like, len(factors), step.images)
            if numbers is None:
                got = tuple(like.shape)
                raise MethodError(f"relevance must balance sums image by image, got shape {got}; explain one at a time")
            return factors[numbers.long()]

        flow.group.node(step.node, after)
