"""Image-text models, with the processors that make their inputs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from explain._utils.errors import ModelError, optional, quiet, raised
from explain.models.files import TIMM
from explain.models.from_code import made_by_code


def load_image_text(name: str) -> tuple[nn.Module, Any]:
    """An image-text model and its processor: of transformers (a folder, or a name on the Hugging
    Face Hub), or of code, whose module has the processor as an attribute. `ModelError` if not."""
    is_folder = Path(name).is_dir()
    if ":" in name.removeprefix(TIMM) and not is_folder:
        module = made_by_code(name)
        if isinstance(module, nn.Module):
            return module, getattr(module, "processor", None)
        raise _unsuitable(name, f"it gives a {type(module).__name__}")
    # on the Hub, names are "owner/name"; a dot begins a path
    if not is_folder and (name.count("/") != 1 or name.startswith((TIMM, "."))):
        raise _unsuitable(name, "it is neither a folder nor a name on the Hugging Face Hub")
    transformers = optional("transformers", f"for the model {name!r}", "transformers", ModelError)
    try:

        def loaded(kind: str, **options: Any) -> Any:
            """What a class of transformers loads."""
            return getattr(transformers, kind).from_pretrained(
                name, trust_remote_code=False, **options
            )

        with quiet(), _bars_in_terminals(transformers.utils.logging):
            model, report = loaded("AutoModelForImageTextToText", output_loading_info=True)
            # from weights of another network, transformers makes a model with random ones in it
            saved_classes = list(model.config.architectures or [type(model).__name__])
            is_another = type(model).__name__ not in saved_classes
            if report["missing_keys"] or (is_another and report["unexpected_keys"]):
                raise _unsuitable(name, f"its weights are those of a {saved_classes[0]}")
            processor = processor_of(loaded)
    except ModelError:
        raise
    except Exception as error:
        raise _unsuitable(name, f"transformers {raised(error)}") from error
    return model.eval(), processor


def processor_of(load: Callable[[str], Any]) -> Any:
    """The processor of a model whose parts ``load`` gives, by the names of their classes in
    transformers; one of both parts where there is no joint one (ViT-GPT2).
    """
    processor = None
    with suppress(Exception):  # such as that there is none
        processor = load("AutoProcessor")
    if hasattr(processor, "image_processor"):
        return processor
    photos = load("AutoImageProcessor")
    tokenizer = load("AutoTokenizer")
    # None is a part that ``load`` does not find
    return processor if None in (photos, tokenizer) else PairedProcessor(photos, tokenizer)


@dataclass(frozen=True)
class PairedProcessor:
    """An image processor and a tokenizer as one processor, which takes photos with a prompt or
    without."""

    photos: Callable[..., Any]
    tokenizer: Callable[..., Any]

    def __call__(self, images: Any, text: Any = None, **options: Any) -> dict[str, Any]:
        inputs = dict(self.photos(images=images, **options))
        if text is not None:
            inputs |= dict(self.tokenizer(text, **options))
        return inputs


@contextmanager
def _bars_in_terminals(bars: Any) -> Iterator[None]:
    """Outside of terminals, hide the progress bars of transformers within the block; ``bars`` is
    its module that has them."""
    is_hidden = bars.is_progress_bar_enabled() and not (sys.stderr and sys.stderr.isatty())
    if is_hidden:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if is_hidden:
            bars.enable_progress_bar()


def _unsuitable(name: str, why: str) -> ModelError:
    """The error for a name that stands for no image-text model."""
    return ModelError(
        f"model {name!r} must be an image-text model that answers in words, but {why}; name one of "
        "transformers, such as llava-hf/llava-1.5-7b-hf, or its folder"
    )
