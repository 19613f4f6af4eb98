"""The studio: models with what can be asked of them, photos, and the answers."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from PIL import Image

from explain._utils.errors import ExplainError, muted, printable, raised, shown
from explain.app.answers import Answered, AnswerJob, CheckJob
from explain.app.cache import Cache, CleanupThread, ExpiredError
from explain.app.limits import Limits
from explain.app.questions import CheckRequest, ExplainRequest, whole
from explain.app.scheduler import AbandonedError, Job, Scheduler, Tell, WorkerThread
from explain.app.uploads import received
from explain.attribution.selection import select
from explain.data.images import Box, load_image, locate
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.layers import default_layer, list_layers
from explain.methods import Method, control, family, get_method
from explain.models import FiveCrops
from explain.report import Detail, item, page_with
from explain.report.curves import run_of

QUICK = 12.0
"""Passes up to which a method is quick: its map comes with the predictions."""
SIDE = 1280
"""The longer side of the picture that the page shows, in pixels."""
SMALL = 160
"""The longer side of an example's small picture."""
DETAIL = Detail(cells=None, live=False)
TIDY = 60.0
"""Seconds between two looks for what is too old."""


@dataclass
class ServedModel:
    """A model with what can be asked of it: it sits for all who ask, one after the other."""

    explainer: Explainer
    limits: Limits
    turns: Scheduler = field(default_factory=Scheduler)

    def __post_init__(self) -> None:
        self.quick, self.slow = (WorkerThread(name, self.limits.waiting) for name in ("quick", "slow"))

    @cached_property
    def costs(self) -> dict[str, float]:
        """How many passes each method takes that this model can be explained with."""
        with muted(), self.turns.quick():
            x = self.explainer.as_input(Image.new("RGB", (256, 256), "gray"))
            return dict(select(self.explainer.model, x, "everything").costs)

    def prepare(self) -> None:
        """Find out which methods fit, and look the network over; what goes wrong is told to whoever asks."""
        with suppress(Exception), muted():  # nobody has given this photo, or asked what is wrong with its map
            method = self.company()
            with self.turns.quick():
                self.explainer(Image.new("RGB", (64, 64), "gray"), [method])

    def is_quick(self, method: Method) -> bool:
        return self.costs.get(method.name, math.inf) <= QUICK

    def company(self) -> Method:
        """The quick method whose map comes first where all that was asked for is slow."""
        quick = [name for name, cost in self.costs.items() if cost <= QUICK]
        if not quick:
            raise ExplainError("model must be explained by a quick method first, but none fits; use explain.attribute")
        return get_method("gradcam" if "gradcam" in quick else quick[0])

    def methods(self) -> list[dict[str, Any]]:
        """What the page says of each method to choose from."""
        found = []
        for name, cost in self.costs.items():
            method = get_method(name)
            found.append(
                {
                    "name": name,
                    "family": family(name),
                    "about": method.about,
                    "paper": method.paper,
                    "passes": cost if math.isfinite(cost) else None,
                    "quick": cost <= QUICK,
                    "control": control(name),
                }
            )
        return found

    def layers(self, photo: Image.Image) -> dict[str, Any]:
        """The layers with a map, for one photo, with the sizes of their maps."""
        with muted(), self.turns.quick():
            x = self.explainer.as_input(photo)
            calls = list_layers(self.explainer.model, x)
            try:
                chosen = default_layer(self.explainer.model, x)
            except ExplainError:
                chosen = None
        maps = [[call.label, call.kind, str(call.grid)] for call in calls if call.grid is not None]
        return {"default": chosen, "layers": maps}


