// The page of extractive QA. Text from the service becomes text nodes only, never markup.
"use strict";

const API = "api/labs/findoc-rag";

// English stands in index.html; this is the Chinese of the same keys.
const CHINESE = {
  title: "财务披露原文检索",
  skip: "跳到结果",
  lead: "一个问题，一个段落：原文照录并注明出处，否则什么也不给。",
  not: "这是带门槛的检索，不是聊天机器人。不运行语言模型，不生成文字，问题之间互不记忆。",
  ask: "问题",
  query: "要查找什么？",
  hint: "中文或英文，最多 500 个字符。按回车键检索。",
  top: "片段数",
  least: "最低置信度",
  search: "检索",
  baseline: "示例：基线",
  stress: "示例：压力",
  result: "结果",
  nothing: "还没有提问。请选择示例或输入问题。",
  about: "什么在运行，什么不运行",
  limits: "局限",
  limit1: "只摘录原文；不计算、不比较、不概括、不翻译。不在任何一个段落中的内容找不到。",
  limit2: "匹配的是词语而不是含义：换一种说法或换一种语言，可能什么也找不到。",
  limit3: "门槛偶尔会放行错误的段落，也会拦下正确的段落。请阅读原文和出处。",
  limit4: "跨文档核对来源、日期和结论，由研究人员完成。",
  limit5: "样例披露均为虚构，不构成任何建议。",
  index: "索引",
  schema: "契约",
  presets: "示例",
};

// What the script itself says: [English, Chinese].
const SAID = {
  answered: ["Answered", "已回答"],
  abstained: ["No answer: abstained", "没有答案：放弃作答"],
  blocked: ["No answer: blocked", "没有答案：已拦截"],
  toldAnswered: ["Answered, word for word, from: ", "已回答，原文出自："],
  toldAbstained: ["No answer. Passages shown as evidence: ", "没有答案。作为证据显示的段落数："],
  toldBlocked: ["Blocked. Nothing was searched: no answer, no citation.", "已拦截。未进行检索：没有答案，没有引文。"],
  searching: ["Searching…", "正在检索……"],
  noAnswer: ["No passage is given as an answer.", "没有段落作为答案给出。"],
  found: ["What the scan found in the question:", "扫描在问题中发现："],
  see: ["See it in the evidence list", "在证据列表中查看"],
  page: ["page ", "第 "],
  pageAfter: ["", " 页"],
  gate: ["The gate’s decision", "门槛的判定"],
  rule: ["Rule", "规则"],
  confidence: ["Confidence", "置信度"],
  margin: ["Margin", "领先幅度"],
  needs: ["needs ", "需要 "],
  fused: ["Fused score", "融合分数"],
  coverage: ["Token coverage", "词语覆盖率"],
  sources: ["Sources", "来源数"],
  confidenceIs: ["Confidence is fused score times token coverage.", "置信度等于融合分数乘以词语覆盖率。"],
  evidence: ["Evidence", "证据"],
  noEvidence: ["Nothing was searched, so there is no evidence.", "未进行检索，因此没有证据。"],
  nothingFound: ["No passage shares a word with the question.", "没有段落含有问题中的词语。"],
  cited: ["Cited as the answer", "作为答案引用"],
  bm25: ["BM25", "BM25"],
  cosine: ["Cosine", "余弦"],
  score: ["Fused", "融合"],
  stages: ["Stages", "阶段"],
  stage: ["Stage", "阶段"],
  time: ["Time (ms)", "耗时（毫秒）"],
  detail: ["What it did", "做了什么"],
  total: ["Total", "合计"],
  components: ["Components", "组件"],
  modalities: ["Modalities", "模态"],
  promptLayers: ["Prompt layers: there is no prompt", "提示词层次：没有提示词"],
  component: ["Component", "组件"],
  modality: ["Modality", "模态"],
  layer: ["Layer", "层次"],
  kind: ["Kind", "类别"],
  runs: ["Runs", "运行"],
  note: ["How", "说明"],
  yes: ["✓ yes", "✓ 是"],
  no: ["✕ no", "✕ 否"],
  chunks: [" chunks", " 个片段"],
  empty: ["Type a question first.", "请先输入问题。"],
  badTop: ["Top chunks: a whole number from 1 to 10.", "片段数：1 到 10 的整数。"],
  badLeast: ["Minimum confidence: a number from 0 to 1.", "最低置信度：0 到 1 的数。"],
  failed: ["The service does not answer. Is it still running?", "服务没有响应。它还在运行吗？"],
  refused: ["The service refused the request: ", "服务拒绝了请求："],
};

