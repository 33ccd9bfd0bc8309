"""Facts of one section that a question can be asked about: where they stand, and what a question needs to say of them.

A fact is found by form alone: a table's cell, numbered steps, a paragraph labelled "Cause" or 处理, a question with its
answer, a sentence that gives a value, a purpose or a definition. Spans are code points within the section's content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ragbuild.core.forms import FormMatcher
from ragbuild.core.records import Chunk, QueryType, TermEntry
from ragbuild.core.text import HAN, STOPWORDS
from ragbuild.offline.question_text import (
    AMOUNT,
    CODE,
    COUNTER,
    MARKER,
    SIZE,
    TIME,
    VALUE,
    cells,
    clean_heading,
    frames,
    plural,
    strip_markdown,
)
from ragbuild.offline.sections import Unit, read_units

_IDENTIFIER = re.compile(r"[A-Z]{0,5}-?\d{3,6}|(?:TCP|UDP)?[ /,\d]+|\S*[./_]\S*")  # may be asked for by its meaning
_NUMBER = re.compile(r"(?P<n>\d{1,2})(?:[.)]\s|、)|[（(](?P<m>\d{1,2})[)）]")
_QUOTED = re.compile(r"\A\s*>\s?")
_LABEL = re.compile(r"\*\*([^*\n]{1,24}?)[.。:：]?\*\*[.。:：]?\s*")
_ANSWER = re.compile(r"\A(?:\*\*)?(?:A|答)\s*[:：](?:\*\*)?\s*")
_QUESTION = re.compile(r"(?:Q|问)\s*[:：]\s*(?P<q>[^\n]+[?？])\s*\n+(?P<a>(?:A|答)\s*[:：][^\n]+)")
_COUNT = r"(?:\d[\d,.]*|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty)"
_MACROS = {
    "S ": r"(?P<s>(?:The |A |An |Each |Every )?[A-Za-z<][^,;:.()]{1,70}?) ",
    "LIM ": "(?P<lim>at least |at most |up to |only |exactly )?",
    "DUR": rf"(?P<v>{_COUNT} ?(?:{TIME}))\b",
    " NOUN": r" (?P<noun>(?!second|minute|hour|day|week|month|year)(?:[a-z][a-z-]+ ){0,2}[a-z][a-z-]+s)\b",
    "N ": rf"(?P<v>{_COUNT}) ", "UNIT": f"{SIZE}|{TIME}", "TIME": TIME, "COUNTER": COUNTER,
}  # fmt: skip


@lru_cache(maxsize=4)
def _patterns(language: str, name: str) -> list[tuple[re.Pattern[str], str]]:
    out = []
    for pattern, question in frames()[language][name]:
        for macro, meaning in _MACROS.items():
            pattern = pattern.replace(macro, meaning)
        out.append((re.compile(pattern), question))
    return out


@dataclass(frozen=True)
class Fact:
    """One thing a section says. `kind` names its frames; `slots` fill them; `answer` defaults to the span's text."""

    kind: str
    type: QueryType
    start: int
    end: int
    slots: dict[str, str]
    answer: str = ""


class FactFinder:
    """Finds the facts of a section; the dictionary says what a term, a command and a product is."""

    def __init__(self, entries: Sequence[TermEntry]) -> None:
        self.terms = FormMatcher((form, entry) for entry in entries for form in entry.formal)
        commands = sorted((e.standard_term for e in entries if e.kind == "command"), key=len, reverse=True)
        self.command = rf"(?P<cmd>`[a-z][^`\n]+`{''.join('|' + re.escape(c) for c in commands)})"
        self.products = sorted(e.standard_term for e in entries if e.kind == "product")
        self.short = [(e.abbreviation, long) for e in entries if e.abbreviation for long in e.forms if len(long) > 3]

    def __call__(self, parent: Chunk) -> list[Fact]:
        """All facts of the section, in no special order; none when its language has no frames."""
        words = re.findall(r"[^\W\d_]+", parent.content.lower())
        foreign = sum(w in frames()["other_languages"] or bool(re.search("[à-ÿ]", w)) for w in words)
        other = parent.language not in ("en", "zh") or foreign > sum(w in STOPWORDS for w in words)
        return [] if other else list(_Section(self, parent).facts())


