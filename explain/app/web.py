"""Addresses and replies, as functions; there are no files behind any address."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import resources
from typing import Any
from urllib.parse import quote, unquote

from explain._utils.errors import AppError, ExplainError
from explain.app.access import COOKIE, Access
from explain.app.cache import ExpiredError
from explain.app.questions import FILLS
from explain.app.scheduler import BusyError
from explain.app.service import Service
from explain.app.uploads import TooLargeError, check_bytes
from explain.data.files import slug
from explain.report.page import SCRIPTS, STYLES, PageTemplate, page, static

PENDING = 4
"""Steps that wait for a slow reader; of those that only tell progress, older ones are left out then."""


class Stream:
    """Takes steps of an answer from any thread, and gives them as lines of JSON to one reader."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._steps: deque[Mapping[str, Any]] = deque()
        self._new = asyncio.Event()

    def send(self, step: Mapping[str, Any]) -> None:
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


OWN_SCRIPTS = ("live.js", "choosing.js", "covering.js", "checking.js", "beside.js", "photos.js", "app.js")
POLICY = "img-src 'self' data: blob:; media-src blob:; connect-src 'self'"


def app_page(service: Service) -> str:
    """Return the page of the app as one text; what it asks for later comes from the same address."""
    style = "\n".join([static(STYLES), _own("app.css")])
    script = "\n".join([static(SCRIPTS), *map(_own, OWN_SCRIPTS)])
    index = {
        "title": "explain",
        "photos": [],
        "models": service.about(),
        "examples": list(service.examples),
        "fills": list(FILLS.items()),
        "limits": {name: getattr(service.limits, name) for name in ("upload", "pixels", "seconds", "targets")},
    }
    return page(index, [], title="explain", front=PageTemplate("report app", style, script, POLICY))


def _own(name: str) -> str:
    return (resources.files("explain.app") / "static" / name).read_text("utf-8")


HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
BODY = 30.0
"""Seconds between two parts of what is sent."""


class SlowError(ExplainError):
    """What was announced did not come."""


STATUS = {ExpiredError: 404, SlowError: 408, TooLargeError: 413, BusyError: 503}


