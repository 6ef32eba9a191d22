"use strict";
// Live updates, and pages that wait for the server.
(() => {
  const lost = document.getElementById("lost");

  document.addEventListener("htmx:sse:error", () => { lost.hidden = false; });
  document.addEventListener("htmx:sse:after:connection", () => { lost.hidden = true; });
  document.addEventListener("signed-out", () => { location.href = "/login?next=" + encodeURIComponent(location.pathname + location.search); });

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