class _Section:
    def __init__(self, finder: FactFinder, parent: Chunk) -> None:
        self.finder, self.parent, self.text, self.zh = finder, parent, parent.content, parent.language == "zh"
        self.units, self.words = read_units(parent.content), frames()[parent.language]
        self.heading = clean_heading((parent.section or parent.chapter).split(" > ")[-1])
        self.verbs = set(self.words["verbs"].split())

    def facts(self) -> Iterator[Fact]:
        for found in (self._tables, self._labelled, self._steps, self._asked, self._short_forms, self._sentences):
            yield from found()

    def _role(self, head: str) -> str:
        head = re.sub(r"\s*[（(].*", "", head.lower()).strip()
        for role, names in self.words["roles"].items():
            if head in names or (role == "value" and re.match(r"(?:default|value)\b|默认值", head)):
                return role
        return "skip" if re.search(r"[?？]|什么|怎么|谁|\b(?:who|what|when|how|if)\b", head) else ""

    # Tables -----------------------------------------------------------------------------------------------------------

    def _tables(self) -> Iterator[Fact]:
        tables: dict[int, list[Unit]] = {}
        for unit in self.units:
            if unit.kind in ("thead", "row"):
                tables.setdefault(unit.block, []).append(unit)
        for n, part in enumerate(tables.values()):
            lead = part[0].kind == "thead"
            header = self._of(part[0]) if lead else self.parent.table_header if n == 0 else ""
            names = cells(header.split("\n")[0])
            rows = [(u, row) for u in part[lead:] if len(row := cells(self._of(u))) == len(names)]
            roles = [self._role(name) for name in names]
            at = 1 if roles[0] == "index" and len(names) > 2 else 0
            stated = at + 1 < len(names) - 1 and roles[at + 1] == "state"
            if len(names) > 1 and rows and (stated or len({row[at] for _, row in rows}) == len(rows)):
                yield from self._table(names, roles, rows, at, stated)

    def _of(self, unit: Unit) -> str:
        return self.text[unit.start : unit.end]

    def _table(self, names: list[str], roles: list[str], rows: list, at: int, stated: bool) -> Iterator[Fact]:
        if len(rows) > 2:
            answer = "\n".join(self._of(u) for u, _ in rows)
            yield Fact("all_rows", "factual", rows[0][0].start, rows[-1][0].end, {}, answer)
        nouns, trivial = set(self.words.get("nouns", "").split()), self.words["trivial"]
        for unit, row in rows:
            key, first = self._key(names[at], row[at], row[at + 1] if stated else ""), row[at].split(" ")[0].lower()
            order = not self.zh and (first in self.verbs - nouns or first in ("who", "what", "how"))
            if not 1 < len(key) <= 70 or key.lower() in trivial or order:
                continue
            for j in range(at + 1 + stated, len(names)):
                value = row[j]
                if (len(value) > 1 + self.zh or value.isdigit()) and value.lower() not in trivial:
                    head = names[at] if names[at].isupper() else names[at].lower()
                    slots = {"key": key, "value": value, "head": head, "col": names[j]}
                    for kind, type_, more in self._cell(slots, roles[j]):
                        answer = row[at] if kind.startswith("which") else value
                        yield Fact(kind, type_, unit.start, unit.end, slots | more, answer)

    def _key(self, head: str, key: str, state: str) -> str:
        """What a row is about, in words: "SYS LED (red)", "port 443", "failover time (LG-500)"."""
        light = "灯" in head or "LED" in head
        if state and self.zh:
            return f"{key} {head}{state}" if light else f"{head} {key}（{state}）"
        if state:
            return f"{key} LED ({state})" if light else f"{head.lower()} {key} ({state})"
        if self.zh and key.isalpha() and len(key) < 6 and not key.isascii() and light:
            return f"{head} {key}"
        key = f"{head.lower()} {key}" if key[:1].isdigit() and head else key
        return re.sub(r"^([^,()]+), (\S+(?: \S+){0,2})$", r"\1 (\2)", key)

    def _cell(self, slots: dict[str, str], role: str) -> Iterator[tuple[str, QueryType, dict[str, str]]]:
        """(kind, type, more slots) of the questions that a cell of this role answers."""
        key, value, name, head = slots["key"], slots["value"], slots["col"], slots["head"]
        zh, version = self.zh, re.search(r"(?<!\d)\d+\.\d+(?!\d)", name)
        bare = len(key.split()) == 1 and (not zh or len(key) < 4)  # says little, unless the value is a quantity
        amount = VALUE.search(value)
        unit = amount and amount["unit"]
        telling = bool(CODE.search(value) or (amount and (unit or not bare)))
        preset = re.search(r"default|默认", f"{name} {self.parent.section or self.parent.chapter}", re.I)
        if version and (telling or not bare):
            number = version.group()
            entity = next((p for p in self.finder.products if p.endswith(f" {number}")), number)
            yield "version_default" if preset else "version", "factual", {"entity": entity}
        elif name in self.parent.product_model or name in self.finder.products:
            if value.isdigit() and not zh:
                if plural(key) and "/" not in key:
                    yield "count", "factual", {"entity": name}
            elif telling and not key[:1].isdigit() and (not bare or value[:1].isdigit()):
                yield "entity", "factual", {"entity": name}
        elif role in ("use", "meaning"):
            named = {"key": f"{head} {key}" if zh else f"the {head} '{key}'"} if bare and key.islower() and head else {}
            yield role, "definitional" if role == "meaning" else "factual", named
            one = _IDENTIFIER.fullmatch(key.removeprefix(f"{head} "))
            if one and len(value) < 46 and not re.search("[;；|]|[.。]$", value):
                yield f"which_{role}", "factual", {}
        elif role in ("cause", "remedy"):
            elsewhere = re.search(r"\b(?:section|chapter)s? \d|[见第] ?\d", value)
            if elsewhere or re.search(r" \d| green|\(green|绿|正常", key[-8:]):
                return
            code = CODE.search(key) or (re.search(r"\d{3,}", key) and not zh)
            said = {"key": f"{head}: {key}"} if len(key.split()) < 2 and not zh and not code else {}
            yield role if code else f"case_{role}", "troubleshooting", {"row": "" if code else "yes"} | said
        elif role in ("value", "require"):
            if value.isdigit() and not zh and plural(key):
                yield "many", "factual", {}
            elif telling or not bare:
                told = role == "require" or not zh or AMOUNT.fullmatch(value)  # else: "what are its settings?"
                kind = "default" if re.match("default|默认", name, re.I) else role if told else "column"
                yield kind, "factual", {}
        elif not role and 0 < len(name) <= 30 and not value.isdigit():
            said = re.search(f"[{HAN}]", name) if zh else unit or " " in name or key not in self.finder.products
            if said:
                yield "column", "factual", {"col": re.sub(r"^(建议|允许|包含|适合)的", r"\1", name)}

    # Steps, labelled paragraphs, questions ----------------------------------------------------------------------------

    def _number(self, unit: Unit) -> int | None:
        match = _NUMBER.match(self.text, unit.start) if unit.kind == "prose" else None
        return int(match["n"] or match["m"]) if match else None

    def _steps(self) -> Iterator[Fact]:
        """The numbered list of at least three steps, with the code between them, where a section has just one."""
        units, found, i = self.units, [], 0
        while i < len(units):
            step, last = self._number(units[i]), i
            for j in range(i + 1, len(units) if step == 1 else 0):
                before, number = units[j - 1], self._number(units[j])
                gap = self.text[before.end : units[j].start].count("\n")
                code = units[j].kind == "code" and self.text[before.end - 1] in ":："
                if number == step + 1:
                    step, last = number, j
                elif last == j - 1 and number is None and units[j].kind in ("prose", "code") and (gap < 2 or code):
                    last = j
                elif units[j].kind == "heading" or j - last > 4:
                    break
            found += [(i, last)] if step and step > 2 and last > i else []
            i = last + 1
        if len(found) != 1 or self.heading[-1:] in "?？":
            return
        first, last = found[0]
        lead = re.fullmatch(r"(.{2,16}?)的?(?:步骤|流程)(?:如下)?[：:]", self._of(units[first - 1])) if first else None
        topic = lead[1] if lead else self.heading
        named = re.match(r"(?:when|if|after|before|how|\w+ing)\b", topic, re.I)
        kind = "remedy" if CODE.search(topic) else "case_remedy" if re.search(self.words["trouble"], topic) else "steps"
        if kind == "steps" or named:
            yield Fact("steps", "procedural", units[first].start, units[last].end, {"topic": topic})
        else:
            yield Fact(kind, "troubleshooting", units[first].start, units[last].end, {"key": topic})

    def _labelled(self) -> Iterator[Fact]:
        """Paragraphs that begin with a bold label (Cause, Resolution, 原因, 处理), each up to the next one."""
        starts = [u.start for u in self.units if u.kind == "prose" and self.text.startswith("**", u.start)]
        for start in starts:
            match = _LABEL.match(self.text, start)
            role = self._role(match[1].strip()) if match else ""
            if match and role in ("cause", "remedy", "verify") and len(self.heading) > 4:
                stop = min((s for s in starts if s > start), default=len(self.text))
                end = max(u.end for u in self.units if u.start < stop)
                kind = role if CODE.search(self.heading) and role != "verify" else f"case_{role}"
                if kind in self.words["frames"]:
                    yield Fact(kind, "troubleshooting", match.end(), end, {"key": self.heading})

    def _asked(self) -> Iterator[Fact]:
        """Questions that the document itself asks and answers."""
        pairs = [(m["q"], *m.span("a")) for m in _QUESTION.finditer(self.text)]
        body = [u for u in self.units if u.kind != "heading"]
        if not pairs and self.heading[-1:] in "?？" and body:
            pairs = [(self.heading, body[0].start, body[-1].end)]
        for question, start, end in pairs:
            match = _ANSWER.match(self.text[start:end])
            trouble = CODE.search(question) or re.search(r"\bwhy\b|refus|fail|报|失败|不[了上到]|怎么办", question)
            how = re.match(r"how (?:do|to|can)\b|.*(?:怎么|如何)", question, re.I)
            type_: QueryType = "troubleshooting" if trouble else "procedural" if how else "factual"
            yield Fact(
                "asked", type_, start + (match.end() if match else 0), end, {"question": strip_markdown(question)}
            )

    def _short_forms(self) -> Iterator[Fact]:
        """An abbreviation of the dictionary where the text introduces it: Single Sign-On (SSO), 单点登录（SSO）."""
        for short, long in self.finder.short if self.parent.status == "active" else ():
            if short in self.text and long != short and bool(re.search(f"[{HAN}]", long)) == self.zh:
                match = re.search(rf"({re.escape(long)}) ?[（(]{re.escape(short)}[）)]", self.text, re.I)
                if match:
                    yield Fact("stands_for", "definitional", *match.span(), {"key": short}, match[1])

    # Sentences --------------------------------------------------------------------------------------------------------

    def _sentences(self) -> Iterator[Fact]:
        for unit in self.units:
            start = unit.start
            for lead in (_QUOTED, MARKER, _LABEL, _ANSWER) if unit.kind == "prose" else ():
                match = lead.match(self.text[start : unit.end])
                start += match.end() if match else 0
            if unit.kind == "prose" and start < unit.end:
                text = self.text[start : unit.end].replace("**", "")
                read = self._chinese if self.zh else self._english
                found = [*read(text.replace("`", "")), *self._commands(text)]
                yield from (Fact(kind, type_, start, unit.end, slots) for kind, type_, slots in found)

    def _english(self, text: str) -> Iterator[tuple[str, QueryType, dict[str, str]]]:
        for pattern, question in _patterns("en", "sentences"):
            match = pattern.match(text)
            if match and self._subject(match["s"]):
                slots = match.groupdict(default="")
                named = re.match(r"(?:The|An?|Each|Every) |\S*[\d/_A-Z]{2}", match["s"]) or plural(match["s"])
                verb = slots.get("verb")
                if verb and (plural(match["s"]) == verb.endswith("s") or not (slots.get("v") or named)):
                    return  # no verb here: "The usual cause is …"
                if question not in ("meaning", "define"):
                    value = f"{slots.get('v', '')} {slots.get('noun', '')}".strip()
                    yield "sentence", "factual", slots | {"pattern": question, "v": value}
                elif self._names(match["s"]) or (
                    question == "define" and re.match(r"An? \S+(?: \S+){0,2}$", match["s"])
                ):
                    yield question, "definitional", {"key": match["s"]}
                return

    def _subject(self, text: str) -> bool:
        """May this be the subject of a question: a short noun phrase that points at nothing outside?"""
        words = text.lower().split()
        pointing, inner = self.words["no_subject"].split(), self.words["no_inner"].split()
        bound = words[-1] in ("the", "a", "an", "in", "of", "to", "at", "for", "by", "from")
        return len(words) <= 8 and words[0] not in pointing and not set(inner) & set(words[1:]) and not bound

    def _chinese(self, text: str) -> Iterator[tuple[str, QueryType, dict[str, str]]]:
        define = re.match(r"([^，。；：（）、]{2,16}?)(是指|指的是|是一[种个套项]|表示|用于|用来)", text)
        if define and self._names(define[1]):
            kind = {"表示": "meaning", "用于": "use", "用来": "use"}.get(define[2], "define")
            yield kind, "definitional", {"key": define[1].strip()}
        for clause in re.split(r"[，。；：:;（）]", text):
            if asked := self._in_place(clause.strip()):
                yield "sentence", "factual", {"pattern": asked[0], "s": asked[0].split("多少")[0], "v": asked[1]}
                return

    def _in_place(self, clause: str) -> tuple[str, str] | None:
        """The clause with its one value replaced by the word that asks for it, and the value."""
        if not 6 <= len(clause) <= 45 or re.search(self.words["no_clause"], clause):
            return None
        for pattern, word in _patterns("zh", "asks"):
            match = pattern.search(clause)
            if match and not VALUE.search(clause.replace(match.group(), "", 1)):
                before, after = clause[: match.start()], re.sub("[且并而但].*", "", clause[match.end() :].strip())
                said = re.findall(f"[{HAN}]", re.sub("[约为每需和与]", "", before + after))
                fits = (
                    not re.match(self.words["broken"], after)
                    if after
                    else word != "多久" or re.search(self.words["lasts"], before)
                )
                if self.finder.terms.find(before) and len(said) > 2 and fits and len(after) <= 14:
                    return f"{before}{match.expand(word)}{after}？", match.group().strip()
        return None

    def _names(self, subject: str) -> bool:
        """Is it the name of a term or a code, and nothing else?"""
        bare = re.sub(r"\A(?:the|a|an)\s+", "", subject.strip(), flags=re.I)
        found = self.finder.terms.find(bare)
        return bool(CODE.fullmatch(bare)) or (len(found) == 1 and found[0][:2] == (0, len(bare)))

    def _commands(self, text: str) -> Iterator[tuple[str, QueryType, dict[str, str]]]:
        """Use `x` to do something; 用 `x` 查看…: which command does it?"""
        for pattern in self.words["commands"]:
            pattern = pattern.replace("CMD", self.finder.command).replace(
                "VERBS", "|".join(self.words["verbs"].split())
            )
            match = re.search(pattern, text)
            if match and " " in match["cmd"] and (self.zh or match["do"].split()[0] in self.verbs):
                yield "command", "procedural", {"do": strip_markdown(match["do"]), "v": match["cmd"].strip("`")}
                return
