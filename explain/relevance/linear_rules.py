"""Rules for linear maps z = W x + b: how the relevance of z is shared out among x.

Each is written from its paper. Relevance is value times gradient; so with R = z g for the gradient g that arrives, a
rule sends back the gradient with which x times gradient is the share of x. Denominators are stabilised as
z + e sign(z), where sign(0) = 1 and e is epsilon times the mean size of the layer's denominators for the same image, so
that units make no difference. With ``absolute``, e is epsilon, as in Captum and zennit.

Shares do not change when a channel's weights, bias and epsilon are all multiplied by a number. So a map that a
normalisation follows is run with the weights that it has, and the bias and epsilon by what they are multiplied with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from explain._utils.errors import MethodError
from explain.relevance.input_prefix import Prefix
from explain.relevance.propagation import LinearNode, RelevanceFlow
from explain.relevance.rule import LinearRule


class _Stabilised(LinearRule):
    """A rule that keeps its denominators away from zero."""

    epsilon: float
    absolute: bool

    def _small(
        self, flow: RelevanceFlow, below: torch.Tensor, size: torch.Tensor | None = None
    ) -> torch.Tensor | float:
        """What is added to ``below``; the denominators are ``size`` times that."""
        if self.absolute or not self.epsilon:
            return self.epsilon if size is None else self.epsilon / size
        sizes = below.abs() if size is None else below.abs().mul_(size)
        mean = flow.mean(sizes)
        least = torch.finfo(mean.dtype).smallest_normal * torch.finfo(mean.dtype).eps
        small = (mean * self.epsilon).clamp_(min=least).masked_fill_(mean == 0, 1)
        return small if size is None else small / size  # 1 where all denominators are zero, and so is the relevance


@dataclass(frozen=True)
class Gradient(LinearRule):
    """LRP-0 (Bach et al., 2015): in proportion to what each input contributes. It is the plain gradient."""

    name: ClassVar[str] = "gradient"

    def attach(self, of: LinearNode, flow: RelevanceFlow) -> None:
        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            _take_bias(flow, of.linear.added, _by_channel(of, gradient))
            return gradient

        flow.arriving(of.exit, arrived)


@dataclass(frozen=True)
class Epsilon(_Stabilised):
    """LRP-epsilon (Bach et al., 2015): R_j = sum_k x_j w_jk / (z_k + e sign(z_k)) R_k.

    e is ``epsilon`` times the mean size of the layer's z of the same image; with ``absolute``, it is ``epsilon``.
    """

    epsilon: float = 1e-6
    absolute: bool = False

    name: ClassVar[str] = "epsilon"

    def attach(self, of: LinearNode, flow: RelevanceFlow) -> None:
        alone = of.linear.size is None and of.rectifier is None
        if not self.epsilon:
            Gradient().attach(of, flow)
        elif alone or of.entrance is None or of.linear.back is None:  # autograd does the rest
            flow.arriving(of.exit, lambda gradient: self._share(of, gradient, flow))
        else:
            super().attach(of, flow)

    def back(self, of: LinearNode, gradient: torch.Tensor, flow: RelevanceFlow) -> torch.Tensor:
        share = self._share(of, gradient, flow)
        share = share if of.linear.size is None else share.mul_(of.linear.size)
        return of.linear.backward(share, of.x.tensor, of.linear.weight)

    def _share(self, of: LinearNode, gradient: torch.Tensor, flow: RelevanceFlow) -> torch.Tensor:
        """g z / (z + e sign(z)), which is g - e g / (|z| + e)."""
        z = of.result.tensor
        positive = of.rectified or of.result.rectified  # what arrives behind a rectifier, arrives where z is
        small = self._small(flow, z.clamp(min=0) if positive else z)
        if of.result.rectified:
            share = torch.add(z, small)
            share = torch.div(z, share, out=share).mul_(gradient)
        else:
            part = z.abs().add_(small)
            part = torch.div(gradient, part, out=part).mul_(small)
            if not positive:
                flow.take("stabiliser", part, z)
            share = torch.sub(gradient, part, out=part)
        sums = _by_channel(of, share)
        _take_bias(flow, of.linear.added, sums)
        if positive:
            flow.take("stabiliser", sums, small)
        return share


@dataclass(frozen=True)
class AlphaBeta(_Stabilised):
    """LRP-alpha-beta (Bach et al., 2015): R_j = sum_k (alpha c+_jk / z+_k - beta c-_jk / z-_k) R_k, c_jk = x_j w_jk.

    alpha - beta must be 1. Positive and negative parts of the bias belong to z+ and z-.
    """

    alpha: float = 1.0
    beta: float = 0.0
    epsilon: float = 1e-6
    bias: bool = True
    """False leaves out what the bias contributes."""
    absolute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs(self.alpha - self.beta - 1) > 1e-6:
            raise MethodError(
                f"alpha - beta of AlphaBeta must be 1 for relevance to be conserved, got {self.alpha:g} - "
                f"{self.beta:g}; beta of {self.alpha - 1:g} fits that alpha"
            )

    @property
    def name(self) -> str:
        return "zplus" if self.beta == 0 else "alphabeta"

    def back(self, of: LinearNode, gradient: torch.Tensor, flow: RelevanceFlow) -> torch.Tensor:
        relevance = gradient * of.result.tensor
        found = self._part(of, relevance, self.alpha, flow, sign=1)
        return found.add_(self._part(of, relevance, -self.beta, flow, sign=-1)) if self.beta else found

    def _part(
        self, of: LinearNode, relevance: torch.Tensor, factor: float, flow: RelevanceFlow, sign: int
    ) -> torch.Tensor:
        """What positive contributions get, or with sign -1 negative ones: their shares of a multiple of relevance."""
        linear, x = of.linear, of.x.tensor
        bias = None if linear.bias is None or not self.bias else _signed(linear.bias, sign)
        weight = _signed(linear.weight, sign)
        if of.x.unsigned or bool(x.amin() >= 0):
            return linear.backward(self._share(of, [(x, weight)], bias, relevance, factor, flow, sign), x, weight)
        parts = [(x.clamp(min=0), weight), (x.clamp(max=0), _signed(linear.weight, -sign))]
        share = self._share(of, parts, bias, relevance, factor, flow, sign)
        above, below = (linear.backward(share, x, w) for _, w in parts)
        return torch.where(x < 0, below, above)

    def _share(
        self,
        of: LinearNode,
        parts: list[tuple[torch.Tensor, torch.Tensor]],
        bias: torch.Tensor | None,
        relevance: torch.Tensor,
        factor: float,
        flow: RelevanceFlow,
        sign: int,
    ) -> torch.Tensor:
        """Relevance by what all contributions of a sign add up to; where there are none, nobody gets any."""
        z = _run(of, parts, bias)
        small = sign * self._small(flow, z, of.linear.size)
        none = z == 0
        share = torch.addcdiv(z.new_zeros(()), relevance, z.add_(small), value=factor, out=z)
        if bool(none.any()):
            share.masked_fill_(none, 0)
            flow.take("no contributions", relevance * none, factor)
        sums = _by_channel(of, share)
        _take_bias(flow, bias, sums)
        flow.take("stabiliser", sums, small)
        return share


def ZPlus(epsilon: float = 1e-6, *, bias: bool = True, absolute: bool = False) -> AlphaBeta:  # noqa: N802 (a rule's name)
    """The z+ rule (Montavon et al., 2017): alpha-beta with 1 and 0."""
    return AlphaBeta(1.0, 0.0, epsilon, bias, absolute)


@dataclass(frozen=True)
class Gamma(_Stabilised):
    """LRP-gamma (Montavon et al., 2019), in the form for inputs of both signs (Andéol et al., 2021).

    R_j = sum_k (c_jk + gamma c'_jk) / (z_k + gamma z'_k) R_k, where c' and z' are the parts of c_jk = x_j w_jk and of
    the bias that have the sign of z_k. With ``c' = (c + sign(z) |c|) / 2``, the map of sizes ``|W| |x| + |b|`` is
    all that has to be run besides.
    """

    gamma: float = 0.25
    epsilon: float = 1e-6
    absolute: bool = False

    name: ClassVar[str] = "gamma"

    def back(self, of: LinearNode, gradient: torch.Tensor, flow: RelevanceFlow) -> torch.Tensor:
        if of.rectified and (of.x.unsigned or bool(of.x.tensor.amin() >= 0)):
            return self._of_positive(of, gradient, flow)
        linear, x, z = of.linear, of.x.tensor, of.result.tensor
        half = self.gamma / 2
        weight = linear.weight.abs().mul_(half)
        bias = None if linear.bias is None else linear.bias.abs().mul_(half)
        below = _run(of, [(x.abs(), weight)], bias)
        size = z.abs()
        below.addcmul_(size, torch.as_tensor(1 + half if linear.size is None else (1 + half) / linear.size).to(size))
        positive = of.rectified or of.result.rectified  # negative values may have been overwritten
        small = self._small(flow, below.masked_fill(z <= 0, 0) if positive else below, linear.size)
        below.add_(small)
        of_z = size.mul_(gradient).div_(below)  # R sign(z) by what is shared out
        of_size = torch.div(gradient * z, below, out=below)
        sums, sums_of_size = _by_channel(of, of_z), _by_channel(of, of_size)
        _take_bias(flow, None if linear.bias is None else linear.bias * (1 + half), sums)
        _take_bias(flow, bias, sums_of_size)
        flow.take("stabiliser", sums_of_size, small)
        found = linear.backward(of_z, x, linear.weight).mul_(1 + half)
        return found.addcmul_(linear.backward(of_size, x, weight), x.sign())

    def _of_positive(self, of: LinearNode, gradient: torch.Tensor, flow: RelevanceFlow) -> torch.Tensor:
        """Where x and z are not negative, the positive weights alone count for more."""
        linear, x = of.linear, of.x.tensor
        weight = linear.weight.clamp(min=0).mul_(self.gamma).add_(linear.weight)
        bias = None if linear.bias is None else linear.bias + self.gamma * linear.bias.clamp(min=0)
        z = _run(of, [(x, weight)], bias).clamp_(min=0)  # nothing arrives where it is negative
        small = self._small(flow, z, linear.size)
        z.add_(small)
        share = torch.div(gradient * of.result.tensor, z, out=z)
        sums = _by_channel(of, share)
        _take_bias(flow, bias, sums)
        flow.take("stabiliser", sums, small)
        return linear.backward(share, x, weight)


class _AtInput(_Stabilised):
    """A rule for the first map, which gives relevance itself: its shares are no multiples of x.

    The sources get the relevance as a deposit, in the places that `Prefix` leads back to; what belongs to constants, as
    to padding, is taken. Where no prefix can be followed, the gradient is relevance over x, and what belongs to x = 0
    is taken.
    """

    def back(self, of: LinearNode, gradient: torch.Tensor, flow: RelevanceFlow) -> torch.Tensor:
        x, prefix = of.x.tensor, Prefix.to(of.node, flow.sources) if of.nearest else None
        shares = self.shares(of, gradient * of.result.tensor, flow, prefix)
        if prefix is not None:
            if bool(prefix.outside.any()):
                flow.take("biases", shares * prefix.outside)
            for place, relevance in prefix.back(shares).items():
                flow.deposit(place, relevance)
            return torch.zeros_like(x)
        flow.take("zero inputs", shares * (x == 0))
        return torch.where(x == 0, 0, shares / torch.where(x == 0, 1, x))

    def shares(
        self, of: LinearNode, relevance: torch.Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> torch.Tensor:
        raise NotImplementedError

    def _by_weights(
        self,
        of: LinearNode,
        weight: torch.Tensor,
        relevance: torch.Tensor,
        flow: RelevanceFlow,
        size: torch.Tensor | None,
    ) -> torch.Tensor:
        """Shares of relevance by weights alone."""
        z = of.linear.run(torch.ones_like(of.x.tensor), weight, None)
        return of.linear.backward(self._quotient(relevance, z, flow, size), of.x.tensor, weight)

    def _quotient(
        self, relevance: torch.Tensor, z: torch.Tensor, flow: RelevanceFlow, size: torch.Tensor | None
    ) -> torch.Tensor:
        """Relevance over the stabilised z; where z is zero nobody contributes, so that nobody gets any."""
        added = torch.copysign(torch.as_tensor(self._small(flow, z, size)).to(z), z)
        none = z == 0
        share = (relevance / (z + added)).masked_fill_(none, 0)
        flow.take("stabiliser", share, added.expand_as(share))
        if bool(none.any()):
            flow.take("no contributions", relevance * none)
        return share


@dataclass(frozen=True)
class Flat(_AtInput):
    """The flat rule (Bach et al., 2016): every input of a unit gets the same share, whatever x and w."""

    epsilon: float = 1e-6
    absolute: bool = False

    name: ClassVar[str] = "flat"

    def shares(
        self, of: LinearNode, relevance: torch.Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> torch.Tensor:
        linear, x = of.linear, of.x.tensor
        if not linear.alike:
            return self._by_weights(of, torch.ones_like(linear.weight), relevance, flow, None)
        # All channels are alike: one of each is enough.
        weight, one = torch.ones_like(linear.weight[:1, :1]), torch.ones_like(x[:1, :1])
        z = linear.run(one, weight, None).mul_(x.shape[1])
        share = self._quotient(relevance.sum(1, keepdim=True), z, flow, None)
        return linear.backward(share, x[:, :1], weight).expand_as(x)


@dataclass(frozen=True)
class WSquare(_AtInput):
    """The w² rule (Montavon et al., 2017): in proportion to the squared weights."""

    epsilon: float = 1e-6
    absolute: bool = False

    name: ClassVar[str] = "wsquare"

    def shares(
        self, of: LinearNode, relevance: torch.Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> torch.Tensor:
        size = None if of.linear.size is None else of.linear.size.square()
        return self._by_weights(of, of.linear.weight.square(), relevance, flow, size)


@dataclass(frozen=True)
class ZBox(_AtInput):
    """The z^B rule (Montavon et al., 2017): R_j = sum_k (x_j w_jk - l_j w+_jk - h_j w-_jk) / (their sum) R_k.

    ``low`` and ``high`` are the least and largest values that the network's input can have, one for each channel or one
    for all; what is done to it before the map is done to them. None takes the least and largest that the map is given
    of the image, of convolutions channel by channel.
    """

    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    epsilon: float = 1e-6
    absolute: bool = False

    name: ClassVar[str] = "zbox"

    def shares(
        self, of: LinearNode, relevance: torch.Tensor, flow: RelevanceFlow, prefix: Prefix | None
    ) -> torch.Tensor:
        linear, x = of.linear, of.x.tensor
        ends = self._range(of, flow, prefix)
        weights = (linear.weight, -linear.weight.clamp(min=0), -linear.weight.clamp(max=0))
        parts = list(zip((x, *ends), weights, strict=True))
        z = _run(of, parts, None)
        share = self._quotient(relevance, z, flow, linear.size)
        found = torch.zeros_like(x)
        for value, weight in parts:
            found.addcmul_(value, linear.backward(share, x, weight))
        return found

    def _range(self, of: LinearNode, flow: RelevanceFlow, prefix: Prefix | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and largest values that the map can be given."""
        x, channels = of.x.tensor, of.linear.channels
        if self.low is None or self.high is None:
            rows = range(x.ndim + channels)  # of a convolution, there are none where it is given a single picture
            apart = (*rows, x.ndim + channels) if of.kind == "convolution" else (flow.images_in(x),)
            dims = tuple(d for d in range(x.ndim) if d not in apart)
            return x.amin(dims, keepdim=True).expand_as(x), x.amax(dims, keepdim=True).expand_as(x)
        if prefix is None:
            return _laid(self.low, x, x.ndim + channels), _laid(self.high, x, x.ndim + channels)
        ends = [(_laid(self.low, source, 1), _laid(self.high, source, 1)) for source in flow.sources]
        return prefix.range(x, flow.sources, ends)


