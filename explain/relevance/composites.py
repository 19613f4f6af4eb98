"""Composites: which rule covers which step, as ordered tuples of (condition, rule), the first that
fits.

Those of the literature are here by name, as functions of their numbers. `automatic` takes the one
that suits a network.
"""

import fnmatch
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from explain._utils.errors import MethodError, did_you_mean, shown
from explain.hooks import HookGroup
from explain.hooks.graph import consumers
from explain.relevance import nonlinear_rules as nonlinear
from explain.relevance.calls import Call
from explain.relevance.gradient_rules import Coverage
from explain.relevance.linear_rules import AlphaBeta, Epsilon, Flat, Gamma, Gradient, ZBox, ZPlus
from explain.relevance.operations import Operation, operations_of
from explain.relevance.propagation import RelevanceFlow, RelevanceRule, with_merged_maps
from explain.relevance.steps import ENTERED, Step
from explain.relevance.table import KINDS, LINEAR, is_library_operator

_MATERIAL = 1e-3
"""The share of what arrives from which on an operation without a rule is named for what it
loses."""


@dataclass(frozen=True)
class When:
    """A condition on steps: their kinds (all, if none is given), their module's name, and whether
    they come first.

    ``module`` is a pattern such as ``"layer4.*"``. ``first`` means the linear maps that the input
    meets first.
    """

    kinds: tuple[str, ...] = ()
    module: str | None = None
    first: bool = False

    def __post_init__(self) -> None:
        """Check a condition on steps, and turn its kinds into a tuple.

        Raises:
            MethodError: a kind is unknown, or an option has another type.
        """
        if not isinstance(self.kinds, (tuple, list)):
            raise MethodError(
                f"kinds of When must be several, as in ('dense',), got {shown(self.kinds)}"
            )
        for kind in self.kinds:
            if kind not in KINDS:
                raise MethodError(
                    f"kind of When {shown(kind)} is unknown; {did_you_mean(str(kind), KINDS)}"
                )
        if not isinstance(self.module, (str, NoneType)):
            raise MethodError(
                f"module of When must be a pattern such as 'layer4.*', got {shown(self.module)}"
            )
        object.__setattr__(self, "kinds", tuple(self.kinds))

    def __call__(self, kind: str, module: str | None, first: bool) -> bool:
        """Whether a step of this kind, in this module, meets the condition; ``first`` says whether
        it is the first map after the input."""
        is_in_module = self.module is None or (
            module is not None and fnmatch.fnmatchcase(module, self.module)
        )
        return is_in_module and (not self.kinds or kind in self.kinds) and (first or not self.first)


Rules = tuple[tuple[When, RelevanceRule], ...]
_FACTORS = When(("product", "quotient", "sampling", *LINEAR))
_OTHERS: Rules = (
    (When(("activation",)), nonlinear.ActivationPassThrough()),
    (When(("deviation", "batchnorm")), nonlinear.ConstantDeviation()),
    (When(("sum", "join", "choice")), nonlinear.ConstantTerms()),
)
_SOFTMAX = When(("softmax", "attention"))
_CONSTANT: Rules = (
    (_SOFTMAX, nonlinear.ConstantWeights()),
    (_FACTORS, nonlinear.Uniform()),
    *_OTHERS,
)
_TAYLOR: Rules = (
    (_SOFTMAX, nonlinear.Taylor()),
    (_FACTORS, nonlinear.Uniform(constant=False)),
    *_OTHERS,
)


