"""Command line: `python -m minicompile bench nanogpt`, `run SCRIPT ARGS...`, `explain FILE:FUNCTION ARGS...`."""

import pathlib
import sys
from typing import Annotated, Optional

import typer

from .errors import MinicompileError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="minicompile: a torch.compile written from scratch, as a book.")
Target = Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="a function or module, such as model.py:step")]
Arguments = Annotated[Optional[list[str]], typer.Argument(
    help="what to call it with: a Python expression each, such as 'torch.randn(8, 64)' or scale=2")]


@app.command()
def bench(
    work: Annotated[str, typer.Argument(help="nanogpt, gpt2, resnet50, captions, or zoo: nearly 200 models, each judged and timed")],
    compilers: Annotated[str, typer.Option(
        help="comma-separated: eager, minicompile, torch; the last two may have a mode, what is compiled besides the model, or both: "
             "minicompile:step, torch:reduce-overhead+optimizer")] = "eager,minicompile,torch",
    steps: Annotated[Optional[int], typer.Option(help="training steps per compiler (not of the zoo)")] = None,
    dtype: Annotated[Optional[str], typer.Option(help="fp32, tf32 or bf16; the zoo's bf16 is autocast")] = None,
    device: Annotated[Optional[str], typer.Option(help="cpu or cuda; default: cuda if it is there")] = None,
    data: Annotated[Optional[str], typer.Option(help='text file, or "shakespeare" to fetch it')] = None,
    out: Annotated[str, typer.Option(help="folder for report.html, plots and result.json")] = "bench-results",
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table and a report")] = False,
    profile: Annotated[bool, typer.Option(help="also record where a step's GPU time goes")] = False,
    models: Annotated[str, typer.Option(help="zoo: patterns of names, e.g. 'hf/bert,timm/*'")] = "*",
    works: Annotated[str, typer.Option(help="zoo: training, inference or both")] = "training,inference",
    limit: Annotated[Optional[int], typer.Option(help="zoo: so many models")] = None,
    jobs: Annotated[Optional[int], typer.Option(help="zoo: processes at once on each device")] = None,
    seconds: Annotated[float, typer.Option(help="zoo: seconds of timing each work; 0: only correctness")] = 1.0,
    timeout: Annotated[float, typer.Option(help="zoo: seconds for a model under a compiler")] = 300.0,
    sizes: Annotated[int, typer.Option(help="zoo: at how many batch sizes each is judged, up to 3")] = 3,
    total: Annotated[float, typer.Option(help="zoo: seconds for the run; the next one goes on")] = float("inf"),
    fresh: Annotated[bool, typer.Option("--fresh", help="zoo: forget what an earlier run finished")] = False,
):
    """Train a model under several compilers, one after the other, and compare; or run a zoo of models."""
    if work == "zoo":
        from .bench.zoo.run import bench_zoo
        record = bench_zoo(compilers=compilers, models=models, works=works, limit=limit, dtype=dtype, device=device, jobs=jobs,
                           seconds=seconds, timeout=timeout, sizes=sizes, total=total, fresh=fresh, out=out, json_only=json)
        bad = {"wrong", "error", "crash", "timeout"}
        raise typer.Exit(any(r["verdict"] in bad for r in record["results"] if r["compiler"].startswith("minicompile")))
    from .bench.run import bench as run_bench
    record = run_bench(work, compilers=compilers, steps=steps, dtype=dtype, device=device, data=data, out=out,
                       json_only=json, profile=profile)
    if any("error" in r for r in record["results"]):
        raise typer.Exit(1)


@app.command()
def explain(
    target: Target,
    arguments: Arguments = None,
    backend: Annotated[Optional[str], typer.Option(help='such as "eager", which stops after capture')] = None,
    mode: Annotated[Optional[str], typer.Option(help="default or reduce-overhead")] = None,
    fullgraph: Annotated[bool, typer.Option("--fullgraph", help="a graph break is an error")] = False,
    html: Annotated[Optional[str], typer.Option(help="write it to this HTML file instead")] = None,
):
    """Compile a function, call it once, and say what was made of it: graphs, breaks, guards, kernels, times."""
    from .tools import standin
    from .tools.explain import explain as explained
    from .tools.target import load
    standin.install()
    function, args, kwargs = load(target, arguments or [])
    found = explained(function, backend=backend, mode=mode, fullgraph=fullgraph)(*args, **kwargs)
    if html is None:
        print(found)
    else:
        pathlib.Path(html).write_text(found._repr_html_())


@app.command()
def explore(
    target: Target,
    arguments: Arguments = None,
    mode: Annotated[Optional[str], typer.Option(help="default or reduce-overhead")] = None,
    dynamic: Annotated[Optional[bool], typer.Option(help="as for compile")] = None,
    fullgraph: Annotated[bool, typer.Option("--fullgraph", help="a graph break is an error")] = False,
    out: Annotated[str, typer.Option(help="the page, one HTML file")] = "explore.html",
    against: Annotated[Optional[str], typer.Option(
        help="show beside it: an earlier page of the explorer, or FILE:FUNCTION, called with the same arguments")] = None,
    against_mode: Annotated[Optional[str], typer.Option(help="show beside it what this mode makes of the same call")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="neither time kernels nor compare stages with eager")] = False,
):
    """Write a page in which each line of each stage, from source to kernel, leads to what it was made from."""
    from .tools import standin
    from .tools.explain import explain as explained
    from .tools.explore import explore as write, recording_of
    from .tools.target import load
    if against is not None and against_mode is not None:
        raise MinicompileError("--against and --against-mode each name the version to be shown beside it: give one of them.")
    standin.install()

    def recorded(target, mode):
        function, args, kwargs = load(target, arguments or [])
        found = explained(function, mode=mode, fullgraph=fullgraph, dynamic=dynamic)(*args, **kwargs)
        return found, f"{found.name}, mode {mode}" if against_mode else found.name

    before = against
    if against is not None and not against.endswith(".html") or against_mode is not None:
        found, title = recorded(against if against is not None else target, against_mode or mode)
        before = recording_of(found, not quick, not quick, title)
    found, title = recorded(target, mode)
    print(write(found, out, against=before, measured=not quick, checked=not quick, title=title.replace("None", "default")))


@app.command()
def bisect(
    target: Target,
    arguments: Arguments = None,
    dynamic: Annotated[Optional[bool], typer.Option(help="as for compile")] = None,
    mode: Annotated[Optional[str], typer.Option(help="as for compile")] = None,
    seconds: Annotated[float, typer.Option(help="limit for one rung, and for reducing")] = 120.0,
    out: Annotated[str, typer.Option(help="folder of the script that shows the difference")] = "bisect-results",
):
    """Find the first stage that changes an answer, and write a few lines that show it."""
    from .tools.bisect import bisect_file
    found = bisect_file(target, arguments or [], seconds=seconds, out=out, dynamic=dynamic, mode=mode)
    print(found)
    if found.largest is not None:
        raise typer.Exit(1)


def main():
    """Entry point. `run` bypasses the option parser: what follows the script's name is the script's own."""
    from .tools import standin
    try:
        if sys.argv[1:2] == ["run"] and sys.argv[2:3] != ["--help"]:
            standin.run_script(sys.argv[2:])
        else:
            app()
    except MinicompileError as error:
        sys.exit(f"minicompile: {error}")


@app.command("run", help="Run SCRIPT with ARGS unmodified; in it, torch.compile means minicompile.compile.")
def run_help(script: str, args: Annotated[Optional[list[str]], typer.Argument()] = None):
    from .tools import standin
    standin.run_script([script, *(args or [])])


if __name__ == "__main__":
    main()
