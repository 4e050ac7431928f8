// Two loops: the tokens that each step computes without a cache and with one, replayed from a recorded run.
import { begin, counted, element, formatBytes, formatCount, range, threeDigits } from "./kv.js";

/** Count what both loops have done after `step` steps; `kept_bytes` is what the cache then holds. */
export function count(data, step) {
  const sum = tokens => tokens.slice(0, step).reduce((total, each) => total + each, 0);
  const uncached = sum(data.uncached);
  const cached = sum(data.cached);
  return { uncached, cached, ratio: cached ? uncached / cached : 0, kept_bytes: cached * data.kv_bytes_per_token };
}

/** Outline the tokens of each step as a staircase over [0, steps], in units of one step and one token, y downwards. */
export function staircase(tokens, top) {
  const stairs = tokens.map((height, step) => `V${top - height}H${step + 1}`).join("");
  return tokens.length ? `M0 ${top}${stairs}V${top}Z` : "";
}

/** Say what each loop did in step `step` and up to it. */
export function readout(data, step) {
  const done = count(data, step);
  const now = (which, total) => `step ${step} computes ${counted(data[which][step - 1], "token")}, ${formatCount(total)} so far`;
  return {
    uncached: `Without a cache: ${now("uncached", done.uncached)}.`,
    cached: `With a cache: ${now("cached", done.cached)}, and ${formatBytes(done.kept_bytes)} are kept.`,
    ratio: `${threeDigits(done.ratio)} times the tokens for the same ${counted(step, "token")}.`,
  };
}

const MILLISECONDS_PER_REPLAY = 6000;

function render({ model, el }) {
  const data = model.get("data");
  const top = Math.max(...data.uncached);
  const paths = {};
  for (const name of ["uncached", "cached"]) {
    paths[name] = element("path", { class: `kvf-${name}` });
  }
  const outline = element("path", { class: "kvf-outline", d: staircase(data.uncached, top) });
  const plot = element("svg", { class: "kvf-plot", viewBox: `0 0 ${data.steps} ${top}`, preserveAspectRatio: "none",
    "aria-hidden": "true" }, outline, paths.uncached, paths.cached);
  const axes = element("p", { class: "kvf-axes", "aria-hidden": "true" },
    element("span", {}, `↑ tokens computed in a step, up to ${formatCount(top)}`),
    element("span", {}, `${formatCount(data.steps)} steps →`));
  const lines = { uncached: element("p", { class: "kvf-uncached" }), cached: element("p", { class: "kvf-cached" }),
    ratio: element("p") };
  const live = element("div", { class: "kvf-readout", "aria-live": "polite" }, ...Object.values(lines));

  const steps = Array.from({ length: data.steps }, (_, index) => index + 1);
  const slider = range("Step", step => `${step} of ${data.steps}`, step => { pause(); show(step); });
  const button = element("button", { type: "button", onclick: () => (timer ? pause() : play()) }, "Play");
  let current = data.steps;
  let timer = null;

  function show(step) {
    current = step;
    for (const name of ["uncached", "cached"]) {
      paths[name].setAttribute("d", staircase(data[name].slice(0, step), top));
    }
    for (const [name, text] of Object.entries(readout(data, step))) lines[name].textContent = text;
  }
  function pause() {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
    live.setAttribute("aria-live", "polite");
  }
  function play() {
    live.setAttribute("aria-live", "off");
    button.textContent = "Pause";
    if (current === data.steps) show(slider.set(steps, 1));
    timer = setInterval(() => {
      show(slider.set(steps, current + 1));
      if (current === data.steps) pause();
    }, MILLISECONDS_PER_REPLAY / data.steps);
  }
  begin(model, el).append(plot, axes, element("div", { class: "kvf-controls kvf-player" }, button, slider), live);
  show(slider.set(steps, data.steps));
  return () => { pause(); el.replaceChildren(); };
}

export default { render };
