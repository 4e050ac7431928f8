// Number lines: which numbers each format can hold, and where a value lands among them.
import { begin, element, formatCount, range, threeDigits } from "./kv.js";

/** Say where a format's list of values begins (`offset`) and what a 1 in it is worth (`scale`). */
export function place(format, largest) {
  const last = format.values.at(-1);
  if (format.affine) return { offset: -largest, scale: 2 * largest / last };
  return { offset: 0, scale: format.scaled ? largest / last : 1 };
}

function exponentOf(magnitude) {
  let exponent = Math.floor(Math.log2(magnitude));
  while (2 ** exponent > magnitude) exponent -= 1;
  while (2 ** (exponent + 1) <= magnitude) exponent += 1;
  return exponent;
}

function roundHalfEven(number) {
  const below = Math.floor(number);
  const over = number - below;
  return over > 0.5 || (over === 0.5 && below % 2 === 1) ? below + 1 : below;
}

const lastCode = format => 2 ** (format.bits - 1) - 2 ** format.fraction_bits - 1;

// A float of 16 bits has too many values to list. The codes of those that are not negative are consecutive numbers.
function nearestFloat(format, value, round) {
  const { bits, exponent_bits, fraction_bits } = format;
  const lowest = 2 - 2 ** (exponent_bits - 1);
  const greatest = (2 - 2 ** -fraction_bits) * 2 ** (1 - lowest);
  const magnitude = Math.min(Math.abs(value), greatest);
  const exponent = magnitude ? Math.max(exponentOf(magnitude), lowest) : lowest;
  const step = 2 ** (exponent - fraction_bits);
  const steps = round(magnitude / step);
  const code = (exponent - lowest) * 2 ** fraction_bits + steps;
  const negative = value < 0 && code > 0;
  return { code: negative ? code + 2 ** (bits - 1) : code, point: negative ? -steps * step : steps * step,
    clipped: Math.abs(value) > greatest };
}

function nearestListed(format, value, largest) {
  const { values, codes } = format;
  const { offset, scale } = place(format, largest);
  const wanted = (value - offset) / scale;
  let above = values.findIndex(each => each >= wanted);
  if (above < 0) above = values.length - 1;
  const below = Math.max(above - 1, 0);
  const gaps = [wanted - values[below], values[above] - wanted];
  const chosen = gaps[0] < gaps[1] || (gaps[0] === gaps[1] && codes[below] % 2 === 0) ? below : above;
  const end = format.scaled || format.affine ? largest : values.at(-1);
  const start = format.affine ? -largest : scale * values[0];
  return { code: codes[chosen], point: offset + scale * values[chosen], clipped: value > end || value < start };
}

/** Find where a value lands: the nearest number that the format holds; of two equally near, the one with the even code. */
export function nearest(format, value, largest) {
  const found = format.values ? nearestListed(format, value, largest) : nearestFloat(format, value, roundHalfEven);
  const error = Math.abs(found.point - value);
  return { ...found, error: error < 1e-12 * Math.abs(value) ? 0 : error };
}

/** Write a number with so many significant digits at most, very small and very large ones with a power of ten. */
export function significant(value, digits) {
  if (value === 0) return "0";
  const [mantissa, exponent] = Math.abs(value).toExponential(digits - 1).split("e");
  const power = [...String(Number(exponent))].map(each => (each === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[each])).join("");
  const text = exponent < -5 || exponent > 8 ? `${Number(mantissa)} × 10${power}` : String(Number(`${mantissa}e${exponent}`));
  return value < 0 ? `−${text}` : text;
}

function lost(error, value) {
  if (error === 0) return "exact";
  if (value === 0) return `off by ${significant(error, 2)}`;
  const relative = error / Math.abs(value);
  const share = relative < 10 ? `${significant(100 * relative, 2)}\u00a0%` : `${threeDigits(relative)} times the value`;
  return `off by ${significant(error, 2)}, ${share}`;
}

function bitFields(format, code) {
  const bits = code.toString(2).padStart(format.bits, "0");
  const fields = format.fields ?? (format.values ? [format.bits] : [1, format.exponent_bits, format.fraction_bits]);
  let at = 0;
  return fields.map(width => bits.slice(at, at += width)).join(" ");
}

/** Say where a value lands, as `point`, `code` (hexadecimal, and the bits of each field) and `lost`. */
export function landing(format, value, largest) {
  const { code, point, error, clipped } = nearest(format, value, largest);
  return { point: significant(point, 4),
    code: `0x${code.toString(16).padStart(Math.ceil(format.bits / 4), "0")} = ${bitFields(format, code)}`,
    lost: lost(error, value) + (clipped ? ", clipped" : "") };
}

/** Say which format changes the value least, and which most. */
export function compareFormats(formats, value, largest) {
  const errors = formats.map(format => nearest(format, value, largest).error);
  const say = error => `${formats[errors.indexOf(error)].name} (${lost(error, value)})`;
  return `In a vector whose largest value is ${significant(largest, 4)}, ${significant(value, 4)} is changed least by `
    + `${say(Math.min(...errors))} and most by ${say(Math.max(...errors))}.`;
}

const WIDTH = 10000;
const CLOSE = 30;
const across = (number, window) => Math.floor(WIDTH * (number + window) / (2 * window) + 0.5);

