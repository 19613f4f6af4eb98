"""Insight: statistics of all maps of a run.

- ``maps``: all maps on one grid, with what is known about their photos; figures as JSON has them
- ``class_statistics``: where the maps of each class lie
- ``clusters``: clusters of the maps of each class (SpRAy)
- ``mistakes``: which classes are taken for which, and why; evidence off the object
- ``answers``: answers in words that do not rest on the photo
- ``drawing``: pictures of these
- ``reattribution``: the photos of a run, explained again
- ``channels``: the patches that activate the channels of a layer most
- ``concepts``: concepts that all photos share
- ``directions``: concept vectors from examples (TCAV)
- ``spurious_regions``: the region that photos of a finding share, which other photos can be given
- ``repair``: a model without a finding: a projection, or training
- ``repaired``: what a repair did to the answers, as a table and a page
- ``ablation``: the accuracy when the evidence is covered, or the object, or the background
- ``result``: `insight` and `Insight`: all of it, as tables and pictures

`Run.insight` needs the stored maps alone, and the model for mistakes, channels, concepts and
directions. These are there as functions too, of `RunPhotos`, a run and its explainer.
"""

from explain.insight.ablation import corrected, removed
from explain.insight.channels import channels
from explain.insight.concepts import shared_concepts
from explain.insight.directions import concept_direction
from explain.insight.reattribution import RunPhotos
from explain.insight.repair import repair
from explain.insight.result import Insight

__all__ = [
    "Insight",
    "RunPhotos",
    "channels",
    "concept_direction",
    "corrected",
    "removed",
    "repair",
    "shared_concepts",
]
