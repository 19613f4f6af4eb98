"""Results stand alone: what was saved or pickled is read back without a model, and computed again
from its record."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import explain
from explain import RecordError
from explain.attribution.encoding import decode, encode, unknown
from explain.attribution.records import FORMAT
from explain.engine import Evidence, InputGradients
from explain.methods import (
    RISE,
    Augmented,
    FinerCAM,
    GradCAM,
    IntegratedGradients,
    LayerCAM,
    Method,
    Smooth,
)
from explain.targets import Difference, Segmentation, Similarity
from explain.targets.labels import Category
from tests.conftest import ROOT, TinyNet, settled

CAT = ROOT / "assets" / "chelsea.png"


@pytest.fixture(scope="module")
def bundled() -> explain.Explainer:
    return explain.Explainer("tiny", size=32)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    with Image.open(CAT) as image:
        image.convert("RGB").resize((48, 36)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def same(one: Any, other: Any) -> bool:
    """Whether two values are of one kind and equal, tensors and fields too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        kinds = (one.dtype, one.shape) == (other.dtype, other.shape)
        return kinds and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return same(list(vars(one).values()), list(vars(other).values()))
    return one == other or (one != one and other != other)


VALUES = [
    [None, True, 0, -3, 0.1, float("inf"), float("nan"), "text", "\x1b[2J\udce9", [1, [2.5]]],
    (1, (2, [3])),
    {"a": (1,), 2: "b"},
    Category(3, "cat"),
    torch.rand(3, 4, 5),
    torch.tensor(2.0),
    torch.zeros(0, 3),
    torch.tensor([[True, False]]),
    torch.rand(5).bfloat16(),
    torch.rand(2, 2).double()[:, ::2],
    torch.tensor([1 + 2j]),
    Augmented(Smooth(GradCAM(relu=False), samples=3), scales=(1.0, 0.9)),
    FinerCAM(LayerCAM(), alpha=0.3),
    IntegratedGradients(baseline=torch.rand(3, 4, 4)),
    Segmentation(3, torch.ones(1, 4, 4)),
    Similarity(torch.rand(4)),
]


def test_options_come_back_from_json_as_they_were() -> None:
    for value in VALUES:
        written = json.loads(json.dumps(encode(value), allow_nan=False))
        assert unknown(written) == []
        assert same(decode(written), value), value


@pytest.mark.parametrize(
    "value",
    [
        {"class": "Explainer", "options": {}},
        {"class": "os.system", "options": {"command": "true"}},
        {"class": "GradCAM", "options": {"rely": True}},
        {"class": "IntegratedGradients", "options": {"rule": "middle"}},
        {"unknown": "f"},
        {"something": 1},
        {"tensor": "?", "dtype": "float32", "shape": [1]},
        {"tensor": "eJwDAAAAAAE=", "dtype": "float32", "shape": [10**12]},
        {"tensor": "eJwDAAAAAAE=", "dtype": "load", "shape": [0]},
    ],
)
def test_what_no_version_has_written_is_refused(value: Any) -> None:
    with pytest.raises(RecordError, match=r"^record must hold "):
        decode([value])


def test_what_is_the_callers_own_is_said_to_be_so() -> None:
    def callers_function() -> None: ...

    assert unknown(encode({"a": [callers_function, (len, 3)]})) == [
        callers_function.__qualname__,
        "len",
    ]


