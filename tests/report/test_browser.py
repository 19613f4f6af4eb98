"""The report in a real browser: what it shows, what it answers to hands and keys, and that it asks
for nothing."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import report
from explain.attribution.pictures import sentence
from explain.layers.layouts import enlarge
from explain.methods import Necessary, Sufficient
from explain.render import styles
from explain.render.styles import thresholds
from tests.browsing import DESKTOP, PHONE, Tab, chromium
from tests.conftest import ROOT
from tests.report.conftest import HOSTILE, KINDS, LABELS, checked, of_kind, photo

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


class Opened(Tab):
    """A page that was opened from disk, with all that it asked for and said."""

    def __init__(self, tab: Any, file: Path) -> None:
        super().__init__(tab)
        self.file = file

    def go(self, address: str = "") -> Opened:
        self.tab.goto("about:blank")
        self.tab.goto(f"{self.file.as_uri()}{address}")
        self.tab.wait_for_selector("html[data-ready]", timeout=30_000)
        return self

    def state(self, name: str) -> Any:
        return self.tab.evaluate(f"explainPage.viewer.state.{name}")

    def drawn(self) -> None:
        """Wait until everything that was asked for is drawn."""
        self.tab.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        self.tab.evaluate("explainPage.viewer ? explainPage.viewer.draw() : null")

    def until(self, truth: str) -> None:
        """Wait for something; Playwright's own waiting is forbidden by the page's policy."""
        for _ in range(200):
            if self.tab.evaluate(truth):
                return
            self.tab.wait_for_timeout(50)
        raise AssertionError(f"never: {truth}")

    @property
    def address(self) -> dict[str, str]:
        from urllib.parse import parse_qsl, urlparse

        self.tab.wait_for_timeout(450)  # it follows at most three times a second
        return dict(parse_qsl(urlparse(self.tab.url).fragment))

    @property
    def elsewhere(self) -> list[str]:
        own = ("data:", "blob:", "about:", self.file.as_uri())
        return [url for url in self.requests if not url.startswith(own)]


Open = Callable[..., Opened]


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Open a page; at the end, it must have asked for nothing and complained of nothing."""
    contexts = []
    pages = []

    def open_(
        file: Path, address: str = "", size: dict[str, int] = DESKTOP, **options: Any
    ) -> Opened:
        contexts.append(browser.new_context(viewport=size, **options))
        pages.append(Opened(contexts[-1].new_page(), file))
        return pages[-1].go(address) if options.get("java_script_enabled", True) else pages[-1]

    yield open_
    for each in pages:
        assert each.elsewhere == []
        assert each.said == []
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def file(explanation: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = explanation.to_html(tmp_path_factory.mktemp("page") / "cat.html", steps=4)
    return found


@pytest.fixture(scope="module")
def sheet(explainer: explain.Explainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = explainer(
        [photo(seed=seed) for seed in range(6)], ["gradcam", "inputxgradient"], targets=[0, 1]
    )
    truth = [LABELS.index(found[0].predictions[0][0]), *[4] * 4, None]
    return report.sheet(
        found,
        tmp_path_factory.mktemp("sheet") / "photos.html",
        truth=truth,
        metrics="sparseness",
        title=HOSTILE,
    )


def stage_of(page: Opened) -> np.ndarray[Any, Any]:
    """The photo as the page shows it, in its own resolution, without what is marked on it."""
    import io

    page.tab.evaluate(
        "document.querySelectorAll('.marks, .tag, .wipe').forEach((each) => { each.style.display = "
        "'none'; })"
    )
    shot = Image.open(io.BytesIO(page.tab.locator(".stage").screenshot())).convert("RGB")
    return np.asarray(shot)


def test_a_page_opens_from_disk_at_once_and_asks_for_nothing(opened: Open, file: Path) -> None:
    page = opened(file)
    assert page.tab.locator("h1").inner_text() == "Why tabby cat?"
    ready = [int(page.go().tab.get_attribute("html", "data-ready") or "") for _ in range(3)]
    assert min(ready) < 1000


@pytest.mark.parametrize("view", ["heat", "mask", "spotlight"])
def test_the_page_draws_what_the_package_draws(
    opened: Open, file: Path, explanation: Any, view: str
) -> None:
    """The stage, pixel by pixel, is the overlay that Python draws, but for the JPEG and the
    smoothing of a screen."""
    opacity = "&opacity=65" if view == "heat" else ""
    page = opened(file, f"#view={view}{opacity}")
    shown = stage_of(page)
    large = explanation.photo.resize(shown.shape[1::-1], Image.Resampling.BILINEAR)
    scale = large.width / explanation.photo.width
    box = explain.data.boxes.Box(*(edge * scale for edge in vars(explanation.box).values()))
    style: Any = styles.get_style(view)
    drawn = np.asarray(
        style.draw(large, explanation.attributions["gradcam"].heatmap[0].numpy(), box)
    ).astype(int)
    left, top, right, bottom = (round(edge) for edge in vars(box).values())
    inside = np.s_[top + 3 : bottom - 3, left + 3 : right - 3]
    off = np.abs(shown[inside].astype(int) - drawn[inside]).mean()
    other = np.asarray(
        style.draw(large, explanation.attributions["gradcam"].heatmap[0].numpy()[::-1, ::-1], box)
    ).astype(int)
    assert off < {"heat": 8, "mask": 10, "spotlight": 14}[view]
    # a map that is turned is not taken for it
    assert off < np.abs(other[inside] - drawn[inside]).mean() / 2


def test_the_slider_moves_between_enough_needed_and_all(
    opened: Open, explainer: explain.Explainer, tmp_path: Path
) -> None:
    """The page knows which set each place lies in, and draws a line around each in its own
    colour."""
    x = explainer.as_input(photo())
    model = nn.Sequential(nn.Flatten(), nn.Linear(x.numel(), 2))
    # the first class where there is 0.3 of the photo's energy, and so in two places apart
    with torch.no_grad():
        model[1].weight[:] = torch.stack([x.flatten(), torch.zeros(x.numel())])
        model[1].bias[:] = torch.tensor([0, 0.3 * float(x.square().sum())])
    methods = [Sufficient(8, "zero", reasons=2), Necessary(8, "zero")]  # type: ignore[arg-type]
    found = explain.Explainer(model, ["bright", "dark"], explainer.preprocess)(photo(), methods)
    assert len(found["sufficient"].sets[0]) == 2
    page = opened(found.to_html(tmp_path / "sets.html", steps=0))
    slider = page.tab.get_by_label("Shown of the photo")
    for step, name in enumerate(("sufficient", "necessary")):
        slider.fill(str(step))
        page.drawn()
        assert (page.state("method"), page.state("whole")) == (step, False)
        sets = found[name].sets[0]
        numbers = page.tab.evaluate("[...explainPage.viewer.now.of('set numbers')]")
        shown = np.any([each.mask.numpy() for each in sets], axis=0)
        assert 0 < shown.sum() < shown.size
        wanted = sum((i + 1) * each.mask.numpy() for i, each in enumerate(sets))
        assert np.reshape(numbers, shown.shape).tolist() == wanted.tolist()
        colors = {
            line.get_attribute("stroke") for line in page.tab.locator(".lines path.thin").all()
        }
        assert len(colors) == len(sets)
        assert (
            sentence(found[name], found.targets[0]) in page.tab.locator(".sets-card").inner_text()
        )
    slider.fill("0")
    page.tab.get_by_role("button", name="Wipe to the photo without it").click()
    page.drawn()
    assert page.address == {"compare": "without"}
    slider.fill("2")
    page.drawn()
    assert page.state("whole")
    assert page.tab.locator(".lines path").count() == 0


def test_values_and_shares_are_those_of_the_map(opened: Open, file: Path, explanation: Any) -> None:
    page = opened(file)
    values = page.tab.evaluate("[...explainPage.viewer.now.values]")
    width, height = page.tab.evaluate(
        "[explainPage.viewer.now.width, explainPage.viewer.now.height]"
    )
    wanted = enlarge(explanation.attributions["gradcam"].values[:, None].float(), (height, width))[
        0, 0
    ].numpy()
    wanted = wanted / np.abs(explanation.attributions["gradcam"].values[0].numpy()).max()
    assert np.abs(np.reshape(values, (height, width)) - wanted).max() < 1e-3
    for share in (0.3, 0.5, 0.9):
        least = page.tab.evaluate(f"threshold(explainPage.viewer.now.falling, {share})")
        assert least == pytest.approx(thresholds(np.clip(wanted, 0, None), [share])[0], abs=2e-3)
    found = page.tab.evaluate("explainPage.viewer.now.within([0, 0, 0.5, 0.25])")
    positive = np.clip(wanted, 0, None)
    assert found["for"] == pytest.approx(
        positive[: height // 4, : width // 2].sum() / positive.sum(), abs=1e-3
    )


def test_contours_run_where_the_shares_end(opened: Open, file: Path, explanation: Any) -> None:
    page = opened(file, "#view=contour")
    values = explanation.attributions["gradcam"].values
    fine = enlarge(values[:, None].float(), (384, 384))[0, 0].clamp(min=0).numpy()
    fine /= fine.max()
    for path, share in zip(
        page.tab.locator(".lines path.wide").all(), (0.5, 0.75, 0.9), strict=True
    ):
        places = np.array(re.findall(r"([\d.]+) ([\d.]+)", path.get_attribute("d")), float)
        inner = places[((places > 0.01) & (places < 0.99)).all(1)]
        assert len(inner) > 20
        x, y = np.clip((inner * 384).astype(int), 0, 383).T
        assert np.abs(fine[y, x] - thresholds(fine, [share])[0]).max() < 0.05


def test_methods_targets_views_and_layers_are_switched_by_click_and_by_keys(
    opened: Open, file: Path
) -> None:
    page = opened(file)
    page.tab.get_by_role("radio", name="LayerCAM").check(force=True)
    page.tab.get_by_text("Contour").click()
    page.drawn()
    assert page.address == {"method": "1", "view": "contour"}
    assert page.tab.locator(".lines path.thin").count() == 3
    page.tab.get_by_role("radio", name=HOSTILE).check(force=True)
    page.drawn()
    assert page.tab.locator("h1").inner_text() == f"Why {HOSTILE}?"
    pressed = [
        ("m", "method", 2),
        ("t", "target", 0),
        ("v", "view", "mask"),
        ("Shift+v", "view", "contour"),
        ("Shift+m", "method", 1),
        ("l", "layer", 1),
        ("w", "compare", "photo"),
    ]
    for key, name, value in pressed:
        page.tab.keyboard.press(key)
        page.drawn()
        assert page.state(name) == value
    assert page.tab.get_by_label("Layer", exact=True).input_value() == "1"
    kept = page.address
    again = opened(file, f"#{page.tab.url.split('#')[1]}")
    assert again.address == kept
    assert again.state("layer") == 1


def test_an_address_with_nonsense_is_taken_for_what_it_can_be(opened: Open, file: Path) -> None:
    page = opened(
        file,
        "#method=99&target=-1&view=<b>&opacity=1e9&share=0&region=1,2&compare=map:9:9&not=7&cover=500&way=x",
    )
    assert [
        page.state(name) for name in ("method", "target", "view", "compare", "not", "region")
    ] == [
        0,
        0,
        "heat",
        "none",
        None,
        None,
    ]
    assert page.state("share") == 5
    assert page.state("cover") == 100


def test_a_region_drawn_by_mouse_says_its_share(opened: Open, file: Path, explanation: Any) -> None:
    page = opened(file)
    bounds = page.tab.locator(".stage").bounding_box()
    scale = bounds["width"] / explanation.photo.width
    left, top, right, bottom = vars(explanation.box).values()
    start = bounds["x"] + left * scale, bounds["y"] + top * scale
    end = bounds["x"] + (left + right) / 2 * scale, bounds["y"] + bottom * scale
    page.tab.mouse.move(*start)
    page.tab.mouse.down()
    page.tab.mouse.move(*end, steps=4)
    page.tab.mouse.up()
    page.drawn()
    heat = enlarge(explanation.attributions["gradcam"].values[:, None].float(), (64, 64))[
        0, 0
    ].clamp(min=0)
    share = 100 * float(heat[:, :32].sum() / heat.sum())
    words = page.tab.locator(".region-words").inner_text()
    told = re.fullmatch(
        r"([\d.]+)\s% of the evidence for tabby cat is in here, on (\d+)\s% of what the model saw\.",
        words,
    )
    assert told is not None
    assert float(told[1]) == pytest.approx(share, abs=1.5)
    assert told[2] == "50"
    assert page.tab.locator(".marks .region").count() == 2
    page.tab.mouse.move(bounds["x"] + 40, bounds["y"] + 40)
    assert "did not see this part" in page.tab.locator(".reading").inner_text()
    page.tab.locator(".stage").press("Escape")
    page.drawn()
    assert page.tab.locator(".region-words").inner_text() == ""


def test_a_region_is_drawn_by_keys_too(opened: Open, file: Path) -> None:
    page = opened(file)
    page.tab.locator(".stage").focus()
    page.tab.keyboard.press("ArrowRight")
    assert re.match(r"At \d+, \d+: ", page.tab.locator(".reading").inner_text())
    for key in ["Shift+ArrowRight"] * 8 + ["Shift+ArrowDown"] * 8:
        page.tab.keyboard.press(key)
    page.drawn()
    assert page.state("region") == pytest.approx([0.525, 0.5, 0.725, 0.7])
    assert "of the evidence for tabby cat" in page.tab.locator(".region-words").inner_text()


def test_the_wipe_moves_by_mouse_and_keys(opened: Open, file: Path) -> None:
    page = opened(file, "#compare=photo")
    handle = page.tab.get_by_role("slider", name="Compare the two pictures")
    bounds = handle.bounding_box()
    stage = page.tab.locator(".stage").bounding_box()
    page.tab.mouse.move(bounds["x"] + bounds["width"] / 2, bounds["y"] + 50)
    page.tab.mouse.down()
    page.tab.mouse.move(stage["x"] + 0.8 * stage["width"], bounds["y"] + 50, steps=3)
    page.tab.mouse.up()
    page.drawn()
    assert page.state("wipe") == pytest.approx(80, abs=1)
    handle.press("Home")
    page.drawn()
    assert handle.get_attribute("aria-valuenow") == "0"
    shown = stage_of(page)
    assert np.ptp(shown.astype(int), axis=2).max() > 60  # all of it is the photo in colour
    page.tab.get_by_label("Compare with").select_option("map:1:2")
    page.drawn()
    assert page.tab.locator(".tag.right").inner_text() == f"Input × Gradient, {HOSTILE}"


def test_why_this_and_not_that_is_the_difference_of_two_maps(
    opened: Open, file: Path, explanation: Any
) -> None:
    page = opened(file, "#method=2")
    page.tab.get_by_label("and not").select_option("1")
    page.drawn()
    one, other = (explanation.results[i]["inputxgradient"].values[0].sum(0).numpy() for i in (0, 1))
    values = np.array(page.tab.evaluate("[...explainPage.viewer.now.plane.values]")).reshape(
        one.shape
    )
    wanted = one - other
    assert np.abs(values - wanted / np.abs(wanted).max()).max() < 0.03
    assert page.tab.locator("h1").inner_text() == f"Why tabby cat, and not {HOSTILE}?"


COVERED = """(() => {
    const canvas = explainPage.viewer.stage.front.cover;
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    const found = [];
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 127) found.push(i);
    return { share: (4 * found.length) / data.length, color: [...data.slice(found[0], found[0] + 3)] };
})()"""
"""The share of the canvas that covers, and its colour."""


def test_the_evidence_is_covered_as_far_as_the_curve_is_dragged(opened: Open, file: Path) -> None:
    page = opened(file)
    page.tab.locator("svg.plot").scroll_into_view_if_needed()
    plot = page.tab.locator("svg.plot").bounding_box()
    page.tab.mouse.move(plot["x"] + plot["width"] * 0.2, plot["y"] + 40)
    page.tab.mouse.down()
    page.tab.mouse.move(plot["x"] + plot["width"] * 0.6, plot["y"] + 40, steps=3)
    page.tab.mouse.up()
    page.drawn()
    cover = page.state("cover")
    assert 45 < cover < 65
    assert page.tab.evaluate(COVERED)["share"] == pytest.approx(cover / 100, abs=0.01)
    assert page.tab.evaluate(COVERED)["color"] == [64, 128, 128]
    page.tab.get_by_text("Uncover").click()
    page.drawn()
    assert page.tab.evaluate(COVERED)["share"] == pytest.approx(cover / 100, abs=0.02)
    page.tab.get_by_role("button", name="Back to the map").click()
    page.drawn()
    assert page.state("cover") is None
    page.tab.get_by_role("button", name="▶ Play").click()
    page.until("explainPage.viewer.state.cover > 1")
    page.tab.get_by_role("button", name="❚❚ Pause").click()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_every_kind_of_explanation_is_shown(opened: Open, tmp_path: Path, kind: str) -> None:
    page = opened(of_kind(kind).to_html(tmp_path / "kind.html", steps=2))
    for key in "mtlvvvwcc":
        page.tab.keyboard.press(key)
        page.drawn()
    assert page.tab.locator(".marks .asked").count() == {"detection": 2, "segmentation": 1}.get(
        kind, 0
    )
    assert page.tab.locator(".marks .frame").count() == {"padded": 0}.get(kind, 1)


def test_the_verdict_is_shown_with_its_reasons(
    opened: Open, explanation: Any, tmp_path: Path
) -> None:
    page = opened(checked(explanation).to_html(tmp_path / "checked.html", steps=0), "#method=1")
    table = page.tab.locator("section:has(h2:text-is('Sanity checks')) tbody")
    assert [" ".join(text.split()) for text in table.locator("tr").all_inner_texts()] == [
        "Grad-CAM ✓ passed – not checked ✓ passed 0.0200 –",
        "LayerCAM ✗ failed – ✓ passed 0.0200 ✗ failed 0.400",
    ]
    reasons = page.tab.locator(".reasons li").all_inner_texts()
    assert reasons == [
        "Is it faithful? ✓ passed no other place is as good",
        f"Is it stable? ✗ failed {HOSTILE}",
        HOSTILE,
    ]
    assert page.tab.locator(".film .checked").all_inner_texts() == [
        "✓ map: check passed",
        "✗ map: check failed",
        "",
    ]
    page.tab.keyboard.press("t")
    page.drawn()
    assert page.tab.get_by_role("heading", name="Sanity checks").count() == 0


def test_the_picture_is_saved_as_a_file(opened: Open, file: Path, explanation: Any) -> None:
    page = opened(file)
    with page.tab.expect_download() as waiting:
        page.tab.get_by_role("button", name="Save the picture").click()
    with Image.open(waiting.value.path()) as saved:
        times = -(-320 // max(explanation.photo.size))  # a small photo is enlarged for its caption
        width, height = (times * side for side in explanation.photo.size)
        assert (saved.width, saved.height > height) == (width, True)
        photo = np.asarray(saved.convert("RGB"))[:height].astype(int)
        strip = np.asarray(saved.convert("L"))[height:]
    assert (np.ptp(photo, axis=2) > 60).any()  # a colour map over it
    assert strip.min() < 60 < 250 < strip.max()  # words on paper
    assert waiting.value.suggested_filename.endswith("-gradcam.png")


def test_the_record_and_the_python_are_there_to_copy(
    opened: Open, file: Path, explanation: Any
) -> None:
    import json

    page = opened(file, "#method=1&target=1")
    assert "import explain" in page.tab.locator("pre").inner_text()
    page.tab.get_by_text("Record", exact=True).click()
    text = page.tab.locator("pre").text_content()
    assert json.loads(text) == json.loads(json.dumps(explanation.record("layercam", 1)))
    page.tab.get_by_role("button", name="Copy").click()
    page.until("document.querySelector('.foot [role=status]').textContent !== ''")


@pytest.mark.parametrize("which", ["page", "sheet"])
def test_labels_are_texts_wherever_they_turn_up(
    opened: Open, file: Path, sheet: Path, which: str
) -> None:
    page = opened(file if which == "page" else sheet)
    for key in "tmcw":
        page.tab.keyboard.press(key)
    assert page.tab.locator("[onerror]").count() == 0
    assert page.tab.locator("img[src=x]").count() == 0
    assert page.tab.title() not in ("1", "2")
    assert HOSTILE in page.tab.locator("body").inner_text()


def test_a_script_that_got_in_would_not_run(opened: Open, file: Path, tmp_path: Path) -> None:
    """What the policy is for: even markup in the file itself does nothing."""
    broken = tmp_path / "broken.html"
    broken.write_text(
        file.read_text("utf-8").replace(
            "</body>", f"{HOSTILE}<script>document.title = 3</script></body>"
        ),
        "utf-8",
    )
    page = opened(broken)
    page.tab.wait_for_timeout(100)
    assert page.tab.title() not in ("1", "3")
    assert len(page.said) >= 2
    assert all("Content Security Policy" in said for said in page.said)
    page.said.clear()
    page.requests.clear()  # the picture was asked for, and refused


AUDITED = [
    ("light", DESKTOP, ""),
    ("dark", DESKTOP, "#cover=30"),
    ("light", PHONE, "#view=contour&compare=photo"),
    ("dark", PHONE, ""),
]


@pytest.mark.parametrize("which", ["page", "sheet"])
@pytest.mark.parametrize(("scheme", "size", "address"), AUDITED)
def test_nothing_is_in_the_way_of_a_screen_reader(
    opened: Open,
    file: Path,
    sheet: Path,
    which: str,
    scheme: str,
    size: dict[str, int],
    address: str,
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="the audit is by axe-playwright-python"
    )
    page = opened(file if which == "page" else sheet, address, size, color_scheme=scheme)
    page.drawn()
    found = axe.Axe().run(page.tab, options={"resultTypes": ["violations"]})
    assert found.violations_count == 0, found.generate_report()


def test_every_control_is_reached_by_tab_and_has_a_name(opened: Open, file: Path) -> None:
    page = opened(file, "#compare=photo")
    seen: list[str] = []
    for _ in range(60):
        page.tab.keyboard.press("Tab")
        name = page.tab.evaluate(
            "(() => { const e = document.activeElement; if (!e || e === document.body) return "
            "null; "
            "return (e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent "
            "|| '').trim(); })()"
        )
        if name is None:
            break
        assert name
        seen.append(name)
    text = " | ".join(seen)
    for control in (
        "Theme",
        "Shortcuts",
        "Compare the two",
        "Save the picture",
        "Grad-CAM",
        "tabby cat",
        "Heat",
        "Opacity",
        "Share of the evidence",
        "Colours",
        "Layer",
        "Cover",
        "Play",
        "Copy",
        "Text to copy",
    ):
        assert control in text
    assert len(seen) < 60


def test_a_sheet_filters_sorts_and_opens(
    opened: Open, sheet: Path, explainer: explain.Explainer
) -> None:
    page = opened(sheet)
    cards = page.tab.locator(".grid li")
    assert cards.count() == 6
    assert page.tab.locator("h1").inner_text() == HOSTILE
    page.tab.get_by_label("Right or wrong").select_option("right")
    assert page.tab.locator(".grid .mark.passed").count() == cards.count() >= 1
    assert page.address == {"right": "right"}
    page.tab.get_by_label("Right or wrong").select_option("")
    page.tab.get_by_label("Sort by").select_option("probability")
    rising = page.tab.locator(".grid b").all_inner_texts()
    numbers = [float(text.split()[0].lstrip("<")) for text in rising]
    assert numbers == sorted(numbers)
    page.tab.get_by_role("button", name="Order: rising").click()
    assert page.tab.locator(".grid b").all_inner_texts()[0] == rising[-1]
    page.tab.get_by_label("Sort by").select_option("sparseness of gradcam")
    figures = [
        float(text.split()[-1]) for text in page.tab.locator(".grid .figure").all_inner_texts()
    ]
    assert figures == sorted(figures, reverse=True)
    page.tab.get_by_role("searchbox").fill("no such thing")
    assert cards.count() == 0
    assert "0 of 6 photos" in page.tab.locator(".sheet > [role=status]").inner_text()
    page.tab.get_by_role("searchbox").fill("")
    link = cards.nth(2).get_by_role("link")
    assert re.fullmatch(r"#photo=\d", link.get_attribute("href"))
    link.click()
    page.tab.wait_for_selector(".viewer .stage")
    page.drawn()
    number = int(page.address["photo"])
    page.tab.get_by_role("button", name="Next").click()
    page.until(f"explainPage.number !== {number}")
    page.drawn()
    assert page.address["photo"] != str(number)
    again = opened(sheet, f"#{page.tab.url.split('#')[1]}")
    assert again.tab.evaluate("explainPage.number") == page.tab.evaluate("explainPage.number")
    page.tab.get_by_role("button", name="All photos").click()
    assert cards.count() == 6
    assert page.tab.get_by_label("Sort by").input_value() == "sparseness of gradcam"


def test_a_sheet_says_of_each_map_which_class_it_explains(opened: Open, sheet: Path) -> None:
    """The first map of each photo is for class 0, whatever the model predicts for it."""
    page = opened(sheet)
    cards = page.tab.locator(".grid li")
    for card in (cards.nth(place) for place in range(cards.count())):
        prediction = card.locator(".label").inner_text()
        told = card.locator(".target").all_inner_texts()
        assert told == ([] if prediction.startswith(LABELS[0]) else [f"map of {LABELS[0]}"])
    assert page.tab.locator(".grid .target").count() > 0


def test_a_sheet_keeps_what_passed_and_what_is_within_bounds(
    opened: Open, explainer: explain.Explainer, tmp_path: Path
) -> None:
    found = [explainer(photo(seed=seed), ["gradcam", "layercam"], targets=[0]) for seed in range(4)]
    passed = checked(found[0]).verdicts[0].results
    first, second, *others = (checked(each) for each in found)
    failed = replace(
        second.verdicts[0], results={"gradcam": replace(passed["layercam"], method="gradcam")}
    )
    second = replace(second, verdicts={0: failed})
    plain = [replace(each, verdicts={}) for each in others]
    file = report.sheet([first, second, *plain], tmp_path / "four.html", metrics=["sparseness"])
    page = opened(file)
    cards = page.tab.locator(".grid li")
    numbers = "explainPage.sheet.chosen().map((photo) => photo.number)"
    for chosen, kept in (("passed", [0]), ("failed", [1]), ("", [0, 1, 2, 3])):
        page.tab.get_by_label("Map check").select_option(chosen)
        assert sorted(page.tab.evaluate(numbers)) == kept
        assert cards.count() == len(kept)
    assert not page.tab.get_by_label("From").is_visible()
    page.tab.get_by_label("Sort by").select_option("sparseness of gradcam")
    values = page.tab.evaluate(
        "explainPage.sheet.chosen().map((photo) => explainPage.sheet.value(photo))"
    )
    page.tab.get_by_label("From").fill(str((values[0] + values[1]) / 2))
    page.tab.get_by_role("spinbutton", name="To").fill(str((values[2] + values[3]) / 2))
    assert (
        page.tab.evaluate(
            "explainPage.sheet.chosen().map((photo) => explainPage.sheet.value(photo))"
        )
        == values[1:3]
    )
    again = opened(file, f"#{page.tab.url.split('#')[1]}") if page.address["least"] else page
    assert again.tab.locator(".grid li").count() == 2
    page.tab.get_by_label("Sort by").select_option("probability")
    assert cards.count() == 4
    best = page.tab.evaluate(
        "Math.max(...explainPage.sheet.photos.map((photo) => photo.probability))"
    )
    page.tab.get_by_label("From (%)").fill(str(100 * best - 1e-6))
    assert cards.count() == 1


def test_a_notebook_shows_the_page_over_its_picture(
    opened: Open, explanation: Any, tmp_path: Path
) -> None:
    around = tmp_path / "notebook.html"
    around.write_text(
        f"<!doctype html><html data-ready><title>n</title><body>{explanation._repr_html_()}",
        "utf-8",
    )
    page = opened(around)
    frame = page.tab.frame_locator("iframe")
    frame.locator(".film canvas").first.wait_for(timeout=10_000)
    assert frame.locator("h1").inner_text() == "Why tabby cat?"
    frame.get_by_role("radio", name="LayerCAM").check(force=True)
    assert frame.locator("header").count() == 0
    covered = page.tab.evaluate("document.elementFromPoint(60, 60).tagName")
    assert covered == "IFRAME"


def test_a_notebook_without_scripts_or_frames_shows_the_picture(
    opened: Open, explanation: Any, tmp_path: Path
) -> None:
    """Where the frame may run no scripts, it lets the picture through; where frames are taken out,
    that is left."""
    text = f"<!doctype html><html data-ready><title>n</title><body>{explanation._repr_html_()}"
    still = tmp_path / "still.html"
    bare = tmp_path / "bare.html"
    still.write_text(text.replace('sandbox="allow-scripts allow-downloads"', 'sandbox=""'), "utf-8")
    bare.write_text(re.sub(r"<iframe.*?</iframe>", "", text, flags=re.DOTALL), "utf-8")
    page = opened(still)
    with_frame = np.asarray(shot_of(page))
    assert page.said
    assert all("Blocked script execution" in said for said in page.said)
    page.said.clear()
    assert (np.asarray(shot_of(opened(bare))) == with_frame).all()
    assert with_frame.std() > 20


def shot_of(page: Opened) -> Image.Image:
    import io

    return Image.open(io.BytesIO(page.tab.screenshot())).convert("RGB")


def test_without_scripts_a_page_says_so(opened: Open, file: Path) -> None:
    page = opened(file, java_script_enabled=False)
    page.tab.goto(file.as_uri())
    assert "Allow scripts to see them" in page.tab.locator("body").inner_text()


GOLDEN = ROOT / "tests" / "report" / "golden"
LOOKS = [
    ("desktop-light", DESKTOP, "light"),
    ("desktop-dark", DESKTOP, "dark"),
    ("phone-light", PHONE, "light"),
    ("phone-dark", PHONE, "dark"),
]


@pytest.mark.parametrize(("name", "size", "scheme"), LOOKS)
def test_the_page_looks_as_it_did(
    opened: Open,
    explainer: explain.Explainer,
    tmp_path: Path,
    name: str,
    size: dict[str, int],
    scheme: str,
) -> None:
    """Against a committed picture, so small that fonts do not matter; EXPLAIN_GOLDEN=write makes it
    again."""
    import io

    plain = copy.copy(explainer(photo(180, 120), ["gradcam", "inputxgradient"], targets=[0]))
    page = opened(plain.to_html(tmp_path / "plain.html"), "", size, color_scheme=scheme)
    page.drawn()
    page.tab.wait_for_timeout(200)
    shot = Image.open(io.BytesIO(page.tab.screenshot())).convert("RGB")
    small = shot.resize((shot.width // 10, shot.height // 10), Image.Resampling.BOX)
    place = GOLDEN / f"{name}.png"
    if os.environ.get("EXPLAIN_GOLDEN") == "write":
        place.parent.mkdir(exist_ok=True)
        small.save(place)
    wanted = np.asarray(Image.open(place)).astype(int)
    off = np.abs(np.asarray(small).astype(int) - wanted).max(2)
    assert off.mean() < 6
    assert (off > 60).mean() < 0.03
