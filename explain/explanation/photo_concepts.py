"""`PhotoConcepts`: the concepts that a layer sees in one photo; as a picture, files and a
record."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from explain._utils.errors import keywords
from explain._utils.html import picture_html
from explain.attribution import records
from explain.attribution.concepts import Concepts, name_concepts
from explain.attribution.pictures import Scene, array
from explain.data.boxes import Box
from explain.data.files import Files, slug
from explain.data.scans import stem_of
from explain.render import captions, overlays
from explain.targets.outputs import percent


@dataclass(frozen=True, eq=False)
class PhotoConcepts:
    """The concepts that a layer sees in one photo; in a notebook they show themselves. It unpacks
    into ``picture`` and ``concepts``. ``box`` is the part of the photo that the model saw.
    """

    concepts: Concepts
    photo: Image.Image = field(repr=False)
    source: str | None
    origin: records.ModelOrigin = field(repr=False)
    box: Box = field(repr=False)
    categories: Sequence[str] | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Any]:
        """Yield the picture and the concepts: ``picture, concepts = explainer.concepts(photo)``."""
        return iter((self.picture, self.concepts))

    @property
    def labels(self) -> list[str]:
        """A label for each concept: the names of the classes that it contributes most to."""
        return name_concepts(self.concepts, self.categories)

    @property
    def title(self) -> str:
        """The title of pictures: the number of concepts and the layer."""
        count = len(self.concepts)
        return f"{count} concept{'s' * (count > 1)} in {self.concepts.layer}"

    @property
    def picture(self) -> Image.Image:
        """The photo with each place in the colour of its strongest concept, and below a line for
        each concept with its share and classes. A small photo is enlarged."""
        concepts = self.concepts
        scene = Scene(self.photo, box=self.box, seen=(self.box,)).enlarged(
            captions.enlargement(self.photo.size)
        )
        model = self.origin.name.split(" ")[0]
        return overlays.concepts(
            scene.photo,
            array(concepts.heatmaps[0]),
            scene.box,
            self.labels,
            shares=concepts.shares,
            title=self.title,
            detail=f"{model} · {percent(concepts.error)} of the layer left over",
        )

    def record(self) -> dict[str, Any]:
        """Return the photo, the model, the layer and the concepts in plain values, for a JSON file;
        ``kind`` tells this record from those of attributions, which `explain.load` reads."""
        concepts = self.concepts
        maps = array(concepts.maps[0])
        parts = zip(concepts.shares, concepts.classes(5).tolist(), self.labels, strict=True)
        return {
            "format": records.FORMAT,
            "kind": "concepts",
            **records.origin_of(self.photo, self.source, self.origin, self.box, concepts.size),
            "layer": concepts.layer,
            "error": concepts.error,
            "concepts": [
                {"share": share, "classes": best, "label": label} for share, best, label in parts
            ],
            "values": records.shape_and_digest(maps),
        }

    @keywords()
    def save(
        self, folder: str | os.PathLike[str], *, stem: str | None = None, overwrite: bool = False
    ) -> list[Path]:
        """Write the files of a photo's K concepts: the picture (PNG), the maps ``(K, h, w)`` and
        the vectors ``(K, C)`` (``.npy``), and a record (JSON).

        The names begin with ``stem``, by default the photo's own name. Each file appears complete
        or not at all.

        Returns:
            The paths, in that order.

        Raises:
            OutputError: a file is there already and ``overwrite`` is not set, or the folder cannot
                be written; then nothing has been written.
        """
        name = f"{slug(stem or (stem_of(self.source) if self.source else 'image'))}-concepts"
        files = Files(folder, overwrite=overwrite)
        files.add_picture(f"{name}.png", self.picture)
        files.add_array(f"{name}.npy", array(self.concepts.maps[0]))
        files.add_array(f"{name}-vectors.npy", array(self.concepts.vectors))
        files.add_json(f"{name}.json", self.record())
        return files.write()

    def _repr_html_(self) -> str:
        """Return what a notebook displays: the picture, with the concepts and their shares as its
        alternative text."""
        lines = (
            f"{label} ({share:.0%})"
            for label, share in zip(self.labels, self.concepts.shares, strict=True)
        )
        return picture_html(self.picture, f"{self.title}: {', '.join(lines)}")
