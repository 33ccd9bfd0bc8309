"""Layer 1 of evaluation, before anything is tuned: are the indexes complete, and what do they find by themselves?

Raw retrieval is the question as typed: no rewriting, no routing, no reranking. It searches what a plain search sees,
the active documents; a case whose right documents are all older versions is searched with these let in, as by
``--old``, since nothing else could ever find it. Letting them in for all would blame retrieval for what routing and
status are there to prevent, and letting them in for none would count such a case as a miss that no index can mend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ragbuild.core.config import Config, ConfigView, RetrieveConfig
from ragbuild.core.records import Chunk
from ragbuild.evaluate.completeness import completeness
from ragbuild.evaluate.gates import GateResult, offline_gate
from ragbuild.evaluate.ledger import Figure
from ragbuild.evaluate.metrics import paired_test, per_query, wilson
from ragbuild.evaluate.qdoc import canonical
from ragbuild.evaluate.quality import HAN_LENGTH, IN_INDEX, KEPT_WHOLE, Row, chunk_quality, dictionary_quality
from ragbuild.index.filters import Filter
from ragbuild.index.versions import IndexVersion
from ragbuild.models.embedders import Embedder
from ragbuild.offline.evalset import EvalCase
from ragbuild.offline.review import QueryRow
from ragbuild.online.retrieve import rrf

ROUTES = ("lexical", "dense", "fused")
GATE_AT = 50  # the K of the gates, measured whatever the cutoffs are


@dataclass(frozen=True)
class OfflineReport:
    """Tables as rows, figures by name, the gates; for the ledger one value a question: metric -> case id -> value."""

    checks: list[Row]
    recall: list[Row]
    chunking: list[Row]
    dictionary: list[Row]
    diagnosis: list[Row]
    gates: list[GateResult]
    figures: dict[str, Figure]
    per_query: dict[str, dict[str, float]]
    notes: list[str]
    lengths: dict[str, list[int]]  # tokens of each ``child`` and each ``parent``

    def as_json(self) -> dict[str, Any]:
        """Plain data, as kept in ``offline_evaluation.json``."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def evaluate_offline(
    version: IndexVersion,
    chunks: Sequence[Chunk],
    cases: Sequence[EvalCase],
    embedder: Embedder,
    config: Config | ConfigView,
    *,
    markdown: Callable[[Chunk], str | None],
    dictionary: Path,
    log: Sequence[QueryRow] = (),
    lost: Sequence[str] = (),
) -> OfflineReport:
    """All of layer 1. `chunks`: the corpus that the index should hold; `cases`: mapped to it, `lost` the ids of those
    that could not be; `markdown`: the parsed text of a chunk's document; `dictionary`: the index's
    keyword_dict.json.

    Nothing is raised for a bad figure: `gates.raise_if_failed` does that, once the report is written.
    """
    checks = completeness(version, chunks, embedder, config, dictionary)
    chunking = chunk_quality(chunks, markdown, config.chunk, embedder.max_tokens)
    words = dictionary_quality(version, log)
    asked = [c for c in cases if c.answerable and c.groups]
    cutoffs = sorted({*config.evaluate.cutoffs, GATE_AT})
    rankings, old = raw_rankings(version, asked, embedder, config.retrieve, max(cutoffs))
    values = {route: measure(ranked, asked, cutoffs) for route, ranked in rankings.items()} if asked else {}
    figures = {f"{route}_{name}": Figure(value=float(np.mean(v[key])), n=len(asked)) for route, v in values.items()
               for name, key in ((f"recall_at_{GATE_AT}", f"recall@{GATE_AT}"), ("mrr", "mrr"))}  # fmt: skip
    figures |= _hard(checks, chunking)
    if (kept := words[0])["share"] is not None:
        figures["terms_kept_whole"] = Figure(value=kept["share"], n=kept["of"])
    on = (*config.retrieve.routes, "fused")
    off = {f"{route}_recall_at_{GATE_AT}" for route in ROUTES if route not in on}
    gated = {k: f for k, f in figures.items() if k not in off and not k.endswith("_mrr")}
    why = {
        "index_completeness": "; ".join(c["check"] for c in checks if not c["ok"]),
        "chunk_boundaries": "; ".join(row["what"] for row in _broken(chunking)),
    }
    gates = offline_gate(gated, config.gates)
    gates = [g.model_copy(update={"said": f"{g.said}: {w}"}) if (w := why.get(g.name)) else g for g in gates]
    return OfflineReport(
        checks=checks, chunking=chunking, dictionary=words, gates=gates, figures=figures,
        recall=recall_rows(values, asked),
        diagnosis=diagnose(checks, chunking, words, {r: values[r] for r in on if r in values}, asked, config),
        per_query={f"{r}_{name}": dict(zip((c.id for c in asked), np.round(values[r][name], 4).tolist(), strict=True))
                   for name in (f"recall@{GATE_AT}", "mrr") for r in ("fused", "lexical", "dense") if r in values},
        notes=_notes(version, cases, asked, values, lost, old),
        lengths={k: [c.n_tokens for c in chunks if c.is_parent == (k == "parent")] for k in ("child", "parent")},
    )  # fmt: skip


