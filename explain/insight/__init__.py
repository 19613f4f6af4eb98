"""Insight: what the maps of a run say together.

    maps              all maps on one grid, with what is known about their photos
    class_statistics  where the maps of each class lie
    clusters          clusters of reasons
    reattribution     the photos of a run, explained again
    confusions        which classes are taken for which, and why
    channels          what the channels of a layer see
    shared_concepts   concepts that all photos share
    directions        concept vectors from examples
    ablation          whether a finding is true: the evidence is covered, or the object, or all else
    further           channels, concepts and directions, as part of an insight
    drawing           pictures of all this
    tables            its tables
    result            `Insight`: all of it, as tables

`insight` needs the stored maps alone, and the model for what else is asked of it. Each of these is there by itself
too, for `RunPhotos`, a run and its explainer: `channels`, `shared_concepts`, `concept_direction`, `removed`,
`corrected`.
"""

from explain.insight.ablation import AblationResult, corrected, removed
from explain.insight.api import insight
from explain.insight.channels import Channel, ChannelReport, Patch, channels
from explain.insight.class_statistics import ClassStatistics, looks
from explain.insight.clusters import Cluster, reasons
from explain.insight.confusions import ClassEvidence, Confusion, pairs, with_reasons
from explain.insight.directions import Direction, concept_direction
from explain.insight.further import ModelInsight, looked_further
from explain.insight.maps import RunMaps, gathered
from explain.insight.reattribution import RunPhotos, method_in
from explain.insight.result import Insight
from explain.insight.shared_concepts import Example, SharedConcepts, shared_concepts

__all__ = [
    "AblationResult",
    "Channel",
    "ChannelReport",
    "ClassEvidence",
    "ClassStatistics",
    "Cluster",
    "Confusion",
    "Direction",
    "Example",
    "Insight",
    "ModelInsight",
    "Patch",
    "RunMaps",
    "RunPhotos",
    "SharedConcepts",
    "channels",
    "concept_direction",
    "corrected",
    "gathered",
    "insight",
    "looked_further",
    "looks",
    "method_in",
    "pairs",
    "reasons",
    "removed",
    "shared_concepts",
    "with_reasons",
]
