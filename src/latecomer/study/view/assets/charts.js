"use strict";
// Converts a view, as study/view/panels.py writes it, to Plotly traces and a layout.
window.Latecomer = window.Latecomer || {};
(function (ns) {
  // Okabe and Ito's palette without yellow; in the dark theme blue is lighter and black is white.
  const LIGHT = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#56B4E9", "#7A7A7A"];
  const DARK = ["#4DA6E0", "#F0793A", "#1FBF93", "#DB93BC", "#E69F00", "#FFFFFF", "#A6DDFA", "#9AA3AB"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon"];

  ns.theme = function () {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    const dark = document.documentElement.dataset.theme === "dark";
    return { dark, ink: read("--ink"), soft: read("--soft"), card: read("--card"),
      grid: read("--grid"), line: read("--line"), colours: dark ? DARK : LIGHT };
  };

  // Lane states come with colours for the light theme.
  ns.shade = function (colour, theme) {
    const place = LIGHT.indexOf(colour);
    return place < 0 ? colour : theme.colours[place];
  };

  // Plotly interprets some tags in names: escape them.
  ns.plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  ns.clear = function (colour, alpha) {
    const n = parseInt(colour.slice(1), 16);
    return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${alpha})`;
  };

  ns.isCategorical = (view) => view.series.some((s) => s.x.some((x) => typeof x === "string"));

  function band(s, colour) {
    return { type: "scatter", mode: "lines", x: s.x.concat(s.x.slice().reverse()),
      y: s.high.concat(s.low.slice().reverse()), fill: "toself", fillcolor: ns.clear(colour, 0.16),
      line: { width: 0 }, hoverinfo: "skip", showlegend: false, meta: "band" };
  }

  function line(s, colour, index, view) {
    const few = s.x.length <= 60;
    // A logarithmic axis has no 0: draw it at 0.5.
    const x = view.log_x ? s.x.map((v) => Math.max(v, 0.5)) : s.x;
    const trace = { type: "scatter", x, y: s.y, name: ns.plain(s.name),
      mode: s.kind === "dots" ? "markers" : few && s.kind === "line" ? "lines+markers" : "lines",
      line: { color: colour, width: 2, dash: DASHES[s.dash % DASHES.length],
        shape: s.kind === "step" ? "hv" : "linear" },
      marker: { color: colour, size: s.kind === "dots" ? s.size : 4,
        symbol: SYMBOLS[index % SYMBOLS.length] },
      hovertemplate: `%{y:.4~g}<extra>${ns.plain(s.name)}</extra>` };
    if (s.kind === "dots") {
      trace.marker.opacity = s.x.length > 300 ? 0.6 : 0.85;
      trace.hovertemplate = `%{x:.5~g}: %{y:.4~g}<extra>${ns.plain(s.name)}</extra>`;
    }
    if (s.kind === "area") {
      Object.assign(trace, { stackgroup: "all", mode: "lines", fillcolor: ns.clear(colour, 0.75) });
      trace.line.width = 0.5;
      if (!view.unit_share) trace.line.shape = "hv";
    }
    return trace;
  }

  function bar(s, colour, crowded) {
    const trace = { type: "bar", x: s.x.map((x) => (typeof x === "string" ? ns.plain(x) : x)),
      y: s.y, name: ns.plain(s.name), marker: { color: colour },
      hovertemplate: `%{x}: %{y:.4~g}<extra>${ns.plain(s.name)}</extra>` };
    if (!crowded && s.low && s.high.some((h, i) => h !== s.low[i])) {
      trace.error_y = { type: "data", symmetric: false, thickness: 1.2, width: 3, color: ns.theme().soft,
        array: s.high.map((h, i) => (h === null ? 0 : h - s.y[i])),
        arrayminus: s.low.map((l, i) => (l === null ? 0 : s.y[i] - l)) };
    }
    return trace;
  }

  // All traces, and for each series the indices of its traces, so that a legend can hide them.
  ns.traces = function (view, theme, width) {
    const data = [], tracesOf = [];
    // No whiskers on bars of a few pixels; the table has the range.
    const bars = view.series.reduce((sum, s) => sum + (s.kind === "bar" ? s.x.length : 0), 0);
    const crowded = bars && width / bars < 9;
    view.series.forEach((s, index) => {
      const colour = theme.colours[s.colour];
      const indices = [];
      if (s.kind === "bar") {
        indices.push(data.push(bar(s, colour, crowded)) - 1);
      } else {
        if (s.low) indices.push(data.push(band(s, colour)) - 1);
        indices.push(data.push(line(s, colour, index, view)) - 1);
      }
      tracesOf.push(indices);
    });
    return { data, tracesOf };
  };

  ns.colourOf = (s, theme) => theme.colours[s.colour];
  ns.dashOf = (s) => ["", "6 3", "2 3", "6 3 2 3", "9 4"][s.dash % 5];

  ns.baseLayout = function (view, theme, width) {
    const axis = { gridcolor: theme.grid, linecolor: theme.line, zerolinecolor: theme.line,
      automargin: true, tickfont: { size: 12 }, title: { font: { size: 13 }, standoff: 8 } };
    const x = Object.assign({}, axis, { title: Object.assign({ text: view.x_title }, axis.title) });
    const y = Object.assign({}, axis, { title: Object.assign({ text: view.y_title }, axis.title) });
    y.rangemode = "tozero";
    if (view.unit_share) { y.range = [view.stacked ? 0 : -0.02, 1.02]; y.tickformat = ".1~f"; y.dtick = 0.2; }
    if (view.log_x) {
      const powers = [1, 10, 100, 1e3, 1e4, 1e5, 1e6];
      Object.assign(x, { type: "log", tickvals: [0.5, ...powers], ticktext: ["0", ...powers.map((v) => v.toLocaleString("en"))] });
    }
    return { xaxis: x, yaxis: y, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: theme.ink, family: "system-ui, sans-serif", size: 12 },
      margin: { l: 44, r: 12, t: 14, b: 40 }, showlegend: false, hovermode: "closest",
      hoverlabel: { bgcolor: theme.card, bordercolor: theme.line, font: { color: theme.ink } },
      dragmode: ns.dragMode(), autosize: true };
  };

  // On a touch screen dragging scrolls the page; the buttons zoom.
  ns.dragMode = () => (window.matchMedia("(pointer: coarse)").matches ? false : "zoom");

  ns.layout = function (view, theme, width) {
    const layout = ns.baseLayout(view, theme, width);
    const bars = view.series.filter((s) => s.kind === "bar");
    if (bars.length) {
      const seen = new Set();
      const disjoint = bars.every((s) => s.x.every((x) => !seen.has(x) && seen.add(x)));
      layout.barmode = view.stacked || disjoint ? "stack" : "group";
      layout.bargap = seen.size > 30 ? 0.05 : 0.25;
      if (ns.isCategorical(view)) {
        const names = [...new Set(bars.flatMap((s) => s.x))];
        layout.xaxis.type = "category";
        layout.xaxis.categoryorder = "array";
        layout.xaxis.categoryarray = names.map(ns.plain);
        const longest = Math.max(...names.map((n) => n.length));
        const room = (width - 70) / names.length / 7;
        if (longest > room) layout.xaxis.tickangle = names.length > 14 || longest > 12 ? -60 : -35;
      }
    } else if (view.series.length > 1 && view.series.every((s) => s.kind !== "dots")) {
      layout.hovermode = width > 600 && view.series.length <= 8 ? "x unified" : "closest";
    }
    addMarks(layout, view, theme, width);
    return layout;
  };

  function addMarks(layout, view, theme, width) {
    const marks = view.marks || [];
    const upright = marks.filter((m) => !m.level);
    // Labels that would overlap are shown in the table only.
    const named = upright.length <= (width > 600 ? 8 : 3);
    layout.shapes = marks.map((m) => m.level
      ? { type: "line", xref: "paper", x0: 0, x1: 1, y0: m.at, y1: m.at,
        line: { color: theme.ink, width: 1.5, dash: "dash" } }
      : { type: "line", yref: "paper", y0: 0, y1: 1, x0: m.at, x1: m.at,
        line: { color: theme.soft, width: 1, dash: "dot" } });
    const rows = named ? Math.min(3, upright.length) : 0;
    layout.annotations = marks.filter((m) => m.level || named).map((m) => {
      const font = { size: 11, color: theme.ink };
      if (m.level) {
        return { xref: "paper", x: 1, xanchor: "right", y: m.at, yanchor: "bottom",
          text: ns.plain(m.label), showarrow: false, font };
      }
      const row = upright.indexOf(m) % rows;
      return { x: m.at, yref: "paper", y: 1, yanchor: "bottom", xanchor: "center",
        yshift: 13 * row, text: ns.plain(m.label), showarrow: false, font };
    });
    if (rows) layout.margin.t += 6 + 13 * rows;
  }

  // Text alternative of a chart, for screen readers.
  ns.gist = function (view) {
    const text = (v) => (v === null || v === undefined ? "no value" : String(v));
    const parts = view.series.slice(0, 8).map((s) => {
      const known = s.y.filter((v) => v !== null);
      if (!known.length) return `${s.name}: no values`;
      if (s.kind === "bar" && s.x.length <= 8) {
        return `${s.name}: ${s.x.map((x, i) => `${x} ${text(s.y[i])}`).join(", ")}`;
      }
      const top = known.reduce((a, b) => Math.max(a, b));
      return `${s.name}: from ${text(known[0])} to ${text(known[known.length - 1])}, highest ${top}`;
    });
    if (view.series.length > 8) parts.push(`and ${view.series.length - 8} more`);
    return parts.join("; ");
  };

  // The data of a chart as a table: one row per x, one column per series.
  ns.tableOf = function (view) {
    const order = new Map();
    view.series.forEach((s) => s.x.forEach((x) => order.set(x, null)));
    let keys = [...order.keys()];
    if (!ns.isCategorical(view)) keys.sort((a, b) => a - b);
    const columns = view.series.map((s) => {
      const at = new Map(s.x.map((x, i) => [x, i]));
      return (x) => {
        const i = at.get(x);
        if (i === undefined || s.y[i] === null) return "";
        const spread = s.low && s.low[i] !== s.high[i] ? ` (${s.low[i]} to ${s.high[i]})` : "";
        return `${s.y[i]}${spread}`;
      };
    });
    const all = keys.length;
    if (all > 200) keys = keys.filter((_, i) => i % Math.ceil(all / 200) === 0 || i === all - 1);
    const rows = keys.map((x) => [x, ...columns.map((c) => c(x))]);
    (view.marks || []).forEach((m) => rows.push([m.at, m.label]));
    return { head: [view.x_title, ...view.series.map((s) => s.name)], rows,
      left: all > keys.length ? `${keys.length} of ${all} rows, evenly picked.` : "" };
  };
})(window.Latecomer);