def test_what_was_saved_is_read_back_without_a_model(
    bundled: explain.Explainer, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explanation = bundled(
        photo, ["gradcam", "integratedgradients"], target="tabby", precision="full"
    )
    explanation.save(tmp_path / "out")
    monkeypatch.setattr("torch.load", None)
    files = {
        "gradcam": "photo-gradcam.json",
        "integratedgradients": "photo-integratedgradients.npy",
    }
    for method, attribution in explanation.attributions.items():
        saved = explain.load(tmp_path / "out" / files[method])
        assert saved.record == explanation.record(method)
        assert saved.record["format"] == FORMAT
        assert saved.record["precision"] == "full"
        assert torch.equal(saved.values, attribution.values[0])
        assert torch.equal(saved.heatmap, attribution.heatmap[0])
        assert (saved.method, saved.label) == (method, "tabby cat")
        again = saved.attribution
        for name in ("layer", "size", "style"):
            assert getattr(again, name) == getattr(attribution, name)
        assert same(dict(again.options), dict(attribution.options))
        assert again.target.tolist() == [66]  # type: ignore[union-attr]
        assert again.score.item() == attribution.score.item()


REPEATED: dict[str, dict[str, Any]] = {
    "plain": {},
    "nested": {"methods": Augmented(Smooth(GradCAM(relu=False), samples=2), scales=(1.0, 0.9))},
    "tensor": {
        "methods": IntegratedGradients(
            steps=3, baseline=torch.linspace(-1, 1, 3 * 32 * 32).reshape(3, 32, 32)
        )
    },
    "fused": {"layer": ["layer2", "layer3"], "fuse": "product"},
    "bf16": {"methods": RISE(samples=9), "precision": "bfloat16"},
    "difference": {"target": Difference("tabby cat", "espresso"), "methods": "saliency"},
    "class": {"target": "espresso"},
}


@pytest.mark.parametrize("case", REPEATED)
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_what_was_saved_is_computed_again(
    case: str, photo: Path, tmp_path: Path, bundled: explain.Explainer
) -> None:
    first = bundled(photo, **REPEATED[case])
    record = explain.load(first.save(tmp_path / "out")[2])
    again = record.repeat()
    assert again.record() == record.record
    assert torch.equal(again.results[0][record.method].values[0], record.values)
    assert again.explainer.model is not bundled.model
    assert record.repeat(bundled).record() == record.record
    assert record.attribution.rounding == first.results[0][record.method].rounding


@dataclass(frozen=True)
class Constant(Method):
    """A method of somebody else's, that is not registered."""

    level: float = 0.5
    name: ClassVar[str] = "constant"
    summary: ClassVar[str] = "the same everywhere"
    needs: ClassVar[frozenset[Any]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> Tensor:
        return torch.full_like(evidence.inputs[:, 0], self.level)


def brightness(output: Tensor) -> Tensor:
    return output.mean(1)


def scaled(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.resize((16, 16)))).permute(2, 0, 1) / 255


def test_what_is_missing_to_repeat_is_said_in_one_line(tmp_path: Path) -> None:
    model = settled(TinyNet())
    explainer = explain.Explainer(model, preprocess=scaled)
    image = Image.linear_gradient("L").convert("RGB")
    first = explainer(image, Constant(0.25), target=brightness)
    saved = explain.load(first.save(tmp_path)[2])
    with pytest.raises(RecordError) as caught:
        saved.repeat()
    message = str(caught.value)
    assert all(
        word in message
        for word in ("image-constant.json", "TinyNet", "scaled", "photo", "constant", "brightness")
    )
    assert message.endswith("use repeat(explainer=..., image=..., method=..., target=...)")
    again = saved.repeat(explainer, image=image, method=Constant(0.25), target=brightness)
    assert torch.equal(again.attributions["constant"].values[0], saved.values)
    assert saved.attribution.style == "heat"


def test_a_repetition_with_something_else_is_refused(
    photo: Path, tmp_path: Path, bundled: explain.Explainer
) -> None:
    saved = explain.load(bundled(photo, "saliency", 3).save(tmp_path / "out")[2])
    with pytest.raises(RecordError, match="explained"):
        saved.repeat(bundled, image=CAT)
    with pytest.raises(RecordError, match="CenterCrop"):
        saved.repeat(explain.Explainer("tiny", size=40))
    weights = tmp_path / "same.pt"
    state = bundled.model.state_dict()
    torch.save(state, weights)
    of_weights = explain.Explainer("tiny", size=32, weights=weights)(photo, "saliency", 3)
    weighed = explain.load(of_weights.save(tmp_path / "w")[2])
    assert torch.equal(weighed.repeat().attributions["saliency"].values[0], weighed.values)
    others = {name: value + 1 for name, value in state.items() if value.is_floating_point()}
    torch.save({**state, **others}, weights)
    with pytest.raises(RecordError, match="weights"):
        weighed.repeat()
    photo.unlink()
    with pytest.raises(RecordError, match="repeat"):
        saved.repeat()


def test_no_record_runs_code_that_it_names(
    tmp_path: Path, photo: Path, bundled: explain.Explainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a function, and not a file either: readers of exported programs and TorchScript may run
    what is in them."""
    path = bundled(photo, "saliency", 3).save(tmp_path / "out")[2]
    record = json.loads(path.read_text("utf-8"))
    opened: list[Any] = []
    monkeypatch.setattr(torch.export, "load", opened.append)
    monkeypatch.setattr(torch.jit, "load", opened.append)
    for suffix in ("pt2", "ts", "pt", "onnx"):
        (tmp_path / f"model.{suffix}").write_bytes(b"content")
    files = [str(file) for file in tmp_path.glob("model.*")]
    for name in ("os:abort", "./model.py:make", "timm:hf-hub:someone/model", *files):
        record["explainer"]["arguments"]["model"] = name
        path.write_text(json.dumps(record), "utf-8")
        with pytest.raises(RecordError, match="explainer="):
            explain.load(path).repeat()
    assert not opened
    np.save(path.with_suffix(".npy"), np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(RecordError, match="photo-saliency"):
        explain.load(path)


def of_later_format(path: Path) -> None:
    record = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**record, "format": FORMAT + 1}), "utf-8")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "later": (of_later_format, "format"),
    "list": (lambda path: path.write_text("[]"), "JSON"),
    "deep": (lambda path: path.write_text("[" * 100_000), "JSON"),
    "no record": (lambda path: path.unlink(), "cannot be read"),
    "no values": (lambda path: path.with_suffix(".npy").unlink(), "values"),
    "others": (
        lambda path: np.save(path.with_suffix(".npy"), np.zeros((3, 32, 32), np.float32)),
        "differ",
    ),
}


def test_damaged_records_are_refused(
    photo: Path, tmp_path: Path, bundled: explain.Explainer
) -> None:
    explanation = bundled(photo, "saliency", 3)
    for mistake, (spoil, message) in BROKEN.items():
        path = explanation.save(tmp_path / mistake)[2]
        spoil(path)
        with pytest.raises(RecordError, match=message) as caught:
            explain.load(path)
        assert "\n" not in str(caught.value)


def test_an_explanation_is_pickled_and_copied_without_its_model(
    bundled: explain.Explainer, photo: Path
) -> None:
    class Unpicklable(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.secret = lambda: None

    explainer = explain.Explainer(
        settled(Unpicklable()), list("abcde"), preprocess=lambda image: scaled(image)
    )
    first = explainer(photo, ["gradcam", "saliency"], targets=[2, lambda output: output[:, 0]])
    assert first.explainer is explainer
    content = pickle.dumps(first)
    assert b"TinyNet" not in content.replace(b"Unpicklable", b"")
    assert len(content) < 100_000
    for other in (pickle.loads(content), copy.copy(first), copy.deepcopy(first)):
        assert other.explainer is None
        assert other.record("saliency", 1) == first.record("saliency", 1)
        assert (
            other.overlay("gradcam", caption=True).tobytes()
            == first.overlay("gradcam", caption=True).tobytes()
        )
        assert (other.predictions, other.targets) == (first.predictions, first.targets)
