"""Words of general use, by which the dictionary tells a name from a phrase. Short lists, for any trade."""

from __future__ import annotations

from ragbuild.core.text import STOPWORDS

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
    "gone good got great greater had half happen happens hardly having held help helps hence here hide high higher hold "
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
GENERAL_HAN = frozenset(
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
TOO_WIDE = frozenset(
    "power method methods group groups system message messages description installation mounting error errors field "
    "fields safety troubleshooting operation directory status local active idle expiring limit config code codes location "
    "introduction overview background conclusion references abstract appendix glossary index faq notes admin get post put "
    "delete patch null true false string integer boolean 设备 配置 文件 地址 系统 数据 信息 功能 操作 服务 管理 网络".split()
)
