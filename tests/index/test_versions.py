"""Index versions: one commit point, nothing changed after it, everything found again as it was."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ragbuild
from ragbuild.core.config import Config, load_config
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import Chunk, TermEntry
from ragbuild.core.store import read_json, sha256
from ragbuild.index import staging
from ragbuild.index.filters import EVERYTHING, FIELDS, Filter
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion, current_version, publish, version_names
from tests.conftest import FakeEmbedder, make_chunks, make_document

CONFIG = load_config()
TERMS = [TermEntry(standard_term="单点登录", abbreviation="SSO", tag="login"), TermEntry(standard_term="OAuth 2.0")]
GUIDE = make_document("guide", product_model=["LG-500", "LG-900"], kb="gateways", effective_date="2026-03-01")
OLD = make_document("guide", doc_version="v3.4", status="legacy", product_model=["LG-500"], kb="gateways")
FAQ = make_document("faq", doc_type="faq", language="zh", title="常见问题\u2028\x85续")
DOCUMENTS = [GUIDE, OLD, FAQ]


def corpus() -> list[Chunk]:
    return [
        *make_chunks(
            ["Reset the admin password.", "Configure OAuth 2.0 for LG-500."], GUIDE, "a", tag=("login", "sso")
        ),
        *make_chunks(["Error E1042: the license expired."], GUIDE, "b", page=3, page_end=4, image_ids=("i1",)),
        *make_chunks(["In 3.4 reset the password on the console."], OLD, "c", table_header="| a | b |"),
        *make_chunks(
            ["如何配置单点登录？", "证书过期\u2028怎么办？\x85", "忘记密码。"], FAQ, "d", tag=("登录",), section="登录"
        ),
    ]


def write(folder: Path, chunks=None, config: Config = CONFIG, embedder=None, **options) -> str:
    embedder = embedder or FakeEmbedder()
    options = {"encode": embedder.encode_documents, "prompt": "# Identity"} | options
    return write_version(
        folder, corpus() if chunks is None else chunks, DOCUMENTS, TERMS,
        config=config, embedder={"name": embedder.name, "dim": embedder.dim}, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def version(tmp_path_factory) -> IndexVersion:
    folder = tmp_path_factory.mktemp("indexes")
    write(folder)
    return IndexVersion(folder)


def children() -> list[Chunk]:
    return [c for c in corpus() if not c.is_parent]


# --- what was written is what is read --------------------------------------------------------------------------------


def test_chunks_come_back_exactly(version: IndexVersion):
    assert len(version) == 7
    assert version.children(np.arange(7)) == children()
    assert version.children(np.array([6, 0])) == [children()[6], children()[0]], "in the order asked for"
    assert version.all_parents() == [c for c in corpus() if c.is_parent]
    assert version.children(np.zeros(0, np.int64)) == []


def test_all_that_belongs_to_a_version(version: IndexVersion):
    assert version.documents == DOCUMENTS
    assert version.entries == TERMS
    assert version.prompt == "# Identity"
    manifest = version.manifest
    assert (manifest["children"], manifest["parents"], manifest["documents"]) == (7, 4, 3)
    assert manifest["embedder"] == {"name": "fake", "dim": 64}
    assert manifest["lexical"]["engine"] == "rank_bm25" and manifest["lexical"]["tokenizer"] == "jieba"
    assert set(manifest["hashes"]) == {"documents.jsonl", "keyword_dict.json", "kept.json", "prompt.md"}
    assert version.digest == sha256((version.folder / "version.json").read_bytes())


def test_tokens_and_vectors_are_kept_with_the_index(version: IndexVersion):
    texts = [
        f"{c.breadcrumb}\n{c.table_header}\n{c.content}" if c.table_header else f"{c.breadcrumb}\n{c.content}"
        for c in children()
    ]
    assert version.tokens(np.arange(7)) == [version.tokenizer(t) for t in texts]
    assert np.array_equal(version.dense.vectors(np.arange(7)), FakeEmbedder().encode_documents(texts))


def test_the_dictionary_of_the_index_cuts_its_queries(version: IndexVersion):
    assert "单点登录" in version.tokenizer("单点登录") and "oauth_2.0" in version.tokenizer("OAuth 2.0")
    assert "OAuth 2.0" in version.vocabulary and "单点登录" in version.vocabulary
    assert "Kubernetes" not in version.vocabulary and "" not in version.vocabulary
    rows, scores = version.search_lexical(version.tokenizer("单点登录"), 5, EVERYTHING, None)
    assert version.ids[rows[0]] == b"c-d-000" and scores[0] > 0


def test_rows_and_parents(version: IndexVersion):
    assert version.rows_of(["c-d-002", "c-a-000"]).tolist() == [6, 0]
    assert version.rows_of([]).tolist() == []
    found = version.parents_of(np.array([5, 0, 4, 3, 1]))
    assert [p.chunk_id for p in found] == ["p-d", "p-a", "p-c"], "collapsed, in the order of first appearance"
    assert version.parents_of(np.zeros(0, np.int64)) == []


@pytest.mark.parametrize("unknown", ["c-x-000", "c-a-0", "c-a-0000", "", "中文", "zzz"])
def test_an_unknown_id_is_refused(version: IndexVersion, unknown: str):
    with pytest.raises(InputRefused, match=f"chunk {unknown} is not in index version v0001"):
        version.rows_of(["c-a-000", unknown])


def test_ids_may_be_of_any_script(tmp_path):
    write(tmp_path, make_chunks(["一", "二"], parent="手册"))
    opened = IndexVersion(tmp_path)
    assert opened.rows_of(["c-手册-001"]).tolist() == [1]
    assert opened.ids[0].decode() == "c-手册-000"


def test_id_rank_is_the_order_of_ids(tmp_path):
    write(
        tmp_path,
        [*make_chunks(["one"], parent="z"), *make_chunks(["two"], parent="b"), *make_chunks(["x"], parent="m")],
    )
    assert IndexVersion(tmp_path).id_rank.tolist() == [2, 0, 1]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 5))
def test_any_batches_give_the_same_index(tmp_path_factory, counts: list[int], size: int):
    """A batch may end anywhere: between a parent and its children, between children, after a parent without any."""
    if not any(counts):
        return
    folder = tmp_path_factory.mktemp("indexes")
    chunks = [c for i, n in enumerate(counts) for c in made(f"p{i}", n)]
    before, staging.BATCH = staging.BATCH, size
    try:
        write(folder, chunks, CONFIG.with_overrides({"lexical.tokenizer": "whitespace"}))
    finally:
        staging.BATCH = before
    opened = IndexVersion(folder)
    rows = np.arange(len(opened))
    assert opened.children(rows) == [c for c in chunks if not c.is_parent]
    assert [p.chunk_id for r in rows for p in opened.parents_of(rows[r : r + 1])] == [
        c.parent_id for c in opened.children(rows)
    ]
    assert opened.values("product_model") == ["all"] and opened.allowed(Filter()) is None
    shutil.rmtree(folder)


def made(parent: str, n: int) -> list[Chunk]:
    chunks = make_chunks([f"{parent} text {i}" for i in range(max(n, 1))], parent=parent)
    return chunks if n else [chunks[0].model_copy(update={"child_ids": ()})]


# --- the commit point ------------------------------------------------------------------------------------------------


def test_version_numbers_go_up_and_current_names_the_last(tmp_path):
    assert current_version(tmp_path) is None and version_names(tmp_path) == []
    assert [write(tmp_path) for _ in range(3)] == ["v0001", "v0002", "v0003"]
    assert current_version(tmp_path) == "v0003" and version_names(tmp_path) == ["v0001", "v0002", "v0003"]
    publish(tmp_path, "v0001")
    assert IndexVersion(tmp_path).name == "v0001" and IndexVersion(tmp_path, "v0002").name == "v0002"
    assert write(tmp_path) == "v0004", "a number is not taken twice"
    shutil.copytree(tmp_path / "v0001", tmp_path / "v0001-copy")
    shutil.copytree(tmp_path / "v0001", tmp_path / "v10000")
    assert version_names(tmp_path)[-2:] == ["v0004", "v10000"], "by number; a copy under another name is none"
    assert write(tmp_path) == "v10001"


def test_a_build_that_dies_leaves_the_former_version(tmp_path):
    write(tmp_path)
    before = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def dies(texts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, encode=dies)
    assert (tmp_path / ".building-v0002").is_dir()
    assert current_version(tmp_path) == "v0001" and len(IndexVersion(tmp_path)) == 7
    assert version_names(tmp_path) == ["v0001"]
    assert (
        before.items() <= {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}.items()
    )
    assert write(tmp_path) == "v0002"
    assert not list(tmp_path.glob(".building-*")), "the next build removes what was left"


def test_a_build_that_dies_before_current_is_renamed_is_not_in_use(tmp_path, monkeypatch):
    write(tmp_path)

    def dies(*_):
        raise OSError("power cut")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="power cut"):
        patch.setattr(staging, "publish", dies)
        write(tmp_path)
    assert IndexVersion(tmp_path).name == "v0001"
    assert write(tmp_path) == "v0003" and IndexVersion(tmp_path).name == "v0003"


def test_readers_of_an_old_version_finish_on_it(tmp_path):
    write(tmp_path)
    reader = IndexVersion(tmp_path)
    write(tmp_path, make_chunks(["another"]))
    assert len(reader.children(np.arange(7))) == 7 and len(IndexVersion(tmp_path)) == 1


@pytest.mark.parametrize("file", ["documents.jsonl", "keyword_dict.json", "prompt.md"])
def test_a_file_that_was_changed_is_refused(tmp_path, file: str):
    write(tmp_path)
    path = tmp_path / "v0001" / file
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(InputRefused, match=f"{file} was changed after publishing"):
        IndexVersion(tmp_path)
    path.unlink()
    with pytest.raises(InputRefused, match=file):
        IndexVersion(tmp_path)


@pytest.mark.parametrize("file", ["vectors.f32", "children.arrow", "parents.arrow"])
@pytest.mark.parametrize("keep", [None, 0, 100])
def test_a_damaged_segment_is_refused(tmp_path, file: str, keep: int | None):
    write(tmp_path)
    path = tmp_path / "segments" / "s0001" / file
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[:keep])
    with pytest.raises(InputRefused, match="index version v0001 is damaged"):
        IndexVersion(tmp_path)


def test_no_index_and_no_such_version(tmp_path):
    with pytest.raises(InputRefused, match="no index in .*; run 'ragbuild build' first"):
        IndexVersion(tmp_path)
    write(tmp_path)
    with pytest.raises(InputRefused, match=r"version v0009 is not there; .* holds \['v0001'\]"):
        IndexVersion(tmp_path, "v0009")


# --- what is refused -------------------------------------------------------------------------------------------------


def test_no_child_no_version(tmp_path):
    for chunks in ([], made("p", 0)):
        with pytest.raises(InputRefused, match="no child chunk to index"):
            write(tmp_path, chunks)
    assert current_version(tmp_path) is None and version_names(tmp_path) == []


def test_a_child_without_its_parent_is_refused(tmp_path):
    parent, child = make_chunks(["text"])
    for chunks in ([child], [*make_chunks(["x"], parent="b"), child]):
        with pytest.raises(InputRefused, match="c-guide-000 comes before its parent p-guide"):
            write(tmp_path, chunks)
    write(tmp_path, [parent, child])


@pytest.mark.parametrize(
    "encode",
    [
        lambda texts: np.full((len(texts), 64), np.nan, np.float32),
        lambda texts: np.full((len(texts), 64), np.inf, np.float32),
        lambda texts: np.ones((len(texts), 32), np.float32),
        lambda texts: np.ones((len(texts) + 1, 64), np.float32),
    ],
    ids=["NaN", "infinity", "another model's length", "one too many"],
)
def test_bad_vectors_are_never_published(tmp_path, encode):
    with pytest.raises(ValueError, match="finite vectors of 64 numbers"):
        write(tmp_path, encode=encode)
    assert current_version(tmp_path) is None


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "passing"),
    [
        (EVERYTHING, None),
        (Filter(), [0, 1, 2, 4, 5, 6]),
        (Filter(status=("legacy",)), [3]),
        (Filter(status=("active", "legacy")), None),
        (EVERYTHING.with_(product_model=("LG-900",)), [0, 1, 2, 4, 5, 6]),
        (EVERYTHING.with_(product_model=("LG-200",)), [4, 5, 6]),
        (EVERYTHING.with_(product_model=("LG-200", "LG-500")), None),
        (EVERYTHING.with_(doc_version=("v3.4",)), [3]),
        (EVERYTHING.with_(doc_type=("faq",)), [4, 5, 6]),
        (EVERYTHING.with_(kb=("gateways",)), [0, 1, 2, 3]),
        (EVERYTHING.with_(tag=("sso",)), [0, 1]),
        (EVERYTHING.with_(tag=("sso", "登录")), [0, 1, 4, 5, 6]),
        (Filter(kb=("gateways",), doc_type=("guide",), tag=("login",)), [0, 1]),
        (EVERYTHING.with_(tag=("unknown",)), []),
        (EVERYTHING.with_(kb=("gateways",), doc_type=("faq",)), []),
    ],
)
def test_allowed(version: IndexVersion, where: Filter, passing: list[int] | None):
    """'all' passes every model filter; a list field passes when one of its values is allowed."""
    allowed = version.allowed(where)
    assert (allowed is None) == (passing is None)
    if allowed is not None:
        assert np.flatnonzero(allowed).tolist() == passing


def test_values_of_a_field(version: IndexVersion):
    assert version.values("status") == ["active", "legacy"]
    assert version.values("product_model") == ["LG-500", "LG-900", "all"]
    assert version.values("tag") == ["login", "sso", "登录"]
    with pytest.raises(UsageError, match=f"filters take {', '.join(FIELDS)}, got 'colour'"):
        version.values("colour")


@pytest.mark.parametrize("engine", ["rank_bm25", "tantivy"])
@pytest.mark.parametrize("field", FIELDS)
def test_both_indexes_filter_before_they_rank(tmp_path, engine: str, field: str):
    """Thirty chunks that match better do not pass; those that pass are found all the same, in both routes."""
    rare = {"status": "legacy", "product_model": ["LG-500"], "doc_version": "v1", "doc_type": "faq", "kb": "b"}
    good = make_document("good", product_model=["LG-200"])
    own = {} if field == "tag" else {field: rare[field]}
    other = make_document("other", **({"product_model": ["LG-200"]} | own))
    tags = {"tag": ("backup",)} if field == "tag" else {}
    chunks = [
        *make_chunks(["reset password"] * 30, good, "good"),
        *make_chunks([f"reset it by turning the device number {i} off" for i in range(12)], other, "other", **tags),
    ]
    config = CONFIG.with_overrides({"lexical.engine": engine})
    write(tmp_path, chunks, config)
    opened = IndexVersion(tmp_path)
    where = EVERYTHING.with_(**{field: ("backup",) if field == "tag" else tuple(np.atleast_1d(rare[field]).tolist())})
    allowed = opened.allowed(where)
    assert allowed.sum() == 12
    lexical, _ = opened.search_lexical(opened.tokenizer("reset password"), 10, where, allowed)
    dense, _ = opened.dense.search(FakeEmbedder().encode_queries(["reset password"])[0], 10, allowed)
    for rows in (lexical, dense):
        assert len(rows) == 10 and allowed[rows].all()
    first = opened.search_lexical(opened.tokenizer("reset password"), 10, EVERYTHING, None)[0]
    assert not allowed[first].any()


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["rank_bm25", "tantivy"])
def test_what_names_a_version_passes_with_it(tmp_path, engine: str):
    notes = make_document("notes", doc_version="v4.2", doc_type="release_notes")
    texts = ["Support of 3.4 ends in March.", "Support of 4.2 ends later.", "Support of 3.4.6 is another."]
    chunks = [*make_chunks(texts, notes, "n"), *make_chunks(["In the old one support is by mail."], OLD, "o")]
    write(tmp_path, chunks, CONFIG.with_overrides({"lexical.engine": engine}))
    version = IndexVersion(tmp_path)
    where = Filter(status=("active", "legacy"), doc_version=("v3.4",), naming=("3.4",))
    allowed = version.allowed(where)
    assert [version.ids[row].decode() for row in np.flatnonzero(allowed)] == ["c-n-000", "c-o-000"]
    rows, _ = version.search_lexical(["support"], 9, where, allowed)
    assert sorted(version.ids[row].decode() for row in rows) == ["c-n-000", "c-o-000"]
    alone = Filter(status=("active", "legacy"), doc_version=("v3.4",))
    assert version.allowed(alone).sum() == 1


def test_the_engine_is_chosen_by_size(tmp_path):
    for limit, engine in ((7, "rank_bm25"), (6, "tantivy")):
        write(tmp_path, config=CONFIG.with_overrides({"lexical.rank_bm25_up_to": limit}))
        opened = IndexVersion(tmp_path)
        assert opened.manifest["lexical"]["engine"] == engine
        assert type(opened.lexical).__name__ == {"rank_bm25": "RankBM25Index", "tantivy": "TantivyIndex"}[engine]
        assert opened.lexical.average_length == pytest.approx(np.mean([len(t) for t in opened.tokens(np.arange(7))]))


@pytest.mark.parametrize("tokenizer", ["jieba", "char", "whitespace"])
def test_both_engines_find_the_same(tmp_path, tokenizer: str):
    found = []
    for engine in ("rank_bm25", "tantivy"):
        config = CONFIG.with_overrides({"lexical.engine": engine, "lexical.tokenizer": tokenizer})
        write(tmp_path, config=config)
        opened = IndexVersion(tmp_path)
        assert opened.tokenizer.name == tokenizer
        for query in ("reset password", "证书过期怎么办", "E1042", "OAuth 2.0"):
            tokens = opened.tokenizer(query)
            rows, scores = opened.search_lexical(tokens, 7, EVERYTHING, None)
            features = opened.features(tokens, np.zeros(64, np.float32), rows)
            assert features["lexical"] == pytest.approx(scores, rel=1e-4), "the feature is the score of the search"
            found.append((rows.tolist(), scores.round(3).tolist(), [round(opened.lexical.idf(t), 4) for t in tokens]))
    assert found[:4] == found[4:]


def test_features_are_complete_for_every_row(version: IndexVersion):
    """A candidate that one route alone found lacks no feature."""
    query = FakeEmbedder().encode_queries(["reset password"])[0]
    features = version.features(version.tokenizer("reset password"), query, np.arange(7))
    assert set(features) == {"lexical", "coverage", "cosine"}
    assert (features["lexical"] > 0).tolist() == [True, False, False, True, False, False, False]
    assert features["coverage"][0] == pytest.approx(1) and features["coverage"][2] == 0
    assert features["cosine"] == pytest.approx(version.dense.vectors(np.arange(7)) @ query, abs=1e-6)


def test_a_graph_is_made_for_large_segments_only(tmp_path):
    texts = [f"word{i} word{i % 7} word{i % 11} text" for i in range(120)]
    write(tmp_path, make_chunks(texts), CONFIG.with_overrides({"dense.hnsw_above": 119, "dense.hnsw_m": 8}))
    assert (tmp_path / "segments" / "s0001" / "hnsw.faiss").is_file()
    write(tmp_path, make_chunks(texts), CONFIG.with_overrides({"dense.hnsw_above": 120}))
    assert not (tmp_path / "segments" / "s0002" / "hnsw.faiss").exists()
    exact, graph = IndexVersion(tmp_path, "v0002").dense, IndexVersion(tmp_path, "v0001").dense
    near = []
    for query in exact.vectors(np.arange(0, 120, 7)):
        tenth = exact.search(query, 10)[1][-1]
        near.append(np.mean(graph.search(query, 10)[1] >= tenth - 1e-6))  # many texts are equally near
    assert np.mean(near) >= 0.9


# --- looking into it -------------------------------------------------------------------------------------------------


def test_inspect(version: IndexVersion):
    assert version.inspect("index") == version.manifest
    assert (
        version.inspect("c-d-000")["content"] == "如何配置单点登录？"
        and "单点登录" in version.inspect("c-d-000")["tokens"]
    )
    assert version.inspect("p-a")["child_ids"] == ["c-a-000", "c-a-001"]
    assert version.inspect("faq.md")["children"] == 3 and version.inspect("faq")["parents"] == 1
    assert version.inspect("sso")["standard_term"] == "单点登录"
    for unknown in ("p-x", "中文", ""):
        with pytest.raises(InputRefused, match="is no chunk, document or term"):
            version.inspect(unknown)


def test_a_manifest_is_plain_json(version: IndexVersion):
    assert read_json(version.folder / "version.json")["version"] == "v0001"


def test_no_pickle_is_loaded_anywhere():
    patterns = r"\b(?:pickle|joblib|marshal|shelve|dill|read_pickle|to_pickle)\b|allow_pickle\s*=\s*True|torch\.load\("
    root = Path(ragbuild.__file__).parent
    for path in sorted(root.rglob("*.py")):
        code = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(patterns, code), path
