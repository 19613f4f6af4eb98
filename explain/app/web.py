"""The web application: its page, addresses and replies. There are no files behind any address."""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar
from urllib.parse import quote, unquote
from weakref import WeakValueDictionary

from explain._utils.errors import AppError, ExplainError, optional
from explain._utils.resources import packaged_text
from explain.app import requests
from explain.app.connections import CONNECTIONS, limited
from explain.app.service import ExpiredError, Service
from explain.app.tasks import SendStep
from explain.data.limits import TooLargeError
from explain.report.pages import SCRIPTS, STYLES, PageTemplate, page, static

T = TypeVar("T")
HEADER = "x-explain"
"""A header that the page sends with every request that changes something: other sites cannot add
it."""
LOCAL = ("localhost", "127.0.0.1", "::1")
_OTHER_SITE = (403, "requests from other sites are refused; open the app itself")


@dataclass(frozen=True)
class Access:
    """Which requests are allowed. Without a token, the app is for this machine alone."""

    hosts: tuple[str, ...] = LOCAL
    """Names of the app in the ``Host`` header."""
    token: str | None = None
    """With one, IP addresses are allowed in the ``Host`` header too."""

    def refusal(
        self, method: str, headers: Mapping[str, str], token: str | None = None
    ) -> tuple[int, str] | None:
        """Status and message of a refusal, or None: host (421), other sites by browsers' headers
        (403), the page's own header for changes (403), token (401), in this order."""
        host = headers.get("host", "")
        site = headers.get("sec-fetch-site", "same-origin")
        if not self._is_known(host):
            return (
                421,
                (
                    "host must be a name of this machine; open the address that explain serve has "
                    "printed"
                ),
            )
        # A link on another site may open the page: the other site learns nothing by it.
        request = (method, headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
        opens_page = request == ("GET", "navigate", "document")
        if site not in ("same-origin", "none") and not opens_page:
            return _OTHER_SITE
        if "origin" in headers and headers["origin"] not in (f"http://{host}", f"https://{host}"):
            return _OTHER_SITE
        if method != "GET" and headers.get(HEADER) != "1":
            return (
                403,
                f"requests that change something must have the header {HEADER}: 1; use the page",
            )
        # compared in constant time, by which nobody can guess it piece by piece
        sent_token = (token or "").encode("utf-8", "replace")
        if self.token is not None and not hmac.compare_digest(sent_token, self.token.encode()):
            return 401, "a token is needed; open the address that explain serve has printed"
        return None

    def _is_known(self, host: str) -> bool:
        """Whether a ``Host`` header names this app: one of ``hosts``, or an IP address with a
        token. Other names are refused: a site may point its own at this machine.
        """
        name = host_name(host)
        if name in self.hosts:
            return True
        with suppress(ValueError):
            ipaddress.ip_address(name or "")
            return self.token is not None
        return False


def cookie_name(host: str) -> str:
    """The cookie that holds the token, with the port of the ``Host`` header: browsers send one
    app's cookies to those on other ports too."""
    port = re.search(r":([0-9]{1,5})$", host)
    return f"explain-token-{port[1]}" if port else "explain-token"


def host_name(host: str) -> str | None:
    """The name in a ``Host`` header, in small letters and without its port; None where there is
    none."""
    matched = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+))(?::\d{1,5})?", host.lower())
    return matched and (matched[1] or matched[2])


OWN_SCRIPTS = (
    "live.js",
    "choosing.js",
    "covering.js",
    "checking.js",
    "asking.js",
    "beside.js",
    "photos.js",
    "address.js",
    "app.js",
)
POLICY = "img-src 'self' data: blob:; media-src blob:; connect-src 'self'"


def app_page(service: Service) -> str:
    """The app's HTML page with style and scripts (`OWN_SCRIPTS` after those of reports), without
    photos; ``index`` has models, examples and limits, whose keys they read.
    """
    own_style = packaged_text("explain.app", "static/app.css")
    style = "\n".join([static((*STYLES, "answer.css")), own_style])
    own_scripts = [packaged_text("explain.app", f"static/{name}") for name in OWN_SCRIPTS]
    script = "\n".join([static((*SCRIPTS, "words.js")), *own_scripts])
    index = {
        "title": "explain",
        "photos": [],
        "models": service.models_info(),
        "asker": service.asker_name,
        "examples": list(service.examples),
        "fills": list(requests.FILLS.items()),
        "limits": {
            name: getattr(service.limits, name)
            for name in ("upload", "pixels", "seconds", "targets")
        },
    }
    front = PageTemplate(style, script, policy=POLICY, kind="report app")
    return page(index, items=[], title="explain", front=front)


HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
STATUS = {
    ExpiredError: 404,
    requests.TooSlowError: 408,
    TooLargeError: 413,
    requests.BusyError: 503,
}


def _reply(
    content: str | bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> Any:
    """A Starlette response with the security headers of the app; ``kind`` is the media type."""
    from starlette.responses import Response

    return Response(content, status, {**HEADERS, **(headers or {})}, kind)


def _json(values: Any) -> Any:
    """A response with plain values as JSON, ``{}`` for None; NaN and infinity are not allowed,
    since browsers cannot read them."""
    return _reply(json.dumps({} if values is None else values, allow_nan=False), "application/json")


Handler = Callable[[Any], Awaitable[Any]]


def _package(name: str) -> Any:
    """Import a package that only the app needs (Starlette, uvicorn).
    Raises `AppError` if it is not installed; the message says what to install.
    """
    return optional(name, "for the app", "app", AppError)


def application(service: Service, access: Access | None = None) -> Any:
    """Return the app as an ASGI application, with a route for each address of the page.

    Every handler is guarded by ``access``; by default the app is for this machine alone. Names
    under ``/api/`` are those that the scripts of the page request.

    Raises:
        AppError: Starlette is not installed.
    """
    starlette = _package("starlette.applications")
    routing = _package("starlette.routing")
    disconnected = _package("starlette.requests").ClientDisconnect
    handlers = Handlers(service, access or Access())
    gets = {
        "/": handlers.index,
        "/photo/{name}": handlers.picture(service.picture),
        "/example/{name}": handlers.picture(service.example_picture),
    }
    posts = {
        "photos": handlers.upload,
        "examples": handlers.call(lambda values: service.upload_example(str(values.get("name")))),
        "methods": handlers.call(lambda values: service.model(values).methods()),
        "layers": handlers.call(service.layers),
        "stop": handlers.call(lambda values: service.stop(str(values.get("work")))),
        "explain": handlers.steps(service.explain),
        "check": handlers.steps(service.check),
        "ask": handlers.steps(service.ask),
        "evidence": handlers.steps(service.evidence),
        "save": handlers.download(
            lambda name: service.answer(name).packed(service.stem(name)), "zip", "application/zip"
        ),
        "report": handlers.download(service.report, "html", "text/html"),
    }
    routes = [
        routing.Route(path, handlers.guarded(handler), methods=["GET"])
        for path, handler in gets.items()
    ]
    for name, handler in posts.items():
        routes.append(routing.Route(f"/api/{name}", handlers.guarded(handler), methods=["POST"]))
    replies = {ExplainError: _refused, disconnected: _to_nobody}
    app = starlette.Starlette(routes=routes, exception_handlers=replies)
    # a path that begins with two slashes would name another host
    app.router.redirect_slashes = False
    return app


async def _refused(request: Any, error: ExplainError) -> Any:
    """The response to a request that raised an error of this package: its message, with the status
    of its class in `STATUS`, else 400.
    """
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 400)
    return _reply(str(error), "text/plain", status)


async def _to_nobody(request: Any, error: Exception) -> Any:
    """The response to a request whose visitor has left before all of it was sent, which nobody
    reads.
    """
    return _reply("", "text/plain", 400)


def _address_of(request: Any) -> str:
    """The network address that a request comes from, by which visitors are told apart; "" where it
    has none."""
    return request.client.host if request.client else ""


