"""What is known of each word, measured on pictures of which it is known what each word is about.

    python examples/answers/words.py [--pictures 30] [--part maps|grounding|evidence|cost]

maps: the share of a word's map in the box of its shape, by method, with 95 % intervals over
pictures that the model was not trained on. grounding: how well the words that a model guesses are
told from those that it sees (`shapes.py --guesses`), as the area under the curve. evidence: the
size of sets that are sufficient for a word, beside those of a plain greedy search with as many
passes. cost: what twelve words take beside one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from shapes import (
    COLORS,
    GUESSES,
    PATCH,
    SHAPES,
    SIDE,
    Scene,
    ShapesModel,
    draw,
    load_shapes,
    whole_answers,
)

from explain.answers import Answered, AnswerExplainer
from explain.answers.scoring import Scorer

ASK = "what is there ?"
CELLS = SIDE // PATCH
METHODS = ("agreement", "occlusion", "attnlrp", "inputxgradient", "integratedgradients", "saliency")
KEPT = 0.9


def inside(box: tuple[int, int, int, int]) -> torch.Tensor:
    """Which patches a box touches ``(8, 8)``."""
    mask = torch.zeros(CELLS, CELLS)
    x0, y0, x1, y1 = (edge // PATCH for edge in box)
    mask[y0 : y1 + 1, x0 : x1 + 1] = 1
    return mask


def described(model: ShapesModel, count: int) -> Iterator[Scene]:
    """Pictures that the model describes without a mistake."""
    scenes = (
        draw(seed) for seed in range(10**6) if whole_answers(model, range(seed, seed + 1)) == 1
    )
    return itertools.islice(scenes, count)


def named(scene: Scene) -> list[int]:
    """The numbers of the words that name a color or a shape."""
    words = scene.answer.split()
    return [i for i, word in enumerate(words) if word in COLORS or word in SHAPES]


def interval(values: list[float]) -> str:
    """The mean of one figure for each picture, with a 95 % interval."""
    spread = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.0%} ± {spread:.0%}"


def share(answered: Answered, number: int, scene: Scene) -> float:
    """The share of a word's map, as it is shown, in the box of its shape."""
    box = scene.boxes[answered.numbers[number]]
    assert box is not None
    shown = F.adaptive_avg_pool2d(answered.words[number].attribution.cells.abs(), CELLS)[0]
    return float((shown * inside(box)).sum() / shown.sum().clamp(min=1e-12))


def maps(count: int) -> None:
    model = load_shapes()
    asker = AnswerExplainer(model)
    scenes = list(described(model, count))
    print("| method | in the word's shape |\n|---|---|")
    for method in METHODS:
        shares = []
        for scene in scenes:
            words = named(scene)
            answered = asker(scene.image, ASK, answer=scene.answer, words=words, method=method)
            of_words = [share(answered, number, scene) for number in range(len(words))]
            shares.append(statistics.mean(of_words))
        print(f"| `{method}` | {interval(shares)} |", flush=True)


def area(grounded: list[float], guessed: list[float]) -> float:
    """The area under the curve: how often a grounded word has the larger value."""
    pairs = [(a > b) + 0.5 * (a == b) for a in grounded for b in guessed]
    return statistics.mean(pairs)


def grounding(count: int) -> None:
    asker = AnswerExplainer(load_shapes(GUESSES))
    values: dict[bool, list[float]] = {True: [], False: []}
    marks: dict[tuple[bool, str], int] = {}
    for seed in range(count):
        scene = draw(seed, guesses=True)
        answered = asker(scene.image, ASK, method="occlusion")
        truth = scene.answer.split()
        if len(answered.texts) != len(truth):
            continue
        for number in named(scene):
            word = answered.words[number]
            is_guessed = number in scene.guessed
            if not is_guessed and word.text != truth[number]:
                continue
            values[is_guessed].append(word.grounding.value)
            key = (is_guessed, word.grounding.mark)
            marks[key] = marks.get(key, 0) + 1
    print(f"{len(values[False])} words that are seen, {len(values[True])} that are guessed")
    print(f"area under the curve {area(values[False], values[True]):.3f}")
    for (is_guessed, mark), number in sorted(marks.items()):
        print(f"{'guessed' if is_guessed else 'seen'}: {mark} {number}")


