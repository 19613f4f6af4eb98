"""The app without the web: photos, questions, turns and limits."""

from __future__ import annotations

import io
import math
import queue
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import explain
from explain._utils.errors import ExplainError, printable
from explain.app.requests import ExplainRequest, Limits
from explain.app.service import Cache, Service
from explain.app.web import Access
from explain.methods.base import get_method
from explain.report.item import Detail, item, map_and_kind, plane
from explain.targets import Text
from tests.app.conftest import LIMITS
from tests.conftest import ROOT, Made, in_threads, snapshot
from tests.report.conftest import LABELS, PREPROCESS, photo
from tests.report.test_report import Read

WAIT = 60.0
RISE = explain.methods.RISE(samples=1000)


def steps_of(
    service: Service,
    during: Callable[[Mapping[str, Any]], None] = lambda step: None,
    begin: Callable[..., str] | None = None,
    **values: Any,
) -> Any:
    """Send a request, and collect the steps of its answer; ``during`` sees each as it comes."""
    sent: queue.Queue[Mapping[str, Any]] = queue.Queue()
    (begin or service.explain)(values, sent.put)
    steps: list[Mapping[str, Any]] = [{}]
    while not steps[-1].get("end"):
        steps.append(sent.get(timeout=WAIT))
        during(steps[-1])
    return steps[1:]


@pytest.fixture
def name(service: Service) -> str:
    """Of a photo that the service has."""
    added: str = service.add_photo(photo())["photo"]
    return added


def plane_of(a: Any) -> Any:
    """A map as the page has it."""
    return plane(map_and_kind(a)[0])


def at_progress(end: Callable[[str], None]) -> Callable[[Mapping[str, Any]], None]:
    """Call ``end`` with the name of the job as soon as there is progress."""
    names: list[str] = []

    def during(step: Mapping[str, Any]) -> None:
        names.extend([step["work"]] if "work" in step else [])
        if "progress" in step:
            end(names[0])

    return during


@pytest.fixture(autouse=True)
def fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """RISE with fewer samples than usual."""
    monkeypatch.setattr(
        "explain.app.requests.get_method", lambda name: RISE if name == "rise" else get_method(name)
    )


def items(steps: Any) -> list[dict[str, Any]]:
    return [step["item"] for step in steps if "item" in step]


def test_a_photo_is_explained_as_python_does_it(
    service: Service, name: str, explainer: explain.Explainer
) -> None:
    methods = ["gradcam", "saliency"]
    [answer] = items(steps_of(service, photo=name, methods=methods))
    expected = explainer(photo(), methods)
    predictions = [[printable(label), value] for label, value in expected.predictions]
    assert answer["predictions"] == predictions
    planes = [one["plane"] for one in answer["maps"][0]]
    assert planes == [plane_of(expected[method]) for method in methods]


def test_slow_methods_sharpen_after_the_quick_ones(
    service: Service, name: str, explainer: explain.Explainer
) -> None:
    steps = steps_of(service, photo=name, methods=["rise", "gradcam"], seconds=60)
    quick, both = items(steps)
    assert [method["name"] for method in quick["methods"]] == ["gradcam"]
    assert [method["name"] for method in both["methods"]] == ["gradcam", "rise"]
    between = [step for step in steps if "progress" in step]
    assert between[-1]["progress"] == [RISE.samples] * 2
    assert {step["maps"][0]["plane"]["width"] for step in between if "maps" in step} == {32}
    expected = explainer(photo(), RISE, targets=[quick["targets"][0]["class"]])
    assert both["maps"][0][1]["plane"] == plane_of(expected["rise"])


@pytest.mark.parametrize("method", ["rise", "lime"])
def test_a_stopped_method_says_what_was_run_and_is_repeated_as_it_was(
    method: str, name: str, service: Service, explainer: explain.Explainer, tmp_path: Path
) -> None:
    *_, last = steps_of(
        service, at_progress(service.stop), photo=name, methods=[method], seconds=60
    )
    with zipfile.ZipFile(io.BytesIO(service.answer(last["answer"]).packed())) as archive:
        archive.extractall(tmp_path)
    saved = explain.load(tmp_path / f"image-{method}.json")
    estimate = saved.record["estimate"]
    planned = service.models[0].costs[method]
    assert 0 < estimate["samples"] < estimate["planned"] <= planned + 1
    assert f"of {estimate['planned']:,}" in estimate["stopped"]
    assert estimate["stopped"] in last["item"]["maps"][0][1]["remark"]
    passes = planned - estimate["planned"] + estimate["samples"]
    assert last["item"]["methods"][1]["passes"] == (passes if math.isfinite(planned) else None)
    again = saved.repeat(explainer, image=photo())
    assert again[method].samples == estimate["samples"]
    largest = float(saved.values.abs().max())
    torch.testing.assert_close(again.values, saved.values, rtol=1e-4, atol=1e-5 * largest)


