
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const chart = document.getElementById("chart"), tip = document.getElementById("tip");
  const NAMESPACE = chart.namespaceURI, COLOURS = 6, LEFT = 66, TOP = 14;
  let RIGHT = 840, BOTTOM = 430; // depends on the window's width: text keeps its size on a phone

  function html(name, words, parent) {
    const made = document.createElement(name);
    made.textContent = words;
    parent.append(made);
    return made;
  }

  function draw(name, attributes, parent = chart, words = "") {
    const made = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = words;
    parent.append(made);
    return made;
  }

  // The table: a button in each title.
  function sortable(table) {
    const titles = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const rank = (row, i) => {
      const cell = row.cells[i];
      if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
      return cell.textContent === "-" ? null : cell.textContent;
    };
    titles.forEach((title, i) => {
      const words = title.textContent;
      title.textContent = "";
      html("button", words, title).addEventListener("click", () => {
        const down = title.getAttribute("aria-sort") === "ascending";
        titles.forEach((other) => other.removeAttribute("aria-sort"));
        title.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map((row) => [rank(row, i), row]);
        rows.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);
          const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
          return down ? -order : order;
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  }

  // Axes
  const shown = (value) => (value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));

  function scale(values, from, to, share) {
    const most = Math.max(2, Math.min(6, Math.floor(Math.abs(to - from) / 70)));
    let low = Math.min(...values), high = Math.max(...values);
    const logarithmic = low > 0 && high / low > 8;
    if (logarithmic) {
      [low, high] = [Math.log10(low), Math.log10(high)];
    }
    const room = (high - low || Math.abs(high) || 1) * share;
    low -= room;
    high += room;
    const place = (value) => from + (((logarithmic ? Math.log10(value) : value) - low) / (high - low)) * (to - from);
    const ticks = [];
    if (logarithmic) {
      const powers = ((high - low) * 6) / most;
      const steps = powers > 3 ? [1] : powers > 1.5 ? [1, 3] : [1, 2, 5];
      for (let power = Math.floor(low); power <= high; power++) {
        for (const step of steps) {
          const at = power + Math.log10(step);
          if (at >= low && at <= high) ticks.push(step * 10 ** power);
        }
      }
    } else {
      const rough = (high - low) / most, ten = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((x) => x * ten).find((x) => x >= rough);
      for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(Math.abs(at) < step / 2 ? 0 : at);
    }
    return { place, ticks, least: logarithmic ? 10 ** low : low };
  }

  // Offsets of a label from its mark, in pixels, nearest first, and whether a line joins them.
  const NAMED = 40; // with more marks than this, none has a label
  const ANGLES = [0, 180, 35, 145, -35, -145, 65, 115, -65, -115, 15, 165, -15, -165, 80, -80];
  const SPOTS = [9, 15, 24, 36, 50, 66, 84, 104, 126].flatMap((far) => ANGLES.map((angle) => {
    const turn = (angle * Math.PI) / 180;
    return [far * Math.cos(turn), -far * Math.sin(turn), far > 12];
  }));

  // The picture
  const titled = ([title, unit]) => (unit ? `${title}, ${unit}` : title);
  const several = data.models.length > 1;

  function choice(words, options, change) {
    const label = html("label", `${words} `, document.getElementById("choices"));
    const select = html("select", "", label);
    options.forEach(([value, name]) => (html("option", name, select).value = value));
    select.addEventListener("change", change);
    return select;
  }

  function picture() {
    const ours = (axis, chosen) => axis[Number(chosen.value)];
    const upwards = choice("Quality", data.upwards.map((axis, i) => [i, titled(axis)]), redraw);
    const across = choice("Cost", data.across.map((axis, i) => [i, titled(axis)]), redraw);
    const model = several
      ? choice("Model", [["", "all"], ...data.models.map((name, i) => [i, name])], redraw)
      : { value: "" };
    const kld = data.upwards.findIndex(([title]) => title.startsWith("KLD"));
    upwards.value = Math.max(kld, 0);
    document.getElementById("drawing").hidden = false;
    if (data.models.length > COLOURS) model.value = 0;
    redraw();

    // Same colours as in plot.py: by the order in the table; the source has the text's colour.
    function hue(group) {
      const at = Math.max(data.methods.indexOf(group), data.models.indexOf(group));
      return at < 0 ? "c6" : `c${at % COLOURS}`;
    }

    function redraw() {
      const width = Math.max(280, document.getElementById("drawing").clientWidth);
      RIGHT = width - 20;
      BOTTOM = Math.max(300, Math.min(480, Math.round(width * 0.56))) - 50;
      chart.setAttribute("viewBox", `0 0 ${width} ${BOTTOM + 50}`);
      chart.replaceChildren();
      tip.hidden = true;
      const x = ours(data.across, across), y = ours(data.upwards, upwards);
      const only = model.value === "" ? null : data.models[Number(model.value)];
      const points = data.points.filter(
        (point) => point.values[x[0]] && point.values[y[0]] && (only === null || point.model === only));
      if (!points.length) {
        draw("text", { x: LEFT, y: 60 }, chart, "No variant has both figures.");
        return;
      }
      const grouped = several && only === null ? "model" : "method";
      const groups = [...new Set(points.map((point) => point[grouped] ?? "source"))];
      groups.sort((a, b) => (a === "source") - (b === "source"));
      const colour = (point) => hue(point[grouped] ?? "source");
      // Values far below the noise floor are drawn at the lower edge.
      const isKld = y[0].startsWith("KLD");
      const floors = isKld ? Object.entries(data.noise).filter(([name]) => points.some((p) => p.model === name)) : [];
      const least = isKld ? Math.min(...floors.map(([, noise]) => noise), 1e-3) / 10 : -Infinity;
      const height = (point) => Math.max(point.values[y[0]][0], least);
      const ends = ([value, error]) => (error === null ? [value] : [value + error, Math.max(value - error, value / 2)]);
      const ups = points.flatMap((point) => (height(point) > least ? ends(point.values[y[0]]) : [least]));
      const sx = scale(points.flatMap((point) => ends(point.values[x[0]])), LEFT, RIGHT, 0.12);
      const sy = scale([...ups, ...floors.map(([, noise]) => noise)], BOTTOM, TOP, 0.06);

      for (const tick of sx.ticks) {
        draw("line", { class: "grid", x1: sx.place(tick), x2: sx.place(tick), y1: TOP, y2: BOTTOM });
        draw("text", { class: "middle", x: sx.place(tick), y: BOTTOM + 17 }, chart, shown(tick));
      }
      for (const tick of sy.ticks) {
        draw("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: sy.place(tick), y2: sy.place(tick) });
        draw("text", { class: "end", x: LEFT - 8, y: sy.place(tick) + 4 }, chart, shown(tick));
      }
      draw("path", { class: "frame", d: `M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}` });
      draw("text", { class: "middle", x: (LEFT + RIGHT) / 2, y: BOTTOM + 40 }, chart, titled(x));
      draw("text", { class: "middle", transform: `translate(14 ${(TOP + BOTTOM) / 2}) rotate(-90)` }, chart, titled(y));
      floors.sort((a, b) => b[1] - a[1]);
      const named = [];
      floors.forEach(([name, noise]) => {
        const at = sy.place(noise), one = floors.length === 1;
        const kind = one ? "frame" : colour(points.find((point) => point.model === name));
        draw("path", { class: `floor ${kind}`, d: `M${LEFT} ${at}H${RIGHT}` });
        named.push([LEFT, at - 1, RIGHT, at + 1]);
        const words = one ? "noise floor: the source in bfloat16" : `noise floor of ${name}`;
        if (floors.length > 3) return;
        // Names of close lines are side by side above them.
        const neighbour = named.findLast((box) => box[2] < RIGHT && at - 5 - box[3] < 16);
        const left = neighbour ? neighbour[2] + 12 : LEFT + 6, base = neighbour ? neighbour[3] : at - 5;
        named.push([left, base - 10, left + words.length * 6.4, base]);
        draw("text", { class: "floor-name", x: left, y: base }, chart, words);
      });

      const places = new Map(points.map((point) => [point, [sx.place(point.values[x[0]][0]), sy.place(height(point))]]));
      const taken = [...places.values()].map(([px, py]) => [px - 7, py - 7, px + 7, py + 7]);
      for (const [point, [px]] of places) {
        const [low, high] = [ends(point.values[y[0]]).at(-1), ends(point.values[y[0]])[0]];
        taken.push([px - 2, sy.place(Math.max(high, least)), px + 2, sy.place(Math.max(low, least))]);
      }
      taken.push(...named);
      pareto(points, places, several ? colour : () => "frame", taken);
      const labels = points.map((point) => mark(point, places.get(point), x, y, sx, sy, colour(point)));
      if (points.length <= NAMED) place(labels, taken);
      key(groups, points.some((point) => point.values[y[0]][0] < least), points.length > NAMED);
    }

    // Copies that no other copy of the model beats on both axes.
    function pareto(points, places, kind, taken) {
      for (const name of data.models) {
        const copies = points.filter((point) => point.model === name && point.method !== null);
        copies.sort((a, b) => places.get(a)[0] - places.get(b)[0] || places.get(b)[1] - places.get(a)[1]);
        const line = [];
        for (const copy of copies) {
          const at = places.get(copy);
          if (!line.length || at[1] > line.at(-1)[1]) line.push(at);
        }
        if (line.length < 2) continue;
        draw("path", { class: `${kind(copies[0])} pareto`, d: `M${line.map((at) => at.join(" ")).join("L")}` });
        line.slice(1).forEach(([toX, toY], i) => {
          const [fromX, fromY] = line[i], steps = Math.ceil(Math.hypot(toX - fromX, toY - fromY) / 6);
          for (let step = 1; step < steps; step++) {
            const x = fromX + ((toX - fromX) * step) / steps, y = fromY + ((toY - fromY) * step) / steps;
            taken.push([x - 1, y - 1, x + 1, y + 1]);
          }
        });
      }
    }

    // A mark with its hint; returns what its label needs.
    function mark(point, [px, py], x, y, sx, sy, kind) {
      const [vx, ex] = point.values[x[0]], [vy, ey] = point.values[y[0]];
      const link = draw("a", { href: `#${point.at}`, class: "point" });
      const error = (value, e, digits = 4) => `${Number(value.toPrecision(digits))}${e === null ? "" : ` ± ${Number(e.toPrecision(2))}`}`;
      const words = `${several ? `${point.model}, ` : ""}${point.label}\n${titled(y)}: ${error(vy, ey)}\n${titled(x)}: ${error(vx, ex)}`;
      link.setAttribute("aria-label", words.replaceAll("\n", "; "));
      if (ey !== null && vy > sy.least) {
        const low = Math.max(vy - ey, sy.least);
        draw("line", { class: `error ${kind}`, x1: px, x2: px, y1: sy.place(low), y2: sy.place(vy + ey) }, link);
      }
      if (ex !== null) {
        const low = Math.max(vx - ex, sx.least);
        draw("line", { class: `error ${kind}`, x1: sx.place(low), x2: sx.place(vx + ex), y1: py, y2: py }, link);
      }
      if (point.method === null) draw("rect", { class: `mark ${kind}`, x: px - 5, y: py - 5, width: 10, height: 10 }, link);
      else draw("circle", { class: `mark ${kind}`, cx: px, cy: py, r: 5 }, link);
      const show = () => {
        tip.textContent = words;
        tip.hidden = false;
        tip.style.top = `${py + 12}px`;
        tip.style.left = px > RIGHT * 0.6 ? "auto" : `${px + 12}px`;
        tip.style.right = px > RIGHT * 0.6 ? `calc(100% - ${px - 12}px)` : "auto";
      };
      const hide = () => (tip.hidden = true);
      for (const kindOf of ["pointerenter", "focus"]) link.addEventListener(kindOf, show);
      for (const kindOf of ["pointerleave", "blur"]) link.addEventListener(kindOf, hide);
      return { words: point.label, px, py, link, kind };
    }

    // Place labels where they hide nothing and are nearest to their own mark; a distant one has a line to it.
    function place(labels, taken) {
      const over = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
      const far = (box, label) => Math.hypot(
        Math.max(box[0] - label.px, label.px - box[2], 0), Math.max(box[1] - label.py, label.py - box[3], 0));
      const crosses = (spot, box) => {
        if (!spot.led) return false;
        for (let step = 1; step <= 20; step++) {
          const x = spot.x + ((spot.endX - spot.x) * step) / 20, y = spot.y + ((spot.endY - spot.y) * step) / 20;
          if (x > box[0] && x < box[2] && y > box[1] && y < box[3]) return true;
        }
        return false;
      };
      for (const label of labels) {
        const short = label.words.length > 26 ? `${label.words.slice(0, 25)}…` : label.words;
        label.text = draw("text", {}, label.link, short);
        const wide = label.text.getComputedTextLength() || short.length * 6.4;
        label.spots = SPOTS.map(([dx, dy, led], number) => {
          const left = label.px + dx - (dx > 0 ? 0 : wide);
          const top = label.py + dy - (Math.abs(dy) < Math.abs(dx) ? 6 : dy > 0 ? 0 : 12);
          const box = [left, top, left + wide, top + 12];
          const spot = { box, led, x: label.px, y: label.py, endX: (box[0] + box[2]) / 2, endY: top + 6 };
          const others = labels.filter((other) => Math.hypot(other.px - label.px, other.py - label.py) > 10);
          const next = Math.min(...others.map((other) => far(box, other))), nearer = next < far(box, label) + 3;
          const crossed = others.filter((other) => crosses(spot, [other.px - 5, other.py - 5, other.px + 5, other.py + 5]));
          const inside = box[0] > LEFT && box[2] < RIGHT + 18 && box[1] > 2 && box[3] < BOTTOM;
          const hidden = taken.filter((other) => over(box, other)).length;
          const wrong = !inside || (nearer && !led); // would be cut off, or taken for another mark's
          spot.cost = (wrong ? 1000 : 0) + 10 * (hidden + (nearer && next < 16)) + 2 * crossed.length + 0.02 * number;
          return spot;
        });
      }
      const order = [...labels].sort((a, b) => a.py - b.py);
      for (let round = 0; round < 6; round++) {
        for (const label of order) {
          let least = Infinity, chosen = null;
          for (const spot of label.spots) {
            let cost = spot.cost;
            for (const other of labels) {
              if (cost >= least) break;
              if (other === label || !other.chosen) continue;
              cost += 10 * (over(spot.box, other.chosen.box) + crosses(spot, other.chosen.box) + crosses(other.chosen, spot.box));
            }
            if (cost < least) [least, chosen] = [cost, spot];
          }
          label.chosen = chosen;
        }
      }
      for (const { text, chosen, link, kind } of labels) {
        text.setAttribute("x", chosen.box[0]);
        text.setAttribute("y", chosen.box[1] + 10);
        if (chosen.led) {
          const [toX, toY] = [Math.min(Math.max(chosen.x, chosen.box[0]), chosen.box[2]), Math.min(Math.max(chosen.y, chosen.box[1]), chosen.box[3])];
          draw("line", { class: `lead ${kind}`, x1: chosen.x, y1: chosen.y, x2: toX, y2: toY }, link);
        }
      }
    }

    function key(groups, clipped, many) {
      const place = document.getElementById("key");
      place.replaceChildren();
      groups.forEach((group) => html("span", `● ${group}`, place).classList.add(hue(group)));
      let words = "line: no other copy is better in both; bars: ± standard error; square: the source";
      if (clipped) words += "; what is below a tenth of the noise floor is drawn at the lower edge";
      if (many) words += `; more than ${NAMED} marks show their names on hover`;
      html("span", words, place);
    }

    new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width && Math.round(contentRect.width) !== RIGHT + 20) redraw();
    }).observe(document.getElementById("drawing"));
  }

  // Data: save the packed data unchanged.
  async function save(event) {
    const link = event.currentTarget;
    event.preventDefault();
    const packed = Uint8Array.from(atob(link.href.split(",")[1]), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const made = document.createElement("a");
    made.href = URL.createObjectURL(await new Response(stream).blob());
    made.download = link.download.replace(/\.gz$/, "");
    made.click();
    setTimeout(() => URL.revokeObjectURL(made.href), 60000);
  }

  function reveal() {
    const place = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    const fold = place && place.closest("details");
    if (fold && !fold.open) {
      fold.open = true;
      place.scrollIntoView();
    }
  }

  sortable(document.getElementById("figures"));
  if (data.across.length && data.upwards.length) picture();
  else html("p", "Nothing was measured that could be drawn.", document.getElementById("choices"));
  if (window.DecompressionStream) {
    document.querySelectorAll("a[download]").forEach((link) => link.addEventListener("click", save));
  }
  window.addEventListener("hashchange", reveal);
  reveal();
})();
