"""An address to listen at, until it is interrupted."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Callable
from typing import Any

from explain._utils.errors import AppError
from explain.app.access import LOCAL, Access

LOOPBACK = "127.0.0.1"
BACKLOG = 128
HEADERS = 20.0
"""Seconds in which the headers of a request must have come."""


def address(host: str, port: int, token: str | None = None) -> str:
    """What to open in a browser.

    >>> address("127.0.0.1", 8000), address("::1", 80, "abc")
    ('http://127.0.0.1:8000/', 'http://[::1]:80/?token=abc')
    """
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/{f'?token={token}' if token else ''}"


def access_for(host: str) -> Access:
    """Who may ask an app that listens there: without a token on this machine alone, elsewhere with a new one.

    >>> access_for("127.0.0.1").token is None, access_for("0.0.0.0").token is None
    (True, False)
    """
    if is_loopback(host):
        return Access((*LOCAL, host.lower()))
    return Access((*LOCAL, host.lower(), socket.gethostname().lower()), secrets.token_urlsafe(24))


def is_loopback(host: str) -> bool:
    """Whether a name or address is that of this machine to itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 takes a free one.

    Raises:
        AppError: the address cannot be listened at.
    """
    try:
        kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.create_server(where[:2], family=kind, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise AppError(f"address {host}:{port} cannot be listened at: {reason}; choose another --port") from None
    return found


def listen(application: Any, where: socket.socket, begun: Callable[[], None] = lambda: None) -> None:
    """Answer requests at a socket until an interrupt.

    Raises:
        AppError: uvicorn is not installed.
    """
    answering = server(application)
    begun()
    answering.run(sockets=[where])


def server(application: Any) -> Any:
    """Return a server of uvicorn that waits `HEADERS` seconds for a request, and no longer.

    Raises:
        AppError: uvicorn is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise AppError("uvicorn must be installed for the app; run pip install 'explain[app]'") from None
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Punctual(H11Protocol):  # type: ignore[misc, unused-ignore]  # uvicorn may not be installed
        """Ends connections whose next request does not come in time, which uvicorn keeps open."""

        _end: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait()
            else:
                self._cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._end is None:
                self._end = asyncio.get_running_loop().call_later(HEADERS, self._close)

        def _cancel(self) -> None:
            if self._end is not None:
                self._end.cancel()
                self._end = None

        def _close(self) -> None:
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    config = uvicorn.Config(
        application, http=Punctual, log_level="warning", access_log=False, server_header=False, lifespan="off",
        ws="none", timeout_graceful_shutdown=1, proxy_headers=False,
    )  # fmt: skip
    return uvicorn.Server(config)
