"""Insight: what the maps of a run say together.

    gathering   all maps on one grid, with what is known about their photos
    looking     where each class looks
    spectral    spectral clustering
    clusters    clusters of reasons
    again       one more look at the model
    mistakes    which classes are taken for which, and why
    layer       the feature maps of a layer, their gradients, and what a place of it can see
    patches     what a channel sees
    shared      concepts that all photos share
    separating  planes between groups of points
    directions  concept vectors from examples
    removing    whether a finding is true: the evidence is covered, or the object, or all else
    further     these three, as part of an insight
    drawing     pictures of all this
    tables      its tables
    result      `Insight`: all of it, as tables

`insight` needs the stored maps alone, and the model for what else is asked of it. Each of these is there by itself
too, for `Photos`, a run and its explainer: `channels`, `shared_concepts`, `concept_direction`, `removed`, `corrected`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from explain.errors import keywords
from explain.hooks import Where
from explain.runs.insight.again import Photos, method_in
from explain.runs.insight.clusters import Cluster, reasons
from explain.runs.insight.directions import Direction, concept_direction
from explain.runs.insight.further import Further, looked_further
from explain.runs.insight.gathering import Maps, gathered
from explain.runs.insight.looking import Look, looks
from explain.runs.insight.mistakes import Pair, Spoken, pairs, with_reasons
from explain.runs.insight.patches import Channel, Patch, Seen, channels
from explain.runs.insight.removing import Removal, corrected, removed
from explain.runs.insight.result import Insight
from explain.runs.insight.shared import Example, Shared, shared_concepts
from explain.runs.reading import Stored

if TYPE_CHECKING:
    from explain.explainer import Explainer

__all__ = [
    "Channel",
    "Cluster",
    "Direction",
    "Example",
    "Further",
    "Insight",
    "Look",
    "Maps",
    "Pair",
    "Patch",
    "Photos",
    "Removal",
    "Seen",
    "Shared",
    "Spoken",
    "channels",
    "concept_direction",
    "corrected",
    "gathered",
    "insight",
    "looks",
    "reasons",
    "removed",
    "shared_concepts",
]


@keywords()
def insight(
    run: Stored | str | os.PathLike[str],
    method: str | None = None,
    *,
    explainer: Explainer | None = None,
    source: Any = None,
    channels: int = 0,
    concepts: int = 0,
    examples: Any = None,
    target: int | str | None = None,
    layer: Where | None = None,
    seed: int = 0,
) -> Insight:
    """Say what the maps of a run say together: where classes look, clusters of reasons, mistakes.

    Args:
        run: a run, or its file.
        method: whose maps; by default the first of the run.
        explainer: what the run was made with; with it, mistakes are explained. What follows needs it.
        source: where photos come from that had no file.
        channels: of how many channels of a layer it says what they see; those that do most for ``target``.
        concepts: how many concepts are looked for that all photos share.
        examples: a source of photos, such as a folder, that have a concept: is ``target`` read from it?
        target: a class, by number or label; for channels, None is the best class of each photo.
        layer: where channels and concepts are looked for; None finds the last feature map.
        seed: of what is drawn by chance.

    Raises:
        RunError: there is no such run or method, the explainer is not that of the run, or it is needed.
        TargetError, LayerError: there is no such class, or layer.

    >>> insight("none.sqlite")
    Traceback (most recent call last):
    explain.errors.RunError: run 'none.sqlite' must be a file, but there is none; check the path
    """
    stored = run if isinstance(run, Stored) else Stored(run)
    maps = gathered(stored, method)
    photos = None if explainer is None else Photos(stored, explainer, source)
    further = looked_further(
        photos, channels=channels, concepts=concepts, examples=examples, target=target, layer=layer
    )
    found = pairs(stored)
    if photos is not None:
        found = with_reasons(found, photos, method_in(stored, maps.method))
    return Insight(stored, maps.method, maps, looks(maps), reasons(maps, seed=seed), found, further)
