"""Lines that reach the browser while the work goes on."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

PENDING = 4
"""Steps that wait for a slow reader; of those that only tell progress, older ones are left out then."""


class Stream:
    """Takes steps of an answer from any thread, and gives them as lines of JSON to one reader."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._steps: deque[Mapping[str, Any]] = deque()
        self._new = asyncio.Event()

    def tell(self, step: Mapping[str, Any]) -> None:
        """Take a step; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, step)
        except RuntimeError:  # the app has ended meanwhile
            return

    def _take(self, step: Mapping[str, Any]) -> None:
        if "progress" in step and len(self._steps) >= PENDING:
            older = next((each for each in self._steps if "progress" in each), None)
            if older is not None:
                self._steps.remove(older)
        self._steps.append(step)
        self._new.set()

    async def lines(self) -> AsyncIterator[bytes]:
        """Give the steps until the one that says that it is the end."""
        while True:
            await self._new.wait()
            self._new.clear()
            while self._steps:
                step = self._steps.popleft()
                yield line(step)
                if step.get("end"):
                    return


def line(step: Mapping[str, Any]) -> bytes:
    r"""A step as a line of JSON.

    >>> line({"end": True})
    b'{"end":true}\n'
    """
    return (json.dumps(step, separators=(",", ":"), allow_nan=False) + "\n").encode("ascii")
