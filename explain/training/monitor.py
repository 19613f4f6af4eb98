"""`Monitor`: during training, a fixed set of photos is explained every so many steps, and gradients are looked at.

A run keeps all of it, with tables of the steps beside its own; there is a log for TensorBoard too.
"""

import importlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import torch
from PIL import Image
from torch import nn

from explain._utils.errors import ExplainError, RunError, keywords, muted, optional, shown, warn
from explain.attribution import pictures
from explain.attribution.options import RunOptions
from explain.attribution.result import Attribution
from explain.data.boxes import Box
from explain.data.images import load_image
from explain.explanation.explainer import Explainer
from explain.hooks.unwrap import unwrapped
from explain.methods.base import MethodLike
from explain.models import Classifier
from explain.render.styles import get_style
from explain.runs.preparing import Labels, Prepared, Preparer
from explain.runs.runner import RunRequest
from explain.store.lists import source_of
from explain.store.sources import Failed, Source, check_count, entries_of, text
from explain.store.writing import PhotoRecord, Store, locked, method_row, unpack
from explain.targets.resolve import TargetLike, as_targets
from explain.training.gradients import DeadUnits, Flow, GradientFlow, Scaler

TABLES = (resources.files("explain.training") / "tables.sql").read_text("utf-8").split(";\n")


@dataclass(frozen=True)
class Gradients:
    """The gradients before a step: flow and verdict of each parameter, number of units and dead ones of each layer."""

    flows: Mapping[str, tuple[Flow, str]] = field(default_factory=dict)
    units: Mapping[str, tuple[int, Sequence[int]]] = field(default_factory=dict)

    @property
    def dead(self) -> float:
        """The share of units that got no gradient; 0.0 where there are none.

        >>> Gradients(units={"conv": (4, [1])}).dead
        0.25
        """
        total = sum(units for units, _ in self.units.values())
        return sum(len(dead) for _, dead in self.units.values()) / total if total else 0.0


def stored_name(step: int, name: str) -> str:
    """Return what a photo is called in the table of photos, where each step has it once.

    >>> stored_name(500, "cat.jpg")
    'step 00000500/cat.jpg'
    """
    return f"step {step:08}/{name}"


class TrainingStore(Store):
    """The file of a watched training, opened for writing; as `Store`."""

    def _open(self, manifest: Mapping[str, Any], compare: bool) -> None:
        super()._open(manifest, compare)
        with self._transaction():
            for statement in TABLES:
                self._db.execute(statement)

    def last(self) -> int:
        """The last step that is there; 0 if there is none."""
        with self._translated():
            return int(self._db.execute("SELECT ifnull(max(step), 0) FROM steps").fetchone()[0])

    def go_back(self, step: int) -> None:
        """Forget what comes after a step: a training that begins there goes another way."""
        with self._transaction():
            later = "SELECT photo FROM steps WHERE step > ?"
            self._db.execute(f"DELETE FROM photos WHERE id IN ({later})", (step,))
            for table in ("figures", "gradients", "units"):
                self._db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))

    def enter_step(
        self, step: int, found: Sequence[PhotoRecord | Failed], figures: Mapping[str, float], gradients: Gradients
    ) -> None:
        """Write all that belongs to a step at once; what was there of this step is replaced.

        Args:
            step: how many steps of training there were before.
            found: the photos, by the names that they have at this step, see `stored_name`.
            figures: such as the loss.
            gradients: what was seen of them before.
        """
        with self._transaction():
            self.write(found)
            start = len(stored_name(step, "")) + 1
            chosen = "SELECT id, ?, substr(name, ?) FROM photos WHERE name = ?"
            for each in found:
                if isinstance(each, PhotoRecord):
                    self._db.execute(f"INSERT OR REPLACE INTO steps {chosen}", (step, start, each.photo[0]))
            flows, units = gradients.flows.items(), gradients.units.items()
            tables: dict[str, list[tuple[Any, ...]]] = {
                "figures": [(step, name, value) for name, value in figures.items()],
                "gradients": [(step, name, f.rms, f.largest, f.zero, verdict) for name, (f, verdict) in flows],
                "units": [(step, name, count, len(dead), json.dumps(dead)) for name, (count, dead) in units],
            }
            for table, rows in tables.items():
                self._db.execute(f"DELETE FROM {table} WHERE step = ?", (step,))
                for row in rows:
                    self._db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


SIDE = 384  # pixels of the longer side of a picture


