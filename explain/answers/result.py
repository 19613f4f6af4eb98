"""What an answer rests on, word by word."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from explain._utils.html import picture_html
from explain._utils.version import __version__
from explain.answers.evidence import Kind, WordEvidence, evidence_of
from explain.answers.grounding import Grounding
from explain.answers.page import MEANINGS, page_of_answer
from explain.answers.scoring import Scorer, numbers_of_word
from explain.attribution.pictures import LARGEST_SIDE, Scene, array
from explain.attribution.result import Attribution
from explain.baselines.base import Baseline
from explain.data.boxes import Box
from explain.data.files import Files, distinct, slug, write_file
from explain.data.scans import stem_of
from explain.engine.settings import Progress
from explain.methods.base import title_of
from explain.render import captions, figures
from explain.render.sheets import ABREAST, Group, Layout, Tile, contact_sheet
from explain.render.styles import StyleLike, get_style
from explain.targets.tokenizer import is_punctuation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("image", "prompt", "before")
COLORS = {"image": (0, 112, 96), "prompt": (60, 90, 170), "before": (200, 140, 60)}
FORMAT = 1
"""The version of the records of answers."""


@dataclass(frozen=True, eq=False)
class ExplainedWord:
    """A word of an answer, and what it rests on.

    ``probability`` is the model's, after the photo, the prompt and the words before it.
    ``attribution`` is a batch of one, laid over the whole photo: what each place does for the word.
    ``prompt_words`` and ``words_before`` are the words of the prompt, and those of the answer
    before it, each with its value in the same unit; ``shares`` are the parts that "image", "prompt"
    and "before" have of all magnitudes. All are empty for methods that see the photo alone.
    """

    text: str
    tokens: tuple[str, ...]
    probability: float
    greyed: str
    """Why the word is greyed: "punctuation", "article", or nothing."""
    attribution: Attribution = field(repr=False)
    prompt_words: tuple[tuple[str, float], ...] = field(repr=False)
    words_before: tuple[tuple[str, float], ...] = field(repr=False)
    shares: Mapping[str, float]
    grounding: Grounding

    @property
    def is_greyed(self) -> bool:
        """Whether it is a word that says nothing of the photo by itself."""
        return bool(self.greyed)

    @property
    def summary(self) -> str:
        """Where the word comes from, in a few words: "64 % photo, 20 % prompt, 16 % before"."""
        names = {"image": "photo"}
        parts = [f"{share:.0%} {names.get(part, part)}" for part, share in self.shares.items()]
        return ", ".join(part.replace("%", " %") for part in parts)

    @property
    def figures(self) -> dict[str, float | None]:
        """Its figures by name, as runs keep them: 1 for "greyed" words, the shares, "grounded" (the
        share of its probability that the photo accounts for), and how probable it is without the
        photo, a part of it, or the words before."""
        probable = asdict(self.grounding)
        del probable["probability"]
        grounded = {"grounded": self.grounding.value}
        return {"greyed": float(self.is_greyed), **self.shares, **grounded, **probable}

    @property
    def heatmap(self) -> torch.Tensor:
        """The map as shown: ``(h, w)`` from 0 to 1, laid over the whole photo."""
        return self.attribution.heatmap[0]

    def to_dict(self) -> dict[str, Any]:
        """The word in plain values, without its map."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "probability": self.probability,
            "greyed": self.greyed,
            "shares": dict(self.shares),
            "prompt": [list(pair) for pair in self.prompt_words],
            "before": [list(pair) for pair in self.words_before],
            "grounding": self.grounding.to_dict(),
        }


