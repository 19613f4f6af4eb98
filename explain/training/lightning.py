"""`callback`: a training with Lightning watched. Lightning is imported when a callback is made, and not before."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from explain._utils.errors import RunError
from explain.training.monitor import Monitor

NAMES = ("lightning.pytorch", "pytorch_lightning")


def callback(photos: Any, *, explainer: Callable[[Any], Any] | None = None, **options: Any) -> Any:
    """Return a callback for Lightning's ``Trainer`` that explains photos every so many steps; see `Monitor`.

    Of several processes, the first one explains. A training that goes on from a checkpoint goes on with its file.
    Needs ``lightning`` or ``pytorch-lightning``.

    Args:
        photos: as for `Monitor`.
        explainer: from the ``LightningModule`` to an `Explainer` or the network in it, such as
            ``lambda module: explain.Explainer(module.net, labels, preprocess)``; by default, the module itself.
        options: as for `Monitor`, but ``start``, which the trainer knows.

    Raises:
        RunError: Lightning is not installed, or it takes no such option.
    """
    if "start" in options:
        raise RunError("start must be left to the trainer, but was given; leave it out")
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise RunError(f"option {unknown[0]!r} is unknown; use one of {', '.join(sorted(OPTIONS))}")
    return _class(_base())(photos, explainer, options)


OPTIONS = frozenset(["every", "output", "board", "methods", "target", "layer", "window", "scaler"])


class MonitorCallback:
    """What Lightning calls during training."""

    def __init__(self, photos: Any, explainer: Callable[[Any], Any] | None, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.photos, self.explainer, self.options = photos, explainer, dict(options)
        self.monitor: Monitor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self.photos, self.explainer, self.options)  # its class is made here, and has no place

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            explained = pl_module if self.explainer is None else self.explainer(pl_module)
            self.monitor = Monitor(explained, self.photos, start=int(trainer.global_step), **self.options)
            self.monitor.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.monitor.step(int(trainer.global_step), **({} if loss is None else {"loss": loss}))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close(completed=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(completed=False)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close(completed=False)

    def _close(self, *, completed: bool) -> None:
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.close(completed=completed)


def _remake(photos: Any, explainer: Any, options: Mapping[str, Any]) -> Any:
    return callback(photos, explainer=explainer, **options)


@cache
def _class(base: type) -> Any:
    return type(
        "ExplainCallback", (MonitorCallback, base), {"__module__": __name__, "__doc__": MonitorCallback.__doc__}
    )


def _base() -> type:
    for name in NAMES:
        try:
            found: type = importlib.import_module(name).Callback
        except ImportError:
            continue
        return found
    raise RunError(
        "lightning must be installed for its callback; pip install 'explain[lightning]', or use Monitor in a loop of "
        "your own"
    )
