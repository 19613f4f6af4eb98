"""An answer in words as the target, which an image-to-text model gives to a photo and a prompt.

Such a model (LLaVA, PaliGemma, BLIP and their relatives) takes ``pixel_values`` and ``input_ids``,
and gives logits of the next token ``(N, L, V)``. The answer is put behind the prompt, and one pass
gives the probability of each token. Those with a decoder of its own (TrOCR, Donut) take
``decoder_input_ids`` in their place, or start without a prompt.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from explain._utils.errors import ModelError, TargetError, shown
from explain.data.inputs import Inputs
from explain.hooks import HookGroup
from explain.hooks.preserve import untouched
from explain.targets.base import CheckedTarget, Picked, Target, find_tensor, unsuitable
from explain.targets.text import Prepared, find_embedding, targets_in
from explain.targets.tokenizer import (
    TokenIds,
    check_text,
    ids_of,
    image_ids_of,
    named_text,
    need_tokenizer,
    special_ids,
    token_names,
    tokenizer_of,
    words_of,
)

DECODER = "decoder_input_ids"
LONGEST = 32  # tokens of a model's own answer, at most


@dataclass(frozen=True)
class Answer(CheckedTarget):
    """The log-probability that an image-to-text model gives an answer, or one word of it, after
    photo and prompt.

    The inputs are what the model's processor makes of both: a mapping with "pixel_values" ``(N, C,
    H, W)`` and "input_ids" ``(N, L)``, the prompt. A model that reads a photo without a prompt
    (TrOCR, GIT) takes the photo alone, or a prompt as "decoder_input_ids" (Donut). All targets of
    one call must be about the same answer.

    Args:
        text: the answer, or the ids of its tokens; None is the model's own to a single photo: the
            most probable tokens, one after the other, to the end or at most 32.
        word: explain the word with this number alone, counted from 0, after the words before it.
        words: whether the words of the prompt, and of the answer before each word, are explained
            together with the photo. The attribution then has them in ``words``, and ``shares`` says
            how much the photo has.

    Raises:
        TargetError: no text and no ids, or no such word.

    >>> Answer("a cat on a sofa", word=1).name
    'word 1 of a cat on a sofa'
    """

    text: str | TokenIds | None = None
    word: int | None = None
    words: bool = False

    minimums = {"word": 0}

    def __post_init__(self) -> None:
        """Check the options of an answer as the target, and turn token ids into a tuple."""
        if self.text is not None:
            object.__setattr__(self, "text", check_text(self.text))
        super().__post_init__()

    @property
    def name(self) -> str:
        """The answer in messages and captions, and in results and records: "word 1 of a cat on a
        sofa"."""
        whole = "the model's answer" if self.text is None else named_text(self.text)
        return whole if self.word is None else f"word {self.word} of {whole}"

    def pick(self, output: Any, count: int) -> Picked:
        """The log-probability of the answer, or of one word of it, for each image: ``(count,)``.

        ``output`` is that of a model from `with_answers`, which has them by word.
        """
        of_words = output.get("answer") if isinstance(output, Mapping) else None
        if of_words is None:
            raise unsuitable(
                repr(self.name), "logits of the next token (N, L, V) for input_ids", output
            )
        if self.word is None:
            return of_words.sum(1), None
        if self.word >= of_words.shape[1]:
            raise TargetError(
                f"word must be one of the answer's {of_words.shape[1]} words, got {self.word}; "
                "count from 0"
            )
        return of_words[:, self.word], None


