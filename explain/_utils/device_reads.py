"""Reads values from a device together: each read waits until the device has computed all that was
asked of it.

Whether scores are finite does not change what is computed next. So such a check waits for the next
values that are read, or for the end of the call.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from explain._utils.signals import came_by_signal


@dataclass(eq=False)
class _Pending:
    """Numbers that must be finite, of one element each, and what is called where one is not."""

    totals: list[Tensor] = field(default_factory=list)
    refusals: list[Callable[[], None]] = field(default_factory=list)


_PENDING: ContextVar[_Pending | None] = ContextVar("pending", default=None)


@contextmanager
def reading_later() -> Iterator[None]:
    """Within this block, checks of `require_finite` wait for `read_together` or its end, to share
    one read. Made also where the block raises: a value may be the cause. Not on signals.
    """
    token = _PENDING.set(_Pending())
    try:
        try:
            yield
        except Exception as error:
            if not came_by_signal(error):
                read_together()
            raise
        read_together()
    finally:
        _PENDING.reset(token)


@contextmanager
def refused_by(refuse: Callable[[], None]) -> Iterator[None]:
    """After this block, ``refuse`` stands for the functions that `require_finite` got within it and
    that wait: it computes again what they hold, so that large tensors are freed.
    """
    pending = _PENDING.get()
    if pending is None:
        yield
        return
    count = len(pending.refusals)
    yield
    # one for each number that waits
    pending.refusals[count:] = [refuse] * len(pending.refusals[count:])


def require_finite(total: Tensor, refuse: Callable[[], None]) -> None:
    """Call ``refuse`` if a number, such as a sum of scores, is not finite: now, or later within
    `reading_later`. It may find all well: a sum overflows where its terms do not."""
    pending = _PENDING.get()
    if pending is not None:
        pending.totals.append(total)
        pending.refusals.append(refuse)
    elif not math.isfinite(total.detach()):
        refuse()


def read_together(*tensors: Tensor) -> list[list[float]]:
    """The numbers in each tensor as a flat list, in one read of the device with those of
    `require_finite` that wait; the first that is not finite calls its function, which raises."""
    pending = _PENDING.get() or _Pending()
    refusals = pending.refusals.copy()
    values = [*pending.totals, *tensors]
    pending.totals.clear()
    pending.refusals.clear()
    if not values:
        return []
    flat = list(map(torch.flatten, map(Tensor.detach, values)))
    for place, row in enumerate(flat):  # a model may be on several devices
        flat[place] = row.to(flat[0].device)
    numbers = torch.cat(flat).tolist()  # the one read
    rows = []
    for row in flat:
        rows.append(numbers[: len(row)])
        del numbers[: len(row)]
    token = _PENDING.set(None)  # what a refusal computes again is checked at once
    try:
        # not strict: the rows of the ``tensors`` follow those of the totals
        for refuse, (total,) in zip(refusals, rows, strict=False):
            if not math.isfinite(total):
                refuse()
    finally:
        _PENDING.reset(token)
    return rows[len(refusals) :]
