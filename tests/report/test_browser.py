"""The report in a real browser: what it shows, what it answers to hands and keys, and that it asks
for nothing."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import explain
from explain import report
from explain.render import styles
from tests.browsing import DESKTOP, PHONE, Tab, chromium
from tests.conftest import ROOT
from tests.report.conftest import HOSTILE, KINDS, LABELS, of_kind, photo

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


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

    def settle(self) -> None:
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
        local = ("data:", "blob:", "about:", self.file.as_uri())
        return [url for url in self.requests if not url.startswith(local)]


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
    for page in pages:
        assert page.elsewhere == []
        assert page.said == []
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def file(explanation: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = explanation.to_html(tmp_path_factory.mktemp("page") / "cat.html", steps=4)
    return path


@pytest.fixture(scope="module")
def sheet(explainer: explain.Explainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    explanations = explainer(
        [photo(seed=seed) for seed in range(6)], ["gradcam", "inputxgradient"], targets=[0, 1]
    )
    truth = [LABELS.index(explanations[0].predictions[0][0]), *[4] * 4, None]
    return report.sheet(
        explanations,
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


@pytest.mark.parametrize("view", ["heat", "mask", "spotlight", "signed"])
def test_the_page_draws_what_the_package_draws(
    opened: Open, file: Path, explanation: Any, view: str
) -> None:
    """The stage, pixel by pixel, is the overlay that Python draws, but for the JPEG and the
    smoothing of a screen."""
    page = opened(file, "#method=2" if view == "signed" else f"#view={view}")
    shown = stage_of(page)
    large = explanation.photo.resize(shown.shape[1::-1], Image.Resampling.BILINEAR)
    scale = large.width / explanation.photo.width
    box = explain.data.boxes.Box(*(edge * scale for edge in vars(explanation.box).values()))
    style: Any = styles.get_style(view)
    values = explanation.attributions["gradcam"].heatmap[0].numpy()
    if view == "signed":
        values = explanation.attributions["inputxgradient"].signed[0].numpy()
    overlay = np.asarray(style.draw(large, values, box)).astype(int)
    left, top, right, bottom = (round(edge) for edge in vars(box).values())
    seen = np.s_[top + 3 : bottom - 3, left + 3 : right - 3]
    off = np.abs(shown[seen].astype(int) - overlay[seen]).mean()
    other = np.asarray(style.draw(large, values[::-1, ::-1], box)).astype(int)
    assert off < {"heat": 8, "mask": 10, "spotlight": 14, "signed": 8}[view]
    # a map that is turned is not taken for it
    assert off < np.abs(other[seen] - overlay[seen]).mean() / 2


def test_methods_targets_views_and_layers_are_switched_by_click_and_by_keys(
    opened: Open, file: Path
) -> None:
    page = opened(file)
    page.tab.get_by_role("radio", name="LayerCAM").check(force=True)
    page.tab.get_by_text("Contour").click()
    page.settle()
    assert page.address == {"method": "1", "view": "contour"}
    assert page.tab.locator(".lines path.thin").count() == 3
    page.tab.get_by_role("radio", name=HOSTILE).check(force=True)
    page.settle()
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
        page.settle()
        assert page.state(name) == value
    assert page.tab.get_by_label("Layer", exact=True).input_value() == "1"
    kept = page.address
    again = opened(file, f"#{page.tab.url.split('#')[1]}")
    assert again.address == kept
    assert again.state("layer") == 1


"""The share of the canvas that covers, and its colour."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_every_kind_of_explanation_is_shown(opened: Open, tmp_path: Path, kind: str) -> None:
    page = opened(of_kind(kind).to_html(tmp_path / "kind.html", steps=2))
    for key in "mtlvvvwcc":
        page.tab.keyboard.press(key)
        page.settle()
    assert page.tab.locator(".marks .asked").count() == {"detection": 2, "segmentation": 1}.get(
        kind, 0
    )
    assert page.tab.locator(".marks .frame").count() == {"padded": 0}.get(kind, 1)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_many_methods_scroll_in_their_strip_and_not_the_page(
    opened: Open, explainer: explain.Explainer, tmp_path: Path, size: dict[str, int]
) -> None:
    methods = ["gradcam", "layercam", "hirescam", "xgradcam", "gradcam++", "eigencam", "fullgrad"]
    methods += ["saliency", "guidedbackprop", "inputxgradient", "lrp", "deeplift", "deconvnet"]
    explanation = explainer(photo(), methods, targets=[0, 1])
    page = opened(explanation.to_html(tmp_path / "many.html", steps=0), size=size)
    across = "(each) => [each.scrollWidth, each.clientWidth]"
    whole, seen = page.tab.locator(".film").evaluate(across)
    assert whole > seen
    assert page.tab.evaluate("document.documentElement.scrollWidth") == size["width"]
    page.tab.locator(".film label").last.click()  # which scrolls to it
    page.until("explainPage.viewer.state.method !== 0")
    assert page.tab.evaluate("document.documentElement.scrollWidth") == size["width"]


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
    page.settle()
    audit = axe.Axe().run(page.tab, options={"resultTypes": ["violations"]})
    assert audit.violations_count == 0, audit.generate_report()


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
    page.settle()
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
