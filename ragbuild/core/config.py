"""One frozen configuration: defaults <- profile <- the user's YAML <- ``-p key=value``.

Environment variables carry secrets and endpoints only (`Endpoints`). An unknown key or a value out of range is
refused with the key's path, what it got and what it takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ragbuild.core.errors import InputRefused, UsageError


class Section(BaseModel):
    """A part of the configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlanConfig(Section):
    """What is asked before anything is built; decides which optional modules are on."""

    domain: str = ""
    document_types: tuple[str, ...] = ()
    knowledge_bases: int = Field(1, ge=1)
    eval_set: bool = False
    image_queries: bool = False


class CorpusConfig(Section):
    """Where the documents and what people decided about them lie."""

    dir: str = "data/corpus"
    query_log: str = "auto"  # auto: query_log.csv in the corpus folder, else beside it
    term_review: str = "auto"
    eval_set: str = "auto"  # a frozen eval_set.json, the same way
    expert_eval_set: str = "auto"
    baseline: str = "auto"  # what the last accepted run reached, the same way
    arrivals: str = "auto"  # documents that come after the build; auto: arrivals beside a folder named corpus
    sidecar: str = "documents.csv"
    max_file_mb: float = Field(100, gt=0)
    max_unzipped_mb: float = Field(500, gt=0)


class ParseConfig(Section):
    """Limits of parsing."""

    timeout_s: float = Field(180, gt=0)
    java_memory_mb: int = Field(2048, ge=256)
    images: bool = True


class DictionaryConfig(Section):
    """How terms are found and forms attached to them."""

    max_candidates: int = Field(400, ge=1)
    min_count: int = Field(2, ge=1)
    string_similarity: float = Field(85, ge=0, le=100)  # rapidfuzz ratio, 0 to 100
    vector_similarity: float = Field(0.72, ge=0, le=1)  # cosine
    use_llm: bool = False


class ChunkConfig(Section):
    """Sizes of parents and children, in tokens of one tokenizer."""

    tokenizer: str = "use-sentencepiece"
    parent_tokens: int = Field(1024, ge=32)
    child_tokens: int = Field(256, ge=16)
    overlap_tokens: int = Field(50, ge=0)

    @model_validator(mode="after")
    def _nested(self) -> ChunkConfig:
        if self.child_tokens > self.parent_tokens:
            raise ValueError(f"child_tokens {self.child_tokens} must not exceed parent_tokens {self.parent_tokens}")
        if self.overlap_tokens * 2 > self.child_tokens:
            raise ValueError(f"overlap_tokens {self.overlap_tokens} must be at most half of child_tokens")
        return self


class EmbedderConfig(Section):
    """The embedding model and how it is loaded."""

    name: str = "auto"  # auto | use-multilingual | minilm | a hub id | a local folder
    processes: int = Field(0, ge=0)  # 0: as many as there are cores, for large jobs only
    batch_size: int = Field(32, ge=1)
    local_files_only: bool = True
    trust_remote_code: bool = False
    query_prompt: str | None = None


class LexicalConfig(Section):
    """The one lexical index: tokenizer, engine, BM25's parameters."""

    tokenizer: Literal["jieba", "char", "whitespace"] = "jieba"
    engine: Literal["auto", "rank_bm25", "tantivy"] = "auto"
    rank_bm25_up_to: int = Field(20_000, ge=0)
    k1: float = Field(1.2, gt=0)  # at 0 a term that a document lacks would divide by zero
    b: float = Field(0.75, ge=0, le=1)
    char_bigrams: bool = True
    stem: bool = True

    @model_validator(mode="after")
    def _fixed(self) -> LexicalConfig:
        if self.engine == "tantivy" and (self.k1, self.b) != (1.2, 0.75):
            raise ValueError("the tantivy engine has k1 = 1.2 and b = 0.75 built in; use rank_bm25 for others")
        return self


class DenseConfig(Section):
    """When a segment of vectors gets a graph."""

    hnsw_above: int = Field(500_000, ge=1)
    hnsw_m: int = Field(32, ge=4)


class RewriteConfig(Section):
    """Which rewrites of a question are on."""

    complete: bool = True  # abbreviation -> full form
    split: bool = True  # compound question -> sub-questions
    fallback: bool = True  # colloquial form or typo -> the documents' term
    use_llm: bool = False
    max_sub_questions: int = Field(4, ge=1, le=10)


