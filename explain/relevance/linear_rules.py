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
from explain.relevance.linear_maps import signed
from explain.relevance.propagation import LinearRule, RelevanceFlow, Sent
from explain.relevance.steps import Step


class _Stabilised(LinearRule):
    """A rule that keeps its denominators away from zero."""

    epsilon: float
    absolute: bool

    def _stabiliser(self, flow: RelevanceFlow, sizes: Tensor) -> Tensor | float:
        """The stabiliser e of denominators of these ``sizes``: ``epsilon`` times their mean in each
        image, which makes it independent of units, or ``epsilon`` itself if ``absolute``."""
        if self.absolute or not self.epsilon:
            return self.epsilon
        mean = flow.mean(sizes)
        # the least number above zero, where a tiny mean times epsilon would be zero
        least = torch.finfo(mean.dtype).smallest_normal * torch.finfo(mean.dtype).eps
        # where all denominators are zero, so is the relevance: 1 avoids 0 / 0
        return (mean * self.epsilon).clamp(min=least).masked_fill(mean == 0, 1)


class Gradient(LinearRule):
    """LRP-0 (Bach et al., 2015): in proportion to what each input contributes. It is the plain
    gradient."""

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """LRP-0 at a linear map: its plain gradient; the bias takes its share."""
        linear = step.linear
        _take(step, flow, gradient, linear.bias)
        return linear.backward(gradient, step.x.tensor, linear.weight)


