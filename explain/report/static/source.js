// Where a page gets its data: the one thing that differs between a report and an app.
//
// A source has
//   index       what the page is about: title, photos in short, colour maps
//   item(i)     a promise of one photo with all that is said of it, as explain/report/item.py describes it
//
// An item has `live` where a model is behind the page: explain(place of an answer), curve(target, method) and
// check(target, method), which change the item and draw it again.

class EmbeddedSource {
  // Reads what lies in the page itself, each photo when it is opened.
  constructor(root) {
    this.root = root;
    this.index = JSON.parse(root.getElementById('index').textContent);
    this.items = new Map();
  }

  async item(number) {
    if (!this.items.has(number)) {
      this.items.set(number, JSON.parse(this.root.getElementById(`item-${number}`).textContent));
    }
    return this.items.get(number);
  }
}
