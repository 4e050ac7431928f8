// Brings the interactive figures of a page to life.
//
// <figure data-kv-figure="NAME"> holds a still frame, which alone makes the point, and its data as JSON in
// <script class="kv-data">, which the figure gets as model.get("data"). figures/NAME.js registers
// { render({ model, el }) } in window.kvFigures; it is loaded as a classic script, since browsers refuse modules from a
// page opened from disk. If anything fails, the frame stays.
(() => {
  const base = document.currentScript.src.replace(/[^/]*$/, "");
  const loading = new Map();

  // From disk a page may not read its neighbours, so the search results there come without excerpts.
  if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS === "object")
    DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

  function load(name) {
    if (!loading.has(name)) {
      loading.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = `${base}figures/${encodeURIComponent(name)}.js`;
        script.onload = () => resolve(window.kvFigures?.[name]);
        script.onerror = () => reject(new Error(`${script.src} did not load`));
        document.head.append(script);
      }));
    }
    return loading.get(name);
  }

  // The part of anywidget's model that a page without a kernel can offer.
  function createModel(state) {
    const handlers = new Map();
    const fire = (event, ...values) => [...(handlers.get(event) ?? [])].forEach((handler) => handler(...values));
    const model = {
      get: (key) => state[key],
      set(key, value) {
        const changes = Object.entries(typeof key === "object" ? key : { [key]: value });
        const changed = changes.filter(([name, next]) => state[name] !== next);
        for (const [name, next] of changed) state[name] = next;
        for (const [name, next] of changed) fire(`change:${name}`, model, next);
        if (changed.length) fire("change", model);
      },
      save_changes() {},
      send() {},
      on(events, handler) {
        for (const event of events.split(" ")) handlers.set(event, [...(handlers.get(event) ?? []), handler]);
      },
      off(events, handler) {
        for (const event of events ? events.split(" ") : [...handlers.keys()])
          handlers.set(event, handler ? (handlers.get(event) ?? []).filter((h) => h !== handler) : []);
      },
    };
    return model;
  }

  async function bringToLife(figure) {
    const name = figure.dataset.kvFigure;
    const el = document.createElement("div");
    el.className = "kv-live";
    try {
      const data = JSON.parse(figure.querySelector("script.kv-data").textContent);
      let widget = await load(name);
      if (typeof widget === "function") widget = await widget();
      const model = createModel({ data });
      await widget.initialize?.({ model });
      const frames = [...figure.children].filter((child) => !child.matches("script, style, figcaption"));
      figure.insertBefore(el, frames[0] ?? figure.firstChild);
      await widget.render({ model, el });
      for (const frame of frames) frame.hidden = true;
      figure.dataset.kvState = "live";
    } catch (error) {
      el.remove();
      figure.dataset.kvState = "still";
      console.error(`figure ${name} stays still:`, error);
    }
  }

  const start = () => document.querySelectorAll("[data-kv-figure]").forEach(bringToLife);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
