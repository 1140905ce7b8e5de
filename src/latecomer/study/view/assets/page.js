"use strict";
// The page: cards with a chart, its legend and its table; light and dark theme. All content is
// inserted as text, never as markup.
window.Latecomer = window.Latecomer || {};
(function (ns) {
  const charts = new Set();
  let serial = 0;

  const make = ns.make = function (tag, attributes, ...children) {
    const element = document.createElement(tag);
    Object.entries(attributes || {}).forEach(([name, value]) => {
      if (name === "class") element.className = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    });
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };
  const button = ns.button = (text, label, onclick, more) =>
    make("button", Object.assign({ type: "button", "aria-label": label, title: label, onclick }, more), text);

  // Light or dark theme: the system's setting, until the reader chooses.
  const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");
  function stored(value) {
    try {
      if (value !== undefined) localStorage.setItem("latecomer-theme", value);
      return localStorage.getItem("latecomer-theme");
    } catch (error) { return null; }
  }
  function applyTheme(choice) {
    const dark = choice === "dark" || (choice !== "light" && darkSystem.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    charts.forEach((chart) => chart.redraw());
  }
  darkSystem.addEventListener("change", () => applyTheme(stored()));
  ns.themeButton = function () {
    const text = () => (document.documentElement.dataset.theme === "dark" ? "Light" : "Dark");
    const toggle = button(text(), "Switch between light and dark", () => {
      applyTheme(stored(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
      toggle.textContent = text();
    });
    toggle.className = "theme";
    return toggle;
  };
  applyTheme(stored());

  const LONG = 40;  // characters from which a cell is wrapped text

  const plainTable = ns.plainTable = function (head, rows, caption) {
    const table = make("table", {});
    if (caption) table.append(make("caption", { class: "skip" }, caption));
    table.append(make("thead", {}, make("tr", {}, ...head.map((h) => make("th", { scope: "col" }, String(h))))));
    table.append(make("tbody", {}, ...rows.map((row) =>
      make("tr", {}, ...row.map((cell) =>
        make("td", { class: String(cell).length > LONG ? "long" : "" }, cell === null ? "" : String(cell)))))));
    return table;
  };

  // A chart is drawn when it scrolls into view, so that the page loads fast.
  const sight = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && entry.target.chart) entry.target.chart.show();
  }), { rootMargin: "300px" });
  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => {
    const chart = entry.target.chart;
    if (chart && chart.drawn && Math.abs(chart.width - entry.contentRect.width) > 2) chart.redraw();
  }));
  window.addEventListener("beforeprint", () => charts.forEach((chart) => chart.show()));

  class Chart {
    constructor(panel) {
      this.panel = panel;
      this.chosen = 0;
      this.first = 0;
      this.hidden = new Set();
      this.drawn = false;
      this.busy = Promise.resolve();
      this.build();
      charts.add(this);
    }

    get view() { return this.panel.views[Math.min(this.chosen, this.panel.views.length - 1)]; }

    build() {
      const { panel } = this, id = `${panel.id}-${serial += 1}`;
      this.plot = make("div", { class: "plot", role: "img", "data-panel": panel.id });
      this.plot.chart = this;
      this.legend = make("ul", { class: "legend", "aria-label": "Shown in the chart" });
      this.note = make("p", { class: "soft" });
      this.pager = make("div", { class: "bar" });
      this.choice = make("select", { "aria-label": `View of: ${panel.title}`,
        onchange: () => this.choose(this.choice.selectedIndex) });
      this.table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${panel.title}` });
      this.details = make("details", { ontoggle: () => this.fillTable() }, make("summary", {}, "Table"), this.table);
      const zoom = (factor, shift) => () => this.zoom(factor, shift);
      const tools = make("span", { class: "group", role: "group", "aria-label": "Zoom" },
        button("+", "Zoom in", zoom(0.5, 0)), button("−", "Zoom out", zoom(2, 0)),
        button("◀", "Move left", zoom(1, -0.4)), button("▶", "Move right", zoom(1, 0.4)),
        button("Reset", "Show everything", () => this.reset()));
      const save = make("span", { class: "group push", role: "group", "aria-label": "Save the chart" },
        button("PNG", "Save as PNG", () => this.save("png")), button("SVG", "Save as SVG", () => this.save("svg")));
      this.element = make("section", { class: "card", id: panel.id, "aria-labelledby": id },
        make("h2", { id }, panel.title), make("p", { class: "soft" }, panel.about),
        make("div", { class: "bar" }, this.choice, tools, save),
        this.plot, this.pager, this.legend, this.note, this.details);
      this.fillChoice();
      sight.observe(this.plot);
      sizes.observe(this.plot);
    }

    fillChoice() {
      this.choice.replaceChildren(...this.panel.views.map((v) => make("option", {}, v.name)));
      this.choice.selectedIndex = this.chosen;
      this.choice.hidden = this.panel.views.length < 2;
    }

    choose(index) {
      this.chosen = index;
      this.hidden.clear();
      this.first = 0;
      this.zoomed = null;
      this.redraw();
    }

    update(panel) {
      const before = this.panel.views.map((v) => v.name).join("\n");
      const name = this.view.name;
      this.panel = panel;
      if (before !== panel.views.map((v) => v.name).join("\n")) {
        this.chosen = Math.max(0, panel.views.findIndex((v) => v.name === name));
        this.fillChoice();
      }
      this.redraw();
    }

    show() { if (!this.drawn) { this.drawn = true; this.redraw(); } }

    remove() {
      charts.delete(this);
      sight.unobserve(this.plot);
      sizes.unobserve(this.plot);
      if (this.plot.data) Plotly.purge(this.plot);
      this.element.remove();
    }

    figure() {
      const theme = ns.theme(), view = this.view;
      this.width = this.plot.clientWidth;
      if (view.lanes) return ns.laneFigure(view, theme, this.width, this.first);
      const { data, tracesOf } = ns.traces(view, theme, this.width);
      return { data, tracesOf, layout: ns.layout(view, theme, this.width) };
    }

    redraw() {
      if (!this.drawn || !this.plot.isConnected) return;
      const figure = this.figure(), view = this.view;
      this.tracesOf = figure.tracesOf;
      figure.tracesOf.forEach((numbers, index) => numbers.forEach((n) => {
        figure.data[n].visible = !this.hidden.has(index);
      }));
      // The zoom is kept while the same view is updated, and reset with a new view.
      if (this.zoomed) {
        Object.assign(figure.layout.xaxis, { range: this.zoomed.x.slice(), autorange: false });
        if (!view.lanes) Object.assign(figure.layout.yaxis, { range: this.zoomed.y.slice(), autorange: false });
      }
      this.plot.style.height = figure.layout.height ? `${figure.layout.height}px` : "";
      this.plot.setAttribute("aria-label", `${this.panel.title}, ${view.name}. `
        + (view.lanes ? ns.laneGist(view) : ns.gist(view)));
      this.busy = Plotly.react(this.plot, figure.data, figure.layout,
        { displayModeBar: false, responsive: false, doubleClick: false });
      if (!this.listening) {
        this.listening = true;
        this.plot.on("plotly_relayout", (change) => {
          if (!Object.keys(change).some((key) => /axis\.range/.test(key))) return;
          const { xaxis, yaxis } = this.plot.layout;
          this.zoomed = { x: xaxis.range.slice(), y: yaxis.range.slice() };
        });
        this.plot.on("plotly_doubleclick", () => this.reset());
      }
      this.fillLegend();
      this.fillPager();
      this.note.textContent = view.note || "";
      this.note.hidden = !view.note;
      if (this.details.open) this.fillTable();
    }

    fillLegend() {
      const theme = ns.theme(), view = this.view;
      const entries = view.lanes
        ? view.lanes.states.map((s) => ({ name: s.name, colour: ns.shade(s.colour, theme), wide: !s.thin, dash: "" }))
        : view.series.map((s) => ({ name: s.name, colour: ns.colourOf(s, theme),
          wide: s.kind === "bar" || s.kind === "area", dots: s.kind === "dots", dash: ns.dashOf(s) }));
      const key = JSON.stringify([entries, [...this.hidden]]);
      if (key === this.legendKey) return;
      this.legendKey = key;
      this.legend.hidden = entries.length < 2;
      this.legend.replaceChildren(...entries.map((entry, index) => make("li", {},
        button("", `Show ${entry.name}`, () => this.toggle(index), { "aria-pressed": String(!this.hidden.has(index)) }))));
      this.legend.querySelectorAll("button").forEach((b, index) => b.append(swatch(entries[index]), entries[index].name));
    }

    toggle(index) {
      if (this.hidden.has(index)) this.hidden.delete(index); else this.hidden.add(index);
      const focused = index;
      this.redraw();
      const again = this.legend.querySelectorAll("button")[focused];
      if (again) again.focus();
    }

    fillPager() {
      const lanes = this.view.lanes;
      const count = lanes ? lanes.labels.length : 0, size = ns.lanesPerPage(this.width);
      this.pager.hidden = count <= size;
      if (count <= size) return;
      const go = (first) => () => { this.first = Math.max(0, Math.min(first, count - 1)); this.redraw(); };
      const last = Math.min(count, this.first + size);
      const field = make("input", { type: "search", "aria-label": "Go to device", placeholder: "go to device",
        onchange: () => {
          const place = lanes.labels.indexOf(field.value.trim());
          if (place >= 0) go(place)();
        } });
      this.pager.replaceChildren(
        make("span", { class: "group", role: "group", "aria-label": "Devices shown" },
          button("‹ Previous", "Previous devices", go(this.first - size), { disabled: this.first === 0 }),
          button("Next ›", "Next devices", go(this.first + size), { disabled: last >= count })),
        make("span", { class: "soft", "aria-live": "polite" },
          `${(this.first + 1).toLocaleString("en")} to ${last.toLocaleString("en")} of ${count.toLocaleString("en")}`),
        field);
    }

    fillTable() {
      if (!this.details.open) return;
      const view = this.view;
      const found = view.lanes ? ns.laneTable(view, this.first, this.width || 800) : ns.tableOf(view);
      this.table.replaceChildren(plainTable(found.head, found.rows, `${this.panel.title}, ${view.name}`),
        found.left ? make("p", { class: "soft" }, found.left) : "");
    }

    zoom(factor, shift) {
      this.show();
      if (!this.plot.layout) return;
      const axis = this.plot.layout.xaxis;
      const [low, high] = axis.range.map(Number), size = high - low;
      const middle = (low + high) / 2 + shift * size;
      Plotly.relayout(this.plot, { "xaxis.range": [middle - (size * factor) / 2, middle + (size * factor) / 2] });
    }

    reset() {
      this.show();
      this.zoomed = null;
      if (this.view.lanes) this.zoomed = { x: [0, this.figure().horizon], y: [] };
      this.redraw();
    }

    async save(format) {
      this.show();
      await this.busy;
      const name = `${this.panel.id}-${this.view.name}`.replace(/[^a-z0-9]+/gi, "-");
      // A saved image includes the legend, the title and the background.
      const layout = Object.assign({}, this.plot.layout, { paper_bgcolor: ns.theme().card,
        showlegend: this.tracesOf.length > 1, width: 900, height: Math.max(480, this.plot.layout.height || 0),
        title: { text: ns.plain(this.panel.title), font: { size: 16 } },
        margin: Object.assign({}, this.plot.layout.margin, { t: 60 }) });
      await Plotly.downloadImage({ data: this.plot.data, layout }, { format, filename: name, scale: 2, width: layout.width, height: layout.height });
    }
  }
  ns.Chart = Chart;

  function swatch(entry) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    const set = (node, values) => Object.entries(values).forEach(([k, v]) => node.setAttribute(k, v));
    set(svg, { width: 22, height: 10, viewBox: "0 0 22 10", "aria-hidden": "true" });
    const shape = document.createElementNS(space, entry.dots ? "circle" : entry.wide ? "rect" : "line");
    if (entry.dots) set(shape, { cx: 11, cy: 5, r: 4, fill: entry.colour });
    else if (entry.wide) set(shape, { x: 5, y: 0, width: 12, height: 10, fill: entry.colour });
    else set(shape, { x1: 0, y1: 5, x2: 22, y2: 5, stroke: entry.colour, "stroke-width": 3, "stroke-dasharray": entry.dash });
    svg.append(shape);
    return svg;
  }

  // A long table with sorting, search and paging.
  class Rows {
    constructor(rows) {
      this.page = 0;
      this.sorted = null;
      this.down = false;
      this.body = make("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": rows.title });
      this.search = make("input", { type: "search", placeholder: "search", "aria-label": `Search: ${rows.title}`,
        oninput: () => { this.page = 0; this.draw(); } });
      this.pager = make("span", { class: "bar push" });
      this.tools = make("div", { class: "bar" }, this.search, this.pager);
      this.element = make("section", { class: "card wide", id: rows.id }, make("h2", {}, rows.title),
        make("p", { class: "soft" }, rows.about), this.tools, this.body);
      this.update(rows);
    }

    update(rows) { this.rows = rows; this.draw(); }

    draw() {
      const { columns } = this.rows, size = 20, wanted = this.search.value.trim().toLowerCase();
      let order = Array.from({ length: columns.length ? columns[0][1].length : 0 }, (_, i) => i);
      this.tools.hidden = order.length <= size;
      if (wanted) order = order.filter((i) => columns.some(([, v]) => String(v[i] ?? "").toLowerCase().includes(wanted)));
      if (this.sorted !== null) {
        const values = columns[this.sorted][1], sign = this.down ? -1 : 1;
        const rank = (v) => (v === null || v === "" ? Infinity * sign : v);
        order.sort((a, b) => {
          const x = rank(values[a]), y = rank(values[b]);
          return (typeof x === "number" && typeof y === "number" ? x - y || 0 : String(x).localeCompare(String(y))) * sign || a - b;
        });
      }
      const pages = Math.max(1, Math.ceil(order.length / size));
      this.page = Math.min(this.page, pages - 1);
      const shown = order.slice(this.page * size, (this.page + 1) * size);
      const table = plainTable(columns.map(([name]) => name), shown.map((i) => columns.map(([, v]) => v[i])), this.rows.title);
      table.querySelectorAll("th").forEach((th, index) => {
        const mark = this.sorted === index ? (this.down ? " ▼" : " ▲") : "";
        th.setAttribute("aria-sort", this.sorted !== index ? "none" : this.down ? "descending" : "ascending");
        th.replaceChildren(button(th.textContent + mark, `Sort by ${th.textContent}`, () => {
          this.down = this.sorted === index && !this.down;
          this.sorted = index;
          this.draw();
          this.body.querySelectorAll("th button")[index].focus();
        }));
      });
      this.body.replaceChildren(table);
      const move = (by) => () => { this.page += by; this.draw(); };
      this.pager.replaceChildren(
        make("span", { class: "group" },
          button("‹", "Previous rows", move(-1), { disabled: this.page === 0 }),
          button("›", "Next rows", move(1), { disabled: this.page >= pages - 1 })),
        make("span", { class: "soft" }, `page ${this.page + 1} of ${pages}`));
    }
  }

  // One document: facts, charts, tables, texts. `update` replaces it with a later one of the run.
  class Sheet {
    constructor(doc) {
      this.charts = new Map();
      this.tables = new Map();
      this.facts = make("dl", { class: "facts" });
      this.notes = make("div", { class: "notes" });
      this.grid = make("div", { class: "panels" });
      this.texts = make("div", {});
      this.element = make("div", {}, this.facts, this.notes, this.grid, this.texts);
      this.update(doc);
    }

    update(doc) {
      this.facts.replaceChildren(...doc.facts.map(([name, value]) =>
        make("div", {}, make("dt", {}, name), make("dd", {}, value))));
      this.facts.hidden = !doc.facts.length;
      this.notes.replaceChildren(...doc.notes.map((note) => make("p", {}, note)));
      this.notes.hidden = !doc.notes.length;
      const tablesFirst = !doc.facts.length;
      if (tablesFirst) this.fillTables(doc);
      let before = null;
      const wide = widened(doc.panels);
      doc.panels.forEach((panel) => {
        const old = this.charts.get(panel.id);
        if (old) old.update(panel);
        else {
          const chart = new Chart(panel);
          this.charts.set(panel.id, chart);
          if (before) before.element.after(chart.element); else if (tablesFirst) this.grid.append(chart.element); else this.grid.prepend(chart.element);
        }
        before = this.charts.get(panel.id);
        before.element.classList.toggle("wide", wide.has(panel.id));
      });
      const ids = new Set(doc.panels.map((p) => p.id));
      [...this.charts].forEach(([id, chart]) => { if (!ids.has(id)) { chart.remove(); this.charts.delete(id); } });
      if (!tablesFirst) this.fillTables(doc);
      const key = JSON.stringify(doc.texts);
      if (key !== this.textKey) {
        this.textKey = key;
        this.texts.replaceChildren(...doc.texts.map(([title, text]) => textCard(title, text)));
      }
    }

    fillTables(doc) {
      doc.tables.forEach((rows) => {
        const old = this.tables.get(rows.id);
        if (old) old.update(rows);
        else {
          const table = new Rows(rows);
          this.tables.set(rows.id, table);
          this.grid.append(table.element);
        }
      });
    }
  }
  ns.Sheet = Sheet;

  const isWide = (panel) => panel.views.some((v) => v.lanes) || panel.id === "learning";

  // Charts with the full width: lanes, learning curves, and the last of an odd number of narrow ones.
  function widened(panels) {
    const found = new Set(panels.filter(isWide).map((p) => p.id));
    let narrow = 0;
    panels.forEach((panel, index) => {
      narrow = found.has(panel.id) ? 0 : narrow + 1;
      const next = panels[index + 1];
      if (narrow % 2 === 1 && (!next || found.has(next.id))) found.add(panel.id);
    });
    return found;
  }

  function textCard(title, text) {
    const copy = button("Copy", `Copy: ${title}`, async () => {
      try { await navigator.clipboard.writeText(text); } catch (error) {
        const range = document.createRange();
        range.selectNodeContents(block);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
      }
      copy.textContent = "Copied";
    });
    const block = make("pre", { tabindex: "0" }, text);
    if (text.split("\n").length > 12) {
      return make("section", {}, make("div", { class: "bar" }, make("h2", {}, title), copy),
        make("details", {}, make("summary", {}, "Show"), block));
    }
    return make("section", {}, make("div", { class: "bar" }, make("h2", {}, title), copy), block);
  }

  ns.showReport = function () {
    const doc = JSON.parse(document.getElementById("document").textContent);
    const sheet = new Sheet(doc);
    document.getElementById("app").replaceChildren(
      make("a", { class: "skip", href: "#charts" }, "Skip to the charts"),
      make("header", { class: "top" },
        make("div", {}, make("h1", {}, doc.title), make("p", { class: "soft" }, doc.subtitle)), ns.themeButton()),
      make("nav", { class: "jump", "aria-label": "Charts" },
        ...doc.panels.map((p) => make("a", { href: `#${p.id}` }, p.title))),
      make("main", { id: "charts" }, sheet.element));
    performance.mark("latecomer-ready");
  };
})(window.Latecomer);
