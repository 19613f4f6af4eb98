"""What is known of each word, measured on pictures of which it is known what each word is about.

    python examples/answers/words.py [--pictures 30] [--part choice|maps|grounding|evidence|cost]

choice: rules that agreement and grounding could follow, on pictures that are kept for the choice:
none of them is measured below, and the model was trained on neither. maps: the share of a word's
map in the box of its shape, by method, with 95 % intervals over pictures. grounding: how well the
words that a model guesses are told from those that it sees (`shapes.py --guesses`), as the area
under the curve, with an interval of pictures that are drawn again with replacement. evidence: the
size of sets that are sufficient for a word, beside those of a plain greedy search with as many
passes. cost: what twelve words take beside one.
"""

from __future__ import annotations

import argparse
import itertools
import random
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
from explain.answers.grounding import Grounding
from explain.answers.maps import FLOOR
from explain.answers.scoring import Scorer

ASK = "what is there ?"
CELLS = SIDE // PATCH
METHODS = ("agreement", "occlusion", "attnlrp", "inputxgradient", "integratedgradients", "saliency")
KEPT = 0.9
CHOICE = 0  # the first seed of the pictures that rules are chosen on
MEASURED = 50_000  # of those that are measured
AGAIN = 500  # samples of pictures, of an interval


def inside(box: tuple[int, int, int, int]) -> torch.Tensor:
    """Which patches a box touches ``(8, 8)``."""
    mask = torch.zeros(CELLS, CELLS)
    x0, y0, x1, y1 = (edge // PATCH for edge in box)
    mask[y0 : y1 + 1, x0 : x1 + 1] = 1
    return mask


def described(model: ShapesModel, count: int, first: int = MEASURED) -> Iterator[Scene]:
    """Pictures from a ``first`` seed on that the model describes without a mistake."""
    scenes = (
        draw(seed)
        for seed in itertools.count(first)
        if whole_answers(model, range(seed, seed + 1)) == 1
    )
    return itertools.islice(scenes, count)


def named(scene: Scene) -> list[int]:
    """The numbers of the words that name a color or a shape."""
    words = scene.answer.split()
    return [i for i, word in enumerate(words) if word in COLORS or word in SHAPES]


def interval(values: list[float], form: str = ".0%") -> str:
    """The mean of one figure for each picture, with a 95 % interval."""
    spread = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):{form}} ± {spread:{form}}"


def share(answered: Answered, number: int, scene: Scene) -> float:
    """The share of a word's map, as it is shown, in the box of its shape."""
    shown = F.adaptive_avg_pool2d(answered.words[number].attribution.cells.abs(), CELLS)[0]
    return share_of(shown, answered.numbers[number], scene)


def share_of(shown: torch.Tensor, word: int, scene: Scene) -> float:
    """The share of a map ``(8, 8)`` in the box of a word's shape."""
    box = scene.boxes[word]
    assert box is not None
    return float((shown * inside(box)).sum() / shown.sum().clamp(min=1e-12))


def choice(count: int) -> None:
    model = load_shapes()
    asker = AnswerExplainer(model)
    shares: dict[str, list[float]] = {}
    for scene in described(model, count, CHOICE):
        words = named(scene)
        both = [
            asker(scene.image, ASK, answer=scene.answer, words=words, method=method)
            for method in ("occlusion", "attnlrp")
        ]
        of_words: dict[str, list[float]] = {}
        for number, word in enumerate(words):
            drops, relevance = (
                F.adaptive_avg_pool2d(one.words[number].attribution.values, CELLS)[0].clamp(min=0)
                for one in both
            )
            one, other = (part / part.sum().clamp(min=1e-12) for part in (drops, relevance))
            rules = {
                "drops": drops,
                "relevance": relevance,
                "the mean of their shares": one + other,
                "the smaller of their shares": torch.minimum(one, other),
                "the root of their product": (drops * relevance).sqrt(),
                "their product": drops * relevance,
                "their product, with a floor (agreement)": (drops + FLOOR) * relevance,
            }
            for rule, shown in rules.items():
                of_words.setdefault(rule, []).append(share_of(shown, word, scene))
        for rule, values in of_words.items():
            shares.setdefault(rule, []).append(statistics.mean(values))
    print("| rule | in the word's shape |\n|---|---|")
    for rule, values in shares.items():
        print(f"| {rule} | {interval(values)} |")
    losses = {
        "without the photo": lambda one: one.without_image,
        "without the part": lambda one: one.without_part,
        "without either, the mean": lambda one: (one.without_image + one.without_part) / 2,
        "without either, the most (grounding)": lambda one: min(
            one.without_image, one.without_part
        ),
    }
    found = list(marked(count, CHOICE))
    print("| what is lost | area under the curve |\n|---|---|")
    for name, left in losses.items():
        values = [
            [(1 - left(word) / word.probability, is_guessed) for word, is_guessed in words]
            for words in found
        ]
        print(f"| {name} | {area_with_interval(values)} |", flush=True)


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


