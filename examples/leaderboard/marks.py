"""Images whose evidence is known: crops of photographs with small squares in them that decide the
class.

An image has class 1 or 0. It depends on the squares alone, by one of seven rules (`KINDS`):

contrast   a bright pattern of two colours is there
faint      a pattern is there that changes the brightness of the photo by a tenth
texture    a square with upright stripes, of any two colours, is there
grey       a square of one colour is there: mid grey, which is zero for the network
and        two patterns are there; one of them alone does not count
xor        one of two patterns is there, but not both
absence    there is a frame, and the pattern that is in it in class 0 is missing

Decoys are squares of the same sort that decide nothing: other patterns, stripes that lie, other
colours, the pattern without its frame. So what is looked for is one property, and not whatever
stands out.

Photos for training are crops of the left part of the pictures in ``assets``, those for testing
of the right part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

ASSETS = Path(__file__).resolve().parents[2] / "assets"
PICTURES = ("astronaut.png", "chelsea.png", "coffee.png", "grace_hopper.jpg", "rocket.jpg")
KINDS = ("contrast", "faint", "texture", "grey", "and", "xor", "absence")
DOTS = 4  # of a pattern, along each side
DOT = {32: 2, 64: 3}  # pixels of a dot, by the side of the image
CELL = {32: 10, 64: 16}  # pixels of the places that squares lie in; they never overlap
PARTS = 4  # squares of an image that is explained
FAINT = 0.4  # in standard deviations: a tenth of the range from black to white
COLOURS = ((1.0, 0.9, 0.0), (0.0, 0.1, 0.8))
SPLIT = 0.6  # of the width of a picture is for training

PATTERNS = {
    "checks": ((1, 0, 1, 0), (0, 1, 0, 1), (1, 0, 1, 0), (0, 1, 0, 1)),
    "corner": ((1, 1, 1, 1), (1, 0, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0)),
    "rows": ((1, 1, 1, 1), (0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)),
    "cross": ((0, 1, 1, 0), (1, 1, 1, 1), (1, 1, 1, 1), (0, 1, 1, 0)),
}
MARKS = ("corner", "cross")
DECOYS = ("checks", "rows")  # they have more edges than the marks


@dataclass(frozen=True)
class Square:
    """What lies at a place of an image ``(3, s, s)``, and what lies there without it.

    ``margin`` pixels at its edges are no part of the evidence (the frame of a missing pattern).
    """

    top: int
    left: int
    shown: torch.Tensor
    hidden: torch.Tensor
    margin: int = 0

    def mask(self, side: int) -> torch.Tensor:
        """The evidence's place ``(H, W)``."""
        size = self.shown.shape[-1]
        where = torch.zeros(side, side, dtype=torch.bool)
        rows = slice(self.top + self.margin, self.top + size - self.margin)
        columns = slice(self.left + self.margin, self.left + size - self.margin)
        where[rows, columns] = True
        return where


@dataclass(frozen=True)
class Scene:
    """A photo ``(3, H, W)`` with squares in it, its class, and which squares are its evidence."""

    photo: torch.Tensor
    label: int
    squares: tuple[Square, ...]
    evidence: tuple[int, ...]

    @property
    def side(self) -> int:
        return self.photo.shape[-1]

    @property
    def parts(self) -> torch.Tensor:
        """The places of all squares ``(M, H, W)``."""
        return torch.stack([square.mask(self.side) for square in self.squares])

    @property
    def mask(self) -> torch.Tensor:
        """The places of the evidence ``(H, W)``."""
        return self.parts[list(self.evidence)].any(0)

    def image(self, kept: Sequence[bool] | None = None) -> torch.Tensor:
        """The image ``(3, H, W)``, of the squares only those that are kept."""
        x = self.photo.clone()
        for number, square in enumerate(self.squares):
            size = square.shown.shape[-1]
            content = square.shown if kept is None or kept[number] else square.hidden
            x[:, square.top : square.top + size, square.left : square.left + size] = content
        return x

    def without_each_set(self) -> torch.Tensor:
        """An image for each set of squares ``(2 ** M, 3, H, W)``: bit i of its number stands for
        square i."""
        total = len(self.squares)
        images = []
        for number in range(2**total):
            kept = [bool(number >> place & 1) for place in range(total)]
            images.append(self.image(kept))
        return torch.stack(images)


@cache
def pictures() -> list[torch.Tensor]:
    """The photographs ``(3, H, W)`` in [0, 1], with 256 pixels along the shorter side."""
    loaded = []
    for name in PICTURES:
        with Image.open(ASSETS / name) as opened:
            pixels = np.asarray(opened.convert("RGB"), np.float32) / 255
        picture = torch.from_numpy(pixels).permute(2, 0, 1)
        scale = 256 / min(picture.shape[1:])
        smaller = F.interpolate(picture[None], scale_factor=scale, mode="area")
        loaded.append(smaller[0])
    return loaded


def photo(side: int, part: str, generator: torch.Generator) -> torch.Tensor:
    """A random crop ``(3, side, side)``, flipped and with its channels shuffled; mid grey is zero,
    white two."""

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    picture = pictures()[integer(0, len(PICTURES) - 1)]
    height, width = picture.shape[1:]
    border = int(SPLIT * width)
    start = 0 if part == "train" else border
    end = border if part == "train" else width
    size = integer(40, min(96, end - start))
    top = integer(0, height - size)
    left = integer(start, end - size)
    crop = picture[:, top : top + size, left : left + size]
    crop = F.interpolate(crop[None], (side, side), mode="bilinear", antialias=True)[0]
    crop = crop[torch.randperm(3, generator=generator)]
    flipped = crop.flip(2) if integer(0, 1) else crop
    return (flipped - 0.5) / 0.25


