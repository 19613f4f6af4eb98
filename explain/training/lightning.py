"""Callbacks for Lightning, which explain photos or add a prior. It is imported when a callback is
made, not before."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from explain._utils.errors import RunError
from explain._utils.spelling import did_you_mean
from explain.attribution.options import RunOptions
from explain.training.monitor import Monitor
from explain.training.prior import AttributionPrior


def callback(photos: Any, *, explainer: Callable[[Any], Any] | None = None, **options: Any) -> Any:
    """Return a callback for Lightning's ``Trainer`` that explains photos every so many steps; see
    `Monitor`.

    Of several processes, the first one explains. A training that goes on from a checkpoint goes on
    with its file. Needs ``lightning`` or ``pytorch-lightning``.

    Args:
        photos: as for `Monitor`.
        explainer: from the ``LightningModule`` to an `Explainer` or the network in it, such as
            ``lambda module: explain.Explainer(module.net, labels, preprocess)``; by default, the
            module itself.
        options: as for `Monitor`, but ``start``, which the trainer knows.

    Raises:
        RunError: Lightning is not installed, or it takes no such option.
    """
    if "start" in options:
        raise RunError("start must be left to the trainer, but was given; leave it out")
    options_of_monitor = {*inspect.signature(Monitor).parameters, *RunOptions.__annotations__} - {
        "explainer",
        "photos",
        "options",
    }
    for name in options.keys() - options_of_monitor:
        raise RunError(
            f"option {name!r} is unknown; {did_you_mean(name, sorted(options_of_monitor))}"
        )
    return _callback_class(MonitorCallback, _base())(photos, explainer, options)


def prior_callback(
    prior: AttributionPrior,
    *,
    network: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Sequence[Any]] | None = None,
) -> Any:
    """Return a callback for Lightning's ``Trainer`` that adds a prior's penalty to the loss of each
    training step.

    The penalty is a part of what ``training_step`` returns, so that gradients are accumulated,
    clipped and shared between processes as those of the loss. The module logs it as
    ``attribution_prior``.

    Args:
        prior: the penalty.
        network: from the ``LightningModule`` to the network that is explained, such as ``lambda
            module: module.net``; by default, the module itself.
        inputs: from a batch to the arguments of the prior after the model: images, targets and, if
            it needs them, masks. By default, the batch itself, as a tuple of these.

    Raises:
        RunError: Lightning is not installed, or, when training starts, the module optimises by
            hand.
    """
    return _callback_class(PriorCallback, _base())(prior, network, inputs)


class MonitorCallback:
    """What Lightning calls during training."""

    def __init__(
        self, photos: Any, explainer: Callable[[Any], Any] | None, options: Mapping[str, Any]
    ) -> None:
        """Keep what `callback` was given; the `Monitor` is made when the training starts."""
        super().__init__()
        self.photos = photos
        self.explainer = explainer
        self.options = dict(options)
        self.monitor: Monitor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the callback as a call of `callback`; Lightning pickles callbacks when it starts
        further processes. The monitor is not kept: it begins with the training."""
        remade = functools.partial(callback, self.photos, explainer=self.explainer, **self.options)
        return remade, ()  # its class is made here, and has no place

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the monitor at the trainer's step, in the first of several processes only."""
        if trainer.is_global_zero:
            explained = pl_module if self.explainer is None else self.explainer(pl_module)
            self.monitor = Monitor(
                explained, self.photos, start=int(trainer.global_step), **self.options
            )
            self.monitor.begin()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let the monitor count a training step, with the loss that ``training_step`` returned.
        With accumulated gradients, ``global_step`` stays the same for several batches.
        """
        if self.monitor is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        figures = {} if loss is None else {"loss": loss}
        self.monitor.step(int(trainer.global_step), **figures)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close(completed=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: Any) -> None:
        self._close(completed=False)

    on_exception = teardown

    def _close(self, *, completed: bool) -> None:
        """Close the monitor, unless it is closed already; with a last snapshot if the training was
        completed."""
        monitor = self.monitor
        self.monitor = None
        if monitor is not None:
            monitor.close(completed=completed)


class PriorCallback:
    """Adds a penalty to what ``training_step`` returns, while a training runs."""

    def __init__(self, prior: AttributionPrior, network: Any, inputs: Any) -> None:
        """Keep what `prior_callback` was given; nothing is changed before the training starts."""
        super().__init__()
        self.prior = prior
        self.network = network
        self.inputs = inputs

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the callback as a call of `prior_callback`: its class is made at run time, and
        cannot be imported by name."""
        return functools.partial(
            prior_callback, self.prior, network=self.network, inputs=self.inputs
        ), ()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace ``training_step`` on the instance (deleting it brings the method back) by one
        whose loss has the penalty: Lightning's hooks come after backward.
        """
        if not pl_module.automatic_optimization:
            raise RunError(
                "automatic_optimization must be True for a prior, got False; add prior(...) to the "
                "loss"
            )
        network = pl_module if self.network is None else self.network(pl_module)
        own_training_step = pl_module.training_step

        @functools.wraps(own_training_step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            """Return what the module's own training step returns, with the penalty of the prior
            added to its loss, and log the penalty."""
            result = own_training_step(batch, *args, **kwargs)
            if result is None:  # Lightning skips this batch
                return None
            penalty = self.prior(network, *(batch if self.inputs is None else self.inputs(batch)))
            pl_module.log("attribution_prior", penalty.detach())
            if isinstance(result, Mapping):
                return {**result, "loss": result["loss"] + penalty}
            return result + penalty

        pl_module.training_step = training_step

    def on_train_end(self, trainer: Any, pl_module: Any, *error: BaseException) -> None:
        """Give the module its own ``training_step`` back."""
        vars(pl_module).pop("training_step", None)

    on_exception = on_train_end


@functools.cache
def _callback_class(kind: type, base: type) -> Any:
    """A subclass of ``kind`` and of Lightning's ``Callback`` (``base``), made once.
    It is made at run time since Lightning is not imported before a callback is wanted.
    """
    return type(kind.__name__, (kind, base), {"__module__": __name__, "__doc__": kind.__doc__})


def _base() -> type:
    """The class ``Callback`` of Lightning, by its new or its old package name."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with suppress(ImportError):
            return cast(type, importlib.import_module(name).Callback)
    raise RunError(
        "lightning must be installed for its callback; pip install 'explain-hooks[lightning]'"
    )
