"""Composites: which rule covers which step, as ordered tuples of (condition, rule), the first that
fits.

Those of the literature are here by name, as functions of their numbers. `automatic` takes the one
that suits a network.
"""

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from explain._utils.errors import MethodError, did_you_mean, shown
from explain._utils.options import CheckedFields, register_reader
from explain.recording import Step as RecordedStep
from explain.recording import Value
from explain.recording.gradients import Gradients, Rule, paths_to, reached_from, walk_back
from explain.recording.operations import TABLE
from explain.relevance import nonlinear_rules as nonlinear
from explain.relevance.gradient_rules import Coverage
from explain.relevance.linear_rules import AlphaBeta, Epsilon, Flat, Gamma, Gradient, ZBox, ZPlus
from explain.relevance.propagation import (
    RelevanceFlow,
    RelevanceRule,
    walk_rule,
    walk_with_account,
)
from explain.relevance.steps import LINEAR, Step, relevance_steps

_OF_TABLE = {row.kind for row in TABLE.values() if row.kind is not None}
KINDS = tuple(sorted(_OF_TABLE | {"attention", "dense", "other"}))
"""The kinds of steps, as conditions of composites name them; operations without a kind are
"other"."""
_MATERIAL = 1e-3
"""The share of what arrives from which on an operation without a rule is named for what it
loses."""


@dataclass(frozen=True)
class When(CheckedFields):
    """A condition on steps: their kinds (all, if none is given), their module's name, and whether
    they come first.

    ``module`` is a pattern such as ``"layer4.*"``. ``first`` means the linear maps that the input
    meets first.
    """

    name: ClassVar[str] = "When"

    kinds: tuple[str, ...] = ()
    module: str | None = None
    first: bool = False

    def __post_init__(self) -> None:
        """Check the condition. Raises MethodError if a kind is unknown, or an option has another
        type."""
        super().__post_init__()
        for kind in self.kinds:
            if kind not in KINDS:
                raise MethodError(
                    f"kind of When {shown(kind)} is unknown; {did_you_mean(kind, KINDS)}"
                )
        # an attention, fused or not, is a softmax between two products
        kinds = ["softmax" if kind == "attention" else kind for kind in self.kinds]
        object.__setattr__(self, "kinds", tuple(kinds))

    def __call__(self, kind: str, module: str | None, first: bool) -> bool:
        """Whether a step of this kind, in this module, meets the condition; ``first`` says whether
        it is the first map after the input."""
        if self.kinds and kind not in self.kinds:
            return False
        if self.first and not first:
            return False
        return self.module is None or (
            module is not None and fnmatch.fnmatchcase(module, self.module)
        )


