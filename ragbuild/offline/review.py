"""What people write for the dictionary: the query log, and the expert's review as a CSV that goes both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragbuild.core.errors import InputRefused
from ragbuild.core.store import read_csv, write_csv
from ragbuild.core.text import language_of

DECISIONS = ("accept", "edit", "reject", "add")
REVIEW_COLUMNS = ("decision", "standard_term", "abbreviation", "full_form", "colloquial", "tag", "note")


@dataclass(frozen=True)
class QueryRow:
    """One line of the query log: how often a wording was typed, and when first (ISO date, may be empty)."""

    query_id: str
    query: str
    language: str
    count: int
    date: str


@dataclass(frozen=True)
class ReviewRow:
    """One line of the expert's review. `decision` is accept, edit, reject, add, or empty (not decided yet)."""

    decision: str
    standard_term: str
    abbreviation: str = ""
    full_form: str = ""
    colloquial: tuple[str, ...] = ()
    tag: str = ""
    note: str = ""

    @property
    def formal(self) -> tuple[str, ...]:
        return tuple(f for f in (self.standard_term, self.abbreviation, self.full_form) if f)

    def row(self) -> dict[str, str]:
        """As it stands in the CSV."""
        plain = {name: getattr(self, name) for name in REVIEW_COLUMNS if name != "colloquial"}
        return plain | {"colloquial": "|".join(self.colloquial)}


def read_query_log(path: str | Path) -> list[QueryRow]:
    """Rows in the file's order; only `query` is required. Blank queries are left out.

    Raises InputRefused when the file cannot be read or a count is no number.
    """
    rows, bad = [], []
    for number, row in enumerate(read_csv(path, ["query"]), 2):
        count, query = row.get("count") or "1", row["query"]
        if query and not (count.isascii() and count.isdigit()):
            bad.append(f"row {number}: count '{count}'")
        elif query:
            query_id = row.get("query_id") or f"q{number - 1:04d}"
            language = row.get("language") or language_of(query)
            rows.append(QueryRow(query_id, query, language, int(count), row.get("date", "")))
    if bad:
        raise InputRefused(f"{path}: a count must be a whole number; {'; '.join(bad[:10])}")
    return rows


def read_review(path: str | Path) -> list[ReviewRow]:
    """Rows in the file's order. Decisions are read in any case; forms of `colloquial` are joined by ``|``.

    Raises InputRefused, naming every row, for another decision, a row without a term, or one term decided twice.
    """
    rows: list[ReviewRow] = []
    bad: list[str] = []
    seen: dict[str, tuple[int, str]] = {}
    for number, row in enumerate(read_csv(path, ["decision", "standard_term"]), 2):
        decision, term = row["decision"].lower(), row["standard_term"]
        if not term and not any(row.values()):
            continue
        if decision not in (*DECISIONS, ""):
            bad.append(f"row {number}: decision '{row['decision']}' is none of {', '.join(DECISIONS)} or empty")
        elif not term:
            bad.append(f"row {number}: no standard_term")
        elif decision and seen.get(term.lower(), (0, decision))[1] != decision:
            bad.append(f"row {number}: '{term}' was decided otherwise in row {seen[term.lower()][0]}")
        if decision:
            seen.setdefault(term.lower(), (number, decision))
        forms = tuple(f.strip() for f in row.get("colloquial", "").split("|") if f.strip())
        rest = [row.get(name, "") for name in ("abbreviation", "full_form")]
        rows.append(ReviewRow(decision, term, *rest, forms, row.get("tag", ""), row.get("note", "")))
    if bad:
        raise InputRefused(f"{path}: correct these rows and run again:\n" + "\n".join(bad))
    return rows


def write_review(path: str | Path, rows: Sequence[Mapping[str, str] | ReviewRow]) -> None:
    """Write the review for a spreadsheet (UTF-8 with BOM); `read_review` gives the same rows back."""
    write_csv(path, [r.row() if isinstance(r, ReviewRow) else r for r in rows], REVIEW_COLUMNS)