class RouteConfig(Section):
    """Which layers of routing are on."""

    enabled: bool = True
    knowledge_base: bool = True
    model_version: bool = True
    tag: bool = False
    use_llm: bool = False


class RetrieveConfig(Section):
    """Routes, fusion and Top-N."""

    top_n: int = Field(50, ge=1, le=1000)
    rrf_k: int = Field(60, ge=1)
    routes: tuple[Literal["lexical", "dense"], ...] = Field(("lexical", "dense"), min_length=1)
    max_query_chars: int = Field(2000, ge=10)


class RerankWeights(Section):
    """Weights of the `features` stand-in: fixed, small, not learned."""

    lexical: float = Field(1.0, ge=0)
    cosine: float = Field(1.0, ge=0)
    coverage: float = Field(0.5, ge=0)


class RerankConfig(Section):
    """The reranker and Top-M."""

    model: str = "features"  # features | none | flag:<id or dir> | a cross-encoder's hub id or local folder
    top_m: int = Field(8, ge=1, le=100)
    weights: RerankWeights = RerankWeights()


class GenerateConfig(Section):
    """The generator, its prompt, and when it abstains."""

    generator: Literal["extractive", "openai"] = "extractive"
    max_quotes: int = Field(5, ge=1, le=20)
    abstain_coverage: float = Field(0.55, ge=0, le=1)
    abstain_cosine: float = Field(0.25, ge=-1, le=1)
    abstain_unknown_names: bool = True
    prompt: str = "initial_prompt"


class EvalSetConfig(Section):
    """How Q-DOC-Q pairs are made."""

    generator: Literal["rules", "openai"] = "rules"
    regenerate: bool = False  # a set is a frozen input: made again only on request
    max_pairs: int = Field(260, ge=1)
    per_child: int = Field(2, ge=1, le=10)  # at most, of different types
    min_pairs: int = Field(50, ge=1)  # below: a warning
    dedup_cosine: float = Field(0.92, ge=0, le=1)  # two questions about one place nearer than this: one goes


class EvaluateConfig(Section):
    """What is measured, and how it is judged."""

    cutoffs: tuple[int, ...] = Field((1, 3, 5, 10, 20, 50), min_length=1)
    judge: Literal["rubric", "openai"] = "rubric"
    dimensions: tuple[str, ...] = Field(
        (
            "keyword_hit_rate", "content_accuracy", "credibility", "content_completeness", "expression_quality",
            "logical_coherence",
        ), min_length=1,
    )  # fmt: skip
    bootstrap: int = Field(2000, ge=100)


class TuneConfig(Section):
    """The sweep over Top-N and Top-M."""

    corpus: str = "python-docs"  # python-docs | own (the workspace) | a folder of documents
    min_children: int = Field(5000, ge=0)  # python-docs is made to hold this many
    top_n: tuple[int, ...] = Field((20, 30, 40, 50, 64, 80, 100, 128, 200), min_length=2)
    top_m_max: int = Field(16, ge=1, le=50)
    tolerance: float = Field(0.01, ge=0, le=0.2)  # the plateau begins at the least K within this of the best recall
    max_share: float = Field(0.1, gt=0, le=1)  # Top-N beyond this share of the children is never recommended
    max_questions: int = Field(200, ge=10)


class GatesConfig(Section):
    """Below these the build ends with exit code 3. Rates are compared by the upper end of their 95 % interval."""

    enabled: bool = True
    lexical_recall_at_50: float = Field(0.8, ge=0, le=1)
    dense_recall_at_50: float = Field(0.5, ge=0, le=1)
    fused_recall_at_50: float = Field(0.85, ge=0, le=1)
    terms_kept_whole: float = Field(0.9, ge=0, le=1)
    margin: float = Field(0.02, ge=0, le=1)  # a metric of the baseline may fall by this much


