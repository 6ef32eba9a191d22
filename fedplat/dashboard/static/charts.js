"use strict";
// Draws the figures of a page with uPlot, and again when a live update changes their data.
(() => {
  const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
  const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3], [1, 2], [10, 4]];
  const drawn = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const scaled = (units) => (value) => {
    let at = 0;
    while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
    return `${+value.toPrecision(3)} ${units[at]}`;
  };
  const powers = (base, factors, count) => Array.from({ length: count }, (_, at) => factors.map((factor) => factor * base ** at)).flat();
  // Ticks are at whole numbers of clients and of rounds, and at powers of two of bytes.
  const STEPS = { count: powers(10, [1, 2, 5], 15), round: powers(10, [1, 2, 5], 15), bytes: powers(2, [1], 50) };
  const clock = (value, options) => new Date(value * 1e3).toLocaleString("sv", { timeZone: "UTC", ...options });
  const moment = (value) => value == null ? "-" : `${clock(value)} UTC`;
  const HOUR_S = 3600, DAY_S = 86400;
  function timeTicks(ticks, step) {
    if (step >= DAY_S) return ticks.map((tick) => clock(tick).slice(0, 10));
    const size = step >= 60 ? 5 : 8;
    const digits = step < 1 ? Math.ceil(-Math.log10(step)) : 0;
    // The first tick, and the first one of each day, have the date below.
    return ticks.map((tick, at) => clock(tick).slice(11, 11 + size) + (tick % 1).toFixed(digits).slice(1) + (at === 0 || tick % DAY_S < ticks[at - 1] % DAY_S ? `\n${clock(tick).slice(0, 10)}` : ""));
  }
  const FORMATS = {
    number: (value) => String(+value.toPrecision(4)),
    count: (value) => value.toLocaleString("en"),
    round: (value) => value.toLocaleString("en"),
    bytes: scaled(["B", "KiB", "MiB", "GiB", "TiB"]),
    seconds: (value) => value < 1 ? `${Math.round(value * 1000)} ms` : value < 120 ? `${+value.toPrecision(3)} s` : value < 7200 ? `${Math.round(value / 60)} min` : `${+(value / 3600).toPrecision(3)} h`,
  };

  function stack(series) {
    const sums = series[0].values.map(() => 0);
    return series.map((line) => line.values.map((value, at) => (sums[at] += value ?? 0)));
  }

  function draw(figure) {
    const text = figure.dataset.chart;
    const place = figure.querySelector(".plot");
    const width = place.clientWidth;
    const known = drawn.get(place);
    const theme = colour("--text");
    if (known && known.text === text && known.width === width && known.theme === theme) return;
    if (known) known.plot.destroy();
    const data = JSON.parse(text);
    const values = data.stack ? stack(data.series) : data.series.map((line) => line.values);
    const order = data.series.map((_, at) => at);
    if (data.stack) order.reverse();  // the highest layer is drawn first
    const format = FORMATS[data.yUnit];
    const isTime = data.xUnit === "time";
    const spread = isTime ? HOUR_S : 1;
    const steps = (unit) => STEPS[unit] ? { incrs: STEPS[unit] } : {};
    const axis = { stroke: theme, grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui" };
    const options = {
      width, height: 200, tzDate: (stamp) => uPlot.tzDate(new Date(stamp * 1e3), "Etc/UTC"),
      scales: { x: { time: isTime, ...(data.x.length === 1 ? { range: [data.x[0] - spread, data.x[0] + spread] } : {}) }, y: { range: (_, low, high) => data.stack || data.yUnit !== "number" ? [0, (high || 1) * 1.05] : low === high ? [low - 1, high + 1] : uPlot.rangeNum(low, high, 0.1, false) } },
      axes: [{ ...axis, ...steps(data.xUnit), ...(isTime ? { values: (_, ticks, at, space, step) => timeTicks(ticks, step) } : { values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) || data.xUnit !== "round" ? FORMATS[data.xUnit](tick) : "") }) },
        { ...axis, ...steps(data.yUnit), size: (_, texts) => Math.max(48, 20 + 7.5 * Math.max(0, ...(texts ?? []).map((text) => text.length))), values: (_, ticks) => ticks.map((tick) => format(tick)) }],
      cursor: { drag: { x: false, y: false } },
      series: [{ label: isTime ? "Time" : data.xUnit === "round" ? "Round" : "Time", ...(isTime ? { value: (_, value) => moment(value) } : { value: (_, value) => value == null ? "-" : FORMATS[data.xUnit](value) }) },
        ...order.map((at) => ({
          label: data.series[at].name, stroke: colour(COLOURS[at % 6]), width: 1.8, spanGaps: true,
          dash: data.stack ? undefined : DASHES[at % 6],
          fill: data.stack ? colour(COLOURS[at % 6]) : undefined,
          paths: data.stack ? uPlot.paths.stepped({ align: 1 }) : undefined,
          points: { show: data.x.length < 2 },
          value: (_, value, series, index) => index == null ? "-" : data.series[at].values[index] == null ? "-" : format(data.series[at].values[index]),
        }))],
    };
    place.replaceChildren();
    drawn.set(place, { plot: new uPlot(options, [data.x, ...order.map((at) => values[at])], place), text, width, theme });
  }

  function drawAll() {
    for (const place of [...drawn.keys()]) {
      if (!place.isConnected) { drawn.get(place).plot.destroy(); drawn.delete(place); }
    }
    document.querySelectorAll("figure[data-chart]").forEach(draw);
  }

  let asked = 0;
  const soon = () => { cancelAnimationFrame(asked); asked = requestAnimationFrame(drawAll); };
  new MutationObserver(soon).observe(document.getElementById("main"), { childList: true, subtree: true, attributes: true, attributeFilter: ["data-chart"] });
  window.addEventListener("resize", soon);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  drawAll();
})();
