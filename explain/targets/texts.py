"""Words as the target: a text that an image-text model compares with a photo, or an answer that a model gives to it.

The first kind (CLIP, SigLIP and their relatives) is known by what it can do: ``get_image_features`` and
``get_text_features`` as in transformers, or ``encode_image`` and ``encode_text`` as in open_clip. `image_scorer` makes
a model of photos alone of it, with the scores of some texts as its output: that is what is explained.

The second kind (LLaVA, PaliGemma, BLIP and their relatives) takes ``pixel_values`` and ``input_ids``, and gives logits
of the next token ``(N, L, V)``. The answer is put behind the prompt, and one pass gives the probability of each token.
"""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from explain._utils.errors import ModelError, TargetError, quiet, shown, warn
from explain.data.inputs import Inputs
from explain.hooks import HookGroup
from explain.hooks.preserve import untouched
from explain.targets.base import Picked, Target, described, find_tensor, unsuitable

_PAIRS = (("get_image_features", "get_text_features"), ("encode_image", "encode_text"))
TokenIds = tuple[int, ...]
Prepared = tuple[nn.Module, Inputs, dict[str, tuple[str, ...]]]  # and the tokens of words, by their names
T = TypeVar("T")


@dataclass(frozen=True)
class Text(Target):
    """How similar an image-text model finds each photo and a text: the logit that it gives the pair.

    The model is one of transformers or open_clip, or has their functions. A text needs the model's tokenizer: an
    attribute ``tokenizer`` or ``processor`` of the model, or the one that lies where transformers loaded it from.

    Args:
        text: a text, or the ids of its tokens, with the tokens of start and end that the model expects.
        words: whether its tokens are explained too, together with the photo, by methods that take several inputs. The
            attribution then has them in ``words``, and in ``parts`` by the text: ``(N, L, D)``, embeddings of L tokens.

    Raises:
        TargetError: no text and no ids; or, when it is picked, a model of another kind.

    Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021.

    >>> (Text("a red bus") - Text("a truck")).name
    'a red bus − a truck'
    """

    text: str | TokenIds
    words: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", check_text(self.text))

    @property
    def name(self) -> str:
        return named_text(self.text)

    def without_words(self) -> "list[Text]":
        """The text without its first word, without its second, and so on: what it loses is what a word brings.

        >>> text = Text("a red bus")
        >>> [(text - shorter).name for shorter in text.without_words()]
        ['a red bus − red bus', 'a red bus − a bus', 'a red bus − a red']
        """
        words = self.text.split() if isinstance(self.text, str) else ()
        if len(words) < 2:
            raise TargetError(f"text must have two words or more, got {self.name!r}; write it out, not as token ids")
        return [Text(" ".join(words[:place] + words[place + 1 :])) for place in range(len(words))]

    def pick(self, output: Any, count: int) -> Picked:
        found = output.get(self.name) if isinstance(output, Mapping) else None
        if found is None:
            raise unsuitable(repr(self.name), "image and text features (CLIP, SigLIP and their relatives)", output)
        return found.reshape(count), None


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


def targets_in(target: Any, kind: type[T]) -> Iterator[T]:
    """The targets of a kind in a target, such as the texts in a difference of two.

    >>> [each.text for each in targets_in(Text("a bus") - 2 * Text("a truck"), Text)]
    ['a bus', 'a truck']
    """
    if isinstance(target, kind):
        yield target
    elif isinstance(target, tuple):
        for each in target:
            yield from targets_in(each, kind)
    elif is_dataclass(target):
        yield from targets_in(tuple(getattr(target, each.name) for each in fields(target)), kind)


def is_image_text(model: nn.Module) -> bool:
    """Whether a model has features of photos and of texts.

    >>> is_image_text(nn.Linear(2, 2))
    False
    """
    return _functions(model) is not None