class KnowledgeConfig(Section):
    """How documents are taken in after the build, and when a full rebuild is recommended."""

    decisions: str = "auto"  # decisions.csv in the source folder, else beside it
    unattended: tuple[Literal["unchanged", "parallel", "correction", "late_legacy", "replace", "legacy"], ...] = (
        "unchanged", "parallel", "correction", "late_legacy",
    )  # fmt: skip
    append_terms: bool = True  # terms that new documents define or name join the dictionary
    keep_versions: int = Field(10, ge=1)
    regression_answers: bool = True  # sync measures answers too, not retrieval alone
    rebuild_growth: float = Field(1.0, gt=0)  # a full rebuild is recommended beyond these
    rebuild_dictionary: float = Field(0.3, gt=0)
    rebuild_recall: float = Field(0.05, gt=0)


class EvidenceConfig(Section):
    """How much evidence a section of a report gets."""

    rag: int = Field(5, ge=1, le=100)  # hits that are retrieved and scored (`retrieval.rag` of the method)
    top_n: int = Field(5, ge=1, le=100)  # of these, kept by score


class LLMConfig(Section):
    """Everything about the chat endpoint but its address and key, which come from the environment."""

    model: str = "default"
    temperature: float = Field(0.0, ge=0, le=2)
    max_tokens: int = Field(1024, ge=1)
    timeout_s: float = Field(60, gt=0)
    retries: int = Field(3, ge=0, le=10)


class CourseConfig(Section):
    """How the notebooks are run."""

    solutions: bool = False  # run the solutions of the notebooks' exercises too


