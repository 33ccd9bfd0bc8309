"""The term dictionary: candidates from documents, merged with the query log and validated by an expert.

One for all documents, and append-only: a form of an earlier run (`previous`) is never lost, not even when documents
are deleted or the expert rejects it later (which the report says). What the expert wrote wins over the machine: a
form that a later edit strikes out stays as a colloquial one. A rebuild upon its own output changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ragbuild.core.config import DictionaryConfig
from ragbuild.core.forms import FormMatcher, fold, form_key
from ragbuild.core.records import Document, TermEntry
from ragbuild.core.store import read_records, write_records, write_text
from ragbuild.core.text import jieba_tokenizer, language_of, normalise
from ragbuild.offline import terms as steps
from ragbuild.offline.candidates import HanWords, statistical_candidates
from ragbuild.offline.colloquial import Attachment, DocumentWords, attach
from ragbuild.offline.entities import Definition, Plain, find_definitions, find_entities, plain
from ragbuild.offline.review import QueryRow, ReviewRow, read_query_log, read_review, write_review
from ragbuild.offline.terms import Conflict, Pool, Term, same_key

__all__ = [
    "Conflict", "DictionaryResult", "QueryRow", "ReviewRow", "append_terms", "build_dictionary", "load_dictionary",
    "read_query_log", "read_review", "write_dictionary", "write_review",
]  # fmt: skip

_DEFINED = 3.0  # scores beside the 0 to 2.3 of the statistics
_PATTERN = {"product": 2.5, "protocol": 2.0, "command": 1.5, "error_code": 1.2}
_FLOOR = 0.75  # a statistical candidate below this score is not proposed


@dataclass(frozen=True)
class DictionaryResult:
    """`entries`: expert first, then by count and name. `review`: rows for the CSV. `report`: plain data, counts."""

    entries: list[TermEntry]
    conflicts: list[Conflict]
    review: list[dict[str, str]]
    report: dict[str, Any]


def build_dictionary(
    documents: Sequence[tuple[Document, str]],
    *,
    config: DictionaryConfig,
    query_log: Sequence[QueryRow] = (),
    review: Sequence[ReviewRow] = (),
    previous: Sequence[TermEntry] = (),
    embed: Callable[[list[str]], np.ndarray] | None = None,
    propose: Callable[[str], list[dict]] | None = None,
    statistics: bool = True,
) -> DictionaryResult:
    """Make the dictionary from (document, parsed Markdown) pairs.

    `embed` maps texts to rows of vectors (n, d); without it nothing is attached by vector. `propose` maps a document's
    text to proposed entries as dicts; a proposal that is no entry, or names what the text does not hold, is counted
    and dropped. `statistics` false: only what documents define or name. The order of documents does not matter.
    """
    texts = [normalise(markdown) for _, markdown in sorted(documents, key=lambda pair: pair[0].key)]
    plains = [plain(text) for text in texts]
    words = HanWords(jieba_tokenizer())
    pool, conflicts, report = Pool(), [], {}
    pool.grown("previous", previous)
    definitions = find_definitions(plains, words.cut)
    pool.add_all("abbreviations", _defined(definitions, plains, config, conflicts))
    entities = find_entities(plains)
    commands = {form_key(form) for form in entities["command"]}
    named = [Term(f, kind=k, score=_PATTERN[k], found_by={"entity"}) for k, c in entities.items() for f in sorted(c)]
    pool.add_all("named entities", named)
    frequent = statistical_candidates(plains, words, config.min_count) if statistics else []
    good = [c for c in frequent if c.score >= _FLOOR and not _of_command(form_key(c.form), commands)]
    pool.add_all("statistics", [Term(c.form, score=c.score, found_by=set(c.sources)) for c in good])
    if propose is not None:
        proposed, report["llm_invalid"] = _proposed(texts, propose)
        pool.add_all("language model", proposed)
    report["candidates"] = dict(sorted(Counter(s for t in pool.terms for s in t.found_by).items()))

    report["review"] = steps.apply_review(pool, review, previous)
    steps.keep(pool, previous, review)
    steps.count_forms(pool.terms, plains)
    report["dropped"] = steps.limit(pool, config)
    pool.grown("expert review", pool.terms)
    conflicts += steps.resolve(pool)

    forms = [(form, i) for i, term in enumerate(pool.terms) for form in term.forms]
    attached = attach([(r.query, r.count) for r in query_log], forms, DocumentWords(texts), words, config, embed)
    rejected = {same_key(r.standard_term) for r in review if r.decision == "reject"}
    attached = [a for a in attached if same_key(a.form) not in rejected]
    before = steps.owners(pool.terms)
    for a in attached:
        term = pool.terms[a.term]
        before.get(form_key(a.form), term).colloquial.append(a.form)
        if a.rivals:
            conflicts.append(Conflict(a.form, tuple(pool.terms[i].standard_term for i in (a.term, *a.rivals))))
    tagged = {t.standard_term for t in pool.terms if t.tag}
    report["tags_inferred"] = steps.infer_tags(pool.terms, plains)
    steps.keep_forms(pool, tagged)
    pool.grown("query log", pool.terms)
    report.update(_figures(pool, attached, query_log, report.pop("review")))
    ordered = sorted(pool.terms, key=lambda t: t.order)
    conflicts = sorted(set(conflicts), key=lambda c: (c.form, c.terms))
    return DictionaryResult([t.entry() for t in ordered], conflicts, _review_rows(ordered, review), report)


def append_terms(
    entries: Sequence[TermEntry],
    documents: Sequence[tuple[Document, str]],
    *,
    config: DictionaryConfig,
    review: Sequence[ReviewRow] = (),
) -> list[TermEntry]:
    """The entries as they are, and after them what new documents define or name (abbreviations, products, commands,
    error codes), or the expert has added since. The statistics need a whole corpus and are left to a full build."""
    held = {form_key(form) for entry in entries for form in entry.forms}
    found = build_dictionary(documents, config=config, review=review, previous=entries, statistics=False).entries
    new = [e for e in found if not any(form_key(form) in held for form in e.formal)]
    return [*entries, *new]


def _defined(
    definitions: Counter[Definition], plains: Sequence[Plain], config: DictionaryConfig, conflicts: list[Conflict]
) -> list[Term]:
    """One term for each abbreviation, both languages in it; a second meaning is a conflict and a term of its own."""
    from rapidfuzz import fuzz

    matcher = FormMatcher((f, f) for d in sorted(definitions, key=astuple) for f in (d.abbreviation, d.long_form))
    uses = Counter(form for p in plains for _, _, form in matcher.find("\n".join(p.lines)))
    groups: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: {"en": Counter(), "zh": Counter()})
    for d, n in sorted(definitions.items(), key=lambda item: (-item[1], item[0].long_form)):
        counter = groups[d.abbreviation][d.language]
        counter[next((f for f in counter if same_key(f) == same_key(d.long_form)), d.long_form)] += n
    out = []
    for abbreviation, by_language in sorted(groups.items()):
        best: list[str] = []
        for counter in by_language.values():
            ranked = sorted(counter, key=lambda form: (-counter[form], form))
            best += ranked[:1]
            for other in ranked[1:]:
                if counter[other] > 1 and fuzz.ratio(ranked[0], other) < config.string_similarity:  # no spelling of it
                    conflicts.append(Conflict(abbreviation, (ranked[0], other)))
                    out.append(Term(other, score=_DEFINED, found_by={"abbreviation"}))
        names = best if len(best) > 1 else [*best, abbreviation]
        names.sort(key=lambda form: (-uses[form], form))
        full = names[1] if names[1] != abbreviation else ""
        out.append(Term(names[0], abbreviation, full, score=_DEFINED, found_by={"abbreviation"}))
    return out


def _of_command(key: str, commands: set[str]) -> bool:
    return any(key == c or key.startswith(f"{c} ") or c.startswith(f"{key} ") for c in commands)


def _proposed(texts: Sequence[str], propose: Callable[[str], list[dict]]) -> tuple[list[Term], int]:
    out, invalid = [], 0
    for text in texts:
        held = fold(text)
        for row in propose(text):
            try:
                forms = row.get("colloquial", ())
                fields = {**row, "colloquial": tuple(forms) if isinstance(forms, list) else forms}
                entry = TermEntry.model_validate({**fields, "source": "llm", "count": 0}).model_dump()
            except (ValidationError, AttributeError, TypeError):
                entry = {"standard_term": ""}
            if entry["standard_term"] and len(entry["standard_term"]) <= 60 and fold(entry["standard_term"]) in held:
                out.append(Term(**entry | {"colloquial": list(entry["colloquial"])}, score=1.0, found_by={"llm"}))
            else:
                invalid += 1
    return out, invalid


def _figures(
    pool: Pool, attached: Sequence[Attachment], log: Sequence[QueryRow], review: dict[str, Any]
) -> dict[str, Any]:
    terms = pool.terms
    matcher = FormMatcher((form, i) for i, term in enumerate(terms) for form in term.forms)
    used = [{i for _, _, i in matcher.find(row.query)} for row in log]
    in_log = set().union(*used)
    how = Counter(a.how for a in attached)
    expert = sum(len(t.colloquial) for t in terms if t.source == "expert")
    expert -= sum(terms[a.term].source == "expert" for a in attached)
    return {
        "terms": len(terms),
        "by_source": dict(sorted(Counter(t.source for t in terms).items())),
        "by_kind": dict(sorted(Counter(t.kind for t in terms).items())),
        "colloquial": {"string": how["string"], "vector": how["vector"], "expert": expert},
        "attached": [
            {"form": a.form, "term": terms[a.term].standard_term, "how": a.how, "score": a.score, "count": a.count}
            for a in attached
        ],
        "review": review,
        "rejected": len(review["rejected"]),
        "unused": sorted(t.standard_term for i, t in enumerate(terms) if i not in in_log) if log else [],
        "queries": {"all": len(log), "with_a_term": sum(map(bool, used))},
        "growth": pool.growth,
    }


def _review_rows(terms: Sequence[Term], review: Sequence[ReviewRow]) -> list[dict[str, str]]:
    """The expert's rows as they were, then what the machine proposes and nobody has decided, the best first."""
    notes = {same_key(r.standard_term): r.note for r in review if not r.decision}
    rejected = {same_key(r.standard_term) for r in review if r.decision == "reject"}
    rows = [r for r in review if r.decision]
    for term in sorted((t for t in terms if t.source != "expert"), key=lambda t: (-t.score, t.order)):
        if (key := same_key(term.standard_term)) not in rejected:
            note = notes.get(key) or f"{', '.join(sorted(term.found_by)) or 'earlier run'}; {term.count}x"
            forms = (term.abbreviation, term.full_form, tuple(term.colloquial))
            rows.append(ReviewRow("", term.standard_term, *forms, term.tag, note))
    return [row.row() for row in rows]


def write_dictionary(workspace_root: str | Path, entries: Sequence[TermEntry]) -> None:
    """Write ``keyword_dict.json`` (the entries) and ``keyword_dict.txt`` (jieba's user dictionary: word, frequency,
    tag; each form once; the frequency keeps the word whole)."""
    tokenizer = jieba_tokenizer()
    lines: dict[str, str] = {}
    for entry in entries:
        tag = entry.tag if entry.tag.isascii() and entry.tag.isalpha() and entry.tag.islower() else "nz"
        for form in entry.forms:
            form = " ".join(form.split())
            least = tokenizer.suggest_freq(form, tune=False) if language_of(form) == "zh" else 0
            frequency = max(1000, entry.count, least)
            lines.setdefault(form.lower(), f"{form} {frequency} {tag}")
    write_records(Path(workspace_root) / "keyword_dict.json", entries)
    write_text(Path(workspace_root) / "keyword_dict.txt", "".join(f"{line}\n" for line in lines.values()))


def load_dictionary(path: str | Path) -> list[TermEntry]:
    """The entries of a ``keyword_dict.json``, in their order. Raises InputRefused when missing or not valid."""
    return read_records(path, TermEntry)
