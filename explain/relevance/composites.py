"""Composites: which rule covers which step, as ordered tuples of (condition, rule), the first that fits.

Those of the literature are here by name, as functions of their numbers. `automatic` takes the one that suits a network.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

import torch
from torch.autograd.graph import Node

from explain._utils.errors import MethodError, shown
from explain._utils.spelling import did_you_mean
from explain.hooks import HookGroup
from explain.relevance.gradient_rules import Coverage
from explain.relevance.linear_rules import AlphaBeta, Epsilon, Flat, Gamma, Gradient, WSquare, ZBox, ZPlus
from explain.relevance.nonlinear_rules import (
    ConstantDeviation,
    ConstantTerms,
    ConstantWeights,
    Identity,
    NoRule,
    Taylor,
    Uniform,
)
from explain.relevance.pass_through import Balanced, Pass
from explain.relevance.propagation import LinearNode, RelevanceFlow, consumers, maps_in
from explain.relevance.rule import RelevanceRule
from explain.tracing.operations import Operations
from explain.tracing.steps import Step
from explain.tracing.table import KINDS, LINEAR

_MATERIAL = 1e-3
"""The share of what arrives from which on an operation without a rule is named for what it loses."""


@dataclass(frozen=True)
class When:
    """A condition on steps: their kinds (all, if none is given), their module's name, and whether they come first.

    ``module`` is a pattern such as ``"layer4.*"``. ``first`` means the linear maps that the input meets first.
    """

    kinds: tuple[str, ...] = ()
    module: str | None = None
    first: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kinds, (tuple, list)):
            raise MethodError(f"kinds of When must be several, as in ('dense',), got {shown(self.kinds)}")
        for kind in self.kinds:
            if kind not in KINDS:
                raise MethodError(f"kind of When {shown(kind)} is unknown; {did_you_mean(str(kind), KINDS)}")
        if not isinstance(self.module, (str, NoneType)):
            raise MethodError(f"module of When must be a pattern such as 'layer4.*', got {shown(self.module)}")
        object.__setattr__(self, "kinds", tuple(self.kinds))

    def __call__(self, kind: str, module: str | None, first: bool) -> bool:
        named = self.module is None or (module is not None and fnmatch.fnmatchcase(module, self.module))
        return named and (not self.kinds or kind in self.kinds) and (first or not self.first)


Rules = tuple[tuple[When, RelevanceRule], ...]
_FACTORS = When(("product", "quotient", *LINEAR))
_OTHERS: Rules = (
    (When(("activation",)), Identity()),
    (When(("deviation", "batchnorm")), ConstantDeviation()),
    (When(("sum", "join", "choice")), ConstantTerms()),
)
_CONSTANT: Rules = ((When(("softmax", "attention")), ConstantWeights()), (_FACTORS, Uniform()), *_OTHERS)
_TAYLOR: Rules = ((When(("softmax", "attention")), Taylor()), (_FACTORS, Uniform(constant=False)), *_OTHERS)


@dataclass(frozen=True)
class Composite:
    """Rules for the steps of a network: the first whose condition is met, and that fits, covers a step.

    >>> from explain.relevance import Composite, Epsilon, Gamma, When
    >>> mine = Composite("mine", ((When(("dense",)), Epsilon(0.1)), (When(("convolution",), "layer1.*"), Gamma(0.5))))
    >>> mine.rules[1][1]
    Gamma(gamma=0.5, epsilon=1e-06, absolute=False)
    """

    name: str
    rules: Rules = field(repr=False)

    def __post_init__(self) -> None:
        rules: Any = self.rules  # of anybody
        for each in rules if isinstance(rules, (tuple, list)) else [rules]:
            pair = each if isinstance(each, (tuple, list)) and len(each) == 2 else (None, None)
            is_rule = isinstance(pair[1], RelevanceRule)
            if not isinstance(pair[0], When) or not is_rule:
                raise MethodError(
                    f"rules of composite {self.name!r} must be pairs of a When and a rule, got {shown(each)}; write "
                    "explain.relevance.Composite('mine', "
                    "((explain.relevance.When(('dense',)), explain.relevance.Epsilon()),))"
                )
        object.__setattr__(self, "rules", tuple((when, rule) for when, rule in rules))

    @property
    def is_open(self) -> bool:
        """Whether a rule for the input takes each image's own range."""
        return any(isinstance(rule, ZBox) and rule.low is None for _, rule in self.rules)

    def within(self, low: tuple[float, ...], high: tuple[float, ...]) -> Composite:
        """The same, with the range of the input for rules that would take each image's own."""
        rules = [
            (when, replace(rule, low=low, high=high) if isinstance(rule, ZBox) and rule.low is None else rule)
            for when, rule in self.rules
        ]
        return replace(self, rules=tuple(rules))

    @property
    def needs_summands(self) -> bool:
        """Whether a rule needs what sums and softmaxes are given."""
        return any(isinstance(rule, (Balanced, Pass)) for _, rule in self.rules)

    def rule(self, step: Step | LinearNode) -> RelevanceRule | None:
        """The first rule whose condition a step meets, and that can act on it; None where there is none."""
        first = isinstance(step, LinearNode) and step.first
        for when, rule in self.rules:
            if when(step.kind, step.module, first) and isinstance(step, rule.acts_on) and rule.fits(step):
                return rule
        return None


