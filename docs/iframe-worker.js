/* Of a page that is opened from the disk a browser starts no worker. The site's search then runs in a hidden frame of
   the page, which replaces the worker. mkdocs.yml has this file under the name that the theme looks for. */
"use strict"

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #waiting = []  // messages from before the script was there
    #frame = null

    constructor(address) {
      super()
      const script = new URL(address, location.href).href
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      frame.addEventListener("load", () => this.#begin(frame, script), { once: true })
      document.body.append(frame)
    }

    postMessage(data) {
      if (this.#frame === null) this.#waiting.push(data)
      else this.#deliver(this.#frame, data)
    }

    terminate() {
      this.#frame?.frameElement?.remove()
    }

    async #begin(frame, script) {
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.#deliver(this, data)
      inside.importScripts = async (...addresses) => {
        for (const address of addresses) await this.#run(inside, address)
      }
      await this.#run(inside, script)
      this.#frame = inside
      for (const data of this.#waiting.splice(0)) this.#deliver(inside, data)
    }

    #run(inside, address) {
      return new Promise((resolve, reject) => {
        const node = inside.document.createElement("script")
        node.src = address
        node.onload = resolve
        node.onerror = () => reject(new Error(`${address} cannot be loaded`))
        inside.document.body.append(node)
      })
    }

    #deliver(target, data) {
      const Message = (target === this ? window : target).MessageEvent
      target.dispatchEvent(new Message("message", { data }))
    }
  }
}
