"""Top-N and Top-M by experiment: everything that search gives is computed once, then any setting is arithmetic.

A sweep keeps, for each question, where each route ranked its first hits (with and without filters), the reranker's
features of all of them, and the truth. From these arrays `Sweep` works out what the pipeline would do at any Top-N,
Top-M, RRF k, routes and filter, for some 200 questions within a slider's patience.

Recall is the share of the ground-truth groups of a question of which one member was found, averaged over questions.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ragbuild.core.errors import InputRefused
from ragbuild.core.store import read_json, write_bytes, write_json, write_text

ROUTES = ("lexical", "dense")
ABSENT = 1 << 20  # the rank of what was not found


@dataclass(frozen=True)
class Setting:
    """What the sliders choose. `filter`: one of the sweep's."""

    top_n: int = 50
    top_m: int = 8
    rrf_k: int = 60
    routes: tuple[str, ...] = ROUTES
    filter: str = "as routed"


@dataclass(frozen=True)
class Choice:
    """A recommended value; the value at which the plateau begins; the best figure; and the rule in words."""

    value: int
    plateau: int
    best: float
    reason: str


class Sweep:
    """The arrays of one sweep, for Q questions in which at most U different children were found, in the order of ids.

    ranks (Q, F, L, U): under each filter the rank from 1 in each list (the lexical route's for each sub-question, then
    the dense one's), 0 where it is not; lexical, coverage, cosine (Q, S, U) for S sub-questions; parents (Q, U); scores
    (Q, U) of any other reranker than `features`; child_*, parent_*: members of the truth's groups (case, group, place).
    """

    def __init__(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.facts, self.arrays = facts, arrays
        self.view = lru_cache(maxsize=8)(self._view)
        self.rerank = lru_cache(maxsize=64)(self._rerank)

    def save(self, path: Path) -> None:
        """Write ``<path>.npz`` and ``<path>.json``."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **self.arrays)
        write_bytes(path.with_suffix(".npz"), buffer.getvalue())
        write_json(path.with_suffix(".json"), self.facts)

    @classmethod
    def load(cls, path: Path) -> Sweep | None:
        """What `save` wrote, or None when it is not there or damaged."""
        try:
            with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
                return cls(read_json(path.with_suffix(".json")), dict(file))
        except (OSError, ValueError, KeyError, InputRefused):
            return None

    @property
    def answers(self) -> dict[int, list[float]]:
        """Scores of the answers that were read, by Top-M."""
        return {int(m): scores for m, scores in self.facts["answers"].items()}

    @cached_property
    def halves(self) -> np.ndarray:
        """``tuning`` or ``test`` for each question; all ``tuning`` where one of them would be empty."""
        halves = np.array(self.facts["half"])
        return halves if len(set(self.facts["half"])) > 1 else np.full(len(halves), "tuning")

    def setting(self, **changes: Any) -> Setting:
        """What is configured now, with changes."""
        now = self.facts["now"]
        return replace(Setting(now["top_n"], now["top_m"], now["rrf_k"], tuple(now["routes"])), **changes)

    @property
    def tolerance(self) -> float:
        """``tune.tolerance``; in a half too small to resolve it, what one question weighs: one is no evidence."""
        return max(self.facts["tolerance"], 1 / max(1, int(self.of("tuning").sum())))

    def of(self, half: str = "") -> np.ndarray:
        """Which questions belong to a half (all without one): bool (Q,)."""
        return self.halves == half if half else np.ones(len(self.halves), bool)

    def _view(self, name: str) -> dict[str, np.ndarray]:
        """The arrays with those columns only that a filter lets through, and the members' places among them."""
        ranks = self.arrays["ranks"][:, self.facts["filters"].index(name)]
        found = (ranks > 0).any(1)
        width = max(1, int(found.sum(1).max(initial=0)))
        keep = np.argsort(~found, axis=1, kind="stable")[:, :width]  # ids stay in order
        out = {"ranks": np.take_along_axis(ranks, keep[:, None], 2)}
        out |= {n: np.take_along_axis(self.arrays[n], keep[:, None], 2) for n in ("lexical", "coverage", "cosine")}
        out |= {n: np.take_along_axis(self.arrays[n], keep, 1) for n in ("parents", "scores")}
        place = np.full(found.shape, -1)
        np.put_along_axis(place, keep, np.where(np.take_along_axis(found, keep, 1), np.arange(width), -1), 1)
        cases, columns = self.arrays["child_case"], self.arrays["child_place"]
        return out | {"place": np.where(columns >= 0, place[cases, columns], -1)}

    def fused(self, setting: Setting) -> np.ndarray:
        """RRF scores (Q, U) of each list's first Top-N, as the pipeline fuses them; 0 where nothing was found."""
        ranks = self.view(setting.filter)["ranks"]
        n = ranks.shape[1] // len(ROUTES)
        shares = np.concatenate([[0.0], 1.0 / (setting.rrf_k + np.arange(1, ranks.max(initial=0) + 1))])
        shares[setting.top_n + 1 :] = 0
        lists = [i for i in range(ranks.shape[1]) if ROUTES[i // n] in setting.routes]
        return np.round(
            sum(shares[ranks[:, i]] for i in lists), 14
        )  # equal shares tie in whichever order they are added

    def truth_ranks(self, setting: Setting) -> np.ndarray:
        """For each ground-truth group the fused rank of its best member among all that was fused, or ABSENT."""
        scores, place = self.fused(setting), self.view(setting.filter)["place"]
        cases = self.arrays["child_case"]
        mine, beside = scores[cases, place], scores[cases]
        ahead = beside > mine[:, None]
        ahead |= (beside == mine[:, None]) & (np.arange(scores.shape[1]) < place[:, None])
        ranks = np.where((place >= 0) & (mine > 0), ahead.sum(1) + 1, ABSENT)
        return np.minimum.reduceat(ranks, _starts(self.arrays["child_group"]))

    def first_ranks(self, setting: Setting) -> np.ndarray:
        """For each question the fused rank of the first ground truth in it, or ABSENT: (Q,)."""
        out = np.full(len(self.halves), ABSENT)
        np.minimum.at(out, self.arrays["child_case"][_starts(self.arrays["child_group"])], self.truth_ranks(setting))
        return out

    def recall(self, setting: Setting) -> np.ndarray:
        """Recall of the Top-N candidates for each question (Q,)."""
        return self._share(self.truth_ranks(setting) <= setting.top_n, "child")

    def recall_curve(self, top_n: Sequence[int], setting: Setting, half: str = "") -> np.ndarray:
        """Mean recall at each Top-N, each with lists of that length, as the pipeline searches."""
        mine = self.of(half)
        return np.array([self.recall(replace(setting, top_n=n))[mine].mean() for n in top_n])

    def _share(self, found: np.ndarray, kind: str) -> np.ndarray:
        groups = self.arrays[f"{kind}_group"]
        cases = self.arrays[f"{kind}_case"][_starts(groups)]
        n = len(self.halves)
        return np.bincount(cases, found, n) / np.maximum(1, np.bincount(cases, minlength=n))

    def _rerank(self, setting: Setting) -> tuple[np.ndarray, np.ndarray]:
        """(columns of the view, scores), both (Q, Top-N), by the reranker's score; -inf where there is nothing."""
        view, fused = self.view(setting.filter), self.fused(setting)
        top = np.sort(np.argsort(-fused, axis=1, kind="stable")[:, : setting.top_n], axis=1)  # by id again
        there = np.take_along_axis(fused, top, 1) > 0
        if self.facts["reranker"] == "features":
            at = top[:, None]
            lexical, coverage, cosine = (np.take_along_axis(view[n], at, 2) for n in ("lexical", "coverage", "cosine"))
            highest = np.where(there[:, None], lexical, 0).max(2, keepdims=True)
            lexical = lexical / np.where(highest > 0, highest, 1)
            low = np.where(there[:, None], cosine, np.inf).min(2, keepdims=True, initial=np.inf)
            span = np.where(there[:, None], cosine, -np.inf).max(2, keepdims=True, initial=-np.inf) - low
            cosine = np.where(span > 0, (cosine - low) / np.where(span > 0, span, 1), 0)
            w = self.facts["weights"]
            best = [np.where(np.isfinite(x), x, 0).max(1) for x in (lexical, cosine, coverage)]
            scores = w["lexical"] * best[0] + w["cosine"] * best[1] + w["coverage"] * best[2]
        else:
            scores = np.take_along_axis(fused if self.facts["reranker"] == "none" else view["scores"], top, 1)
        scores = np.where(there, scores, -np.inf)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(top, order, 1), np.take_along_axis(scores, order, 1)

    def parents(self, setting: Setting, most: int) -> np.ndarray:
        """The parent of each of the first `most` children after reranking, (Q, most); -1 where there is none."""
        columns, scores = self.rerank(replace(setting, top_m=1))  # which has no say in it
        parents = np.take_along_axis(self.view(setting.filter)["parents"], columns, 1)
        parents = np.where(np.isfinite(scores), parents, -1)[:, :most]
        return np.pad(parents, ((0, 0), (0, most - parents.shape[1])), constant_values=-1)

    def parent_recall(self, setting: Setting, top_m: Sequence[int]) -> np.ndarray:
        """Recall of the right parents within each Top-M for each question: (M, Q)."""
        parents = self.parents(setting, max(top_m))
        same = parents[self.arrays["parent_case"]] == self.arrays["parent_place"][:, None]
        ranks = np.where(same.any(1), same.argmax(1) + 1, ABSENT)
        ranks = np.minimum.reduceat(ranks, _starts(self.arrays["parent_group"]))
        return np.stack([self._share(ranks <= m, "parent") for m in top_m])

    def context_tokens(self, setting: Setting, top_m: Sequence[int]) -> np.ndarray:
        """Tokens of the distinct parents within each Top-M for each question: (M, Q)."""
        parents = self.parents(setting, max(top_m))
        earlier = np.tril(np.ones((parents.shape[1],) * 2, bool), -1)
        first = ~((parents[:, :, None] == parents[:, None]) & earlier).any(2) & (parents >= 0)
        tokens = np.cumsum(np.where(first, self.arrays["parent_tokens"][parents], 0), axis=1)
        return np.stack([tokens[:, m - 1] for m in top_m])

    def recommend(self) -> tuple[Choice, Choice]:
        """Top-N and Top-M by the rules below, from the tuning half, with all else as configured."""
        facts = self.facts
        curve = self.recall_curve(facts["top_n"], self.setting(), "tuning")
        first = recommend_top_n(facts["top_n"], curve, facts["children"], self.tolerance, facts["max_share"])
        within = self.parent_recall(self.setting(top_n=first.value), facts["top_m"])[:, self.of("tuning")].mean(1)
        return first, recommend_top_m(facts["top_m"], within, self.tolerance, self.answers)

    def flips(self, before: Setting, after: Setting, half: str = "") -> list[dict[str, Any]]:
        """Questions (of a half) whose right parents are within Top-M for one setting only, with the truth's fused rank
        in both."""
        recalls = [self.parent_recall(s, [s.top_m])[0] for s in (before, after)]
        ranks = [self.first_ranks(s) for s in (before, after)]
        rows = []
        for q in np.flatnonzero((recalls[0] != recalls[1]) & self.of(half)):
            at = [int(r[q]) if r[q] <= s.top_n else None for r, s in zip(ranks, (before, after), strict=True)]
            now = "gained" if recalls[1][q] > recalls[0][q] else "lost"
            rows.append({"now": now, "question": self.facts["queries"][q], "rank before": at[0], "rank now": at[1]})
        return sorted(rows, key=lambda row: row["now"], reverse=True)


def _starts(groups: np.ndarray) -> np.ndarray:
    """Where each group begins; members of a group stand together."""
    return np.flatnonzero(np.concatenate([[True], np.diff(groups) != 0]))


def recommend_top_n(
    top_n: Sequence[int], recall: Sequence[float], n_children: int, tolerance: float, max_share: float
) -> Choice:
    """The plateau rule: the least Top-N whose recall is within `tolerance` of the best over the sweep; but never more
    than `max_share` of the children: then the largest allowed, or the limit itself where no swept value is allowed."""
    best, limit = max(recall), max(1, int(max_share * n_children + 1e-9))
    plateau = next(n for n, r in zip(top_n, recall, strict=True) if r >= best - tolerance - 1e-12)
    allowed = [n for n in top_n if n <= limit]
    if plateau <= limit:
        reason = f"the least Top-N whose recall is within {tolerance:.2g} of the best of the sweep ({best:.3f})"
        return Choice(plateau, plateau, best, reason + _rising(plateau, top_n))
    share = f"a {max_share:g} share of the {n_children:,} children ({limit}), beyond which reranking is no selection"
    if allowed:
        return Choice(
            max(allowed), plateau, best, f"the plateau begins at {plateau}, beyond {share}: the largest below"
        )
    return Choice(limit, plateau, best, f"every swept value lies beyond {share}: the limit itself")


def recommend_top_m(
    top_m: Sequence[int], recall: Sequence[float], tolerance: float, answers: Mapping[int, Sequence[float]]
) -> Choice:
    """The least Top-M whose parent recall is within `tolerance` of the best. Answers decide only where they differ by
    more than chance: when those read at another Top-M are better by more than two standard errors of the paired
    difference, the best of these is taken."""
    best = max(recall)
    value = plateau = next(m for m, r in zip(top_m, recall, strict=True) if r >= best - tolerance - 1e-12)
    reason = f"the least Top-M whose parent recall is within {tolerance:.2g} of the best ({best:.3f})"
    reason += _rising(plateau, top_m)
    if answers:
        at = max((m for m in answers if m <= plateau), default=min(answers))
        gains = {m: np.subtract(scores, answers[at]) for m, scores in answers.items()}
        better = [m for m, g in gains.items() if g.mean() > 2 * g.std() / len(g) ** 0.5]
        if better:
            value = min(better, key=lambda m: (-gains[m].mean(), m))
            reason += f" is {plateau}, but answers read at {value} are better by more than two standard errors"
    return Choice(value, plateau, best, reason)


def _rising(plateau: int, swept: Sequence[int]) -> str:
    """A remark where the curve has no plateau within the sweep."""
    return "; there is no plateau yet, it still rises where the sweep ends" if plateau == swept[-1] != swept[0] else ""


def write_choice(path: Path, setting: Setting, remarks: Sequence[str] = ()) -> None:
    """A YAML for ``ragbuild build --config``; `remarks` stand above it as comments."""
    held = {
        "retrieve": {"top_n": setting.top_n, "rrf_k": setting.rrf_k, "routes": list(setting.routes)},
        "rerank": {"top_m": setting.top_m},
    }
    lines = [f"# {line}" for remark in remarks for line in remark.splitlines()]
    write_text(path, "\n".join([*lines, yaml.safe_dump(held, sort_keys=False)]))