def _composite(name: str, *rules: tuple[When, RelevanceRule], others: Rules = _CONSTANT) -> Composite:
    return Composite(name, (*rules, *others))


def _first(rule: RelevanceRule) -> tuple[When, RelevanceRule]:
    return When(("convolution", "dense", "matrixproduct"), first=True), rule


def epsilon(epsilon: float = 1e-6) -> Composite:
    """LRP-epsilon at every linear map."""
    return _composite("Epsilon", (When(LINEAR), Epsilon(epsilon)))


def epsilon_plus(epsilon: float = 1e-6, *first: tuple[When, RelevanceRule], name: str = "EpsilonPlus") -> Composite:
    """z+ at convolutions, epsilon at other maps (Montavon et al., 2019)."""
    return _composite(name, *first, (When(("convolution",)), ZPlus()), (When(LINEAR), Epsilon(epsilon)))


def epsilon_alpha2_beta1(
    epsilon: float = 1e-6, *first: tuple[When, RelevanceRule], name: str = "EpsilonAlpha2Beta1"
) -> Composite:
    """Alpha-beta with 2 and 1 at convolutions, epsilon at other maps."""
    return _composite(name, *first, (When(("convolution",)), AlphaBeta(2, 1)), (When(LINEAR), Epsilon(epsilon)))


def epsilon_gamma_box(
    epsilon: float = 1e-6,
    gamma: float = 0.25,
    low: tuple[float, ...] | None = None,
    high: tuple[float, ...] | None = None,
) -> Composite:
    """z^B at the input, gamma at convolutions, epsilon at other maps (Montavon et al., 2019)."""
    first = _first(ZBox(low, high))
    gammas = (When(("convolution",)), Gamma(gamma))
    return _composite("EpsilonGammaBox", first, gammas, (When(LINEAR), Epsilon(epsilon)))


def attn_lrp(epsilon: float = 1e-6, gamma: float = 0.0) -> Composite:
    """Epsilon at linear maps, or gamma at all of them; softmax by its derivative (Achtibat et al., ICML 2024)."""
    rule: RelevanceRule = Gamma(gamma, epsilon) if gamma else Epsilon(epsilon)
    return _composite("AttnLRP", (When(LINEAR), rule), others=_TAYLOR)


def cp_lrp(epsilon: float = 1e-6, gamma: float = 0.0) -> Composite:
    """Epsilon or gamma at linear maps; the weights of attention are constants (Ali et al., ICML 2022)."""
    rule: RelevanceRule = Gamma(gamma, epsilon) if gamma else Epsilon(epsilon)
    return _composite("CPLRP", (When(LINEAR), rule))


def excitation_backprop() -> Composite:
    """z+ at every linear map, without biases (Zhang et al., 2016)."""
    return _composite("ExcitationBackprop", (When(LINEAR), ZPlus(bias=False)))


def deep_taylor(low: tuple[float, ...] | None = None, high: tuple[float, ...] | None = None) -> Composite:
    """z^B at the input and z+ above it, without biases (Montavon et al., 2017)."""
    return _composite("DeepTaylor", _first(ZBox(low, high)), (When(LINEAR), ZPlus(bias=False)))


def transformer_attribution() -> Composite:
    """The rules of Chefer et al. (CVPR 2021): z+ without biases, pass-through elsewhere, balanced sums."""
    passed = When(("activation", "deviation", "softmax", "attention")), Pass()
    factors = _FACTORS, Uniform(constant=False)
    rules = ((When(LINEAR), ZPlus(1e-9, bias=False)), passed, (When(("sum",)), Balanced()), factors)
    return _composite("TransformerAttribution", *rules)


