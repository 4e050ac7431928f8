// Block tables: who holds which block of a pool, replayed from a recorded run.
import { begin, counted, element, range } from "./kv.js";

function stateOf(frame, block) {
  const refcount = frame.refcounts[block - 1];
  const kept = frame.cached?.includes(block);
  const state = refcount > 1 ? "shared" : refcount ? "held" : kept ? "kept" : "free";
  const copied = frame.copied ?? [];
  const from = copied.find(pair => pair[1] === block);
  const to = copied.filter(pair => pair[0] === block).map(pair => pair[1]);
  if (from) return { state, note: `copy of ${from[0]}` };
  if (to.length) return { state, note: `copied to ${to.join(", ")}` };
  if (state === "free" && frame.freed?.includes(block)) return { state, note: "given back" };
  return { state, note: refcount ? counted(refcount, "holder") : state };
}

function tell(frame, states) {
  const count = state => states.filter(each => each === state).length;
  const counts = `${states.length - count("free") - count("kept")} of ${counted(states.length, "block")} held, `
    + `${count("free")} free${count("kept") ? `, ${count("kept")} kept` : ""}`;
  const lies = frame.tables.filter(table => table.blocks.length).map(table =>
    `${table.name}: ${counted(table.num_tokens, "token")} in `
      + table.blocks.map(block => (block ? `block ${block}` : "null")).join(", "));
  return { counts, spoken: `${[...lies, counts].join("; ")}.` };
}

/** Read a frame: `tables` with what is read through their entries, `blocks`, and `counts` and `spoken`, which tell it. */
export function seeBlocks(trace, step) {
  const frame = trace.frames[step];
  const size = trace.block_size;
  const fill = words => [...words, ...Array(size - words.length).fill("")];
  const holders = {};
  const seen = {};
  const tables = frame.tables.map(({ name, blocks, num_tokens }) => ({ name, entries: blocks.map((block, index) => {
    const count = Math.min(size, num_tokens - index * size);
    (holders[block] ??= []).push(name);
    seen[block] = Math.max(seen[block] ?? 0, count);
    return { block, words: fill(block ? frame.words[block - 1].slice(0, count) : []) };
  }) }));
  const blocks = frame.words.map((words, index) => {
    const { state, note } = stateOf(frame, index + 1);
    const count = state === "kept" ? size : seen[index + 1] ?? 0;
    return { state, note, holders: holders[index + 1] ?? [], words: fill(words.slice(0, count)) };
  });
  return { tables, blocks, ...tell(frame, blocks.map(each => each.state)) };
}

/** Say in words where the tokens of one entry lie. */
export function tellEntry(trace, step, table, index) {
  const { name, num_tokens, blocks } = trace.frames[step].tables[table];
  const first = index * trace.block_size;
  const last = Math.min(num_tokens, first + trace.block_size) - 1;
  const tokens = first === last ? `token ${first}` : `tokens ${first} to ${last}`;
  const entry = `Entry ${index} of ${name}, ${tokens}`;
  if (!blocks[index]) return `${entry}: null. The window has passed, and the block was given back.`;
  const others = seeBlocks(trace, step).blocks[blocks[index] - 1].holders.filter(each => each !== name);
  return `${entry}: block ${blocks[index]}, ${others.length ? `also held by ${others.join(", ")}` : "held by nobody else"}.`;
}

function drawing(trace, step, names, rows) {
  const frame = trace.frames[step];
  const found = seeBlocks(trace, step);
  const span = (name, ...children) => element("span", name ? { class: name } : {}, ...children);
  const bold = text => element("b", {}, text);
  const part = (title, text) => element("p", { class: "kvf-part" }, element("strong", {}, title), span("", text));
  const tag = name => span(`kvf-tag kvf-request-${names.indexOf(name) + 1}`, name);
  const slots = (words, block) => span("kvf-slots", ...words.map((word, at) =>
    span(block && frame.written?.includes(block * words.length + at) ? "kvf-written" : "", word)));
  const tables = found.tables.map(({ name, entries }) =>
    element("div", { class: name === frame.by ? "kvf-table kvf-acting" : "kvf-table" }, tag(name), ...entries.map(({ block, words }) =>
      span(block ? "kvf-entry" : "kvf-entry kvf-null", slots(words, block), bold(`→ ${block || "null"}`)))));
  const blocks = found.blocks.map(({ state, note, holders, words }, index) =>
    element("div", { class: `kvf-block kvf-${state}${note.startsWith("cop") ? " kvf-copied" : ""}` },
      element("p", {}, bold(String(index + 1)), span("", note)), slots(words, index + 1),
      element("p", { class: "kvf-holders" }, ...holders.map(tag))));
  return [part("Tables", "each entry names a block"),
    element("div", { class: "kvf-tables", style: `--kvf-rows:${rows}` }, ...tables), part("Pool", found.counts),
    element("div", { class: "kvf-pool" }, ...blocks)];
}

