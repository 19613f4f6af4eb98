"""The app in a real browser: photos come, the model answers, and nothing leaves the machine."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import explain
from explain.app import application
from explain.app.requests import Limits
from explain.app.service import Service
from explain.app.web import bound
from tests.app.conftest import encoded
from tests.browsing import DESKTOP, PHONE, Tab, chromium
from tests.report.conftest import HOSTILE, LABELS, photo

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
uvicorn = pytest.importorskip("uvicorn", reason="the app needs uvicorn: pip install -e '.[app]'")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def served(explainer: explain.Explainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The app at an address of this machine."""
    place = tmp_path_factory.mktemp("examples") / "stripes.png"
    photo(seed=1).save(place)
    yield from serving(explainer, {"stripes.png": place})


def serving(explainer: explain.Explainer, examples: dict[str, Path]) -> Iterator[str]:
    service = Service([explainer], Limits(upload=200_000), examples)
    server = uvicorn.Server(
        uvicorn.Config(application(service), log_level="warning", lifespan="off", ws="none")
    )
    with bound("127.0.0.1", 0) as socket:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)
    service.close()


class Opened(Tab):
    """The app in a tab, with all that it asked for and said."""

    def __init__(self, tab: Any, address: str) -> None:
        super().__init__(tab)
        self.address = address
        tab.goto(f"{address}/")
        tab.wait_for_selector("html[data-ready]", timeout=60_000)

    def until(self, truth: str) -> None:
        for _ in range(2400):  # two minutes: machines may be slow
            if self.tab.evaluate(truth):
                return
            self.tab.wait_for_timeout(50)
        raise AssertionError(f"never: {truth}; {self.tab.locator('.work').inner_text()}")

    def give(self, content: bytes | None = None, name: str = "cat.png") -> Opened:
        """Choose a photo, and wait for its map."""
        upload = {
            "name": name,
            "mimeType": "image/png",
            "buffer": encoded(photo()) if content is None else content,
        }
        self.tab.set_input_files("input[type=file]", upload)
        self.until(f"explainPage.viewer?.item.name === {json.dumps(name)}")
        return self

    def item(self, path: str) -> Any:
        return self.tab.evaluate(f"explainPage.viewer.item.{path}")


@pytest.fixture
def app(browser: Any, served: str) -> Iterator[Any]:
    """Open the app; at the end, it must have asked for nothing from elsewhere, and complained of
    nothing."""
    contexts = []
    pages = []

    def open_(size: dict[str, int] = DESKTOP, **options: Any) -> Opened:
        contexts.append(browser.new_context(viewport=size, **options))
        pages.append(Opened(contexts[-1].new_page(), served))
        return pages[-1]

    yield open_
    for page in pages:
        assert [
            url for url in page.requests if not url.startswith((served, "data:", "blob:", "about:"))
        ] == []
        assert [line for line in page.said if "status of 4" not in line] == []
    for context in contexts:
        context.close()


def test_a_photo_that_is_chosen_is_explained(app: Any, explainer: explain.Explainer) -> None:
    page = app().give()
    expected = explainer(photo())
    assert page.item("predictions")[0][1] == expected.predictions[0][1]
    assert page.tab.locator("h1").last.inner_text() == f"Why {expected.targets[0]}?"
    assert page.tab.evaluate("document.querySelector('.photo').naturalWidth") == 90


def test_names_and_labels_are_texts(app: Any) -> None:
    page = app().give(name=HOSTILE.replace("/", ""))
    for number in (2, 1):
        page.tab.locator(".label-search input").fill(str(number))
        page.tab.locator(".found button").first.click()
        page.until(
            f"explainPage.viewer.item.targets[explainPage.viewer.state.target].class === {number}"
        )
        page.until(
            "document.querySelector('.viewer h1').textContent === "
            f"{json.dumps(f'Why {LABELS[number]}?')}"
        )
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
    steps = []

    def settles(truth: str) -> None:
        """Wait for what a step leads to, and for the address to say it."""
        page.until(truth)
        page.until("addressWaits === null && explainPage.status.textContent.endsWith('s')")
        address, shown = page.tab.evaluate(f"[location.href, {SHOWN}]")
        assert address not in [of_step for of_step, _ in steps]
        steps.append((address, shown))

    settles("location.hash.includes('photo=')")
    page.tab.locator("details.choice").evaluate("(each) => { each.open = true; }")
    page.tab.locator("input[value=saliency]").check()
    settles("location.hash.includes('saliency')")
    page.tab.locator(".label-search input").fill("2")
    page.tab.locator(".found button").first.click()
    settles("new URLSearchParams(location.hash.slice(1)).get('of') === '2'")
    page.tab.get_by_label("Part of the photo").select_option("whole")
    settles("location.hash.includes('crop=whole')")
    left, _, right, _ = page.item("box")  # padded above and below
    assert (left, right) == (0, 90)
    page.tab.get_by_text("Contour").click()  # no step of its own
    page.until("location.hash.includes('view=contour')")
    steps[-1] = page.tab.evaluate("location.href"), page.tab.evaluate(SHOWN)

    def returns(step: int) -> None:
        address, shown = steps[step]
        page.until(f"window.explainPage?.viewer && {SHOWN} === {json.dumps(shown)}")
        page.until(f"location.href === {json.dumps(address)}")

    page.tab.reload()
    returns(-1)
    for step in (-2, -3, -4):
        page.tab.evaluate("history.back()")
        returns(step)
    page.tab.evaluate("history.back()")
    page.until("explainPage.viewer === null && explainPage.tools.hidden")
    page.tab.evaluate("history.forward()")
    returns(0)


def test_what_is_no_photo_is_named(app: Any) -> None:
    page = app()
    for name, kind in (("notes.txt", "text/plain"), ("broken.png", "image/png")):
        upload = {"name": name, "mimeType": kind, "buffer": b"hello"}
        page.tab.set_input_files("input[type=file]", upload)
        page.until(f"explainPage.trouble.textContent.startsWith({json.dumps(name)})")
        assert page.tab.locator(".trouble").is_visible()


def test_saved_files_carry_the_name_of_the_photo(app: Any) -> None:
    page = app().give(name="my cat.png")
    page.tab.evaluate("explainPage.viewer.change({ region: [0, 0, 0.5, 0.5] })")
    for suffix in ("", "-covered"):
        if suffix:
            page.tab.get_by_role("button", name="Cover the region").click()
            page.until("explainPage.viewer.item.name.endsWith('covered')")
        for button, stem in (
            ("Save the files", f"my-cat{suffix}-explained.zip"),
            ("Save the report", f"my-cat{suffix}-explained.html"),
            ("Save the picture", f"my cat{suffix}-gradcam.png"),
        ):
            with page.tab.expect_download() as download:
                page.tab.get_by_role("button", name=button).click()
            assert download.value.suggested_filename == stem
            if stem.endswith("zip"):
                names = zipfile.ZipFile(download.value.path()).namelist()
                assert {name.rsplit("-", 1)[0] for name in names} == {f"my-cat{suffix}"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_is_accessible_and_fits(app: Any, size: dict[str, int], scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason='pip install -e ".[browser]"'
    )
    page = app(size, color_scheme=scheme, bypass_csp=True)
    for _ in range(2):
        violations = axe.Axe().run(page.tab).response["violations"]
        assert [
            (violation["id"], [node["target"] for node in violation["nodes"]])
            for violation in violations
        ] == []
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.give()
        page.tab.locator("details.choice").evaluate("(each) => { each.open = true; }")
    assert Image.open(io.BytesIO(page.tab.screenshot())).width == size["width"]
