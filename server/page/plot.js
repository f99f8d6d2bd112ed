// Small plots as SVG: a line for each series, the newest value as text.

import { make } from "./dom.js";

const WIDTH = 240, HEIGHT = 60;
const svg = (tag, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

/** The points of a line; a value that is unknown breaks nothing, it is left out. */
export function linePoints(values, most, width = WIDTH, height = HEIGHT) {
  const step = width / Math.max(values.length - 1, 1);
  return values
    .map((value, at) => (value === null ? "" : `${(at * step).toFixed(1)},${(height - 2 - (value / (most || 1)) * (height - 4)).toFixed(1)}`))
    .filter(Boolean)
    .join(" ");
}

/** A plot of series, `[name, values]`; `shown(value)` writes a value with its unit. */
export function plot(title, series, shown, range = "") {
  const most = Math.max(...series.flatMap(([, values]) => values.map(each => each ?? 0)), 0);
  const told = series
    .map(([name, values]) => (name ? `${name} ` : "") + (values.at(-1) === null || !values.length ? "–" : shown(values.at(-1))))
    .join(" · ");
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${told}` });
  series.forEach(([, values], at) =>
    drawing.append(svg("polyline", { points: linePoints(values, most), class: `line line${at}` })));
  return make("figure", { class: "plot" },
    make("figcaption", {}, make("strong", {}, title), make("span", {}, told)),
    drawing,
    make("p", { class: "hint" }, `highest ${shown(most)}${range}`));
}
