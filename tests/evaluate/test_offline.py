"""Layer 1 of evaluation: what is broken is named, what is whole passes, and a tiny set does not fail by chance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ragbuild.core.config import Config, load_config
from ragbuild.core.errors import GateFailed
from ragbuild.core.records import Chunk, TermEntry
from ragbuild.core.store import read_json, write_json, write_records
from ragbuild.core.text import CharTokenizer, WhitespaceTokenizer, WordTokenizer
from ragbuild.evaluate.gates import raise_if_failed
from ragbuild.evaluate.offline import OfflineReport, evaluate_offline, measure, raw_rankings
from ragbuild.evaluate.quality import chunk_quality, dictionary_quality, parsed_text, whole_tokens
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.evalset import EvalCase
from ragbuild.offline.prompts import load_prompt
from ragbuild.offline.review import QueryRow
from tests.conftest import FakeEmbedder, make_chunks, make_document

TERMS = [
    TermEntry(standard_term="break-glass account", colloquial=("rescue login",)),
    TermEntry(standard_term="单点登录", abbreviation="SSO"),
    TermEntry(standard_term="集群心跳"),
    TermEntry(standard_term="carrier pigeon"),  # in no document
]
TEXTS = {
    "guide": ["Reset the break-glass account on the console.", "The fan tray is replaced without tools.",
              "Back up the configuration every night.", "Certificates expire after a year."],
    "faq": ["用户通过单点登录访问门户。", "管理员检查集群心跳是否丢失。",
            "备份文件使用口令加密。", "风扇停转时更换托盘。"],
    "old": ["In 3.4 the backup runs every week.", "In 3.4 the fan tray needs a screwdriver."],
}  # fmt: skip
DOCUMENTS = [
    make_document("guide"),
    make_document("faq", language="zh"),
    make_document("old", doc_version="v3.4", status="legacy"),
]
CORPUS = [chunk for d in DOCUMENTS for chunk in make_chunks(TEXTS[d.doc_id], d)]
QUESTIONS = {
    "c-guide-000": ("How to reset the break-glass account?", "en"),
    "c-guide-001": ("replace the fan tray", "en"),
    "c-faq-000": ("单点登录怎么访问", "zh"),
    "c-faq-001": ("集群心跳丢失", "zh"),
    "c-faq-002": ("备份怎么加密", "zh"),
}
LOG = [QueryRow("q1", "rescue login", "en", 3, ""), QueryRow("q2", "SSO 登录", "zh", 1, "")]


def config(**overrides) -> Config:
    return load_config(overrides={"embedder.name": "fake", **{k.replace("__", "."): v for k, v in overrides.items()}})


def markdown(chunk: Chunk) -> str | None:
    return "\n\n".join(TEXTS[chunk.doc_source.removesuffix(".md")])


def case(*groups: tuple[str, ...], query: str = "", language: str = "en", **fields) -> EvalCase:
    base = {"id": f"{groups[0][0]}?", "query_type": "factual", "kind": "plain", "source": "generated", "half": "test"}
    return EvalCase(**{**base, "query": query, "language": language, "groups": groups, **fields})


CASES = [case((chunk,), query=query, language=language) for chunk, (query, language) in QUESTIONS.items()]


def make(folder: Path, settings: Config, chunks: list[Chunk] = CORPUS, damage=None) -> IndexVersion:
    embedder = FakeEmbedder()

    def encode(texts):
        vectors = embedder.encode_documents(texts)
        return vectors if damage is None else damage(vectors)

    write_records(folder / "keyword_dict.json", TERMS)
    write_version(
        folder / "indexes", chunks, DOCUMENTS, TERMS, config=settings, encode=encode,
        embedder={"name": "fake", "dim": 64, "why": ""}, prompt=load_prompt(settings.generate.prompt).text,
    )  # fmt: skip
    return IndexVersion(folder / "indexes")


def evaluate(folder: Path, settings: Config | None = None, version=None, cases=CASES, log=LOG, **options):
    settings = settings or config()
    version = version or make(folder, settings)
    return evaluate_offline(
        version, CORPUS, cases, FakeEmbedder(), settings,
        **{"markdown": markdown, "dictionary": folder / "keyword_dict.json", "log": log} | options,
    )  # fmt: skip


def findings(report: OfflineReport) -> str:
    return " | ".join(row["finding"] for row in report.diagnosis)


def failed(report: OfflineReport) -> set[str]:
    return {g.name for g in report.gates if g.passed is False}


# --- raw recall -------------------------------------------------------------------------------------------------------


def test_recall_counts_groups_not_chunks():
    two = case(("a", "b"), ("c",))
    figures = measure([["x", "b", "a", "c"]], [two], [1, 2, 3, 4])
    assert [figures[f"recall@{k}"][0] for k in (1, 2, 3, 4)] == [0, 0.5, 0.5, 1], "b serves a's group, a adds nothing"
    assert figures["mrr"][0] == 1 / 2
    none = measure([[]], [two], [1])
    assert none["recall@1"][0] == 0 and none["mrr"][0] == 0


def test_raw_means_active_documents_and_older_ones_only_for_questions_that_nothing_else_answers(tmp_path):
    version = make(tmp_path, config())
    asked = [case(("c-guide-002",), query="backup every week"), case(("c-old-000",), query="backup every week")]
    rankings, old = raw_rankings(version, asked, FakeEmbedder(), config().retrieve, 50)
    assert old == 1
    for route, (now, before) in rankings.items():
        assert not any("old" in i for i in now), f"{route}: the question has an active answer"
        assert "c-old-000" in before and (route == "lexical" or "c-guide-002" in before), "older ones let in, not alone"
    assert rankings["dense"][1][0] == "c-old-000"


def test_recall_does_not_fall_as_k_grows_and_two_runs_are_equal(tmp_path):
    report = evaluate(tmp_path)
    for row in report.recall:
        values = [row[k] for k in row if k.startswith("recall@")]
        assert values == sorted(values) and 0 <= row["MRR"] <= 1
    again = evaluate(tmp_path, version=IndexVersion(tmp_path / "indexes"))
    assert again.recall == report.recall and again.per_query == report.per_query


def test_rows_by_language_and_type_and_what_takes_no_part(tmp_path):
    unanswerable = case(("c-guide-000",), query="price?", answerable=False)
    expert = case(("c-guide-003",), query="certificates expire", source="expert", query_type="definitional")
    report = evaluate(tmp_path, cases=[*CASES, unanswerable, expert], lost=["p9"])
    n = {(r["by"], r["questions"]): r["n"] for r in report.recall if r["route"] == "fused"}
    assert n == {
        ("all", "all"): 6, ("language", "en"): 3, ("language", "zh"): 3, ("query_type", "definitional"): 1,
        ("query_type", "factual"): 5, ("source", "expert"): 1, ("source", "generated"): 5,
    }  # fmt: skip
    notes = "\n".join(report.notes)
    assert "1 question(s) that the documents do not answer" in notes and "in no chunk: p9" in notes
    assert set(report.per_query["fused_recall@50"]) == {c.id for c in [*CASES, expert]}


# --- a whole index passes, a broken one is named ----------------------------------------------------------------------


def test_a_whole_index_passes(tmp_path):
    report = evaluate(tmp_path)
    assert all(c["ok"] for c in report.checks), [c for c in report.checks if not c["ok"]]
    assert all(g.passed for g in report.gates)
    assert findings(report) == "nothing stands out"
    raise_if_failed(report.gates)
    write_json(tmp_path / "report.json", report.as_json())
    assert read_json(tmp_path / "report.json")["figures"]["fused_recall_at_50"] == {"value": 1, "n": 5, "unmeasured": 0}


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (lambda v: v * 0, "vectors of zeros"),
        (lambda v: np.repeat(v[:1], len(v), axis=0), "distinct vectors"),
        (lambda v: v[::-1], "encoded again"),
        (lambda v: np.vstack([v[:3], v[3:6][::-1], v[6:]]), "encoded again"),
        (lambda v: 3 * v, "length is not 1"),
        (lambda v: unit(v + np.random.default_rng(0).normal(size=v.shape)), "encoded again"),
    ],
    ids=["zeros", "all equal", "shuffled", "two exchanged", "not normalised", "another model"],
)
def test_a_broken_dense_index_names_embedding_or_completeness(tmp_path, damage, check):
    report = evaluate(tmp_path, version=make(tmp_path, config(), damage=damage))
    assert any(check in c["check"] for c in report.checks if not c["ok"])
    assert {c["part"] for c in report.checks if not c["ok"]} == {"dense"}
    assert "embedding or index completeness" in findings(report) and "tokenizer" not in findings(report)
    with pytest.raises(GateFailed, match="index completeness") as error:
        raise_if_failed(report.gates)
    assert check in str(error.value) and error.value.exit_code == 3


def test_vectors_that_are_no_numbers(tmp_path):
    make(tmp_path, config())
    path = tmp_path / "indexes" / "segments" / "s0001" / "vectors.f32"
    vectors = np.fromfile(path, np.float32)
    vectors[[5, 70]] = np.nan, np.inf
    vectors.tofile(path)
    report = evaluate(tmp_path, version=IndexVersion(tmp_path / "indexes"))
    check = next(c for c in report.checks if "NaN" in c["check"])
    assert (check["found"], check["ok"]) == ("2", False) and failed(report) == {"index_completeness"}


def test_chunks_that_the_index_lacks_are_misses_and_are_named(tmp_path):
    report = evaluate(tmp_path, version=make(tmp_path, config(), [c for c in CORPUS if c.doc_id != "faq"]))
    checks = {c["check"]: c for c in report.checks}
    assert checks["child ids"]["found"] == "6 (4 missing, 0 of no chunk)" and not checks["parent ids"]["ok"]
    assert "the index does not hold the corpus" in findings(report)
    zh = [r for r in report.recall if r["questions"] == "zh"]
    assert len(zh) == 3 and all(r["recall@50"] == 0 for r in zh)


def test_what_the_index_holds_beyond_the_corpus_is_named(tmp_path):
    more = make_chunks(["A stale copy."], DOCUMENTS[0], "stale")
    report = evaluate(tmp_path, version=make(tmp_path, config(), [*CORPUS, *more]))
    checks = {c["check"]: c for c in report.checks if not c["ok"]}
    assert checks["child ids"]["found"] == "11 (0 missing, 1 of no chunk)" and failed(report) == {"index_completeness"}


def test_one_span_that_does_not_give_its_content_fails_the_gate(tmp_path):
    report = evaluate(tmp_path, markdown=lambda chunk: (markdown(chunk) or "").replace("fan tray", "fan trap"))
    assert failed(report) == {"chunk_boundaries"} and "chunking" in findings(report)
    with pytest.raises(GateFailed, match="span does not give the content"):
        raise_if_failed(report.gates)


def test_another_dictionary_or_prompt_or_embedder(tmp_path):
    version = make(tmp_path, config())
    write_records(tmp_path / "keyword_dict.json", TERMS[:2])
    prompt = tmp_path / "mine.md"
    prompt.write_text(load_prompt("initial_prompt").text.replace("1.0", "1.1", 1) + "\n", encoding="utf-8")
    report = evaluate(tmp_path, config(generate__prompt=str(prompt), embedder__name="other"), version)
    wrong = {c["check"] for c in report.checks if not c["ok"]}
    assert wrong == {"dictionary is the workspace's", "prompt is the configured one", "embedder (configured)"}
    assert "belongs to another dictionary or prompt" in findings(report)
    fake = FakeEmbedder()
    fake.name = "another"  # it is not the one that was configured, whatever the manifest says
    found = evaluate_offline(version, CORPUS, CASES, fake, config(), markdown=markdown,
                             dictionary=tmp_path / "keyword_dict.json")  # fmt: skip
    assert not next(c["ok"] for c in found.checks if c["check"].startswith("embedder"))


def test_whitespace_names_tokenizer_or_dictionary(tmp_path):
    settings = config(lexical__tokenizer="whitespace")
    report = evaluate(tmp_path, settings)
    assert "terms_kept_whole" in failed(report)
    row = report.diagnosis[0]
    assert row["finding"] == "tokenizer or dictionary"
    assert "Chinese text is not cut into words" in row["evidence"] and "zh 0.00 (n = 3)" in row["evidence"]
    with pytest.raises(GateFailed, match="tokenizer or dictionary"):
        raise_if_failed(report.gates)


def test_an_index_searched_with_another_tokenizer_than_it_was_made_with(tmp_path):
    report = evaluate(tmp_path, config(lexical__tokenizer="char"), make(tmp_path, config()))
    assert [c["check"] for c in report.checks if not c["ok"]] == ["tokenizer"]
    assert findings(report).startswith("tokenizer or dictionary")
    version = make(tmp_path / "other", config())
    vars(version)["entries"] = []  # the children were cut with terms, the questions would be without
    found = evaluate(tmp_path, version=version)
    assert "tokens of a sample, cut again" in {c["check"] for c in found.checks if not c["ok"]}


# --- what must not fail by chance -------------------------------------------------------------------------------------


def test_without_questions_log_terms_or_parsed_texts_nothing_fails(tmp_path):
    report = evaluate(tmp_path, cases=[], log=[], markdown=lambda chunk: None)
    assert not failed(report) and report.recall == [] and report.per_query == {}
    assert {g.name for g in report.gates if g.passed is None} == {
        f"{r}_recall_at_50" for r in ("lexical", "dense", "fused")
    }
    unmeasured = {r["what"] for r in report.dictionary if r["found"] is None}
    assert unmeasured == {"questions of the query log with a term", "tokens of the query log that the index holds"}
    assert {r["share"] for r in report.chunking if "sentence" in r["what"] or "span" in r["what"]} == {None}
    assert findings(report) == "nothing stands out" and "no question" in report.diagnosis[0]["evidence"]


def test_one_miss_of_two_is_no_proof_and_twenty_misses_are(tmp_path):
    miss = case(("c-guide-003",), query="zzz qqq")
    version = make(tmp_path, config())
    few = evaluate(tmp_path, version=version, cases=[CASES[0], miss])
    assert not failed(few) and findings(few) == "nothing stands out"
    many = [case(("c-guide-003",), query="zzz qqq", id=f"m{i}") for i in range(20)]
    report = evaluate(tmp_path, version=version, cases=many)
    assert "lexical_recall_at_50" in failed(report)
    assert report.diagnosis[0]["finding"] == "tokenizer or dictionary"


def test_one_bad_language_is_named_though_the_whole_passes(tmp_path):
    good = [case(("c-guide-001",), query="replace the fan tray", id=f"g{i}") for i in range(60)]
    bad = [case(("c-faq-003",), query="zzz", language="zh", id=f"b{i}") for i in range(8)]
    report = evaluate(tmp_path, cases=good + bad)
    assert not failed(report) and "zh 0.00 (n = 8)" in report.diagnosis[0]["evidence"]


def test_switched_off_gates_only_report(tmp_path):
    settings = config(lexical__tokenizer="whitespace", gates__enabled=False)
    report = evaluate(tmp_path, settings)
    raise_if_failed(report.gates)
    assert findings(report) == "tokenizer or dictionary", "and the diagnosis is there all the same"


def test_a_route_that_is_off_is_measured_and_not_gated(tmp_path):
    version = make(tmp_path, config(), damage=lambda v: unit(np.random.default_rng(1).normal(size=v.shape)))
    report = evaluate(tmp_path, config(retrieve__routes=["lexical"]), version)
    assert next(g for g in report.gates if g.name == "dense_recall_at_50").passed is None
    assert "dense_recall_at_50" in report.figures
    rankings, _ = raw_rankings(version, CASES, FakeEmbedder(), config(retrieve__routes=["lexical"]).retrieve, 50)
    assert rankings["fused"] == rankings["lexical"] != rankings["dense"], "fused are the routes that are on"


def test_char_bm25_cuts_terms_and_means_to(tmp_path):
    report = evaluate(tmp_path, config(lexical__tokenizer="char"))
    assert report.dictionary[0]["found"] is None and not failed(report)


# --- chunks -----------------------------------------------------------------------------------------------------------

TEXT = """# A

