"""The page of an answer: its words show their maps."""

from collections.abc import Sequence
from typing import Any

from explain._utils.errors import printable
from explain.attribution.result import Attribution
from explain.methods.base import title_of
from explain.render.styles import get_style
from explain.report.item import address_of
from explain.report.pages import page_of_words, words_of_page
from explain.targets.outputs import percent

SIDE = 900  # pixels of the longer side of a picture
MUCH = 0.05  # share of all that a word rests on, from which another word stands out
LITTLE = 0.01


MEANINGS = {"image": "the photo", "prompt": "the prompt", "before": "words before"}


def page_of_answer(answered: Any) -> str:
    """The page of an `Answered` as text."""
    details = f"{answered.model} · {title_of(answered.method)}"
    title = printable(answered.answer)
    return page_of_words(title, ask=answered.ask, details=details, **_values(answered))


def part_of_answer(answered: Any) -> str:
    """The sentence and its maps, for another page."""
    return words_of_page(**_values(answered))


def picture_of(answered: Any, attribution: Attribution) -> str:
    """The address of a picture of an attribution on the photo of an `Answered`."""
    picture = _scene(answered).overlay(attribution, get_style(attribution.style))
    return address_of(picture.convert("RGB"), SIDE)


def _scene(answered: Any) -> Any:
    """The photo at the size of the pictures."""
    times = max(1, SIDE // 2 // max(answered.photo.size))
    return answered.scene.enlarged(times).fitted(SIDE)


def _values(answered: Any) -> dict[str, Any]:
    """The sentence and its maps as the template takes them."""
    # an answer of greyed words alone shows these like others
    has_others = not all(word.is_greyed for word in answered.words)
    words = {}
    for number, word in zip(answered.numbers, answered.words, strict=True):
        words[number] = {
            "number": number,
            "picture": picture_of(answered, word.attribution),
            "is_hidden": word.is_greyed and has_others,
            **_described(word),
        }
    sentence = []
    for number, text in enumerate(answered.texts):
        sentence.append(words.get(number, {"number": None, "text": text}))
    pale = [word.text for word in answered.words if word.is_greyed and has_others]
    return {
        "sentence": sentence,
        "words": list(words.values()),
        "meanings": MEANINGS,
        "photo": address_of(_scene(answered).photo.convert("RGB"), SIDE),
        "photo_text": answered.source or "the photo",
        "pale": ", ".join(f"“{text}”" for text in dict.fromkeys(pale)),
    }


def _described(word: Any) -> dict[str, Any]:
    """An `ExplainedWord` as the template takes it."""
    # the parts of a bar, in per cent of its width
    start = 0.0
    parts = []
    for name, share in word.shares.items():
        parts.append({"name": name, "start": round(start, 2), "width": round(100 * share, 2)})
        start += 100 * share
    return {
        "text": word.text,
        "probability": percent(word.probability),
        "greyed": word.greyed,
        "is_greyed": word.is_greyed,
        "mark": word.grounding.mark,
        "summary": word.summary,
        "grounding": word.grounding.text,
        "parts": parts,
        "prompt": _weighed(word.prompt_words, word.shares.get("prompt", 0.0)),
        "before": _weighed(word.words_before, word.shares.get("before", 0.0)),
    }


def _weighed(words: Sequence[tuple[str, float]], share: float) -> list[dict[str, str]]:
    """Words with the part that each has of the ``share`` of all of them, by its magnitude."""
    total = sum(abs(value) for _, value in words) or 1.0  # all zero: shares of 0
    weighed = []
    for text, value in words:
        part = share * abs(value) / total
        # how the word is marked: not at all where it has hardly a part
        level = ""
        if part >= LITTLE:
            level = "much" if part >= MUCH else "little"
        if level and value < 0:
            level = "against"
        sign = "−" if value < 0 else ""
        weighed.append({"text": text, "level": level, "share": f"{sign}{percent(part)}"})
    return weighed