@dataclass(frozen=True)
class Epsilon(_Stabilised):
    """LRP-epsilon (Bach et al., 2015): R_j = sum_k x_j w_jk / (z_k + e sign(z_k)) R_k.

    e is ``epsilon`` times the mean size of the layer's z of the same image; with ``absolute``, it
    is ``epsilon``.
    """

    epsilon: float = 1e-6
    absolute: bool = False

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """The LRP-epsilon gradient in x. With R = z g, the gradient ``g z / (z + e sign(z))`` is
        sent back, which is ``g - g e / (abs(z) + e)``.

        The stabiliser and the bias take their shares.
        """
        if not self.epsilon:
            return Gradient().back(step, gradient, flow)
        linear = step.linear
        z = step.result.tensor
        size = z if step.rectified else z.abs()  # a rectifier's result is not negative
        stabiliser = self._stabiliser(flow, size)
        taken = (gradient / (size + stabiliser)).mul_(stabiliser)
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
        """Check the options: alpha - beta must be 1, or relevance is not conserved."""
        super().__post_init__()
        if abs(self.alpha - self.beta - 1) > 1e-6:
            raise MethodError(
                "alpha - beta of AlphaBeta must be 1 for relevance to be conserved, got "
                f"{self.alpha:g} - {self.beta:g}; take beta={self.alpha - 1:g}"
            )

    @property
    def name(self) -> str:
        """What ``coverage`` calls the rule in results and records: "zplus" with beta 0."""
        return "zplus" if self.beta == 0 else "alphabeta"

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Tensor:
        """The LRP-alpha-beta gradient in x: shares of the positive contributions times alpha, less
        those of the negative times beta."""
        relevance = gradient * step.result.tensor
        of_x = self._part(step, relevance, self.alpha, flow, sign=1)
        if not self.beta:
            return of_x
        return of_x.add_(self._part(step, relevance, -self.beta, flow, sign=-1))

    def _part(
        self, step: Step, relevance: Tensor, factor: float, flow: RelevanceFlow, sign: int
    ) -> Tensor:
        """The gradient in x of one half of LRP-alpha-beta: ``factor`` times ``relevance`` shared
        among the contributions of one sign."""
        linear = step.linear
        x = step.x.tensor
        bias = None if linear.bias is None or not self.bias else signed(linear.bias, sign)
        weight = linear.weight_of_sign(sign)
        inputs_and_weights = [(x, weight)]
        if not flow.is_nonnegative(step):
            # negative inputs contribute so by weights of the other sign
            inputs_and_weights = [
                (x.clamp(min=0), weight),
                (x.clamp(max=0), linear.weight_of_sign(-sign)),
            ]
        z = _run(step, inputs_and_weights, bias)
        stabiliser = sign * self._stabiliser(flow, z if sign > 0 else -z)
        # relevance arrives where a rectifier gives more than zero: there, something contributes
        always_contributes = step.rectified is not None and sign > 0 and self.bias
        if always_contributes:
            share = relevance / z.add_(stabiliser)
        else:
            has_no_contribution = z == 0
            share = (relevance / z.add_(stabiliser)).masked_fill_(has_no_contribution, 0)
            # units without any contribution
            flow.take("no contributions", relevance.where(has_no_contribution, 0), factor)
        if factor != 1:
            share = share.mul_(factor)
        _take(step, flow, share, bias, stabiliser)
        by_sign_of_x = [linear.backward(share, x, weight) for _, weight in inputs_and_weights]
        if len(by_sign_of_x) == 1:
            return by_sign_of_x[0]
        of_positive_x, of_negative_x = by_sign_of_x
        return torch.where(x < 0, of_negative_x, of_positive_x)


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
        """The LRP-gamma gradient in x, from the gradient in z = W x + b.

        Two maps are run backward: W with the shares of z, and ``|W|`` with those of the sizes. The
        bias and the stabiliser take their shares.
        """
        # then the parts with the sign of z are those of positive weights: one map does
        if step.rectified and flow.is_nonnegative(step):
            return self._of_positive(step, gradient, flow)
        linear = step.linear
        x = step.x.tensor
        z = step.result.tensor
        half_gamma = self.gamma / 2
        weight = linear.weight
        size_weight = weight.abs() * half_gamma
        value_bias = None if linear.bias is None else linear.bias * (1 + half_gamma)
        size_bias = None if linear.bias is None else linear.bias.abs() * half_gamma
        size = z.abs()
        # those of the rule times sign(z): (1 + gamma / 2) |z| + gamma / 2 (|W| |x| + |b|)
        denominators = _run(step, [(x.abs(), size_weight)], size_bias)
        denominators.add_(size, alpha=1 + half_gamma)
        # no relevance arrives where a rectifier gives zero: these do not count in the mean
        stabiliser = self._stabiliser(
            flow, denominators.masked_fill(z <= 0, 0) if step.rectified else denominators
        )
        denominators = denominators + stabiliser
        # Relevance R = z g over sign(z) times these is |z| g over these. The contributions of the
        # sizes have a factor sign(z) too, and the two cancel out.
        share_of_z = size.mul_(gradient).div_(denominators)
        share_of_size = (gradient * z).div_(denominators)
        _take(step, flow, share_of_z, value_bias)
        # this share is R over the denominators, of which the stabiliser is a part
        _take(step, flow, share_of_size, size_bias, stabiliser)
        of_x = linear.backward(share_of_z, x, weight).mul_(1 + half_gamma)
        return of_x.addcmul_(linear.backward(share_of_size, x, size_weight), x.sign())

    def _of_positive(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Tensor:
        """The same where x and z are nowhere negative: only positive weights and biases are
        enlarged by gamma, which needs one map fewer."""
        linear = step.linear
        x = step.x.tensor
        weight = linear.weight
        weight = weight + self.gamma * weight.clamp(min=0)
        bias = None if linear.bias is None else linear.bias + self.gamma * linear.bias.clamp(min=0)
        z = _run(step, [(x, weight)], bias).clamp(min=0)  # nothing arrives where it is negative
        stabiliser = self._stabiliser(flow, z)
        share = gradient * step.result.tensor / (z + stabiliser)
        _take(step, flow, share, bias, stabiliser)
        return linear.backward(share, x, weight)


class _AtInput(_Stabilised):
    """A rule for the first map, whose shares are no multiples of x: where `Prefix` leads back, the
    sources get relevance itself, as a deposit; else the gradient is relevance over x."""

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Tensor:
        """Deposit the relevance of the map's input in the explained inputs, and return zeros as the
        gradient in x; relevance over x if no prefix leads back."""
        linear = step.linear
        x = step.x.tensor
        original = linear.x  # before copies of it, which hooks make
        while original.step is not None and original.step.name in ("alias", "clone"):
            original = original.step.inputs[0]
        is_source = original in flow.sources
        prefix = None
        if step.nearest and not is_source:  # no other map lies before this one
            prefix = Prefix.to(linear.x, flow.recorded, flow.sources, flow.signals)
        shares = self.shares(step, gradient * step.result.tensor, flow, prefix)
        if is_source:
            flow.deposit(original, shares)
            return torch.zeros_like(x)
        if prefix is not None:
            # what belongs to padding comes from no input
            flow.take("biases", shares * prefix.outside)
            for source, relevance in prefix.back(shares).items():
                flow.deposit(source, relevance)
            return torch.zeros_like(x)
        return flow.per_value(shares, x)

    def shares(
        self, step: Step, relevance: Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> Tensor:
        """The relevance of each value of the map's input x, in its shape, from that of the map's
        result; ``prefix`` leads from x back to the explained inputs."""
        raise NotImplementedError

    def _quotient(self, relevance: Tensor, z: Tensor, flow: RelevanceFlow) -> Tensor:
        """Relevance over the stabilised z; where z is zero, the cause "no contributions" takes
        it."""
        stabiliser = self._stabiliser(flow, z.abs())
        if not isinstance(stabiliser, Tensor):  # `copysign` takes no number first
            stabiliser = z.new_full((), stabiliser)
        added = torch.copysign(stabiliser, z)
        is_zero = z == 0
        share = (relevance / (z + added)).masked_fill(is_zero, 0)
        flow.take("stabiliser", share, added.expand_as(share))
        flow.take("no contributions", relevance * is_zero)
        return share


@dataclass(frozen=True)
class _ByWeights(_AtInput):
    """A rule at the input whose shares depend on the weights alone."""

    epsilon: float = 1e-6
    absolute: bool = False

    def shares(
        self, step: Step, relevance: Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> Tensor:
        """The relevance of each value of x in proportion to its `sizes`, whatever the value."""
        weight = self.sizes(step.linear.weight)
        z = step.linear.run(torch.ones_like(step.x.tensor), weight, None)
        return step.linear.backward(self._quotient(relevance, z, flow), step.x.tensor, weight)

    def sizes(self, weight: Tensor) -> Tensor:
        """What each weight of the map counts, in its shape, and never negative."""
        raise NotImplementedError


class Flat(_ByWeights):
    """The flat rule (Bach et al., 2016): every input of a unit gets the same share, whatever x and
    w."""

    def sizes(self, weight: Tensor) -> Tensor:
        """One for each weight."""
        return torch.ones_like(weight)


class WSquare(_ByWeights):
    """The w² rule (Montavon et al., 2017): in proportion to the squared weights."""

    def sizes(self, weight: Tensor) -> Tensor:
        """The squared weights."""
        return weight.square()


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
        """The relevance of each value of x by the z^B rule, in the shape of x."""
        linear = step.linear
        x = step.x.tensor
        low_and_high = self._range(step, flow, prefix)
        weight = linear.weight
        # the least value counts less by positive weights, the largest less by negative ones
        weights = (weight, -weight.clamp(min=0), -weight.clamp(max=0))
        inputs_and_weights = list(zip((x, *low_and_high), weights, strict=True))
        z = _run(step, inputs_and_weights, bias=None)
        share = self._quotient(relevance, z, flow)
        of_x = torch.zeros_like(x)
        for value, its_weight in inputs_and_weights:
            of_x.addcmul_(value, linear.backward(share, x, its_weight))
        return of_x

    def _range(
        self, step: Step, flow: RelevanceFlow, prefix: Prefix | None
    ) -> tuple[Tensor, Tensor]:
        """The least and largest value of each element of x: ``low`` and ``high``, brought forward
        through the prefix, or those of x itself for each image (and channel, of convolutions)."""
        x = step.x.tensor
        channels = step.linear.channels
        if self.low is None or self.high is None:
            # Of a convolution, those up to the channels: of a single picture without a batch, these
            # come first.
            kept_dims = (
                range(x.ndim + channels + 1) if step.kind == "convolution" else (flow.images_in(x),)
            )
            dims = tuple(d for d in range(x.ndim) if d not in kept_dims)
            return x.amin(dims, keepdim=True).expand_as(x), x.amax(dims, keepdim=True).expand_as(x)
        if prefix is None:
            return _laid(self.low, x, x.ndim + channels), _laid(self.high, x, x.ndim + channels)
        source_ranges = {
            source: (_laid(self.low, source.tensor, 1), _laid(self.high, source.tensor, 1))
            for source in flow.sources
        }
        return prefix.range(x, source_ranges)


def _laid(numbers: tuple[float, ...], like: Tensor, channels: int) -> Tensor:
    """The numbers of the z^B rule's range, one for all or one for each channel, expanded to the
    shape of ``like``, whose channels are dimension ``channels``."""
    count = like.shape[channels] if like.ndim > channels else 1
    if len(numbers) not in (1, count):
        raise MethodError(
            f"low and high must have a number for each of {count} channels, got {len(numbers)}; "
            "give one"
        )
    shape = [-1 if d == channels and len(numbers) > 1 else 1 for d in range(like.ndim)]
    return torch.tensor(numbers).to(like).reshape(shape).expand_as(like)


def _run(
    step: Step, inputs_and_weights: list[tuple[Tensor, Tensor]], bias: Tensor | None
) -> Tensor:
    """The result z of a step's linear map for a sum of (input, weight) pairs, as LRP rules split it
    (positive and negative halves of x), with the bias added once."""
    first_x, first_weight = inputs_and_weights[0]
    z = step.linear.run(first_x, first_weight, bias)
    for x, weight in inputs_and_weights[1:]:
        z += step.linear.run(x, weight, None)
    return z


def _take(
    step: Step,
    flow: RelevanceFlow,
    share: Tensor,
    bias: Tensor | None,
    stabiliser: Tensor | float | None = None,
) -> None:
    """Add to the flow what bias and stabiliser of a linear map take: ``share``, relevance over z,
    times each of these."""
    # Bias and stabiliser are the same at all positions of a channel, so these are added up first,
    # unless images lie along them.
    dims = tuple(range(step.linear.channels + 1, 0))
    images = step.images
    if dims and (images is None or all(images.shape[d] == 1 for d in dims)):
        share = share.sum(dims, keepdim=True)
    if bias is not None:
        flow.take("biases", share, bias)
    if stabiliser is not None:
        flow.take("stabiliser", share, stabiliser)