/** Draw the numbers of a format between -window and window: `ticks`, and a `band` where they are too close to tell. */
export function inView(format, largest, window) {
  if (!format.values) {
    return { ticks: "", band: `M0 4H${WIDTH}V20H0Z`, shown: 2 * nearestFloat(format, window, Math.floor).code + 1,
      total: 2 * lastCode(format) + 1 };
  }
  const { offset, scale } = place(format, largest);
  const points = format.values.map(each => offset + scale * each).filter(each => Math.abs(each) <= window);
  const runs = [];
  for (const x of points.map(point => across(point, window))) {
    if (runs.length && x - runs.at(-1)[1] < CLOSE) runs.at(-1)[1] = x;
    else runs.push([x, x]);
  }
  return { ticks: runs.filter(([from, to]) => from === to).map(([x]) => `M${x} 4V20`).join(""),
    band: runs.filter(([from, to]) => from < to).map(([from, to]) => `M${from} 4H${to}V20H${from}Z`).join(""),
    shown: points.length, total: format.values.length };
}

function scaleText(format, largest) {
  if (!format.values) return "";
  const { scale } = place(format, largest);
  return format.affine ? `from ${significant(-largest, 4)} in steps of ${significant(scale, 3)}` : `scale ${significant(scale, 3)}`;
}

// Where the number is out of view, an arrow points to it.
function errorBar(at, lands) {
  if (lands < 0) return `M${at} 12H0M150 5L0 12L150 19`;
  return lands > WIDTH ? `M${at} 12H${WIDTH}M${WIDTH - 150} 5L${WIDTH} 12L${WIDTH - 150} 19` : `M${at} 12H${lands}`;
}

function row(format, { value, largest, window }) {
  const drawn = inView(format, largest, window);
  const said = landing(format, value, largest);
  const at = across(value, window);
  const lands = across(nearest(format, value, largest).point, window);
  const dot = lands >= 0 && lands <= WIDTH ? `M${lands} 12h0` : "";
  const path = (name, d) => element("path", { class: name, d });
  return element("li", { class: format.scaled || format.affine ? "kvf-moves" : "kvf-stays" },
    element("p", { class: "kvf-format" }, element("strong", {}, format.name),
      element("span", {}, [scaleText(format, largest), format.error].filter(Boolean).join("; ")),
      element("span", { class: "kvf-shown" }, `${formatCount(drawn.shown)} of ${formatCount(drawn.total)} in view`)),
    element("svg", { class: "kvf-line", viewBox: `0 0 ${WIDTH} 24`, preserveAspectRatio: "none", "aria-hidden": "true" },
      path("kvf-base", `M0 12H${WIDTH}`), path("kvf-band", drawn.band), path("kvf-ticks", drawn.ticks),
      path("kvf-halo", dot), path("kvf-at", `M${at} 0V24`), path("kvf-off", errorBar(at, lands)),
      path("kvf-lands", dot)),
    element("p", { class: "kvf-landing" }, element("span", {}, `→ ${said.point}`), element("span", {}, said.lost),
      element("span", {}, said.code)));
}

function ruler(window) {
  return [-1, -0.5, 0, 0.5, 1].map(part =>
    element("span", { style: `left:${50 + 50 * part}%` }, significant(part * window, 3)));
}

// Four hundred steps across the view; a value that is not one of them stays where it is.
function stops(window, value) {
  const steps = Array.from({ length: 401 }, (_, index) => window * (index - 200) / 200);
  if (Math.abs(value) > window) return steps;
  return [...steps.filter(each => Math.abs(each - value) > 1e-9 * window), value].sort((a, b) => a - b);
}

function render({ model, el }) {
  const { formats, start, largests, windows } = model.get("data");
  const state = { ...start };
  let wanted = start.value;
  const live = element("p", { class: "kvf-least-most", "aria-live": "polite" });
  const marks = element("p", { class: "kvf-ruler", "aria-hidden": "true" });
  const lines = element("ul", { class: "kvf-lines kvf-drag" });

  function draw() {
    live.textContent = compareFormats(formats, state.value, state.largest);
    marks.replaceChildren(...ruler(state.window));
    lines.replaceChildren(...formats.map(format => row(format, state)));
  }
  const value = range("Value", number => significant(number, 4), chosen => {
    wanted = state.value = chosen;
    draw();
  });
  const largest = range("Largest value in the vector", number => significant(number, 4), chosen => {
    state.largest = chosen;
    draw();
  });
  const window = range("View", number => `${significant(-number, 3)} to ${significant(number, 3)}`, chosen => {
    state.window = chosen;
    state.value = value.set(stops(chosen, wanted), Math.max(wanted, -chosen));
    draw();
  });
  largest.set(largests, state.largest);
  window.set(windows, state.window);
  value.set(stops(state.window, state.value), state.value);

  function drag(event) {
    const { left, width } = lines.querySelector("svg").getBoundingClientRect();
    const part = Math.min(Math.max((event.clientX - left) / width, 0), 1);
    wanted = state.window * (Math.round(400 * part) - 200) / 200;
    state.value = value.set(stops(state.window, wanted), wanted);
    draw();
  }
  lines.addEventListener("pointerdown", event => {
    if (event.button !== 0 || !event.target.closest("svg")) return;
    lines.setPointerCapture(event.pointerId);
    drag(event);
  });
  lines.addEventListener("pointermove", event => {
    if (lines.hasPointerCapture(event.pointerId)) drag(event);
  });
  begin(model, el).append(element("div", { class: "kvf-controls" }, largest, window), live,
    element("div", { class: "kvf-handle" }, value), marks, lines);
  draw();
  return () => el.replaceChildren();
}

export default { render };
