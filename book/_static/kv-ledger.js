// The filters of the ledger page. Without this script every claim is shown, and the filters are not.
(() => {
  function start() {
    for (const ledger of document.querySelectorAll(".kv-ledger")) {
      const form = ledger.querySelector(".kv-filters");
      const entries = [...ledger.querySelectorAll(".kv-entry")];

      function apply() {
        const { verdict, chapter } = Object.fromEntries(new FormData(form));
        let count = 0;
        for (const entry of entries) {
          const fits = (!verdict || entry.dataset.verdict === verdict) && (!chapter || entry.dataset.chapter === chapter);
          entry.hidden = !fits;
          count += fits;
        }
        for (const section of ledger.querySelectorAll(".kv-ledger-chapter"))
          section.hidden = !section.querySelector(".kv-entry:not([hidden])");
        form.querySelector("output").value = `${count} of ${entries.length} claims`;
      }

      // A link to one claim shows it, whatever the filters say.
      function reveal() {
        const target = location.hash && document.getElementById(location.hash.slice(1));
        if (target && target.hidden && ledger.contains(target)) {
          form.reset();
          setTimeout(() => target.scrollIntoView());
        }
      }

      form.addEventListener("change", apply);
      form.addEventListener("reset", () => setTimeout(apply));
      form.addEventListener("submit", (event) => event.preventDefault());
      addEventListener("hashchange", reveal);
      form.hidden = false;
      apply();
    }
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