def test_a_method_more_takes_the_maps_that_are_there(
    service: Service, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = steps_of(service, photo=name, methods=["rise", "gradcam"], seconds=60)[-1]
    computed: list[str] = []
    explains = explain.Explainer.__call__

    def noted(explainer: Any, of: Any, methods: Any, *arguments: Any, **options: Any) -> Any:
        computed.extend(method.name for method in methods)
        return explains(explainer, of, methods, *arguments, **options)

    monkeypatch.setattr(explain.Explainer, "__call__", noted)
    classes = [target["class"] for target in first["item"]["targets"]]
    again = {"photo": name, "seconds": 60, "targets": classes, "earlier": first["answer"]}
    [answer] = items(steps_of(service, methods=["saliency", "rise"], **again))
    assert computed == ["saliency"]
    assert [record["method"] for record in answer["records"][0]] == ["saliency", "rise"]
    assert answer["maps"][0][1]["plane"] == first["item"]["maps"][0][1]["plane"]
    for other in (
        {"layer": "first"},
        {"targets": [4]},
        {"cover": {"region": [0, 0, 0.5, 0.5]}},
        {"seconds": 50},
    ):
        computed.clear()
        steps_of(service, methods=["gradcam"], **{**again, **other})
        assert computed == ["gradcam"], other


def test_the_curves_of_a_map_are_those_of_the_report(
    service: Service, name: str, explainer: explain.Explainer
) -> None:
    question = {"targets": [1, 3], "methods": ["gradcam", "saliency"]}
    answer = steps_of(service, photo=name, **question)[-1]["answer"]
    of_map = {"answer": answer, "what": "curve", "method": "saliency", "target": 1}
    progress, *_, last = steps_of(service, begin=service.check, **of_map)
    expected = item(explainer(photo(), **question), Detail(steps=20))["maps"][1][1]["curve"]
    assert last == {"curve": expected, "notes": [], "end": True}
    assert "work" in progress
    saved = Read(service.report(answer)).data["item-0"]["maps"]
    assert [[one["curve"] for one in row] for row in saved] == [[None, None], [None, expected]]
    again = steps_of(service, photo=name, **question, earlier=answer)
    assert items(again)[0]["maps"][1][1]["curve"] == expected


def test_a_map_is_checked_and_the_check_is_saved(
    service: Service, name: str, explainer: explain.Explainer
) -> None:
    answer = steps_of(service, photo=name)[-1]["answer"]
    steps = steps_of(service, begin=service.check, answer=answer, what="check", method="gradcam")
    expected = explainer(photo()).check()["gradcam"].to_dict()
    assert steps[-1]["check"] == service.answer(answer).record()["check"] == expected
    saved = Read(service.report(answer)).data["item-0"]["maps"]
    assert saved[0][0]["check"] == expected


def test_what_nobody_waits_for_ends(service: Service, name: str) -> None:
    steps = steps_of(service, at_progress(service.drop), photo=name, methods=["rise"], seconds=60)
    assert len(items(steps)) == 1
    assert steps[-1] == {"end": True}


def test_the_model_is_as_before_after_interleaved_questions(
    service: Service, name: str, explainer: explain.Explainer
) -> None:
    state = snapshot(explainer.model)
    methods = ("rise", "gradcam", "occlusion", "guidedbackprop", "saliency")

    def ask(number: int) -> None:
        steps_of(service, photo=name, methods=[methods[number]], seconds=60)

    in_threads(len(methods), ask)
    assert snapshot(explainer.model) == state


def test_what_nobody_asks_about_for_an_hour_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("explain.app.service.time.monotonic", lambda: now)
    cache: Cache[str] = Cache("photo", 9, age=Limits().age)
    old = cache.add("old")
    used = cache.add("used")
    now += 3000
    assert cache[used] == "used"
    now += 700
    with pytest.raises(ExplainError, match="photo is unknown or has expired"):
        cache[old]
    assert (len(cache), cache[used]) == (1, "used")
    now += 3601
    cache.remove_expired()
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"more": 1}, "'more'"),
        ({"photo": 3}, "photo of request must be a text"),
        ({"methods": [3]}, "methods of request must be a list"),
        ({"methods": ["rise(samples=10000000)"]}, "without options"),
        ({"methods": ["nosuch"]}, "nosuch"),
        ({"methods": explain.list_methods()[:17]}, "at most 16, got 17"),
        ({"targets": [True]}, "each item a whole number from 0 or a text"),
        ({"model": 1}, "model of request must be at most 0"),
        ({"seconds": float("nan")}, "seconds of request must be a number"),
        ({"seconds": 10**400}, "seconds of request must be a number"),
        ({"cover": {"region": [0, 0, 0, 1]}}, "x0 < x1"),
        ({"cover": {"region": [0, 0, 1, 1], "fill": "photo"}}, "fill of cover must be one of"),
        ({"cover": [1]}, "cover of request must be a region"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(values: Any, words: str) -> None:
    with pytest.raises(ExplainError, match=words) as caught:
        ExplainRequest.of({"photo": "p", **values}, 1, LIMITS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"layer": "third"}, {"targets": [99]}])
