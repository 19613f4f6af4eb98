"""`insight`: what the maps of a run say together, as tables, pictures and a page."""

import os
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explain._utils.errors import (
    ArgumentError,
    ExplainError,
    RunError,
    keywords,
    option_name,
    printable,
    python_or_command,
    shown,
)
from explain._utils.resources import packaged_text
from explain.data.files import Files, distinct, slug
from explain.explanation.explainer import Explainer
from explain.hooks.layer_names import Where
from explain.insight import class_statistics
from explain.insight.answers import Ungrounded, ungrounded
from explain.insight.channels import ChannelReport, finer_layer
from explain.insight.channels import channels as find_channels
from explain.insight.class_statistics import ClassStatistics
from explain.insight.clusters import Cluster, map_clusters
from explain.insight.concepts import SharedConcepts, shared_concepts
from explain.insight.confirmation import TRIED, TriedFinding, confirmed_finding
from explain.insight.directions import Direction, concept_direction
from explain.insight.drawing import (
    Album,
    draw_class_means,
    draw_clusters,
    draw_label_mistakes,
    draw_mistakes,
)
from explain.insight.maps import RunMaps, filled, json_value, read_maps, table_lines
from explain.insight.mistakes import (
    Confusion,
    LabelMistakes,
    OddEvidence,
    label_mistakes,
    label_thresholds,
    odd_evidence,
    unknown_labels,
    with_label_maps,
    with_reasons,
)
from explain.insight.mistakes import pairs as find_pairs
from explain.insight.reattribution import RunPhotos, images_of, method_in
from explain.report.pages import Section, document
from explain.store.reading import StoredRun
from explain.targets.outputs import THRESHOLD

MOST_UNKNOWN = 5  # labels that a headline names, of those that are none of the model's
MOST_LABELS = 20  # labels whose mistakes are explained and drawn
NOTABLE = 0.5  # mean silhouette from which on a cluster is worth a look
# least height and width of maps, in places, at which a pattern can be told from what is beside it
MIN_RESOLUTION = 6
SECTIONS = tomllib.loads(packaged_text("explain.insight", "sections.toml"))


