"""The registry's records and the tables (SQLAlchemy 2 models) that hold them.

A PostgreSQL holds the rows of many workspaces, so every row carries its workspace. Times are ISO text with their zone,
since SQLite drops zones. A change of the tables is a new `SCHEMA_VERSION`.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ragbuild.core.records import Document, Record

SCHEMA_VERSION = 1


class Change(Record):
    """One document's new state, and why."""

    document: Document
    decision: str
    reason: str
    decided_by: str


class Run(Record):
    """One writing command; times are ISO with zone. Outcome: published, unchanged, failed, undone; None: not known."""

    id: str
    command: str
    why: str
    who: str
    host: str
    pid: int
    started: str
    base: int
    target: int
    outcome: str | None = None
    finished: str | None = None
    note: str = ""


class HistoryRow(Record):
    """One change of one document. No `from_status`: it was not there; no `to_status`: it is no longer there."""

    when: str
    key: str
    from_status: str | None
    to_status: str | None
    version: int
    decision: str
    reason: str
    decided_by: str
    run_id: str


class Queued(Record):
    """A document that waits for an expert's decision."""

    key: str
    doc_source: str
    content_hash: str
    suggestion: str
    reason: str
    signals: dict[str, str]
    since: str
    run_id: str


class Base(DeclarativeBase):
    """Columns of text are unbounded; lists and maps are JSON."""

    type_annotation_map = {str: sa.Text, list[str]: sa.JSON, dict[str, str]: sa.JSON}  # noqa: RUF012


class SchemaRow(Base):
    """One row: the version of these tables."""

    __tablename__ = "schema"
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class DocumentRow(Base):
    """A document's identity, which never changes; its states hang on it."""

    __tablename__ = "documents"
    workspace: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    kb: Mapped[str]
    doc_id: Mapped[str]
    doc_version: Mapped[str]
    __table_args__ = (sa.Index("documents_by_doc_id", "workspace", "doc_id"),)


class StateRow(Base):
    """A document's other fields, valid in the index versions from `valid_from` until before `valid_to`."""

    __tablename__ = "states"
    workspace: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    valid_from: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    valid_to: Mapped[int | None]
    product_model: Mapped[list[str]]  # in the document's own order; the key has them sorted
    doc_type: Mapped[str]
    status: Mapped[str]
    supersedes: Mapped[str | None]
    effective_date: Mapped[str | None]
    doc_source: Mapped[str]
    title: Mapped[str]
    language: Mapped[str]
    content_hash: Mapped[str]
    __table_args__ = (
        sa.ForeignKeyConstraint(["workspace", "key"], ["documents.workspace", "documents.key"]),
        sa.ForeignKeyConstraint(["workspace", "supersedes"], ["documents.workspace", "documents.key"]),
        sa.CheckConstraint("valid_to > valid_from"),
        sa.CheckConstraint("status in ('active', 'legacy', 'superseded')"),
        sa.Index("states_open", "workspace", "valid_to"),
        sa.Index("states_by_content", "workspace", "content_hash"),
    )


class RunRow(Base):
    """One writing command."""

    __tablename__ = "runs"
    number: Mapped[int] = mapped_column(primary_key=True)
    workspace: Mapped[str]
    id: Mapped[str]
    command: Mapped[str]
    why: Mapped[str]
    who: Mapped[str]
    host: Mapped[str]
    pid: Mapped[int]
    started: Mapped[str]
    base: Mapped[int]
    target: Mapped[int]
    outcome: Mapped[str | None]
    finished: Mapped[str | None]
    note: Mapped[str]
    __table_args__ = (sa.UniqueConstraint("workspace", "id"),)


class ChangeRow(Base):
    """One change of one document's state."""

    __tablename__ = "history"
    number: Mapped[int] = mapped_column(primary_key=True)
    workspace: Mapped[str]
    when: Mapped[str]
    key: Mapped[str]
    from_status: Mapped[str | None]
    to_status: Mapped[str | None]
    version: Mapped[int]
    decision: Mapped[str]
    reason: Mapped[str]
    decided_by: Mapped[str]
    run_id: Mapped[str]
    __table_args__ = (
        sa.ForeignKeyConstraint(["workspace", "key"], ["documents.workspace", "documents.key"]),
        sa.ForeignKeyConstraint(["workspace", "run_id"], ["runs.workspace", "runs.id"]),
        sa.Index("history_by_key", "workspace", "key"),
    )


class QueueRow(Base):
    """A document that waits for an expert; it isn't registered yet."""

    __tablename__ = "queue"
    workspace: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    doc_source: Mapped[str]
    content_hash: Mapped[str]
    suggestion: Mapped[str]
    reason: Mapped[str]
    signals: Mapped[dict[str, str]]
    since: Mapped[str]
    run_id: Mapped[str]
