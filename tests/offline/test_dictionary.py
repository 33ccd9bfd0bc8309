from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ragbuild.core.config import DictionaryConfig
from ragbuild.core.errors import InputRefused
from ragbuild.core.forms import form_key
from ragbuild.core.records import Document, TermEntry
from ragbuild.core.text import jieba_tokenizer
from ragbuild.offline.candidates import HanWords, statistical_candidates, token_runs
from ragbuild.offline.dictionary import (
    QueryRow,
    ReviewRow,
    build_dictionary,
    load_dictionary,
    read_query_log,
    read_review,
    write_dictionary,
    write_review,
)
from ragbuild.offline.entities import find_definitions, find_entities, long_form, plain

ENGLISH = """
# Sign-in guide

## Idle timeout

Single Sign-On (SSO) uses an identity provider (IdP). SSO is optional, SSO can be enforced. The idle timeout is 15
minutes; the idle timeout of the portal differs. When the identity provider is lost, use the recovery key. The recovery
key is on the sealed card. Run `backup run --profile full` or `backup list`. The LG-500 and the LG-900 speak TLS 1.2 and
SAML 2.0. Error E1042 means that the clock skew is too large; the clock skew is checked with NTP.

## Recovery key

The recovery key opens the break-glass account. The LG-500 reports error E1042. Every recovery key is printed once.
`backup run` writes a file, `backup list` shows it. The TLS 1.2 profile is the default of the LG-500.
"""
CHINESE = """
# 登录手册

## 恢复密钥

单点登录（SSO）由身份提供者（IdP）完成。单点登录失败时检查身份提供者。恢复密钥在密封卡上，恢复密钥只能用一次。
启用多因素认证（MFA）之后，多因素认证对所有人生效。审计日志保存 180 天，审计日志可以外发。报错 E1042 表示时钟偏差过大。

## 审计日志

审计日志里能看到单点登录的记录。时钟偏差超过 60 秒会报错 E1042。单点登录可以强制，多因素认证也可以强制。
"""


def document(name: str, language: str = "en") -> Document:
    return Document(doc_id=name, doc_source=f"{name}.md", title=name, language=language, content_hash=name)


DOCUMENTS = [(document("guide"), ENGLISH), (document("手册", "zh"), CHINESE)]


def build(documents=DOCUMENTS, config=None, **more):
    return build_dictionary(documents, config=config or DictionaryConfig(), **more)


def named(result) -> dict[str, TermEntry]:
    return {form: entry for entry in result.entries for form in entry.formal}


# Candidates ---------------------------------------------------------------------------------------------------------


def definitions(text: str) -> set[tuple[str, str, str]]:
    cut = HanWords(jieba_tokenizer()).cut
    return {(d.abbreviation, d.long_form, d.language) for d in find_definitions([plain(text)], cut)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Use Single Sign-On (SSO) here.", {("SSO", "Single Sign-On", "en")}),
        ("Use SSO (Single Sign-On) here.", {("SSO", "Single Sign-On", "en")}),
        ("单点登录（SSO）", {("SSO", "单点登录", "zh")}),
        ("SSO（单点登录）", {("SSO", "单点登录", "zh")}),
        ("启用单点登录(SSO, Single Sign-On)。", {("SSO", "单点登录", "zh"), ("SSO", "Single Sign-On", "en")}),
        ("an identity provider (IdP)", {("IdP", "identity provider", "en")}),
        ("基于角色的访问控制（RBAC）", {("RBAC", "基于角色的访问控制", "zh")}),
        ("at least two Network Time Protocol (NTP) servers", {("NTP", "Network Time Protocol", "en")}),
        ("the nightly backup (SSO) runs", set()),  # the letters do not fit
        ("either this or that (OR)", set()),  # an everyday word would be found everywhere
        ("see the table (p. 4)", set()),
    ],
)
def test_abbreviations_in_both_languages_and_orders(text, expected):
    assert definitions(text) == expected


def test_long_form_holds_the_letters_in_order():
    assert long_form("HSM", "with a Hardware Security Module") == "Hardware Security Module"
    assert long_form("HSM", "some other words") == ""
    assert long_form("SSO", "single") == ""


