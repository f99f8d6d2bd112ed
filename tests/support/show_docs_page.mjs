// Runs the script of /docs over a document of so few parts as it needs, and prints what it shows.
import { readFileSync } from "node:fs";

const folder = process.argv[2];
const page = readFileSync(`${folder}/page.html`, "utf8");

class Element {
  constructor(tag) { this.tag = tag; this.children = []; this.textContent = ""; this.listeners = []; }
  append(child) { this.children.push(child); }
  addEventListener(name, listener) { this.listeners.push(listener); }
  *all() { yield this; for (const child of this.children) yield* child.all(); }
}

const byId = new Map();
globalThis.document = {
  createElement: tag => new Element(tag),
  getElementById: id => byId.get(id) ?? byId.set(id, new Element("div")).get(id),
};
globalThis.fetch = async name => ({
  ok: true,
  json: async () => JSON.parse(readFileSync(`${folder}/${name}`, "utf8")),
});

(0, eval)(page.match(/<script>([^]*?)<\/script>/)[1]);
await new Promise(done => setTimeout(done, 100));

for (const details of byId.get("routes").children.filter(each => each.tag === "details")) {
  const [method, path] = details.children[0].children.map(each => each.textContent);
  console.log(`${method} ${path}`);
  for (const listener of details.listeners) listener();
  for (const each of details.all())
    if (each.tag === "code" && each.textContent !== path)
      console.log(`FIELD ${path} ${each.textContent.replace(" *", "")}`);
}
if (!byId.get("routes").children.length) throw new Error(byId.get("routes").textContent);