// From the nearer edge of one box to the nearer edge of another, or below both where they stand side by side.
function arrow(from, to, origin) {
  const x = [from, to].map(({ left, width }) => Math.round(left + width / 2 - origin.left));
  const beside = Math.abs(from.top - to.top) < from.height / 2;
  const down = beside || to.top > from.top;
  const y1 = (down ? from.bottom : from.top) - origin.top;
  const y2 = (beside || !down ? to.bottom : to.top) - origin.top;
  const bend = beside ? 14 : (y2 - y1) / 2;
  const back = beside || !down ? 5 : -5;
  return `M${x[0]} ${y1}C${x[0]} ${y1 + bend} ${x[1]} ${y2 + (beside ? bend : -bend)} ${x[1]} ${y2}`
    + `M${x[1] - 4} ${y2 + back}L${x[1]} ${y2}L${x[1] + 4} ${y2 + back}`;
}

const MILLISECONDS_PER_FRAME = 3500;
const HINT = "Point to an entry of a table, or choose one with the arrow keys.";

function render({ model, el }) {
  const trace = model.get("data");
  const last = trace.frames.length - 1;
  const names = [...new Set(trace.frames.flatMap(frame => frame.tables.map(table => table.name)))];
  const rows = Math.max(...trace.frames.map(frame => frame.tables.length));
  let step = trace.start;
  let pointed = -1;
  let timer = null;

  const said = element("p", { class: "kvf-said", "aria-live": "polite" });
  const spoken = element("p", { class: "kvf-spoken" });
  const hint = element("p", { class: "kvf-pointed", "aria-live": "polite" });
  const paging = element("div", { class: "kvf-paging", "aria-hidden": "true" });
  const paths = { copies: element("path", { class: "kvf-copies" }), link: element("path", { class: "kvf-link-to" }) };
  const arrows = element("svg", { class: "kvf-arrows", "aria-hidden": "true" }, ...Object.values(paths));
  const entries = () => [...paging.querySelectorAll(".kvf-entry")];
  const boxOf = block => paging.querySelectorAll(".kvf-block")[block - 1];

  function drawArrows() {
    const origin = arrows.getBoundingClientRect();
    const between = (from, to) => arrow(from.getBoundingClientRect(), to.getBoundingClientRect(), origin);
    const block = pointed < 0 ? 0 : entryAt(pointed).block;
    paths.copies.setAttribute("d", (trace.frames[step].copied ?? []).map(pair => between(...pair.map(boxOf))).join(""));
    paths.link.setAttribute("d", block ? between(entries()[pointed], boxOf(block)) : "");
  }
  function entryAt(number) {
    const all = trace.frames[step].tables.flatMap(({ blocks }, table) => blocks.map((block, index) => ({ block, table, index })));
    return all[number];
  }
  function point(number) {
    pointed = number;
    const { block, table, index } = entryAt(number) ?? {};
    for (const each of paging.querySelectorAll(".kvf-marked")) each.classList.remove("kvf-marked");
    entries().forEach((each, at) => {
      if (at === number || (block && entryAt(at).block === block)) each.classList.add("kvf-marked");
    });
    if (block) boxOf(block).classList.add("kvf-marked");
    const text = number < 0 ? HINT : tellEntry(trace, step, table, index);
    if (hint.textContent !== text) hint.textContent = text;               // an unchanged text is not read out again
    drawArrows();
  }
  function show(frame) {
    step = frame;
    said.textContent = trace.frames[step].said;
    said.className = trace.frames[step].refused ? "kvf-said kvf-refused" : "kvf-said";
    spoken.textContent = seeBlocks(trace, step).spoken;
    paging.replaceChildren(...drawing(trace, step, names, rows));
    previous.setAttribute("aria-disabled", step === 0);
    next.setAttribute("aria-disabled", step === last);
    point(-1);
  }
  const steps = trace.frames.map((_, index) => index);
  const go = frame => show(slider.set(steps, Math.min(Math.max(frame, 0), last)));
  function pause() {
    clearInterval(timer);
    timer = null;
    player.textContent = "Play";
    said.setAttribute("aria-live", "polite");
  }
  function play() {
    said.setAttribute("aria-live", "off");
    player.textContent = "Pause";
    go(step === last ? 0 : step + 1);
    timer = setInterval(() => {
      go(step + 1);
      if (step === last) pause();
    }, MILLISECONDS_PER_FRAME);
  }
  const button = (text, onclick) => element("button", { type: "button", onclick }, text);
  const previous = button("Previous", () => { pause(); go(step - 1); });
  const player = button("Play", () => (timer ? pause() : play()));
  const next = button("Next", () => { pause(); go(step + 1); });
  const slider = range("Frame", frame => `${frame + 1} of ${last + 1}`, frame => { pause(); show(frame); });

  const place = element("div", { class: "kvf-place", tabindex: 0, role: "group", "aria-label": "Entries of the tables",
    onkeydown: event => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const count = entries().length;
      if (!move || !count) return;
      event.preventDefault();
      point(pointed < 0 ? (move > 0 ? 0 : count - 1) : (pointed + move + count) % count);
    },
    onblur: () => point(-1),
    onpointerover: event => {
      const number = entries().indexOf(event.target.closest(".kvf-entry"));
      if (number >= 0) point(number);
    },
    onpointerleave: event => event.pointerType !== "touch" && point(-1) }, paging, arrows);
  begin(model, el).append(element("div", { class: "kvf-steps" }, previous, player, next, slider), said, spoken, place, hint);
  const observer = new ResizeObserver(drawArrows);
  observer.observe(place);
  go(step);
  return () => { pause(); observer.disconnect(); el.replaceChildren(); };
}

export default { render };