def test_what_the_model_cannot_answer_is_told(service: Service, name: str, wrong: Any) -> None:
    [_, last] = steps_of(service, photo=name, **wrong)
    assert re.search("third|99", last["error"])


GOOD = {"host": "127.0.0.1:8000"}
FOLLOWED = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", GOOD, None),
        ("GET", {"host": "localhost:1"}, None),
        ("GET", {"host": "192.168.0.7"}, 421),
        ("GET", {}, 421),
        ("GET", {"host": "localhost:1@evil.example"}, 421),
        ("POST", GOOD, 403),
        ("POST", {**GOOD, "x-explain": "1"}, None),
        ("POST", {**GOOD, "x-explain": "1", "origin": "http://127.0.0.1:8000"}, None),
        ("POST", {**GOOD, "x-explain": "1", "origin": "http://127.0.0.1:9000"}, 403),
        ("GET", {**GOOD, "sec-fetch-site": "same-site", "sec-fetch-dest": "empty"}, 403),
        ("GET", {**GOOD, **FOLLOWED, "sec-fetch-dest": "iframe"}, 403),
        ("GET", {**GOOD, **FOLLOWED, "sec-fetch-dest": "document"}, None),
    ],
)
def test_only_this_machine_and_the_page_itself_may_ask(
    method: str, headers: dict[str, str], status: int | None
) -> None:
    refused = Access().refusal(method, headers)
    assert (refused and refused[0]) == status


@pytest.mark.parametrize(
    ("model", "more"),
    [
        pytest.param("nanodet", {"drise"}, marks=pytest.mark.long),
        (Made(lambda net, x: -3 - net.conv(x).abs(), conv=torch.nn.Conv2d(3, 1, 3)).eval(), set()),
    ],
)
def test_models_that_find_nothing_in_an_empty_photo_have_methods(
    model: Any, more: set[str]
) -> None:
    """A detector, and class maps in which nothing is a person."""
    preprocess = None if model == "nanodet" else PREPROCESS
    service = Service([explain.Explainer(model, preprocess=preprocess)], Limits())
    names = {method["name"] for method in service.models[0].methods()}
    service.close()
    assert {"gradcam", "saliency", "rise"} | more <= names


@pytest.mark.long
def test_an_image_text_model_explains_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explain.app.tasks.STEPS", 2)
    explainer = explain.Explainer("tiny-clip")
    text = "a cup of coffee"
    service = Service([explainer], Limits())
    coffee = Image.open(ROOT / "assets" / "coffee.png").convert("RGB")
    request = {"photo": service.add_photo(coffee)["photo"], "targets": [8, text]}
    methods = ["gradcam", "saliency"]
    service.models[0].costs = {"gradcam": 2.0, "saliency": 50.0}  # which is a slow one then
    *_, last = steps_of(service, **request, methods=methods)
    expected = explainer(coffee, methods, targets=[8, Text(text)])
    assert [info["texts"] for info in service.models_info()] == [True]
    assert [target["class"] for target in last["item"]["targets"]] == [8, text]
    answer = service.answer(last["answer"])
    assert answer.targets == expected.targets == ["espresso", text]
    for one, other in zip(answer.results, expected.results, strict=True):
        for method in methods:
            torch.testing.assert_close(one[method].values, other[method].values)
    of_map = {"answer": last["answer"], "what": "curve", "method": "gradcam", "target": 1}
    *_, curve = steps_of(service, begin=service.check, **of_map)
    assert curve["curve"]["areas"].keys() == {"deletion", "insertion"}
    service.close()


CROPS: dict[str, Any] = {"": "center", "square": 1.0, "whole": "whole"}


def test_another_part_of_the_photo_is_seen_by_the_same_model(
    service: Service, name: str, explainer: explain.Explainer
) -> None:
    [info] = service.models_info()
    assert info["crops"] == list(CROPS)
    earlier = ""
    for crop, as_option in CROPS.items():
        earlier = steps_of(service, photo=name, crop=crop, earlier=earlier)[-1]["answer"]
        answer = service.answer(earlier)
        other = explain.Explainer(explainer.model, LABELS, PREPROCESS, crop=as_option)
        expected = other(photo())
        assert (answer.box, answer.predictions) == (expected.box, expected.predictions)
        torch.testing.assert_close(answer.values, expected.values)
    with pytest.raises(ExplainError, match="crop"):
        service.explain({"photo": name, "crop": "centre"}, print)
