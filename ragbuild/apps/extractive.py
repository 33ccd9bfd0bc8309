"""Extractive QA over financial disclosures: the answer is the best chunk word for word, or none. No model, no prompt.

    contract → injection scan → tokenizer → BM25, TF-IDF cosine → fusion → gate → evidence pack

Scores are normalised within the query (divided by their maximum) and summed, 0.3 BM25 + 0.7 cosine: this system does
what the main pipeline must not, and notebook 42 measures what that costs. Because such a score does not say whether
anything fits, the gate's confidence is the best chunk's fused score times its token coverage, which is absolute.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ragbuild.core.errors import InputRefused, UsageError
from ragbuild.core.guard import injections
from ragbuild.core.records import IsoDate, Record, Text
from ragbuild.core.store import error_fields, read_json, sha256
from ragbuild.core.text import HAN, STOPWORDS, normalise, stem_word
from ragbuild.index.lexical import RankBM25Index, lucene_idf

BM25_WEIGHT, COSINE_WEIGHT = 0.3, 0.7
PACK = 3  # evidences shown
# The middle of where right minus wrong answers is highest on the tuning half of the questions (notebook 42).
MINIMUM_CONFIDENCE = 0.62
MINIMUM_MARGIN = 0.35

_PIECE = re.compile(rf"(?P<han>[{HAN}]+)|(?P<number>\d+(?:[.,]\d+)*)|[^\W\d_{HAN}]+")
_ASKING = re.compile(  # what only asks holds no subject; a Han run is cut there
    r"\bhow (?:much|many|high|large|long|big|often|far)\b|\b(?:did|had|would|could|should|came|come)\b|['’]s\b"
    "|请问|为什么|是多少|有多少|多少|有多[长大高久]|多[久长]|什么|怎么样?|怎样|如何|哪些|哪个|哪里|何时|[吗呢吧的了是]"
)
_NAMED_HAN = re.compile(  # 东屏银行, but neither 这家银行 nor 商业银行
    rf"(?:^|(?<=[^{HAN}的和与]))(?!这|那|该|本|哪|各|某|贵|商业|中央|国有|政策|投资)([{HAN}]{{2}})[{HAN}]{{0,4}}?(?:银行|证券|保险|集团|股份)"
)
_YEAR = re.compile(r"(?<!\d)(?:19|20)\d\d(?!\d)")


class Ask(BaseModel):
    """What may be asked. Any other field is refused by its name: no images, audio, files or prompts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    query: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500, pattern=r"\S")]
    topK: int = Field(default=3, ge=1, le=10)
    minimumConfidence: float = Field(default=MINIMUM_CONFIDENCE, ge=0, le=1, allow_inf_nan=False)


class Passage(Record):
    """A chunk of a disclosure or policy text. `issuer`: who published it; `section` and `page`: where it stands."""

    chunkId: Text
    issuer: Text
    title: Text
    source: Text
    section: str = ""
    page: int = Field(default=1, ge=1)
    date: IsoDate = None
    language: Text
    text: Text

    @property
    def searched(self) -> str:
        """What is indexed: title and section help to find, only `text` is ever given out."""
        return f"{self.title}\n{self.section}\n{self.text}"


class Cited(Record):
    """Where an evidence stands."""

    title: str
    source: str
    section: str
    page: int
    date: str | None


class Evidence(Record):
    """One of the best chunks. `bm25` and `cosine` are the raw scores, `score` the fused one (0 to 1)."""

    rank: int
    chunkId: str
    text: str
    citation: Cited
    score: float
    bm25: float
    cosine: float


class Scores(Record):
    """Telemetry of the best chunk. `tokenCoverage`: idf-weighted share of the query's tokens that it holds; `margin`:
    to the second chunk's fused score; `sourceCount`: documents in the evidence pack."""

    fusedScore: float
    tokenCoverage: float
    margin: float
    sourceCount: int


class Gate(Record):
    """What was decided, by which rule, and the figures it went by, in words in both languages."""

    decision: Literal["answered", "abstained", "blocked"]
    rule: str
    confidence: float | None
    minimumConfidence: float
    minimumMargin: float
    explanation: str
    explanationZh: str


class Stage(Record):
    """One stage: how long it took and what it did."""

    name: str
    ms: float
    detail: str


