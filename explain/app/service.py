"""The service: models with what can be asked of them, photos, and the answers."""

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
from explain.app.answers import Answer, AnswerJob, CheckJob
from explain.app.cache import Cache, CleanupThread, ExpiredError
from explain.app.limits import Limits
from explain.app.questions import CheckRequest, ExplainRequest, whole
from explain.app.scheduler import AbandonedError, Job, Scheduler, SendStep, WorkerThread
from explain.app.uploads import received
from explain.attribution.selection import select
from explain.data.images import Box, load_image, locate
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.layers import default_layer, list_layers
from explain.methods import Method
from explain.methods.registry import control, family, get_method
from explain.models import FiveCrops
from explain.report.curves import run_of
from explain.report.item import Detail, item
from explain.report.reported import page_with

QUICK = 12.0
"""Passes up to which a method is quick: its map comes with the predictions."""
SIDE = 1280
"""The longer side of the picture that the page shows, in pixels."""
SMALL = 160
"""The longer side of an example's small picture."""
DETAIL = Detail(cells=None, live=False)
CLEANUP = 60.0
"""Seconds between two looks for what is too old."""


@dataclass
class ServedModel:
    """A model that answers all requests, one after the other."""

    explainer: Explainer
    limits: Limits
    scheduler: Scheduler = field(default_factory=Scheduler)

    def __post_init__(self) -> None:
        self.quick, self.slow = (WorkerThread(name, self.limits.waiting) for name in ("quick", "slow"))

    @cached_property
    def costs(self) -> dict[str, float]:
        """How many passes each method takes that this model can be explained with."""
        with muted(), self.scheduler.quick():
            x = self.explainer.as_input(Image.new("RGB", (256, 256), "gray"))
            return dict(select(self.explainer.model, x, "everything").costs)

    def prepare(self) -> None:
        """Find out which methods fit, and look the network over; what goes wrong is told to whoever asks."""
        with suppress(Exception), muted():  # nobody has given this photo, or asked what is wrong with its map
            method = self.preview_method()
            with self.scheduler.quick():
                self.explainer(Image.new("RGB", (64, 64), "gray"), [method])

    def is_quick(self, method: Method) -> bool:
        return self.costs.get(method.name, math.inf) <= QUICK

    def preview_method(self) -> Method:
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
        with muted(), self.scheduler.quick():
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

    >>> service = Service([Explainer("tiny")])
    >>> photo = service.take(Image.new("RGB", (30, 20), "red"))
    >>> photo["size"]
    [30, 20]
    >>> service.close()
    """

    def __init__(
        self,
        explainers: Sequence[Explainer],
        limits: Limits | None = None,
        examples: Mapping[str, Path] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.models = [ServedModel(explainer, self.limits) for explainer in explainers]
        self.examples = dict(examples or {})
        age = self.limits.age
        self._photos: Cache[Image.Image] = Cache(
            "photo", self.limits.photos, self.limits.kept_pixels, lambda each: each.width * each.height, age
        )
        self._answers: Cache[Answer] = Cache(
            "answer", self.limits.explanations, self.limits.kept_values, lambda each: each.size, age
        )
        self._jobs: Cache[Job] = Cache("question", 10 * self.limits.waiting, age=age)
        self._cleanup = CleanupThread(self.remove_expired, CLEANUP)

    def remove_expired(self) -> None:
        """Forget photos and answers that nobody has asked about for too long."""
        for kept in (self._photos, self._answers, self._jobs):
            kept.remove_expired()

    def prepare(self) -> None:
        """Look the models over before the first question comes; returns at once."""
        for served in self.models:
            served.quick.do(served.prepare)

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
            for each in self.models
        ]

    def methods(self, model: Any) -> list[dict[str, Any]]:
        """The methods to choose from for one of the models."""
        return self.models[whole("model", model, len(self.models))].methods()

    def layers(self, model: Any, photo: str) -> dict[str, Any]:
        """The layers to choose from for one of the models and photos."""
        return self.models[whole("model", model, len(self.models))].layers(self._photos[photo])

    # --- questions ---

    def explain(self, values: Any, send: SendStep) -> str:
        """Begin to answer a question, and return the name of the work; `explain.app.questions` says what may be asked.

        Raises:
            ExplainError: it cannot be asked, or too many wait (`explain.app.scheduler.BusyError`).
        """
        request = ExplainRequest.of(values, len(self.models), self.limits)
        served, photo = self.models[request.model], self._photos[request.photo]
        before = None if request.before is None else self._answers.get(request.before)
        if request.cover is not None:
            photo = request.cover.of(photo, _seen(served.explainer, photo))
        work = AnswerJob(request, served.explainer, photo, send, before)
        name = self._jobs.add(work)
        send({"work": name, "before": served.quick.waiting})
        served.quick.do(partial(self._run_step, work, partial(self._run_quick, work, served)))
        return name

    def check(self, values: Any, send: SendStep) -> str:
        """Begin to answer a question about a map of an answer, as `explain` does; see `CheckRequest`."""
        request = CheckRequest.of(values, self.limits)
        about = self._answers[request.answer]
        served, work = self.models[about.request.model], CheckJob(request, about, send)
        name = self._jobs.add(work)
        send({"work": name, "before": served.slow.waiting})

        def step() -> None:
            try:
                send({**work.run(served.scheduler), "end": True})
            except KeyboardInterrupt:
                send({"stopped": f"The {request.what} of {request.method}", "end": True})

        served.slow.do(partial(self._run_step, work, step))
        return name

    def stop(self, name: str) -> None:
        """End the slow methods of a question with what they have."""
        self._jobs[name].stop()

    def drop(self, name: str) -> None:
        """End a question that nobody waits for."""
        if name in self._jobs:
            self._jobs[name].drop()
            self._jobs.forget(name)

    def answer(self, name: str) -> Explanation:
        """An explanation that was given, to be saved."""
        return self._answers[name].explanation

    def report(self, name: str) -> str:
        """The report of an answer, with the curves and checks that were asked for."""
        answered = self._answers[name]
        with self.models[answered.request.model].scheduler.quick():
            values = item(answered.explanation, Detail())
        _add_curves(values, answered.explanation, answered.curves)
        return page_with(answered.explanation, values)

    def close(self) -> None:
        """Begin nothing more."""
        self._cleanup.close()
        for served in self.models:
            served.quick.close()
            served.slow.close()

    def _run_quick(self, work: AnswerJob, served: ServedModel) -> None:
        methods = list(work.request.methods)
        quick = [method for method in methods if served.is_quick(method)]
        slow = [method for method in methods if not served.is_quick(method) and not work.is_known(method)]
        begun = time.perf_counter()
        self._send_answer(
            work, work.run_quick(quick or [served.preview_method()], served.scheduler), begun, last=not slow
        )
        if slow:
            work.send({"waiting": served.slow.waiting, "methods": [method.name for method in slow]})
            served.slow.do(partial(self._run_step, work, partial(self._run_slow, work, served, slow)))

    def _run_slow(self, work: AnswerJob, served: ServedModel, methods: list[Method]) -> None:
        for number, method in enumerate(methods, 1):
            begun = time.perf_counter()
            last = number == len(methods)
            try:
                found = work.run_slow(method, served.scheduler)
            except KeyboardInterrupt:  # stopped before there was anything to show
                work.send({"stopped": method.name, "end": True})
                return
            self._send_answer(work, found, begun, last=last or work.stopped)
            if work.stopped:
                return

    def _send_answer(self, work: AnswerJob, explanation: Explanation, begun: float, *, last: bool) -> None:
        address = f"photo/{work.request.photo}" if work.request.cover is None else None
        values = item(explanation, DETAIL, address=address)
        if address is None:
            values["name"] = f"{_name(self._photos[work.request.photo])}, covered"
        _add_curves(values, explanation, work.curves)
        costs = self.models[work.request.model].costs
        for method, attribution in zip(values["methods"], explanation.attributions.values(), strict=True):
            cost = run_of(costs.get(method["name"], math.inf), attribution)
            method["passes"] = cost if math.isfinite(cost) else None
        best = [each.category for each in explanation.predicted]
        notes, work.notes[:] = list(dict.fromkeys(work.notes)), []
        work.send(
            {
                "item": {**values, "classes": best},
                "answer": self._answers.add(Answer(work.request, explanation, work.curves)),
                "seconds": round(time.perf_counter() - begun, 4),
                "notes": list(map(printable, notes)),
                "end": last,
            }
        )

    def _run_step(self, work: Job, step: Any) -> None:
        """Do a step of an answer; what goes wrong is told in one line."""
        try:
            step()
        except AbandonedError:
            work.send({"end": True})
        except ExplainError as error:
            work.send({"error": str(error), "end": True})
        except MemoryError:
            work.send({"error": "out of memory; give a smaller photo or fewer methods", "end": True})
        except BaseException as error:  # of the model's own, or a fault of ours: the app goes on
            work.send({"error": printable(f"the model {raised(error)}"), "end": True})


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
