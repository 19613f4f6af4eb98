"""Rendered scenes of creatures that are made of exchangeable parts, in the manner of FunnyBirds.

A creature has a body and five parts: tail, crest, feet, snout and eye. Each part has four variants,
which differ in shape, colour and texture. Sixteen classes are combinations of variants; body, pose,
background and the objects lying around say nothing about the class. Whatever is removed or
exchanged, everything else stays as it is, pixel by pixel: the difference of the model's scores is
the true importance.

    scene = draw(label=3, seed=7)
    picture = render(scene)                          # (64, 64, 3), uint8
    without = render(scene.without("tail"))          # differs only where masks(scene)["tail"] is
    True

After: R. Hesse, S. Schaub-Meyer, S. Roth, FunnyBirds: A synthetic vision dataset for a part-based
analysis of explainable AI methods, ICCV 2023. Written from scratch: other creatures, another
renderer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import cv2
import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

# pixels; subpixels along each side of a pixel
SIDE = 64
FINE = 4
PARTS = ("tail", "crest", "feet", "snout", "eye")
OBJECTS = ("object 1", "object 2", "object 3")
ELEMENTS = (*PARTS, *OBJECTS)
VARIANTS = 4
CLASSES = 16
PATTERNS = 4
HUES = 4
KINDS = PATTERNS * HUES  # of backgrounds

COLOURS = {
    "red": (205, 52, 48),
    "orange": (238, 138, 34),
    "yellow": (240, 205, 52),
    "green": (62, 150, 72),
    "teal": (32, 150, 160),
    "blue": (50, 92, 190),
    "violet": (134, 72, 168),
    "pink": (232, 122, 164),
    "white": (246, 246, 240),
    "black": (40, 40, 46),
}
LOOKS = {  # colour, colour of the texture, texture; a row for each variant
    "tail": (
        ("red", "yellow", "stripes"),
        ("blue", "white", "dots"),
        ("green", "black", "plain"),
        ("violet", "orange", "checks"),
    ),
    "crest": (
        ("yellow", "red", "dots"),
        ("teal", "white", "stripes"),
        ("pink", "violet", "plain"),
        ("blue", "yellow", "checks"),
    ),
    "feet": (
        ("orange", "black", "plain"),
        ("black", "white", "dots"),
        ("teal", "yellow", "checks"),
        ("pink", "red", "stripes"),
    ),
    "snout": (
        ("yellow", "orange", "plain"),
        ("red", "white", "dots"),
        ("violet", "pink", "stripes"),
        ("green", "yellow", "checks"),
    ),
    "eye": (
        ("white", "blue", "plain"),
        ("yellow", "black", "plain"),
        ("white", "red", "plain"),
        ("teal", "black", "plain"),
    ),
}
BODIES = ((186, 168, 150), (164, 176, 186), (178, 186, 160), (196, 178, 182))


@cache
def classes() -> tuple[tuple[int, ...], ...]:
    """The variants of each class's parts. Two classes share at most two of five parts.

    Each class has two others that share exactly two parts with it, and not the same: that is what
    target sensitivity asks about.
    """
    random = np.random.default_rng(5)
    while True:
        found: list[tuple[int, ...]] = []
        for _ in range(4000):
            one = tuple(int(v) for v in random.integers(0, VARIANTS, len(PARTS)))
            if all(len(shared(one, other)) <= 2 for other in found):
                found.append(one)
            if len(found) == CLASSES:
                break
        if len(found) == CLASSES and all(rivals_in(found, label) for label in range(CLASSES)):
            return tuple(found)


def shared(one: Sequence[int], other: Sequence[int]) -> tuple[str, ...]:
    """The parts that two classes have in common."""
    return tuple(part for part, a, b in zip(PARTS, one, other, strict=True) if a == b)


def rivals_in(of: Sequence[Sequence[int]], label: int) -> list[tuple[int, int]]:
    """Pairs of classes that each share two parts with a class, and have none of these in common."""
    close = [i for i in range(len(of)) if i != label and len(shared(of[i], of[label])) == 2]
    parts = {i: set(shared(of[i], of[label])) for i in close}
    return [(i, j) for i, j in combinations(close, 2) if not parts[i] & parts[j]]


def consistent(parts: Sequence[int | None]) -> list[int]:
    """The classes that what is there of a creature's parts could belong to."""
    return [
        label
        for label, whole in enumerate(classes())
        if all(part in (None, wanted) for part, wanted in zip(parts, whole, strict=True))
    ]


