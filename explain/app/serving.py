"""An address to listen at, until it is interrupted."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable
from typing import Any

from explain.app.access import LOCAL, Access
from explain.errors import AppError

LOOPBACK = "127.0.0.1"
BACKLOG = 128


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
    try:
        import uvicorn
    except ImportError:
        raise AppError("uvicorn must be installed for the app; run pip install 'explain[app]'") from None
    config = uvicorn.Config(
        application, log_level="warning", access_log=False, server_header=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=1, proxy_headers=False,
    )  # fmt: skip
    begun()
    uvicorn.Server(config).run(sockets=[where])
