"""Rules for linear maps z = W x + b: how the relevance of z is shared out among x.

Each is written from its paper. Relevance is value times gradient; so with R = z g for the gradient g that arrives, a
rule sends back the gradient with which x times gradient is the share of x. Denominators are stabilised as
z + epsilon sign(z), where sign(0) = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

from explain.engine.relevance import Flow, Map, only_laid_out, sources_behind


@runtime_checkable
class LinearRule(Protocol):
    """How a linear map hands on relevance."""

    @property
    def name(self) -> str: ...

    def attach(self, of: Map, flow: Flow) -> None: ...


def signed_epsilon(z: torch.Tensor, epsilon: float) -> torch.Tensor:
    """What stabilises z as a denominator: epsilon with the sign of z."""
    return torch.copysign(z.new_tensor(epsilon), z)


@dataclass(frozen=True)
class Gradient:
    """LRP-0 (Bach et al., 2015): in proportion to what each input contributes. It is the plain gradient."""

    name: ClassVar[str] = "gradient"

    def attach(self, of: Map, flow: Flow) -> None:
        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            _take_bias(flow, of.linear.bias, gradient)
            return gradient

        flow.arriving(of.exit, arrived)


@dataclass(frozen=True)
class Epsilon:
    """LRP-epsilon (Bach et al., 2015): R_j = sum_k x_j w_jk / (z_k + epsilon sign(z_k)) R_k."""

    epsilon: float = 1e-6

    name: ClassVar[str] = "epsilon"

    def attach(self, of: Map, flow: Flow) -> None:
        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            z = of.result.tensor
            if not self.epsilon:
                _take_bias(flow, of.linear.bias, gradient)
                return gradient
            added = signed_epsilon(z, self.epsilon)
            share = torch.add(z, added).reciprocal_().mul_(z).mul_(gradient)
            _take_bias(flow, of.linear.bias, share)
            flow.take("stabiliser", share, added)
            return share

        flow.arriving(of.exit, arrived)


class _Altered:
    """A rule that runs the map with other weights, in the place of autograd."""

    def attach(self, of: Map, flow: Flow) -> None:
        def arrived(gradient: torch.Tensor) -> None:
            relevance = gradient * of.result.tensor
            flow.give(of.entrance, lambda _: self.back(of, relevance, flow).to(gradient.dtype))

        flow.arriving(of.exit, arrived)

    def back(self, of: Map, relevance: torch.Tensor, flow: Flow) -> torch.Tensor:
        """The gradient in x, from the relevance of the result."""
        raise NotImplementedError


@dataclass(frozen=True)
class AlphaBeta(_Altered):
    """LRP-alpha-beta (Bach et al., 2015): R_j = sum_k (alpha c+_jk / z+_k - beta c-_jk / z-_k) R_k, c_jk = x_j w_jk.

    alpha - beta must be 1. Positive and negative parts of the bias belong to z+ and z-.
    """

    alpha: float = 1.0
    beta: float = 0.0
    epsilon: float = 1e-6
    bias: bool = True
    """False leaves out what the bias contributes."""

    @property
    def name(self) -> str:
        return "zplus" if self.beta == 0 else "alphabeta"

    def back(self, of: Map, relevance: torch.Tensor, flow: Flow) -> torch.Tensor:
        found = self._part(of, self.alpha * relevance, flow, sign=1)
        return found if not self.beta else found + self._part(of, -self.beta * relevance, flow, sign=-1)

    def _part(self, of: Map, relevance: torch.Tensor, flow: Flow, sign: int) -> torch.Tensor:
        x, weight = of.x.tensor, of.linear.weight
        bias = None if of.linear.bias is None or not self.bias else _signed(of.linear.bias, sign)
        with_sign, against = _signed(weight, sign), _signed(weight, -sign)
        return _shared(of, x, with_sign, against, bias, relevance, self.epsilon, flow)


def ZPlus(epsilon: float = 1e-6, *, bias: bool = True) -> AlphaBeta:  # noqa: N802 (a rule's name)
    """The z+ rule (Montavon et al., 2017): alpha-beta with 1 and 0."""
    return AlphaBeta(1.0, 0.0, epsilon, bias)


@dataclass(frozen=True)
class Gamma(_Altered):
    """LRP-gamma (Montavon et al., 2019), in the form for inputs of both signs (Andéol et al., 2021).

    R_j = sum_k (c_jk + gamma c'_jk) / (z_k + gamma z'_k) R_k, where c' and z' are the parts of c_jk = x_j w_jk and of
    the bias that have the sign of z_k.
    """

    gamma: float = 0.25
    epsilon: float = 1e-6

    name: ClassVar[str] = "gamma"

    def back(self, of: Map, relevance: torch.Tensor, flow: Flow) -> torch.Tensor:
        z = of.result.tensor
        below = relevance * (z < 0)
        if not bool(below.any()):
            return self._side(of, relevance, flow, sign=1)
        return self._side(of, relevance - below, flow, sign=1) + self._side(of, below, flow, sign=-1)

    def _side(self, of: Map, relevance: torch.Tensor, flow: Flow, sign: int) -> torch.Tensor:
        x, weight, bias = of.x.tensor, of.linear.weight, of.linear.bias
        more = weight + self.gamma * _signed(weight, sign)
        less = weight + self.gamma * _signed(weight, -sign)
        bias = None if bias is None else bias + self.gamma * _signed(bias, sign)
        return _shared(of, x, more, less, bias, relevance, self.epsilon, flow)


class _AtInput(_Altered):
    """A rule for the first map, which gives relevance itself: its shares are no multiples of x.

    The source gets the relevance as a deposit where the map has as many inputs as the source, in the same places.
    Elsewhere the gradient is relevance over x, and what belongs to x = 0 is taken.
    """

    def back(self, of: Map, relevance: torch.Tensor, flow: Flow) -> torch.Tensor:
        shares = self.shares(of, relevance, flow)
        x = of.x.tensor
        places = list(sources_behind(of.entrance.node, flow.sources))
        source = flow.sources[places[0]] if len(places) == 1 else None
        if source is not None and (source.shape == x.shape or only_laid_out(of.entrance.node)):
            flow.deposit(places[0], shares.reshape(source.shape))
            return torch.zeros_like(x)
        flow.take("zero inputs", shares * (x == 0))
        return torch.where(x == 0, 0, shares / torch.where(x == 0, 1, x))

    def shares(self, of: Map, relevance: torch.Tensor, flow: Flow) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Flat(_AtInput):
    """The flat rule (Bach et al., 2016): every input of a unit gets the same share, whatever x and w."""

    epsilon: float = 1e-6

    name: ClassVar[str] = "flat"

    def shares(self, of: Map, relevance: torch.Tensor, flow: Flow) -> torch.Tensor:
        ones = torch.ones_like(of.linear.weight)
        return _of_ones(of, ones, relevance, self.epsilon, flow)


@dataclass(frozen=True)
class WSquare(_AtInput):
    """The w² rule (Montavon et al., 2017): in proportion to the squared weights."""

    epsilon: float = 1e-6

    name: ClassVar[str] = "wsquare"

    def shares(self, of: Map, relevance: torch.Tensor, flow: Flow) -> torch.Tensor:
        return _of_ones(of, of.linear.weight.square(), relevance, self.epsilon, flow)


@dataclass(frozen=True)
class ZBox(_AtInput):
    """The z^B rule (Montavon et al., 2017): R_j = sum_k (x_j w_jk - l_j w+_jk - h_j w-_jk) / (their sum) R_k.

    ``low`` and ``high`` are the least and largest values that the input can have, one for each channel or one for all;
    None takes the image's own, of convolutions channel by channel.
    """

    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    epsilon: float = 1e-6

    name: ClassVar[str] = "zbox"

    def shares(self, of: Map, relevance: torch.Tensor, flow: Flow) -> torch.Tensor:
        x, weight = of.x.tensor, of.linear.weight
        convolution = of.kind == "convolution"
        ends = [self._end(x, end, least=i == 0, convolution=convolution) for i, end in enumerate((self.low, self.high))]
        with torch.enable_grad():
            values = [each.detach().requires_grad_() for each in (x, *ends)]
            parts = zip(values, (weight, _signed(weight, 1), _signed(weight, -1)), strict=True)
            whole, low, high = (of.linear.run(value, w) for value, w in parts)
            z = whole - low - high
            share = _quotient(relevance, z.detach(), self.epsilon, flow)
            gradients = torch.autograd.grad(z, values, share)
        return sum((v.detach() * g for v, g in zip(values, gradients, strict=True)), torch.zeros_like(x))

    def _end(self, x: torch.Tensor, given: tuple[float, ...] | None, *, least: bool, convolution: bool) -> torch.Tensor:
        if given is not None:
            end = torch.tensor(given).to(x)
            return end.expand_as(x) if len(given) == 1 else end.reshape(-1, *[1] * (x.ndim - 2)).expand_as(x)
        dims = tuple(range(2 if convolution else 1, x.ndim))
        return (x.amin(dims, keepdim=True) if least else x.amax(dims, keepdim=True)).expand_as(x)


def _signed(tensor: torch.Tensor, sign: int) -> torch.Tensor:
    return tensor.clamp(min=0) if sign > 0 else tensor.clamp(max=0)


def _take_bias(flow: Flow, bias: torch.Tensor | None, share: torch.Tensor) -> None:
    if bias is not None:
        flow.take("biases", share, bias)


def _quotient(relevance: torch.Tensor, z: torch.Tensor, epsilon: float, flow: Flow) -> torch.Tensor:
    """Relevance over the stabilised z; where z is zero nobody contributes, so that nobody gets any."""
    added = signed_epsilon(z, epsilon)
    none = z == 0
    share = torch.add(z, added).reciprocal_().mul_(relevance).masked_fill_(none, 0)
    flow.take("stabiliser", share, added)
    if bool(none.any()):
        flow.take("stabiliser", relevance * none)
    return share


def _shared(
    of: Map,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_below: torch.Tensor,
    bias: torch.Tensor | None,
    relevance: torch.Tensor,
    epsilon: float,
    flow: Flow,
) -> torch.Tensor:
    """The gradient with which x times gradient shares out relevance by contributions.

    These are x times ``weight`` where x is positive, and x times ``weight_below`` where it is negative. Where no x is,
    as behind a rectifier, the map is run once.
    """
    run = of.linear.run
    both = bool(x.amin() < 0)
    with torch.enable_grad():
        above = (x.clamp(min=0) if both else x).detach().requires_grad_()
        z = run(above, weight)
        below = x.clamp(max=0).detach().requires_grad_() if both else None
        if below is not None:
            z = z + run(below, weight_below)
        whole = z.detach() if bias is None else z.detach() + bias
        share = _quotient(relevance, whole, epsilon, flow)
        if bias is not None:
            flow.take("biases", share, bias)
        if below is None:
            return torch.autograd.grad(z, above, share)[0]
        gradient, gradient_below = torch.autograd.grad(z, (above, below), share)
    return torch.where(x < 0, gradient_below, gradient)


def _of_ones(of: Map, weight: torch.Tensor, relevance: torch.Tensor, epsilon: float, flow: Flow) -> torch.Tensor:
    """Shares of relevance by weights alone."""
    with torch.enable_grad():
        ones = torch.ones_like(of.x.tensor).requires_grad_()
        z = of.linear.run(ones, weight)
        share = _quotient(relevance, z.detach(), epsilon, flow)
        return torch.autograd.grad(z, ones, share)[0]
