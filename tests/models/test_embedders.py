"""Embedders and the cache of their vectors."""

from __future__ import annotations

import numpy as np
import pytest

from ragbuild.core.config import EmbedderConfig
from ragbuild.core.errors import MissingResource
from ragbuild.models.embedders import (
    BGEM3Embedder,
    SentenceTransformerEmbedder,
    USEEmbedder,
    VectorCache,
    load_embedder,
    resolve_auto,
    unit,
)
from tests.conftest import FakeEmbedder

LOCAL = EmbedderConfig()
HEAVY = pytest.mark.xdist_group("heavy models")  # one worker loads torch, not two


def is_unit(vectors: np.ndarray, dim: int) -> bool:
    lengths = np.linalg.norm(vectors, axis=1)
    return vectors.dtype == np.float32 and vectors.shape[1] == dim and np.allclose(lengths, 1, atol=1e-5)


def test_unit():
    assert unit(np.array([[3, 4], [0, 0], [0, -2]])).tolist() == [
        [pytest.approx(0.6), pytest.approx(0.8)],
        [0, 0],
        [0, -1],
    ]
    assert unit(np.zeros((0, 3))).shape == (0, 3) and unit(np.ones((2, 2))).dtype == np.float32


# --- the packaged models ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def use() -> USEEmbedder:
    return load_embedder("use-multilingual", LOCAL)


@HEAVY
def test_use_gives_unit_vectors_in_the_order_of_the_texts(use: USEEmbedder):
    texts = ["a much longer text about backups, licences and gateways", "short", "", "备份", "short"]
    vectors = use.encode_documents(texts)
    assert is_unit(vectors, 512) and (use.name, use.dim) == ("use-multilingual", 512)
    assert np.allclose(vectors[1], use.encode_queries(["short"])[0], atol=1e-5)
    assert np.allclose(vectors[1], vectors[4], atol=1e-6)
    assert use.encode_documents([]).shape == (0, 512)


@HEAVY
def test_use_brings_chinese_and_english_together(use: USEEmbedder):
    question = use.encode_queries(["怎么重置管理员密码？"])[0]
    answer, other = use.encode_documents(["How to reset the administrator password", "The fan speed of the chassis"])
    assert question @ answer > 0.4 > question @ other
    english = use.encode_queries(["how do I recover the admin account?"])[0]
    chinese = use.encode_documents(["恢复管理员账户的步骤", "机箱风扇转速"])
    assert english @ chinese[0] > english @ chinese[1] + 0.1


@HEAVY
def test_use_in_processes_equals_use_in_process(use: USEEmbedder, monkeypatch):
    texts = [f"document number {i} " * (1 + i % 5) for i in range(9)] + ["登录失败", ""]
    monkeypatch.setattr(USEEmbedder, "_WORTH_A_POOL", 4)
    monkeypatch.setattr(USEEmbedder, "_BLOCK", 3)
    pooled = USEEmbedder(processes=2)
    assert np.allclose(pooled.encode_documents(texts), use._here(texts), atol=1e-5)
    assert pooled._model is None, "nothing was encoded here"


@HEAVY
def test_minilm_loads_from_its_package():
    embedder = load_embedder("minilm", LOCAL)
    assert (embedder.name, embedder.dim, embedder.max_tokens) == ("minilm", 384, 256)
    question = embedder.encode_queries(["how do I reset the password?"])
    documents = embedder.encode_documents(["To reset your password, open the portal.", "The fan is loud."])
    assert is_unit(documents, 384)
    assert question[0] @ documents[0] > question[0] @ documents[1] + 0.3
    assert embedder.encode_documents([]).shape == (0, 384)


# --- hub models, random and tiny -------------------------------------------------------------------------------------


@HEAVY
def test_bge_m3_from_a_local_folder(tiny_bge_m3):
    embedder = load_embedder(str(tiny_bge_m3), LOCAL)
    assert isinstance(embedder, BGEM3Embedder) and embedder.dim == 32
    texts = ["reset admin password", "证 书 过 期", "reset " * 60]
    vectors = embedder.encode_documents(texts)
    assert is_unit(vectors, 32)
    assert np.allclose(vectors, embedder.encode_queries(texts), atol=1e-5), "no prompt, no difference"
    assert embedder.encode_documents([]).shape == (0, 32) == embedder.encode_queries([]).shape
    assert embedder.max_tokens == 64, "what the model's positions allow"


@HEAVY
def test_a_query_prompt_goes_before_queries_only(tiny_bge_m3):
    plain = load_embedder(str(tiny_bge_m3), LOCAL)
    prompted = load_embedder(str(tiny_bge_m3), EmbedderConfig(query_prompt="backup : "))
    assert np.allclose(prompted.encode_documents(["reset"]), plain.encode_documents(["reset"]), atol=1e-5)
    expected = plain.encode_documents(["backup : reset"])
    assert np.allclose(prompted.encode_queries(["reset"]), expected, atol=1e-5)
    assert not np.allclose(expected, plain.encode_documents(["reset"]), atol=1e-3)


