"""The app in a real browser: photos come, the model answers, and nothing leaves the machine."""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import explain
from explain.app import application
from explain.app.requests import Limits
from explain.app.service import Service
from explain.app.web import bound
from tests.app.conftest import encoded
from tests.browsing import DESKTOP, PHONE, Tab, chromium, tabs
from tests.conftest import ROOT
from tests.report.conftest import HOSTILE, LABELS, photo

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
uvicorn = pytest.importorskip("uvicorn", reason="the app needs uvicorn: pip install -e '.[app]'")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def served(explainer: explain.Explainer) -> Iterator[str]:
    """The app at an address of this machine."""
    examples = {name: ROOT / "assets" / name for name in ("coffee.png", "chelsea.png")}
    service = Service([explainer], Limits(upload=200_000), examples)
    config = uvicorn.Config(application(service), log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with bound("127.0.0.1", 0) as socket:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)
    service.close()


class App(Tab):
    """The app in a tab."""

    def __init__(self, tab: Any, address: str) -> None:
        super().__init__(tab, address)
        tab.goto(f"{address}/")
        tab.wait_for_selector("html[data-ready]", timeout=60_000)

    def choose(self, name: str, content: bytes, kind: str = "image/png") -> None:
        upload = {"name": name, "mimeType": kind, "buffer": content}
        self.tab.set_input_files("input[type=file]", upload)

    def give(self, name: str = "cat.png") -> App:
        """Choose a photo, and wait for its map."""
        self.choose(name, encoded(photo()))
        self.until(f"explainPage.viewer?.item.name === {json.dumps(name)}")
        return self

    def ask_for(self, label: int) -> None:
        """Choose a class, and wait for its map."""
        self.tab.locator(".label-search input").fill(str(label))
        self.tab.locator(".found button").first.click()
        shown = "explainPage.viewer.item.targets[explainPage.viewer.state.target].class"
        self.until(f"{shown} === {label}")

    def item(self, path: str) -> Any:
        return self.tab.evaluate(f"explainPage.viewer.item.{path}")


@pytest.fixture
def app(browser: Any, served: str) -> Iterator[Any]:
    """Open the app."""
    with tabs(browser, App, expected="status of 4") as opens:
        yield partial(opens, served)


def test_a_photo_that_is_chosen_is_explained(app: Any, explainer: explain.Explainer) -> None:
    page = app().give()
    expected = explainer(photo())
    assert page.item("predictions")[0][1] == expected.predictions[0][1]
    assert page.tab.locator("h1").last.inner_text() == f"Why {expected.targets[0]}?"
    assert page.tab.evaluate("document.querySelector('.photo').naturalWidth") == 90


def test_names_and_labels_are_texts(app: Any) -> None:
    page = app().give(HOSTILE.replace("/", ""))
    for number in (2, 1):
        page.ask_for(number)
        heading = json.dumps(f"Why {LABELS[number]}?")
        page.until(f"document.querySelector('.viewer h1').textContent === {heading}")
    assert page.tab.locator("img[onerror]").count() == 0


def test_a_region_is_covered_and_the_answers_follow(app: Any) -> None:
    page = app().give()
    uncovered = page.item("predictions[0]")
    button = page.tab.get_by_role("button", name="Cover the region")
    assert button.is_disabled()
    box = page.tab.locator(".stage").bounding_box()
    page.tab.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.2 * box["height"])
    page.tab.mouse.down()
    page.tab.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.8 * box["height"], steps=4)
    page.tab.mouse.up()
    button.click()
    page.until("explainPage.viewer.item.photo.startsWith('data:')")
    assert page.item("predictions[0]") != uncovered
    assert "→" in page.tab.locator(".cover-choice .hint").inner_text()
    page.tab.get_by_role("button", name="Uncover it").click()
    page.until("explainPage.viewer.item.photo.startsWith('photo/')")
    assert page.item("predictions[0]") == uncovered


SHOWN = """(() => {
    const { item, state } = explainPage.viewer;
    return JSON.stringify([
        item.name, item.methods.map(({ name }) => name), item.targets.map((each) => each.class),
        item.methods[state.method].name, item.targets[state.target].class, state.view, item.box,
    ]);
})()"""