def test_named_entities_by_kind():
    text = (
        "The LG-500 and FT-500B: error E1042, event HW-3102, SHA-256, RFC 9457, AES-128. TLS 1.2, OAuth 2.0, RADIUS on "
        "TCP 443.\n`cluster join <ip>` `cluster join` `system diag collect` `system diag collect` `limit`\n"
        "```\n$ cluster leave\nthe quick fox\n```\n"
    )
    found = find_entities([plain(text)])
    assert set(found["product"]) == {"LG-500", "FT-500B"}
    assert set(found["error_code"]) == {"E1042", "HW-3102"}
    assert set(found["protocol"]) == {"TLS", "TLS 1.2", "OAuth", "OAuth 2.0", "RADIUS"}
    assert set(found["command"]) == {"cluster join", "cluster leave", "system diag collect"}


def test_plain_takes_marks_away_and_keeps_code_apart():
    read = plain("# A\n\n**Bold** [link](http://x.y/z) ![alt](i.png) `one` and `two words`\n\n```sh\nls -l\n```\n")
    assert read.lines == ["# A", "Bold  link   one and  ¦"]
    assert read.code == ["one", "two words"] and read.blocks == ["ls -l"]


def test_statistics_find_names_and_no_phrases():
    forms = {c.form for c in statistical_candidates([plain(ENGLISH), plain(CHINESE)], HanWords(jieba_tokenizer()), 2)}
    assert {"idle timeout", "recovery key", "clock skew", "恢复密钥", "审计日志", "时钟偏差"} <= forms
    for junk in ("the recovery", "recovery key is", "is printed", "minutes", "only", "可以", "时钟", "之后"):
        assert junk not in forms


def test_a_run_ends_at_punctuation_and_han_words_are_cut():
    words = HanWords(jieba_tokenizer())
    assert list(token_runs("API 令牌, two words; 2 LG-500", words)) == [["API", "令牌"], ["two", "words"], ["LG-500"]]
    assert "".join(words.cut("单" * 1000)) == "单" * 1000


# The dictionary -----------------------------------------------------------------------------------------------------


def test_one_entry_for_a_concept_in_two_languages():
    terms = named(build())
    assert terms["SSO"] is terms["Single Sign-On"] is terms["单点登录"]
    assert terms["SSO"].standard_term == "单点登录"  # five times against one
    assert (terms["SSO"].abbreviation, terms["SSO"].full_form) == ("SSO", "Single Sign-On")
    assert terms["IdP"].standard_term in ("identity provider", "身份提供者")
    assert terms["LG-500"].kind == "product" and terms["E1042"].kind == "error_code"
    assert terms["TLS 1.2"].kind == "protocol" and terms["backup run"].kind == "command"


def test_the_order_of_documents_does_not_matter():
    assert build().entries == build(DOCUMENTS[::-1]).entries


def test_min_count_and_max_candidates_bound_the_machine_only():
    review = [ReviewRow("add", "break-glass account", "", "应急账号", ("breakglass",), "authentication")]
    few = build(config=DictionaryConfig(max_candidates=3), review=review)
    assert sum(e.source == "machine" for e in few.entries) == 3
    assert named(few)["应急账号"].source == "expert"
    assert few.report["dropped"]["over_max_candidates"] > 0
    assert all(e.count >= 4 for e in build(config=DictionaryConfig(min_count=4)).entries)


def test_nothing_to_read_gives_an_empty_dictionary():
    result = build([(document("empty"), "")])
    assert result.entries == [] and result.conflicts == [] and result.review == []


def rows(*queries: str) -> list[QueryRow]:
    return [QueryRow(f"q{i}", query, "", 2, "") for i, query in enumerate(queries)]


def test_misspelt_forms_of_the_log_are_attached_by_string():
    log = rows("recvoery key lost", "单点登陆失败", "idle timeout", "审计日志", "idel timeouts", "recovery menu")
    result = build(query_log=log)
    terms = named(result)
    assert terms["recovery key"].colloquial == ("recvoery key",)
    assert terms["单点登录"].colloquial == ("单点登陆",)
    assert terms["idle timeout"].colloquial == ()  # "idel" is one swap in a word of four letters: too short to tell
    assert {(a["form"], a["how"]) for a in result.report["attached"]} == {
        ("recvoery key", "string"), ("单点登陆", "string"),
    }  # fmt: skip
    assert result.report["colloquial"] == {"string": 2, "vector": 0, "expert": 0}


def test_codes_and_other_words_are_not_attached():
    result = build(query_log=rows("E1043", "LG-600", "recovery menu", "printer jam", "增量日志"))
    assert result.report["attached"] == []