@HEAVY
def test_any_sentence_transformers_folder(tiny_bge_m3, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    body = Transformer(str(tiny_bge_m3))
    SentenceTransformer(modules=[body, Pooling(32)]).save(str(tmp_path / "model"))
    embedder = load_embedder(str(tmp_path / "model"), EmbedderConfig(query_prompt="backup : "))
    assert isinstance(embedder, SentenceTransformerEmbedder) and embedder.dim == 32
    documents = embedder.encode_documents(["backup : reset", "reset"])
    assert is_unit(documents, 32)
    assert np.allclose(embedder.encode_queries(["reset"])[0], documents[0], atol=1e-5)


@HEAVY
@pytest.mark.parametrize("name", ["BAAI/bge-m3", "no-such-org/no-such-model", "/no/such/folder"])
def test_a_model_that_is_not_here_names_what_to_do(name: str):
    with pytest.raises(MissingResource, match="embedder.*could not be loaded.*local_files_only=false.*PROFILE=offline"):
        load_embedder(name, LOCAL)


@pytest.mark.parametrize(
    ("languages", "name"),
    [(["en"], "minilm"), (["en", "en"], "minilm"), (["en", "zh"], "use"), (["zh"], "use"), ([], "use")],
)
def test_auto_is_resolved_by_language(languages: list[str], name: str):
    name = {"use": "use-multilingual"}.get(name, name)
    assert resolve_auto(languages)[0] == name and resolve_auto(languages)[1]


# --- the cache -------------------------------------------------------------------------------------------------------


def test_equal_texts_are_encoded_once_and_never_again(tmp_path):
    embedder = FakeEmbedder()
    texts = ["b", "a", "b", "证书", "a"]
    first = VectorCache(embedder, tmp_path).encode(texts)
    assert embedder.encoded == ["b", "a", "证书"], "in order, each once"
    assert np.array_equal(first, FakeEmbedder().encode_documents(texts))
    again = VectorCache(embedder, tmp_path)
    assert np.array_equal(again.encode(texts), first) and len(embedder.encoded) == 3, "another run encodes nothing"
    assert np.array_equal(again.encode(["new", "b"])[1], first[0])
    assert embedder.encoded[3:] == ["new"]
    assert again.encode([]).shape == (0, 64)


def test_segments_are_never_rewritten(tmp_path):
    cache = VectorCache(FakeEmbedder(), tmp_path)
    cache.encode(["a", "b"])
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()}
    cache.encode(["a", "c"])
    assert before.items() <= {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()}.items()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("tear", ["shorten the vectors", "lose the vectors", "lose the keys", "shorten the keys"])
def test_a_torn_segment_is_ignored(tmp_path, tear: str):
    VectorCache(FakeEmbedder(), tmp_path).encode(["a", "b", "c"])
    (vectors,), (keys,) = tmp_path.glob("*.f32"), tmp_path.glob("*.keys")
    path = vectors if "vectors" in tear else keys
    if "lose" in tear:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5])
    embedder = FakeEmbedder()
    assert np.array_equal(
        VectorCache(embedder, tmp_path).encode(["a", "c"]), FakeEmbedder().encode_documents(["a", "c"])
    )
    assert set(embedder.encoded) <= {"a", "c"} and "c" in embedder.encoded


def test_a_run_that_died_goes_on_where_it_stopped(tmp_path, monkeypatch):
    class Dies(FakeEmbedder):
        def encode_documents(self, texts):
            if len(self.encoded) >= 4:
                raise KeyboardInterrupt
            return super().encode_documents(texts)

    monkeypatch.setattr(VectorCache, "BLOCK", 2)
    texts = [f"text {i}" for i in range(7)]
    done = []
    with pytest.raises(KeyboardInterrupt):
        VectorCache(Dies(), tmp_path).encode(texts, progress=lambda i, n: done.append((i, n)))
    assert done == [(2, 7), (4, 7)]
    embedder = FakeEmbedder()
    found = VectorCache(embedder, tmp_path).encode(texts, progress=lambda i, n: done.append((i, n)))
    assert embedder.encoded == texts[4:] and done[2:] == [(2, 3), (3, 3)]
    assert np.array_equal(found, FakeEmbedder().encode_documents(texts))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_refused_and_not_kept(tmp_path, bad: float):
    class Damaged(FakeEmbedder):
        def encode_documents(self, texts):
            vectors = super().encode_documents(texts)
            vectors[-1, 0] = bad
            return vectors

    with pytest.raises(MissingResource, match="'fake' returned NaN or infinity"):
        VectorCache(Damaged(), tmp_path).encode(["a", "b"])
    assert list(tmp_path.iterdir()) == []


def test_old_segments_go_when_the_cache_is_full_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(VectorCache, "LIMIT_BYTES", 3 * 64 * 4)
    monkeypatch.setattr(VectorCache, "BLOCK", 2)
    embedder = FakeEmbedder()
    cache = VectorCache(embedder, tmp_path)
    texts = [f"text {i}" for i in range(9)]
    expected = FakeEmbedder().encode_documents(texts)
    assert np.array_equal(cache.encode(texts), expected), "more than fits is still returned whole"
    assert sum(p.stat().st_size for p in tmp_path.glob("*.f32")) <= 3 * 64 * 4
    assert len(list(tmp_path.glob("*.f32"))) == len(list(tmp_path.glob("*.keys")))
    assert np.array_equal(cache.encode(texts), expected), "what went is encoded again"


def test_what_another_process_removed_is_encoded_again(tmp_path):
    cache = VectorCache(FakeEmbedder(), tmp_path)
    first = cache.encode(["a", "b"])
    for path in tmp_path.iterdir():
        path.unlink()
    assert np.array_equal(cache.encode(["b", "a"]), first[::-1])


def test_every_model_has_its_own_cache():
    one, other = FakeEmbedder(), FakeEmbedder()
    other.name = "fake/2"
    assert VectorCache(one).folder != VectorCache(other).folder
    VectorCache(one).encode(["a"])
    VectorCache(other).encode(["a"])
    assert other.encoded == ["a"], "vectors of two models never meet"
