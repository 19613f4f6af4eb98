"""`AnswerExplainer`: a photo and a prompt in, an `Answered` out."""

import io
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from explain._utils.default_device import cpu_by_default
from explain._utils.errors import (
    ExplainError,
    TargetError,
    check_whole_number,
    keywords,
    shown,
    warn,
)
from explain._utils.progress import ProgressLine
from explain.answers import maps
from explain.answers.grounding import Grounding, grounding_of
from explain.answers.maps import WordMap, maps_of
from explain.answers.occlusion import Altered, altered, count_of
from explain.answers.reading import Reader
from explain.answers.result import Answered, ExplainedWord
from explain.answers.scoring import Scorer, answer_ids, numbers_of_word, text_of
from explain.baselines.base import Baseline
from explain.baselines.replacements import BaselineLike, get_baseline
from explain.data.images import ImageLike, image_path, load_image
from explain.engine.settings import Progress
from explain.explanation.photos import collected, each_tried, reported
from explain.methods.base import MethodLike, get_method
from explain.models.image_text import load_image_text
from explain.targets.tokenizer import is_punctuation

DEFAULT = maps.AGREEMENT
ARTICLES = {"a", "an", "the"}
SQUARES = 8  # across the photo


class AnswerExplainer:
    """Explains the words that an image-text model says about photos.

    Any model of transformers that takes ``pixel_values`` and gives logits of the next token, or one
    with that interface: LLaVA, Qwen2-VL, PaliGemma, Idefics3 and their relatives, captioners (BLIP,
    GIT, ViT-GPT2) and readers (TrOCR, Donut). How its processor tiles, pads, resizes or packs
    photos is found by trying it on pictures whose levels say where they are; a processor that does
    more is refused.

    Args:
        model: the model, in evaluation mode or not; it is left as found. Or its name: a folder that
            transformers has saved, a name on the Hugging Face Hub, or ./file.py:factory.
        processor: makes its inputs: ``processor(images=photo, text=prompt, return_tensors="pt")``,
            with a ``tokenizer``; or a pair of an image processor and a tokenizer. None takes the
            attribute ``processor`` of the model, or what lies beside its weights.
        squares: how many squares across a photo are covered one by one.
        baseline: what takes the place of covered squares, and of the photo where words are to be
            grounded in it: one of `explain.baselines`, or its name.
        batch_size: how many altered inputs are run at once.

    Raises:
        ModelError: the model takes no photos, or has no processor.

    >>> import numpy, torch
    >>> class Captioner(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.words, self.photo = torch.nn.Embedding(4, 8), torch.nn.Linear(192, 8)
    ...         self.head = torch.nn.Linear(8, 4)
    ...
    ...     def forward(self, pixel_values, input_ids):
    ...         photo = self.photo(pixel_values.flatten(1))[:, None]
    ...         return {"logits": self.head((self.words(input_ids) + photo).relu())}
    >>> def processor(images, text, **options):
    ...     pixels = torch.from_numpy(numpy.array(images)).permute(2, 0, 1)[None] / 255
    ...     return {"pixel_values": pixels, "input_ids": torch.tensor([[0]])}
    >>> words = ["<start>", "a", "red", "cup"]
    >>> processor.tokenizer = lambda text, **options: {
    ...     "input_ids": [words.index(word) for word in text.split()]
    ... }
    >>> photo = numpy.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype="uint8")
    >>> asker = AnswerExplainer(Captioner(), processor)
    >>> answered = asker(photo, "what is it?", answer="a red cup", words=[1, 2])
    >>> answered
    Answered('a red cup', 2 words, agreement, Captioner)
    >>> answered.words[0].attribution.values.shape, [*answered.words[0].shares]
    (torch.Size([1, 8, 8]), ['image', 'prompt', 'before'])
    """

    @keywords()
    def __init__(
        self,
        model: nn.Module | str,
        processor: Any = None,
        *,
        squares: int = SQUARES,
        baseline: BaselineLike = "mean",
        batch_size: int | None = None,
    ) -> None:
        check_whole_number("squares", squares, 1)
        check_whole_number("batch_size", batch_size, 1)
        if isinstance(model, str):
            model, processor_beside_it = load_image_text(model)
            processor = processor or processor_beside_it
        self.reader = Reader.of(model, processor)
        self.squares = squares
        self.baseline: Baseline = get_baseline(baseline)
        self.batch_size = batch_size

    def __repr__(self) -> str:
        """The class of the model in one line."""
        return f"AnswerExplainer({self.name})"

    @property
    def model(self) -> nn.Module:
        """The model that is asked."""
        return self.reader.model

    @property
    def name(self) -> str:
        """The model's name in captions: where transformers loaded it from, or its class."""
        config = getattr(self.reader.model, "config", None)
        path = getattr(config, "_name_or_path", None)
        return path or type(self.reader.model).__name__

    @keywords()
    def __call__(
        self,
        image: Any,
        ask: str | None = None,
        *,
        answer: str | None = None,
        words: str | Sequence[str | int] | None = None,
        method: MethodLike | None = None,
        other: ImageLike | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Answer about a photo, or several, and explain the words.

        Args:
            image: a path, the bytes of a file, a PIL image or an array; a list of these gives a
                list.
            ask: the question or instruction, without a template; None for captioners.
            answer: the words that are explained; None takes the model's own, the most probable
                tokens one after the other.
            words: which words of it, by number from 0 or by text: a list, or "cup, table"; None
                explains all of them.
            method: "agreement" (occlusion where AttnLRP agrees, the default), "occlusion" of
                squares of the photo and of words, or any method of `explain.attribute` that
                explains pixels or tokens, such as "inputxgradient" or "gradientrollout".
            other: another photo, to see whether the words depend on this one. Of several photos,
                each has the next one.
            progress: called with the number of altered inputs done, first 0, and their total; True
                prints them in a line.

        Raises:
            PhotosError: some of several photos could not be explained; it holds the others.
            ExplainError: one line that says which argument does not fit.
        """
        options: dict[str, Any] = {
            "answer": answer,
            "words": words,
            "method": method,
            "progress": progress,
        }
        # an open file is an iterator of lines, and one photo
        if not isinstance(image, list | tuple | Iterator) or isinstance(image, io.IOBase):
            return self._each_answered(ask, [image], other=other, **options)[0]
        photos = list(image)
        other_photos = [other] * len(photos)
        if other is None and len(photos) > 1:
            other_photos = [*photos[1:], photos[0]]
        outcomes = []
        for number, (photo, another) in enumerate(zip(photos, other_photos, strict=True)):
            work = partial(self._each_answered, ask, other=another, **options)
            [outcome] = each_tried([photo], work)
            # a batch of one photo, as each has another one beside it
            outcomes.append([(number, outcome)])
        return collected(reported(outcomes))

    def probabilities(self, image: ImageLike, ask: str | None, ids: Sequence[int]) -> list[float]:
        """The probability of each word of an answer, given by the ids of its tokens, without
        explaining it; arguments as of a call."""
        with cpu_by_default():
            reading = self.reader.read(load_image(image), self.reader.prompt_of(ask))
            scorer = Scorer(reading, tuple(ids), self.batch_size)
            return scorer.log_probabilities.exp().tolist()

    def _each_answered(
        self, ask: str | None, photos: Sequence[ImageLike], **options: Any
    ) -> list[Answered]:
        """Explain the answers about some photos, one after the other."""
        with cpu_by_default():
            return [self._answered(photo, ask, **options) for photo in photos]

    def _answered(
        self,
        image: ImageLike,
        ask: str | None,
        *,
        answer: str | None,
        words: str | Sequence[str | int] | None,
        method: MethodLike | None,
        other: ImageLike | None,
        progress: Progress | None,
    ) -> Answered:
        """Explain the answer about one photo; words are also scored on an ``other`` photo, to see
        whether they depend on this one."""
        began = time.perf_counter()
        # True stands for a line on the screen
        line = ProgressLine() if progress is True else None
        if ask is not None and (not isinstance(ask, str) or not ask.strip()):
            raise TargetError(
                f"ask must be a question or an instruction, got {shown(ask)}; leave it out for none"
            )
        photo = load_image(image)
        reading = self.reader.read(photo, self.reader.prompt_of(ask))
        ids = answer_ids(reading, answer)
        scorer = Scorer(reading, ids, self.batch_size, line or progress)
        word_numbers = _numbers_of(words, [word.text for word in scorer.words])
        # at the size of this photo, whose place it takes
        other_photo = None if other is None else reading.sampling.like(load_image(other))
        scorer.planned = count_of(scorer, self.squares, has_other=other_photo is not None)
        if scorer.progress is not None:
            scorer.progress(0, scorer.planned)
        altered_scores = altered(scorer, self.squares, self.baseline, other_photo)
        word_maps, method_name = _maps(scorer, altered_scores, word_numbers, method)
        explained = []
        for number, word_map in zip(word_numbers, word_maps, strict=True):
            grounding = grounding_of(altered_scores, number)
            explained.append(_explained(scorer, number, word_map, grounding))
        return Answered(
            photo=photo,
            source=image_path(image),
            model=self.name,
            ask=ask,
            prompt=reading.prompt,
            answer=answer or text_of(self.reader.tokenizer, ids),
            texts=tuple(word.text for word in scorer.words),
            numbers=tuple(word_numbers),
            words=tuple(explained),
            method=method_name,
            passes=scorer.passes,
            seconds=time.perf_counter() - began,
            scorer=scorer,
            baseline=self.baseline,
        )


def _maps(
    scorer: Scorer, altered_scores: Altered, numbers: Sequence[int], method: MethodLike | None
) -> tuple[list[WordMap], str]:
    """The maps of words, and the name of the method; where the default's relevance cannot follow a
    network, occlusion alone, with a warning."""
    if method is not None:
        name = method if isinstance(method, str) else get_method(method).name
        return maps_of(scorer, altered_scores, numbers, method), name
    try:
        return maps_of(scorer, altered_scores, numbers, DEFAULT), DEFAULT
    except ExplainError as error:
        warn(f"words are explained by occlusion alone, since attnlrp does not go here: {error}")
    return maps_of(scorer, altered_scores, numbers, maps.OCCLUSION), maps.OCCLUSION


def _explained(
    scorer: Scorer, number: int, word_map: WordMap, grounding: Grounding
) -> ExplainedWord:
    """One word with all that is known of it."""
    word = scorer.words[number]
    greyed = ""
    if is_punctuation(word.text):
        greyed = "punctuation"
    elif word.text.casefold() in ARTICLES:
        greyed = "article"
    # a method that sees the photo alone has no values of words: then there are no pairs
    prompt = zip(scorer.prompt_words, word_map.prompt or (), strict=False)
    earlier = zip(scorer.words[:number], word_map.earlier or (), strict=False)
    return ExplainedWord(
        text=word.text,
        tokens=tuple(scorer.token_names[place] for place in word.places),
        probability=grounding.probability,
        greyed=greyed,
        attribution=word_map.attribution,
        prompt_words=tuple((other.text, value) for other, value in prompt),
        words_before=tuple((other.text, value) for other, value in earlier),
        shares=word_map.shares,
        grounding=grounding,
    )


def _numbers_of(words: str | Sequence[str | int] | None, texts: Sequence[str]) -> list[int]:
    """The numbers of the words that are asked for, in their order in the answer."""
    if words is None:
        return list(range(len(texts)))
    wanted = [part.strip() for part in words.split(",")] if isinstance(words, str) else words
    numbers = {number for word in wanted for number in numbers_of_word(word, texts)}
    if not numbers:
        raise TargetError("words must name at least one word of the answer, got none")
    return sorted(numbers)
