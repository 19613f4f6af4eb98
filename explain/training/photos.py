"""The photos that are watched during a training: read once, and explained at every snapshot."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from explain._utils.errors import RunError
from explain.attribution.pictures import Scene
from explain.explanation.explainer import Explainer
from explain.methods.base import MethodLike
from explain.runs.job import Job
from explain.runs.preparing import Prepared
from explain.store.sources import Failed, Source, entries_of
from explain.store.writing import PhotoRecord
from explain.targets.resolve import as_targets
from explain.training.writing import stored_name

MOST = 64  # photos; their inputs stay in memory


class LabelJob(Job):
    """Explains each photo's label, or its top class if it has none, where no target is given. A
    label stays during training; the map of another top class would be another map."""

    is_training = True
    by_label = False

    def answers(self, photos: Sequence[Prepared]) -> list[PhotoRecord]:
        """Explain a batch of watched photos for their labels, or for the top class where one of
        them has no label of the model. It replaces the targets of the job's session.
        """
        if self.by_label:
            classes = [self.labels.first_class(photo.label) for photo in photos]
            targets = as_targets(None if None in classes else classes)
            self.session = replace(self.session, targets=targets)
        return super().answers(photos)


class WatchedPhotos:
    """A fixed set of photos from ``source``, read once, and what is asked of them, as in a call of
    the `Explainer` whose model is trained.
    """

    def __init__(
        self,
        source: Source,
        explainer: Explainer,
        methods: MethodLike | Iterable[MethodLike],
        target: Any,
        **options: Any,
    ) -> None:
        """Make the job that explains the photos, and read them. They are explained for their labels
        (``by_label``) only where the caller asked for no target in any way.
        """
        self.job = LabelJob(source, explainer, methods, target, **options)
        asked = (target, options.get("targets"), options.get("top_k"))
        self.job.by_label = asked == (None, None, None)
        self.photos = _read(self.job)

    def explained(self, step: int) -> list[PhotoRecord | Failed]:
        """A record of each watched photo, in order, named by `stored_name` for this step. Photos
        with and without a label are in separate batches: a batch has labels for all or none.
        """
        labelled: list[Prepared] = []
        unlabelled: list[Prepared] = []
        names = [stored_name(step, photo.entry.name) for photo in self.photos]
        for photo, name in zip(self.photos, names, strict=True):
            group = unlabelled if self.job.labels.first_class(photo.label) is None else labelled
            group.append(replace(photo, entry=replace(photo.entry, name=name)))
        records: dict[str, PhotoRecord | Failed] = {}
        for group in (labelled, unlabelled):
            for batch in self.job.explained(group):
                for record in batch:
                    records[record.name] = record
        return [records[name] for name in names]

    def scene(self, photo: Prepared, side: int) -> Scene | None:
        """The watched photo, reduced to ``side`` pixels, with the place of its map in it, on which
        maps are drawn for TensorBoard; None for a photo that came as a tensor."""
        image = self.job.source.read(photo.entry).image
        if isinstance(image, torch.Tensor):
            return None
        image = self.job.explainer.read(image)
        return Scene(image, photo.box, photo.crops or (photo.box,)).fitted(side)


def _read(job: Job) -> Sequence[Prepared]:
    """Read and preprocess all photos that a training watches; their inputs stay in memory."""
    photos: list[Prepared] = []
    for entry in entries_of(job.source):
        photo = job.preparer(entry)
        if not isinstance(photo, Prepared):
            raise RunError(
                f"photos must be readable to be watched, but {photo.reason}; leave this one out"
            )
        photos.append(photo)
        if len(photos) > MOST:
            raise RunError(
                f"photos must be from 1 to {MOST} to be watched, got more; choose some of them"
            )
    if not photos:
        raise RunError(f"photos must be from 1 to {MOST} to be watched, got none; name some")
    return photos
