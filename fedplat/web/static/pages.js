"use strict";
// Small helpers around the pages, which all work without this script.
(() => {
  const local = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

  function addLocalTimes() {
    for (const each of document.querySelectorAll("time[datetime]:not([title])")) {
      each.title = `${local.format(new Date(each.dateTime))}, your local time`;
    }
  }

  new MutationObserver(addLocalTimes).observe(document.getElementById("main"), { childList: true, subtree: true, attributes: true, attributeFilter: ["datetime", "title"] });
  addLocalTimes();

  const form = document.querySelector("form[data-submit]");
  if (form) form.submit();
})();
