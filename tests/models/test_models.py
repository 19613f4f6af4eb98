from __future__ import annotations

import pickle
import re
import sys
import textwrap
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.testing import assert_close

from explain import ModelError
from explain.models import load
from explain.models.weights import read_weights


def test_the_temperature_changes_confidence_and_never_the_order() -> None:
    loaded = load("tiny")
    logits = torch.randn(50, 200) * 3
    probabilities = loaded.probabilities(logits)
    assert torch.equal(probabilities.argsort(1), logits.argsort(1))
    assert_close(probabilities, (logits / loaded.temperature).softmax(1))


def test_torchvision_models_bring_their_own_weights_transforms_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = torchvision.models.ShuffleNet_V2_X0_5_Weights.DEFAULT
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    random = torchvision.models.shufflenet_v2_x0_5()
    cached = tmp_path / "checkpoints" / published.url.rsplit("/", 1)[1]
    torch.save(random.state_dict(), cached)
    loaded = load("shufflenet_v2_x0_5")  # from the cache: nothing is asked of the network
    assert list(loaded.categories or ()) == published.meta["categories"]
    assert torch.equal(loaded.model.fc.weight, random.fc.weight)
    image = Image.new("RGB", (300, 200), "orange")
    assert_close(loaded.preprocess(image), published.transforms()(image))
    assert loaded.weights == str(published)
    assert load("shufflenet_v2_x0_5", size=96).preprocess(image).shape == (3, 96, 96)


def test_old_names_of_densenets_are_understood(tmp_path: Path) -> None:
    state = torchvision.models.densenet121(num_classes=3).state_dict()
    old = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", key): value
        for key, value in state.items()
    }
    assert old.keys() != state.keys()
    torch.save(old, tmp_path / "old.pt")
    loaded = load("densenet121", weights=tmp_path / "old.pt")
    assert all(torch.equal(value, state[key]) for key, value in loaded.model.state_dict().items())
    assert loaded.weights is not None
    assert "sha256" in loaded.weights


def test_weights_that_cannot_be_downloaded_are_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> object:
        raise URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", offline)
    monkeypatch.setattr("torch.hub.urlopen", offline)
    with pytest.raises(ModelError, match="'resnet50' needs its"):
        load("resnet50")


def test_a_torchvision_that_does_not_fit_torch_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(ModelError, match="torchvision::nms does not exist"):
        load("resnet18")
    assert load().name == "efficientnet-lite0"


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    source = """
    from torch import nn

    class Net(nn.Module):
        categories = ["cat", "dog"]
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.fc = nn.Linear(4, 2)
        def forward(self, x):
            return self.fc(self.conv(x).relu().mean((2, 3)))

    ready = Net()
    number = 3
    def wrong():
        return "no model"
    def failing():
        raise ZeroDivisionError("from the factory")
    """
    (tmp_path / "own_models.py").write_text(textwrap.dedent(source))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    return "own_models"


def test_ones_own_model_is_imported_from_the_current_folder(
    own_module: str, tmp_path: Path
) -> None:
    loaded = load(f"{own_module}:Net")
    assert loaded.categories == ["cat", "dog"]
    assert isinstance(load(f"{own_module}:ready").model, nn.Module)
    state = {f"module.{name}": torch.zeros_like(t) for name, t in loaded.model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "weights.pt")
    zero = load(f"{own_module}:Net", weights=tmp_path / "weights.pt").model
    assert not zero.fc.weight.any()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":Net", "package"),
        ("own_models:", "package"),
        ("not_there:Net", "'not_there'"),
        ("own_models:Nett", "did you mean 'Net'"),
        ("own_models:number", "nn.Module"),
        ("own_models:wrong", "return"),
    ],
)
def test_what_gives_no_model_is_refused(own_module: str, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(name)


class Dangerous:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("code ran",))


def test_weights_that_hold_code_or_nothing_useful_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.pt").write_bytes(pickle.dumps(Dangerous()))
    torch.save({"model": Dangerous()}, tmp_path / "inner.pt")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("text")
    for name, message in (
        ("code.pt", "nothing but tensors|cannot be read"),
        ("inner.pt", "nothing but tensors"),
        ("none.pt", "state dict of tensors"),
        ("text.pt", "cannot be read"),
        ("nothing.pt", "must be a file"),
    ):
        with pytest.raises(ModelError, match=message):
            read_weights(tmp_path / name)
    assert "code ran" not in capsys.readouterr().out
