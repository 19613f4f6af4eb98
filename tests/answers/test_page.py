"""The page of an answer: what it says, and what it shows to hands and keys in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from explain._utils.errors import OutputError
from explain.answers import Answered, AnswerExplainer
from tests.answers.toys import made, photo_of
from tests.browsing import DESKTOP, PHONE, Tab, chromium, tabs

WORDS = ["a", "red", "cup", "on", "the", "table", "."]
HOSTILE = '<img src=x onerror="alert(1)"></script>'


@pytest.fixture(scope="module")
def answered() -> Answered:
    asker = AnswerExplainer(*made("LLaVA"))
    found: Answered = asker(photo_of(), "what is a cup?", answer="a red cup on the table.")
    return found


def test_the_page_has_each_word_with_its_map_and_its_parts(answered: Answered) -> None:
    page = answered.to_html()
    assert isinstance(page, str)
    assert re.findall(r'<button [^>]*>([^<]+)<svg class="bar"', page) == WORDS
    assert page.count('<img src="data:image/jpeg;base64,') == len(WORDS) + 1
    for number, word in enumerate(answered.words):
        figure = page.split(f'id="word-{number}"')[1].split("</figure>")[0]
        assert word.grounding.text in figure
        widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', figure)]
        assert widths == pytest.approx([100 * share for share in word.shares.values()], abs=0.01)
        chips = re.findall(r'<span class="chip [^"]*">([^<]+?)(?: <small>|<)', figure)
        assert chips == [text for text, _ in (*word.prompt_words, *word.words_before)]
    assert "http" not in page.split("</title>")[1]


def test_words_that_are_not_explained_are_no_buttons() -> None:
    asker = AnswerExplainer(*made("GIT"))
    page = asker(photo_of(), answer="a red cup", words="cup", method="saliency").to_html()
    assert page.count("<button") == 1
    assert page.count('<span class="word">') == 2


def test_no_text_becomes_markup(answered: Answered) -> None:
    words = tuple(replace(word, text=HOSTILE, tokens=(HOSTILE,)) for word in answered.words)
    hostile = replace(
        answered,
        answer=HOSTILE,
        ask=HOSTILE,
        model=HOSTILE,
        source=HOSTILE,
        texts=(HOSTILE,) * len(words),
        words=words,
    )
    page = str(hostile.to_html())
    assert "<img src=x" not in page
    assert page.count("</script>") == 1


def test_the_page_is_written_once(answered: Answered, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert answered.to_html(path) == path
    with pytest.raises(OutputError, match="exists"):
        answered.to_html(path)
    assert path.read_text("utf-8") == answered.to_html()
    [_, page, *_] = answered.save(tmp_path / "all", stem="x", html=True)
    assert (page.name, page.read_text("utf-8")) == ("x-answer.html", answered.to_html())


class AnswerTab(Tab):
    """A page of an answer that was opened from disk."""

    def __init__(self, tab: Any, file: Path) -> None:
        super().__init__(tab, file.as_uri())
        tab.goto(file.as_uri())

    @property
    def shown(self) -> list[str]:
        """The headings of the maps that are seen."""
        texts: list[str] = self.tab.evaluate(
            "[...document.querySelectorAll('figure.map')].filter((one) => one.offsetHeight)"
            ".map((one) => one.getAttribute('aria-label') || 'photo')"
        )
        return texts


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_pointing_and_tabbing_show_the_map_of_a_word(
    browser: Any, answered: Answered, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    answered.to_html(file)
    with tabs(browser, AnswerTab) as opens:
        for size in (DESKTOP, PHONE):
            page = opens(file, size=size)
            assert page.shown == ["red"]
            page.tab.locator("button", has_text="table").hover()
            assert page.shown == ["table"]
            page.tab.mouse.move(2, 2)
            assert page.shown == ["red"]
            page.tab.locator("button", has_text="table").click()
            page.tab.mouse.move(2, 2)
            assert page.shown == ["table"]
            page.tab.keyboard.press("Shift+Tab")
            assert page.shown == ["the"]
            assert page.violations == []
            assert page.small_targets == []
            width = page.tab.evaluate("document.documentElement.scrollWidth")
            assert width == size["width"]
            page.tab.emulate_media(media="print")
            assert page.shown == ["photo", "red", "cup", "on", "table"]
        plain = opens(file, java_script_enabled=False)
        assert plain.tab.locator("figure.map:visible").count() == 5
