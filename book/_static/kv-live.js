// Lets the reader edit and run the cells marked `#| live`, in the page, by a Python that comes with the book.
//
// Nothing is fetched before the first press of Run. All cells of a page share one interpreter, in a worker of its own
// (kv-live-worker.js); a cell runs after those above it that have not run yet. Without this script a cell is an ordinary
// one with its recorded output.
(() => {
  const { src, dataset: { megabytes } } = document.currentScript;
  const base = src.replace(/[^/]*$/, "");
  const isServed = location.protocol !== "file:" && self.origin !== "null";      // elsewhere, browsers refuse workers
  const cells = [];                                         // in the order of the page
  let python = null;                                        // the worker, from the first run on
  let hasStarted = false;
  let running = null;                                       // { cell, tell, finish } of the cell that runs now

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties))
      if (name in element) element[name] = value;
      else element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  // Python ---------------------------------------------------------------------------------------------------------

  function startPython() {
    hasStarted = false;
    python = new Worker(`${base}kv-live-worker.js`, { type: "module" });
    python.onmessage = ({ data: { kind, text } }) => {
      if (kind === "started") {
        hasStarted = true;
        running.tell();
      } else if (kind === "done") running.finish(text === "ok" ? "ran" : "failed");
      else if (kind === "broken") stopPython(`Python stopped (${text}).`);
      else running.cell.print(kind, text);
    };
    python.onerror = (event) => stopPython(`Python did not start (${event.message || "its files could not be loaded"}).`);
  }

  function stopPython(reason) {
    python.onmessage = python.onerror = null;
    python.terminate();
    python = null;
    for (const cell of cells) cell.hasRun = false;
    running?.finish("stopped", `${reason} The next run starts afresh.`);
  }

  // Runs one cell because `pressed`, the same or one below, was to be run; resolves to "ran", "failed" or "stopped".
  function runOne(cell, pressed) {
    return new Promise((resolve) => {
      const tell = () => {
        const starting = hasStarted ? "" : `Starting Python (about ${megabytes} MB, once) …`;
        pressed.say(starting || `Running ${cell.name} first …`);
        cell.say(starting || "Running …");
      };
      const finish = (outcome, reason) => {
        running = null;
        cell.hasRun = outcome === "ran";
        cell.end(outcome, reason);
        resolve(outcome);
      };
      cell.begin();
      running = { cell, tell, finish };
      if (!python) startPython();
      tell();
      python.postMessage({ name: cell.name, source: cell.area.value });
    });
  }

  async function run(cell) {
    if (document.querySelector(".kv-busy")) return;
    const earlier = cells.slice(0, cells.indexOf(cell)).filter((other) => !other.hasRun);
    cell.setBusy(true);
    for (const one of [...earlier, cell]) {
      const outcome = await runOne(one, cell);
      if (outcome === "ran") continue;
      if (one !== cell) cell.say(outcome === "failed" ? `Not run: ${one.name}, above, ended in an error.` : "Stopped.");
      break;
    }
    cell.setBusy(false);
  }

  // The editor: a textarea with transparent text, exactly over the coloured code -----------------------------------------

  const words = (list) => `\\b(?:${list.replaceAll(" ", "|")})\\b`;
  const TOKEN = new RegExp([
    "(?<c1>#.*)",
    String.raw`(?<s1>(?:\b[rbfuRBFU]{1,2})?(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))`,
    String.raw`(?<mi>\b\d[\w.]*)`,
    `(?<k>${words("and as assert async await break class continue def del elif else except finally for from global if "
      + "import in is lambda nonlocal not or pass raise return try while with yield None True False")})`,
    `(?<nb>${words("abs all any bool dict enumerate filter float format getattr hash int isinstance iter len list "
      + "map max min next print range repr reversed round set sorted str sum tuple type zip")})`,
    "(?<o>[-+*/%=<>!&|^~@.])",
    String.raw`\w+`,
  ].join("|"), "g");

  // Python in the colours that the book's other cells have.
  function colour(code) {
    const parts = [];
    let end = 0, before = "";
    for (const match of code.matchAll(TOKEN)) {
      const kind = Object.entries(match.groups).find(([, text]) => text)?.[0] ?? (/^(def|class)$/.test(before) ? "nf" : "n");
      const className = kind === "nb" && before === "." ? "n" : kind;
      parts.push(code.slice(end, match.index), make("span", { className }, match[0]));
      end = match.index + match[0].length;
      before = match[0];
    }
    return [...parts, code.slice(end)];
  }

  const insert = (text) => document.execCommand(text ? "insertText" : "delete", false, text);    // keeps undo

  // Tab and Shift+Tab move the lines of the selection; Tab without one goes to the next column of four.
  function indent(area, isBack) {
    const { value, selectionStart: from, selectionEnd: to } = area;
    const lineStart = value.lastIndexOf("\n", from - 1) + 1;
    if (!isBack && from === to) return insert(" ".repeat(4 - ((from - lineStart) % 4)));
    const lines = value.slice(lineStart, to);
    const moved = isBack ? lines.replace(/^ {1,4}/gm, "") : lines.replace(/^(?=.)/gm, "    ");
    if (moved === lines) return;
    area.setSelectionRange(lineStart, to);
    insert(moved);
    const firstLine = (text) => text.split("\n")[0].length;
    const start = Math.max(lineStart, from + firstLine(moved) - firstLine(lines));
    area.setSelectionRange(from === to ? start : lineStart, from === to ? start : lineStart + moved.length);
  }

  // A new line begins where the one before it did, four further after a colon.
  function breakLine(area) {
    const line = area.value.slice(0, area.selectionStart).split("\n").pop();
    insert(`\n${line.match(/^ */)[0]}${/:\s*(#.*)?$/.test(line) ? "    " : ""}`);
  }

  // Cells ------------------------------------------------------------------------------------------------------------

  class Cell {
    constructor(element, number) {
      this.element = element;
      this.name = `cell ${number}`;
      this.hasRun = false;
      this.code = element.querySelector(".cell_input pre");
      this.recordedCode = this.code.textContent.replace(/\n$/, "");
      this.output = element.querySelector(".cell_output");
      if (!this.output) element.append(this.output = make("div", { className: "cell_output" }));
      this.recorded = [...this.output.children];
      this.output.append(this.live = make("div", { className: "kv-ran", "aria-live": "polite" }));
      this.addEditor();
      this.addBar(number === 1 ? "Python in this page: edit it and run it." : "");
    }

    addEditor() {
      this.keys = make("span", { id: this.name.replace("cell ", "kv-keys-"), className: "kv-keys" },
        "Ctrl+Enter runs. Tab indents; Esc, then Tab, leaves the cell.");
      this.area = make("textarea", { value: this.recordedCode, rows: 1, wrap: "off", spellcheck: false,
        autocapitalize: "off", autocomplete: "off", "aria-label": `Python of ${this.name}`,
        "aria-describedby": this.keys.id });
      const box = make("div", { className: "kv-editor" });
      this.code.replaceWith(box);
      this.code.setAttribute("aria-hidden", "true");
      box.append(this.code, this.area);
      this.area.addEventListener("input", () => this.redraw());
      this.area.addEventListener("keydown", (event) => this.onKey(event));
      this.area.addEventListener("blur", () => { this.isLeaving = false; });
    }

    addBar(invitation) {
      const button = (text, onclick) => make("button", { type: "button", onclick, "aria-label": `${text} ${this.name}` }, text);
      this.runButton = button("Run", () => run(this));
      this.stopButton = button("Stop", () => stopPython("Stopped."));
      this.resetButton = button("Reset", () => this.reset());
      this.stopButton.hidden = this.resetButton.hidden = true;
      this.status = make("output", {}, invitation);
      const bar = make("div", { className: "kv-runbar" },
        this.runButton, this.stopButton, this.resetButton, make("span", {}, this.name), this.status, this.keys);
      this.output.before(bar);
    }

    onKey(event) {
      if (event.isComposing) return;
      const isTab = event.key === "Tab" && !event.ctrlKey && !event.altKey && !event.metaKey;
      if (event.key === "Enter" && (event.ctrlKey || event.shiftKey || event.metaKey)) run(this);
      else if (event.key === "Enter" && !event.altKey) breakLine(this.area);
      else if (isTab && !this.isLeaving) indent(this.area, event.shiftKey);
      else {
        if (event.key !== "Shift") this.isLeaving = event.key === "Escape";
        return;
      }
      this.isLeaving = false;
      event.preventDefault();
    }

    redraw() {
      this.code.replaceChildren(...colour(`${this.area.value}\n`));
      this.resetButton.hidden = false;
    }

    reset() {
      this.area.value = this.recordedCode;
      this.redraw();
      this.live.replaceChildren();
      for (const part of this.recorded) part.hidden = false;
      this.say("");
      this.runButton.focus();
      this.resetButton.hidden = true;
    }

    setBusy(isBusy) {
      this.element.classList.toggle("kv-busy", isBusy);
      if (!isBusy && document.activeElement === this.stopButton) this.runButton.focus();
      this.stopButton.hidden = !isBusy;
      for (const cell of cells) cell.runButton.setAttribute("aria-disabled", isBusy);
      this.resetButton.hidden = isBusy;
    }

    begin() {
      for (const part of this.recorded) part.hidden = true;
      this.live.replaceChildren();
    }

    say(text) { this.status.value = text; }

    print(kind, text) {
      let block = this.live.lastElementChild;
      if (block?.className !== `kv-${kind}`) this.live.append(block = make("pre", { className: `kv-${kind}` }));
      block.append(text);
    }

    end(outcome, reason) {
      this.say(reason ?? (outcome === "ran" ? "Ran in this page." : "Ended in an error."));
      this.resetButton.hidden = false;
      for (const block of this.live.children)
        if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;      // so that the keyboard can scroll it
    }
  }

  function start() {
    document.querySelectorAll(".cell.tag_live").forEach((element, index) => {
      if (isServed) cells.push(new Cell(element, index + 1));
      else element.querySelector(".cell_input").after(make("p", { className: "kv-runbar" },
        "This runs when the book is served: ", make("code", { textContent: "make serve" })));
    });
  }

  // After the copy buttons, which are put beside each `pre` as it is at DOMContentLoaded.
  if (document.readyState === "complete") start();
  else addEventListener("DOMContentLoaded", start);
})();
