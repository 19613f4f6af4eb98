"""The report as a file: what is in it is right, nothing in it is markup, and it asks for nothing
from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import explain
from explain import ExplainError, MetricError
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
    if packed["filter"] == "left":
        steps = np.cumsum(steps, axis=1, dtype=steps.dtype)
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
    peak = np.abs(values).max()
    off = np.abs(unpacked(packed) - values)
    if packed["bits"] == 16:
        assert off.max() <= peak / 2**15
    else:  # a step near v is 2 * sqrt(v) / 127 wide, of the peak
        step = 2 * np.sqrt(np.abs(values) / peak) / (127 if signed else 255) + 1 / 127**2
        assert (off <= step * peak * 0.51).all()


def test_a_page_has_the_maps_and_answers_of_its_explanation(explanation: Any) -> None:
    data = Read(explanation.to_html(steps=4)).data
    short = data["index"]["photos"][0]
    full = data["item-0"]
    assert (
        short["label"]
        == full["predictions"][0][0]
        == explain._utils.errors.printable(explanation.predictions[0][0])
    )
    assert full["targets"][0]["label"] == "tabby cat"
    assert full["targets"][1]["probability"] == pytest.approx(float(explanation.probabilities[1]))
    assert [method["name"] for method in full["methods"]] == explanation.methods
    for target, result in enumerate(explanation.results):
        for number, attribution in enumerate(result.values()):
            values = attribution.values[0]
            values = (values.sum(0) if values.ndim == 3 else values).numpy()
            one = full["maps"][target][number]
            assert np.abs(unpacked(one["plane"]) - values).max() <= np.abs(values).max() / 100
            assert one["score"] == pytest.approx(float(attribution.score[0]))
            layers = {
                layer_map["layer"]: unpacked(layer_map["plane"]) for layer_map in one["layers"]
            }
            assert set(layers) == set(attribution.maps)
            for name, layer_map in attribution.maps.items():
                assert (
                    np.abs(layers[name] - layer_map[0].numpy()).max()
                    <= layer_map.abs().max() / 2**15
                )
    assert full["box"] == pytest.approx([18.0, 3.0, 72.0, 57.0])
    # the preprocessing's mean, which is what deletion covers with
    assert full["zero"] == [64, 128, 128]
    assert full["records"][1][2] == json.loads(json.dumps(explanation.record("inputxgradient", 1)))
    shown = Image.open(io.BytesIO(base64.b64decode(full["photo"].split(",")[1])))
    assert shown.size == explanation.photo.size
    assert np.abs(np.asarray(shown).astype(int) - np.asarray(explanation.photo)).mean() < 8


def test_the_curves_are_those_of_the_metrics(
    explanation: Any, explainer: explain.Explainer
) -> None:
    full = item(explanation, Detail(steps=4))
    x = explainer.as_input(explanation.photo)
    for target, result in enumerate(explanation.results):
        table = explain.evaluate(
            explainer.model, x, dict(result), [Deletion(steps=4), Insertion(steps=4)], target=target
        )
        for number, name in enumerate(result):
            curve = full["maps"][target][number]["curve"]
            for metric in ("deletion", "insertion"):
                at, values = table.curve(name, metric)
                assert curve["at"] == at.tolist()
                assert curve[metric] == pytest.approx(values[0].tolist(), abs=1e-5)
                assert curve["areas"][metric] == pytest.approx(float(table[name][metric]), abs=1e-5)


@pytest.mark.parametrize("text", ["page", "sheet", "widget"])
def test_nothing_in_a_page_becomes_markup(text: str, explanation: Any, tmp_path: Path) -> None:
    """The page has the elements that a harmless one has, and the names arrive as the texts that
    they are."""
    if text == "page":
        written = explanation.to_html(steps=0)
    elif text == "sheet":
        both = [explanation, explanation]
        written = sheet(
            both, tmp_path / "sheet.html", title=HOSTILE, truth=[HOSTILE, None]
        ).read_text("utf-8")
    else:
        page = Read(explanation._repr_html_())
        assert page.tags == ["div", "div", "img", "iframe"]
        written = dict(page.attributes)["srcdoc"] or ""
    blocks_of_data = re.findall(
        r'<script type="application/json" id="[\w-]+">(.*?)</script>', written, re.DOTALL
    )
    assert len(blocks_of_data) == (3 if text == "sheet" else 2)
    assert not any(re.search("[<>&]", block) for block in blocks_of_data)
    page = Read(written)
    outside = [tag for tag in page.tags if tag not in ("tr", "td", "th")]
    blocks = 1 + (2 if text == "sheet" else 1)
    assert outside == [
        "html",
        "head",
        "meta",
        "meta",
        "meta",
        "meta",
        "title",
        "link",
        "style",
        "body",
        "div",
        "div",
        "h1",
        "p",
        "table",
        "thead",
        "tbody",
        *["script"] * (blocks + 1),
    ]
    assert not any(name.startswith("on") for name, _ in page.attributes)
    labels = [target["label"] for target in page.data["item-0"]["targets"]]
    assert labels == [explain._utils.errors.printable(label) for label in LABELS[:2]]
    assert page.data["item-0"]["name"] == '"><img src=x>.png'
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", written)
    assert "src=" not in re.sub(r"<script.*?</script>", "", written, flags=re.DOTALL).replace(
        "&lt;img src=x", ""
    )


def test_a_page_forbids_all_but_its_own_script_and_style(explanation: Any) -> None:
    page = Read(explanation.to_html(steps=0))
    policy = dict(part.strip().split(" ", 1) for part in _policy(page).split(";"))
    assert (
        policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
    )
    assert policy.pop("img-src") == "data: blob:"
    for name in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.texts[name].encode()).digest()).decode()
        assert policy.pop(f"{name}-src") == f"'sha256-{digest}'"
    assert not policy


def _policy(page: Read) -> str:
    return next(
        value
        for name, value in page.attributes
        if name == "content" and value and "default-src" in value
    )


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves in two steps, which take less time than the usual ones."""
    monkeypatch.setattr("explain.report.item.STEPS", 2)
    monkeypatch.setattr("explain.report.item.FEWEST_STEPS", 2)


