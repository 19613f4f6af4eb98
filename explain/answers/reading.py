"""What a model reads: its processor's inputs of a photo and a prompt, and the model as a function
of the photo and of the tokens' embeddings."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from PIL import Image
from torch import nn

from explain._utils.errors import ExplainError, ModelError, TargetError, quiet, shown
from explain._utils.modules import floating_parameter
from explain.answers.sampling import Sampling, sampling_of
from explain.data.inputs import Inputs
from explain.models.image_text import PairedProcessor, processor_of
from explain.targets import answer, packed
from explain.targets.tokenizer import beside_weights, image_ids_of, tokenizer_of

PIXELS = packed.PIXELS


@dataclass(frozen=True, eq=False)
class Reader:
    """A model with the processor that makes its inputs of a photo and a prompt."""

    model: nn.Module
    processor: Any

    @classmethod
    def of(cls, model: nn.Module, processor: Any = None) -> "Reader":
        """Find a model's processor, where none is given: its attribute, or the one beside its
        weights. A `ModelError` where there is none, or the model takes no photo."""
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        if PIXELS not in parameters and not takes_any:
            raise ModelError(
                f"model must take a photo as {PIXELS}, {type(model).__name__} takes "
                f"{', '.join(list(parameters)[:3])}; take an image-text model such as LLaVA"
            )
        chosen = processor or getattr(model, "processor", None)
        config = getattr(model, "config", None)
        chosen = chosen or processor_of(partial(beside_weights, config))
        if isinstance(chosen, tuple) and len(chosen) == 2:  # image processor and tokenizer
            chosen = PairedProcessor(*chosen)
        if not callable(chosen):
            raise ModelError(
                f"model must come with its processor, {type(model).__name__} has "
                f"{shown(chosen)}; give processor="
            )
        return cls(model, chosen)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the processor, or of the model; None without one."""
        tokenizer = getattr(self.processor, "tokenizer", None)
        return tokenizer if callable(tokenizer) else tokenizer_of(self.model)

    @property
    def decodes(self) -> bool:
        """Whether the model has a decoder of its own beside the photo (TrOCR, Donut)."""
        return answer.decodes(self.model)

    @property
    def image_ids(self) -> set[int]:
        """The ids of tokens that stand for patches of a photo in a prompt."""
        return image_ids_of(self.model)

    def prompt_of(self, ask: str | None) -> str | None:
        """The text that the processor gets: the question, in the model's chat template if it has
        one; None where there is nothing to ask.
        """
        if getattr(self.processor, "chat_template", None):
            content = [{"type": "image"}]
            if ask:
                content.append({"type": "text", "text": ask})
            chat = [{"role": "user", "content": content}]
            text: str = self.processor.apply_chat_template(chat, add_generation_prompt=True)
            return text
        # nothing is asked, but a prompt has to hold the photo's token, which `read` writes
        return "" if ask is None and self._image_token is not None else ask

    @property
    def _image_token(self) -> str | None:
        """The text of the token that stands for a photo in prompts; None where there is none."""
        if not self.image_ids or self.decodes:  # the photo is not among the tokens
            return None
        for holder in (self.processor, self.tokenizer):
            token = getattr(holder, "image_token", None)
            if token is not None:  # a text, or an object of tokenizers with the text in it
                return str(getattr(token, "content", token))
        if not hasattr(self.tokenizer, "convert_ids_to_tokens"):
            return None
        names: list[str] = self.tokenizer.convert_ids_to_tokens(sorted(self.image_ids))
        return names[0]

    def read(self, photo: Image.Image, prompt: str | None) -> "Reading":
        """Return what the model reads of a photo and a prompt (of `prompt_of`). An `ExplainError`
        where the processor does not take them, or makes no known inputs."""
        token = self._image_token
        lacks_image = token is not None and token not in (prompt or "")
        has_template = bool(getattr(self.processor, "chat_template", None))
        missing_token = TargetError(
            f"ask must hold the token that stands for the photo, {token!r}, got {shown(prompt)}; "
            "leave the template to the processor"
        )
        try:
            inputs = self._processed(photo, prompt)
        except ModelError as error:
            if not lacks_image:
                raise
            if has_template:
                raise missing_token from error
            inputs = {}  # some processors fail without the photo's token; it is added below
        # whether the caller or the processor has to write the photo's token is found by trying
        if lacks_image and not has_template:
            with_token = self._processed(photo, f"{token}{prompt}")
            count = self._image_tokens(inputs)
            # one that adds them by itself (BLIP-2) would have one more with the token
            if count in (0, self._image_tokens(with_token)):
                prompt = f"{token}{prompt}"
                inputs = with_token
        if token is not None and not self._image_tokens(inputs):
            raise missing_token
        # instead of packed patches, photos; and one name for the prompt's tokens, of decoders too
        model, with_photo = packed.with_photos(self.model, inputs)
        model, inputs = answer.with_prompt(model, dict(with_photo), inputs[PIXELS])  # type: ignore[arg-type]

        def pixels_of(image: Image.Image) -> torch.Tensor:
            """What the processor makes of another picture in the place of the photo."""
            processed = self._processed(image, prompt)
            laid_out: Any = packed.with_photos(self.model, processed)[1]
            pixels: torch.Tensor = laid_out[PIXELS]
            return pixels

        tokens = self._tokens(inputs)
        names = inputs.keys() - tokens.keys() - {PIXELS}
        fixed = {name: inputs[name] for name in sorted(names)}
        sampling = sampling_of(photo, pixels_of)
        return Reading(self, model, prompt, sampling=sampling, tokens=tokens, fixed=fixed)

    def _image_tokens(self, inputs: Mapping[str, Any]) -> int:
        """How many tokens of the prompt stand for the photo."""
        ids = inputs.get("input_ids")
        if ids is None:
            return 0
        return sum(token in self.image_ids for token in ids[0].tolist())

    def _processed(self, photo: Image.Image, prompt: str | None) -> dict[str, Any]:
        """The processor's inputs of a photo and a prompt, on the model's device and in its
        precision."""
        # the prompt of a decoder of its own is for the tokenizer alone, below
        words = {} if prompt is None or self.decodes else {"text": prompt}
        try:
            with quiet():
                processed = self.processor(images=photo, **words, return_tensors="pt")
        except ExplainError:
            raise
        except Exception as error:
            raise ModelError(
                f"processor must take images=photo and {', '.join(words) or 'no text'}, "
                f"{type(self.processor).__name__} says: {shown(str(error))}; give another "
                "processor="
            ) from error
        inputs = dict(processed)
        inputs.pop("labels", None)  # of training
        if self.decodes and prompt is not None:
            written = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            inputs[answer.DECODER] = torch.tensor([written])
        if not isinstance(inputs.get(PIXELS), torch.Tensor):
            raise ModelError(
                f"processor must make {PIXELS} of a photo, {type(self.processor).__name__} makes "
                f"{', '.join(inputs) or 'nothing'}; give another processor="
            )
        weight = floating_parameter(self.model)
        for name, value in inputs.items():
            if weight is not None and isinstance(value, torch.Tensor):
                dtype = weight.dtype if value.is_floating_point() else value.dtype
                inputs[name] = value.to(weight.device, dtype)
        return inputs

    def _tokens(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The prompt's tokens "input_ids" ``(1, L)``, and what else has one value for each of them,
        such as masks."""
        ids = inputs.get("input_ids")
        if ids is None:
            raise ModelError(
                f"model must say which token an answer starts with, {type(self.model).__name__} "
                "has no decoder_start_token_id or bos_token_id; set it in model.config"
            )
        tokens = {
            name: value
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and value.shape == ids.shape
        }
        return self._open_ended(tokens)

    def _open_ended(self, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A prompt without the token that would end it, and with the model's own first token, where
        the tokenizer is that of another model (BLIP, GIT)."""
        ids = tokens["input_ids"]
        first = int(ids[0, 0])
        last = int(ids[0, -1])
        ends = {getattr(self.tokenizer, name, None) for name in ("sep_token_id", "eos_token_id")}
        if ids.shape[1] > 1 and last in ends:
            tokens = {name: value[:, :-1] for name, value in tokens.items()}
        text_config = getattr(getattr(self.model, "config", None), "text_config", None)
        own_first = getattr(text_config, "bos_token_id", None)
        # a tokenizer that begins with a class token is a BERT's, whatever model it is beside
        begins_with_class = first == getattr(self.tokenizer, "cls_token_id", None)
        if begins_with_class and isinstance(own_first, int):
            with_own_first = tokens["input_ids"].clone()
            with_own_first[0, 0] = own_first
            tokens["input_ids"] = with_own_first
        return tokens


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model reads of one photo and one prompt. ``tokens`` have a value for each token of the
    prompt, ``(1, L)``; ``fixed`` is what else the processor says of the photo, such as its size.
    """

    reader: Reader
    model: nn.Module
    prompt: str | None
    sampling: Sampling
    tokens: Mapping[str, torch.Tensor]
    fixed: Mapping[str, Any]

    def of_photos(self) -> tuple[nn.Module, Inputs]:
        """The model as one of photos ``(N, 3, h, w)`` and tokens, and its inputs."""
        model = self._as_model(self.sampling.of)
        return model, Inputs(kwargs={PIXELS: self.sampling.photo, **self.tokens}, explained=PIXELS)

    def of_pixels(self) -> tuple[nn.Module, Inputs]:
        """The model as one of its own pixels, laid out as images ``(N, C, H, W)``, with inputs."""
        pixels = self.sampling.pixels
        x = pixels
        # tiles or packed patches of one photo: together an image of one channel
        if pixels.ndim != 4 or len(pixels) > 1:
            x = pixels.reshape(1, 1, -1, pixels.shape[-1])

        def laid_out(images: torch.Tensor) -> torch.Tensor:
            """The images as the model takes them."""
            return images.reshape(len(images) * len(pixels), *pixels.shape[1:])

        model = self._as_model(laid_out)
        return model, Inputs(kwargs={PIXELS: x, **self.tokens}, explained=PIXELS)

    def _as_model(self, pixels_of: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        """The same modules as a model of N images, of which ``pixels_of`` makes the model's own
        pixels, and of their tokens."""
        model = copy.copy(self.model)  # its modules, parameters and hooks are those of the model
        vars(model)["tokenizer"] = self.reader.tokenizer
        model.forward = partial(_run, self.model.forward, pixels_of, dict(self.fixed))
        return model


def _run(
    run: Callable[..., Any],
    pixels_of: Callable[[torch.Tensor], torch.Tensor],
    fixed: Mapping[str, Any],
    /,
    pixel_values: torch.Tensor,
    **tokens: torch.Tensor,
) -> Any:
    """The output of the model's own forward ``run``. What belongs to the photo is repeated for each
    of N images.
    """
    count = len(pixel_values)
    inputs: dict[str, Any] = {PIXELS: pixels_of(pixel_values)}
    for name, value in fixed.items():
        is_tensor = isinstance(value, torch.Tensor)
        inputs[name] = torch.cat([value] * count) if is_tensor else value
    return run(**inputs, **tokens)