class Config(Section):
    """The whole configuration, passed explicitly; see `config/default_config.yaml` for what each key means."""

    profile: str = "offline"
    seed: int = 13
    plan: PlanConfig = PlanConfig()
    corpus: CorpusConfig = CorpusConfig()
    parse: ParseConfig = ParseConfig()
    dictionary: DictionaryConfig = DictionaryConfig()
    chunk: ChunkConfig = ChunkConfig()
    embedder: EmbedderConfig = EmbedderConfig()
    lexical: LexicalConfig = LexicalConfig()
    dense: DenseConfig = DenseConfig()
    rewrite: RewriteConfig = RewriteConfig()
    route: RouteConfig = RouteConfig()
    retrieve: RetrieveConfig = RetrieveConfig()
    rerank: RerankConfig = RerankConfig()
    generate: GenerateConfig = GenerateConfig()
    evalset: EvalSetConfig = EvalSetConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    tune: TuneConfig = TuneConfig()
    gates: GatesConfig = GatesConfig()
    knowledge: KnowledgeConfig = KnowledgeConfig()
    evidence: EvidenceConfig = EvidenceConfig()
    llm: LLMConfig = LLMConfig()
    course: CourseConfig = CourseConfig()

    def digest(self, sections: Iterable[str] | None = None) -> str:
        """Hash of the named sections (all when None), stable across machines."""
        data = self.model_dump(mode="json")
        names = sorted(data if sections is None else sections)
        text = json.dumps({name: data[name] for name in names}, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def with_overrides(self, overrides: Mapping[str, Any]) -> Config:
        """A copy with dotted keys set, validated like everything else."""
        return _validated(_merge(self.model_dump(mode="json"), _nested(overrides)))

    def only(self, sections: Iterable[str]) -> ConfigView:
        """A view that answers for these sections only: what a step did not declare it can't read."""
        return ConfigView(self, tuple(sections))


class ConfigView:
    """A configuration restricted to the sections that a notebook declares; others raise with what to do."""

    def __init__(self, config: Config, sections: tuple[str, ...]) -> None:
        self._config, self._sections = config, sections

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._sections:
            raise UsageError(
                f"configuration section '{name}' is not declared by this step; it declares "
                f"{', '.join(self._sections)}. Add it to the notebook's metadata (ragbuild.config)."
            )
        return getattr(self._config, name)

    def model_dump(self, mode: str = "json") -> dict[str, Any]:
        """The declared sections as plain data."""
        held = self._config.model_dump(mode=mode)
        return {name: held[name] for name in self._sections}

    def with_overrides(self, overrides: Mapping[str, Any]) -> ConfigView:
        """A view of a copy with dotted keys set, for measuring a change."""
        return ConfigView(self._config.with_overrides(overrides), self._sections)


@dataclass(frozen=True)
class Endpoints:
    """Secrets and addresses, read from the environment and never written anywhere."""

    llm_base_url: str | None = None
    llm_api_key: str | None = None
    database_url: str | None = None

    @classmethod
    def from_env(cls) -> Endpoints:
        def get(name: str) -> str | None:
            return os.environ.get(name) or None

        return cls(get("RAGBUILD_LLM_BASE_URL"), get("RAGBUILD_LLM_API_KEY"), get("RAGBUILD_DATABASE_URL"))

    def __repr__(self) -> str:  # a key must not reach a log or a traceback
        key = "set" if self.llm_api_key else None
        return f"Endpoints(llm_base_url={shown_url(self.llm_base_url)!r}, llm_api_key={key})"


def shown_url(url: str | None) -> str:
    """An address as it may be shown: without the user, password and query that may stand in it; ``none`` for None."""
    if not url:
        return "none"
    head, tail = re.fullmatch(r"([^?#]*)(.*)", url, re.DOTALL).groups()
    if "@" in tail:  # a password with a sign that should have been written as %23: it's unclear where it ends
        head = head.partition("://")[0] + "://…"
    return re.sub(r"^([\w.+-]+://)?.*@", r"\1", head, flags=re.DOTALL)


def profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("ragbuild") / "config" / "profiles"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_config(
    profile: str | None = None, file: str | Path | None = None, overrides: Mapping[str, Any] | None = None,
    template: Path | None = None,
) -> Config:  # fmt: skip
    """Resolve defaults <- profile <- template (a folder of records, see knowledge/sediment.py) <- file <- overrides
    (dotted keys).

    Raises UsageError for an unknown profile, a file that is no YAML mapping, an unknown key or a bad value.
    """
    packaged = resources.files("ragbuild") / "config"
    data = yaml.safe_load((packaged / "default_config.yaml").read_text(encoding="utf-8"))
    user = _read_yaml(template / "template.yaml") if template else {}
    if template and (prompt := template / "prompt.md").is_file():
        user = _merge(user, {"generate": {"prompt": str(prompt.resolve())}})
    user = _merge(user, _read_yaml(Path(file)) if file else {})
    name = (overrides or {}).get("profile") or profile or user.get("profile") or data["profile"]
    if name not in profiles():
        raise UsageError(f"unknown profile '{name}'; there are: {', '.join(profiles())}")
    layer = yaml.safe_load((packaged / "profiles" / f"{name}.yaml").read_text(encoding="utf-8")) or {}
    for part in (layer, user, {"profile": name}, _nested(overrides or {})):
        data = _merge(data, part)
    return _validated(data)


def stored_config(workspace: Path) -> Config:
    """The configuration that a workspace was built with (the defaults where it has none).

    Raises InputRefused, with what to do, when its config.yaml is damaged.
    """
    path = workspace / "config.yaml"
    if not path.is_file():
        return load_config()
    try:
        data = _read_yaml(path)
        if not data:
            raise UsageError("it is empty")
        return _validated(data)
    except UsageError as error:
        raise InputRefused(
            f"{path} is damaged: {error}\nRun 'ragbuild build' again, which writes it anew, or name another --workspace"
        ) from None


def parse_assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """``["retrieve.top_n=30", ...]`` to a dict of dotted keys; values are read as YAML."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise UsageError(f"-p takes key=value with a dotted key such as retrieve.top_n=30, got '{pair}'")
        try:
            out[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"-p {key}: the value is not valid YAML: {error}") from error
    return out


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"configuration file {path} cannot be read: {error}") from error
    if not isinstance(data or {}, dict):
        raise UsageError(f"configuration file {path} must be a YAML mapping, got {type(data).__name__}")
    return data or {}


def _nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in dotted.items():
        *parents, last = key.split(".")
        node = out
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UsageError(f"configuration key '{key}': '{part}' is set to a value and to a section")
        node[last] = value
    return out


def _merge(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in layer.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merge(out[key], value) if both else value
    return out


def _takes(path: tuple[str | int, ...]) -> str:
    """The keys that the section at `path[:-1]` takes, for an error message."""
    model: Any = Config
    for part in path[:-1]:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field else None
    return ", ".join(getattr(model, "model_fields", {}))


def _validated(data: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(str(p) for p in problem["loc"]) or "configuration"
            if problem["type"] == "extra_forbidden":
                lines.append(f"unknown configuration key '{key}'; this section takes: {_takes(problem['loc'])}")
            else:
                lines.append(f"configuration key '{key}': got {problem['input']!r}; {problem['msg']}")
        raise UsageError("\n".join(lines)) from None
