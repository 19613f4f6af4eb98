"""Pieces of a run whose process dies are tried again, and a photo that ends each of them is found out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from explain.runs.places import Place
from explain.runs.sources import Entry

BEGUN = "_begun-"
TOGETHER = 2  # attempts at a piece as a whole: a machine may be lost without any photo's fault


def key_of(names: Sequence[str]) -> str:
    """Return a name for a piece, by the photos in it."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]


@dataclass
class Attempt:
    """One attempt at a piece.

    ``alone`` says that the photos are to be explained one after the other, since attempts at all together came to no
    end; ``ended`` has those during which the process died then.
    """

    place: Place
    file: str
    before: int = 0
    ended: list[str] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        return self.before >= TOGETHER

    def begin(self, photo: str | None = None) -> None:
        """Note that the piece is begun, or this photo of it alone: who comes after us has to know."""
        found = {"attempts": self.before + 1, "ended": self.ended, "now": photo}
        self.place.write(self.file, json.dumps(found).encode())


@contextmanager
def attempt(place: Place, entries: Sequence[Entry]) -> Iterator[Attempt]:
    """An attempt at a piece; nothing is left of it when the block ends, but by the death of the process."""
    file = f"{BEGUN}{key_of([entry.name for entry in entries])}.json"
    content = place.read(file)
    found = Attempt(place, file)
    if content is not None:
        before = json.loads(content)
        found.before, found.ended = before["attempts"], [*before["ended"], *filter(None, [before["now"]])]
    found.begin()
    try:
        yield found
    except Exception:  # not an interrupt: it may be the end of the process, which is what the file is for
        place.remove(file)
        raise
    place.remove(file)
