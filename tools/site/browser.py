"""python -m tools.site.browser [--all] [--axe FILE]: the finished site in headless Chromium, from file://.

Every page has to load without a console error, an exception or a request to the outside. Search has to find, the stepper has to step, by
mouse and by keyboard. On a phone no page and no line of code is wider than the screen, and pictures stay
readable. On paper nothing is cut off, and nothing
is dark, whatever the scheme. axe-core looks at the pages in both
colour schemes (all kinds of pages; `--all`: every page). axe-core comes from
the npm registry into .site/, or an older one from PyPI, and is not part of the project; `--axe` names a file instead.

Exit status: 0 no findings, 1 findings, 3 nothing was looked at because there is no Chromium.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time

from . import ROOT

AXE = "4.10.2"
AXE_ON_PYPI = "axe-core-python==0.1.0"
NOT_RUN = 3
RULES = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
COLOURS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}       # all that the other scheme can change


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """A Chromium that is spoken to over two pipes, in the DevTools protocol: JSON texts that end with a zero byte."""

    def __init__(self):
        name = chromium()
        self.profile = tempfile.mkdtemp(prefix="site-browser-")
        (theirs, self.send_to), (self.read_from, back) = os.pipe(), os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 60) for fd in (theirs, back)]

        def wire():
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.process = subprocess.Popen(
            [name, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--remote-debugging-pipe", f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=(3, 4), preexec_fn=wire, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for fd in (theirs, back, *high):
            os.close(fd)
        self.buffer, self.number, self.events = b"", 0, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    session = None

    def message(self, limit: float):
        """The next message, or None when there is none for `limit` seconds."""
        while b"\0" not in self.buffer:
            if not select.select([self.read_from], [], [], limit)[0]:
                return None
            data = os.read(self.read_from, 1 << 20)
            if not data:
                raise SystemExit("Chromium ended.")
            self.buffer += data
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, **params):
        self.number += 1
        about = {"id": self.number, "method": method, "params": params, **({"sessionId": self.session} if self.session else {})}
        os.write(self.send_to, json.dumps(about).encode() + b"\0") if len(json.dumps(about)) < 60_000 else self.write_long(about)
        while True:
            answer = self.message(60)
            if answer is None:
                raise SystemExit(f"{method}: no answer in a minute")
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def write_long(self, about):
        data = json.dumps(about).encode() + b"\0"
        while data:
            data = data[os.write(self.send_to, data[:1 << 16]):]

    def open(self, address: str):
        """Go to an address and wait until it has loaded. Events from before are forgotten."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.wait(lambda: any(e.get("method") == "Page.loadEventFired" for e in self.events), "load")

    def wait(self, ready, what: str, limit: float = 20):
        end = time.monotonic() + limit
        while not ready():
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not in {limit:.0f} s")
            if event := self.message(0.05):
                self.events.append(event)

    def run(self, script: str):
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"].get("exception", {}).get("description", str(answer["exceptionDetails"])))
        return answer["result"].get("value")

    def until(self, script: str, what: str, limit: float = 20):
        self.wait(lambda: self.run(script), what, limit)

    def complaints(self) -> list[str]:
        """Errors and outside requests since the page was opened."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append("exception: " + params["exceptionDetails"].get("exception", {}).get("description", "")[:200])
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append("error: " + params["entry"]["text"][:200])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                found.append("console: " + str([a.get("value") for a in params["args"]])[:200])
            elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:", "blob:", "about:")):
                found.append("request to " + params["request"]["url"])
        return found

    def scheme(self, name: str):
        self.run("location.protocol === 'file:' && localStorage.clear()")      # the theme remembers a choice
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def close(self):
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)


def axe_source(work: pathlib.Path, given: str | None) -> str | None:
    """The text of axe-core, fetched once through npm or else pip; None where neither can."""
    if given:
        return pathlib.Path(given).read_text()
    folder = work / "axe"
    for found, command in (("node_modules/axe-core", ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder,
                                                      f"axe-core@{AXE}"]),
                           ("axe_core_python", [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder,
                                                AXE_ON_PYPI])):
        file = folder / found / "axe.min.js"
        if not file.exists():
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
        if file.exists():
            return file.read_text()
    return None


def violations(browser: Browser, axe: str, rules: dict) -> list[str]:
    browser.run(axe + "; 0")
    found = browser.run("axe.run(document, {resultTypes: ['violations'], runOnly: " + json.dumps(rules) + "}).then(r => r.violations.map("
                        "v => v.id + ': ' + v.nodes.length + ' x, e.g. ' + v.nodes[0].html.slice(0, 140) + ' | ' + "
                        "(v.nodes[0].any[0] ? v.nodes[0].any[0].message.slice(0, 140) : '')))")
    return [f"axe: {line}" for line in found]


NARROW = """(() => {
  const found = [], width = document.documentElement.clientWidth, folded = document.querySelectorAll('details:not([open])')
  for (const fold of folded) fold.open = true                   // what is folded keeps the size that it had on another screen
  if (document.documentElement.scrollWidth > width) found.push('the page is wider than the screen')
  for (const code of document.querySelectorAll('.mc-lines'))
    if (code.scrollWidth > code.clientWidth + 1) found.push(`a line of code is cut off: ${code.textContent.trim().slice(0, 40)}`)
  for (const svg of document.querySelectorAll('.md-content svg')) {
    const box = svg.viewBox.baseVal, about = svg.querySelector('title')?.textContent || svg.getAttribute('aria-label') || ''
    if (!about && !svg.closest('a, button, label, [aria-hidden=true]')) found.push('a picture has no text alternative')
    for (const text of svg.querySelectorAll('text')) {
      const size = parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / box.width, r = text.getBBox()
      if (size && size < 8) found.push(`text of ${size.toFixed(1)} px in: ${about.slice(0, 60)}`)
      if (r.x < box.x - 1 || r.x + r.width > box.x + box.width + 1) found.push(`"${text.textContent}" is cut off in: ${about.slice(0, 60)}`)
    }
  }
  for (const fold of folded) fold.open = false
  return [...new Set(found)]
})()"""


def on_a_phone(browser: Browser) -> list[str]:
    """What is wrong with the open page on a screen of 390 points."""
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    found = browser.run(NARROW)
    browser.call("Emulation.clearDeviceMetricsOverride")
    return [f"phone: {text}" for text in found]


PRINTED = """(() => {
  const found = [], width = document.documentElement.clientWidth
  for (const e of document.querySelectorAll('.md-content *')) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e), shown = box.width && box.height
    const words = e.textContent.trim().slice(0, 40)
    if (e.matches('.mc-walk > ol > li') && !shown) found.push(`a frame of a walk is lost: ${words}`)
    if (!shown || e.closest('svg, .md-annotation')) continue
    if (box.right > width + 1 || e.scrollWidth > e.clientWidth + 1 && e.clientWidth && style.overflowX !== 'visible')
      found.push(`${e.tagName.toLowerCase()} is cut off: ${words}`)
    const [, red, green, blue, alpha] = /^rgba?\\((\\d+), (\\d+), (\\d+)(?:, ([\\d.]+))?/.exec(style.backgroundColor) || []
    if (+(alpha ?? 1) > .5 && +red + +green + +blue < 330 && e.matches('pre, code, div, table, details, figure, section'))
      found.push(`${e.tagName.toLowerCase()} has a dark background: ${words}`)
  }
  return [...new Set(found)].slice(0, 5)
})()"""


def on_paper(browser: Browser) -> list[str]:
    """What is wrong with the open page when it is printed on A4."""
    browser.run("document.head.insertAdjacentHTML('beforeend', '<style>* { transition: none !important }</style>')")
    browser.call("Emulation.setDeviceMetricsOverride", width=718, height=1040, deviceScaleFactor=1, mobile=False)
    browser.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    found = browser.run(PRINTED)
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.call("Emulation.clearDeviceMetricsOverride")
    return [f"paper: {text}" for text in found]


def check_pages(browser: Browser, pages: list, looked_at: set, axe: str | None, site: pathlib.Path) -> list[str]:
    findings = []
    try:
        for page in pages:
            for scheme in ("light", "dark") if page in looked_at else ("light",):
                browser.scheme(scheme)
                browser.open(page.as_uri())
                complaints = browser.complaints()
                if axe and page in looked_at:
                    complaints += violations(browser, axe, RULES if scheme == "light" else COLOURS)
                if scheme == "dark":
                    complaints += on_a_phone(browser) + on_paper(browser)
                for text in complaints:
                    findings.append(f"{page.relative_to(site).as_posix()} ({scheme}): {text}")
                    print(findings[-1], flush=True)
    finally:
        browser.close()
    return findings


def check_search(browser: Browser, site: pathlib.Path) -> list[str]:
    """Typing a word into the search field lists pages with it."""
    browser.open((site / "index.html").as_uri())
    browser.run("document.querySelector('[data-md-toggle=search]').click(); document.querySelector('.md-search__input').focus()")
    for word, expected in (("partitioner", "ch05"), ("choose_saved", "partition")):
        browser.run(f"(i => {{ i.value = {word!r}; i.dispatchEvent(new Event('input', {{bubbles: true}})); "
                    f"i.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}})) }})"
                    "(document.querySelector('.md-search__input'))")
        try:
            browser.until(f"[...document.querySelectorAll('.md-search-result__link')].some(a => a.href.includes({expected!r}))",
                          f"search for {word} does not find {expected}")
        except AssertionError as error:
            return [str(error)]
    return browser.complaints()


def check_stepper(browser: Browser, site: pathlib.Path) -> list[str]:
    browser.open((site / "stepper.html").as_uri())
    browser.until("!document.querySelector('.mc-stepper').hidden", "the stepper does not show itself")
    said, click = "document.querySelector('.mc-now').textContent", "document.querySelector('[data-go={}]').click()"
    nodes = "document.querySelectorAll('.mc-graph span').length"
    first = browser.run(said)
    browser.run(click.format("on"))
    second = browser.run(said)
    browser.run("document.querySelector('[data-go=on]').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    third = browser.run("document.querySelector('output').textContent")
    browser.run(click.format("last"))
    end = browser.run(nodes)
    found = []
    if first == second or not first:
        found.append(f"the button Next does nothing: {first!r}")
    if not third.startswith("3 of"):
        found.append(f"the arrow key does nothing: {third!r}")
    if end < 3:
        found.append(f"the graph has {end} nodes at the end")
    return found + browser.complaints()


def check_explorer(browser: Browser, site: pathlib.Path) -> list[str]:
    """A line of a kernel leads to the line of the program, by pointing, by keys and by its address."""
    page = (site / "explore" / "gpt.html").as_uri()
    browser.open(page + "#panes=source,guards,cpp")
    shown = "[...document.querySelectorAll('.pane.shown')].map(p => p.id.slice(5)).join()"
    marked = "[...document.querySelectorAll('#pane-source .up')].map(l => l.textContent.trim()).join()"
    found, panes = [], browser.run(shown)
    if panes != "source,guards,cpp":
        found.append(f"its address does not choose panes: {panes}")
    browser.run("[...document.querySelectorAll('#pane-cpp li')].find(l => l.textContent.includes('erf')).click()")
    if "gelu" not in browser.run(marked):
        found.append(f"a line of a kernel leads to {browser.run(marked)!r}")
    if "gelu" not in browser.run("document.getElementById('details').textContent"):
        found.append("the selection is not said in words")
    browser.run("document.querySelector('#pane-source ol').focus()")
    for key, code in (("Home", 36), ("End", 35)):
        browser.call("Input.dispatchKeyEvent", type="rawKeyDown", key=key, code=key, windowsVirtualKeyCode=code)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)
    if not browser.run("document.querySelectorAll('#pane-guards .down').length && document.querySelectorAll('#pane-cpp .down').length"):
        found.append("a line that is reached with a key is not linked")
    return found + browser.complaints()


def main(arguments=None) -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--all", action="store_true")
    options.add_argument("--axe")
    options = options.parse_args(arguments)
    site, start = ROOT / "site", time.perf_counter()
    pages = sorted(p for p in site.rglob("*.html") if p.name != "404.html")
    if not pages:
        print("There is no site: make site", file=sys.stderr)
        return 1
    if chromium() is None:
        print("The browser tests were not run: there is no Chromium.", file=sys.stderr)
        return NOT_RUN
    axe = axe_source(ROOT / ".site", options.axe)
    findings = [] if axe else ["axe-core could not be had; pass --axe FILE"]
    code = sorted((p for p in pages if "code" in p.relative_to(site).parts), key=lambda p: -p.stat().st_size)
    looked_at = set(pages) - (set() if options.all else set(code[3:]))
    browsers = [Browser(), Browser()]                                   # one for each of two cores
    with concurrent.futures.ThreadPoolExecutor(2) as both:
        for found in both.map(lambda b, some: check_pages(b, some, looked_at, axe, site), browsers, (pages[::2], pages[1::2])):
            findings += found
    browser = Browser()
    try:
        browser.scheme("dark")
        browser.open((site / "index.html").as_uri())
        browser.until("document.body.dataset.mdColorScheme", "the theme")
        if browser.run("document.body.dataset.mdColorScheme") != "slate":
            findings.append("index.html: the dark scheme is not taken from the system")
        findings += [f"search: {text}" for text in check_search(browser, site)]
        findings += [f"stepper.html: {text}" for text in check_stepper(browser, site)]
        findings += [f"explore/gpt.html: {text}" for text in check_explorer(browser, site)]
    finally:
        browser.close()
    print("\n".join(["findings:", *findings]) if findings else "no findings")
    print(f"{len(pages)} pages, {len(looked_at) if axe else 0} of them with axe-core in both schemes, {time.perf_counter() - start:.0f} s")
    return bool(findings)


if __name__ == "__main__":
    raise SystemExit(main())
