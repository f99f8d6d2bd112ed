// Markdown as elements. A small part of CommonMark: headings, lists, quotes, tables, rules, fenced
// code; emphasis, code, links. Tags stay text, images become links, and nothing is fetched.

import { copyButton, make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8;

/** Show `text` in `parent`; blocks that did not change since the last call keep their elements. */
export function showMarkdown(parent, text) {
  const sources = blocks(text.split("\n"));
  sources.forEach((lines, at) => {
    const source = lines.join("\n");
    const old = parent.children[at];
    if (old?.source === source) return;
    const element = block(lines, 0);
    element.source = source;
    if (old) old.replaceWith(element);
    else parent.append(element);
  });
  while (parent.children.length > sources.length) parent.lastChild.remove();
}

const startsBlock = (line, next) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) ||
  ITEM.test(line) || (line.includes("|") && next !== undefined && TABLE_RULE.test(next));

/** Cut lines into blocks, lists of lines. */
function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const end = Math.max(endOf(lines, at), at + 1);
    found.push(lines.slice(at, end));
    at = end;
  }
  return found;
}

function endOf(lines, start) {
  let at = start + 1;
  const first = lines[start];
  const fence = FENCE.exec(first);
  if (fence) {
    const closes = line =>
      line.trim().startsWith(fence[1]) && !line.trim().replaceAll(fence[1][0], "");
    while (at < lines.length && !closes(lines[at])) at++;
    return at + 1;
  }
  if (HEADING.test(first) || RULE.test(first)) return at;
  if (QUOTE.test(first)) {
    while (at < lines.length && QUOTE.test(lines[at])) at++;
    return at;
  }
  const item = ITEM.exec(first);
  if (item) {
    const isOrdered = isNumber(item[2]);
    const goesOn = line => {
      const next = ITEM.exec(line);
      if (next && next[1].length <= item[1].length + 1) return isNumber(next[2]) === isOrdered;
      return Boolean(next) || /^ {2,}\S/.test(line);
    };
    for (; at < lines.length; at++) {
      if (lines[at].trim()) {
        const isLazy = lines[at - 1].trim() && !startsBlock(lines[at], lines[at + 1]);
        if (!goesOn(lines[at]) && !isLazy) break;
      } else if (at + 1 >= lines.length || !goesOn(lines[at + 1])) break;
    }
    return at;
  }
  if (startsBlock(first, lines[at])) {
    while (at < lines.length && lines[at].includes("|")) at++;
    return at;
  }
  while (at < lines.length && lines[at].trim() && !startsBlock(lines[at], lines[at + 1])) at++;
  return at;
}

const isNumber = marker => /\d/.test(marker);

function block(lines, depth) {
  const first = lines[0];
  const fence = FENCE.exec(first);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(first);
  // The page's own headings are h1 and h2.
  if (heading) return make(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2]));
  if (RULE.test(first)) return make("hr");
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(first)) return quote(lines, depth);
    if (ITEM.test(first)) return list(lines, depth);
    if (lines.length > 1 && TABLE_RULE.test(lines[1]) && first.includes("|")) return table(lines);
  }
  return make("p", {}, ...inline(lines.join("\n")));
}

function code(lines, fence) {
  const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const head = make("figcaption", {}, make("span", {}, fence[2] || "text"), copyButton(() => text));
  const label = `Code, ${fence[2] || "text"}`;
  const body = make("pre", { tabindex: 0, role: "region", "aria-label": label }, make("code", {}, text));
  return make("figure", { class: "code" }, head, body);
}

const inner = (lines, depth) => blocks(lines).map(each => block(each, depth + 1));

const quote = (lines, depth) =>
  make("blockquote", {}, ...inner(lines.map(line => line.replace(QUOTE, "")), depth));

function list(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) {
      width = item[1].length + item[2].length + 1;
      items.push([item[3]]);
    } else items.at(-1).push(line.slice(Math.min(width, line.search(/\S|$/))));
  }
  const rows = items.map(item => {
    const parts = inner(item, depth);
    // A tight item has no paragraph of its own.
    if (parts[0]?.tagName === "P") parts.splice(0, 1, ...parts[0].childNodes);
    return make("li", {}, ...parts);
  });
  const start = Number.parseInt(marker, 10);
  return isNumber(marker) ? make("ol", { start: start === 1 ? null : start }, ...rows) : make("ul", {}, ...rows);
}

const cells = line =>
  line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));

function table(lines) {
  const row = (line, tag) =>
    make("tr", {}, ...cells(line).map(cell => make(tag, {}, ...inline(cell))));
  const head = make("thead", {}, row(lines[0], "th"));
  const body = make("tbody", {}, ...lines.slice(2).map(line => row(line, "td")));
  return make("div", { class: "scroll" }, make("table", {}, head, body));
}

// Bounded repetitions: an answer of a thousand stars must not take seconds.
const INLINE = new RegExp(
  [
    /(?<ticks>`{1,3})(?<code>[^]{1,800}?)\k<ticks>(?!`)/,
    /\\(?<escaped>[\\`*_{}[\]()#+\-.!|~<>])/,
    /(?<strongMark>\*\*|__)(?=\S)(?<strong>[^]{1,800}?)(?<=\S)\k<strongMark>/,
    /(?<![\p{L}\p{N}_])_(?=\S)(?<under>[^_]{1,800})(?<=\S)_(?![\p{L}\p{N}])/,
    /\*(?=[^\s*])(?<star>[^*]{1,800})(?<=\S)\*/,
    /~~(?=\S)(?<struck>[^]{1,800}?)~~/,
    /!?\[(?<label>[^\][]{0,400})\]\((?<target>https?:\/\/[^\s)]{1,800})(?:\s+"[^"\n]{0,200}")?\)/,
    /(?<address>https?:\/\/[^\s<>()"'`]{1,800}[^\s<>()"'`.,;:!?])/,
    /(?<lineBreak>(?: {2,}|\\)?\n)/,
  ].map(each => each.source).join("|"),
  "gu",
);

function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parts.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const found = match.groups;
    const styled = (tag, content) => make(tag, {}, ...inline(content, depth + 1));
    if (found.code !== undefined) parts.push(make("code", {}, found.code));
    else if (found.escaped !== undefined) parts.push(found.escaped);
    else if (found.strong !== undefined) parts.push(styled("strong", found.strong));
    else if (found.under !== undefined) parts.push(styled("em", found.under));
    else if (found.star !== undefined) parts.push(styled("em", found.star));
    else if (found.struck !== undefined) parts.push(styled("s", found.struck));
    else if (found.lineBreak !== undefined) parts.push(make("br"));
    else parts.push(link(found.target ?? found.address, found.label));
  }
  parts.push(text.slice(end));
  return parts.filter(part => part !== "");
}

// Only http and https reach this, and a click is needed: the address is shown.
const link = (target, label) =>
  make("a", { href: target, title: target, target: "_blank", rel: "noopener noreferrer" }, label || target);