First sentence here. Second sentence here.

| x | y |
|---|---|
| 1 | 2 |
| 3 | 4 |

# B

Another section."""


def pieces(*quotes: str, **fields) -> list[Chunk]:
    """One parent over all of TEXT's first section, and a child for each quote."""
    end = TEXT.index("\n\n# B")
    parent, *children = make_chunks(["x"] * len(quotes), parent="doc", **fields)
    parent = parent.model_copy(update={"content": TEXT[:end], "span": (0, end), "n_tokens": 24})
    out = [parent]
    for child, quote in zip(children, quotes, strict=True):
        at = TEXT.index(quote)
        out.append(child.model_copy(update={"content": quote, "span": (at, at + len(quote)), "n_tokens": 8}))
    return out


def counted(chunks: list[Chunk], max_tokens: int | None = None, text: str | None = TEXT) -> dict[str, int]:
    limits = config(chunk__child_tokens=32, chunk__overlap_tokens=8).chunk
    rows = chunk_quality(chunks, lambda chunk: text, limits, max_tokens)
    return {row["what"]: row["found"] for row in rows if row["found"]}


WHOLE = ["First sentence here. Second sentence here.", TEXT[TEXT.index("| x") : TEXT.index("\n\n# B")]]


def test_good_chunks_have_no_finding():
    assert counted(pieces(*WHOLE)) == {}


