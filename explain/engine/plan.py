"""`Plan`: which passes gather the evidence, decided before any of them is run; it prints itself.

* layers only: everything below the first of those that gradients are taken of runs without a graph,
  like inference;
* gradients of the input: the whole pass is recorded, and each rule is one more backward pass over
  it;
* each further target, and each further objective, is one more backward pass, never one more
  forward;
* perturbed samples: each plan of them is run once, for all methods and targets.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

from explain._utils.html import lines_html
from explain._utils.progress import duration
from explain.engine.needs import (
    Attention,
    AttentionRelevance,
    Backward,
    BlockAttention,
    Need,
    NeedAtLayer,
    needs_at,
)
from explain.engine.perturbations import Attributions, Perturbation, Searches, Unperturbed


@dataclass(frozen=True)
class PerturbationPass:
    """Perturbed samples that are run once, at a layer or none, and the needs that they answer."""

    perturbation: Perturbation
    layer: str | None
    needs: tuple[NeedAtLayer, ...]
    names: tuple[str, ...] = ()
    """The methods that use them."""

    @property
    def is_known(self) -> bool:
        """Whether the first forward pass has the scores of these perturbed samples already. So it
        is where nothing is perturbed, and only scores are needed. Such a stream is not run."""
        return isinstance(self.perturbation, Unperturbed) and not self.inner

    @cached_property
    def inner(self) -> frozenset[NeedAtLayer]:
        """The needs that must be answered for each perturbed sample, beside its score: those of the
        methods that are applied to samples. Empty where all read scores alone."""
        inner_needs = set[NeedAtLayer]()
        for need in self.needs:
            if isinstance(need.kind, Attributions):
                inner_needs.update(map(need.at_same_place, need.kind.method.needs))
        return frozenset(inner_needs)

    @cached_property
    def gradients(self) -> frozenset[NeedAtLayer]:
        """The gradients that are taken of perturbed samples, also of samples of samples."""
        gradients = set[NeedAtLayer]()
        for need in self.inner:
            if isinstance(need.kind, Attributions):
                inner = PerturbationPass(need.kind.perturbation, need.layer, (need,))
                gradients |= inner.gradients
            elif need.kind.differentiates:
                gradients.add(need)
        return frozenset(gradients)

    @cached_property
    def inner_plan(self) -> "Plan":
        """The plan of the passes over a batch of perturbed samples, which `gather` is called with
        for them."""
        return Plan({"": self.inner})

    @cached_property
    def gradients_plan(self) -> "Plan":
        """The plan of these gradients of an unperturbed image, with the methods' names."""
        return Plan({", ".join(self.names): self.gradients})


