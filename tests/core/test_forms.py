from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.forms import (
    FormMatcher,
    NearHan,
    fold,
    form_key,
    plural,
    singular,
    sounds_alike,
    typo_distance,
    units,
)


def found(matcher: FormMatcher[str], text: str) -> list[tuple[str, str]]:
    return [(text[start:end], value) for start, end, value in matcher.find(text)]


def test_fold_keeps_every_position():
    assert fold("ＬＧ－500 ﬁle Ⅳ") == "lg-500 ﬁle Ⅳ"  # what would become two characters stays as it is


@given(st.text(max_size=60))
def test_fold_and_units_keep_spans(text):
    assert len(fold(text)) == len(text)
    spans = [(start, end) for _, start, end in units(text)]
    assert spans == sorted(spans) and all(
        fold(text)[a:b] == u for (u, _, _), (a, b) in zip(units(text), spans, strict=True)
    )


def test_longest_form_wins_and_nothing_overlaps():
    matcher = FormMatcher([("SSO", "sso"), ("SSO server", "idp"), ("单点登录", "sso"), ("登录", "sign-in")])
    assert found(matcher, "the SSO server and SSO，单点登录 登录") == [
        ("SSO server", "idp"), ("SSO", "sso"), ("单点登录", "sso"), ("登录", "sign-in"),
    ]  # fmt: skip


def test_latin_forms_match_whole_words_in_any_spelling():
    matcher = FormMatcher([("Single Sign-On", 1), ("HA", 2), ("backup code", 3), ("policy", 4)])
    assert [v for _, _, v in matcher.find("SINGLE sign on; ha灯; has; Backup  codes; policies")] == [1, 2, 3, 4]
    assert matcher.find("single, sign on; shah; single\n\n\nsign on") == []


def test_han_forms_need_no_word_boundary_but_no_gap():
    matcher = FormMatcher([("备份目标", 1), ("加固 清单", 2)])
    assert [v for _, _, v in matcher.find("把备份目标改了，加固 清单")] == [1, 2]
    assert matcher.find("备份，目标；加固清单") == []


def test_the_first_of_two_equal_forms_counts_and_one_letter_is_no_form():
    assert [v for _, _, v in FormMatcher([("rate limit", 1), ("Rate-Limit", 2), ("C", 3)]).find("rate limit C")] == [1]


def test_singular_and_plural():
    assert [singular(w) for w in ("codes", "policies", "addresses", "boxes", "status", "access", "tls", "用户")] == [
        "code", "policy", "address", "box", "status", "access", "tls", "用户",
    ]  # fmt: skip
    pairs = {"clause": "clauses", "case": "cases", "cause": "causes", "close": "closes", "size": "sizes", "use": "uses",
             "response": "responses", "cache": "caches", "batch": "batches", "bus": "buses", "status": "statuses",
             "alias": "aliases", "pass": "passes", "fax": "faxes", "hash": "hashes", "release": "releases"}  # fmt: skip
    assert {singular(many): many for many in pairs.values()} == pairs
    assert [plural(w) for w in ("code", "policy", "key", "box")] == ["codes", "policies", "keys", "boxes"]
    assert form_key("Break-Glass  Account") == "break glass account"


def test_near_han_finds_one_wrong_character_that_sounds_alike():
    near = NearHan([("单点登录", "sso"), ("全量备份", "full")], min_length=4)
    assert near.find("报单点登陆") == [(1, 5, "单点登录", "sso")]
    assert near.find("增量备份") == []  # 增 and 全 do not sound alike: another thing, no misspelling
    assert near.find("单点登录") == []
    assert sounds_alike("复", "付") and not sounds_alike("复", "岚")


def test_typo_distance_depends_on_length():
    assert typo_distance("raduis", "radius") == 1  # two neighbours swapped
    assert typo_distance("certifcate", "certificate") == 1
    assert typo_distance("authentification", "authentication") == 2
    assert typo_distance("port", "part") is None  # too short to tell
    assert typo_distance("xadius", "radius") is None  # people get the first letter right
    assert typo_distance("radish", "radius") is None
