"""A text as the target, which an image-text model compares with a photo.

Such a model (CLIP, SigLIP and their relatives) is known by what it can do: ``get_image_features``
and ``get_text_features`` as in transformers, or ``encode_image`` and ``encode_text`` as in
open_clip. `image_scorer` makes a model of photos alone of it, with the scores of some texts as its
output: that is what is explained.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from explain._utils.errors import ModelError, TargetError
from explain._utils.modules import modules_of
from explain.data.inputs import Inputs
from explain.hooks import HookGroup
from explain.hooks.preserve import untouched
from explain.targets.base import CheckedTarget, Picked, Target, summary_of_output, unsuitable
from explain.targets.tokenizer import (
    TokenIds,
    check_text,
    named_text,
    need_tokenizer,
    token_names,
    tokenizer_of,
    warn_of_cut,
)

_PAIRS = (("get_image_features", "get_text_features"), ("encode_image", "encode_text"))
"""The names of the functions of features: of transformers, and of open_clip."""
Prepared = tuple[nn.Module, Inputs, dict[str, tuple[str, ...]]]
"""A model whose output has the scores of texts, its inputs, and the tokens of each explained input
of words, by the name of that input."""
T = TypeVar("T")


@dataclass(frozen=True)
class Text(CheckedTarget):
    """How similar an image-text model finds each photo and a text: the logit that it gives the
    pair.

    The model is one of transformers or open_clip, or has their functions. A text needs the model's
    tokenizer: an attribute ``tokenizer`` or ``processor`` of the model, or the one that lies where
    transformers loaded it from.

    Args:
        text: a text, or the ids of its tokens, with the tokens of start and end that the model
            expects.
        words: whether its tokens are explained too, together with the photo, by methods that take
            several inputs. The attribution then has them in ``words``, and in ``parts`` by the
            text: ``(N, L, D)``, embeddings of L tokens.

    Raises:
        TargetError: no text and no ids; or, when it is picked, a model of another kind.

    Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML
    2021.

    >>> (Text("a red bus") - Text("a truck")).name
    'a red bus − a truck'
    """

    text: str | TokenIds
    words: bool = False

    def __post_init__(self) -> None:
        """Check the text that is the target, and turn token ids into a tuple."""
        object.__setattr__(self, "text", check_text(self.text))
        super().__post_init__()

    @property
    def name(self) -> str:
        return named_text(self.text)

    def without_words(self) -> "list[Text]":
        """Return the texts without the first word, without the second, and so on; the score that a
        text loses is what the word brings.

        >>> text = Text("a red bus")
        >>> [(text - shorter).name for shorter in text.without_words()]
        ['a red bus − red bus', 'a red bus − a bus', 'a red bus − a red']
        """
        words = self.text.split() if isinstance(self.text, str) else ()
        if len(words) < 2:
            raise TargetError(
                f"text must have two words or more, got {self.name!r}; write it out, not as token "
                "ids"
            )
        return [Text(" ".join(words[:place] + words[place + 1 :])) for place in range(len(words))]

    def pick(self, output: Any, count: int) -> Picked:
        """The model's logit ``(count,)`` for each photo and this text.

        ``output`` is that of a model from `image_scorer`, which has them by text.
        """
        scores = output.get(self.name) if isinstance(output, Mapping) else None
        if scores is None:
            needs = "image and text features (CLIP, SigLIP and their relatives)"
            raise unsuitable(repr(self.name), needs, output)
        return scores.reshape(count), None


def targets_in(target: Any, kind: type[T]) -> Iterator[T]:
    """Yield the targets of class ``kind`` inside a target or a tuple of targets, such as the texts
    in a difference of two."""
    if isinstance(target, kind):
        yield target
    elif isinstance(target, tuple):
        for part in target:
            yield from targets_in(part, kind)
    elif is_dataclass(target):
        parts = tuple(getattr(target, field.name) for field in fields(target))
        yield from targets_in(parts, kind)


def is_image_text(model: nn.Module) -> bool:
    """Whether a model has functions for features of photos and of texts, as CLIP does."""
    return _functions(model) is not None


def image_scorer(
    model: nn.Module,
    texts: Sequence[Text] = (),
    labels: Sequence[str] | None = None,
    words: "Mapping[str, _Words] | None" = None,
) -> nn.Module:
    """The same modules as a model of photos with the scores of texts; those of ``labels`` ``(N,
    K)`` are its "logits". Texts are encoded once, here, but those in ``words`` in each pass.
    """
    if not is_image_text(model):
        raise ModelError(
            "model must have features of images and of texts for a text as the target, got "
            f"{type(model).__name__}; take an image-text model such as CLIP or SigLIP, or a "
            "class as the target"
        )
    scorer = copy.copy(model)  # its modules, parameters and hooks are those of the model
    with torch.no_grad(), untouched(model):
        # a scorer may be made of a scorer, whose labels stay
        label_features = getattr(model, "features_of_labels", None)
        if labels is not None:
            label_features = _features(model, [Text(label) for label in labels])
        text_features = {text.name: _features(model, [text])[0] for text in texts}
    scorer.features_of_labels = label_features  # type: ignore[assignment]
    scorer.forward = partial(_scores, scorer, text_features, words or {})
    return scorer


def with_texts(model: nn.Module, inputs: Inputs, targets: Sequence[Target]) -> Prepared:
    """The scorer of photos for the `Text` targets, its inputs (with embeddings of explained words),
    and these words' tokens by text; model and inputs as they are without a text.
    """
    texts = list(dict.fromkeys(targets_in(tuple(targets), Text)))
    if not texts:
        return model, inputs, {}
    if len(inputs.paths) + len(inputs.other_tensors) > 1:
        raise TargetError(
            f"target {texts[0].name!r} must have the image as the only input, got {inputs}; give x "
            "alone"
        )
    words = {}
    if is_image_text(model):  # else it is refused by `image_scorer`
        words = {text.name: _Words(model, text) for text in texts if text.words}
    scorer = image_scorer(model, texts, words=words)
    if not words:
        return scorer, Inputs((inputs.x,)), {}
    embedded = {}
    tokens = {}
    for name, text_words in words.items():
        embedded[name] = text_words.embedded.expand(len(inputs), -1, -1).to(inputs.x)
        tokens[name] = text_words.tokens
    return scorer, Inputs((inputs.x,), embedded, explained=[0, *embedded]), tokens


class _Words:
    """The tokens of a text, their embeddings ``(1, L, D)``, and the features of the text from other
    embeddings."""

    def __init__(self, model: nn.Module, text: Text) -> None:
        """Run the text once, to find its token embeddings in the model."""
        self.arguments = _tokenized(model, [text])
        """What the text encoder is called with."""
        self.layer, self.embedded = find_embedding(
            model, self.arguments["ids"], partial(_run_text, model, self.arguments)
        )
        self.tokens = token_names(tokenizer_of(model), self.arguments["ids"][0].tolist())

    def features(self, model: nn.Module, embedded: torch.Tensor) -> torch.Tensor:
        """Return the features ``(N, F)`` of the text, with embeddings ``(N, L, D)`` in place of
        those of its tokens."""
        arguments = {}
        for name, tensor in self.arguments.items():
            arguments[name] = tensor.expand(len(embedded), -1)
        with HookGroup(model) as group:
            group.forward(self.layer, lambda module, args, output: embedded)
            return _run_text(model, arguments)


def find_embedding(
    model: nn.Module, ids: torch.Tensor, run: Callable[[], Any]
) -> tuple[str, torch.Tensor]:
    """Run a model, and return the name of the layer that embeds the token ids ``(N, L)``, with its
    output ``(N, L, D)``.
    """
    embeddings: list[tuple[str, torch.Tensor]] = []

    def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Record the output of an embedding that is given the ids: a forward hook."""
        if args and isinstance(args[0], torch.Tensor) and torch.equal(args[0].cpu(), ids.cpu()):
            embeddings.append((name, output.detach().clone()))

    with torch.no_grad(), untouched(model), HookGroup(model) as group:
        for module, name in modules_of(model).items():
            if isinstance(module, nn.Embedding):
                group.forward(name, partial(note, name))
        run()
    if not embeddings:
        raise ModelError(
            "model must embed token ids with an nn.Embedding for words to be explained, "
            f"{type(model).__name__} does not; leave out words=True"
        )
    return embeddings[0]


