"""python -m tools.site build | serve [PORT] | gpu CHAPTER.py | clean

build writes site/; serve builds, serves it and builds again when a source changes; gpu runs a chapter on this machine's GPU and records
the results of its `gpu-result` cells beside it.
"""
from __future__ import annotations

import functools
import http.server
import pathlib
import sys
import threading
import time

from . import ROOT, SiteError, build, execute

WATCHED = ("chapters", "minicompile", "results", "exercises/tasks", "tools/site")


def built() -> bool:
    start = time.perf_counter()
    try:
        out = build.build()
    except SiteError as error:
        print("\n".join(error.findings), file=sys.stderr)
        print(f"The site was not built: {len(error.findings)} finding{'s' * (len(error.findings) != 1)}.", file=sys.stderr)
        return False
    print(f"{out.relative_to(ROOT)}/index.html, {time.perf_counter() - start:.1f} s in all")
    return True


def state() -> dict:
    return {p: p.stat().st_mtime_ns for folder in WATCHED for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".json", ".css",
                                                                                                              ".js")}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *message):
        pass


def serve(port: int = 8000):
    built()
    handler = functools.partial(Quiet, directory=str(ROOT / build.SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{port}/index.html (Ctrl-C ends)")
    seen = state()
    while True:
        time.sleep(0.5)
        if (now := state()) != seen:
            seen = now
            # a new process: this one has old versions of the sources imported
            import subprocess
            subprocess.run([sys.executable, "-m", "tools.site", "build"], cwd=ROOT)


def main(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "build"
    if command == "build":
        return 0 if built() else 1
    if command == "serve":
        try:
            serve(*map(int, arguments[1:2]))
        except KeyboardInterrupt:
            return 0
    if command == "gpu" and len(arguments) == 2:
        import os
        os.environ["MINICOMPILE_SITE_GPU"] = "1"
        execute.prepare()
        print(execute.record(pathlib.Path(arguments[1]).resolve()).relative_to(ROOT))
        return 0
    if command == "clean":
        build.clean()
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
