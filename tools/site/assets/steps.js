/* What can be gone through in steps, with a row of buttons and a slider: recorded runs, and walks of several frames. */
function goThrough(root, count, render) {
  const row = root.querySelector(".mc-buttons"), slider = root.querySelector("input")
  let at = 0
  const moves = { first: () => 0, back: () => at - 1, on: () => at + 1, last: () => count - 1 }
  const keys = { ArrowLeft: "back", ArrowRight: "on" }

  function show(step) {
    at = Math.max(0, Math.min(count - 1, step))
    slider.value = at
    root.querySelector("output").textContent = `${at + 1} of ${count}`
    row.querySelectorAll("[data-go]").forEach(button => {
      button.disabled = at === (["first", "back"].includes(button.dataset.go) ? 0 : count - 1)
    })
    render(at)
  }

  row.addEventListener("click", event => {
    const move = moves[event.target.dataset.go]
    if (move) show(move())
  })
  row.addEventListener("keydown", event => {
    if (event.target === slider || !keys[event.key]) return
    event.preventDefault()
    event.stopPropagation()
    show(moves[keys[event.key]]())
  })
  slider.addEventListener("input", () => show(+slider.value))
  show(0)
}

/* Frames of a walk, one at a time. Without this script, and in print, all frames stand below each other. */
document.querySelectorAll(".mc-walk").forEach(root => {
  const frames = [...root.querySelectorAll(":scope > ol > li")]
  root.querySelector(".mc-buttons").hidden = false
  goThrough(root, frames.length, at => frames.forEach((frame, n) => { frame.hidden = n !== at }))
})

/* The stepper: one recorded step at a time. Without this script the page has the same steps as a table. */
document.querySelectorAll(".mc-stepper").forEach(root => {
  if (!root.querySelector(".mc-data")) return
  const data = JSON.parse(root.querySelector(".mc-data").textContent), all = data.steps
  const find = selector => root.querySelector(selector)
  const ops = find(".mc-ops code"), graph = find(".mc-graph code")
  const line = (text, className) => Object.assign(document.createElement("span"), { textContent: text, className })
  const item = (tag, text, fresh) => Object.assign(document.createElement(tag), { textContent: text, className: fresh ? "fresh" : "" })

  root.hidden = false
  document.querySelectorAll(".mc-all").forEach(table => { table.open = false })
  goThrough(root, all.length, at => {
    const now = all[at], before = all[at - 1]
    find(".mc-now").textContent = `Line ${now.line + 1}: about to run ${now.op} ${now.arg}`
    root.querySelectorAll("[data-line]").forEach(s => s.classList.toggle("now", +s.dataset.line === now.line))
    const first = Math.max(0, Math.min(at - 4, all.length - 12))
    ops.replaceChildren(...all.slice(first, first + 12).map((s, n) =>
      line(`${String(first + n + 1).padStart(3)}  ${s.op} ${s.arg}`, first + n === at ? "now" : "")))
    find(".mc-stack").replaceChildren(...(now.stack.length ? [...now.stack].reverse() : ["empty"]).map(v =>
      item("li", v, before && now.stack.length && !before.stack.includes(v))))
    find(".mc-locals").replaceChildren(...Object.entries(now.locals).flatMap(([name, value]) =>
      [item("dt", name), item("dd", value, before && before.locals[name] !== value)]))
    graph.replaceChildren(...(now.nodes ? data.graph.slice(0, now.nodes) : ["(no node yet)"]).map((text, n) =>
      line(text, before && n >= before.nodes && now.nodes ? "now" : "")))
  })
})