def test_the_address_remembers_and_back_goes_back(app: Any) -> None:
    page = app().give()
    steps: list[list[str]] = []

    def settles(truth: str) -> None:
        """Wait for what a step leads to, and for the address to say it."""
        page.until(truth)
        page.until("addressWaits === null && explainPage.status.textContent.endsWith('s')")
        steps.append(page.tab.evaluate(f"[location.href, {SHOWN}]"))

    settles("location.hash.includes('photo=')")
    page.tab.locator("details.choice").evaluate("(each) => { each.open = true; }")
    page.tab.locator("input[value=saliency]").check()
    settles("location.hash.includes('saliency')")
    page.ask_for(2)
    settles("new URLSearchParams(location.hash.slice(1)).get('of') === '2'")
    page.tab.get_by_label("Part of the photo").select_option("whole")
    settles("location.hash.includes('crop=whole')")
    assert page.item("box")[0::2] == [0, 90]  # padded above and below
    page.tab.get_by_text("Contour").click()  # no step of its own
    page.until("location.hash.includes('view=contour')")
    steps[-1] = page.tab.evaluate(f"[location.href, {SHOWN}]")
    assert len({address for address, _ in steps}) == 4

    def returns(address: str, shown: str) -> None:
        page.until(f"window.explainPage?.viewer && {SHOWN} === {json.dumps(shown)}")
        page.until(f"location.href === {json.dumps(address)}")

    page.tab.reload()
    returns(*steps[-1])
    for step in reversed(steps[:-1]):
        page.tab.evaluate("history.back()")
        returns(*step)
    page.tab.evaluate("history.back()")
    page.until("explainPage.viewer === null && explainPage.tools.hidden")
    page.tab.evaluate("history.forward()")
    returns(*steps[0])


def test_what_is_no_photo_is_named(app: Any) -> None:
    page = app()
    for name, kind in (("notes.txt", "text/plain"), ("broken.png", "image/png")):
        page.choose(name, b"hello", kind)
        page.until(f"explainPage.trouble.textContent.startsWith({json.dumps(name)})")
        assert page.tab.locator(".trouble").is_visible()


def test_saved_files_carry_the_name_of_the_photo(app: Any) -> None:
    page = app().give("my cat.png")
    page.tab.evaluate("explainPage.viewer.change({ region: [0, 0, 0.5, 0.5] })")
    page.tab.get_by_role("button", name="Cover the region").click()
    page.until("explainPage.viewer.item.name.endsWith('covered')")
    for button, name in {
        "Save the report": "my-cat-covered-explained.html",
        "Save the picture": "my cat-covered-gradcam.png",
        "Save the files": "my-cat-covered-explained.zip",
    }.items():
        with page.tab.expect_download() as download:
            page.tab.get_by_role("button", name=button).click()
        assert download.value.suggested_filename == name
    names = zipfile.ZipFile(download.value.path()).namelist()
    assert {name.rsplit("-", 1)[0] for name in names} == {"my-cat-covered"}


LAPTOP = {"width": 1366, "height": 768}


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_the_photo_comes_first_and_the_examples_after_all_controls(
    app: Any, size: dict[str, int]
) -> None:
    page = app(size=size).give()
    heading, stage, tools, side, examples = (
        page.tab.locator(where).bounding_box()
        for where in (".heading", ".stage", ".tools", ".side", ".examples")
    )
    assert heading["y"] < 0.2 * size["height"]
    assert stage["y"] + stage["height"] <= size["height"]
    assert tools["y"] > stage["y"] + stage["height"]
    assert examples["y"] > tools["y"] + tools["height"]
    if size == LAPTOP:
        assert side["x"] > stage["x"] + stage["width"]
        assert side["y"] < stage["y"]
    page.tab.evaluate("document.activeElement.blur()")
    reached: list[str] = []
    for _ in range(80):
        page.tab.keyboard.press("Tab")
        reached.append(
            page.tab.evaluate(
                "['.examples', '.tools', '.stage', '.drop'].find("
                "(where) => document.activeElement.closest(where)) ?? ''"
            )
        )
        if reached[-1] == ".examples":
            break
    places = [place for place in dict.fromkeys(reached) if place]
    assert places == [".drop", ".stage", ".tools", ".examples"]
    page.tab.locator("details.choice").evaluate("(each) => { each.open = true; }")
    page.tab.locator(".label-search input").fill("1")
    assert page.small_targets == []


@pytest.mark.parametrize(("scheme", "size"), [("light", PHONE), ("dark", DESKTOP)])
def test_it_is_accessible_and_fits(app: Any, size: dict[str, int], scheme: str) -> None:
    page = app(size=size, color_scheme=scheme, bypass_csp=True)
    for _ in range(2):
        assert page.violations == []
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.give()
        page.tab.locator("details.choice").evaluate("(each) => { each.open = true; }")
