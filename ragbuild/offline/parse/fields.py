"""Document fields: front matter, then the sidecar ``documents.csv``, then stated rules; what was inferred is listed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from ragbuild.core.errors import DocumentRefused
from ragbuild.core.records import Document
from ragbuild.core.store import read_csv
from ragbuild.core.text import language_of
from ragbuild.offline.parse.base import ParsedDocument

FIELDS = (
    "doc_id", "doc_version", "product_model", "kb", "doc_type", "status", "supersedes", "effective_date", "title", "language",
)  # fmt: skip
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
_VERSION = re.compile(
    r"(?<![\w.])(?:v\d{1,3}(?:\.\d{1,3}){0,3}|\d{1,2}(?:\.\d{1,3}){1,3})(?![\w])|(?<![a-z0-9])rev[-_. ]?[a-z0-9]{1,2}(?![a-z0-9])",
    re.I,
)


def read_sidecar(folder: Path, name: str) -> tuple[dict[str, Row], list[str]]:
    """Rows of the sidecar by `doc_source`, and warnings (unknown column, repeated row, file that is not there)."""
    path, rows, warnings = folder / name, {}, []
    if not path.is_file():
        return {}, []
    for line, row in enumerate(read_csv(path, required=["doc_source"]), 2):
        source = row.pop("doc_source").replace("\\", "/").removeprefix("./")
        if line == 2 and (unknown := sorted(set(row) - set(FIELDS))):
            warnings.append(
                f"{name}: unknown column(s) {', '.join(unknown)} ignored; it takes doc_source, {', '.join(FIELDS)}"
            )
        if not source:
            warnings.append(f"{name} line {line}: doc_source is empty; the row was ignored")
        elif source in rows:
            warnings.append(
                f"{name} line {line}: a second row for '{source}' (first: line {rows[source][0]}) was ignored"
            )
        elif not (folder / source).is_file():
            warnings.append(f"{name} line {line}: there is no file '{source}' in {folder}")
        else:
            rows[source] = (line, {key: value for key, value in row.items() if key in FIELDS and value})
    return rows, warnings


def resolve(
    source: str, parsed: ParsedDocument, row: Row | None, sidecar: str, content_hash: str, twin: bool = False
) -> tuple[Document, list[dict[str, str]], list[str]]:
    """The document's record, what was inferred (doc_source, field, value, rule), and warnings.

    `twin`: another file has the same path but for its extension, so that an inferred doc_id keeps the extension.
    Raises DocumentRefused, naming the line of the sidecar or the front matter, when a given value is not valid.
    """
    front = parsed.metadata if parsed.parser == "markdown" else {}
    unknown = sorted(set(front) - set(FIELDS))
    warnings = [f"{source}: unknown front matter key(s) {', '.join(unknown)} ignored"] if unknown else []
    line, given = row or (0, {})
    values: dict[str, Any] = {**given, **{key: front[key] for key in FIELDS if front.get(key)}}
    inferred = []
    for field, (value, rule) in _rules(source, parsed, twin).items():
        if field not in values:
            values[field] = value
            inferred.append({"doc_source": source, "field": field, "value": value, "rule": rule})
    values["product_model"] = tuple(m.strip() for m in re.split("[;；]", values["product_model"]) if m.strip())
    try:
        return Document(doc_source=source, content_hash=content_hash, **values), inferred, warnings
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            field = str(problem["loc"][0])
            where = "front matter" if field in front else f"{sidecar} line {line}" if field in given else "inferred"
            problems.append(f"{field} '{problem['input']}' ({where}): {problem['msg']}")
        raise DocumentRefused("invalid document fields: " + "; ".join(problems)) from None


def _rules(source: str, parsed: ParsedDocument, twin: bool) -> Mapping[str, tuple[str, str]]:
    """Each field that may be inferred: (value, the rule that gives it)."""
    path = PurePosixPath(source)
    stem = path.name.removesuffix(path.suffix)
    version, kind = _VERSION.search(stem), next((name for name, words in _TYPES if re.search(words, stem, re.I)), "")
    plain = re.sub(r"[-_. ]{2,}", "-", stem.replace(version.group(), "")).strip("-_. ") if version else stem
    doc_id = re.sub(r"\s+", "-", ".".join([*path.parts[:-1], plain or stem])) + (path.suffix if twin else "")
    heading = re.search(r"^# +(.+)$", re.sub(r"^```.*?^```", "", parsed.markdown[:5000], flags=re.S | re.M), re.M)
    title = heading.group(1).strip(" *") if heading else parsed.metadata.get("title", "")
    how = "first level-1 heading" if heading else "core properties" if title else "file name"
    version_value = re.sub(r"^(?=\d)", "v", version.group()) if version else "unversioned"
    return {
        "doc_id": (
            doc_id,
            "relative path" + (" without the version" if version else "") + (" with the extension" if twin else ""),
        ),
        "doc_version": (version_value, "pattern in the file name" if version else "default"),
        "product_model": ("all", "default"),
        "kb": ("default", "default"),
        "doc_type": (kind or "document", "keyword in the file name" if kind else "default"),
        "status": ("active", "default"),
        "title": (title or stem, how),
        "language": (language_of(parsed.markdown), "script of the text"),
    }
