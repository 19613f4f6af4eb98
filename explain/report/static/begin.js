// A report begins: all that it shows lies in the page itself.

window.explainPage = new Page(document.getElementById('app'), new EmbeddedSource(document));
