"""The term dictionary: candidates from documents, merged with the query log and validated by an expert.

One for all documents, and append-only: an entry of an earlier run (`previous`) is never lost, not even when documents
are deleted or the expert rejects it later (which the report says). What the expert wrote wins over the machine.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ragbuild.core.config import DictionaryConfig
from ragbuild.core.forms import FormMatcher, fold, form_key, singular
from ragbuild.core.records import Document, TermEntry
from ragbuild.core.store import read_records, write_records, write_text
from ragbuild.core.text import jieba_tokenizer, language_of, normalise
from ragbuild.offline.candidates import HanWords, statistical_candidates
from ragbuild.offline.colloquial import Attachment, DocumentWords, attach
from ragbuild.offline.entities import Definition, Plain, find_definitions, find_entities, plain
from ragbuild.offline.review import QueryRow, ReviewRow, read_query_log, read_review, write_review

__all__ = [
    "Conflict", "DictionaryResult", "QueryRow", "ReviewRow", "build_dictionary", "load_dictionary", "read_query_log",
    "read_review", "write_dictionary", "write_review",
]  # fmt: skip

_DEFINED = 3.0  # scores beside the 0 to 2.3 of the statistics
_PATTERN = {"product": 2.5, "protocol": 2.0, "command": 1.5, "error_code": 1.2}
_FLOOR = 0.75  # a statistical candidate below this score is not proposed


@dataclass(frozen=True)
class Conflict:
    """One form that several terms claim. The first of `terms` has it in use; all are named, for the expert."""

    form: str
    terms: tuple[str, ...]


@dataclass(frozen=True)
class DictionaryResult:
    """`entries`: expert first, then by count and name. `review`: rows for the CSV. `report`: plain data, counts."""

    entries: list[TermEntry]
    conflicts: list[Conflict]
    review: list[dict[str, str]]
    report: dict[str, Any]


@dataclass
class _Term:
    """An entry in the making. `held`: it comes from an earlier run and stays."""

    standard_term: str
    abbreviation: str = ""
    full_form: str = ""
    colloquial: list[str] = field(default_factory=list)
    tag: str = ""
    kind: str = "term"
    source: str = "machine"
    count: int = 0
    score: float = 0.0
    found_by: set[str] = field(default_factory=set)
    held: bool = False

    @property
    def formal(self) -> list[str]:
        return list(dict.fromkeys(f for f in (self.standard_term, self.abbreviation, self.full_form) if f))

    @property
    def forms(self) -> list[str]:
        return list(dict.fromkeys((*self.formal, *self.colloquial)))

    @property
    def order(self) -> tuple[bool, int, str]:
        return self.source != "expert", -self.count, self.standard_term

    def entry(self) -> TermEntry:
        colloquial = tuple(f for f in dict.fromkeys(self.colloquial) if f not in self.formal)
        return TermEntry(
            standard_term=self.standard_term, abbreviation=self.abbreviation, full_form=self.full_form,
            colloquial=colloquial, tag=self.tag, kind=self.kind, source=self.source, count=self.count,
        )  # fmt: skip


class _Pool:
    """The terms so far, found again by their formal forms."""

    def __init__(self) -> None:
        self.terms: list[_Term] = []
        self.growth: list[dict[str, Any]] = []

    def find(self, forms: Iterable[str]) -> list[_Term]:
        keys = set(map(_key, forms))
        return [t for t in self.terms if not keys.isdisjoint(map(_key, t.formal))]

    def add_all(self, stage: str, terms: Iterable[_Term]) -> None:
        """Append each, or fill the gaps of the term that has one of its forms already."""
        index = {_key(form): term for term in reversed(self.terms) for form in term.formal}
        for new in terms:
            known = next((index[k] for k in map(_key, new.formal) if k in index), None)
            if known is None:
                self.terms.append(new)
                known = new
            elif known is not new:
                known.found_by |= new.found_by
                known.score = max(known.score, new.score)
                known.kind = new.kind if known.kind == "term" else known.kind
                if known.source != "expert":
                    for name in ("abbreviation", "full_form", "tag"):
                        value = getattr(known, name) or getattr(new, name)
                        setattr(known, name, "" if name == "full_form" and value == known.standard_term else value)
            for form in known.formal:
                index.setdefault(_key(form), known)
        self.grown(stage)

    def grown(self, stage: str) -> None:
        self.growth.append({"stage": stage, "terms": len(self.terms), "forms": sum(len(t.forms) for t in self.terms)})


@lru_cache(maxsize=100_000)
def _key(form: str) -> str:
    """Spellings with and without hyphen, singular and plural have one key."""
    return "".join(map(singular, form_key(form).split()))


def build_dictionary(
    documents: Sequence[tuple[Document, str]],
    *,
    config: DictionaryConfig,
    query_log: Sequence[QueryRow] = (),
    review: Sequence[ReviewRow] = (),
    previous: Sequence[TermEntry] = (),
    embed: Callable[[list[str]], np.ndarray] | None = None,
    propose: Callable[[str], list[dict]] | None = None,
) -> DictionaryResult:
    """Make the dictionary from (document, parsed Markdown) pairs.

    `embed` maps texts to rows of vectors (n, d); without it nothing is attached by vector. `propose` maps a document's
    text to proposed entries as dicts; a proposal that is no entry, or names what the text does not hold, is counted
    and dropped. The order of documents does not matter.
    """
    texts = [normalise(markdown) for _, markdown in sorted(documents, key=lambda pair: pair[0].key)]
    plains = [plain(text) for text in texts]
    words = HanWords(jieba_tokenizer())
    pool, conflicts, report = _Pool(), [], {}
    pool.add_all("previous", [_Term(**{**e.model_dump(), "colloquial": list(e.colloquial)}, held=True) for e in previous])
    definitions = find_definitions(plains, words.cut)
    pool.add_all("abbreviations", _defined(definitions, plains, config, conflicts))
    entities = find_entities(plains)
    commands = {form_key(form) for form in entities["command"]}
    named = [_Term(f, kind=k, score=_PATTERN[k], found_by={"entity"}) for k, c in entities.items() for f in sorted(c)]
    pool.add_all("named entities", named)
    statistics = statistical_candidates(plains, words, config.min_count)
    good = [c for c in statistics if c.score >= _FLOOR and not _of_command(form_key(c.form), commands)]
    pool.add_all("statistics", [_Term(c.form, score=c.score, found_by=set(c.sources)) for c in good])
    if propose is not None:
        proposed, report["llm_invalid"] = _proposed(texts, propose)
        pool.add_all("language model", proposed)
    report["candidates"] = dict(sorted(Counter(s for t in pool.terms for s in t.found_by).items()))

    _count(pool.terms, plains)
    report["review"] = _apply_review(pool, review)
    _count(pool.terms, plains)
    report["dropped"] = _limit(pool, config)
    pool.grown("expert review")
    conflicts += _resolve(pool)

    forms = [(form, i) for i, term in enumerate(pool.terms) for form in term.forms]
    attached = attach([(r.query, r.count) for r in query_log], forms, DocumentWords(texts), words, config, embed)
    rejected = {_key(r.standard_term) for r in review if r.decision == "reject"}
    attached = [a for a in attached if _key(a.form) not in rejected]
    for a in attached:
        pool.terms[a.term].colloquial.append(a.form)
        if a.rivals:
            names = (pool.terms[i].standard_term for i in (a.term, *a.rivals))
            conflicts.append(Conflict(a.form, tuple(names)))
    pool.grown("query log")
    report["tags_inferred"] = _infer_tags(pool.terms, plains)
    report.update(_figures(pool, attached, query_log, report.pop("review")))
    ordered = sorted(pool.terms, key=lambda t: t.order)
    conflicts = sorted(set(conflicts), key=lambda c: (c.form, c.terms))
    return DictionaryResult([t.entry() for t in ordered], conflicts, _review_rows(ordered, review), report)


def _defined(
    definitions: Counter[Definition], plains: Sequence[Plain], config: DictionaryConfig, conflicts: list[Conflict]
) -> list[_Term]:
    """One term for each abbreviation, both languages in it; a second meaning is a conflict and a term of its own."""
    from rapidfuzz import fuzz

    matcher = FormMatcher((f, f) for d in sorted(definitions, key=astuple) for f in (d.abbreviation, d.long_form))
    uses = Counter(form for p in plains for _, _, form in matcher.find("\n".join(p.lines)))
    groups: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: {"en": Counter(), "zh": Counter()})
    for d, n in sorted(definitions.items(), key=lambda item: (-item[1], item[0].long_form)):
        counter = groups[d.abbreviation][d.language]
        same = next((f for f in counter if _key(f) == _key(d.long_form)), d.long_form)
        counter[same] += n
    out = []
    for abbreviation, by_language in sorted(groups.items()):
        best: list[str] = []
        for counter in by_language.values():
            ranked = [form for form, _ in sorted(counter.items(), key=lambda item: (-item[1], item[0]))]
            best += ranked[:1]
            for other in ranked[1:]:
                if counter[other] > 1 and fuzz.ratio(ranked[0], other) < config.string_similarity:  # not a spelling of it
                    conflicts.append(Conflict(abbreviation, (ranked[0], other)))
                    out.append(_Term(other, score=_DEFINED, found_by={"abbreviation"}))
        names = best if len(best) > 1 else [*best, abbreviation]
        names.sort(key=lambda form: (-uses[form], form))
        full = names[1] if names[1] != abbreviation else ""
        out.append(_Term(names[0], abbreviation, full, score=_DEFINED, found_by={"abbreviation"}))
    return out


def _of_command(key: str, commands: set[str]) -> bool:
    return any(key == c or key.startswith(f"{c} ") or c.startswith(f"{key} ") for c in commands)


def _proposed(texts: Sequence[str], propose: Callable[[str], list[dict]]) -> tuple[list[_Term], int]:
    out, invalid = [], 0
    for text in texts:
        held = fold(text)
        for row in propose(text):
            try:
                if isinstance(row.get("colloquial"), list):
                    row = {**row, "colloquial": tuple(row["colloquial"])}
                entry = TermEntry.model_validate({**row, "source": "llm", "count": 0})
            except (ValidationError, AttributeError, TypeError):
                invalid += 1
                continue
            if fold(entry.standard_term) not in held or len(entry.standard_term) > 60:
                invalid += 1
                continue
            term = _Term(**{**entry.model_dump(), "colloquial": list(entry.colloquial)}, score=1.0, found_by={"llm"})
            out.append(term)
    return out, invalid


def _count(terms: Sequence[_Term], plains: Sequence[Plain]) -> None:
    """How often the documents hold each term, in any formal form; a longer term hides the shorter ones in it."""
    matcher = FormMatcher((form, i) for i, term in enumerate(terms) for form in term.formal)
    counts = Counter(i for p in plains for _, _, i in matcher.find("\n".join((*p.lines, *p.code, *p.blocks))))
    for i, term in enumerate(terms):
        term.count = counts[i]


def _apply_review(pool: _Pool, review: Sequence[ReviewRow]) -> dict[str, Any]:
    done: dict[str, Any] = {d: 0 for d in ("accept", "edit", "add", "reject")}
    done |= {"undecided": 0, "rejected": [], "rejected_but_kept": [], "without_effect": [], "absorbed": []}
    owned = {_key(f): r.standard_term for r in review if r.decision not in ("", "reject") for f in r.colloquial}
    for row in review:
        done[row.decision or "undecided"] += 1
        if row.decision == "reject":
            hits = [t for t in pool.terms if _key(t.standard_term) == _key(row.standard_term)]
            kept = [t for t in hits if t.held or t.source == "expert"]
            pool.terms = [t for t in pool.terms if t not in hits or t in kept]
            name = "rejected_but_kept" if kept else "rejected" if hits else "without_effect"
            done[name].append(row.standard_term)
        elif row.decision:
            _decide(pool, row)
    # What the expert calls a colloquial form is no term of its own.
    for term in [t for t in pool.terms if t.source != "expert" and not t.held and _key(t.standard_term) in owned]:
        pool.terms.remove(term)
        done["absorbed"].append(term.standard_term)
    return done


def _decide(pool: _Pool, row: ReviewRow) -> None:
    """Accept confirms and completes; edit and add set the fields. Several machine terms for one concept become one."""
    hits = pool.find(row.formal)
    first = next((t for t in hits if t.held), hits[0] if hits else None)
    term = first or _Term(row.standard_term)
    if first is None:
        pool.terms.append(term)
    others = [t for t in hits if t is not term and not (t.held and term.held)]
    pool.terms = [t for t in pool.terms if t not in others]
    term.found_by |= {"expert"}.union(*(t.found_by for t in others))
    term.kind = next((t.kind for t in (term, *others) if t.kind != "term"), "term")
    machine = (term.abbreviation, term.full_form, term.colloquial, term.tag)
    term.standard_term, term.source = row.standard_term, "expert"
    term.abbreviation, term.full_form, term.tag = row.abbreviation, row.full_form, row.tag
    term.colloquial = list(row.colloquial)
    if row.decision == "accept":
        term.abbreviation = row.abbreviation or machine[0]
        term.full_form = row.full_form or (machine[1] if machine[1] != row.standard_term else "")
        term.colloquial += [f for f in machine[2] if f not in row.colloquial]
        term.tag = row.tag or machine[3]


def _limit(pool: _Pool, config: DictionaryConfig) -> dict[str, int]:
    machine = [t for t in pool.terms if t.source != "expert" and not t.held]
    rare = [t for t in machine if t.count < config.min_count]
    ranked = sorted((t for t in machine if t.count >= config.min_count), key=lambda t: (-t.score, -t.count, t.standard_term))
    gone = {id(t) for t in (*rare, *ranked[config.max_candidates :])}
    pool.terms = [t for t in pool.terms if id(t) not in gone]
    return {"under_min_count": len(rare), "over_max_candidates": max(0, len(ranked) - config.max_candidates)}


def _resolve(pool: _Pool) -> list[Conflict]:
    """A form that several terms claim stays with the first by (expert, count, name); the others lose it."""
    claims: dict[str, list[_Term]] = defaultdict(list)
    shown: dict[str, str] = {}
    for term in sorted(pool.terms, key=lambda t: t.order):
        for form in term.forms:
            key = form_key(form)
            shown.setdefault(key, form)
            if term not in claims[key]:
                claims[key].append(term)
    conflicts = []
    for key, terms in claims.items():
        if len(terms) < 2:
            continue
        # A standard term keeps its own name against another's colloquial form, except against the expert's word.
        terms.sort(key=lambda t: (t.order[0], form_key(t.standard_term) != key, t.order))
        conflicts.append(Conflict(shown[key], tuple(t.standard_term for t in terms)))
        for loser in terms[1:]:
            loser.colloquial = [f for f in loser.colloquial if form_key(f) != key]
            for name in ("abbreviation", "full_form"):
                if form_key(getattr(loser, name)) == key and form_key(loser.standard_term) != key:
                    setattr(loser, name, "")
    return conflicts


def _infer_tags(terms: Sequence[_Term], plains: Sequence[Plain]) -> int:
    """Give a term without tag that of the tagged terms beside it: in its own words first, then on the same lines.

    A neighbour counts by its rarity; the tag needs two lines, a quarter of the term's lines and half of all weight.
    """
    tagged = [i for i, t in enumerate(terms) if t.tag]
    if not tagged:
        return 0
    matcher = FormMatcher((form, i) for i, term in enumerate(terms) for form in term.formal)
    lines = [{i for _, _, i in matcher.find(line)} for p in plains for line in (*p.lines, *p.blocks)]
    df = Counter(i for line in lines for i in line)
    weight: dict[int, Counter[str]] = defaultdict(Counter)
    seen: dict[int, Counter[str]] = defaultdict(Counter)
    for line in lines:
        for i in line:
            if not terms[i].tag:
                for tag in {terms[j].tag for j in line if terms[j].tag}:
                    best = max(math.log(1 + len(lines) / df[j]) for j in line if terms[j].tag == tag)
                    weight[i][tag] += best
                    seen[i][tag] += 1
    inner = FormMatcher((form, terms[i].tag) for i in tagged for form in terms[i].formal)
    chosen: dict[int, str] = {}
    for i, term in enumerate(terms):
        own = {tag for form in term.formal for _, _, tag in inner.find(form)} if not term.tag else set()
        if len(own) == 1:
            chosen[i] = own.pop()
        elif weight[i]:
            tag, most = min(weight[i].items(), key=lambda item: (-item[1], item[0]))
            if 2 * most >= sum(weight[i].values()) and seen[i][tag] >= max(2, df[i] / 4):
                chosen[i] = tag
    for i, tag in chosen.items():
        terms[i].tag = tag
    return len(chosen)


def _figures(
    pool: _Pool, attached: Sequence[Attachment], log: Sequence[QueryRow], review: dict[str, Any]
) -> dict[str, Any]:
    terms = pool.terms
    matcher = FormMatcher((form, i) for i, term in enumerate(terms) for form in term.forms)
    used = [{i for _, _, i in matcher.find(row.query)} for row in log]
    expert = sum(len(t.colloquial) for t in terms if t.source == "expert")
    how = Counter(a.how for a in attached)
    by_log = {id(terms[a.term]) for a in attached}
    in_expert = sum(1 for a in attached if id(terms[a.term]) in by_log and terms[a.term].source == "expert")
    return {
        "terms": len(terms),
        "by_source": dict(sorted(Counter(t.source for t in terms).items())),
        "by_kind": dict(sorted(Counter(t.kind for t in terms).items())),
        "by_tag": dict(sorted(Counter(t.tag or "(none)" for t in terms).items())),
        "colloquial": {"string": how["string"], "vector": how["vector"], "expert": expert - in_expert},
        "attached": [
            {"form": a.form, "term": terms[a.term].standard_term, "how": a.how, "score": a.score, "count": a.count}
            for a in attached
        ],
        "review": review,
        "rejected": len(review["rejected"]),
        "unused": sorted(t.standard_term for i, t in enumerate(terms) if not any(i in u for u in used)) if log else [],
        "queries": {"all": len(log), "with_a_term": sum(map(bool, used))},
        "growth": pool.growth,
    }


def _review_rows(terms: Sequence[_Term], review: Sequence[ReviewRow]) -> list[dict[str, str]]:
    """The expert's rows as they were, then what the machine proposes and nobody has decided, the best first."""
    decided = [r for r in review if r.decision]
    notes = {_key(r.standard_term): r.note for r in review if not r.decision}
    rejected = {_key(r.standard_term) for r in review if r.decision == "reject"}
    rows = [r.row() for r in decided]
    for term in sorted((t for t in terms if t.source != "expert"), key=lambda t: (-t.score, t.order)):
        if _key(term.standard_term) not in rejected:
            note = notes.get(_key(term.standard_term)) or f"{', '.join(sorted(term.found_by)) or 'earlier run'}; {term.count}x"
            forms = (term.abbreviation, term.full_form, tuple(term.colloquial))
            rows.append(ReviewRow("", term.standard_term, *forms, term.tag, note).row())
    return rows


def write_dictionary(workspace_root: str | Path, entries: Sequence[TermEntry]) -> None:
    """Write ``keyword_dict.json`` (the entries) and ``keyword_dict.txt`` (jieba's user dictionary: word, frequency,
    tag; each form once; the frequency keeps the word whole)."""
    tokenizer = jieba_tokenizer()
    lines: dict[str, str] = {}
    for entry in entries:
        tag = entry.tag if entry.tag.isascii() and entry.tag.isalpha() and entry.tag.islower() else "nz"
        for form in entry.forms:
            form = " ".join(form.split())
            frequency = max(1000, entry.count, tokenizer.suggest_freq(form, tune=False) if language_of(form) == "zh" else 0)
            lines.setdefault(form.lower(), f"{form} {frequency} {tag}")
    write_records(Path(workspace_root) / "keyword_dict.json", entries)
    write_text(Path(workspace_root) / "keyword_dict.txt", "".join(f"{line}\n" for line in lines.values()))


def load_dictionary(path: str | Path) -> list[TermEntry]:
    """The entries of a ``keyword_dict.json``, in their order. Raises InputRefused when missing or not valid."""
    return read_records(path, TermEntry)
