"use strict";
// One lane per device: spans of states as thick lines, paged by device.
window.Latecomer = window.Latecomer || {};
(function (ns) {
  const HOVER_LIMIT = 6000;

  function bytes(text) {
    const raw = atob(text);
    const found = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i += 1) found[i] = raw.charCodeAt(i);
    return found.buffer;
  }

  function unpacked(lanes) {
    if (!lanes.ready) {
      lanes.ready = { offsets: new Uint32Array(bytes(lanes.offsets)),
        state: new Uint8Array(bytes(lanes.state)), start: new Float32Array(bytes(lanes.start)),
        end: new Float32Array(bytes(lanes.end)) };
    }
    return lanes.ready;
  }

  ns.lanesPerPage = (width) => (width < 520 ? 15 : 25);

  ns.laneFigure = function (view, theme, width, first) {
    const lanes = view.lanes, { offsets, state, start, end } = unpacked(lanes);
    const last = Math.min(lanes.labels.length, first + ns.lanesPerPage(width));
    const many = offsets[last] - offsets[first] > HOVER_LIMIT;
    const traces = lanes.states.map((s) => ({ type: "scatter", mode: "lines", x: [], y: [], text: [],
      name: ns.plain(s.name), connectgaps: false, hoverinfo: many ? "skip" : "text",
      line: { color: ns.shade(s.colour, theme), width: s.thin ? 3 : 9, simplify: false } }));
    for (let lane = first; lane < last; lane += 1) {
      for (let i = offsets[lane]; i < offsets[lane + 1]; i += 1) {
        const s = lanes.states[state[i]], trace = traces[state[i]];
        const y = lane - first - (s.thin ? 0.36 : 0);
        trace.x.push(start[i], end[i], null);
        trace.y.push(y, y, null);
        if (!many) {
          const text = `device ${ns.plain(lanes.labels[lane])}: ${ns.plain(s.name)}<br>`
            + `${+start[i].toPrecision(5)} to ${+end[i].toPrecision(5)}`;
          trace.text.push(text, text, "");
        }
      }
    }
    const layout = ns.baseLayout(view, theme, width);
    const shown = last - first;
    Object.assign(layout.yaxis, { range: [shown - 0.4, -0.8], showgrid: false, zeroline: false,
      rangemode: "normal", fixedrange: true, tickmode: "array", tickfont: { size: 11 },
      tickvals: Array.from({ length: shown }, (_, i) => i),
      ticktext: Array.from({ length: shown }, (_, i) => ns.plain(lanes.labels[first + i])
        + (lanes.late[first + i] ? " late" : "")) });
    let horizon = 0;
    for (let i = 0; i < end.length; i += 1) horizon = Math.max(horizon, end[i]);
    layout.xaxis.range = ns.firstRange(lanes, horizon);
    layout.height = 70 + 19 * shown;
    return { data: traces, layout, tracesOf: traces.map((_, i) => [i]), shown, horizon };
  };

  // The initial time range: cut so that a lane shows about 90 spans.
  ns.firstRange = function (lanes, horizon) {
    const { offsets, end } = unpacked(lanes);
    const perLane = end.length / Math.max(1, lanes.labels.length);
    return perLane > 90 ? [0, (horizon * 90) / perLane] : [0, horizon];
  };

  ns.laneTable = function (view, first, width) {
    const lanes = view.lanes, { offsets, state, start, end } = unpacked(lanes);
    const last = Math.min(lanes.labels.length, first + ns.lanesPerPage(width));
    const rows = [];
    for (let lane = first; lane < last; lane += 1) {
      const sums = lanes.states.map(() => 0), times = lanes.states.map(() => 0);
      for (let i = offsets[lane]; i < offsets[lane + 1]; i += 1) {
        sums[state[i]] += end[i] - start[i];
        times[state[i]] += 1;
      }
      rows.push([lanes.labels[lane] + (lanes.late[lane] ? " late" : ""),
        ...sums.map((v, k) => (times[k] ? `${+v.toPrecision(4)} (${times[k]})` : ""))]);
    }
    return { head: ["device", ...lanes.states.map((s) => s.name)], rows,
      left: "Total time in each state (number of spans), of the devices shown." };
  };

  ns.laneGist = (view) => `${view.lanes.labels.length} devices; states: `
    + view.lanes.states.map((s) => s.name).join(", ");
})(window.Latecomer);
