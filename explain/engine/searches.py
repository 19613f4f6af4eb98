"""Runs searches step by step: they choose perturbed rows by the values of earlier ones."""

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
from explain.engine.reruns import FEW, run_streams
from explain.hooks.preserve import calculating


def run_searches(need: NeedAtLayer, context: RerunContext, resolved: ResolvedTarget) -> None:
    """Run the searches of a method for a target, and add them to the target's answers.

    They share the method's time. An interrupt ends them; where partial results are wanted, they
    have what there is by then.
    """
    settings = context.settings
    method: Searcher = need.kind.method  # type: ignore[attr-defined]
    with calculating(context.device.type, create_graph=settings.create_graph):
        searches = method.searches(context.evidence(resolved, need.layer))
        planned = [search.planned for search in searches]
    seconds: float | None = getattr(method, "max_seconds", None)
    began = time.monotonic()
    read = _reader(need, replace(context, targets=[resolved]))

    def maps() -> dict[str, Tensor]:
        return {
            method.name: torch.cat([search.map() * (search.samples > 0) for search in searches])
        }

    for place, search in enumerate(searches):
        end = math.inf if seconds is None else began + seconds * (place + 1) / len(searches)

        def report(earlier: int = sum(planned[:place]), search: Search = search) -> None:
            runtime.report_progress(settings.progress, earlier + search.samples, sum(planned), maps)

        try:
            _run(search, context, read, end, report)
        except KeyboardInterrupt as error:
            if not search.has_result or not settings.keep_partial:
                raise
            context.state.interrupted.append(error)
            break
    resolved.answers[need] = searches


def _reader(need: NeedAtLayer, context: RerunContext) -> Callable[[Scores], Any]:
    """A function that runs rows and returns their values; the error of scores in bfloat16 is noted
    once."""
    (resolved,) = context.targets
    # the search decides about an interrupt
    settings = replace(context.settings, keep_partial=False, progress=None)
    quiet = replace(context, settings=settings)
    noted = False

    def read(asked: Scores) -> Any:
        nonlocal noted
        rows = NeedAtLayer(asked, need.layer)
        noted |= run_streams(Plan({"": frozenset({rows})}), quiet, math.inf if noted else FEW)
        return resolved.answers.pop(rows)

    return read


def _run(
    search: Search,
    context: RerunContext,
    read: Callable[[Scores], Any],
    end: float,
    report: Callable[[], None],
) -> None:
    """Run a search to its end, or until ``time.monotonic`` is ``end``; ``read`` runs the rows that
    it asks for."""
    steps = search.steps()

    def asked(step: Callable[..., Scores], value: Any) -> Scores | None:
        try:
            with calculating(context.device.type, create_graph=context.settings.create_graph):
                return step(value)
        except (StopIteration, OutOfTimeError):
            return None

    rows = asked(steps.send, None)
    while rows is not None:
        if not search.finishing and time.monotonic() > end:
            search.finishing = True
            rows = asked(steps.throw, OutOfTimeError())
            continue
        values = read(rows)
        search.samples += len(values)
        only_describes = search.finishing  # the last few rows change nothing of the result
        rows = asked(steps.send, values)
        if not only_describes:
            report()
    search.finished = True
