"""The tables and the figure of assets/tables/parts.md, from what measure.py and in_domain.py stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from dimensions import (
    by_intervention,
    complete,
    completeness,
    drops,
    expected,
    mean_of,
    rank_correlation,
    sensitivity,
    shapley,
)
from PIL import Image
from scenes import PARTS, draw, masks, render
from train import background_of_class

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "assets" / "tables" / "parts.md"
FIGURE = ROOT / "assets" / "parts.png"
COLOURS = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0), (204, 121, 167))
BLIND = ("noise", "centre blob", "edges", "local contrast", "mean colour", "uniform")
REFERENCES = ("each part removed", "Shapley values", "each part exchanged")
COLUMNS = (
    "completeness",
    "sufficient set",
    "kept",
    "lost",
    "not distracted",
    "correctness",
    "with Shapley",
    "across scenes",
    "contrastivity",
)


def with_references(scene: Mapping[str, Any]) -> dict[str, Any]:
    """The methods of a scene, and as further ones the importances that interventions give."""
    fall = drops(scene["scores"])
    objects = scene["scores"][-1] - np.asarray(scene["objects"])
    truths = zip(
        REFERENCES, (fall, shapley(scene["scores"]), np.asarray(scene["exchanged"])), strict=True
    )
    found = {}
    for name, values in truths:
        each = np.concatenate([values, objects])
        rivals = by_intervention(scene) if name == REFERENCES[0] else []
        found[name] = {
            "sums": each.tolist(),
            "positive": float(each.clip(0).sum()),
            "rivals": rivals,
        }
    return {**found, **scene["methods"]}


def judged(scenes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every dimension for each method, over scenes of one network; methods with the same maps are
    one."""
    each = [(scene, with_references(scene)) for scene in scenes]
    found: dict[str, dict[str, Any]] = {}
    for names in alike(each):
        name = names[0]
        mine = {
            number: (scene, methods[name])
            for number, (scene, methods) in enumerate(each)
            if name in methods
        }
        values: dict[str, dict[int, float]] = {
            "correctness": {},
            "with Shapley": {},
            "contrastivity": {},
        }
        for number, (scene, method) in mine.items():
            sums = method["sums"][: len(PARTS)]
            values["correctness"][number] = rank_correlation(drops(scene["scores"]), sums)
            values["with Shapley"][number] = rank_correlation(shapley(scene["scores"]), sums)
            if method["rivals"] and expected(scene):
                values["contrastivity"][number] = sensitivity(*method["rivals"])
        checks = [
            completeness(method["sums"], method["positive"], scene)
            for scene, method in mine.values()
        ]
        found[name] = {dimension: mean_of(list(of.values())) for dimension, of in values.items()}
        found[name] |= {
            "completeness": complete(checks),
            "across scenes": across(list(mine.values())),
        }
        found[name] |= {"values": values, "names": names}
    return found


