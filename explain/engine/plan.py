"""`Plan`: which passes gather what was asked for, decided before any of them is run; it prints itself.

* layers only: everything below the first of those that gradients are taken of runs without a graph, like inference;
* gradients of the input: the whole pass is recorded, and each rule is one more backward pass over it;
* each further target, and each further objective, is one more backward pass, never one more forward;
* perturbed rows: each plan of them is run once, for all methods and targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from explain.engine.needs import Backward, BlockAttention, Need, NeedAtLayer, RevealCancel, asks_of
from explain.engine.perturbations import Attributions, Perturbation, PerturbationRuns, Scores, Unperturbed
from explain.engine.settings import Precision


@dataclass(frozen=True)
class Stream:
    """Perturbed rows that are run once, at a layer or none, and the asks that they answer."""

    of: Perturbation
    layer: str | None
    readers: tuple[NeedAtLayer, ...]

    def is_known(self, precision: Precision) -> bool:
        """Whether the first forward pass has said it already: nothing is perturbed, nor computed otherwise."""
        return isinstance(self.of, Unperturbed) and precision == "full" and not self.inner

    @property
    def inner(self) -> frozenset[NeedAtLayer]:
        """What is asked of each perturbed row."""
        found: frozenset[NeedAtLayer] = frozenset()
        for reader in self.readers:
            if isinstance(reader.need, Attributions):
                layers = () if reader.layer is None else (reader.layer,)
                found |= asks_of(reader.need.method.needs, layers, (reader.input,))
        return found


@dataclass(frozen=True)
class Plan:
    """The passes that answer some asks; ``wanted`` has the asks of each method by its name.

    ``targets`` says how many scores are explained, ``images`` how many images, and ``channels`` how many each layer
    has, where that is known. A few rows more are run to see that rows do not change each other's scores; they are not
    counted here.

    >>> from explain.engine.needs import Activations, LayerGradients
    >>> plan = Plan({"gradcam": asks_of({Activations(), LayerGradients()}, ["layer4"])}, targets=2)
    >>> print(plan)
    1 forward pass of 1 image, recorded from layer4 on: gradcam
    2 backward passes from the score to layer4: gradcam
    >>> plan.passes, plan.passes_back, plan.rows
    (1, 2, 0)

    Perturbed rows are copies of the images, or of a layer's maps, that the network is run on again.

    >>> from explain.methods import Smooth
    >>> print(Plan({"smoothgrad": asks_of(Smooth(samples=8).needs, [])}, images=2))
    1 forward pass of 2 images: smoothgrad
    16 perturbed rows (noisy copies of the photo) forward and back: smoothgrad
    """

    wanted: Mapping[str, frozenset[NeedAtLayer]]
    targets: int = 1
    images: int = 1
    channels: Mapping[str, int] = field(default_factory=dict)
    precision: Precision = "full"
    size: tuple[int, ...] = ()
    """Height and width of the photo, where they are known."""

    @cached_property
    def asks(self) -> tuple[NeedAtLayer, ...]:
        """All asks, and those that they rest on before them."""
        ordered: dict[NeedAtLayer, None] = {}
        waiting = frozenset().union(*self.wanted.values())
        for ask in sorted(waiting, key=lambda ask: (type(ask.need).__name__, ask.layer or "")):
            for before in ask.need.also:
                ordered[ask.before(before)] = None
            ordered[ask] = None
        return tuple(ordered)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The perturbed rows to run, each distinct plan of them once."""
        found: dict[tuple[Perturbation, str | None], list[NeedAtLayer]] = {}
        for ask in self.asks:
            if isinstance(ask.need, (Scores, Attributions)):
                of = ask.need.of
                depends = of.of_layer or any(need.of_layer for need in of.needs)
                found.setdefault((of, ask.layer if depends else None), []).append(ask)
        return tuple(Stream(of, layer, tuple(readers)) for (of, layer), readers in found.items())

    @cached_property
    def answered_at_once(self) -> tuple[NeedAtLayer, ...]:
        """The asks that the forward pass and the backward passes over it answer."""
        return tuple(ask for ask in self.asks if not isinstance(ask.need, (Scores, Attributions, PerturbationRuns)))

    @property
    def reruns(self) -> bool:
        """Whether the model may be run again on perturbed rows."""
        return bool(self.streams) or any(isinstance(ask.need, PerturbationRuns) for ask in self.asks)

    @cached_property
    def backwards(self) -> tuple[Backward, ...]:
        """The distinct backward passes for one target, the plain one first."""
        found = {ask.need.backward: None for ask in self.answered_at_once if ask.need.backward is not None}
        return tuple(sorted(found, key=_order))

    @property
    def whole(self) -> bool:
        """Whether the graph reaches back to the input."""
        return any(ask.need.whole for ask in self.answered_at_once)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that gradients are taken of."""
        return _layers(ask for ask in self.answered_at_once if ask.need.at_layer)

    @cached_property
    def watched(self) -> tuple[str, ...]:
        """The layers of which only the output is wanted."""
        every = _layers(ask for ask in self.asks if ask.need.of_layer)
        return tuple(layer for layer in every if layer not in self.layers)

    @property
    def passes(self) -> int:
        """How many forward passes of all images there are, perturbed rows apart."""
        compared = len({b.reference for b in self.backwards} - {None})
        return 1 + (self._of_blocks + 3 * self._revealed) * self.targets + compared

    @property
    def passes_back(self) -> int:
        """How many backward passes of all images there are, perturbed rows apart."""
        own = self._of_blocks + 3 * self._revealed
        return self.targets * (own + sum(2 if backward.second else 1 for backward in self.backwards))

    @property
    def _of_blocks(self) -> int:
        """How many passes read out all transformer blocks, for one target."""
        return sum(isinstance(ask.need, BlockAttention) for ask in self.asks)

    @property
    def _revealed(self) -> int:
        """How often the network is run on three rows for each image, for one target."""
        return sum(isinstance(ask.need, RevealCancel) for ask in self.asks)

    @property
    def rows(self) -> int:
        """How many perturbed rows are run at most, where the layers' channels are known; those made of them too."""
        return sum(self.rows_of(stream) * inner.passes + inner.rows for stream, inner in self._perturbed())

    @property
    def rows_back(self) -> int:
        """How many backward passes perturbed rows have, each of a single row."""
        return sum(self.rows_of(stream) * inner.passes_back + inner.rows_back for stream, inner in self._perturbed())

    def rows_of(self, stream: Stream) -> int:
        """How many perturbed rows a stream has at most."""
        layer = stream.layer or next((reader.layer for reader in stream.readers if reader.layer), None)
        return self.images * stream.of.count(self.channels.get(layer or "", 0), self.size)

    def cost(self, shares: Mapping[str, float] = MappingProxyType({})) -> float:
        """How many passes of one image it takes, forward and backward ones alike.

        Perturbed rows that begin at a layer count for the part of a pass after it, which ``shares`` has for each layer;
        for all of it, where it is not known. Where what is run depends on the evidence, it is infinite.

        >>> from explain.methods import AblationCAM
        >>> plan = Plan({"ablationcam": asks_of(AblationCAM().needs, ["layer4"])}, channels={"layer4": 100})
        >>> plan.cost(), plan.cost({"layer4": 0.01})
        (101.0, 2.0)
        """
        if any(isinstance(ask.need, PerturbationRuns) for ask in self.asks):
            return float("inf")
        total = float(self.images * (self.passes + self.passes_back))
        for stream, inner in self._perturbed():
            if not inner.images:
                return float("inf")  # as many as there may be
            total += inner.cost(shares) * (shares.get(stream.layer or "", 1.0) if stream.of.of_layer else 1.0)
        return total

    def _perturbed(self) -> Iterator[tuple[Stream, Plan]]:
        """The streams that have to be run, each with the plan for its rows."""
        for stream in self.streams:
            if not stream.is_known(self.precision):
                rows = self.rows_of(stream)
                yield stream, Plan({"": stream.inner}, self.targets, rows, self.channels, self.precision, self.size)

    def __str__(self) -> str:
        lines = [self._forward(), *map(self._back, self.backwards)]
        blocks = [ask for ask in self.asks if isinstance(ask.need, BlockAttention)]
        if blocks:
            count = _counted(self._of_blocks * self.targets, "backward pass", "es")
            lines.append(f"{count} from the score of every transformer block to its attention{self._for(blocks)}")
        for stream, inner in self._perturbed():
            lines += [f"{self._run(stream, inner)}{self._for(stream.readers)}", *inner._nested()]
        return "\n".join([*lines, self._in_all()] if len(lines) > 2 else lines)

    def _forward(self) -> str:
        begin = ""
        if self.whole:
            begin = ", recorded"
        elif self.layers:
            begin = f", recorded from {'the first of ' * (len(self.layers) > 1)}{', '.join(self.layers)} on"
        of = f" of {_counted(self.images, 'image', 's')}"
        return f"{_counted(self.passes, 'forward pass', 'es')}{of}{begin}{self._for(self.asks)}"

    def _back(self, backward: Backward) -> str:
        asks = [ask for ask in self.answered_at_once if ask.need.backward == backward]
        count = _counted(self.targets * (2 if backward.second else 1), "backward pass", "es")
        start = "the score" if backward.objective is None else str(backward.objective)
        end = " and ".join(dict.fromkeys(ask.layer or "the input" for ask in asks))
        how = ", for its curvature" if backward.second else ""
        how += "" if backward.rule is None else f", with the rule {backward.rule.name!r}"
        how += "" if backward.composite is None else f", with the composite {backward.composite.name!r}"
        how += "" if backward.reference is None else f", against {backward.reference}"
        how += "" if backward.concept is None else f", through channels of {backward.concept.layer}"
        return f"{count} from {start} to {end}{how}{self._for(asks)}"

    def _run(self, stream: Stream, inner: Plan) -> str:
        """What is run of a stream."""
        count = self.rows_of(stream)
        rows = _counted(count, "perturbed row", "s") if count else "perturbed rows"
        start = f" from {stream.layer} on" if stream.of.of_layer else ""
        back = inner.passes_back
        return f"{rows} ({stream.of}) forward{start}{' and back' * bool(back)}{f' {back} times' * (back > 1)}"

    def _nested(self) -> list[str]:
        """The lines for what is perturbed of rows that are perturbed themselves."""
        lines = []
        for stream, inner in self._perturbed():
            lines += [f"  made of these: {self._run(stream, inner)}", *(f"  {line}" for line in inner._nested())]
        return lines

    def __repr__(self) -> str:
        return f"Plan({', '.join(self.wanted)}; {self._in_all()})"

    def _in_all(self) -> str:
        words = [_counted(self.passes, "forward pass", "es"), _counted(self.passes_back, "backward pass", "es")]
        if self.rows:
            words.append(f"{_counted(self.rows, 'perturbed row', 's')} forward")
        if self.rows_back:
            words.append(f"{self.rows_back} back")
        return f"in all: {', '.join(words)}"

    def names_of(self, *asks: NeedAtLayer) -> list[str]:
        """The methods that some asks are of."""
        these = set(asks)
        return [name for name, wanted in self.wanted.items() if name and wanted & these]

    def _for(self, asks: Iterable[NeedAtLayer]) -> str:
        names = self.names_of(*asks)
        return f": {', '.join(names)}" if names else ""


def _layers(asks: Iterable[NeedAtLayer]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ask.layer for ask in asks if ask.layer is not None))


def _order(backward: Backward) -> tuple[bool, ...]:
    handed_back = backward.composite is not None or backward.reference is not None
    return backward.second, handed_back, backward.rule is not None, backward.objective is not None


def _counted(count: int, thing: str, plural: str) -> str:
    return f"{count} {thing}{plural if count != 1 else ''}"


def plan_of(needs: Iterable[Need[Any]], layers: Iterable[str]) -> Plan:
    """The plan for some needs, each at every layer."""
    return Plan({"": asks_of(needs, layers)})
