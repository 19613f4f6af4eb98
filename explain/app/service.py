"""The service behind the app: models, photos and answers."""

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from PIL import Image

from explain._utils.errors import ExplainError, printable, shown
from explain.answers import Answered, AnswerExplainer
from explain.app.requests import (
    AskRequest,
    CheckRequest,
    EvidenceRequest,
    ExplainRequest,
    Limits,
    decode_upload,
    read_request,
)
from explain.app.tasks import (
    AskTask,
    CheckTask,
    EvidenceTask,
    ExplainTask,
    PageTask,
    SendStep,
    ServedAnswers,
    ServedModel,
    ShownAnswer,
    WorkerThread,
    photo_name,
)
from explain.data.images import load_image
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.report.item import Detail, jpeg
from explain.report.pages import page_with
from explain.targets import text

T = TypeVar("T")


class ExpiredError(ExplainError):
    """No item of the cache has this name, or no longer."""


class Cache(Generic[T]):
    """At most ``most`` items of at most ``size`` together, each under a random name. Items not used
    for ``age`` seconds expire at the next use of the cache, or by `remove_expired`."""

    def __init__(
        self,
        kind: str,
        most: int,
        size: float = math.inf,
        size_of: Callable[[T], float] = lambda item: 0,
        age: float = math.inf,
    ) -> None:
        """``kind`` is an item's word in messages, ``size_of`` gives its size in the unit of
        ``size``, the limit of all ``most`` items together; ``age`` is in seconds.
        """
        self._kind = kind
        self._most = most
        self._size = size
        self._size_of = size_of
        self._age = age
        self._items: dict[str, tuple[T, float]] = {}  # with the time of the last use, in that order
        self._lock = threading.RLock()

    def add(self, item: T) -> str:
        """Add an item under a random name, which is returned, and remove those unused for longest
        until the limits hold; the new item stays, however large it is.
        """
        name = secrets.token_urlsafe(16)
        with self._lock:
            self.remove_expired()
            self._items[name] = item, time.monotonic()
            while len(self._items) > 1 and (
                len(self._items) > self._most or self._total() > self._size
            ):
                del self._items[next(iter(self._items))]  # the first is unused for longest
        return name

    def __getitem__(self, name: str) -> T:
        """Return an item, which counts as its use: it becomes the last to expire."""
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
        """Remove an item of the cache and return it; None where there is none."""
        with self._lock:
            return self._items.pop(name, (None,))[0]

    def remove_expired(self) -> None:
        """Remove the items that were not used for ``age`` seconds."""
        with self._lock:
            expiry_time = time.monotonic() - self._age
            for name in [
                name for name, (_, last_use) in self._items.items() if last_use < expiry_time
            ]:
                del self._items[name]

    def _total(self) -> float:
        """The sizes of all items together, in the unit of ``size_of``."""
        return sum(self._size_of(item) for item, _ in self._items.values())


SIDE = 1280
"""The longer side of the picture that the page shows, in pixels."""
THUMBNAIL = 160
"""The longer side of an example's small picture."""
THREADS = 32
"""How many requests may read photos or wait for a model at the same time."""
CLEANUP = 60.0
"""Seconds between two removals of expired photos and answers."""


