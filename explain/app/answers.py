"""Answers step by step: the quick methods first, then progressive results of the slow ones, then checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ExplainError, overheard
from explain.app.questions import CheckRequest, ExplainRequest
from explain.app.scheduler import Job, JobProgress, Scheduler, SendStep
from explain.attribution.pictures import array
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.methods import Method
from explain.methods.base import options, uses_layer
from explain.methods.registry import control, family
from explain.report.curves import STEPS, curve
from explain.report.maps import as_drawn, plane


def about(method: Method) -> dict[str, Any]:
    """What the page says of a method before it is done."""
    return {
        "name": method.name,
        "family": family(method.name),
        "about": method.about,
        "paper": method.paper,
        "layer": "",
        "passes": None,
        "control": control(method.name),
    }


def unfinished(method: Method, values: torch.Tensor, done: int, total: int) -> dict[str, Any]:
    """The map so far ``(h, w)`` or ``(C, H, W)`` as the page takes it.

    >>> from explain.methods.registry import get_method
    >>> found = unfinished(get_method("rise"), torch.rand(4, 5), 30, 1000)
    >>> found["plane"]["height"], found["remark"]
    (4, 'not finished: 30 of 1000 altered photos')
    """
    values, kind = as_drawn(values.detach().float(), method.style, uses_layer(method))
    if getattr(method, "centred", None) is False:  # what it is taken from on is known at the end; this is near it
        values = values - values.mean()
    remark = f"not finished: {done} of {total} altered photos"
    return _map(kind, array(values), remark, done, signed=method.style == "signed")


def not_begun() -> dict[str, Any]:
    """An empty map in the place of one of which nothing is known until it is done."""
    return _map("heat", np.zeros((1, 1), np.float32), "not there yet; that of the first answer sharpens meanwhile", 0)


def _map(kind: str, values: np.ndarray[Any, Any], remark: str, done: int, *, signed: bool = False) -> dict[str, Any]:
    return {
        "kind": kind,
        "plane": plane(values, signed=signed),
        "layers": [],
        "remark": remark,
        "score": None,
        "delta": None,
        "runs": done,
        "curve": None,
        "figures": {},
        "verdict": None,
    }


@dataclass(frozen=True)
class Answer:
    """An answer: what was asked, what was found, and the curves of its maps by target and method, as far as asked."""

    request: ExplainRequest
    explanation: Explanation
    curves: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many values its maps have."""
        every = [each for result in self.explanation.results for each in result.values()]
        return sum(each.values.numel() + sum(one.numel() for one in each.maps.values()) for each in every)

    def holds_for(self, request: ExplainRequest) -> bool:
        """Whether its maps answer another question too, as far as that asks for the same methods."""
        same = replace(request, methods=self.request.methods, targets=self.request.targets) == self.request
        return same and (
            request.targets == self.request.targets or list(request.targets) == classes_of(self.explanation)
        )


class AnswerJob(Job):
    """One question on its way, and what it has found; ``before`` is an answer whose maps are taken where they fit."""

    def __init__(
        self,
        request: ExplainRequest,
        explainer: Explainer,
        photo: Image.Image,
        send: SendStep,
        before: Answer | None = None,
    ) -> None:
        super().__init__(send)
        self.request, self.photo = request, photo
        self._explainer = explainer
        fits = before is not None and before.holds_for(request)
        self._known = before.explanation if before is not None and fits else None
        self.curves = before.curves if before is not None and fits else {}
        self.notes: list[str] = []
        self.explanation: Explanation | None = None

    def is_known(self, method: Method) -> bool:
        """Whether a method's map is there already."""
        return self._known is not None and method.name in self._known

    def run_quick(self, methods: list[Method], scheduler: Scheduler) -> Explanation:
        """Explain with methods that take a few passes; maps that are known already come along."""
        self.still_wanted()
        new = [method for method in methods if not self.is_known(method)]
        found = self._known
        if new or found is None:
            with scheduler.quick(), overheard(self.notes):
                self.still_wanted()  # it may have waited for long
                own = self._explainer(
                    self.photo, new, targets=list(self.request.targets) or None, layer=self.request.layer
                )
            found = own if found is None else joined(found, own)
        asked = [method.name for method in (*methods, *self.request.methods)]
        self.explanation = only(found, asked)
        return self.explanation

    def run_slow(self, method: Method, scheduler: Scheduler) -> Explanation:
        """Add what a method says that takes many passes, telling the map so far."""
        before = self.explanation
        assert before is not None
        self.still_wanted()
        takes_seconds = "max_seconds" in options(method)

        def step(done: int, total: int, maps: Mapping[str, torch.Tensor]) -> dict[str, Any]:
            told: dict[str, Any] = {"progress": [done, total], "method": method.name}
            values = maps.get(method.name)
            if values is not None and values.ndim in (3, 4):  # the engine tells those of the first target
                rest = [not_begun()] * (len(before.results) - 1)
                told |= {"about": about(method), "maps": [unfinished(method, values[0], done, total), *rest]}
            return told

        with scheduler.slow(), overheard(self.notes):
            self.still_wanted()
            found = self._explainer(
                self.photo, [method], targets=classes_of(before), layer=self.request.layer,
                max_seconds=self.request.seconds if takes_seconds else None, keep_partial=True,
                progress=JobProgress(self, scheduler, step),
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


class CheckJob(Job):
    """One such question on its way; what it finds becomes part of the answer that it is about."""

    def __init__(self, request: CheckRequest, about: Answer, send: SendStep) -> None:
        super().__init__(send)
        self.request, self._about = request, about
        results = about.explanation.results
        if request.target >= len(results) or request.method not in results[request.target]:
            raise ExplainError("map must be one of the answer's, got another; ask about one that is shown")

    def run(self, scheduler: Scheduler) -> dict[str, Any]:
        """Ask the model, and return the last step of the answer."""
        self.still_wanted()
        notes: list[str] = []
        with scheduler.slow(), overheard(notes):
            self.still_wanted()
            watch = JobProgress(self, scheduler)
            return self._curve(watch) if self.request.what == "curve" else self._check(watch)

    def _curve(self, watch: JobProgress) -> dict[str, Any]:
        key = (self.request.target, self.request.method)
        found = self._about.curves.get(key) or curve(self._about.explanation, *key, STEPS, watch)
        if found is None:
            raise ExplainError("map must be of a class, and of one crop, to have curves, got another; choose a class")
        self._about.curves[key] = found
        return {"curve": found}

    def _check(self, watch: JobProgress) -> dict[str, Any]:
        method, target = self.request.method, self.request.target
        verdict = self._about.explanation.check(method, target, progress=watch)
        return {"verdict": verdict[method].to_dict()}