def _broken(chunking: Sequence[Row]) -> list[Row]:
    return [row for row in chunking if row["must be 0"] and row["found"]]


def _hard(checks: Sequence[Row], chunking: Sequence[Row]) -> dict[str, Figure]:
    """Shares that must be 1."""
    good, worst = [c["ok"] for c in checks], max((r["found"] / r["of"] for r in _broken(chunking)), default=0.0)
    return {
        "index_completeness": Figure(value=sum(good) / len(good), n=len(good)),
        "chunk_boundaries": Figure(value=1 - worst, n=max(row["of"] for row in chunking)),
    }


def _notes(
    version: IndexVersion, cases: Sequence[EvalCase], asked: Sequence[EvalCase],
    values: dict[str, dict[str, np.ndarray]], lost: Sequence[str], old: int,
) -> list[str]:  # fmt: skip
    mask = version.allowed(Filter())
    active = len(version) if mask is None else int(mask.sum())
    lots = min(1.0, GATE_AT / max(1, active))
    out = [f"{len(asked)} questions; {GATE_AT} of {active:,} active children: drawing lots would find {lots:.0%}"]
    if asked:
        lexical, dense = (values[r][f"recall@{GATE_AT}"] for r in ("lexical", "dense"))
        more = [int((x > y).sum()) for x, y in ((lexical, dense), (dense, lexical))]
        out.append(f"within {GATE_AT}, words find more than vectors on {more[0]} questions and less on {more[1]}")
    told = {
        "have their answer in older versions alone and were searched with these let in": old,
        "that the documents do not answer take no part here": sum(not c.answerable for c in cases),
        "have their place in no chunk: " + ", ".join(lost[:5]): len(lost),
    }
    return out + [f"{n} question(s) {what}" for what, n in told.items() if n]


def raw_rankings(
    version: IndexVersion, cases: Sequence[EvalCase], embedder: Embedder, config: RetrieveConfig, depth: int
) -> tuple[dict[str, list[list[str]]], int]:
    """Child ids in order for each case and route, and how many cases were searched with older versions let in. Both
    routes are searched; fused are those that `config` has on."""
    active, both = Filter(), Filter(status=("active", "legacy"))
    masks = {where: version.allowed(where) for where in (active, both)}
    place = {i.decode(): row for row, i in enumerate(version.ids)}
    vectors = embedder.encode_queries([c.query for c in cases])
    out: dict[str, list[list[str]]] = {route: [] for route in ROUTES}
    old = 0
    for case, vector in zip(cases, vectors, strict=True):
        mask = masks[active]
        rows = [[place[i] for i in group if i in place] for group in case.groups]  # what the index lacks is a miss
        where = active if mask is None or all(mask[r].any() for r in rows if r) else both
        old += where is both
        lexical = version.search_lexical(version.tokenizer(case.query), depth, where, masks[where])[0]
        dense = version.dense.search(vector, depth, masks[where])[0]
        ids = {r: [i.decode() for i in version.ids[rows]] for r, rows in (("lexical", lexical), ("dense", dense))}
        ids["fused"] = [i for i, _ in rrf([ids[route] for route in config.routes], config.rrf_k)][:depth]
        for route, ranked in ids.items():
            out[route].append(ranked)
    return out, old


def measure(rankings: Sequence[Sequence[str]], cases: Sequence[EvalCase], cutoffs: Sequence[int]
) -> dict[str, np.ndarray]:  # fmt: skip
    """Figures of one route, one value a case. A group of the ground truth is found when any of its children is."""
    named = [canonical(ranked, case.groups) for ranked, case in zip(rankings, cases, strict=True)]
    return per_query(named, [{group[0]: 1.0 for group in case.groups} for case in cases], cutoffs)


def recall_rows(values: dict[str, dict[str, np.ndarray]], cases: Sequence[EvalCase]) -> list[Row]:
    """One row for each route over all questions, then by language, query type, and set where there are two."""
    out = []
    for what in ("", "language", "query_type", "source"):
        groups = sorted({str(getattr(c, what)) for c in cases}) if what else ["all"] if cases else []
        for group in groups if what != "source" or len(groups) > 1 else []:
            mask = np.array([not what or str(getattr(c, what)) == group for c in cases])
            for route, figures in values.items():
                means = {k: round(float(v[mask].mean()), 4) for k, v in figures.items() if k.startswith("recall@")}
                out.append({"questions": group, "by": what or "all", "route": route, "n": int(mask.sum()), **means,
                            "MRR": round(float(figures["mrr"][mask].mean()), 4)})  # fmt: skip
    return out


