"""`Plan`: which passes gather what was asked for, decided before any of them is run; it prints itself.

* layers only: everything below the first of those that gradients are taken of runs without a graph, like inference;
* gradients of the input: the whole pass is recorded, and each rule is one more backward pass over it;
* each further target, and each further objective, is one more backward pass, never one more forward;
* altered rows: each plan of them is run once, for all methods and targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from explain.engine.altered import Alteration, Attributions, Reruns, Scores
from explain.engine.asks import Ask, Backward, BlockAttention, Need, asks_of


@dataclass(frozen=True)
class Stream:
    """Altered rows that are run once, at a layer or none, and the asks that they answer."""

    of: Alteration
    layer: str | None
    readers: tuple[Ask, ...]

    @property
    def inner(self) -> frozenset[Ask]:
        """What is asked of each altered row."""
        found: frozenset[Ask] = frozenset()
        for reader in self.readers:
            if isinstance(reader.need, Attributions):
                layers = () if reader.layer is None else (reader.layer,)
                found |= asks_of(reader.need.method.needs, layers, (reader.input,))
        return found


@dataclass(frozen=True)
class Plan:
    """The passes that answer some asks; ``wanted`` has the asks of each method by its name.

    ``targets`` says how many scores are explained, ``images`` how many images, and ``channels`` how many each layer
    has, where that is known.

    >>> from explain.engine.asks import Activations, LayerGradients
    >>> plan = Plan({"gradcam": asks_of({Activations(), LayerGradients()}, ["layer4"])}, targets=2)
    >>> print(plan)
    1 forward pass, recorded from layer4 on: gradcam
    2 backward passes of the score to layer4: gradcam
    >>> plan.passes, plan.passes_back, plan.rows
    (1, 2, 0)
    """

    wanted: Mapping[str, frozenset[Ask]]
    targets: int = 1
    images: int = 1
    channels: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def asks(self) -> tuple[Ask, ...]:
        """All asks, and those that they rest on before them."""
        ordered: dict[Ask, None] = {}
        waiting = frozenset().union(*self.wanted.values())
        for ask in sorted(waiting, key=lambda ask: (type(ask.need).__name__, ask.layer or "")):
            for before in ask.need.also:
                ordered[ask.before(before)] = None
            ordered[ask] = None
        return tuple(ordered)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The altered rows to run, each distinct plan of them once."""
        found: dict[tuple[Alteration, str | None], list[Ask]] = {}
        for ask in self.asks:
            if isinstance(ask.need, (Scores, Attributions)):
                of = ask.need.of
                depends = of.of_layer or any(need.of_layer for need in of.needs)
                found.setdefault((of, ask.layer if depends else None), []).append(ask)
        return tuple(Stream(of, layer, tuple(readers)) for (of, layer), readers in found.items())

    @cached_property
    def answered_at_once(self) -> tuple[Ask, ...]:
        """The asks that the forward pass and the backward passes over it answer."""
        return tuple(ask for ask in self.asks if not isinstance(ask.need, (Scores, Attributions, Reruns)))

    @property
    def reruns(self) -> bool:
        """Whether the model may be run again on altered rows."""
        return bool(self.streams) or any(isinstance(ask.need, Reruns) for ask in self.asks)

    @cached_property
    def backwards(self) -> tuple[Backward, ...]:
        """The distinct backward passes for one target, the plain one first."""
        found = {ask.need.backward: None for ask in self.answered_at_once if ask.need.backward is not None}
        return tuple(sorted(found, key=lambda b: (b.second, b.rule is not None, b.objective is not None)))

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
        """How many forward passes of all images there are, altered rows apart."""
        return 1 + sum(isinstance(ask.need, BlockAttention) for ask in self.asks) * self.targets

    @property
    def passes_back(self) -> int:
        """How many backward passes of all images there are, altered rows apart."""
        return self.targets * sum(2 if backward.second else 1 for backward in self.backwards)

    @property
    def rows(self) -> int:
        """How many altered rows are run at most, where the layers' channels are known."""
        return sum(self.rows_of(stream) for stream in self.streams)

    def rows_of(self, stream: Stream) -> int:
        layer = stream.layer or next((reader.layer for reader in stream.readers if reader.layer), None)
        return self.images * stream.of.count(self.channels.get(layer or "", 0))

    def __str__(self) -> str:
        begin = "recorded" if self.whole else f"recorded from {' or '.join(self.layers)} on" if self.layers else ""
        lines = [f"{_counted(self.passes, 'forward pass', 'es')}{', ' * bool(begin)}{begin}{self._for(self.asks)}"]
        for backward in self.backwards:
            asks = [ask for ask in self.answered_at_once if ask.need.backward == backward]
            count = self.targets * (2 if backward.second else 1)
            what = "the score" if backward.objective is None else str(backward.objective)
            under = "" if backward.rule is None else f" under the rule {backward.rule.name!r}"
            to = ", ".join(dict.fromkeys(ask.layer or "the input" for ask in asks))
            lines.append(f"{_counted(count, 'backward pass', 'es')} of {what} to {to}{under}{self._for(asks)}")
        for stream in self.streams:
            where = f" at {stream.layer}" if stream.of.of_layer else ""
            back = ", each with a backward pass" if any(ask.need.backward for ask in stream.inner) else ""
            count = self.rows_of(stream)
            rows = _counted(count, "altered row", "s") if count else "altered rows"
            lines.append(f"{rows}{where}{back}, {stream.of}{self._for(stream.readers)}")
        return "\n".join(lines)

    def _for(self, asks: Iterable[Ask]) -> str:
        """The methods that some asks are of."""
        these = set(asks)
        names = [name for name, wanted in self.wanted.items() if name and wanted & these]
        return f": {', '.join(names)}" if names else ""


def _layers(asks: Iterable[Ask]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ask.layer for ask in asks if ask.layer is not None))


def _counted(count: int, thing: str, plural: str) -> str:
    return f"{count} {thing}{plural if count != 1 else ''}"


def plan_of(needs: Iterable[Need[Any]], layers: Iterable[str]) -> Plan:
    """The plan for some needs, each at every layer."""
    return Plan({"": asks_of(needs, layers)})