def with_answers(model: nn.Module, inputs: Inputs, targets: Sequence[Target]) -> Prepared:
    """The model with log-probabilities of words as output, the inputs with the answer behind the
    prompts, and the tokens of explained words; model and inputs as they are without an answer.
    """
    answers = list(targets_in(tuple(targets), Answer))
    if not answers:
        return model, inputs, {}
    if len({answer.text for answer in answers}) > 1:
        raise TargetError(
            f"targets must be about one answer, got {answers[0].name!r} and others; make two calls"
        )
    model, kwargs = with_prompt(model, inputs.kwargs, inputs.x)
    # by their paths: None would look for the image once more, among other arguments
    inputs = replace(inputs, kwargs=kwargs, explained=list(inputs.paths))
    _check_prompts(inputs)
    inputs = _with_padding(model, inputs)
    last_place = _ends(inputs.kwargs)[:, None] - 1  # of each prompt
    with torch.no_grad(), untouched(model):
        logits_without = _at(_next_token_logits(inputs.call(model), inputs.kwargs), last_place)
    ids = _ids(model, inputs, answers[0])
    if not image_ids_of(model).isdisjoint(ids):
        raise TargetError(
            f"answer must be words, got {answers[0].name!r} with a token that stands for a photo; "
            "leave it out"
        )
    inputs_with_answer = _behind(inputs, ids)
    with torch.no_grad(), untouched(model):
        output = inputs_with_answer.call(model)
        logits_with = _at(_next_token_logits(output, inputs_with_answer.kwargs), last_place)
        layer, embedded = find_embedding(
            model, inputs_with_answer.kwargs["input_ids"], lambda: inputs_with_answer.call(model)
        )
    # the first word must be as probable without the answer behind it, or one pass cannot give all
    slack = max(1e-3, 8 * torch.finfo(logits_with.dtype).eps)  # half precision rounds coarsely
    largest = float(logits_with.abs().max())
    if not torch.allclose(logits_without, logits_with, rtol=slack, atol=slack * largest):
        raise ModelError(
            f"model must predict words from those before, {type(model).__name__} looks behind; "
            "give the argument that marks the answer, such as token_type_ids"
        )
    tokenizer = tokenizer_of(model)
    token_texts = token_names(tokenizer, ids)
    # tokens without texts are words of their own
    words = words_of(token_texts) if any(token_texts) else [[place] for place in range(len(ids))]
    scoring_model = copy.copy(model)  # its modules, parameters and hooks are those of the model
    # by position, since all keywords are inputs of the model
    scoring_model.forward = partial(
        _log_probabilities, scoring_model, model.forward, layer, ids, words
    )
    scoring_model.joint_tokens = _joint_tokens(model, inputs_with_answer, len(ids))  # type: ignore[assignment]
    if not any(answer.words for answer in answers):
        return scoring_model, inputs_with_answer, {}
    texts_of_prompt = _prompt_words(model, inputs_with_answer, tokenizer)
    kwargs = {**inputs_with_answer.kwargs, "words": embedded.to(inputs.x)}
    inputs_with_words = Inputs(
        inputs_with_answer.args,
        kwargs,
        explained=[inputs.path, "words"],
        shared=inputs.shared,
        layout=inputs.layout,
    )
    return scoring_model, inputs_with_words, {"words": texts_of_prompt}