def _laid(numbers: tuple[float, ...], like: torch.Tensor, channels: int) -> torch.Tensor:
    """One number for all, or one for each channel, in the shape of a tensor."""
    count = like.shape[channels] if like.ndim > channels else 1
    if len(numbers) not in (1, count):
        raise MethodError(
            f"low and high of a rule for the input must have one number, or one for each of its {count} channels, got "
            f"{len(numbers)} numbers; give one for all"
        )
    shape = [-1 if d == channels and len(numbers) > 1 else 1 for d in range(like.ndim)]
    return torch.tensor(numbers).to(like).reshape(shape).expand_as(like)


def _signed(tensor: torch.Tensor, sign: int) -> torch.Tensor:
    return tensor.clamp(min=0) if sign > 0 else tensor.clamp(max=0)


def _run(of: LinearNode, parts: list[tuple[torch.Tensor, torch.Tensor]], bias: torch.Tensor | None) -> torch.Tensor:
    """The sum of the map's results for some inputs and weights, and of the bias."""
    (x, weight), *others = parts
    z = of.linear.run(x, weight, bias)
    for x, weight in others:
        z += of.linear.run(x, weight, None)
    return z


def _by_channel(of: LinearNode, share: torch.Tensor) -> torch.Tensor:
    """The sums over all that lies behind the dimension of the channels, unless images lie there."""
    dims, images = tuple(range(of.linear.channels + 1, 0)), of.exit.images
    if images is not None and any(images.shape[d] > 1 for d in dims):
        return share
    return share.sum(dims, keepdim=True) if dims else share


def _take_bias(flow: RelevanceFlow, bias: torch.Tensor | None, share: torch.Tensor) -> None:
    if bias is not None:
        flow.take("biases", share, bias)
