"""The app without the web: photos, questions, turns and limits."""

from __future__ import annotations

import io
import json
import math
import queue
import re
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from explain.explanation.loading import Saved
from explain.methods.base import get_method
from explain.report.item import Detail, item, map_and_kind, plane
from explain.targets import Text
from tests.app.conftest import LIMITS, encoded
from tests.conftest import ROOT, snapshot
from tests.report.conftest import LABELS, PREPROCESS, photo

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
    steps = []
    while not (steps and steps[-1].get("end")):
        steps.append(sent.get(timeout=WAIT))
        during(steps[-1])
    return steps


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
    service: Service, explainer: explain.Explainer
) -> None:
    name = service.upload(encoded(photo()), "a/b/cat.png")
    assert (name["name"], name["size"]) == ("cat.png", [90, 60])
    [item] = items(steps_of(service, photo=name["photo"], methods=["gradcam", "saliency"]))
    expected = explainer(photo(), ["gradcam", "saliency"])
    assert item["predictions"] == [
        [printable(label), value] for label, value in expected.predictions
    ]
    assert [item["maps"][0][i]["plane"] for i in range(2)] == [
        plane(map_and_kind(expected[method])[0]) for method in ("gradcam", "saliency")
    ]
    assert item["photo"] == f"photo/{name['photo']}"
    assert "explain cat.png" in str(item["again"]["command"]) or item["again"]["why"]
    shown = Image.open(io.BytesIO(service.picture(name["photo"])))
    assert shown.size == (90, 60)


def test_slow_methods_sharpen_after_the_quick_ones(
    service: Service, explainer: explain.Explainer
) -> None:
    name = service.add_photo(photo())["photo"]
    steps = steps_of(service, photo=name, methods=["rise", "gradcam"], seconds=60)
    items_so_far = items(steps)
    named = [[method["name"] for method in item["methods"]] for item in items_so_far]
    assert named == [["gradcam"], ["gradcam", "rise"]]
    between = [step for step in steps if "progress" in step]
    assert between[-1]["progress"] == [RISE.samples] * 2
    assert all(step["maps"][0]["plane"]["width"] == 32 for step in between if "maps" in step)
    assert any("maps" in step for step in between)
    expected = explainer(photo(), RISE, targets=[items_so_far[0]["targets"][0]["class"]])
    assert items_so_far[1]["maps"][0][1]["plane"] == plane(map_and_kind(expected["rise"])[0])


@pytest.mark.parametrize("method", ["rise", "lime"])
def test_a_stopped_method_says_what_was_run_and_is_repeated_as_it_was(
    method: str, service: Service, explainer: explain.Explainer, tmp_path: Path
) -> None:
    name = service.add_photo(photo())["photo"]
    last = steps_of(service, at_progress(service.stop), photo=name, methods=[method], seconds=60)[
        -1
    ]
    with zipfile.ZipFile(io.BytesIO(service.answer(last["answer"]).packed())) as archive:
        archive.extractall(tmp_path)
    saved = explain.load(tmp_path / f"image-{method}.json")
    assert isinstance(saved, Saved)
    estimate = saved.record["estimate"]
    planned = service.models[0].costs[method]
    assert 0 < estimate["samples"] < estimate["planned"] <= planned + 1
    assert f"of {estimate['planned']:,}" in estimate["stopped"]
    assert estimate["stopped"] in last["item"]["maps"][0][1]["remark"]
    expected = (
        planned - estimate["planned"] + estimate["samples"] if math.isfinite(planned) else None
    )
    assert last["item"]["methods"][1]["passes"] == expected
    again = saved.repeat(explainer, image=photo())
    assert again[method].samples == estimate["samples"]
    torch.testing.assert_close(
        again.values, saved.values, rtol=1e-4, atol=1e-5 * float(saved.values.abs().max())
    )


