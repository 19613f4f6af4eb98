"""Tokens of texts: the tokenizer of a model, and which tokens make up the words."""

import importlib
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ModelError, TargetError, quiet, shown, warn

TokenIds = tuple[int, ...]


def check_text(text: Any) -> str | TokenIds:
    """Return a text as it is, or token ids as a tuple of ints; raises `TargetError` for others."""
    if isinstance(text, str) and text.strip():
        return text
    is_single = getattr(text, "ndim", None) == 0  # a number as a tensor or an array
    if hasattr(text, "__iter__") and not isinstance(text, str) and not is_single:
        ids: Any = text.tolist() if isinstance(text, torch.Tensor) else list(text)
        if len(ids) == 1 and isinstance(ids[0], (list, tuple)):  # (1, L)
            ids = ids[0]
        if ids and all(type(number) is int and number >= 0 for number in ids):
            return tuple(ids)
    raise TargetError(
        f"text must be words, or the ids of their tokens, got {shown(text)}; write it as in 'a cat'"
    )


def named_text(text: str | TokenIds) -> str:
    """The name of a text in messages and results; of token ids, "tokens 1 2"."""
    return text if isinstance(text, str) else f"tokens {' '.join(map(str, text))}"


def warn_of_cut(
    texts: Sequence[str], ids: torch.Tensor, ids_of: Callable[[list[str]], torch.Tensor]
) -> None:
    """Warn of texts that a tokenizer cuts off, since they are too long.
    Those have the same ``ids`` ``(N, L)`` without their last word; ``ids_of`` tokenizes texts.
    """
    ids_of_shorter = ids_of([text.rpartition(" ")[0] for text in texts])
    for text, is_cut in zip(texts, (ids == ids_of_shorter).all(1).tolist(), strict=True):
        if is_cut:
            warn(
                f"the text {shown(text)} has more than the {ids.shape[1]} tokens that the "
                "model reads; the rest is cut off: write a shorter one"
            )


def tokenizer_of(model: nn.Module) -> Any:
    """Return the tokenizer of a model: its attribute, its processor's, or the one where
    transformers loaded it from; None without one."""
    for holder in (model, getattr(model, "processor", None)):
        tokenizer = getattr(holder, "tokenizer", None)
        if callable(tokenizer):
            return tokenizer
    return beside_weights(getattr(model, "config", None), "AutoTokenizer")


def beside_weights(config: Any, kind: str) -> Any:
    """What lies beside a transformers model's weights, loaded by its class ``kind``, such as
    "AutoTokenizer"; None where there is none. Nothing is downloaded.
    """
    source = getattr(config, "_name_or_path", None)
    if not source:
        return None
    # files beside the weights may be broken in any way
    with suppress(Exception), quiet():
        auto = getattr(importlib.import_module("transformers"), kind)
        return auto.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    return None


def need_tokenizer(model: nn.Module, what: str) -> Any:
    """Return the tokenizer of a model; ``what`` it is needed for is in the error."""
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise ModelError(
            f"model must bring its tokenizer for {what}, {type(model).__name__} has none; set "
            "model.tokenizer, or give token ids as in explain.targets.Text((49406, 320, 2368, "
            "49407))"
        )
    return tokenizer


def token_names(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token, "" for special tokens (start, padding); without a tokenizer,
    the ids as texts."""
    special = {*getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "pad_token_id", None)}
    decoder = getattr(tokenizer, "decoder", None)
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        names = tokenizer.convert_ids_to_tokens(list(ids))
    elif isinstance(decoder, Mapping):  # open_clip pads with token 0
        names = [decoder[number] for number in ids]
        special.add(0)
    else:
        names = [str(number) for number in ids]
    return tuple("" if number in special else name for number, name in zip(ids, names, strict=True))


def words_of(tokens: Sequence[str]) -> list[list[int]]:
    """Return the positions of each word's tokens, by the marks of the tokenizer ("▁zeb", "ra</w>",
    "##ra"). Empty tokens belong to no word; punctuation around a word is a word of its own."""
    # a tokenizer marks the first token of each word, the last one, or all but the first (##)
    marks_begin = any(token.startswith(("▁", "Ġ")) for token in tokens)
    marks_end = any(token.endswith("</w>") for token in tokens)
    words: list[list[int]] = []
    previous = ""
    for place, token in enumerate(tokens):
        has_begin = token.startswith(("▁", "Ġ"))
        if marks_end:
            continues = not previous.endswith("</w>")
        else:
            continues = token.startswith("##") or (marks_begin and not has_begin)
        if token and previous and continues:
            words[-1].append(place)
        elif token:
            words.append([place])
        previous = token
    parts = list[list[int]]()
    for places in words:  # without the punctuation before and behind each
        behind = list[list[int]]()
        while places and is_punctuation(tokens[places[0]]):
            parts.append([places.pop(0)])
        while places and is_punctuation(tokens[places[-1]]):
            behind.insert(0, [places.pop()])
        parts += [places, *behind] if places else behind
    return parts


def is_punctuation(token: str) -> bool:
    """Whether a token or a word has marks alone, no letter or digit."""
    letters = token.removesuffix("</w>").strip("▁ĠĊ")
    return bool(token) and all(letter in string.punctuation for letter in letters)


def ids_of(model: nn.Module, name: str) -> set[int]:
    """Return all ids of a special token, such as "eos_token_id", in a model's configurations and
    tokenizer."""
    ids = set()
    for value in special_ids(model, name):
        ids |= set(value if isinstance(value, list) else [value])
    return ids - {None}


def special_ids(model: nn.Module, name: str) -> list[Any]:
    """What the configurations of a model and its tokenizer have under the ``name`` of a special
    token, the likeliest first: an id, a list of them, or None."""
    config = getattr(model, "config", None)
    parts = [getattr(config, part, None) for part in ("decoder", "text_config")]
    holders = [getattr(model, "generation_config", None), *parts, config, tokenizer_of(model)]
    return [getattr(holder, name, None) for holder in holders]


def image_ids_of(model: nn.Module) -> set[int]:
    """Return the ids of tokens that stand for patches of a photo in a prompt."""
    return ids_of(model, "image_token_id") | ids_of(model, "image_token_index")
