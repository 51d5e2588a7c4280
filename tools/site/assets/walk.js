/* Frames of a walk: one at a time, with buttons. Without this script, and in print, all frames stand below each other. */
document.querySelectorAll(".mc-walk").forEach(root => {
  const frames = [...root.querySelectorAll(":scope > ol > li")], find = selector => root.querySelector(selector)
  const slider = find("input")
  let at = 0

  function show(frame) {
    at = Math.max(0, Math.min(frames.length - 1, frame))
    slider.value = at
    find("output").textContent = `${at + 1} of ${frames.length}`
    frames.forEach((f, n) => { f.hidden = n !== at })
    find("[data-go=back]").disabled = at === 0
    find("[data-go=on]").disabled = at === frames.length - 1
  }

  find(".mc-buttons").addEventListener("click", event => {
    if (event.target.dataset.go) show(at + (event.target.dataset.go === "on" ? 1 : -1))
  })
  find(".mc-buttons").addEventListener("keydown", event => {
    if (event.target === slider || !["ArrowLeft", "ArrowRight"].includes(event.key)) return
    event.preventDefault()
    event.stopPropagation()
    show(at + (event.key === "ArrowRight" ? 1 : -1))
  })
  slider.addEventListener("input", () => show(+slider.value))
  find(".mc-buttons").hidden = false
  show(0)
})
