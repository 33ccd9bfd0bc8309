"""Routing: what a question names narrows the search; what it does not name is left alone."""

from __future__ import annotations

import pytest

from ragbuild.core.config import RouteConfig
from ragbuild.core.records import TermEntry
from ragbuild.index.filters import Filter
from ragbuild.online.route import Router
from tests.conftest import make_document

DOCUMENTS = [
    make_document("admin", doc_version="v4.2", product_model=["LG-500", "LG-900"], kb="gateways"),
    make_document("admin", doc_version="v3.4", product_model=["LG-500"], status="legacy", kb="gateways"),
    make_document("install", doc_version="4.2", product_model=["LG-200"], kb="gateways"),
    make_document("faq", doc_version="2026-01", doc_type="faq", language="zh", kb="portal"),
    make_document("notes", doc_version="4.2", doc_type="release_notes", kb="gateways"),
    make_document("pro", doc_version="v1.0", product_model=["Pro", "ＬＧ－７００"], status="superseded", kb="hr"),
]
TERMS = [
    TermEntry(standard_term="单点登录", abbreviation="SSO", tag="login"),
    TermEntry(standard_term="backup", tag="storage"),
    TermEntry(standard_term="gateway"),
]


def route(query: str, where: Filter | None = None, ask=None, **config):
    return Router(DOCUMENTS, TERMS, RouteConfig(**config), ask)(query, where)


def values(query: str, field: str, where: Filter | None = None, **config) -> tuple[str, ...]:
    return getattr(route(query, where, **config).where, field)


@pytest.mark.parametrize(
    "query", ["How do I reset the password?", "怎么重置密码", "The problem of the protocol", "10.3.4.1", ""]
)
def test_what_names_nothing_gets_the_default_filter(query: str):
    routing = route(query)
    assert routing.where == Filter() and routing.where.status == ("active",)
    assert routing.decisions == ()


@pytest.mark.parametrize(
    "spelling", ["LG-500", "lg500", "LG 500", "lg_500", "LG-500s", "ＬＧ－５００", "(LG-500)", "配置LG-500的证书"]
)
def test_models_may_be_written_loosely(spelling: str):
    assert values(f"backup of {spelling}", "product_model") == ("LG-500",)


@pytest.mark.parametrize("other", ["LG-5000", "LG-50", "XLG-500", "LG-500HW", "1LG-500", "problem", "improve"])
def test_another_model_is_another_model(other: str):
    assert values(f"backup of {other} please", "product_model") == ()


def test_two_models_and_models_in_other_forms():
    assert values("LG-500和LG 200有什么区别", "product_model") == ("LG-200", "LG-500")
    assert values("lg700 fan", "product_model") == ("ＬＧ－７００",), "as the documents write it"
    assert values("the Pro edition", "product_model") == ("Pro",)


@pytest.mark.parametrize(
    "query",
    [
        "In 3.4, how do I reset it?",
        "v3.4 reset",
        "3.4版本怎么重置",
        "版本3.4怎么重置",
        "在 V3.4 中",
        "reset (3.4)",
        "version 3.4.",
    ],
)
def test_an_old_version_alone_lets_legacy_in_and_is_kept_to(query: str):
    routing = route(query)
    assert set(routing.where.status) == {"active", "legacy"}
    assert routing.where.doc_version == ("v3.4",) and routing.where.naming == ("3.4",)
    assert [d.layer for d in routing.decisions] == ["status", "doc_version"] and all(
        d.reason for d in routing.decisions
    )


def test_a_superseded_version_lets_superseded_in():
    assert values("what was in 1.0?", "status") == ("active", "superseded")


def test_two_spellings_of_one_version_are_one():
    documents = [
        make_document("a", doc_version="v3.4", status="legacy"),
        make_document("b", doc_version="3.4", status="legacy"),
    ]
    routing = Router(documents, [], RouteConfig())("in 3.4")
    assert routing.where.doc_version == ("v3.4", "3.4")


@pytest.mark.parametrize("query", ["difference between 3.4 and 4.2", "从3.4升级到4.2要多久", "v4.2 instead of v3.4"])
def test_two_versions_relax_the_status_only(query: str):
    routing = route(query)
    assert set(routing.where.status) == {"active", "legacy"} and routing.where.doc_version == ()