@dataclass(frozen=True)
class Composite:
    """Rules for the steps of a network: the first whose condition is met, and that fits, covers a
    step.

    >>> from explain.relevance import Composite, Epsilon, Gamma, When
    >>> mine = Composite(
    ...     "mine",
    ...     ((When(("dense",)), Epsilon(0.1)), (When(("convolution",), "layer1.*"), Gamma(0.5))),
    ... )
    >>> mine.rules[1][1]
    Gamma(gamma=0.5, epsilon=1e-06, absolute=False)
    """

    name: str
    rules: Rules = field(repr=False)

    def __post_init__(self) -> None:
        """Check a composite's rules, and turn them into tuples of (condition, rule).

        Raises:
            MethodError: they are no such pairs.
        """
        rules: Any = self.rules  # a caller may have passed anything
        for pair in rules if isinstance(rules, (tuple, list)) else [rules]:
            when, rule = (
                pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, None)
            )
            if not isinstance(when, When) or not isinstance(rule, RelevanceRule):
                raise MethodError(
                    f"rules of composite {self.name!r} must be pairs (When, rule), got "
                    f"{shown(pair)}"
                )
        object.__setattr__(self, "rules", tuple((when, rule) for when, rule in rules))

    @property
    def is_open(self) -> bool:
        """Whether a z^B rule among these LRP rules has no range of its own, and would take each
        image's least and largest value.

        Callers that know the range of the input then set it with `within`.
        """
        return any(isinstance(rule, ZBox) and rule.low is None for _, rule in self.rules)

    def within(self, low: tuple[float, ...], high: tuple[float, ...]) -> "Composite":
        """This composite of LRP rules, with ``low`` and ``high`` (one number per channel) in the
        z^B rules that have no range of their own.

        Called by those who know the range of the model's input; other rules stay the same objects.
        """
        rules: list[tuple[When, RelevanceRule]] = []
        for when, rule in self.rules:
            if isinstance(rule, ZBox) and rule.low is None:
                rule = replace(rule, low=low, high=high)
            rules.append((when, rule))
        return replace(self, rules=tuple(rules))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of steps at which these LRP rules may replace gradients: the recorder gives
        those entrances."""
        acting = {
            kind
            for when, rule in self.rules
            for kind in when.kinds or KINDS
            if not isinstance(rule, nonlinear.ConstantTerms)
        }
        return ENTERED | acting

    def rule(self, step: Step) -> RelevanceRule | None:
        """The LRP rule that covers a step: the first whose condition it meets and that fits it.

        A linear map without one gets the plain gradient; any other step None.
        """
        for when, rule in self.rules:
            if when(step.kind, step.module, step.first) and rule.fits(step):
                return rule
        return Gradient() if step.map is not None else None


_MAPS = When(LINEAR)
_CONVOLUTIONS = When(("convolution",))
_AT_INPUT = When(("convolution", "dense", "matrixproduct"), first=True)


def attn_lrp(epsilon: float = 1e-6, gamma: float = 0.0) -> Composite:
    """The AttnLRP composite: epsilon at linear maps, or gamma at all of them; softmax by its
    derivative (Achtibat et al., ICML 2024)."""
    rule: RelevanceRule = Gamma(gamma, epsilon) if gamma else Epsilon(epsilon)
    return Composite("AttnLRP", ((_MAPS, rule), *_TAYLOR))


def transformer_attribution() -> Composite:
    """The composite of the first transformer attribution (Chefer et al., CVPR 2021): z+ without
    biases, pass-through elsewhere, balanced sums."""
    pass_through = (
        When(("activation", "deviation", "softmax", "attention")),
        nonlinear.ElementwisePassThrough(),
    )
    sums = (When(("sum",)), nonlinear.Balanced())
    factors = (_FACTORS, nonlinear.Uniform(constant=False))
    return Composite(
        "TransformerAttribution",
        ((_MAPS, ZPlus(1e-9, bias=False)), pass_through, sums, factors, *_CONSTANT),
    )


AUTOMATIC = Composite("automatic", ())
_EPSILON = (_MAPS, Epsilon())
_FLAT = (_AT_INPUT, Flat())
_BOX = (_AT_INPUT, ZBox())
_PLUS = (_CONVOLUTIONS, ZPlus())
_ALPHA_BETA = (_CONVOLUTIONS, AlphaBeta(2, 1))
_AT_THE_INPUT: dict[str, Rules] = {"": (), "Flat": (_FLAT,), "Box": (_BOX,)}
_ABOVE: dict[str, Rules] = {"": (), "Plus": (_PLUS,), "Alpha2Beta1": (_ALPHA_BETA,)}
_RULES: dict[str, Rules] = {
    "Gradient": ((_MAPS, Gradient()),),
    # Montavon et al., 2019: with the flat rule or z^B at the input, and gamma at convolutions
    **{
        f"Epsilon{a}{i}": (*_AT_THE_INPUT[i], *_ABOVE[a], _EPSILON)
        for a in _ABOVE
        for i in _AT_THE_INPUT
    },
    "EpsilonGammaBox": (_BOX, (_CONVOLUTIONS, Gamma(0.25)), _EPSILON),
    # The weights of attention are constants (Ali et al., ICML 2022).
    "CPLRP": (_EPSILON,),
    # Zhang et al., 2016
    "ExcitationBackprop": ((_MAPS, ZPlus(bias=False)),),
    # Montavon et al., 2017
    "DeepTaylor": (_BOX, (_MAPS, ZPlus(bias=False))),
}
COMPOSITES: dict[str, Composite] = {
    "automatic": AUTOMATIC,
    **{name: Composite(name, (*rules, *_CONSTANT)) for name, rules in _RULES.items()},
    "AttnLRP": attn_lrp(),
}
"""The composites that have names, each with its usual numbers."""


def automatic_composite(steps: Sequence[Step]) -> Composite:
    """The composite of LRP rules that suits a network, from its steps: AttnLRP for attention,
    EpsilonPlusFlat for convolutions, Epsilon elsewhere.

    A network with a single convolution, as one that cuts patches, does not count as convolutional.
    """
    if any(step.kind in ("softmax", "attention") for step in steps):
        return COMPOSITES["AttnLRP"]
    # Counted by their weights: a network that takes its images one by one calls each convolution
    # once for each image.
    convolutions = [step for step in steps if step.kind == "convolution"]
    weights = {
        step.node if step.map is None else step.linear.call_weight.data_ptr()
        for step in convolutions
    }
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
        """Which LRP rules covered how many operations, and how much relevance each cause has taken:
        read after the backward pass.

        Operations without a rule are listed as missed if they lost a material share of relevance;
        what is within rounding is not counted as taken.
        """
        by_kind = Counter[str]()
        by_rule = dict[str, dict[str, int]]()
        for (rule, kind), count in self.covered.items():
            by_rule.setdefault(rule, {})[kind] = count
            by_kind[kind] += count
        flow = self.flow
        missed = Counter(self.missed)
        taken = dict(flow.taken)
        for cause, arrived in flow.watched.items():
            if not flow.lost(cause, 1e3 * torch.finfo(arrived.dtype).eps):
                del taken[cause]  # only rounding errors: the operation conserves relevance
            elif cause not in self.missed and flow.lost(cause, _MATERIAL):
                missed[cause] += self.covered["gradient", cause]
        return Coverage(dict(by_kind), dict(missed), by_rule, taken, self.composite.name)


def propagate(
    composite: Composite,
    group: HookGroup,
    score: Tensor,
    noted: Mapping[Node, Operation],
    steps: Sequence[Step],
    sources: Sequence[Tensor],
    count: int,
    do_not_merge: Collection[Node] = (),
) -> PropagationResult:
    """Attach the rules of a composite to the graph of ``score``, so that its next backward pass
    propagates relevance.

    The engine calls this before it differentiates; the hooks last as long as ``group``. ``noted``
    and ``steps`` were recorded in the forward pass, ``sources`` are the explained inputs, ``count``
    is the number of images. Linear maps whose Nodes are in ``do_not_merge`` are not merged with the
    normalisation that follows. The result's ``flow`` fills during the backward pass.
    """
    nodes = consumers(score)
    steps_of_score = [step for step in steps if step.node in nodes]
    chosen = automatic_composite(steps_of_score) if composite == AUTOMATIC else composite
    flow = RelevanceFlow(group, count, sources)
    covered = Counter[tuple[str, str]]()
    missed = Counter[str]()
    counted: set[Call] = set()
    for step in with_merged_maps(steps_of_score, nodes, do_not_merge):
        has_no_rule = step.kind == "other"
        name = step.function if has_no_rule else step.kind
        rule = nonlinear.NoRule() if has_no_rule else chosen.rule(step)
        if step.call not in counted:  # one call may have several results
            counted.add(step.call)
            covered["gradient" if rule is None else rule.name, name] += 1
            missed[name] += is_library_operator(name) or (has_no_rule and not step.entrances)
        if rule is not None:
            if getattr(rule, "by_sign", False):
                flow.signed.append(step)
            flow.attach(step, partial(rule.back, step, flow=flow.for_step(step)))
    recorded = {step.node for step in steps}
    for operation in operations_of(nodes, noted):
        if not operation.rectifies and operation.node not in recorded:
            missed[operation.kind] += 1
    return PropagationResult(chosen, flow, covered, +missed)