def area(values: list[tuple[float, bool]]) -> float:
    """The area under the curve: how often a grounded word has a larger value than a guessed one."""
    grounded = torch.tensor([value for value, is_guessed in values if not is_guessed])
    guessed = torch.tensor([value for value, is_guessed in values if is_guessed])
    differences = grounded[:, None] - guessed
    return float(((differences > 0).float() + 0.5 * (differences == 0)).mean())


def area_with_interval(of_pictures: list[list[tuple[float, bool]]]) -> str:
    """The area under the curve of the words of some pictures, with a 95 % interval of pictures
    that are drawn again."""
    rng = random.Random(0)
    areas = sorted(
        area(list(itertools.chain(*rng.choices(of_pictures, k=len(of_pictures)))))
        for _ in range(AGAIN)
    )
    whole = area(list(itertools.chain(*of_pictures)))
    return f"{whole:.3f} ({areas[AGAIN // 40]:.3f} to {areas[-AGAIN // 40]:.3f})"


def marked(count: int, first: int) -> Iterator[list[tuple[Grounding, bool]]]:
    """For each of ``count`` pictures, what grounds its words, and whether they are guessed."""
    asker = AnswerExplainer(load_shapes(GUESSES))
    for seed in range(first, first + count):
        scene = draw(seed, guesses=True)
        answered = asker(scene.image, ASK, method="occlusion")
        truth = scene.answer.split()
        if len(answered.texts) != len(truth):
            continue
        words = []
        for number in named(scene):
            word = answered.words[number]
            is_guessed = number in scene.guessed
            if is_guessed or word.text == truth[number]:
                words.append((word.grounding, is_guessed))
        yield words


def grounding(count: int) -> None:
    found = list(marked(count, MEASURED))
    marks: dict[tuple[bool, str], int] = {}
    for word, is_guessed in itertools.chain(*found):
        key = (is_guessed, word.mark)
        marks[key] = marks.get(key, 0) + 1
    values = [[(word.value, is_guessed) for word, is_guessed in words] for words in found]
    print(f"area under the curve {area_with_interval(values)}")
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
    sizes: dict[int, list[list[tuple[int, int]]]] = {budget: [] for budget in budgets}
    for scene in described(model, count):
        words = named(scene)
        answered = asker(scene.image, ASK, answer=scene.answer, words=words, method="occlusion")
        for budget in budgets:
            pairs = []
            for number, word in enumerate(words):
                ours = answered.evidence(number, budget=budget)
                size = CELLS * CELLS if ours.proof == "none" else round(ours.size * CELLS**2)
                pairs.append((size, greedy(answered.scorer, word, budget)))
            sizes[budget].append(pairs)
    print("| passes | squares of 64 here | greedy | no larger | smaller |\n|---|---|---|---|---|")
    for budget, of_pictures in sizes.items():
        of_sizes = [zip(*pairs, strict=True) for pairs in of_pictures]
        here, there = zip(*(map(statistics.mean, both) for both in of_sizes), strict=True)
        no_larger = [statistics.mean(a <= b for a, b in pairs) for pairs in of_pictures]
        smaller = [statistics.mean(a < b for a, b in pairs) for pairs in of_pictures]
        print(
            f"| {budget} | {interval(list(here), '.1f')} | {interval(list(there), '.1f')} "
            f"| {interval(no_larger)} | {interval(smaller)} |"
        )


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


PARTS = {"choice": choice, "maps": maps, "grounding": grounding, "evidence": evidence, "cost": cost}


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