@pytest.mark.parametrize(
    ("quotes", "found"),
    [
        (["First sentence here. Second"], {"child ends inside a sentence": 1}),
        (["First sentence here."], {}),
        (["| x | y |\n|---|---|\n| 1 | 2 |", "| 3 | 4 |"], {"table in more than one child": 1}),
        (["| x | y |\n|---|---|\n| 1 | 2"], {"child ends inside a table row": 1, "table in more than one child": 1}),
        ([*WHOLE, WHOLE[0]], {"active child that repeats another": 1}),
        (["| 3 | 4 |\n\n# B\n\nAnother section."],
         {"chunk across sections": 1, "child outside its parent": 1, "table in more than one child": 1}),
    ],
)  # fmt: skip
def test_where_children_end(quotes, found):
    assert counted(pieces(*quotes)) == found


def test_a_span_that_does_not_give_the_content_and_one_outside_its_parent():
    parent, child, table = pieces(*WHOLE)
    moved = child.model_copy(update={"span": (child.span[0] + 1, child.span[1] + 1)})
    assert counted([parent, moved, table]) == {"span does not give the content": 1}
    narrow = parent.model_copy(update={"content": TEXT[:20], "span": (0, 20)})
    assert counted([narrow, child, table]) == {"child outside its parent": 2}


