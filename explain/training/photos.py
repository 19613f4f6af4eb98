"""The photos that are explained again and again during training, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from explain._utils.errors import RunError
from explain.attribution.pictures import Scene
from explain.data.images import Box, load_image
from explain.explanation.explainer import Explainer
from explain.methods.registry import MethodLike
from explain.runs.explaining import RunRequest
from explain.runs.known_photos import Labels
from explain.runs.preparing import Failed, Prepared, Preparer, each_explained, in_batches
from explain.runs.sources import Source, entries_of
from explain.runs.store import PhotoRecord
from explain.targets.resolve import as_targets
from explain.training.store import stored_name

MOST = 64  # photos; their inputs stay in memory


class LabelQuestion(RunRequest):
    """A question about the label of each photo, if no target is given; without a label, about the top class.

    During training the top class changes, and a map of another class is another map: the label stays.
    """

    by_label = False

    def answers(self, photos: list[Prepared], labels: Labels) -> list[PhotoRecord]:
        if self.by_label:
            known = [labels.of(photo.label)[0] for photo in photos]
            self.targets = as_targets(None if None in known else known)
        return super().answers(photos, labels)


class MonitoredPhotos:
    """A fixed set of photos, read once, and a question about them.

    Args:
        source: where the photos come from.
        explainer: the model that is trained, with all that belongs to it.
        methods, target, options: as for calling an `Explainer`.

    Raises:
        RunError: there is no photo or there are too many, or one cannot be read.
    """

    def __init__(
        self, source: Source, explainer: Explainer, methods: MethodLike | Iterable[MethodLike], target: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        self.source = source
        self.question = LabelQuestion(explainer, methods, target, (), **options)
        self.question.by_label = all(each is None for each in (target, options.get("targets"), options.get("top_k")))
        self.labels = Labels(explainer.categories, source.classes)
        self.photos = _read(source, Preparer(source, explainer.preprocess))

    def answers(self, step: int) -> list[PhotoRecord | Failed]:
        """Explain the photos; each is called as it is at this step."""
        at = {}
        for photo in self.photos:
            entry = replace(photo.entry, name=stored_name(step, photo.entry.name))
            at[photo.entry.name] = replace(photo, entry=entry)
        known = {name: self.labels.of(photo.label)[0] is not None for name, photo in at.items()}
        found: dict[str, PhotoRecord | Failed] = {}
        for labelled in (True, False):
            group = [photo for name, photo in at.items() if known[name] is labelled]
            for batch in in_batches(group, self.question.at_once):
                assert not isinstance(batch, Failed)
                for each in each_explained(batch, lambda photos: self.question.answers(photos, self.labels)):
                    found[each.name if isinstance(each, Failed) else each.photo[0]] = each
        return [found[photo.entry.name] for photo in at.values()]

    def scene(self, photo: Prepared, side: int) -> Scene | None:
        """The photo at a size for looking at, and where its map lies; None for one that came as a tensor."""
        image = self.source.read(photo.entry).image
        return None if isinstance(image, torch.Tensor) else shrunk_scene(load_image(image), photo.box, side)


def shrunk_scene(image: Image.Image, box: Box, side: int) -> Scene:
    """A photo whose longer side has at most so many pixels, and where maps lie on it."""
    scale = min(1.0, side / max(image.size))
    width, height = (max(1, round(length * scale)) for length in image.size)
    across, down = width / image.width, height / image.height
    where = Box(box.left * across, box.top * down, box.right * across, box.bottom * down)
    return Scene(image.resize((width, height)) if scale < 1 else image, where, (where,))


def _read(source: Source, preparer: Preparer) -> list[Prepared]:
    photos: list[Prepared] = []
    for entry in entries_of(source):
        found = preparer(entry)
        if not isinstance(found, Prepared):
            raise RunError(f"photos must be readable to be watched, but {found.reason}; leave this one out")
        photos.append(found)
        if len(photos) > MOST:
            raise RunError(f"photos must be {MOST} at most to be watched, got more; choose some of them")
    if not photos:
        raise RunError("photos must be one at least to be watched, got none; name some")
    return photos