@pytest.mark.parametrize(
    "query", ["the previous version of the manual", "in older releases", "旧版怎么做", "老系统怎么重置", "以前的版本"]
)
def test_asking_for_an_older_version_lets_legacy_in(query: str):
    routing = route(query)
    assert routing.where == Filter(status=("active", "legacy"))


@pytest.mark.parametrize(
    "query",
    ["4.2 reset", "in 4.2版本", "firmware 3.4.1", "3.44", "address 10.3.4.2", "version 9.9", "v3.4x", "old password"],
)
def test_what_is_no_old_version_changes_nothing(query: str):
    assert values(query, "status") == ("active",) and values(query, "doc_version") == ()


@pytest.mark.parametrize(
    ("query", "doc_type"),
    [
        ("What do the release notes say about SSO?", ("release_notes",)), ("发行说明里有什么", ("release_notes",)),
        ("看看常见问题", ("faq",)), ("is it in the FAQ or the release notes?", ()), ("which guide?", ()),
    ],
)  # fmt: skip
def test_a_kind_of_document(query: str, doc_type: tuple[str, ...]):
    assert values(query, "doc_type") == doc_type


@pytest.mark.parametrize(
    ("query", "kb"),
    [
        ("search the portal knowledge base", ("portal",)),
        ("in portal kb", ("portal",)),
        ("查portal知识库", ("portal",)),
        ("hr 知识库里的假期", ("hr",)),
        ("the portal does not open", ()),
        ("portal kb and hr kb", ()),
        ("three kb of text", ()),
    ],
)
def test_a_knowledge_base(query: str, kb: tuple[str, ...]):
    assert values(query, "kb") == kb


def test_tags_are_a_switch_and_match_whole_words():
    assert values("SSO fails", "tag") == ()
    assert values("SSO fails", "tag", tag=True) == ("login",)
    assert values("单点登录失败", "tag", tag=True) == ("login",)
    assert values("a lesson, assorted", "tag", tag=True) == (), "'sso' inside a word is no term"
    assert values("backup of SSO settings", "tag", tag=True) == (), "two subsystems: none is chosen"
    assert values("gateway", "tag", tag=True) == ()


def test_the_callers_filter_is_never_loosened():
    where = Filter(
        status=("legacy",), product_model=("LG-900",), doc_version=("v4.2",), doc_type=("guide",), kb=("gateways",)
    )
    routing = route("LG-500 in 3.4, see the FAQ in portal kb, old version", where)
    assert routing.where == where and routing.decisions == ()
    partly = route("LG-500 in 3.4", Filter(product_model=("LG-900",))).where
    assert partly.product_model == ("LG-900",) and partly.doc_version == ("v3.4",)


def test_layers_are_switches():
    query = "LG-500 in 3.4, see the FAQ"
    assert route(query, enabled=False).where == Filter() and route(query, enabled=False).decisions == ()
    where = Filter(kb=("hr",))
    assert route(query, where, enabled=False).where == where
    assert route(query, knowledge_base=False).where.doc_type == ()
    only = route(query, model_version=False).where
    assert (only.product_model, only.doc_version, only.status, only.doc_type) == ((), (), ("active",), ("faq",))


def test_a_model_may_route_and_names_known_values_only():
    asked = []

    def ask(query, known):
        asked.append((query, known))
        return {
            "product_model": ["LG-500", "LG-1"],
            "kb": ["moon"],
            "status": ["legacy"],
            "colour": ["red"],
            "doc_version": [],
        }

    routing = route("Wie geht das mit LG-900?", ask=ask, use_llm=True)
    assert routing.where == Filter(product_model=("LG-500",), status=("legacy",))
    assert [d.reason for d in routing.decisions] == ["chosen by the language model"] * 2
    query, known = asked[0]
    assert query == "Wie geht das mit LG-900?" and known["kb"] == ["gateways", "hr", "portal"]
    assert known["status"] == ["active", "legacy"] and "all" not in known["product_model"]
    assert route("LG-900", ask=ask).where.product_model == ("LG-900",), "only when it is switched on"
    assert len(asked) == 1


def test_no_documents():
    assert Router([], [], RouteConfig(tag=True))("LG-500 in 3.4").where == Filter()
