"""What somebody may have meant who misspelt a name."""

import difflib
import re
from collections.abc import Iterable


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of an error about an unknown name: the closest candidates, else the first eight.
    Capitals, dashes, dots, spaces and underlines make no difference."""
    names = list(dict.fromkeys(candidates))
    close = close_to(name, names)
    if close:
        return f"did you mean {' or '.join(repr(match) for match in close)}?"
    if not names:
        return "none is known"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"known: {', '.join(names[:8])}{more}"


def close_to(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return at most ``count`` candidates that a misspelt name may stand for, the closest first; a
    candidate that differs only in capitals or marks is returned alone."""
    by_plain_name: dict[str, str] = {}
    for candidate in candidates:
        by_plain_name.setdefault(_plain(candidate), candidate)
    plain = _plain(name)
    if plain in by_plain_name:
        return [by_plain_name[plain]]
    matches = difflib.get_close_matches(plain, by_plain_name, n=count, cutoff=0.6)
    return [by_plain_name[match] for match in matches]


def _plain(name: str) -> str:
    """A name without what makes no difference between names: capitals, and dashes, dots, spaces and
    underlines between letters."""
    return re.sub(r"(?<=\w)[-_. ]+(?=\w)", "", name.casefold())