class TensorBoardLog:
    """Writes what is seen of photos at each step; maps are drawn on the ``scenes``, where a photo has one."""

    def __init__(self, writer: Any, photos: Sequence[Prepared], scenes: Sequence[pictures.Scene | None]) -> None:
        self._writer, self._photos, self._scenes = writer, photos, scenes

    def enter(
        self, step: int, found: Sequence[PhotoRecord | Failed], figures: Mapping[str, float], gradients: Gradients,
        styles: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Write the pictures and figures of a step; ``styles`` are those of the methods."""
        for photo, answer, scene in zip(self._photos, found, self._scenes, strict=True):
            for result in answer.results if isinstance(answer, PhotoRecord) else ():
                tag = f"{photo.entry.name}/{result.method}/{result.target}"
                self._writer.add_scalar(f"score/{tag}", result.score, step)
                if result.probability is not None:
                    self._writer.add_scalar(f"probability/{tag}", result.probability, step)
                if scene is not None:
                    values = unpack(result.map.content, result.map.shape, result.map.scale)[None]
                    size, score = (int(photo.x.shape[-2]), int(photo.x.shape[-1])), torch.tensor([result.score])
                    found_map = Attribution(result.method, values, result.target, score, result.layer, size)
                    picture = scene.overlay(found_map, get_style(styles[result.method]))
                    self._writer.add_image(f"maps/{tag}", np.asarray(picture), step, dataformats="HWC")
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        for name, (flow, _) in gradients.flows.items():
            self._writer.add_scalar(f"gradient/{name}", flow.rms, step)
        if gradients.units:
            self._writer.add_scalar("dead units", gradients.dead, step)


def writer_of(given: Any) -> tuple[Any, bool]:
    """Return what writes for TensorBoard, and whether it was made here and has to be closed.

    Args:
        given: a folder, or a writer such as ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        RunError: it is neither, or TensorBoard is not installed.

    >>> writer_of(3)
    Traceback (most recent call last):
    explain.RunError: board must be a folder or a SummaryWriter, got 3; name a folder
    """
    if isinstance(given, (str, os.PathLike)):
        optional("tensorboard", "to write a board", "tensorboard", RunError)
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(os.fspath(given)), True
    if callable(getattr(given, "add_scalar", None)) and callable(getattr(given, "add_image", None)):
        return given, False
    raise RunError(f"board must be a folder or a SummaryWriter, got {shown(given)}; name a folder")


MOST = 64  # photos; their inputs stay in memory


class LabelQuestion(RunRequest):
    """A question about the label of each photo, if no target is given; without a label, about the top class.

    During training the top class changes, and a map of another class is another map: the label stays.
    """

    by_label = False

    def answers(self, photos: list[Prepared], labels: Labels) -> list[PhotoRecord]:
        if self.by_label:
            known = [labels.first_class(photo.label) for photo in photos]
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
        photos = [replace(p, entry=replace(p.entry, name=stored_name(step, p.entry.name))) for p in self.photos]
        found: dict[str, PhotoRecord | Failed] = {}
        for labelled in (True, False):
            group = [photo for photo in photos if (self.labels.first_class(photo.label) is not None) is labelled]
            for batch in self.question.each(group, self.labels):
                found |= {each.name if isinstance(each, Failed) else each.photo[0]: each for each in batch}
        return [found[photo.entry.name] for photo in photos]

    def scene(self, photo: Prepared, side: int) -> pictures.Scene | None:
        """The photo at a size for looking at, and where its map lies; None for one that came as a tensor."""
        image = self.source.read(photo.entry).image
        return None if isinstance(image, torch.Tensor) else shrunk_scene(load_image(image), photo.box, side)


def shrunk_scene(image: Image.Image, box: Box, side: int) -> pictures.Scene:
    """A photo whose longer side has at most so many pixels, and where maps lie on it."""
    scale = min(1.0, side / max(image.size))
    width, height = (max(1, round(length * scale)) for length in image.size)
    across, down = width / image.width, height / image.height
    where = Box(box.left * across, box.top * down, box.right * across, box.bottom * down)
    return pictures.Scene(image.resize((width, height)) if scale < 1 else image, where, (where,))


def _read(source: Source, preparer: Preparer) -> list[Prepared]:
    photos: list[Prepared] = []
    for entry in entries_of(source):
        found = preparer(entry)
        if not isinstance(found, Prepared):
            raise RunError(f"photos must be readable to be watched, but {found.reason}; leave this one out")
        photos.append(found)
        if len(photos) > MOST:
            break
    if not 0 < len(photos) <= MOST:
        got = "more; choose some of them" if photos else "none; name some"
        raise RunError(f"photos must be from 1 to {MOST} to be watched, got {got}")
    return photos


class Monitor:
    """Explains a fixed set of photos every so many steps of a training; call `step` after each step of the optimizer.

    The first look is at the network before its first step, and the last one at what it is at the end of the block. In
    the steps just before each look, gradients are watched: their flow from layer to layer (`GradientFlow`) and units
    that get none (`DeadUnits`). Between looks there are no hooks. The model, its gradients and modes, and the random
    numbers of the training stay as they are without it.

    Each photo is explained for its label, where that is a class of the model, and otherwise for its top class.

    What goes wrong at the first look is raised. Later, it becomes a warning, and the training goes on.

    Args:
        explainer: an `Explainer` of the model that is trained, or the model.
        photos: at most 64, as for `explain.run`: a folder, a list, pairs of a photo and a label, a small data set.
        every: how many steps there are from one look to the next.
        output: the file of a run, which keeps maps, figures and gradients; see `film`. A training that goes on from an
            earlier step continues the file from there, and what came after that step is taken out of it.
        board: a folder for TensorBoard (extra ``tensorboard``), or a ``SummaryWriter``. One of the two must be given.
        methods, target, targets, top_k, layer, fuse, batch_size, precision, samples, tolerance, max_seconds:
            as for `explain.run`.
        window: in how many steps before each look gradients are watched; 0 for none.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does.
        start: how many steps of training there were before.

    Raises:
        RunError: the photos or the file cannot be used, or numbers do not fit.

    >>> import torch, explain, tempfile
    >>> from PIL import Image
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    >>> explainer = explain.Explainer(model, preprocess=explain.models.CenterCrop(8))
    >>> photos = [(Image.new("RGB", (9, 8), "red"), 1), (Image.new("RGB", (9, 8), "blue"), 2)]
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Monitor(explainer, photos, every=2, output=f"{folder}/training.sqlite") as watch:
    ...         for _ in range(4):
    ...             loss = model(torch.rand(2, 3, 8, 8)).square().mean()
    ...             loss.backward()
    ...             optimizer.step()
    ...             watch.step(loss=loss)
    ...     run = explain.open_run(f"{folder}/training.sqlite")
    ...     sorted(set(run.query("SELECT step, name FROM steps ORDER BY step")))
    [(0, 'photo 0'), (0, 'photo 1'), (2, 'photo 0'), (2, 'photo 1'), (4, 'photo 0'), (4, 'photo 1')]
    """

    @keywords(RunOptions)
    def __init__(
        self, explainer: Explainer | nn.Module | Classifier | str, photos: Any, *, every: int = 500,
        output: str | os.PathLike[str] | None = None, board: Any = None,
        methods: MethodLike | Iterable[MethodLike] = "gradcam", target: TargetLike = None, window: int = 5,
        scaler: Scaler | None = None, start: int = 0, **options: Unpack[RunOptions],
    ) -> None:  # fmt: skip
        for name, value, least in (("every", every, 1), ("window", window, 0), ("start", start, 0)):
            check_count(name, value, least)
        if output is None and board is None:
            raise RunError("output or board must be given, got neither; name a file such as training.sqlite")
        self.every, self.window = every, min(window, every)
        self.output = None if output is None else Path(output)
        self._explainer = explainer if isinstance(explainer, Explainer) else Explainer(_plain(explainer))
        self._network = _plain(self._explainer.model)
        for name, parameter in self._network.named_parameters():  # to explain takes all, in all processes at once
            if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "FlatParameter":
                raise RunError(f"model must be whole in this process, but {name!r} is sharded; explain its checkpoints")
        self._photos = MonitoredPhotos(source_of(photos), self._explainer, methods, target, **options)
        self._board: TensorBoardLog | None = None
        self._scaler, self._board_given = scaler, board
        self._stack, self._tools = ExitStack(), ExitStack()
        self._watched: tuple[GradientFlow, DeadUnits] | None = None
        self.done, self._explained, self._due = start, -1, start
        self._begun = False

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(completed=error is None)

    def __repr__(self) -> str:
        where, count = str(self.output or "a board"), len(self._photos.photos)
        return f"Monitor({count} photos every {self.every} steps, to {where!r}; step {self.done})"

    def begin(self) -> None:
        """Open what is written to, and look at the network as it is now.

        Raises:
            RunError: the file cannot be used, or none of the photos can be explained.
        """
        if self._begun:
            raise RunError("watch must begin once, but has begun already; make another one")
        self._begun = True
        try:
            if self.output is not None:
                self.output.parent.mkdir(parents=True, exist_ok=True)
                self._stack.enter_context(locked(self.output))
                own = self._photos.question.manifest(self._photos.source, trained=True)
                self._manifest = {"training": True, **own}
                with self._store() as store:
                    last = 0 if self.done else store.last()
                    if last:
                        got = f"got one up to step {last}; give its start to continue it, or another file"
                        raise RunError(f"output {text(self.output)!r} must be a new file for a new training, {got}")
                    store.go_back(self.done)
            if self._board_given is not None:
                writer, ours = writer_of(self._board_given)
                if ours:
                    self._stack.callback(writer.close)
                photos = self._photos.photos
                self._board = TensorBoardLog(writer, photos, [self._photos.scene(photo, SIDE) for photo in photos])
            self._explain({}, first=True)
            self._prepare()
        except BaseException:  # an interrupt too must not leave hooks and the lock of the file behind
            self._stack.close()
            raise

    def step(self, step: int | None = None, **figures: Any) -> None:
        """Note that a step of training is done, and look if it is time to.

        Args:
            step: how many steps there have been; by default, one more than before.
            figures: numbers that are kept with the look, such as ``loss=loss``. They are read only if there is one.

        Raises:
            RunError: the watch has not begun, or a figure is no number.
        """
        if not self._begun:
            raise RunError("watch must begin before its first step; use it in with, or call begin()")
        self.done = self.done + 1 if step is None else step
        if self.done >= self._due:
            self._explain(figures)
        self._prepare()

    def close(self, *, completed: bool = True) -> None:
        """Look once more if the training was completed, and close what is written to."""
        try:
            if self._begun and completed and self.done > self._explained:
                self._explain({})
            if self._begun and completed and self.output is not None:
                with self._without_failing(), self._store() as store:
                    store.end(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        finally:
            self._tools.close()
            self._stack.close()
            self._begun = False

    def _explain(self, figures: dict[str, Any], *, first: bool = False) -> None:
        gradients = self._gradients()
        numbers = {name: _number(name, value) for name, value in figures.items()}
        self._explained, self._due = self.done, (self.done // self.every + 1) * self.every
        found = self._photos.answers(self.done)
        failures = [each for each in found if isinstance(each, Failed)]
        if first and len(failures) == len(found):
            raise RunError(f"photos must be explained to be watched, but {failures[0].reason}") from failures[0].general
        if failures and not first:
            count = f"{len(failures)} of {len(found)}"
            warn(f"{count} photos could not be explained at step {self.done}: {failures[0].reason}")
        methods = self._photos.question.methods or []
        with nullcontext() if first else self._without_failing():
            if self.output is not None:
                with self._store() as store:
                    store.enter_methods(map(method_row, methods))
                    store.enter_step(self.done, found, numbers, gradients)
            if self._board is not None:
                styles = {method.name: method.style for method in methods}
                self._board.enter(self.done, found, numbers, gradients, styles)

    @contextmanager
    def _without_failing(self) -> Iterator[None]:
        """Warn of what fails in the block: it must not end a training."""
        try:
            yield
        except (ExplainError, OSError) as error:
            warn(f"what was seen at step {self.done} is not kept: {error}")

    def _prepare(self) -> None:
        """Watch gradients if the next step is one of those before a look."""
        if self._watched is None and self.done + 1 > self._due - self.window:
            flow = self._tools.enter_context(GradientFlow(self._network, scaler=self._scaler))
            self._watched = flow, self._tools.enter_context(DeadUnits(self._network))

    def _gradients(self) -> Gradients:
        """What was seen of gradients since the hooks were put in place, and the hooks taken away."""
        watched, self._watched = self._watched, None
        self._tools.close()
        if watched is None:
            return Gradients()
        flow, units = watched
        verdicts, counts = flow.verdicts(), units.counts()
        flows = {name: (each, verdicts[name]) for name, each in flow.summary().items()}
        return Gradients(flows, {name: (counts[name], dead) for name, dead in units.dead().items()})

    def _store(self) -> AbstractContextManager[TrainingStore]:
        """The file, opened for one look: a process forked between two has no part in it."""
        assert self.output is not None
        return closing(TrainingStore(self.output, self._manifest))


def _plain(model: Any) -> Any:
    """A module without what is wrapped around it; a name or classifier as it is."""
    if not isinstance(model, nn.Module):
        return model
    with muted():
        return unwrapped(model)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise RunError(f"{name} must be a number, got {shown(value)}; give one, such as the loss") from None
