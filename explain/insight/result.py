"""`Insight`: what the maps of a run say together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from explain._utils.errors import printable
from explain.data.files import Files
from explain.insight import class_statistics as looking
from explain.insight import clusters
from explain.insight import confusions as mistakes
from explain.insight.class_statistics import ClassStatistics, percent
from explain.insight.clusters import Cluster
from explain.insight.confusions import Confusion
from explain.insight.drawing import Album, draw_clusters, draw_looks, draw_mistakes
from explain.insight.maps import RunMaps
from explain.insight.model_insight import ModelInsight, TableSection
from explain.insight.reattribution import RunPhotos
from explain.report.document import Section, document
from explain.runs.result import Run

LOOKS = (
    "The share of the evidence on the object, beside the share of the photo that the object covers: a class whose "
    "evidence is on the object has much more than that. At the border, an even map has 44%. Spread is 1 for an even "
    "map, and 0 for one place. Apart says how far a class looks elsewhere than all others: 0 to 1."
)
REASONS = (
    "Photos of one class whose maps are alike, and unlike the others of the class. What stands out by 0.5 or more is "
    "worth a look: a shortcut is often such a cluster. About 0, there is no cluster."
)
NOTABLE = 0.5  # how far a cluster stands out that is worth a look
MISTAKES = "Which class is taken for which, the most frequent first."


@dataclass(frozen=True, eq=False, repr=False)
class Insight:
    """What the maps of a run say together; it prints itself.

    ``looks`` says where each class looks, the most striking first. ``reasons`` are the clusters of maps of one class,
    those that stand out most first. ``pairs`` are the classes that are taken for others, the most frequent first.
    ``maps`` has all maps on one grid, ``further`` what one more look at the model said, if it was asked for.
    """

    run: Run
    method: str
    maps: RunMaps = field(repr=False)
    looks: Sequence[ClassStatistics]
    reasons: Sequence[Cluster]
    pairs: Sequence[Confusion]
    further: ModelInsight = field(default=ModelInsight(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "run": str(self.run.path), "method": self.method, "maps": len(self.maps), "empty": self.maps.empty,
            "repeated": self.maps.repeated, "looks": [each.to_dict() for each in self.looks],
            "reasons": [each.to_dict() for each in self.reasons], "mistakes": [each.to_dict() for each in self.pairs],
            **self.further.to_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return str(self)

    @property
    def about(self) -> str:
        """How many maps there are, and what was left out."""
        left = [f"{self.maps.empty} of zeros"] * bool(self.maps.empty)
        left += [f"{self.maps.repeated} of photos that were there twice"] * bool(self.maps.repeated)
        told = f"; left out: {', '.join(left)}" if left else ""
        return printable(f"{self.run.path}: {len(self.maps)} maps of {self.method}{told}")

    @property
    def headlines(self) -> list[str]:
        """What stands out most of each kind, in a sentence each."""
        return [printable(line) for line in (_of_looks(self.looks), _of_reasons(self.reasons), _of_pairs(self.pairs))
                if line]  # fmt: skip

    def parts(self, most: int = 10) -> list[TableSection]:
        """What there is to be told: where classes look, clusters of reasons, mistakes, and what else was asked for.

        Args:
            most: rows of each table.
        """
        few = "no class has enough photos"
        looks, reasons = looking.table_rows(self.looks, most), clusters.table_rows(self.reasons, most)
        pairs = mistakes.table_rows(self.pairs, most)
        return [
            TableSection("Where each class looks", LOOKS, looks, few, "looks"),
            TableSection("Clusters of reasons", REASONS, reasons, few, "reasons"),
            TableSection("Mistakes", MISTAKES, pairs, "none, or no labels", "mistakes"),
            *self.further.parts(most),
        ]

    def lines(self, most: int = 10) -> list[str]:
        """The tables as lines for people; see `parts`."""
        lines = [self.about, *(f"  {line}" for line in self.headlines)]
        for part in self.parts(most):
            lines += ["", *part.lines]
        return lines

    def pictures(self, source: Any = None, *, photos: bool = True) -> dict[str, Image.Image]:
        """Draw what there is to be seen: "looks", "reasons", "mistakes" where they were explained, and what was asked
        for of "channels" and "concepts".

        Args:
            source: where photos come from that had no file.
            photos: whether photos are shown beside the mean maps; without, pictures may be shown where photos may not.

        Photos that cannot be read are left out.
        """
        album = Album(RunPhotos(self.run, source=source), self.method, empty=not photos)
        found = {
            "looks": draw_looks(self.looks, self.maps, album),
            "reasons": draw_clusters(self.reasons, album),
            "mistakes": draw_mistakes(self.pairs, album),
        }
        drawn = {name: picture for name, picture in found.items() if picture is not None}
        return {**drawn, **self.further.pictures()} if photos else drawn

    def save(self, folder: str | os.PathLike[str], *, source: Any = None, overwrite: bool = False) -> list[Path]:
        """Write the pictures, ``insight.json`` and a page with all of it, ``insight.html``; return the paths.

        Args:
            folder: where to.
            source: where photos come from that had no file.
            overwrite: replace files that are there.

        Raises:
            OutputError: they cannot be written.
        """
        files = Files(folder, overwrite=overwrite)
        pictures = self.pictures(source)
        for name, picture in pictures.items():
            files.add_picture(f"{name}.png", picture)
        files.add_json("insight.json", self.to_dict())
        files.add_text("insight.html", self._page(pictures))
        return files.write()

    def _page(self, pictures: Mapping[str, Image.Image]) -> str:
        sections = [Section("Summary", "\n".join(self.headlines))] if self.headlines else []
        for part in self.parts(20):
            shown = [(pictures[part.picture], part.title)] if part.picture in pictures else []
            about = part.about if len(part.rows) > 1 else part.nothing
            sections.append(Section(part.title, about, part.rows, shown))
        return document(f"What {self.run.path.name} says", self.about, sections)


def _of_looks(looks: Sequence[ClassStatistics]) -> str:
    if not looks or looks[0].striking <= 0:
        return ""
    first = looks[0]
    if first.on_object.value >= 0:
        return (
            f"{first.target} looks away from its object most: {percent(first.on_object.value)} of the evidence is on "
            f"it, and it covers {percent(first.object_size.value)} of the photo."
        )
    return f"{first.target} looks elsewhere than all others most: their mean maps are apart by {first.apart:.2f}."


def _of_reasons(reasons: Sequence[Cluster]) -> str:
    if not reasons:
        return ""
    first = reasons[0]
    if first.stands_out < NOTABLE:
        return f"No cluster of reasons stands out: by {first.stands_out:.2f} at most, where {NOTABLE} is worth a look."
    return (
        f"{first.size} photos of {first.target} have a reason of their own ({percent(first.share)} of the class): they "
        f"stand out by {first.stands_out:.2f}."
    )


def _of_pairs(pairs: Sequence[Confusion]) -> str:
    if not pairs:
        return ""
    first = pairs[0]
    return f"{first.label} is taken for {first.prediction} most often: {first.count} of {first.of} photos."
