"""Results stand alone: what was saved or pickled is read back without a model, and computed again
from its record."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import explain
from explain import RecordError
from explain.attribution.encoding import decode, encode, unknown
from explain.attribution.records import FORMAT
from explain.baselines import Zero
from explain.methods import (
    RISE,
    Augmented,
    FinerCAM,
    GradCAM,
    IntegratedGradients,
    LayerCAM,
    Saliency,
    Smooth,
    Sufficient,
)
from explain.targets import Difference, Segmentation
from explain.targets.labels import Category
from tests.conftest import Made, TinyNet, settled
from tests.runs.networks import as_it_is, picture


@pytest.fixture(scope="module")
def bundled() -> explain.Explainer:
    return explain.Explainer("tiny", size=32)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    picture(0, (48, 36)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def same(one: Any, other: Any) -> bool:
    """Whether two values are of one kind and equal, tensors and fields too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return same(list(vars(one).values()), list(vars(other).values()))
    return one == other


VALUES = [
    [None, True, 0, -3, 0.1, float("inf"), "text", "\x1b[2J\udce9", [1, [2.5]]],
    (1, (2, [3])),
    {"a": (1,), 2: "b"},
    Category(3, "cat"),
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
]


def test_options_come_back_from_json_as_they_were() -> None:
    for value in VALUES:
        written = json.loads(json.dumps(encode(value), allow_nan=False))
        assert unknown(written) == []
        assert same(decode(written), value), value


@pytest.mark.parametrize(
    "value",
    [
        {"class": "os.system", "options": {"command": "true"}},
        {"class": "GradCAM", "options": {"rely": True}},
        {"class": "IntegratedGradients", "options": {"rule": "middle"}},
        {"unknown": "f"},
        {"something": 1},
        {"tensor": "eJwDAAAAAAE=", "dtype": "float32", "shape": [10**12]},
        {"tensor": "eJwDAAAAAAE=", "dtype": "load", "shape": [0]},
    ],
)
def test_what_no_version_has_written_is_refused(value: Any) -> None:
    with pytest.raises(RecordError, match=r"^record must hold "):
        decode([value])


def test_what_a_record_cannot_hold_is_named_in_it() -> None:
    written = encode({"a": [brightness, (len, 3)]})
    assert unknown(written) == ["brightness", "len"]
    large = torch.zeros(1).expand(2**27)  # which needs no memory
    assert encode(large) == {"unknown": f"a tensor of shape ({2**27},)"}


