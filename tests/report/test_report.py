"""The report as a file: what is in it is right, nothing in it is markup, and it asks for nothing
from elsewhere."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
import re
import shlex
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageChops

import explain
from explain import ExplainError, MetricError
from explain._utils.errors import printable
from explain.cli import main
from explain.methods import GradCAM, Smooth
from explain.metrics import Deletion, Insertion
from explain.report.item import Detail, item, plane
from explain.report.pages import sheet
from explain.report.reproduce import reproduction
from tests.conftest import ROOT
from tests.report.conftest import HOSTILE, KINDS, LABELS, checked, of_kind, photo


class Read(HTMLParser):
    """The elements of a page, and what its blocks of data hold, read by Python's own parser."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.data: dict[str, Any] = {}
        self._id: str | None = None
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        self._id = dict(attrs).get("id") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._inside == "script" and self._id:
            self.data[self._id] = json.loads(data)
        elif self._inside in ("script", "style", "title"):
            self.texts[self._inside] = self.texts.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""
        self._id = None


def unpacked(packed: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A map as the page reads it, written from what `plane` says of its form."""
    kind = np.dtype(f"<{'i' if packed['signed'] else 'u'}{packed['bits'] // 8}")
    steps = np.frombuffer(
        zlib.decompress(base64.b64decode(packed["data"])), kind.str.replace("i", "u")
    )
    steps = steps.reshape(packed["height"], packed["width"])
    if packed["filter"] == "differences":
        steps = np.cumsum(np.cumsum(steps, axis=0, dtype=steps.dtype), axis=1, dtype=steps.dtype)
    shares = steps.view(kind) / np.iinfo(kind).max
    return packed["scale"] * (shares if packed["bits"] == 16 else np.sign(shares) * shares**2)


@pytest.mark.parametrize("size", [(7, 7), (1, 1), (3, 200), (80, 90)])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("smooth", [False, True])
def test_maps_survive_their_packing(size: tuple[int, int], signed: bool, smooth: bool) -> None:
    values = np.random.default_rng(1).normal(size=size).astype(np.float32)
    values = np.cumsum(values, axis=1) if smooth else values
    values = values if signed else np.abs(values)
    packed = plane(values)
    assert (packed["width"], packed["height"]) == size[::-1]
    shares = np.abs(values) / np.abs(values).max()
    off = np.abs(unpacked(packed) - values) / np.abs(values).max()
    # where they are 8 bits, a step near v is 2 * sqrt(v) / 127 wide
    step = 2 * np.sqrt(shares) / (127 if signed else 255) + 1 / 127**2
    assert (off <= (1 / 2**15 if packed["bits"] == 16 else step * 0.51)).all()


def test_a_page_has_the_maps_and_answers_of_its_explanation(explanation: Any) -> None:
    data = Read(explanation.to_html(steps=4)).data
    full = data["item-0"]
    best = printable(explanation.predictions[0][0])
    assert data["index"]["photos"][0]["label"] == full["predictions"][0][0] == best
    assert full["targets"][0]["label"] == "tabby cat"
    assert full["targets"][1]["probability"] == pytest.approx(float(explanation.probabilities[1]))
    assert [method["name"] for method in full["methods"]] == explanation.methods
    for maps, result in zip(full["maps"], explanation.results, strict=True):
        for one, attribution in zip(maps, result.values(), strict=True):
            plane = unpacked(one["plane"])  # where cells look; pixels, since there are few
            off = plane / np.abs(plane).max() - attribution.signed[0].numpy()
            assert np.abs(off).max() < 0.01
            assert one["score"] == pytest.approx(float(attribution.score[0]))
            assert [of_layer["layer"] for of_layer in one["layers"]] == list(attribution.maps)
            for of_layer, expected in zip(one["layers"], attribution.maps.values(), strict=True):
                assert_near(of_layer["plane"], expected[0].numpy(), 1 / 2**15)
    assert full["box"] == pytest.approx([18.0, 3.0, 72.0, 57.0])
    # the preprocessing's mean, which is what deletion covers with
    assert full["zero"] == [64, 128, 128]
    assert full["records"][1][2] == json.loads(json.dumps(explanation.record("inputxgradient", 1)))
    shown = Image.open(io.BytesIO(base64.b64decode(full["photo"].split(",")[1])))
    assert np.asarray(ImageChops.difference(shown, explanation.photo)).mean() < 8


def assert_near(packed: dict[str, Any], values: np.ndarray, tolerance: float) -> None:
    off = np.abs(unpacked(packed) - values).max()
    assert off <= np.abs(values).max() * tolerance


def test_the_curves_are_those_of_the_metrics(
    explanation: Any, explainer: explain.Explainer
) -> None:
    full = item(explanation, Detail(steps=4))
    x = explainer.as_input(explanation.photo)
    metrics = [Deletion(steps=4), Insertion(steps=4)]
    for target, result in enumerate(explanation.results):
        table = explain.evaluate(explainer.model, x, dict(result), metrics, target=target)
        for one, name in zip(full["maps"][target], result, strict=True):
            for metric in ("deletion", "insertion"):
                at, values = table.curve(name, metric)
                curve = one["curve"]
                assert curve["at"] == at.tolist()
                assert curve[metric] == pytest.approx(values[0].tolist(), abs=1e-5)
                assert curve["areas"][metric] == pytest.approx(float(table[name][metric]), abs=1e-5)


@pytest.mark.parametrize("text", ["page", "sheet", "widget"])
def test_nothing_in_a_page_becomes_markup(text: str, explanation: Any, tmp_path: Path) -> None:
    """No name is an element or an attribute; each arrives as the text that it is. Only the page's
    own script and style run, and it asks for nothing."""
    if text == "page":
        written = explanation.to_html(steps=0)
    elif text == "sheet":
        options: dict[str, Any] = {"title": HOSTILE, "truth": [HOSTILE, None]}
        path = sheet([explanation, explanation], tmp_path / "sheet.html", **options)
        written = path.read_text("utf-8")
    else:
        page = Read(explanation._repr_html_())
        assert page.tags == ["div", "div", "img", "iframe"]
        written = dict(page.attributes)["srcdoc"] or ""
    page = Read(written)
    elements = "html head meta title link style body div h1 p table thead tbody tr th td script"
    stills = () if text == "widget" else ("figure", "img", "figcaption")
    assert set(page.tags) <= {*elements.split(), *stills}
    assert page.tags.count("script") == (4 if text == "sheet" else 3)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    sources = [value for name, value in page.attributes if name == "src"]
    assert len(sources) == page.tags.count("img") == {"page": 1, "sheet": 2, "widget": 0}[text]
    assert all(re.fullmatch(r"data:image/jpeg;base64,[\w+/=]+", source or "") for source in sources)
    blocks = re.findall(r'<script type="application/json" id="[\w-]+">(.*?)</script>', written)
    assert len(blocks) == page.tags.count("script") - 1
    assert not any(re.search("[<>&]", block) for block in blocks)
    labels = [target["label"] for target in page.data["item-0"]["targets"]]
    assert labels == [printable(label) for label in LABELS[:2]]
    assert page.data["item-0"]["name"] == '"><img src=x>.png'
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", written)
    (policy,) = (value for _, value in page.attributes if value and "default-src" in value)
    digests = {
        name: base64.b64encode(hashlib.sha256(page.texts[name].encode()).digest()).decode()
        for name in ("style", "script")
    }
    assert dict(part.strip().split(" ", 1) for part in policy.split(";")) == {
        **dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'"),
        **{f"{name}-src": f"'sha256-{digest}'" for name, digest in digests.items()},
        "img-src": "data: blob:",
    }


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves in two steps, which take less time than the usual ones."""
    monkeypatch.setattr("explain.report.item.STEPS", 2)
    monkeypatch.setattr("explain.report.item.FEWEST_STEPS", 2)


@pytest.mark.long
@pytest.mark.usefixtures("few_steps")
def test_the_command_makes_the_same_again(tmp_path: Path) -> None:
    """What a page says to type is typed, and gives the same values; its Python too."""
    place = tmp_path / "-a b.png"
    photo().save(place)
    names = [f"thing {number}" for number in range(200)]
    (tmp_path / "names.txt").write_text("\n".join(names))
    explainer = explain.Explainer("tiny", categories=tmp_path / "names.txt", crop="whole")
    ways = ["integratedgradients(steps=3, baseline=blur)", Smooth(GradCAM(), samples=2)]
    first = explainer(place, ways, targets=[81, 3])
    again = reproduction(first)
    assert again.command is not None
    name, *words = shlex.split(again.command)
    assert name == "explain"
    assert main([*words, "-o", str(tmp_path / "out")]) == 0
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    scope: dict[str, Any] = {}
    exec(again.python.rsplit("\n", 1)[0], scope)
    expected = answers_of(records_of(first))
    assert answers_of(records) == answers_of(records_of(scope["explanation"])) == expected
    assert {label for label, _ in expected} == {names[81], names[3]}
    assert (tmp_path / "out" / "a-b-tiny.html").is_file()


def records_of(explanation: Any) -> list[Any]:
    return [explanation.record(name, index) for name in explanation.methods for index in range(2)]


def answers_of(records: list[Any]) -> set[tuple[str, str]]:
    return {(record["label"], record["values"]["sha256"]) for record in records}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_a_page_of_every_kind_of_explanation(kind: str) -> None:
    explanation = of_kind(kind)
    data = Read(explanation.to_html(steps=2)).data["item-0"]
    compile(data["again"]["python"], "again", "exec")
    places = [target["place"] for target in data["targets"]]
    if kind == "detection":
        assert places == [{"box": [8 / 32, 4 / 32, 24 / 32, 28 / 32]}]
    elif kind == "segmentation":
        bright = explanation.explainer.as_input(explanation.photo)[0].mean(0) > 0
        assert (unpacked(places[0]["mask"]).astype(bool) == bright.numpy()).all()
    else:
        assert places == [None]
    of_no_class = ("one logit", "detection", "segmentation", "function")
    reading = "score" if kind in of_no_class else "probability"
    assert [one["curve"]["reading"] for one in data["maps"][0]] == [reading] * len(data["methods"])
    assert data["crops"] == []


def test_a_page_has_the_check_of_each_map(explanation: Any) -> None:
    answered = checked(explanation)
    data = Read(answered.to_html(steps=0)).data
    assert data["index"]["photos"][0]["check"] == answered.record()["check"]
    of_first, of_second = ([one["check"] for one in maps] for maps in data["item-0"]["maps"])
    assert of_first == [answered.record(name)["check"] for name in explanation.methods]
    assert of_second == [None] * 3
    assert "\nexplanation.check()\n" in data["item-0"]["again"]["python"]
    assert "check()" not in reproduction(explanation).python


def test_a_sheet_knows_right_and_wrong_and_figures(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    explanations = explainer([photo(seed=seed) for seed in range(3)], ["gradcam", "saliency"])
    best, second, _ = (explanation.predictions[0][0] for explanation in explanations)
    wrong = next(label for label in LABELS if label != second)
    options: dict[str, Any] = {"metrics": ["sparseness"], "steps": 3}
    path = tmp_path / "sheet.html"
    sheet(explanations, path, truth=[LABELS.index(best), wrong, None], **options)
    data = Read(path.read_text("utf-8")).data
    photos = data["index"]["photos"]
    assert [one_photo.get("right") for one_photo in photos] == [True, False, None]
    maps = dict(explanations[1].attributions)
    x = explainer.as_input(explanations[1].photo)
    table = explain.evaluate(explainer.model, x, maps, "sparseness")
    sparseness = {"sparseness": pytest.approx(float(table["saliency"]["sparseness"]))}
    saliency = data["item-1"]["maps"][0][1]
    assert saliency["figures"] == photos[1]["figures"]["saliency"] == sparseness
    expected = item(explanations[1], Detail(steps=3))["maps"][0][1]
    assert saliency["curve"] == expected["curve"]
    with pytest.raises(ExplainError, match="truth must"):
        sheet(explanations, path, truth=[0])
    with pytest.raises(MetricError, match="metrics need an"):
        sheet([copy.copy(explanations[0])], path, metrics="sparseness")


def test_the_report_that_is_shown_is_small_and_tells_no_paths() -> None:
    text = (ROOT / "assets" / "report.html").read_text("utf-8")
    assert len(text) < 1_000_000
    data = Read(text).data
    for number in range(len(data["index"]["photos"])):
        record = data[f"item-{number}"]["records"][0][0]
        assert record["image"]["path"].startswith("assets/")
