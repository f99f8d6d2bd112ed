// Talk: conversations with streamed answers.

import { events, key } from "./api.js";
import { asCurl, asPython, chatRequest } from "./chat_request.js";
import * as kept from "./conversations.js";
import { announce, button, byId, copyButton, make } from "./dom.js";
import { messageElement, resultsForm, tokensElement, update } from "./message.js";
import { lastSettings, onChange, refuse, showSettings } from "./settings.js";

const SAVE_MS = 1000;
let model = "default";
let conversations = [];
let current = null;
let images = [];
// One answer of each conversation may run; another one can be read meanwhile.
const running = new Map();

/** The conversation that is shown, as a request; the other views ask about it. */
export const currentRequest = () => chatRequest(current.settings, kept.path(current), model);
/** The latest answer that ended, with its times. */
export const lastAnswer = () => kept.path(current).findLast(node => node.times?.first);

/** Begin; `server` has the model's name and whether it sees images. */
export async function start(server) {
  model = server.model;
  byId("attach").hidden = !server.sees;
  conversations = await kept.load();
  onChange(settings => {
    current.settings = settings;
    keep(current);
  });
  byId("new").addEventListener("click", () => {
    open(kept.create(lastSettings()));
    byId("prompt").focus();
  });
  byId("stop").addEventListener("click", stop);
  byId("as-program").addEventListener("click", showAsProgram);
  startComposer(server.sees);
  open(conversations[0] ?? kept.create(lastSettings()));
}

function startComposer(sees) {
  const prompt = byId("prompt");
  byId("composer").addEventListener("submit", event => {
    event.preventDefault();
    submit();
  });
  prompt.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  if (!sees) return;
  const take = files => {
    for (const file of files) if (file.type.startsWith("image/")) attach(file);
  };
  byId("files").addEventListener("change", event => {
    take(event.target.files);
    event.target.value = "";
  });
  byId("attach").addEventListener("click", () => byId("files").click());
  prompt.addEventListener("paste", event => take(event.clipboardData.files));
  byId("composer").addEventListener("dragover", event => event.preventDefault());
  byId("composer").addEventListener("drop", event => {
    event.preventDefault();
    take(event.dataTransfer.files);
  });
}

function attach(file) {
  const reader = new FileReader();
  reader.onload = () => {
    images.push(reader.result);
    showAttached();
    announce(`${file.name} is attached.`);
  };
  reader.readAsDataURL(file);
}

function showAttached() {
  byId("attached").replaceChildren(...images.map((src, at) =>
    make("span", {}, make("img", { src, alt: `Attached image ${at + 1}` }),
      button("Remove", () => {
        images.splice(at, 1);
        showAttached();
      }, { "aria-label": `Remove image ${at + 1}` }))));
}

async function keep(conversation) {
  // Unused conversations are not kept.
  if (conversation.leaf === "root") return;
  try {
    await kept.save(conversation);
  } catch (error) {
    announce(`This conversation could not be kept: ${error.message}`);
  }
}

function open(conversation) {
  current = conversation;
  showSettings(conversation.settings);
  draw();
}

function submit() {
  const prompt = byId("prompt");
  const text = prompt.value;
  if (running.has(current.id) || !(text.trim() || images.length)) return;
  kept.append(current, current.leaf, { role: "user", text, images });
  prompt.value = "";
  images = [];
  showAttached();
  if (!conversations.includes(current)) conversations.unshift(current);
  answer(current, current.leaf);
}

const stop = () => running.get(current.id)?.abort();

/** Stream an answer to `parent` into a new message of `conversation`. */
async function answer(conversation, parent) {
  let body;
  try {
    body = chatRequest(conversation.settings, kept.path(conversation, parent), model);
  } catch (error) {
    draw();
    announce(error.message);
    refuse(error.field);
    return;
  }
  Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  const node = kept.append(conversation, parent, { role: "assistant" });
  const controller = new AbortController();
  running.set(conversation.id, controller);
  draw();
  announce("The answer is being written.");
  const show = eachFrame(() => drawMessage(conversation, node));
  let saved = performance.now();
  try {
    const begun = performance.now();
    for await (const event of events("v1/chat/completions", body, controller.signal)) {
      take(node, event, performance.now() - begun);
      show();
      if (performance.now() - saved > SAVE_MS) {
        saved = performance.now();
        keep(conversation);
      }
    }
    if (node.finish === "length") node.note = "The answer reached its longest length.";
  } catch (error) {
    node.note = error.name === "AbortError" ? "Stopped." : `Error: ${error.message}`;
  }
  running.delete(conversation.id);
  await keep(conversation);
  if (conversation === current) draw();
  announce(node.note ?? "The answer is complete.");
}

function take(node, event, ms) {
  if (event.usage) node.usage = event.usage;
  node.request = event.id;
  const choice = event.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: thoughts, tool_calls: calls } = choice.delta;
  if (content || thoughts || calls?.length) {
    node.times ??= { first: ms, gaps: [] };
    if (node.times.last !== undefined) node.times.gaps.push(ms - node.times.last);
    node.times.last = ms;
  }
  if (content) node.text += content;
  if (thoughts) node.thoughts = (node.thoughts ?? "") + thoughts;
  for (const call of calls ?? []) {
    node.calls ??= [];
    const known = (node.calls[call.index] ??= { id: "", name: "", arguments: "" });
    if (call.id) known.id = call.id;
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  for (const { token, logprob, top_logprobs: top } of choice.logprobs?.content ?? [])
    (node.tokens ??= []).push([token, logprob, top.map(each => [each.token, each.logprob])]);
  if (choice.finish_reason) node.finish = choice.finish_reason;
}

