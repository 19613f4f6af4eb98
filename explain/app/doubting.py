"""A question about a map that was given: does the evidence matter, and does the map stand up to a check?"""

from __future__ import annotations

from typing import Any

from explain.app.answering import Answered
from explain.app.asking import Doubt
from explain.app.turns import Turns
from explain.app.work import Tell, Watch, Work
from explain.errors import ExplainError, overheard
from explain.report import STEPS, curve


class Doubting(Work):
    """One such question on its way; what it finds becomes part of the answer that it is about."""

    def __init__(self, doubt: Doubt, about: Answered, tell: Tell) -> None:
        super().__init__(tell)
        self.doubt, self._about = doubt, about
        results = about.explanation.results
        if doubt.target >= len(results) or doubt.method not in results[doubt.target]:
            raise ExplainError("map must be one of the answer's, got another; ask about one that is shown")

    def told(self, turns: Turns) -> dict[str, Any]:
        """Ask the model, and return the last step of the answer."""
        self.still_wanted()
        notes: list[str] = []
        with turns.slow(), overheard(notes):
            self.still_wanted()
            watch = Watch(self, turns)
            return self._curve(watch) if self.doubt.what == "curve" else self._check(watch)

    def _curve(self, watch: Watch) -> dict[str, Any]:
        key = (self.doubt.target, self.doubt.method)
        found = self._about.curves.get(key) or curve(self._about.explanation, *key, STEPS, watch)
        if found is None:
            raise ExplainError("map must be of a class, and of one crop, to have curves, got another; choose a class")
        self._about.curves[key] = found
        return {"curve": found}

    def _check(self, watch: Watch) -> dict[str, Any]:
        method, target = self.doubt.method, self.doubt.target
        verdict = self._about.explanation.check(method, target, progress=watch)
        return {"verdict": verdict[method].to_dict()}
