"""Rules for linear maps z = W x + b: how the relevance of z is shared out among x.

Each is written from its paper. Relevance is value times gradient; so with R = z g for the gradient
g that arrives, a rule sends back the gradient with which x times gradient is the share of x.
Denominators are stabilised as z + e sign(z), where sign(0) = 1 and e is epsilon times the mean size
of the layer's denominators for the same image, so that units make no difference. With ``absolute``,
e is epsilon, as in Captum and zennit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from explain._utils.errors import MethodError
from explain.relevance.input_prefix import Prefix
from explain.relevance.propagation import LinearRule, RelevanceFlow, Sent, send_nothing
from explain.relevance.steps import Step


class _Stabilised(LinearRule):
    """A rule that keeps its denominators away from zero."""

    epsilon: float
    absolute: bool

    def _small(self, flow: RelevanceFlow, below: Tensor) -> Tensor | float:
        """What is added to the denominators."""
        if self.absolute or not self.epsilon:
            return self.epsilon
        mean = flow.mean(below.abs())
        least = torch.finfo(mean.dtype).smallest_normal * torch.finfo(mean.dtype).eps
        # 1 where all denominators are zero, and so is the relevance
        return (mean * self.epsilon).clamp(min=least).masked_fill(mean == 0, 1)


class Gradient(LinearRule):
    """LRP-0 (Bach et al., 2015): in proportion to what each input contributes. It is the plain
    gradient."""

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        _take(step, flow, gradient, step.linear.bias)
        return dict.fromkeys(step.scales, send_nothing)


@dataclass(frozen=True)
class Epsilon(_Stabilised):
    """LRP-epsilon (Bach et al., 2015): R_j = sum_k x_j w_jk / (z_k + e sign(z_k)) R_k.

    e is ``epsilon`` times the mean size of the layer's z of the same image; with ``absolute``, it
    is ``epsilon``.
    """

    epsilon: float = 1e-6
    absolute: bool = False

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """With R = z g, what is sent back is ``g z / (z + e sign(z))``, which is ``g - g e /
        (abs(z) + e)``."""
        if not self.epsilon:
            return Gradient().back(step, gradient, flow)
        linear = step.linear
        z = step.result.tensor
        small = self._small(flow, z.clamp(min=0) if step.rectified else z)
        taken = (gradient / (z.abs() + small)).mul_(small)
        flow.take("stabiliser", taken, z)
        share = gradient - taken
        _take(step, flow, share, linear.bias)
        return linear.backward(share, step.x.tensor, linear.weight)


@dataclass(frozen=True)
class AlphaBeta(_Stabilised):
    """LRP-alpha-beta (Bach et al., 2015): R_j = sum_k (alpha c+_jk / z+_k - beta c-_jk / z-_k) R_k,
    c_jk = x_j w_jk.

    alpha - beta must be 1. Positive and negative parts of the bias belong to z+ and z-.
    """

    alpha: float = 1.0
    beta: float = 0.0
    epsilon: float = 1e-6
    bias: bool = True
    """False leaves out what the bias contributes."""
    absolute: bool = False

    by_sign = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs(self.alpha - self.beta - 1) > 1e-6:
            raise MethodError(
                "alpha - beta of AlphaBeta must be 1 for relevance to be conserved, got "
                f"{self.alpha:g} - {self.beta:g}; take beta={self.alpha - 1:g}"
            )

    @property
    def name(self) -> str:
        return "zplus" if self.beta == 0 else "alphabeta"

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Tensor:
        relevance = gradient * step.result.tensor
        of_x = self._part(step, relevance, self.alpha, flow, sign=1)
        if not self.beta:
            return of_x
        return of_x.add_(self._part(step, relevance, -self.beta, flow, sign=-1))

    def _part(
        self, step: Step, relevance: Tensor, factor: float, flow: RelevanceFlow, sign: int
    ) -> Tensor:
        """What positive contributions get, or with sign -1 negative ones: their shares of a
        multiple of relevance.

        Where there are no contributions of the sign, nobody gets any.
        """
        linear = step.linear
        x = step.x.tensor
        bias = None if linear.bias is None or not self.bias else _signed(linear.bias, sign)
        weight = linear.weight
        parts = [(x, _signed(weight, sign))]
        if not flow.is_nonnegative(step):
            parts = [(x.clamp(min=0), parts[0][1]), (x.clamp(max=0), _signed(weight, -sign))]
        z = _run(step, parts, bias)
        small = sign * self._small(flow, z)
        none = z == 0
        share = (factor * relevance).div_(z + small).masked_fill_(none, 0)
        flow.take("no contributions", relevance.masked_fill(~none, 0), factor)
        _take(step, flow, share, bias, small)
        of_positive, *of_negative = (linear.backward(share, x, weight) for _, weight in parts)
        return torch.where(x < 0, of_negative[0], of_positive) if of_negative else of_positive


def ZPlus(epsilon: float = 1e-6, *, bias: bool = True, absolute: bool = False) -> AlphaBeta:  # noqa: N802 (a rule's name)
    """The z+ rule (Montavon et al., 2017): alpha-beta with 1 and 0."""
    return AlphaBeta(1.0, 0.0, epsilon, bias, absolute)


@dataclass(frozen=True)
class Gamma(_Stabilised):
    """LRP-gamma (Montavon et al., 2019), in the form for inputs of both signs (Andéol et al.,
    2021).

    R_j = sum_k (c_jk + gamma c'_jk) / (z_k + gamma z'_k) R_k, where c' and z' are the parts of c_jk
    = x_j w_jk and of the bias that have the sign of z_k. With ``c' = (c + sign(z) |c|) / 2``, the
    map of sizes ``|W| |x| + |b|`` is all that has to be run besides.
    """

    gamma: float = 0.25
    epsilon: float = 1e-6
    absolute: bool = False

    by_sign = True

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Tensor:
        if step.rectified and flow.is_nonnegative(step):
            return self._of_positive(step, gradient, flow)
        linear = step.linear
        x = step.x.tensor
        z = step.result.tensor
        half = self.gamma / 2
        weight = linear.weight
        size_weight = weight.abs() * half
        bias = None if linear.bias is None else linear.bias.abs() * half
        size = z.abs()
        below = _run(step, [(x.abs(), size_weight)], bias).add_(size, alpha=1 + half)
        small = self._small(flow, below.masked_fill(z <= 0, 0) if step.rectified else below)
        below = below + small
        of_z = size.mul_(gradient).div_(below)  # R sign(z) by what is shared out
        of_size = (gradient * z).div_(below)
        _take(step, flow, of_z, None if linear.bias is None else linear.bias * (1 + half))
        _take(step, flow, of_size, bias, small)
        of_x = linear.backward(of_z, x, weight).mul_(1 + half)
        return of_x.addcmul_(linear.backward(of_size, x, size_weight), x.sign())

    def _of_positive(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Tensor:
        """Where x and z are not negative, the positive weights alone count for more."""
        linear = step.linear
        x = step.x.tensor
        weight = linear.weight
        weight = weight + self.gamma * weight.clamp(min=0)
        bias = None if linear.bias is None else linear.bias + self.gamma * linear.bias.clamp(min=0)
        z = _run(step, [(x, weight)], bias).clamp(min=0)  # nothing arrives where it is negative
        small = self._small(flow, z)
        share = gradient * step.result.tensor / (z + small)
        _take(step, flow, share, bias, small)
        return linear.backward(share, x, weight)


class _AtInput(_Stabilised):
    """A rule for the first map, which gives relevance itself: its shares are no multiples of x.

    The sources get the relevance as a deposit, in the places that `Prefix` leads back to; what
    belongs to constants, as to padding, is taken. Where no prefix can be followed, the gradient is
    relevance over x, and what belongs to x = 0 is taken.
    """

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Tensor:
        linear = step.linear
        x = step.x.tensor
        prefix = Prefix.to(step.entrances[linear.place], flow.sources) if step.nearest else None
        shares = self.shares(step, gradient * step.result.tensor, flow, prefix)
        if prefix is not None:
            flow.take("biases", shares * prefix.outside)
            for place, relevance in prefix.back(shares).items():
                flow.deposit(place, relevance)
            return torch.zeros_like(x)
        return flow.per_value(shares, x)

    def shares(
        self, step: Step, relevance: Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> Tensor:
        raise NotImplementedError

    def _quotient(self, relevance: Tensor, z: Tensor, flow: RelevanceFlow) -> Tensor:
        """Relevance over the stabilised z; where z is zero nobody contributes, so that nobody gets
        any."""
        small = self._small(flow, z)
        added = torch.copysign(small if isinstance(small, Tensor) else z.new_full((), small), z)
        none = z == 0
        share = (relevance / (z + added)).masked_fill(none, 0)
        flow.take("stabiliser", share, added.expand_as(share))
        flow.take("no contributions", relevance * none)
        return share


@dataclass(frozen=True)
class _ByWeights(_AtInput):
    """A rule at the input whose shares depend on the weights alone."""

    epsilon: float = 1e-6
    absolute: bool = False

    def _by_weights(
        self, step: Step, weight: Tensor, relevance: Tensor, flow: RelevanceFlow
    ) -> Tensor:
        z = step.linear.run(torch.ones_like(step.x.tensor), weight, None)
        return step.linear.backward(self._quotient(relevance, z, flow), step.x.tensor, weight)


class Flat(_ByWeights):
    """The flat rule (Bach et al., 2016): every input of a unit gets the same share, whatever x and
    w."""

    def shares(
        self, step: Step, relevance: Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> Tensor:
        linear = step.linear
        x = step.x.tensor
        if not linear.alike:
            return self._by_weights(step, torch.ones_like(linear.weight), relevance, flow)
        # All channels are alike: one of each is enough.
        weight = torch.ones_like(linear.weight[:1, :1])
        one = torch.ones_like(x[:1, :1])
        z = linear.run(one, weight, None).mul_(x.shape[1])
        share = self._quotient(relevance.sum(1, keepdim=True), z, flow)
        return linear.backward(share, x[:, :1], weight).expand_as(x)


class WSquare(_ByWeights):
    """The w² rule (Montavon et al., 2017): in proportion to the squared weights."""

    def shares(
        self, step: Step, relevance: Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> Tensor:
        return self._by_weights(step, step.linear.weight.square(), relevance, flow)


@dataclass(frozen=True)
class ZBox(_AtInput):
    """The z^B rule (Montavon et al., 2017): R_j = sum_k (x_j w_jk - l_j w+_jk - h_j w-_jk) / (their
    sum) R_k.

    ``low`` and ``high`` are the least and largest values that the network's input can have, one for
    each channel or one for all; what is done to it before the map is done to them. None takes the
    least and largest that the map is given of the image, of convolutions channel by channel.
    """

    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    epsilon: float = 1e-6
    absolute: bool = False

    def shares(
        self, step: Step, relevance: Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> Tensor:
        linear = step.linear
        x = step.x.tensor
        ends = self._range(step, flow, prefix)
        weight = linear.weight
        weights = (weight, -weight.clamp(min=0), -weight.clamp(max=0))
        parts = list(zip((x, *ends), weights, strict=True))
        share = self._quotient(relevance, _run(step, parts, None), flow)
        of_x = torch.zeros_like(x)
        for value, weight in parts:
            of_x.addcmul_(value, linear.backward(share, x, weight))
        return of_x

    def _range(
        self, step: Step, flow: RelevanceFlow, prefix: Prefix | None
    ) -> tuple[Tensor, Tensor]:
        """The least and largest values that the map can be given."""
        x = step.x.tensor
        channels = step.linear.channels
        if self.low is None or self.high is None:
            # Of a convolution that is given a single picture, there are no rows before the
            # channels.
            apart = (
                range(x.ndim + channels + 1) if step.kind == "convolution" else (flow.images_in(x),)
            )
            dims = tuple(d for d in range(x.ndim) if d not in apart)
            return x.amin(dims, keepdim=True).expand_as(x), x.amax(dims, keepdim=True).expand_as(x)
        if prefix is None:
            return _laid(self.low, x, x.ndim + channels), _laid(self.high, x, x.ndim + channels)
        ends = [
            (_laid(self.low, source, 1), _laid(self.high, source, 1)) for source in flow.sources
        ]
        return prefix.range(x, flow.sources, ends)


def _laid(numbers: tuple[float, ...], like: Tensor, channels: int) -> Tensor:
    """One number for all, or one for each channel, in the shape of a tensor."""
    count = like.shape[channels] if like.ndim > channels else 1
    if len(numbers) not in (1, count):
        raise MethodError(
            f"low and high must have a number for each of {count} channels, got {len(numbers)}; "
            "give one"
        )
    shape = [-1 if d == channels and len(numbers) > 1 else 1 for d in range(like.ndim)]
    return torch.tensor(numbers).to(like).reshape(shape).expand_as(like)


def _signed(tensor: Tensor, sign: int) -> Tensor:
    return tensor.clamp(min=0) if sign > 0 else tensor.clamp(max=0)


def _run(step: Step, parts: list[tuple[Tensor, Tensor]], bias: Tensor | None) -> Tensor:
    """The sum of the map's results for some inputs and weights, and of the bias."""
    first_x, first_weight = parts[0]
    z = step.linear.run(first_x, first_weight, bias)
    for x, weight in parts[1:]:
        z += step.linear.run(x, weight, None)
    return z


def _take(
    step: Step,
    flow: RelevanceFlow,
    share: Tensor,
    bias: Tensor | None,
    small: Tensor | float | None = None,
) -> None:
    """Take what the bias and the stabiliser get of a share of relevance."""
    # Both are the same for all that lies behind the dimension of the channels, unless images lie
    # there.
    dims = tuple(range(step.linear.channels + 1, 0))
    images = step.images
    if dims and (images is None or all(images.shape[d] == 1 for d in dims)):
        share = share.sum(dims, keepdim=True)
    if bias is not None:
        flow.take("biases", share, bias)
    if small is not None:
        flow.take("stabiliser", share, small)