@cache
def sufficient(label: int) -> tuple[tuple[str, ...], ...]:
    """The smallest sets of parts that no other class has: with one more removed, the class is
    open."""
    found: list[tuple[str, ...]] = []
    for size in range(1, len(PARTS) + 1):
        for chosen in combinations(range(len(PARTS)), size):
            names = tuple(PARTS[i] for i in chosen)
            left = [variant if i in chosen else None for i, variant in enumerate(classes()[label])]
            if not any(set(smaller) <= set(names) for smaller in found) and consistent(left) == [
                label
            ]:
                found.append(names)
    return tuple(found)


@dataclass(frozen=True)
class Scene:
    """What is in a picture. ``seed`` gives the pose, the body and the objects; ``background`` a
    kind and a seed."""

    label: int
    seed: int
    parts: tuple[int | None, ...]
    objects: tuple[bool, ...]
    background: tuple[int, int]

    def without(self, *elements: str) -> Scene:
        """The scene without some parts or objects."""
        parts = tuple(
            None if name in elements else v for name, v in zip(PARTS, self.parts, strict=True)
        )
        objects = tuple(
            there and name not in elements
            for name, there in zip(OBJECTS, self.objects, strict=True)
        )
        return replace(self, parts=parts, objects=objects)

    def exchanged(self, part: str, variant: int) -> Scene:
        """The scene with another variant of a part."""
        return replace(
            self,
            parts=tuple(
                variant if n == part else v for n, v in zip(PARTS, self.parts, strict=True)
            ),
        )

    def before(self, background: tuple[int, int]) -> Scene:
        """The scene before another background, with the same objects."""
        return replace(self, background=background)


def draw(label: int, seed: int, kind: int | None = None) -> Scene:
    """A scene of a class. Its background is of a random kind, unless it is given."""
    random = np.random.default_rng([1, label, seed])
    drawn = int(random.integers(KINDS))
    background = (drawn if kind is None else kind, int(random.integers(1 << 30)))
    return Scene(
        label, int(random.integers(1 << 30)), classes()[label], (True,) * len(OBJECTS), background
    )


# Shapes: outlines in the creature's coordinates. The body has half axes of 1 and 0.7; x is towards
# the head, y down.


def ellipse(
    x: float, y: float, width: float, height: float, start: float = 0, end: float = 360
) -> Floats:
    angles = np.radians(np.linspace(start, end, 48, endpoint=end - start < 360))
    return np.stack([x + width * np.cos(angles), y + height * np.sin(angles)], 1).astype(np.float32)


def polygon(*points: tuple[float, float]) -> Floats:
    return np.array(points, np.float32)


def tail(variant: int) -> list[Floats]:
    angles = np.linspace(-1, 1, 60)
    lobes = 0.78 + 0.2 * np.cos(angles * 3 * np.pi)
    bush = np.stack([-0.75 - lobes * np.cos(angles * 1.2), lobes * np.sin(angles * 1.2)], 1).astype(
        np.float32
    )
    return [
        [polygon((-0.8, -0.2), (-1.85, -0.85), (-1.5, 0), (-1.85, 0.85), (-0.8, 0.2))],
        [ellipse(-1.38, 0, 0.55, 0.62)],
        [polygon((-0.8, -0.14), (-1.4, -0.72), (-2.0, 0), (-1.4, 0.72), (-0.8, 0.14))],
        [np.concatenate([polygon((-0.75, 0.1), (-0.75, -0.1)), bush])],
    ][variant]


def crest(variant: int) -> list[Floats]:
    zigzag = [
        (-0.75 + 0.25 * i, -0.5 if i % 2 == 0 else -1.45 + 0.05 * abs(i - 3)) for i in range(7)
    ]
    return [
        [polygon((0.5, -0.5), (-0.1, -1.55), (-0.75, -1.2), (-0.65, -0.5))],
        [polygon(*zigzag)],
        [ellipse(-0.05, -0.55, 0.72, 0.8, 180, 359)],
        [ellipse(-0.35, -1.05, 0.32, 0.5), ellipse(0.25, -1.1, 0.32, 0.5)],
    ][variant]


