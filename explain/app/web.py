"""The web application: its page, addresses and replies. There are no files behind any address."""

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
from explain.app.requests import FILLS
from explain.app.scheduler import BusyError
from explain.app.service import Service
from explain.app.uploads import TooLargeError, check_bytes
from explain.data.files import slug
from explain.report.page import SCRIPTS, STYLES, PageTemplate, page, static

OWN_SCRIPTS = ("live.js", "choosing.js", "covering.js", "checking.js", "beside.js", "photos.js", "app.js")
POLICY = "img-src 'self' data: blob:; media-src blob:; connect-src 'self'"


def app_page(service: Service) -> str:
    """Return the page of the app; all that it loads later comes from the same address."""
    style = "\n".join([static(STYLES), _own("app.css")])
    script = "\n".join([static(SCRIPTS), *map(_own, OWN_SCRIPTS)])
    index = {
        "title": "explain",
        "photos": [],
        "models": service.models_info(),
        "examples": list(service.examples),
        "fills": list(FILLS.items()),
        "limits": {name: getattr(service.limits, name) for name in ("upload", "pixels", "seconds", "targets")},
    }
    return page(index, [], title="explain", front=PageTemplate("report app", style, script, POLICY))


def _own(name: str) -> str:
    return (resources.files("explain.app") / "static" / name).read_text("utf-8")


PENDING = 4
"""Steps that wait for a slow reader; beyond these, older steps of progress are left out."""


class Stream:
    """Takes steps of an answer from any thread, and gives them as lines of JSON to one reader."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._steps: deque[Mapping[str, Any]] = deque()
        self._new = asyncio.Event()

    def send(self, step: Mapping[str, Any]) -> None:
        """Take a step; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._append, step)
        except RuntimeError:  # the app has ended meanwhile
            return

    def _append(self, step: Mapping[str, Any]) -> None:
        if "progress" in step and len(self._steps) >= PENDING:
            older = next((each for each in self._steps if "progress" in each), None)
            if older is not None:
                self._steps.remove(older)
        self._steps.append(step)
        self._new.set()

    async def lines(self) -> AsyncIterator[bytes]:
        """Give the steps until the last one."""
        while True:
            await self._new.wait()
            self._new.clear()
            while self._steps:
                step = self._steps.popleft()
                yield (json.dumps(step, separators=(",", ":"), allow_nan=False) + "\n").encode("ascii")
                if step.get("end"):
                    return


HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
BODY_TIMEOUT = 30.0
"""Seconds between two parts of the body of a request."""


class SlowError(ExplainError):
    """The body of a request did not arrive in time."""


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
    handlers = Handlers(service, access or Access())
    get = {"/photo/{name}": handlers.picture, "/example/{name}": handlers.example_picture}
    post = {
        "/api/photos": handlers.upload,
        "/api/examples": handlers.example,
        "/api/methods": handlers.methods,
        "/api/layers": handlers.layers,
        "/api/explain": handlers.explain,
        "/api/check": handlers.check,
        "/api/stop": handlers.stop,
        "/api/save": handlers.save,
        "/api/report": handlers.report,
    }
    made = Starlette(
        routes=[
            Route("/", handlers.index, methods=["GET"]),
            *(Route(path, handlers.guarded(handler), methods=["GET"]) for path, handler in get.items()),
            *(Route(path, handlers.guarded(handler), methods=["POST"]) for path, handler in post.items()),
        ]
    )
    made.router.redirect_slashes = False  # a path that begins with two slashes would name another host
    return made


