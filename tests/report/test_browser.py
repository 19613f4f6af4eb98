"""The report in a real browser: what it shows, what it answers to hands and keys, and that it asks
for nothing."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlparse

import numpy as np
import pytest
from PIL import Image

import explain
from explain import report
from explain.data.boxes import Box
from explain.render import styles
from explain.report import pages
from tests.browsing import DESKTOP, PHONE, Opens, Tab, chromium, tabs
from tests.conftest import ROOT
from tests.report.conftest import HOSTILE, KINDS, LABELS, of_kind, photo

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


class Page(Tab):
    """A page that was opened from disk."""

    def __init__(self, tab: Any, file: Path, address: str = "") -> None:
        super().__init__(tab, file.as_uri())
        tab.goto(f"{file.as_uri()}{address}")
        tab.wait_for_selector("html[data-ready]", timeout=30_000)

    def state(self, name: str) -> Any:
        return self.tab.evaluate(f"explainPage.viewer.state.{name}")

    def settle(self) -> None:
        """Wait until everything that was asked for is drawn."""
        self.tab.evaluate("new Promise(requestAnimationFrame)")
        self.tab.evaluate("explainPage.viewer ? explainPage.viewer.draw() : null")

    def press(self, keys: str) -> None:
        """Press keys, and wait after each until everything that was asked for is drawn."""
        for key in keys.split(" "):
            self.tab.keyboard.press(key)
            self.settle()

    @property
    def address(self) -> dict[str, str]:
        self.tab.wait_for_timeout(450)  # it follows at most three times a second
        return dict(parse_qsl(urlparse(self.tab.url).fragment))


@pytest.fixture
def opens(browser: Any) -> Iterator[Opens]:
    with tabs(browser, Page) as opens:
        yield opens


@pytest.fixture(scope="module")
def files(
    explainer: explain.Explainer, explanation: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    photos = [photo(seed=seed) for seed in range(6)]
    explanations = explainer(photos, ["gradcam", "inputxgradient"], targets=[0, 1])
    truth = [LABELS.index(explanations[0].predictions[0][0]), *[4] * 4, None]
    options: dict[str, Any] = {"truth": truth, "metrics": "sparseness", "title": HOSTILE}
    return {
        "page": explanation.to_html(folder / "cat.html", steps=4),
        "sheet": report.sheet(explanations, folder / "photos.html", **options),
    }


MARKS = "document.querySelectorAll('.marks, .tag, .wipe').forEach((each) => each.remove())"


@pytest.mark.parametrize(
    ("view", "off"), [("heat", 8), ("mask", 10), ("spotlight", 14), ("signed", 8)]
)
def test_the_page_draws_what_the_package_draws(
    opens: Opens, files: dict[str, Path], explanation: Any, view: str, off: int
) -> None:
    """The stage, pixel by pixel, is the overlay that Python draws, but for the JPEG and the
    smoothing of a screen; a map that is turned is not taken for it."""
    page = opens(files["page"], "#method=2" if view == "signed" else f"#view={view}")
    page.settle()
    page.tab.evaluate(MARKS)
    shown = page.screenshot(".stage")
    large = explanation.photo.resize(shown.size, Image.Resampling.BILINEAR)
    scale = large.width / explanation.photo.width
    box = Box(*(edge * scale for edge in vars(explanation.box).values()))
    values = explanation.attributions["gradcam"].heatmap[0].numpy()
    if view == "signed":
        values = explanation.attributions["inputxgradient"].signed[0].numpy()
    style: Any = styles.get_style(view)
    overlay, turned = (style.draw(large, drawn, box) for drawn in (values, values[::-1, ::-1]))
    left, top, right, bottom = (round(edge) for edge in vars(box).values())
    within = np.s_[top + 3 : bottom - 3, left + 3 : right - 3]
    pixels, expected, other = (
        np.asarray(picture)[within].astype(int) for picture in (shown, overlay, turned)
    )
    difference = np.abs(pixels - expected).mean()
    assert difference < min(off, np.abs(other - expected).mean() / 2)


def test_methods_targets_views_and_layers_are_switched_by_click_and_by_keys(
    opens: Opens, files: dict[str, Path]
) -> None:
    page = opens(files["page"])
    page.tab.get_by_role("radio", name="LayerCAM").check(force=True)
    page.tab.get_by_text("Contour").click()
    page.settle()
    assert page.address == {"method": "1", "view": "contour"}
    assert page.tab.locator(".lines path.thin").count() == 3
    page.tab.get_by_role("radio", name=HOSTILE).check(force=True)
    page.settle()
    assert page.tab.locator("h1").inner_text() == f"Why {HOSTILE}?"
    for key, name, value in (
        ("m", "method", 2),
        ("t", "target", 0),
        ("v", "view", "mask"),
        ("Shift+v", "view", "contour"),
        ("Shift+m", "method", 1),
        ("l", "layer", 1),
        ("w", "compare", "photo"),
    ):
        page.press(key)
        assert page.state(name) == value
    kept = page.address
    again = opens(files["page"], f"#{urlparse(page.tab.url).fragment}")
    assert again.address == kept
    assert again.state("layer") == 1


def test_a_card_has_the_name_of_the_class_that_its_map_is_of(
    opens: Opens, files: dict[str, Path]
) -> None:
    """Whatever is predicted, which stands below where it is another class."""
    page = opens(files["sheet"])
    photos = page.tab.evaluate("JSON.parse(document.getElementById('index').textContent).photos")
    cards = page.tab.locator(".grid li")
    assert cards.count() == len(photos) == 6
    assert any(one["label"] != LABELS[0] for one in photos)
    for number, one in enumerate(photos):
        card = cards.nth(number)
        assert card.locator(".label").inner_text() == f"{LABELS[0]} {one['of_target']}"
        below = card.locator(".target").all_inner_texts()
        assert len(below) == (one["label"] != LABELS[0])
        assert all(one["label"] in words for words in below)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_every_kind_of_explanation_is_shown(opens: Opens, tmp_path: Path, kind: str) -> None:
    page = opens(of_kind(kind).to_html(tmp_path / "kind.html", steps=2))
    page.press("m t l v v v w c c")
    asked = {"detection": 2, "segmentation": 1}
    assert page.tab.locator(".marks .asked").count() == asked.get(kind, 0)
    assert page.tab.locator(".marks .frame").count() == int(kind != "padded")


@pytest.mark.parametrize("which", ["page", "sheet"])
def test_labels_are_texts_wherever_they_turn_up(
    opens: Opens, files: dict[str, Path], which: str
) -> None:
    page = opens(files[which])
    page.press("t m c w")
    assert page.tab.locator("[onerror], img[src=x]").count() == 0
    assert page.tab.title() not in ("1", "2")
    assert HOSTILE in page.tab.locator("body").inner_text()


def test_a_script_that_got_in_would_not_run(
    opens: Opens, files: dict[str, Path], tmp_path: Path
) -> None:
    """What the policy is for: even markup in the file itself does nothing."""
    text = files["page"].read_text("utf-8")
    markup = f"{HOSTILE}<script>document.title = 3</script></body>"
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("</body>", markup), "utf-8")
    page = opens(broken)
    page.tab.wait_for_timeout(100)
    assert page.tab.title() not in ("1", "3")
    assert len(page.said) >= 2
    assert all("Content Security Policy" in said for said in page.said)
    page.said.clear()
    page.requests.clear()  # the picture was asked for, and refused


@pytest.mark.parametrize("which", ["page", "sheet"])
@pytest.mark.parametrize(
    ("scheme", "size", "address"),
    [
        ("dark", DESKTOP, "#cover=30"),
        ("light", PHONE, "#view=contour&compare=photo"),
    ],
)
def test_nothing_is_in_the_way_of_a_screen_reader_and_no_page_is_too_wide(
    opens: Opens,
    files: dict[str, Path],
    which: str,
    scheme: str,
    size: dict[str, int],
    address: str,
) -> None:
    page = opens(files[which], address, size=size, color_scheme=scheme)
    page.settle()
    assert page.violations == []
    assert page.tab.evaluate("document.documentElement.scrollWidth") == size["width"]


@pytest.mark.parametrize("which", ["page", "sheet"])
def test_without_scripts_the_maps_are_pictures(
    browser: Any, files: dict[str, Path], explanation: Any, which: str
) -> None:
    """As in the preview of a mail: every photo is seen with its map, and all fits the window."""
    context = browser.new_context(java_script_enabled=False, viewport=DESKTOP)
    tab = context.new_page()
    tab.goto(files[which].as_uri())
    stills = tab.locator(".stills img")
    assert stills.count() == (1 if which == "page" else 6)
    shown = Image.open(io.BytesIO(stills.first.screenshot())).convert("RGB")
    if which == "page":
        expected = pages.all_maps(explanation).resize(shown.size, Image.Resampling.BILINEAR)
        off = np.abs(np.asarray(shown).astype(int) - np.asarray(expected)).mean()
        assert off < 6  # of JPEG
        assert shown.width <= DESKTOP["width"]
    else:
        assert shown.width >= 100
        assert np.asarray(shown).std() > 10
    assert tab.locator(".stills figcaption").first.is_visible()
    context.close()


def test_print_has_all_maps_and_the_screen_has_them_once(
    opens: Opens, files: dict[str, Path]
) -> None:
    page = opens(files["page"])
    page.settle()
    stills, film = page.tab.locator(".stills"), page.tab.locator(".film")
    assert not stills.is_visible()
    assert film.is_visible()
    page.tab.emulate_media(media="print")
    assert stills.is_visible()
    assert not film.is_visible()


def test_names_below_small_pictures_break_between_words_only(
    opens: Opens, explainer: explain.Explainer, tmp_path: Path
) -> None:
    methods = ["integratedgradients(steps=2)", "guidedbackprop", "smooth(gradcam, samples=2)"]
    narrow = explainer(photo(60, 180), [*methods, "xgradcam"], targets=[0])
    page = opens(narrow.to_html(tmp_path / "narrow.html", steps=0))
    page.settle()
    broken = page.tab.evaluate(
        """[...document.querySelectorAll('.film .frame > span')].flatMap((name) => {
            const text = name.firstChild;
            return [...text.data.matchAll(/[^ -]+-?/g)].filter((word) => {
                const range = document.createRange();
                range.setStart(text, word.index);
                range.setEnd(text, word.index + word[0].length);
                return range.getClientRects().length > 1;
            }).map(([word]) => word);
        })"""
    )
    assert page.tab.locator(".film .frame > span").count() == 4
    assert broken == []


@pytest.mark.parametrize("which", ["page", "sheet"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_what_is_touched_is_large_enough(
    opens: Opens, files: dict[str, Path], which: str, size: dict[str, int]
) -> None:
    page = opens(files[which], size=size)
    page.settle()
    assert page.small_targets == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_looks_as_it_did(
    opens: Opens, explainer: explain.Explainer, tmp_path: Path, size: dict[str, int], scheme: str
) -> None:
    """Against a committed picture, so small that fonts do not matter; EXPLAIN_GOLDEN=write makes it
    again."""
    plain = explainer(photo(180, 120), ["gradcam", "inputxgradient"], targets=[0])
    page = opens(plain.to_html(tmp_path / "plain.html"), size=size, color_scheme=scheme)
    page.settle()
    tenth = (size["width"] // 10, size["height"] // 10)
    small = page.screenshot().resize(tenth, Image.Resampling.BOX)
    name = "desktop" if size == DESKTOP else "phone"
    path = ROOT / "tests" / "report" / "golden" / f"{name}-{scheme}.png"
    if os.environ.get("EXPLAIN_GOLDEN") == "write":
        small.save(path)
    golden = np.asarray(Image.open(path)).astype(int)
    off = np.abs(np.asarray(small).astype(int) - golden).max(2)
    assert off.mean() < 6
    assert (off > 60).mean() < 0.03
