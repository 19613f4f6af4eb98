"""The service behind the app: models, photos and answers."""

from __future__ import annotations

import io
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from PIL import Image

from explain._utils.errors import ExplainError, muted, printable, raised, shown
from explain.app.cache import Cache, ExpiredError
from explain.app.jobs import AbandonedError, Answer, CheckJob, ExplainJob, Job, SendStep
from explain.app.requests import CheckRequest, ExplainRequest, whole
from explain.app.scheduler import Scheduler, WorkerThread
from explain.app.uploads import Limits, decode_upload
from explain.attribution.selection import select
from explain.data.images import Box, load_image, locate
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.layers import default_layer, list_layers
from explain.methods import Method
from explain.methods.registry import get_method
from explain.models import FiveCrops
from explain.report.curves import passes_run
from explain.report.item import Detail, item, method_info
from explain.report.reported import page_with

QUICK = 12.0
"""Passes up to which a method is quick: its map comes with the predictions."""
SIDE = 1280
"""The longer side of the picture that the page shows, in pixels."""
THUMBNAIL = 160
"""The longer side of an example's small picture."""
DETAIL = Detail(cells=None, live=False)
CLEANUP = 60.0
"""Seconds between two removals of expired photos and answers."""


class ServedModel:
    """A model that answers all requests, one after the other."""

    def __init__(self, explainer: Explainer, limits: Limits) -> None:
        self.explainer = explainer
        self.scheduler = Scheduler()
        self.quick, self.slow = (WorkerThread(name, limits.waiting) for name in ("quick", "slow"))

    @cached_property
    def costs(self) -> dict[str, float]:
        """How many passes each method takes that fits the model."""
        with muted(), self.scheduler.quick():
            x = self.explainer.as_input(Image.new("RGB", (256, 256), "gray"))
            return dict(select(self.explainer.model, x, "everything").costs)

    def warm_up(self) -> None:
        """Find out which methods fit, and explain an empty photo; errors come up again with the first request."""
        with suppress(Exception), muted():
            method = self.preview_method()
            with self.scheduler.quick():
                self.explainer(Image.new("RGB", (64, 64), "gray"), [method])

    def is_quick(self, name: str) -> bool:
        return self.costs.get(name, math.inf) <= QUICK

    def preview_method(self) -> Method:
        """The quick method whose map comes first where all methods of a request are slow."""
        quick = list(filter(self.is_quick, self.costs))
        if not quick:
            raise ExplainError("model must be explained by a quick method first, but none fits; use explain.attribute")
        return get_method("gradcam" if "gradcam" in quick else quick[0])

    def methods(self) -> list[dict[str, Any]]:
        """The methods that fit the model, with their costs."""
        return [
            {
                **method_info(name, passes=cost if math.isfinite(cost) else None),
                "quick": self.is_quick(name),
            }
            for name, cost in self.costs.items()
        ]

    def layers(self, photo: Image.Image) -> dict[str, Any]:
        """The layers whose output is a feature map of one photo, with its size."""
        with muted(), self.scheduler.quick():
            x = self.explainer.as_input(photo)
            calls = list_layers(self.explainer.model, x)
            try:
                default = default_layer(self.explainer.model, x)
            except ExplainError:
                default = None
        layers = [[call.label, call.kind, str(call.grid)] for call in calls if call.grid is not None]
        return {"default": default, "layers": layers}