class Outcome(Record):
    """The answer is a chunk's own text, or None. A blocked query has no evidence, since nothing was retrieved."""

    answer: str | None
    status: Literal["answered", "abstained", "blocked"]
    citation: Cited | None
    evidencePack: tuple[Evidence, ...]
    scores: Scores | None
    gate: Gate
    injections: tuple[str, ...]
    indexVersion: str
    stages: tuple[Stage, ...]


def tokens(text: str) -> list[str]:
    """Han text as single characters and bigrams; Latin words (their stems) and numbers whole; no stop words."""
    out: list[str] = []
    for match in _PIECE.finditer(_ASKING.sub(" ", normalise(text).lower())):
        piece = match[0]
        if match["han"]:
            out += piece
            out += [piece[i : i + 2] for i in range(len(piece) - 1)]
        elif piece not in STOPWORDS:
            out.append(piece if match["number"] else stem_word(piece))
    return out


@cache
def texts() -> dict[str, Any]:
    """What the lab says about itself, from ``extractive.yaml``: the gate's rules, components and so on."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def checked(data: Any) -> Ask:
    """An `Ask` from plain data. Raises UsageError that names each unknown field and each value out of range."""
    try:
        return Ask.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"the request is refused: {error_fields(error)}") from error


class Lab:
    """The chunks of a folder with their index, made once. Equal chunks in any order give the same lab."""

    def __init__(
        self,
        passages: Iterable[Passage],
        presets: Sequence[dict[str, str]] = (),
        minimum_margin: float = MINIMUM_MARGIN,
    ) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.passages = tuple(sorted(passages, key=lambda p: p.chunkId))
        if not self.passages or len({p.chunkId for p in self.passages}) < len(self.passages):
            raise InputRefused("a lab needs at least one chunk, and every chunkId once")
        self.minimum_margin = minimum_margin
        self._presets = [dict(p) for p in presets]
        cut = [tokens(p.searched) for p in self.passages]
        self._held = [frozenset(c) for c in cut]
        self._frequency = Counter(token for held in self._held for token in held)
        self._bm25 = RankBM25Index(cut, np.arange(len(cut)))
        self._tfidf = TfidfVectorizer(analyzer=tokens, sublinear_tf=True)
        self._vectors = self._tfidf.fit_transform([p.searched for p in self.passages])
        self._texts = {p.chunkId: sha256(p.text) for p in self.passages}
        self._orders = {p.chunkId for p in self.passages if injections(p.searched)}

    @classmethod
    def load(cls, folder: Path) -> Lab:
        """``chunks.jsonl`` of a folder, the 10-K reports in ``10-k/`` and the statements in ``statements/`` below it.

        Raises InputRefused for a line that is no chunk, naming it, and where there is nothing at all.
        """
        from ragbuild.apps.extractive_loaders import folder_passages

        folder = Path(folder)
        file, passages = folder / "chunks.jsonl", []
        try:  # lines end at \n alone: U+2028 and the like may stand in a text
            lines = file.read_text(encoding="utf-8-sig").split("\n") if file.is_file() else []
        except UnicodeDecodeError as error:
            raise InputRefused(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
        for number, line in enumerate(lines, 1):
            try:
                passages += [Passage.model_validate_json(line)] if line.strip() else []
            except ValidationError as error:
                raise InputRefused(f"{file}, line {number}: {error_fields(error)}") from error
        passages += folder_passages(folder)
        if not passages:
            raise InputRefused(f"no chunks.jsonl, 10-k/ or statements/ with text in {folder}")
        presets = folder / "presets.json"
        given = read_json(presets) if presets.is_file() else []
        if not isinstance(given, list) or not all(isinstance(p, dict) for p in given):
            raise InputRefused(f"{presets} is no list of presets; each has id, title, titleZh, query, kind")
        return cls(passages, given)

    @cached_property
    def index_version(self) -> str:
        """A hash of chunks and settings."""
        settings = [BM25_WEIGHT, COSINE_WEIGHT, MINIMUM_CONFIDENCE, self.minimum_margin, PACK, "tokens-1"]
        data = [settings, [p.model_dump(mode="json") for p in self.passages]]
        return f"findoc-{sha256(json.dumps(data, ensure_ascii=False, sort_keys=True))[:12]}"

    def presets(self) -> list[dict[str, str]]:
        """Questions to start from: id, title, titleZh, query, and kind (baseline or stress)."""
        return [dict(p) for p in self._presets]

    def components(self) -> dict[str, list[dict[str, Any]]]:
        """What runs and what does not: components by kind, modalities, prompt layers (there are none)."""
        return {name: rows for name, rows in texts().items() if name != "gate"}

    def search(self, query: str) -> dict[str, np.ndarray]:
        """Scores of all chunks, in the order of `passages`: ``bm25`` and ``cosine`` raw, and ``fused``."""
        cut = tokens(query)
        bm25 = np.zeros(len(self.passages))
        rows, scores = self._bm25.search(cut, len(self.passages), None, None)  # type: ignore[arg-type]
        bm25[rows] = scores
        cosine = (self._vectors @ self._tfidf.transform([query]).T).toarray()[:, 0]
        return {"bm25": bm25, "cosine": cosine, "fused": fuse(bm25, cosine)}

    def coverage(self, query: str, row: int) -> float:
        """Idf-weighted share of the query's tokens that a chunk holds; a token that no chunk holds weighs most.

        Publishers and years are left out: they stand in every chunk of a report, and the rule "subject" looks at them.
        """
        asked = {*tokens(_YEAR.sub(" ", self._named.sub(" ", normalise(query))))}
        weights = {t: lucene_idf(len(self._held), self._frequency[t]) for t in sorted(asked)}
        total = sum(weights.values())
        return sum(w for t, w in weights.items() if t in self._held[row]) / total if total else 0.0

    def is_own_text(self, chunk_id: str, text: str) -> bool:
        """Extraction only: is this, word for word, the text of that chunk?"""
        return self._texts.get(chunk_id) == sha256(text)

    def ask(self, ask: Ask) -> Outcome:
        """Answer, abstain or block; every stage is told. Never raises for a checked `Ask`."""
        stages: list[Stage] = []
        clock = _Clock(stages)
        clock("contract", lambda: None, lambda _: "query, topK, minimumConfidence; nothing else")
        found = clock(
            "injection scan", lambda: injections(ask.query, asked=True), lambda f: "; ".join(f) or "nothing found"
        )
        if found:
            gate = self._gate(ask, "blocked", "injection", None)
            return self._outcome(gate, stages, injections=tuple(found))
        clock("tokenizer", lambda: tokens(ask.query), lambda t: " · ".join(t[:40]))
        scores = clock("BM25, TF-IDF cosine, fusion", lambda: self.search(ask.query), lambda s: _told(s))
        order = [int(i) for i in np.argsort(-scores["fused"], kind="stable") if scores["fused"][i] > 0][: ask.topK]
        pack = tuple(self._evidence(rank, row, scores) for rank, row in enumerate(order[:PACK], 1))
        told = self._scores(ask.query, scores, pack)
        gate = clock("gate", lambda: self._decide(ask, told, pack), lambda g: f"{g.decision}: {g.rule}")
        clock("evidence pack", lambda: pack, lambda p: ", ".join(e.chunkId for e in p) or "empty")
        return self._outcome(gate, stages, pack, told)

    def _evidence(self, rank: int, row: int, scores: dict[str, np.ndarray]) -> Evidence:
        p = self.passages[row]
        cited = Cited(title=p.title, source=p.source, section=p.section, page=p.page, date=p.date)
        figures = {"score": "fused", "bm25": "bm25", "cosine": "cosine"}
        numbers = {name: round(float(scores[key][row]), 6) for name, key in figures.items()}
        return Evidence(rank=rank, chunkId=p.chunkId, text=p.text, citation=cited, **numbers)

    def _scores(self, query: str, scores: dict[str, np.ndarray], pack: tuple[Evidence, ...]) -> Scores:
        first, second = [*np.sort(scores["fused"])[::-1][:2], 0.0, 0.0][:2]
        row = int(np.argmax(scores["fused"]))
        return Scores(
            fusedScore=round(float(first), 6),
            tokenCoverage=round(self.coverage(query, row), 6) if pack else 0.0,
            margin=round(float(first - second), 6),
            sourceCount=len({e.citation.source for e in pack}),
        )

    def _decide(self, ask: Ask, told: Scores, pack: tuple[Evidence, ...]) -> Gate:
        """The rules in order; the first that speaks decides."""
        confidence = round(told.fusedScore * told.tokenCoverage, 6)
        if not pack:
            rule = "no match"
        elif not self.is_own_text(pack[0].chunkId, pack[0].text):
            rule = "extraction only"
        elif pack[0].chunkId in self._orders:
            rule = "order in a chunk"
        elif self._other_subject(ask.query, pack[0].chunkId):
            rule = "subject"
        elif confidence < ask.minimumConfidence:
            rule = "confidence"
        elif told.margin < self.minimum_margin:
            rule = "margin"
        else:
            return self._gate(ask, "answered", "passed", confidence, told.margin)
        return self._gate(ask, "abstained", rule, confidence, told.margin)

    def _other_subject(self, query: str, chunk_id: str) -> bool:
        """Does the question name a year that the chunk doesn't, another issuer of this index, or a name that no chunk
        holds?"""
        query = normalise(query)
        passage = next(p for p in self.passages if p.chunkId == chunk_id)
        years = set(_YEAR.findall(query)) - set(_YEAR.findall(f"{passage.searched} {passage.date}"))
        named = {match.lower() for match in self._named.findall(query)}
        words = re.findall(r"[^\W\d_]+", query)
        capitals = [w for w in words if w[0].isupper()]
        unknown = [*_NAMED_HAN.findall(query), *(capitals if 2 * len(capitals) <= len(words) else ())]
        known = self._tfidf.vocabulary_
        unknown = [w for w in unknown if w != words[0] and tokens(w) and tokens(w)[-1] not in known]
        return bool(years or unknown) or (bool(named) and not named & self._names[passage.issuer])

    @cached_property
    def _names(self) -> dict[str, frozenset[str]]:
        """By what each issuer is called: its whole name, and the Latin words of it that only its own chunks hold."""
        out = {}
        for issuer in {p.issuer for p in self.passages}:
            others = frozenset().union(
                *(h for p, h in zip(self.passages, self._held, strict=True) if p.issuer != issuer)
            )
            words = [w for w in re.findall(rf"[^\W\d_{HAN}]+", normalise(issuer).lower()) if stem_word(w) not in others]
            out[issuer] = frozenset({normalise(issuer).lower(), *(w for w in words if w not in STOPWORDS)})
        return out

    @cached_property
    def _named(self) -> re.Pattern[str]:
        """Finds the names of all issuers, longest first."""
        names = sorted(frozenset().union(*self._names.values()), key=lambda n: (-len(n), n))
        return re.compile("|".join(rf"\b{re.escape(n)}\b" if n.isascii() else re.escape(n) for n in names), re.I)

    def _gate(self, ask: Ask, decision: Any, rule: str, confidence: float | None, margin: float = 0.0) -> Gate:
        figures = {"confidence": confidence or 0.0, "least": ask.minimumConfidence, "margin": margin}
        said = [text.format(**figures, least_margin=self.minimum_margin) for text in texts()["gate"][rule]]
        return Gate(
            decision=decision, rule=rule, confidence=confidence, minimumConfidence=ask.minimumConfidence,
            minimumMargin=self.minimum_margin, explanation=said[0], explanationZh=said[1],
        )  # fmt: skip

    def _outcome(
        self, gate: Gate, stages: list[Stage], pack: tuple[Evidence, ...] = (), scores: Scores | None = None,
        injections: tuple[str, ...] = (),
    ) -> Outcome:  # fmt: skip
        given = pack[0] if gate.decision == "answered" else None
        return Outcome(
            answer=given.text if given else None, status=gate.decision, citation=given.citation if given else None,
            evidencePack=pack, scores=scores, gate=gate, injections=injections, indexVersion=self.index_version,
            stages=tuple(stages),
        )  # fmt: skip


def fuse(bm25: np.ndarray, cosine: np.ndarray) -> np.ndarray:
    """0.3 BM25 + 0.7 cosine, each divided by its maximum in this query; zeros stay zero."""
    parts = (BM25_WEIGHT * bm25 / (bm25.max() or 1.0)), (COSINE_WEIGHT * cosine / (cosine.max() or 1.0))
    return np.round(parts[0] + parts[1], 9)


def _told(scores: dict[str, np.ndarray]) -> str:
    best = {name: float(values.max()) for name, values in scores.items()}
    return "best " + ", ".join(f"{name} {value:.3f}" for name, value in best.items())


class _Clock:
    """Runs a stage and notes its time and what it says of its result."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages

    def __call__(self, name: str, work: Callable[[], Any], tell: Callable[[Any], str]) -> Any:
        start = time.perf_counter()
        result = work()
        ms = round(1000 * (time.perf_counter() - start), 3)
        self._stages.append(Stage(name=name, ms=ms, detail=tell(result)))
        return result