@pytest.mark.usefixtures("few_steps")
def test_the_command_makes_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a page says to type is typed, and gives the same values; its Python too."""
    import shlex

    place = tmp_path / "-a b.png"
    photo().save(place)
    names = [f"thing {number}" for number in range(200)]
    (tmp_path / "names.txt").write_text("\n".join(names))
    first = explain.Explainer("tiny", categories=tmp_path / "names.txt", crop="whole")(
        place,
        ["gradcam", "integratedgradients(steps=3, baseline=blur)", Smooth(GradCAM(), samples=2)],
        targets=[281 % 200, 3],
    )
    again = reproduction(first)
    assert again.command is not None
    words = shlex.split(again.command)
    assert words[0] == "explain"
    assert main([*words[1:], "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "a-b-tiny.html" in printed
    records = {
        path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")
    }
    digests = {record["values"]["sha256"] for record in records.values()}
    wanted = {
        first.record(name, index)["values"]["sha256"]
        for name in first.methods
        for index in range(2)
    }
    assert digests == wanted
    assert {record["label"] for record in records.values()} == {names[281 % 200], names[3]}
    scope: dict[str, Any] = {}
    exec(again.python.rsplit("\n", 1)[0], scope)
    repeated = scope["explanation"]
    assert repeated.targets == first.targets == [names[281 % 200], names[3]]
    assert {
        repeated.record(n, i)["values"]["sha256"] for n in repeated.methods for i in range(2)
    } == wanted


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
        assert places == [None] * len(explanation.results)
    curves = [one["curve"] for row in data["maps"] for one in row]
    assert all(curves)
    classes = kind not in ("one logit", "detection") and all(
        target["probability"] is not None for target in data["targets"]
    )
    assert {curve["reading"] for curve in curves} == {"probability" if classes else "score"}
    assert data["crops"] == []


def test_a_page_has_the_verdict_of_each_map(explanation: Any) -> None:
    data = Read(checked(explanation).to_html(steps=0)).data
    assert data["index"]["photos"][0]["answer"] == "supported"
    verdicts = [one["verdict"] for one in data["item-0"]["maps"][0]]
    assert verdicts == [
        checked(explanation).record(name)["verdict"] for name in explanation.methods
    ]
    assert [verdict and verdict["passed"] for verdict in verdicts] == [True, False, None]
    assert [one["verdict"] for one in data["item-0"]["maps"][1]] == [None] * 3
    assert "\nexplanation.check()\n" in data["item-0"]["again"]["python"]
    assert "check()" not in reproduction(explanation).python


def test_a_sheet_knows_right_and_wrong_and_figures(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    explanations = explainer([photo(seed=seed) for seed in range(3)], ["gradcam", "saliency"])
    best = [explanation.predictions[0][0] for explanation in explanations]
    classes: list[Any] = [
        LABELS.index(best[0]),
        "tabby cat" if best[1] != "tabby cat" else "{{data}}",
        None,
    ]
    place = sheet(
        explanations, tmp_path / "sheet.html", truth=classes, metrics=["sparseness"], steps=3
    )
    data = Read(place.read_text("utf-8")).data
    photos = data["index"]["photos"]
    assert [one_photo.get("right") for one_photo in photos] == [True, False, None]
    table = explain.evaluate(
        explainer.model,
        explainer.as_input(explanations[1].photo),
        dict(explanations[1].attributions),
        "sparseness",
    )
    assert photos[1]["figures"]["saliency"]["sparseness"] == pytest.approx(
        float(table["saliency"]["sparseness"])
    )
    assert data["item-1"]["maps"][0][1]["figures"] == photos[1]["figures"]["saliency"]
    assert (
        data["item-2"]["maps"][0][1]["curve"]
        == item(explanations[2], Detail(steps=3))["maps"][0][1]["curve"]
    )
    with pytest.raises(ExplainError, match="truth must"):
        sheet(explanations, tmp_path / "none.html", truth=[0])
    with pytest.raises(ExplainError, match="explanations must"):
        sheet([], tmp_path / "none.html")
    import copy

    with pytest.raises(MetricError, match="metrics need an"):
        sheet([copy.copy(explanations[0])], tmp_path / "none.html", metrics="sparseness")


def test_the_report_that_is_shown_is_small_and_tells_no_paths() -> None:
    text = (ROOT / "assets" / "report.html").read_text("utf-8")
    assert len(text) < 1_000_000
    data = Read(text).data
    assert len(data["index"]["photos"]) == 5
    paths = [data[f"item-{number}"]["records"][0][0]["image"]["path"] for number in range(5)]
    assert all(path.startswith("assets/") for path in paths)
