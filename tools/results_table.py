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
TITLES = {"nanogpt": "nanoGPT, characters", "gpt2": "GPT-2 124M", "resnet50": "ResNet-50", "captions": "Captions of images, ViT and GPT-2"}
HEADER = ["work", "mode", "eager", "torch.compile", "minicompile", "over eager", "over torch.compile",
          "cold compile s, ours / torch", "peak GB, ours / eager"]


def find(results: list, compiler: str, dtype: str) -> dict | None:
    """The run of this compiler on these numbers, if there is one and it did not fail."""
    return next((r for r in results if "ms" in r and r["task"]["compiler"] == compiler
                 and r["task"]["dtype"] == dtype), None)


def fastest(results: list, name: str, dtype: str) -> dict | None:
    """The fastest run of `name` on these numbers, whatever its settings."""
    return min((r for r in results if "ms" in r and r["task"]["compiler"].partition(":")[0] == name and r["task"]["dtype"] == dtype),
               key=lambda r: r["ms"], default=None)


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def title(task: dict) -> str:
    model = task["model"]
    size = f"{model['size']}x{model['size']}" if "size" in model else f"block {model['block']}" if "block" in model else \
        f"{model['layers']} layers, width {model['width']}, block {model['block_size']}"
    return f"{TITLES[task['work']]} (batch {task['batch']}, {size})"


def rows(record: dict):
    """One Markdown row per minicompile run of a record."""
    def figure(run, value, form):
        return form.format(value(run)) if run else "-"

    for r in record["results"]:
        name, _, mode = r["task"]["compiler"].partition(":")
        if name != "minicompile" or "ms" not in r:
            continue
        whole = {"step", "optimizer"} & set(mode.split("+"))        # then the peer is torch.compile's fastest run
        eager = find(record["results"], "eager", r["task"]["dtype"])
        torch = fastest(record["results"], "torch", r["task"]["dtype"]) if whole else \
            find(record["results"], "torch" + (f":{mode}" if mode else ""), r["task"]["dtype"])
        numbers = r["task"]["dtype"] + (" channels_last" if r["task"]["channels_last"] else "")
        cold = [figure(run, lambda run: run["cold_seconds"], "{:.1f}") for run in (r, torch)]
        peak = [figure(run, lambda run: run["peak_memory_mb"] / 1000, "{:.2f}") for run in (r, eager)]
        note = f"; {record['note']}" if "note" in record else ""
        yield line([f"{title(r['task'])}, {numbers}{note}", mode or "default",
                    *(figure(run, lambda run: run["ms"], "{:.2f}") for run in (eager, torch)),
                    f"**{r['ms']:.2f}**",
                    *(figure(run, lambda run: run["ms"] / r["ms"], "{:.2f}x") for run in (eager, torch)),
                    " / ".join(cold), " / ".join(peak)])


def training_table(records: list[dict]) -> list[str]:
    return ["Milliseconds per training step, median of one run:", "", line(HEADER), "|" + "---|" * len(HEADER),
            *(row for record in records for row in rows(record))]


def compared(name: str, eager, torch, ours, form: str) -> str:
    """One row of a plain table: three figures and the ratios. Without eager: None."""
    cells = [form.format(eager)] if eager is not None else []
    ratios = [f"{eager / ours:.2f}x"] if eager is not None else []
    return line([name, *cells, form.format(torch), f"**{form.format(ours)}**", *ratios, f"{torch / ours:.2f}x"])


def chains_table(records: list[dict]) -> list[str]:
    head = ["fused chain, forward and backward", "eager", "torch.compile", "minicompile", "over eager",
            "over torch.compile"]
    return ["Milliseconds of chains on tensors larger than the cache, and of an optimizer with many small ones:", "", line(head),
            "|" + "---|" * len(head),
            *(compared(name, ms["eager"], ms["torch"], ms["minicompile"], "{:.1f}")
              for record in records for name, ms in record["ms"].items())]


def overhead_table(records: list[dict]) -> list[str]:
    head = ["cost apart from kernels", "torch.compile", "minicompile", "over torch.compile"]
    kinds = {"call_us": "one call, microseconds", "capture_ms": "capture, milliseconds"}
    return ["What a compiled call and its compilation cost apart from kernels (medians):", "", line(head),
            "|" + "---|" * len(head),
            *(compared(f"{name}: {kind}", None, cost["torch"]["median"], cost["minicompile"]["median"], "{:.1f}")
              for record in records for key, kind in kinds.items() for name, cost in record[key].items())]


def zoo_table(records: list[dict]) -> list[str]:
    head = ["zoo of models", "compiler", "models", "pass", "wrong", "error, crash, timeout", "over eager", "slower than eager",
            "one graph", "cold compile s, median", "memory, of eager's"]

    def cell(value, form):
        return "-" if value is None else form.format(value)
    lines = ["Models of Hugging Face transformers, timm, torchvision and plain PyTorch, each judged against float64 and timed in "
             "turns with eager; ratios are geometric means over the models that pass. " +
             " ".join(f"The zoo has {record['chosen']} models, each for inference and for training. Each compiler had a limited time "
                      "for its run, and a row counts the models that the run came to, in a mixed order. So many processes were at work on "
                      "each device, most of them compiling:" for record in records[-1:]), "",
             line(head), "|" + "---|" * len(head)]
    for record in records:
        for r in record["summary"]:
            lines.append(line([f"{r['work']}, {r['dtype']}, {record['jobs']} processes",
                               r["compiler"], str(r["models"]), str(r["pass"]), str(r["wrong"]),
                               ", ".join(str(r[v]) for v in ("error", "crash", "timeout")), cell(r["speed"], "{:.2f}x"),
                               str(r["slower"]), str(r["one_graph"]), cell(r["cold_seconds"], "{:.1f}"), cell(r["memory"], "{:.2f}")]))
    for record in records:
        for kind, found in record["against_torch"].items():
            if found:
                names = ", ".join(found["slower"])
                slower = f"; slower beyond doubt: {names}" if names else ""
                lines += ["", f"{kind.capitalize()}, {record['jobs']} processes, the {found['models']} models that both pass: "
                              f"minicompile is {found['speed']:.2f} times as fast as torch.compile, and its cold compile takes "
                              f"{found['cold']:.2f} of the time{slower}."]
    return lines


TABLES = {"chains": chains_table, "overhead": overhead_table, "zoo": zoo_table}


def machine_of(record: dict) -> str:
    hardware = record["hardware"]
    return hardware["gpu"] or f"{hardware['cpu']}, {hardware['cores']} cores"


def render() -> str:
    groups: dict[str, list] = {}
    for path in sorted((ROOT / "results").glob("*.json")):
        record = json.loads(path.read_text())
        if record.get("benchmark") in (*TITLES, *TABLES):
            groups.setdefault(machine_of(record), []).append((path.name, record))
    parts = []
    for machine, records in sorted(groups.items(), key=lambda item: not item[1][0][1]["hardware"]["gpu"]):
        versions = records[0][1]["versions"]
        runs = [f"`{r['command']}` at {r['commit']} (`results/{name}`)" for name, r in records]
        parts += [f"**{machine}** (torch {versions['torch']}, triton {versions.get('triton', 'none')}, "
                  f"Python {versions['python']}).", ""]
        tables: dict = {}
        for _, record in records:
            tables.setdefault(TABLES.get(record["benchmark"], training_table), []).append(record)
        for table, members in tables.items():
            parts += [*table(members), ""]
        parts += [f"Commands and commits: {'; '.join(runs)}.", ""]
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
