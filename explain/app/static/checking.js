// Questions about a map that is shown: does its evidence matter, does it stand up to a check?

class Checking {
  // `on` has what happens: say(text), progress(done, total) or progress(null), fail(text).
  constructor(source, on) {
    this.source = source;
    this.on = on;
    this.works = new Map(); // by what is asked
  }

  // What is asked of an answer; `now` gives the item that is shown then, and `changed` is called when it has something new.
  of(now, answer, changed) {
    const ask = (what, words, target, method) => {
      const { name, title } = now().methods[method];
      const number = now().targets[target].class;
      return this.ask({ answer, what, method: name, target }, `${words} ${title}`, (step) => {
        const item = now();
        const place = item.targets.findIndex((each) => each.class === number);
        const map = item.maps[place]?.[item.methods.findIndex((each) => each.name === name)];
        if (!map) return;
        if (step.curve) map.curve = step.curve;
        if (step.check) map.check = step.check;
        changed();
      });
    };
    return {
      curve: (target, method) => ask('curve', 'Curves of', target, method),
      check: (target, method) => ask('check', 'Check of', target, method),
    };
  }

  async ask(values, words, found) {
    const key = JSON.stringify(values);
    if (this.works.has(key)) return;
    const asked = { words, end: new AbortController(), name: null };
    this.works.set(key, asked);
    this.on.say(`${words} …`);
    try {
      await this.source.steps('check', values, (step) => this.heard(asked, step, found), asked.end.signal);
    } catch (error) {
      asked.failed = true;
      if (error.name !== 'AbortError') this.on.fail(error.message);
    } finally {
      // Curves that went wrong are not asked for again by themselves.
      if (!asked.failed || values.what === 'check') this.works.delete(key);
      if (!asked.end.signal.aborted) this.on.progress(null);
    }
  }

  heard(asked, step, found) {
    if (step.work) asked.name = step.work;
    if (step.before) this.on.say(`${asked.words}: ${step.before} before it`);
    if (step.progress) {
      this.on.say(`${asked.words}: ${step.progress[0]} of ${step.progress[1]} runs`);
      this.on.progress(...step.progress);
    }
    if (step.error || step.stopped) asked.failed = true;
    if (step.error) this.on.fail(step.error);
    if (step.stopped) this.on.say(`${asked.words} was stopped.`);
    if (step.curve || step.check) {
      this.on.say(`${asked.words}: done`);
      found(step);
    }
  }

  // Ends all that is on its way, without an answer.
  drop() {
    this.works.forEach(({ end }) => end.abort());
    this.works.clear();
  }

  stop() {
    this.works.forEach(({ name, failed }) => { if (name && !failed) this.source.ask('stop', { work: name }).catch(() => {}); });
  }
}