// Names that the service gives in English.
const NAMES = {
  "contract": "请求契约",
  "injection scan": "注入扫描",
  "tokenizer": "分词",
  "BM25, TF-IDF cosine, fusion": "BM25、TF-IDF 余弦、融合",
  "gate": "门槛",
  "evidence pack": "证据包",
  "passed": "通过",
  "injection": "指令注入",
  "no match": "无匹配",
  "extraction only": "只摘录原文",
  "order in a chunk": "片段含指令",
  "subject": "主体",
  "confidence": "置信度",
  "margin": "领先幅度",
  "asks to ignore the rules": "要求忽略规则",
  "asks for the prompt": "索要提示词",
  "assigns another role": "指派其他角色",
  "poses as a chat turn": "冒充对话轮次",
  "asks to decode and obey": "要求解码并执行",
  "asks to switch off the safeguards": "要求关闭防护",
  "hides an order": "隐藏指令",
  "speaks to the machine about its rules": "对机器谈论其规则",
};

const $ = (id) => document.getElementById(id);
const ENGLISH = {};
let language = "en";
let about = null;
let presets = [];
let last = null; // the outcome on the page
let running = null;

const chinese = () => language === "zh";
const say = (key) => SAID[key][chinese() ? 1 : 0];
const named = (name) => (chinese() ? NAMES[name] || name : name);
const both = (row, key) => (chinese() && row[key + "Zh"]) || row[key];
const figure = (number, digits = 2) => number.toFixed(digits);
const tongue = (text) => (/[\u4e00-\u9fff]/.test(text) ? "zh-CN" : "en");

/** An element: properties, then children (strings become text). */
function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "class") element.className = value;
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function bar(share, need) {
  const fill = make("span", { class: "fill" });
  fill.style.width = `${100 * Math.max(0, Math.min(1, share || 0))}%`;
  const track = make("dd", { class: "track", "aria-hidden": "true" }, fill);
  if (need !== undefined) {
    const tick = make("span", { class: "need" });
    tick.style.left = `calc(${100 * Math.min(1, need)}% - .075rem)`;
    track.append(tick);
  }
  return track;
}

function meter(label, share, value, need) {
  const told = make("dd", { class: "value" }, value);
  if (need !== undefined) told.append(" ", make("small", {}, say("needs") + figure(need)));
  return make("div", { class: "meter" }, make("dt", {}, label), bar(share, need), told);
}

function place(citation) {
  const parts = [
    citation.section,
    say("page") + citation.page + say("pageAfter"),
    citation.date,
    citation.source,
  ];
  return parts.filter(Boolean).join(" · ");
}

function showAnswer(outcome) {
  const badge = make("span", { class: "badge" }, say(outcome.status));
  if (outcome.answer === null) {
    const box = make("div", { class: `answer ${outcome.status}` }, badge, make("p", {}, say("noAnswer")));
    if (outcome.injections.length) {
      const found = outcome.injections.map((reason) => make("li", {}, named(reason)));
      box.append(make("p", {}, say("found")), make("ul", {}, ...found));
    }
    return box;
  }
  const { citation } = outcome;
  const caption = make(
    "figcaption", {},
    make("cite", { lang: tongue(citation.title) }, citation.title), make("br"),
    place(citation), make("br"),
    make("a", { href: "#cited" }, say("see")),
  );
  const quote = make("blockquote", { lang: tongue(outcome.answer) }, outcome.answer);
  return make("figure", { class: "answer answered" }, badge, quote, caption);
}

