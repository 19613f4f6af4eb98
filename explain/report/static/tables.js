// What stands below: about the map, all methods in a table, the check, and how to make it again.

function aboutMap(item, state) {
  const method = item.methods[state.method];
  const map = item.maps[state.target][state.method];
  const rows = [
    ['method', method.paper ? `${method.title}, ${method.paper}` : method.title],
    ['layer', method.layer || 'none: the map is of the pixels'],
    ['map', `${map.plane.width} × ${map.plane.height} values, the largest ${figure(map.plane.scale)}`],
    ['score', `${figure(map.score)} for ${item.targets[state.target].label}`],
    method.passes === null || method.passes === undefined ? null : ['cost', `${Number(method.passes.toFixed(1))} passes of the model`],
    map.samples ? ['perturbed photos', String(map.samples)] : null,
    map.delta === null ? null : ['convergence delta', figure(map.delta)],
    map.remark ? ['note', map.remark] : null,
  ].filter(Boolean);
  const about = method.about ? method.about[0].toUpperCase() + method.about.slice(1) : '';
  return el('section', { class: 'card' }, el('h2', {}, 'About this map'), el('p', {}, about ? `${about}.` : ''),
    el('dl', {}, rows.map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)])),
    el('p', { class: 'hint' }, 'A map explains the model and not the world: it shows what the score depends on, not that the answer is right. Each map is scaled by its own maximum.'));
}

function allMethods(item, state) {
  const maps = item.maps[state.target];
  const metrics = [...new Set(maps.flatMap((map) => Object.keys(map.figures)))];
  const curves = maps.some((map) => map.curve);
  const head = ['method', 'family', 'layer', 'passes', ...(curves ? ['deletion ↓', 'insertion ↑'] : []), ...metrics];
  const rows = maps.map((map, number) => {
    const method = item.methods[number];
    const passes = method.passes === null || method.passes === undefined ? (map.samples ? String(map.samples) : '–') : String(Number(method.passes.toFixed(1)));
    return {
      current: number === state.method,
      cells: [method.title + (method.control ? ' (null map)' : ''), method.family, method.layer || 'pixels', passes,
        ...(curves ? ['deletion', 'insertion'].map((name) => figure(map.curve?.areas[name])) : []),
        ...metrics.map((name) => figure(map.figures[name]))],
    };
  });
  return el('section', { class: 'card wide' }, el('h2', {}, 'All methods'),
    table(`Methods for ${item.targets[state.target].label}`, head, rows),
    curves ? el('p', { class: 'hint' }, 'Areas under the curves: less is better for deletion (↓), more for insertion (↑). Both favour blurred maps.') : null);
}

// What a check says of the maps, where there was one.
function checks(item, state) {
  const found = item.maps[state.target].map((map, number) => [number, map.check]).filter(([, check]) => check);
  if (!found.length) return item.live ? unchecked(item, state) : null;
  const current = found.find(([number]) => number === state.method)?.[1];
  const names = Object.keys(found[0][1].figures);
  const row = ([number, check]) => ({
    current: number === state.method,
    cells: [item.methods[number].title, ...names.map((name) => marked(check.figures[name], figure(check.figures[name].value)))],
  });
  const lines = current && [...Object.values(current.figures).map((found) => el('li', {}, marked(found, found.text.startsWith(found.name) ? '' : `${found.name}: `), found.text)),
    current.note ? el('li', {}, current.note) : null];
  return el('section', { class: 'card wide' }, el('h2', {}, 'Check of the maps'),
    table(`Maps for ${item.targets[state.target].label}`, ['method', ...names], found.map(row)),
    current || !item.live ? el('ul', { class: 'reasons' }, lines) : el('div', { class: 'buttons' }, checkButton(item, state)),
    el('p', { class: 'hint' }, 'Figures of one photo, each beside what it is compared with: no test, and no word on whether the prediction is right.'));
}

// Where a live model is behind the page, it can be asked.
function unchecked(item, state) {
  return el('section', { class: 'card wide' }, el('h2', {}, 'Check of the maps'),
    el('p', {}, 'Does the map depend on the model and on the class, does what it marks matter, and is it stable? This takes at most 240 passes of the model.'),
    el('div', { class: 'buttons' }, checkButton(item, state)));
}

function checkButton(item, state) {
  return el('button', { type: 'button', class: 'plain-button', onclick: () => item.live.check(state.target, state.method) }, `Check ${item.methods[state.method].title}`);
}

// A mark with its words, and its look.
function marked({ mark }, words) {
  const look = { '✓': 'passed', '?': 'open', '✗': 'failed' }[mark];
  return el('span', { class: `mark ${look}` }, `${mark} ${words}`);
}

const mapCheck = ({ figures }) => el('span', {}, Object.values(figures).map((found) => [marked(found, found.name), ' ']));

// Whether the prediction is right, where that is known.
function rightOrWrong(photo) {
  const mistakes = (photo?.mistakes ?? []).map(([mistake, probability]) => `✗ ${mistake} ${percent(probability)}`).join(' · ');
  if (photo?.right === undefined && !mistakes) return null;
  return el('span', {},
    photo.right === undefined ? null : el('span', { class: `mark ${photo.right ? 'passed' : 'failed'}` }, photo.right ? '✓ prediction right' : `✗ prediction wrong: it is ${photo.truth}`),
    photo.right === undefined || !mistakes ? null : ' · ',
    mistakes ? el('span', { class: 'mark failed' }, mistakes) : null);
}

class Again {
  constructor(item) {
    this.item = item;
    this.way = 'python';
    const ways = [['python', 'Python'], ...(item.again.command ? [['command', 'Command line']] : []), ['record', 'Record']];
    this.ways = choices('', ways, (way) => { this.way = way; this.draw(); });
    this.text = el('pre', { tabindex: 0, role: 'group', 'aria-label': 'Text to copy' });
    this.copy = el('button', { type: 'button', class: 'plain-button', onclick: () => this.copied() }, 'Copy');
    this.said = el('span', { role: 'status', class: 'hint' });
    this.element = el('section', { class: 'card wide' }, el('h2', {}, 'Reproduce'), el('div', { class: 'buttons' }, this.ways, this.copy, this.said), this.text,
      item.again.command || !item.again.why ? null : el('p', { class: 'hint' }, `There is no command for this: ${item.again.why}.`));
  }

  take(state) {
    this.state = state;
    this.draw();
  }

  draw() {
    this.ways.take(this.way);
    const { again, records } = this.item;
    this.text.textContent = this.way === 'record' ? JSON.stringify(records[this.state.target][this.state.method], null, 2) : again[this.way];
    this.said.textContent = '';
  }

  async copied() {
    try {
      await navigator.clipboard.writeText(this.text.textContent);
      this.said.textContent = 'Copied.';
    } catch {
      getSelection().selectAllChildren(this.text);
      this.said.textContent = 'Selected: copy it with the keyboard.';
    }
  }
}
