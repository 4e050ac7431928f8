// Who shares which KV: the query heads of a model in groups, each over the KV head that it reads.
import { begin, counted, element, formatBytes, formatCount, range, select, threeDigits } from "./kv.js";

/**
 * Find the KV head of a query head, and what a token costs because of it. `config` is one of the data's configs;
 * `stored_numbers` are of one token in one layer, `times` is what one KV head for each query head would cost over that.
 */
export function share(config, head) {
  const groupSize = config.num_heads / config.num_kv_heads;
  const headNumbers = config.head_dim + (config.value_dim ?? config.head_dim);
  const storedNumbers = config.latent ? config.latent_dim : config.num_kv_heads * headNumbers;
  return { kv_head: Math.floor(head / groupSize), group_size: groupSize, stored_numbers: storedNumbers,
    times: config.num_heads * headNumbers / storedNumbers,
    bytes_per_number: config.kv_bytes_per_token / (config.num_layers * storedNumbers) };
}

const split = (count, most) => Math.ceil(count / Math.ceil(count / most));

/** Choose the columns of a group and the groups in a row, where `squares` heads fit; a gap is a third of one. */
export function arrange(config, squares) {
  const { num_heads, num_kv_heads } = config;
  const groupSize = num_heads / num_kv_heads;
  const alone = num_kv_heads === 1;
  let most = groupSize;
  if (groupSize > (alone ? squares : 3)) {
    most = 1;
    while (alone ? 2 * most <= squares : most * most < groupSize) most *= 2;
  }
  const columns = split(groupSize, most);
  return [columns, split(num_kv_heads, Math.max(1, Math.floor((3 * squares + 1) / (3 * columns + 1))))];
}

const amount = value => (Number.isInteger(value) ? formatCount(value) : threeDigits(value));
const about = value => (Number.isInteger(value) ? "" : "about ");

function compare(times) {
  const whole = "what one KV head for each query head would cost";
  if (times === 1) return "exactly what one KV head for each query head costs";
  return times < 1 ? `${threeDigits(1 / times)} times ${whole}` : `${about(times)}1/${amount(times)} of ${whole}`;
}

function sharers(groupSize, alone) {
  if (groupSize === 1) return "no other head reads it";
  return alone ? `all ${groupSize} heads share it` : `${groupSize} heads share each`;
}

/** Say what one query head reads, as `sentence`, and how KV head and bytes follow, as `formula`. */
export function describe(config, head) {
  const shared = share(config, head);
  const reads = config.latent ? `the one latent of ${counted(config.latent_dim, "number")}`
    : `KV head ${shared.kv_head} of ${config.num_kv_heads}`;
  const bytes = `${formatCount(config.kv_bytes_per_token)} B a token`;
  const parts = [counted(config.num_layers, "layer")];
  if (!config.latent) parts.push(counted(config.num_kv_heads, "KV head"));
  const numbers = config.latent ? formatCount(config.latent_dim)
    : `(${config.head_dim} + ${config.value_dim ?? config.head_dim})`;
  parts.push(`${numbers} numbers`, `${about(shared.bytes_per_number)}${amount(shared.bytes_per_number)} B`);
  const rule = config.latent ? "." : `: ⌊${head} / ${shared.group_size}⌋ = ${shared.kv_head}.`;
  return {
    sentence: `Query head ${head} of ${config.num_heads} reads ${reads}; `
      + `${sharers(shared.group_size, config.num_kv_heads === 1)}; ${bytes}, ${compare(shared.times)}.`,
    formula: `${parts.join(" × ")} = ${bytes}; a person with ${counted(config.max_context, "token")} keeps `
      + `${formatBytes(config.kv_bytes_per_token * config.max_context)}. Heads are numbered from 0${rule}`,
  };
}

const SQUARES = { narrow: 12, wide: 24 };

function drawing(config, head) {
  const { kv_head: read, group_size: groupSize } = share(config, head);
  const style = Object.entries(SQUARES).map(([name, squares]) => {
    const [columns, groups] = arrange(config, squares);
    return `--kvf-columns-${name}:${columns};--kvf-groups-${name}:${groups}`;
  }).join(";");
  const group = (_, kvHead) => {
    const queries = Array.from({ length: groupSize }, (_, index) => kvHead * groupSize + index);
    return element("div", { class: kvHead === read ? "kvf-group kvf-read" : "kvf-group" },
      element("div", { class: "kvf-queries" },
        ...queries.map(query => element("span", { class: query === head && "kvf-marked" }, String(query)))),
      element("span", { class: "kvf-link" }),
      config.latent ? element("span", { class: "kvf-stored kvf-latent" }, "latent")
        : element("span", { class: "kvf-stored" }, String(kvHead)));
  };
  return element("div", { class: config.num_heads <= 12 ? "kvf-groups kvf-few" : "kvf-groups", style }, ...Array.from({ length: config.num_kv_heads }, group));
}

function key(config) {
  return [element("span", { class: "kvf-query" }), counted(config.num_heads, "query head"),
    element("span", { class: "kvf-stored" }), config.latent ? "1 latent" : counted(config.num_kv_heads, "KV head")];
}

function render({ model, el }) {
  const { configs, start } = model.get("data");
  let config = configs.find(each => each.name === start.model);
  let head = start.head;
  const counts = element("p", { class: "kvf-key kvf-counts", "aria-hidden": "true" });
  const frame = element("div", { class: "kvf-heads", "aria-hidden": "true" });
  const live = element("p", { class: "kvf-sharing", "aria-live": "polite" });
  const formula = element("p", { class: "kvf-formula" });

  function draw() {
    const said = describe(config, head);
    counts.replaceChildren(...key(config));
    frame.replaceChildren(drawing(config, head));
    live.textContent = said.sentence;
    formula.textContent = said.formula;
  }
  const slider = range("Query head", query => `${query} of ${config.num_heads}`, query => { head = query; draw(); });
  const limitHead = () => { head = slider.set(Array.from({ length: config.num_heads }, (_, query) => query), head); };
  const controls = element("div", { class: "kvf-controls" },
    select("Heads of", configs.map(each => each.name), config.name, name => {
      config = configs.find(each => each.name === name);
      limitHead();
      draw();
    }), slider);
  limitHead();
  begin(model, el).append(controls, counts, frame, live, formula);
  draw();
  return () => el.replaceChildren();
}

export default { render };