class Service:
    """Models, photos and answers; each request of the page is one call.

    >>> service = Service([Explainer("tiny")])
    >>> photo = service.add_photo(Image.new("RGB", (30, 20), "red"))
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
        self.limits = limits = limits or Limits()
        self.models = [ServedModel(explainer, limits) for explainer in explainers]
        self.examples = dict(examples or {})
        self._photos: Cache[Image.Image] = Cache(
            "photo", limits.photos, limits.kept_pixels, lambda photo: photo.width * photo.height, limits.age
        )
        self._answers: Cache[Answer] = Cache(
            "answer", limits.explanations, limits.kept_values, lambda answer: answer.size, limits.age
        )
        self._jobs: Cache[Job] = Cache("job", 10 * limits.waiting, age=limits.age)
        self._closed = threading.Event()
        threading.Thread(target=self._clean_up, name="explain-cleanup", daemon=True).start()

    def _clean_up(self) -> None:
        while not self._closed.wait(CLEANUP):
            for cache in (self._photos, self._answers, self._jobs):
                cache.remove_expired()

    def prepare(self) -> None:
        """Warm up the models before the first request; returns at once."""
        for served in self.models:
            served.quick.submit(served.warm_up)

    def close(self) -> None:
        """Begin nothing more."""
        self._closed.set()
        for served in self.models:
            served.quick.close()
            served.slow.close()

    # --- photos ---

    def upload(self, content: bytes, name: str) -> dict[str, Any]:
        """Add an uploaded photo; errors as of `explain.app.uploads.decode_upload`."""
        return self.add_photo(decode_upload(content, name, self.limits))

    def example(self, name: str) -> dict[str, Any]:
        """Add one of the examples."""
        if name not in self.examples:
            raise ExplainError(f"example must be one of {', '.join(self.examples) or 'none'}; choose one of them")
        path = self.examples[name]
        return self.upload(path.read_bytes(), path.name)

    def add_photo(self, photo: Image.Image) -> dict[str, Any]:
        """Add a photo, and return the name under which it can be used."""
        return {"photo": self._photos.add(photo), "size": list(photo.size), "name": _name(photo)}

    def picture(self, photo: str) -> bytes:
        """A photo as a JPEG of the size that the page shows."""
        return _jpeg(self._photos[photo], SIDE)

    def example_picture(self, name: str) -> bytes:
        """An example as a small JPEG."""
        if name not in self.examples:
            raise ExpiredError(f"example {shown(name)} is unknown; choose one on the page")
        return _jpeg(load_image(self.examples[name]), THUMBNAIL)

    # --- models ---

    def models_info(self) -> list[dict[str, Any]]:
        """The names of the models, and their labels."""
        return [
            {"name": printable(each.explainer.name), "labels": list(map(printable, each.explainer.categories or ()))}
            for each in self.models
        ]

    def methods(self, model: Any) -> list[dict[str, Any]]:
        """The methods that fit one of the models."""
        return self.models[whole("model", model, len(self.models))].methods()

    def layers(self, model: Any, photo: str) -> dict[str, Any]:
        """The layers of one of the models that can be chosen for a photo."""
        return self.models[whole("model", model, len(self.models))].layers(self._photos[photo])

    # --- requests ---

    def explain(self, values: Any, send: SendStep) -> str:
        """Begin to answer a request, and return the name of the job; see `explain.app.requests.ExplainRequest`.

        Raises:
            ExplainError: the request is not valid, or too many wait (`explain.app.scheduler.BusyError`).
        """
        request = ExplainRequest.of(values, len(self.models), self.limits)
        served, photo = self.models[request.model], self._photos[request.photo]
        before = None
        if request.before is not None:
            with suppress(ExpiredError):
                before = self._answers[request.before]
        if request.cover is not None:
            photo = request.cover.apply(photo, _box_of(served.explainer, photo))
        job = ExplainJob(request, served.explainer, photo, send, before)
        name = self._jobs.add(job)
        send({"work": name, "before": served.quick.waiting})
        served.quick.submit(partial(_run_step, job, partial(self._run_quick, job, served)))
        return name

    def check(self, values: Any, send: SendStep) -> str:
        """Begin to compute the curve or checks of a map, as `explain` does; see `CheckRequest`."""
        request = CheckRequest.of(values, self.limits)
        answer = self._answers[request.answer]
        served, job = self.models[answer.request.model], CheckJob(request, answer, send)
        name = self._jobs.add(job)
        send({"work": name, "before": served.slow.waiting})

        def step() -> None:
            try:
                send({**job.run(served.scheduler), "end": True})
            except KeyboardInterrupt:
                send({"stopped": f"The {request.what} of {request.method}", "end": True})

        served.slow.submit(partial(_run_step, job, step))
        return name

    def stop(self, name: str) -> None:
        """End the slow methods of a job with what they have."""
        self._jobs[name].stop()

    def drop(self, name: str) -> None:
        """End a job whose answer nobody waits for."""
        job = self._jobs.pop(name)
        if job is not None:
            job.drop()

    def answer(self, name: str) -> Explanation:
        """The explanation of an answer, to be saved."""
        return self._answers[name].explanation

    def report(self, name: str) -> str:
        """The report of an answer, with its curves and checks."""
        answer = self._answers[name]
        with self.models[answer.request.model].scheduler.quick():
            values = item(answer.explanation, Detail())
        _add_curves(values, answer)
        return page_with(answer.explanation, values)

    def _run_quick(self, job: ExplainJob, served: ServedModel) -> None:
        methods = job.request.methods
        quick = [method for method in methods if served.is_quick(method.name)]
        slow = [method for method in methods if not served.is_quick(method.name) and not job.is_known(method)]
        start = time.perf_counter()
        found = job.run_quick(quick or [served.preview_method()], served.scheduler)
        self._send_answer(job, found, start, last=not slow)
        if slow:
            job.send({"waiting": served.slow.waiting, "methods": [method.name for method in slow]})
            served.slow.submit(partial(_run_step, job, partial(self._run_slow, job, served, slow)))

    def _run_slow(self, job: ExplainJob, served: ServedModel, methods: list[Method]) -> None:
        for method in methods:
            start = time.perf_counter()
            try:
                found = job.run_slow(method, served.scheduler)
            except KeyboardInterrupt:  # stopped before there was anything to show
                job.send({"stopped": method.name, "end": True})
                return
            self._send_answer(job, found, start, last=method is methods[-1] or job.stopped)
            if job.stopped:
                return

    def _send_answer(self, job: ExplainJob, explanation: Explanation, start: float, *, last: bool) -> None:
        request, answer = job.request, Answer(job.request, explanation, job.curves)
        values = item(explanation, DETAIL, address=None if request.cover else f"photo/{request.photo}")
        if request.cover is not None:
            values["name"] = f"{_name(self._photos[request.photo])}, covered"
        _add_curves(values, answer)
        costs = self.models[request.model].costs
        for method, attribution in zip(values["methods"], explanation.attributions.values(), strict=True):
            cost = passes_run(costs.get(method["name"], math.inf), attribution)
            method["passes"] = cost if math.isfinite(cost) else None
        notes, job.notes[:] = list(dict.fromkeys(job.notes)), []
        job.send(
            {
                "item": {**values, "classes": [each.category for each in explanation.predicted]},
                "answer": self._answers.add(answer),
                "seconds": round(time.perf_counter() - start, 4),
                "notes": list(map(printable, notes)),
                "end": last,
            }
        )


def _run_step(job: Job, step: Callable[[], None]) -> None:
    """Run a step of a job; an error is sent in one line, and the app continues."""
    try:
        step()
    except AbandonedError:
        job.send({"end": True})
    except ExplainError as error:
        job.send({"error": str(error), "end": True})
    except MemoryError:
        job.send({"error": "out of memory; give a smaller photo or fewer methods", "end": True})
    except BaseException as error:  # of the model's own code, or a mistake of this package
        job.send({"error": printable(f"the model {raised(error)}"), "end": True})


def _add_curves(values: dict[str, Any], answer: Answer) -> None:
    """Put the known curves of an answer into the values of its page."""
    for (target, method), curve in answer.curves.items():
        if method in answer.explanation:
            values["maps"][target][answer.explanation.methods.index(method)]["curve"] = dict(curve)


def _name(photo: Image.Image) -> str:
    return printable(getattr(photo, "filename", "") or "photo")


def _jpeg(photo: Image.Image, side: int) -> bytes:
    smaller = photo.copy()
    smaller.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    smaller.save(buffer, "JPEG", quality=86)
    return buffer.getvalue()


def _box_of(explainer: Explainer, photo: Image.Image) -> Box:
    """The part of a photo that the maps lie on."""
    if isinstance(explainer.preprocess, FiveCrops):
        return Box(0.0, 0.0, float(photo.width), float(photo.height))
    return locate(explainer.preprocess, photo.size)
