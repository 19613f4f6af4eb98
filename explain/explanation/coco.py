"""Parts of maps as annotations in the format of COCO, which tools for labels and detectors read."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from explain.data.boxes import Array
from explain.explanation.explanation import Explanation
from explain.render.styles import cells_on_photo


def to_coco(explanations: Iterable[Explanation], threshold: float = 0.5) -> dict[str, Any]:
    """The connected parts of all maps above a share of their maximum as a document of COCO.

    Categories are the labels of the targets. Each annotation has a box and a mask (uncompressed run
    lengths) in pixels of the photo, and beside what COCO asks for the ``method``, the ``model`` and
    a ``score``: the heatmap's largest value in the part.

    Raises:
        ArgumentError: the threshold is not above 0 and up to 1.
        ImageError: the maps are those of videos or volumes.

    >>> from explain.explanation.explainer import Explainer
    >>> from PIL import Image
    >>> explanation = Explainer("tiny")(Image.new("RGB", (60, 40), "red"), "lafam")
    >>> document = to_coco([explanation])
    >>> document["images"]
    [{'id': 1, 'file_name': 'image 1', 'width': 60, 'height': 40}]
    """
    annotations = Annotations(threshold)
    for explanation in explanations:
        annotations.add(explanation)
    return annotations.to_dict()


@dataclass
class Annotations:
    """The document of `to_coco`, one explanation after the other, so that none must be kept."""

    threshold: float = 0.5
    images: dict[str, dict[str, Any]] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, explanation: Explanation) -> None:
        """Add the parts of the maps of one explanation; a photo of the same file is one image."""
        name = explanation.source or f"image {len(self.images) + 1}"
        width, height = explanation.photo.size
        entry = {"id": len(self.images) + 1, "file_name": name, "width": width, "height": height}
        image = self.images.setdefault(name, entry)
        for label, maps in zip(explanation.targets, explanation.results, strict=True):
            category = self.categories.setdefault(label, len(self.categories) + 1)
            for method, attribution in maps.items():
                heatmap = attribution.heatmap[0].detach().cpu().numpy()
                [parts] = attribution[:1].connected_parts(self.threshold)
                for _, part in parts:
                    mask = cells_on_photo(part, explanation.photo.size, explanation.box)
                    if not mask.any():  # it lies in the padding
                        continue
                    annotation = {
                        "id": len(self.entries) + 1,
                        "image_id": image["id"],
                        "category_id": category,
                        **_region(mask),
                        "iscrowd": 0,
                        "score": float(heatmap[part].max()),
                        "method": method,
                        "model": explanation.origin.name,
                    }
                    self.entries.append(annotation)

    def to_dict(self) -> dict[str, Any]:
        """The document in plain values."""
        return {
            "images": [*self.images.values()],
            "annotations": self.entries,
            "categories": [{"id": index, "name": name} for name, index in self.categories.items()],
        }


def _region(mask: Array) -> dict[str, Any]:
    """The box, the area and the run lengths, column by column, of a mask ``(H, W)``."""
    rows = np.flatnonzero(mask.any(1))
    columns = np.flatnonzero(mask.any(0))
    height = int(rows[-1] - rows[0]) + 1
    width = int(columns[-1] - columns[0]) + 1
    pixels = mask.T.ravel()
    # runs of pixels outside and inside in turn, the first of them outside, if only of length 0
    changes = np.flatnonzero(np.diff(pixels, prepend=False))
    counts = np.diff(changes, prepend=0, append=len(pixels))
    return {
        "bbox": [int(columns[0]), int(rows[0]), width, height],
        "area": int(mask.sum()),
        "segmentation": {"size": list(mask.shape), "counts": counts.tolist()},
    }
