"""Jobs: requests that are answered step by step, quick methods first, then slow ones; curves and checks of a map."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ExplainError, overheard
from explain.app.requests import CheckRequest, ExplainRequest
from explain.attribution.pictures import array
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.methods.base import Method, options, uses_layer
from explain.report.item import STEPS, as_drawn, curve, map_info, method_info, plane
from explain.targets.text import Text, is_image_text

PATIENCE = 2.0
"""Seconds that a slow task waits for quick ones, however many come."""


class BusyError(ExplainError):
    """Too many requests wait already."""


class Scheduler:
    """Lets one thread at a time use a model.

    >>> scheduler = Scheduler()
    >>> with scheduler.quick():
    ...     scheduler.busy
    True
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._quick_waiting = 0
        self.busy = False

    @contextmanager
    def quick(self) -> Iterator[None]:
        """A task that begins before the next part of a slow one, and does not pause."""
        with self._changed:
            self._quick_waiting += 1
            self._changed.wait_for(lambda: not self.busy)
            self._quick_waiting -= 1
            self.busy = True
        with closing(self):
            yield

    @contextmanager
    def slow(self) -> Iterator[None]:
        """A task that calls `pause` between its parts."""
        self._enter_slow()
        with closing(self):
            yield

    def pause(self) -> None:
        """Let quick tasks run first; called from within a slow one."""
        if self._quick_waiting:
            self.close()
            self._enter_slow()

    def _enter_slow(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.busy and not self._quick_waiting, PATIENCE)
            self._changed.wait_for(lambda: not self.busy)
            self.busy = True

    def close(self) -> None:
        """End a task."""
        with self._changed:
            self.busy = False
            self._changed.notify_all()


class WorkerThread:
    """One thread with a queue of at most ``most`` waiting tasks.

    >>> worker = WorkerThread("quick", 1)
    >>> worker.submit(lambda: None)
    >>> worker.close()
    """

    def __init__(self, name: str, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._tasks: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"explain-{name}")

    @property
    def waiting(self) -> int:
        """How many tasks wait or run."""
        return sum(not each.done() for each in self._tasks)

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task when all before it are done.

        Raises:
            BusyError: too many wait already.
        """
        with self._lock:
            self._tasks = [each for each in self._tasks if not each.done()]
            if len(self._tasks) > self._most:
                raise BusyError(f"{len(self._tasks)} requests wait already; try again in a moment")
            self._tasks.append(self._thread.submit(task))

    def close(self) -> None:
        """Begin no further task."""
        self._thread.shutdown(wait=False, cancel_futures=True)


INTERVAL = 0.2
"""Seconds between two intermediate maps of a slow method."""

SendStep = Callable[[Mapping[str, Any]], None]
"""Sends a step of an answer to the page, in plain values."""


MakeStep = Callable[[int, int, Mapping[str, torch.Tensor]], dict[str, Any]]
"""Makes a step of the passes done, their total, and the maps so far."""


class AbandonedError(Exception):
    """Nobody waits for the answer any more."""


class Job:
    """One request that is being answered.

    ``stopped`` ends slow methods with what they have, and ``dropped`` everything, since nobody waits for the answer.
    """

    def __init__(self, send: SendStep) -> None:
        self.send = send
        self.stopped = self.dropped = False

    def check_wanted(self) -> None:
        """Raise `AbandonedError` where the job was dropped."""
        if self.dropped:
            raise AbandonedError

    def progress(self, scheduler: Scheduler, step: MakeStep = lambda done, total, maps: {}) -> Any:
        """Return a progress callback: it sends progress at intervals, lets quick tasks run, and ends the work."""
        sent = float("-inf")

        def report(done: int, total: int, maps: Mapping[str, torch.Tensor] | None = None) -> None:
            nonlocal sent
            self.check_wanted()
            if self.stopped:
                raise KeyboardInterrupt
            now = time.monotonic()
            if now - sent >= INTERVAL or done >= total:
                sent = now
                self.send({"progress": [done, total], **step(done, total, maps or {})})
            scheduler.pause()

        return report


def unfinished(method: Method, values: torch.Tensor, done: int, total: int) -> dict[str, Any]:
    """Return the intermediate map ``(h, w)`` or ``(C, H, W)`` of a slow method, as the page takes it.

    >>> from explain.methods.base import get_method
    >>> found = unfinished(get_method("rise"), torch.rand(4, 5), 30, 1000)
    >>> found["plane"]["height"], found["remark"]
    (4, 'not finished: 30 of 1000 perturbed photos')
    """
    values, kind = as_drawn(values.detach().float(), method.style, uses_layer(method))
    if getattr(method, "centred", None) is False:  # the final offset is known only at the end; the mean is close to it
        values = values - values.mean()
    drawn = plane(array(values), signed=method.style == "signed")
    return map_info(kind, drawn, remark=f"not finished: {done} of {total} perturbed photos", samples=done)


@dataclass(frozen=True)
class Answer:
    """An answer: the request, the explanation, and those curves of its maps that are known, by target and method."""

    request: ExplainRequest
    explanation: Explanation
    curves: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many values its maps have."""
        every = [each for result in self.explanation.results for each in result.values()]
        return sum(each.values.numel() + sum(one.numel() for one in each.maps.values()) for each in every)

    def fits(self, request: ExplainRequest) -> bool:
        """Whether its maps can be reused for another request, where both have the same methods."""
        mine = self.request
        same = replace(request, methods=mine.methods, targets=mine.targets) == mine
        return same and (request.targets == mine.targets or list(request.targets) == classes_of(self.explanation))


