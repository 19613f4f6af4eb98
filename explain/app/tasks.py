"""Tasks: requests that are answered step by step, quick methods first, then slow ones; curves and
checks of a map."""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import (
    ExplainError,
    ModelError,
    TargetError,
    collect_warnings,
    muted,
    printable,
    raised,
)
from explain._utils.rounding import finite_or_none
from explain.answers import Answered, AnswerExplainer
from explain.answers.page import part_of_answer, picture_of
from explain.app.requests import (
    CROPS,
    AskRequest,
    BusyError,
    CheckRequest,
    EvidenceRequest,
    ExplainRequest,
    Limits,
)
from explain.attribution.pictures import array
from explain.attribution.selection import select
from explain.data.boxes import locate
from explain.data.files import slug
from explain.data.scans import stem_of
from explain.explanation.explainer import Explainer
from explain.explanation.explanation import Explanation
from explain.layers import default_layer, list_layers
from explain.methods.base import Method, get_method, options, uses_layer
from explain.report.item import (
    STEPS,
    Detail,
    as_drawn,
    curves,
    item,
    map_info,
    method_info,
    passes_run,
    plane,
)
from explain.targets import Detections, Segmentation, Target, detector_outputs
from explain.targets.text import Text, is_image_text

BUDGET = 200
"""Altered photos for the smallest evidence of a word."""
PATIENCE = 2.0
"""Seconds that a slow task waits for quick ones, however many come."""


class Scheduler:
    """Lets one thread at a time use a model, and quick tasks between the parts of slow ones."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._quick_waiting = 0
        self.busy = False

    @contextmanager
    def quick(self) -> Iterator[None]:
        """Hold the model for a short task, which waits for the running part of a slow one only
        (`pause` lets it in), and must not call `pause` itself.
        """
        with self._changed:
            self._quick_waiting += 1
            self._changed.wait_for(lambda: not self.busy)
            self._quick_waiting -= 1
            self.busy = True
        with closing(self):
            yield

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Hold the model for a long task of the app, which must call `pause` between its parts so
        that quick tasks can use the model meanwhile."""
        self._enter_slow()
        with closing(self):
            yield

    def pause(self) -> None:
        """Release the model where quick tasks wait for it, and take it again after them."""
        if self._quick_waiting:
            self.close()
            self._enter_slow()

    def _enter_slow(self) -> None:
        """Take the model for a slow task: after all quick tasks, but after `PATIENCE` seconds as
        soon as it is free, so that quick tasks that keep coming cannot starve a slow one."""
        with self._changed:
            self._changed.wait_for(lambda: not self.busy and not self._quick_waiting, PATIENCE)
            self._changed.wait_for(lambda: not self.busy)
            self.busy = True

    def close(self) -> None:
        """Release the model, and wake the tasks that wait for it."""
        with self._changed:
            self.busy = False
            self._changed.notify_all()


class WorkerThread:
    """One thread with a queue of at most ``max_waiting`` waiting tasks."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._tasks: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"explain-{name}")

    @property
    def waiting(self) -> int:
        """How many tasks wait or run; tasks that are done are removed from the list."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return len(self._tasks)

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task and return at once; it must report its own errors, as what it raises is
        lost. `BusyError` if more than ``max_waiting`` wait or run.
        """
        with self._lock:
            waiting = self.waiting
            if waiting > self._max_waiting:
                raise BusyError(f"{waiting} requests wait already; try again in a moment")
            self._tasks.append(self._thread.submit(task))

    def close(self) -> None:
        """Cancel the tasks that wait, without waiting for the one that runs."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class ServedAnswers:
    """An image-text model that answers all questions, one after the other."""

    def __init__(self, asker: AnswerExplainer, limits: Limits) -> None:
        """Start the thread in which it answers."""
        self.asker = asker
        self.scheduler = Scheduler()
        self.worker = WorkerThread("ask", limits.waiting)


