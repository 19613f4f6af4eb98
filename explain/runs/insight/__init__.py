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
    statistics  Welch's test
    directions  concept vectors from examples
    removing    whether a finding is true: the evidence is removed
    drawing     pictures of all this
    result      `Insight`: all of it, as tables

`insight` needs the stored maps alone. What takes one more look at the model is asked for with `Photos`, a run and its
explainer: `channels`, `shared_concepts`, `concept_direction` and `removed`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from explain.errors import keywords
from explain.runs.insight.again import Photos, method_in
from explain.runs.insight.clusters import Cluster, reasons
from explain.runs.insight.directions import Direction, concept_direction
from explain.runs.insight.gathering import Maps, gathered
from explain.runs.insight.looking import Look, looks
from explain.runs.insight.mistakes import Pair, Spoken, pairs, with_reasons
from explain.runs.insight.patches import Channel, Patch, Seen, channels
from explain.runs.insight.removing import Removal, removed
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
    seed: int = 0,
) -> Insight:
    """Say what the maps of a run say together: where classes look, clusters of reasons, mistakes.

    Args:
        run: a run, or its file.
        method: whose maps; by default the first of the run.
        explainer: what the run was made with; with it, mistakes are explained.
        source: where photos come from that had no file.
        seed: of what is drawn by chance.

    Raises:
        RunError: there is no such run or method, or the explainer is not that of the run.

    >>> insight("none.sqlite")
    Traceback (most recent call last):
    explain.errors.RunError: run 'none.sqlite' must be a file, but there is none; check the path
    """
    stored = run if isinstance(run, Stored) else Stored(run)
    maps = gathered(stored, method)
    found = pairs(stored)
    if explainer is not None:
        found = with_reasons(found, Photos(stored, explainer, source), method_in(stored, maps.method))
    return Insight(stored, maps.method, maps, looks(maps), reasons(maps, seed=seed), found)
