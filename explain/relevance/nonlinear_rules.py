"""Rules for the steps of a network that are no linear maps: products, activations, softmax,
normalisations, sums.

Relevance is value times gradient. So where a rule passes relevance on place by place, the gradient
that leaves a step is the one that arrives, times the step's result over its input.
`ElementwisePassThrough` and `Balanced` are the rules of the first transformer attribution (Chefer
et al., CVPR 2021).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from explain._utils.errors import MethodError
from explain.recording import Value
from explain.relevance.constants import constant_part, has_constant_part
from explain.relevance.linear_maps import along
from explain.relevance.propagation import (
    RelevanceFlow,
    RelevanceRule,
    Sent,
    numbers_of,
    plain_gradient,
)
from explain.relevance.steps import Step


@dataclass(frozen=True)
class Uniform(RelevanceRule):
    """Factors get equal shares (Achtibat et al., 2024); gates, denominators (Arras et al., 2017)
    and, if ``constant``, the weights of attention are constants."""

    constant: bool = True

    def fits(self, step: Step) -> bool:
        """Whether an LRP rule for products can act on a step: it has several factors, or factors
        that are constants (gates, denominators)."""
        return super().fits(step) and (bool(self._scales(step)) or len(step.signals) > 1)

    def _scales(self, step: Step) -> list[int]:
        """The places of a product's factors that get no relevance: gates, denominators, and
        attention weights if ``constant``."""
        return [i for i, scale in step.scales.items() if self.constant or scale != "weights"]

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """LRP at a product: divide the gradient equally among its signals; gates and denominators
        get none."""
        scales = self._scales(step)
        # the plain gradient would give each factor all of the relevance
        factor_count = max(1, len(step.signals) - len(scales))
        sent = plain_gradient(step, gradient / factor_count, flow.signals)
        for position in scales:
            sent[position] = None
        return sent


class _OfOneSignal(RelevanceRule):
    """A rule for steps whose first argument alone depends on the input."""

    def fits(self, step: Step) -> bool:
        return super().fits(step) and tuple(step.signals) == (0,)


class ActivationPassThrough(_OfOneSignal):
    """An activation passes relevance on unchanged (Bach et al., 2015): its slope is that of the
    line from zero. f(0) counts as a bias and absorbs its share."""

    name: ClassVar[str] = "identity"

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """LRP at y = f(x): the gradient in x is that in y, times (f(x) - f(0)) / x; at x = 0, the
        plain gradient. The cause "activations" takes the share of f(0)."""
        x = step.x.tensor
        y = step.result.tensor
        at_zero = _at_zero(step, x)
        if at_zero is not None:
            flow.take("activations", gradient * at_zero)

        plain = plain_gradient(step, gradient, {step.x})[0]
        assert plain is not None
        # the slope of the line from zero
        line = torch.div(y if at_zero is None else y - at_zero, torch.where(x == 0, 1, x))
        sent = torch.where(x == 0, plain, line * gradient)
        # an infinite value times a gradient of 0 is NaN: 0 is sent instead
        if not bool(sent.sum().isfinite()):
            sent = torch.where(gradient == 0, 0, sent)
        return sent


def _at_zero(step: Step, x: Tensor) -> Tensor | None:
    """An activation's value at zero, as a tensor that broadcasts to its result; None where it is 0
    everywhere, or not finite."""
    # one zero is enough; for a single number, one without a dimension, as the result has none
    zero = x.new_zeros([1] if x.ndim else [])
    with torch.no_grad():
        results = step.recorded.run(lambda value: zero if value is step.x else value.tensor)
    at_zero = results[step.output].nan_to_num(nan=0, posinf=0, neginf=0)
    return at_zero if bool(at_zero.any()) else None


class ConstantWeights(RelevanceRule):
    """The weights of attention are constants (Ali et al., 2022): nothing goes on through the
    softmax."""

    name: ClassVar[str] = "constant"

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """LRP with constant attention weights: send no relevance through a softmax."""
        # its result may be used otherwise than as a factor: that relevance ends here
        if bool(gradient.any()):
            flow.take("softmax", gradient * step.result.tensor)
        return torch.zeros_like(gradient)


class Taylor(RelevanceRule):
    """The softmax by its first derivative (Achtibat et al., 2024): R_i = x_i (R_i - s_i sum_j R_j),
    the plain gradient. It does not conserve: the softmax takes what is missing."""

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """LRP at a softmax: its derivative; the cause "softmax" takes the relevance that is not
        conserved."""
        s = step.result.tensor
        plain = plain_gradient(step, gradient, {step.x})[0]
        assert plain is not None
        # log s stands for x: they differ by one number in each row, whose gradients add up to zero.
        flow.take("softmax", s * gradient - torch.where(s > 0, s, 1).log() * plain)
        return plain


class ConstantDeviation(_OfOneSignal):
    """Normalisations divide by a constant (Ali et al., 2022): the deviation is not differentiated,
    the mean is."""

    name: ClassVar[str] = "constant deviation"

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """LRP at a normalisation: its deviation is held constant; the bias takes its share."""
        weight = parameter_of(step, "weight")
        bias = parameter_of(step, "bias")
        if bias is not None:
            flow.take("biases", gradient * bias)
        x = step.x.tensor
        rows, dims = normalised_rows(step, x)
        # less its mean, as the gradient of a value less the mean is
        arrived, _ = normalised_rows(step, gradient if weight is None else gradient * weight)
        square = rows.square().mean(dims, keepdim=True)
        return (arrived * (square + epsilon_of(step, x)).rsqrt()).reshape(x.shape)


def parameter_of(step: Step, name: str) -> Tensor | None:
    """The weight or bias (``name``) of a step that normalises, in a shape that broadcasts to its
    input; None without one."""
    parameter: Value | None = step.recorded.options.get(name)
    if parameter is None:
        return None
    if "normalized_shape" in step.recorded.options:
        return parameter.tensor
    return along(parameter.tensor, len(step.x.shape) - 1)


def normalised_rows(step: Step, values: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Values of a normalisation's input as it sees them: reshaped (for groups, to ``(N, groups,
    rest)``), and less their mean if it subtracts that; and the dimensions of its statistics."""
    options = step.recorded.options
    dims: tuple[int, ...] = (0, *range(2, values.ndim))  # by the statistics of a batch
    if "normalized_shape" in options:
        dims = tuple(range(-len(options["normalized_shape"]), 0))
    elif "group" in options:
        values = values.reshape(len(values), options["group"], -1)
        dims = (-1,)
    if "rms_norm" not in step.name:
        values = values - values.mean(dims, keepdim=True)
    return values, dims


