"""A question, answered step by step: the quick methods first, then the slow ones while they sharpen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image

from explain.app.asking import Ask
from explain.app.partial import about, not_begun, unfinished
from explain.app.turns import Turns
from explain.app.work import Tell, Watch, Work
from explain.errors import ExplainError, overheard
from explain.explainer import Explainer
from explain.explanation import Explanation
from explain.methods import Method, options


@dataclass(frozen=True)
class Answered:
    """An answer: what was asked, what was found, and the curves of its maps by target and method, as far as asked."""

    ask: Ask
    explanation: Explanation
    curves: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many values its maps have."""
        every = [each for result in self.explanation.results for each in result.values()]
        return sum(each.values.numel() + sum(one.numel() for one in each.maps.values()) for each in every)

    def holds_for(self, ask: Ask) -> bool:
        """Whether its maps answer another question too, as far as that asks for the same methods."""
        same = replace(ask, methods=self.ask.methods, targets=self.ask.targets) == self.ask
        return same and (ask.targets == self.ask.targets or list(ask.targets) == classes_of(self.explanation))


class Answering(Work):
    """One question on its way, and what it has found; ``before`` is an answer whose maps are taken where they fit."""

    def __init__(
        self, ask: Ask, explainer: Explainer, photo: Image.Image, tell: Tell, before: Answered | None = None
    ) -> None:
        super().__init__(tell)
        self.ask, self.photo = ask, photo
        self._explainer = explainer
        fits = before is not None and before.holds_for(ask)
        self._known = before.explanation if before is not None and fits else None
        self.curves = before.curves if before is not None and fits else {}
        self.notes: list[str] = []
        self.explanation: Explanation | None = None

    def is_known(self, method: Method) -> bool:
        """Whether a method's map is there already."""
        return self._known is not None and method.name in self._known

    def quickly(self, methods: list[Method], turns: Turns) -> Explanation:
        """Explain with methods that take a few passes; maps that are known already come along."""
        self.still_wanted()
        new = [method for method in methods if not self.is_known(method)]
        found = self._known
        if new or found is None:
            with turns.quick(), overheard(self.notes):
                self.still_wanted()  # it may have waited for long
                targets: Any = list(self.ask.targets) or None
                own = self._explainer(self.photo, new, targets, layer=self.ask.layer)
            found = own if found is None else joined(found, own)
        asked = [method.name for method in (*methods, *self.ask.methods)]
        self.explanation = only(found, asked)
        return self.explanation

    def slowly(self, method: Method, turns: Turns) -> Explanation:
        """Add what a method says that takes many passes, telling the map so far."""
        before = self.explanation
        assert before is not None
        self.still_wanted()
        takes_seconds = "seconds" in options(method)

        def step(done: int, total: int, maps: Mapping[str, torch.Tensor]) -> dict[str, Any]:
            told: dict[str, Any] = {"progress": [done, total], "method": method.name}
            values = maps.get(method.name)
            if values is not None and values.ndim in (3, 4):  # the engine tells those of the first target
                rest = [not_begun()] * (len(before.results) - 1)
                told |= {"about": about(method), "maps": [unfinished(method, values[0], done, total), *rest]}
            return told

        with turns.slow(), overheard(self.notes):
            self.still_wanted()
            found = self._explainer(
                self.photo, [method], classes_of(before), layer=self.ask.layer,
                seconds=self.ask.seconds if takes_seconds else None, keep_partial=True,
                progress=Watch(self, turns, step),
            )  # fmt: skip
        self.explanation = joined(before, found)
        return self.explanation


def joined(one: Explanation, other: Explanation) -> Explanation:
    """An explanation with the maps of another of the same photo and targets."""
    results = tuple({**old, **new} for old, new in zip(one.results, other.results, strict=True))
    return replace(one, results=results, question=_of_all(one, other.question.classes))


def only(explanation: Explanation, methods: list[str]) -> Explanation:
    """The same with the maps of these methods alone, as far as they are there, in this order."""
    results = tuple({name: result[name] for name in methods if name in result} for result in explanation.results)
    return replace(explanation, results=results)


def _of_all(explanation: Explanation, classes: Mapping[str, Any]) -> Any:
    return replace(explanation.question, classes={**explanation.question.classes, **classes})


def classes_of(explanation: Explanation) -> list[Any]:
    """The classes that were explained, so that other methods explain the same."""
    chosen = [next(iter(result.values())).target for result in explanation.results]
    if not all(isinstance(each, torch.Tensor) for each in chosen):
        raise ExplainError("model must give class scores for slow methods in the app; use explain.attribute")
    return [int(each[0]) for each in chosen]
