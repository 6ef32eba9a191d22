"use strict";
// Small helpers around the pages, which all work without this script.
(() => {
  const lost = document.getElementById("lost");
  const local = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

  function addLocalTimes() {
    for (const each of document.querySelectorAll("time[datetime]:not([title])")) {
      each.title = `${local.format(new Date(each.dateTime))}, your local time`;
    }
  }

  document.addEventListener("htmx:sse:error", () => { lost.hidden = false; });
  document.addEventListener("htmx:sse:after:connection", () => { lost.hidden = true; });
  document.addEventListener("signed-out", () => { location.href = "/login?next=" + encodeURIComponent(location.pathname + location.search); });
  new MutationObserver(addLocalTimes).observe(document.getElementById("main"), { childList: true, subtree: true, attributes: true, attributeFilter: ["datetime", "title"] });
  addLocalTimes();

  const form = document.querySelector("form[data-submit]");
  if (form) form.submit();

  if (document.querySelector("[data-away]")) {
    const again = async () => {
      try {
        const response = await fetch(location.href, { method: "HEAD", cache: "no-store" });
        if (response.status !== 503) { location.reload(); return; }
      } catch { /* the dashboard itself is away: try again */ }
      setTimeout(again, 2000);
    };
    setTimeout(again, 2000);
  }
})();
