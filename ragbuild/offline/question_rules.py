"""Questions made from a section by rules: a stand-in for a language model, and called so wherever its figures appear.

A fact of the section (`question_facts.py`) becomes a question through one of several frames, chosen by a stable hash;
it names the version, the model or the topic where it would be unclear without; and its terms are exchanged for other
forms of the dictionary, so that a question does not merely copy its chunk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ragbuild.core.forms import form_key, singular, typo_distance
from ragbuild.core.records import Chunk, GroundSpan, QueryType, TermEntry
from ragbuild.core.store import sha256
from ragbuild.core.text import HAN
from ragbuild.offline.general_words import GENERAL, TOO_WIDE
from ragbuild.offline.question_facts import Fact, FactFinder
from ragbuild.offline.question_text import AMOUNT, CODE, clean_heading, frames, keywords, plural, tidy

_HAN = re.compile(f"[{HAN}]")
_VERSION = re.compile(r"\Av?(\d+(?:\.\d+){1,2})\Z", re.I)
_WH = re.compile(r"(?:which|what|how|why|when|who)\b", re.I)
_NAMED = re.compile(r"\b[a-z]+[A-Z_]\w+|\b\w+[_/]\w+|\b[A-Za-z]+-\d\w*|\b(?!GB|MB|KB|TB|LED)[A-Z]{2,}\d*\b")
_OF = ("column", "entity", "version", "version_default")  # kinds that ask for the `col` of a `key`
_CORE = ("key", "col", "s", "do", "topic", "question")  # what a question is about, without its frame
_LOOSE = ("steps", "all_rows", "asked", "cause", "remedy", "case_cause", "case_remedy")  # about a whole section


@dataclass(frozen=True)
class Draft:
    """A question before it is checked. `answer`: verbatim from the document, its parts on lines of their own; `plain`:
    the question before terms were exchanged; `kind` and `about`: of which fact, about what."""

    query: str
    answer: str
    query_type: QueryType
    spans: tuple[GroundSpan, ...]
    keywords: tuple[str, ...]
    language: str
    plain: str = ""
    kind: str = ""
    about: str = ""


def stable(*parts: object) -> int:
    """A number that is the same in every run and on every machine."""
    return int(sha256("|".join(map(str, parts)))[:12], 16)


class RuleGenerator:
    """Drafts for a section by rules, in English and Chinese; needs the dictionary."""

    name = "rules"

    def __init__(self, entries: Sequence[TermEntry], seed: int = 0) -> None:
        self._find, self._seed = FactFinder(entries), seed
        firsts = {f.split()[0] for e in entries for f in e.formal}
        self._proper = {w for w in firsts if w.lower() not in firsts}

    def __call__(self, parent: Chunk, children: Sequence[Chunk]) -> list[Draft]:
        """Drafts about what the section says; whole tables only where no child holds all of it."""
        out = []
        for fact in self._find(parent):
            start, end = parent.span[0] + fact.start, parent.span[0] + fact.end
            if fact.kind == "all_rows" and any(c.span[0] <= start and end <= c.span[1] for c in children):
                continue
            number = stable(self._seed, parent.doc_key, start, fact.kind)
            framed = self._question(parent, fact, number)
            if plain := framed and self._in_context(parent, *framed, fact):
                query = self._other_words(plain, number)
                answer = fact.answer or parent.content[fact.start : fact.end].strip()
                words = (fact.slots["v"],) if fact.slots.get("v") else keywords(answer, self._find.terms)
                words = tuple(w for w in words if w.lower() not in plain.lower()) or words  # what is not said yet
                spans = (GroundSpan(doc_key=parent.doc_key, start=start, end=end),)
                about = fact.slots.get("key", "")
                out.append(Draft(query, answer, fact.type, spans, words, parent.language, plain, fact.kind, about))
        return out

    # Frames -----------------------------------------------------------------------------------------------------------

    def _question(self, parent: Chunk, fact: Fact, number: int) -> tuple[str, str] | None:
        """(the question, what it is about), or None where no frame fits."""
        words, slots, kind, zh = frames()[parent.language], dict(fact.slots), fact.kind, parent.language == "zh"
        if kind == "all_rows":
            slots["topic"] = topic = clean_heading(_leaf(parent))
            if _WH.match(topic) or not (re.search(words["lists"], topic) if zh else plural(topic)):
                return None
        if kind == "steps":
            kind, slots = (_steps_zh if zh else _steps_en)(slots["topic"], words)
            if not kind:
                return None
        if kind in ("cause", "remedy"):
            slots["key"] = _trouble(slots["key"], number, zh)
        named = kind == "column" and any(e.kind == "product" for *_, e in self._find.terms.find(slots["key"]))
        said = [slots.get(name, "") for name in (("col",) if named else _CORE)]
        about = " ".join(filter(None, dict.fromkeys([*said, "" if zh else fact.slots.get("topic", "")])))
        slots["what"] = "多少" if AMOUNT.fullmatch(slots.get("value", "")) else "什么"
        slots = slots if zh else self._english(slots, kind)
        choice = [slots["pattern"]] if "pattern" in slots else words["frames"].get(kind, ["{question}"])
        return tidy(choice[number % len(choice)].format_map(slots)), about

    def _english(self, slots: dict[str, str], kind: str) -> dict[str, str]:
        """Articles, number agreement and the forms of the verb."""
        out = dict(slots)
        for name in ("key", "col", "s", "topic"):
            out[f"{name}_bare"] = bare = self._lower(out.get(name, ""))
            out[name.capitalize()] = bare[:1].upper() + bare[1:]
            out[name] = bare if name == "topic" else self._the(bare)
        out["is"] = "are" if plural(out["col_bare" if kind in _OF else "key_bare"]) else "is"
        if verb := out.get("verb", ""):
            out["base"] = "have" if verb == "has" else singular(verb)
        out["do"] = out.get("do") or ("do" if plural(out["s_bare"] or out["key_bare"]) else "does")
        return out

    def _lower(self, text: str) -> str:
        """Small first letter, unless the first word is a name, an abbreviation or I."""
        first = re.split(r"[\s'’]", text)[0].strip("`,:")
        name = first[1:] != first[1:].lower() or re.search(r"\d", first) or first in self._proper or first == "I"
        return text if name else text[:1].lower() + text[1:]

    def _the(self, phrase: str) -> str:
        """The phrase with its article, unless it has one or is a name, a code or a command."""
        first, found = phrase.split(" ")[0], self._find.terms.find(phrase)
        if re.match(r"(?:the|a|an|your|my|any|all|each|no|every|one|two)\b", phrase, re.I):
            return phrase[:1].lower() + phrase[1:]
        kind = found[0][2].kind if found and found[0][0] == 0 else ""
        if kind == "product":
            return phrase if " " in phrase else f"the {phrase}"
        named = first != first.lower() if phrase == first else re.search(r"[\d_/<=]", " ".join(phrase.split()[:2]))
        return phrase if not phrase or kind == "command" or named or CODE.match(phrase) else f"the {phrase}"

    # Context ----------------------------------------------------------------------------------------------------------

    def clear(self, text: str, strict: bool = False, least: int = 2) -> bool:
        """Does it hold a term, a code, a name or at least so many words of its own to say what it is about? `strict`: a
        short term is not enough, and one word more is needed."""
        for start, end, entry in self._find.terms.find(text):
            form = text[start:end]
            tells = " " in form or (len(form) > 3 and not form.isascii() and (entry.tag or not strict))
            if form.lower() not in GENERAL and (tells or (not strict and (entry.kind != "term" or entry.tag))):
                return True
        own = set(re.findall("[a-z]{4,}", text.lower())) - GENERAL - TOO_WIDE - set(frames()["en"]["process"].split())
        many = len(own) >= least + strict or (len(_HAN.findall(text)) >= 2 * least + 2 and not strict)
        return bool(many or CODE.search(text) or _NAMED.search(text))

    def terms(self, text: str) -> set[str]:
        """Names of the dictionary's entries in a text that tell what it is about."""
        found = [(e, text[a:b]) for a, b, e in self._find.terms.find(text) if e.kind != "product" and b - a > 2]
        return {e.standard_term for e, form in found if e.tag or e.kind != "term" or " " in form}

    def _in_context(self, parent: Chunk, question: str, about: str, fact: Fact) -> str:
        """Name the version or model where the document has its own, and the topic where the question is not clear;
        nothing where no heading makes it clear."""
        zh, loose, label = parent.language == "zh", fact.kind in _LOOSE, self.label(parent, question)
        if "row" in fact.slots or fact.kind == "asked":  # a case of the section's trouble, a question of the document
            said = fact.slots.get("key") or question
            clear = len(said.split()) + len(_HAN.findall(said)) / 2 > 5
        else:
            clear = self.clear(about, not loose, 1 if label and loose else 2)
        topic = "" if clear else self._topic(parent, about, whole=loose)
        if not clear and not topic:
            return ""
        label = self.label(parent, f"{question} {topic}")
        models = any(m in label for m in parent.product_model)
        if zh:
            joint = "：" if topic else ("上，" if models else "中，") if label else ""
            return tidy(f"{' '.join(filter(None, (label, topic)))}{joint}{question}")
        if topic:
            return tidy(f"{f'{label}, {self._lower(topic)}' if label else topic}: {self._lower(question)}")
        return f"{'On the' if models else 'In'} {label}, {self._lower(question)}" if label else question

    def _topic(self, parent: Chunk, about: str, whole: bool) -> str:
        """The heading that makes it clear: the section's, with the chapter or the title before it where need be.
        `whole`: the question is about a whole section, whose heading another may only repeat."""
        zh, joint = parent.language == "zh", "，" if parent.language == "zh" else ", "
        title, chapter, leaf = (
            clean_heading(h) for h in (parent.breadcrumb.split(" > ")[0].split(": ")[0], parent.chapter, _leaf(parent))
        )
        wide, heads = GENERAL | TOO_WIDE, []
        for h in (title, chapter, _trouble(leaf, 1, zh)):
            repeats = h in about or (whole and about.lower() in h.lower())
            wide_only = set(re.findall(r"\w+", h.lower())) <= wide
            heads.append("" if h[-1:] in "?？" or repeats or wide_only or _WH.match(h) else h.split(": ")[-1])
        title, chapter, leaf = heads
        options = [
            joint.join(filter(None, (h, leaf))) for h in dict.fromkeys(("", chapter, title)) if h != leaf or not h
        ]
        return next((o for o in options if o and self.clear(f"{o} {about}")), "")

    def label(self, parent: Chunk, text: str) -> str:
        """Version of a document that is no longer the current one; model of a document about one model or two."""
        zh, version = parent.language == "zh", _VERSION.match(parent.doc_version)
        name = version[1] if version else parent.doc_version
        if parent.status != "active" and name not in text:
            known = (p for p in self._find.products if p.endswith(f" {name}"))
            return next(known, f"{name} 版" if zh else f"version {name}")
        models = [m for m in parent.product_model if m != "all"]
        named = len(models) in (1, 2) and not any(m in text for m in models)
        return (" 和 " if zh else " and ").join(models) if named else ""

    # Other words ------------------------------------------------------------------------------------------------------

    def _other_words(self, question: str, number: int) -> str:
        """Exchange terms for other forms of the dictionary, in the same language, that fit the sentence."""
        out, at = [], 0
        for start, end, entry in self._find.terms.find(question):
            last = (question[:start].lower().split() or [""])[-1].strip("(,:")
            options = [f for f in entry.forms if _fits(question[start:end], f, entry, question)]
            options = [f for f in options if f.lower().split()[0] != last and not self._narrower(f, entry)]
            if options and not re.match(" [A-Z]", question[end:]):  # else a part of a name
                other = options[(number >> 4) % len(options)]
                long = other in entry.formal and other != entry.abbreviation
                out += [question[at:start], other.lower() if long else other]
                at = end
        return tidy("".join(out) + question[at:])

    def _narrower(self, form: str, entry: TermEntry) -> bool:
        """Does a colloquial form name another thing beside its own: "sftp target" for a backup target?"""
        others = (e for *_, e in self._find.terms.find(form) if e is not entry)
        return form in entry.colloquial and any(e.kind != "term" or e.abbreviation for e in others)