def image_scorer(model: nn.Module, texts: Sequence[Text] = (), labels: Sequence[str] | None = None) -> nn.Module:
    """Return a model of photos alone: the same modules under the same names, with the scores of texts as its output.

    ``labels`` are the texts of zero-shot classes, with the class scores ``(N, K)`` as "logits"; they replace those that
    a scorer has. The features of texts are computed once, here.

    Raises:
        ModelError: not an image-text model, or one without the tokenizer that a text needs.
    """
    if not is_image_text(model):
        got = f"{type(model).__name__}; take an image-text model such as CLIP or SigLIP, or a class as the target"
        raise ModelError(f"model must have features of photos and of texts for a text as the target, got {got}")
    scorer = copy.copy(model)  # its modules, parameters and hooks are those of the model
    with torch.no_grad(), untouched(model):
        forward: Any = model.__dict__.get("forward")
        before = forward.args[1].labels if isinstance(forward, partial) and forward.func is _scores else None
        of_labels = before if labels is None else _features(model, [Text(label) for label in labels])
        known = {text.name: _features(model, [text])[0] for text in texts}
    words = {text.name: _Words(model, text) for text in texts if text.words}
    scorer.forward = partial(_scores, scorer, _Scored(of_labels, known, words))
    return scorer


def with_texts(model: nn.Module, inputs: Inputs, targets: Sequence[Target]) -> Prepared:
    """Prepare a model and its inputs for the texts in targets, and say what the tokens of explained words are."""
    texts = list(dict.fromkeys(targets_in(tuple(targets), Text)))
    if not texts:
        return model, inputs, {}
    if len(inputs.paths) + len(inputs.others) > 1:
        raise TargetError(f"target {texts[0].name!r} must have the photo as the only input, got {inputs}; give x alone")
    scorer = image_scorer(model, texts)
    words: Mapping[str, _Words] = cast(Any, scorer.forward).args[1].words
    if not words:
        return scorer, Inputs((inputs.x,)), {}
    embedded = {name: each.embedded.expand(len(inputs), -1, -1).to(inputs.x) for name, each in words.items()}
    tokens = {name: each.tokens for name, each in words.items()}
    return scorer, Inputs((inputs.x,), embedded, explained=[0, *embedded]), tokens


@dataclass(frozen=True, eq=False)
class _Scored:
    """What a scorer scores: the features of labels ``(K, D)`` and of each text ``(D,)``, and words to explain."""

    labels: torch.Tensor | None
    known: Mapping[str, torch.Tensor]
    words: "Mapping[str, _Words]"


class _Words:
    """The tokens of a text, their embeddings ``(1, L, D)``, and the features of the text from other embeddings."""

    def __init__(self, model: nn.Module, text: Text) -> None:
        self.given = _tokenized(model, [text])
        self.layer, self.embedded = find_embedding(model, self.given["ids"], partial(_run_text, model, self.given))
        self.tokens = token_names(tokenizer_of(model), self.given["ids"][0].tolist())

    def features(self, model: nn.Module, embedded: torch.Tensor) -> torch.Tensor:
        given = {name: each.expand(len(embedded), -1) for name, each in self.given.items()}
        with HookGroup(model) as group:
            group.forward(self.layer, lambda module, args, output: embedded)
            return _run_text(model, given)


def find_embedding(model: nn.Module, ids: torch.Tensor, run: Callable[[], Any]) -> tuple[str, torch.Tensor]:
    """Return the name of the layer that embeds these ids ``(N, L)`` when the model is run, and what it gives."""
    found: list[tuple[str, torch.Tensor]] = []

    def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and torch.equal(args[0].cpu(), ids.cpu()):
            found.append((name, output.detach().clone()))

    with torch.no_grad(), untouched(model), HookGroup(model) as group:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                group.forward(name, partial(note, name))
        run()
    if not found:
        got = f"{type(model).__name__} does not; leave out words=True"
        raise ModelError(f"model must embed token ids with an nn.Embedding for words to be explained, {got}")
    return found[0]


def _functions(model: nn.Module) -> tuple[Any, Any] | None:
    pairs = ((getattr(model, image, None), getattr(model, text, None)) for image, text in _PAIRS)
    return next((pair for pair in pairs if all(map(callable, pair))), None)