def dots(name: str, side: int) -> torch.Tensor:
    """A pattern of zeros and ones ``(s, s)``."""
    pattern = torch.tensor(PATTERNS[name], dtype=torch.float32)
    return pattern.repeat_interleave(DOT[side], 0).repeat_interleave(DOT[side], 1)


def colour(values: Sequence[float]) -> torch.Tensor:
    return (torch.tensor(values).view(3, 1, 1) - 0.5) / 0.25


def bright(name: str, side: int) -> torch.Tensor:
    """A pattern in its two colours ``(3, s, s)``."""
    return torch.where(dots(name, side).bool(), colour(COLOURS[0]), colour(COLOURS[1]))


def stripes(upright: bool, side: int, generator: torch.Generator) -> torch.Tensor:
    """Stripes one dot wide, of two random colours with a random phase ``(3, s, s)``."""
    lines = dots("rows", side).roll(int(torch.randint(0, 4, (), generator=generator)), 0)
    lines = lines.T if upright else lines
    middle = torch.rand(3, 1, 1, generator=generator) * 2 - 1
    change = torch.rand(3, 1, 1, generator=generator) * 2 - 1
    change = change / change.norm() * 1.5
    return middle + change * (2 * lines - 1)


def plain_colour(side: int, generator: torch.Generator) -> torch.Tensor:
    """One random colour that is not mid grey ``(3, s, s)``."""
    value = torch.rand(3, generator=generator) * 4 - 2
    value = value / value.abs().max() * (0.7 + 1.3 * torch.rand((), generator=generator))
    return value.view(3, 1, 1).expand(3, DOTS * DOT[side], DOTS * DOT[side])


def framed(filled: bool, behind: torch.Tensor, side: int) -> torch.Tensor:
    """A frame one dot wide; in it a pattern of three dots, or what is behind ``(3, s, s)``."""
    dot = DOT[side]
    size = behind.shape[-1]
    content = colour(COLOURS[0]).expand(3, size, size).clone()
    pattern = bright("checks", side)[:, : 3 * dot, : 3 * dot]
    middle = behind[:, dot : size - dot, dot : size - dot]
    content[:, dot : size - dot, dot : size - dot] = pattern if filled else middle
    return content


def content(kind: str, name: str, behind: torch.Tensor, generator: torch.Generator, side: int):
    """What a square shows, for a mark or a decoy by its name ``(3, s, s)``."""
    if kind == "faint":
        return behind + FAINT * (2 * dots(name, side) - 1)
    if kind == "texture":
        return stripes(name in MARKS, side, generator)
    if kind == "grey" and name in MARKS:
        return torch.zeros_like(behind)
    if kind == "grey":
        return plain_colour(side, generator)
    return bright(name, side)


def marks_of(kind: str, label: int, generator: torch.Generator) -> tuple[str, ...]:
    """The names of the marks that an image of a class has."""
    first, second = MARKS
    choice = int(torch.randint(0, 3, (), generator=generator))
    if kind == "and":
        return MARKS if label else ((first,), (second,), ())[choice]
    if kind == "xor":
        one = first if choice == 0 or (choice == 2 and label) else second
        return (one,) if label else ((), MARKS, MARKS)[choice]
    return (first,) if label else ()


def scene(
    kind: str, side: int, part: str, label: int, generator: torch.Generator, decoys: int
) -> Scene:
    """An image of a class with so many decoys."""
    background = photo(side, part, generator)
    names = () if kind == "absence" else marks_of(kind, label, generator)
    if kind == "absence":
        wanted = ["frame", *["checks"] * decoys]
    else:
        wanted = [*names, *(DECOYS[number % 2] for number in range(decoys))]
    across = side // CELL[side]
    places = torch.randperm(across * across, generator=generator)[: len(wanted)].tolist()
    squares = []
    for name, place in zip(wanted, places, strict=True):
        size = (DOTS + (name == "frame")) * DOT[side]
        room = CELL[side] - size
        shift = torch.randint(0, room + 1, (2,), generator=generator).tolist()
        top = place // across * CELL[side] + shift[0]
        left = place % across * CELL[side] + shift[1]
        behind = background[:, top : top + size, left : left + size]
        if name == "frame":
            shown = framed(label == 0, behind, side)
            hidden = framed(label == 1, behind, side)
            squares.append(Square(top, left, shown, hidden, DOT[side]))
        else:
            shown = content(kind, name, behind, generator, side)
            squares.append(Square(top, left, shown, behind))
    evidence = range(1 if kind == "absence" else len(names))
    return Scene(background, label, tuple(squares), tuple(evidence))


def batch(
    kind: str, side: int, part: str, size: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``(N, 3, H, W)`` with none to three decoys, and their classes ``(N,)``."""
    generator = torch.Generator().manual_seed(seed)
    images = []
    labels = []
    for number in range(size):
        label = number % 2
        decoys = int(torch.randint(0, PARTS, (), generator=generator))
        images.append(scene(kind, side, part, label, generator, decoys).image())
        labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def explained(kind: str, side: int, seed: int) -> Iterator[Scene]:
    """Test images of which the evidence is there, each with four squares, without an end.

    All are of class 1; of "xor", each second one has both patterns and class 0.
    """
    for number in count():
        generator = torch.Generator().manual_seed(seed * 100_000 + number)
        both = kind == "xor" and number % 2 == 1
        marks = 2 if kind == "and" or both else 1
        while True:
            image = scene(kind, side, "test", 0 if both else 1, generator, PARTS - marks)
            if len(image.evidence) == marks:
                break
        yield image
