"""What needs the model: channels, concepts that photos share, concept vectors of examples; and tables of an insight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from explain._utils.errors import ExplainError, RunError, printable
from explain.hooks.layer_names import Where
from explain.insight import channels as patches
from explain.insight import directions
from explain.insight import shared_concepts as shared
from explain.insight.reattribution import RunPhotos
from explain.runs.files import source_of

CHANNELS = (
    "The channels of a layer that do most for a class, and the parts of photos that excite each one most. The weight "
    "is what the score of the class gets from the channel, to first order."
)
CONCEPTS = (
    "What a layer's feature maps are made of in all photos: parts that are there or not, never negative. The share is "
    "how much of the layer each makes up."
)
DIRECTION = (
    "Whether the class is read from what the examples have in common. p is the share of concepts of random photos with "
    "as large a gain. The layer knows the concept if it tells examples apart that it was not given: 50% is chance."
)


WIDEST = 50  # letters of a column


@dataclass(frozen=True)
class TableSection:
    """A table with its title, what it says, what is said where it is empty, and what its picture is called."""

    title: str
    about: str
    rows: Sequence[Sequence[str]]
    nothing: str = "none"
    picture: str = ""

    @property
    def lines(self) -> list[str]:
        """The table as lines for people, below its title."""
        return [self.title, *(aligned(self.rows) if len(self.rows) > 1 else [f"  {self.nothing}"])]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines: texts at the left of their columns.

    >>> aligned([["a", "bcd"], ["ef", "g"]])
    ['  a   bcd', '  ef  g']
    """
    plain = [[printable(cell) for cell in row] for row in rows]
    widths = [min(WIDEST, max(len(row[i]) for row in plain)) for i in range(len(plain[0]))]
    return [
        "  " + "  ".join(_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in plain
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


@dataclass(frozen=True, eq=False)
class ModelInsight:
    """Results that need the model; None is what was not requested."""

    channels: patches.ChannelReport | None = None
    concepts: shared.SharedConcepts | None = None
    direction: directions.Direction | None = None
    photos: RunPhotos | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        found: Mapping[str, Any] = {
            "channels": None if self.channels is None else self.channels.to_dict(),
            "concepts": None if self.concepts is None else self.concepts.to_dict(),
            "direction": None if self.direction is None else self.direction.to_dict(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def parts(self, most: int = 10) -> list[TableSection]:
        """The tables."""
        found = []
        if self.channels is not None:
            title = f"What channels of {self.channels.layer} see, by weight for {self.channels.target}"
            found.append(TableSection(title, CHANNELS, patches.table_rows(self.channels, most), picture="channels"))
        if self.concepts is not None:
            title = f"Concepts of {self.concepts.layer} in {self.concepts.photos} photos"
            left = f" {self.concepts.error:.0%} of the layer is left over."
            found.append(TableSection(title, CONCEPTS + left, shared.table_rows(self.concepts), picture="concepts"))
        if self.direction is not None:
            found.append(TableSection("A concept from examples", DIRECTION, directions.table_rows(self.direction)))
        return found

    def pictures(self) -> dict[str, Image.Image]:
        """Patches of channels and maps of concepts, where photos can be drawn."""
        found: dict[str, Image.Image] = {}
        for name, each in (("channels", self.channels), ("concepts", self.concepts)):
            if each is None or self.photos is None:
                continue
            try:
                found[name] = each.picture(self.photos)
            except ExplainError as error:  # photos that are tensors, or gone since
                self.photos.missing[name] = str(error)
        return found


def insight_of_model(
    photos: RunPhotos | None,
    *,
    channels: int = 0,
    concepts: int = 0,
    examples: Any = None,
    target: int | str | None = None,
    layer: Where | None = None,
) -> ModelInsight:
    """Compute what is requested of the model; arguments as for `explain.Run.insight`.

    Raises:
        RunError: something is requested without a model or its class, or an argument has no effect.
    """
    requested = [name for name, value in (("channels", channels), ("concepts", concepts)) if value]
    requested += ["examples"] if examples is not None else []
    for name, value in (("target", target), ("layer", layer)):
        if value is not None and not requested:
            raise RunError(f"{name} has no effect without channels, concepts or examples; give one of them")
    if not requested:
        return ModelInsight()
    if photos is None:
        raise RunError(f"{requested[0]} must have the model, got none; give the explainer of the run")
    if examples is not None and target is None:
        raise RunError("target must say of which class the examples may be a reason, got none; give a class")
    if target is not None and requested == ["concepts"]:
        raise RunError("target has no effect with concepts, which all photos share; leave it out")
    return ModelInsight(
        channels=patches.channels(photos, target, layer=layer, count=channels) if channels else None,
        concepts=shared.shared_concepts(photos, concepts, layer=layer) if concepts else None,
        direction=None if examples is None or target is None else directions.concept_direction(
            photos, _photos_of(examples), target, layer=layer
        ),
        photos=photos,
    )  # fmt: skip


def _photos_of(examples: Any) -> list[Any]:
    """The photos of a source, none of which may be missing."""
    source, found = source_of(examples), []
    for entry in source.entries():
        if entry.problem is not None:
            raise RunError(f"examples must be readable, but {entry.name!r} is not ({entry.problem}); remove it")
        found.append(source.read(entry).image)
    return found