def epsilon_of(step: Step, x: Tensor) -> float:
    """The number that a normalisation step adds to the variance: its argument, or PyTorch's default
    for x."""
    epsilon: float | None = step.recorded.options.get("eps")
    return torch.finfo(x.dtype).eps if epsilon is None else epsilon


class ConstantTerms(RelevanceRule):
    """What is added to a signal takes what belongs to it; the signals get theirs by the plain
    gradient."""

    name: ClassVar[str] = "gradient"

    def fits(self, step: Step) -> bool:
        """Whether a step is a sum, a concatenation or a choice by a mask, with a constant among its
        arguments that takes relevance."""
        if step.kind == "sum":
            return len(step.signals) < 2
        return step.kind in ("join", "choice") and has_constant_part(step)

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """LRP at a sum, concatenation or choice: its constants take their relevance as "biases";
        gradients stay."""
        # Masks add minus infinity to scores that do not count: 0 times that is NaN.
        flow.take("biases", torch.where(gradient == 0, 0, gradient * constant_part(step)))
        return None


class ElementwisePassThrough(_OfOneSignal):
    """The pass rule: each element of the input gets the relevance of the element of the output at
    its position; for activations, softmaxes and normalisations of an image."""

    # Relevance that would go to an input of zero is absorbed, since value times gradient cannot
    # express it.
    name: ClassVar[str] = "pass"

    def fits(self, step: Step) -> bool:
        """Whether the pass rule of LRP can act: each element of the step's result belongs to one of
        its input."""
        return super().fits(step) and step.kind in ("activation", "softmax", "deviation")

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """LRP's pass rule: the gradient with which each element of the input has the relevance of
        the result's element there."""
        return flow.per_value(gradient * step.result.tensor, step.x.tensor)


class Balanced(RelevanceRule):
    """A sum of two signals, such as a shortcut and what it leads past (Chefer et al., CVPR
    2021)."""

    def fits(self, step: Step) -> bool:
        """Whether a step adds or subtracts two signals, as LRP's rule for shortcuts needs."""
        return super().fits(step) and step.name in ("add", "sub") and len(step.signals) == 2

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """LRP at a sum of two signals: their gradients, scaled for each image so that large
        opposite shares do not cancel out."""
        # By the plain gradient (LRP-0), the shares of the two signals add up, in an image, to s1
        # (`first_sum`) and s2, and large ones of opposite signs cancel out. Here they are to add up
        # to |s1| and |s2| out of |s1| + |s2| parts of what arrived, s1 + s2. So the shares of the
        # first are multiplied by sign(s1) (s1 + s2) / (|s1| + |s2|); the second likewise.
        first_signal = step.inputs[0].tensor
        second_signal = step.inputs[1].tensor
        sign = -1 if step.name == "sub" else 1
        of_first = gradient.sum_to_size(first_signal.shape)
        # the second signal is multiplied by `alpha` before it is added
        of_second = (sign * step.recorded.kwargs.get("alpha", 1) * gradient).sum_to_size(
            second_signal.shape
        )
        first_sum = flow.by_image(of_first * first_signal)
        second_sum = flow.by_image(of_second * second_signal)
        total = first_sum + second_sum
        sum_of_sizes = first_sum.abs() + second_sum.abs()
        total_over_size = total / torch.where(sum_of_sizes == 0, 1, sum_of_sizes)
        of_first = _scaled_by_image(of_first, first_sum.sign() * total_over_size, step)
        of_second = _scaled_by_image(of_second, second_sum.sign() * total_over_size, step)
        return [of_first, of_second]


def _scaled_by_image(gradient: Tensor, factors: Tensor, step: Step) -> Tensor:
    """A gradient times the factor of the image that each value belongs to, of ``factors``
    ``(count,)``. Raises MethodError if it is not known which image that is."""
    numbers = numbers_of(gradient, len(factors), step.images)
    if numbers is None:
        got = tuple(gradient.shape)
        raise MethodError(
            f"relevance must balance sums image by image, got shape {got}; explain one at a time"
        )
    return gradient * factors[numbers.long()]