def alike(each: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[list[str]]:
    """The methods, in groups that give the same shares to all parts and objects of all scenes."""
    groups: dict[Any, list[str]] = {}
    for name in sorted({name for _, methods in each for name in methods}):
        shares = [
            tuple(round(v / max(methods[name]["positive"], 1e-9), 4) for v in methods[name]["sums"])
            for _, methods in each
            if name in methods
        ]
        groups.setdefault(name if name in (*REFERENCES, *BLIND) else tuple(shares), []).append(name)
    return list(groups.values())


def across(mine: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float:
    """The rank correlation of a part's share of the map and of the score over scenes, on average
    over the parts.

    Here a part is compared with itself, so that a map gains nothing by giving more to parts that
    are always large.
    """
    shares = np.array(
        [
            np.array(method["sums"][: len(PARTS)]) / max(method["positive"], 1e-9)
            for _, method in mine
        ]
    )
    truth = np.array([drops(scene["scores"]) / abs(scene["scores"][-1]) for scene, _ in mine])
    return float(np.mean([rank_correlation(shares[:, i], truth[:, i]) for i in range(len(PARTS))]))


def cell(found: Mapping[str, float]) -> str:
    if not found:
        return "–"
    return f"{found['mean']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def in_order(found: Mapping[str, Any]) -> list[str]:
    """References first, control maps last, methods by correctness in between."""
    methods = [name for name in found if name not in (*REFERENCES, *BLIND)]
    methods.sort(key=lambda name: -found[name]["correctness"]["mean"])
    return [*REFERENCES, *methods, *(name for name in BLIND if name in found)]


def above(found: Mapping[str, Any], dimension: str) -> list[str]:
    """The methods that are better than every control map: the mean difference on the same scenes,
    with its interval."""
    kept = []
    for name in (name for name in found if name not in (*REFERENCES, *BLIND)):
        mine = found[name]["values"][dimension]
        differences = []
        for other in (other for other in BLIND if other in found):
            theirs = found[other]["values"][dimension]
            differences.append(
                mean_of([mine[number] - theirs[number] for number in mine if number in theirs])
            )
        if differences and all(each and each["low"] > 0 for each in differences):
            kept.append(name)
    return sorted(kept, key=lambda name: -found[name][dimension]["mean"])


def styled(name: str) -> str:
    if name in REFERENCES:
        return f"**{name}**"
    return f"*{name}*" if name in BLIND else f"`{name}`"


def table(found: Mapping[str, Any]) -> str:
    rows = [("map", "scenes", *COLUMNS), ("---",) * (len(COLUMNS) + 2)]
    for name in in_order(found):
        each = found[name]
        whole = each["completeness"]
        checks = [
            f"{whole[check]:.2f}"
            for check in ("sufficient", "preserved", "deleted", "not distracted")
        ]
        alone = (f"{each['with Shapley']['mean']:.2f}", f"{each['across scenes']:.2f}")
        last = (cell(each["correctness"]), *alone, cell(each["contrastivity"]))
        shown = ", ".join(map(styled, each["names"]))
        rows.append((shown, str(whole["scenes"]), cell(whole), *checks, *last))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def said(scenes: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    """Which methods are above the floor, on how many scenes it was asked, and how steady the order
    is."""
    asked = sum(expected(scene) for scene in scenes)
    lines = [
        (
            f"{len(scenes)} scenes that the network gets right; contrastivity is asked on {asked} of "
            "them."
        )
    ]
    falls = np.array([drops(scene["scores"]) / abs(scene["scores"][-1]) for scene in scenes])
    lines.append(
        f"Without one part, the score falls by {falls.mean():.0%} on average, and by "
        f"{falls.max(1).mean():.0%} without "
        f"the most important one; without all parts by {whole_fall(scenes):.0%}."
    )
    for dimension, shown in (
        ("correctness", "correctness"),
        ("with Shapley", "correctness with Shapley values"),
        ("contrastivity", "contrastivity"),
    ):
        floor = max((found[name][dimension].get("mean", 0.0) for name in BLIND), default=0.0)
        kept = above(found, dimension)
        lines.append(
            f"Better than every control map in **{shown}** (the best of them has {floor:.2f}): "
            f"{listed(kept)}."
        )
    floor = max(found[name]["completeness"]["high"] for name in BLIND)
    kept = [
        name
        for name in in_order(found)
        if name not in REFERENCES and found[name]["completeness"]["low"] > floor
    ]
    lines.append(f"Intervals above those of all control maps in **completeness**: {listed(kept)}.")
    seeds = sorted({scene["seed"] for scene in scenes})
    if len(seeds) > 1:
        orders = []
        for seed in seeds:
            mine = [(scene, scene["methods"]) for scene in scenes if scene["seed"] == seed]
            names = sorted(name for name in found if name not in (*REFERENCES, *BLIND))
            orders.append(
                {
                    name: float(
                        np.mean(
                            [
                                rank_correlation(drops(s["scores"]), m[name]["sums"][: len(PARTS)])
                                for s, m in mine
                                if name in m
                            ]
                        )
                    )
                    for name in names
                    if any(name in m for _, m in mine)
                }
            )
        alike = []
        for one, other in combinations(orders, 2):
            both = sorted(set(one) & set(other))
            alike.append(
                rank_correlation([one[name] for name in both], [other[name] for name in both])
            )
        lines.append(
            "The order of correctness on one seed's scenes correlates with another's by "
            f"{min(alike):.2f} at least."
        )
    return "\n".join(f"- {line}" for line in lines)


def whole_fall(scenes: Sequence[Mapping[str, Any]]) -> float:
    """The share of the score that is lost without any part, on average."""
    return float(
        np.mean(
            [
                (scene["scores"][-1] - scene["scores"][0]) / abs(scene["scores"][-1])
                for scene in scenes
            ]
        )
    )


def background(records: Sequence[Mapping[str, Any]]) -> str:
    """Which maps see that one network decides by the background and the other does not: the same
    scenes."""
    by = {
        name: {(r["seed"], r["scene"]): r for r in records if r["model"] == name}
        for name in ("resnet", "shortcut")
    }
    both = sorted(set(by["resnet"]) & set(by["shortcut"]))
    if not both:
        return ""
    pairs = [(by["resnet"][key], by["shortcut"][key]) for key in both]

    def truth(scene: Mapping[str, Any]) -> float:
        rest = float(
            drops(scene["scores"]).clip(0).sum()
            + (scene["scores"][-1] - np.asarray(scene["objects"])).clip(0).sum()
        )
        own = max(0.0, scene["background"])
        return own / (own + rest) if own + rest > 0 else 0.0

    rows: dict[str, list[tuple[float, float]]] = {
        "each thing removed": [(truth(a), truth(b)) for a, b in pairs]
    }
    for name in sorted(set(pairs[0][0]["methods"]) & set(pairs[0][1]["methods"])):
        values = [
            (
                a["methods"].get(name, {}).get("background"),
                b["methods"].get(name, {}).get("background"),
            )
            for a, b in pairs
        ]
        rows[name] = [(a, b) for a, b in values if a is not None and b is not None]
    share = {
        name: mean_of([(b > a) + (b == a) / 2 for a, b in each])
        for name, each in rows.items()
        if each
    }
    order = sorted(
        share, key=lambda name: (name != "each thing removed", name in BLIND, -share[name]["mean"])
    )
    area = float(np.mean([a["area"] for a, _ in pairs]))
    out = [
        (
            "| map | scenes | more on the background | share there: resnet | shortcut "
            "|\n|---|---|---|---|---|"
        )
    ]
    for name in order:
        first, second = (float(np.mean([pair[i] for pair in rows[name]])) for i in (0, 1))
        shown = f"**{name}**" if name == "each thing removed" else styled(name)
        out.append(
            f"| {shown} | {share[name]['scenes']} | {cell(share[name])} | {first:.0%} | "
            f"{second:.0%} |"
        )
    return (
        f"The background is {area:.0%} of a picture, parts and objects with their rims left "
        "out.\n\n" + "\n".join(out)
    )


def networks(folder: Path) -> str:
    """What the networks reach on new scenes."""
    rows = [
        (
            "| network | whole creatures | one part missing | another background | minutes "
            "|\n|---|---|---|---|---|"
        )
    ]
    for name in ("resnet", "transformer", "shortcut"):
        file = folder / f"{name}.json"
        if file.exists():
            facts = json.loads(file.read_text("utf-8"))
            shares = [
                f"{facts[key]:.1%}"
                for key in ("accuracy", "one part missing", "another background")
            ]
            rows.append(f"| {name} | {' | '.join(shares)} | {facts['minutes']:.0f} |")
    return "\n".join(rows)


def tables(records: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, str]:
    """The tables by the name of their place."""
    found = {"parts-networks": networks(folder)}
    for name in ("resnet", "transformer"):
        mine = [each for each in records if each["model"] == name]
        if mine:
            result = judged(mine)
            found[f"parts-{name}"] = f"{said(mine, result)}\n\n{table(result)}"
    shown = background(records)
    return {**found, "parts-shortcut": shown} if shown else found


def updated(found: Mapping[str, str]) -> None:
    """Write texts between their markers in the page."""
    page = PAGE.read_text("utf-8")
    for name, text in found.items():
        place = re.compile(rf"(<!-- part: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(page):
            raise SystemExit(
                f"assets/tables/parts.md must have a place for {name!r}, got none; add <!-- part: {name} "
                "--> and its end"
            )
        page = place.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)
    PAGE.write_text(page, "utf-8")


def figure(file: Path = FIGURE) -> Path:
    """Two rows of scenes; then one scene, without each of four parts, with another tail, before
    another background; and where its parts are to be seen."""
    scene = draw(3, 7, background_of_class(3))
    seen = masks(scene)
    where = np.full((64, 64, 3), 255, np.uint8)
    where[seen["body"]] = 190
    for part, colour in zip(PARTS, COLOURS, strict=True):
        where[seen[part]] = colour
    changed = [
        scene,
        *(scene.without(part) for part in PARTS[:4]),
        scene.exchanged("tail", 3),
        scene.before((9, 5)),
    ]
    samples = [draw(label, 40 + label, background_of_class(label)) for label in range(16)]
    tiles = [*(render(each) for each in (*samples, *changed)), where]
    large = [cv2.resize(tile, (128, 128), interpolation=cv2.INTER_CUBIC) for tile in tiles]
    framed = [np.pad(tile, ((4, 4), (4, 4), (0, 0)), constant_values=255) for tile in large]
    rows = [np.concatenate(framed[start : start + 8], 1) for start in range(0, len(framed), 8)]
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(rows)).quantize(256).save(file, optimize=True)
    return file
