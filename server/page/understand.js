// Understand: a text as tokens, a prompt against the prefix cache, the milliseconds of a request.

import { post, read } from "./api.js";
import { button, byId, make } from "./dom.js";
import { plot } from "./plot.js";
import { currentRequest, lastAnswer } from "./talk.js";

const MAX_SHOWN = 4000;

export function start() {
  byId("tokenize").addEventListener("submit", event => {
    event.preventDefault();
    showing("tokens", tokens);
  });
  byId("explain").addEventListener("click", () => showing("explained", explain));
  // Other clients' requests are the operator's to see; the admin key is not kept.
  byId("request-key").hidden = document.documentElement.dataset.admin !== "apart";
  byId("explain-request").addEventListener("submit", event => {
    event.preventDefault();
    showing("request-explained", explainRequest);
  });
  document.addEventListener("view", event => event.detail === "understand" && showTimes());
}

/** Fill the element `id` with what `work` gives, or with the reason why not. */
async function showing(id, work) {
  const place = byId(id);
  place.setAttribute("aria-busy", "true");
  try {
    place.replaceChildren(...(await work()));
  } catch (error) {
    place.replaceChildren(make("p", { class: "note" }, error.message));
  }
  place.setAttribute("aria-busy", "false");
}

async function tokens() {
  const prompt = byId("text").value;
  const { tokens: ids, count } = await post("tokenize", { prompt, add_special_tokens: byId("special").checked });
  const shown = ids.slice(0, MAX_SHOWN);
  const { text } = await post("detokenize", { tokens: shown.map(id => [id]), skip_special_tokens: false });
  const bytes = new TextEncoder().encode(prompt).length;
  const rest = count > shown.length ? ` The first ${shown.length} are shown.` : "";
  return [
    make("p", {}, `${count} tokens, ${bytes} bytes, ${(bytes / Math.max(count, 1)).toFixed(1)} bytes a token.${rest}`),
    make("ol", { class: "chips", "aria-label": "Tokens" }, ...shown.map((id, at) =>
      make("li", { class: `chip chip${at % 5}` }, make("span", {}, text[at].replaceAll("\n", "⏎\n") || "∅"), make("small", {}, String(id))))),
  ];
}

async function explain() {
  const info = await read("server_info");
  if (!info.enable_cache_report)
    return [make("p", {}, "Start the server with --enable-cache-report: where a prompt leaves the cache tells what others have sent.")];
  const body = currentRequest();
  if (!body.messages.length) return [make("p", {}, "The conversation under Talk is empty.")];
  const { prompt_tokens: all, cached_tokens: cached, cache_break: broken } = await post("explain_cache", { body });
  const found = [
    make("p", {}, `${cached} of ${all} prompt tokens would come from the cache.`),
    make("meter", { min: 0, max: all, value: cached, "aria-label": "Cached share of the prompt" }),
  ];
  if (broken) {
    const why = broken.kind === "differs" ? "another cached prompt goes on differently here" : "no cached prompt goes on here";
    found.push(make("p", {}, `The prompt leaves the cache at token ${broken.index}: ${why}. Whole pages of ${info.page_size} tokens are reused.`),
      make("pre", { class: "break", tabindex: 0 }, make("span", {}, broken.before), make("mark", {}, broken.after)));
  }
  return found;
}

async function explainRequest() {
  const id = byId("request").value.trim() || lastAnswer()?.request;
  if (!id) return [make("p", {}, "Give the id of a request: its rid, its answer's id, or its x-request-id.")];
  const { requests } = await post("explain_request", { id }, byId("request-key").value);
  return requests.flatMap(request => [
    make("p", {}, `${request.rid}: ${ms(request.total_ms)}, ${request.cached_tokens} of ${request.prompt_tokens} prompt tokens cached, ${request.completion_tokens} of the answer.`),
    rows(request.stages.flatMap(({ name, ms: took, parts }) => [
      [name, ms(took)], ...Object.entries(parts).map(([part, some]) => [`– ${part}`, ms(some)])])),
    make("ul", {}, ...request.causes.map(({ name, ms: took, text }) => make("li", {}, make("strong", {}, name), `: ${ms(took)}. ${text}`))),
    ...(request.prefix ? [make("p", {}, `The prompt left the cache at token ${request.prefix.index}.`),
      make("pre", { class: "break", tabindex: 0 }, make("span", {}, request.prefix.before), make("mark", {}, request.prefix.after))] : []),
  ]);
}

const rows = facts => make("table", {}, make("tbody", {}, ...facts.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)))));

const ms = value => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;

function showTimes() {
  const answer = lastAnswer();
  const place = byId("times");
  if (!answer) {
    place.replaceChildren(make("p", {}, "No answer of the conversation under Talk has times yet."));
    return;
  }
  const { first, last, gaps } = answer.times;
  const sorted = [...gaps].sort((a, b) => a - b);
  const at = share => (sorted.length ? ms(sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]) : "–");
  const bar = make("div", { class: "bar", role: "img", "aria-label": `First token after ${ms(first)} of ${ms(last)}` }, make("span"), make("span"));
  bar.firstChild.style.flexGrow = first;
  bar.lastChild.style.flexGrow = last - first;
  const facts = [
    ["Until the first token (queue, prompt, first step, way back)", ms(first)],
    ["From the first token to the last", ms(last - first)],
    ["Between two pieces: median", at(0.5)],
    ["99th percentile", at(0.99)],
    ["Longest", at(1)],
    ["Prompt tokens, from the cache", `${answer.usage?.prompt_tokens ?? "–"}, ${answer.usage?.prompt_tokens_details?.cached_tokens ?? "not reported"}`],
  ];
  place.replaceChildren(bar,
    rows(facts),
    plot("Milliseconds between pieces", [["", gaps]], ms),
    button("Refresh", showTimes));
}
