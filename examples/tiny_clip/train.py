"""Train the text tower of tiny-clip on what `prepare.py` computed, and write the shipped files.

    python examples/tiny_clip/train.py work/ [--steps 1200]

At every step, each of the 200 classes gets one of its texts at random: its name, a synonym or a
short description of `examples/bundled/texts.txt`, most of them in a template. Photos must find the
text of their class; half of what they are to find is what `tiny-transformer` says of the photo. One
word in twenty is spelled in pieces, so that pieces are learned too. Takes a few minutes of one
core. The files are `tiny_clip.safetensors` (half precision) and `tiny_clip.txt` in
`explain/models/`; the new sha256 is printed, and belongs into `explain/models/bundled.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from explain.models import load
from explain.models.bundled import (
    LENGTH,
    PAD,
    START,
    UNKNOWN,
    VOCABULARY,
    WEIGHTS,
    TinyCLIP,
    WordPieces,
    words,
)

TEXTS = Path(__file__).resolve().parents[1] / "bundled" / "texts.txt"
TEMPLATES = """{} | a {} | the {} | a photo of a {} | a photo of the {} | a picture of a {} | an image of the {}
a small photo of a {} | a blurry photo of the {} | this is a {} | there is a {} | a close view of a {}
a good picture of the {} | a dark photo of a {} | one {} | some {} | a photo of {} | a picture with {}"""
BATCH = 512


def phrases() -> list[list[str]]:
    """The texts of each class: its name, the synonyms, the descriptions."""
    found = [line.split(" | ") for line in TEXTS.read_text("utf-8").splitlines()]
    synonyms = getattr(load("tiny").categories, "synonyms", ())
    rows = [[name, *more.split(", "), *others] for name, more, *others in found]
    return [
        [*row, *(each for each in known if each.isascii())]
        for row, known in zip(rows, synonyms, strict=True)
    ]


def templates() -> list[str]:
    return [each for line in TEMPLATES.splitlines() for each in line.split(" | ")]


def make_vocabulary(texts: list[list[str]]) -> list[str]:
    """Every word of the texts and templates, letters, and the most frequent ends and beginnings of
    words."""
    known = Counter(word for row in texts for text in row for word in words(text))
    known.update(word for each in templates() for word in words(each.format("")))
    parts = Counter(f"##{word[-n:]}" for word in known for n in (1, 2, 3, 4) if len(word) > n)
    parts.update(word[:n] for word in known for n in (2, 3) if len(word) > n)
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789"]
    pieces = [piece for piece, _ in parts.most_common(200) if len(piece.removeprefix("##")) > 1]
    return list(
        dict.fromkeys(
            [
                PAD,
                START,
                UNKNOWN,
                *letters,
                *(f"##{each}" for each in letters),
                *pieces,
                *sorted(known),
            ]
        )
    )


def spelled(tokenizer: WordPieces, text: str) -> list[int]:
    """The ids of a text with one word in twenty in pieces."""
    row = [tokenizer.ids[START]]
    for word in words(text):
        cut = random.randrange(1, len(word)) if len(word) > 2 and random.random() < 0.05 else 0
        row += tokenizer.pieces(word[:cut]) + tokenizer.pieces(word[cut:], "##" if cut else "")
    return (row + [tokenizer.ids[PAD]] * LENGTH)[:LENGTH]


def draw(texts: list[list[str]]) -> list[str]:
    """A text for each class: half of the time by its name."""
    chosen = [row[0] if random.random() < 0.5 else random.choice(row[1:]) for row in texts]
    patterns = templates()
    return [
        text if len(words(text)) > 5 else random.choice(patterns).format(text) for text in chosen
    ]


def features(model: TinyCLIP, tower: torch.Tensor) -> torch.Tensor:
    return F.normalize(model.image_projection(tower), dim=-1)


def accuracy(
    model: TinyCLIP, tokenizer: WordPieces, data: tuple[torch.Tensor, torch.Tensor], template: str
) -> float:
    """Top-1 accuracy with the labels in a template."""
    model.eval()
    with torch.inference_mode():
        labels = F.normalize(
            model.encode_text(tokenizer([template.format(row[0]) for row in phrases()])), dim=-1
        )
        found = (features(model, data[0]) @ labels.T).argmax(1)
    model.train()
    return float((found == data[1]).float().mean())


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    saved = np.load(path)
    return torch.from_numpy(saved["features"]).float(), torch.from_numpy(saved["labels"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, help="the folder that prepare.py wrote to")
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    training = read(options.work / "training.npz")
    validation = read(options.work / "validation.npz")
    head = load("tiny-transformer").model.head
    with torch.inference_mode():
        teacher = head(training[0]).softmax(1)
    texts = phrases()
    tokenizer = WordPieces(make_vocabulary(texts))
    model = TinyCLIP(len(tokenizer.ids))
    torch.nn.init.eye_(model.image_projection.weight)
    torch.nn.init.normal_(model.token_embedding.weight, std=0.3)
    own = {name: p for name, p in model.named_parameters() if not name.startswith("image_tower")}
    solver = torch.optim.AdamW(own.values(), lr=1.5e-3, weight_decay=0.02)
    plan = torch.optim.lr_scheduler.OneCycleLR(solver, 1.5e-3, options.steps, pct_start=0.1)
    started = time.perf_counter()
    losses = []
    for step in range(options.steps):
        ids = torch.tensor([spelled(tokenizer, text) for text in draw(texts)])
        of_texts = F.normalize(model.encode_text(ids), dim=-1)
        chosen = torch.randint(len(training[0]), (BATCH,))
        wanted = 0.5 * teacher[chosen] + 0.5 * F.one_hot(training[1][chosen], len(texts))
        loss = F.cross_entropy(
            model.logit_scale.exp() * features(model, training[0][chosen]) @ of_texts.T, wanted
        )
        solver.zero_grad()
        loss.backward()
        solver.step()
        plan.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            said = (
                f"{accuracy(model, tokenizer, validation, 'a photo of a {}'):.2%} of the "
                "validation photos"
            )
            print(
                f"step {step + 1}: loss {np.mean(losses):.3f}, {said}, "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
            losses = []
            write(model, tokenizer)
    print(
        f"{WEIGHTS.stat().st_size / 1e6:.2f} MB, sha256 "
        f"{hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()}"
    )


def write(model: TinyCLIP, tokenizer: WordPieces) -> None:
    state = {name: each.detach().half().contiguous() for name, each in model.state_dict().items()}
    save_file(
        {name: each for name, each in state.items() if not name.startswith("image_tower")}, WEIGHTS
    )
    VOCABULARY.write_text("\n".join(tokenizer.ids) + "\n", "utf-8")


if __name__ == "__main__":
    main()
