"use strict";
// The live page: shows the chosen runs side by side; pauses and stops runs that it started.
(function (ns) {
  const { make, button } = ns;
  const app = document.getElementById("app");
  const sheets = new Map();
  const looks = new Map();
  let chosen = null, source = null, known = [];

  const status = make("p", { class: "soft", role: "status" }, "connecting");
  const choose = make("fieldset", { class: "choose" });
  const runs = make("div", { class: "runs" });
  app.replaceChildren(
    make("header", { class: "top" },
      make("div", {}, make("h1", {}, app.dataset.title), status), ns.themeButton()),
    choose, make("main", { id: "charts" }, runs));

  function fillChoose() {
    choose.hidden = known.length < 2;
    choose.replaceChildren(make("legend", {}, "Runs, side by side"), ...known.map((run) =>
      make("label", {}, make("input", { type: "checkbox", checked: chosen.includes(run.name), onchange: (event) => {
        chosen = event.target.checked ? [...chosen, run.name].slice(-8) : chosen.filter((n) => n !== run.name);
        listen();
      } }), run.name, make("span", { class: "badge" }, run.state))));
  }

  function column(name) {
    if (!looks.has(name)) {
      const badge = make("span", { class: "badge" });
      const acts = make("span", { class: "bar" });
      const reason = make("p", { class: "soft" });
      const title = make("h2", { class: "name" }, name);
      const body = make("div", {}, make("p", { class: "soft" }, "waiting for the first evaluation"));
      const element = make("section", { class: "run", "data-run": name },
        make("div", { class: "bar" }, title, badge, acts), reason, body);
      looks.set(name, { element, badge, acts, reason, body, title });
    }
    return looks.get(name);
  }

  function showStates(listed) {
    const first = known.length === 0;
    known = listed;
    if (chosen === null && known.length) {
      const active = known.filter((r) => r.state === "running" || r.state === "paused");
      chosen = (active.length ? active : known).slice(0, 4).map((r) => r.name);
      listen();
    } else if (!first || chosen) fillChoose();
    known.forEach((run) => {
      const look = column(run.name);
      look.badge.textContent = run.state;
      look.reason.textContent = run.reason || "";
      look.reason.hidden = !run.reason;
      const key = run.actions.join();
      if (look.key !== key) {
        look.key = key;
        look.acts.replaceChildren(...run.actions.map((action) => button(
          action[0].toUpperCase() + action.slice(1), `${action} ${run.name}`, () => act(run.name, action))));
      }
    });
    if (!known.length) status.textContent = "no runs in this folder yet";
  }

  async function act(run, action) {
    const response = await fetch("/api/act", { method: "POST", headers: { "x-latecomer": "1" },
      body: JSON.stringify({ run, action }) });
    if (!response.ok) status.textContent = `${action} was refused`;
  }

  function layOut() {
    runs.classList.toggle("many", chosen.length > 1);
    app.classList.toggle("wide", chosen.length > 1);
    runs.replaceChildren(...chosen.map((name) => column(name).element));
  }

  function show({ name, document: doc }) {
    const look = column(name);
    if (doc.waiting) return;
    if (sheets.has(name)) sheets.get(name).update(doc);
    else {
      const sheet = new ns.Sheet(doc);
      sheets.set(name, sheet);
      look.body.replaceChildren(make("p", { class: "soft" }, `${doc.title}, ${doc.subtitle}`), sheet.element);
    }
    document.documentElement.dataset.updates = String(Number(document.documentElement.dataset.updates || 0) + 1);
  }

  function listen() {
    if (source) source.close();
    const query = (chosen || []).map((name) => `run=${encodeURIComponent(name)}`).join("&");
    if (chosen) { fillChoose(); layOut(); }
    source = new EventSource(`/api/stream?${query}`);
    source.addEventListener("open", () => { status.textContent = "live"; });
    source.addEventListener("error", () => { status.textContent = "connection lost; trying again"; });
    source.addEventListener("runs", (event) => showStates(JSON.parse(event.data)));
    source.addEventListener("run", (event) => show(JSON.parse(event.data)));
  }
  listen();
})(window.Latecomer);