def feet(variant: int) -> list[Floats]:
    def leg(x: float) -> list[Floats]:
        shaft = polygon((x - 0.1, 0.5), (x + 0.1, 0.5), (x + 0.1, 1.2), (x - 0.1, 1.2))
        return [shaft, ellipse(x + 0.12, 1.22, 0.36, 0.18)]

    comb = [(-0.75 + 0.25 * i, 0.45 if i % 2 == 0 else 1.4) for i in range(7)]
    return [
        [*leg(-0.4), *leg(0.35)],
        [ellipse(-0.45, 0.92, 0.38, 0.38), ellipse(0.45, 0.92, 0.38, 0.38)],
        [
            polygon((-0.95, 0.9), (0.95, 0.9), (1.15, 0.7), (1.15, 1.25), (-0.95, 1.25)),
            polygon((-0.35, 0.5), (0.35, 0.5), (0.35, 1.0), (-0.35, 1.0)),
        ],
        [polygon(*comb)],
    ][variant]


def snout(variant: int) -> list[Floats]:
    trunk = [
        (0.8, -0.22),
        (1.3, -0.2),
        (1.6, 0.1),
        (1.65, 0.75),
        (1.3, 0.78),
        (1.25, 0.35),
        (0.8, 0.28),
    ]
    return [
        [polygon((0.82, -0.32), (1.75, 0.08), (0.82, 0.38))],
        [ellipse(1.22, 0.05, 0.4, 0.4)],
        [polygon(*trunk)],
        [ellipse(1.3, -0.12, 0.52, 0.2), ellipse(1.25, 0.26, 0.45, 0.18)],
    ][variant]


def eye(variant: int) -> list[Floats]:
    x = 0.45
    y = -0.18
    star = [
        (x + r * np.cos(a), y + r * np.sin(a))
        for a, r in zip(np.arange(10) * 0.628, [0.42, 0.2] * 5, strict=True)
    ]
    return [
        [ellipse(x, y, 0.34, 0.34)],
        [polygon((x - 0.3, y - 0.3), (x + 0.3, y - 0.3), (x + 0.3, y + 0.3), (x - 0.3, y + 0.3))],
        [ellipse(x, y, 0.2, 0.4)],
        [polygon(*star)],
    ][variant]


SHAPES = {"tail": tail, "crest": crest, "feet": feet, "snout": snout, "eye": eye}


# Painting: layers, each a colour for every subpixel and how much of it it covers


@dataclass(frozen=True)
class Layer:
    """What covers a window of the fine picture: ``cover`` ``(h, w)`` in [0, 1], ``colour`` ``(h, w,
    3)``."""

    name: str
    window: tuple[slice, slice]
    cover: Floats
    colour: Floats


@dataclass(frozen=True)
class Pose:
    """Where the creature is: from its own coordinates to subpixels, and back."""

    matrix: Floats
    centre: Floats

    def __call__(self, points: Floats) -> Floats:
        return points @ self.matrix.T + self.centre


def pose_of(random: np.random.Generator) -> Pose:
    size = random.uniform(12.5, 15.5) * FINE
    angle = np.radians(random.uniform(-18, 18))
    flip = 1 if random.random() < 0.5 else -1
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = size * turn @ np.diag([flip, 1])
    centre = FINE * (SIDE / 2 + np.array([flip * 2.0, 1.0]) + random.uniform(-4, 4, 2))
    return Pose(matrix.astype(np.float32), centre.astype(np.float32))


