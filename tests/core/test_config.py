"""Configuration: precedence, what is refused and how it is said, views, secrets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ragbuild.core.config import Config, Endpoints, load_config, parse_assignments, profiles
from ragbuild.core.errors import EXIT_CODES, RagbuildError, UsageError


def test_the_packaged_defaults_are_the_classes_own():
    assert load_config() == Config(), "default_config.yaml and the classes say the same"


def test_every_profile_loads():
    assert set(profiles()) == {"offline", "standard", "qwen"}
    for name in profiles():
        assert load_config(name).profile == name
    assert load_config("standard").embedder.name == "BAAI/bge-m3"
    assert load_config("standard").rerank.model == "flag:BAAI/bge-reranker-v2-m3"
    assert load_config("qwen").embedder.query_prompt.endswith("Query:")
    assert not any(load_config(name).embedder.trust_remote_code for name in profiles())


def test_precedence(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "profile: standard\nembedder: {batch_size: 7}\nretrieve: {top_n: 40, rrf_k: 10}\n", encoding="utf-8"
    )
    config = load_config(file=file, overrides={"retrieve.top_n": 30})
    assert config.retrieve.top_n == 30, "-p over the file"
    assert config.retrieve.rrf_k == 10, "the file over the defaults"
    assert config.embedder.batch_size == 7
    assert config.embedder.name == "BAAI/bge-m3", "the file's profile, keys that the file leaves alone"
    assert config.rerank.top_m == 8, "the defaults"
    assert load_config("offline", file).profile == "offline", "--profile over the file's"
    assert load_config("offline", file).embedder.name == "auto"


def test_a_profile_named_by_p_is_taken_whole():
    config = load_config(overrides={"profile": "standard"})
    assert (config.profile, config.generate.generator) == ("standard", "openai")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"retrieve.topn": 3}, ["'retrieve.topn'", "top_n", "rrf_k", "max_query_chars"]),
        ({"retriever.top_n": 3}, ["'retriever'", "retrieve", "lexical"]),
        ({"rerank.weights.bm25": 1}, ["'rerank.weights.bm25'", "lexical, cosine, coverage"]),
        ({"retrieve.top_n": 0}, ["'retrieve.top_n'", "got 0", "greater than or equal to 1"]),
        ({"retrieve.top_n": "many"}, ["'retrieve.top_n'", "got 'many'", "integer"]),
        ({"lexical.tokenizer": "bm25"}, ["'lexical.tokenizer'", "got 'bm25'", "'jieba', 'char' or 'whitespace'"]),
        ({"lexical.b": 1.5}, ["'lexical.b'", "got 1.5", "less than or equal to 1"]),
        ({"lexical.k1": float("nan")}, ["'lexical.k1'", "finite"]),
        ({"lexical.k1": 0}, ["'lexical.k1'", "greater than 0"]),
        ({"lexical.engine": "tantivy", "lexical.k1": 2.0}, ["tantivy", "k1 = 1.2", "rank_bm25"]),
        ({"chunk.child_tokens": 2000}, ["'chunk'", "child_tokens 2000 must not exceed parent_tokens 1024"]),
        ({"chunk.overlap_tokens": 200}, ["overlap_tokens 200 must be at most half"]),
        ({"retrieve.routes": []}, ["'retrieve.routes'", "at least 1"]),
        ({"retrieve.routes": ["sparse"]}, ["'retrieve.routes.0'", "'lexical' or 'dense'"]),
        ({"retrieve": 5}, ["'retrieve'", "got 5"]),
        ({"retrieve": 5, "retrieve.top_n": 3}, ["'retrieve.top_n'", "to a value and to a section"]),
        ({"profile": "big"}, ["unknown profile 'big'", "offline, qwen, standard"]),
    ],
)
def test_a_bad_key_is_named_with_its_path_and_what_it_takes(overrides, said):
    with pytest.raises(UsageError) as error:
        load_config(overrides=overrides)
    for part in said:
        assert part in str(error.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(UsageError) as error:
        load_config(overrides={"retrieve.top_n": 0, "rerank.top_m": 1000, "x": 1})
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- a\n- b\n", "must be a YAML mapping, got list"),
        (b"a: [", "cannot be read"),
        (b"\xff\xfe\xff", "cannot be read"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, content: bytes, said: str):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        load_config(file=path)


def test_a_missing_file_is_refused_and_an_empty_one_is_not(tmp_path):
    with pytest.raises(UsageError, match="none.yaml cannot be read"):
        load_config(file=tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    assert load_config(file=tmp_path / "empty.yaml") == Config()


def test_overrides_are_validated_and_the_original_stays():
    config = load_config()
    changed = config.with_overrides({"rerank.weights.cosine": 0.25, "embedder.name": "minilm"})
    assert (changed.rerank.weights.cosine, changed.embedder.name) == (0.25, "minilm")
    assert changed.rerank.weights.lexical == 1.0 and config.embedder.name == "auto"
    with pytest.raises(UsageError, match="unknown configuration key 'embedder.nam'"):
        config.with_overrides({"embedder.nam": "x"})


def test_the_configuration_is_frozen():
    with pytest.raises(ValidationError):
        load_config().retrieve.top_n = 3


def test_assignments_are_read_as_yaml():
    pairs = [
        "retrieve.top_n=30",
        "retrieve.routes=[lexical]",
        "route.enabled=false",
        "plan.domain=a=b",
        "embedder.query_prompt=",
    ]
    assert parse_assignments(pairs) == {
        "retrieve.top_n": 30,
        "retrieve.routes": ["lexical"],
        "route.enabled": False,
        "plan.domain": "a=b",
        "embedder.query_prompt": None,
    }
    for bad in ("retrieve.top_n", "=3", "a=["):
        with pytest.raises(UsageError, match="-p"):
            parse_assignments([bad])


def test_a_view_answers_for_declared_sections_only():
    view = load_config().only(["retrieve", "seed"])
    assert view.retrieve.top_n == 50 and view.seed == 13
    with pytest.raises(UsageError, match="'lexical' is not declared by this step; it declares retrieve, seed"):
        _ = view.lexical


def test_the_digest_knows_sections():
    config = load_config()
    changed = config.with_overrides({"rerank.top_m": 5})
    assert config.digest(["retrieve"]) == changed.digest(["retrieve"])
    assert config.digest(["rerank"]) != changed.digest(["rerank"])
    assert config.digest() != changed.digest()
    assert config.digest(["rerank", "retrieve"]) == config.digest(["retrieve", "rerank"])


@given(st.integers(1, 1000), st.integers(1, 100), st.booleans())
def test_a_configuration_survives_its_file(top_n: int, top_m: int, switch: bool):
    config = load_config(overrides={"retrieve.top_n": top_n, "rerank.top_m": top_m, "route.tag": switch})
    assert Config.model_validate(config.model_dump(mode="json")) == config


def test_secrets_come_from_the_environment_and_are_not_shown(monkeypatch):
    monkeypatch.setenv("RAGBUILD_LLM_BASE_URL", "http://localhost:9/v1")
    monkeypatch.setenv("RAGBUILD_LLM_API_KEY", "sk-secret")
    monkeypatch.setenv("RAGBUILD_DATABASE_URL", "postgresql://user:secret@host/db")
    endpoints = Endpoints.from_env()
    assert endpoints.llm_api_key == "sk-secret"
    assert "secret" not in repr(endpoints) and "secret" not in f"{endpoints}" and "set" in repr(endpoints)
    monkeypatch.setenv("RAGBUILD_LLM_API_KEY", "")
    assert Endpoints.from_env().llm_api_key is None


def test_exit_codes():
    expected = {"RagbuildError": 1, "StepFailed": 1, "UsageError": 2, "GateFailed": 3, "InputRefused": 4}
    expected |= {"MissingResource": 5, "WorkspaceLocked": 6, "DocumentRefused": 4, "NothingToMeasure": 4}
    assert expected == EXIT_CODES
    assert {cls.__name__ for cls in RagbuildError.__subclasses__() if cls.__module__ == "ragbuild.core.errors"} == set(
        expected
    ) - {"RagbuildError", "NothingToMeasure"}
