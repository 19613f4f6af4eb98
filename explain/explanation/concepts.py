"""`PhotoConcepts`: the concepts that a layer sees in one photo, as a picture, files and a record; and read back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from explain._utils.errors import RecordError, keywords, shown
from explain._utils.html import picture_html, png
from explain.attribution.concepts import Concepts, name_concepts
from explain.attribution.pictures import Scene, array
from explain.attribution.records import FORMAT, ModelOrigin, digest, is_number, is_size, versions
from explain.data.files import Files, slug
from explain.data.images import Box
from explain.layers.feature_maps import enlarge
from explain.render import captions, overlays


@dataclass(frozen=True, eq=False)
class PhotoConcepts:
    """The concepts that a layer sees in one photo; in a notebook they show themselves.

    It unpacks into ``picture`` and ``concepts``. ``box`` is the part of the photo that the model saw.
    """

    concepts: Concepts
    photo: Image.Image = field(repr=False)
    source: str | None
    origin: ModelOrigin = field(repr=False)
    box: Box = field(repr=False)
    categories: Sequence[str] | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.picture, self.concepts))

    @property
    def labels(self) -> list[str]:
        """The best classes of each concept."""
        return name_concepts(self.concepts, self.categories)

    @property
    def title(self) -> str:
        count = len(self.concepts)
        return f"{count} concept{'s' * (count > 1)} in {self.concepts.layer}"

    @property
    def picture(self) -> Image.Image:
        """The photo with each place in the colour of its strongest concept; each one's share and classes below."""
        found = self.concepts
        scene = Scene(self.photo, self.box, (self.box,)).enlarged(captions.enlargement(self.photo.size))
        return overlays.concepts(
            scene.photo,
            array(found.heatmaps[0]),
            scene.box,
            self.labels,
            shares=found.shares,
            title=self.title,
            detail=f"{self.origin.name.split(' ')[0]} · {found.error:.0%} of the layer left over".replace("%", " %"),
        )

    def record(self) -> dict[str, Any]:
        """Return what was done, in plain values."""
        found, maps = self.concepts, array(self.concepts.maps[0])
        parts = zip(found.shares, found.classes(5).tolist(), self.labels, strict=True)
        return {
            "format": FORMAT,
            "kind": "concepts",
            "image": {"path": self.source, "size": list(self.photo.size), "sha256": digest(self.photo.tobytes())},
            "model": self.origin.name,
            "weights": self.origin.weights,
            "preprocess": self.origin.preprocess,
            "explainer": self.origin.to_dict(),
            "input_size": list(found.size),
            "seen": asdict(self.box),
            "layer": found.layer,
            "error": found.error,
            "concepts": [{"share": share, "classes": best, "label": label} for share, best, label in parts],
            "values": {"shape": list(maps.shape), "sha256": digest(maps.tobytes())},
            "versions": versions(),
        }

    @keywords()
    def save(self, folder: str | os.PathLike[str], *, stem: str | None = None, overwrite: bool = False) -> list[Path]:
        """Write the picture (PNG), the maps ``(K, h, w)`` and vectors ``(K, C)`` (``.npy``), and a record (JSON).

        The names begin with ``stem``, by default the photo's own name. Each file appears complete or not at all.

        Returns:
            The paths, in that order.

        Raises:
            OutputError: a file is there already and ``overwrite`` is not set, or the folder cannot be written; then
                nothing has been written.
        """
        name = f"{slug(stem or (Path(self.source).stem if self.source else 'image'))}-concepts"
        files = Files(folder, overwrite=overwrite)
        files.add_picture(f"{name}.png", self.picture)
        files.add_array(f"{name}.npy", array(self.concepts.maps[0]))
        files.add_array(f"{name}-vectors.npy", array(self.concepts.vectors))
        files.add_json(f"{name}.json", self.record())
        return files.write()

    def _repr_png_(self) -> bytes:
        return png(self.picture)

    def _repr_html_(self) -> str:
        lines = (f"{label} ({share:.0%})" for label, share in zip(self.labels, self.concepts.shares, strict=True))
        return picture_html(self._repr_png_(), f"{self.title}: {', '.join(lines)}")


@dataclass(frozen=True, eq=False)
class SavedConcepts:
    """Concepts that were saved, read back without a model: ``record``, as `PhotoConcepts.record` gave it, and arrays.

    ``maps`` ``(K, h, w)`` says how strongly each concept is present at each place, 1 at its strongest, and ``vectors``
    ``(K, C)`` is each one's activation of the layer's channels there.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)
    maps: torch.Tensor = field(repr=False)
    vectors: torch.Tensor = field(repr=False)

    def __len__(self) -> int:
        return len(self.maps)

    @property
    def layer(self) -> str:
        return str(self.record["layer"])

    @property
    def shares(self) -> list[float]:
        """How much of what the concepts make up is each one's, together 1."""
        return [float(each["share"]) for each in self.record["concepts"]]

    @property
    def labels(self) -> list[str]:
        """The best classes of each concept."""
        return [str(each["label"]) for each in self.record["concepts"]]

    @property
    def heatmaps(self) -> torch.Tensor:
        """``(K, H, W)`` in [0, 1] at the resolution of the model's input."""
        return enlarge(self.maps[None], tuple(self.record["input_size"]))[0].clamp(0, 1)

    @classmethod
    def read(cls, path: Path, record: Mapping[str, Any], maps: torch.Tensor, vectors: torch.Tensor) -> SavedConcepts:
        """Put a record and its arrays together.

        Raises:
            RecordError: the record lacks something, or they do not belong together.
        """
        name = f"record {str(path)!r}"
        for key, kind in (("layer", str), ("concepts", list), ("input_size", list), ("error", float), ("values", dict)):
            if not isinstance(record.get(key), kind):
                got = shown(record.get(key))
                raise RecordError(f"{name} must have another value for {key!r}, got {got}; save it again")
        if not is_size(record["input_size"]):
            got = shown(record["input_size"])
            raise RecordError(f"{name} must have a height and width as 'input_size', got {got}; save it again")
        parts, about = record["concepts"], record["values"]
        if not all(map(_is_part, parts)):
            raise RecordError(f"{name} must say the share and label of each concept, got {shown(parts)}; save it again")
        same = about.get("sha256") == digest(array(maps).tobytes()) and len(parts) == len(maps) == len(vectors)
        if maps.ndim != 3 or vectors.ndim != 2 or not same:
            raise RecordError(f"{name} must lie beside the values that it tells of, but they differ; save both again")
        return cls(path, record, maps, vectors)


def _is_part(part: Any) -> bool:
    """Whether a record says of a concept what is read."""
    return isinstance(part, dict) and is_number(part.get("share")) and isinstance(part.get("label"), str)
