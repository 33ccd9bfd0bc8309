"""Facts of one section that a question can be asked about: where they stand, and what a question needs to say of them.

A fact is found by form alone: a table's cell, numbered steps, a paragraph labelled "Cause" or 处理, a question with its
answer, a sentence that gives a value, a purpose or a definition. Spans are code points within the section's content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragbuild.core.forms import FormMatcher
from ragbuild.core.records import Chunk, QueryType, TermEntry
from ragbuild.core.text import HAN, STOPWORDS, row_cells
from ragbuild.offline.question_text import AMOUNT, CODE, MARKER, VALUE, clean_heading, frames, patterns, plural
from ragbuild.offline.sections import Unit, read_units

_NUMBER = re.compile(r"(?P<n>\d{1,2})(?:[.)]\s|、)|[（(](?P<m>\d{1,2})[)）]")
_QUOTED = re.compile(r"\A\s*>\s?")
_LABEL = re.compile(r"\*\*([^*\n]{1,24}?)[.。:：]?\*\*[.。:：]?\s*")
_ANSWER = re.compile(r"\A(?:\*\*)?(?:A|答)\s*[:：](?:\*\*)?\s*")
_QUESTION = re.compile(r"(?:Q|问)\s*[:：]\s*(?P<q>[^\n]+[?？])\s*\n+(?P<a>(?:A|答)\s*[:：][^\n]+)")


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
        self.products = sorted(e.standard_term for e in entries if e.kind == "product")

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
        for found in (self._tables, self._labelled, self._steps, self._asked, self._sentences):
            yield from found()

    def _role(self, head: str) -> str:
        head = re.sub(r"\s*[（(].*", "", head.lower()).strip()
        for role, names in self.words["roles"].items():
            if head in names or (role == "value" and re.match(r"value\b", head)):
                return role
        return "unasked" if re.search(self.words["unasked"], head) else ""

    # Tables -----------------------------------------------------------------------------------------------------------

    def _tables(self) -> Iterator[Fact]:
        tables: dict[int, list[Unit]] = {}
        for unit in self.units:
            if unit.kind in ("thead", "row"):
                tables.setdefault(unit.block, []).append(unit)
        for n, part in enumerate(tables.values()):
            lead = part[0].kind == "thead"
            header = self._of(part[0]) if lead else self.parent.table_header if n == 0 else ""
            names = _cells(header.split("\n")[0])
            rows = [(u, row) for u in part[lead:] if len(row := _cells(self._of(u))) == len(names)]
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
                    slots = {"key": key, "value": value, "col": names[j]}
                    head = names[at] if names[at].isupper() else names[at].lower()
                    for kind, type_, more in self._cell(slots, head, roles[j], stated):
                        yield Fact(kind, type_, unit.start, unit.end, slots | more, value)

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

    def _cell(self, slots: dict[str, str], head: str, role: str, stated: bool) -> Iterator[tuple[str, QueryType, dict]]:
        """(kind, type, more slots) of the question that a cell of this role answers, if there is one."""
        key, value, name, zh = slots["key"], slots["value"], slots["col"], self.zh
        version, amount, code = re.search(r"(?<!\d)\d+\.\d+(?!\d)", name), VALUE.search(value), CODE.search(key)
        bare = len(key.split()) == 1 and (not zh or len(key) < 4)  # says little, unless the value is a quantity
        telling = bool(CODE.search(value) or (amount and (amount["unit"] or not bare)))
        product = name in self.parent.product_model or name in self.finder.products
        if version or product:
            number = "" if product else version.group()
            known = (p for p in self.finder.products if number and p.endswith(f" {number}"))
            entity = name if product else next(known, f"{number} 版" if zh else f"version {number}")
            sure = telling and (value[:1].isdigit() or not (bare or plural(key))) if product else telling or not bare
            if sure and (zh or not value.isdigit()) and not key[:1].isdigit():
                preset = not product and re.search(r"default|默认", f"{name} {self.heading}", re.I)
                kind = "entity" if product else "version_default" if preset else "version"
                yield kind, "factual", {"key": entity, "col": key}
        elif role == "meaning" or (role == "use" and not VALUE.match(value)):
            named = {"key": f"{head} {key}" if zh else f"the {head} '{key}'"} if bare and key.islower() and head else {}
            yield role, "definitional" if role == "meaning" else "factual", named
        elif role in ("cause", "remedy"):
            elsewhere = re.search(r"\b(?:section|chapter)s? \d|[见第] ?\d|见案例", value)
            if not elsewhere and not re.search(r" \d| green|\(green|绿|正常", key[-8:]):
                said = {} if len(key.split()) > 1 or zh or code else {"key": f"{key} ({head})"}
                case = {} if code or stated or re.search("灯|LED", f"{head} {key}") else {"row": "yes"}
                yield f"case_{role}" if case else role, "troubleshooting", case | said
        elif role == "value" and (telling or not bare) and not value.isdigit():
            yield "value" if not zh or AMOUNT.fullmatch(value) else "column", "factual", {}
        elif not role and 0 < len(name) <= 30 and not value.isdigit() and value[0] != "已":
            told = (amount and amount["unit"]) or " " in name or key not in self.finder.products
            if re.search(f"[{HAN}]", name) if zh else told:
                yield "column", "factual", {"col": re.sub(r"^(建议|允许|包含|适合)的", r"\1", name)}

    # Steps, labelled paragraphs, questions ----------------------------------------------------------------------------

    def _number(self, unit: Unit) -> int | None:
        match = _NUMBER.match(self.text, unit.start) if unit.kind == "prose" else None
        return int(match["n"] or match["m"]) if match else None

    def _steps(self) -> Iterator[Fact]:
        """The numbered list of at least three steps, with the code between them, where a section has just one."""
        runs: list[list[int]] = []  # first unit, last unit, steps
        for n, unit in enumerate(self.units):
            number, run = self._number(unit), runs[-1] if runs else [0, -9, 0]
            before = self.units[n - 1]
            gap = self.text[before.end : unit.start].count("\n")
            code = unit.kind == "code" and self.text[before.end - 1] in ":："
            if number == 1:
                runs.append([n, n, 1])
            elif number == run[2] + 1 and n - run[1] < 6:
                run[1:] = n, number
            elif run[1] == n - 1 and number is None and unit.kind in ("prose", "code") and (gap < 2 or code):
                run[1] = n
        found = [(first, last) for first, last, steps in runs if steps > 2]
        if len(found) != 1 or self.heading[-1:] in "?？":
            return
        (first, last), units = found[0], self.units
        before = self._of(units[first - 1]) if first else ""
        lead = re.fullmatch(r"(.{2,16}?)的?(?:步骤|流程)(?:如下)?[：:]", before)
        if re.search(r"时[：:]$|^(?:If|When)\b[^\n]*:$", before):
            return  # steps of a case, not what the heading says
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
            if match and role in ("cause", "remedy") and len(self.heading) > 4:
                stop = min((s for s in starts if s > start), default=len(self.text))
                end = max(u.end for u in self.units if u.start < stop)
                kind = role if CODE.search(self.heading) else f"case_{role}"
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
            yield Fact("asked", type_, start + (match.end() if match else 0), end, {"question": question})

    # Sentences --------------------------------------------------------------------------------------------------------

    def _sentences(self) -> Iterator[Fact]:
        for unit in self.units:
            start = unit.start
            for lead in (_QUOTED, MARKER, _LABEL, _ANSWER) if unit.kind == "prose" else ():
                match = lead.match(self.text[start : unit.end])
                start += match.end() if match else 0
            if unit.kind == "prose" and start < unit.end:
                read = self._chinese if self.zh else self._english
                found = read(re.sub(r"\*\*|`", "", self.text[start : unit.end]))
                yield from (Fact(kind, type_, start, unit.end, slots) for kind, type_, slots in found)

    def _english(self, text: str) -> Iterator[tuple[str, QueryType, dict[str, str]]]:
        for pattern, question in patterns("en", "sentences"):
            match = pattern.match(text)
            if match and self._subject(match["s"]):
                slots, subject = match.groupdict(default=""), match["s"]
                named = re.match(r"(?:The|An?|Each|Every) |\S*[\d/_A-Z]{2}", subject) or plural(subject)
                verb = slots.get("verb")
                if verb and (plural(subject) == verb.endswith("s") or not (slots.get("v") or named)):
                    return  # no verb here: "The usual cause is …"
                if question not in ("meaning", "define"):
                    value = f"{slots.get('v', '')} {slots.get('noun', '')}".strip()
                    yield "sentence", "factual", slots | {"pattern": question, "v": value}
                elif self._names(subject) or (question == "define" and re.fullmatch(r"An?(?: \S+){1,3}", subject)):
                    yield question, "definitional", {"key": subject}
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
        for pattern, word in patterns("zh", "asks"):
            match = pattern.search(clause)
            if match and not VALUE.search(clause.replace(match.group(), "", 1)):
                before, after = clause[: match.start()], re.sub("[且并而但].*", "", clause[match.end() :].strip())
                said = re.findall(f"[{HAN}]", re.sub("[约为每需和与]", "", before + after))
                lasts = word != "多久" or re.search(self.words["lasts"], before)
                fits = not re.match(self.words["broken"], after) if after else lasts
                if self.finder.terms.find(before) and len(said) > 2 and fits and len(after) <= 14:
                    return f"{before}{match.expand(word)}{after}？", match.group().strip()
        return None

    def _names(self, subject: str) -> bool:
        """Is it the name of a term or a code, and nothing else?"""
        bare = re.sub(r"\A(?:the|a|an)\s+", "", subject.strip(), flags=re.I)
        found = self.finder.terms.find(bare)
        return bool(CODE.fullmatch(bare)) or (len(found) == 1 and found[0][:2] == (0, len(bare)))


def _cells(row: str) -> list[str]:
    return [cell.replace("`", "").strip(" :：") for cell in row_cells(row)]