def _scores(scorer: nn.Module, scored: _Scored, x: torch.Tensor, /, **words: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of a scorer: logits of labels ``(N, K)``, and of each text ``(N, 1, 1)``, which is no class."""
    photos = F.normalize(_pooled(_functions(scorer)[0](x)), dim=-1)  # type: ignore[index]
    labels = scored.labels
    output = {} if labels is None else {"logits": _similarity(scorer, photos @ labels.to(photos).T)}
    for name, features in scored.known.items():
        texts = features.to(photos)
        if name in words:
            texts = F.normalize(scored.words[name].features(scorer, words[name]), dim=-1)
        output[name] = _similarity(scorer, (photos * texts).sum(-1))[:, None, None]
    return output


def _similarity(model: nn.Module, cosine: torch.Tensor) -> torch.Tensor:
    """The model's logits of cosines, by the parameters that CLIP, SigLIP or ALIGN have for it."""
    scale, bias, temperature = (getattr(model, name, None) for name in ("logit_scale", "logit_bias", "temperature"))
    if isinstance(scale, torch.Tensor):
        cosine = cosine * scale.exp()
    elif isinstance(temperature, torch.Tensor):
        cosine = cosine / temperature
    return cosine + bias if isinstance(bias, torch.Tensor) else cosine


def _features(model: nn.Module, texts: Sequence[Text]) -> torch.Tensor:
    """The features of texts, of length one ``(K, D)``."""
    return F.normalize(_run_text(model, _tokenized(model, texts)), dim=-1)


def _run_text(model: nn.Module, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    run = _functions(model)[1]  # type: ignore[index]
    others = {name: each for name, each in given.items() if name != "ids"}
    return _pooled(run(given["ids"], **others))


def _pooled(output: Any) -> torch.Tensor:
    """The features ``(N, D)`` in what a function of features returned."""
    for name in ("pooler_output", "image_embeds", "text_embeds"):
        output = getattr(output, name, output) if not isinstance(output, torch.Tensor) else output
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        got = described(output)
        raise ModelError(f"model must give features (N, D) of photos and texts, got {got}; wrap it in some that do")
    return output


def _tokenized(model: nn.Module, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    """The arguments of the function of text features: "ids" ``(K, L)``, and a mask where the tokenizer gives one."""
    device = next(model.parameters()).device
    if not isinstance(texts[0].text, str):
        return {"ids": torch.tensor([each.text for each in texts], device=device)}
    written = [each.name for each in texts]
    tokenizer = need_tokenizer(model, f"the text {written[0]!r}")
    if not hasattr(tokenizer, "convert_ids_to_tokens"):  # of open_clip: a function of texts
        _warn_of_cut(written, tokenizer, tokenizer)
        return {"ids": tokenizer(written).to(device)}
    config = getattr(model, "config", None)
    length = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    how = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
    _warn_of_cut(written, tokenizer, lambda texts: tokenizer(texts, **how)["input_ids"])
    given = tokenizer(written, **how)
    return {"ids" if name == "input_ids" else name: each.to(device) for name, each in given.items()}


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


LONGEST = 32  # tokens of a model's own answer


@dataclass(frozen=True)
class Answer(Target):
    """The log-probability that an image-to-text model gives an answer, or one word of it, after photo and prompt.

    The inputs are what the model's processor makes of both: a mapping with "pixel_values" ``(N, C, H, W)`` and
    "input_ids" ``(N, L)``, the prompt. All targets of one call must be about the same answer.

    Args:
        text: the answer, or the ids of its tokens; None is the model's own to a single photo: the most probable tokens,
            one after the other, to the end or at most 32.
        word: explain the word with this number alone, counted from 0, after the words before it.
        words: whether the words of the prompt, and of the answer before each word, are explained together with the
            photo. The attribution then has them in ``words``, and ``shares`` says how much the photo has.

    Raises:
        TargetError: no text and no ids, or no such word.

    >>> Answer("a cat on a sofa", word=1).name
    'word 1 of a cat on a sofa'
    """

    text: str | TokenIds | None = None
    word: int | None = None
    words: bool = False

    def __post_init__(self) -> None:
        if self.text is not None:
            object.__setattr__(self, "text", check_text(self.text))
        if self.word is not None and (type(self.word) is not int or self.word < 0):
            raise TargetError(f"word must be the number of a word from 0, got {shown(self.word)}; None is all of them")

    @property
    def name(self) -> str:
        whole = "the model's answer" if self.text is None else named_text(self.text)
        return whole if self.word is None else f"word {self.word} of {whole}"

    def pick(self, output: Any, count: int) -> Picked:
        found = output.get("answer") if isinstance(output, Mapping) else None
        if found is None:
            raise unsuitable(repr(self.name), "logits of the next token (N, L, V) for input_ids", output)
        if self.word is not None and self.word >= found.shape[1]:
            raise TargetError(f"word must be one of the answer's {found.shape[1]} words, got {self.word}; count from 0")
        return (found.sum(1) if self.word is None else found[:, self.word]), None


def with_answers(model: nn.Module, inputs: Inputs, targets: Sequence[Target]) -> Prepared:
    """Prepare a model and its inputs for the answers in targets, and say what the tokens of explained words are.

    Raises:
        ModelError: the model reads its answer from both sides, or gives no logits of tokens.
    """
    answers = list(targets_in(tuple(targets), Answer))
    if not answers:
        return model, inputs, {}
    if len({answer.text for answer in answers}) > 1:
        raise TargetError(f"targets must be about one answer, got {answers[0].name!r} and others; make two calls")
    prompt = inputs.kwargs.get("input_ids")
    if not isinstance(prompt, torch.Tensor) or prompt.ndim != 2 or len(prompt) != len(inputs):
        got = f'{inputs}; use explain.attribute(model, dict(processor(images=photo, text=prompt, return_tensors="pt")))'
        raise TargetError(f'inputs must have the prompt of each photo as "input_ids" (N, L) for an answer, got {got}')
    inputs = _with_padding(model, inputs)
    ids = _ids(model, inputs, answers[0])
    longer = _behind(inputs, ids)
    end = _ends(inputs.kwargs)[:, None] - 1
    with torch.no_grad(), untouched(model):
        alone = _at(_logits(inputs.call(model), len(prompt)), end)
        last = _at(_logits(longer.call(model), len(prompt)), end)
        layer, embedded = find_embedding(model, longer.kwargs["input_ids"], lambda: longer.call(model))
    if not torch.allclose(alone, last, rtol=1e-3, atol=1e-3 * float(last.abs().max())):
        remedy = "give the argument that marks the answer, such as token_type_ids"
        raise ModelError(f"model must predict words from those before, {type(model).__name__} looks behind; {remedy}")
    numbers = longer.kwargs["input_ids"][0].tolist()
    names = token_names(tokenizer_of(model), numbers)
    of_words = _are_words(model, longer)[0].tolist()
    tokens = tuple(name if is_word else "" for is_word, name in zip(of_words, names, strict=True))
    written = token_names(tokenizer_of(model), list(ids))
    words = words_of(written) if any(written) else [[place] for place in range(len(ids))]
    answered = copy.copy(model)  # its modules, parameters and hooks are those of the model
    answered.forward = partial(_log_probabilities, answered, model.forward, layer, ids, words)
    answered.joint_tokens = _joint_tokens(model, longer, len(ids))  # type: ignore[assignment]
    if not any(answer.words for answer in answers):
        return answered, longer, {}
    if not bool((longer.kwargs["input_ids"] == longer.kwargs["input_ids"][0]).all()):
        raise TargetError(
            "inputs must have the same prompt for all photos with words=True, got several; explain one each"
        )
    given = {**longer.kwargs, "words": embedded.to(inputs.x)}
    explained = Inputs(longer.args, given, [inputs.path, "words"], inputs.shared, inputs.layout)
    return answered, explained, {"words": tokens}


def _log_probabilities(
    model: nn.Module, run: Callable[..., Any], layer: str, ids: TokenIds, parts: list[list[int]], /, *args: Any,
    words: torch.Tensor | None = None, **kwargs: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The log-probability of each word of the answer, ``(N, W)``.

    ``ids`` are its tokens, which ``parts`` puts together to words; ``words`` take the place of what ``layer`` embeds.
    """
    with HookGroup(model) as group:
        if words is not None:
            group.forward(layer, lambda module, given, output: words)
        output = run(*args, **kwargs)
    count = len(kwargs["input_ids"])
    first = _ends(kwargs)[:, None] - len(ids) - 1
    logits = _at(_logits(output, count), first + torch.arange(len(ids), device=first.device))
    tokens = torch.tensor(ids, device=logits.device).expand(count, -1)
    found = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return {"answer": torch.stack([found[:, places].sum(1) for places in parts], 1)}


def _joint_tokens(model: nn.Module, inputs: Inputs, answered: int) -> tuple[Any, ...] | None:
    """What `Grids` says of a photo's tokens before those of an answer, if the prompt has a place for each of them.

    It is the number of all tokens, where those of the photo are and those that the answer's are read from, and how the
    photo's lie, where neighbouring patches make one token.
    """
    ids, packed = inputs.kwargs["input_ids"], inputs.kwargs.get("image_grid_thw")
    of_photo = torch.isin(ids, torch.tensor(_image_ids(model), device=ids.device))
    first = _ends(inputs.kwargs) - answered - 1
    places, length, size = of_photo[0].nonzero()[:, 0].tolist(), ids.shape[1], None
    if not places or not bool((of_photo == of_photo[0]).all()):
        return None
    if packed is not None:
        _, rows, columns = packed[0].tolist()
        merge = round((rows * columns / len(places)) ** 0.5)
        size = rows // merge, columns // merge
    starts = first.tolist() if bool((first != first[0]).any()) else first[:1].tolist()
    return length, places, [range(start, start + answered) for start in starts], size


def _logits(output: Any, count: int) -> torch.Tensor:
    found: torch.Tensor | None = find_tensor(output, count, (3,), ("logits",))
    if found is None:
        raise unsuitable("answer", "logits of the next token (N, L, V) for input_ids", output)
    return found


def _at(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The logits ``(N, L, V)`` at some places ``(N, P)``: ``(N, P, V)``."""
    return logits.gather(1, places.to(logits.device)[..., None].expand(-1, -1, logits.shape[2]))


def _with_padding(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs with a mask of the prompts' tokens, where there is none but prompts end in tokens that fill up.

    Raises:
        TargetError: the mask says more than which tokens there are.
    """
    prompt, mask = inputs.kwargs["input_ids"], inputs.kwargs.get("attention_mask")
    if mask is not None:
        if mask.shape != prompt.shape or not bool((mask != 0).any(1).all()):
            got = f"{tuple(mask.shape)}; give the one that the processor makes"
            need = f"mark the tokens of each prompt, {tuple(prompt.shape)}"
            raise TargetError(f"attention_mask must {need}, for an answer, got {got}")
        return inputs
    padding, ends = _ids_of(model, "pad_token_id"), _ids_of(model, "eos_token_id")
    filling = torch.isin(prompt, torch.tensor(sorted(padding - ends), device=prompt.device))
    there = (~filling).long().flip(1).cummax(1).values.flip(1)  # all up to the last token that does not fill up
    if bool(there.all()):
        return inputs
    return replace(inputs, kwargs={**inputs.kwargs, "attention_mask": there}, explained=list(inputs.paths))


def _ends(kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The number of the place ``(N,)`` behind each text's last token, which padding may follow."""
    ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    places = torch.arange(1, ids.shape[1] + 1, device=ids.device).expand(len(ids), -1)
    return places[:, -1] if mask is None else (places * (mask != 0)).amax(1)


def _behind(inputs: Inputs, ids: TokenIds) -> Inputs:
    """The inputs with tokens behind the prompts, in all that has a number for each token.

    What fills up the prompts comes behind the new tokens.
    """
    prompt, ends = inputs.kwargs["input_ids"], _ends(inputs.kwargs)[:, None]
    new = torch.arange(len(ids), device=prompt.device)
    places = torch.arange(prompt.shape[1] + len(ids), device=prompt.device)
    is_new = (places >= ends) & (places < ends + len(ids))
    before = torch.where(places < ends, places, torch.where(is_new, ends - 1, places - len(ids)))
    more = torch.tensor(ids, dtype=prompt.dtype, device=prompt.device)
    fill = {"input_ids": more, "attention_mask": torch.ones_like(more), "token_type_ids": torch.ones_like(more)}
    longer = dict(inputs.kwargs)
    for name, tokens in inputs.kwargs.items():
        if not isinstance(tokens, torch.Tensor) or tokens.shape[-1:] != prompt.shape[-1:]:
            continue
        if name == "position_ids":  # also (1, L), and (3, N, L) of rotary positions in time, height and width
            tokens = tokens.expand(*tokens.shape[:-2], *prompt.shape)
            last = tokens.gather(-1, (ends - 1).expand(*tokens.shape[:-1], 1))
            values = last + 1 + new
        elif tokens.shape == prompt.shape:
            values = fill.get(name, torch.zeros_like(more)).expand(len(prompt), -1)
        else:
            continue
        moved = tokens.gather(-1, before.expand(*tokens.shape[:-1], -1))
        where = (ends + new).expand(values.shape)
        longer[name] = moved.scatter(-1, where, values.to(moved))
    return replace(inputs, kwargs=longer, explained=list(inputs.paths))


def _are_words(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Which tokens ``(N, L)`` stand for no patch, and do not fill up."""
    ids, mask = inputs.kwargs["input_ids"], inputs.kwargs.get("attention_mask")
    of_photo = torch.isin(ids, torch.tensor(_image_ids(model), device=ids.device))
    return ~of_photo if mask is None else ~of_photo & (mask != 0)


def _ids(model: nn.Module, inputs: Inputs, answer: Answer) -> TokenIds:
    """The ids of an answer's tokens."""
    if answer.text is None:
        return _own_answer(model, inputs)
    if not isinstance(answer.text, str):
        return answer.text
    tokenizer = need_tokenizer(model, f"the answer {answer.text!r}")
    return tuple(tokenizer(answer.text, add_special_tokens=False)["input_ids"])


def _own_answer(model: nn.Module, inputs: Inputs) -> TokenIds:
    """The most probable tokens, one after the other, up to one that ends the answer."""
    if len(inputs) > 1:
        raise TargetError(f"x must hold one photo for the model's own answer, got {len(inputs)}; explain one at a time")
    ends = _ids_of(model, "eos_token_id")
    last = int(_ends(inputs.kwargs)) - 1
    found: TokenIds = ()
    with torch.no_grad(), untouched(model):
        while len(found) < LONGEST:
            longer = _behind(inputs, found) if found else inputs
            scores = _logits(longer.call(model), 1)[0, last + len(found)].clone()
            scores[_image_ids(model)] = -torch.inf  # these stand for patches
            best = int(scores.argmax())
            if best in ends and found:
                break
            found += (best,)
    return found


def _ids_of(model: nn.Module, name: str) -> set[int]:
    """The ids of a special token, by the model's configurations and its tokenizer."""
    config = getattr(model, "config", None)
    holders = [getattr(model, "generation_config", None), config, getattr(config, "text_config", None)]
    return {number for each in (*holders, tokenizer_of(model)) for number in _as_list(getattr(each, name, None))}


def _image_ids(model: nn.Module) -> list[int]:
    """The ids of tokens that stand for patches."""
    config = getattr(model, "config", None)
    return [i for name in ("image_token_id", "image_token_index") for i in _as_list(getattr(config, name, None))]


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
