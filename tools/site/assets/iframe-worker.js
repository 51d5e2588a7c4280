/* Browsers refuse web workers on pages from file://. There, search runs in a hidden frame that looks like a worker. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "search"
      this.waiting = []
      document.body.append(frame)
      this.inner = frame.contentWindow
      const page = frame.contentDocument
      page.open()
      page.write(`<!doctype html><html lang="en"><title>search</title><body></body></html>`)
      page.close()
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = page.createElement("script")
      script.onload = () => {
        this.ready = true
        this.waiting.splice(0).forEach(data => this.send(data))
      }
      script.onerror = event => this.dispatchEvent(new ErrorEvent("error", { message: String(event) }))
      script.src = address
      page.body.append(script)
    }
    send(data) { this.inner.dispatchEvent(new MessageEvent("message", { data })) }
    postMessage(data) { this.ready ? this.send(data) : this.waiting.push(data) }
    terminate() {}
  }
}
