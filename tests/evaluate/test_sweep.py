"""The sweep: equal to the pipeline at any setting, its rules by hand, kept and found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.config import Config, TuneConfig, load_config
from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.records import Chunk
from ragbuild.evaluate.sweep import ABSENT, Setting, Sweep, recommend_top_m, recommend_top_n, write_choice
from ragbuild.evaluate.sweep_compute import compute_sweep
from ragbuild.evaluate.tuning import open_corpus
from ragbuild.index.filters import Filter
from ragbuild.index.staging import write_version
from ragbuild.index.versions import IndexVersion
from ragbuild.offline.evalset import EvalCase, half_of
from ragbuild.online.pipeline import Pipeline
from ragbuild.online.rerank import rerank, to_parents
from ragbuild.online.retrieve import Retriever
from tests.conftest import FakeEmbedder, make_chunks, make_document

WORDS = "gateway port timeout backup restore radius realm token seat licence cluster node fan power cable".split()
TUNE = TuneConfig(top_n=(3, 5, 8, 20), top_m_max=6, max_share=0.5)


def corpus() -> tuple[list[Chunk], list]:
    """12 documents in two knowledge bases, five children each; no two texts are equal."""
    chunks, documents = [], []
    for i in range(12):
        document = make_document(f"doc{i:02d}", kb="alpha" if i % 2 else "beta", doc_type=("guide", "faq")[i % 3 == 0])
        texts = [
            f"{WORDS[(i + j) % 15]} {WORDS[(3 * i + j * j) % 15]} setting {i} of part {j}. " * (1 + (i + j) % 3)
            + f"The {WORDS[(7 * i + 2 * j) % 15]} is {100 * i + j}."
            for j in range(5)
        ]
        documents.append(document)
        chunks += make_chunks(texts, document)
    return chunks, documents


def case(name: str, query: str, groups: list[list[str]], doc: str) -> EvalCase:
    parents = tuple(tuple(dict.fromkeys("p-" + i[2:-4] for i in g)) for g in groups)
    return EvalCase(
        name, query, "en", "factual", "plain", "expert", half_of(doc), documents=(next(
            d.key for d in corpus()[1] if d.doc_id == doc),), groups=tuple(map(tuple, groups)),
        parent_groups=tuple(dict.fromkeys(parents)), answer="it is set", keywords=("set",),
    )  # fmt: skip


CASES = [
    case("a", "what is the gateway port timeout", [["c-doc00-000"]], "doc00"),
    case(
        "b", "how do I restore the backup, and what is the radius realm?", [["c-doc03-001"], ["c-doc04-002"]], "doc03"
    ),
    case("c", "token seat licence of part 4", [["c-doc07-004", "c-doc08-004"]], "doc07"),
    case("d", "cluster node fan power", [["c-doc09-001"], ["c-doc09-002"]], "doc09"),
    case("e", "cable 1103", [["c-doc11-003"]], "doc11"),
    case("f", "zzz unheard", [["c-doc05-000"]], "doc05"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pipeline, Sweep]:
    chunks, documents = corpus()
    config, embedder = load_config(overrides={"route.enabled": False}), FakeEmbedder()
    root = tmp_path_factory.mktemp("sweep")
    write_version(
        root / "indexes", chunks, documents, [], config=config, encode=embedder.encode_documents,
        embedder={"name": "fake", "dim": 64},
    )  # fmt: skip
    pipeline = Pipeline(IndexVersion(root / "indexes"), config, embedder)
    return pipeline, compute_sweep(pipeline, CASES, TUNE)


def asked(sweep: Sweep) -> list[EvalCase]:
    return [next(c for c in CASES if c.id == i) for i in sweep.facts["ids"]]


def searched(pipeline: Pipeline, case: EvalCase, setting: Setting) -> tuple[list[str], list[str], list[Chunk]]:
    """What the pipeline itself gives: fused ids, reranked ids, parents."""
    rewritten = pipeline.rewriter(case.query)
    kb, kind = case.documents[0].split("/")[0], next(d.doc_type for d in corpus()[1] if d.key == case.documents[0])
    where = {"right kb": Filter(kb=(kb,)), "right doc_type": Filter(doc_type=(kind,))}.get(setting.filter, Filter())
    values = {"top_n": setting.top_n, "rrf_k": setting.rrf_k, "routes": setting.routes}
    config = pipeline.config.retrieve.model_copy(update=values)
    found = Retriever(pipeline.version, pipeline.embedder, config)(rewritten.sub_questions, where).candidates
    ranked = rerank(rewritten.query, found, pipeline.reranker)
    parents = to_parents(ranked[: setting.top_m], pipeline.version)
    return [c.hit.chunk_id for c in found], [c.hit.chunk_id for c in ranked], parents


SETTINGS = [
    Setting(20, 6), Setting(3, 2), Setting(8, 4, rrf_k=1), Setting(5, 3, rrf_k=200, routes=("dense",)),
    Setting(20, 5, routes=("lexical",)), Setting(8, 6, filter="right kb"), Setting(5, 2, 7, filter="right doc_type"),
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_equals_the_pipeline_at_the_same_setting(made: tuple[Pipeline, Sweep], setting: Setting):
    pipeline, sweep = made
    recall, parents = sweep.recall(setting), sweep.parent_recall(setting, [setting.top_m])[0]
    tokens, columns = sweep.context_tokens(setting, [setting.top_m])[0], sweep.rerank(setting)
    above = pipeline.version.all_parents()
    for q, one in enumerate(asked(sweep)):
        fused, ranked, found = searched(pipeline, one, setting)
        assert np.isfinite(columns[1][q]).sum() == len(fused)
        assert recall[q] == pytest.approx(np.mean([bool({*g} & {*fused}) for g in one.groups]))
        ids = {p.chunk_id for p in found}
        assert parents[q] == pytest.approx(np.mean([bool({*g} & ids) for g in one.parent_groups]))
        assert tokens[q] == sum(p.n_tokens for p in found)
        mine = [above[p].chunk_id for p in sweep.parents(setting, len(ranked) or 1)[q] if p >= 0]
        assert mine == ["p-" + i[2:-4] for i in ranked], "the order after reranking, as parents"


def test_ranks_of_the_truth_are_those_of_the_fused_list(made: tuple[Pipeline, Sweep]):
    pipeline, sweep = made
    setting = Setting(20, 6)
    ranks = iter(sweep.truth_ranks(setting).tolist())
    for one in asked(sweep):
        fused = searched(pipeline, one, replace(setting, top_n=20))[0]
        for group in one.groups:
            rank, places = next(ranks), [fused.index(i) + 1 for i in group if i in fused]
            assert rank == min(places) if places else rank > 20


def test_another_reranker_s_scores_are_kept_and_used(made: tuple[Pipeline, Sweep]):
    pipeline, _ = made

    class Longest:
        name, stand_in = "longest", False

        def score(self, query, candidates):
            return np.array([float(len(c.chunk.content)) + c.chunk.span[0] / 1e4 for c in candidates])

    other = Pipeline(pipeline.version, pipeline.config, pipeline.embedder)
    other.reranker = Longest()
    sweep, above = compute_sweep(other, CASES, TUNE), pipeline.version.all_parents()
    assert sweep.facts["reranker"] == "longest" and not sweep.facts["stand_in"]
    for q, one in enumerate(asked(sweep)):
        ranked = searched(other, one, Setting(8, 6))[1]
        assert [above[p].chunk_id for p in sweep.parents(Setting(8, 6), 8)[q] if p >= 0] == [
            f"p-{i[2:-4]}" for i in ranked
        ]


def test_two_sweeps_are_identical_and_survive_a_file(made: tuple[Pipeline, Sweep], tmp_path: Path):
    pipeline, sweep = made
    sweep.save(tmp_path / "one")
    again, loaded = compute_sweep(pipeline, CASES, TUNE), Sweep.load(tmp_path / "one")
    assert loaded is not None and loaded.facts == sweep.facts and loaded.answers.keys() == {1, 2, 4}
    for name, values in sweep.arrays.items():
        assert np.array_equal(values, again.arrays[name]) and np.array_equal(values, loaded.arrays[name])
    assert {k: v for k, v in again.facts.items() if k != "seconds"} == {
        k: v for k, v in sweep.facts.items() if k != "seconds"
    }
    assert len(sweep.facts["seconds"]) == len(TUNE.top_n) and min(sweep.facts["seconds"]) > 0
    (tmp_path / "one.npz").write_bytes(b"PK broken")
    assert Sweep.load(tmp_path / "one") is None and Sweep.load(tmp_path / "none") is None


def test_recall_of_one_list_does_not_fall_as_more_of_it_is_read(made: tuple[Pipeline, Sweep]):
    _, sweep = made
    for routes in (("lexical",), ("dense",)):
        curve = sweep.recall_curve(TUNE.top_n, sweep.setting(routes=routes))
        assert (np.diff(curve) >= 0).all()
    ranks = sweep.truth_ranks(Setting(20))
    assert (np.diff([(ranks <= k).mean() for k in range(1, 21)]) >= 0).all()
    within = sweep.parent_recall(Setting(20), range(1, 7))
    assert (np.diff(within, axis=0) >= 0).all() and (
        np.diff(sweep.context_tokens(Setting(20), range(1, 7)), axis=0) >= 0
    ).all()


def test_flips_name_the_questions_that_change(made: tuple[Pipeline, Sweep]):
    _, sweep = made
    before, after = Setting(3, 1, routes=("dense",)), Setting(20, 6)
    recalls = [sweep.parent_recall(s, [s.top_m])[0] for s in (before, after)]
    rows = sweep.flips(before, after)
    changed = {q for q, a, b in zip(sweep.facts["queries"], *recalls, strict=True) if a != b}
    assert rows and {r["question"] for r in rows} == changed and sweep.flips(after, after) == []
    assert [{"gained": "lost", "lost": "gained"}[r["now"]] for r in sweep.flips(after, before)].count("gained") == sum(
        r["now"] == "gained" for r in rows
    )


def test_without_a_hit_everything_is_zero(made: tuple[Pipeline, Sweep]):
    pipeline, _ = made
    sweep = compute_sweep(pipeline, [replace(CASES[5], query="zzz")], TUNE)
    setting = sweep.setting(routes=("lexical",), top_n=5)
    assert sweep.recall(setting).tolist() == [0.0] and sweep.truth_ranks(setting).tolist() == [ABSENT]
    assert sweep.context_tokens(setting, [4]).tolist() == [[0]] and sweep.parents(setting, 3).tolist() == [[-1, -1, -1]]
    with pytest.raises(InputRefused, match="no question has its answer"):
        compute_sweep(pipeline, [replace(CASES[0], answerable=False)], TUNE)


# --- the rules, by hand ---------------------------------------------------------------------------------------------


def test_the_plateau_rule():
    top_n, recall = (20, 50, 100, 200), (0.70, 0.795, 0.80, 0.805)
    choice = recommend_top_n(top_n, recall, 5000, 0.01, 0.1)
    assert (choice.value, choice.plateau, choice.best) == (50, 50, 0.805), "0.795 is within 0.01 of 0.805"
    greedy = recommend_top_n(top_n, recall, 5000, 0.0, 0.1)
    assert greedy.value == 200 and "no plateau yet" in greedy.reason, "no tolerance: the best itself, at the end"
    assert "no plateau" not in choice.reason
    assert recommend_top_n(top_n, (0.8, 0.9, 0.7, 0.6), 5000, 0.01, 0.1).value == 50, "not every curve only rises"


def test_one_question_decides_nothing_and_the_test_half_is_not_read(made: tuple[Pipeline, Sweep]):
    sweep = made[1]
    mine, few, many = sweep.of("tuning"), Setting(2, 1), Setting(20, 6)
    assert sweep.tolerance == pytest.approx(max(0.01, 1 / mine.sum())), "a half of a few questions resolves no 0.01"
    read = [row["question"] for row in sweep.flips(few, many, "tuning")]
    assert set(read) <= {q for q, own in zip(sweep.facts["queries"], mine, strict=True) if own}
    assert len(read) < len(sweep.flips(few, many)), "the other half flips too, and is not shown"


def test_top_n_is_never_more_than_a_tenth_of_the_children():
    top_n, recall = (20, 50, 100, 200), (0.5, 0.6, 0.7, 0.8)
    largest = recommend_top_n(top_n, recall, 600, 0.01, 0.1)
    assert (largest.value, largest.plateau) == (50, 200) and "beyond" in largest.reason, "a tenth of 600 is 60"
    tiny = recommend_top_n(top_n, recall, 90, 0.01, 0.1)
    assert tiny.value == 9 and "every swept value lies beyond" in tiny.reason
    assert recommend_top_n(top_n, recall, 3, 0.01, 0.1).value == 1


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.integers(1, 4000), st.floats(0, 0.2))
def test_the_rule_holds_for_any_curve(recall: list[float], n: int, tolerance: float):
    top_n = (20, 50, 100, 200)
    choice = recommend_top_n(top_n, recall, n, tolerance, 0.1)
    assert 1 <= choice.value <= max(1, n // 10 + 1) and choice.best == max(recall)
    if choice.value in top_n and choice.value == choice.plateau:
        earlier = [r for k, r in zip(top_n, recall, strict=True) if k < choice.value]
        assert all(r < choice.best - tolerance for r in earlier)


def test_top_m_by_parent_recall_and_answers_only_beyond_chance():
    top_m, recall = (1, 2, 3, 4), (0.5, 0.79, 0.8, 0.8)
    assert recommend_top_m(top_m, recall, 0.01, {}).value == 2
    assert "no plateau yet" in recommend_top_m(top_m, (0.5, 0.6, 0.7, 0.8), 0.01, {}).reason
    same = {1: [1.0, 0.0, 1.0], 4: [1.0, 0.0, 1.0]}
    assert recommend_top_m(top_m, recall, 0.01, same).value == 2
    noise = {1: [0.0, 1.0, 0.0, 0.0], 2: [0.0, 1.0, 0.0, 0.0], 4: [1.0, 0.0, 0.0, 0.0]}
    assert recommend_top_m(top_m, recall, 0.01, noise).value == 2, "as often worse as better"
    better = {1: [0.1, 0.2], 2: [0.1, 0.2], 4: [0.8, 0.9]}
    choice = recommend_top_m(top_m, recall, 0.01, better)
    assert choice.value == 4 and choice.plateau == 2 and "standard errors" in choice.reason


def test_the_choice_is_a_yaml_that_the_build_takes(tmp_path: Path):
    write_choice(tmp_path / "tuned.yaml", Setting(64, 6, 30, ("dense",)), ["chosen by hand", "two\nlines"])
    config = load_config(file=tmp_path / "tuned.yaml")
    assert (config.retrieve.top_n, config.retrieve.rrf_k, config.retrieve.routes) == (64, 30, ("dense",))
    assert config.rerank.top_m == 6
    assert (tmp_path / "tuned.yaml").read_text().startswith("# chosen by hand\n# two\n# lines\n")


# --- the corpus to tune on ------------------------------------------------------------------------------------------


def small(tmp_path: Path, corpus: str) -> Config:
    return load_config(overrides={"tune.corpus": corpus, "tune.top_n": [3, 5], "embedder.name": "use-multilingual"})


def test_a_folder_is_indexed_once_and_needs_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAGBUILD_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "docs"
    folder.mkdir()
    with pytest.raises(UsageError, match="no folder"):
        open_corpus(small(tmp_path, str(tmp_path / "missing")), tmp_path)
    with pytest.raises(InputRefused, match="no document"):
        open_corpus(small(tmp_path, str(folder)), tmp_path, say=lambda text: None)
    (folder / "fan.md").write_text("# Fan\n\n## Replace\n\nPull the blue lever, then lift the fan tray out.\n")
    (folder / "port.md").write_text("# Port\n\n## Default\n\nThe portal listens on port 8443.\n")
    with pytest.raises(InputRefused, match="eval set"):
        open_corpus(small(tmp_path, str(folder)), tmp_path, say=lambda text: None)
    (folder / "expert_eval_set.json").write_text(
        '[{"case_id": "x1", "query": "how is the fan tray taken out?", "language": "en", "reference_answer": "lever",'
        ' "ground": [{"doc_source": "fan.md", "pages": [1], "quotes": ["Pull the blue lever"]}]}]'
    )
    said: list[str] = []
    sweep = open_corpus(small(tmp_path, str(folder)), tmp_path, say=said.append).sweep(said.append)
    assert sweep.recall(sweep.setting()).tolist() == [1.0] and any("encoding" in line for line in said)
    again: list[str] = []
    second = open_corpus(small(tmp_path, str(folder)), tmp_path, say=again.append)
    assert np.array_equal(second.sweep(again.append).arrays["ranks"], sweep.arrays["ranks"]) and again == []
    changed = small(tmp_path, str(folder)).with_overrides({"retrieve.rrf_k": 1})
    assert open_corpus(changed, tmp_path, say=again.append).key != second.key and again == []
