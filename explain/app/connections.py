"""Connections of the server: how long one may wait with a request, and how many an address may
have."""

import asyncio
from typing import Any

CONNECTIONS = 512
"""Connections at the same time."""
OF_AN_ADDRESS = 100
"""Of these, how many one address may have. Behind a proxy, all visitors have its address."""
HEAD = 10.0
"""Seconds in which a request must have sent all of its headers."""


def limited(http_protocol: Any) -> Any:
    """Return a subclass of uvicorn's HTTP connections, ``http_protocol``, that closes those that
    wait too long for a whole request, and the longest waiting ones where there are too many."""

    class Limited(http_protocol):  # type: ignore[misc]
        _closing: asyncio.TimerHandle | None = None
        """What closes the connection; None while a request is answered."""

        def connection_made(self, transport: Any) -> None:
            """Begin to wait, and make room if the address of the client has too many."""
            super().connection_made(transport)
            self._watch()
            earlier = [other for other in self.connections if other is not self]
            of_address = [other for other in earlier if self._shares_address(other)]
            for rivals, most in ((of_address, OF_AN_ADDRESS), (earlier, CONNECTIONS)):
                if len(rivals) < most:
                    continue
                # the next to be closed in any case has waited longest; without one that waits, the
                # new one is closed
                waiting = [other for other in rivals if other._closing is not None]
                longest = min(waiting, key=lambda other: other._closing.when(), default=self)
                longest._end()

        def _shares_address(self, other: Any) -> bool:
            """Whether another connection comes from the same address."""
            return bool((self.client or [""])[0] == (other.client or [""])[0])

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            self._stop_waiting()

        def _watch(self) -> None:
            """Begin to wait where no request is answered, or stop waiting."""
            # uvicorn's cycle is a request and its response
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self._closing is None:  # what the client sends does not prolong the wait
                self._closing = self.loop.call_later(HEAD, self._end)

        def _stop_waiting(self) -> None:
            if self._closing is not None:
                self._closing.cancel()
            self._closing = None

        def _end(self) -> None:
            """Close the connection; it no longer counts."""
            self.connections.discard(self)
            self.transport.abort()

    return Limited
