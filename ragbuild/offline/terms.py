"""Dictionary entries in the making: merged by their forms, reviewed, counted, tagged, and freed of conflicts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ragbuild.core.config import DictionaryConfig
from ragbuild.core.forms import FormMatcher, form_key, singular
from ragbuild.core.records import TermEntry
from ragbuild.offline.entities import Plain
from ragbuild.offline.review import DECISIONS, ReviewRow


@dataclass(frozen=True)
class Conflict:
    """One form that several terms claim. The first of `terms` has it in use; all are named, for the expert."""

    form: str
    terms: tuple[str, ...]


@dataclass(eq=False)
class Term:
    """An entry in the making. `former`: the entries of an earlier run that live on in it; such a term stays."""

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
    former: list[TermEntry] = field(default_factory=list)

    @property
    def formal(self) -> list[str]:
        return list(dict.fromkeys(f for f in (self.standard_term, self.abbreviation, self.full_form) if f))

    @property
    def forms(self) -> list[str]:
        return list(dict.fromkeys((*self.formal, *self.colloquial)))

    @property
    def order(self) -> tuple[bool, int, str]:
        return self.source != "expert", -self.count, self.standard_term

    @property
    def decided(self) -> bool:
        """Does a row of the review that is at hand say so?"""
        return "expert" in self.found_by

    def fill(self, abbreviation: str, full_form: str) -> None:
        """Take a formal form for each that is still missing, unless it is here already in another spelling."""
        for name, form in (("abbreviation", abbreviation), ("full_form", full_form)):
            if form and not getattr(self, name) and same_key(form) not in map(same_key, self.formal):
                setattr(self, name, form)

    def entry(self) -> TermEntry:
        names = ("standard_term", "abbreviation", "full_form", "tag", "kind", "source", "count")
        colloquial = tuple(f for f in dict.fromkeys(self.colloquial) if f not in self.formal)
        return TermEntry(colloquial=colloquial, **{name: getattr(self, name) for name in names})


@lru_cache(maxsize=100_000)
def same_key(form: str) -> str:
    """Spellings with and without hyphen, singular and plural have one key."""
    return "".join(map(singular, form_key(form).split()))


class Pool:
    """The terms so far, found again by their formal forms."""

    def __init__(self) -> None:
        self.terms: list[Term] = []
        self.growth: list[dict[str, Any]] = []

    def add_all(self, stage: str, terms: Iterable[Term]) -> None:
        """Append each, or fill the gaps of the term that has one of its forms already."""
        index = {same_key(form): term for term in reversed(self.terms) for form in term.formal}
        for new in terms:
            known = next((index[k] for k in map(same_key, new.formal) if k in index), None)
            if known is None:
                self.terms.append(known := new)
            elif known is not new:
                known.found_by |= new.found_by
                known.score = max(known.score, new.score)
                known.kind = new.kind if known.kind == "term" else known.kind
                known.tag = known.tag or new.tag
                known.fill(new.abbreviation, new.full_form)
            for form in known.formal:
                index.setdefault(same_key(form), known)
        self.grown(stage, self.terms)

    def grown(self, stage: str, terms: Sequence[Term | TermEntry]) -> None:
        self.growth.append({"stage": stage, "terms": len(terms), "forms": sum(len(t.forms) for t in terms)})


def keep(pool: Pool, previous: Sequence[TermEntry], review: Sequence[ReviewRow]) -> None:
    """Let every entry of an earlier run live on: in the term found again for it, else as a term of its own.

    A term found again keeps its former names and gains what is new. A term that the expert has decided is called as
    the expert says, and takes in every former entry with one of its forms. Former colloquial forms and tags come back
    last (`keep_forms`): nothing is concluded from what an earlier run concluded, so that a rerun changes nothing.
    """
    formal = {same_key(f): t for t in reversed(pool.terms) for f in t.formal}
    named = {same_key(t.standard_term): t for t in reversed(pool.terms)}
    owned = {same_key(f): t for t in reversed(pool.terms) if t.decided for f in t.colloquial}
    accepted = {same_key(r.standard_term): r for r in review if r.decision == "accept"}
    lost = []
    for entry in sorted(previous, key=lambda e: (same_key(e.standard_term) not in named, e.standard_term)):
        keys = [same_key(f) for f in entry.formal]
        found = (named.get(keys[0]), formal.get(keys[0]), owned.get(keys[0]), *map(formal.get, keys[1:]))
        term = next((t for t in found if t), None)
        if term and term.decided:
            row = accepted.get(same_key(term.standard_term))
            if row and same_key(row.standard_term) == keys[0]:  # what the row leaves open stays as it was
                term.abbreviation = row.abbreviation or entry.abbreviation or term.abbreviation
                term.full_form = row.full_form or entry.full_form or term.full_form
            elif row:
                term.fill(entry.abbreviation, entry.full_form)
        elif term and not term.former:
            new = (term.abbreviation, term.full_form), ("", term.standard_term)
            for name in ("standard_term", "abbreviation", "full_form", "source"):
                setattr(term, name, getattr(entry, name))
            for forms in new:
                term.fill(*forms)
        else:
            term = Term(entry.standard_term, entry.abbreviation, entry.full_form, source=entry.source)
            lost.append(term)
        term.kind = term.kind if entry.kind == "term" else entry.kind
        term.former.append(entry)
    before = owners(pool.terms)
    pool.terms = lost + [t for t in pool.terms if t.former or t.decided or form_key(t.standard_term) not in before]


def keep_forms(pool: Pool, tagged: Container[str]) -> None:
    """Former forms that no other term has come back as colloquial ones; former tags stay, except in `tagged`."""
    held = {form_key(f): t for t in pool.terms for f in t.forms}
    for term in pool.terms:
        for form in (f for entry in term.former for f in entry.forms if f not in term.forms):
            if held.setdefault(form_key(form), term) is term:
                term.colloquial.append(form)
        if term.standard_term not in tagged:
            term.tag = next((e.tag for e in term.former if e.tag), term.tag)


def owners(terms: Iterable[Term]) -> dict[str, Term]:
    """Which term had a form (by its `form_key`) in the run before."""
    return {form_key(f): t for t in terms for entry in t.former for f in entry.forms}


def count_forms(terms: Sequence[Term], plains: Sequence[Plain]) -> None:
    """How often the documents hold each term, in any formal form; a longer term hides the shorter ones in it."""
    matcher = FormMatcher((form, i) for i, term in enumerate(terms) for form in term.formal)
    counts = Counter(i for p in plains for _, _, i in matcher.find("\n".join((*p.lines, *p.code, *p.blocks))))
    for i, term in enumerate(terms):
        term.count = counts[i]


def apply_review(pool: Pool, review: Sequence[ReviewRow], previous: Sequence[TermEntry]) -> dict[str, Any]:
    """Let the expert's rows win, in their order; returns how many there were of each kind and what they did.

    A rejected term of an earlier run stays (the dictionary only grows) and is listed as `rejected_but_kept`.
    """
    done: dict[str, Any] = {d or "undecided": sum(r.decision == d for r in review) for d in (*DECISIONS, "")}
    done |= {"rejected": [], "rejected_but_kept": [], "without_effect": [], "absorbed": []}
    owned = {same_key(f) for r in review if r.decision not in ("", "reject") for f in r.colloquial}
    held = {same_key(e.standard_term) for e in previous}
    for row in review:
        if row.decision == "reject":
            key = same_key(row.standard_term)
            hits = [t for t in pool.terms if t.source != "expert" and same_key(t.standard_term) == key]
            pool.terms = [t for t in pool.terms if t not in hits]
            name = "rejected_but_kept" if key in held else "rejected" if hits else "without_effect"
            done[name].append(row.standard_term)
        elif row.decision:
            _decide(pool, row)
    # What the expert calls a colloquial form is no term of its own.
    absorbed = [t for t in pool.terms if t.source != "expert" and same_key(t.standard_term) in owned]
    pool.terms = [t for t in pool.terms if t not in absorbed]
    done["absorbed"] = [t.standard_term for t in absorbed]
    return done


def _decide(pool: Pool, row: ReviewRow) -> None:
    """Accept confirms and completes; edit and add set the fields. Several machine terms for one concept become one."""
    keys = set(map(same_key, row.formal))
    hits = [t for t in pool.terms if not keys.isdisjoint(map(same_key, t.formal))] or [Term(row.standard_term)]
    term = hits[0]
    if term not in pool.terms:
        pool.terms.append(term)
    pool.terms = [t for t in pool.terms if t not in hits[1:]]
    term.found_by = {"expert"}.union(*(t.found_by for t in hits))
    term.kind = next((t.kind for t in hits if t.kind != "term"), "term")
    machine = (term.abbreviation, term.full_form, term.colloquial, term.tag)
    term.standard_term, term.source = row.standard_term, "expert"
    term.abbreviation, term.full_form, term.tag = row.abbreviation, row.full_form, row.tag
    term.colloquial = list(row.colloquial)
    if row.decision == "accept":
        term.abbreviation = row.abbreviation or machine[0]
        term.full_form = row.full_form or (machine[1] if machine[1] != row.standard_term else "")
        term.colloquial += [f for f in machine[2] if f not in row.colloquial]
        term.tag = row.tag or machine[3]


def limit(pool: Pool, config: DictionaryConfig) -> dict[str, int]:
    """Keep the machine's best `max_candidates` terms that documents hold `min_count` times; returns what went."""
    machine = [t for t in pool.terms if t.source != "expert" and t.found_by]
    ranked = [t for t in machine if t.count >= config.min_count]
    ranked.sort(key=lambda t: (-t.score, -t.count, t.standard_term))
    good = {id(t) for t in ranked[: config.max_candidates]}
    pool.terms = [t for t in pool.terms if t.source == "expert" or t.former or id(t) in good]
    return {"under_min_count": len(machine) - len(ranked), "over_max_candidates": len(ranked) - len(good)}


def resolve(pool: Pool) -> list[Conflict]:
    """A form that several terms claim stays with the first by (expert, had it before, count, name)."""
    claims: dict[str, list[Term]] = defaultdict(list)
    shown: dict[str, str] = {}
    before = owners(pool.terms)
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
        terms.sort(
            key=lambda t: (not t.decided, before.get(key, t) is not t, form_key(t.standard_term) != key, t.order)
        )
        conflicts.append(Conflict(shown[key], tuple(t.standard_term for t in terms)))
        for loser in terms[1:]:
            loser.colloquial = [f for f in loser.colloquial if form_key(f) != key]
            for name in ("abbreviation", "full_form"):
                if form_key(getattr(loser, name)) == key and form_key(loser.standard_term) != key:
                    setattr(loser, name, "")
    return conflicts


def infer_tags(terms: Sequence[Term], plains: Sequence[Plain]) -> int:
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
        rarest: dict[str, float] = defaultdict(float)
        for j in line:
            if tag := terms[j].tag:
                rarest[tag] = max(rarest[tag], math.log(1 + len(lines) / df[j]))
        for i in (i for i in line if not terms[i].tag):
            weight[i].update(rarest)  # type: ignore[arg-type]
            seen[i].update(rarest.keys())
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
