"""Candidate terms by statistics: TF-IDF over documents, headings, and co-occurrence of adjacent words (NPMI).

A candidate is one to three words without function words: Latin words, Han words (jieba), or both (``API 令牌``). What
no expert would keep is removed here: pieces of longer candidates, phrases that begin or end with a word of general
use, units, and numbers.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ragbuild.core.forms import singular
from ragbuild.core.text import HAN, STOPWORDS
from ragbuild.offline.entities import Plain

_HAN = re.compile(f"[{HAN}]")

# Words of any manual, in any trade: no term begins or ends with one, though a term may hold one inside.
GENERAL = STOPWORDS | frozenset(
    "able about above accept accepts across add added adds affected after afterwards again against all allow allowed "
    "allows almost alone along already also although always among amount another answer answers any anybody anyone "
    "anything appear appears applied applies apply around ask asked asks away back based because become been before "
    "begin behind being belongs below best better between beyond both bring but call called came cannot carries carry "
    "cause causes certain change changed changes changing check checked checking checks choose chosen click close come "
    "comes common compare complete confirm connect connected consists contain contains continue copy correct could "
    "cover covers create created creates date day days decide delete deleted deletes depends describe described "
    "describes did differ different differs disable does doing done down during each earlier easy either else enable "
    "enabled end ends enough enter entered equal etc even ever every everybody everyone everything exactly example "
    "except exist exists expect explain fail failed fails false far few find finds first five fix fixed follow followed "
    "following follows for form found four free from full fully further gets getting give given gives go goes going "
    "gone good got great greater half happen happens hardly having held help helps hence here hide high higher hold "
    "holds hour hours however http https hundred important in include included includes inside instead intended into "
    "itself just keep keeps kept kind know known large larger last late later latest lead least leave leaves left less "
    "let lets like list listed little long longer look looks lose lost lot low lower made main make makes making many "
    "mark matter may mean means meant meanwhile might million minute minutes miss missing mode month months more most "
    "move moved moves much must name named names near nearly need needed needs neither never new newer next nine no "
    "nobody non none nor normal not note nothing now number numbers occur occurs off offer offers often old older once "
    "one ones only onto open opens order other others otherwise out outside over overview own page part particular "
    "parts pass past per perform performed perhaps person place places please point points possible present press "
    "prevent previous problem proceed produce provide provided provides put puts question questions quite raise rather "
    "reach reached reaches read reads ready really reason receive recent recommend recommended refer refused related "
    "release remain remains remark remember remove removed removes replace replaced report reported require required "
    "requires resolution result results return returns right row run running runs said same save saved saw say says "
    "second seconds section see seen select selected send sends sent separate set sets setting settings seven several "
    "shall short should show shown shows side similar simple simply since single situation six small smaller so some "
    "something sometimes soon start started starts state stated stay stays step steps still stop stopped stops such "
    "suggest summary sure symptom table take taken takes tell tells ten text than that therefore thing things think "
    "third though thousand three through thus till time times together told too took top total toward try turn turns "
    "two type under unless unlike until up upon usable use used useful user users uses using usual usually valid value "
    "values various very via view wait want wants warning way ways week weeks well went were whatever whenever whether "
    "while whole whose why wide within without word words work works would write writes written wrong year years yes "
    "yet zero today tomorrow yesterday figure chapter contents yourself themselves himself herself themself "
    "role roles gave permits lives trusts becomes produces former e-mail reason query current existing imported optional "
    "permit repair blink blinks share shares bound locked invalid blinking steady lit kb mb gb tb ms mm cm kg ghz mhz gbe mbit gbit".split()
)
_GENERAL_HAN = frozenset(
    "进行 以及 如果 没有 可以 需要 不能 必须 应当 应该 使用 通过 其中 以下 以上 之后 之前 同时 时候 情况 方法 方式 问题 步骤 说明 内容 "
    "原因 现象 处理 解决 结果 项目 示例 例子 案例 表示 显示 出现 发生 完成 开始 结束 选择 点击 打开 关闭 输入 检查 查看 确认 注意 提示 "
    "执行 运行 设置 修改 更改 更换 建立 添加 增加 删除 新建 启用 停用 允许 拒绝 支持 提供 包括 包含 属于 位于 适用 适用于 要求 建议 默认 "
    "同一 不同 其他 其它 任何 所有 全部 部分 每个 每次 多个 一次 两次 第一 第二 最多 最少 至少 超过 少于 大于 小于 以内 以外 左右 分钟 "
    "小时 秒 天 周 月 年 日 次 位 台 条 个 份 项 节 章 页 号 名 值 时 后 前 上 下 中 内 外 里 不 无 非 再 又 只 才 已 将 会 能 要 该 "
    "此 其 各 每 某 本 由 向 按 经 用 让 使 给 请 即 则 若 因 但 或者 因此 因为 所以 然后 接着 首先 最后 随后 立即 自动 手动 直接 仍 仍然 "
    "报 申请 按住 接受 导入 导出 改 收集 生成 写入 接 接到 找不到 来自 带回 组成 安装 核对 报告 失败 受影响 相差 开头 另有 新 旧 老 只能 存放 保管 "
    "另一 另一台 同型号 系统配置 本机 再用 用时 先 后 失联 打不开 收不到 改用 换 填写 写明 注明 不符 应为 只用 放宽 手工 长时间 做 取 拿 放 等待 等于 得 成 "
    "台上 卡上 机上 侧 较 等同 等同于 每名 每季度 每分钟 每天 时会 为止 角色 转为 放在 取得 达到 连续 个字符 另行 勾选 准备好 不通 大量 普通 "
    "不要 不会 不再 不得 无法 无需 不必 一般 通常 正常 相应 相关 有关 具体 重新 继续 是否 怎样 为何 何时 多久 发现 找到 得到 收到 回到 "
    "下列 上述 如下 下表 所示 参见 详见 版本 时间 用户 人员 一个 一台 两台 两个 三个 数量 大小 当前 目前 现在 今后 今天".split()
)
# Tags of jieba's dictionary that a term neither begins nor ends with: function words, numbers, pronouns, adverbs …
# Tags of jieba's dictionary that a term does not hold: function words, numbers, pronouns, adverbs, directions, times.
_NO_TERM = ("p", "c", "d", "r", "m", "q", "u", "y", "e", "o", "f", "z", "x", "t", "k", "h")
_TOKEN = re.compile(
    rf"(?P<latin>(?<![\w-])[A-Za-z][A-Za-z0-9]*(?:['’][a-z]+)?(?:[-\u2010\u2011\u2013][A-Za-z0-9]+)*(?![\w-]))"
    rf"|(?P<han>[{HAN}]+)|(?P<space> )"
)
_TOO_WIDE = frozenset(
    "power method methods group groups system message messages description installation mounting error errors field "
    "fields safety troubleshooting operation directory status local active idle expiring limit config code codes location "
    "introduction overview background conclusion references abstract appendix glossary index faq notes admin get post put "
    "delete patch null true false string integer boolean 设备 配置 文件 地址 系统 数据 信息 功能 操作 服务 管理 网络".split()
)
_HEADING = re.compile(
    r"^#{1,6}\s+(?:[\dA-Z]{1,3}(?:\.\d{1,3}){0,4}\.?\s+|第?[一二三四五六七八九十\d]{1,3}[章节、.]\s*)?(.{2,60})$"
)
_MAX_WORDS = 3
_PIECE_OF = 0.7  # a form that stands in a longer one this often is a piece of it


@dataclass
class Candidate:
    """A form with what speaks for it. `sources` names the statistics that found it; `score` (0 to 3) orders them."""

    form: str
    count: int
    score: float
    sources: set[str] = field(default_factory=set)


class HanWords:
    """jieba's own dictionary as three questions: how is a run cut, can a term hold a word, how special is it?"""

    def __init__(self, tokenizer) -> None:  # type: ignore[no-untyped-def]
        self.cut: Callable[[str], Sequence[str]] = tokenizer.lcut
        self._frequency, self._total = tokenizer.FREQ, tokenizer.total
        self._tags: dict[str, str] = {}
        with tokenizer.get_dict_file() as lines:
            for line in lines:
                word, _, tag = line.decode("utf-8").split()
                self._tags[word] = tag

    def termlike(self, word: str) -> bool:
        tag = self._tags.get(word, "n")
        return word not in _GENERAL_HAN and word not in STOPWORDS and not (tag != "zg" and tag.startswith(_NO_TERM))

    def verb(self, word: str) -> bool:
        return self._tags.get(word) == "v"

    def nounlike(self, word: str) -> bool:
        """A noun to jieba, or unknown to it and without a function character."""
        tag = self._tags.get(word, "")
        return tag[:1] in ("n", "l", "i", "j") or tag == "vn" or (not tag and all(self.termlike(c) for c in word))

    def keyness(self, word: str, share: float) -> float:
        """How many times commoner `word` is here than in jieba's general count."""
        return share * self._total / (self._frequency.get(word) or 1)


