"use strict";
(() => {
  const root = document.documentElement, strip = document.querySelector(".strip"), details = document.getElementById("details");
  const hint = details.innerHTML, buttons = [...strip.children], items = [...document.querySelectorAll("li[id]")];
  const paneOf = li => li.closest(".pane"), by = id => document.getElementById(id), split = words => words ? words.split(" ") : [];
  const parents = new Map(), children = new Map();
  for (const li of items) {
    parents.set(li.id, split(li.dataset.from));
    for (const id of parents.get(li.id)) children.has(id) ? children.get(id).push(li.id) : children.set(id, [li.id]);
  }
  root.classList.add("js");
  for (const list of document.querySelectorAll("main ol")) list.setAttribute("role", "listbox");
  for (const li of items) li.setAttribute("role", "option");

  // Everything that is reached from a line; what says nothing about its origin is left out on the way down.
  function reach(start, next, skipQuiet) {
    const seen = new Set(), pending = [...(next.get(start) || [])];
    while (pending.length) {
      const id = pending.pop();
      if (seen.has(id) || skipQuiet && by(id).classList.contains("quiet")) continue;
      seen.add(id);
      pending.push(...(next.get(id) || []));
    }
    return seen;
  }

  let marked = [], selected = null;
  function mark(li, chosen) {
    for (const old of marked) old.classList.remove("on", "up", "down", "same");
    for (const b of buttons) { b.lastChild.textContent = ""; b.lastChild.className = ""; }
    marked = [];
    if (!li) return { up: new Set(), down: new Set() };
    const up = reach(li.id, parents, false), down = reach(li.id, children, true), all = new Set([...up, ...down]);
    const put = (id, name) => { const other = by(id); if (other) { other.classList.add(name); marked.push(other); } };
    put(li.id, "on");
    up.forEach(id => put(id, "up"));
    down.forEach(id => put(id, "down"));
    for (const id of [li.id, ...all]) if (by(id).dataset.same && !all.has(by(id).dataset.same)) put(by(id).dataset.same, "same");
    const counts = {};
    for (const other of new Set(marked)) if (other !== li) { const p = paneOf(other).id.slice(5); counts[p] = (counts[p] || 0) + 1; }
    for (const b of buttons) if (counts[b.dataset.pane]) { b.lastChild.textContent = counts[b.dataset.pane]; b.lastChild.className = "some"; }
    if (chosen) for (const pane of document.querySelectorAll(".pane.shown")) {
      for (const list of pane.querySelectorAll("ol")) {
        const first = list.querySelector(".on, .up, .down, .same");
        if (first && first !== li) list.scrollTop = first.offsetTop - list.offsetTop - list.clientHeight / 3;
      }
    }
    return { up, down };
  }

  function element(name, words, parent) {
    const e = document.createElement(name);
    if (words !== undefined) e.textContent = words;
    parent.append(e);
    return e;
  }

  // The same in words: for those who do not see colours, and for panes that are not shown.
  function describe(li, reached) {
    details.textContent = "";
    details.classList.toggle("chosen", !!li);
    if (!li) { details.innerHTML = hint; return; }
    element("p", undefined, details).innerHTML = "<code></code>";
    details.querySelector("code").textContent = li.textContent.trim();
    if (li.dataset.facts) {
      const list = element("dl", undefined, details);
      for (const [name, value] of Object.entries(JSON.parse(li.dataset.facts))) { element("dt", name, list); element("dd", value, list); }
    }
    const chain = element("div", undefined, details);
    chain.className = "chain";
    for (const [title, ids] of [["Made from", reached.up], ["Became", reached.down]]) {
      if (!ids.size) continue;
      const side = element("div", undefined, chain), grouped = new Map();
      element("p", title, side).style.fontWeight = 600;
      const list = element("dl", undefined, side);
      for (const other of items) if (ids.has(other.id)) {
        const pane = paneOf(other).id;
        grouped.has(pane) ? grouped.get(pane).push(other) : grouped.set(pane, [other]);
      }
      for (const [pane, lines] of grouped) {
        element("dt", by(pane).querySelector("h2").firstChild.textContent, list);
        const dd = element("dd", undefined, list);
        for (const other of lines.slice(0, 4)) {
          const go = element("button", other.textContent.trim().slice(0, 160), dd);
          go.type = "button";
          go.onclick = () => { show(paneOf(other).id.slice(5)); select(other, true); };
          element("br", undefined, dd);
        }
        if (lines.length > 4) dd.append(`and ${lines.length - 4} more`);
      }
    }
  }

  function select(li, jump) {
    if (selected) { selected.removeAttribute("aria-selected"); selected.parentElement.removeAttribute("aria-activedescendant"); }
    selected = li;
    describe(li, mark(li, true));
    if (!li) return;
    li.setAttribute("aria-selected", "true");
    li.parentElement.setAttribute("aria-activedescendant", li.id);
    const list = li.parentElement, top = li.offsetTop - list.offsetTop;
    if (jump || top < list.scrollTop || top + li.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = top - list.clientHeight / 3;
    if (jump) list.focus({ preventScroll: true });
  }

  // ---- which panes are shown
  const narrow = matchMedia("(max-width: 44rem)");
  let shown = split(strip.dataset.first);
  function layout() {
    const visible = narrow.matches ? shown.slice(-1) : shown;
    for (const b of buttons) {
      b.setAttribute("aria-pressed", visible.includes(b.dataset.pane));
      by("pane-" + b.dataset.pane).classList.toggle("shown", visible.includes(b.dataset.pane));
    }
    const wide = root.dataset.count === "2" ? 900 : 430;
    root.style.setProperty("--columns", Math.max(1, Math.min(visible.length, Math.floor(innerWidth / wide))));
    const current = narrow.matches && buttons.find(b => b.dataset.pane === visible[0]);
    if (current) strip.scrollLeft = current.offsetLeft - strip.offsetLeft;
    if (selected) mark(selected, true);
  }
  function show(pane) {
    if (narrow.matches || !shown.includes(pane)) { shown = [...shown.filter(p => p !== pane), pane]; layout(); }
  }
  for (const b of buttons) b.onclick = () => {
    const pane = b.dataset.pane;
    if (narrow.matches || !shown.includes(pane)) show(pane);
    else { shown = shown.filter(p => p !== pane); layout(); }
  };
  addEventListener("resize", layout);

  // ---- pointing and keys
  const lineAt = event => event.target.closest && event.target.closest("li[id]");
  let ahead = 0;
  document.addEventListener("mouseover", event => {
    const li = lineAt(event);
    if (li === ahead || matchMedia("(hover: none)").matches) return;
    ahead = li;
    if (li) mark(li, false); else mark(selected, false);
  });
  document.addEventListener("click", event => { const li = lineAt(event); if (li) select(li === selected ? null : li, false); });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") { select(null); return; }
    const list = event.target.closest && event.target.closest("ol");
    if (!list || event.ctrlKey || event.altKey || event.metaKey) return;
    const lines = [...list.children].filter(li => li.id), at = lines.indexOf(selected);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      select(lines[Math.max(0, Math.min(lines.length - 1, at < 0 ? 0 : at + step))]);
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      event.preventDefault();
      const lists = [...document.querySelectorAll(".pane.shown ol")];
      const next = lists[(lists.indexOf(list) + (event.key === "ArrowRight" ? 1 : lists.length - 1)) % lists.length];
      const linked = next.querySelector(".up, .down, .same");
      next.focus();
      if (linked) select(linked);
    }
  });

  const theme = by("theme");
  theme.onclick = () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  };

  // explore.html#at=a-cpp-12&panes=source,cpp opens there
  function open() {
    const asked = new URLSearchParams(location.hash.slice(1)), li = asked.get("at") && by(asked.get("at"));
    if (asked.get("panes")) shown = asked.get("panes").split(",").filter(p => by("pane-" + p));
    else if (narrow.matches && !li) shown = [...shown.slice(1), shown[0]];       // one pane at a time, the last: begin with the source
    if (asked.get("theme")) root.dataset.theme = asked.get("theme");
    layout();
    if (li) { show(paneOf(li).id.slice(5)); select(li, true); }
  }
  addEventListener("hashchange", open);
  if (root.dataset.count === "2" && !narrow.matches) document.querySelector("details.summary").open = true;
  open();
})();