@dataclass(frozen=True)
class Plan:
    """The passes that answer some needs; ``wanted`` has those of each method by its name.

    ``targets`` says how many scores are explained, ``images`` how many images, and ``channels`` how
    many each layer has, where that is known. A few samples more are run to see that samples do not
    change each other's scores; they are not counted here.

    >>> from explain.engine.needs import Activations, LayerGradients
    >>> plan = Plan({"gradcam": needs_at({Activations(), LayerGradients()}, ["layer4"])}, targets=2)
    >>> print(plan)
    1 forward pass of 1 image, recorded from layer4 on: gradcam
    2 backward passes from the score to layer4: gradcam
    >>> plan.passes, plan.passes_back, plan.rows
    (1, 2, 0)

    Perturbed samples are copies of the images, or of a layer's maps, that the network is run on
    again.

    >>> from explain.methods import Smooth
    >>> print(Plan({"smoothgrad": needs_at(Smooth(samples=8).needs, [])}, images=2))
    1 forward pass of 2 images: smoothgrad
    16 perturbed inputs (noisy copies of the photo) forward and back: smoothgrad
    """

    wanted: Mapping[str, frozenset[NeedAtLayer]]
    targets: int = 1
    images: int = 1
    channels: Mapping[str, int] = field(default_factory=dict)
    size: tuple[int, ...] = ()
    """Height and width of the image, where they are known."""
    seconds: float | None = None
    """About how long it takes; infinite where what is run depends on the evidence."""
    memory: int | None = None
    """About how many bytes it takes besides the weights."""

    @cached_property
    def needs(self) -> tuple[NeedAtLayer, ...]:
        """All needs of the methods, in the order in which they are answered: after those that must
        be gathered before (``also``), else by kind and layer, then by method."""
        by_method = dict.fromkeys(chain.from_iterable(self.wanted.values()))
        ordered: dict[NeedAtLayer, None] = {}
        for need in sorted(by_method, key=lambda it: (type(it.kind).__name__, it.layer or "")):
            for prerequisite in need.kind.also:
                ordered[need.at_same_place(prerequisite)] = None
            ordered[need] = None
        return tuple(ordered)

    @cached_property
    def streams(self) -> tuple[PerturbationPass, ...]:
        """The streams of perturbed samples to run: each distinct perturbation once per layer, with
        all needs that it answers; those that read no layer once for all layers."""
        needs_of: dict[tuple[Perturbation, str | None], list[NeedAtLayer]] = {}
        for need in self.needs:
            if isinstance(need.kind, Attributions):
                perturbation = need.kind.perturbation
                reads_layer = perturbation.of_layer or any(
                    need_of_perturbation.of_layer for need_of_perturbation in perturbation.needs
                )
                perturbed_at = (perturbation, need.layer if reads_layer else None)
                needs_of.setdefault(perturbed_at, []).append(need)
        return tuple(
            [
                PerturbationPass(perturbation, layer, tuple(needs), tuple(self.names_of(needs)))
                for (perturbation, layer), needs in needs_of.items()
            ]
        )

    @cached_property
    def answered_at_once(self) -> tuple[NeedAtLayer, ...]:
        """The needs that the forward pass and the backward passes over it answer, without perturbed
        samples."""
        return tuple(
            [need for need in self.needs if not isinstance(need.kind, (Attributions, Searches))]
        )

    @cached_property
    def searches(self) -> tuple[NeedAtLayer, ...]:
        """The needs for searches by perturbed samples, which come after all else."""
        return tuple([need for need in self.needs if isinstance(need.kind, Searches)])

    @cached_property
    def reruns(self) -> bool:
        """Whether the model is run again after the first forward pass, on perturbed samples or for
        searches."""
        return len(self.answered_at_once) < len(self.needs)

    @cached_property
    def backwards(self) -> tuple[Backward, ...]:
        """The distinct backward passes for one target, in order: plain gradients, other objectives,
        rules, composites or references, and last that for curvature."""
        passes = [backward for backward in self.needs_by_backward if backward is not None]
        passes.sort(
            key=lambda b: (b.second, b.propagates, b.rule is not None, b.objective is not None)
        )
        return tuple(passes)

    @cached_property
    def needs_by_backward(self) -> dict[Backward | None, list[NeedAtLayer]]:
        """The needs that each distinct backward pass answers (needs share one if their options are
        equal); under None, those that need no backward pass."""
        needs: dict[Backward | None, list[NeedAtLayer]] = {}
        for need in self.answered_at_once:
            needs.setdefault(need.kind.backward, []).append(need)
        return needs

    @cached_property
    def looks_inside(self) -> str | None:
        """The name of a method that must see the blocks of the network, or None; scripted models
        are refused for it."""
        for name, needs in self.wanted.items():
            if any(need.kind.looks_inside for need in needs):
                return name
        return None

    @cached_property
    def kinds(self) -> frozenset[type[Need[Any]]]:
        """The kinds of needs that the forward pass and its backward passes answer; they decide what
        is hooked."""
        return frozenset([type(need.kind) for need in self.answered_at_once])

    @cached_property
    def perturbed_layer(self) -> str | None:
        """The first layer whose feature maps are perturbed, or None; the operations before it may
        be taped."""
        return next((stream.layer for stream in self.streams if stream.perturbation.of_layer), None)

    @cached_property
    def reads_attention(self) -> bool:
        """Whether a need reads attention weights of the first forward pass, so that they are hooked
        in the graph."""
        return any(
            isinstance(need.kind, (Attention, AttentionRelevance)) for need in self.answered_at_once
        )

    @cached_property
    def whole(self) -> bool:
        """Whether the autograd graph must reach back to the input; otherwise it may begin at a
        layer."""
        return any(need.kind.whole for need in self.answered_at_once)

    @cached_property
    def walks_back(self) -> bool:
        """Whether gradients come by a walk over the recording of the pass: by rules, relevance, to
        bias terms, or to attention that the graph does not reach."""
        return any(backward.changes_gradients for backward in self.backwards) or any(
            need.kind.walks_back for need in self.answered_at_once
        )

    @cached_property
    def hooks_nodes(self) -> bool:
        """Whether rules at rectifiers alone walk back, which hooks on Nodes may follow without a
        recording."""
        has_rules = any(backward.rule is not None for backward in self.backwards)
        if not has_rules or any(backward.propagates for backward in self.backwards):
            return False
        return not any(need.kind.walks_back or need.kind.hooked for need in self.answered_at_once)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers whose outputs gradients are taken in; the forward pass records a graph from
        the first of them on. The order of gradients in a pass is that of needs, not of these."""
        layers = dict.fromkeys([need.layer for need in self.answered_at_once if need.kind.at_layer])
        return tuple([layer for layer in layers if layer is not None])

    @cached_property
    def watched(self) -> tuple[str, ...]:
        """The layers of which only the output is needed, without gradients. Disjoint from `layers`;
        both are captured under these names."""
        layers = dict.fromkeys([need.layer for need in self.needs if need.kind.of_layer])
        return tuple([layer for layer in layers if layer is not None and layer not in self.layers])

    @property
    def passes(self) -> int:
        """The number of forward passes of all images, for all targets: without perturbed samples,
        with references. Needs with a pass of their own are counted for each target."""
        references = {backward.reference for backward in self.backwards} - {None}
        return 1 + self._own_passes * self.targets + len(references)

    @property
    def passes_back(self) -> int:
        """The number of backward passes of all images, for all targets, without those of perturbed
        samples."""
        return self.targets * (
            self._own_passes + sum(2 if backward.second else 1 for backward in self.backwards)
        )

    @property
    def _own_passes(self) -> int:
        """The number of needs that run the model forward and back once more for each target."""
        return sum(map(_has_own_pass, self.needs))

    @property
    def rows(self) -> int:
        """The largest number of perturbed samples that are run, for all images, also those made of
        other perturbed samples; of a layer only where its channels are known (``channels``)."""
        return sum(
            self.rows_of(stream) * inner.passes + inner.rows for stream, inner in self._perturbed()
        )

    @property
    def rows_back(self) -> int:
        """The number of backward passes over perturbed samples, each counted for a single
        sample."""
        return sum(
            self.rows_of(stream) * inner.passes_back + inner.rows_back
            for stream, inner in self._perturbed()
        )

    def rows_of(self, stream: PerturbationPass) -> int:
        """The largest number of perturbed samples of one stream, for all images; 0 where it is not
        known. An upper bound: accumulators may finish early."""
        layer = stream.layer or next((need.layer for need in stream.needs if need.layer), "")
        channels = self.channels.get(layer, 0)
        return self.images * stream.perturbation.count(channels, self.size)

    def cost(self, shares: Mapping[str, float] = MappingProxyType({})) -> float:
        """How many passes of one image the plan takes, forward and backward ones alike, for the
        choice of "all" methods.

        Perturbed samples that begin at a layer count for the part of a pass after it, which
        ``shares`` has for each layer; for all of it, where it is not known. Where what is run
        depends on the evidence, the cost is infinite.

        >>> from explain.methods import AblationCAM
        >>> plan = Plan(
        ...     {"ablationcam": needs_at(AblationCAM().needs, ["layer4"])}, channels={"layer4": 100}
        ... )
        >>> plan.cost(), plan.cost({"layer4": 0.01})
        (101.0, 2.0)
        """
        if self.searches:
            return float("inf")
        total = float(self.images * (self.passes + self.passes_back))
        for stream, inner in self._perturbed():
            if not inner.images:
                return float("inf")  # how many samples there are depends on the evidence
            begins_at_layer = stream.perturbation.of_layer
            share = shares.get(stream.layer or "", 1.0) if begins_at_layer else 1.0
            total += inner.cost(shares) * share
        return total

    def _perturbed(self) -> "Iterator[tuple[PerturbationPass, Plan]]":
        """The streams of perturbed samples that must be run, each with the plan for its samples, of
        which these are the images."""
        for stream in self.streams:
            if not stream.is_known:
                sample_count = self.rows_of(stream)
                yield (
                    stream,
                    replace(
                        self,
                        wanted={"": stream.inner},
                        images=sample_count,
                        seconds=None,
                        memory=None,
                    ),
                )

    def __str__(self) -> str:
        """The plan in words: a line for each kind of pass with its number and methods, then the
        sums and costs."""
        lines = [self._forward(), *map(self._back, self.backwards)]
        separate = [need for need in self.needs if _has_own_pass(need)]
        if separate:
            count = _counted(len(separate) * self.targets, "of these passes", "")
            lines.append(f"{count} forward and back for one method{self._for(separate)}")
        for stream, inner in self._perturbed():
            lines += [f"{self._run(stream, inner)}{self._for(stream.needs)}", *inner._nested()]
        lines += [self._in_all()] if len(lines) > 2 else []
        if self.seconds is not None and self.memory is not None:
            is_sure = math.isfinite(self.seconds)
            time = duration(self.seconds) if is_sure else "a time that depends on the photo"
            megabytes = max(1, round(self.memory / 2**20))
            lines.append(f"at most about {time}, and {megabytes} MB besides the weights")
        return "\n".join(lines)

    def _forward(self) -> str:
        """The line of the printed plan for the forward pass: how many, of how many images, recorded
        from which layer on. Examples in the documentation show these words."""
        begin = ", recorded" if self.whole or self.layers else ""
        if self.layers and not self.whole:
            first = "the first of " if len(self.layers) > 1 else ""
            begin += f" from {first}{', '.join(self.layers)} on"
        of = f" of {_counted(self.images, 'image', 's')}"
        return f"{_counted(self.passes, 'forward pass', 'es')}{of}{begin}{self._for(self.needs)}"

    def _back(self, backward: Backward) -> str:
        """The line of the printed plan for one backward pass: from which score to which layer, and
        under which rule. Examples in the documentation show these words."""
        needs = self.needs_by_backward[backward]
        count = _counted(self.targets * (2 if backward.second else 1), "backward pass", "es")
        origin = "the score" if backward.objective is None else str(backward.objective)
        destinations = " and ".join(dict.fromkeys(need.layer or "the input" for need in needs))
        details = ", for its curvature" if backward.second else ""
        details += f", with the rule {backward.rule.name!r}" if backward.rule else ""
        details += f", with the composite {backward.composite.name!r}" if backward.composite else ""
        details += f", against {backward.reference}" if backward.reference else ""
        details += f", through channels of {backward.concept.layer}" if backward.concept else ""
        return f"{count} from {origin} to {destinations}{details}{self._for(needs)}"

    def _run(self, stream: PerturbationPass, inner: "Plan") -> str:
        """The words of the printed plan for one stream of perturbed samples; ``inner`` is the plan
        for these samples. Examples in the documentation show these words."""
        count = self.rows_of(stream)
        counted = _counted(count, "perturbed input", "s") if count else "perturbed inputs"
        from_layer = f" from {stream.layer} on" if stream.perturbation.of_layer else ""
        back = " and back" if inner.passes_back else ""
        times = f" {inner.passes_back} times" if inner.passes_back > 1 else ""
        return f"{counted} ({stream.perturbation}) forward{from_layer}{back}{times}"

    def _nested(self) -> list[str]:
        """The lines of the printed plan for samples that are perturbed once more, as by occlusion
        inside SmoothGrad. They are indented below the line of the outer samples."""
        lines = []
        for stream, inner in self._perturbed():
            lines.append(f"  made of these: {self._run(stream, inner)}")
            lines += [f"  {line}" for line in inner._nested()]
        return lines

    def _repr_html_(self) -> str:
        return lines_html(str(self).splitlines())

    def __repr__(self) -> str:
        return f"Plan({', '.join(self.wanted)}; {self._in_all()})"

    def _in_all(self) -> str:
        """The last line of the printed plan: the sums of forward passes, backward passes and
        perturbed samples. Also in the ``repr``."""
        counts = [
            _counted(self.passes, "forward pass", "es"),
            _counted(self.passes_back, "backward pass", "es"),
        ]
        if self.rows:
            counts.append(f"{_counted(self.rows, 'perturbed input', 's')} forward")
        if self.rows_back:
            counts.append(f"{self.rows_back} back")
        return f"in all: {', '.join(counts)}"

    def names_of(self, needs: Iterable[NeedAtLayer]) -> list[str]:
        """The names of the methods that have at least one of these needs; methods without a name
        are left out."""
        return [name for name, wanted in self.wanted.items() if name and wanted.intersection(needs)]

    def _for(self, needs: Iterable[NeedAtLayer]) -> str:
        """The end of a line of the printed plan: the names of the methods that need the pass. Empty
        for methods without names."""
        names = self.names_of(needs)
        return f": {', '.join(names)}" if names else ""


def _has_own_pass(need: NeedAtLayer) -> bool:
    """Whether a need runs the model forward and back once more: LeGrad's blocks, full-backward
    hooks."""
    return isinstance(need.kind, BlockAttention) or need.kind.hooked


def _counted(count: int, thing: str, plural: str) -> str:
    """A number with its noun, such as "2 images"; ``plural`` is the ending of the plural."""
    return f"{count} {thing}{plural if count != 1 else ''}"


def plan_of(needs: Iterable[Need[Any]], layers: Iterable[str]) -> Plan:
    """The plan for some needs, each at every layer, for no method by name: for callers inside the
    package."""
    return Plan({"": needs_at(needs, layers)})


_PLANS_KEPT = 32
_plans: dict[Hashable, tuple[object, Plan]] = {}


def planned(
    key: Hashable, methods: object, needs: Callable[[], Mapping[str, frozenset[NeedAtLayer]]]
) -> Plan:
    """Return the plan for ``key`` from a cache of the latest 32, with what it has computed lazily,
    or make it of ``needs()``."""
    # The methods, whose ids are in the key, are kept with it, since the id of a freed object may be
    # taken by another. They must stay alive anyway, since others may hold tensors of the caller's.
    kept = _plans.pop(key, None) or (methods, Plan(needs()))
    _plans[key] = kept
    if len(_plans) > _PLANS_KEPT:
        _plans.pop(next(iter(_plans)), None)
    return kept[1]