_PARTS = {
    "corpus": "index completeness: the index does not hold the corpus at hand",
    "lexical": "tokenizer or dictionary: the lexical index was made otherwise than it is searched",
    "dense": "embedding or index completeness: the dense index is not what the embedder makes of these children",
    "version": "index completeness: the index belongs to another dictionary or prompt",
}


def diagnose(
    checks: Sequence[Row], chunking: Sequence[Row], words: Sequence[Row], values: dict[str, dict[str, np.ndarray]],
    cases: Sequence[EvalCase], config: Config | ConfigView,
) -> list[Row]:  # fmt: skip
    """The method's tree for what comes before tuning, as rows of finding, evidence, try: what to mend first is first.

    `values`: the routes that are on, and fused. Low means what it means to the gate, for one language alone too.
    """
    rows: list[Row] = []

    def find(finding: str, evidence: Sequence[str], to_try: str) -> None:
        rows.append({"finding": finding, "evidence": "; ".join(evidence), "try": to_try})

    for part, finding in _PARTS.items():
        wrong = [f"{c['check']}: expected {c['expected']}, found {c['found']}"
                 for c in checks if c["part"] == part and not c["ok"]]  # fmt: skip
        if wrong:
            find(finding, wrong, "make the index again: ragbuild build --fresh")
    if broken := [f"{row['what']}: {row['found']} of {row['of']}" for row in _broken(chunking)]:
        find("chunking: chunks break their own rules", broken, "ragbuild build --from 02; a chunker of your own must "
             "keep spans, sections and parents")  # fmt: skip

    rates = {route: _rates(v[f"recall@{GATE_AT}"], cases) for route, v in values.items()}
    needed = {route: getattr(config.gates, f"{route}_recall_at_{GATE_AT}") for route in rates}
    low = {route for route, of in rates.items() if any(_low(m, n, needed[route]) for m, n in of.values())}
    told = {route: f"{route} recall@{GATE_AT} " + ", ".join(f"{k} {m:.2f} (n = {n})" for k, (m, n) in of.items())
            + f", needed {needed[route]:g}" for route, of in rates.items()}  # fmt: skip
    known = {row["what"]: row for row in words}
    kept, held = (known[name]["share"] for name in (KEPT_WHOLE, IN_INDEX))
    if "lexical" in low or (kept is not None and _low(kept, known[KEPT_WHOLE]["of"], config.gates.terms_kept_whole)):
        evidence = [told["lexical"]] if "lexical" in told else []
        evidence += [f"{kept:.0%} of the terms are kept whole"] if kept is not None else []
        if (length := known[HAN_LENGTH]["found"] or 0) > 4:
            evidence.append(f"a Han token has {length} characters (median): Chinese text is not cut into words")
        evidence += [f"the index holds {held:.0%} of the tokens of the query log"] if held is not None else []
        find("tokenizer or dictionary", evidence,
             f"lexical.tokenizer (now {config.lexical.tokenizer}): jieba reads the term dictionary, char suits typing "
             "errors; then the users' words in the dictionary (notebook 01)")  # fmt: skip
    if "dense" in low:
        find("embedding", [told["dense"]], "index completeness first (the checks); then another model: embedder.name, "
             "--profile standard. Fine-tuning comes last")  # fmt: skip
    if low == {"fused"}:
        find("fusion: each route passes, their fusion does not", list(told.values()), "retrieve.rrf_k, retrieve.top_n")
    if not rows and len(values) == 3:
        best = max(("lexical", "dense"), key=lambda route: rates[route]["all"])
        change, _, high, _ = paired_test(*(values[route][f"recall@{GATE_AT}"] for route in ("fused", best)))
        if change < -0.01 and high < 0:
            find("fusion costs recall: the weaker route has an equal vote",
                 [f"fused against {best}: {change:+.3f}", *told.values()], f"retrieve.routes=[{best}]")  # fmt: skip
    if not rows:
        find("nothing stands out", list(told.values()) or ["no question to measure recall with"], "go on to Q-DOC")
    return rows


def _low(mean: float, n: int, needed: float) -> bool:
    return max(mean, wilson(mean * n, n)[1]) < needed


def _rates(recall: np.ndarray, cases: Sequence[EvalCase]) -> dict[str, tuple[float, int]]:
    """(mean, n) over all questions, and for each language where there are several."""
    names = sorted({c.language for c in cases})
    masks = {"all": np.ones(len(cases), bool)}
    masks |= {name: np.array([c.language == name for c in cases]) for name in names if len(names) > 1}
    return {name: (float(recall[mask].mean()), int(mask.sum())) for name, mask in masks.items()}
