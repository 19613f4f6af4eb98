"""What somebody may have meant who misspelt a name."""

import difflib
import re
from collections.abc import Iterable


def did_you_mean(name: str, candidates: Iterable[str], count: int = 3) -> str:
    """Return a clause that suggests the closest of ``known`` names for a misspelt one, or lists the
    first few.

    Capitals, dashes, dots, spaces and underlines make no difference.

    >>> did_you_mean("gradcan", ["gradcam", "saliency"])
    "did you mean 'gradcam'?"
    >>> did_you_mean("Grad-CAM", ["xgradcam", "gradcam"])
    "did you mean 'gradcam'?"
    >>> did_you_mean("zzz", ["gradcam", "saliency"])
    'known: gradcam, saliency'
    """
    names = list(dict.fromkeys(candidates))
    close = close_to(name, names, count)
    if close:
        return f"did you mean {' or '.join(repr(match) for match in close)}?"
    if not names:
        return "none is known"
    return f"known: {', '.join(names[:8])}" + (
        f" and {len(names) - 8} more" if len(names) > 8 else ""
    )


def close_to(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the ``known`` names that a misspelt one may stand for, the closest first; one that is
    the same, alone.

    >>> close_to("centre", ["center", "whole"])
    ['center']
    """
    plain = {
        _plain(candidate): candidate for candidate in reversed(list(dict.fromkeys(candidates)))
    }
    if _plain(name) in plain:
        return [plain[_plain(name)]]
    return [
        plain[match]
        for match in difflib.get_close_matches(_plain(name), list(plain), n=count, cutoff=0.6)
    ]


def _plain(name: str) -> str:
    return re.sub(r"(?<=\w)[-_. ]+(?=\w)", "", name.casefold())