/** `work`, at most once a frame. */
function eachFrame(work) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      work();
    });
  };
}

function draw() {
  drawList();
  const log = byId("messages");
  const path = kept.path(current);
  log.replaceChildren(...path.map(node => messageElement(node, actions(node))));
  const end = path.at(-1);
  const isRunning = running.has(current.id);
  if (end?.calls?.length && !isRunning)
    log.lastChild.querySelector(".calls").append(resultsForm(end.calls, results => sendResults(end, results)));
  if (!path.length) log.append(make("p", { class: "hint" }, `Ask ${model} something.`));
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
  byId("as-program").disabled = !path.length;
  log.scrollTop = log.scrollHeight;
}

function drawMessage(conversation, node) {
  if (conversation !== current) return;
  const element = document.querySelector(`[data-node="${node.id}"]`);
  if (!element || !running.has(conversation.id)) return;
  const log = byId("messages");
  // Whoever has scrolled back reads there.
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  update(element, node, true);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function drawList() {
  byId("conversation-list").replaceChildren(...conversations.map(each =>
    make("li", {},
      button(each.title || "Images", () => open(each), { class: "title", "aria-current": each === current ? "true" : null }),
      button("×", event => removeConversation(each, event.target), { class: "remove", "aria-label": `Delete ${each.title}` }))));
}

/** The first click asks, the second one deletes. */
async function removeConversation(conversation, clicked) {
  if (!clicked.dataset.sure) {
    clicked.dataset.sure = "true";
    clicked.textContent = "Delete?";
    return;
  }
  running.get(conversation.id)?.abort();
  conversations = conversations.filter(each => each !== conversation);
  await kept.remove(conversation);
  if (conversation === current) open(conversations[0] ?? kept.create(lastSettings()));
  else drawList();
}

function actions(node) {
  if (running.has(current.id)) return [];
  const all = kept.siblings(current, node);
  const at = all.indexOf(node.id);
  const turn = step => () => {
    kept.turn(current, node, step);
    keep(current);
    draw();
  };
  const found = [];
  if (all.length > 1)
    found.push(make("span", { class: "turns", role: "group", "aria-label": "Versions" },
      button("‹", turn(-1), { disabled: at === 0, "aria-label": "Earlier version" }),
      `${at + 1}/${all.length}`,
      button("›", turn(1), { disabled: at === all.length - 1, "aria-label": "Later version" })));
  found.push(copyButton(() => node.text));
  if (node.role !== "tool") found.push(button("Edit", () => edit(node)));
  if (node.role === "assistant") {
    found.push(button("Regenerate", () => answer(current, node.parent)));
    found.push(button("Branch", () => {
      conversations.unshift(kept.branch(current, node));
      keep(conversations[0]);
      open(conversations[0]);
    }));
  }
  if (node.tokens?.length) found.push(button("Tokens", event => toggleTokens(node, event.target), { "aria-pressed": "false" }));
  return found;
}

function toggleTokens(node, pressed) {
  const text = document.querySelector(`[data-node="${node.id}"] .text`);
  const isOn = pressed.getAttribute("aria-pressed") === "false";
  pressed.setAttribute("aria-pressed", isOn);
  text.replaceChildren();
  if (isOn) text.append(tokensElement(node.tokens));
  else update(text.parentElement, node, false);
}

function edit(node) {
  const text = document.querySelector(`[data-node="${node.id}"] .text`);
  const field = make("textarea", { rows: Math.min(12, node.text.split("\n").length + 1), "aria-label": "Edited text" });
  field.value = node.text;
  const done = () => {
    const { role, images: shown, calls } = node;
    kept.append(current, node.parent, { role, images: shown, calls, text: field.value });
    if (role === "user") answer(current, current.leaf);
    else {
      keep(current);
      draw();
    }
  };
  text.replaceChildren(field, button(node.role === "user" ? "Send" : "Keep", done), button("Cancel", draw));
  field.focus();
}

function sendResults(node, results) {
  let parent = node.id;
  results.forEach((text, at) => {
    parent = kept.append(current, parent, { role: "tool", text, callId: node.calls[at].id }).id;
  });
  answer(current, parent);
}

function showAsProgram() {
  let path = kept.path(current);
  // The request whose answer is shown, not the next one.
  if (path.at(-1).role === "assistant") path = path.slice(0, -1);
  const body = chatRequest(current.settings, path, model);
  const hasKey = Boolean(key());
  const parts = [["curl", asCurl(body, hasKey)], ["Python", asPython(body, hasKey)]];
  byId("program-list").replaceChildren(...parts.map(([name, text]) =>
    make("figure", { class: "code" },
      make("figcaption", {}, make("span", {}, name), copyButton(() => text)),
      make("pre", { tabindex: 0 }, make("code", {}, text)))));
  byId("program-dialog").showModal();
}
