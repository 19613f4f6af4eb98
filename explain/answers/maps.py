"""The maps of words by one method, laid on the photo, with the values of the other words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError, collect_warnings, warn
from explain.answers.occlusion import Altered
from explain.answers.scoring import EMBEDDED, Scorer, Word
from explain.attribution.api import attribute
from explain.attribution.result import Attribution
from explain.methods.base import Method, MethodLike, get_method
from explain.targets.answer import Answer

OCCLUSION = "occlusion"
AGREEMENT = "agreement"
RELEVANCE = "attnlrp"
STYLES: dict[Any, Literal["signed", "heat"]] = {OCCLUSION: "signed", AGREEMENT: "heat"}
"""How maps are drawn of methods that are for words alone."""
FLOOR = 0.01  # nats, below which a drop says little beside relevance
IN_LOGARITHM = "(1 x log_softmax)"
"""What a warning about operations without a rule names for every answer: the gradient that leads
through the logarithm of a probability is the one that is meant, the word's against other words'."""


@dataclass(frozen=True, eq=False)
class WordMap:
    """The attribution of a word, a batch of one over the whole photo, and the values of the words
    of the prompt and of those before it; None where the method sees the photo alone."""

    attribution: Attribution
    prompt: tuple[float, ...] | None
    earlier: tuple[float, ...] | None

    @property
    def shares(self) -> dict[str, float]:
        """The parts that the photo, the prompt and the words before have of all magnitudes; empty
        where the method sees the photo alone. The photo's magnitudes are those of 8 x 8 fields.
        """
        if self.prompt is None or self.earlier is None:
            return {}
        values = self.attribution.values[0].double()
        rows, columns = (min(8, side) for side in values.shape)
        means = F.adaptive_avg_pool2d(values[None], (rows, columns))
        sizes = {
            "image": float(means.abs().mean()) * values.numel(),
            "prompt": sum(map(abs, self.prompt)),
            "before": sum(map(abs, self.earlier)),
        }
        total = sum(sizes.values()) or 1.0  # all zero: shares of 0
        return {name: size / total for name, size in sizes.items()}


def maps_of(
    scorer: Scorer, altered: Altered, numbers: Sequence[int], method: MethodLike
) -> list[WordMap]:
    """Return the maps of the words with these numbers: "occlusion" from the altered inputs,
    "agreement" where relevance (AttnLRP) agrees with it, or a method of `explain.attribute`."""
    if method == OCCLUSION:
        return [_dropped(scorer, altered, word) for word in numbers]
    if method == AGREEMENT:
        relevance = _attributed(scorer, numbers, RELEVANCE)
        return [
            _agreed(_dropped(scorer, altered, word), word_map.attribution)
            for word, word_map in zip(numbers, relevance, strict=True)
        ]
    return _attributed(scorer, numbers, method)


def _dropped(scorer: Scorer, altered: Altered, word: int) -> WordMap:
    """The map of a word from what its log-probability loses."""
    attribution = Attribution(
        method=OCCLUSION,
        values=altered.squares[word][None],
        target=scorer.words[word].text,
        score=altered.whole[word][None],
        layer=None,
        size=scorer.reading.sampling.size,
        style=STYLES[OCCLUSION],
    )
    prompt = altered.lost_without(altered.prompt, word)
    earlier = altered.lost_without(altered.words[:word], word)
    return WordMap(attribution, prompt, earlier)


def _agreed(dropped: WordMap, relevance: Attribution) -> WordMap:
    """The drops of squares that support the word, weighed by how much relevance does so there;
    their sum stays. `FLOOR` lets relevance decide alone where covering changes nothing."""
    drops = dropped.attribution.values.clamp(min=0)
    rows, columns = drops.shape[1:]
    supporting = F.adaptive_avg_pool2d(relevance.values, (rows, columns)).clamp(min=0)
    weighed = (drops + FLOOR) * supporting
    total = weighed.sum()
    # where no square has relevance for the word, the drops stand alone
    values = weighed * (drops.sum() / total) if float(total) > 0 else drops
    attribution = replace(
        dropped.attribution, method=AGREEMENT, values=values, style=STYLES[AGREEMENT]
    )
    return replace(dropped, attribution=attribution)


def _attributed(scorer: Scorer, numbers: Sequence[int], method: MethodLike) -> list[WordMap]:
    """The maps of words by a method of `explain.attribute`, on the model's own pixels."""
    chosen: Method = get_method(method)
    model, inputs = scorer.reading.of_pixels()
    messages: list[str] = []

    def attributions(words: bool) -> list[Attribution]:
        targets = [Answer(scorer.ids, word=number, words=words) for number in numbers]
        return attribute(model, inputs, chosen, targets=targets)

    with collect_warnings(messages):
        try:
            results = attributions(words=True)
        except MethodError:  # of methods that explain one input: the photo without the words
            messages.clear()
            results = attributions(words=False)
    for message in dict.fromkeys(messages):
        if IN_LOGARITHM not in message:
            warn(message)
    return [_laid(scorer, number, result) for number, result in zip(numbers, results, strict=True)]


def _laid(scorer: Scorer, word: int, result: Attribution) -> WordMap:
    """An attribution of the model's own pixels, laid on the photo."""
    sampling = scorer.reading.sampling
    is_of_pixels = result.values.ndim == 4
    values = result.values
    if not is_of_pixels:  # of tokens or cells: a value for each pixel that they stand for
        channels = sampling.pixels.shape[1]
        values = result.heatmap[:, None].expand(-1, channels, -1, -1)
    if values[0].numel() != sampling.pixels.numel():
        raise MethodError(
            f"method must lay its map on the photo's pixels, {result.method} gives "
            f"{tuple(result.values.shape)} for the {tuple(sampling.pixels.shape)} of this model; "
            "take occlusion or attnlrp"
        )
    on_photo = sampling.on_photo(values.reshape(1, *sampling.pixels.shape))
    attribution = Attribution(
        method=result.method,
        values=on_photo,
        target=scorer.words[word].text,
        score=scorer.log_probabilities[word][None],
        layer=result.layer,
        size=sampling.size,
        style=result.style,
        options=result.options,
    )
    if not result.parts:
        return WordMap(attribution, prompt=None, earlier=None)
    # of each token, the sum over its embedding
    tokens = result.parts[EMBEDDED[0]].values[0].flatten(1).sum(1)
    return WordMap(
        attribution,
        prompt=_sums(tokens, scorer.prompt_words),
        earlier=_sums(tokens, scorer.words[:word]),
    )


def _sums(values: torch.Tensor, words: Sequence[Word]) -> tuple[float, ...]:
    """The value of each word, the sum over its tokens."""
    return tuple(float(values[list(word.places)].sum()) for word in words)