def test_parents_that_overlap_and_orphans():
    parent, *children = pieces(*WHOLE)
    second = parent.model_copy(update={"chunk_id": "p-2", "child_ids": ("none",)})
    found = counted([parent, second, *children])
    assert found == {"parents overlap": 1, "child without its parent, or parent without a child": 1}
    assert counted(children)["child without its parent, or parent without a child"] == 2


def test_lengths_and_documents_without_their_text():
    chunks = pieces(*WHOLE)
    long = [c.model_copy(update={"n_tokens": 99}) if not c.is_parent else c for c in chunks]
    assert counted(long)["chunk over its limit"] == 2
    assert counted(chunks, max_tokens=5)["child longer than the embedder reads (5)"] == 2
    assert counted([c.model_copy(update={"n_tokens": 1}) for c in chunks])["child under 2 tokens"] == 2
    assert counted(chunks, text=None) == {"document without its parsed text (not looked at above)": 1}


def test_parsed_text_is_read_as_it_was_written(tmp_path):
    (tmp_path / "a.md.md").write_bytes("一\r\ntwo".encode())
    a, b = (make_chunks(["x"], make_document(name))[0] for name in "ab")
    assert parsed_text(tmp_path)(a) == "一\r\ntwo", "line ends are not translated, or spans would shift"
    assert parsed_text(tmp_path)(b) is None


