"""Questions that people wrote without meaning to: in the "See Also" of a docstring an author says in other words what
another function is for.

Such a description is kept as a question when it says enough to be found by, fits one function only, and is not what the
function says of itself.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from ragbuild.core.store import sha256
from ragbuild.core.text import STOPWORDS

RULE = re.compile(r"^(\S[^\n]*)\n(?:-{3,}|={3,})[ \t]*$", re.M)  # a section of a docstring: a line, underlined
ROLE = re.compile(r"(?::[a-z]{1,12}){1,2}:`~?([^`<]{1,120}?)(?:\s*<[^`>]{1,200}>)?`")
_ENTRY = re.compile(r"([\w.]+)\s*(?::\s*(.*))?$")
_VERBS = frozenset(
    "add alter apply arrange assign build calculate cast change check combine compute concatenate conform construct"
    " convert copy count create cut decompose determine discretize display divide draw drop evaluate expand export"
    " extract fill filter find fit flip generate get give group insert interpolate iterate join load make merge modify"
    " move multiply normalize obtain perform plot pad print produce put read reduce remove render reorder repeat"
    " replace reshape retrieve return reverse roll round run sample save select set shift show solve sort split stack"
    " subtract sum swap take test transform truncate try turn unpack update view write".split()
)
# A description that needs what stands around it, or that names what it describes instead of saying it
_VAGUE = re.compile(
    r"^(?:as|can|from|when|where|with)\b|[`_=<>\[\]{}|]|\w\(\)|\w\.\w|https?:|\b(?:above|aggregating|alternative|also"
    r"|analog(?:ous)?|another|below|but|class|complement|corresponding|counterpart|current|default|deprecated|describes"
    r"|details?|equivalent|except|faster|function|generaliz(?:ed|ation)|given|here|instead|its?|legacy|less|like|method"
    r"|module|more|object-oriented|only|opposite|others?|our|related|routine|same|see|similar(?:ly)?|simpler|simplified"
    r"|slower|specified|such|that is|these|this|those|underlying|ungrouped|used|variant|versions?|wrapper)\b",
    re.I,
)


def key(text: str) -> str:
    """The words of a text, for comparing what two texts say."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def sections(doc: str) -> Iterator[tuple[str, str]]:
    """(title, text) of a docstring; the title of what stands before the first section is empty."""
    parts = RULE.split(doc)
    yield "", parts[0]
    yield from zip(parts[1::2], parts[2::2], strict=True)


def _described(doc: str) -> Iterator[tuple[str, str]]:
    """(name, description) of the See Also entries that describe one thing."""
    for title, text in sections(doc):
        if title.strip() == "See Also":
            entries: list[list[str]] = []
            for line in ROLE.sub(r"\1", inspect.cleandoc(text)).split("\n"):
                if re.match(r"\S", line):
                    match = _ENTRY.match(line)
                    entries.append([match[1], match[2] or ""] if match else ["", ""])
                elif entries and line.strip():
                    entries[-1][1] += f" {line.strip()}"
            yield from ((name, text.strip()) for name, text in entries if name and text.strip())


def questions(
    docs: Mapping[str, Mapping[str, str]], summaries: Mapping[str, str]
) -> tuple[dict[str, list[tuple[str, str]]], Counter[str]]:
    """(question, `key` of the description) for each function, at most two; how many were dropped, by reason.

    `docs`: library -> name of a function -> its docstring; `summaries`: what each function says of itself.
    """
    said = Counter(map(key, summaries.values()))
    dropped: Counter[str] = Counter()
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)  # description -> (what it describes, as a question)
    for library, known in docs.items():
        for beside in sorted(known):
            for name, text in _described(known[beside]):
                sentence = re.split(r"(?<=[a-z)])\.\s", text)[0].rstrip(". ")
                target, plain = _named(name, beside, known), key(sentence)
                if target is None or target == beside:
                    dropped["describes nothing that is documented"] += 1
                elif _VAGUE.search(sentence) or len(_content(sentence)) < 3 or len(sentence) > 160:
                    dropped["too vague, or names what it describes"] += 1
                elif plain in said or plain in key(summaries[target]):
                    dropped["says what a summary says"] += 1
                elif said[key(summaries[target])] > 1:
                    dropped["its function's summary stands at another one too"] += 1
                else:
                    found[plain].add((target, f"{_question(sentence)} in {library}?"))
    out: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for plain in sorted(found, key=sha256):
        target, query = min(found[plain])
        if len({t for t, _ in found[plain]}) > 1 or len(out[target]) == 2:
            dropped["describes several, or what two other questions describe"] += 1
        else:
            out[target].append((query, plain))
    return out, dropped


def _content(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z][a-z-]{2,}", text.lower()) if word not in STOPWORDS]


def _named(name: str, beside: str, names: Mapping[str, str]) -> str | None:
    """What `name` means in the docstring of `beside`: from the innermost scope outwards, or the only one so called."""
    scope = beside.split(".")
    for depth in range(len(scope) - 1, -1, -1):
        if (full := ".".join([*scope[:depth], name])) in names:
            return full
    ends = [n for n in names if n.endswith(f".{name}")]
    return ends[0] if len(ends) == 1 else None


def _question(text: str) -> str:
    """A description as someone asks who looks for it."""
    first, _, rest = text.partition(" ")
    low = first.lower()
    verb = next((v for v in (low, low.removesuffix("s"), low.removesuffix("es")) if v in _VERBS), "")
    verb = {"return": "get", "give": "get", "retrieve": "get"}.get(verb, verb)
    named = low not in ("a", "an", "the") and re.search(r"[A-Z0-9]", first[1:] + rest[:1])  # GMM, Short Time Fourier
    noun = rest if low in ("for", "to") else f"{first if named else low} {rest}"
    return f"How do I {verb} {rest}" if verb else f"What is there for {noun}"
