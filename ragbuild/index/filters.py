"""What a search may return: conditions on the chunk's own copies of its document's fields, applied before ranking."""

from __future__ import annotations

from dataclasses import dataclass, replace

FIELDS = ("status", "product_model", "doc_version", "doc_type", "kb", "tag")
ANY_MODEL = "all"  # a document for all models passes every model filter


@dataclass(frozen=True)
class Filter:
    """Allowed values by field; an empty tuple lets everything pass. A list field passes when one value is allowed.

    `naming`: tokens. A chunk of another version passes the `doc_version` condition when its text holds one of them, so
    that release notes may tell about the version that a question names.
    """

    status: tuple[str, ...] = ("active",)
    product_model: tuple[str, ...] = ()
    doc_version: tuple[str, ...] = ()
    doc_type: tuple[str, ...] = ()
    kb: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    naming: tuple[str, ...] = ()

    def conditions(self) -> dict[str, tuple[str, ...]]:
        """The fields that restrict something, with the values that pass (``all`` added for product models)."""
        out = {field: getattr(self, field) for field in FIELDS if getattr(self, field)}
        if "product_model" in out:
            out["product_model"] = (*out["product_model"], ANY_MODEL)
        return out

    def with_(self, **values: tuple[str, ...]) -> Filter:
        return replace(self, **values)


EVERYTHING = Filter(status=())