def greedy(scorer: Scorer, word: int, budget: int) -> int:
    """The number of squares of a plain greedy search that are enough for a word, within a budget:
    the square whose sight makes the word most probable is shown, until it is probable enough.
    """
    photo = scorer.photo
    blank = photo.mean((2, 3), keepdim=True).expand_as(photo)
    goal = KEPT * float(scorer(photo)[0, word].exp())
    shown = torch.zeros(CELLS * CELLS, dtype=torch.bool)
    spent = 1
    while not bool(shown.all()):
        candidates = (~shown).nonzero()[:, 0].tolist()
        if spent + len(candidates) > budget:
            return CELLS * CELLS  # no set was found
        rows = shown.repeat(len(candidates), 1)
        rows[range(len(candidates)), candidates] = True
        keep = rows.float().reshape(-1, 1, CELLS, CELLS)
        keep = F.interpolate(keep, (SIDE, SIDE))
        scores = scorer(photo * keep + blank * (1 - keep))[:, word].exp()
        spent += len(candidates)
        best = int(scores.argmax())
        shown[candidates[best]] = True
        if float(scores[best]) >= goal:
            break
    return int(shown.sum())


def evidence(count: int) -> None:
    model = load_shapes()
    asker = AnswerExplainer(model)
    budgets = (200, 500, 1000)
    sizes: dict[int, list[tuple[int, int]]] = {budget: [] for budget in budgets}
    for scene in described(model, count):
        words = named(scene)
        answered = asker(scene.image, ASK, answer=scene.answer, words=words, method="occlusion")
        for number, word in enumerate(words):
            for budget in budgets:
                ours = answered.evidence(number, budget=budget)
                size = CELLS * CELLS if ours.proof == "none" else round(ours.size * CELLS**2)
                sizes[budget].append((size, greedy(answered.scorer, word, budget)))
    print("| passes | squares of 64 here | greedy | no larger | smaller |\n|---|---|---|---|---|")
    for budget, pairs in sizes.items():
        here, there = (statistics.mean(column) for column in zip(*pairs, strict=True))
        no_larger = statistics.mean(a <= b for a, b in pairs)
        smaller = statistics.mean(a < b for a, b in pairs)
        print(f"| {budget} | {here:.1f} | {there:.1f} | {no_larger:.0%} | {smaller:.0%} |")


def cost(count: int) -> None:
    asker = AnswerExplainer(load_shapes())
    answer = "a red square left of a blue circle above a green"  # 11 words, and one more
    answer = f"{answer} triangle"
    print("| method | one word | twelve words | times |\n|---|---|---|---|")
    for method in ("occlusion", "saliency", "inputxgradient", "agreement"):
        spent = {}
        for words in ([11], None):
            seconds = []
            for _ in range(count):
                began = time.process_time()
                asker(draw(3).image, ASK, answer=answer, words=words, method=method)
                seconds.append(time.process_time() - began)
            spent[words is None] = min(seconds)
        times = spent[True] / spent[False]
        print(f"| `{method}` | {spent[False]:.2f} s | {spent[True]:.2f} s | {times:.2f} |")


PARTS = {"maps": maps, "grounding": grounding, "evidence": evidence, "cost": cost}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=30)
    parser.add_argument("--part", choices=PARTS, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of maps that are zero
    for name, part in PARTS.items():
        if options.part in (None, name):
            print(f"\n{name}", flush=True)
            part(min(options.pictures, 5) if name == "cost" else options.pictures)


if __name__ == "__main__":
    main()