@dataclass(frozen=True, eq=False, repr=False)
class Insight:
    """What the maps of a run say together; it prints itself.

    ``looks`` says where each class looks, the most striking first. ``reasons`` are the clusters of
    maps of one class, those that stand out most first. ``pairs`` are the classes that are taken for
    others, the most frequent first. ``maps`` has all maps on one grid. ``evidence`` lists photos
    whose smallest evidence is not on the object; None where the run has no `Sufficient` or
    `Necessary`. ``answers`` are those in words that do not rest on the photo; None where the run
    has no answers. Where several labels may be true of a photo, ``labels`` says which are missed
    and which are false alarms, instead of ``pairs``; else it is None. ``threshold`` says from
    which probability on labels are predicted. ``channels``, ``concepts`` and ``direction`` are
    results that need the model; None where they were not requested. ``finer_layer`` is the layer
    to run where the maps are too coarse; None where they are not, or the model is not known.
    ``unknown_labels`` counts the photos of labels that are none of the model's, which are left
    out.
    """

    run: StoredRun
    method: str
    maps: RunMaps
    looks: Sequence[ClassStatistics]
    reasons: Sequence[Cluster]
    pairs: Sequence[Confusion]
    channels: ChannelReport | None = None
    concepts: SharedConcepts | None = None
    direction: Direction | None = None
    photos: RunPhotos | None = None
    evidence: Sequence[OddEvidence] | None = None
    answers: Sequence[Ungrounded] | None = None
    labels: Sequence[LabelMistakes] | None = None
    threshold: str = f"{THRESHOLD:.0%}"
    finer_layer: str | None = None
    unknown_labels: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The whole insight in plain values of JSON: what ``insight.json`` and ``--json`` hold;
        keys must stay."""
        return {
            "run": str(self.run.path),
            "method": self.method,
            "maps": len(self.maps),
            "empty": self.maps.empty,
            "repeated": self.maps.repeated,
            "finer_layer": self.finer_layer,
            "unknown_labels": dict(self.unknown_labels),
            **{name: json_value(rows) for name, rows in self._results.items()},
        }

    @property
    def _results(self) -> dict[str, Any]:
        """The results that were requested and exist, by the names of their tables in
        ``sections.toml``, in the order in which tables, pages and ``to_dict`` show them."""
        results = {
            "looks": self.looks,
            "reasons": self.reasons,
            "mistakes": self.pairs if self.labels is None else None,
            "labels": self.labels,
            "evidence": self.evidence,
            "answers": self.answers,
            "channels": self.channels,
            "concepts": self.concepts,
            "direction": self.direction,
        }
        return {name: rows for name, rows in results.items() if rows is not None}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """One line: the run, how many maps of which method were read, and how many were left
        out."""
        left_out = []
        if self.maps.empty:
            left_out.append(f"{self.maps.empty} of zeros")
        if self.maps.repeated:
            left_out.append(f"{self.maps.repeated} of photos that were there twice")
        without = f"; left out: {', '.join(left_out)}" if left_out else ""
        return printable(f"{self.run.path}: {len(self.maps)} maps of {self.method}{without}")

    @property
    def _coarse_resolution(self) -> tuple[int, int] | None:
        """The height and width of the maps in places, if they have fewer than `MIN_RESOLUTION`
        along a side: then `headlines` recommends a finer layer, which `insight` looks for."""
        resolution = self.maps.resolution
        if resolution is None or min(resolution) >= MIN_RESOLUTION:
            return None
        return resolution

    @property
    def headlines(self) -> list[str]:
        """One sentence for each kind of result about its most striking row, such as the class that
        looks away from its object; first, what limits the insight (unknown labels, maps that are
        too coarse).

        The sentences are templates of ``sections.toml``.
        """
        lines = []
        if self.unknown_labels:
            named = [f"{label} ({count})" for label, count in self.unknown_labels.items()]
            more = " …" if len(named) > MOST_UNKNOWN else ""
            lines.append(
                "Labels left out, which are none of the model's, and their photos: "
                f"{', '.join(named[:MOST_UNKNOWN])}{more}."
            )
        if self._coarse_resolution is not None:
            height, width = self._coarse_resolution
            with_model = python_or_command("insight(explainer=...)", "--model")
            remedy = (
                f"Run the layer {self.finer_layer!r}."
                if self.finer_layer
                else f"Run an earlier layer; {with_model} says which."
            )
            lines.append(
                f"The maps have {height} × {width} places: too few to tell a pattern from the "
                f"object. {remedy}"
            )
        if self.looks and self.looks[0].striking > 0:
            of_class = self.looks[0]
            is_about_object = of_class.on_object.is_known  # else how far it is from other classes
            lines.append(_sentence("looks", of_class, is_remarkable=is_about_object))
        if self.reasons:
            cluster = self.reasons[0]
            lines.append(_sentence("reasons", cluster, is_remarkable=cluster.stands_out >= NOTABLE))
        frequent = [pair for pair in self.pairs if pair.of >= class_statistics.LEAST]
        if frequent:
            lines.append(_sentence("mistakes", frequent[0]))
        if self.labels:
            lines.append(_sentence("labels", self.labels[0]))
        if self.answers:
            answer = self.answers[0]
            lines.append(_sentence("answers", answer, is_remarkable=bool(answer.guessed)))
        return [printable(line) for line in lines]

    def parts(self, most: int = 10) -> dict[str, Section]:
        """The tables of the insight as sections (title, text and rows of cells), by the names in
        ``sections.toml``, which has their templates; without pictures, which `_page` adds.

        Args:
            most: rows of each table.
        """
        sections = {}
        for name, result in self._results.items():
            # a report has its rows in a table; other results are the rows
            rows = getattr(result, "table", result)[:most]
            words = SECTIONS[name]
            content = filled(words["about" if rows else "nothing"], **vars(self))
            # without templates of cells, each row is a list of texts already
            cells = [
                [filled(column, row) for column in words["cells"]] if "cells" in words else row
                for row in rows
            ]
            sections[name] = Section(
                filled(words["title"], **vars(self)), content, [words["head"], *cells]
            )
        return sections

    def finding(self, which: int | str | None = None) -> Cluster | ClassStatistics:
        """Return a finding, a cluster or a class of this insight, as `explain.insight.repair` takes
        it.

        Args:
            which: the number of a cluster, from 1, or the label of a class. None tries the clusters
                and classes that stand out most: each one's pattern is put on other photos, and the
                one that draws most of them to its class is taken. This needs the model.

        Raises:
            RunError: there is no such cluster or class; or none is confirmed.
        """
        if which is None:
            return self.confirmed().finding
        if str(which).isdecimal() and 1 <= int(which) <= len(self.reasons):
            return self.reasons[int(which) - 1]
        for of_class in self.looks:
            if which in (of_class.title, of_class.target):
                return of_class
        raise RunError(
            f"{option_name('finding')} must be the number of a cluster, 1 to "
            f"{len(self.reasons)}, or the label of a class, got {shown(which)}; the insight "
            "lists them"
        )

    def confirmed(self) -> TriedFinding:
        """Return the finding that `finding` takes if none is named, and what its pattern does: of
        the clusters that stand out most, and the classes whose maps differ most from the others, it
        is the one whose pattern draws most photos to its class.

        Raises:
            RunError: none is confirmed, or the insight has no model.
        """
        if self.photos is None:
            remedy = python_or_command("give explainer= to the insight", "give --model")
            raise RunError(f"finding must be named where there is no model; {remedy}")
        classes = sorted(self.looks, key=lambda of_class: -of_class.apart)
        return confirmed_finding([*self.reasons[:TRIED], *classes[:TRIED]], self.photos)

    def lines(self, most: int = 10) -> list[str]:
        """The insight as lines of text for a terminal: summary, headlines, and each table with at
        most ``most`` rows."""
        lines = [self.summary, *(f"  {line}" for line in self.headlines)]
        for part in self.parts(most).values():
            lines += ["", part.heading]
            lines += table_lines(part.table) if len(part.table) > 1 else [f"  {part.text}"]
        return lines

    def pictures(self, source: Any = None, *, photos: bool = True) -> dict[str, Image.Image]:
        """Draw the pictures of the insight, by their names: "looks", "reasons", "mistakes" where
        they were explained, a card for each label that is mistaken, and "channels" and "concepts"
        if requested.

        Args:
            source: where the photos are, if they had no file or it has moved.
            photos: whether photos are drawn; without, the pictures of mean maps may be published
                where photos may not.

        Photos that have changed, or cannot be read, are left out; a warning names one.
        """
        album = Album(RunPhotos(self.run, source=source), self.method, empty=not photos)
        sheets = {
            "looks": draw_class_means(self.looks, self.maps, album),
            "reasons": draw_clusters(self.reasons, album),
            "mistakes": draw_mistakes(self.pairs, album),
        }
        pictures = {name: picture for name, picture in sheets.items() if picture is not None}
        if self.labels is not None:
            pictures |= draw_label_mistakes(self.labels[:MOST_LABELS], album)
        album.photos.tell_missing()
        # the others consist of photos, and are there only for an insight with the model
        if not photos or self.photos is None:
            return pictures
        for name, report in (("channels", self.channels), ("concepts", self.concepts)):
            if report is not None:
                try:
                    pictures[name] = report.picture(self.photos)
                except ExplainError as error:  # photos that are tensors, or gone since
                    self.photos.missing[name] = str(error)
        return pictures

    def save(
        self, folder: str | os.PathLike[str], *, source: Any = None, overwrite: bool = False
    ) -> list[Path]:
        """Write the pictures, ``insight.json`` and a page with all of it, ``insight.html``; return
        the paths.

        Args:
            folder: where to.
            source: where the photos are, if they had no file or it has moved.
            overwrite: replace files that are there.

        Raises:
            OutputError: they cannot be written.
        """
        files = Files(folder, overwrite=overwrite)
        pictures = self.pictures(source)
        names = distinct(map(slug, pictures))
        for name, picture in zip(names, pictures.values(), strict=True):
            files.add_picture(f"{name}.png", picture)
        files.add_json("insight.json", self.to_dict())
        files.add_text("insight.html", self._page(pictures))
        return files.write()

    def _page(self, pictures: Mapping[str, Image.Image]) -> str:
        """The HTML of ``insight.html``: headlines, and each table with the pictures whose keys
        begin with its name ("labels cat missed: 1 of 3" for "labels").
        """
        sections = [Section("Summary", "\n".join(self.headlines))] if self.headlines else []
        for name, part in self.parts(most=20).items():
            with_captions = [
                (picture, key.removeprefix(name).strip() or part.heading)
                for key, picture in pictures.items()
                if key.split()[0] == name
            ]
            sections.append(replace(part, pictures=with_captions))
        return document(f"What {self.run.path.name} says", self.summary, sections)


def _in_words(run: StoredRun, threshold: np.ndarray[Any, Any]) -> str:
    """From which probabilities ``(K,)`` on labels are predicted: that of most labels, and those of
    the rest by their names."""
    shares = [f"{limit:.3g}" for limit in 100 * threshold]
    [(usual, _)] = Counter(shares).most_common(1)
    other_labels = [
        f"{run.label_of(number)} {share} %" for number, share in enumerate(shares) if share != usual
    ]
    return f"{usual} %" + (f" ({', '.join(other_labels)})" if other_labels else "")


def _sentence(table: str, row: Any, *, is_remarkable: bool = True) -> str:
    """Fill a sentence about a result, the "headline" of its table in ``sections.toml`` (or what is
    said otherwise), with the fields of ``row``."""
    return filled(SECTIONS[table]["headline" if is_remarkable else "otherwise"], row)


def _check_requested(
    explainer: Explainer | None,
    channels: int,
    concepts: int,
    examples: Any,
    target: int | str | None,
    layer: Where | None,
) -> None:
    """Refuse options of `insight` that lack another one, or have no effect. ``channels`` and
    ``concepts`` are counts, 0 if they were not requested.
    """
    counts = {"channels": channels, "concepts": concepts, "examples": examples is not None}
    requested = [name for name, count in counts.items() if count]
    of_a_class = [name for name in requested if name != "concepts"]  # which all classes share
    for name, value, users in (("target", target, of_a_class), ("layer", layer, requested)):
        if value is not None and not users:
            raise ArgumentError(
                f"{option_name(name)} has no effect on what is requested; leave it out"
            )
    if requested and explainer is None:
        remedy = python_or_command("give the explainer of the run", "give --model")
        raise ArgumentError(f"{option_name(requested[0])} must have the model, got none; {remedy}")
    if examples is not None and target is None:
        raise ArgumentError(
            f"{option_name('target')} must say of which class the examples may be a reason; "
            "give a class"
        )


@keywords()
def insight(
    run: StoredRun,
    method: str | None = None,
    *,
    explainer: Explainer | None = None,
    source: Any = None,
    channels: int = 0,
    concepts: int = 0,
    examples: Any = None,
    target: int | str | None = None,
    layer: Where | None = None,
    threshold: float | Mapping[Any, float] | None = None,
    seed: int = 0,
) -> Insight:
    """Summarise the maps of a run: where classes look, clusters of reasons, mistakes.

    Args:
        run: the run.
        method: whose maps; by default the first of the run.
        explainer: what the run was made with; with it, mistakes are explained. What follows needs
            it.
        source: where the photos are, if they had no file or it has moved.
        channels: of how many channels of a layer it says what they see; those that do most for
            ``target``.
        concepts: how many concepts are looked for that all photos share.
        examples: a source of photos, such as a folder, that have a concept: is ``target`` read from
            it?
        target: a class, by number or label; for channels, None is the best class of each photo.
        layer: where channels and concepts are looked for; None finds the last feature map.
        threshold: the probability from which on a label is predicted, where several may be true of
            a photo: one for all, or a mapping from labels or indices; by default those of a run of
            `explain.targets.Predicted`, else 0.5.
        seed: of what is drawn by chance.

    Raises:
        RunError: there is no such method, or the explainer is not that of the run.
        ArgumentError: the explainer is needed, or an argument has no effect.
        TargetError, LayerError: there is no such class, or layer.
    """
    _check_requested(explainer, channels, concepts, examples, target, layer)
    thresholds = label_thresholds(run, threshold)
    labels = label_mistakes(run, thresholds)
    maps = read_maps(run, method, thresholds)
    if threshold is not None and labels is None:
        raise ArgumentError(
            f"{option_name('threshold')} has no effect on a run without photos of several labels "
            "that the model knows; leave it out"
        )
    result = Insight(
        run=run,
        method=maps.method,
        maps=maps,
        looks=class_statistics.class_mean_maps(maps),
        reasons=map_clusters(maps, seed=seed),
        pairs=find_pairs(run) if labels is None else (),
        evidence=odd_evidence(run),
        answers=ungrounded(run, maps.method),
        labels=labels,
        threshold=_in_words(run, thresholds),
        unknown_labels=unknown_labels(run),
    )
    if explainer is None:
        return result
    photos = RunPhotos(run, explainer, source)
    direction = None
    if examples is not None and target is not None:
        direction = concept_direction(photos, images_of(examples, "examples"), target, layer=layer)
    of_maps = method_in(run, maps.method)
    if labels is not None:
        labels = with_label_maps(labels[:MOST_LABELS], photos, of_maps)
    return replace(
        result,
        pairs=with_reasons(result.pairs, photos, of_maps),
        labels=labels,
        channels=find_channels(photos, target, layer=layer, count=channels) if channels else None,
        concepts=shared_concepts(photos, concepts, layer=layer) if concepts else None,
        direction=direction,
        photos=photos,
        finer_layer=finer_layer(photos, MIN_RESOLUTION) if result._coarse_resolution else None,
    )
