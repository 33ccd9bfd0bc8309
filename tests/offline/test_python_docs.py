"""A corpus made of docstrings: deterministic, sized, spans that hold, and questions whose words are not in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ragbuild.core.config import ChunkConfig, CorpusConfig, ParseConfig
from ragbuild.core.text import TokenCounter
from ragbuild.offline.chunk import chunk_corpus
from ragbuild.offline.evalset import ChunkMap, load_pairs, pair_cases
from ragbuild.offline.parse.corpus import CorpusResult, parse_corpus
from ragbuild.offline.python_docs import LIBRARIES, _chapter, _Item, installed, write_python_docs
from ragbuild.offline.see_also import key, questions

DOC = """Multiply things.

It multiplies `a` by :func:`~numpy.foo`, and ``b`` too.

Parameters
----------
a : array_like
    The first
    of both.
b : int, optional
    The second.

See Also
--------
other : Divide one array by another, in place of this.

Examples
--------
Session:

>>> multiply(2, 3)
6

.. versionadded:: 1.2
"""


def test_a_docstring_becomes_a_chapter_without_see_also():
    assert _chapter(_Item("lib.multiply", DOC, "multiply(a, b)")) == (
        "## lib.multiply\n\n`multiply(a, b)`\n\nMultiply things.\n\nIt multiplies `a` by `numpy.foo`, and `b` too.\n\n"
        "### Parameters\n\n- a : array_like\n  The first\n  of both.\n- b : int, optional\n  The second.\n\n"
        "### Examples\n\nSession:\n\n```\n>>> multiply(2, 3)\n6\n```\n\nversionadded: 1.2"
    )


def said(summary: str, *entries: str) -> str:
    return f"{summary}.\n\nSee Also\n--------\n" + "\n".join(entries)


def test_descriptions_become_questions_or_are_dropped_for_a_reason():
    docs = {
        "lib.add": said("Sum", "mean : Compute the arithmetic average of all values.", "median : Equivalent function."),
        "lib.mean": "Average along an axis.",
        "lib.median": said(
            "Middle", "lib.std : Spread of the\n    values around their middle", "gone : No known thing."
        ),
        "lib.std": said("Width", "mean", "    Arithmetic mean", "add, mean : Two things of one kind.", "add : Sum"),
        "lib.var": said("Square", "copy : Duplicate every element twice over.", "mean : Average along an axis"),
        "lib.copy": said("Same", "add : Add all the numbers up.", "var : Compute squares of all deviations."),
        "lib.vars": said("Same", *(f"{name} : Smooth every value out slowly." for name in ("copy", "mean", "std"))),
    }
    summaries = {name: doc.split("\n")[0] for name, doc in docs.items()}
    found, dropped = questions({"lib": docs}, summaries)
    assert {name: query for name, [(query, _)] in found.items()} == {
        "lib.mean": "How do I compute the arithmetic average of all values in lib?",
        "lib.std": "What is there for spread of the values around their middle in lib?",
        "lib.add": "How do I add all the numbers up in lib?",
        "lib.var": "How do I compute squares of all deviations in lib?",
    }
    assert dropped == {
        "describes nothing that is documented": 1,  # gone; two names before one description are not read at all
        "too vague, or names what it describes": 3,  # "Equivalent function", "Arithmetic mean", "Sum": too few words
        "says what a summary says": 1,
        "its function's summary stands at another one too": 2,  # copy and vars both say "Same"
        "describes several, or what two other questions describe": 1,  # mean and std
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, CorpusResult]:
    out = tmp_path_factory.mktemp("docs")
    made = write_python_docs(out, 400)
    return out, made, parse_corpus(out, parse=ParseConfig(), corpus=CorpusConfig())


def test_the_size_is_what_was_asked_for(corpus: tuple[Path, dict, CorpusResult]):
    _, made, parsed = corpus
    assert not parsed.refused and not parsed.warnings
    assert {i["field"] for i in parsed.inferred} == {"product_model", "status"}, "the rest is in the front matter"
    documents = [e.document for e in parsed.documents]
    assert len(documents) == made["documents"] and {d.kb for d in documents} <= set(LIBRARIES)
    assert all(d.doc_version == installed()[d.kb] and d.language == "en" for d in documents)
    items = [(e.document, e.parsed.markdown, e.parsed.page_of) for e in parsed.documents]
    chunks = chunk_corpus(items, config=ChunkConfig(), counter=TokenCounter(ChunkConfig().tokenizer))
    assert chunks.stats["children"] == made["children"] >= 400
    last = [c for c in chunks.chunks if c.doc_key == documents[-1].key and not c.is_parent]
    assert made["children"] < 400 + 300 and len(last) > 0, "it stops with the document that makes it enough"


def test_spans_hold_and_no_question_is_in_the_corpus(corpus: tuple[Path, dict, CorpusResult]):
    out, made, parsed = corpus
    pairs = load_pairs(out / "eval_set.json")
    text = {e.document.key: e.parsed.markdown for e in parsed.documents}
    plain = [f" {key(t)} " for t in text.values()]
    assert len(pairs) == made["questions"] >= 20 and len({p.query for p in pairs}) == len(pairs)
    for pair in pairs:
        (span,) = pair.gt_spans
        assert " ".join(text[span.doc_key][span.start : span.end].split()) == pair.gt_answer
        heading = text[span.doc_key].rfind("\n## ", 0, span.start)
        chapter = text[span.doc_key][heading + 4 :].split("\n")[0]
        assert chapter.rsplit(".", 1)[-1] == pair.gt_keywords[0], "the summary of the function that was described"
        asked = key(re.sub(r"^How do I |^What is there for | in [\w-]+\?$", "", pair.query))
        assert not any(f" {asked} " in t for t in plain)
    items = [(e.document, e.parsed.markdown, e.parsed.page_of) for e in parsed.documents]
    chunks = chunk_corpus(items, config=ChunkConfig(), counter=TokenCounter(ChunkConfig().tokenizer))
    cases, lost = pair_cases(pairs, ChunkMap(chunks.chunks))
    assert len(cases) == len(pairs) and not lost


def test_no_document_holds_a_see_also_section(corpus: tuple[Path, dict, CorpusResult]):
    for entry in corpus[2].documents:
        assert not re.search(r"^#+ See Also|^See Also$", entry.parsed.markdown, re.M)


def test_the_same_libraries_give_the_same_files(corpus: tuple[Path, dict, CorpusResult], tmp_path: Path):
    out, made, _ = corpus
    assert write_python_docs(tmp_path, 400) == made
    files = sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert all((out / f).read_bytes() == (tmp_path / f).read_bytes() for f in files)
