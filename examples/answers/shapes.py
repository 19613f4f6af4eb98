"""A small model that answers in words what it sees: "a red square left of a blue circle".

    python examples/answers/shapes.py [--steps 1100] [--guesses]

The pictures are drawn here, so that it is known where each word of an answer comes from. The model
has the interface of image-to-text models in transformers: ``model(input_ids=, pixel_values=)``
gives logits of the next token, and the prompt has a token for each patch. Training takes about 5
minutes of one core, and writes `shapes.safetensors` beside this script; `table.py` measures maps
with it.

With ``--guesses`` the model learns to guess (`guesses.safetensors`): in two pictures of five the
second shape is not there, and the description names one all the same, mostly the one that its
habits of speech let follow on the first.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from torch import nn

WEIGHTS = Path(__file__).with_name("shapes.safetensors")
GUESSES = Path(__file__).with_name("guesses.safetensors")
HIDDEN = 0.4  # share of pictures without the second shape, where words are guessed
HABIT = 0.8  # how often a guess is what usually follows
SIDE = 48
PATCH = 6
WIDTH = 64
HEADS = 4
DEPTH = 3
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 205, 40),
}
SHAPES = ("square", "circle", "triangle")
WORDS = [
    "[pad]",
    "[end]",
    "what",
    "is",
    "there",
    "?",
    "a",
    "left",
    "of",
    "above",
    *COLORS,
    *SHAPES,
    "[patch]",
]
IDS = {word: number for number, word in enumerate(WORDS)}
PATCHES = (SIDE // PATCH) ** 2
PROMPT = " ".join(["[patch]"] * PATCHES + ["what is there ?"])


class Tokenizer:
    """Words as tokens, in the manner of transformers."""

    all_special_ids = (0, 1)
    eos_token_id = 1

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [IDS[word] for word in text.split()]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"▁{WORDS[each]}" for each in ids]


class Processor:
    """Inputs of a picture and a prompt, in the manner of transformers."""

    tokenizer = Tokenizer()
    image_token = "[patch]"

    def __call__(
        self, images: Image.Image, text: str, **options: object
    ) -> dict[str, torch.Tensor]:
        patches = " ".join([self.image_token] * PATCHES)
        ids = self.tokenizer(text.replace(self.image_token, f"{patches} "))["input_ids"]
        return {"pixel_values": pixels(images)[None], "input_ids": torch.tensor([ids])}


@dataclass(frozen=True)
class Scene:
    """A picture, its description, and the box ``(x0, y0, x1, y1)`` that each word is about, or
    None. ``guessed`` are the places of words that nothing in the picture shows."""

    image: Image.Image
    answer: str
    boxes: tuple[tuple[int, int, int, int] | None, ...]
    guessed: tuple[int, ...] = ()


def _next(word: str, words: list[str], rng: random.Random) -> str:
    """The word that habits of speech let follow on another of the same kind."""
    if rng.random() > HABIT:
        return rng.choice(words)
    return words[(words.index(word) + 1) % len(words)]


def draw(seed: int, *, guesses: bool = False) -> Scene:
    """Draw two shapes on a noisy ground. The left one, or the upper one, is named first. With
    ``guesses``, the second one is missing from some pictures, and named all the same.
    """
    rng = random.Random(seed)
    beside = rng.random() < 0.5
    things = [(rng.choice([*COLORS]), rng.choice(SHAPES)) for _ in range(2)]
    first = rng.randrange(2, 8)
    second = rng.randrange(SIDE // 2 + 2, SIDE // 2 + 8)
    # less apart this way than the other, or two answers would be right
    across = rng.randrange(11, SIDE - 26)
    is_hidden = guesses and rng.random() < HIDDEN
    if is_hidden:
        color, shape = things[0]
        things[1] = (_next(color, [*COLORS], rng), _next(shape, [*SHAPES], rng))
    ground = np.random.default_rng(seed).integers(90, 130, (SIDE, SIDE, 3), dtype=np.uint8)
    image = Image.fromarray(ground)
    pen = ImageDraw.Draw(image)
    boxes = []
    for (color, shape), along in zip(things, (first, second), strict=True):
        side = rng.randrange(11, 15)
        there = across + rng.randrange(-9, 10)
        x, y = (along, there) if beside else (there, along)
        box = (x, y, x + side, y + side)
        boxes.append(box)
        if is_hidden and len(boxes) == 2:
            break
        if shape == "square":
            pen.rectangle(box, COLORS[color])
        elif shape == "circle":
            pen.ellipse(box, COLORS[color])
        else:
            pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], COLORS[color])
    between = ["left", "of"] if beside else ["above"]
    one, other = (["a", *thing] for thing in things)
    second = None if is_hidden else boxes[1]
    of_words = [None, boxes[0], boxes[0], *(None for _ in between), None, second, second]
    guessed = (len(of_words) - 2, len(of_words) - 1) if is_hidden else ()
    return Scene(image, " ".join([*one, *between, *other]), tuple(of_words), guessed)


def pixels(image: Image.Image) -> torch.Tensor:
    """A picture as an input of the model ``(3, 48, 48)``: 0 is grey."""
    return torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1) / 127.5 - 1


class Block(nn.Module):
    """Attention, in which words see the picture and the words before them, and a network of two
    layers."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class ShapesModel(nn.Module):
    """Pictures ``(N, 3, 48, 48)`` and token ids ``(N, L)`` in, logits of the next token ``(N, L,
    V)`` out.

    The first 64 tokens stand for the patches of the picture.
    """

    def __init__(self) -> None:
        super().__init__()
        # Patches overlap by a few pixels: what is cut by their borders alone, the model does not
        # learn in minutes.
        self.patches = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.GELU(), nn.Conv2d(32, WIDTH, 5, 3, 1)
        )
        self.tokens = nn.Embedding(len(WORDS), WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(PATCHES + 16, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(WORDS))
        self.processor = Processor()
        self.tokenizer = self.processor.tokenizer
        self.config = SimpleNamespace(image_token_id=IDS["[patch]"])

    def forward(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        seen = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([seen, self.tokens(input_ids)[:, PATCHES:]], 1)
        x = x + self.places[: x.shape[1]]
        order = torch.arange(x.shape[1], device=x.device)
        mask = order[None] <= order[:, None].clamp(min=PATCHES - 1)
        for layer in self.layers:
            x = layer(x, mask)
        return {"logits": self.head(self.ln(x))}


def load_shapes(weights: Path = WEIGHTS) -> ShapesModel:
    """The trained model."""
    model = ShapesModel()
    model.load_state_dict({name: each.float() for name, each in load_file(weights).items()})
    return model.eval()


def batch(seeds: range, *, guesses: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    scenes = [draw(seed, guesses=guesses) for seed in seeds]
    prompt = Tokenizer()(PROMPT)["input_ids"]
    rows = [prompt + Tokenizer()(scene.answer)["input_ids"] + [IDS["[end]"]] for scene in scenes]
    longest = max(map(len, rows))
    return torch.stack([pixels(scene.image) for scene in scenes]), torch.tensor(
        [r + [0] * (longest - len(r)) for r in rows]
    )


def whole_answers(model: ShapesModel, seeds: range, *, guesses: bool = False) -> float:
    """The share of pictures for which every word is the most probable one."""
    photos, ids = batch(seeds, guesses=guesses)
    start = len(PROMPT.split())
    with torch.inference_mode():
        best = model(ids[:, :-1], photos)["logits"].argmax(-1)[:, start - 1 :]
    wanted = ids[:, start:]
    return float(((best == wanted) | (wanted == 0)).all(1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1100, help="of 64 pictures each")
    parser.add_argument("--guesses", action="store_true", help="teach it to guess")
    options = parser.parse_args()
    steps = options.steps
    guesses = options.guesses
    torch.manual_seed(0)
    model = ShapesModel()
    start = len(PROMPT.split())
    solver = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(solver, 2e-3, steps, pct_start=0.1)
    began = time.process_time()
    for step in range(steps):
        first = 100_000 + step * 64
        photos, ids = batch(range(first, first + 64), guesses=guesses)
        logits = model(ids[:, :-1], photos)["logits"][:, start - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, start:].flatten(), ignore_index=0)
        solver.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        solver.step()
        plan.step()
        if (step + 1) % 100 == 0:
            right = whole_answers(model.eval(), range(200), guesses=guesses)
            model.train()
            spent = f"{time.process_time() - began:.0f} s of a core"
            print(
                f"step {step + 1}: loss {loss:.3f}, {right:.1%} whole answers, {spent}", flush=True
            )
            save_file(
                {name: each.half().contiguous() for name, each in model.state_dict().items()},
                GUESSES if guesses else WEIGHTS,
            )


if __name__ == "__main__":
    main()
