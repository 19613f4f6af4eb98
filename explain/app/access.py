"""Who may use the app: this machine, or who has the token; never a page of another site."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

COOKIE = "explain-token"
HEADER = "x-explain"
"""A header that the page sends with every request that changes something: other sites cannot add it."""
LOCAL = ("localhost", "127.0.0.1", "::1")
_OTHER_SITE = (403, "requests from other sites are refused; open the app itself")


@dataclass(frozen=True)
class Access:
    """Which requests are allowed.

    ``hosts`` are the names of the app in the ``Host`` header. With a ``token``, IP addresses are allowed as well.
    Other names are refused: another site's name may be pointed at this machine. Without a token, the app is for this
    machine alone.
    """

    hosts: tuple[str, ...] = LOCAL
    token: str | None = None

    def refusal(self, method: str, headers: Mapping[str, str], token: str | None = None) -> tuple[int, str] | None:
        """Return the status and message with which a request is refused; None where it is allowed.

        ``headers`` have their names in lower case; ``token`` is that of the address or of the cookie.

        >>> Access().refusal("GET", {"host": "127.0.0.1:8000"})
        >>> Access().refusal("GET", {"host": "evil.example"})
        (421, 'host must be a name of this machine; open the address that explain serve has printed')
        """
        host, site = headers.get("host", ""), headers.get("sec-fetch-site", "same-origin")
        if not self._is_known(host):
            return 421, "host must be a name of this machine; open the address that explain serve has printed"
        # A link on another site may open the page: the other site learns nothing by it.
        mode = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
        if site not in ("same-origin", "none") and (method, *mode) != ("GET", "navigate", "document"):
            return _OTHER_SITE
        if "origin" in headers and headers["origin"] not in (f"http://{host}", f"https://{host}"):
            return _OTHER_SITE
        if method != "GET" and headers.get(HEADER) != "1":
            return 403, f"requests that change something must have the header {HEADER}: 1; use the page"
        if self.token is not None and not self._is_token(token or ""):
            return 401, "a token is needed; open the address that explain serve has printed"
        return None

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), str(self.token).encode())

    def _is_known(self, host: str) -> bool:
        name = name_of(host)
        if name is None or name in self.hosts:
            return name is not None
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.token is not None


def name_of(host: str) -> str | None:
    """Return the name in a ``Host`` header, without its port; None where there is none.

    >>> name_of("LocalHost:8000"), name_of("[::1]:8000"), name_of("a b"), name_of("x@127.0.0.1")
    ('localhost', '::1', None, None)
    """
    found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+))(?::\d{1,5})?", host.lower())
    return found and (found[1] or found[2])
