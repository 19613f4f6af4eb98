"""Runs searches step by step: they choose perturbed samples by the values of earlier ones."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from explain.engine import settings as runtime
from explain.engine.forward import ResolvedTarget
from explain.engine.needs import NeedAtLayer
from explain.engine.perturbations import OutOfTimeError, Scores, Search, Searcher
from explain.engine.plan import Plan
from explain.engine.rerun_context import RerunContext
from explain.engine.reruns import run_streams
from explain.hooks.preserve import calculating


def run_searches(need: NeedAtLayer, context: RerunContext, resolved: ResolvedTarget) -> None:
    """Run the searches of a method for one target, image after image, and write them into its
    answers. They share ``max_seconds`` equally; an interrupt may leave partial results."""
    settings = context.settings
    method: Searcher = need.kind.method  # type: ignore[attr-defined]
    with calculating(context.device.type, create_graph=settings.create_graph):
        searches = method.searches(context.evidence(resolved, need.layer))
        planned = [search.planned for search in searches]
    seconds: float | None = getattr(method, "max_seconds", None)
    began = time.monotonic()
    read = _reader(need, replace(context, targets=[resolved]))

    def maps() -> dict[str, Tensor]:
        """The maps so far; zeros for searches without samples yet."""
        return {
            method.name: torch.cat([search.map() * (search.samples > 0) for search in searches])
        }

    for number, search in enumerate(searches):
        deadline = math.inf if seconds is None else began + seconds * (number + 1) / len(searches)

        # the numbers of this search, since the loop goes on
        def report(earlier: int = sum(planned[:number]), search: Search = search) -> None:
            runtime.report_progress(settings.progress, earlier + search.samples, sum(planned), maps)

        try:
            _run(search, context, read, deadline, report)
        except KeyboardInterrupt as error:
            if not search.has_result or not settings.keep_partial:
                raise
            context.state.interrupted.append(error)
            break
    resolved.answers[need] = searches


def _reader(need: NeedAtLayer, context: RerunContext) -> Callable[[Scores], Any]:
    """Return a function that runs the perturbed samples of a search's step for the only target of
    ``context``, and returns their values. It reports no progress, and raises interrupts."""
    (resolved,) = context.targets
    # the search itself reports its steps, and decides what an interrupt leaves
    settings = replace(context.settings, keep_partial=False, progress=None)
    quiet = replace(context, settings=settings)
    name: str = need.kind.method.name  # type: ignore[attr-defined]

    def read(asked: Scores) -> Any:
        """Run the perturbed samples that a search asks for, and return their values in the order of
        the samples, for the search alone."""
        need_at_layer = NeedAtLayer(asked, need.layer)
        # a plan of its own, with the method's name for warnings about its gradients
        run_streams(Plan({name: frozenset({need_at_layer})}), quiet)
        # the values are among the target's answers now, where nobody else asks for them
        return resolved.answers.pop(need_at_layer)

    return read


def _run(
    search: Search,
    context: RerunContext,
    read: Callable[[Scores], Any],
    deadline: float,
    report: Callable[[], None],
) -> None:
    """Run a search by ``read`` to its end. After ``deadline`` (of ``time.monotonic()``) it is told
    once, and may finish with a few samples more. ``report`` follows each step."""
    steps = search.steps()

    def next_samples(step: Callable[..., Scores], value: Any) -> Scores | None:
        """Go on with the search's generator by ``step``; return the samples that it asks for next,
        or None at its end."""
        try:
            with calculating(context.device.type, create_graph=context.settings.create_graph):
                return step(value)
        except (StopIteration, OutOfTimeError):
            return None

    samples = next_samples(steps.send, None)
    while samples is not None:
        if not search.finishing and time.monotonic() > deadline:
            search.finishing = True
            samples = next_samples(steps.throw, OutOfTimeError())
            continue
        values = read(samples)
        search.samples += len(values)
        is_progress = not search.finishing  # samples after its time only describe the result
        samples = next_samples(steps.send, values)
        if is_progress:
            report()
    search.finished = True
