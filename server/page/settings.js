// The controls beside a conversation.

import { byId } from "./dom.js";

const KEPT = "headrace-settings";
const form = () => byId("settings-form");

/** What a new conversation begins with: the controls as they were last set. */
export function lastSettings() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}

export function readSettings() {
  const settings = {};
  for (const field of form().elements) {
    if (!field.name) continue;
    const value = field.type === "checkbox" ? field.checked : field.value;
    if (value) settings[field.name] = value;
  }
  return settings;
}

export function showSettings(settings) {
  for (const field of form().elements) {
    if (!field.name) continue;
    if (field.type === "checkbox") field.checked = Boolean(settings[field.name]);
    else field.value = settings[field.name] ?? "";
    field.removeAttribute("aria-invalid");
  }
}

export function onChange(changed) {
  form().addEventListener("submit", event => event.preventDefault());
  form().addEventListener("input", event => {
    event.target.removeAttribute("aria-invalid");
    const settings = readSettings();
    localStorage.setItem(KEPT, JSON.stringify(settings));
    changed(settings);
  });
}

/** Point at the control whose value cannot be sent. */
export function refuse(name) {
  const field = form().elements[name];
  field.closest("details")?.setAttribute("open", "");
  field.setAttribute("aria-invalid", "true");
  field.focus();
}