def test_two_versions_with_one_file_name_are_two_documents():
    """Else the parents of one would overlap those of the other, and its text would be compared with the other's."""
    new = make_document("doc", doc_version="v5.0")
    texts = {make_document("doc").key: "Old text here.", new.key: "A new text here."}
    chunks = [c for d in (make_document("doc"), new) for c in make_chunks([texts[d.key]], d, d.doc_version)]
    rows = chunk_quality(chunks, lambda chunk: texts[chunk.doc_key], config().chunk, None)
    assert not any(row["found"] for row in rows if row["must be 0"])


def test_a_legacy_copy_is_no_repetition():
    def twins(status: str) -> int:
        copies = [c.model_copy(update={"chunk_id": f"{c.chunk_id}-2"})
                  for c in pieces(WHOLE[0], document=make_document("doc2", status=status))]  # fmt: skip
        return counted(pieces(WHOLE[0]) + copies).get("active child that repeats another", 0)

    assert (twins("active"), twins("legacy")) == (1, 0)


# --- dictionary -------------------------------------------------------------------------------------------------------


def test_whole_tokens_are_what_the_parts_do_not_give():
    jieba = WordTokenizer(TERMS)
    assert whole_tokens(jieba, "单点登录") == [{"单点登录"}]
    assert whole_tokens(jieba, "break-glass account") == [{"break-glass_account"}]
    assert whole_tokens(jieba, "LG-500") == [{"lg-500"}]
    assert whole_tokens(jieba, "SSO登录") == [{"sso"}, {"登录"}], "a run of each script"
    assert whole_tokens(WhitespaceTokenizer(), "break-glass account") == [set()]
    assert whole_tokens(CharTokenizer(), "单点登录") == [set()]


