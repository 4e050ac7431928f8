// The memory planner: which devices hold a model's weights and everybody's KV cache.
import { begin, element, formatBytes, formatCount, range, select, threeDigits } from "./kv.js";

/**
 * Add up what a choice needs and hold it against each device.
 * `choice` is { model, context, people, weight_dtype, kv_dtype }; sizes are in bytes, times in seconds.
 */
export function plan(data, choice) {
  const model = data.models.find(each => each.name === choice.model);
  const weightBytes = model.num_params * data.weight_bytes_per_param[choice.weight_dtype];
  const kvBytesPerToken = model.kv_bytes_per_token[choice.kv_dtype];
  const kvBytesPerPerson = kvBytesPerToken * choice.context;
  const kvBytes = kvBytesPerPerson * choice.people;
  const totalBytes = weightBytes + kvBytes;
  const devices = data.devices.map(({ name, memory_bytes, bandwidth_bytes_per_s }) => ({
    name,
    fits: totalBytes <= memory_bytes,
    people: Math.max(0, Math.floor((memory_bytes - weightBytes) / kvBytesPerPerson)),
    free_bytes: memory_bytes - totalBytes,
    step_s: bandwidth_bytes_per_s ? totalBytes / bandwidth_bytes_per_s : null,
  }));
  return { weight_bytes: weightBytes, kv_bytes_per_token: kvBytesPerToken, kv_bytes_per_person: kvBytesPerPerson,
    kv_bytes: kvBytes, total_bytes: totalBytes, devices };
}

const plural = count => (count === 1 ? "1 person" : `${formatCount(count)} people`);

/** Say what the numbers mean, in one sentence for each. */
export function summarize(choice, planned, devices) {
  const fitting = devices.filter(each => each.fits).length;
  return [
    `Weights: ${formatBytes(planned.weight_bytes)}.`,
    `KV: ${formatCount(planned.kv_bytes_per_token)} B for each token, ${formatBytes(planned.kv_bytes)} for `
      + `${plural(choice.people)} with ${formatCount(choice.context)} tokens each.`,
    `Together ${formatBytes(planned.total_bytes)}: fits on ${fitting} of ${devices.length} devices shown.`,
  ].join(" ");
}

/** Say how one device fares. */
export function verdict(device) {
  const room = device.people ? `room for ${plural(device.people)}` : "not even one person";
  if (!device.fits) return `does not fit: ${room}`;
  return device.step_s === null ? `fits: ${room}` : `fits: ${room}, reading it takes\u00a0${threeDigits(device.step_s * 1000)}\u00a0ms`;
}

function row(device, memoryBytes, planned) {
  const full = Math.max(memoryBytes, planned.total_bytes);
  const percent = bytes => `${(100 * bytes / full).toFixed(2)}%`;
  return element("li", { class: device.fits ? "kvf-fits" : "kvf-over" },
    element("span", { class: "kvf-name" }, `${device.name}, ${formatBytes(memoryBytes)}`),
    element("span", { class: "kvf-verdict" }, verdict(device)),
    element("span", { class: "kvf-track", "aria-hidden": "true" },
      element("span", { class: "kvf-weights", style: `width:${percent(planned.weight_bytes)}` }),
      element("span", { class: "kvf-kv", style: `width:${percent(planned.kv_bytes)}` }),
      element("span", { class: "kvf-capacity", style: `left:${percent(memoryBytes)}` })));
}

function render({ model, el }) {
  const data = model.get("data");
  const choice = { ...data.start };
  const hidden = new Set();
  const live = element("p", { class: "kvf-summary", "aria-live": "polite" });
  const rows = element("ul", { class: "kvf-devices" });

  function draw() {
    const planned = plan(data, choice);
    const shown = planned.devices.filter(each => !hidden.has(each.name));
    live.textContent = summarize(choice, planned, shown);
    rows.replaceChildren(...shown.map(device =>
      row(device, data.devices.find(each => each.name === device.name).memory_bytes, planned)));
  }
  const change = name => value => { choice[name] = value; draw(); };

  const context = range("Tokens each", formatCount, change("context"));
  const people = range("People at once", formatCount, change("people"));
  const limitContext = () => {
    const longest = data.models.find(each => each.name === choice.model).max_context;
    choice.context = context.set(data.contexts.filter(each => each <= longest), choice.context);
  };
  limitContext();
  people.set(data.people, choice.people);

  const boxes = data.devices.map(({ name }) => {
    const box = element("input", { type: "checkbox", checked: true, onchange: () => {
      if (box.checked) hidden.delete(name); else hidden.add(name);
      draw();
    } });
    return element("label", {}, box, ` ${name}`);
  });
  const controls = element("div", { class: "kvf-controls" },
    select("Model", data.models.map(each => each.name), choice.model, value => {
      choice.model = value;
      limitContext();
      draw();
    }),
    context, people,
    select("Weights in", Object.keys(data.weight_bytes_per_param), choice.weight_dtype, change("weight_dtype")),
    select("KV in", Object.keys(data.models[0].kv_bytes_per_token), choice.kv_dtype, change("kv_dtype")));
  const filter = element("details", { class: "kvf-filter" }, element("summary", {}, "Devices shown"),
    element("fieldset", {}, element("legend", {}, "Devices shown"), ...boxes));
  const key = element("p", { class: "kvf-key", "aria-hidden": "true" },
    element("span", { class: "kvf-weights" }), "weights", element("span", { class: "kvf-kv" }), "KV",
    element("span", { class: "kvf-capacity" }), "what the device holds");
  begin(model, el).append(controls, live, key, rows, filter);
  draw();
  return () => el.replaceChildren();
}

export default { render };