def layer_of(
    name: str, pose: Pose, shapes: Sequence[Floats], look: tuple[Floats, Floats, str], light: float
) -> Layer:
    """Paint shapes with a texture, a little shade and a darker outline."""
    outlines = [pose(shape) for shape in shapes]
    points = np.concatenate(outlines)
    edge = 2 * FINE
    low = np.clip(np.floor(points.min(0)).astype(int) - edge, 0, SIDE * FINE)
    high = np.clip(np.ceil(points.max(0)).astype(int) + edge, 0, SIDE * FINE)
    width, height = np.maximum(high - low, 1)
    drawn = [np.round((outline - low) * 16).astype(np.int32) for outline in outlines]
    cover = np.zeros((height, width), np.uint8)
    line = np.zeros((height, width), np.uint8)
    cv2.fillPoly(cover, drawn, 255, cv2.LINE_AA, 4) if len(drawn) == 1 else [
        cv2.fillPoly(cover, [each], 255, cv2.LINE_AA, 4) for each in drawn
    ]
    cv2.polylines(line, drawn, True, 255, FINE, cv2.LINE_AA, 4)
    rows, columns = np.mgrid[low[1] : low[1] + height, low[0] : low[0] + width].astype(np.float32)
    place = np.stack([columns, rows], -1) - pose.centre
    u, v = np.moveaxis(place @ np.linalg.inv(pose.matrix).T.astype(np.float32), -1, 0)
    one, other, texture = look
    colour = one + (other - one) * textured(texture, u, v)[..., None]
    middle = points.mean(0)
    shade = light * (1.06 - 0.14 * (rows - middle[1]) / max(1.0, float(np.ptp(points[:, 1])) / 2))
    colour = np.clip(colour * shade[..., None], 0, 255)
    ink = (line.astype(np.float32) / 255)[..., None]
    colour = colour * (1 - ink) + 0.35 * one * ink
    window = (slice(int(low[1]), int(low[1] + height)), slice(int(low[0]), int(low[0] + width)))
    whole = np.maximum(cover, line).astype(np.float32) / 255
    inside = whole[: window[0].stop - window[0].start, : window[1].stop - window[1].start]
    return Layer(name, window, inside, colour.astype(np.float32))


def textured(texture: str, u: Floats, v: Floats) -> Floats:
    """How much of the second colour there is, at coordinates of the creature."""
    if texture == "plain":
        return np.zeros_like(u)
    if texture == "stripes":
        wave = np.sin(u * 2 * np.pi / 0.42)
    elif texture == "dots":
        wave = np.cos(u * 2 * np.pi / 0.44) + np.cos(v * 2 * np.pi / 0.44) - 0.75
    else:
        wave = np.sin(u * 2 * np.pi / 0.7) * np.sin(v * 2 * np.pi / 0.7)
    return np.clip(0.5 + 4 * wave, 0, 1)


def colour(name: str) -> Floats:
    return np.array(COLOURS[name], np.float32)


def layers(scene: Scene) -> list[Layer]:
    """What is painted on the background, from behind. What is random does not depend on which parts
    are there."""
    random = np.random.default_rng([2, scene.seed])
    pose = pose_of(random)
    light = random.uniform(0.88, 1.06)
    skin = np.array(BODIES[int(random.integers(len(BODIES)))], np.float32) + random.uniform(
        -14, 14, 3
    )
    jitter = random.uniform(-0.06, 0.06, (len(PARTS), 2)).astype(np.float32)
    found = [
        each
        for each, there in zip(objects_of(scene.seed, pose), scene.objects, strict=True)
        if there
    ]  # behind the creature
    painted = {}
    for name, variant, shift in zip(PARTS, scene.parts, jitter, strict=True):
        if variant is not None:
            first, second, texture = LOOKS[name][variant]
            look = (colour(first), colour(second), texture)
            painted[name] = layer_of(
                name, pose, [s + shift for s in SHAPES[name](variant)], look, light
            )
            if name == "eye":
                pupil = [
                    ellipse(0.47 + shift[0], -0.18 + shift[1], 0.13, 0.2 if variant == 2 else 0.15)
                ]
                dark = layer_of(name, pose, pupil, (colour(second), colour(second), "plain"), 0.8)
                painted["pupil"] = dark
    body = layer_of(
        "body", pose, [ellipse(0, 0, 1, 0.7)], (skin.astype(np.float32), skin, "plain"), light
    )
    order = ["tail", "crest", "feet", "body", "snout", "eye", "pupil"]
    painted["body"] = body
    return found + [painted[name] for name in order if name in painted]