def test_what_was_saved_is_read_back_without_a_model(
    bundled: explain.Explainer, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explanation = bundled(photo, "integratedgradients", target="tabby")
    attribution = explanation.attributions["integratedgradients"]
    _, values, record = explanation.save(tmp_path / "out")
    monkeypatch.setattr("torch.load", None)
    for path in (values, record):
        saved = explain.load(path)
        assert saved.record == explanation.record()
        assert saved.record["format"] == FORMAT
        assert torch.equal(saved.values, attribution.values[0])
        assert torch.equal(saved.heatmap, attribution.heatmap[0])
        assert (saved.method, saved.label) == (attribution.method, "tabby cat")
    for name in ("layer", "size", "style", "target", "score"):
        assert same(getattr(saved.attribution, name), getattr(attribution, name))
    assert same(dict(saved.attribution.options), dict(attribution.options))


def brightest_square(net: Any, x: Tensor) -> Tensor:
    """Says class 1 where one of 2 x 2 pixels is bright."""
    mark = nn.functional.avg_pool2d(x.mean(1), 2).amax((1, 2))
    return torch.stack([torch.full_like(mark, 0.5), mark], 1)


@pytest.mark.parametrize("map_format", ["npy", "npz"])
@pytest.mark.parametrize("reasons", [1, 5, 6, 7, 9])
def test_sets_of_evidence_are_read_back_as_they_were(
    reasons: int, map_format: Any, tmp_path: Path
) -> None:
    explainer = explain.Explainer(Made(brightest_square), preprocess=as_it_is)
    image = np.full((6, 6, 3), 255, np.uint8)
    explanation = explainer(image, Sufficient(3, Zero(), reasons=reasons), target=1)
    record = explanation.save(tmp_path, map_format=map_format)[2]
    (sets,) = explanation.attributions["sufficient"].sets  # each square is one
    (read,) = explain.load(record).attribution.sets
    assert len(sets) == reasons
    for first, second in zip(sets, read, strict=True):
        assert torch.equal(first.mask, second.mask)
        assert first.mask.sum() == 4
        assert (first.proof, first.alone) == (second.proof, pytest.approx(second.alone))


BASELINE = torch.linspace(-1, 1, 3 * 32 * 32).reshape(3, 32, 32)


REPEATED: dict[str, dict[str, Any]] = {
    "nested": {"methods": Augmented(Smooth(GradCAM(relu=False), samples=2), scales=(1.0, 0.9))},
    "tensor": {"methods": IntegratedGradients(steps=3, baseline=BASELINE)},
    "fused": {"layer": ["layer2", "layer3"], "fuse": "product"},
    "estimate": {"methods": RISE(samples=9)},
    "difference": {"target": Difference("tabby cat", "espresso"), "methods": "saliency"},
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
    assert torch.equal(again.values, record.values)
    assert again.explainer.model is not bundled.model
    assert record.repeat(bundled).record() == record.record


def brightness(output: Tensor) -> Tensor:
    return output.mean(1)


def test_what_is_missing_to_repeat_is_said_in_one_line(tmp_path: Path) -> None:
    explainer = explain.Explainer(settled(TinyNet()), preprocess=as_it_is)
    first = explainer(picture(0), Own(), target=brightness)
    saved = explain.load(first.save(tmp_path)[2])
    with pytest.raises(RecordError) as caught:
        saved.repeat()
    message = str(caught.value)
    for word in ("image-own.json", "TinyNet", "as_it_is", "photo", "'own'", "brightness"):
        assert word in message
    assert message.endswith("use repeat(explainer=..., image=..., method=..., target=...)")
    again = saved.repeat(explainer, image=picture(0), method=Own(), target=brightness)
    assert torch.equal(again.values, saved.values)


def test_a_repetition_with_something_else_is_refused(
    photo: Path, tmp_path: Path, bundled: explain.Explainer
) -> None:
    weights = tmp_path / "same.pt"
    state = bundled.model.state_dict()
    torch.save(state, weights)
    first = explain.Explainer("tiny", size=32, weights=weights)(photo, "saliency", 3)
    saved = explain.load(first.save(tmp_path / "out")[2])
    assert torch.equal(saved.repeat().values, saved.values)
    with pytest.raises(RecordError, match="explained"):
        saved.repeat(bundled, image=picture(1))
    content = photo.read_bytes()
    pixels = np.asarray(Image.open(photo))
    for changed in (pixels[::-1], pixels.reshape(pixels.shape[1], pixels.shape[0], 3)):
        Image.fromarray(changed).save(photo)  # the latter has the same bytes in other rows
        with pytest.raises(RecordError, match="explained"):
            saved.repeat()
    photo.write_bytes(content)
    with pytest.raises(RecordError, match="CenterCrop"):
        saved.repeat(explain.Explainer("tiny", size=40))
    state["fc.bias"] = state["fc.bias"] + 1
    torch.save(state, weights)
    with pytest.raises(RecordError, match="weights"):
        saved.repeat()
    photo.unlink()
    with pytest.raises(RecordError, match="repeat"):
        saved.repeat(bundled)


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
    files = [tmp_path / f"model.{suffix}" for suffix in ("pt2", "ts", "pt", "onnx")]
    for file in files:
        file.write_bytes(b"content")
    for name in ("os:abort", "./model.py:make", "timm:hf-hub:someone/model", *files):
        record["explainer"]["arguments"]["model"] = str(name)
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


BROKEN: dict[str, Callable[[Path], Any]] = {
    "format": of_later_format,
    "JSON": lambda path: path.write_text("[" * 100_000),
    "cannot be read": lambda path: path.unlink(),
    "values": lambda path: path.with_suffix(".npy").unlink(),
    "differ": lambda path: np.save(path.with_suffix(".npy"), np.zeros((3, 32, 32), np.float32)),
}


def test_damaged_records_are_refused(
    photo: Path, tmp_path: Path, bundled: explain.Explainer
) -> None:
    explanation = bundled(photo, "saliency", 3)
    for message, spoil in BROKEN.items():
        path = explanation.save(tmp_path / message)[2]
        spoil(path)
        with pytest.raises(RecordError, match=message) as caught:
            explain.load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(RecordError, match="file must"):
        explain.load("a.png")


def test_an_explanation_is_pickled_and_copied_without_its_model(photo: Path) -> None:
    model = settled(TinyNet())
    model.secret = lambda: None  # which cannot be pickled
    explainer = explain.Explainer(model, preprocess=lambda image: as_it_is(image))
    first = explainer(photo, ["gradcam", "saliency"], targets=[2, lambda output: output[:, 0]])
    content = pickle.dumps(first)
    assert len(content) < 100_000
    picture_of_first = first.overlay("gradcam", caption=True).tobytes()
    for other in (pickle.loads(content), copy.copy(first), copy.deepcopy(first)):
        assert other.explainer is None
        assert other.record("saliency", 1) == first.record("saliency", 1)
        assert other.overlay("gradcam", caption=True).tobytes() == picture_of_first
        assert (other.predictions, other.targets) == (first.predictions, first.targets)


class Own(Saliency):
    """A method of somebody else's, that is not registered."""

    name = "own"
