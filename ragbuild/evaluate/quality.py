"""Quality of what the indexes are made from: chunks that end where the text does, terms that the index keeps whole.

Both return the rows of a table: what was looked at, what was found, of how many, examples. What was not measured has
None, never zero.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ragbuild.core.config import ChunkConfig
from ragbuild.core.forms import FormMatcher, form_key, units
from ragbuild.core.records import Chunk, index_text
from ragbuild.core.text import HAN, LexicalTokenizer, TokenCounter
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.parse.base import safe_name
from ragbuild.offline.review import QueryRow
from ragbuild.offline.sections import Unit, read_units

Row = dict[str, Any]
# Never right, whatever the text: one is enough for the gate. The others depend on the documents, and are only shown.
NO_SPAN, ACROSS, OVERLAP = "span does not give the content", "chunk across sections", "parents overlap"
OUTSIDE, ORPHAN = "child outside its parent", "child without its parent, or parent without a child"
VIOLATIONS = (NO_SPAN, ACROSS, OVERLAP, OUTSIDE, ORPHAN)
_ENDS = {"prose": "child ends inside a sentence", "row": "child ends inside a table row",
         "thead": "child ends inside a table row", "code": "child ends inside a line of code"}  # fmt: skip
KEPT_WHOLE, IN_INDEX = "terms kept whole by the tokenizer", "tokens of the query log that the index holds"
HAN_LENGTH = "characters in a Han token (median)"
CHILDREN = 20_000  # of a larger index every n-th child is looked at for the dictionary
_HAN, _RUN = re.compile(f"[{HAN}]"), re.compile(f"[{HAN}]+|[^{HAN}]+")


def parsed_text(folder: Path) -> Callable[[Chunk], str | None]:
    """Gives the parsed Markdown of a chunk's document from a build's ``parsed/``, or None where it is gone."""

    def read(chunk: Chunk) -> str | None:
        path = folder / f"{safe_name(chunk.doc_source)}.md"
        return path.read_bytes().decode("utf-8") if path.is_file() else None

    return read


def chunk_quality(
    chunks: Sequence[Chunk], markdown: Callable[[Chunk], str | None], limits: ChunkConfig, max_tokens: int | None
) -> list[Row]:
    """Rows for all chunks of a corpus. `markdown` gives the parsed text of a chunk's document, None where it is
    gone; `max_tokens` is what the embedder reads of one text (counted with the chunks' tokenizer), None: no limit."""
    parents = {c.chunk_id: c for c in chunks if c.is_parent}
    children = [c for c in chunks if not c.is_parent]
    found: dict[str, list[str]] = {name: [] for name in (*VIOLATIONS, *_ENDS.values())}
    by_document: dict[str, list[Chunk]] = defaultdict(list)  # two versions may have one file name
    for chunk in chunks:
        by_document[chunk.doc_key].append(chunk)
    tables, cut_tables, gone, looked_at = 0, [], [], list[Chunk]()
    for mine in by_document.values():
        spans = sorted((c.span, c.chunk_id) for c in mine if c.is_parent)
        found[OVERLAP] += [b[1] for a, b in pairwise(spans) if a[0][1] > b[0][0]]
        if (text := markdown(mine[0])) is None:
            gone.append(mine[0].doc_source)
            continue
        looked_at += mine
        for what, chunk_id in _against_text(mine, text, read_units(text)):
            if what == "table":
                tables += 1
                cut_tables += [chunk_id] if chunk_id else []
            else:
                found[what].append(chunk_id)
    held = Counter(c.parent_id for c in children)
    found[ORPHAN] += [p for p in parents if not held[p]]
    for c in children:
        parent = parents.get(c.parent_id or "")
        if parent is None or c.chunk_id not in parent.child_ids:
            found[ORPHAN].append(c.chunk_id)
        elif not parent.span[0] <= c.span[0] < c.span[1] <= parent.span[1]:
            found[OUTSIDE].append(c.chunk_id)
    of = dict.fromkeys((NO_SPAN, ACROSS), len(looked_at)) | {OUTSIDE: len(children), OVERLAP: len(parents)}
    of |= {ORPHAN: len(chunks)} | dict.fromkeys(_ENDS.values(), sum(not c.is_parent for c in looked_at))
    rows = [_row(name, ids, of[name], hard=name in VIOLATIONS) for name, ids in found.items()]
    active = [c for c in children if c.status == "active"]
    texts = [(" ".join(c.content.split()), c) for c in active]
    first = {text: c.chunk_id for text, c in reversed(texts)}
    twins = [c.chunk_id for text, c in texts if first[text] != c.chunk_id]
    short, longest = limits.child_tokens // 16, {True: limits.parent_tokens, False: limits.child_tokens}
    read = TokenCounter(limits.tokenizer).count([index_text(c) for c in children]) if max_tokens else []
    beyond = [c.chunk_id for c, n in zip(children, read, strict=False) if n > (max_tokens or 0)]
    rows += [
        _row("table in more than one child", cut_tables, tables),
        _row("active child that repeats another", twins, len(active)),
        _row(f"child under {short} tokens", [c.chunk_id for c in children if c.n_tokens < short], len(children)),
        _row("chunk over its limit", [c.chunk_id for c in chunks if c.n_tokens > longest[c.is_parent]], len(chunks)),
        _row(f"child longer than the embedder reads ({max_tokens or 'no limit'})", beyond, len(children)),
        _row("document without its parsed text (not looked at above)", gone, len(by_document)),
    ]
    return rows


def _against_text(chunks: Sequence[Chunk], text: str, parts: Sequence[Unit]) -> Iterator[tuple[str, str]]:
    """(what is wrong, chunk) for one document; ("table", a child that holds a part only, or "") for each table."""
    starts = [u.start for u in parts]

    def unit(at: int) -> Unit | None:
        return parts[i] if (i := bisect_right(starts, at) - 1) >= 0 else None

    for c in chunks:
        first, last = unit(c.span[0]), unit(c.span[1] - 1)
        if text[c.span[0] : c.span[1]] != c.content:
            yield NO_SPAN, c.chunk_id
        elif first and last and first.section is not last.section:
            yield ACROSS, c.chunk_id
        elif not c.is_parent and last and c.span[1] < last.end and last.kind in _ENDS:
            yield _ENDS[last.kind], c.chunk_id
    spans: dict[int, tuple[int, int]] = {}
    for u in parts:
        if u.kind in ("thead", "row"):
            spans[u.block] = (min(u.start, spans.get(u.block, (u.start, 0))[0]), u.end)
    children = sorted((c.span, c.chunk_id) for c in chunks if not c.is_parent)
    for start, end in spans.values():
        holding = [(span, name) for span, name in children if span[0] < end and start < span[1]]
        whole = any(a <= start and end <= b for (a, b), _ in holding)
        yield "table", holding[0][1] if holding and not whole else ""


def whole_tokens(tokenizer: LexicalTokenizer, form: str) -> list[set[str]]:
    """For each run (Han, or other) of a form the tokens that stand for all of it: what its parts alone don't give.

    An empty set means that the tokenizer never keeps this run whole.
    """
    out = []
    for run in _RUN.findall(form):
        cuts = [start for _, start, _ in units(run)]
        parts = {t for cut in cuts[1:] for part in (run[:cut], run[cut:]) for t in tokenizer(part)}
        out += [set(tokenizer(run)) - parts] if cuts else []
    return out


def dictionary_quality(version: IndexVersion, log: Sequence[QueryRow] = ()) -> list[Row]:
    """Rows for the dictionary that an index version was built with. A form is kept whole in a child when the child's
    tokens hold it uncut; a term is, when its formal forms are in at least half of the children that hold one."""
    entries, tokenizer = version.entries, version.tokenizer
    matcher = FormMatcher((form, (i, form)) for i, e in enumerate(entries) for form in e.formal)
    loose = FormMatcher((form, i) for i, e in enumerate(entries) for form in e.forms)
    whole: dict[str, list[set[str]]] = {}
    seen, kept, used, han = Counter[int](), Counter[int](), set[int](), Counter[int]()
    for child, held in _children(version):
        text, tokens = index_text(child), set(held)
        used |= {i for _, _, i in loose.find(text)}
        for i, form in {value for _, _, value in matcher.find(text)}:
            seen[i] += 1
            own = whole[form] if form in whole else whole.setdefault(form, whole_tokens(tokenizer, form))
            kept[i] += bool(own) and all(run & tokens for run in own)
        han.update(len(t) for t in held if _HAN.match(t))
    good = [i for i in seen if 2 * kept[i] >= seen[i]]
    applies = version.manifest["lexical"]["tokenizer"] != "char"  # Char-BM25 cuts every term, and means to
    owners: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        for form in entry.forms:
            owners[form_key(form)].add(entry.standard_term)
    middle = sorted(han.elements())[han.total() // 2] if han else None
    cut = [entries[i].standard_term for i in seen if 2 * kept[i] < seen[i]]
    unused = [e.standard_term for i, e in enumerate(entries) if i not in used]
    rows = [
        _row(KEPT_WHOLE, good if applies else None, len(seen), examples=_few("cut", cut)),
        _row("entries that no document uses", unused, len(entries)),
        _row("forms that two entries claim", [f for f, names in owners.items() if len(names) > 1], len(owners)),
        _row(HAN_LENGTH, middle, han.total()) | {"share": None},
    ]
    total = sum(r.count for r in log)
    known, words = 0, Counter[str]()
    for row in log:
        known += row.count * bool(loose.find(row.query))
        words.update({t: row.count for t in tokenizer(row.query)})
    unknown = [t for t, _ in words.most_common() if version.lexical.idf(t) <= 0]
    in_index = words.total() - sum(words[t] for t in unknown)
    rows += [
        _row("questions of the query log with a term", known if log else None, total),
        _row(IN_INDEX, in_index if log else None, words.total(), examples=_few("not held", unknown)),
    ]
    return rows


def _children(version: IndexVersion) -> Iterator[tuple[Chunk, list[str]]]:
    rows = np.arange(0, len(version), 1 + len(version) // CHILDREN)
    for start in range(0, len(rows), 512):
        yield from zip(*version.children_and_tokens(rows[start : start + 512]), strict=True)


def _few(label: str, names: Sequence[str]) -> list[str]:
    return [f"{label}: {', '.join(names[:6])}"] if names else []


def _row(
    what: str, found: Sequence[Any] | int | None, of: int, hard: bool = False, examples: Sequence[str] = ()
) -> Row:  # fmt: skip
    count = found if isinstance(found, int) or found is None else len(found)
    shown = examples or (list(map(str, found[:3])) if isinstance(found, list) else [])
    share = round(count / of, 4) if of and count is not None else None
    return {"what": what, "found": count, "of": of, "share": share, "must be 0": hard, "examples": " · ".join(shown)}