class Service:
    """Models, photos and answers; each request of the page is one call."""

    def __init__(
        self,
        explainers: Sequence[Explainer],
        limits: Limits | None = None,
        examples: Mapping[str, Path] | None = None,
        asker: AnswerExplainer | None = None,
    ) -> None:
        """Serve these models (chosen by position), ``examples`` (files of photos by name) and
        ``asker``, the model that is asked questions. `close` ends the threads."""
        self.limits = limits = limits or Limits()
        self.models = [ServedModel(explainer, limits) for explainer in explainers]
        self.examples = dict(examples or {})
        self._asked = None if asker is None else ServedAnswers(asker, limits)
        self._photos: Cache[Image.Image] = Cache(
            "photo",
            limits.photos,
            size=limits.kept_pixels,
            size_of=lambda photo: math.prod(photo.size),
            age=limits.age,
        )
        self._answers: Cache[ShownAnswer] = Cache(
            "answer",
            limits.explanations,
            size=limits.kept_values,
            size_of=attrgetter("size"),
            age=limits.age,
        )
        self._answered: Cache[Answered] = Cache("answer", limits.explanations, age=limits.age)
        # those that wait or run: each is removed when its reply ends; ten times as many as may
        # wait in one queue, so that with a few models the limit is never reached
        self._jobs: Cache[PageTask] = Cache("job", 10 * limits.waiting, age=limits.age)
        self.threads = ThreadPoolExecutor(THREADS, "explain-request")
        """What requests are worked on in."""
        self._closed = threading.Event()
        threading.Thread(target=self._clean_up, name="explain-cleanup", daemon=True).start()

    def _clean_up(self) -> None:
        """Remove expired photos, answers and jobs every `CLEANUP` seconds until the service is
        closed; runs in a thread of its own, so that memory is freed without any visitor."""
        while not self._closed.wait(CLEANUP):
            for cache in (self._photos, self._answers, self._answered, self._jobs):
                cache.remove_expired()

    def prepare(self) -> None:
        """Let each model's quick thread warm it up before the first request; returns at once."""
        for served in self.models:
            served.quick.submit(served.warm_up)

    def close(self) -> None:
        """Stop the threads of the app: no queued task begins, and expired items are no longer
        removed. The task that runs is not waited for."""
        self._closed.set()
        self.threads.shutdown(wait=False, cancel_futures=True)
        for served in self.models:
            served.quick.close()
            served.slow.close()
        if self._asked is not None:
            self._asked.worker.close()

    # --- photos ---

    def upload(self, content: bytes, name: str) -> dict[str, Any]:
        """Decode and keep a photo (a scan in the first model's window); the reply is `add_photo`'s,
        errors are `explain.app.requests.decode_upload`'s. ``name`` is the browser's.
        """
        window = self.models[0].explainer.window
        return self.add_photo(decode_upload(content, name, self.limits, window))

    def upload_example(self, name: str) -> dict[str, Any]:
        """Upload the example photo of this name, and return what `upload` does."""
        path = self._example(name)
        return self.upload(path.read_bytes(), path.name)

    def add_photo(self, photo: Image.Image) -> dict[str, Any]:
        """Keep a photo; the page's reply has the random name ``photo`` for requests, ``size``
        (width, height in pixels) and the file's ``name``.
        """
        return {
            "photo": self._photos.add(photo),
            "size": list(photo.size),
            "name": photo_name(photo),
        }

    def picture(self, photo: str) -> bytes:
        """An uploaded photo, by its random name, as a JPEG of at most `SIDE` pixels a side. Raises
        `ExpiredError` if the photo is unknown or has expired.
        """
        return jpeg(self._photos[photo], SIDE)

    def example_picture(self, name: str) -> bytes:
        """An example photo as a JPEG of at most `THUMBNAIL` pixels a side."""
        return jpeg(load_image(self._example(name)), THUMBNAIL)

    def _example(self, name: str) -> Path:
        """The file of an example photo."""
        if name not in self.examples:
            raise ExpiredError(f"example {shown(name)} is unknown; choose one on the page")
        return self.examples[name]

    # --- models ---

    def models_info(self) -> list[dict[str, Any]]:
        """For each model of the app, what the page's controls offer: its name, the labels of its
        classes, whether it can be asked for a text, and the names of the crops (`CROPS`)."""
        return [
            {
                "name": printable(served.explainer.name),
                "labels": [*map(printable, served.explainer.categories or ())],
                "texts": text.is_image_text(served.explainer.model),
                "crops": list(served.crops),
            }
            for served in self.models
        ]

    def model(self, values: Mapping[str, Any]) -> ServedModel:
        """The model that a request of the page names by its number under ``model``; the first by
        default.
        """
        number = values.get("model", 0)
        if not isinstance(number, int) or not 0 <= number < len(self.models):
            raise ExplainError(
                f"model must be a number from 0 to {len(self.models) - 1}, got {shown(number)}"
            )
        return self.models[number]

    def layers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The layers that can be chosen for a photo, as `ServedModel.layers` returns them.
        ``values`` are the request of the page: ``photo``, ``model`` and ``crop``.
        """
        photo = self._photos[str(values.get("photo"))]
        return self.model(values).layers(photo, str(values.get("crop") or ""))

    # --- requests ---

    def explain(self, values: Any, send: SendStep) -> str:
        """Queue a request and return the job's name; worker threads ``send`` each step. Maps of a
        named earlier answer are reused if they fit. `BusyError` if too many wait.
        """
        request = ExplainRequest.of(values, len(self.models), self.limits)
        served = self.models[request.model]
        photo = self._photos[request.photo]
        earlier = None
        with suppress(ExpiredError):  # also where the request names none
            earlier = self._answers[request.earlier]
        if earlier is not None and not earlier.fits(request):
            earlier = None
        job = ExplainTask(served, send, request, photo, keep=self._answers.add, earlier=earlier)
        return self._begin(job, served.quick)

    def check(self, values: Any, send: SendStep) -> str:
        """Queue the task that computes the curve or the checks of a map of an answer
        (`CheckRequest`), and return the name of the job; ``send`` is as for `explain`."""
        request = read_request(CheckRequest, values)
        answer = self._answers[request.answer]
        served = self.models[answer.request.model]
        return self._begin(CheckTask(served, send, request, answer), served.slow)

    @property
    def asker_name(self) -> str | None:
        """The name of the model that is asked questions; None without one."""
        return None if self._asked is None else printable(self._asked.asker.name)

    @property
    def asked(self) -> ServedAnswers:
        """The model that is asked questions."""
        if self._asked is None:
            raise ExplainError("the app has no model to ask; give explain serve --answers")
        return self._asked

    def ask(self, values: Any, send: SendStep) -> str:
        """Queue a question (`AskRequest`), and return the name of the job; ``send`` is as for
        `explain`."""
        request = read_request(AskRequest, values)
        photo = self._photos[request.photo]
        job = AskTask(self.asked, send, request, photo, keep=self._answered.add)
        return self._begin(job, self.asked.worker)

    def evidence(self, values: Any, send: SendStep) -> str:
        """Queue a search for the smallest evidence of a word (`EvidenceRequest`), and return the
        name of the job; ``send`` is as for `explain`."""
        request = read_request(EvidenceRequest, values)
        answered = self._answered[request.answered]
        job = EvidenceTask(self.asked, send, request, answered)
        return self._begin(job, self.asked.worker)

    def _begin(self, job: PageTask, worker: WorkerThread) -> str:
        """Queue a job in a worker thread, and return its name. Its first step (``work``, its name;
        ``before``, the tasks before it) is sent before, so that none comes first.
        """
        name = self._jobs.add(job)
        job.send({"work": name, "before": worker.waiting})
        worker.submit(partial(job.attempt, job.begin))
        return name

    def stop(self, name: str) -> None:
        """Let a job end its slow methods with the maps that they have; the visitor has pressed
        "stop"."""
        self._jobs[name].stopped = True

    def drop(self, name: str) -> None:
        """Let a job end at its next progress step, since nobody waits for the answer any more."""
        job = self._jobs.pop(name)
        if job is not None:
            job.dropped = True

    def answer(self, name: str) -> Explanation:
        """The explanation of a kept answer, by the answer's name, whose files the visitor saves."""
        return self._answers[name].explanation

    def stem(self, name: str) -> str:
        """What the names of the saved files of a kept answer begin with."""
        return self._answers[name].stem

    def report(self, name: str) -> str:
        """A kept answer's report as HTML, with the curves and checks computed so far. Holds the
        model, which may run to find a target's region.
        """
        answer = self._answers[name]
        with self.models[answer.request.model].scheduler.quick():
            values = answer.page_item(Detail())
        return page_with(answer.explanation, values)
