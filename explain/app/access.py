"""Who may ask: this machine, or who has the token; and never a page from elsewhere."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

COOKIE = "explain-token"
MARK = "x-explain"
"""A header that the page sends with every request that does something: other sites cannot send it unasked."""
LOCAL = ("localhost", "127.0.0.1", "::1")
_OWN = ("same-origin", "none")


@dataclass(frozen=True)
class Access:
    """Which requests are answered.

    ``hosts`` are the names that the app may be called by, besides addresses where it has a ``token``; names from
    elsewhere are those of a page that wants to pass for the app. Without a token, it is for this machine alone.
    """

    hosts: tuple[str, ...] = LOCAL
    token: str | None = None

    def refusal(self, method: str, headers: Mapping[str, str], *, secret: str | None = None) -> tuple[int, str] | None:
        """Say with which status and words a request is refused; None where it may pass.

        ``headers`` have their names in lower case; ``secret`` is the token in the address.

        >>> Access().refusal("GET", {"host": "127.0.0.1:8000"})
        >>> Access().refusal("GET", {"host": "evil.example"})
        (421, 'host must be a name of this machine; open the address that explain serve has printed')
        """
        if not self._is_known(headers.get("host", "")):
            return 421, "host must be a name of this machine; open the address that explain serve has printed"
        if headers.get("sec-fetch-site", "same-origin") not in _OWN and not _opens_a_page(method, headers):
            return 403, "requests from other sites are refused; open the app itself"
        if "origin" in headers and not self._is_own(headers["origin"], headers.get("host", "")):
            return 403, "requests from other sites are refused; open the app itself"
        if method != "GET" and headers.get(MARK) != "1":
            return 403, f"requests that do something must have the header {MARK}: 1; use the page"
        if self.token is not None and not self._has_token(headers, secret):
            return 401, "a token is needed; open the address that explain serve has printed"
        return None

    def _is_known(self, host: str) -> bool:
        name = name_of(host)
        if name is None:
            return False
        return name in self.hosts or (self.token is not None and _is_address(name))

    def _is_own(self, origin: str, host: str) -> bool:
        return origin in (f"http://{host}", f"https://{host}")

    def _has_token(self, headers: Mapping[str, str], secret: str | None) -> bool:
        given = secret or cookie_in(headers.get("cookie", "")) or ""
        return hmac.compare_digest(given.encode("utf-8", "replace"), str(self.token).encode("utf-8"))


def name_of(host: str) -> str | None:
    """The name in a ``Host`` header, without its port; None where it is none.

    >>> name_of("LocalHost:8000"), name_of("[::1]:8000"), name_of("a b"), name_of("x@127.0.0.1")
    ('localhost', '::1', None, None)
    """
    found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+))(?::\d{1,5})?", host.lower())
    return found and (found[1] or found[2])


def cookie_in(header: str) -> str | None:
    """The token in a ``Cookie`` header."""
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return None
    return found.value if found is not None else None


def _opens_a_page(method: str, headers: Mapping[str, str]) -> bool:
    """Whether somebody follows a link to the app: that shows them the page, and tells the other site nothing."""
    return (
        method == "GET" and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
