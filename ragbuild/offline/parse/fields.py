"""Document fields: front matter, then the sidecar ``documents.csv``, then stated rules; what was inferred is listed."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from ragbuild.core.errors import DocumentRefused, UsageError
from ragbuild.core.records import Document
from ragbuild.core.store import inside, read_csv
from ragbuild.core.text import language_of
from ragbuild.offline.parse.base import ParsedDocument

FIELDS = tuple(name for name in Document.model_fields if name not in ("doc_source", "content_hash"))
Row = tuple[int, dict[str, str]]  # line of the sidecar, its values

# doc_type by the first of these that the file's name holds
_TYPES = (
    ("release_notes", "release.?note|changelog|发布说明|版本说明"), ("faq", "faq|常见问题|问答"),
    ("service_bulletin", "bulletin|公告|通报"), ("troubleshooting", "troubleshoot|故障|排错|排障"),
    ("installation_guide", "install|安装"), ("backup_guide", "backup|recovery|备份|恢复"),
    ("security_guide", "security|hardening|安全|加固"), ("api_reference", "(?<![a-z])api(?![a-z])|接口"),
    ("spec_sheet", "(?<![a-z])spec|datasheet|规格"), ("training", "training|培训"),
    ("admin_guide", "admin|管理员"), ("user_guide", "user.?(guide|manual|portal)|用户手册|使用手册"),
    ("guide", "guide|manual|handbook|手册|指南"), ("report", "report|报告"),
)  # fmt: skip
_VERSION = re.compile(  # v4.2, 3.4.1, v2, Rev-B; not the 2206.01062 of a paper
    r"(?<![a-z\d.])(?:v\d{1,3}(?:\.\d{1,3}){0,3}|\d{1,2}(?:\.\d{1,3}){1,3}|rev[-_. ]?[a-z\d]{1,2})(?![a-z\d])", re.I
)


def read_sidecar(folder: Path, name: str) -> tuple[dict[str, Row], list[str]]:
    """Rows of the sidecar by `doc_source`, and warnings (unknown column, repeated row, file that is not there)."""
    if not (folder / name).is_file():
        return {}, []
    rows: dict[str, Row] = {}
    warnings = []
    for line, row in enumerate(read_csv(folder / name, required=["doc_source"]), 2):
        source, where = row.pop("doc_source").replace("\\", "/").removeprefix("./"), f"{name} line {line}"
        if line == 2 and (unknown := sorted(set(row) - set(FIELDS))):
            warnings.append(f"{name}: unknown column(s) {', '.join(unknown)} ignored; it takes {', '.join(FIELDS)}")
        if source in rows:
            warnings.append(f"{where}: a second row for '{source}' was ignored; the first is line {rows[source][0]}")
        elif not source or not _is_file(folder, source):
            warnings.append(f"{where}: there is no file {source[:100]!r} in {folder}; the row was ignored")
        else:
            rows[source] = (line, {key: value for key, value in row.items() if key in FIELDS and value})
    return rows, warnings


def _is_file(folder: Path, source: str) -> bool:
    try:
        return inside(folder, source).is_file()
    except (OSError, ValueError, UsageError):  # a name too long, a NUL byte, a path that leads outside
        return False


def resolve(
    source: str, parsed: ParsedDocument, row: Row | None, content_hash: str, twin: bool = False
) -> tuple[Document, list[dict[str, str]], list[str]]:
    """The document's record, what was inferred (doc_source, field, value, rule), and warnings.

    `twin`: another file has the same path but for its extension, so that an inferred doc_id keeps the extension.
    Raises DocumentRefused, naming the front matter or the line of the sidecar, when a given value is not valid.
    """
    front = parsed.metadata if parsed.parser == "markdown" else {}
    unknown = sorted(set(front) - set(FIELDS))
    warnings = [f"{source}: unknown front matter key(s) {', '.join(unknown)} ignored"] if unknown else []
    line, given = row or (0, {})
    values: dict[str, Any] = given | {key: front[key] for key in FIELDS if front.get(key)}
    rules = {key: found for key, found in _rules(source, parsed, twin).items() if key not in values}
    inferred = [
        {"doc_source": source, "field": key, "value": found[0], "rule": found[1]} for key, found in rules.items()
    ]
    values |= {key: value for key, (value, _) in rules.items()}
    values["product_model"] = tuple(
        model.strip() for model in re.split("[;；]", values["product_model"]) if model.strip()
    )
    try:
        return Document(doc_source=source, content_hash=content_hash, **values), inferred, warnings
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            key = str(problem["loc"][0])
            where = "front matter" if key in front else f"sidecar line {line}" if key in given else "inferred"
            problems.append(f"{key} '{problem['input']}' ({where}): {problem['msg']}")
        raise DocumentRefused("invalid document fields: " + "; ".join(problems)) from None


def _rules(source: str, parsed: ParsedDocument, twin: bool) -> dict[str, tuple[str, str]]:
    """Each field that may be inferred: (value, the rule that gives it)."""
    path = PurePosixPath(source)
    stem = path.name.removesuffix(path.suffix)
    version, kind = _VERSION.search(stem), next((name for name, words in _TYPES if re.search(words, stem, re.I)), "")
    plain = re.sub(r"[-_. ]{2,}", "-", stem.replace(version.group(), "")).strip("-_. ") if version else stem
    doc_id = re.sub(r"\s+", "-", ".".join([*path.parts[:-1], plain or stem])) + (path.suffix if twin else "")
    start = re.sub(r"^```.*?^```", "", parsed.markdown[:5000], flags=re.S | re.M)
    heading = re.search(r"^# +(.+)$", start, re.M)
    title = heading.group(1).strip(" *") if heading else parsed.metadata.get("title", "")
    words = re.sub(r"\]\([^()\n]*\)|https?://\S+", "", parsed.markdown)  # an address says nothing about the language
    return {
        "doc_id": (doc_id, f"relative path{' without the version' * bool(version)}{' with the extension' * twin}"),
        "doc_version": (
            re.sub(r"^(?=\d)", "v", version.group()) if version else "unversioned",
            "pattern in the file name" if version else "default",
        ),
        "product_model": ("all", "default"),
        "kb": ("default", "default"),
        "doc_type": (kind or "document", "keyword in the file name" if kind else "default"),
        "status": ("active", "default"),
        "title": (title or stem, "first heading" if heading else "core properties" if title else "file name"),
        "language": (language_of(words), "script of the text"),
    }
