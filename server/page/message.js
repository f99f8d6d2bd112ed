// One message as elements: thoughts, text, tool calls, images, what it cost.

import { button, copyButton, make } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };

/** The frame of a message; `update(element, node)` fills it. */
export function messageElement(node, actions) {
  const element = make(
    "article",
    { class: `message ${node.role}`, "data-node": node.id, "aria-label": NAMES[node.role] },
    make("h2", {}, NAMES[node.role]),
    make("details", { class: "thoughts", hidden: true }, make("summary", {}, "Thoughts"), make("div")),
    make("div", { class: "images" }, ...(node.images ?? []).map((src, at) => make("img", { src, alt: `Image ${at + 1}` }))),
    make("div", { class: "text" }),
    make("div", { class: "calls" }),
    make("p", { class: "note", hidden: true }),
    make("footer", {}, make("span", { class: "cost" }), ...actions),
  );
  update(element, node, false);
  return element;
}

/** Show what `node` holds by now. */
export function update(element, node, isRunning) {
  const [, thoughts, , text, calls, note, footer] = element.children;
  element.setAttribute("aria-busy", isRunning);
  thoughts.hidden = !node.thoughts;
  if (node.thoughts) showMarkdown(thoughts.lastChild, node.thoughts);
  thoughts.firstChild.textContent = isRunning && !node.text ? "Thinking …" : "Thoughts";
  if (node.role === "assistant") showMarkdown(text, node.text);
  else text.textContent = node.text;
  calls.replaceChildren(...(node.calls ?? []).map(callElement));
  note.hidden = !node.note;
  note.textContent = node.note ?? "";
  footer.firstChild.textContent = cost(node);
}

function callElement(call) {
  let given = call.arguments;
  try {
    given = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // It is still being written.
  }
  return make("figure", { class: "code call", "aria-label": `Tool call, ${call.name}` },
    make("figcaption", {}, make("span", {}, `calls ${call.name}`), copyButton(() => given)),
    make("pre", { tabindex: 0 }, make("code", {}, given)));
}

function cost({ usage, times }) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens` + (cached ? ` (${cached} cached)` : ""));
  }
  if (times?.first) {
    parts.push(`first after ${Math.round(times.first)} ms`);
    const seconds = (times.last - times.first) / 1000;
    if (usage?.completion_tokens > 1 && seconds > 0)
      parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  return parts.join(" · ");
}

const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(1)}%`;

/** The tokens of an answer, shaded by probability; hover or arrow keys tell the alternatives. */
export function tokensElement(tokens) {
  const told = make("output", { class: "alternatives", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
  const spans = tokens.map(([text, logprob], at) =>
    make("span", { class: `token p${Math.min(4, Math.floor(5 * Math.exp(logprob)))}`, tabindex: at ? -1 : 0 }, text));
  const tell = target => {
    const at = spans.indexOf(target);
    if (at < 0) return;
    const [text, logprob, top] = tokens[at];
    const others = top.map(([other, each]) => `${JSON.stringify(other)} ${percent(each)}`).join(", ");
    told.textContent = `${JSON.stringify(text)} ${percent(logprob)}; most probable: ${others}`;
  };
  const onkeydown = event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const next = step && spans[spans.indexOf(event.target) + step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };
  const box = make("div", {
    class: "token-list", role: "group", "aria-label": "Token probabilities",
    onmouseover: event => tell(event.target), onfocusin: event => tell(event.target), onkeydown,
  }, ...spans);
  return make("div", { class: "tokens" }, box, told);
}

/** A form for the results of an answer's tool calls. */
export function resultsForm(calls, send) {
  const fields = calls.map(call => make("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` }));
  const submit = button("Send results", () => send(fields.map(field => field.value)));
  return make("div", { class: "results" }, ...fields, submit);
}
