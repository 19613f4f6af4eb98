"""The callback is called as Lightning calls it; with Lightning itself where it is installed."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import RunError
from explain.training import AttributionPrior
from explain.training.lightning import callback, prior_callback
from tests.training.test_watch import PHOTOS, Training, explainer, network, steps_of


class Callback:
    """The base class of callbacks, as Lightning has it."""


class Trainer:
    """What a callback sees of Lightning's trainer: the optimizer steps after every second batch."""

    is_global_zero = True

    def __init__(self, start: int = 0) -> None:
        self.global_step = start

    def fit(self, training: Training, made: Any, batches: int) -> None:
        module = training.model
        made.on_train_start(self, module)
        for number in range(batches):
            loss = training.step()
            self.global_step += number % 2
            made.on_train_batch_end(self, module, {"loss": loss}, None, number)
        made.on_train_end(self, module)
        made.teardown(self, module, "fit")


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.ModuleType("lightning.pytorch")
    stand_in.Callback = Callback  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stand_in)


@pytest.mark.usefixtures("lightning")
def test_a_callback_counts_the_steps_of_the_optimizer_and_goes_on_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    file = tmp_path / "t.sqlite"
    training = Training()
    made = callback(PHOTOS, explainer=explainer, every=2, output=file)
    assert isinstance(made, Callback)
    Trainer().fit(training, made, 10)
    assert steps_of(explain.open_run(file)) == [0, 2, 4, 5]
    again = pickle.loads(pickle.dumps(callback(PHOTOS, explainer=explainer, every=2, output=file)))
    Trainer(start=4).fit(training, again, 4)
    assert steps_of(explain.open_run(file)) == [0, 2, 4, 6]


@pytest.mark.usefixtures("lightning")
def test_options_that_are_unknown_are_refused_when_the_callback_is_made() -> None:
    with pytest.raises(RunError, match="option 'evry' is unknown"):
        callback(PHOTOS, evry=3)
    with pytest.raises(RunError, match="start must"):
        callback(PHOTOS, start=3)


def test_without_lightning_the_callback_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    # and all options of a `Monitor` are known
    with pytest.raises(RunError, match="lightning must"):
        callback(PHOTOS, output="t.sqlite", top_k=2, fuse="mean", batch_size=1)


# as above
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*does not have many workers")
def test_a_prior_is_a_term_of_the_loss(tmp_path: Path) -> None:
    lightning = pytest.importorskip(
        "lightning.pytorch", reason="the extra lightning is not installed"
    )
    prior = AttributionPrior("inputxgradient", penalty="share", weight=2.0)
    photos = torch.rand(8, 3, 10, 12)
    mask = torch.zeros(8, 10, 12)
    mask[:, :5] = 1
    batches = [(photos[:4], mask[:4]), (photos[4:], mask[4:])]

    class Module(lightning.LightningModule):
        def __init__(self, *, by_hand: bool = False, as_dict: bool = False) -> None:
            super().__init__()
            self.net = network()
            self.by_hand = by_hand
            self.as_dict = as_dict

        def training_step(self, batch: Any, number: int) -> Any:
            x, labels, mask = with_labels(batch)
            loss = F.cross_entropy(self.net(x), labels)
            if self.by_hand:
                loss = loss + prior(self.net, x, labels, mask)
            return {"loss": loss} if self.as_dict else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"accelerator": "cpu", "default_root_dir": tmp_path}

    def trained(module: Any, *callbacks: Any) -> torch.Tensor:
        trainer = lightning.Trainer(
            max_epochs=2, accumulate_grad_batches=2, callbacks=[*callbacks], **quiet
        )
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        assert ("attribution_prior" in trainer.callback_metrics) == bool(callbacks)
        assert "training_step" not in vars(module)
        return nn.utils.parameters_to_vector(module.net.parameters())

    made = pickle.loads(pickle.dumps(prior_callback(prior, network=net_of, inputs=with_labels)))
    expected = trained(Module(by_hand=True))
    assert not torch.allclose(expected, trained(Module()))
    assert torch.equal(trained(Module(), made), expected)
    assert torch.equal(trained(Module(as_dict=True), made), expected)
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(RunError, match="automatic_optimization"):
        made.on_train_start(None, module)


def net_of(module: Any) -> nn.Module:
    return module.net


def with_labels(batch: Any) -> tuple[Any, ...]:
    return batch[0], torch.tensor([0, 1, 2, 3]), batch[1]