QUICK = 12.0
"""Passes up to which a method is quick: its map comes with the predictions."""


class ServedModel:
    """A model that answers all requests, one after the other."""

    def __init__(self, explainer: Explainer, limits: Limits) -> None:
        """Start the two threads in which tasks of this model run, for quick and for slow methods;
        the scheduler lets only one of them use the model at a time."""
        self.explainer = explainer
        self.scheduler = Scheduler()
        self.quick = WorkerThread("quick", limits.waiting)
        self.slow = WorkerThread("slow", limits.waiting)

    @cached_property
    def crops(self) -> dict[str, Explainer]:
        """The explainers by crop in `CROPS` ("" is the preprocessing's own), all of one model,
        without those that cannot be or give the same preprocessing again.
        """
        explainers = {"": self.explainer}
        for name, crop in CROPS.items():
            with suppress(ModelError):
                other = self.explainer.with_crop(crop)
                if all(one.preprocess != other.preprocess for one in explainers.values()):
                    explainers[name] = other
        return explainers

    def explainer_for(self, crop: str) -> Explainer:
        """Return the explainer that shows the model this part of a photo, by the crop's name in a
        request of the page.
        """
        if not crop:
            return self.explainer
        if crop not in self.crops:
            raise ExplainError(
                f"crop must be one of {', '.join(map(repr, self.crops))}, got {crop!r}; use the "
                "page"
            )
        return self.crops[crop]

    @cached_property
    def costs(self) -> dict[str, float]:
        """By method that fits, in the page's order, about how many passes one photo takes. Found
        once, on a grey photo; they decide which methods are quick.
        """
        with muted(), self.scheduler.quick():
            model = self.explainer.model
            x = self.explainer.as_input(Image.new("RGB", (256, 256), "gray"))
            try:
                return dict(select(model, x, "everything").costs)
            # a detector or segmenter finds nothing in grey: take the best box, however unlikely,
            # or the whole map
            except TargetError:
                size = tuple(x.shape[2:])
                with torch.no_grad():
                    boxes = detector_outputs.find_layout(model(x), count=1, size=size)
                any_target: Target = Detections(threshold=0)
                if boxes is None:  # a segmenter
                    any_target = Segmentation(0, torch.ones(size))
                return dict(select(model, x, "everything", target=any_target).costs)

    def warm_up(self) -> None:
        """Compute `costs`, and explain a grey photo, so that the first visitor need not wait.
        Errors are ignored: the first request raises them again.
        """
        with suppress(Exception), muted():
            method = self.preview_method()
            with self.scheduler.quick():
                self.explainer(Image.new("RGB", (64, 64), "gray"), [method])

    def is_quick(self, name: str) -> bool:
        """Whether a method takes at most `QUICK` passes, so that its map is sent together with the
        predictions; methods whose cost is unknown are slow."""
        return self.costs.get(name, math.inf) <= QUICK

    def preview_method(self) -> Method:
        """The quick method whose map the page shows first where all methods of a request are slow:
        Grad-CAM if it fits the model.
        """
        quick = list(filter(self.is_quick, self.costs))
        if not quick:
            raise ExplainError(
                "model must be explained by a quick method first, but none fits; use "
                "explain.attribute"
            )
        return get_method("gradcam" if "gradcam" in quick else quick[0])

    def methods(self) -> list[dict[str, Any]]:
        """The methods that fit, for ``POST /api/methods``, whose keys the page's scripts read:
        `method_info` with the number of passes and whether it is quick.
        """
        return [
            {**method_info(name, passes=finite_or_none(cost)), "quick": self.is_quick(name)}
            for name, cost in self.costs.items()
        ]

    def layers(self, photo: Image.Image, crop: str = "") -> dict[str, Any]:
        """The layers with feature maps, for ``POST /api/layers``: ``default`` (a label or None),
        and ``layers``, each with label, module kind and grid size as text.
        """
        with muted(), self.scheduler.quick():
            x = self.explainer_for(crop).as_input(photo)
            calls = list_layers(self.explainer.model, x)
            default = None
            with suppress(ExplainError):
                default = default_layer(self.explainer.model, x)
        layers = [
            [call.label, call.kind, str(call.grid)] for call in calls if call.grid is not None
        ]
        return {"default": default, "layers": layers}


