// The page's beginning: the key, the model, the views.

import { keepKey, key, onRefusal, read } from "./api.js";
import { byId } from "./dom.js";
import * as talk from "./talk.js";
import * as understand from "./understand.js";
import * as watch from "./watch.js";

let asking = null;

/** Ask for a key once, however many requests wait for it; resolves to whether one was given. */
function askForKey(refusal) {
  asking ??= new Promise(resolve => {
    const dialog = byId("key-dialog");
    const form = dialog.querySelector("form");
    byId("key-refusal").textContent = refusal;
    form.onsubmit = event => {
      event.preventDefault();
      keepKey(byId("key").value.trim(), byId("remember").checked);
      dialog.returnValue = "given";
      dialog.close("given");
    };
    dialog.onclose = () => {
      asking = null;
      resolve(dialog.returnValue === "given");
    };
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asking;
}

function startTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const choose = tab => {
    for (const each of tabs) {
      const isChosen = each === tab;
      each.setAttribute("aria-selected", isChosen);
      each.tabIndex = isChosen ? 0 : -1;
      byId(each.getAttribute("aria-controls")).hidden = !isChosen;
    }
    document.dispatchEvent(new CustomEvent("view", { detail: tab.getAttribute("aria-controls") }));
  };
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", event => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const next = tabs[(at + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  });
}

function announceFailure(text) {
  byId("failure").textContent = text;
  byId("failure").hidden = false;
}

async function start() {
  startTabs();
  onRefusal(askForKey);
  for (const cancel of document.querySelectorAll("dialog .cancel"))
    cancel.addEventListener("click", () => cancel.closest("dialog").close(""));
  byId("change-key").addEventListener("click", async () => (await askForKey("")) && location.reload());
  const needsKey = document.documentElement.dataset.key === "needed";
  byId("change-key").hidden = !needsKey;
  if (needsKey && !key()) await askForKey("This server needs an API key.");
  // Wide windows have room for both side columns.
  if (matchMedia("(min-width: 64rem)").matches)
    for (const side of document.querySelectorAll(".side")) side.open = true;
  try {
    const info = await read("model_info");
    const models = await read("v1/models");
    const server = { model: models.data[0]?.id ?? "default", sees: info.has_image_understanding };
    byId("model").textContent = server.model;
    document.title = `${server.model} · Headrace`;
    await talk.start(server);
    watch.start();
    understand.start();
    if (!info.is_generation) announceFailure("This model gives vectors or scores, no text: its routes are under docs.");
    document.body.dataset.ready = "true";
  } catch (error) {
    announceFailure(`The server does not answer this page: ${error.message}`);
  }
}

start();