def _leaf(parent: Chunk) -> str:
    return parent.section.split(" > ")[-1] or parent.chapter


def _fits(form: str, other: str, entry: TermEntry, question: str) -> bool:
    """May `other` stand for `form` here: an abbreviation, its long form, or a colloquial form of the same build?"""
    han, key, latin = bool(_HAN.search(form)), form_key(other), not _HAN.search(other)
    if key in form_key(question) or form_key(form) in key or re.search(r"\d|[(（]", form + other):
        return False
    if entry.kind not in ("term", "protocol") or other == entry.abbreviation:
        return entry.kind in ("term", "protocol") and len(other) > 1
    if form == entry.abbreviation:  # its long form, in the question's language
        fits = other in entry.formal and len(form) > 2 and len(other.split()) < 4
        return fits and entry.kind == "term" and latin == (not _HAN.search(question))
    if other in entry.formal or han == latin:
        return False
    if han:
        alike = form[:2] == other[:2] or form[-2:] == other[-2:] or (form[0], form[-1]) == (other[0], other[-1])
        typo = len(form) == len(other) > 3 and sum(a != b for a, b in zip(form, other, strict=True)) == 1
        return alike and not typo and not re.search("[了几不最多会A-Za-z]|怎么|什么", form + other)
    mine, theirs = form.lower().split(), other.lower().split()
    alike = singular(mine[-1]) == singular(theirs[-1]) or (mine[0] == theirs[0] and len(mine) == len(theirs) == 2)
    odd = theirs[0] in frames()["en"]["verbs"].split() or theirs[-1].endswith(("ed", "out")) or "this" in theirs
    return alike and len(theirs) > 1 and not odd and not typo_distance(other.lower(), form.lower())


