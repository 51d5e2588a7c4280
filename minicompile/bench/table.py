"""The table of a benchmark: one run a row, compared with eager and with the peer."""
from rich.table import Table

from .worker import settings_of


def loss_difference(result: dict, reference: dict) -> float:
    """Largest absolute difference of two loss curves."""
    return max(abs(a - b) for a, b in zip(result["losses"], reference["losses"]))


def label(task: dict) -> str:
    return f"{task['dtype']}{' channels_last' if task['channels_last'] else ''}"


HEADER = ("numbers", "compiler", "ms/iter", "10%-90%", "vs eager", "vs torch", "MFU", "cold compile",
          "peak MB", "graphs", "kernels", "max loss difference")


def summary_table(results: list[dict]) -> Table:
    """One column a run, one row a figure, so that it fits a narrow terminal."""
    table = Table(show_header=False)
    for _ in range(1 + len(results)):
        table.add_column(justify="right", overflow="fold")
    for name, *cells in zip(HEADER, *rows(results)):
        table.add_row(name, *cells)
    return table


def rows(results: list[dict]) -> list[list[str]]:
    """The table's cells as text, one list of len(HEADER) a run."""
    timed = {(label(r["task"]), r["task"]["compiler"]): r for r in results if "error" not in r}
    return [_row(r, timed) for r in results]


def _row(r: dict, timed: dict) -> list[str]:
    numbers, compiler = label(r["task"]), r["task"]["compiler"]
    if "error" in r:
        return [numbers, compiler, "failed"] + ["-"] * (len(HEADER) - 3)
    eager = timed.get((numbers, "eager"))
    peer = peer_of(compiler, {c: run for (n, c), run in timed.items() if n == numbers})
    cells = [numbers, compiler, f"{r['ms']:.2f}", f"{r['ms_low']:.2f}-{r['ms_high']:.2f}",
             f"{eager['ms'] / r['ms']:.2f}x" if eager else "-",
             f"{peer['ms'] / r['ms']:.2f}x" if peer else "-",
             f"{100 * r['mfu']:.1f}%" if r["mfu"] else "-"]
    if compiler == "eager":
        return cells + ["-", f"{r['peak_memory_mb']:.0f}", "-", "-", "-"]
    return cells + [f"{r['cold_seconds']:.1f} s", f"{r['peak_memory_mb']:.0f}", str(r["graphs"] or "-"),
                    str(r["kernels"] or "-"), f"{loss_difference(r, eager):.2g}" if eager else "-"]


def peer_of(compiler: str, timed: dict[str, dict]) -> dict | None:
    """The run of torch.compile that one of ours is compared with, among those on equal numbers: the one in the same mode;
    for a whole step the fastest."""
    name, mode, extent = settings_of(compiler)
    if name != "minicompile":
        return None
    if extent:
        return min((r for c, r in timed.items() if settings_of(c)[0] == "torch"), key=lambda r: r["ms"], default=None)
    return timed.get(":".join(filter(None, ("torch", mode))))
