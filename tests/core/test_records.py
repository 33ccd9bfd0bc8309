"""Records: frozen, closed, and refused when what is required is missing."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ragbuild.core.records import Chunk, Document, EvalPair, ExpertCase, TermEntry, document_key, index_text
from tests.conftest import make_chunks, make_document

PARENT, CHILD = make_chunks(["Reset the password."])
REQUIRED = (
    "chunk_id", "chapter", "breadcrumb", "page", "page_end", "content", "span", "n_tokens", "doc_id", "doc_version",
    "product_model", "kb", "doc_type", "status", "doc_source", "language",
)  # fmt: skip
MAY_BE_EMPTY = {"parent_id", "child_ids", "section", "tag", "effective_date", "image_ids", "table_header"}


def test_what_a_chunk_requires_is_what_the_method_says():
    assert {name for name, field in Chunk.model_fields.items() if field.is_required()} == set(REQUIRED)
    assert set(Chunk.model_fields) - set(REQUIRED) == MAY_BE_EMPTY


@pytest.mark.parametrize("field", REQUIRED)
def test_a_chunk_without_a_required_field_is_refused(field: str):
    data = CHILD.model_dump()
    del data[field]
    with pytest.raises(ValidationError, match=field):
        Chunk.model_validate(data)


@pytest.mark.parametrize(
    "bad",
    [
        {"content": " \n"}, {"doc_version": ""}, {"product_model": ()}, {"product_model": ("",)}, {"page": 0},
        {"page": 3, "page_end": 2}, {"span": (4, 4)}, {"span": (-1, 3)}, {"n_tokens": 0}, {"status": "old"},
        {"effective_date": "2026-13-01"}, {"child_ids": ("c",)}, {"colour": "red"}, {"kb": "  "},
    ],
)  # fmt: skip
def test_a_chunk_that_contradicts_itself_is_refused(bad: dict):
    with pytest.raises(ValidationError):
        Chunk.model_validate(CHILD.model_dump() | bad)


@pytest.mark.parametrize("record", [PARENT, make_document(), TermEntry(standard_term="SSO")])
def test_records_are_frozen_and_closed(record):
    name = next(iter(type(record).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(record, name, "x")
    with pytest.raises(ValidationError, match="extra"):
        type(record).model_validate(record.model_dump() | {"colour": "red"})


def test_parent_and_child():
    assert PARENT.is_parent and not CHILD.is_parent
    assert PARENT.child_ids == (CHILD.chunk_id,) and CHILD.parent_id == PARENT.chunk_id
    assert PARENT.content[slice(*CHILD.span)] == CHILD.content


def test_the_key_of_a_document_does_not_depend_on_the_order_of_models():
    first = make_document(product_model=["LG-900", "LG-500"], doc_version="v3.4", kb="gateways")
    assert first.key == "gateways/guide/v3.4/LG-500+LG-900"
    assert first.key == document_key("gateways", "guide", "v3.4", ["LG-500", "LG-900"])
    assert make_chunks(["text"], first)[0].doc_key == first.key


def test_defaults_of_a_document():
    document = Document(doc_id="a", doc_source="a.md", title="A", language="en", content_hash="0")
    assert document.key == "default/a/unversioned/all"
    assert (document.status, document.supersedes, document.effective_date) == ("active", None, None)


def test_index_text_adds_what_is_not_the_documents_text():
    chunk = CHILD.model_copy(update={"breadcrumb": "Guide > Reset", "table_header": "| code | meaning |"})
    assert index_text(chunk) == "Guide > Reset\n| code | meaning |\nReset the password."
    assert index_text(CHILD) == "Guide > Chapter\nReset the password."
    assert chunk.content == "Reset the password."


def test_forms_of_a_term():
    entry = TermEntry(
        standard_term="单点登录", abbreviation="SSO", full_form="单点登录", colloquial=("一键登录", "SSO")
    )
    assert entry.formal == ("单点登录", "SSO")
    assert entry.forms == ("单点登录", "SSO", "一键登录")


def test_an_eval_pair_takes_the_methods_types_only():
    pair = {"query": "q", "gt_answer": "a", "query_type": "factual", "gen_source": "single_chunk", "pair_id": "1"}
    pair |= {"gt_spans": [{"doc_key": "kb/d/v1/all", "start": 0, "end": 3}], "language": "en"}
    assert EvalPair.model_validate(pair).gt_doc_ids == ()
    with pytest.raises(ValidationError, match="gt_spans"):
        EvalPair.model_validate(pair | {"gt_spans": []})
    with pytest.raises(ValidationError, match="query_type"):
        EvalPair.model_validate(pair | {"query_type": "opinion"})


def test_an_expert_case_has_ground_truth_or_is_not_answerable():
    place = {"doc_source": "a.md", "pages": [1]}
    case = {"case_id": "1", "query": "q", "language": "en", "reference_answer": "a", "ground": [place]}
    assert ExpertCase.model_validate(case).ground[0].quotes == ()
    for wrong in ({"ground": []}, {"answerable": False}, {"given_answer": "x"}, {"human_score": 1}, {"kind": "odd"}):
        with pytest.raises(ValidationError):
            ExpertCase.model_validate(case | wrong)
    with pytest.raises(ValidationError, match="pages"):
        ExpertCase.model_validate(case | {"ground": [place | {"pages": []}]})
