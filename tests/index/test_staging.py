"""Versions that share: an update gives what writing it whole would give, and nothing published ever changes."""

from __future__ import annotations

import errno
import gc
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragbuild.core.config import Config, load_config
from ragbuild.core.errors import InputRefused
from ragbuild.core.records import Chunk, Document, TermEntry, index_text
from ragbuild.core.store import sha256
from ragbuild.index import staging
from ragbuild.index.filters import EVERYTHING, FIELDS, Filter
from ragbuild.index.lexical import TantivyIndex, lucene_idf
from ragbuild.index.staging import (
    DELETED,
    MAX_SEGMENTS,
    Added,
    Content,
    discard,
    prune,
    stage_again,
    stage_update,
    stage_whole,
    tokenizer_of,
)
from ragbuild.index.versions import IndexVersion, current_version, publish, version_names
from tests.conftest import FakeEmbedder, make_chunks, make_document

TERMS = [TermEntry(standard_term="单点登录", abbreviation="SSO", tag="login")]
WORDS = ["reset", "admin", "password", "E1042", "fan", "LG-500", "port", "证书", "过期", "单点登录", "密码", "端口"]
QUERIES = ["reset the admin password", "证书过期", "SSO 单点登录 port", "fan E1042 密码"]
EMBEDDER = FakeEmbedder()
EMBEDDED = {"name": "fake", "dim": EMBEDDER.dim}
FILTERS = [
    EVERYTHING,
    Filter(),
    Filter(status=("legacy",)),
    EVERYTHING.with_(product_model=("LG-500",)),
    EVERYTHING.with_(kb=("b",), doc_type=("faq",)),
    EVERYTHING.with_(tag=("t1",)),
    EVERYTHING.with_(doc_version=("v2",), naming=("fan",)),
]
ENGINES = ["rank_bm25", "tantivy"]


def configured(engine: str = "rank_bm25", **others: object) -> Config:
    return load_config(overrides={"lexical.engine": engine, **{k.replace("__", "."): v for k, v in others.items()}})


