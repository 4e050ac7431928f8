// Shared by the figures: numbers in words, and the few elements that all of them are made of.

/** Write a number with three significant digits, all of those before the point included. */
export function threeDigits(value) {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  const rounded = Math.floor(value * 10 ** digits + 0.5) / 10 ** digits;
  return rounded.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Write a whole number with commas: 23,040. */
export function formatCount(value) {
  return Math.floor(value + 0.5).toLocaleString("en-US");
}

/** Count things: 1 token, 2 tokens. */
export function counted(number, noun) {
  return `${formatCount(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function scaled(bytes, base, units) {
  let power = 0;
  while (power < units.length - 1 && bytes >= base ** (power + 2)) power += 1;
  return `${threeDigits(bytes / base ** (power + 1))} ${units[power]}`;
}

/** Write bytes in powers of 1,000 and of 1,024: 403 MB (384 MiB); below 100,000 as they are. */
export function formatBytes(bytes) {
  if (bytes < 100000) return `${formatCount(bytes)} B`;
  const decimal = scaled(bytes, 1000, ["kB", "MB", "GB", "TB", "PB"]);
  return `${decimal} (${scaled(bytes, 1024, ["KiB", "MiB", "GiB", "TiB", "PiB"])})`;
}

/** Make an element; attributes that start with "on" are listeners, children are elements or texts. */
export function element(tag, attributes = {}, ...children) {
  const made = tag === "svg" || tag === "path"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// The label encloses its control: ids would have to differ from those of every other figure on the page.
function labelled(text, ...controls) {
  return element("label", { class: "kvf-control" }, element("span", {}, text), ...controls);
}

/** Make a labelled <select>; `onpick` gets the chosen option. */
export function select(label, options, chosen, onpick) {
  const control = element("select", { onchange: () => onpick(control.value) });
  for (const option of options) control.append(element("option", { value: option, selected: option === chosen }, option));
  return labelled(label, control);
}

/**
 * Make a labelled range over a list of values. `words` turns a value into the text shown beside the label and read out.
 * The result has `set(values, value)`, which changes both and returns the nearest value not above `value`.
 */
export function range(label, words, onpick) {
  let values = [];
  const shown = element("span", { class: "kvf-value", "aria-hidden": "true" });
  const control = element("input", { type: "range", min: 0, step: 1, oninput: () => {
    show();
    onpick(values[control.valueAsNumber]);
  } });
  const holder = labelled(label, shown, control);
  function show() {
    const text = words(values[control.valueAsNumber]);
    shown.textContent = text;
    control.setAttribute("aria-valuetext", text);
  }
  holder.set = (newValues, value) => {
    values = newValues;
    control.max = values.length - 1;
    control.value = Math.max(0, values.filter(each => each <= value).length - 1);
    show();
    return values[control.valueAsNumber];
  };
  return holder;
}

/** Empty a figure's place; in a notebook, where no page stands around it, name it and give it its caption. */
export function begin(model, el) {
  const caption = model.get("caption");
  const body = element("div");
  el.classList.add("kv-mount");
  el.replaceChildren(body);
  if (caption) {
    el.setAttribute("role", "figure");
    el.setAttribute("aria-label", model.get("alt"));
    el.append(element("p", { class: "kvf-caption" }, caption));
  }
  return body;
}
