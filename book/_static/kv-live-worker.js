// Runs Python for kv-live.js, away from the page: an endless loop leaves the page alone, and ending the worker ends it.
//
// A message in is one cell, { name, source }. Messages out are { kind, text }: "started" once, and for each cell "out",
// "value" and "error" as live_runner.py says them, then "done" (text is "ok" or empty). "broken" means that Python itself
// could not start or go on.
import { loadPyodide } from "./vendor/pyodide/pyodide.mjs";

const near = (path) => new URL(path, import.meta.url).href;
const say = (kind, text = "") => postMessage({ kind, text });

async function start() {
  const archive = fetch(near("live/kvbook.zip"), { cache: "no-cache" }).then((answer) => answer.arrayBuffer());
  const lock = fetch(near("vendor/pyodide/pyodide-lock.json")).then((answer) => answer.json());
  const python = await loadPyodide({
    lockFileContents: lock.then(({ info }) => ({ info, packages: {} })),   // what is not in the book cannot be loaded
    packageBaseUrl: near("vendor/pyodide/"),
    stdin: () => null,                                                     // nobody answers `input()`
  });
  python.FS.writeFile("/kvbook.zip", new Uint8Array(await archive));
  python.runPython("import sys; sys.path.insert(0, '/kvbook.zip')");
  const cells = python.pyimport("live_runner").Cells();
  say("started");
  return cells;
}

const started = start();

onmessage = async ({ data: { name, source } }) => {
  try {
    const cells = await started;
    say("done", cells.run(name, source, say) ? "ok" : "");
  } catch (error) {
    say("broken", String(error.message ?? error).trim().split("\n").pop());
  }
};
