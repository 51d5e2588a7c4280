"""Command line: `python -m minicompile bench nanogpt`, `python -m minicompile run SCRIPT ARGS...`."""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer

from .errors import MinicompileError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="minicompile: a torch.compile written from scratch, as a book.")


@app.command()
def bench(
    work: Annotated[str, typer.Argument(help="nanogpt, gpt2 or resnet50")],
    compilers: Annotated[str, typer.Option(
        help="comma-separated: eager, minicompile[:MODE], torch[:MODE]")] = "eager,minicompile,torch",
    steps: Annotated[Optional[int], typer.Option(help="training steps per compiler")] = None,
    dtype: Annotated[Optional[str], typer.Option(help="fp32, tf32 or bf16")] = None,
    device: Annotated[Optional[str], typer.Option(help="cpu or cuda; default: cuda if it is there")] = None,
    data: Annotated[Optional[str], typer.Option(help='text file, or "shakespeare" to fetch it')] = None,
    out: Annotated[str, typer.Option(help="folder for report.html, plots and result.json")] = "bench-results",
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table and a report")] = False,
    profile: Annotated[bool, typer.Option(help="also record where a step's GPU time goes")] = False,
):
    """Train a model under several compilers, one after the other, and compare."""
    from .bench.run import bench as run_bench
    record = run_bench(work, compilers=compilers, steps=steps, dtype=dtype, device=device, data=data, out=out,
                       json_only=json, profile=profile)
    if any("error" in r for r in record["results"]):
        raise typer.Exit(1)


def run_script(arguments: list[str]) -> None:
    """Run a Python script as `__main__` with `torch.compile` standing for `minicompile.compile`."""
    from .standin import run_script as run
    run(arguments)


def main():
    """Entry point. `run` bypasses the option parser: what follows the script's name is the script's own."""
    try:
        if sys.argv[1:2] == ["run"] and sys.argv[2:3] != ["--help"]:
            run_script(sys.argv[2:])
        else:
            app()
    except MinicompileError as error:
        sys.exit(f"minicompile: {error}")


@app.command("run", help="Run SCRIPT with ARGS unmodified; in it, torch.compile means minicompile.compile.")
def run_help(script: str, args: Annotated[Optional[list[str]], typer.Argument()] = None):
    run_script([script, *(args or [])])


if __name__ == "__main__":
    main()
