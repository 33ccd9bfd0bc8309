"""Q-DOC-Q pairs from chunks: drafts of a generator, checked, freed of duplicates, chosen evenly over the corpus.

What is refused is counted with its reason. A pair's ground truth is the passage that holds the answer, as a span of the
parsed Markdown; other places that hold the same answer are noted with it, so that finding them counts as right.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Protocol

import numpy as np

from ragbuild.core.config import EvalSetConfig
from ragbuild.core.guard import injections
from ragbuild.core.records import Chunk, EvalPair, ExpertCase, GroundSpan, TermEntry, index_text
from ragbuild.core.store import sha256
from ragbuild.core.text import WordTokenizer, language_of
from ragbuild.offline.evalset import ChunkMap
from ragbuild.offline.question_rules import Draft, RuleGenerator, ask_more, join_questions, stable
from ragbuild.offline.question_text import CODE, bare

_UNSEEN = re.compile(
    r"\b(?:this|these|the (?:following|above|preceding|previous)|above|below) (?:section|table|chapter|figure|step|list"
    r"|page|document|example|paragraph|rule)s?\b|\b(?:table|figure|section|list|steps?) (?:above|below)\b"
    r"|\b(?:section|chapter|figure|table|page) \d|\b(?:as|see) (?:shown |described |mentioned )?(?:above|below)\b"
    r"|(?<![上线网])[上下][表图文](?![件档本])|如[上下](?=[所图表文述，：]|$)|[上下前后]述|(?<![版样文脚])本[章节表文例页]"
    r"|第\s?\d+\s?[章节步页]|(?<!常)见 ?\d",
    re.I,
)
_POINTING = re.compile(
    r"\A(?:it|this|that|they|these|those|he|she)\b|\A[^.:,]*\b(?:do|does|did|is|are|was|can|must|should|may|will) "
    r"(?:it|this|they|these|those)\b|\A[^。：，]*(?:它|(?<!应)该(?![怎如做用在由选不找注])|(?<![因如彼])此(?![外时])"
    r"|(?<![尤与])其(?![他它中余实]))",
    re.I,
)
SAME_PLACE = 0.8  # share of a question's other words that a chunk with its key facts holds to be a place of its answer
PLAIN = {"value", "entity", "use", "sentence", "steps"}  # may be asked with another
SEVERAL = 0.15  # share of questions that need several chunks, as far as there are any


class QuestionGenerator(Protocol):
    """Makes drafts for one section: a parent chunk and its children, in order."""

    name: str

    def __call__(self, parent: Chunk, children: Sequence[Chunk]) -> list[Draft]: ...


@dataclass(frozen=True)
class EvalSetResult:
    """The pairs, and what became of all drafts: counts, `refused` by reason with `examples`, and the `overlap` of each
    pair (share of the question's words that stand in its chunks)."""

    pairs: list[EvalPair]
    report: dict[str, Any]


@dataclass(frozen=True)
class _Item:
    """A draft that passed the checks. `words`: of the question, `facts`: of its keywords."""

    draft: Draft
    parent: Chunk
    children: tuple[str, ...]
    words: frozenset[str]
    facts: frozenset[str]
    also: tuple[GroundSpan, ...] = ()
    of: tuple[int, ...] = ()  # which of the draft's spans each stands for, where there are several


def make_eval_set(
    chunks: Iterable[Chunk],
    entries: Sequence[TermEntry],
    config: EvalSetConfig,
    seed: int,
    embed: Callable[[list[str]], np.ndarray],
    generator: QuestionGenerator,
) -> EvalSetResult:
    """Generate, check, merge and choose at most `config.max_pairs` pairs; the same for the same input and seed.
    `embed` gives unit vectors (n, dim)."""
    maker = _Maker(list(chunks), entries, config, seed, embed)
    sections = maker.sections()
    drafts, passed = 0, []
    for parent in sections:
        found = generator(parent, maker.of[parent.chunk_id])
        drafts += len(found)
        passed += filter(None, (maker.checked(draft, parent) for draft in found))
        if len(passed) > 6 * config.max_pairs:
            break  # enough to choose from
    single = maker.unlike(maker.distinct(passed))
    several = maker.joined(single)
    halves = {span for item in several for span in item.draft.spans}
    chosen = maker.choose([*several, *(i for i in single if len(i.children) > 1 or i.draft.spans[0] not in halves)])
    pairs = sorted((maker.pair(item, generator.name) for item in chosen), key=lambda p: p.pair_id)
    report = {
        "generator": generator.name, "sections": len(sections), "drafts": drafts, "accepted": len(single),
        "pairs": len(pairs), "with_other_places": sum(bool(p.also_spans) for p in pairs),
        "refused": dict(maker.refused.most_common()), "examples": dict(maker.examples),
        "overlap": [round(maker.overlap(item), 4) for item in chosen], **getattr(generator, "counts", {}),
    }  # fmt: skip
    return EvalSetResult(pairs, report)


class _Maker:
    """What the steps of one run share: chunks, their words, and the counts of what was refused."""

    def __init__(
        self, chunks: list[Chunk], entries: Sequence[TermEntry], config: EvalSetConfig, seed: int, embed: Callable
    ) -> None:
        self.config, self.seed, self.embed, self.map = config, seed, embed, ChunkMap(chunks)
        self.parents = [c for c in chunks if c.is_parent]
        self.children = {c.chunk_id: c for c in chunks if not c.is_parent}
        self.of: dict[str | None, list[Chunk]] = defaultdict(list)
        self.tokenizer, self.rules = WordTokenizer(entries), RuleGenerator(entries)
        self.words = {i: frozenset(self.tokenizer(index_text(child))) for i, child in self.children.items()}
        self.holders: dict[str, set[str]] = defaultdict(set)  # word -> children
        for i, child in self.children.items():
            self.of[child.parent_id].append(child)
            for word in self.words[i]:
                self.holders[word].add(i)
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = defaultdict(list)

    def refuse(self, reason: str, query: str) -> None:
        self.refused[reason] += 1
        self.examples[reason] += [query] if len(self.examples[reason]) < 3 else []

    def overlap(self, item: _Item) -> float:
        held = frozenset().union(*(self.words[i] for i in item.children))
        return len(item.words & held) / max(1, len(item.words))

    def order(self, item: _Item) -> tuple[int, str]:
        return stable(self.seed, item.draft.spans, item.draft.kind), item.draft.query

    def sections(self) -> list[Chunk]:
        """Sections of documents in force, of all documents in turn, each document's in a stable random order."""
        rows: dict[str, list[Chunk]] = defaultdict(list)
        for parent in sorted(self.parents, key=lambda p: stable(self.seed, p.doc_key, p.span[0])):
            if parent.status != "superseded":
                rows[parent.doc_key].append(parent)
        ranked = [(n, stable(self.seed, key), p) for key, ps in rows.items() for n, p in enumerate(ps)]
        return [p for *_, p in sorted(ranked, key=lambda row: row[:2])]

    # Checks -----------------------------------------------------------------------------------------------------------

    def checked(self, draft: Draft, parent: Chunk) -> _Item | None:
        children = tuple(dict.fromkeys(g[0] for span in draft.spans for g in self.map.holding(span)))
        spans = [self.children[i].span for i in children]
        first, end = min((a for a, _ in spans), default=0), max((b for _, b in spans), default=0)
        if fault := self._fault(draft, bare(parent.content[first - parent.span[0] : end - parent.span[0]])):
            return self.refuse(fault, draft.query)
        words, facts = self.tokenizer(draft.query), self.tokenizer(" ".join(draft.keywords))
        if not facts:
            return self.refuse("no key fact in the answer", draft.query)
        return _Item(draft, parent, children, frozenset(words), frozenset(facts))

    def _fault(self, draft: Draft, text: str) -> str:
        """Why a draft is refused, or nothing. `text`: of its chunks, to compare by."""
        query, said = draft.query, bare(draft.query)
        size = len(query.split()) if language_of(query) == "en" else len(query) / 2
        faults = {
            "tries to give orders": injections(query) or injections(draft.answer),
            "other language than its document": language_of(query) != draft.language,
            "needs a context nobody sees": _UNSEEN.search(query),
            "points at something outside": _POINTING.search(query),
            "answer not in its chunks": not text or not all(bare(a) in text for a in draft.answer.split("\n")),
            "too short or too long": not 3 <= size <= 45 or len(draft.answer) > 3000,
            "not understandable alone": not self.rules.clear(query),
            "copied from its chunk": bare(re.split("[:：]", query)[-1]).rstrip("?？") in text,
            "its answer goes on": draft.answer.endswith((":", "：")),
            "no key fact in the answer": not draft.keywords or not all(bare(k) in text for k in draft.keywords),
            "gives its answer away": all(bare(k) in said for k in draft.keywords),
        }
        return next((reason for reason, found in faults.items() if found), "")

    def distinct(self, items: Sequence[_Item]) -> list[_Item]:
        """One question for each passage and type, none asked twice; what has different answers goes, all of it. What an
        error code means, causes or needs is one question, wherever it is answered: the longest answer stays. The other
        places are noted with it."""
        places: dict[tuple, _Item] = {}
        for item in sorted(items, key=self.order):
            if places.setdefault((item.draft.spans, item.draft.query_type), item) is not item:
                self.refuse("a second question of its type about its passage", item.draft.query)
        groups: dict[tuple, list[_Item]] = defaultdict(list)
        for item in places.values():
            codes = frozenset(CODE.findall(item.draft.about))
            groups[(codes, _kind(item), item.parent.status) if codes else (item.draft.language, item.words)].append(
                item
            )
        out = []
        for key, rows in groups.items():
            coded = len(key) == 3
            rows.sort(key=lambda i: (-len(i.draft.answer) * coded, self.order(i)))
            for language in dict.fromkeys(i.draft.language for i in rows):
                first, *more = [i for i in rows if i.draft.language == language]
                agree = coded or all(i.facts <= first.facts or first.facts <= i.facts for i in more)
                for item in more if agree else [first, *more]:
                    self.refuse("asked twice" if agree else "asked with different answers", item.draft.query)
                also = tuple(s for i in rows if i is not first for s in i.draft.spans)
                if agree and (kept := self._elsewhere(replace(first, also=also))):
                    out.append(kept)
        return out

    def _elsewhere(self, item: _Item) -> _Item | None:
        """Note the other places of the answer: chunks in force with its key facts and nearly all of the question."""
        own = frozenset().union(*(self.words[i] for i in item.children))
        rest, also = (item.words & own) - item.facts, list(item.also)
        known = {i for span in also for group in self.map.holding(span) for i in group}.union(item.children)
        found = set.intersection(*(self.holders.get(w, set()) for w in item.facts))
        for child in (self.children[i] for i in sorted(found - known)):
            label = self.rules.label(child, "")
            right = child.status == item.parent.status or (label and label in item.draft.query)
            held = len(rest & self.words[child.chunk_id]) >= SAME_PLACE * len(rest)
            if right and held and child.status != "superseded":
                also.append(GroundSpan(doc_key=child.doc_key, start=child.span[0], end=child.span[1]))
        if len(set(also)) > 8:
            return self.refuse("its answer stands nearly everywhere", item.draft.query)
        return replace(item, also=tuple(dict.fromkeys(also)))

    def unlike(self, items: Sequence[_Item]) -> list[_Item]:
        """Of two questions about one place that the embedder can hardly tell apart, the first stays."""
        vectors = self.embed([item.draft.query for item in items])
        here: dict[str, list[int]] = defaultdict(list)
        out = []
        for n, item in enumerate(items):
            near = {m for i in item.children for m in here[i] if item.facts & items[m].facts}
            if any(vectors[n] @ vectors[m] >= self.config.dedup_cosine for m in near):
                self.refuse("nearly the same as another about its chunk", item.draft.query)
                continue
            out.append(item)
            for i in item.children:
                here[i].append(n)
        return out

    # Several chunks, choice -------------------------------------------------------------------------------------------

    def joined(self, items: Sequence[_Item]) -> list[_Item]:
        """Two questions in one that only two chunks answer: more of one thing (its cause, its remedy), or two plain
        facts of a section or of one term in two documents; those with most words in common first, each part once."""
        groups: dict[Any, list[_Item]] = defaultdict(list)
        for item in items:
            if len(item.children) == 1 and item.parent.status == "active" and len(item.draft.query) < 90:
                for name in (
                    item.parent.chunk_id,
                    *((item.draft.language, t) for t in sorted(self.rules.terms(item.draft.plain))),
                ):
                    groups[name].append(item)
        pairs = dict.fromkeys(ab for rows in groups.values() for ab in permutations(rows[:20], 2) if _joins(*ab))
        used: set[str] = set()
        out: list[_Item] = []
        for a, b in sorted(pairs, key=lambda ab: (not _more(*ab), -len(ab[0].words & ab[1].words))):
            one, two, here = a.draft, b.draft, {a.parent.chunk_id} if a.parent is b.parent else set()
            held = set.intersection(*(self.holders[w] for w in a.facts | b.facts)) or {*a.also} & {*b.also}
            if held or a.children == b.children or {one.query, two.query, *here} & used:
                continue
            query = ask_more(one.query, _kind(b), one.language) if _more(a, b) else ""
            if query := query or join_questions(one.query, two.query, one.language):
                used |= {one.query, two.query, *here}
                keys = tuple(dict.fromkeys((*one.keywords[:2], *two.keywords[:2])))
                both = {"kind": "joined", "keywords": keys, "spans": one.spans + two.spans}
                draft = replace(one, query=query, plain=query, answer=f"{one.answer}\n{two.answer}", **both)
                also, of = a.also + b.also, (0,) * len(a.also) + (1,) * len(b.also)
                words, facts = a.words | b.words, a.facts | b.facts
                out.append(_Item(draft, a.parent, a.children + b.children, words, facts, also, of))
        return out[: self.config.max_pairs // 8]

    def choose(self, items: Sequence[_Item]) -> list[_Item]:
        """Documents in turn, of each the type asked least so far, in words furthest from the chunk; at most `per_child`
        of different types about a child."""
        pools: dict[str, list[_Item]] = defaultdict(list)
        for item in sorted(items, key=self.order):
            pools[item.parent.doc_key].append(item)
        types, kinds, asked, out = Counter(), Counter(), defaultdict(list), []

        def room(item: _Item) -> bool:
            of = asked[item.children[0]]
            return len(item.children) > 1 or (len(of) < self.config.per_child and item.draft.query_type not in of)

        def rank(item: _Item) -> tuple:
            few_wanted, type_, copied = (
                few and len(item.children) < 2,
                item.draft.query_type,
                round(4 * self.overlap(item)),
            )
            return few_wanted, types[type_], kinds[key, item.draft.kind], copied, len(asked[item.children[0]])

        while pools and len(out) < self.config.max_pairs:
            for key in sorted(pools, key=lambda k: stable(self.seed, k)):
                few = sum(len(i.children) > 1 for i in out) < SEVERAL * len(out)
                pools[key] = [i for i in pools[key] if room(i)]
                if not pools[key] or len(out) >= self.config.max_pairs:
                    del pools[key]
                    continue
                best = min(pools[key], key=rank)
                pools[key] = [i for i in pools[key] if i is not best]
                types[best.draft.query_type] += 1
                kinds[key, best.draft.kind] += 1
                if len(best.children) == 1:
                    asked[best.children[0]].append(best.draft.query_type)
                out.append(best)
        return out

    def pair(self, item: _Item, generator: str) -> EvalPair:
        draft, children = item.draft, [self.children[i] for i in item.children]
        name = "|".join(f"{s.doc_key}:{s.start}-{s.end}" for s in draft.spans) + draft.query_type
        return EvalPair(
            pair_id=f"q-{sha256(name)[:12]}", query=draft.query, gt_spans=draft.spans,
            also_spans=item.also, also_of=item.of, gt_doc_ids=item.children,
            gt_pages=tuple(sorted({p for c in children for p in (c.page, c.page_end)})),
            gt_answer=draft.answer, gt_keywords=draft.keywords, query_type=draft.query_type,
            gen_source="multi_chunk" if len(children) > 1 else "single_chunk", source_chunk_ids=item.children,
            language=draft.language, generator=generator,
        )  # fmt: skip


def _kind(item: _Item) -> str:
    return item.draft.kind.removeprefix("case_")


def _joins(a: _Item, b: _Item) -> bool:
    """May the two be asked in one question: more of one thing, or different plain facts?"""
    apart = a.parent.doc_id != b.parent.doc_id or (a.parent is b.parent and a.draft.kind == b.draft.kind)
    alike = len(a.words & b.words) > 0.5 * len(a.words | b.words) or not {a.draft.kind, b.draft.kind} <= PLAIN
    return _more(a, b) or (apart and not alike)


def _more(a: _Item, b: _Item) -> bool:
    """Does the second ask for the cause or the remedy of what the first asks about?"""
    order = {"meaning": 1, "cause": 2, "remedy": 3}
    codes = [set(CODE.findall(i.draft.about)) for i in (a, b)]
    same = codes[0] == codes[1] if any(codes) else a.draft.about == b.draft.about and a.parent is b.parent
    return same and 0 < order.get(_kind(a), 0) < order.get(_kind(b), 0)


def coverage(pairs: Sequence[EvalPair], chunks: Iterable[Chunk], min_pairs: int) -> dict[str, Any]:
    """How many pairs there are by type, language, source, product line and document, and in words what is missing."""
    of = {c.doc_key: c for c in chunks}
    named = {n: Counter(getattr(p, n) for p in pairs) for n in ("query_type", "language", "gen_source", "generator")}
    keys = [dict.fromkeys(s.doc_key for s in pair.gt_spans if s.doc_key in of) for pair in pairs]
    documents = Counter({key: 0 for key, c in of.items() if c.status != "superseded"})
    documents.update(key for some in keys for key in some)
    models = Counter({m: 0 for c in of.values() for m in c.product_model})
    models.update(m for some in keys for m in {m for key in some for m in of[key].product_model})
    without = sorted(of[key].doc_source for key, n in documents.items() if not n)
    types = ("factual", "procedural", "troubleshooting", "definitional")
    warnings = [f"only {len(pairs)} pairs; at least {min_pairs} are wanted"] if len(pairs) < min_pairs else []
    warnings += [f"no pair is {name}" for name in types if not named["query_type"][name]]
    warnings += [f"no pair in '{code}'" for code in sorted({c.language for c in of.values()} - set(named["language"]))]
    warnings += [f"{len(without)} document(s) without a pair: {', '.join(without[:5])}"] if without else []
    counts = {**named, "product_model": models, "documents": Counter()}
    counts["documents"].update({of[key].doc_source: n for key, n in documents.items()})
    tables = {name: dict(sorted(c.items(), key=lambda row: (-row[1], row[0]))) for name, c in counts.items()}
    return {"pairs": len(pairs), **tables, "without": without, "warnings": warnings}


def merge_expert(
    pairs: Sequence[EvalPair], cases: Sequence[ExpertCase], chunks: ChunkMap, near: float = 80
) -> list[EvalPair]:
    """The generated pairs and the expert's answerable cases as pairs. Of two about one place that read nearly alike
    (rapidfuzz ratio, 0 to 100, of `near` or more) the expert's stays. Raises InputRefused for a case without place."""
    from rapidfuzz.fuzz import ratio

    mine = [(_expert_pair(case, chunks), bare(case.query)) for case in cases if case.answerable]

    def known(pair: EvalPair) -> bool:
        places = {i for s in pair.gt_spans for g in chunks.holding(s) for i in g}
        return any(places & set(own.gt_doc_ids) and ratio(bare(pair.query), query) >= near for own, query in mine)

    return [*(pair for pair in pairs if not known(pair)), *(own for own, _ in mine)]


def _expert_pair(case: ExpertCase, chunks: ChunkMap) -> EvalPair:
    spans = tuple(span for ref in case.ground for span in chunks.spans_of(ref))
    ids = tuple(dict.fromkeys(g[0] for span in spans for g in chunks.holding(span)))
    return EvalPair(
        pair_id=f"x-{case.case_id}", query=case.query, gt_spans=spans, gt_doc_ids=ids, source_chunk_ids=ids,
        also_spans=tuple(span for ref in case.also for span in chunks.spans_of(ref)), language=case.language,
        gt_pages=tuple(p for ref in case.ground for p in ref.pages), gt_answer=case.reference_answer,
        gt_keywords=case.gt_keywords, query_type=case.query_type, generator="expert",
        gen_source="multi_chunk" if len(ids) > 1 else "single_chunk",
    )  # fmt: skip
