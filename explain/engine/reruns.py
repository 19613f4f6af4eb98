"""Altered rows: the same question asked of altered inputs or feature maps, in pieces, once for all that is asked.

Rows are built when they are needed and forgotten when their results have been added up, so memory does not grow with
their number. With the first piece goes a row that is not altered: its score must be the one that is known already.
Where it is not, the network lets rows depend on each other, and every row is run alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from explain.engine.altered import Alteration, Rows, Scores, Unaltered
from explain.engine.asked import Asked, DependentRowsError, check_width, in_fastest_layout, running_altered
from explain.engine.asks import Ask
from explain.engine.behind import behind_layer
from explain.engine.evidence import Evidence, Origin
from explain.engine.forward import Choice
from explain.engine.pieces import Readers, Told, in_pieces
from explain.engine.plan import Plan, Stream
from explain.engine.work import Pace, agree
from explain.errors import ModelError, note
from explain.hooks import calculating
from explain.inputs import Path


def run_streams(plan: Plan, asked: Asked) -> None:
    """Run all altered rows of a plan, and put what they say into what was found for each target."""
    waiting = []
    for stream in plan.streams:
        if isinstance(stream.of, Unaltered) and asked.work.precision == "full" and not stream.inner:
            for choice in asked.choices:
                choice.found.update({ask: _known(ask, asked, choice) for ask in stream.readers})
        else:
            waiting.append(stream)
    with calculating(asked.inputs.x.device.type):
        streams = [(stream, _rows(stream, asked)) for stream in waiting]
    progress = Told(asked.work, sum(len(rows[asked.inputs.path].owners) for _, rows in streams))
    for stream, rows in streams:
        run = _behind_layer if stream.of.of_layer else _at_input
        readers = [Readers(stream, asked, choice) for choice in asked.choices]
        try:
            run(stream, rows, readers, asked, progress)
        except DependentRowsError:
            _must_score_alone(asked)
            note("altered rows are run one at a time: the model's scores depend on what stands beside an image")
            asked.one_at_a_time = True
            readers = [Readers(stream, asked, choice) for choice in asked.choices]
            run(stream, rows, readers, asked, progress)
        for choice, each in zip(asked.choices, readers, strict=True):
            choice.found.update(each.results())


def _rows(stream: Stream, asked: Asked) -> dict[Path, Rows]:
    """The altered rows of each explained input; they are altered together, row by row."""
    paths: Sequence[Path | None] = asked.inputs.paths if len(asked.inputs.paths) > 1 else (None,)
    made = [stream.of.rows(asked.evidence(asked.choices[0], stream.layer, path)) for path in paths]
    return dict(zip(asked.inputs.paths, made, strict=True))


def _behind_layer(
    stream: Stream, rows: Mapping[Path, Rows], readers: Sequence[Readers], asked: Asked, progress: Told
) -> None:
    behind_layer(stream, rows[asked.inputs.path], readers, asked, progress)


def _must_score_alone(asked: Asked) -> None:
    """Refuse a batch in which an image has quite another score than alone; altered rows could not be compared with it.

    Small differences are let pass: quantised networks have them, and so have detectors whose boxes all but tie.
    """
    if len(asked.inputs) == 1:
        return
    with running_altered(asked):
        output = asked.inputs.first().call(asked.model)
    for choice in asked.choices:
        first = torch.zeros(1, dtype=torch.long, device=asked.inputs.x.device)
        score, among = choice.of_rows(first).pick(output, 1)[0].detach().to(choice.score), choice.score[:1]
        if abs(score - among) > 0.05 * max(score.abs().max(), among.abs().max()):
            raise ModelError(
                "model must score each image on its own to be run on altered images, but the first one scores "
                f"{among.item():.4g} among the others and {score.item():.4g} alone (a normalisation over the batch?); "
                "explain one image at a time"
            )


def _known(ask: Ask, asked: Asked, choice: Choice) -> torch.Tensor:
    """The scores of what is not altered, which are there already."""
    if not isinstance(ask.need, Scores) or not ask.need.logits:
        return choice.score
    assert asked.forward.logits is not None
    return asked.forward.logits


@dataclass(frozen=True)
class Runner:
    """Runs altered rows on behalf of a method that has leave to."""

    asked: Asked
    choice: Choice
    layer: str | None
    precision: torch.autocast

    def scores(self, of: Alteration, *, logits: bool = False) -> torch.Tensor:
        """The score ``(P,)`` of each altered row, or its class scores ``(P, K)``; equal plans are run once."""
        ask = Ask(Scores(of, logits), self.layer)
        if ask not in self.choice.found:
            with self.precision:
                run_streams(Plan({"": frozenset({ask})}), replace(self.asked, choices=[self.choice]))
        found: torch.Tensor = self.choice.found[ask]
        return found


def _at_input(
    stream: Stream, rows: Mapping[Path, Rows], readers: Sequence[Readers], asked: Asked, progress: Told
) -> None:
    """Run altered inputs, each piece with all that is asked of it."""
    inner, inputs, first = Plan({"": stream.inner}), asked.inputs, rows[asked.inputs.path]
    owners = first.owners
    graph = inner.whole or bool(inner.layers)
    most = asked.footprint.most(inputs.x.device, graph=graph)
    work, given = replace(asked.work, progress=None), asked.evidence(asked.choices[0], None)

    def run(numbers: torch.Tensor, check: bool) -> None:
        with calculating(inputs.x.device.type):
            images = owners[numbers]
            altered = {path: each.make(numbers).to(inputs.tensor(path)) for path, each in rows.items()}
        beside = owners[:1].repeat(len(inputs) - len(numbers) if asked.fixed else int(check))  # not altered
        if len(beside):
            images = torch.cat([images, beside])
            altered = {path: torch.cat([t, inputs.tensor(path)[beside]]) for path, t in altered.items()}
        targets = [reader.choice.of_rows(images) for reader in readers]
        origin = Origin(given.images, partial(_carried, given, first, images, numbers))
        ask = partial(asked.gather, plan=inner, targets=targets, work=work, origin=origin)
        found = in_fastest_layout(asked, images, altered, ask)
        for reader, evidence_of in zip(readers, found, strict=True):
            evidence = evidence_of(None)
            check_width(asked, evidence.logits)
            if check and not agree(evidence.score[-1:], reader.choice.score[owners[:1]], inputs.x, asked.work, 1e-2):
                raise DependentRowsError
            with calculating(inputs.x.device.type):
                reader.add(images[: len(numbers)], numbers, evidence_of)

    kind = (tuple(inputs.x.shape[1:]), inputs.x.dtype, graph)
    in_pieces(
        torch.arange(len(owners), device=inputs.x.device),
        run,
        readers,
        asked,
        progress,
        Pace(asked.model, kind, most, inputs.x.device),
    )


def _carried(
    given: Evidence, rows: Rows, images: torch.Tensor, numbers: torch.Tensor, tensor: torch.Tensor
) -> torch.Tensor:
    """Bring a tensor of the caller's images to altered rows; behind these may be one that is not altered."""
    found = given.of_images(tensor)[images]
    if rows.carry is None:
        return found
    return torch.cat([rows.carry(found[: len(numbers)], numbers), found[len(numbers) :]])