@dataclass(frozen=True, eq=False, repr=False)
class Answered:
    """An answer to a photo and a prompt, explained word by word; in a notebook it shows its sheet.

    ``words`` are the explained ones, in their order; ``numbers`` says which words of the answer
    they are, and ``texts`` has them all. ``passes`` is how many altered inputs were run together
    for all of them.
    """

    photo: Image.Image
    source: str | None
    model: str
    ask: str | None
    prompt: str | None
    answer: str
    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    words: tuple[ExplainedWord, ...]
    method: str
    passes: int
    seconds: float
    scorer: Scorer = field(repr=False)
    baseline: Baseline
    key: str = ""
    """What the command line asked, as a digest; records have it."""

    def __repr__(self) -> str:
        """The answer, the method and the photo in one line."""
        return f"Answered({self.answer!r}, {len(self.words)} words, {self.method}, {self.model})"

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, word: int | str) -> ExplainedWord:
        """An explained word, by its number among `words` or by its text."""
        return self.words[self.number(word)]

    def number(self, word: int | str) -> int:
        """The number of an explained word among `words`, given by number or text (the first).

        Raises:
            TargetError: there is none.
        """
        return numbers_of_word(word, [explained.text for explained in self.words])[0]

    @property
    def probability(self) -> float:
        """The model's probability of the whole answer."""
        return float(self.scorer.log_probabilities.sum().exp())

    @cached_property
    def scene(self) -> Scene:
        """The photo, all of which maps are laid over."""
        box = Box.whole(self.photo.size)
        return Scene(self.photo, box, (box,))

    def overlay(
        self,
        word: int | str = 0,
        *,
        style: StyleLike | None = None,
        largest_side: int | None = LARGEST_SIDE,
    ) -> Image.Image:
        """The photo with the map of a word on it, at the photo's resolution, but at most 2,000
        pixels a side unless asked."""
        attribution = self[word].attribution
        look = get_style(attribution.style if style is None else style)
        return self.scene.fitted(largest_side).overlay(attribution, look)

    def evidence(
        self,
        word: int | str,
        kind: Kind = "sufficient",
        *,
        budget: int = 500,
        squares: int = 8,
        progress: Progress | None = None,
    ) -> WordEvidence:
        """The smallest regions of the photo that are enough for nine tenths of a word's
        probability, or without which it loses a tenth of it ("necessary").

        Args:
            word: its number among `words`, or its text.
            kind: "sufficient" or "necessary".
            budget: how many altered photos are run, at most.
            squares: how many regions lie across the photo.
            progress: called with the number of altered photos done, and their total so far.

        Raises:
            ExplainError: no such word or kind.
        """
        place = self.numbers[self.number(word)]
        return evidence_of(self.scorer, place, self.baseline, kind, budget, squares, progress)

    def layout(self, *, style: StyleLike | None = None, abreast: int = ABREAST) -> Layout:
        """The contents of `sheet` and `figure`: the photo, and a map for each word that is not
        greyed, with its shares."""
        photo = self.scene.fitted(LARGEST_SIDE).photo
        tiles = [Tile(photo, "the photo", self.ask or "")]
        for number, word in enumerate(self.words):
            if word.is_greyed and len(self.words) > 1:  # a single word has its map all the same
                continue
            picture = self.overlay(number, style=style)
            mark = word.grounding.mark
            detail = ", ".join(filter(None, [mark, word.summary]))
            remark = "may be said whatever is there" if mark == "guessed" else ""
            tiles.append(Tile(picture, word.text, detail, remark))
        greyed = [word.text for word in self.words if word.is_greyed]
        details = [self.model, title_of(self.method)]
        if greyed:
            details.append(f"without a map here: {', '.join(greyed)}")
        group = Group("", tuple(tiles))
        return Layout(self.answer, " · ".join(details), (group,), abreast)

    def sheet(self, tile: int = 300, *, style: StyleLike | None = None) -> Image.Image:
        """The photo and the map of each word side by side, under the answer whose words are
        underlined by what they rest on; ``tile`` is the side of a picture in pixels."""
        sheet = contact_sheet(self.layout(style=style), tile)
        margin = tile // 20
        sentence = self.sentence(sheet.width - 2 * margin, max(12, tile // 18))
        head = captions.placed([(margin, sentence)], sheet.width)
        return captions.stacked([captions.space(1, margin), head, sheet], sheet.width)

    def figure(self, *, width_cm: float | None = None, style: StyleLike | None = None) -> "Figure":
        """A matplotlib figure of the photo and the map of each word, with the answer on top;
        ``width_cm`` is how wide it is: 8 and 17 cm are usual in papers."""
        layout = self.layout(style=style, abreast=figures.abreast(width_cm, is_table=False))
        return figures.figure_of(layout, self.alternative, width_cm=width_cm)

    def sentence(self, width: int = 900, size: int = 18) -> Image.Image:
        """The answer as a picture: below each word a bar whose parts are what it takes from the
        photo, the prompt and the words before; greyed words are pale."""
        lines: list[Image.Image] = []
        line: list[Image.Image] = []
        gap = size // 2
        by_number = dict(zip(self.numbers, self.words, strict=True))
        for number, text in enumerate(self.texts):
            picture = _worded(text, by_number.get(number), size)
            used = sum(word.width for word in line) + gap * len(line)
            if line and used + picture.width > width:
                lines.append(captions.beside(line, gap))
                line = []
            line.append(picture)
        lines.append(captions.beside(line, gap))
        # what the colours mean
        legend = []
        for part in PARTS:
            swatch = Image.new("RGB", (gap, gap), COLORS[part])
            label = captions.text_picture(MEANINGS[part], max(8, size * 2 // 3))
            legend.append(captions.beside([swatch, label], size // 4))
        lines.append(captions.beside(legend, size))
        return captions.stacked(lines, max(width, *(row.width for row in lines)))

    @property
    def alternative(self) -> str:
        """The alternative text of the pictures: the photo's file, the answer, and what its words
        rest on."""
        source = f"the photo {Path(self.source).name}" if self.source else "a photo"
        marks = ", ".join(f"{word.text} ({word.grounding.mark})" for word in self.words)
        return f"{source} with a map of the evidence for each word of {self.answer!r}: {marks}"

    def _repr_html_(self) -> str:
        """The sheet as a picture for notebooks."""
        return picture_html(self.sheet(180), self.alternative)

    def to_html(
        self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False
    ) -> str | Path:
        """A page for any browser, without a network: the answer, whose words show their maps when
        they are pointed at or reached by the Tab key, with what each rests on, also of the prompt.
        In print, and where scripts do not run, it shows the maps of all words.

        Args:
            path: the file to write; None returns the page as a text.
            overwrite: replace an existing file.

        Raises:
            OutputError: the file exists and ``overwrite`` is not set, or it cannot be written.
        """
        text = page_of_answer(self)
        return text if path is None else write_file(path, text, overwrite=overwrite)

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain values, which JSON can hold, but for the maps: what pages, the app and
        runs are made of."""
        words = []
        for number, word in zip(self.numbers, self.words, strict=True):
            words.append({"number": number, **word.to_dict()})
        return {
            "format": FORMAT,
            "version": __version__,
            "source": self.source,
            "size": list(self.photo.size),
            "model": self.model,
            "ask": self.ask,
            "prompt": self.prompt,
            "answer": self.answer,
            "texts": list(self.texts),
            "words": words,
            "method": self.method,
            "baseline": repr(self.baseline),
            "passes": self.passes,
            "seconds": self.seconds,
            "ids": list(self.scorer.ids),
            "key": self.key,
        }

    record = property(to_dict)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        stem: str | None = None,
        overwrite: bool = False,
        style: StyleLike | None = None,
        html: bool = False,
    ) -> list[Path]:
        """Write a sheet (PNG), with ``html`` the page of `to_html` too, for each word that is not
        greyed its overlay (PNG), the maps of all words (``.npy``) and a record (JSON), which names
        their files.

        The folder is made if needed, and each file appears complete or not at all; names begin with
        ``stem``, by default the photo's.

        Returns:
            The paths; the sheet comes first, and the record last.

        Raises:
            OutputError: a file exists and ``overwrite`` is not set, or the folder cannot be
                written; then nothing has been written.
        """
        files = Files(folder, overwrite=overwrite)
        source = stem_of(self.source) if self.source else "image"
        name = slug(str(stem) if stem else source)
        files.add_picture(f"{name}-answer.png", self.sheet(style=style))
        if html:
            files.add_text(f"{name}-answer.html", page_of_answer(self))
        record = self.to_dict()
        # `slug` leaves nothing of punctuation
        texts = ["mark" if is_punctuation(word.text) else slug(word.text) for word in self.words]
        stems = distinct(f"{name}-{text}" for text in texts)
        for number, (word, path) in enumerate(zip(self.words, stems, strict=True)):
            files.add_array(f"{path}.npy", array(word.attribution.values[0]))
            record["words"][number]["map"] = f"{path}.npy"
            if not word.is_greyed:
                files.add_picture(f"{path}.png", self.overlay(number, style=style))
        record["files"] = files.names
        files.add_json(f"{name}-answer.json", record)
        return files.write()


def _worded(text: str, word: ExplainedWord | None, size: int) -> Image.Image:
    """One word of a sentence, with a bar of its shares below."""
    is_pale = word is None or word.is_greyed
    written = captions.text_picture(text, size, captions.FAINT if is_pale else captions.INK)
    height = max(3, size // 4)
    bar = captions.space(written.width, height + size // 3)
    left = 0.0
    for part, share in ({} if word is None else word.shares).items():
        right = left + share * written.width
        box = (round(left), 0, round(right), height)
        bar.paste(COLORS[part], box)
        left = right
    return captions.stacked([written, bar], written.width)