function showGate(outcome) {
  const { gate, scores } = outcome;
  const parts = [
    make("h3", {}, say("gate")),
    make("p", {}, `${both(gate, "explanation")} `, make("small", {}, `(${say("rule")}: ${named(gate.rule)})`)),
  ];
  if (scores) {
    parts.push(
      make(
        "dl", { class: "meters" },
        meter(say("confidence"), gate.confidence, figure(gate.confidence), gate.minimumConfidence),
        meter(say("margin"), scores.margin, figure(scores.margin), gate.minimumMargin),
        meter(say("fused"), scores.fusedScore, figure(scores.fusedScore)),
        meter(say("coverage"), scores.tokenCoverage, figure(scores.tokenCoverage)),
      ),
      make("p", { class: "facts" }, `${say("confidenceIs")} ${say("sources")}: ${scores.sourceCount}`),
    );
  }
  return parts;
}

function showEvidence(outcome) {
  const pack = outcome.evidencePack;
  const parts = [make("h3", {}, say("evidence"))];
  if (!pack.length) {
    const why = outcome.status === "blocked" ? "noEvidence" : "nothingFound";
    return [...parts, make("p", { class: "card" }, say(why))];
  }
  const most = (key) => Math.max(...pack.map((item) => item[key])) || 1;
  const [bm25, cosine] = [most("bm25"), most("cosine")];
  const rows = pack.map((item) => {
    const cited = outcome.answer !== null && item.rank === 1;
    const text = cited ? make("mark", {}, item.text) : item.text;
    const row = make(
      "li", {},
      make(
        "div", { class: "head" },
        make("b", { lang: tongue(item.citation.title) }, `${item.rank}. ${item.citation.title}`),
        cited ? make("span", { class: "tag" }, say("cited")) : null,
      ),
      make("div", { class: "source" }, place(item.citation)),
      make("div", { class: "text", lang: tongue(item.text) }, text),
      make(
        "dl", { class: "meters" },
        meter(say("score"), item.score, figure(item.score, 3)),
        meter(say("bm25"), item.bm25 / bm25, figure(item.bm25, 3)),
        meter(say("cosine"), item.cosine / cosine, figure(item.cosine, 3)),
      ),
    );
    if (cited) Object.assign(row, { id: "cited", className: "cited", tabIndex: -1 });
    return row;
  });
  return [...parts, make("ol", {}, ...rows)];
}

function table(caption, columns, rows) {
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  return make(
    "div", { class: "scroll" },
    make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...rows)),
  );
}

function showStages(outcome) {
  const line = (name, ms, detail) =>
    make(
      "tr", {},
      make("th", { scope: "row" }, name),
      make("td", { class: "number" }, figure(ms)),
      make("td", { class: "detail", lang: "en" }, detail),
    );
  const rows = outcome.stages.map((stage) => line(named(stage.name), stage.ms, stage.detail));
  rows.push(line(say("total"), outcome.stages.reduce((sum, stage) => sum + stage.ms, 0), outcome.indexVersion));
  return [table(say("stages"), [say("stage"), say("time"), say("detail")], rows)];
}

function showAbout() {
  $("index").textContent = `${about.indexVersion} · ${about.chunks}${say("chunks")}`;
  const lists = [
    ["components", "component", true],
    ["modalities", "modality", false],
    ["promptLayers", "layer", false],
  ];
  const cards = lists.map(([list, key, kind]) => {
    const columns = [say(key), ...(kind ? [say("kind")] : []), say("runs"), say("note")];
    const rows = about[list].map((row) =>
      make(
        "tr", {},
        make("th", { scope: "row" }, both(row, key)),
        kind ? make("td", {}, both(row, "kind")) : null,
        make("td", { class: row.runs ? "yes" : "no" }, say(row.runs ? "yes" : "no")),
        make("td", { class: "detail" }, both(row, "note")),
      ),
    );
    return make("div", { class: "card" }, table(say(list), columns, rows));
  });
  $("components").replaceChildren(...cards);
}

function told(outcome) {
  if (outcome.status === "answered") {
    const { title, section } = outcome.citation;
    return say("toldAnswered") + [title, section].filter(Boolean).join(", ");
  }
  return outcome.status === "blocked" ? say("toldBlocked") : say("toldAbstained") + outcome.evidencePack.length;
}

function showPresets() {
  for (const kind of ["baseline", "stress"]) {
    const buttons = presets.filter((preset) => preset.kind === kind).map((preset) => {
      const button = make(
        "button", { type: "button" },
        make("b", {}, both(preset, "title")),
        make("small", { lang: tongue(preset.query) }, preset.query),
      );
      button.dataset.preset = preset.id;
      button.addEventListener("click", () => {
        $("query").value = preset.query;
        search();
      });
      return make("li", {}, button);
    });
    $(kind).replaceChildren(...buttons);
  }
  markPreset();
}

