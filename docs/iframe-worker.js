/* Makes search work where the pages are opened from disk: browsers start no Worker from file://, so that its script
   runs in a frame that nobody sees. Elsewhere this does nothing. */
if (location.protocol === "file:") {
  const run = (inside, url) =>
    new Promise((done, failed) => {
      const script = inside.document.createElement("script");
      Object.assign(script, { src: url, onload: done, onerror: () => failed(new Error(`${url} cannot be read`)) });
      inside.document.head.append(script);
    });

  window.Worker = class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
      const loaded = new Promise((done) => (this.frame.onload = done));
      document.body.append(this.frame);
      this.inside = loaded.then(async () => {
        const inside = this.frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = async (...urls) => {
          for (const each of urls) await run(inside, each);
        };
        await run(inside, url);
        return inside;
      });
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
