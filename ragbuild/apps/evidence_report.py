"""A report of evidence alone: for each section fetch its figures, retrieve, draft, save; then Markdown and HTML.

A draft is saved only if the section's figures were fetched first and each stands in it once, with its source; a picture
that is not among them, or a quotation that is not the section's evidence, is refused.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ragbuild.apps.evidence import Evidence, Found, Ledger, find_evidence
from ragbuild.apps.evidence_build import Source, build_store
from ragbuild.apps.evidence_figures import (
    WORDS,
    as_url,
    escaped,
    images_in,
    insert_images,
    parser,
    quotations_in,
    refuse_unknown,
    source_line,
)
from ragbuild.apps.evidence_outline import Need, by_id, is_outline, load_outline, section_of
from ragbuild.apps.evidence_store import EvidenceStore
from ragbuild.apps.evidence_tables import Figure, SectionRow
from ragbuild.core.config import Config, ConfigView, EvidenceConfig
from ragbuild.core.errors import GateFailed, UsageError
from ragbuild.core.store import read_json, walk, write_bytes, write_json, write_text
from ragbuild.core.text import language_of
from ragbuild.models.embedders import Embedder

_PAGE_HTML = """<!DOCTYPE html>
<html lang="{language}"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title><style>
body {{ font: 16px/1.7 system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif; color: #17202b;
  max-width: 860px; margin: 0 auto; padding: 24px; }}