register_reader(When, "a When", lambda value: value)
register_reader(RelevanceRule, "a rule", lambda value: value)
Rules = tuple[tuple[When, RelevanceRule], ...]
_FACTORS = When(("product", "quotient", "sampling", *LINEAR))
_OTHERS: Rules = (
    (When(("activation",)), nonlinear.ActivationPassThrough()),
    (When(("deviation", "batchnorm")), nonlinear.ConstantDeviation()),
    (When(("sum", "join", "choice")), nonlinear.ConstantTerms()),
)
_SOFTMAX = When(("softmax",))
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
class Composite(CheckedFields):
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

    def rule(self, step: Step) -> RelevanceRule | None:
        """The LRP rule that covers a step: the first whose condition it meets and that fits it.

        A linear map without one gets the plain gradient; any other step None.
        """
        kind = step.kind
        module = step.recorded.module
        first = step.first
        for when, rule in self.rules:
            if when(kind, module, first) and rule.fits(step):
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
        When(("activation", "deviation", "softmax")),
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
        f"Epsilon{above}{at_input}": (*_AT_THE_INPUT[at_input], *_ABOVE[above], _EPSILON)
        for above in _ABOVE
        for at_input in _AT_THE_INPUT
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
    EpsilonPlusFlat for several convolutions, Epsilon elsewhere."""
    if any(step.kind == "softmax" for step in steps):
        return COMPOSITES["AttnLRP"]
    # Counted by their weights: a network that takes its images one by one calls each convolution
    # once for each image.
    convolutions = [step for step in steps if step.kind == "convolution"]
    weights = {step.recorded.inputs[1] for step in convolutions}
    # a single one, as one that cuts patches, does not count
    return COMPOSITES["EpsilonPlusFlat" if len(weights) > 1 else "Epsilon"]


@dataclass(eq=False)
class PropagationResult:
    """What a walk back under a composite found."""

    gradients: Gradients
    """Those in the wanted values: times the value, they are relevance."""
    composite: Composite
    flow: RelevanceFlow
    covered: Counter[tuple[str, str]]
    """Steps by rule ("gradient" where there is none) and kind, or name without a kind."""
    missed: Counter[str]
    """Operators of libraries, by name."""

    @property
    def coverage(self) -> Coverage:
        """Which LRP rules covered how many operations, and how much relevance each cause has taken:
        read after the backward pass."""
        by_kind = Counter[str]()
        by_rule = dict[str, dict[str, int]]()
        for (rule, kind), count in self.covered.items():
            by_rule.setdefault(rule, {})[kind] = count
            by_kind[kind] += count
        flow = self.flow
        missed = Counter(self.missed)
        taken = dict(flow.taken)
        # operations without a rule: the cause is the operation's name
        for cause, arrived in flow.watched.items():
            # less than this may be the rounding errors of the sums
            rounding = 1e3 * torch.finfo(arrived.dtype).eps
            if not flow.lost(cause, rounding):
                del taken[cause]  # the operation conserves relevance
            elif cause not in self.missed and flow.lost(cause, _MATERIAL):
                # steps without a rule are counted under "gradient", by their name
                missed[cause] += self.covered["gradient", cause]
        return Coverage(dict(by_kind), dict(missed), by_rule, taken, self.composite.name)


@dataclass(frozen=True, eq=False)
class KeptChannels:
    """The channels of a value that relevance passes through alone, along its dimension ``dim``."""

    value: Value
    kept: Sequence[int]
    dim: int

    def of(self, gradient: Tensor) -> Tensor:
        """A gradient with zeros in all other channels."""
        kept = torch.tensor(self.kept, device=gradient.device)
        part = gradient.index_select(self.dim, kept)
        return torch.zeros_like(gradient).index_copy(self.dim, kept, part)


def propagate(
    composite: Composite,
    recorded: Sequence[RecordedStep],
    gradients: Gradients,
    sources: Sequence[Value],
    signals: AbstractSet[Value],
    wanted: AbstractSet[Value],
    count: int,
    image_labels: Mapping[Value, Tensor | None] | None = None,
    channels: KeptChannels | None = None,
) -> PropagationResult:
    """Walk back over a recorded pass by the rules of a composite, from the ``gradients`` of the
    score in the output; with ``channels``, relevance passes through these alone."""
    # `signals` are the values that a gradient leads from to the explained inputs (`sources`) of
    # `count` images; `wanted` are those whose gradients are returned; `image_labels` says which
    # image each element of a value belongs to, where the images do not come first
    leading = paths_to(gradients)
    unmerged = {*wanted, channels.value} if channels else set(wanted)
    steps = relevance_steps(recorded, signals, leading, unmerged)
    chosen = automatic_composite(steps) if composite == AUTOMATIC else composite
    flow = RelevanceFlow(count, sources, recorded, signals)
    covered = Counter[tuple[str, str]]()
    missed = Counter[str]()
    rules: dict[RecordedStep, Rule] = {}
    image_labels = image_labels or {}
    # linear maps first, so that `coverage` lists their rules first
    for step in sorted(steps, key=lambda step: step.map is None):
        step.images = image_labels.get(step.map_output)
        step.input_images = [image_labels.get(value) for value in step.inputs]
        has_no_rule = step.kind == "other"
        name = step.name if has_no_rule else step.kind
        rule = None if has_no_rule else chosen.rule(step)
        covered["gradient" if rule is None else rule.name, name] += 1
        if "::" in name:  # the namespace of a library
            missed[name] += 1
        if has_no_rule:
            rules[step.last] = walk_with_account(step, flow)
        elif rule is not None:
            if getattr(rule, "by_sign", False):  # the flow answers all of them at once
                flow.signed.append(step)
            rules[step.last] = walk_rule(step, rule, flow)
    if channels is not None:
        # back to the channels' value alone; from there on, with what arrives in these channels
        behind = reached_from(recorded, [channels.value])
        of_channels = walk_back(recorded, gradients, {channels.value}, behind & signals, rules)
        arrived = of_channels.get(channels.value)
        gradients = {} if arrived is None else {channels.value: channels.of(arrived)}
    of_wanted = walk_back(recorded, gradients, wanted, signals, rules)
    return PropagationResult(of_wanted, chosen, flow, covered, missed)