INTERVAL = 0.2
"""Seconds between two intermediate maps of a slow method."""

SendStep = Callable[[Mapping[str, Any]], None]
"""Sends a step of an answer to the page, in plain values."""


class AbandonedError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(eq=False)
class PageTask:
    """One request that is being answered. ``stopped`` ends slow methods with what they have, and
    ``dropped`` everything, since nobody waits for the answer.
    """

    served: Any
    send: SendStep
    """Passes a step to the page, from any thread."""
    notes: list[str] = field(default_factory=list, init=False)
    """Warnings for the next step."""

    stopped = False
    dropped = False
    running = ""
    """What is computed, for the page's message when it is stopped: the name of a method, or a few
    words; empty before anything has begun."""
    _sent = -math.inf
    """When progress was sent last."""

    def begin(self) -> None:
        """Compute the answer, and send it as the only step; runs in a worker thread."""
        with self.served.scheduler.slow(), collect_warnings(self.notes):
            self.check_wanted()
            values = self.answer()
        self.send({**values, "notes": self.taken_notes(), "end": True})

    def answer(self) -> dict[str, Any]:
        """Compute the keys of the only step."""
        raise NotImplementedError

    def taken_notes(self) -> list[str]:
        """The warnings since the last step, each once."""
        notes = [printable(note) for note in dict.fromkeys(self.notes)]
        self.notes.clear()
        return notes

    def attempt(self, step: Callable[[], None]) -> None:
        """Run a part of the task in a worker thread and raise nothing: an error is sent as the step
        that ends the answer (``end``), after which no part may follow.
        """
        last_step: dict[str, Any] = {}
        try:
            step()
            return
        except AbandonedError:
            pass
        except KeyboardInterrupt:  # stopped before there was anything to show
            last_step = {"stopped": self.running}
        except ExplainError as error:
            last_step = {"error": str(error)}
        except MemoryError:
            last_step = {"error": "out of memory; give a smaller photo or fewer methods"}
        except BaseException as error:  # of the model's own code, or a mistake of this package
            last_step = {"error": printable(f"the model {raised(error)}")}
        self.send({**last_step, "end": True})

    def check_wanted(self) -> None:
        """Raise `AbandonedError` if nobody waits for the answer any more, which `attempt`
        catches."""
        if self.dropped:
            raise AbandonedError

    def progress(
        self, done: int, total: int, maps: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Send a slow method's progress (perturbed photos run, total, maps), every `INTERVAL`
        seconds at most, and let quick tasks in. `AbandonedError` or KeyboardInterrupt end it.
        """
        self.check_wanted()
        if self.stopped:
            raise KeyboardInterrupt  # at which a method gives the maps that it has
        now = time.monotonic()
        if now - self._sent >= INTERVAL or done >= total:
            self._sent = now
            self.send({"progress": [done, total], **self.partial_maps(done, total, maps or {})})
        self.served.scheduler.pause()

    def partial_maps(
        self, done: int, total: int, maps: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """What is sent with the progress besides numbers, as keys of the step; subclasses that have
        maps override it."""
        return {}


def unfinished(method: Method, values: torch.Tensor, done: int, total: int) -> dict[str, Any]:
    """Return the map ``(h, w)`` or ``(C, H, W)`` of a method that still runs, in the form of
    `map_info`; ``done`` of ``total`` perturbed images were used."""
    values, kind = as_drawn(values.detach().float(), method.style, uses_layer(method))
    # the final offset is known only at the end; the mean is close to it
    if getattr(method, "centred", None) is False:
        values = values - values.mean()
    map_plane = plane(array(values), signed=method.style == "signed")
    return map_info(
        kind, map_plane, remark=f"not finished: {done} of {total} perturbed photos", samples=done
    )


@dataclass(frozen=True)
class ShownAnswer:
    """An answer: the request, the explanation, and those curves of its maps that are known, by
    target and method."""

    request: ExplainRequest
    explanation: Explanation
    curves: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    name: str = "photo"
    """That of the photo."""

    @property
    def stem(self) -> str:
        """What the names of saved files begin with."""
        stem = slug(stem_of(self.name))
        return stem if self.request.cover is None else f"{stem}-covered"

    @property
    def size(self) -> int:
        """How many numbers its maps hold, by which the app limits the answers that it keeps in
        memory (``Limits.kept_values``)."""
        attributions = [
            attribution for result in self.explanation.results for attribution in result.values()
        ]
        return sum(
            attribution.values.numel() + sum(one.numel() for one in attribution.maps.values())
            for attribution in attributions
        )

    def fits(self, request: ExplainRequest) -> bool:
        """Whether another request can reuse these maps: fields that count in ``==`` are equal (not
        methods and targets), and targets are the same or those explained here.
        """
        targets = request.targets
        return request == self.request and (
            targets == self.request.targets or list(targets) == classes_of(self.explanation)
        )

    def page_item(self, detail: Detail, address: str | None = None) -> dict[str, Any]:
        """The page's values of the answer (`explain.report.item.item`) with the curves so far and
        the photo's name, and the photo itself without an ``address`` for it.
        """
        values = item(self.explanation, detail, address=address)
        values["name"] = self.name if self.request.cover is None else f"{self.name}, covered"
        for (target, method), known_curve in self.curves.items():
            if method in self.explanation:
                number = self.explanation.methods.index(method)
                values["maps"][target][number]["curve"] = dict(known_curve)
        return values


DETAIL = Detail(cells=None, live=False)


def photo_name(photo: Image.Image) -> str:
    """The name of a photo on the page: that of its file, if it has one."""
    return printable(getattr(photo, "filename", "") or "photo")


@dataclass(eq=False)
class ExplainTask(PageTask):
    """Answers one request for a photo; the maps of an ``earlier`` answer are reused.
    ``keep`` stores each answer, and returns its name.
    """

    request: ExplainRequest
    photo: Image.Image
    keep: Callable[[ShownAnswer], str]
    earlier: ShownAnswer | None

    def __post_init__(self) -> None:
        """Prepare the photo, covered if asked for, with maps and curves of an earlier answer that
        fits (`ShownAnswer.fits`). Refused without such a crop."""
        request = self.request
        self.explainer = self.served.explainer_for(request.crop)
        self.photo_name = photo_name(self.photo)
        self.notes += getattr(self.photo, "notes", ())
        # one dictionary for both answers: a curve that is computed later serves both
        self.curves = {} if self.earlier is None else self.earlier.curves
        self.explanation = None if self.earlier is None else self.earlier.explanation
        if request.cover is not None:
            seen = locate(self.explainer.preprocess, self.photo.size)
            self.photo = request.cover.apply(self.photo, seen)

    def begin(self) -> None:
        """In the quick thread, explain with the quick methods that the earlier answer lacks, send
        the answer (quick first), and queue the slow ones (`_refine`).
        """
        served = self.served
        chosen = self.request.chosen
        finished: Collection[str] = () if self.explanation is None else self.explanation.methods
        start = time.perf_counter()
        quick = [method for name, method in chosen.items() if served.is_quick(name)]
        if not quick:  # the page shows a map at once, though nobody asked for this one
            quick = [served.preview_method()]
        slow = [
            method
            for name, method in chosen.items()
            if not (served.is_quick(name) or name in finished)
        ]
        new = [method for method in quick if method.name not in finished]
        if new:
            with served.scheduler.quick():
                self._explain(new, self.request.targets)
        explanation = self.explanation
        assert explanation is not None
        # without those of an earlier answer that are not asked for now
        names = dict.fromkeys([*(method.name for method in quick), *chosen])
        results = tuple(
            {name: result[name] for name in names if name in result}
            for result in explanation.results
        )
        self.explanation = replace(explanation, results=results)
        self._send_answer(start, last=not slow)
        if slow:
            self.send({"waiting": served.slow.waiting, "methods": [method.name for method in slow]})
            served.slow.submit(partial(self.attempt, partial(self._refine, slow)))

    def _refine(self, methods: Sequence[Method]) -> None:
        """In the slow thread, add the slow methods' maps one by one, and send the answer after
        each; one that the visitor stops keeps its map, and those after it are not run.
        """
        assert self.explanation is not None
        targets = classes_of(self.explanation)
        for method in methods:
            self.running = method.name
            start = time.perf_counter()
            seconds = self.request.seconds if "max_seconds" in options(method) else None
            with self.served.scheduler.slow():
                self._explain(
                    [method],
                    targets,
                    max_seconds=seconds,
                    keep_partial=True,
                    progress=self.progress,
                )
            last = method is methods[-1] or self.stopped
            self._send_answer(start, last=last)
            if last:
                return

    def _explain(
        self, methods: list[Method], targets: Sequence[Any], **explainer_options: Any
    ) -> None:
        """Add the maps of some methods to ``self.explanation``, and warnings to ``self.notes``.
        Texts become `Text` targets for image-text models: a string would be a label.
        """
        explainer = self.explainer
        if is_image_text(explainer.model):
            targets = [Text(target) if isinstance(target, str) else target for target in targets]
        with collect_warnings(self.notes):
            self.check_wanted()
            new_explanation = explainer(
                self.photo,
                methods,
                targets=list(targets) or None,
                layer=self.request.layer,
                **explainer_options,
            )
        if self.explanation is not None:
            new_explanation = merged(self.explanation, new_explanation)
        self.explanation = new_explanation

    def partial_maps(
        self, done: int, total: int, maps: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """A progress step's keys: the running method and its map ``(N, h, w)`` or ``(N, C, h, w)``
        of the first target, empty for the others; the name alone before there is one.
        """
        values = maps.get(self.running)
        # the page draws maps of pixels alone, with channels or without
        if values is None or values.ndim not in (3, 4):
            return {"method": self.running}
        assert self.explanation is not None
        empty = map_info(
            "heat", plane(np.zeros((1, 1), np.float32)), remark="not computed yet", samples=0
        )
        rest = [empty] * (len(self.explanation.results) - 1)
        method = self.request.chosen[self.running]
        maps_now = [unfinished(method, values[0], done, total), *rest]
        return {"method": self.running, "about": method_info(self.running), "maps": maps_now}

    def _send_answer(self, start: float, *, last: bool) -> None:
        """Keep the answer and send it with maps and notes; ``start`` is when the newest maps began,
        ``last`` ends it. Without the photo's address if it is covered.
        """
        explanation = self.explanation
        assert explanation is not None
        answer = ShownAnswer(self.request, explanation, self.curves, self.photo_name)
        covered = self.request.cover is not None
        values = answer.page_item(
            DETAIL, address=None if covered else f"photo/{self.request.photo}"
        )
        for method, attribution in zip(
            values["methods"], explanation.attributions.values(), strict=True
        ):
            cost = self.served.costs.get(method["name"], math.inf)
            method["passes"] = finite_or_none(passes_run(cost, attribution))
        if is_image_text(self.served.explainer.model):
            for target in values["targets"]:
                if target["class"] is None:  # a text, by which the page asks for it again
                    target["class"] = target["label"]
        # by which the page asks for each listed prediction, when its row is clicked
        values["classes"] = [
            one.label if one.box else one.category for one in explanation.predicted
        ]
        self.send(
            {
                "item": values,
                "answer": self.keep(answer),
                "seconds": round(time.perf_counter() - start, 4),
                "notes": self.taken_notes(),
                "end": last,
            }
        )


def merged(first: Explanation, second: Explanation) -> Explanation:
    """The first explanation with the second's maps added, which count where both have a method;
    both of the same photo and targets, in order.
    """
    results = tuple({**old, **new} for old, new in zip(first.results, second.results, strict=True))
    return replace(first, results=results)


def classes_of(explanation: Explanation) -> list[Any]:
    """The targets explained as they can be asked for again (class indices, names of boxes, texts),
    so that slow methods explain the same; refused for mere descriptions.
    """
    session = explanation.session
    has_texts = session is not None and any(isinstance(target, Text) for target in session.targets)
    has_named_targets = has_texts or any(explanation.boxes)
    explained_targets = [next(iter(result.values())).target for result in explanation.results]
    if any(isinstance(target, str) for target in explained_targets) and not has_named_targets:
        raise ExplainError(
            "model must give class scores or boxes for slow methods in the app; use "
            "explain.attribute"
        )
    # a class is a tensor with its index for each image: there is one photo
    return [target if isinstance(target, str) else int(target[0]) for target in explained_targets]


@dataclass(eq=False)
class CheckTask(PageTask):
    """Computes the curve or the checks of a map, and adds them to the answer that has the map."""

    request: CheckRequest
    shown: ShownAnswer

    def __post_init__(self) -> None:
        """Refuse a map that the answer does not have."""
        request = self.request
        self.running = f"The {request.what} of {request.method}"
        results = self.shown.explanation.results
        if request.target >= len(results) or request.method not in results[request.target]:
            raise ExplainError(
                "map must be one of the answer's, got another; choose one that is shown"
            )

    def answer(self) -> dict[str, Any]:
        return self._check() if self.request.what == "check" else self._curve()

    def _check(self) -> dict[str, Any]:
        """The results of `Explanation.check` for the map, as plain values for the page."""
        method = self.request.method
        check = self.shown.explanation.check(method, self.request.target, progress=self.progress)
        return {"check": check[method].to_dict()}

    def _curve(self) -> dict[str, Any]:
        """The map's deletion and insertion curves (`explain.report.item.curves`), computed once and
        kept with the answer; refused for maps that can have none.
        """
        target = self.request.target
        method = self.request.method
        computed_curves = self.shown.curves
        if (target, method) not in computed_curves:
            explanation = self.shown.explanation
            maps = {method: explanation.results[target][method]}
            computed = curves(explanation, target, maps, steps=STEPS, progress=self.progress)
            if not computed:
                raise ExplainError(
                    "map must be of a class and one crop to have curves, got another; choose a "
                    "class"
                )
            computed_curves[target, method] = computed[method]
        return {"curve": computed_curves[target, method]}


@dataclass(eq=False)
class AskTask(PageTask):
    """Answers a question about a photo, and explains the words; ``keep`` stores the answer, and
    returns its name."""

    request: AskRequest
    photo: Image.Image
    keep: Callable[[Answered], str]

    running = "The answer"

    def answer(self) -> dict[str, Any]:
        """Answer and explain; the part of the page that shows it."""
        ask = self.request.ask.strip() or None
        answered = self.served.asker(self.photo, ask, progress=self.progress)
        return {
            "words": part_of_answer(answered),
            "said": printable(answered.answer),
            "answered": self.keep(answered),
        }


@dataclass(eq=False)
class EvidenceTask(PageTask):
    """Finds the smallest evidence of a word of what was ``answered``."""

    request: EvidenceRequest
    answered: Answered

    running = "The evidence"

    def answer(self) -> dict[str, Any]:
        """Find it; a picture and a sentence."""
        evidence = self.answered.evidence(
            self.request.word, self.request.kind, budget=BUDGET, progress=self.progress
        )
        picture = picture_of(self.answered, evidence.attribution)
        return {"evidence": picture, "text": evidence.text}