def fake_embed(texts: list[str]) -> np.ndarray:
    """Two directions: what speaks of a key, and all else."""
    return np.array([[1.0, 0.0] if "key" in t or "passphrase" in t else [0.0, 1.0] for t in texts])


def test_a_colloquial_form_is_attached_by_vector_where_it_is_clearly_nearest():
    documents = [
        (document("a"), "The recovery key is printed. A recovery key opens it. The idle timeout, the idle timeout.")
    ]
    result = build(documents, query_log=rows("passphrase?", "gibberish"), embed=fake_embed)
    assert named(result)["recovery key"].colloquial == ("passphrase",)
    assert [(a["form"], a["how"], a["score"]) for a in result.report["attached"]] == [
        ("gibberish", "vector", 1.0), ("passphrase", "vector", 1.0),
    ]  # fmt: skip
    strict = build(documents, query_log=rows("passphrase?"), embed=lambda texts: np.ones((len(texts), 2)))
    assert strict.report["attached"] == []  # every term is as near: none is clearly meant


# The expert ---------------------------------------------------------------------------------------------------------


def test_the_expert_wins():
    review = [
        ReviewRow("accept", "单点登录", "SSO", "Single Sign-On", ("统一登录",), "authentication"),
        ReviewRow("edit", "恢复密钥", "", "recovery key", ("密封卡",), "recovery"),
        ReviewRow("add", "应急账号", "", "break-glass account", ("breakglass",), "recovery"),
        ReviewRow("reject", "idle timeout"),
        ReviewRow("reject", "no such candidate"),
    ]
    result = build(review=review, query_log=rows("单点登陆"))
    terms = named(result)
    assert terms["SSO"].source == "expert" and set(terms["SSO"].colloquial) == {"统一登录", "单点登陆"}
    assert terms["恢复密钥"] is terms["recovery key"]  # two terms of the machine, one for the expert
    assert terms["恢复密钥"].tag == "recovery"
    assert terms["应急账号"].source == "expert"
    assert "idle timeout" not in terms and "密封卡" not in terms
    assert result.report["rejected"] == 1
    assert result.report["review"]["without_effect"] == ["no such candidate"]
    assert [r["decision"] for r in result.review[:5]] == ["accept", "edit", "add", "reject", "reject"]
    assert all(r["decision"] == "" for r in result.review[5:])
    assert "idle timeout" not in {r["standard_term"] for r in result.review[5:]}
    assert result.entries[0].source == "expert"


def test_edit_replaces_the_fields_and_accept_completes_them():
    proposal = [ReviewRow("accept", "SSO")]
    assert named(build(review=proposal))["SSO"].abbreviation == "SSO"
    assert named(build(review=proposal))["SSO"].full_form in ("Single Sign-On", "单点登录")
    edited = named(build(review=[ReviewRow("edit", "SSO", "", "", (), "x")]))["SSO"]
    assert (edited.abbreviation, edited.full_form, edited.tag) == ("", "", "x")


def test_a_term_takes_the_tag_of_the_terms_beside_it():
    review = [
        ReviewRow("accept", "审计日志", "", "audit log", (), "audit"),
        ReviewRow("accept", "SSO", "SSO", "", (), "login"),
    ]
    text = "SSO needs the login dialog.\n\nSSO opens the login dialog.\n\nThe sealed card is here.\n\nA sealed card."
    terms = named(build([(document("a"), text)], review=review))
    assert terms["login dialog"].tag == "login"
    assert terms["sealed card"].tag == ""


def test_the_dictionary_only_grows():
    first = build(query_log=rows("recvoery key"))
    other = [(document("other"), "The fan tray is hot. Replace the fan tray. A fan tray costs little.")]
    second = build(other, previous=first.entries)
    assert {e.standard_term for e in first.entries} <= {e.standard_term for e in second.entries}
    assert "fan tray" in named(second)
    assert named(second)["recovery key"].colloquial == ("recvoery key",)
    third = build(other, previous=second.entries, review=[ReviewRow("reject", "recovery key")])
    assert "recovery key" in named(third)
    assert third.report["review"]["rejected_but_kept"] == ["recovery key"]
    assert "recovery key" not in {r["standard_term"] for r in third.review if not r["decision"]}
    assert second.report["growth"][0] == {
        "stage": "previous", "terms": len(first.entries), "forms": sum(len(e.forms) for e in first.entries),
    }  # fmt: skip


