"""The app's server on this machine: connections that wait, stall or break off."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

import explain
from explain.app import application, connections
from explain.app.requests import Limits
from explain.app.service import Service
from explain.app.web import bound, server
from tests.app.conftest import LIMITS, encoded
from tests.conftest import ROOT
from tests.report.conftest import photo

pytest.importorskip("uvicorn", reason="the app needs uvicorn: pip install -e '.[app]'")
HEAD = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n"
PHOTO = encoded(photo())
WAIT = 30.0

Connect = Callable[..., socket.socket]


@contextmanager
def served(service: Service) -> Iterator[Connect]:
    """Serve a service in a thread, and give what connects to it and sends something."""
    with bound("127.0.0.1", 0) as listening, ExitStack() as stack:
        running = server(application(service))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()

        def connect(sent: bytes = b"") -> socket.socket:
            connection = socket.create_connection(listening.getsockname(), timeout=WAIT)
            stack.enter_context(connection)
            connection.sendall(sent)
            return connection

        try:
            yield connect
        finally:
            running.should_exit = True
            thread.join()


@pytest.fixture
def connect(service: Service) -> Iterator[Connect]:
    with served(service) as connect:
        yield connect


def request(path: str, body: bytes, length: int | None = None) -> bytes:
    lines = [
        f"POST /api/{path} HTTP/1.1",
        "host: 127.0.0.1",
        "x-explain: 1",
        f"content-length: {len(body) if length is None else length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(100_000).split()[1])


def has_ended(connection: socket.socket) -> bool:
    """Whether the server ends a connection, after what it still sends."""
    try:
        while connection.recv(100_000):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_headers_that_are_sent_in_part_stop_nobody(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "OF_AN_ADDRESS", 10)
    half = [connect(HEAD) for _ in range(30)]
    assert status_of(connect(HEAD + b"\r\n")) == 200
    assert all(map(has_ended, half[:20]))  # these have waited longest
    whole = connect(request("photos", PHOTO[:-1], len(PHOTO)))
    time.sleep(0.2)
    more = [connect(HEAD) for _ in range(30)]
    whole.sendall(PHOTO[-1:])
    assert status_of(whole) == 200  # it did not wait, and so stayed
    assert all(map(has_ended, more[:20]))


def test_an_address_has_so_many_requests_at_a_time(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "OF_AN_ADDRESS", 3)
    running = [connect(request("photos", PHOTO[:-1], len(PHOTO))) for _ in range(3)]
    time.sleep(0.2)
    assert has_ended(connect(HEAD))
    for connection in running:
        connection.sendall(PHOTO[-1:])
        assert status_of(connection) == 200


@pytest.mark.parametrize("begun", [b"", HEAD, HEAD + b"\r\n", request("photos", b"x", 10**9)])
def test_what_is_sent_slowly_ends(
    begun: bytes, explainer: explain.Explainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, a header without an end, what follows a reply, and a photo."""
    monkeypatch.setattr(connections, "HEAD", 0.5)
    service = Service([explainer], replace(LIMITS, arrival=0.5))
    with served(service) as connect:
        connection = connect(begun)
        start = time.monotonic()
        connection.settimeout(0.1)
        while time.monotonic() - start < WAIT:
            try:
                connection.sendall(b"x")
            except ConnectionError:
                break
            if has_ended(connection):
                break
        assert 0.3 < time.monotonic() - start < WAIT / 2
        late = connect(request("photos", PHOTO[:-1], len(PHOTO)))
        assert status_of(late) == 408
        assert status_of(connect(request("photos", PHOTO))) == 200
    service.close()


def test_bodies_that_are_not_complete_count(explainer: explain.Explainer) -> None:
    service = Service([explainer], replace(LIMITS, pending=3 * len(PHOTO)))
    with served(service) as connect:
        first = connect(request("photos", PHOTO[:-1], len(PHOTO)))
        time.sleep(0.2)
        assert status_of(connect(request("photos", PHOTO))) == 503
        first.sendall(PHOTO[-1:])
        assert status_of(first) == 200
        for _ in range(4):  # nothing is left of those before
            assert status_of(connect(request("photos", PHOTO))) == 200
            connect(request("photos", PHOTO[:-1], len(PHOTO))).close()
            time.sleep(0.1)
    service.close()


def test_who_leaves_is_no_error(
    connect: Connect, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    name = service.add_photo(photo())["photo"]
    question = json.dumps({"photo": name, "methods": ["rise"]}).encode()
    for sent in (
        b"",
        HEAD,
        HEAD + b"\r\n",
        request("photos", b"", 1000),
        request("photos", PHOTO[:-1], len(PHOTO)),
        request("photos", PHOTO),
        request("explain", question[:-1], len(question)),
        request("explain", question),
    ):
        connect(sent).close()
        amid = connect(sent)
        time.sleep(0.1)
        amid.close()
    assert status_of(connect(request("photos", PHOTO))) == 200
    logger.removeHandler(caplog.handler)
    assert caplog.text == ""


async def sent_from(app: Any, address: str, name: str) -> int:
    """The status of the reply to a photo from an address."""
    headers = {"host": "localhost", "x-explain": "1", "x-name": name}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/photos",
        "query_string": b"",
        "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
        "client": (address, 1),
    }
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": PHOTO}

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    await app(scope, receive, send)
    return statuses[0]


def test_photos_that_take_long_let_others_through(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    upload = Service.upload

    def slow(own: Service, content: bytes, name: str) -> Any:
        assert name != "slow.png" or go_on.wait(WAIT)
        return upload(own, content, name)

    monkeypatch.setattr(Service, "upload", slow)

    async def work() -> None:
        app = application(service)
        waiting = [asyncio.create_task(sent_from(app, "10.0.0.1", "slow.png")) for _ in range(40)]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        others = [sent_from(app, f"10.0.0.{number}", "a.png") for number in range(2, 6)]
        assert await asyncio.gather(*others) == [200] * 4
        assert time.monotonic() - start < WAIT / 2
        assert not any(task.done() for task in waiting)
        go_on.set()
        assert set(await asyncio.gather(*waiting)) == {200}

    asyncio.run(work())


def test_the_promised_limits_are_those_of_the_app() -> None:
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    limits = Limits()
    for row in (
        f"{connections.CONNECTIONS}, of these {connections.OF_AN_ADDRESS} of one address",
        f"headers of a request | {connections.HEAD:g} s",
        f"body of a request | {limits.arrival:g} s",
        f"{limits.pending >> 20} MiB, half",
        f"{limits.upload >> 20} MiB, {limits.pixels / 1e6:g} megapixels",
        f"{limits.decoders}, of these {limits.decoders - 1} from one address",
        f"wait for a model | {limits.waiting}",
        f"slow method | {limits.seconds:g} s",
        f"{limits.photos}, {limits.explanations} and {limits.explanations}, for an hour",
    ):
        assert row in page
    assert limits.age == 3600
