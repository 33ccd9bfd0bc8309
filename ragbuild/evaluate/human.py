"""A judge beside people on any file of judged answers, and beside how people agree with each other in it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ragbuild.core.errors import InputRefused
from ragbuild.core.store import error_fields
from ragbuild.evaluate.align import Alignment, align, confusion, kappa, level, reasons
from ragbuild.evaluate.judge import Judge, overall
from ragbuild.evaluate.rubric import Judged

# A person's dimension and ours that comes nearest. Naturalness is how it reads, appropriateness whether it is a useful
# answer to the question, faithfulness whether the documents support it.
COMPARED = {
    "naturalness": "expression_quality",
    "appropriateness": "content_accuracy",
    "completeness": "content_completeness",
    "faithfulness": "credibility",
}


class HumanRow(BaseModel):
    """One answer judged by people. `human`: dimension to a value on the file's scale; or 0, 1, 2 for the whole answer;
    or ``ok`` / ``hallucinated``. `human_raw`: dimension to annotator to value, for the agreement between people."""

    id: str = ""
    query: str
    answer: str
    reference: str = ""
    contexts: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    gt_keywords: tuple[str, ...] = ()
    answerability: str = ""
    human: dict[str, float] | float | str
    human_raw: dict[str, Any] = {}


@dataclass(frozen=True)
class FileAlignment:
    """One dimension of people in a file beside ours, and beside how people agree with each other.

    `human_kappa`: mean over the pairs of annotators, weighted by the answers both judged. `judge_kappa`: the judge with
    each annotator, likewise: what to hold `human_kappa` against, since `alignment` is with the median of several.
    """

    human: str
    ours: str
    alignment: Alignment
    human_kappa: float | None = None
    judge_kappa: float | None = None
    annotators: int = 0

    def row(self) -> dict[str, Any]:
        keep = ("n", "unmeasured", "kappa", "low", "high", "quadratic", "agreement", "verdict")
        return {
            "human": self.human, "ours": self.ours, **{k: getattr(self.alignment, k) for k in keep},
            "judge_kappa": self.judge_kappa, "human_kappa": self.human_kappa, "annotators": self.annotators,
            "beside": self.beside,
        }  # fmt: skip

    @property
    def beside(self) -> str:
        if self.human_kappa is None or self.judge_kappa is None:
            return "no two people judged the same answers: how they agree with each other is not known"
        worse = "less than" if self.judge_kappa < self.human_kappa else "no less than"
        return (
            f"the judge agrees with one annotator ({self.judge_kappa:.2f}) {worse} annotators with each other "
            f"({self.human_kappa:.2f})"
        )


@dataclass(frozen=True)
class JudgeReport:
    """`refused`: malformed rows, each with its line. `alone`: people's dimensions without one of ours."""

    judge: str
    stand_in: bool
    dimensions: list[FileAlignment]
    refused: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)


