"""Fair timing on a noisy machine: everything in turn, many times; the median of ratios to a
baseline run beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def interleaved(
    works: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] | None = None,
    *,
    warm: bool = True,
) -> dict[str, list[float]]:
    """Run every piece of work once to warm up, then ``rounds`` times in turn; return the seconds of
    each run.

    With one thread they are those of the processor, which leave out what other programs take.
    """
    clock = clock or (time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    for work in works.values() if warm else ():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = clock()
            work()
            seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, baseline: str) -> float:
    """Return the median, over the rounds, of a work's time by the baseline's in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[baseline], strict=True))


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that torch's CPU allocator held at once during the work, beyond what
    it held before."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        work()
    held = peak = 0
    for event in run.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            held += event.nbytes()
            peak = max(peak, held)
    return peak
