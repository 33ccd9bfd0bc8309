"""Tokenizers, sentences, languages, token counts: hand-worked examples and properties."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragbuild.core.errors import MissingResource, UsageError
from ragbuild.core.records import TermEntry
from ragbuild.core.text import (
    STOPWORDS,
    CharTokenizer,
    TokenCounter,
    WhitespaceTokenizer,
    WordTokenizer,
    jieba_tokenizer,
    language_of,
    make_tokenizer,
    normalise,
    row_cells,
    sentences,
    stem_word,
    strip_span,
)

TERMS = [
    TermEntry(standard_term="Single Sign-On", abbreviation="SSO", full_form="单点登录"),
    TermEntry(standard_term="OAuth 2.0", kind="protocol"),
    TermEntry(standard_term="LG-500", kind="product"),
    TermEntry(standard_term="会话粘滞"),
    TermEntry(standard_term="单点登录服务器"),
]
WORDS = WordTokenizer(TERMS)
PLAIN = WordTokenizer()
CHARS = CharTokenizer()
TOKENIZERS = [WORDS, PLAIN, WordTokenizer(stem=False), CHARS, CharTokenizer(bigrams=False), WhitespaceTokenizer()]

# Unicode without surrogates, and what our documents are made of more often than chance would.
mixed = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=80),
    st.text(st.sampled_from("aZ19-_./:'% \n\t单点登录会话的ｖ２０é\u200bの한" + "\uf900\u3400"), max_size=80),
)


# --- tokenizers ------------------------------------------------------------------------------------------------------


@given(mixed)
def test_any_text_gives_tokens_without_white_space(text: str):
    for tokenizer in TOKENIZERS:
        tokens = tokenizer(text)
        assert all(token and not any(c.isspace() for c in token) for token in tokens)
        assert tokens == tokenizer(text), "a query and a document go the same way"


@given(mixed)
def test_full_width_and_upper_case_forms_equal_plain_ones(text: str):
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
    for tokenizer in (WORDS, CHARS):
        assert tokenizer(wide) == tokenizer(text)


def growth(function, unit: str) -> float:
    """Processor time for 80,000 characters over that for 10,000 (20 ms at least): 8 when linear, 64 when quadratic."""
    seconds = []
    for length in (10_000, 80_000):
        text = (unit * length)[:length] + "x"
        start = time.process_time()
        function(text)
        seconds.append(time.process_time() - start)
    return seconds[1] / max(seconds[0], 0.02)


UNITS = [*"a 1 . - a. a/ a- a_ a: a' 1. 1- a1 1a a.b-c/d_ é 登 龘 龘靐 登a".split(), " ", "\n"]


@pytest.mark.parametrize("unit", UNITS)
def test_time_is_linear_in_the_length(unit: str):
    PLAIN("预热")
    assert growth(PLAIN, unit) < 32
    assert growth(CHARS, unit) < 32


@pytest.mark.parametrize(
    "code", ["LG-500", "E1042", "v2.0.1", "TLS1.2", "192.168.10.1/24", "SB-2026-03", "10:30", "99.5%"]
)
@pytest.mark.parametrize("around", ["the {} here", "设备{}的说明", "({}),", "见{}。", "Use {}."])
def test_codes_and_versions_stay_whole(code: str, around: str):
    assert code.lower() in PLAIN(around.format(code))
    assert code.lower() in CHARS(around.format(code))


def test_a_code_comes_with_its_parts():
    assert PLAIN("LG-500") == ["lg-500", "lg", "500"]
    assert PLAIN("lg500") == ["lg500", "lg", "500"], "so that two spellings of a model meet in their parts"
    assert PLAIN("v2.0.1") == ["v2.0.1", "v", "2.0.1"]
    assert PLAIN("192.168.10.1/24") == ["192.168.10.1/24", "192.168.10.1", "24"]


def test_a_latin_term_is_emitted_whole_and_in_its_parts():
    assert WORDS("OAuth 2.0") == ["oauth", "oauth_2.0", "2.0"]
    assert WORDS("oauth  2.0 flow")[:3] == ["oauth", "oauth_2.0", "2.0"]
    assert "singl_sign-on" in WORDS("With Single Sign-On enabled")
    assert {"singl", "sign-on", "sign"} <= set(WORDS("With Single Sign-On enabled")), "'on' is a stop word"
    assert PLAIN("OAuth 2.0") == ["oauth", "2.0"]


def test_a_han_term_is_emitted_whole_and_in_its_parts():
    assert WORDS("单点登录") == ["单点", "登录", "单点登录"]
    assert WORDS("配置单点登录。") == ["配置", "单点", "登录", "单点登录"]
    nested = WORDS("单点登录服务器")
    assert {"单点登录", "单点登录服务器", "服务器"} <= set(nested), "a term inside a term too"


def test_a_new_han_term_hides_no_document_that_was_indexed_before_it():
    assert PLAIN("会话粘滞") == ["会话", "粘滞"], "only jieba's model for unknown words knows the first"
    assert set(PLAIN("会话粘滞")) <= set(WORDS("会话粘滞"))
    rng = random.Random(5)
    common = "登录密钥证书网关节点备份恢复会话审计令牌策略租约凭据引导轮换吊销粘滞备援熔断仲裁镜像"
    terms = ["".join(rng.sample(common, rng.randint(2, 6))) for _ in range(150)]
    grown = WordTokenizer([TermEntry(standard_term=t) for t in terms])
    for term in terms:
        tokens = grown(term)
        assert set(PLAIN(term)) <= set(tokens) | set(STOPWORDS), term
        assert term in tokens


def test_a_term_of_both_scripts_is_known_by_its_han_part():
    tokens = WordTokenizer([TermEntry(standard_term="API 密钥轮换")])("API密钥轮换")
    assert "api" in tokens and "密钥轮换" in tokens


def test_the_global_jieba_is_never_touched():
    import jieba

    def state() -> tuple:
        tokenizer = jieba.dt
        words = (dict(tokenizer.FREQ), dict(tokenizer.user_word_tag_tab), set(jieba.finalseg.Force_Split_Words))
        return tokenizer.initialized, *words

    before = state()
    assert WordTokenizer([TermEntry(standard_term="全局词典不变")])("全局词典不变")[-1] == "全局词典不变"
    assert state() == before


def test_one_jieba_is_kept_for_each_set_of_terms():
    assert jieba_tokenizer(("单点登录",)) is jieba_tokenizer(("单点登录",))
    assert jieba_tokenizer(("单点登录",)) is not jieba_tokenizer(("灵枢网关",))
    first = WordTokenizer([TermEntry(standard_term="甲乙"), TermEntry(standard_term="丙丁戊")])
    second = WordTokenizer([TermEntry(standard_term="丙丁戊"), TermEntry(standard_term="甲乙")])
    first("甲乙"), second("甲乙")
    assert first._jieba is second._jieba, "the order of the dictionary does not matter"


def test_english_words_are_stemmed_and_stop_words_go():
    assert PLAIN("Recovering the recovered accounts") == ["recov", "recov", "account"]
    assert PLAIN("Why does it do this to us") == [], "also those whose stem is another word"
    assert PLAIN("do not") == ["not"], "a negation stays"
    assert WordTokenizer(stem=False)("Recovering accounts") == ["recovering", "accounts"]
    assert PLAIN("我们的证书吗") == ["证书"]
    assert stem_word("configurations") == stem_word("configuring")


def test_han_and_other_scripts_do_not_swallow_each_other():
    assert PLAIN("é证书") == ["é", "证书"]
    assert CHARS("の証") == ["の", "^の$", "証"]


def test_char_tokenizer_by_hand():
    assert CHARS("登录页") == ["登", "录", "页", "登录", "录页"]
    assert CharTokenizer(bigrams=False)("登录页") == ["登", "录", "页"]
    assert CHARS("login") == ["^lo", "log", "ogi", "gin", "in$"]
    assert CHARS("E1042") == ["e1042", "^e1", "e10", "104", "042", "42$"]
    shared = set(CHARS("authentication")) & set(CHARS("authentcation"))
    assert len(shared) >= 9, "a typo leaves most trigrams"


def test_whitespace_shows_what_goes_wrong():
    assert WhitespaceTokenizer()("How to 重置管理员密码？") == ["how", "to", "重置管理员密码？"]


def test_make_tokenizer_is_the_only_switch():
    assert make_tokenizer("jieba", TERMS, stem=True, char_bigrams=True).name == "jieba"
    assert make_tokenizer("char", TERMS, stem=True, char_bigrams=False)("登录") == ["登", "录"]
    assert make_tokenizer("whitespace", TERMS, stem=True, char_bigrams=True)("A b") == ["a", "b"]
    with pytest.raises(UsageError, match="lexical.tokenizer takes jieba, char or whitespace, got 'bm25'"):
        make_tokenizer("bm25", TERMS, stem=True, char_bigrams=True)


# --- normalising, languages, sentences -------------------------------------------------------------------------------


def test_normalise():
    assert normalise("ＬＧ－５００\u200b ﬁle\ufeff") == "LG-500 file"


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How do I reset it?", "en"),
        ("The 登录 button opens the sign-in page of the portal", "en"),
        ("怎么重置？", "zh"),
        ("LG-500 怎么恢复出厂设置", "zh"),
        ("SSO 登录失败怎么办", "zh"),
        ("パスワードを忘れました", "ja"),
        ("비밀번호 재설정", "ko"),
        ("¿Cómo?", "en"),
        ("12345", "en"),
        ("", "en"),
    ],
)
def test_language_of(text: str, language: str):
    assert language_of(text) == language


@given(mixed)
def test_sentences_cover_the_text_in_order(text: str):
    spans = sentences(text)
    position = 0
    for start, end in spans:
        assert position <= start < end <= len(text)
        assert not text[position:start].strip(), "nothing but white space lies between"
        assert not text[start].isspace() and not text[end - 1].isspace()
        position = end
    assert not text[position:].strip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Stop it. Then rest! Why? No.", ["Stop it.", "Then rest!", "Why?", "No."]),
        ("Use v2.0.1 e.g. here, i.e. there. Done", ["Use v2.0.1 e.g. here, i.e. there.", "Done"]),
        ("重启设备。等待“完成”！”然后登录？好", ["重启设备。", "等待“完成”！”", "然后登录？", "好"]),
        ('He said "stop." Then left.', ['He said "stop."', "Then left."]),
        ("The file.  name goes on.", ["The file.  name goes on."]),
        ("See Fig. 3 and J. Smith.", ["See Fig. 3 and J. Smith."]),
        ("先停止；再启动。", ["先停止；", "再启动。"]),
        ("   \n ", []),
    ],
)
def test_sentences_by_hand(text: str, expected: list[str]):
    assert [text[a:b] for a, b in sentences(text)] == expected


@pytest.mark.parametrize("unit", [".", "!", '"', ". ", ".)", "。", "A.", ".  a"])
def test_sentences_take_linear_time(unit: str):
    assert growth(sentences, unit) < 32


@given(st.text(st.sampled_from(" \n\tab"), max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_strip_span_equals_strip(text: str, a: int, b: int):
    a, b = sorted((min(a, len(text)), min(b, len(text))))
    start, end = strip_span(text, a, b)
    assert text[start:end] == text[a:b].strip()


# --- counting tokens -------------------------------------------------------------------------------------------------


def test_token_counter_counts_without_special_tokens():
    counter = TokenCounter()
    assert counter.count([]) == []
    empty, one, chinese = counter.count(["", "hello", "重置管理员密码"])
    assert empty == 0 and 1 <= one <= 2 and 2 <= chinese <= 7
    assert counter.count(["a b", "a b c"])[0] < counter.count(["a b", "a b c"])[1]


def test_token_counter_names_what_is_missing(tmp_path):
    with pytest.raises(MissingResource, match="chunk.tokenizer"):
        TokenCounter(str(tmp_path / "none.model"))


def test_cells_of_a_row():
    assert row_cells("| a \\| b | `c` | |") == ["a | b", "`c`", ""]
    assert row_cells("**a**<br>b|  c  d |") == ["a b", "c d"] and row_cells("| |") == [""]