class ExplainJob(Job):
    """Answers one request; maps of an earlier answer ``before`` are reused where they fit."""

    def __init__(
        self,
        request: ExplainRequest,
        explainer: Explainer,
        photo: Image.Image,
        send: SendStep,
        before: Answer | None = None,
    ) -> None:
        super().__init__(send)
        self.request = request
        self.photo = photo
        self._explainer = explainer
        reused = before if before is not None and before.fits(request) else None
        self._known = None if reused is None else reused.explanation
        self.curves = {} if reused is None else reused.curves
        self.notes: list[str] = list(getattr(photo, "notes", ()))
        self.explanation: Explanation | None = None

    def is_known(self, method: Method) -> bool:
        """Whether the map of a method is reused."""
        return self._known is not None and method.name in self._known

    def run_quick(self, methods: list[Method], scheduler: Scheduler) -> Explanation:
        """Explain with methods that take a few passes, and add the maps that are known already."""
        new = [method for method in methods if not self.is_known(method)]
        found = self._known
        if new or found is None:
            with scheduler.quick(), overheard(self.notes):
                self.check_wanted()
                targets = self._as_targets(self.request.targets) or None
                own = self._explainer(self.photo, new, targets=targets, layer=self.request.layer)
            found = own if found is None else merged(found, own)
        names = [method.name for method in (*methods, *self.request.methods)]
        results = tuple({name: result[name] for name in names if name in result} for result in found.results)
        self.explanation = replace(found, results=results)
        return self.explanation

    def run_slow(self, method: Method, scheduler: Scheduler) -> Explanation:
        """Add the map of a method that takes many passes, and send intermediate maps."""
        before = self.explanation
        assert before is not None

        def step(done: int, total: int, maps: Mapping[str, torch.Tensor]) -> dict[str, Any]:
            values = maps.get(method.name)
            if values is None or values.ndim not in (3, 4):
                return {"method": method.name}
            empty = map_info("heat", plane(np.zeros((1, 1), np.float32)), remark="not computed yet", samples=0)
            rest = [empty] * (len(before.results) - 1)  # the engine reports intermediate maps of the first target
            maps_now = [unfinished(method, values[0], done, total), *rest]
            return {"method": method.name, "about": method_info(method.name), "maps": maps_now}

        with scheduler.slow(), overheard(self.notes):
            self.check_wanted()
            found = self._explainer(
                self.photo,
                [method],
                targets=self._as_targets(classes_of(before)),
                layer=self.request.layer,
                max_seconds=self.request.seconds if "max_seconds" in options(method) else None,
                keep_partial=True,
                progress=self.progress(scheduler, step),
            )
        self.explanation = merged(before, found)
        return self.explanation

    def _as_targets(self, chosen: Sequence[Any]) -> list[Any]:
        """Classes and names of boxes as they are; a text to an image-text model is a target of its own."""
        texts = is_image_text(self._explainer.model)
        return [Text(each) if texts and isinstance(each, str) else each for each in chosen]


def merged(one: Explanation, other: Explanation) -> Explanation:
    """Return an explanation with the maps of another of the same photo and targets as well."""
    results = tuple({**old, **new} for old, new in zip(one.results, other.results, strict=True))
    return replace(one, results=results)


def classes_of(explanation: Explanation) -> list[Any]:
    """Return the classes, boxes by name, and texts of an explanation, so that slow methods explain the same."""
    request = explanation.request
    has_texts = request is not None and any(isinstance(target, Text) for target in request.targets)
    named = has_texts or any(explanation.boxes)
    chosen = [next(iter(result.values())).target for result in explanation.results]
    if any(isinstance(each, str) for each in chosen) and not named:
        raise ExplainError("model must give class scores or boxes for slow methods in the app; use explain.attribute")
    return [each if isinstance(each, str) else int(each[0]) for each in chosen]


class CheckJob(Job):
    """Computes the curve or the checks of a map, and adds them to the answer that has the map."""

    def __init__(self, request: CheckRequest, answer: Answer, send: SendStep) -> None:
        super().__init__(send)
        self.request = request
        self._answer = answer
        results = answer.explanation.results
        if request.target >= len(results) or request.method not in results[request.target]:
            raise ExplainError("map must be one of the answer's, got another; choose one that is shown")

    def run(self, scheduler: Scheduler) -> dict[str, Any]:
        """Run the model, and return the last step of the answer."""
        notes: list[str] = []
        with scheduler.slow(), overheard(notes):
            self.check_wanted()
            progress = self.progress(scheduler)
            method = self.request.method
            target = self.request.target
            if self.request.what == "check":
                verdict = self._answer.explanation.check(method, target, progress=progress)
                return {"verdict": verdict[method].to_dict()}
            found = self._answer.curves.get((target, method))
            found = found or curve(self._answer.explanation, target, method, STEPS, progress)
            if found is None:
                raise ExplainError("map must be of a class and one crop to have curves, got another; choose a class")
            self._answer.curves[target, method] = found
            return {"curve": found}
