"""Insight: statistics of all maps of a run.

    maps              all maps on one grid, with what is known about their photos
    class_statistics  where the maps of each class lie
    clusters          clusters of the maps of each class (SpRAy)
    reattribution     the photos of a run, explained again
    confusions        which classes are taken for which, and why
    channels          the patches that activate the channels of a layer most
    shared_concepts   concepts that all photos share
    directions        concept vectors from examples (TCAV)
    ablation          the accuracy when the evidence is covered, or the object, or the background
    model_insight     channels, concepts and directions as part of an insight; tables
    drawing           pictures of all this
    result            `Insight`: all of it, as tables

`Run.insight` needs the stored maps alone, and the model for mistakes, channels, concepts and directions. These are
there as functions too, of `RunPhotos`, a run and its explainer.
"""

from explain.insight.ablation import corrected, removed
from explain.insight.api import insight
from explain.insight.channels import channels
from explain.insight.directions import concept_direction
from explain.insight.reattribution import RunPhotos
from explain.insight.result import Insight
from explain.insight.shared_concepts import shared_concepts

__all__ = [
    "Insight", "RunPhotos", "channels", "concept_direction", "corrected", "insight", "removed", "shared_concepts",
]  # fmt: skip
