"""`Monitor`: during training, a fixed set of photos is explained every so many steps, and gradients
are looked at."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import nn

from explain._utils.errors import (
    ExplainError,
    RunError,
    check_whole_number,
    keywords,
    muted,
    shown,
    warn,
)
from explain.attribution.options import RunOptions
from explain.explanation.explainer import Explainer
from explain.hooks.unwrap import unwrapped
from explain.methods.base import MethodLike
from explain.models import Classifier
from explain.store.lists import source_of
from explain.store.sources import Failed, path_text
from explain.store.writing import locked_run, method_row
from explain.targets.resolve import TargetLike
from explain.training.gradients import DeadUnits, GradientFlow, Scaler
from explain.training.photos import WatchedPhotos
from explain.training.writing import TensorBoardLog, TrainingSnapshot, TrainingStore, writer_of

SIDE = 384  # pixels of the longer side of a picture on a board


class Monitor:
    """Explains a fixed set of photos every so many steps of a training; call `step` after each step
    of the optimizer.

    The first of these snapshots is of the network before its first step, and the last one of what
    it is at the end of the block. In the steps just before each snapshot, gradients are watched:
    their flow from layer to layer (`GradientFlow`) and units that get none (`DeadUnits`). At other
    times there are no hooks. The model, its gradients and modes, and the random numbers of the
    training stay as they are without it.

    Each photo is explained for its label, where that is a class of the model, and otherwise for its
    top class.

    What goes wrong at the first snapshot is raised. Later, it becomes a warning, and the training
    goes on.

    Args:
        explainer: an `Explainer` of the model that is trained, or the model.
        photos: at most 64, as for `explain.run`: a folder, a list, pairs of a photo and a label, a
            small data set.
        every: how many steps there are from one snapshot to the next.
        output: the file of a run, which keeps maps, figures and gradients; see `film`. A training
            that goes on from an earlier step continues the file from there, and what came after
            that step is taken out of it.
        board: a folder for TensorBoard (extra ``tensorboard``), or a ``SummaryWriter``. One of the
            two must be given.
        methods, target, targets, top_k, layer, fuse, batch_size: as for `explain.run`.
        samples, tolerance, max_seconds: as for `explain.run`.
        window: in how many steps before each snapshot gradients are watched; 0 for none.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does.
        start: how many steps of training there were before.

    Raises:
        RunError: the photos or the file cannot be used, or numbers do not fit.

    >>> import torch, explain, tempfile
    >>> from PIL import Image
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    ... )
    >>> explainer = explain.Explainer(model, preprocess=explain.models.CenterCrop(8))
    >>> photos = [(Image.linear_gradient("L"), 1), (Image.radial_gradient("L"), 2)]
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
        self,
        explainer: Explainer | nn.Module | Classifier | str,
        photos: Any,
        *,
        every: int = 500,
        output: str | os.PathLike[str] | None = None,
        board: Any = None,
        methods: MethodLike | Iterable[MethodLike] = "gradcam",
        target: TargetLike = None,
        window: int = 5,
        scaler: Scaler | None = None,
        start: int = 0,
        **options: Unpack[RunOptions],
    ) -> None:
        check_whole_number("every", every, 1)
        check_whole_number("window", window, 0)
        check_whole_number("start", start, 0)
        if output is None and board is None:
            raise RunError(
                "output or board must be given, got neither; name a file such as training.sqlite"
            )
        self.every = every
        self.window = min(window, every)  # there are no more steps between two snapshots
        self.output = None if output is None else Path(output)
        explainer = explainer if isinstance(explainer, Explainer) else Explainer(_plain(explainer))
        self._network = _plain(explainer.model)
        _must_be_whole(self._network)
        self._photos = WatchedPhotos(source_of(photos), explainer, methods, target, **options)
        self._scaler = scaler
        self._board_or_folder = board
        self._board: TensorBoardLog | None = None  # made by `begin`
        self._files = ExitStack()  # the lock of the file, and the writer for the board
        self._hooks = ExitStack()  # those on gradients, there for the steps before a snapshot
        self._watched: tuple[GradientFlow, DeadUnits] | None = None
        self.done = start
        self._last_snapshot = -1  # none
        self._next_snapshot = start
        self._begun = False

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(completed=error is None)

    def __repr__(self) -> str:
        """How many photos are watched, how often, and the step of the training, as text."""
        where = str(self.output or "a board")
        return (
            f"Monitor({len(self._photos.photos)} photos every {self.every} steps, to {where!r}; "
            f"step {self.done})"
        )

    def begin(self) -> None:
        """Open what is written to, and take a snapshot of the network as it is now.

        Raises:
            RunError: the file cannot be used, or none of the photos can be explained.
        """
        if self._begun:
            raise RunError("watch must begin once, but has begun already; make another one")
        self._begun = True
        try:
            if self.output is not None:
                self._begin_file(self.output)
            if self._board_or_folder is not None:
                self._begin_board()
            self._take_snapshot({}, first=True)
            self._watch_gradients()
        # an interrupt too must not leave hooks and the lock of the file behind
        except BaseException:
            self._files.close()
            raise

    def step(self, step: int | None = None, **figures: Any) -> None:
        """Note that a step of training is done, and take a snapshot if it is time to.

        Args:
            step: how many steps there have been; by default, one more than before.
            figures: numbers that are kept with the snapshot, such as ``loss=loss``. They are read
                only if there is one.

        Raises:
            RunError: the watch has not begun, or a figure is no number.
        """
        if not self._begun:
            raise RunError(
                "watch must begin before its first step; use it in with, or call begin()"
            )
        self.done = self.done + 1 if step is None else step
        if self.done >= self._next_snapshot:
            self._take_snapshot(figures)
        self._watch_gradients()

    def close(self, *, completed: bool = True) -> None:
        """Take a last snapshot if the training was completed, and close what is written to."""
        try:
            if self._begun and completed:
                if self.done > self._last_snapshot:
                    self._take_snapshot({})
                if self.output is not None:
                    with self._warning(), self._store() as store:
                        store.end(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        finally:
            self._hooks.close()
            self._files.close()
            self._begun = False

    def _begin_file(self, output: Path) -> None:
        """Open and lock the training's file until `close`, and delete snapshots after the step at
        which training starts; refused for a new training if the file has snapshots.
        """
        output.parent.mkdir(parents=True, exist_ok=True)
        self._files.enter_context(locked_run(output))
        self._manifest = {"training": True, **self._photos.job.manifest}
        with self._store() as store:
            last = 0 if self.done else store.last()
            if last:
                raise RunError(
                    f"output {path_text(output)!r} must be a new file for a new training, got one "
                    f"up to step {last}; give its start to continue it, or another file"
                )
            store.go_back(self.done)

    def _begin_board(self) -> None:
        """Open the writer for TensorBoard, or take the caller's own, and draw the photos once, on
        which later snapshots lay their maps."""
        writer = self._files.enter_context(writer_of(self._board_or_folder))
        photos = self._photos.photos
        self._board = TensorBoardLog(
            writer, photos, [self._photos.scene(photo, SIDE) for photo in photos]
        )

    def _take_snapshot(self, figures: dict[str, Any], *, first: bool = False) -> None:
        """Explain the watched photos, write the snapshot with the caller's ``figures``, remove
        gradient hooks and set the next. Only the ``first`` raises errors, later ones warn.
        """
        numbers = {name: _number(name, value) for name, value in figures.items()}
        self._last_snapshot = self.done
        self._next_snapshot = (self.done // self.every + 1) * self.every
        gradients = self._gradients()
        records = self._photos.explained(self.done)
        failures = [record for record in records if isinstance(record, Failed)]
        if first and len(failures) == len(records):
            raise RunError(
                f"photos must be explained to be watched, but {failures[0].reason}"
            ) from failures[0].general
        if failures and not first:
            warn(
                f"{len(failures)} of {len(records)} photos could not be explained at step "
                f"{self.done}: {failures[0].reason}"
            )
        snapshot = TrainingSnapshot(self.done, records, numbers, **gradients)
        with nullcontext() if first else self._warning():
            self._write(snapshot)

    def _write(self, snapshot: TrainingSnapshot) -> None:
        """Write a snapshot to the file of the training and to TensorBoard, whichever were asked
        for."""
        methods = self._photos.job.methods or []
        if self.output is not None:
            with self._store() as store:
                store.enter_methods(map(method_row, methods))
                store.enter(snapshot)
        if self._board is not None:
            self._board.enter(snapshot, {method.name: method.style for method in methods})

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Turn errors of writing a snapshot in this block into a warning: they must not end a
        training."""
        try:
            yield
        except (ExplainError, OSError) as error:
            warn(f"what was seen at step {self.done} is not kept: {error}")

    def _watch_gradients(self) -> None:
        """Place the hooks that watch gradients, until the snapshot, if the next training step is
        one of the last ``window`` steps before it.
        """
        if self._watched is None and self.done + 1 > self._next_snapshot - self.window:
            flow = self._hooks.enter_context(GradientFlow(self._network, scaler=self._scaler))
            units = self._hooks.enter_context(DeadUnits(self._network))
            self._watched = flow, units

    def _gradients(self) -> dict[str, Any]:
        """Remove the hooks on gradients, and return what they saw as the fields ``gradients`` and
        ``units`` of a `TrainingSnapshot`; empty where no hooks were in place."""
        watched = self._watched
        self._watched = None
        self._hooks.close()
        if watched is None:
            return {}
        flow, units = watched
        verdicts = flow.verdicts()
        counts = units.counts()
        gradients = [
            (name, mean_flow.rms, mean_flow.largest, mean_flow.zero, verdicts[name])
            for name, mean_flow in flow.summary().items()
        ]
        return {
            "gradients": gradients,
            "units": [(layer, counts[layer], dead) for layer, dead in units.dead().items()],
        }

    def _store(self) -> AbstractContextManager[TrainingStore]:
        """Open the file of the training for one snapshot. It is not kept open: worker processes
        that are forked between two snapshots would share an SQLite connection, which damages files.
        """
        assert self.output is not None
        return closing(TrainingStore(self.output, self._manifest))


def _must_be_whole(network: nn.Module) -> None:
    """Refuse a network whose parameters are sharded over processes (FSDP, tensor parallel):
    explaining takes all processes at once, and the monitor is in one alone.
    """
    for name, parameter in network.named_parameters():
        if (
            type(parameter.data).__name__ == "DTensor"
            or type(parameter).__name__ == "FlatParameter"
        ):
            raise RunError(
                f"model must be whole in this process, but {name!r} is sharded; explain its "
                "checkpoints"
            )


def _plain(model: Any) -> Any:
    """The network inside wrappers such as DDP or ``torch.compile``, so that explaining
    neither compiles nor waits for other processes; a name or classifier is returned as it is."""
    if not isinstance(model, nn.Module):
        return model
    with muted():
        return unwrapped(model)


def _number(name: str, value: Any) -> float:
    """The caller's figure ``name`` of a training step, such as the loss, as a float; a tensor of
    one element is read from its device."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise RunError(
            f"{name} must be a number, got {shown(value)}; give one, such as the loss"
        ) from None