class Service:
    """Models, photos and answers; what the web asks of it is one call each.

    >>> studio = Service([Explainer("tiny")])
    >>> photo = studio.take(Image.new("RGB", (30, 20), "red"))
    >>> photo["size"]
    [30, 20]
    >>> studio.close()
    """

    def __init__(
        self,
        explainers: Sequence[Explainer],
        limits: Limits | None = None,
        examples: Mapping[str, Path] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.sitters = [ServedModel(explainer, self.limits) for explainer in explainers]
        self.examples = dict(examples or {})
        age = self.limits.age
        self._photos: Cache[Image.Image] = Cache(
            "photo", self.limits.photos, self.limits.kept_pixels, lambda each: each.width * each.height, age
        )
        self._answers: Cache[Answered] = Cache(
            "answer", self.limits.explanations, self.limits.kept_values, lambda each: each.size, age
        )
        self._asked: Cache[Job] = Cache("question", 10 * self.limits.waiting, age=age)
        self._tidying = CleanupThread(self.tidy, TIDY)

    def tidy(self) -> None:
        """Forget photos and answers that nobody has asked about for too long."""
        for kept in (self._photos, self._answers, self._asked):
            kept.tidy()

    def prepare(self) -> None:
        """Look the models over before the first question comes; returns at once."""
        for sitter in self.sitters:
            sitter.quick.do(sitter.prepare)

    # --- photos ---

    def receive(self, content: bytes, name: str) -> dict[str, Any]:
        """Take a photo that was sent; errors as `explain.app.uploads.received`."""
        return self.take(received(content, name, self.limits))

    def example(self, name: str) -> dict[str, Any]:
        """Take one of the examples."""
        if name not in self.examples:
            raise ExplainError(f"example must be one of {', '.join(self.examples) or 'none'}; choose one of them")
        path = self.examples[name]
        return self.receive(path.read_bytes(), path.name)

    def take(self, photo: Image.Image) -> dict[str, Any]:
        """Keep a photo, and say what it is called from now on."""
        return {"photo": self._photos.add(photo), "size": list(photo.size), "name": _name(photo)}

    def picture(self, photo: str) -> bytes:
        """A photo as a JPEG of the size that the page shows."""
        return _jpeg(self._photos[photo], SIDE)

    def example_picture(self, name: str) -> bytes:
        """An example as a small JPEG."""
        if name not in self.examples:
            raise ExpiredError(f"example {shown(name)} is unknown; choose one on the page")
        return _jpeg(load_image(self.examples[name]), SMALL)

    # --- models ---

    def about(self) -> list[dict[str, Any]]:
        """What the page says of the models, with the labels to search in."""
        return [
            {"name": printable(each.explainer.name), "labels": list(map(printable, each.explainer.categories or ()))}
            for each in self.sitters
        ]

    def methods(self, model: Any) -> list[dict[str, Any]]:
        """The methods to choose from for one of the models."""
        return self.sitters[whole("model", model, len(self.sitters))].methods()

    def layers(self, model: Any, photo: str) -> dict[str, Any]:
        """The layers to choose from for one of the models and photos."""
        return self.sitters[whole("model", model, len(self.sitters))].layers(self._photos[photo])

    # --- questions ---

    def ask(self, values: Any, tell: Tell) -> str:
        """Begin to answer a question, and return the name of the work; `explain.app.questions` says what may be asked.

        Raises:
            ExplainError: it cannot be asked, or too many wait (`explain.app.scheduler.BusyError`).
        """
        ask = ExplainRequest.of(values, len(self.sitters), self.limits)
        sitter, photo = self.sitters[ask.model], self._photos[ask.photo]
        before = None if ask.before is None else self._answers.get(ask.before)
        if ask.cover is not None:
            photo = ask.cover.of(photo, _seen(sitter.explainer, photo))
        work = AnswerJob(ask, sitter.explainer, photo, tell, before)
        name = self._asked.add(work)
        tell({"work": name, "before": sitter.quick.waiting})
        sitter.quick.do(partial(self._told, work, partial(self._quickly, work, sitter)))
        return name

    def doubt(self, values: Any, tell: Tell) -> str:
        """Begin to answer a question about a map of an answer, as `ask` does; see `CheckRequest`."""
        doubt = CheckRequest.of(values, self.limits)
        about = self._answers[doubt.answer]
        sitter, work = self.sitters[about.ask.model], CheckJob(doubt, about, tell)
        name = self._asked.add(work)
        tell({"work": name, "before": sitter.slow.waiting})

        def step() -> None:
            try:
                tell({**work.told(sitter.turns), "end": True})
            except KeyboardInterrupt:
                tell({"stopped": f"The {doubt.what} of {doubt.method}", "end": True})

        sitter.slow.do(partial(self._told, work, step))
        return name

    def stop(self, name: str) -> None:
        """End the slow methods of a question with what they have."""
        self._asked[name].stop()

    def drop(self, name: str) -> None:
        """End a question that nobody waits for."""
        if name in self._asked:
            self._asked[name].drop()
            self._asked.forget(name)

    def answer(self, name: str) -> Explanation:
        """An explanation that was given, to be saved."""
        return self._answers[name].explanation

    def report(self, name: str) -> str:
        """The report of an answer, with the curves and checks that were asked for."""
        answered = self._answers[name]
        with self.sitters[answered.ask.model].turns.quick():
            values = item(answered.explanation, Detail())
        _add_curves(values, answered.explanation, answered.curves)
        return page_with(answered.explanation, values)

    def close(self) -> None:
        """Begin nothing more."""
        self._tidying.close()
        for sitter in self.sitters:
            sitter.quick.close()
            sitter.slow.close()

    def _quickly(self, work: AnswerJob, sitter: ServedModel) -> None:
        methods = list(work.ask.methods)
        quick = [method for method in methods if sitter.is_quick(method)]
        slow = [method for method in methods if not sitter.is_quick(method) and not work.is_known(method)]
        begun = time.perf_counter()
        self._tell_answer(work, work.quickly(quick or [sitter.company()], sitter.turns), begun, last=not slow)
        if slow:
            work.tell({"waiting": sitter.slow.waiting, "methods": [method.name for method in slow]})
            sitter.slow.do(partial(self._told, work, partial(self._slowly, work, sitter, slow)))

    def _slowly(self, work: AnswerJob, sitter: ServedModel, methods: list[Method]) -> None:
        for number, method in enumerate(methods, 1):
            begun = time.perf_counter()
            last = number == len(methods)
            try:
                found = work.slowly(method, sitter.turns)
            except KeyboardInterrupt:  # stopped before there was anything to show
                work.tell({"stopped": method.name, "end": True})
                return
            self._tell_answer(work, found, begun, last=last or work.stopped)
            if work.stopped:
                return

    def _tell_answer(self, work: AnswerJob, explanation: Explanation, begun: float, *, last: bool) -> None:
        address = f"photo/{work.ask.photo}" if work.ask.cover is None else None
        values = item(explanation, DETAIL, address=address)
        if address is None:
            values["name"] = f"{_name(self._photos[work.ask.photo])}, covered"
        _add_curves(values, explanation, work.curves)
        costs = self.sitters[work.ask.model].costs
        for method, attribution in zip(values["methods"], explanation.attributions.values(), strict=True):
            cost = run_of(costs.get(method["name"], math.inf), attribution)
            method["passes"] = cost if math.isfinite(cost) else None
        best = [each.category for each in explanation.predicted]
        notes, work.notes[:] = list(dict.fromkeys(work.notes)), []
        work.tell(
            {
                "item": {**values, "classes": best},
                "answer": self._answers.add(Answered(work.ask, explanation, work.curves)),
                "seconds": round(time.perf_counter() - begun, 4),
                "notes": list(map(printable, notes)),
                "end": last,
            }
        )

    def _told(self, work: Job, step: Any) -> None:
        """Do a step of an answer; what goes wrong is told in one line."""
        try:
            step()
        except AbandonedError:
            work.tell({"end": True})
        except ExplainError as error:
            work.tell({"error": str(error), "end": True})
        except MemoryError:
            work.tell({"error": "memory must hold the model and the photo, but it ran out", "end": True})
        except BaseException as error:  # of the model's own, or a fault of ours: the app goes on
            work.tell({"error": printable(f"the model {raised(error)}"), "end": True})


def _add_curves(
    values: dict[str, Any], explanation: Explanation, curves: Mapping[tuple[int, str], Mapping[str, Any]]
) -> None:
    """Put the curves that are known into the values of a page."""
    for (target, method), curve in curves.items():
        if method in explanation:
            values["maps"][target][explanation.methods.index(method)]["curve"] = dict(curve)


def _name(photo: Image.Image) -> str:
    return printable(getattr(photo, "filename", "") or "photo")


def _jpeg(photo: Image.Image, side: int) -> bytes:
    smaller = photo.copy()
    smaller.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    smaller.save(buffer, "JPEG", quality=86)
    return buffer.getvalue()


def _seen(explainer: Explainer, photo: Image.Image) -> Box:
    """The part of a photo that the maps lie on."""
    if isinstance(explainer.preprocess, FiveCrops):
        return Box(0.0, 0.0, float(photo.width), float(photo.height))
    return locate(explainer.preprocess, photo.size)
