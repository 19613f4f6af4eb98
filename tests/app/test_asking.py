"""Questions about a photo in the app: the answer's words, their maps and their smallest evidence."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain._utils.errors import ExplainError
from explain.answers import AnswerExplainer
from explain.answers.page import part_of_answer
from explain.app import application
from explain.app.requests import Limits
from explain.app.service import ExpiredError, Service
from explain.app.web import bound
from tests.answers.toys import Says
from tests.app.conftest import encoded
from tests.app.test_browser import App
from tests.app.test_service import at_progress, steps_of
from tests.browsing import DESKTOP, PHONE, chromium, tabs

WORDS = ["a", "red", "cup"]
pytestmark = pytest.mark.filterwarnings("ignore:attnlrp is zero everywhere")


def half_bright() -> Image.Image:
    """A photo whose left half is bright, and speaks for "cup"."""
    levels = np.random.default_rng(0).integers(30, 50, (24, 36, 3), dtype=np.uint8)
    levels[:, :18] += 200
    return Image.fromarray(levels)


@pytest.fixture(scope="module")
def asker() -> AnswerExplainer:
    return AnswerExplainer(Says())


@pytest.fixture(scope="module")
def asked_of(explainer: explain.Explainer, asker: AnswerExplainer) -> Iterator[Service]:
    service = Service([explainer], Limits(explanations=2), asker=asker)
    yield service
    service.close()


def test_the_words_are_those_of_python(asked_of: Service, asker: AnswerExplainer) -> None:
    photo = asked_of.add_photo(half_bright())["photo"]
    steps = steps_of(asked_of, begin=asked_of.ask, photo=photo, ask="what is a cup?")
    expected = asker(half_bright(), "what is a cup?")
    last = steps[-1]
    assert last["said"] == "a red cup"
    assert last["words"] == part_of_answer(expected)
    done = [step["progress"] for step in steps if "progress" in step]
    assert done[-1] == [expected.passes, expected.passes]
    evidence = steps_of(asked_of, begin=asked_of.evidence, answered=last["answered"], word=2)[-1]
    found = expected.evidence("cup", budget=200)
    assert evidence["text"] == found.text
    assert evidence["evidence"].startswith("data:image/")
    assert found.alone >= 0.9 * found.probability
    assert not torch.any(found.mask[:, 18:])


def test_a_captioner_needs_no_question(asked_of: Service) -> None:
    photo = asked_of.add_photo(half_bright())["photo"]
    assert steps_of(asked_of, begin=asked_of.ask, photo=photo)[-1]["said"] == "a red cup"


def test_questions_that_cannot_be_answered_are_refused(asked_of: Service, service: Service) -> None:
    photo = asked_of.add_photo(half_bright())["photo"]
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (asked_of.ask, {"photo": "other"}, "photo is unknown"),
        (asked_of.ask, {"photo": photo, "ask": "what " * 300}, "letters"),
        (asked_of.ask, {"photo": photo, "ask": 3}, "ask"),
        (asked_of.evidence, {"answered": "other"}, "answer is unknown"),
        (asked_of.evidence, {"answered": "other", "word": -1}, "word"),
        (asked_of.evidence, {"answered": "other", "kind": "best"}, "kind"),
    ]
    for begin, values, said in cases:
        with pytest.raises(ExplainError, match=said):
            begin(values, lambda step: None)
    with pytest.raises(ExplainError, match="no model to ask"):
        service.ask({"photo": service.add_photo(half_bright())["photo"]}, lambda step: None)
    answered = steps_of(asked_of, begin=asked_of.ask, photo=photo)[-1]["answered"]
    last = steps_of(asked_of, begin=asked_of.evidence, answered=answered, word=3)[-1]
    assert "word must be one of a, red, cup" in last["error"]
    for _ in range(2):
        steps_of(asked_of, begin=asked_of.ask, photo=photo)
    with pytest.raises(ExpiredError):
        asked_of.evidence({"answered": answered}, lambda step: None)


def test_a_question_can_be_stopped(asked_of: Service) -> None:
    photo = asked_of.add_photo(half_bright())["photo"]
    during = at_progress(asked_of.stop)
    last = steps_of(asked_of, during, asked_of.ask, photo=photo, ask="what is a cup?")[-1]
    assert last == {"stopped": "The answer", "end": True}
    answered = steps_of(asked_of, begin=asked_of.ask, photo=photo)[-1]["answered"]
    during = at_progress(asked_of.stop)
    last = steps_of(asked_of, during, asked_of.evidence, answered=answered, word=2)[-1]
    assert last == {"stopped": "The evidence", "end": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def app(browser: Any, asked_of: Service) -> Iterator[Any]:
    """Open the app."""
    uvicorn = pytest.importorskip("uvicorn", reason="pip install -e '.[app]'")
    config = uvicorn.Config(application(asked_of), log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with bound("127.0.0.1", 0) as socket:
        sockets = {"sockets": [socket]}
        thread = threading.Thread(target=server.run, kwargs=sockets, daemon=True)
        thread.start()
        with tabs(browser, App, expected="status of 4") as opens:
            yield partial(opens, f"http://127.0.0.1:{socket.getsockname()[1]}")
        server.should_exit = True
        thread.join(30)


def shown(page: App) -> list[str]:
    """The words whose maps are seen."""
    seen: list[str] = page.tab.evaluate(
        "[...document.querySelectorAll('.in-words figure.map')].filter((one) => one.offsetHeight)"
        ".map((one) => one.getAttribute('aria-label'))"
    )
    return seen


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_question_is_answered_and_each_word_shows_its_map(app: Any, size: Any) -> None:
    page = app(size=size)
    assert not page.tab.get_by_role("button", name="Ask", exact=True).is_visible()
    page.choose("half.png", encoded(half_bright()))
    page.until("explainPage.viewer?.item.name === 'half.png'")
    page.tab.get_by_label("Ask Says").fill("what is a cup?")
    page.tab.keyboard.press("Enter")
    page.until("document.querySelectorAll('.sentence button').length === 3")
    buttons = page.tab.locator(".sentence button")
    assert [text.split(",")[0].strip() for text in buttons.all_inner_texts()] == WORDS
    assert shown(page) == ["red"]  # the first that is not greyed
    buttons.nth(2).hover()
    assert shown(page) == ["cup"]
    page.tab.mouse.move(2, 2)
    assert shown(page) == ["red"]
    buttons.nth(1).focus()
    page.tab.keyboard.press("Tab")
    assert shown(page) == ["cup"]
    assert page.violations == []
    assert page.small_targets == []
    assert page.tab.evaluate("document.documentElement.scrollWidth") == size["width"]
    before = page.tab.locator("#word-2 img").get_attribute("src")
    page.tab.locator("#word-2").get_by_role("button", name="Smallest evidence").click()
    page.until(
        "document.querySelector('#word-2 [role=status]').textContent.includes('alone keeps')"
    )
    assert page.tab.locator("#word-2 img").get_attribute("src") != before
    page.choose("other.png", encoded(half_bright().rotate(180)))
    page.until("explainPage.viewer?.item.name === 'other.png'")
    assert shown(page) == []


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_an_answer_that_comes_late_is_not_shown_with_another_photo(app: Any) -> None:
    page = app()
    page.choose("half.png", encoded(half_bright()))
    page.until("explainPage.viewer?.item.name === 'half.png'")
    hostile = json.dumps("<img src=x onerror=alert(1)>")
    page.tab.evaluate(f"explainPage.asking.input.value = {hostile}; explainPage.asking.ask(); 0")
    page.choose("other.png", encoded(half_bright().rotate(180)))
    page.until("explainPage.viewer?.item.name === 'other.png'")
    page.until("explainPage.asking.end.signal.aborted")
    assert shown(page) == []
    assert page.tab.locator("img[onerror]").count() == 0