def application(service: Service, access: Access | None = None) -> Any:
    """Return the app as an ASGI application.

    Raises:
        AppError: Starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError:
        raise AppError("starlette must be installed for the app; run pip install 'explain[app]'") from None
    handlers = Routes(service, access or Access())
    routes = [
        Route("/", handlers.index, methods=["GET"]),
        Route("/photo/{name}", handlers.guarded(handlers.picture), methods=["GET"]),
        Route("/example/{name}", handlers.guarded(handlers.example_picture), methods=["GET"]),
        Route("/api/photos", handlers.guarded(handlers.receive), methods=["POST"]),
        Route("/api/examples", handlers.guarded(handlers.example), methods=["POST"]),
        Route("/api/methods", handlers.guarded(handlers.methods), methods=["POST"]),
        Route("/api/layers", handlers.guarded(handlers.layers), methods=["POST"]),
        Route("/api/explain", handlers.guarded(handlers.explain), methods=["POST"]),
        Route("/api/check", handlers.guarded(handlers.check), methods=["POST"]),
        Route("/api/stop", handlers.guarded(handlers.stop), methods=["POST"]),
        Route("/api/save", handlers.guarded(handlers.save), methods=["POST"]),
        Route("/api/report", handlers.guarded(handlers.report), methods=["POST"]),
    ]
    made = Starlette(routes=routes)
    made.router.redirect_slashes = False  # a path that begins with two slashes would name another host
    return made


class Routes:
    """One function for each address; ``request`` is Starlette's."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service, self._access = service, access
        self._page: bytes | None = None

    def guarded(self, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Let a request pass or not, and say in one line what goes wrong."""

        async def answered(request: Any) -> Any:
            refused = self._access.refusal(request.method, dict(request.headers))
            if refused:
                return _text(refused[1], refused[0])
            try:
                return await work(request)
            except ExplainError as error:
                status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 400)
                return _text(str(error), status)

        return answered

    async def index(self, request: Any) -> Any:
        """The page; a token in the address becomes a cookie, and leaves the address."""
        from starlette.responses import RedirectResponse, Response

        secret = request.query_params.get("token")
        refused = self._access.refusal(request.method, dict(request.headers), secret=secret)
        if refused:
            return _text(refused[1], refused[0])
        if secret is not None:
            reply = RedirectResponse("/", 303, HEADERS)
            if self._access.token is not None:
                reply.set_cookie(COOKIE, self._access.token, httponly=True, samesite="strict")
            return reply
        if self._page is None:
            self._page = app_page(self._service).encode("utf-8")
        frames = {"content-security-policy": "frame-ancestors 'none'"}
        return Response(self._page, media_type="text/html; charset=utf-8", headers=HEADERS | frames)

    # --- photos ---

    async def receive(self, request: Any) -> Any:
        name = unquote(request.headers.get("x-name", ""))
        content = await _body(request, lambda count: check_bytes(count, self._service.limits))
        return _json(await asyncio.to_thread(self._service.receive, content, name))

    async def example(self, request: Any) -> Any:
        values = await self._values(request)
        return _json(await asyncio.to_thread(self._service.example, str(values.get("name"))))

    async def picture(self, request: Any) -> Any:
        return _bytes(await asyncio.to_thread(self._service.picture, request.path_params["name"]), "image/jpeg")

    async def example_picture(self, request: Any) -> Any:
        return _bytes(await asyncio.to_thread(self._service.example_picture, request.path_params["name"]), "image/jpeg")

    # --- models ---

    async def methods(self, request: Any) -> Any:
        values = await self._values(request)
        return _json(await asyncio.to_thread(self._service.methods, values.get("model", 0)))

    async def layers(self, request: Any) -> Any:
        values = await self._values(request)
        found = await asyncio.to_thread(self._service.layers, values.get("model", 0), str(values.get("photo")))
        return _json(found)

    # --- questions ---

    async def explain(self, request: Any) -> Any:
        return await self._steps(request, self._service.explain)

    async def check(self, request: Any) -> Any:
        return await self._steps(request, self._service.check)

    async def _steps(self, request: Any, begin: Callable[[Any, Any], str]) -> Any:
        """Answer step by step, each one line."""
        from starlette.responses import StreamingResponse

        values, stream = await self._values(request), Stream()
        name = await asyncio.to_thread(begin, values, stream.send)

        async def lines() -> Any:
            try:
                async for each in stream.lines():
                    yield each
            finally:
                self._service.drop(name)  # the reader may have gone

        return StreamingResponse(lines(), media_type="application/x-ndjson", headers=HEADERS)

    async def stop(self, request: Any) -> Any:
        values = await self._values(request)
        self._service.stop(str(values.get("work")))
        return _json({})

    async def save(self, request: Any) -> Any:
        """What the command line would save, as one archive."""
        explanation = self._service.answer(str((await self._values(request)).get("answer")))
        return _download(await asyncio.to_thread(explanation.packed), "application/zip", _stem(explanation), "zip")

    async def report(self, request: Any) -> Any:
        name = str((await self._values(request)).get("answer"))
        text = await asyncio.to_thread(self._service.report, name)
        stem = _stem(self._service.answer(name))
        return _download(text.encode("utf-8"), "text/html; charset=utf-8", stem, "html")

    async def _values(self, request: Any) -> Any:
        def check(count: int) -> None:
            if count > self._service.limits.body:
                raise TooLargeError(f"question must have at most {self._service.limits.body} bytes, got more; ask less")

        try:
            values = json.loads(await _body(request, check))
        except ExplainError:
            raise
        except (ValueError, RecursionError):
            raise ExplainError("question must be JSON, got something else; use the page") from None
        if not isinstance(values, dict):
            raise ExplainError("question must be an object of JSON, got something else; use the page")
        return values


async def _body(request: Any, check: Callable[[int], None]) -> bytes:
    """The bytes that were sent, counted as they come, and before by what is announced."""
    announced = request.headers.get("content-length", "0")
    check(int(announced) if announced.isdecimal() else 0)
    parts, count, stream = [], 0, aiter(request.stream())
    while True:
        try:
            part = await asyncio.wait_for(anext(stream), BODY)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise SlowError(f"request must send something every {BODY:g} s, but did not; send it again") from None
        count += len(part)
        check(count)
        parts.append(part)
    return b"".join(parts)


def _stem(explanation: Any) -> str:
    source = str(explanation.source or "photo")
    return slug(source.rsplit(".", 1)[0] if "." in source else source)


def _json(values: Any) -> Any:
    from starlette.responses import Response

    return Response(json.dumps(values, allow_nan=False), media_type="application/json", headers=HEADERS)


def _text(text: str, status: int) -> Any:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text, status, HEADERS)


def _bytes(content: bytes, kind: str) -> Any:
    from starlette.responses import Response

    return Response(content, media_type=kind, headers=HEADERS)


def _download(content: bytes, kind: str, stem: str, ending: str) -> Any:
    from starlette.responses import Response

    name = {"content-disposition": f"attachment; filename*=UTF-8''{quote(f'{stem}-explained.{ending}')}"}
    return Response(content, media_type=kind, headers=HEADERS | name)