def objects_of(seed: int, pose: Pose) -> list[Layer]:
    """Things of the parts' colours and textures that lie around, away from the creature's
    middle."""
    random = np.random.default_rng([3, seed])
    found = []
    turn = random.uniform(0, 2 * np.pi)
    for number, name in enumerate(OBJECTS):
        angle = turn + 2 * np.pi * (number + random.uniform(-0.25, 0.25)) / len(OBJECTS)
        reach = FINE * random.uniform(25, 29)
        middle = np.clip(
            pose.centre + reach * np.array([np.cos(angle), np.sin(angle)]),
            5 * FINE,
            (SIDE - 5) * FINE,
        )
        corners = int(random.choice([3, 4, 5, 40]))
        angles = 2 * np.pi * np.arange(corners) / corners + random.uniform(0, 6)
        own = Pose(
            np.eye(2, dtype=np.float32) * FINE * random.uniform(4.0, 6.5), middle.astype(np.float32)
        )
        names = random.choice(list(COLOURS)[:8], 2, replace=False)
        texture = str(random.choice(["plain", "stripes", "dots", "checks"]))
        shape = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        found.append(
            layer_of(name, own, [shape], (colour(names[0]), colour(names[1]), texture), 1.0)
        )
    return found


def background_of(kind: int, seed: int) -> Floats:
    """Light, soft patterns of four kinds in four hues: ``(SIDE, SIDE, 3)``."""
    random = np.random.default_rng([4, seed])
    pattern, hue = divmod(kind, HUES)
    base = np.array(
        [(150, 186, 214), (166, 200, 150), (222, 202, 160), (200, 176, 212)][hue], np.float32
    )
    base = base + random.uniform(-10, 10, 3).astype(np.float32)
    v, u = np.mgrid[:SIDE, :SIDE].astype(np.float32) / SIDE
    angle = random.uniform(0, np.pi)
    phase = random.uniform(0, 6, 2)
    period = random.uniform(0.14, 0.22)
    along = u * np.cos(angle) + v * np.sin(angle)
    across = -u * np.sin(angle) + v * np.cos(angle)
    blotches = cv2.GaussianBlur(random.normal(size=(SIDE, SIDE)).astype(np.float32), (0, 0), 3.5)
    wave = [
        along * 1.6 - 0.8,
        np.sin(along * 2 * np.pi / period + phase[0]),
        np.clip(blotches / max(1e-6, float(blotches.std())), -1.5, 1.5),
        np.sin(along * np.pi / period + phase[0])
        * np.sin(across * np.pi / period + phase[1])
        * 1.4,
    ][pattern]
    grain = random.normal(size=(SIDE, SIDE, 1)).astype(np.float32) * 2.5
    return np.clip(base + 20 * wave[..., None] + 14 * (0.5 - v)[..., None] + grain, 0, 255).astype(
        np.float32
    )


def shrunk(fine: Floats) -> Floats:
    """Average the subpixels of each pixel."""
    return cv2.resize(fine, (SIDE, SIDE), interpolation=cv2.INTER_AREA)


def render(scene: Scene) -> Pixels:
    """The picture ``(64, 64, 3)``."""
    behind = background_of(*scene.background)
    fine = cv2.resize(behind, (SIDE * FINE, SIDE * FINE), interpolation=cv2.INTER_LINEAR)
    for layer in layers(scene):
        window = fine[layer.window]
        window += layer.cover[..., None] * (layer.colour[: len(window), : window.shape[1]] - window)
    return np.clip(shrunk(fine) + 0.5, 0, 255).astype(np.uint8)


def visible(scene: Scene) -> dict[str, Floats]:
    """Which share of each pixel shows each part, each object, the body and the background; shares
    add up to one."""
    left = np.ones((SIDE * FINE, SIDE * FINE), np.float32)
    found: dict[str, Floats] = {}
    for layer in reversed(layers(scene)):  # from the front
        shown = np.zeros_like(left)
        window = left[layer.window]
        shown[layer.window] = layer.cover * window
        window *= 1 - layer.cover
        found[layer.name] = found.get(layer.name, 0) + shown
    return {name: shrunk(each) for name, each in {**found, "background": left}.items()}


def masks(scene: Scene) -> dict[str, Mask]:
    """Where each thing is to be seen, were it only a little: ``(64, 64)``."""
    return {name: each > 0 for name, each in visible(scene).items()}