def as_json(result) -> str:
    return json.dumps([entry.model_dump(mode="json") for entry in result.entries], ensure_ascii=False)


def settles(documents, first, **inputs) -> None:
    """Built again upon its own output, twice, the dictionary is the same to the byte, and so is what is reported."""
    for again in (first, build(documents, previous=first.entries, **inputs)):
        result = build(documents, previous=again.entries, **inputs)
        assert as_json(result) == as_json(first)
        assert (result.conflicts, result.review) == (first.conflicts, first.review)


REVIEW = [
    ReviewRow("accept", "SSO", "SSO", "", ("统一登录",), "login"),
    ReviewRow("edit", "恢复密钥", "", "recovery key", ("密封卡",), "recovery"),
    ReviewRow("reject", "idle timeout"),
]


@pytest.mark.parametrize("review", [[], REVIEW], ids=["machine", "expert"])
@pytest.mark.parametrize("most", [2000, 4])
def test_a_rebuild_changes_nothing(review, most):
    inputs = {"review": review, "query_log": rows("recvoery key", "单点登陆"), "embed": fake_embed}
    inputs["config"] = DictionaryConfig(max_candidates=most)
    settles(DOCUMENTS, build(**inputs), **inputs)


def test_an_added_document_only_adds():
    inputs = {"review": REVIEW, "query_log": rows("recvoery key", "单点登陆")}
    first = build(**inputs)
    swap = "Single Sign-On. " * 9 + "The fan tray is hot. A fan tray needs SSO."  # another name is the commonest now
    more = [*DOCUMENTS, (document("more"), swap)]
    second = build(more, previous=first.entries, **inputs)
    now = {e.standard_term: e for e in second.entries}
    for old in first.entries:
        new = now[old.standard_term]
        assert {"tag": old.tag or new.tag, "count": new.count} | old.model_dump(exclude={"count", "tag"}) == (
            new.model_dump()
        )
    assert set(now) - {e.standard_term for e in first.entries} == {"fan tray"}
    settles(more, second, **inputs)
    settles(DOCUMENTS, build(previous=second.entries, **inputs), **inputs)  # and when it is taken out again


def test_a_review_that_comes_later_renames_terms_and_loses_no_form():
    first = build()
    second = build(previous=first.entries, review=REVIEW)
    forms = [form_key(f) for e in second.entries for f in e.forms]
    assert {form_key(f) for e in first.entries for f in e.forms} <= set(forms)
    assert len(forms) == len(set(forms)), "a form has one owner"
    assert named(second)["recovery key"].standard_term == "恢复密钥"
    assert named(second)["SSO"].standard_term == "SSO" and "单点登录" in named(second)["SSO"].forms
    settles(DOCUMENTS, second, review=REVIEW)


def test_two_meanings_of_one_abbreviation_are_reported():
    text = "Service Provider (SP) and Service Pack (SP).\n\nA Service Provider (SP). A Service Pack (SP)." * 2
    result = build([(document("a"), text)])
    assert [c.terms for c in result.conflicts if c.form == "SP"] == [("Service Pack", "Service Provider")]
    assert [e.standard_term for e in result.entries if e.abbreviation == "SP"] == ["SP"]


def test_a_form_that_two_entries_claim_stays_with_the_first():
    review = [
        ReviewRow("add", "join token", "", "加入令牌", ("token",), "cluster"),
        ReviewRow("add", "API token", "", "API 令牌", ("token",), "api"),
    ]
    result = build([(document("a"), "The API token. An API token. A join token.")], review=review)
    assert [(c.form, c.terms) for c in result.conflicts] == [("token", ("API token", "join token"))]
    assert named(result)["API token"].colloquial == ("token",)  # more often in the documents
    assert named(result)["join token"].colloquial == ()


def test_proposals_of_a_model_are_checked():
    def propose(text: str) -> list[dict]:
        return [
            {"standard_term": "sealed card", "colloquial": ["card"], "tag": "recovery"},
            {"standard_term": "not in the text"},
            {"standard_term": ""},
            {"term": "wrong field"},
            "no dict",
        ]

    result = build([(document("a"), "The sealed card. A sealed card is here.")], propose=propose)
    entry = named(result)["sealed card"]
    assert entry.tag == "recovery"
    assert result.report["llm_invalid"] == 4


