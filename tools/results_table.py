"""Writes the measured results (results/*.json, as `bench --json` prints them) into the README, between its
two markers.

    python tools/results_table.py            # rewrite
    python tools/results_table.py --check    # exit 1 if the README does not show the committed results
"""

from __future__ import annotations

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: written by tools/results_table.py -->", "<!-- end of results -->"
TITLES = {"nanogpt": "nanoGPT, characters (10.7M parameters, batch 64, block 256)",
          "gpt2": "GPT-2 124M (batch 12, block 1024)",
          "resnet50": "ResNet-50 (batch 128, 224x224)"}
HEADER = ["work", "mode", "eager", "torch.compile", "minicompile", "over eager", "over torch.compile",
          "cold compile s, ours / torch", "peak GB, ours / eager"]


def find(results: list, compiler: str, dtype: str) -> dict | None:
    """The run of this compiler on these numbers, if there is one and it did not fail."""
    return next((r for r in results if "ms" in r and r["task"]["compiler"] == compiler
                 and r["task"]["dtype"] == dtype), None)


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def rows(record: dict):
    """One Markdown row per minicompile run of a record."""
    def figure(run, value, form):
        return form.format(value(run)) if run else "-"

    for r in record["results"]:
        name, _, mode = r["task"]["compiler"].partition(":")
        if name != "minicompile" or "ms" not in r:
            continue
        eager = find(record["results"], "eager", r["task"]["dtype"])
        torch = find(record["results"], "torch" + (f":{mode}" if mode else ""), r["task"]["dtype"])
        numbers = r["task"]["dtype"] + (" channels_last" if r["task"]["channels_last"] else "")
        cold = [figure(run, lambda run: run["cold_seconds"], "{:.1f}") for run in (r, torch)]
        peak = [figure(run, lambda run: run["peak_memory_mb"] / 1000, "{:.2f}") for run in (r, eager)]
        yield line([f"{TITLES[record['benchmark']]}, {numbers}", mode or "default",
                    *(figure(run, lambda run: run["ms"], "{:.2f}") for run in (eager, torch)),
                    f"**{r['ms']:.2f}**",
                    *(figure(run, lambda run: run["ms"] / r["ms"], "{:.2f}x") for run in (eager, torch)),
                    " / ".join(cold), " / ".join(peak)])


def machine_of(record: dict) -> str:
    hardware = record["hardware"]
    return hardware["gpu"] or f"{hardware['cpu']}, {hardware['cores']} cores"


def render() -> str:
    groups: dict[str, list] = {}
    for path in sorted((ROOT / "results").glob("*.json")):
        record = json.loads(path.read_text())
        groups.setdefault(machine_of(record), []).append((path.name, record))
    parts = []
    for machine, records in sorted(groups.items(), key=lambda item: not item[1][0][1]["hardware"]["gpu"]):
        versions = records[0][1]["versions"]
        runs = [f"`{r['command']}` at {r['commit']} (`results/{name}`)" for name, r in records]
        parts += [f"**{machine}** (torch {versions['torch']}, triton {versions.get('triton', 'none')}, "
                  f"Python {versions['python']}); milliseconds per training step, median of one run:",
                  "", line(HEADER), "|" + "---|" * len(HEADER)]
        parts += [row for _, record in records for row in rows(record)]
        parts += ["", f"Commands and commits: {'; '.join(runs)}.", ""]
    return "\n".join(parts)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    wanted = f"{before}{BEGIN}\n{render()}{END}{rest.split(END)[1]}"
    if "--check" in sys.argv:
        if wanted != text:
            print("README.md does not show the results in results/: run python tools/results_table.py")
        return wanted != text
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