def token_runs(line: str, words: HanWords) -> Iterator[list[str]]:
    """Runs of neighbouring words of one line: whatever is neither word nor single space ends a run."""
    run: list[str] = []
    at = 0
    for match in _TOKEN.finditer(line):
        if match.start() != at and run:
            yield run
            run = []
        at = match.end()
        if match.lastgroup == "han":
            run += words.cut(match.group())
        elif match.lastgroup == "latin":
            run.append(match.group())
    if run:
        yield run


def join(words: Sequence[str]) -> str:
    """Words to a form: no space between Han words."""
    out = words[0]
    for word in words[1:]:
        out += ("" if _is_han(out[-1]) and _is_han(word[0]) else " ") + word
    return out


def statistical_candidates(documents: Sequence[Plain], words: HanWords, min_count: int) -> list[Candidate]:
    """Candidates from all documents, best first (ties by form)."""
    grams: list[Counter[tuple[str, ...]]] = []
    surfaces: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    longer: dict[tuple[str, ...], Counter[tuple[str, ...]]] = defaultdict(Counter)
    for document in documents:
        counter: Counter[tuple[str, ...]] = Counter()
        for line in document.lines:
            for run in token_runs(line, words):
                low = [word.lower() for word in run]
                for n in range(1, _MAX_WORDS + 2):
                    for i in range(len(run) - n + 1):
                        counter[tuple(low[i : i + n])] += 1
                        if n <= _MAX_WORDS:
                            surfaces[tuple(low[i : i + n])][join(run[i : i + n])] += 1
        grams.append(counter)
    total: Counter[tuple[str, ...]] = sum(grams, Counter())
    size = max(1, sum(n for key, n in total.items() if len(key) == 1))
    for key, n in total.items():
        if len(key) > 1 and n >= min_count:
            for part in (key[1:], key[:-1]):
                longer[part][key] = n
    headings = _headings(documents)
    codes = Counter(code.lower() for document in documents for code in document.code)
    kept: dict[tuple[str, ...], Candidate] = {}
    for key, n in total.items():
        form = _surface(key, surfaces) if len(key) <= _MAX_WORDS else ""
        if n < min_count or not form or not _termlike(key, n, words) or _piece(key, n, longer[key], words):
            continue
        found = {"heading"} if form.lower() in headings else set()
        if len(key) > 1:
            npmi = _npmi(key, total, size)
            if npmi < 0.4 or ("of" in key and not found):
                continue
            found.add("cooccurrence")
        elif key[0] in _TOO_WIDE or form.lower() in _TOO_WIDE:
            continue
        elif _is_han(form[0]):
            keyness = words.keyness(form, n / size) if words.nounlike(form) and len(form) > 1 else 0.0
            if keyness < 150 or n < 2 * min_count:
                continue
            npmi = min(1.0, math.log10(keyness) / 5)
        elif len(form) > 3 and (found or codes[form.lower()] >= min_count):
            npmi = 0.6
        else:
            continue
        # NPMI flatters what is rare: discounted as Pantel & Lin (2002) do.
        kept[key] = Candidate(form, n, npmi * n / (n + 2) + (0.3 if "heading" in found else 0.0), found)
    for key, weight in _tfidf(grams, kept).items():
        kept[key].score += weight
        if weight >= 0.25:
            kept[key].sources.add("tfidf")
    return sorted((c for c in kept.values() if c.sources), key=lambda c: (-c.score, c.form))