# Files --------------------------------------------------------------------------------------------------------------


def test_files_of_the_dictionary(tmp_path):
    entries = build(query_log=rows("单点登陆")).entries
    write_dictionary(tmp_path, entries)
    assert load_dictionary(tmp_path / "keyword_dict.json") == entries
    lines = (tmp_path / "keyword_dict.txt").read_text(encoding="utf-8").splitlines()
    assert len({line.rsplit(" ", 2)[0] for line in lines}) == len(lines)
    import jieba

    tokenizer = jieba.Tokenizer()
    tokenizer.tmp_dir = str(tmp_path)
    with (tmp_path / "keyword_dict.txt").open("rb") as handle:  # given a path, jieba leaves the file open
        tokenizer.load_userdict(handle)
    assert "单点登陆" in tokenizer.lcut("报单点登陆失败")
    assert tokenizer.user_word_tag_tab["单点登录"] == "nz"


def test_the_review_goes_out_and_comes_back(tmp_path):
    review = [ReviewRow("add", "=cmd", "", "应急账号", ("a, b", '"c"'), "x", "why, indeed")]
    result = build(review=review)
    path = tmp_path / "review.csv"
    write_review(path, result.review)
    assert path.read_bytes()[:3] == b"\xef\xbb\xbf"
    back = read_review(path)
    assert back[0] == review[0]
    assert [r.row() for r in back] == result.review
    assert build(review=back).entries == result.entries


def test_bad_rows_of_the_review_are_named(tmp_path):
    path = tmp_path / "review.csv"
    path.write_text("decision,standard_term\nacept,SSO\nadd,\nadd,MFA\nreject,mfa\n,later\n", encoding="utf-8")
    with pytest.raises(InputRefused, match="row 2.*acept(.|\n)*row 3: no standard_term(.|\n)*row 5.*row 4"):
        read_review(path)


def test_the_query_log_is_read_with_defaults(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("query,count\n单点登陆,3\nsso,\n,4\n", encoding="gb18030")
    assert read_query_log(path) == [QueryRow("q0001", "单点登陆", "zh", 3, ""), QueryRow("q0002", "sso", "en", 1, "")]
    path.write_text("query,count\nsso,many\n", encoding="utf-8")
    with pytest.raises(InputRefused, match="row 2: count 'many'"):
        read_query_log(path)


def test_the_report_is_plain_data():
    report = build(query_log=rows("单点登陆", "sso")).report
    assert json.loads(json.dumps(report)) == report
    assert report["queries"] == {"all": 2, "with_a_term": 2}
    assert sum(report["by_kind"].values()) == report["terms"]


def test_the_sample_data_give_a_dictionary_an_expert_can_work_with():
    folder = Path(__file__).parents[2] / "data"
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted((folder / "corpus").glob("*.md"))}
    documents = [(document(name, "zh" if ".zh." in name else "en"), text) for name, text in texts.items()]
    review = read_review(folder / "term_review.csv")
    log = read_query_log(folder / "query_log.csv")
    assert len(log) >= 300
    machine = named(build(documents, query_log=log))
    assert {"LG-500", "E1042", "mgmt-sso enforce on", "RADIUS", "identity provider", "审计日志"} & set(machine) >= {
        "LG-500", "E1042", "RADIUS", "审计日志",
    }  # fmt: skip
    rejected = {row.standard_term for row in review if row.decision == "reject"}
    assert not rejected & set(machine)  # what the expert would strike out is not even proposed
    result = build(documents, query_log=log, review=review)
    terms = named(result)
    assert all(terms[row.standard_term].source == "expert" for row in review if row.decision != "reject")
    assert result.conflicts == []
    assert terms["SSO"].colloquial[:1] == ("single signon",)
    settles(documents, result, query_log=log, review=review)
    part = build(documents[1:], query_log=log, review=review)
    whole = build(documents, query_log=log, review=review, previous=part.entries)
    kept = {e.standard_term: set(e.forms) for e in whole.entries}
    assert all(set(e.forms) <= kept[e.standard_term] for e in part.entries)
    assert len(whole.entries) > len(part.entries)
    settles(documents, whole, query_log=log, review=review)
    left = {e.standard_term: set(e.forms) for e in build([], previous=result.entries).entries}
    assert left == {e.standard_term: set(e.forms) for e in result.entries}  # without documents, review and log
