"""The page of an answer: its words show their maps."""

from collections.abc import Mapping, Sequence
from typing import Any

from explain._utils.errors import printable
from explain.methods.base import title_of
from explain.render.styles import get_style
from explain.report.item import address_of
from explain.report.pages import page_of_words
from explain.targets.outputs import percent

SIDE = 900  # pixels of the longer side of a picture
MUCH = 0.05  # share of all that a word rests on, from which another word stands out
LITTLE = 0.01


def page_of_answer(answered: Any, meanings: Mapping[str, str]) -> str:
    """The page of an `Answered` as text; ``meanings`` names each part of the shares."""
    by_number = dict(zip(answered.numbers, answered.words, strict=True))
    has_others = not all(word.is_greyed for word in answered.words)
    words = {}
    times = max(1, SIDE // 2 // max(answered.photo.size))
    scene = answered.scene.enlarged(times).fitted(SIDE)
    for number, word in by_number.items():
        picture = scene.overlay(word.attribution, get_style(word.attribution.style))
        hidden = word.is_greyed and has_others
        words[number] = {
            "number": number,
            "picture": address_of(picture.convert("RGB"), SIDE),
            "is_hidden": hidden,
            **_described(word),
        }
    sentence = []
    for number, text in enumerate(answered.texts):
        sentence.append(words.get(number, {"number": None, "text": text}))
    details = f"{answered.model} · {title_of(answered.method)}"
    pale = [word.text for word in answered.words if word.is_greyed and has_others]
    return page_of_words(
        printable(answered.answer),
        ask=answered.ask,
        details=details,
        sentence=sentence,
        words=list(words.values()),
        meanings=meanings,
        photo=address_of(scene.photo.convert("RGB"), SIDE),
        photo_text=answered.source or "the photo",
        pale=", ".join(f"“{text}”" for text in dict.fromkeys(pale)),
    )


def _described(word: Any) -> dict[str, Any]:
    """An `ExplainedWord` as the template takes it."""
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
    total = sum(abs(value) for _, value in words) or 1.0
    weighed = []
    for text, value in words:
        part = share * abs(value) / total
        level = ""
        if part >= LITTLE:
            level = "much" if part >= MUCH else "little"
        if level and value < 0:
            level = "against"
        sign = "−" if value < 0 else ""
        weighed.append({"text": text, "level": level, "share": f"{sign}{percent(part)}"})
    return weighed