def with_prompt(
    model: nn.Module, kwargs: Mapping[str, Any], photos: torch.Tensor
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model that takes "decoder_input_ids" (TrOCR, Donut) as one that takes "input_ids",
    with its arguments; other models as they are."""
    kwargs = dict(kwargs)
    if not {"input_ids", "attention_mask"}.isdisjoint(kwargs):  # there is a prompt
        return model, kwargs
    has_decoder = decodes(model)
    prompt = kwargs.pop(DECODER, None) if has_decoder else None
    if prompt is None:
        # without a prompt, answers begin with their start token, unless tokens of the prompt stand
        # for the photo
        start = _start(model)
        if start is None or (not has_decoder and image_ids_of(model)):
            return model, kwargs
        prompt = torch.full((len(photos), 1), start, device=photos.device)
    kwargs["input_ids"] = prompt
    if not has_decoder:
        return model, kwargs
    kwargs["attention_mask"] = kwargs.pop("decoder_attention_mask", torch.ones_like(prompt))
    decoding_model = copy.copy(model)  # its modules, parameters and hooks are those of the model
    decoding_model.forward = partial(_decode, model.forward)
    return decoding_model, kwargs


def decodes(model: nn.Module) -> bool:
    """Whether a model has a decoder of its own beside the photo, which takes "decoder_input_ids"
    (TrOCR, Donut)."""
    parameters = inspect.signature(model.forward).parameters
    return DECODER in parameters and "input_ids" not in parameters


def _start(model: nn.Module) -> int | None:
    """The token that answers start with, where there is no prompt; None if nothing says it."""
    tokens = [
        *special_ids(model, "decoder_start_token_id"),
        *special_ids(model, "bos_token_id"),
    ]
    return next((token for token in tokens if isinstance(token, int)), None)


def _decode(
    run: Callable[..., Any],
    /,
    *args: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """The forward of the model that `with_prompt` makes, from that of the caller's model
    ``run``."""
    return run(*args, decoder_input_ids=input_ids, decoder_attention_mask=attention_mask, **kwargs)


def _check_prompts(inputs: Inputs) -> None:
    """Refuse inputs without a prompt for each photo."""
    prompt = inputs.kwargs.get("input_ids")
    if not isinstance(prompt, torch.Tensor) or prompt.ndim != 2 or len(prompt) != len(inputs):
        raise TargetError(
            'inputs must have the prompt of each photo as "input_ids" (N, L) for an answer, '
            f"got {inputs}; use explain.attribute(model, dict(processor(images=photo, "
            'text=prompt, return_tensors="pt")))'
        )


def _prompt_words(model: nn.Module, inputs: Inputs, tokenizer: Any) -> tuple[str, ...]:
    """The texts of the prompt's tokens, with "" for tokens of photos and padding, which are no
    words.
    """
    prompts = inputs.kwargs["input_ids"]
    if not bool((prompts == prompts[0]).all()):
        raise TargetError(
            "inputs must have the same prompt for all photos with words=True, got several; explain "
            "one each"
        )
    is_no_word = torch.isin(prompts[0], _image_ids(model, prompts.device))
    if "attention_mask" in inputs.kwargs:
        is_no_word |= inputs.kwargs["attention_mask"][0] == 0
    token_texts = token_names(tokenizer, prompts[0].tolist())
    pairs = zip(token_texts, is_no_word.tolist(), strict=True)
    return tuple("" if no_word else text for text, no_word in pairs)


def _log_probabilities(
    model: nn.Module,
    run: Callable[..., Any],
    layer: str,
    ids: TokenIds,
    words_of_answer: list[list[int]],
    /,
    *args: Any,
    words: torch.Tensor | None = None,
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """The log-probability of each word of the answer, ``(N, W)``; ``words_of_answer`` has the
    positions of each word in ``ids``, and ``words`` ``(N, L, D)`` replace what ``layer`` embeds.
    """
    with HookGroup(model) as group:
        if words is not None:
            group.forward(layer, lambda module, args, output: words)
        output = run(*args, **kwargs)
    count = len(kwargs["input_ids"])
    # each token's logits are at the one before it
    first_places = _ends(kwargs)[:, None] - len(ids) - 1
    places = first_places + torch.arange(len(ids), device=first_places.device)
    logits = _at(_next_token_logits(output, kwargs), places)
    tokens = torch.tensor(ids, device=logits.device).expand(count, -1)
    of_tokens = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    of_words = [of_tokens[:, places_of_word].sum(1) for places_of_word in words_of_answer]
    return {"answer": torch.stack(of_words, 1)}


class JointTokens(NamedTuple):
    """Positions ``photo`` of the photo's tokens in a sequence of ``length``, which holds text too,
    and ``read``, those whose logits give the answer: a list for each image, or one list for all."""

    length: int
    photo: Sequence[int]
    read: Sequence[Sequence[int]]
    size: tuple[int, ...] = ()
    """Their rows and columns, where neighbouring patches make one token; empty where they lie as
    the photo does."""


def _joint_tokens(model: nn.Module, inputs: Inputs, answer_length: int) -> JointTokens | None:
    """Where the photo's tokens and those from which the answer is read are in the sequence; None
    where photos have no positions of their own, or different ones.
    """
    ids = inputs.kwargs["input_ids"]
    is_photo_token = torch.isin(ids, _image_ids(model, ids.device))
    places = is_photo_token[0].nonzero()[:, 0].tolist()
    if not places or not bool((is_photo_token == is_photo_token[0]).all()):
        return None
    size: tuple[int, ...] = ()
    if "image_grid_thw" in inputs.kwargs:
        _, rows, columns = inputs.kwargs["image_grid_thw"][0].tolist()
        merge = round((rows * columns / len(places)) ** 0.5)  # patches a side of one token
        size = (rows // merge, columns // merge)
    # each token's logits are at the one before it
    starts = (_ends(inputs.kwargs) - answer_length - 1).tolist()
    if len(set(starts)) == 1:  # one list for all images
        starts = starts[:1]
    read = [range(start, start + answer_length) for start in starts]
    return JointTokens(ids.shape[1], photo=places, read=read, size=size)


def _next_token_logits(output: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The logits ``(N, L, V)`` of what follows each of "input_ids" ``(N, L)``, in an image-to-text
    model's output."""
    count, length = kwargs["input_ids"].shape
    logits: torch.Tensor | None = find_tensor(output, count, (3,), ("logits",))
    if logits is None:
        raise unsuitable("answer", "logits of the next token (N, L, V) for input_ids", output)
    return logits[:, -length:]  # those of the photo's own tokens may come first (GIT)


def _at(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The logits ``(N, L, V)`` of the next token at the given places ``(N, P)`` of each sequence:
    ``(N, P, V)``."""
    return logits.gather(1, places.to(logits.device)[..., None].expand(-1, -1, logits.shape[2]))


def _with_padding(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs with an attention mask if prompts end in padding and none was given; else the same
    inputs."""
    prompt = inputs.kwargs["input_ids"]
    if "attention_mask" in inputs.kwargs:
        return inputs
    # a token that pads and also ends texts may be the end of a prompt
    fillers = ids_of(model, "pad_token_id") - ids_of(model, "eos_token_id")
    is_token = ~torch.isin(prompt, torch.tensor(sorted(fillers), device=prompt.device))
    # true up to the last token that is no padding
    mask = is_token.long().flip(1).cummax(1).values.flip(1)
    if bool(mask.all()):
        return inputs
    return replace(inputs, kwargs={**inputs.kwargs, "attention_mask": mask})


def _ends(kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The place ``(N,)`` behind the last token of each text in "input_ids", which padding may
    follow."""
    ids = kwargs["input_ids"]
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids)
    return (torch.arange(1, ids.shape[1] + 1, device=ids.device) * (mask != 0)).amax(1)


def _behind(inputs: Inputs, ids: TokenIds) -> Inputs:
    """The inputs with the answer's tokens ``ids`` behind each prompt and before its padding; masks
    and positions are extended, too."""
    prompt = inputs.kwargs["input_ids"]
    ends = _ends(inputs.kwargs).tolist()
    longer_inputs = dict(inputs.kwargs)
    for name, values in inputs.kwargs.items():
        # may be (1, L), or (3, N, L): rotary positions in time, height and width
        if name == "position_ids":
            values = values.expand(*values.shape[:-2], *prompt.shape)
        elif not isinstance(values, torch.Tensor) or values.shape != prompt.shape:
            continue  # it has no value for each token
        # the answer is read, and marked as such; other masks do not count it
        is_counted = name in ("attention_mask", "token_type_ids")
        rows = []
        # the images are always the dimension before the last
        for row, end in zip(values.unbind(-2), ends, strict=True):
            if name == "input_ids":
                inserted = row.new_tensor(ids)
            elif name == "position_ids":
                inserted = row[..., end - 1 : end] + torch.arange(
                    1, len(ids) + 1, device=row.device
                )
            else:
                inserted = row.new_full((len(ids),), is_counted)
            rows.append(torch.cat([row[..., :end], inserted, row[..., end:]], -1))
        longer_inputs[name] = torch.stack(rows, -2)
    return replace(inputs, kwargs=longer_inputs, explained=list(inputs.paths))


def _ids(model: nn.Module, inputs: Inputs, answer: Answer) -> TokenIds:
    """The token ids of an answer: as given, from its text, or the model's own answer."""
    if answer.text is None:
        return own_answer(model, inputs)
    if not isinstance(answer.text, str):
        return answer.text
    return ids_of_text(model, answer.text)


def ids_of_text(model: nn.Module, text: str) -> TokenIds:
    """Return the tokens of an answer; a `ModelError` without a tokenizer, a `TargetError` for
    unknown words."""
    tokenizer = need_tokenizer(model, f"the answer {text!r}")
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    got = "an unknown token" if ids else "none"
    if not ids or getattr(tokenizer, "unk_token_id", None) in ids:
        raise TargetError(
            f"answer must be words that the tokenizer has tokens for, got {got} for "
            f"{shown(text)}; write other words"
        )
    return ids


def own_answer(model: nn.Module, inputs: Inputs) -> TokenIds:
    """The tokens that the model itself answers to a single photo: the most probable ones, up to one
    that ends the answer. It runs the model once for each token, at most `LONGEST` times.
    """
    if len(inputs) > 1:
        raise TargetError(
            f"x must hold one photo for the model's own answer, got {len(inputs)}; explain one at "
            "a time"
        )
    ends = ids_of(model, "eos_token_id")
    last_place = int(_ends(inputs.kwargs)) - 1
    answer: TokenIds = ()
    with torch.no_grad(), untouched(model):
        while len(answer) < LONGEST:
            inputs_with_answer = _behind(inputs, answer)
            output = inputs_with_answer.call(model)
            logits = _next_token_logits(output, inputs_with_answer.kwargs)
            scores = logits[0, last_place + len(answer)].clone()
            # tokens that stand for patches are no answer
            scores[_image_ids(model, scores.device)] = -torch.inf
            best = int(scores.argmax())
            if best in ends and answer:  # an answer has a token at least
                break
            answer += (best,)
    return answer


def _image_ids(model: nn.Module, device: torch.device) -> torch.Tensor:
    """The ids of tokens that stand for patches of a photo in a prompt."""
    return torch.tensor(sorted(image_ids_of(model)), dtype=torch.long, device=device)
