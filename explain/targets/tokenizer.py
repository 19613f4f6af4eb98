"""Tokens of texts: the tokenizer of a model, and which tokens make up the words."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ModelError, TargetError, quiet, shown, warn

TokenIds = tuple[int, ...]


def check_text(given: Any) -> str | TokenIds:
    """Return a text as it is, and ids of tokens as a tuple."""
    if isinstance(given, str) and given.strip():
        return given
    if hasattr(given, "__iter__") and not isinstance(given, str):
        ids = tuple(given.tolist() if isinstance(given, torch.Tensor) else given)
        if ids and all(type(each) is int and each >= 0 for each in ids):
            return ids
    raise TargetError(f"text must be words, or the ids of their tokens, got {shown(given)}; write it as in 'a cat'")


def named_text(text: str | TokenIds) -> str:
    """How messages and results call a text, or the ids of its tokens."""
    return text if isinstance(text, str) else f"tokens {' '.join(map(str, text))}"


def _warn_of_cut(texts: Sequence[str], tokenizer: Any, ids_of: Callable[[list[str]], torch.Tensor]) -> None:
    """Warn of texts that have more tokens than ``ids_of`` gives: ids ``(N, L)`` of one length, filled up with padding.

    A tokenizer that cannot say how many a text has gives those of its words one by one.
    """
    padding = ids_of([""])[0, -1]

    def lengths(texts: Sequence[str]) -> list[int]:
        is_padding = (ids_of(list(texts)) == padding).long()
        return (is_padding.shape[1] - is_padding.flip(1).cumprod(1).sum(1)).tolist()

    (special,) = lengths([""])
    ids = ids_of(list(texts))
    if special >= ids.shape[1] - 1:  # padding comes first
        return
    for text, length in zip(texts, lengths(texts), strict=True):
        if length < ids.shape[1] - 1:  # there is room for more; the last token may look like padding
            continue
        if hasattr(tokenizer, "tokenize"):
            count = len(tokenizer.tokenize(text))
        else:
            count = sum(each - special for each in lengths(text.split()))
        if length - special < count:
            what = f"the model reads {length - special} of the {count} tokens of the text {shown(text)}"
            warn(f"{what}; the rest is cut off: write a shorter one")


def tokenizer_of(model: nn.Module) -> Any:
    """The tokenizer that comes with a model, or lies where transformers loaded it from; None without one."""
    for holder in (model, getattr(model, "processor", None)):
        if callable(found := getattr(holder, "tokenizer", None)):
            return found
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    with suppress(Exception), quiet():  # it may not be here; a file of others may be wrong in any way
        if source:
            auto = importlib.import_module("transformers").AutoTokenizer
            return auto.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    return None


def need_tokenizer(model: nn.Module, what: str) -> Any:
    """The same, refused where there is none."""
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        remedy = "set model.tokenizer, or give token ids as in explain.targets.Text((49406, 320, 2368, 49407))"
        raise ModelError(f"model must bring its tokenizer for {what}, {type(model).__name__} has none; {remedy}")
    return tokenizer


def token_names(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """How a tokenizer writes each token, "" for tokens that are no part of a text; without one, their numbers."""
    special = set(getattr(tokenizer, "all_special_ids", ())) | {getattr(tokenizer, "pad_token_id", None)}
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        written = tokenizer.convert_ids_to_tokens(list(ids))
    elif isinstance(known := getattr(tokenizer, "decoder", None), Mapping):  # open_clip pads with token 0
        written, special = [known[each] for each in ids], special | {0}
    else:
        written = [str(each) for each in ids]
    return tuple("" if each in special else token for each, token in zip(ids, written, strict=True))


def words_of(tokens: Sequence[str]) -> list[list[int]]:
    """Which tokens make up each word, by how tokenizers mark beginnings, ends and continuations.

    >>> words_of(["", "▁a", "▁zeb", "ra", ""]), words_of(["a</w>", "zeb", "ra</w>"]), words_of(["a", "zeb", "##ra"])
    ([[1], [2, 3]], [[0], [1, 2]], [[0], [1, 2]])
    """
    begins, ends = any(t.startswith(("▁", "Ġ")) for t in tokens), any(t.endswith("</w>") for t in tokens)
    words: list[list[int]] = []
    for place, (before, token) in enumerate(zip(["", *tokens], tokens, strict=False)):
        goes_on = token.startswith("##") or (begins and not token.startswith(("▁", "Ġ")))
        if token and not (before and (not before.endswith("</w>") if ends else goes_on)):
            words.append([])
        if token:
            words[-1].append(place)
    return words


def _ids_of(model: nn.Module, name: str) -> set[int]:
    """The ids of a special token, by the model's configurations and its tokenizer."""
    config = getattr(model, "config", None)
    holders = [getattr(model, "generation_config", None), config, getattr(config, "text_config", None)]
    return {number for each in (*holders, tokenizer_of(model)) for number in _as_list(getattr(each, name, None))}


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
