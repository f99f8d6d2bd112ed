// Elements. Text always becomes a text node: what a model or a person writes is never markup.

export const byId = id => document.getElementById(id);

/** An element with `properties` (`class`, `on...` listeners, attributes) and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(each => each !== null && each !== undefined && each !== false));
  return element;
}

export const button = (text, onclick, properties = {}) =>
  make("button", { type: "button", onclick, ...properties }, text);

/** A button that copies what `text()` gives. */
export function copyButton(text, label = "Copy") {
  const copy = button(label, async () => {
    try {
      await navigator.clipboard.writeText(text());
      copy.textContent = "Copied";
    } catch {
      // Browsers offer the clipboard to HTTPS and localhost only.
      const area = make("textarea", { class: "hidden" });
      area.value = text();
      document.body.append(area);
      area.select();
      copy.textContent = document.execCommand("copy") ? "Copied" : "Not allowed";
      area.remove();
    }
    setTimeout(() => (copy.textContent = label), 1500);
  });
  return copy;
}

/** Tell people who do not see the page. */
export function announce(text) {
  byId("status").textContent = text;
}