blockquote {{ margin: 18px 0 4px; padding: 2px 16px; border-left: 4px solid #0072b2; background: #f5f8fb; }}
em {{ color: #5a6675; font-size: 13px; font-style: normal; }} h2 {{ margin-top: 40px; border-top: 2px solid #d8dee6;
  padding-top: 16px; }} table {{ border-collapse: collapse; font-size: 14px; display: block; overflow-x: auto; }}
b {{ font-size: 14px; }}
th, td {{ border: 1px solid #d8dee6; padding: 3px 9px; text-align: left; }} img {{ display: block; max-width: 100%; }}
</style></head><body>
{body}</body></html>
"""


@dataclass(frozen=True)
class Fetched:
    """A section of the documents: its text, and every figure of its pages, captioned or not."""

    section: SectionRow
    text: str
    images: tuple[Figure, ...]


class Report:
    """The sections of one report while they are made. One ledger hands each snippet to one section; a figure stands in
    one section too: the first that is saved with it."""

    def __init__(
        self, store: EvidenceStore, company_id: str, needs: Sequence[Need], title: str = "", *, task_id: str = "",
        settings: EvidenceConfig | None = None,
    ) -> None:  # fmt: skip
        """Raises UsageError for names of chapters and sections that are unknown or ambiguous, all of them at once."""
        self.store, self.company_id, self.task_id = store, company_id, task_id or company_id
        self.needs, self.title, self.settings = {n.title: n for n in needs}, title or company_id, settings
        self.sections: dict[str, SectionRow | None] = {}
        store.figures(company_id)  # raises for a company that the store does not know
        problems = []
        for need in needs:
            try:
                self.sections[need.title] = section_of(store, self.task_id, need, company_id)
            except UsageError as error:
                problems.append(f"section '{need.title}': {error}")
        if problems:
            raise UsageError("\n".join(problems))
        self.language = language_of(" ".join([self.title, *self.needs]))
        self.words = WORDS.get(self.language, WORDS["en"])
        self.ledger, self.found, self.drafts = Ledger(), dict[str, Found](), dict[str, str]()
        self._fetched: dict[str, tuple[Figure, ...]] = {}
        self.refused: list[dict[str, str]] = []  # documents that the store could not read, and why
        self._placed: dict[str, str] = {}  # img_url -> title of the section that was saved with it

    def fetch_section(self, section_id: str, need_img: bool = True) -> Fetched:
        """A section's text and, with `need_img`, all its figures. Raises UsageError for an unknown id."""
        mine = [s for s in self.store.sections(self.task_id) if s.company_id == self.company_id]
        section = by_id(mine, section_id)
        images = tuple(self.store.figures(self.company_id, section)) if need_img else ()
        if need_img:
            self._fetched[section_id] = images
        return Fetched(section, self.store.text(section), images)

    def retrieve(self, title: str, limit_chapter: Any = None) -> Found:
        """The section's evidence; asked again, the same. `limit_chapter` is refused."""
        if title not in self.found or limit_chapter is not None:
            self.found[title] = find_evidence(
                self.store, self.company_id, self._need(title), settings=self.settings, ledger=self.ledger,
                section=self.sections[title], limit_chapter=limit_chapter,
            )  # fmt: skip
        return self.found[title]

    def images(self, title: str) -> list[Figure]:
        """The figures that this section's draft must hold: those fetched, without what another section was saved with.

        Raises GateFailed when they were not fetched.
        """
        self._need(title)
        section = self.sections[title]
        if section is None:
            return []
        if section.section_id not in self._fetched:
            raise GateFailed(
                f"section '{title}': its figures were not fetched; call fetch_section('{section.section_id}', "
                "need_img=True) before writing"
            )
        distinct = {f.img_url: f for f in reversed(self._fetched[section.section_id])}
        return [f for f in reversed(distinct.values()) if self._placed.get(f.img_url, title) == title]

    def draft(self, title: str) -> str:
        """The evidence as quotations with their sources, the figures in their places. Nothing is added to it."""
        found, words = self.retrieve(title), self.words
        parts = [f"## {escaped(title)}"]
        for item in (i for i in found.items if i.type == "text"):
            more = [*filter(None, [item.breadcrumb]), words["points"].format(item.points)]
            parts += [quotation(item), source_line(item.source, item.page_no, item.page_end, more, self.language)]
        if not found.items:
            terms = escaped(words["comma"].join(self.needs[title].terms))
            parts.append(f"*{words['none'].format(terms, found.retrieved)}*")
        return insert_images("\n\n".join(parts), self.images(title), self.language)

    def save(self, title: str, text: str) -> None:
        """Keep a section's text. Raises GateFailed, naming what is missing, unknown, or there twice."""
        due = self.images(title)
        refuse_unknown(text, due)
        drafts = [text, *(draft for other, draft in self.drafts.items() if other != title)]
        known = self.store.figures(self.company_id)  # what one section calls [a], another may point elsewhere
        refuse_unknown("\n\n".join(drafts), known)
        seen = images_in(text)
        missing = [f for f in due if as_url(f.img_url) not in seen]
        if missing:
            names = "; ".join(f"{f.caption or 'no caption'} (p{f.page_no}, {f.img_url})" for f in missing)
            raise GateFailed(f"section '{title}' is not saved: its text lacks {len(missing)} figure(s): {names}")
        if twice := next((url for url in seen if seen.count(url) > 1), None):
            raise GateFailed(f"section '{title}' is not saved: {twice} stands in it more than once")
        told = [line.strip() for line in text.split("\n")]
        for figure in due:
            line = source_line(figure.source, figure.page_no, language=self.language)
            if line not in told:
                raise GateFailed(
                    f"section '{title}' is not saved: {figure.img_url} has no line with its source: {line}"
                )
            told.remove(line)  # one for each
        lines = text.split("\n")
        quotable = [_quoted(item) for item in (self.found[title].items if title in self.found else ())]
        for start, end in quotations_in(text):
            quote = "\n".join(re.sub("^> ?", "", line) for line in lines[start:end]).strip()
            if not any(quote in whole for whole in quotable):
                raise GateFailed(f"section '{title}' is not saved: a quotation is not among its evidence: {quote[:80]}")
        self.drafts[title] = text
        self._placed = {url: t for url, t in self._placed.items() if t != title} | {f.img_url: title for f in due}

    def write_section(self, title: str) -> None:
        """Fetch, retrieve, draft and save one section."""
        self._need(title)
        if section := self.sections[title]:
            self.fetch_section(section.section_id, need_img=True)
        self.save(title, self.draft(title))

    def _need(self, title: str) -> Need:
        if title not in self.needs:
            raise UsageError(f"the outline has no section '{title}'; it has {', '.join(self.needs)}")
        return self.needs[title]

    def left_out(self) -> list[Figure]:
        """Figures of the company that no saved section holds: they stand outside of the outline's sections."""
        return [f for f in self.store.figures(self.company_id) if f.img_url not in self._placed]

    def markdown(self) -> str:
        """The saved sections in the outline's order; one that is not saved is named."""
        words = self.words
        count = sum(len(self.found[t].items) for t in self.drafts if t in self.found)
        parts = [f"# {escaped(self.title)}", f"*{words['head'].format(count, len(self._placed))}*"]
        for title in self.needs:
            parts.append(self.drafts.get(title, f"## {escaped(title)}\n\n*{words['unsaved']}*").strip())
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """One file that loads nothing: pictures are embedded, all text is escaped, scripts are forbidden."""
        by_url = {as_url(f.img_url): f.img_url for f in self.store.figures(self.company_id)}

        def embedded(match: re.Match[str]) -> str:
            url, caption = by_url[match.group(1)], match.group(2)
            data = base64.b64encode(self.store.image(url)).decode()
            kind = mimetypes.guess_type(url)[0] or "image/png"
            return f'<img src="data:{kind};base64,{data}" alt="{caption}"><b>{caption}</b>'

        body = re.sub(r'<img src="([^"]*)" alt="([^"]*)" />', embedded, parser(False).render(self.markdown()))
        body = body.replace("&lt;br&gt;", "<br>")  # the line breaks of table cells
        return _PAGE_HTML.format(language=self.language, title=escape(self.title), body=body)

    def summary(self) -> dict[str, Any]:
        """Sections with their evidence and figures, and what is left out, as plain data."""
        sections = []
        for title, need in self.needs.items():
            row, found = self.sections[title], self.found.get(title)
            sections.append({
                "title": title, "section_id": row.section_id if row else None, "saved": title in self.drafts,
                "keywords": need.keywords, "must_terms": need.must_terms, "message": found.message if found else "",
                "evidence": [i.model_dump(mode="json") for i in found.items] if found else [],
                "images": [url for url, owner in self._placed.items() if owner == title],
            })  # fmt: skip
        left = [f.model_dump(mode="json", exclude={"at", "doc_key"}) for f in self.left_out()]
        about = {"title": self.title, "company_id": self.company_id, "task_id": self.task_id}
        return {**about, "sections": sections, "images_left_out": left, "refused": self.refused}

    def write(self, out: Path) -> None:
        """``report.md`` with ``images/`` beside it, ``report.html``, ``evidence.json``; a former report's go."""
        former = read_json(out / "evidence.json") if (out / "evidence.json").is_file() else {}
        for url in [url for row in former.get("sections", ()) for url in row["images"]]:
            if Path(url).parent == Path("images"):  # and nothing else in that folder
                (out / url).unlink(missing_ok=True)
        for url in self._placed:
            write_bytes(out / url, self.store.image(url))
        write_text(out / "report.md", self.markdown())
        write_text(out / "report.html", self.html())
        write_json(out / "evidence.json", self.summary())


def quotation(item: Evidence) -> str:
    """The item's text as a Markdown quotation."""
    return "\n".join(f"> {line}".rstrip() for line in _quoted(item).split("\n"))


def _quoted(item: Evidence) -> str:
    """Word for word, under the header of its table where it goes on with one; HTML but line breaks shows as text,
    and so do pictures and the definitions of links, whose uses may stand in another quotation."""
    whole = f"{item.table_header}\n{item.content}" if item.table_header else item.content
    whole = re.sub(r"(?<=!)(?=\[)|(?<=\])(?=:)", r"\\", whole)
    return re.sub(r"<(?=[A-Za-z/!?])(?!br ?/?>)", "&lt;", whole)


def build_report(
    documents: Sequence[Path], outline: Path, company_id: str, out: Path, config: Config | ConfigView, *,
    only: Sequence[str] = (), embedder: Embedder | None = None,
) -> Report:  # fmt: skip
    """Index the documents in ``<out>/store``, write every section of the outline (or those in `only`) from those of the
    company (by default the outline's), and the report's files in `out`. Raises UsageError, InputRefused."""
    plan = load_outline(outline)
    company = company_id or plan.company_id
    if not company:
        raise UsageError(f"{outline} names no company_id; give one with --company")
    titles = [need.title for need in plan.sections]
    if unknown := [name for name in only if name not in titles]:
        raise UsageError(f"the outline has no section '{unknown[0]}'; it has {', '.join(titles)}")
    own = [out / name for name in ("store", "images", "report.md", "report.html", "evidence.json")]
    others = [file for folder in documents if folder.is_dir() for file in walk(folder) if is_outline(file)]
    source = Source(company, documents, plan.task_id, apart_from=[outline, *own, *others])
    store = build_store(out / "store", [source], config, embedder)
    needs = [need for need in plan.sections if not only or need.title in only]
    report = Report(store, company, needs, plan.title, task_id=plan.task_id, settings=config.evidence)
    report.refused = store.refused
    for need in needs:
        report.write_section(need.title)
    report.write(out)
    return report
