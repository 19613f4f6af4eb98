"""The probability of each word of an answer, for altered photos and with tokens left out: all words
are read from the same passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from explain._utils.errors import TargetError, shown
from explain.answers.reading import PIXELS, Reading
from explain.data.inputs import Inputs
from explain.hooks.preserve import untouched
from explain.targets import answer
from explain.targets.answer import Answer
from explain.targets.tokenizer import TokenIds, ids_of, token_names, words_of

SAMPLE_BATCH = 16  # altered inputs in a pass, where the caller says nothing
EMBEDDED: tuple[str] = ("words",)
"""Where `explain.targets.answer.with_answers` puts the embeddings of tokens."""


@dataclass(frozen=True)
class Word:
    """A word of a text: its tokens' places in the sequence of prompt and answer, and its text."""

    text: str
    places: tuple[int, ...]


class Scorer:
    """A reading with an answer behind the prompt, as a function of the photo and of which tokens
    are there."""

    def __init__(
        self,
        reading: Reading,
        ids: TokenIds,
        batch_size: int | None = None,
        progress: Any = None,
    ) -> None:
        """Run the model a few times, to find the embeddings of its tokens. ``progress`` is called
        with how many altered inputs are done, and how many are planned.
        """
        self.reading = reading
        self.ids = ids
        self.batch_size = batch_size or SAMPLE_BATCH
        model, inputs = reading.of_photos()
        whole = Answer(ids, words=True)
        self.model, self.inputs, names = answer.with_answers(model, inputs, [whole])
        self.token_names = names[EMBEDDED[0]]
        self.passes = 0
        self.planned = 0
        self.progress = progress or None  # False is none, too

    @property
    def photo(self) -> torch.Tensor:
        """The photo ``(1, 3, h, w)``, from 0 to 1."""
        return self.inputs.x

    @cached_property
    def photo_inputs(self) -> Inputs:
        """The inputs of the model with the photo alone to be altered."""
        kwargs = dict(self.inputs.kwargs)
        del kwargs[EMBEDDED[0]]
        return Inputs(kwargs=kwargs, explained=PIXELS)

    @cached_property
    def embedded(self) -> torch.Tensor:
        """The embeddings of all tokens, ``(1, L, D)``."""
        return self.inputs.tensor(EMBEDDED)

    def places_of(self, words: Sequence[Word]) -> torch.Tensor:
        """Which tokens belong to some words: ``(L,)``."""
        places = [place for word in words for place in word.places]
        belongs = torch.zeros(len(self.token_names), dtype=torch.bool, device=self.photo.device)
        belongs[places] = True
        return belongs

    @cached_property
    def log_probabilities(self) -> torch.Tensor:
        """The log-probability of each word as it stands, ``(W,)``."""
        return self(self.photo)[0]

    @cached_property
    def prompt_length(self) -> int:
        """How many of the tokens are the prompt's."""
        return len(self.token_names) - len(self.ids)

    @cached_property
    def words(self) -> tuple[Word, ...]:
        """The words of the answer, which have a log-probability each."""
        names = self.token_names[self.prompt_length :]
        # an answer of special tokens alone, which have no names, has each of them as a word
        in_words = words_of(names) if any(names) else [[place] for place in range(len(names))]
        return tuple(self._word(places, self.prompt_length) for places in in_words)

    @cached_property
    def prompt_words(self) -> tuple[Word, ...]:
        """The words of the prompt, without tokens that stand for the photo or mark its parts."""
        names = self.token_names[: self.prompt_length]
        words = [self._word(places, 0) for places in words_of(names)]
        return tuple(word for word in words if word.text)

    def _word(self, places: Sequence[int], first: int) -> Word:
        """A word by the places of its tokens from ``first`` on."""
        at = tuple(first + place for place in places)
        ids = self.inputs.kwargs["input_ids"][0, list(at)].tolist()
        return Word(text_of(self.reading.reader.tokenizer, ids), at)

    def __call__(self, photos: torch.Tensor, left_out: torch.Tensor | None = None) -> torch.Tensor:
        """The log-probability of each word, ``(P, W)``, for photos ``(P, 3, h, w)``; ``left_out``
        ``(P, L)`` is true for tokens that an average token takes the place of.
        """
        scores = []
        with torch.no_grad(), untouched(self.model):
            for start in range(0, len(photos), self.batch_size):
                part = slice(start, start + self.batch_size)
                altered = {self.inputs.path: photos[part]}
                if left_out is not None:
                    altered[EMBEDDED] = self._without(left_out[part])
                # all else is that of the one photo
                owners = torch.zeros(len(photos[part]), dtype=torch.long)
                output = self.inputs.rows(owners, altered).call(self.model)
                scores.append(output["answer"])
                self.passes += len(owners)
                if self.progress is not None:  # more than planned may be run
                    self.progress(self.passes, max(self.passes, self.planned))
        return torch.cat(scores)

    def _without(self, left_out: torch.Tensor) -> torch.Tensor:
        """The embeddings ``(P, L, D)`` with an average one in the place of tokens left out."""
        is_word = torch.tensor([bool(name) for name in self.token_names])
        average = self.embedded[:, is_word.to(self.embedded.device)].mean(1, keepdim=True)
        return torch.where(left_out[..., None], average, self.embedded)


def numbers_of_word(word: str | int, texts: Sequence[str]) -> list[int]:
    """The numbers of the words among ``texts`` that a caller means by a text, or a number from 0;
    a `TargetError` if there is none."""
    numbers: list[int] = []
    if isinstance(word, str):
        numbers = [
            number for number, text in enumerate(texts) if text.casefold() == word.casefold()
        ]
    elif type(word) is int and -len(texts) <= word < len(texts):  # and no bool
        numbers = [word % len(texts)]  # negative ones count from the end
    if not numbers:
        raise TargetError(
            f"word must be one of {', '.join(texts)}, got {shown(word)}; or its number from 0"
        )
    return numbers


def text_of(tokenizer: object, ids: Sequence[int]) -> str:
    """The text of some tokens as a reader has it; without a tokenizer, their ids."""
    decode = getattr(tokenizer, "decode", None)
    if callable(decode):
        return str(decode(list(ids))).strip()
    names = token_names(tokenizer, ids)
    # signs by which tokenizers mark the ends, insides and beginnings of words
    pieces = (name.removesuffix("</w>").removeprefix("##") for name in names)
    return "".join(pieces).replace("▁", " ").replace("Ġ", " ").strip()


def answer_ids(reading: Reading, text: str | None) -> TokenIds:
    """Return the tokens of the given answer, or of the model's own: the most probable ones. An
    `ExplainError` if it is empty, or a tokenizer for it is missing."""
    model, inputs = reading.of_photos()
    if text is None:
        generated = answer.own_answer(model, inputs)
        if generated[0] in ids_of(model, "eos_token_id"):
            raise TargetError(
                "answer must have words, the model's own ends before the first; give answer='...'"
            )
        return generated
    if not isinstance(text, str) or not text.strip():
        raise TargetError(
            f"answer must be the words that are explained, got {shown(text)}; write it as in "
            "'a cat', or leave it out for the model's own"
        )
    return answer.ids_of_text(model, text)