function markPreset() {
  const now = $("query").value.trim();
  for (const button of document.querySelectorAll("[data-preset]")) {
    const same = presets.find((preset) => preset.id === button.dataset.preset).query === now;
    button.setAttribute("aria-current", String(same));
  }
}

function show() {
  if (last === null) return;
  $("answer").replaceChildren(showAnswer(last));
  $("gate").replaceChildren(...showGate(last));
  $("evidence").replaceChildren(...showEvidence(last));
  $("stages").replaceChildren(...showStages(last));
  $("outcome").hidden = false;
  $("status").textContent = told(last);
}

function refuse(text, field) {
  $("error").textContent = text;
  for (const id of ["query", "top", "least"]) {
    if (id === field) $(id).setAttribute("aria-invalid", "true");
    else $(id).removeAttribute("aria-invalid");
  }
  if (field) $(field).focus();
}

/** The request's body, or null where a field is not right (which is said at the field). */
function request() {
  const body = { query: $("query").value.trim(), topK: Number($("top").value) };
  const least = $("least");
  refuse("");
  if (!body.query) refuse(say("empty"), "query");
  else if (!Number.isInteger(body.topK) || body.topK < 1 || body.topK > 10) refuse(say("badTop"), "top");
  else if (least.validity.badInput || Number(least.value) < 0 || Number(least.value) > 1) refuse(say("badLeast"), "least");
  else return least.value === "" ? body : { ...body, minimumConfidence: Number(least.value) };
  return null;
}

async function search() {
  const body = request();
  markPreset();
  if (body === null) return;
  if (running) running.abort();
  const mine = (running = new AbortController());
  const submit = document.querySelector(".primary");
  submit.setAttribute("aria-disabled", "true");
  $("status").textContent = say("searching");
  let failure = "";
  try {
    const response = await fetch(API, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: mine.signal,
    });
    const given = await response.json();
    if (response.ok) last = given;
    else failure = say("refused") + given.message;
  } catch (error) {
    failure = say("failed");
  }
  if (running !== mine) return; // another question was asked meanwhile
  running = null;
  submit.removeAttribute("aria-disabled");
  if (failure) {
    last = null;
    $("outcome").hidden = true;
    $("status").textContent = "";
    refuse(failure);
  } else {
    show();
    const { top } = $("result").getBoundingClientRect();
    if (top < 0 || top > 0.6 * innerHeight) $("result").scrollIntoView(); // below the form where there is one column
  }
}

function speak(chosen) {
  language = chosen;
  document.documentElement.lang = chinese() ? "zh-CN" : "en";
  for (const element of document.querySelectorAll("[data-t]")) {
    const key = element.dataset.t;
    ENGLISH[key] = ENGLISH[key] || element.textContent;
    element.textContent = (chinese() && CHINESE[key]) || ENGLISH[key];
  }
  for (const button of document.querySelectorAll("[data-language]")) {
    button.setAttribute("aria-pressed", String(button.dataset.language === chosen));
  }
  refuse("");
  if (about) showAbout();
  showPresets();
  show();
  try {
    localStorage.setItem("language", chosen);
  } catch (error) { /* a browser may keep nothing */ }
}

function preferred() {
  try {
    const kept = localStorage.getItem("language");
    if (kept === "en" || kept === "zh") return kept;
  } catch (error) { /* a browser may keep nothing */ }
  return (navigator.language || "").toLowerCase().startsWith("zh") ? "zh" : "en";
}

async function start() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    search();
  });
  $("query").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // composing: Enter chooses a character
    event.preventDefault();
    search();
  });
  for (const button of document.querySelectorAll("[data-language]")) {
    button.addEventListener("click", () => speak(button.dataset.language));
  }
  speak(preferred());
  try {
    [about, presets] = await Promise.all([API, `${API}/presets`].map(async (url) => (await fetch(url)).json()));
  } catch (error) {
    refuse(say("failed"));
    return;
  }
  $("least").value = about.minimumConfidence;
  showAbout();
  showPresets();
}

start();
