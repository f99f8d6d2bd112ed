// Watch: the server's load as small live plots.

import { post, read, readText } from "./api.js";
import { byId, make } from "./dom.js";
import { plot } from "./plot.js";

const INTERVAL_MS = 2000, KEPT = 150;
const PREFIX = "sglang:";
const history = [];
let info = null;
let timer = null;
let before = null;

// Other clients' errors are the operator's to see; the admin key is not kept.
let showsErrors = document.documentElement.dataset.admin !== "apart";
let adminKey = "";

/** Poll while the view is shown. */
export function start() {
  const show = byId("show-errors");
  show.hidden = showsErrors;
  show.addEventListener("submit", event => {
    event.preventDefault();
    adminKey = byId("admin-key").value;
    show.hidden = showsErrors = true;
    follow(true);
  });
  document.addEventListener("view", event => follow(event.detail === "watch"));
  document.addEventListener("visibilitychange", () => follow(!document.hidden && !byId("watch").hidden));
}

function follow(isShown) {
  clearTimeout(timer);
  timer = null;
  if (isShown) poll();
}

async function poll() {
  const mine = (timer = setTimeout(() => {}, 0));
  try {
    info ??= await read("server_info");
    const { loads } = await read("v1/loads");
    const metrics = info.enable_metrics ? parseMetrics(await readText("metrics")) : null;
    history.push(sample(loads, metrics));
    if (history.length > KEPT) history.shift();
    draw(loads, metrics);
    if (showsErrors) drawErrors((await post("last_errors", {}, adminKey)).errors);
    byId("watch-note").textContent = metrics ? "" :
      "Start the server with --enable-metrics to see the time to the first token and how many requests fail.";
  } catch (error) {
    byId("watch-note").textContent = `The server does not answer: ${error.message}`;
    if (adminKey && [401, 403].includes(error.status)) {
      adminKey = "";
      byId("show-errors").hidden = showsErrors = false;
    }
  }
  // Another call may have begun to poll meanwhile.
  if (timer === mine) timer = setTimeout(poll, INTERVAL_MS);
}

/** Prometheus' text as lists of `{labels, value}` by name. */
export function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^([a-z:_]+)(?:\{(.*)\})? (\S+)$/i.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(each => [each[1], each[2]]));
    (found[match[1].replace(PREFIX, "")] ??= []).push({ labels, value: Number(match[3]) });
  }
  return found;
}

const sum = list => (list ?? []).reduce((total, each) => total + each.value, 0);
const isError = ({ labels }) => Number(labels.status_code) >= 400;
const add = (loads, name) => loads.reduce((total, load) => total + load[name], 0);

function sample(loads, metrics) {
  const now = performance.now();
  const counted = metrics && {
    at: now,
    generated: sum(metrics.generation_tokens_total),
    first: sum(metrics.time_to_first_token_seconds_sum),
    answers: sum(metrics.time_to_first_token_seconds_count),
    prompt: sum(metrics.prompt_tokens_total),
    cached: sum(metrics.cached_tokens_total),
    errors: sum((metrics.http_responses_total ?? []).filter(isError)),
  };
  const grown = name => counted && before && counted[name] - before[name];
  const share = (part, whole) => (grown(whole) ? grown(part) / grown(whole) : null);
  const made = {
    running: add(loads, "num_running_reqs"),
    queued: add(loads, "num_waiting_reqs"),
    speed: add(loads, "gen_throughput"),
    first: share("first", "answers"),
    hits: metrics ? share("cached", "prompt") : add(loads, "cache_hit_rate") / loads.length,
    pages: Math.ceil(add(loads, "num_used_tokens") / info.page_size),
    errors: grown("errors") ?? null,
  };
  before = counted;
  return made;
}

function draw(loads, metrics) {
  const series = (name, label = "") => [label, history.map(each => each[name])];
  const count = value => String(Math.round(value));
  const percent = value => `${Math.round(100 * value)}%`;
  const pages = Math.floor(add(loads, "max_total_num_tokens") / info.page_size);
  const plots = [
    plot("Requests", [series("running", "running"), series("queued", "queued")], count),
    plot("Tokens a second", [series("speed")], value => value.toFixed(1)),
    plot("Cached prompts", [series("hits")], percent),
    plot("Pages in use", [series("pages")], count, ` of ${pages.toLocaleString("en")}`),
  ];
  if (metrics)
    plots.splice(2, 0, plot("First token after", [series("first")], value => `${Math.round(1000 * value)} ms`));
  if (metrics) plots.push(plot("Refused or failed", [series("errors")], count));
  byId("plots").replaceChildren(...plots);
  rows("replicas", loads.map(load => [
    load.dp_rank, load.num_running_reqs, load.num_waiting_reqs, load.gen_throughput.toFixed(1),
    percent(load.token_usage), percent(load.cache_hit_rate),
  ]));
}

const drawErrors = errors =>
  rows("errors", errors.map(each => [
    new Date(each.time).toLocaleTimeString(), each.status, `${each.method} ${each.path}`, each.reason, each.request_id,
  ]));

function rows(id, lines) {
  byId(id).replaceChildren(...lines.map(line => make("tr", {}, ...line.map(cell => make("td", {}, String(cell))))));
}