def test_dictionary_rows_by_hand(tmp_path):
    twice = TermEntry(standard_term="emergency access", colloquial=("rescue login",))
    terms, version = [*TERMS, twice], make(tmp_path, config())
    rows = {r["what"].split(" (")[0]: r for r in dictionary_quality(version, LOG)}
    found = {what: (row["found"], row["of"]) for what, row in rows.items()}
    assert found["terms kept whole by the tokenizer"] == (3, 3)
    assert found["entries that no document uses"] == (1, 4)
    assert rows["entries that no document uses"]["examples"] == "carrier pigeon"
    assert found["questions of the query log with a term"] == (4, 4), "rescue login three times, SSO once"
    # rescue, login and the term of both three times each, sso and 登录 once; the documents hold 登录 alone, in 单点登录
    assert found["tokens of the query log that the index holds"] == (1, 11)
    vars(version)["entries"] = terms
    claimed = next(r for r in dictionary_quality(version) if "claim" in r["what"])
    assert (claimed["found"], claimed["examples"]) == (1, "rescue login")


THREE = ("单点登录 门户", "请用单点登录吧", "经单点登录访问")  # cut at blanks, the first alone keeps the term


@pytest.mark.parametrize(("sentences", "kept"), [(THREE[:1], 1), (THREE[:2], 1), (THREE, 0)])
def test_a_term_is_kept_when_at_least_half_of_its_children_keep_it(sentences, kept, tmp_path):
    version = make(tmp_path, config(lexical__tokenizer="whitespace"), make_chunks(sentences, DOCUMENTS[1]))
    assert (dictionary_quality(version)[0]["found"], dictionary_quality(version)[0]["of"]) == (kept, 1)


def test_whitespace_keeps_no_term_of_a_chinese_sentence(tmp_path):
    rows = {r["what"]: r for r in dictionary_quality(make(tmp_path, config(lexical__tokenizer="whitespace")))}
    kept = rows["terms kept whole by the tokenizer"]
    assert (kept["found"], kept["examples"]) == (0, "cut: break-glass account, 单点登录, 集群心跳")
    assert rows["characters in a Han token (median)"]["found"] > 8