def judge_file(
    path: Path,
    judge: Judge,
    scale: tuple[float, float] = (1, 4),
    progress: Callable[[int, int], None] | None = None,
    n_resamples: int = 2000,
    seed: int = 13,
) -> JudgeReport:
    """The judge on any file of judged answers (JSONL, or a JSON list) of `HumanRow`.

    A value v on `scale` counts as (v - low) / (high - low) and becomes a level as a score does: on 1 to 4 these are
    0, 0, 1, 2. ``ok`` is level 2 and ``hallucinated`` 0 of faithfulness, and the judge says ok from 0.8 on. Raises
    InputRefused when no row can be read.
    """
    rows, refused = _read(path, scale)
    judged = []
    for number, row in enumerate(rows, 1):
        query, answerable = "\n".join([*row.history, row.query]), row.answerability.upper() != "UNANSWERABLE"
        judged.append(judge(Judged(query, row.answer, row.reference, row.gt_keywords, (), row.contexts, answerable)))
        if progress:
            progress(number, len(rows))
    people = [_levels(row, scale) for row in rows]
    out, alone = [], []
    for name in dict.fromkeys(n for given in people for n in given):
        ours = COMPARED.get(name, name)
        keep = [i for i, given in enumerate(people) if name in given]
        if ours != "overall" and not all(ours in judged[i] for i in keep):
            alone.append(name)
            continue
        scores = [overall(judged[i]) if ours == "overall" else judged[i][ours].value for i in keep]
        levels = (lambda s: 2 if s >= 0.8 else 0) if isinstance(rows[keep[0]].human, str) else level
        info = [
            {**rows[i].model_dump(include={"id", "query", "answer"}), "judge_reason": reasons(judged[i])} for i in keep
        ]
        raw = [_annotators(rows[i], name, scale) for i in keep]
        mine = [{} if s is None else {"judge": levels(s)} for s in scores]
        who = sorted({a for given in raw for a in given})
        out.append(FileAlignment(
            name, ours, align([people[i][name] for i in keep], scores, info, n_resamples, seed, levels),
            _pairwise((raw, a, raw, b) for a, b in combinations(who, 2)),
            _pairwise((mine, "judge", raw, a) for a in who), len(who),
        ))  # fmt: skip
    return JudgeReport(judge.name, judge.stand_in, out, refused, alone)


def _read(path: Path, scale: tuple[float, float]) -> tuple[list[HumanRow], list[str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"{path} cannot be read: {error}") from error
    lines = enumerate(text.split("\n"), 1)
    items = [(f"line {n}", line) for n, line in lines if line.strip()]
    if text.lstrip().startswith("["):
        try:
            items = [(f"row {n}", json.dumps(row)) for n, row in enumerate(json.loads(text), 1)]
        except ValueError as error:
            raise InputRefused(f"{path} is not valid JSON: {error}") from error
    rows, refused = [], []
    for place, line in items:
        try:
            row = HumanRow.model_validate_json(line)
            for name in _levels(row, scale):
                _annotators(row, name, scale)
            rows.append(row)
        except ValidationError as error:
            refused.append(f"{place}: {error_fields(error)}")
        except ValueError as error:
            refused.append(f"{place}: {error}")
    if not rows:
        raise InputRefused(f"{path} holds no judged answer (query, answer, human):\n  " + "\n  ".join(refused[:5]))
    return rows, refused


def _levels(row: HumanRow, scale: tuple[float, float]) -> dict[str, int]:
    """People's levels by dimension. Raises ValueError for a value that is none."""
    if isinstance(row.human, str):
        if row.human not in ("ok", "hallucinated"):
            raise ValueError(f"human: expected ok or hallucinated, got '{row.human}'")
        return {"faithfulness": 2 if row.human == "ok" else 0}
    if isinstance(row.human, float):
        if row.human not in (0, 1, 2):
            raise ValueError(f"human: one value for the whole answer is 0, 1 or 2, got {row.human:g}")
        return {"overall": int(row.human)}
    return {name: _level(value, scale) for name, value in row.human.items()}


def _level(value: float, scale: tuple[float, float]) -> int:
    low, high = scale
    if not low <= value <= high:
        raise ValueError(f"human: expected a value from {low:g} to {high:g}, got {value:g}")
    return level((value - low) / (high - low))


def _annotators(row: HumanRow, name: str, scale: tuple[float, float]) -> dict[str, int]:
    given = row.human_raw.get(name)
    return {who: _level(value, scale) for who, value in given.items()} if isinstance(given, dict) else {}


def _pairwise(pairs: Iterable[tuple[list[dict[str, int]], str, list[dict[str, int]], str]]) -> float | None:
    """Mean kappa of pairs of raters, weighted by the answers that both judged; undefined ones are left out."""
    found = []
    for first, a, second, b in pairs:
        both = [(x[a], y[b]) for x, y in zip(first, second, strict=True) if a in x and b in y]
        value = float(kappa(confusion(*zip(*both, strict=True)))) if both else math.nan
        found += [] if math.isnan(value) else [(value, len(both))]
    return sum(v * n for v, n in found) / sum(n for _, n in found) if found else None
