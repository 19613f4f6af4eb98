"""The app in a real browser: photos come, the model answers, and nothing leaves the machine."""

from __future__ import annotations

import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import explain
from explain.app import application
from explain.app.requests import Limits
from explain.app.service import Service
from explain.app.web import bound
from tests.app.conftest import encoded
from tests.browsing import DESKTOP, PHONE, Tab, chromium
from tests.conftest import ROOT
from tests.report.conftest import HOSTILE, LABELS, photo

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
uvicorn = pytest.importorskip("uvicorn", reason="the app needs uvicorn: pip install -e '.[app]'")
CAMERA = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(*CAMERA) as found:
        yield found


@pytest.fixture(scope="module")
def served(explainer: explain.Explainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The app at an address of this machine."""
    place = tmp_path_factory.mktemp("examples") / "stripes.png"
    photo(seed=1).save(place)
    yield from serving(explainer, {"stripes.png": place})


@pytest.fixture
def detector() -> Iterator[str]:
    """The app with a detector."""
    yield from serving(explain.Explainer("nanodet"), {})


@pytest.fixture
def image_text() -> Iterator[str]:
    """The app with an image-text model."""
    yield from serving(explain.Explainer("tiny-clip"), {})


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
        given = {
            "name": name,
            "mimeType": "image/png",
            "buffer": encoded(photo()) if content is None else content,
        }
        self.tab.set_input_files("input[type=file]", given)
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


@pytest.mark.long
def test_a_detector_explains_its_best_box_and_draws_all(browser: Any, detector: str) -> None:
    with browser.new_context(viewport=DESKTOP) as context:
        page = Opened(context.new_page(), detector)
        page.give((ROOT / "assets" / "grace_hopper.jpg").read_bytes(), "grace.jpg")
        assert [label for label, _ in page.item("predictions")] == ["person", "tie"]
        assert page.tab.locator("h1").last.inner_text() == "Why person?"
        assert page.tab.locator(".marks .found.inner").count() == 2
        # the tie is inside the person
        for label, (u, v) in (("tie", (0.5, 0.5)), ("person", (0.1, 0.9))):
            number = [name for name, _ in page.item("predictions")].index(label)
            u0, v0, u1, v1 = page.item(f"boxes[{number}]")
            left, top, right, bottom = page.item("box")
            width, height = page.item("size")
            stage = page.tab.locator(".stage").bounding_box()
            x = left + (right - left) * (u0 + u * (u1 - u0))
            y = top + (bottom - top) * (v0 + v * (v1 - v0))
            page.tab.locator(".stage").click(
                position={"x": stage["width"] * x / width, "y": stage["height"] * y / height}
            )
            page.until(f"document.querySelector('.viewer h1').textContent === 'Why {label}?'")


@pytest.mark.long
def test_a_text_is_typed_and_explained(browser: Any, image_text: str) -> None:
    with browser.new_context(viewport=DESKTOP) as context:
        page = Opened(context.new_page(), image_text)
        with Image.open(ROOT / "assets" / "coffee.png") as coffee:
            page.give(encoded(coffee.convert("RGB").resize((300, 200))), "coffee.png")
        assert page.tab.get_by_label("Explain a text").is_visible()
        for text in ("a wooden table", "a cup of coffee"):
            page.tab.get_by_label("Explain a text").fill(text)
            page.tab.keyboard.press("Enter")
            page.until(f"document.querySelector('.viewer h1').textContent === 'Why {text}?'")
        assert page.item("targets.map((target) => target.class)")[1:] == [
            "a wooden table",
            "a cup of coffee",
        ]
        if folder := os.environ.get("EXPLAIN_SCREENSHOTS"):
            page.tab.screenshot(path=str(Path(folder) / "text.png"), full_page=True)
        page.tab.get_by_label("Explain a text").fill("espres")
        page.tab.get_by_role("button", name="espresso 8").click()
        page.until("document.querySelector('.viewer h1').textContent === 'Why espresso?'")


def test_photos_are_dropped_and_pasted(app: Any) -> None:
    page = app()
    for kind, name in (("drop", "dropped.png"), ("paste", "pasted.png")):
        page.tab.evaluate(
            """([kind, name, bytes]) => {
                const data = new DataTransfer();
                data.items.add(new File([new Uint8Array(bytes)], name, { type: 'image/png' }));
                const event = kind === 'drop' ? new DragEvent('drop', { dataTransfer: data, cancelable: true })
                    : new ClipboardEvent('paste', { clipboardData: data });
                document.dispatchEvent(event);
            }""",
            [kind, name, list(encoded(photo()))],
        )
        page.until(f"explainPage.viewer?.item.name === {json.dumps(name)}")
        assert len(page.item("predictions")) > 1


def test_an_example_is_picked(app: Any) -> None:
    page = app()
    page.tab.get_by_role("button", name="stripes.png").click()
    page.until("explainPage.viewer?.item.name === 'stripes.png'")
    assert len(page.item("predictions")) > 1


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


def test_another_answer_is_explained_by_a_click(app: Any) -> None:
    page = app().give()
    label = page.item("predictions[1][0]")
    page.tab.locator("button.answer").first.click()
    page.until("explainPage.viewer.item.targets.length === 2")
    assert page.item("targets[1].label") == label
    assert page.tab.evaluate("explainPage.viewer.state.target") == 1


def test_methods_and_layers_are_chosen(app: Any, explainer: explain.Explainer) -> None:
    page = app().give()
    page.tab.locator("details.choice summary").click()
    page.tab.locator(".method-list input[value=saliency]").check()
    page.until("explainPage.viewer.item.methods.length === 2")
    page.until("explainPage.layer.field.select.options.length === 3")
    page.tab.get_by_label("Layer", exact=True).first.select_option("first")
    page.until("explainPage.viewer.item.methods[0].layer === 'first'")
    assert page.item("maps[0][0].plane.width") == explainer(photo(), layer="first").values.shape[-1]


@pytest.mark.long
def test_what_is_enough_is_said_and_the_slider_shows_all(app: Any) -> None:
    page = app().give()
    page.tab.locator("details.choice summary").click()
    page.tab.locator(".method-list input[value=sufficient]").check()
    page.until("explainPage.viewer.item.maps[0][1]?.words")
    slider = page.tab.get_by_label("Shown of the photo")
    for step in (1, 0):  # all, and what is enough
        slider.fill(str(step))
        page.until(f"explainPage.viewer.state.whole === {str(step == 1).lower()}")
    assert page.tab.evaluate("explainPage.viewer.state.method") == 1
    page.until(
        "document.querySelector('.sets-card').innerText.includes(explainPage.viewer.item.maps[0][1].words)"
    )


def test_a_slow_method_sharpens_until_it_is_done(app: Any) -> None:
    page = app().give()
    page.tab.evaluate("""() => {
        window.seen = [];
        const sharpen = explainPage.sharpen.bind(explainPage);
        explainPage.sharpen = async (step) => { window.seen.push(step.progress[0]); await sharpen(step); };
    }""")
    page.tab.locator("details.choice summary").click()
    # slow machines too
    page.tab.evaluate("explainPage.methods.seconds.take(explainPage.source.index.limits.seconds)")
    page.tab.locator(".method-list input[value=rise]").check()
    page.until("explainPage.viewer.item.methods.length === 2 && explainPage.progress.hidden")
    assert len(page.tab.evaluate("seen")) >= 1
    assert page.item("maps[0][1].samples") == explain.methods.RISE().samples


def test_a_region_is_covered_and_the_answers_follow(app: Any) -> None:
    page = app().give()
    before = page.item("predictions[0]")
    button = page.tab.get_by_role("button", name="Cover the region")
    assert button.is_disabled()
    box = page.tab.locator(".stage").bounding_box()
    page.tab.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.2 * box["height"])
    page.tab.mouse.down()
    page.tab.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.8 * box["height"], steps=4)
    page.tab.mouse.up()
    button.click()
    page.until("explainPage.viewer.item.photo.startsWith('data:')")
    assert page.item("predictions[0]") != before
    assert "→" in page.tab.locator(".cover-choice .hint").inner_text()
    page.tab.get_by_role("button", name="Uncover it").click()
    page.until("explainPage.viewer.item.photo.startsWith('photo/')")
    assert page.item("predictions[0]") == before


def test_files_and_the_report_are_saved(app: Any, tmp_path: Path) -> None:
    page = app().give()
    with page.tab.expect_download() as waited:
        page.tab.get_by_role("button", name="Save the files").click()
    assert waited.value.suggested_filename == "cat-explained.zip"
    waited.value.save_as(tmp_path / "cat.zip")
    names = zipfile.ZipFile(tmp_path / "cat.zip").namelist()
    assert names == ["cat-gradcam.png", "cat-gradcam.npy", "cat-gradcam.json"]
    with page.tab.expect_download() as waited:
        page.tab.get_by_role("button", name="Save the report").click()
    assert waited.value.suggested_filename == "cat-explained.html"


def test_an_answer_is_kept_beside_another(app: Any) -> None:
    page = app().give(name="one.png")
    page.tab.get_by_role("button", name="Pin to compare").click()
    page.give(encoded(photo(seed=2)), name="two.png")
    words = page.tab.locator(".viewer .sub").all_inner_texts()
    assert [text.split(" ")[0] for text in words] == ["one.png", "two.png"]
    left, right = (
        page.tab.locator(f"{where} .stage").bounding_box() for where in (".kept", ".current")
    )
    assert left["x"] + left["width"] <= right["x"]
    for where in (".kept", ".current"):
        frame = page.tab.locator(f"{where} .marks .frame")
        assert frame.evaluate("(each) => getComputedStyle(each).strokeDasharray") == "none"
    page.tab.get_by_role("button", name="Unpin").click()
    assert page.tab.locator(".viewer").count() == 1


def drag(page: Opened, where: str, edges: tuple[float, float, float, float]) -> None:
    page.tab.locator(f"{where} .stage").scroll_into_view_if_needed()
    box = page.tab.locator(f"{where} .stage").bounding_box()
    (x0, x1), (y0, y1) = (
        [box[corner] + share * box[side] for share in shares]
        for corner, side, shares in (("x", "width", edges[::2]), ("y", "height", edges[1::2]))
    )
    page.tab.mouse.move(x0, y0)
    page.tab.mouse.down()
    page.tab.mouse.move(x1, y1, steps=4)
    page.tab.mouse.up()


def test_the_model_is_asked_about_covered_photos_when_they_are_played(app: Any) -> None:
    page = app().give()
    page.tab.get_by_role("button", name="Play").click()
    page.until("explainPage.viewer.item.maps[0][0].curve !== null")
    page.until("document.querySelector('.plot').style.display === ''")
    curve = page.item("maps[0][0].curve")
    assert curve["deletion"][0] == pytest.approx(page.item("predictions[0][1]"), abs=1e-4)
    assert page.requests.count(f"{page.address}/api/check") == 1
    page.until(
        "document.querySelector('.plot').getAttribute('aria-label').startsWith('Curves of "
        "Grad-CAM')"
    )


def test_a_map_is_checked_by_a_click(app: Any, explainer: explain.Explainer) -> None:
    page = app().give()
    page.tab.get_by_role("button", name="Check Grad-CAM").click()
    page.until("explainPage.viewer.item.maps[0][0].verdict !== null")
    expected = explainer(photo()).check()["gradcam"]
    page.until("document.querySelectorAll('.reasons li').length >= 4")
    words = page.tab.locator(".reasons").inner_text()
    assert all(answer.reason in words for answer in expected)
    page.tab.locator("details.choice summary").click()
    page.tab.locator(".method-list input[value=saliency]").check()
    page.until("explainPage.viewer.item.methods.length === 2")
    assert page.item("maps[0][0].verdict.passed") == expected.passed
    assert page.item("maps[0][1].verdict") is None


def test_a_photo_is_taken_with_the_camera(app: Any) -> None:
    page = app(permissions=["camera"])
    page.tab.get_by_role("button", name="Camera").click()
    page.until("document.querySelector('.camera .main-button')?.disabled === false")
    page.until("document.querySelector('.camera video').videoWidth > 0")
    page.tab.get_by_role("button", name="Take the photo").click()
    page.until("explainPage.viewer?.item.name === 'camera.jpg'")
    assert page.tab.locator("dialog.camera").count() == 0


def test_the_app_is_used_by_keys_alone(app: Any, explainer: explain.Explainer) -> None:
    page = app()
    page.tab.get_by_role("button", name="stripes.png").focus()
    page.tab.keyboard.press("Enter")
    page.until("explainPage.viewer?.item.name === 'stripes.png'")
    assert len(page.item("predictions")) > 1
    page.tab.locator(".label-search input").focus()
    page.tab.keyboard.type("tabby")
    page.tab.keyboard.press("Enter")
    page.until(
        "explainPage.viewer.item.targets[explainPage.viewer.state.target].label === 'tabby cat'"
    )
    assert page.tab.locator(".found").is_hidden()
    page.tab.keyboard.type("nothing like it")
    page.tab.keyboard.press("Escape")
    assert page.tab.locator(".label-search input").input_value() == ""
    page.tab.locator("details.choice summary").focus()
    page.tab.keyboard.press("Enter")
    page.tab.locator(".method-list input[value=saliency]").focus()
    page.tab.keyboard.press("Space")
    page.until("explainPage.viewer.item.methods.length === 2")
    page.tab.locator(".current .stage").focus()
    for key in ("ArrowLeft", "Shift+ArrowLeft", "Shift+ArrowUp"):
        page.tab.keyboard.press(key)
    page.until("!explainPage.covering.button.disabled")
    page.tab.get_by_role("button", name="Cover the region").focus()
    page.tab.keyboard.press("Enter")
    page.until("explainPage.viewer.item.name.endsWith('covered')")


def test_every_control_of_the_app_is_reached_by_tab_and_has_a_name(app: Any) -> None:
    page = app().give()
    page.tab.get_by_role("button", name="Pin to compare").click()
    page.tab.locator("details.choice summary").click()
    page.tab.get_by_role("button", name="Shortcuts").focus()
    seen: list[str] = []
    for _ in range(150):
        page.tab.keyboard.press("Tab")
        name = page.tab.evaluate(
            "(() => { const e = document.activeElement; if (!e || e === document.body) return "
            "null; "
            "return (e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent "
            "|| e.querySelector('img')?.alt || '').trim(); })()"
        )
        if name is None:
            break
        assert name
        seen.append(name)
    text = " | ".join(seen)
    for control in (
        "Choose a photo",
        "Camera",
        "stripes.png",
        "Explain another class",
        "Layer",
        "Cover with",
        "Methods:",
        "Slow methods may take",
        "Saliency",
        "Linked",
        "Unpin",
        "Save the files",
        "Save the report",
        "Check Grad-CAM",
        "Play",
    ):
        assert control in text, control
    assert len(seen) < 150


def test_what_cannot_be_explained_is_said_where_it_is_seen(app: Any) -> None:
    page = app()
    page.tab.set_input_files(
        "input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": b"no photo"}
    )
    page.until("!document.querySelector('.trouble').hidden")
    assert "not an image" in page.tab.locator(".trouble").inner_text()
    large = {"name": "a.png", "mimeType": "image/png", "buffer": b"x" * 200_001}
    page.tab.set_input_files("input[type=file]", large)
    page.until("document.querySelector('.trouble').innerText.includes('MiB')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_is_accessible_and_fits(app: Any, size: dict[str, int], scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason='pip install -e ".[browser]"'
    )
    page = app(size, color_scheme=scheme, bypass_csp=True)
    for _ in range(2):
        found = axe.Axe().run(page.tab).response["violations"]
        assert [(each["id"], [node["target"] for node in each["nodes"]]) for each in found] == []
        assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.give()
        page.tab.locator("details.choice").evaluate("(each) => { each.open = true; }")
    assert Image.open(io.BytesIO(page.tab.screenshot())).width == size["width"]


GOLDEN = ROOT / "tests" / "app" / "golden"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_app_looks_as_it_did(app: Any, size: dict[str, int], scheme: str, request: Any) -> None:
    """Against a committed picture, so small that fonts do not matter; EXPLAIN_GOLDEN=write makes it
    again."""
    page = app(size, color_scheme=scheme).give(encoded(photo(180, 120)))
    page.tab.evaluate("explainPage.viewer.draw()")
    page.tab.evaluate("explainPage.say('done')")  # and not how long it took
    page.tab.wait_for_timeout(300)
    shot = Image.open(io.BytesIO(page.tab.screenshot())).convert("RGB")
    small = shot.resize((shot.width // 10, shot.height // 10), Image.Resampling.BOX)
    place = GOLDEN / f"{request.node.callspec.id}.png"
    if os.environ.get("EXPLAIN_GOLDEN") == "write":
        place.parent.mkdir(exist_ok=True)
        small.save(place)
    off = np.abs(np.asarray(small).astype(int) - np.asarray(Image.open(place)).astype(int)).max(2)
    assert off.mean() < 6
    assert (off > 60).mean() < 0.03
