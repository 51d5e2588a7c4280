"""`python -m minicompile run`: unmodified scripts in which torch.compile means minicompile.compile."""
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch

import minicompile
from minicompile.errors import MinicompileError
from minicompile.tools import target

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(minicompile.__file__).parents[1]


@pytest.fixture
def run(tmp_path):
    def run(text, *arguments, status=0):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        done = subprocess.run([sys.executable, "-m", "minicompile", "run", str(script), *arguments], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
        assert done.returncode == status, done.stderr
        return done.stdout.splitlines(), done.stderr
    return run


def test_arguments_and_neighbours(run, tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 5\n")
    out, _ = run("import sys, neighbour\nprint(sys.argv[1:], __name__, neighbour.value)\n", "--help", "-x", "run")
    assert out == ["['--help', '-x', 'run'] __main__ 5"]
    run("import sys\nsys.exit(3)\n", status=3)


def test_every_way_to_ask(run):
    out, err = run("""
        import torch
        from minicompile.driver import counters
        import minicompile
        def seen(label):
            print(label, counters.graphs)
            torch.compiler.reset()

        @torch.compile
        def f(x):
            return x.sin() + 1
        f(torch.ones(3)); seen("decorator")

        @torch.compile(backend="inductor", options={"triton.cudagraphs": False, "shape_padding": True})
        def g(x):
            return x.cos() + 1
        assert torch.equal(g(torch.zeros(3)), torch.full((3,), 2.0)); seen("inductor")

        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        x = torch.randn(2, 3)
        expected = model(x)
        model.compile()
        torch.testing.assert_close(model(x), expected); seen("Module.compile")

        @torch.compiler.disable
        def plain(x):
            assert not torch.compiler.is_compiling()
            return x + 1
        assert torch.equal(torch.compile(lambda x: plain(x))(x), x + 1)
        seen("disable")

        step = torch.compile(torch.nn.Linear(3, 1), mode="default", fullgraph=True, dynamic=True)
        step(x).sum().backward(); seen("module")
        assert torch.compiler.compile is torch.compile and step.weight.grad is not None
    """)
    assert out == ["decorator 1", "inductor 1", "Module.compile 1", "disable 0", "module 1"]
    assert err.count("shape_padding") == 1


def test_settings_of_torchs_own_compiler_do_no_harm(run):
    out, _ = run("""
        import torch
        import torch._dynamo
        torch._dynamo.config.suppress_errors = True
        torch._inductor.config.max_autotune = False
        torch.set_float32_matmul_precision("high")

        @torch._dynamo.disable
        def plain(x):
            return x * 3

        @torch.compile
        def f(x):
            return plain(x.sin()) + 1
        x = torch.ones(4)
        print(torch.allclose(f(x), x.sin() * 3 + 1), torch.compile.__module__)
    """)
    assert out == ["True minicompile.tools.standin"]


def test_training_and_growing_sequences(run):
    """A sequence model trains as in eager, and generates token after token without compiling anew for each length."""
    script = """
        import sys, torch, torch.nn as nn, torch.nn.functional as F
        compiled = sys.argv[1] == "True"
        torch.manual_seed(0)
        torch.set_num_threads(1)

        class Model(nn.Module):
            def __init__(self, width=16, vocab=11, block=24):
                super().__init__()
                self.embed, self.place, self.block = nn.Embedding(vocab, width), nn.Embedding(block, width), block
                self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, vocab)
                self.norm = nn.LayerNorm(width)

            def forward(self, tokens, targets=None):
                b, t = tokens.size()
                assert t <= self.block, f"{t} tokens, at most {self.block}"
                x = self.embed(tokens) + self.place(torch.arange(0, t, dtype=torch.long, device=tokens.device))
                q, k, v = self.qkv(self.norm(x)).split(x.size(-1), dim=2)
                q, k, v = (a.view(b, t, 2, -1).transpose(1, 2) for a in (q, k, v))
                x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(b, t, -1)
                if targets is not None:
                    logits = self.out(x)
                    return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
                return self.out(x[:, [-1], :]), None

        model = Model()
        if compiled:
            import minicompile
            minicompile.config.raise_on_internal_error = True
            model = torch.compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.randint(11, (4, 13))
        inputs, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        for _ in range(10):
            _, loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            print(f"{loss.item():.4f}")
        model.eval()
        tokens = data[:1, :1]
        with torch.no_grad():
            for _ in range(40):
                context = tokens if tokens.size(1) <= 24 else tokens[:, -24:]
                logits, _ = model(context)
                tokens = torch.cat((tokens, logits[:, -1, :].argmax(-1, keepdim=True)), dim=1)
        print(tokens[0].tolist())
        if compiled:
            from minicompile.driver import counters
            print(counters.graphs, file=sys.stderr)
    """
    ours, err = run(script, "True")
    eager, _ = run(script, "False")
    assert ours[-1] == eager[-1], "the same tokens"
    assert max(abs(float(a) - float(b)) for a, b in zip(ours[:-1], eager[:-1])) <= 2e-4
    assert int(err.split()[-1]) <= 4, "training, and generation at length 1 and at a symbolic length"


MODEL = """
import torch
SIZE = 6

def step(x, scale=1.0):
    print("seen")
    return (x * scale).relu().sum()

@torch.compile
def marked(x):
    return x + 1

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)

if __name__ == "__main__":
    raise SystemExit("run as a script")
"""


def explained(folder, *arguments, status=0):
    (folder / "model.py").write_text(MODEL)
    done = subprocess.run([sys.executable, "-m", "minicompile", "explain", *arguments], capture_output=True, text=True, cwd=folder,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_explain_a_function_of_a_file(tmp_path):
    text = explained(tmp_path, "model.py:step", "torch.randn(SIZE, 4)", "scale=2.0", "--backend", "eager")
    assert "step: 1 graph, 1 graph break" in text and "model.py:6" in text and "seen" in text
    assert "marked: 1 graph, 0 graph breaks" in explained(tmp_path, "model:marked", "torch.ones(3)", "--backend", "eager")
    page = tmp_path / "page.html"
    assert explained(tmp_path, "model.py:Model(width=4)", "torch.ones(2, 4)", "--html", str(page)) == "" and "Linear" in page.read_text()


@pytest.mark.parametrize("arguments, says", [
    (["model.py"], "Write FILE:FUNCTION"), (["nothing.py:f"], "does not exist"), (["model.py:nothing"], "no attribute|not defined"),
    (["model.py:step"], "missing a required argument: 'x'"), (["model.py:step", "torch.randn("], r"torch.randn\( makes no sense"),
    (["model.py:SIZE"], "cannot be called"), (["no.such.module:f"], "neither a Python file nor a module")])
def test_a_target_that_makes_no_sense_is_refused_in_a_line(tmp_path, monkeypatch, arguments, says):
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", minicompile.compile)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(MinicompileError, match=says) as caught:
        target.load(arguments[0], arguments[1:])
    assert "\n" not in str(caught.value)


def test_the_command_says_it_without_a_traceback(tmp_path):
    assert explained(tmp_path, "nothing.py:f", status=1) == "minicompile: The file 'nothing.py' does not exist.\n"
