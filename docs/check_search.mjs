// Words for which people search must find the intended page: those of search.json first,
// others among the first three.
//
//     node docs/check_search.mjs runs/site
//
// The search is that of the built site: its own code and index. Build it afresh, as Sphinx
// forgets the index entries of pages that it does not read again.
import { existsSync, readFileSync } from "node:fs";
import vm from "node:vm";

const WORDS = {
  FedAvg: "gallery/fedavg", DiLoCo: "(tutorials|gallery)/diloco",
  GPU: "get_started/index|howto/(install|many_clients)", Slurm: "tutorials/processes|howto/several_hosts",
  optax: "howto/optimizers", equinox: "howto/models", checkpoint: "engines/failures|howto/(checkpoints|failures)",
  privacy: "gallery/dp_fedavg", profiling: "howto/profiling", sampling: "howto/sampling_and_state",
  cite: "get_started/index",
};
const site = process.argv[2];
const context = {
  document: { addEventListener() {}, getElementById: () => ({ children: [] }) },
  localStorage: { setItem() {} }, SPHINX_HIGHLIGHT_ENABLED: false, _ready() {}, _: (x) => x, console,
};
context.window = context;
vm.createContext(context);
const files = ["_static/language_data.js", "_static/searchtools.js"].map((x) => `${site}/${x}`);
const code = files.map((x) => readFileSync(x, "utf8")).join("\n");
vm.runInContext(`${code}\nwindow.Search = Search;`, context);
vm.runInContext(readFileSync(`${site}/searchindex.js`, "utf8"), context);
const found = (word) =>
  [...new Set(context.Search._performSearch(...context.Search._parseQuery(word)).reverse().map((x) => x[0]))].slice(0, 3);
const wrong = Object.entries(WORDS).filter(([word, page]) => !found(word).some((x) => RegExp(`^(${page})$`).test(x)));
const searched = JSON.parse(readFileSync(new URL("search.json", import.meta.url)));
for (const [word, pages] of Object.entries(searched)) {
  const page = pages.find((x) => existsSync(`${site}/${x}.html`));
  if (found(word)[0] !== page) wrong.push([word, page]);
}
for (const [word, page] of wrong) console.error(`${word}: ${found(word)}, without ${page}`);
process.exit(wrong.length);
