"""The six dimensions of Q-DOC-A, each with its definition and the formula by which the rubric counts it.

The rubric reads words and numbers, not meaning: it is a stand-in for a judge who understands. Its constants were set by
hand and checked on the tuning half of the sample's expert cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

from pydantic import Field

from ragbuild.core.records import Record
from ragbuild.core.text import language_of
from ragbuild.evaluate.facts import Claim, claims, holds, numbers, refuses, ungreeted, words
from ragbuild.offline.prompts import citations_in


class Score(Record):
    """A score from 0 to 1 with its reason. None: unmeasured, or (`applies` false) not to be measured here."""

    value: float | None = Field(ge=0, le=1, allow_inf_nan=False)
    reason: str = ""
    applies: bool = True


@dataclass(frozen=True)
class Judged:
    """What a judge is shown: one answer, what it should have said and the documents it was given.

    `contexts`: a citation ``^n^`` means the n-th. `status`: a pipeline's own (answered, abstained, blocked), ``failed``
    where no answer came, "" where the text alone tells. `right_cited`: is any citation of a right document?
    `needed_cited`: share of the needed places that are cited. Both None where it isn't known.
    """

    query: str
    answer: str
    reference: str = ""
    keywords: tuple[str, ...] = ()
    wrong_keywords: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    answerable: bool = True
    status: str = ""
    right_cited: bool | None = None
    needed_cited: float | None = None

    @property
    def withheld(self) -> bool:
        """No answer, whatever the text says."""
        return self.status in ("abstained", "blocked", "failed")

    @property
    def refused(self) -> bool:
        return self.withheld or refuses(self.answer)


class Reading:
    """One answer as the rubric reads it; each part is computed once."""

    def __init__(self, judged: Judged) -> None:
        self.judged = judged

    @cached_property
    def claims(self) -> list[Claim]:
        return claims(ungreeted(self.judged.answer))

    @cached_property
    def points(self) -> list[tuple[str, float]]:
        """The reference's sentences, each with how much of it the answer says: ``min(1, share of its words / 0.6) x
        share of its numbers``. None of them where reference and answer are in two languages."""
        j = self.judged
        if language_of(j.reference) != language_of(j.answer):
            return []
        held, digits, out = set(words(j.answer)), numbers(j.answer, spelt=True), []
        for claim in claims(j.reference):
            wanted = numbers(claim.text) - numbers(j.query)
            out.append((claim.text, min(1.0, _share(words(claim.text), held) / 0.6) * _share(wanted, digits)))
        return out

    @property
    def said(self) -> float | None:
        """How much of the reference the answer says: the mean over its sentences."""
        return _mean(p for _, p in self.points) if self.points else None

    @cached_property
    def lacking(self) -> list[str]:
        return [k for k in self.judged.keywords if not holds(self.judged.answer, k)]

    @property
    def hit_rate(self) -> float:
        return 1 - len(self.lacking) / len(self.judged.keywords)

    @cached_property
    def unsupported(self) -> list[str]:
        """The sentences that the documents they cite (all, where they cite none) do not support."""
        j, out = self.judged, []
        for claim in self.claims:
            cited = [j.contexts[n - 1] for n in claim.cited if 1 <= n <= len(j.contexts)] or j.contexts
            held = {w for text in cited for w in words(text)}
            digits = numbers(j.query).union(*(numbers(text, spelt=True) for text in cited))
            if _share(set(words(claim.text)), held) < 0.6 or numbers(claim.text) - digits:
                out.append(claim.text)
        return out


@dataclass(frozen=True)
class Dimension:
    """`definition` is what the report and the model read; `formula` is how the rubric counts it (`score` None: it
    can't).

    `content`: it says whether the answer is right, so that a wrong refusal has 0 in it and a right one 1; the others do
    not apply to these. `counted`: nothing but counting, so that no model is asked.
    """

    name: str
    definition: str
    formula: str = ""
    score: Callable[[Reading], Score] | None = None
    content: bool = False
    counted: bool = False


DIMENSIONS: dict[str, Dimension] = {}


def dimension(content: bool = False, counted: bool = False) -> Callable[[Callable[[Reading], Score]], Dimension]:
    """Register a scorer: the first paragraph of its docstring is the definition, the rest the formula."""

    def register(score: Callable[[Reading], Score]) -> Dimension:
        definition, _, formula = (score.__doc__ or "").partition("\n\n")
        texts = (" ".join(definition.split()), " ".join(formula.split()))
        DIMENSIONS[score.__name__] = Dimension(score.__name__, *texts, score, content, counted)
        return DIMENSIONS[score.__name__]

    return register


@dimension(content=True, counted=True)
def keyword_hit_rate(r: Reading) -> Score:
    """Does the answer hold the ground-truth keywords?

    Share of the keywords held, each in any of its alternatives; full width, case, blanks, hyphens and thousands
    separators do not count, and a number inside of another number is no hit.
    """
    if not r.judged.keywords:
        return Score(value=None, reason="no keywords", applies=False)
    return Score(value=r.hit_rate, reason=f"lacks {', '.join(r.lacking)}" if r.lacking else "all held")


@dimension(content=True)
def content_accuracy(r: Reading) -> Score:
    """Does the answer mean what the reference and the right sources say? A wrong value, or one of another version or
    model, makes it wrong, however well it is written.

    0.5 + 0.5 x share of keywords held. With none of them min(0.5, said), where no keywords are given said: the mean
    over the reference's sentences of min(1, share of words held / 0.6) x share of numbers held. A wrong keyword beside
    some of the right ones halves it, without any makes it 0 (a keyword that the question itself holds proves nothing).
    x 0.5 when none of its citations is of a right document.
    """
    j, reasons = r.judged, []
    if j.keywords:
        value = 0.5 + 0.5 * r.hit_rate if r.hit_rate else min(0.5, r.said or 0.0)
        reasons += [f"lacks {', '.join(r.lacking)}"] if r.lacking else []
    elif r.said is not None:
        value = r.said
    else:
        return Score(value=None, reason="neither keywords nor a reference in the answer's language")
    told = [k for k in j.keywords if not holds(j.query, k)]
    wrong = [k for k in j.wrong_keywords if holds(j.answer, k)]
    if wrong and (not told or set(told) & set(r.lacking)):
        value *= 0.5 if set(told) - set(r.lacking) else 0.0
        reasons.append(f"holds the wrong {', '.join(wrong)}")
    if j.right_cited is False:
        value *= 0.5
        reasons.append("cites none of the right documents")
    return Score(value=value, reason="; ".join(reasons) or "agrees with the reference")


@dimension(content=True)
def credibility(r: Reading) -> Score:
    """Is each sentence of the answer grounded in the documents that it cites?

    Share of sentences of which the cited documents (all given, where none is cited) hold 60 % of the words and, with
    the question, every number.
    """
    if not r.claims:
        return Score(value=0.0, reason="says nothing")
    bad, n = r.unsupported, len(r.claims)
    reason = f"{len(bad)} of {n} sentences unsupported: {bad[0][:80]}" if bad else "all sentences supported"
    return Score(value=1 - len(bad) / n, reason=reason)


@dimension(content=True)
def content_completeness(r: Reading) -> Score:
    """Does the answer cover every key point of the reference, every part of the question and all sources needed?

    Mean of the keyword hit rate, of how much of the reference it says (as in content_accuracy) and of the share of
    needed places that it cites, as far as each is known.
    """
    parts = [r.hit_rate] if r.judged.keywords else []
    parts += [value for value in (r.said, r.judged.needed_cited) if value is not None]
    if not parts:
        return Score(value=None, reason="neither keywords nor a reference in the answer's language")
    least, value = min(r.points, key=lambda p: p[1], default=("", 1.0))
    lacks = ", ".join(r.lacking) or (f"'{least[:80]}'" if value < 0.6 else "")
    return Score(value=_mean(parts), reason=f"lacks {lacks}" if lacks else "all key points")


@dimension()
def expression_quality(r: Reading) -> Score:
    """Is the answer concise and clear, in the question's language, without repetition or broken Markdown?

    1 - up to 0.5 for a length of 4 to 12 times the reference's (one of at least 40 words) - share of repeated sentences
    - 0.25 for each fault of Markdown - 0.5 for another language than the question's.
    """
    j = r.judged
    if not r.claims:
        return Score(value=0.0, reason="says nothing")
    times = len(words(j.answer)) / max(40, len(words(j.reference)))
    again = 1 - len({c.text for c in r.claims}) / len(r.claims)
    broken, other = _broken(j.answer), language_of(j.answer) != language_of(j.query)
    long = 0.5 * min(1.0, max(0.0, times - 4) / 8)
    found = [f"{times:.0f} times as long as the reference"] * bool(long) + broken
    found += [f"{again:.0%} of its sentences repeat others"] * bool(again) + ["not in the question's language"] * other
    value = max(0.0, 1 - long - again - 0.25 * len(broken) - 0.5 * other)
    return Score(value=value, reason="; ".join(found) or "concise")


@dimension()
def logical_coherence(r: Reading) -> Score:
    """Is the answer well ordered and reasoned: steps in order, no contradiction, citations beside what they support?

    Mean of: 1 - share of sentences that contradict another (the same words, but other numbers or one of them denied);
    where there are steps, share of them that follow the one before; where there are citations, share of sentences with
    one.
    """
    if not r.claims:
        return Score(value=0.0, reason="says nothing")
    against = [pair for pair in combinations(r.claims, 2) if _contradict(*pair)]
    parts = {f"'{a.text[:60]}' against '{b.text[:60]}'": 0.0 for a, b in against[:1]}
    parts = {reason: 1 - len({c for pair in against for c in pair}) / len(r.claims) for reason in parts} or {"": 1.0}
    steps = [int(n) for n in _STEP.findall(r.judged.answer)]
    if len(steps) > 1:
        parts["steps out of order"] = _mean(b in (a + 1, 1) for a, b in pairwise(steps))
    if r.judged.contexts and citations_in(r.judged.answer):
        parts["sentences without a citation"] = _mean(bool(c.cited) for c in r.claims)
    found = [reason for reason, value in parts.items() if value < 1]
    return Score(value=_mean(parts.values()), reason="; ".join(found) or "in order, nothing contradicts")


_STEP = re.compile(r"^\s*(\d{1,3})[.)、]\s*\S", re.M)
_NOT = re.compile(r"\b(?:not|no|never|cannot)\b|n't\b|不|没|无|未")


def _contradict(a: Claim, b: Claim) -> bool:
    """The same words (four at least), but other numbers, or one of the two denied."""
    first, second = ({w for w in words(c.text) if not w[0].isdigit()} for c in (a, b))
    if min(len(first), len(second)) < 4 or len(first & second) < 0.9 * len(first | second):
        return False
    return numbers(a.text) != numbers(b.text) or bool(_NOT.search(a.text)) != bool(_NOT.search(b.text))


def _broken(text: str) -> list[str]:
    """Faults of the Markdown: an open fence, an odd number of **, table rows of different widths."""
    prose = re.sub(r"```.*?(?:```|\Z)|`[^`\n]*`", "", text, flags=re.S)
    rows = [line.replace(r"\|", "").count("|") * line.lstrip().startswith("|") for line in prose.split("\n")]
    faults = {
        "code fence left open": len(re.findall(r"^\s*```", text, re.M)) % 2,
        "** left open": prose.count("**") % 2,
        "table rows of different widths": any(a and b and a != b for a, b in pairwise(rows)),
    }
    return [name for name, found in faults.items() if found]


def _share(part: Iterable[str], whole: Iterable[str]) -> float:
    """Share of `part` that is in `whole`; 1 of nothing."""
    part, whole = set(part), set(whole)
    return len(part & whole) / len(part) if part else 1.0


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