def _steps_en(heading: str, words: dict) -> tuple[str, dict[str, str]]:
    """(frames, slots) for a heading above steps: an order, a gerund, a case, or a noun that names a procedure."""
    verbs, heading = words["verbs"].split(), heading.partition(": ")[2] or heading
    ing = {form: v for v in verbs for form in ((f"{v[:-1]}ing",) if v[-1] == "e" else (f"{v}ing", f"{v}{v[-1]}ing"))}
    first, _, rest = heading.partition(" ")
    order = first.lower() if first.lower() in verbs else ""
    if order in words["nouns"].split() and not re.match(r"(?:an?|the|your|all)\b", rest):
        order = ""
    if rest and (verb := ing.get(first.lower(), order)):
        rest = re.sub(r"\b(and|or) (\w+ing)\b", lambda m: f"{m[1]} {ing.get(m[2], m[2])}", rest)
        return "steps_verb", {"do": f"{verb} {rest}"}
    if re.match(r"(?:when|if|after|before)\b", first, re.I):
        return "steps_when", {"topic": heading}
    named = set(re.findall("[a-z]+", heading.lower())) & set(words["process"].split())
    return ("steps_noun" if named else ""), {"topic": heading}


def _steps_zh(heading: str, words: dict) -> tuple[str, dict[str, str]]:
    topic = re.sub(r"的?(?:操作)?(?:步骤|流程|次序|顺序|方法|过程|程序)$", "", heading)
    verbs, latin = tuple(words["verbs"].split()), re.search("[A-Za-z]", topic)
    does = topic.startswith(verbs) or topic.endswith(verbs) or (not latin and any(v in topic for v in verbs))
    return ("steps_verb" if does and not topic.endswith(("记录", "要求", "限制")) else ""), {"topic": topic}