class Corpus:
    """What a version should hold: documents with their chunks in the order in which they came. The oracle.

    Each change is made to the index by an update, and to the oracle by changing its list.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self.indexes, self.config, self.number = folder / "indexes", config, 0
        self.files = folder / "files"
        self.files.mkdir(parents=True)
        self.held: dict[str, tuple[Document, list[Chunk]]] = {}
        self.entries: Sequence[TermEntry] = TERMS
        self.prompt = "# Identity"

    def make(self, texts: Sequence[str], **fields: object) -> tuple[Document, list[Chunk]]:
        """A new document of parents of up to three children."""
        self.number += 1
        n = self.number
        own = {"product_model": [["LG-500"], ["LG-900"], ["all"]][n % 3], "kb": "ab"[n % 2], "doc_version": f"v{n % 4}"}
        document = make_document(f"doc-{n}", **(own | {"doc_type": "faq" if n % 3 else "guide"} | fields))
        chunks: list[Chunk] = []
        for i in range(0, len(texts), 3):
            chunks += make_chunks(texts[i : i + 3], document, f"{n:03d}-{i}", tag=(f"t{n % 3}",))
        return document, chunks

    def kept(self, documents: Sequence[Document]) -> dict[str, dict[str, Path]]:
        out = {}
        for d in documents:
            path = self.files / f"{sha256(d.key)}.md"
            path.write_text(f"# {d.title} 手册\n{d.key}\n", encoding="utf-8")
            out[d.key] = {"document.md": path}
        return out

    def content(self, new: Sequence[Document], base: IndexVersion | None = None) -> Content:
        documents = sorted((d for d, _ in self.held.values()), key=lambda d: d.key)
        entries = base.entries if base is not None and base.entries == self.entries else self.entries
        return Content(documents, entries, self.prompt, self.kept(new), {"command": "ingest", "why": "test"})

    def encode(self, document_and_chunks: tuple[Document, list[Chunk]]) -> Added:
        texts = [index_text(c) for c in document_and_chunks[1] if not c.is_parent]
        tokenizer = tokenizer_of(self.config, self.entries)
        return Added(document_and_chunks[1], [tokenizer(t) for t in texts], EMBEDDER.encode_documents(texts))

    def whole(self, indexes: Path | None = None) -> IndexVersion:
        """The same, written whole."""
        indexes = indexes or self.indexes
        chunks = [c for _, chunks in self.held.values() for c in chunks]
        content = self.content([d for d, _ in self.held.values()])
        name = stage_whole(
            indexes, chunks, content, config=self.config, encode=EMBEDDER.encode_documents, embedder=EMBEDDED
        )
        publish(indexes, name)
        return IndexVersion(indexes)

    def start(self, texts: Sequence[Sequence[str]]) -> IndexVersion:
        for document, chunks in map(self.make, texts):
            self.held[document.key] = (document, chunks)
        return self.whole()

    def update(
        self, add: Sequence[Sequence[str]] = (), remove: Sequence[str] = (), status: Sequence[str] = (),
        publishes: bool = True, **options: object,
    ) -> str:  # fmt: skip
        """Documents leave, change their status (with tokens and vectors as they are), and come; returns the name."""
        base = IndexVersion(self.indexes)
        leaving = [self.held[key][0] for key in dict.fromkeys([*remove, *status])]
        gone = [base.rows_of_document(d) for d in leaving]
        added = [self._as_legacy(base, key) for key in status if key not in remove]
        for key in [*remove, *status]:
            document, chunks = self.held.pop(key, (None, []))
            if document is not None and key not in remove:
                fields = {"status": "legacy" if document.status == "active" else "active"}
                self.held[key] = (
                    document.model_copy(update=fields),
                    [c.model_copy(update=fields) for c in chunks],
                )
        new = [self.make(texts) for texts in add]
        self.held |= {document.key: (document, chunks) for document, chunks in new}
        content = self.content([d for d, _ in new], base)
        name = stage_update(
            self.indexes, base, content, config=self.config, gone=np.concatenate([np.zeros(0, np.int64), *gone]),
            added=[*added, *map(self.encode, new)], **options,
        )  # fmt: skip
        if publishes:
            publish(self.indexes, name)
        return name

    def _as_legacy(self, base: IndexVersion, key: str) -> Added:
        rows = base.rows_of_document(self.held[key][0])
        children, tokens = base.children_and_tokens(rows)
        fields = {"status": "legacy" if self.held[key][0].status == "active" else "active"}
        chunks = [c.model_copy(update=fields) for c in (*base.parents_of(rows), *children)]
        return Added(chunks, tokens, base.dense.vectors(rows))


def found(version: IndexVersion, rows: np.ndarray) -> list[str]:
    return [version.ids[r].decode() for r in rows]


def assert_same(updated: IndexVersion, whole: IndexVersion) -> None:
    """Everything that a reader can ask gives the same; only names of versions and segments differ."""
    rows = np.arange(len(whole))
    assert updated.ids.tolist() == whole.ids.tolist(), "those that stay in their order, those that come after them"
    assert len(set(updated.ids.tolist())) == len(updated)
    assert updated.id_rank.tolist() == whole.id_rank.tolist()
    assert updated.children(rows) == whole.children(rows)
    assert updated.all_parents() == whole.all_parents()
    assert [updated.parents_of(rows[i : i + 1]) for i in rows] == [whole.parents_of(rows[i : i + 1]) for i in rows]
    assert [updated.families(rows[i : i + 1]).tolist() for i in rows] == [
        whole.families(rows[i : i + 1]).tolist() for i in rows
    ]
    assert updated.tokens(rows) == whole.tokens(rows)
    assert np.array_equal(updated.dense.vectors(rows), whole.dense.vectors(rows))
    assert (updated.documents, updated.entries, updated.prompt) == (whole.documents, whole.entries, whole.prompt)
    assert updated.kept == whole.kept
    assert [updated.markdown(d.key) for d in whole.documents] == [whole.markdown(d.key) for d in whole.documents]
    assert {d.key: updated.rows_of_document(d).tolist() for d in whole.documents} == {
        d.key: whole.rows_of_document(d).tolist() for d in whole.documents
    }
    for count in ("children", "parents", "n_tokens", "documents"):
        assert updated.manifest[count] == whole.manifest[count], count
    assert [updated.values(f) for f in FIELDS] == [whole.values(f) for f in FIELDS]
    assert sum(s["children"] - s["deleted"] for s in updated.manifest["segments"]) == len(whole)
    uids = updated.uids(rows)
    assert (np.diff(uids) > 0).all() and updated.manifest["next_uid"] > uids[-1]
    assert updated.verify() == []
    for where in FILTERS:
        allowed, other = updated.allowed(where), whole.allowed(where)
        assert (allowed is None) == (other is None)
        assert allowed is None or allowed.tolist() == other.tolist()
        for query in QUERIES:
            vector = EMBEDDER.encode_queries([query])[0]
            for k in (3, len(whole)):
                (a, s), (b, t) = updated.dense.search(vector, k, allowed), whole.dense.search(vector, k, allowed)
                assert a.tolist() == b.tolist() and s == pytest.approx(t, abs=1e-6)
            _assert_same_lexical(updated, whole, query, where, allowed)


def _assert_same_lexical(updated, whole, query, where, allowed) -> None:
    """Exactly the same with rank_bm25, and with tantivy when no deleted child counts any more.

    Until then tantivy's frequencies count up to a tenth of deleted children: what is found is the same, and a
    frequency is too high by these at most.
    """
    tokens = whole.tokenizer(query)
    assert updated.tokenizer(query) == tokens
    (a, s), (b, t) = (v.search_lexical(tokens, len(whole), where, allowed) for v in (updated, whole))
    lag = updated.manifest["lexical"]["deleted"]
    if updated.manifest["lexical"]["engine"] == "rank_bm25":
        assert a.tolist() == b.tolist() and np.array_equal(s, t)
        assert [updated.lexical.idf(x) for x in tokens] == [whole.lexical.idf(x) for x in tokens]
    elif not lag:
        assert a.tolist() == b.tolist() and s == pytest.approx(t, rel=1e-5)
    else:
        assert lag <= DELETED * len(whole)
        assert set(a.tolist()) == set(b.tolist()) and (s > 0).all()
    for token in set(tokens):
        held = len(whole.lexical.rows_with(token))
        assert sorted(updated.lexical.rows_with(token)) == sorted(whole.lexical.rows_with(token))
        low, high = lucene_idf(len(whole), held + lag), lucene_idf(len(whole), held) if held else math.inf
        assert updated.lexical.idf(token) == 0 or low <= updated.lexical.idf(token) <= high
        assert updated.lexical.idf(token) > 0 or not held
    assert updated.lexical.n_documents == len(whole)
    assert updated.lexical.average_length == pytest.approx(whole.lexical.average_length)


def files(indexes: Path) -> dict[str, str]:
    """Hash of every file of the index, by relative path; without ``CURRENT`` and tantivy's empty lock files."""
    return {
        p.relative_to(indexes).as_posix(): sha256(p.read_bytes())
        for p in indexes.rglob("*") if p.is_file() and p.name != "CURRENT" and not p.name.endswith(".lock")
    }  # fmt: skip


