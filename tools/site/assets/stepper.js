/* The stepper: shows one recorded step at a time. Without this script the page has the same steps as a table. */
document.querySelectorAll(".mc-stepper").forEach(root => {
  if (!root.querySelector(".mc-data")) return
  const data = JSON.parse(root.querySelector(".mc-data").textContent), all = data.steps
  const find = selector => root.querySelector(selector)
  const slider = find("input"), ops = find(".mc-ops code"), graph = find(".mc-graph code")
  let at = 0

  const line = (text, className) => Object.assign(document.createElement("span"), { textContent: text, className })
  const item = (tag, text, fresh) => Object.assign(document.createElement(tag), { textContent: text, className: fresh ? "fresh" : "" })

  function show(step) {
    at = Math.max(0, Math.min(all.length - 1, step))
    const now = all[at], before = all[at - 1]
    slider.value = at
    find("output").textContent = `${at + 1} of ${all.length}`
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
    find("[data-go=back]").disabled = find("[data-go=first]").disabled = at === 0
    find("[data-go=on]").disabled = find("[data-go=last]").disabled = at === all.length - 1
  }

  const moves = { first: () => 0, back: () => at - 1, on: () => at + 1, last: () => all.length - 1 }
  find(".mc-buttons").addEventListener("click", event => {
    const move = moves[event.target.dataset.go]
    if (move) show(move())
  })
  find(".mc-buttons").addEventListener("keydown", event => {
    if (event.target === slider || !["ArrowLeft", "ArrowRight"].includes(event.key)) return
    event.preventDefault()
    event.stopPropagation()
    show(at + (event.key === "ArrowRight" ? 1 : -1))
  })
  slider.addEventListener("input", () => show(+slider.value))
  root.hidden = false
  document.querySelectorAll(".mc-all").forEach(table => { table.open = false })
  show(0)
})