class Handlers:
    """One function for each address; ``request`` is Starlette's."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access
        self._decoders = asyncio.Semaphore(service.limits.decoders)  # photos at a time
        self._decoders_of = WeakValueDictionary[str, asyncio.Semaphore]()
        """Those that one visitor may use, by address, while a photo waits or is decoded."""
        self._pending = Counter[str]()
        """The bytes that `_body` holds, by address."""

    @cached_property
    def _page(self) -> str:
        """The HTML page of the app, made at the first visit."""
        return app_page(self._service)

    def guarded(self, handler: Handler) -> Handler:
        """A handler that calls ``handler`` for allowed requests, and refuses others (`Access`);
        every route is wrapped. The token is the cookie's, or at "/" the address's.
        """

        async def handle(request: Any) -> Any:
            """Check a request's token and headers, and pass it to the handler if they are
            allowed."""
            token = request.cookies.get(cookie_name(request.headers.get("host", "")))
            if request.scope["path"] == "/":
                token = request.query_params.get("token", token)
            refusal = self._access.refusal(request.method, dict(request.headers), token)
            if refusal is None:
                return await handler(request)
            status, message = refusal
            return _reply(message, "text/plain", status)

        return handle

    async def index(self, request: Any) -> Any:
        """Reply with the page. A token in the address becomes a cookie, and the browser is sent to
        the address without it, so that it is not left in the history.
        """
        if "token" not in request.query_params:
            return _reply(
                self._page,
                "text/html",
                headers={"content-security-policy": "frame-ancestors 'none'"},
            )
        reply = _reply("", "text/plain", status=303, headers={"location": "/"})
        if self._access.token is not None:
            cookie = cookie_name(request.headers["host"])
            reply.set_cookie(cookie, self._access.token, httponly=True, samesite="strict")
        return reply

    async def upload(self, request: Any) -> Any:
        """Keep the photo in a request's body, and reply with its name and size; ``x-name`` is the
        file's, URL-quoted. ``Limits.decoders`` at a time, one left to other visitors.
        """
        limits = self._service.limits
        name = unquote(request.headers.get("x-name", ""))
        async with self._body(request, "photo", limits.upload) as content:
            decoders = self._decoders_of.setdefault(
                _address_of(request), asyncio.Semaphore(max(1, limits.decoders - 1))
            )
            # a photo takes hundreds of megabytes while it is decoded
            async with decoders, self._decoders:
                return _json(await self._in_thread(self._service.upload, content, name))

    @asynccontextmanager
    async def _body(self, request: Any, what: str, max_bytes: int) -> AsyncIterator[bytes]:
        """Read the body of a web request, which messages call ``what``. Until the block ends, it
        counts against ``Limits.pending``.
        """
        seconds = self._service.limits.arrival
        body = bytearray()
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._read(request, what, max_bytes, body)
            yield bytes(body)
        except TimeoutError:
            if not limit.expired():  # it came from the block
                raise
            raise requests.TooSlowError(
                f"{what} must arrive within {seconds:g} seconds, but did not; make it smaller"
            ) from None
        finally:
            self._pending[_address_of(request)] -= len(body)
            self._pending += Counter()  # which forgets addresses without any

    async def _read(self, request: Any, what: str, max_bytes: int, body: bytearray) -> None:
        """Add the parts of a request's body to ``body`` as they arrive, and count them."""
        address = _address_of(request)
        most = self._service.limits.pending
        async for part in request.stream():
            body += part
            self._pending[address] += len(part)
            requests.check_byte_count(what, len(body), max_bytes)
            # one visitor alone must not keep the others from sending
            if self._pending[address] > most / 2 or self._pending.total() > most:
                raise requests.BusyError(
                    f"{what} must wait, since too much is being sent; try again in a moment"
                )

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread of the app, so that other requests are answered meanwhile."""
        call = partial(function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._service.threads, call)

    def picture(self, function: Callable[[str], bytes]) -> Handler:
        """Return a handler that replies with a JPEG, which ``function`` returns for the name in the
        address."""

        async def handle(request: Any) -> Any:
            content = await self._in_thread(function, request.path_params["name"])
            return _reply(content, "image/jpeg")

        return handle

    async def _values(self, request: Any) -> dict[str, Any]:
        """Return the JSON object in the body of a request of the page."""
        async with self._body(request, "request", self._service.limits.body) as body:
            with suppress(ValueError, RecursionError):
                values = json.loads(body)
                if isinstance(values, dict):
                    return values
        raise ExplainError("request must be an object of JSON, got something else; use the page")

    def call(self, function: Callable[[Any], Any]) -> Handler:
        """A handler that calls ``function`` with a request's JSON object, in a thread, and replies
        with its Starlette response, or its plain values as JSON.
        """

        async def handle(request: Any) -> Any:
            result = await self._in_thread(function, await self._values(request))
            return result if callable(result) else _json(result)

        return handle

    def steps(self, begin: Callable[[Any, SendStep], str]) -> Handler:
        """A handler that streams an answer's steps as lines of JSON until one with ``end``;
        ``begin`` queues the task and names the job, which is dropped when the reply ends.
        """

        async def handle(request: Any) -> Any:
            """Queue the task of a request, and stream its steps to the browser.
            The steps come from worker threads through a queue of this request's event loop.
            """
            from starlette.responses import StreamingResponse

            loop = asyncio.get_running_loop()
            queue: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

            def send(step: Mapping[str, Any]) -> None:  # from any thread
                with suppress(RuntimeError):  # the app has ended meanwhile
                    loop.call_soon_threadsafe(queue.put_nowait, step)

            name = await self._in_thread(begin, await self._values(request), send)

            async def lines() -> AsyncIterator[str]:
                """Yield each step as a line of JSON until the last; drop the job at the end, also
                if the visitor has left."""
                step: Mapping[str, Any] = {}
                try:
                    while not step.get("end"):
                        step = await queue.get()
                        yield json.dumps(step, separators=(",", ":"), allow_nan=False) + "\n"
                finally:
                    self._service.drop(name)

            return StreamingResponse(lines(), media_type="application/x-ndjson", headers=HEADERS)

        return handle

    def download(self, content_of: Callable[[str], str | bytes], ending: str, kind: str) -> Handler:
        """A handler whose reply the browser saves as the file ``STEM-explained.ENDING``: what
        ``content_of`` returns for the name of a kept answer; ``kind`` is the media type."""

        def respond(values: Any) -> Any:
            name = str(values.get("answer"))
            file = quote(f"{self._service.stem(name)}-explained.{ending}")
            disposition = f"attachment; filename*=UTF-8''{file}"
            return _reply(content_of(name), kind, headers={"content-disposition": disposition})

        return self.call(respond)


BACKLOG = 128


def address(host: str, port: int, token: str | None = None) -> str:
    """The URL at which a browser opens the app; IPv6 addresses get brackets."""
    host_in_url = f"[{host}]" if ":" in host else host
    return f"http://{host_in_url}:{port}/{f'?token={token}' if token else ''}"


def access_for(host: str) -> Access:
    """Return who may use the app that listens at ``host``: at a loopback address this machine,
    without a token; at any other address everybody who has a new random token."""
    loopback = host.lower() == "localhost"
    with suppress(ValueError):
        loopback = ipaddress.ip_address(host).is_loopback
    if loopback:
        return Access((*LOCAL, host.lower()))
    return Access((*LOCAL, host.lower(), socket.gethostname().lower()), secrets.token_urlsafe(24))


def bound(host: str, port: int) -> socket.socket:
    """Return a socket on which the web app listens, already open: its port is known before the
    server starts, and an address in use is refused in one line; port 0 takes a free one.
    """
    try:
        # a place is an address and a port, and of IPv6 two numbers more
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise AppError(
            f"address {host}:{port} cannot be listened at: {reason}; choose another --port"
        ) from None


def server(application: Any) -> Any:
    """Return a server of uvicorn for the app, with the limits of `explain.app.connections`.
    Raises `AppError` if uvicorn is not installed.
    """
    uvicorn = _package("uvicorn")
    http_protocol = _package("uvicorn.protocols.http.h11_impl").H11Protocol
    config = uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        http=limited(http_protocol),
        ws="none",
        timeout_graceful_shutdown=1,  # second
        proxy_headers=False,  # in which anybody may claim another address
        limit_concurrency=CONNECTIONS + 1,  # at which uvicorn refuses: `limited` comes before
    )
    server = uvicorn.Server(config)
    # Once it ends, it reports each answer that it cuts off by a traceback.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
    return server


def listen(
    application: Any, bound_socket: socket.socket, on_start: Callable[[], None] = lambda: None
) -> None:
    """Run the web server for the app on a socket of `bound` until an interrupt (Ctrl-C).
    ``on_start`` is called once before it, to print the address.
    """
    own_server = server(application)
    on_start()
    own_server.run(sockets=[bound_socket])
