// The table with filters of leaderboard.html. Its values are in leaderboard-data.js, which examples/leaderboard/page.py writes.
"use strict";

(() => {
  const { metrics, families, passes, cells } = window.LEADERBOARD;
  const root = document.getElementById("board");
  const find = (name) => root.querySelector(`[name=${name}]`);
  let sorted = { column: "", down: true };

  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

  // What stands in the table: a value to sort by, and its text.
  const entry = (chosen, method, number, places) => {
    const there = chosen
      .map((cell) => [cell, cell.methods.indexOf(method)])
      .filter(([cell, i]) => i >= 0 && cell.means[number][i] !== null);
    if (!there.length) return { value: null, text: "–", title: "not measured" };
    const photos = there.reduce((sum, [cell, i]) => sum + cell.photos[number][i], 0);
    if (places) {
      const value = mean(there.map(([cell, i]) => cell.places[number][i]).filter((each) => each !== null));
      const text = value === null ? "–" : `${Math.round(100 * value)}`;
      return { value, text, title: `${photos} photos, ${there.length} cells` };
    }
    const [cell, i] = there[0];
    const half = cell.half[number][i];
    const text = `${Number(cell.means[number][i].toPrecision(3))}`;
    return { value: cell.means[number][i], text: half === null ? text : `${text} ± ${half}`, title: `${photos} photos` };
  };

  const element = (name, text, more = {}) => Object.assign(document.createElement(name), { textContent: text }, more);

  const draw = () => {
    const [truth, model, group, family] = ["truth", "model", "group", "family"].map((name) => find(name).value);
    const chosen = cells.filter((cell) => (!truth || cell.truth === truth) && (!model || cell.model === model));
    const single = chosen.length === 1;
    find("show").disabled = !single;
    const places = !single || find("show").value === "places";
    const text = find("search").value.trim().toLowerCase();
    const columns = metrics
      .map((metric, number) => ({ ...metric, number }))
      .filter((metric) => !group || metric.group === group)
      .filter((metric) => chosen.some((cell) => cell.means[metric.number].some((value) => value !== null)));
    const rows = Object.keys(families)
      .filter((name) => (!family || families[name] === family) && name.toLowerCase().includes(text))
      .filter((name) => chosen.some((cell) => cell.methods.includes(name)))
      .map((name) => ({ name, cells: columns.map((metric) => entry(chosen, name, metric.number, places)) }));
    const place = columns.findIndex((metric) => metric.name === sorted.column);
    if (place < 0 && sorted.column !== "passes") sorted = { column: "", down: false };
    const key = (row) => (place >= 0 ? row.cells[place].value : sorted.column === "passes" ? passes[row.name] : row.name);
    rows.sort((a, b) => {
      const [one, other] = [key(a), key(b)];
      if (one === null || other === null) return (one === null) - (other === null);
      return (one < other ? -1 : one > other ? 1 : 0) * (sorted.down ? -1 : 1);
    });
    const head = element("tr", "");
    const heading = (name, label, down) => {
      const cell = element("th", "", { scope: "col" });
      const button = element("button", label, { type: "button" });
      if (sorted.column === name) cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      button.addEventListener("click", () => {
        sorted = { column: name, down: sorted.column === name ? !sorted.down : down };
        draw();
      });
      cell.append(button);
      head.append(cell);
    };
    heading("", "method", false);
    heading("passes", "passes", false);
    for (const metric of columns) heading(metric.name, `${metric.name} ${metric.more ? "↑" : "↓"}`, places || metric.more);
    const body = rows.map((row) => {
      const line = element("tr", "");
      line.append(element("th", row.name, { scope: "row", title: families[row.name] }), element("td", `${passes[row.name]}`));
      for (const each of row.cells) line.append(element("td", each.text, { title: each.title }));
      return line;
    });
    root.querySelector("thead").replaceChildren(head);
    root.querySelector("tbody").replaceChildren(...body);
    root.querySelector("output").textContent =
      `${rows.length} methods, ${columns.length} metrics, ${chosen.length} of ${cells.length} cells. ` +
      (places ? "Win rates: of the other distinct maps, the percentage that each method is better than; figures of ten photos or more." : "Means ± half of the 95 % interval; figures of ten photos or more.");
  };

  const options = (name, values, all) => {
    const each = values.map((value) => element("option", value, { value }));
    find(name).replaceChildren(...(all ? [element("option", all, { value: "" })] : []), ...each);
  };
  const distinct = (values) => [...new Set(values)].sort();
  options("truth", distinct(cells.map((cell) => cell.truth)), "all kinds");
  options("model", distinct(cells.map((cell) => cell.model)), "all networks");
  options("group", distinct(metrics.map((metric) => metric.group)), "all metrics");
  options("family", distinct(Object.values(families)), "all methods");
  find("truth").value = "planted";
  find("group").value = "truth";
  sorted = { column: "truth", down: true };
  for (const control of root.querySelectorAll("select, input")) control.addEventListener("input", draw);
  root.hidden = false;
  draw();
})();
