"""Writes the measured results (results/*.json, as `bench --json` prints them) into the README, between its two markers.

    python tools/results_table.py            # rewrite
    python tools/results_table.py --check    # exit 1 if the README does not show the committed results
"""

from __future__ import annotations

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: written by tools/results_table.py -->", "<!-- end of results -->"
TITLES = {"nanogpt": "nanoGPT, characters (10.7M parameters, batch 64, block 256)", "gpt2": "GPT-2 124M (batch 12, block 1024)",
          "resnet50": "ResNet-50 (batch 128, 224x224)"}


def find(results, compiler, task):
    same = [r for r in results if r["task"]["compiler"] == compiler and r["task"]["dtype"] == task["dtype"] and "ms" in r]
    return same[0] if same else None


def rows(record):
    """One Markdown row per minicompile run of a record."""
    for r in record["results"]:
        name, _, mode = r["task"]["compiler"].partition(":")
        if name != "minicompile" or "ms" not in r:
            continue
        eager = find(record["results"], "eager", r["task"])
        torch = find(record["results"], "torch" + (f":{mode}" if mode else ""), r["task"])
        numbers = r["task"]["dtype"] + (" channels_last" if r["task"]["channels_last"] else "")
        cells = [TITLES[record["benchmark"]] + f", {numbers}", mode or "default", f"{eager['ms']:.2f}",
                 f"{torch['ms']:.2f}" if torch else "-", f"**{r['ms']:.2f}**", f"{eager['ms'] / r['ms']:.2f}x",
                 f"{torch['ms'] / r['ms']:.2f}x" if torch else "-",
                 f"{r['cold_seconds']:.1f} / {torch['cold_seconds']:.1f}" if torch else f"{r['cold_seconds']:.1f} / -",
                 f"{r['peak_memory_mb'] / 1000:.2f} / {eager['peak_memory_mb'] / 1000:.2f}"]
        yield "| " + " | ".join(cells) + " |"


def render() -> str:
    groups: dict[str, list] = {}
    for path in sorted((ROOT / "results").glob("*.json")):
        record = json.loads(path.read_text())
        machine = record["hardware"]["gpu"] or f"{record['hardware']['cpu']}, {record['hardware']['cores']} cores"
        groups.setdefault(machine, []).append((path.name, record))
    parts = []
    for machine, records in sorted(groups.items(), key=lambda item: not item[1][0][1]["hardware"]["gpu"]):
        first = records[0][1]
        parts += [f"**{machine}** (torch {first['versions']['torch']}, triton {first['versions'].get('triton', 'none')}, Python "
                  f"{first['versions']['python']}); milliseconds per training step, median of one run:", "",
                  "| work | mode | eager | torch.compile | minicompile | over eager | over torch.compile | cold compile s, ours / torch | peak GB, ours / eager |",
                  "|---|---|---|---|---|---|---|---|---|"]
        parts += [row for _, record in records for row in rows(record)]
        parts += ["", "Commands and commits: " + "; ".join(f"`{r['command']}` at {r['commit']} (`results/{name}`)" for name, r in records) + ".", ""]
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
