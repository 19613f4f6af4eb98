"""The service behind the app: models, photos and answers."""

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from PIL import Image

from explain._utils.errors import ExplainError, TargetError, muted, printable, raised, shown
from explain.app.jobs import AbandonedError, Answer, CheckJob, ExplainJob, Job, Scheduler, SendStep, WorkerThread
from explain.app.requests import CheckRequest, ExplainRequest, Limits, decode_upload, whole
from explain.attribution.selection import select
from explain.data.boxes import locate
from explain.data.images import load_image
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.layers import default_layer, list_layers
from explain.methods.base import Method, get_method
from explain.report.item import Detail, item, jpeg, method_info, passes_run
from explain.report.pages import page_with
from explain.targets import Detections, Segmentation, Target, detector_outputs, text

T = TypeVar("T")


class ExpiredError(ExplainError):
    """No item of the cache has this name, or no longer."""


class Cache(Generic[T]):
    """At most ``most`` items of at most ``size`` together, each under a random name.

    Items that were not used for ``age`` seconds expire at the next use of the cache, or by `remove_expired`.

    >>> cache = Cache("photo", 2)
    >>> first, second = cache.add("a"), cache.add("b")
    >>> cache[first], cache[cache.add("c")], second in cache
    ('a', 'c', False)
    """

    def __init__(
        self,
        kind: str,
        most: int,
        size: float = math.inf,
        size_of: Callable[[T], float] = lambda item: 0,
        age: float = math.inf,
    ) -> None:
        self._kind = kind
        self._most = most
        self._size = size
        self._size_of = size_of
        self._age = age
        self._items: dict[str, tuple[T, float]] = {}  # with the time of the last use, in that order
        self._lock = threading.RLock()

    def add(self, item: T) -> str:
        """Add an item, remove the oldest where there are too many, and return its name."""
        name = secrets.token_urlsafe(16)
        with self._lock:
            self._items[name] = item, time.monotonic()
            while len(self._items) > 1 and (len(self._items) > self._most or self._total() > self._size):
                del self._items[next(iter(self._items))]
            self.remove_expired()
        return name

    def __getitem__(self, name: str) -> T:
        with self._lock:
            self.remove_expired()
            if name not in self._items:
                raise ExpiredError(f"{self._kind} is unknown or has expired; send it again")
            item, _ = self._items.pop(name)
            self._items[name] = item, time.monotonic()
            return item

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __len__(self) -> int:
        return len(self._items)

    def pop(self, name: str) -> T | None:
        """Remove an item and return it; None where there is none."""
        with self._lock:
            return self._items.pop(name, (None,))[0]

    def remove_expired(self) -> None:
        """Remove the items that were not used for too long."""
        with self._lock:
            oldest = time.monotonic() - self._age
            for name in [name for name, (_, used) in self._items.items() if used < oldest]:
                del self._items[name]

    def _total(self) -> float:
        return sum(self._size_of(item) for item, _ in self._items.values())


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
            model = self.explainer.model
            x = self.explainer.as_input(Image.new("RGB", (256, 256), "gray"))
            try:
                return dict(select(model, x, "everything").costs)
            except TargetError:  # nothing is found in grey: take the best box, however unlikely, or the whole map
                with torch.no_grad():
                    boxes = detector_outputs.find_layout(model(x), 1, tuple(x.shape[2:]))
                nothing: Target = Segmentation(0, torch.ones(x.shape[2:])) if boxes is None else Detections(threshold=0)
                return dict(select(model, x, "everything", target=nothing).costs)

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
        costs = self.costs.items()
        return [{**method_info(name, passes=_finite(cost)), "quick": self.is_quick(name)} for name, cost in costs]

    def layers(self, photo: Image.Image) -> dict[str, Any]:
        """The layers whose output is a feature map of one photo, with its size."""
        with muted(), self.scheduler.quick():
            x = self.explainer.as_input(photo)
            calls = list_layers(self.explainer.model, x)
            default = None
            with suppress(ExplainError):
                default = default_layer(self.explainer.model, x)
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
        self, explainers: Sequence[Explainer], limits: Limits | None = None, examples: Mapping[str, Path] | None = None
    ) -> None:
        self.limits = limits = limits or Limits()
        self.models = [ServedModel(explainer, limits) for explainer in explainers]
        self.examples = dict(examples or {})
        self._photos: Cache[Image.Image] = Cache(
            "photo", limits.photos, limits.kept_pixels, lambda photo: math.prod(photo.size), limits.age
        )
        self._answers: Cache[Answer] = Cache(
            "answer", limits.explanations, limits.kept_values, attrgetter("size"), limits.age
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
        """Add an uploaded photo; errors as of `explain.app.requests.decode_upload`."""
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
        return jpeg(self._photos[photo], SIDE)

    def example_picture(self, name: str) -> bytes:
        """An example as a small JPEG."""
        if name not in self.examples:
            raise ExpiredError(f"example {shown(name)} is unknown; choose one on the page")
        return jpeg(load_image(self.examples[name]), THUMBNAIL)

    # --- models ---

    def models_info(self) -> list[dict[str, Any]]:
        """The names of the models, their labels, and whether they can be asked for a text."""
        return [
            {
                "name": printable(served.explainer.name),
                "labels": [*map(printable, served.explainer.categories or ())],
                "texts": text.is_image_text(served.explainer.model),
            }
            for served in self.models
        ]

    def model(self, values: Mapping[str, Any]) -> ServedModel:
        """The model that a request names."""
        return self.models[whole("model", values.get("model", 0), len(self.models))]

    def layers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The layers of one of the models that can be chosen for a photo."""
        return self.model(values).layers(self._photos[str(values.get("photo"))])

    # --- requests ---

    def explain(self, values: Any, send: SendStep) -> str:
        """Begin to answer a request, and return the name of the job; see `explain.app.requests.ExplainRequest`.

        Raises:
            ExplainError: the request is not valid, or too many wait (`explain.app.jobs.BusyError`).
        """
        request = ExplainRequest.of(values, len(self.models), self.limits)
        served = self.models[request.model]
        photo = self._photos[request.photo]
        before = None
        with suppress(ExpiredError):
            before = self._answers[request.before or ""]
        if request.cover is not None:
            photo = request.cover.apply(photo, locate(served.explainer.preprocess, photo.size))
        job = ExplainJob(request, served.explainer, photo, send, before)
        name = self._jobs.add(job)
        send({"work": name, "before": served.quick.waiting})
        served.quick.submit(partial(_run_step, job, partial(self._run_quick, job, served)))
        return name

    def check(self, values: Any, send: SendStep) -> str:
        """Begin to compute the curve or checks of a map, as `explain` does; see `CheckRequest`."""
        request = CheckRequest.of(values, self.limits)
        answer = self._answers[request.answer]
        served = self.models[answer.request.model]
        job = CheckJob(request, answer, send)
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
        self._jobs[name].stopped = True

    def drop(self, name: str) -> None:
        """End a job whose answer nobody waits for."""
        job = self._jobs.pop(name)
        if job is not None:
            job.dropped = True

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
        request = job.request
        answer = Answer(request, explanation, job.curves)
        values = item(explanation, DETAIL, address=None if request.cover else f"photo/{request.photo}")
        if request.cover is not None:
            values["name"] = f"{_name(self._photos[request.photo])}, covered"
        _add_curves(values, answer)
        costs = self.models[request.model].costs
        for method, attribution in zip(values["methods"], explanation.attributions.values(), strict=True):
            method["passes"] = _finite(passes_run(costs.get(method["name"], math.inf), attribution))
        notes = list(dict.fromkeys(job.notes))
        job.notes.clear()
        if text.is_image_text(self.models[request.model].explainer.model):
            for each in values["targets"]:
                each["class"] = each["label"] if each["class"] is None else each["class"]
        classes = [each.label if each.box else each.category for each in explanation.predicted]
        job.send(
            {
                "item": {**values, "classes": classes},
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


def _finite(cost: float) -> float | None:
    return cost if math.isfinite(cost) else None


def _name(photo: Image.Image) -> str:
    return printable(getattr(photo, "filename", "") or "photo")