def _trouble(heading: str, number: int, zh: bool) -> str:
    """A heading with an error code at one end as a person says it: the code, or the code and what it says."""
    code, joint = CODE.pattern, r"[:：,，]\s*"
    match = re.fullmatch(rf"(?P<a>{code}){joint}(?P<b>.+)|(?P<c>.+?){joint}(?P<d>{code})", heading)
    if not match:
        return heading
    code, said = match["a"] or match["d"], re.sub(r"\s*[（(]([^（）()]*)[）)]", r", \1", match["b"] or match["c"])
    if number % 3 == 0 or len(said) > 50:
        return code
    said = said if said[1:2].isupper() or zh else said[:1].lower() + said[1:]
    return f"{code}（{said}）" if zh else f"{code} ({said})"


def join_questions(first: str, second: str, language: str) -> str:
    """Two plain questions as one text, or nothing where that would not read well."""
    lead = re.match("[^，]{2,16}[上中]，" if language == "zh" else r"(?:On|For|In) [^,]+, ", first)
    rest = second.removeprefix(lead.group()) if lead else second
    if language == "zh":
        plain = all(q.count("？") == 1 and "：" not in q for q in (first, second))
        return f"{first}另外，{re.sub('^请问', '', rest).strip()}" if plain else ""
    asked = re.compile(r"(?:(?:On|For) the [^:.,]+, )?(?:what|how|which|why|after how) [^:.]+\?", re.I)
    plain = all(asked.fullmatch(q) for q in (first, second))
    return f"{first[:-1]}, and {rest[0].lower()}{rest[1:]}" if plain else ""


def ask_more(first: str, kind: str, language: str) -> str:
    """A question with what else is to be known of the same thing: its cause or its remedy."""
    if language == "zh":
        return f"{first}{'该怎么处理？' if kind == 'remedy' else '是什么原因造成的？'}"
    more = "what should I do about it?" if kind == "remedy" else "what causes it?"
    return f"{first[:-1]}, and {more}" if re.fullmatch(r"(?:What|Why|How) [^:.]+\?", first) else f"{first} And {more}"
