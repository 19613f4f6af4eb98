// The table with filters of leaderboard.html. Its values are in leaderboard-data.js, which examples/leaderboard/page.py writes.
"use strict";

(() => {
  const { scores, families, passes, groups } = window.LEADERBOARD;
  const root = document.getElementById("board");
  const find = (name) => root.querySelector(`[name=${name}]`);
  let sorted = { column: scores[0], down: true };

  // The mean of a score over the chosen networks on which it is defined; null where there is none.
  const meanOf = (chosen, method, number) => {
    let sum = 0;
    let count = 0;
    for (const group of chosen) {
      const value = group.means[number][group.methods.indexOf(method)] ?? null;
      if (value === null) continue;
      sum += value * group.networks;
      count += group.networks;
    }
    return count ? sum / count : null;
  };

  const element = (name, text, more = {}) => Object.assign(document.createElement(name), { textContent: text }, more);

  const draw = () => {
    const [kind, architecture, side, family] = ["kind", "architecture", "side", "family"].map((name) => find(name).value);
    const text = find("search").value.trim().toLowerCase();
    const chosen = groups
      .filter((group) => !kind || group.kind === kind)
      .filter((group) => !architecture || group.architecture === architecture)
      .filter((group) => !side || group.side === side);
    const rows = Object.keys(families)
      .filter((name) => (!family || families[name] === family) && name.toLowerCase().includes(text))
      .filter((name) => chosen.some((group) => group.methods.includes(name)))
      .map((name) => ({ name, means: scores.map((_, number) => meanOf(chosen, name, number)) }));
    const place = scores.indexOf(sorted.column);
    const key = (row) => (place >= 0 ? row.means[place] : sorted.column === "passes" ? passes[row.name] : row.name);
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
    for (const score of scores) heading(score, score, true);
    const body = rows.map((row) => {
      const line = element("tr", "");
      line.append(element("th", row.name, { scope: "row", title: families[row.name] }), element("td", `${passes[row.name]}`));
      for (const value of row.means) line.append(element("td", value === null ? "–" : value.toFixed(2)));
      return line;
    });
    root.querySelector("thead").replaceChildren(head);
    root.querySelector("tbody").replaceChildren(...body);
    const networks = chosen.reduce((sum, group) => sum + group.networks, 0);
    root.querySelector("output").textContent = `${rows.length} methods, mean over ${networks} networks.`;
  };

  const options = (name, values, all) => {
    const choices = [...new Set(values)].map((value) => element("option", value, { value }));
    find(name).replaceChildren(element("option", all, { value: "" }), ...choices);
  };
  options("kind", groups.map((group) => group.kind), "all kinds");
  options("architecture", groups.map((group) => group.architecture), "all architectures");
  options("side", groups.map((group) => group.side), "all sides");
  options("family", Object.values(families).sort(), "all methods");
  for (const control of root.querySelectorAll("select, input")) control.addEventListener("input", draw);
  root.hidden = false;
  draw();
})();