def _at_input(name: str) -> tuple[tuple[When, RelevanceRule], ...]:
    return {"Flat": (_first(Flat()),), "Box": (_first(ZBox()),), "W2": (_first(WSquare()),)}.get(name, ())


AUTOMATIC = Composite("automatic", ())
COMPOSITES: dict[str, Composite] = {
    each.name: each
    for each in (
        AUTOMATIC,
        _composite("Gradient", (When(LINEAR), Gradient())),
        epsilon(),
        _composite("EpsilonFlat", *_at_input("Flat"), (When(LINEAR), Epsilon())),
        _composite("EpsilonBox", *_at_input("Box"), (When(LINEAR), Epsilon())),
        *(epsilon_plus(1e-6, *_at_input(end), name=f"EpsilonPlus{end}") for end in ("", "Flat", "Box")),
        *(epsilon_alpha2_beta1(1e-6, *_at_input(end), name=f"EpsilonAlpha2Beta1{end}") for end in ("", "Flat", "Box")),
        epsilon_gamma_box(),
        attn_lrp(),
        cp_lrp(),
        excitation_backprop(),
        deep_taylor(),
    )
}
"""The composites that have names, each with its usual numbers."""


def suiting(steps: Iterable[Step]) -> Composite:
    """The composite that suits a network: AttnLRP for attention, EpsilonPlusFlat for convolutions, Epsilon elsewhere.

    A softmax or attention on the way means attention; and one convolution that cuts patches out is none.
    """
    found = list(steps)
    if any(step.kind in ("softmax", "attention") for step in found):
        return COMPOSITES["AttnLRP"]
    # By their weights: a network that takes its images one by one calls each as often as there are images.
    convolutions = [step for step in found if step.kind == "convolution"]
    weights = {step.node if step.linear is None else step.linear.weight.data_ptr() for step in convolutions}
    return COMPOSITES["EpsilonPlusFlat" if len(weights) > 1 else "Epsilon"]


@dataclass(eq=False)
class PropagationResult:
    """What a backward pass under a composite found besides gradients."""

    composite: Composite
    flow: RelevanceFlow
    covered: Counter[tuple[str, str]]
    missed: Counter[str]

    @property
    def coverage(self) -> Coverage:
        by_kind: Counter[str] = Counter()
        by_rule: dict[str, dict[str, int]] = {}
        for (rule, kind), count in self.covered.items():
            by_rule.setdefault(rule, {})[kind] = count
            by_kind[kind] += count
        flow, missed = self.flow, Counter(self.missed)
        taken = dict(flow.taken)
        for cause, size in flow.watched.items():
            if not flow.lost(cause, 1e3 * torch.finfo(size.dtype).eps):
                del taken[cause]  # rounding errors: it conserves
            elif flow.lost(cause, _MATERIAL):
                missed[cause] += self.covered["gradient", cause]
        return Coverage(dict(by_kind), dict(missed), by_rule, taken, self.composite.name)


def propagate(
    composite: Composite,
    group: HookGroup,
    score: torch.Tensor,
    operations: Operations,
    steps: Sequence[Step],
    sources: Sequence[torch.Tensor],
    count: int,
    apart: Collection[Node] = (),
) -> PropagationResult:
    """Make the next backward pass from ``score`` follow a composite, for as long as ``group`` lasts.

    A map whose Node is ``apart`` is not taken together with the normalisation behind it.
    """
    nodes = consumers(score)
    behind = [step for step in steps if step.node in nodes]
    chosen = suiting(behind) if composite is AUTOMATIC or composite == AUTOMATIC else composite
    found = PropagationResult(chosen, RelevanceFlow(group, count, sources), Counter(), Counter())
    reached: list[Step | LinearNode] = [*maps_in(behind, nodes, apart), *(step for step in behind if not step.is_map)]
    for step in reached:
        name, rule = step.kind, chosen.rule(step)
        if isinstance(step, LinearNode):
            rule, flow = rule or Gradient(), found.flow.for_step(step.exit)
        else:
            flow = found.flow.for_step(step)
            if step.kind == "other":
                name, rule = step.function, NoRule()
        found.covered["gradient" if rule is None else rule.name, name] += 1
        if rule is not None:
            rule.attach(step, flow)
    for operation in operations.of_graph(score):
        if not operation.rectifies:
            found.missed[operation.kind] += 1
    return found