def test_a_method_more_takes_the_maps_that_are_there(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = service.add_photo(photo())["photo"]
    first = steps_of(service, photo=name, methods=["rise", "gradcam"], seconds=60)[-1]
    asked: list[list[str]] = []
    explainer = service.models[0].explainer

    class Asked:
        def __getattr__(self, name: str) -> Any:
            return getattr(explainer, name)

        def __call__(self, of: Any, methods: Any, *arguments: Any, **options: Any) -> Any:
            asked.append([method.name for method in methods])
            return explainer(of, methods, *arguments, **options)

    monkeypatch.setattr(service.models[0], "explainer", Asked())
    classes = [target["class"] for target in first["item"]["targets"]]
    again = {"photo": name, "seconds": 60, "targets": classes, "earlier": first["answer"]}
    [item] = items(steps_of(service, methods=["saliency", "rise"], **again))
    assert asked == [["saliency"]]
    assert [method["name"] for method in item["methods"]] == ["saliency", "rise"]
    assert item["maps"][0][1]["plane"] == first["item"]["maps"][0][1]["plane"]
    assert [record["method"] for record in item["records"][0]] == ["saliency", "rise"]
    [item] = items(steps_of(service, methods=["gradcam"], **again))
    assert asked == [["saliency"]]
    for other in (
        {"layer": "first"},
        {"targets": [4]},
        {"cover": {"region": [0, 0, 0.5, 0.5]}},
        {"seconds": 50},
    ):
        asked.clear()
        steps_of(service, methods=["gradcam"], **{**again, **other})
        assert asked == [["gradcam"]], other


def test_the_curves_of_a_map_are_those_of_the_report(
    service: Service, explainer: explain.Explainer
) -> None:
    name = service.add_photo(photo())["photo"]
    answer = steps_of(service, photo=name, targets=[1, 3], methods=["gradcam", "saliency"])[-1][
        "answer"
    ]
    steps = steps_of(
        service, begin=service.check, answer=answer, what="curve", method="saliency", target=1
    )
    explained = explainer(photo(), ["gradcam", "saliency"], targets=[1, 3])
    expected = item(explained, Detail(steps=20))["maps"][1][1]["curve"]
    assert steps[-1] == {"curve": expected, "end": True}
    assert any("progress" in step for step in steps)
    saved = json.loads(re.search(r'id="item-0">(.*?)</script>', service.report(answer))[1])  # type: ignore[index]
    assert [[one["curve"] is not None for one in row] for row in saved["maps"]] == [
        [False] * 2,
        [False, True],
    ]
    [again] = items(
        steps_of(service, photo=name, targets=[1, 3], methods=["saliency"], earlier=answer)
    )
    assert again["maps"][1][0]["curve"] == expected


def test_a_map_is_checked_and_the_verdict_is_saved(
    service: Service, explainer: explain.Explainer
) -> None:
    name = service.add_photo(photo())["photo"]
    answer = steps_of(service, photo=name)[-1]["answer"]
    steps = steps_of(service, begin=service.check, answer=answer, what="check", method="gradcam")
    expected = explainer(photo()).check()["gradcam"].to_dict()
    assert steps[-1]["verdict"] == expected
    assert service.answer(answer).record()["verdict"] == expected
    assert '"verdict":{"passed"' in service.report(answer)


def test_what_nobody_waits_for_ends(service: Service) -> None:
    name = service.add_photo(photo())["photo"]
    steps = steps_of(service, at_progress(service.drop), photo=name, methods=["rise"], seconds=60)
    assert len(items(steps)) == 1
    assert steps[-1] == {"end": True}


def test_the_model_is_as_before_after_interleaved_questions(
    service: Service, explainer: explain.Explainer
) -> None:
    model = explainer.model
    state = snapshot(model)
    name = service.add_photo(photo())["photo"]
    methods = ("rise", "gradcam", "occlusion", "guidedbackprop", "saliency")
    with ThreadPoolExecutor(len(methods)) as pool:
        answers = [
            pool.submit(steps_of, service, photo=name, methods=[method], seconds=60)
            for method in methods
        ]
    assert all("item" in answer.result()[-1] for answer in answers)
    assert snapshot(model) == state


def test_what_nobody_asks_about_for_an_hour_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("explain.app.service.time.monotonic", lambda: now)
    kept: Cache[str] = Cache("photo", 9, age=Limits().age)
    old = kept.add("old")
    used = kept.add("used")
    now += 3000
    assert kept[used] == "used"
    now += 700
    with pytest.raises(ExplainError, match="photo is unknown or has expired"):
        kept[old]
    assert (len(kept), kept[used]) == (1, "used")
    now += 3601
    kept.remove_expired()
    assert len(kept) == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "request must be an object"),
        ({"photo": "p", "more": 1}, "'more'"),
        ({"photo": 3}, "photo of request must be a text"),
        ({"photo": "p", "methods": [3]}, "methods of request must be a list"),
        ({"photo": "p", "methods": ["rise(samples=10000000)"]}, "without options"),
        ({"photo": "p", "methods": ["nosuch"]}, "nosuch"),
        ({"photo": "p", "methods": explain.list_methods()[:17]}, "at most 16, got 17"),
        (
            {"photo": "p", "targets": [True]},
            "targets of request must be a list, each item a whole number from 0 or a text",
        ),
        ({"photo": "p", "model": 1}, "model of request must be at most 0"),
        ({"photo": "p", "seconds": float("nan")}, "seconds of request must be a number"),
        ({"photo": "p", "seconds": 0}, "seconds of request must be above 0"),
        ({"photo": "p", "cover": {"region": [0, 0, 1]}}, "region of cover must be a list"),
        ({"photo": "p", "cover": {"region": [0, 0, 0, 1]}}, "x0 < x1"),
        ({"photo": "p", "seconds": 10**400}, "seconds of request must be a number"),
        (
            {"photo": "p", "cover": {"region": [0, 0, 1, 1], "fill": "photo"}},
            "fill of cover must be one of",
        ),
        ({"photo": "p", "cover": [1]}, "cover of request must be a region"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(values: Any, words: str) -> None:
    with pytest.raises(ExplainError) as caught:
        ExplainRequest.of(values, 1, LIMITS)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


def test_what_the_model_cannot_answer_is_told(service: Service) -> None:
    name = service.add_photo(photo())["photo"]
    [_, last] = steps_of(service, photo=name, layer="third")
    assert "third" in last["error"]
    assert last["end"]
    [_, last] = steps_of(service, photo=name, targets=[99])
    assert "99" in last["error"]


GOOD = {"host": "127.0.0.1:8000"}
FOLLOWED = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", GOOD, None),
        ("GET", {"host": "localhost:1"}, None),
        ("GET", {"host": "evil.example"}, 421),
        ("GET", {"host": "192.168.0.7"}, 421),
        ("GET", {}, 421),
        ("GET", {"host": "localhost:1@evil.example"}, 421),
        ("POST", GOOD, 403),
        ("POST", {**GOOD, "x-explain": "1"}, None),
        ("POST", {**GOOD, "x-explain": "1", "origin": "http://127.0.0.1:8000"}, None),
        ("POST", {**GOOD, "x-explain": "1", "origin": "http://127.0.0.1:9000"}, 403),
        ("GET", {**GOOD, "sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}, 403),
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


class Nobody(torch.nn.Module):
    """Class maps in which nothing is a person."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -3 - self.conv(x).abs()


@pytest.mark.parametrize(
    ("model", "more"),
    [pytest.param("nanodet", {"drise"}, marks=pytest.mark.long), (Nobody().eval(), set())],
)
def test_models_that_find_nothing_in_an_empty_photo_have_methods(
    model: Any, more: set[str]
) -> None:
    preprocess = None if model == "nanodet" else PREPROCESS
    service = Service([explain.Explainer(model, preprocess=preprocess)], Limits())
    names = {method["name"] for method in service.models[0].methods()}
    service.close()
    assert {"gradcam", "saliency", "rise"} | more <= names


def test_an_image_text_model_explains_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explain.app.tasks.STEPS", 2)
    path = explain.methods.IntegratedGradients(steps=3)
    monkeypatch.setattr(
        "explain.app.requests.get_method",
        lambda name: path if name == path.name else get_method(name),
    )
    explainer = explain.Explainer("tiny-clip")
    methods = ["gradcam", path.name]
    text = "a cup of coffee"
    service = Service([explainer], Limits())
    service.models[0].costs = {"gradcam": 2.0, path.name: 50.0}
    coffee = Image.open(ROOT / "assets" / "coffee.png").convert("RGB")
    request = {
        "photo": service.add_photo(coffee)["photo"],
        "methods": methods,
        "targets": [8, text],
    }
    *_, last = steps_of(service, **request)  # the second method is a slow one
    answer = service.answer(last["answer"])
    expected = explainer(coffee, ["gradcam", path], targets=[8, Text(text)])
    assert [info["texts"] for info in service.models_info()] == [True]
    assert [target["class"] for target in last["item"]["targets"]] == [8, text]
    assert answer.targets == expected.targets == ["espresso", text]
    for one, other in zip(answer.results, expected.results, strict=True):
        for method in methods:
            torch.testing.assert_close(one[method].values, other[method].values)
    *_, curve = steps_of(
        service,
        begin=service.check,
        answer=last["answer"],
        what="curve",
        method="gradcam",
        target=1,
    )
    assert curve["curve"]["areas"].keys() == {"deletion", "insertion"}
    service.close()


def test_another_part_of_the_photo_is_seen_by_the_same_model(
    service: Service, explainer: explain.Explainer
) -> None:
    [info] = service.models_info()
    assert info["crops"] == ["", "square", "whole"]
    name = service.add_photo(photo())["photo"]
    earlier = ""
    for crop in info["crops"]:
        last = steps_of(service, photo=name, crop=crop, earlier=earlier)[-1]
        earlier = last["answer"]
        answer = service.answer(earlier)
        as_given = {"": "center", "square": 1.0, "whole": "whole"}[crop]
        expected = explain.Explainer(explainer.model, LABELS, PREPROCESS, crop=as_given)(photo())
        assert answer.box == expected.box
        assert answer.predictions == expected.predictions
        torch.testing.assert_close(answer["gradcam"].values, expected["gradcam"].values)
    with pytest.raises(ExplainError, match="crop"):
        service.explain({"photo": name, "crop": "centre"}, print)