def _surface(key: tuple[str, ...], surfaces: dict[tuple[str, ...], Counter[str]]) -> str:
    """How the documents write it most; in small letters and in the singular where they do so at all."""
    one = (*key[:-1], singular(key[-1]))
    if one in surfaces:
        key = one
    seen = surfaces[key]
    return min(seen, key=lambda form: (form != form.lower(), -seen[form], form))


def _termlike(key: tuple[str, ...], n: int, words: HanWords) -> bool:
    """Do all words of `key` look like those of a name?"""
    for i, word in enumerate(key):
        edge = i in (0, len(key) - 1)
        if _is_han(word[0]):
            if not words.termlike(word) or (edge and len(word) == 1 and words.verb(word) and (i > 0 or n < 5)):
                return False
        elif (word in GENERAL and (edge or word != "of")) or len(word) < 2 or (edge and word.endswith(("ly", "'s"))):
            return False
        elif re.search(r"\d{2}", word):
            return False  # a model or a code, alone or beside a word: the named-entity rules have those
    return any(len(word) > 1 for word in key)


def _piece(key: tuple[str, ...], n: int, longer: Counter[tuple[str, ...]], words: HanWords) -> bool:
    """Does `key` nearly always stand inside of one longer form? Function words around it do not count."""
    for other, count in longer.items():
        extra = other[0] if other[1:] == key else other[-1]
        general = extra in GENERAL or (_is_han(extra[0]) and not words.termlike(extra) and len(extra) > 1)
        if count >= _PIECE_OF * n and not general:
            return True
    return False


def _npmi(key: tuple[str, ...], total: Counter[tuple[str, ...]], size: int) -> float:
    """Normalised pointwise mutual information (Bouma 2009) of the weakest joint of `key`, -1 to 1."""
    share = total[key] / size
    joints = (total[key[:i]] * total[key[i:]] / size**2 for i in range(1, len(key)))
    return min(math.log(share / joint) / -math.log(share) if share < 1 else 1.0 for joint in joints)


def _headings(documents: Sequence[Plain]) -> set[str]:
    """Short headings, small letters, without their numbers."""
    found = (_HEADING.match(line) for document in documents for line in document.lines)
    return {m.group(1).strip().lower() for m in found if m}


def _tfidf(grams: list[Counter[tuple[str, ...]]], kept: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], float]:
    """The best TF-IDF weight of each form over the documents, scaled to 0..1 within its number of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    order = list(kept)
    if not order:
        return {}
    model = TfidfVectorizer(analyzer=list, vocabulary={k: i for i, k in enumerate(order)}, norm=None, sublinear_tf=True)
    weights = model.fit_transform([list(counter.elements()) for counter in grams]).max(axis=0).toarray().ravel()
    best = max(float(weights.max()), 1e-9)
    return {key: float(weights[i]) / best for i, key in enumerate(order)}


def _is_han(char: str) -> bool:
    return bool(_HAN.match(char))