def texts(n: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=5)) for _ in range(n)]


def pieces(n: int, each: int = 1) -> list[list[str]]:
    return [texts(each, seed) for seed in range(n)]


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Most of the time of these tests would be that; none of them cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Thirty documents of one chunk, rank_bm25."""
    out = Corpus(tmp_path, configured())
    out.start(pieces(30))
    return out


# --- against the oracle ----------------------------------------------------------------------------------------------

_text = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)
_new = st.lists(st.lists(_text, min_size=1, max_size=5), max_size=2)
_some = st.lists(st.integers(0, 99), max_size=2)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=8)
@given(data=st.data(), first=st.integers(1, 14), steps=st.lists(st.tuples(_new, _some, _some), min_size=1, max_size=4))
def test_updates_give_what_writing_it_whole_gives(tmp_path_factory, engine: str, data, first: int, steps):
    folder = tmp_path_factory.mktemp("staging")
    corpus = Corpus(folder, configured(engine))
    corpus.start([texts(1 + i % 4, i) for i in range(first)])
    for add, removed, changed in steps:
        keys = list(corpus.held)
        remove, status = ([keys[i % len(keys)] for i in dict.fromkeys(n % len(keys) for n in picked)]
                          for picked in (removed, changed))  # fmt: skip
        if not add and len(remove) >= len(keys):
            remove = remove[1:]
        before = files(corpus.indexes)
        corpus.update(add, remove, status)
        assert before.items() <= files(corpus.indexes).items()
    assert_same(IndexVersion(corpus.indexes), corpus.whole(folder / "whole"))
    shutil.rmtree(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_long_life(tmp_path, engine: str):
    """Documents of several chunks come, go and change their status for fifteen updates."""
    corpus = Corpus(tmp_path, configured(engine))
    corpus.start([texts(1 + i % 5, i) for i in range(24)])
    rng, before = np.random.default_rng(5), {}
    for step in range(15):
        picked = rng.permutation(list(corpus.held))
        corpus.update([texts(int(rng.integers(1, 6)), 100 + step)], picked[: step % 3].tolist(), picked[3:4].tolist())
        now = files(corpus.indexes)
        assert before.items() <= now.items(), "what was published is never changed"
        before = now
        if step % 7 == 6:
            assert_same(IndexVersion(corpus.indexes), corpus.whole(tmp_path / f"whole-{step}"))
    assert prune(corpus.indexes, 1) == [f"v{n:04d}" for n in range(1, 16)]
    assert_same(IndexVersion(corpus.indexes), corpus.whole(tmp_path / "whole"))
    assert discard(corpus.indexes) == [], "pruning left nothing that no version names"


def test_tantivy_is_made_anew_when_a_tenth_is_deleted(tmp_path):
    """39 children, of which three leave (3 <= 0.1 * 36) and then a fourth: what is left is scored as if alone."""
    corpus = Corpus(tmp_path, configured("tantivy"))
    corpus.start([["alpha beta"]] * 20 + [["beta gamma"]] * 19)
    keys = list(corpus.held)
    corpus.update(remove=keys[:3])
    lagging = IndexVersion(corpus.indexes)
    assert lagging.manifest["lexical"]["deleted"] == 3
    assert lagging.lexical.idf("alpha") == pytest.approx(lucene_idf(36, 20)), "17 hold it; the deleted three count too"
    assert lagging.search_lexical(["alpha"], 50, EVERYTHING, None)[0].tolist() == list(range(17))
    corpus.update(remove=keys[3:4])
    anew = IndexVersion(corpus.indexes)
    assert anew.manifest["lexical"]["deleted"] == 0
    assert anew.lexical.idf("alpha") == pytest.approx(lucene_idf(35, 16))
    assert_same(anew, corpus.whole(tmp_path / "whole"))


def test_the_engine_changes_when_the_corpus_outgrows_it(tmp_path):
    corpus = Corpus(tmp_path, configured("auto", lexical__rank_bm25_up_to=5))
    assert corpus.start(pieces(4)).manifest["lexical"]["engine"] == "rank_bm25"
    corpus.update([["one"], ["two"]])
    grown = IndexVersion(corpus.indexes)
    assert grown.manifest["lexical"]["engine"] == "tantivy"
    assert_same(grown, corpus.whole(tmp_path / "whole"))
    corpus.update(remove=list(corpus.held)[:3])
    assert IndexVersion(corpus.indexes).manifest["lexical"]["engine"] == "tantivy", "it does not change back and forth"


def test_what_belongs_to_a_version_changes_with_it(corpus: Corpus):
    first = IndexVersion(corpus.indexes)
    kept = first.kept
    corpus.prompt = "# Another"
    corpus.entries = [*TERMS, TermEntry(standard_term="fan"), TermEntry(standard_term="端口")]
    corpus.update([["fan"]], remove=list(corpus.held)[:1])
    second = IndexVersion(corpus.indexes)
    assert (first.prompt, second.prompt) == ("# Identity", "# Another")
    assert (len(first.entries), len(second.entries)) == (1, 3)
    assert [v.manifest["built"]["terms_changed"] for v in (first, second)] == [0, 2]
    assert first.kept == kept and set(second.kept) == {d.key for d in second.documents}
    assert second.made == {"command": "ingest", "why": "test"} and second.manifest["made_by"] == "ingest"
    corpus.entries = [TERMS[0].model_copy(update={"count": 9}), *corpus.entries[1:]]
    corpus.update([["port"]])
    assert IndexVersion(corpus.indexes).manifest["built"]["terms_changed"] == 2, "a count alone is no change"


# --- segments --------------------------------------------------------------------------------------------------------


def test_forty_updates_of_one_document(corpus: Corpus):
    """Segments stay few, and a child is written again a number of times that grows with the logarithm alone."""
    expected, written, seen = IndexVersion(corpus.indexes).ids.tolist(), 0, {"s0001"}
    for n in range(40):
        corpus.update([[f"text {n}"]])
        version = IndexVersion(corpus.indexes)
        expected.append(f"c-{corpus.number:03d}-0-000".encode())
        assert version.ids.tolist() == expected
        segments = version.manifest["segments"]
        assert len(segments) <= MAX_SEGMENTS
        written += sum(s["children"] for s in segments if s["name"] not in seen)
        seen |= {s["name"] for s in segments}
    assert written <= 40 * math.log2(40), "children written, those that came among them"
    assert version.uids(np.arange(70)).tolist() == list(range(70))
    assert discard(corpus.indexes) == [], "merging left nothing behind"


def test_a_segment_is_written_again_when_a_tenth_is_deleted(corpus: Corpus):
    keys = list(corpus.held)
    corpus.update(remove=keys[10:13])
    marked = IndexVersion(corpus.indexes)
    (segment,) = marked.manifest["segments"]
    assert segment | {"hash": ""} == {"name": "s0001", "hash": "", "children": 30, "deleted": 3}
    assert (marked.folder / "s0001.deleted").stat().st_size == 4, "thirty bits"
    corpus.update(remove=keys[5:6])
    again = IndexVersion(corpus.indexes)
    (segment,) = again.manifest["segments"]
    assert (segment["name"], segment["children"], segment["deleted"]) == ("s0002", 26, 0)
    assert not list(again.folder.glob("*.deleted"))
    assert again.uids(np.arange(26)).tolist() == [n for n in range(30) if n not in (5, 10, 11, 12)]
    folder = corpus.indexes / "segments" / "s0002"
    assert not any(b"c-011-0-000" in f.read_bytes() for f in folder.iterdir()), "deleted text is not kept in it"


def test_a_segment_without_a_child_left_is_not_named(corpus: Corpus):
    corpus.update([["one", "two"]])
    added = list(corpus.held)[-1]
    assert len(IndexVersion(corpus.indexes).manifest["segments"]) == 2
    corpus.update(remove=[added])
    assert [s["name"] for s in IndexVersion(corpus.indexes).manifest["segments"]] == ["s0001"]


def test_many_small_batches_do_not_stay_in_a_merged_segment(tmp_path):
    """Columns that are read whole lie in few batches, also after segments of one document were put together."""
    corpus = Corpus(tmp_path, configured())
    corpus.start([texts(150, i) for i in range(4)])
    corpus.update(remove=list(corpus.held)[:1])
    version = IndexVersion(corpus.indexes)
    assert version.manifest["segments"][0]["name"] == "s0002"
    assert version._segments[0].keys["uid"].num_chunks == 1


def test_a_graph_finds_live_rows_only(tmp_path):
    config = configured(dense__hnsw_above=60, dense__hnsw_m=8)
    corpus = Corpus(tmp_path, config)
    corpus.start([[f"word{i} {w} text{j}" for j, w in enumerate(WORDS)] for i in range(10)])
    assert (corpus.indexes / "segments" / "s0001" / "hnsw.faiss").is_file()
    key = list(corpus.held)[4]
    lost = set(IndexVersion(corpus.indexes).ids[48:60].tolist())
    query = IndexVersion(corpus.indexes).dense.vectors(np.array([50]))[0]
    corpus.update([[f"other {i} word4" for i in range(3)]], remove=[key])
    version = IndexVersion(corpus.indexes)
    assert version.manifest["segments"][0]["deleted"] == 12 and version.dense._graphs[0] is not None
    exact = version.dense.vectors(np.arange(len(version))) @ query
    for k in (1, 10, 50, len(version)):
        rows, scores = version.dense.search(query, k)
        assert len(rows) == k and len(set(rows.tolist())) == k and rows.max() < len(version)
        assert not lost & set(version.ids[rows].tolist())
        assert scores == pytest.approx(exact[rows], abs=1e-6)
        assert np.mean(scores >= np.sort(exact)[-k] - 1e-6) >= 0.9
    allowed = version.allowed(EVERYTHING.with_(kb=("b",)))
    assert allowed[version.dense.search(query, 20, allowed)[0]].all()


# --- what was published stays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reader_finishes_on_its_version(tmp_path, engine: str):
    """It answers as before after updates and prunes; what it holds is removed when it is gone."""
    corpus = Corpus(tmp_path, configured(engine))
    corpus.start(pieces(30))
    reader = IndexVersion(corpus.indexes)  # nothing of it was read yet
    oracle = corpus.whole(tmp_path / "whole")
    for n in range(4):
        corpus.update([texts(2, 40 + n)], remove=list(corpus.held)[:5])
        assert prune(corpus.indexes, 1) == ([f"v{n + 1:04d}"] if n else [])
    assert version_names(corpus.indexes) == ["v0001", "v0005"]
    assert_same(reader, oracle)
    del reader
    gc.collect()
    assert prune(corpus.indexes, 1) == ["v0001"] and version_names(corpus.indexes) == ["v0005"]
    named = {s["name"] for s in IndexVersion(corpus.indexes).manifest["segments"]}
    assert {p.name for p in (corpus.indexes / "segments").iterdir()} == named
    assert len(list((corpus.indexes / "files").iterdir())) == len(corpus.held)
    assert_same(IndexVersion(corpus.indexes), corpus.whole(tmp_path / "whole-after"))
    assert prune(corpus.indexes, 1) == []


def test_pruning_keeps_the_last_ones_and_the_one_in_use(corpus: Corpus):
    for n in range(4):
        corpus.update([[f"text {n}"]])
    assert prune(corpus.indexes, 3) == ["v0001", "v0002"]
    assert [len(IndexVersion(corpus.indexes, n)) for n in ("v0003", "v0004", "v0005")] == [32, 33, 34]
    corpus.update([["never published"]], publishes=False)
    assert prune(corpus.indexes, 1) == ["v0003", "v0004"], "a staged one is not counted, nor removed"
    assert version_names(corpus.indexes) == ["v0005", "v0006"] and IndexVersion(corpus.indexes).name == "v0005"


def test_discard_removes_exactly_what_was_never_published(corpus: Corpus):
    corpus.update([["published"]])
    before = files(corpus.indexes)
    held = dict(corpus.held)
    assert corpus.update([["staged"]], remove=list(corpus.held)[:4], publishes=False) == "v0003"
    assert before.items() < files(corpus.indexes).items()
    assert discard(corpus.indexes) == [
        "removed version v0003, which was never published",
        "removed segments and files that no version names",
    ]
    assert files(corpus.indexes) == before and discard(corpus.indexes) == []
    corpus.held = held
    assert corpus.update([["again"]]) == "v0003"


@pytest.mark.parametrize("step", ["chunks and vectors", "lexical index"])
def test_a_writer_that_is_killed_leaves_the_version_in_use(tmp_path, step: str):
    corpus = Corpus(tmp_path, configured("tantivy"))
    corpus.start(pieces(12))
    before, held = files(corpus.indexes), dict(corpus.held)

    def dies(done: str) -> None:
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpus.update([["new"]], remove=list(corpus.held)[:3], on_step=dies)
    corpus.held = held
    assert current_version(corpus.indexes) == "v0001" and version_names(corpus.indexes) == ["v0001"]
    assert before.items() <= files(corpus.indexes).items()
    assert_same(IndexVersion(corpus.indexes), corpus.whole(tmp_path / "whole"))
    assert discard(corpus.indexes) == [
        "removed .building-v0002, which was half written",
        "removed segments and files that no version names",
    ]
    assert files(corpus.indexes) == before
    corpus.update([["new"]], remove=list(corpus.held)[:3])
    assert_same(IndexVersion(corpus.indexes), corpus.whole(tmp_path / "whole-after"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_former_version_comes_back_byte_for_byte(tmp_path, engine: str):
    corpus = Corpus(tmp_path, configured(engine))
    corpus.start(pieces(30))
    corpus.update([["old"]], remove=list(corpus.held)[:2])  # with marks of deletion and two segments
    held = dict(corpus.held)
    corpus.update([["newer"]], remove=list(corpus.held)[2:9])
    former, now = IndexVersion(corpus.indexes, "v0002"), files(corpus.indexes)
    assert stage_again(corpus.indexes, former, {"command": "rollback", "why": "it was better"}) == "v0004"
    assert current_version(corpus.indexes) == "v0003"
    publish(corpus.indexes, "v0004")
    back, after = IndexVersion(corpus.indexes), files(corpus.indexes)
    assert now.items() <= after.items()
    own = {"version.json", "made.json"}
    assert {k[6:]: v for k, v in after.items() if k[:5] == "v0004" and k[6:] not in own} == {
        k[6:]: v for k, v in after.items() if k[:5] == "v0002" and k[6:] not in own
    }
    assert back.manifest == former.manifest | {"version": "v0004", "made_by": "rollback"}
    assert back.made == {"command": "rollback", "why": "it was better"}
    corpus.held = held
    assert_same(back, corpus.whole(tmp_path / "whole"))
    assert prune(corpus.indexes, 1) == ["v0001", "v0003"], "the reader above holds the second"
    corpus.update([["after it"]], remove=list(corpus.held)[:1])
    assert_same(IndexVersion(corpus.indexes), corpus.whole(tmp_path / "whole-after"))


@pytest.mark.parametrize("engine", ENGINES)
def test_without_hard_links_files_are_copied(tmp_path, monkeypatch, engine: str):
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    corpus = Corpus(tmp_path, configured(engine))
    corpus.start(pieces(30))
    corpus.update([["new"]], remove=list(corpus.held)[:2])
    corpus.update([["newer"]])
    before = files(corpus.indexes)
    publish(corpus.indexes, stage_again(corpus.indexes, IndexVersion(corpus.indexes), {"command": "rollback"}))
    assert before.items() <= files(corpus.indexes).items()
    assert all(p.stat().st_nlink == 1 for p in corpus.indexes.rglob("*") if p.is_file())
    assert_same(IndexVersion(corpus.indexes), corpus.whole(tmp_path / "whole"))


# --- damage and refusals ---------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_found(tmp_path):
    corpus = Corpus(tmp_path, configured("tantivy", dense__hnsw_above=4))
    corpus.start(pieces(40))
    corpus.update([["new", "newer"]], remove=list(corpus.held)[:2])
    version = IndexVersion(corpus.indexes)
    assert version.verify() == []
    segments = [f for s in version.manifest["segments"] for f in (corpus.indexes / "segments" / s["name"]).iterdir()]
    kept = [corpus.indexes / "files" / digest for names in version.kept.values() for digest in names.values()]
    lexical = [f for f in (version.folder / "lexical").iterdir() if f.stat().st_size]
    deep = [f for f in segments if f.name != "segment.json"] + kept[:3] + lexical
    assert {f.name for f in deep} >= {"children.arrow", "keys.arrow", "parents.arrow", "vectors.f32", "hnsw.faiss"}
    for path in deep:
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        (wrong,) = version.verify()
        assert str(path) in wrong and "is missing or was changed" in wrong
        path.unlink()
        assert len(version.verify()) == 1
        path.write_bytes(whole)
    assert version.verify() == []
    shallow = [f for f in version.folder.iterdir() if f.is_file() and f.name not in ("version.json", "made.json")]
    assert {f.suffix for f in shallow} == {".json", ".jsonl", ".md", ".deleted"}
    for path in shallow + [f for f in segments if f.name == "segment.json"]:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(InputRefused, match="was changed"):
            IndexVersion(corpus.indexes)
        path.write_bytes(whole)


def test_nothing_left_is_refused(corpus: Corpus):
    before = files(corpus.indexes)
    with pytest.raises(InputRefused, match="nothing would be left in the index; the version in use is kept"):
        corpus.update(remove=list(corpus.held))
    discard(corpus.indexes)
    assert files(corpus.indexes) == before and current_version(corpus.indexes) == "v0001"


def test_a_chunk_that_would_stand_twice_is_refused(corpus: Corpus):
    base = IndexVersion(corpus.indexes)
    held = list(corpus.held.values())

    def staged(*chunks: list[Chunk], gone: Sequence[int] = ()) -> str:
        added = [corpus.encode((held[0][0], c)) for c in chunks]
        content = corpus.content([])
        return stage_update(corpus.indexes, base, content, config=corpus.config, gone=np.array(gone), added=added)

    new = make_chunks(["a", "b"], parent="new")
    for chunks, gone in (([held[3][1]], []), ([held[3][1]], [2, 4]), ([new, new], []), ([[*new, new[1]]], [0])):
        with pytest.raises(InputRefused, match="would stand twice; the version in use is kept"):
            staged(*chunks, gone=gone)
    with pytest.raises(InputRefused, match="comes before its parent"):
        staged(new[1:])
    assert current_version(corpus.indexes) == "v0001"
    assert len(IndexVersion(corpus.indexes, staged(held[3][1], gone=[3]))) == 30, "in the place of itself"


def test_nobody_writes_to_a_lexical_index_that_was_published(tmp_path):
    """An update of tantivy's files, also one that merges all its segments, leaves the former's as they are."""
    rows = [(n, ["word", f"w{n}"], {f: ["x"] for f in FIELDS}) for n in range(60)]
    TantivyIndex.build(tmp_path / "0", rows[:10])
    before = files(tmp_path)
    for n in range(1, 11):  # tantivy merges eight segments of like size
        TantivyIndex.update(tmp_path / str(n - 1), tmp_path / str(n), [n], rows[n * 5 + 5 : n * 5 + 10])
        now = files(tmp_path)
        assert before.items() <= now.items()
        before = now
    index = TantivyIndex(tmp_path / "10", np.arange(60), np.arange(60))
    assert sorted(index.rows_with("word")) == [0, *range(11, 60)]


def test_versions_and_segments_get_a_new_name_after_a_crash(corpus: Corpus):
    (corpus.indexes / "segments" / "s0007").mkdir()
    (corpus.indexes / ".building-v0002").mkdir()
    assert corpus.update([["new"]]) == "v0002"
    assert [s["name"] for s in IndexVersion(corpus.indexes).manifest["segments"]] == ["s0001", "s0008"]
    assert staging.next_version(corpus.indexes) == "v0003"