def _functions(model: nn.Module) -> tuple[Any, Any] | None:
    """The methods of an image-text model that give features of photos and of texts; None without
    both."""
    for of_image, of_text in _PAIRS:
        pair = (getattr(model, of_image, None), getattr(model, of_text, None))
        if all(map(callable, pair)):
            return pair
    return None


def _scores(
    scorer: nn.Module,
    text_features: Mapping[str, torch.Tensor],
    texts_with_words: Mapping[str, _Words],
    x: torch.Tensor,
    /,
    **words: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Logits of labels ``(N, K)``, and of each text ``(N, 1, 1)``, a shape that is not taken for
    scores of classes; ``text_features`` has ``(D,)`` for each text's name, ``words`` other token
    embeddings of some."""
    image_features, _ = _functions(scorer)  # type: ignore[misc]
    of_photos = F.normalize(_pooled(image_features(x)), dim=-1)
    of_labels: Any = scorer.features_of_labels
    output = {}
    if of_labels is not None:
        output["logits"] = _to_logits(scorer, of_photos @ of_labels.to(of_photos).T)
    for name, features in text_features.items():
        of_text = features.to(of_photos)
        if name in words:
            of_text = F.normalize(texts_with_words[name].features(scorer, words[name]), dim=-1)
        output[name] = _to_logits(scorer, (of_photos * of_text).sum(-1))[:, None, None]
    return output


def _to_logits(model: nn.Module, cosines: torch.Tensor) -> torch.Tensor:
    """The logits of an image-text model from cosines, by the scale and bias that CLIP, SigLIP or
    ALIGN have as parameters."""
    log_scale = getattr(model, "logit_scale", None)  # CLIP and SigLIP learn its logarithm
    temperature = getattr(model, "temperature", None)  # of ALIGN
    bias = getattr(model, "logit_bias", None)  # of SigLIP
    logits = cosines
    if isinstance(log_scale, torch.Tensor):
        logits = cosines * log_scale.exp()
    elif isinstance(temperature, torch.Tensor):
        logits = cosines / temperature
    return logits + bias if isinstance(bias, torch.Tensor) else logits


def _features(model: nn.Module, texts: Sequence[Text]) -> torch.Tensor:
    """The features of texts by the model's text encoder, normalised to length one: ``(K, D)``."""
    return F.normalize(_run_text(model, _tokenized(model, texts)), dim=-1)


def _run_text(model: nn.Module, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The features ``(K, F)`` of texts, from the arguments that `_tokenized` makes; not
    normalised."""
    encode_text = _functions(model)[1]  # type: ignore[index]
    options = dict(arguments)
    ids = options.pop("ids")
    return _pooled(encode_text(ids, **options))


def _pooled(output: Any) -> torch.Tensor:
    """The features ``(N, D)`` in the result of an image or text encoder."""
    # they are the result itself, or in an object the first of these that it has
    for name in ("pooler_output", "image_embeds", "text_embeds"):
        output = getattr(output, name, output) if not isinstance(output, torch.Tensor) else output
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        got = summary_of_output(output)
        raise ModelError(
            f"model must give features (N, D) of images and texts, got {got}; wrap it in some that "
            "do"
        )
    return output


def _tokenized(model: nn.Module, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    """The arguments of the text encoder for some texts: "ids" ``(K, L)``, and a mask where the
    tokenizer gives one. Warns of texts that are cut off.
    """
    device = next(model.parameters()).device
    if not isinstance(texts[0].text, str):  # ids were given; texts that come together are of a kind
        return {"ids": torch.tensor([text.text for text in texts], device=device)}
    strings = [text.name for text in texts]
    tokenizer = need_tokenizer(model, f"the text {strings[0]!r}")
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        # tokenizers of open_clip are functions from texts to ids
        ids = tokenizer(strings)
        warn_of_cut(strings, ids, tokenizer)
        return {"ids": ids.to(device)}
    config = getattr(model, "config", None)
    text_config = getattr(config, "text_config", config)
    length = getattr(text_config, "max_position_embeddings", None)
    # SigLIP was trained on texts that are padded to its full length; and texts that are compared,
    # to see whether one is cut off, need one length
    tokenize = partial(
        tokenizer, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )
    tokens = tokenize(strings)
    warn_of_cut(strings, tokens["input_ids"], lambda shorter: tokenize(shorter)["input_ids"])
    arguments = {name: tensor.to(device) for name, tensor in tokens.items()}
    return {"ids": arguments.pop("input_ids"), **arguments}
