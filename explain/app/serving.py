"""The server of the app: it listens at an address until an interrupt."""

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
HEADERS_TIMEOUT = 20.0
"""Seconds in which the headers of a request must arrive."""


def address(host: str, port: int, token: str | None = None) -> str:
    """Return the address to open in a browser.

    >>> address("127.0.0.1", 8000), address("::1", 80, "abc")
    ('http://127.0.0.1:8000/', 'http://[::1]:80/?token=abc')
    """
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/{f'?token={token}' if token else ''}"


def access_for(host: str) -> Access:
    """Return who may use an app at an address: this machine without a token; others with a new one.

    >>> access_for("127.0.0.1").token is None, access_for("0.0.0.0").token is None
    (True, False)
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host.lower() == "localhost"
    if loopback:
        return Access((*LOCAL, host.lower()))
    return Access((*LOCAL, host.lower(), socket.gethostname().lower()), secrets.token_urlsafe(24))


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 takes a free one.

    Raises:
        AppError: the address cannot be listened at.
    """
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise AppError(f"address {host}:{port} cannot be listened at: {reason}; choose another --port") from None


def listen(application: Any, bound_socket: socket.socket, on_start: Callable[[], None] = lambda: None) -> None:
    """Answer requests at a socket until an interrupt.

    Raises:
        AppError: uvicorn is not installed.
    """
    found = server(application)
    on_start()
    found.run(sockets=[bound_socket])


def server(application: Any) -> Any:
    """Return a server of uvicorn that waits at most `HEADERS_TIMEOUT` seconds for a request.

    Raises:
        AppError: uvicorn is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise AppError("uvicorn must be installed for the app; run pip install 'explain[app]'") from None
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):  # type: ignore[misc, unused-ignore]  # uvicorn may not be installed
        """Closes connections whose next request does not arrive in time; uvicorn keeps them open."""

        _timer: asyncio.TimerHandle | None = None

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
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(HEADERS_TIMEOUT, self._close)

        def _cancel(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _close(self) -> None:
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    config = uvicorn.Config(
        application, http=TimedProtocol, log_level="warning", access_log=False, server_header=False, lifespan="off",
        ws="none", timeout_graceful_shutdown=1, proxy_headers=False,
    )  # fmt: skip
    return uvicorn.Server(config)