class Handlers:
    """One function for each address; ``request`` is Starlette's."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service, self._access = service, access
        self._page: bytes | None = None

    def guarded(self, handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Refuse requests that are not allowed, and reply to an error with one line."""

        async def handle(request: Any) -> Any:
            refused = self._access.refusal(request.method, dict(request.headers), request.cookies.get(COOKIE))
            if refused:
                return _reply(refused[1], "text/plain", refused[0])
            try:
                return await handler(request)
            except ExplainError as error:
                status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 400)
                return _reply(str(error), "text/plain", status)

        return handle

    async def index(self, request: Any) -> Any:
        """The page; a token in the address becomes a cookie, and leaves the address."""
        token = request.query_params.get("token")
        known = token or request.cookies.get(COOKIE)
        refused = self._access.refusal(request.method, dict(request.headers), known)
        if refused:
            return _reply(refused[1], "text/plain", refused[0])
        if token is not None:
            reply = _reply("", "text/plain", 303, {"location": "/"})
            if self._access.token is not None:
                reply.set_cookie(COOKIE, self._access.token, httponly=True, samesite="strict")
            return reply
        if self._page is None:
            self._page = app_page(self._service).encode("utf-8")
        return _reply(self._page, "text/html", headers={"content-security-policy": "frame-ancestors 'none'"})

    async def upload(self, request: Any) -> Any:
        content = await _body(request, lambda count: check_bytes(count, self._service.limits))
        name = unquote(request.headers.get("x-name", ""))
        return _json(await asyncio.to_thread(self._service.upload, content, name))

    async def example(self, request: Any) -> Any:
        values = await self._values(request)
        return _json(await asyncio.to_thread(self._service.example, str(values.get("name"))))

    async def picture(self, request: Any) -> Any:
        return _reply(await asyncio.to_thread(self._service.picture, request.path_params["name"]), "image/jpeg")

    async def example_picture(self, request: Any) -> Any:
        return _reply(await asyncio.to_thread(self._service.example_picture, request.path_params["name"]), "image/jpeg")

    async def methods(self, request: Any) -> Any:
        values = await self._values(request)
        return _json(await asyncio.to_thread(self._service.methods, values.get("model", 0)))

    async def layers(self, request: Any) -> Any:
        values = await self._values(request)
        return _json(await asyncio.to_thread(self._service.layers, values.get("model", 0), str(values.get("photo"))))

    async def explain(self, request: Any) -> Any:
        return await self._steps(request, self._service.explain)

    async def check(self, request: Any) -> Any:
        return await self._steps(request, self._service.check)

    async def _steps(self, request: Any, begin: Callable[[Any, Any], str]) -> Any:
        """Reply step by step, each in one line."""
        from starlette.responses import StreamingResponse

        values, stream = await self._values(request), Stream()
        name = await asyncio.to_thread(begin, values, stream.send)

        async def lines() -> Any:
            try:
                async for line in stream.lines():
                    yield line
            finally:
                self._service.drop(name)  # the reader may have gone

        return StreamingResponse(lines(), media_type="application/x-ndjson", headers=HEADERS)

    async def stop(self, request: Any) -> Any:
        values = await self._values(request)
        self._service.stop(str(values.get("work")))
        return _json({})

    async def save(self, request: Any) -> Any:
        """The files of `Explanation.save`, as one archive."""
        explanation = self._service.answer(str((await self._values(request)).get("answer")))
        return _download(await asyncio.to_thread(explanation.packed), "application/zip", explanation, "zip")

    async def report(self, request: Any) -> Any:
        name = str((await self._values(request)).get("answer"))
        text = await asyncio.to_thread(self._service.report, name)
        return _download(text.encode("utf-8"), "text/html", self._service.answer(name), "html")

    async def _values(self, request: Any) -> Any:
        """Return the JSON object in the body of a request."""
        most = self._service.limits.body

        def check(count: int) -> None:
            if count > most:
                raise TooLargeError(f"request must have at most {most} bytes, got more; send less")

        body = await _body(request, check)
        try:
            values = json.loads(body)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ExplainError("request must be an object of JSON, got something else; use the page")
        return values


async def _body(request: Any, check: Callable[[int], None]) -> bytes:
    """Return the body of a request; ``check`` refuses a number of bytes, first the announced one."""
    announced = request.headers.get("content-length", "0")
    check(int(announced) if announced.isdecimal() else 0)
    body, stream = bytearray(), aiter(request.stream())
    while True:
        try:
            body += await asyncio.wait_for(anext(stream), BODY_TIMEOUT)
        except StopAsyncIteration:
            return bytes(body)
        except TimeoutError:
            raise SlowError(
                f"request must send something every {BODY_TIMEOUT:g} s, but did not; send it again"
            ) from None
        check(len(body))


def _reply(content: str | bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
    from starlette.responses import Response

    return Response(content, status, {**HEADERS, **(headers or {})}, kind)


def _json(values: Any) -> Any:
    return _reply(json.dumps(values, allow_nan=False), "application/json")


def _download(content: bytes, kind: str, explanation: Any, ending: str) -> Any:
    source = str(explanation.source or "photo")
    stem = slug(source.rsplit(".", 1)[0] if "." in source else source)
    name = f"attachment; filename*=UTF-8''{quote(f'{stem}-explained.{ending}')}"
    return _reply(content, kind, headers={"content-disposition": name})
