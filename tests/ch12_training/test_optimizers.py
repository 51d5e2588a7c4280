"""Whole training steps as one graph: every optimizer that does not decide on values, compared with eager step by step."""
import collections
import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_optimizers import optim_db

import minicompile
from minicompile import logs
from minicompile.ch02_guards import codegen
from minicompile.tools.explain import explain

pytestmark = pytest.mark.usefixtures("fresh")

CONFIGURATIONS = [
    ("SGD", {}), ("SGD", dict(momentum=0.9, weight_decay=0.1)), ("SGD", dict(momentum=0.9, nesterov=True, foreach=True)),
    ("SGD", dict(maximize=True, foreach=False)), ("Adam", {}), ("Adam", dict(amsgrad=True, maximize=True)),
    ("Adam", dict(foreach=True, weight_decay=0.1)), ("Adam", dict(fused=True)), ("AdamW", dict(foreach=True, amsgrad=True)),
    ("AdamW", dict(weight_decay=0.1)), ("AdamW", dict(fused=True, weight_decay=0.1)), ("RMSprop", dict(momentum=0.5, centered=True)),
    ("RMSprop", dict(foreach=True)), ("Adagrad", {}), ("Adagrad", dict(foreach=True, lr_decay=0.1)),
    ("Adagrad", dict(fused=True, weight_decay=0.1, lr_decay=0.1)), ("Adadelta", {}),
    ("Adadelta", dict(foreach=True)), ("Adamax", {}), ("Adamax", dict(foreach=True)),
    ("RAdam", {}), ("RAdam", dict(foreach=True)), ("Rprop", {}), ("Rprop", dict(foreach=True)),
    ("NAdam", dict(foreach=False)), ("NAdam", dict(foreach=True, weight_decay=0.1)),
    ("ASGD", dict(foreach=False)), ("ASGD", dict(foreach=True)),
]
TOLERANCE = dict(rtol=1e-4, atol=1e-5)


def network():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))


def training(net, optimizer):
    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm
    return step


def batches(count):
    return [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(count)]


def compare(net, optimizer, twin, other, where):
    for p, q in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, **TOLERANCE, msg=lambda m: f"{where}, parameter: {m}")
        torch.testing.assert_close(p.grad, q.grad, **TOLERANCE, msg=lambda m: f"{where}, gradient: {m}")
        one, two = optimizer.state[p], other.state[q]
        assert one.keys() == two.keys(), where
        for key, value in two.items():
            assert type(one[key]) is type(value), (where, key)
            if isinstance(value, torch.Tensor):
                assert one[key].dtype == value.dtype and one[key].device == value.device
                torch.testing.assert_close(one[key], value, **TOLERANCE, msg=lambda m: f"{where}, {key}: {m}")


@pytest.mark.parametrize("rung", ["eager", "default"])
@pytest.mark.parametrize("name,options", CONFIGURATIONS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain")
def test_steps_as_eager(name, options, rung):
    net = network()
    twin = copy.deepcopy(net)
    make = lambda n: getattr(torch.optim, name)(n.parameters(), lr=0.01, **options)
    optimizer, other = make(net), make(twin)
    compiled = minicompile.compile(training(net, optimizer), backend=rung, fullgraph=True)
    eager = training(twin, other)
    for number, (x, y) in enumerate(batches(8)):
        if number in (3, 5):
            for o in (optimizer, other):
                o.param_groups[0]["lr"] *= 0.5
        found, expected = compiled(x, y), eager(x, y)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, **TOLERANCE)
        compare(net, optimizer, twin, other, f"step {number}")
        net.load_state_dict(twin.state_dict())                              # each step begins as eager's
        state = copy.deepcopy(other.state_dict())
        for p, q in zip(net.parameters(), twin.parameters()):
            for key, value in other.state[q].items():
                if isinstance(value, torch.Tensor):
                    optimizer.state[p][key].copy_(value)
        assert state["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]


def versions_of(function, calls, **settings) -> int:
    """How many times `function`, compiled, is compiled over `calls`."""
    from minicompile.driver import counters
    before = counters.graphs
    compiled = minicompile.compile(function, fullgraph=True, **settings)
    for arguments in calls:
        compiled(*arguments)
    return counters.graphs - before


def test_all_steps_are_one_version():
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = training(net, optimizer)

    def calls():
        for arguments in batches(12):
            yield arguments
            scheduler.step()
    assert versions_of(step, calls()) == 1


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_steps_of_any_batch_size_are_one_version(name):
    net = network()
    step = training(net, getattr(torch.optim, name)(net.parameters(), lr=0.1, **(dict(momentum=0.9) if name == "SGD" else {})))
    calls = [(torch.randn(n, 4), torch.randint(0, 3, (n,))) for n in (6, 5, 9, 6)]
    assert versions_of(step, calls, dynamic=True) == 1


LEARNING_RATES = {
    "a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1)), "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "fused, a tensor": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1), fused=True),
    "SGD, fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "SGD, a tensor": lambda ps: torch.optim.SGD(ps, lr=torch.tensor(0.1), foreach=False),
    "SGD, lists, a tensor": lambda ps: torch.optim.SGD(ps, lr=torch.tensor(0.1), foreach=True),
    "RMSprop, a tensor": lambda ps: torch.optim.RMSprop(ps, lr=torch.tensor(0.01), foreach=False),
}


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("name", LEARNING_RATES)
def test_a_learning_rate_that_a_scheduler_changes(name, inside):
    def make():
        net = network()
        optimizer = LEARNING_RATES[name](net.parameters())
        scheduler, step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), training(net, optimizer)

        def both(x, y):
            result = step(x, y)
            scheduler.step()
            return result
        return net, optimizer, scheduler, both if inside else step
    (net, optimizer, scheduler, step), (twin, other, its, eager) = make(), make()
    twin.load_state_dict(net.state_dict())

    def calls():
        for number, arguments in enumerate(batches(6)):
            yield arguments
            eager(*arguments)
            if not inside:
                scheduler.step(), its.step()
            torch.testing.assert_close(optimizer.param_groups[0]["lr"], other.param_groups[0]["lr"])
            compare(net, optimizer, twin, other, f"step {number}")
    assert versions_of(step, calls()) == 1


STATE_AT_ONCE = [(name, options) for name, options in CONFIGURATIONS if name != "RAdam"]       # which decides by its count of steps


@pytest.mark.parametrize("name,options", STATE_AT_ONCE, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain")
def test_the_first_step_is_a_step_like_the_others(name, options):
    """To the last bit, with gradients that are zeros of either sign."""
    def make():
        p = torch.nn.Parameter(torch.tensor([1.0, -0.0, 0.0, 2.0, -0.0, 0.0]))
        optimizer = getattr(torch.optim, name)([p], lr=0.5, **options)

        def step(x):
            optimizer.zero_grad()
            (p * x).sum().backward()
            optimizer.step()
        return p, optimizer, step
    (p, optimizer, step), (q, other, eager) = make(), make()
    compiled = minicompile.compile(step, backend="eager", fullgraph=True)

    def calls():
        for number in range(3):
            x = torch.tensor([1.0, 0.0, -0.0, -3.0, -0.0, 0.0]) * (1 - number)
            yield x,
            eager(x)
            for one, two in ((p, q), *((optimizer.state[p][k], v) for k, v in other.state[q].items())):
                torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
                assert torch.equal(torch.signbit(one), torch.signbit(two))
            assert optimizer.state[p].keys() == other.state[q].keys()
    for arguments in calls():
        compiled(*arguments)
    with minicompile.set_stance("fail_on_recompile"):
        compiled(torch.ones(6))


@pytest.mark.parametrize("name, options", [("SGD", dict(momentum=0.9)), ("Adam", {}), ("AdamW", dict(foreach=True)), ("Adagrad", {}),
                                           ("RMSprop", dict(centered=True))])
@pytest.mark.parametrize("whole", [True, False])
def test_a_new_model_with_a_new_optimizer_is_no_new_version(name, options, whole, monkeypatch):
    """What has state is asked for by what leads to the parameters, and a state that is not there yet is made again."""
    def step(net, optimizer, x, y):
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def stepping(net, optimizer, x, y):
        F.cross_entropy(net(x), y).backward()
        alone(optimizer)
        optimizer.zero_grad()

    fast, alone = minicompile.compile(step, backend="eager"), minicompile.compile(lambda optimizer: optimizer.step(), backend="eager")
    gone, recompiles = [], []
    monkeypatch.setattr(logs, "watchers", [lambda kind, **data: recompiles.append(data["why"]) if kind == "recompile" else None])
    for round in range(4):
        net = network()
        if round == 3:
            net.requires_grad_(False)[0].requires_grad_()          # fewer gradients than the first had: another version
        twin = copy.deepcopy(net)
        optimizer, other = (getattr(torch.optim, name)(n.parameters(), lr=0.1, **options) for n in (net, twin))
        for x, y in batches(3):
            (fast if whole else stepping)(net, optimizer, x, y)
            step(twin, other, x, y)
            compare_states(net, optimizer, twin, other)
        gone += [weakref.ref(p) for p in net.parameters()]
    assert len(recompiles) == 1
    del net, optimizer
    gc.collect()
    assert not any(ref() is not None for ref in gone), "a version keeps parameters"


def test_an_optimizer_for_each_step_is_met_by_one_function_of_guards(monkeypatch):
    """Not by evaluating guard after guard, which is for messages."""
    def step(net, optimizer, x, y):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    net, made, asked = network(), [], []
    twin, fast = copy.deepcopy(net), minicompile.compile(step, backend="eager")
    monkeypatch.setattr(logs, "watchers", [lambda kind, **data: made.append(kind) if kind == "entry" else None])
    for i, (x, y) in enumerate(batches(5)):
        optimizer, other = (torch.optim.SGD(n.parameters(), lr=0.1 / (i + 1), momentum=0.9) for n in (net, twin))
        if i == 1:
            monkeypatch.setattr(codegen, "failing_guards", lambda *args: asked.append(args) or iter(()))
        fast(net, optimizer, x, y)
        step(twin, other, x, y)
        compare_states(net, optimizer, twin, other)
    assert len(made) == 1 and not asked


def compare_states(net, optimizer, twin, other):
    assert len(optimizer.state) == len(other.state)
    for p, q in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, **TOLERANCE)
        one, two = optimizer.state.get(p, {}), other.state.get(q, {})
        assert one.keys() == two.keys()
        for key in two:
            torch.testing.assert_close(one[key], two[key], **TOLERANCE)


def test_states_that_were_exchanged_or_cleared():
    """A state is found by its parameter in every call."""
    net = torch.nn.ModuleList([torch.nn.Linear(3, 3, bias=False) for _ in range(2)])

    def step(net, optimizer, x):
        (net[0](x) - net[1](x) * 2).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    twin, fast = copy.deepcopy(net), minicompile.compile(step, backend="eager")
    optimizer, other = (torch.optim.Adam(n.parameters(), lr=0.1) for n in (net, twin))
    for i in range(9):
        x = torch.randn(4, 3)
        fast(net, optimizer, x)
        step(twin, other, x)
        compare_states(net, optimizer, twin, other)
        for o, n in ((optimizer, net), (other, twin)):
            a, b = n.parameters()
            if i == 2:
                o.state[a], o.state[b] = o.state[b], o.state[a]
            if i == 4:
                o.state.clear()
            if i == 5:
                o.state = collections.defaultdict(dict, {b: o.state[b], a: o.state[a]})
            if i == 6:
                del o.state[a]


@pytest.mark.parametrize("groups", [lambda group: [group["params"]], lambda group: [{"lr": 0.1}], lambda group: [], lambda group: None])
def test_groups_of_another_make_raise_what_they_raise_in_eager(groups):
    def step(net, optimizer, x):
        net(x).sum().backward()
        optimizer.step()

    def errors(step):
        found = []
        for strange in (False, True):
            net = torch.nn.Linear(3, 3)
            optimizer = torch.optim.Adam(net.parameters())
            if strange:
                optimizer.param_groups = groups(optimizer.param_groups[0])
            try:
                step(net, optimizer, torch.ones(2, 3))
                found.append(None)
            except Exception as error:
                found.append((type(error), str(error)))
        return found
    assert errors(minicompile.compile(step, backend="eager")) == errors(step)


def test_a_program_that_looks_at_the_state_sees_what_is_there():
    def make():
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

        def step(x, y):
            known = len(optimizer.state)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            return known, len(optimizer.state)
        return net, optimizer, step
    net, optimizer, step = make()
    compiled = minicompile.compile(step, fullgraph=True)
    assert [compiled(*arguments) for arguments in batches(3)] == [(0, 4), (4, 4), (4, 4)]


@pytest.mark.parametrize("where", ["backend", "graph", "break", "hook"])
def test_a_first_step_that_is_not_taken_leaves_no_state(where):
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def step(x, y):
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        if where == "break":
            torch._dynamo.graph_break()
        return x + 1

    def refuse(*args):
        raise ValueError(f"no {where}")
    if where == "hook":
        optimizer.register_step_pre_hook(refuse)
    backend = {"backend": lambda gm, inputs: refuse(), "graph": lambda gm, inputs: refuse}.get(where, "eager")
    compiled = minicompile.compile(step, backend=backend, fullgraph=where == "break")
    (x, y), = batches(1)
    with pytest.raises((ValueError, minicompile.MinicompileError), match=f"no {where}|breaks"):
        compiled(x, y)
    assert not optimizer.state


def test_steps_with_a_gradient_and_without():
    """A parameter gets its state when it gets its first gradient."""
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    optimizer, other = (torch.optim.AdamW([{"params": n[0].parameters()}, {"params": n[2].parameters(), "lr": 0.1}]) for n in (net, twin))

    def step(net, optimizer, x, both):
        optimizer.zero_grad()
        hidden = net[0](x)
        (net[2](hidden) if both else hidden).square().mean().backward()
        optimizer.step()
    compiled = minicompile.compile(step, fullgraph=True)
    for both in (False, False, True, False, True):
        x = torch.randn(6, 4)
        compiled(net, optimizer, x, both), step(twin, other, x, both)
        for p, q in zip(net.parameters(), twin.parameters()):
            torch.testing.assert_close(p, q, **TOLERANCE)
            assert (p.grad is None) is (q.grad is None) and (p in optimizer.state) is (q in other.state)
            assert all(torch.equal(optimizer.state[p][k], v) for k, v in other.state.get(q, {}).items() if k == "step")


def last(s, loss, o):
    s.step()
    return loss.detach(), loss


def asked(s, loss, o):
    s.step()
    return loss.detach(), s.get_last_lr()


def twice(s, loss, o):
    s.step()
    s.step()
    return loss


def rate(s, loss, o):
    s.step()
    return o.param_groups[0]["lr"] * loss.detach()


def caught(s, loss, o):
    try:
        s.step()
    except ZeroDivisionError:
        return loss.detach() * 0
    return loss.detach()


@pytest.mark.parametrize("end", [last, asked, twice, rate, caught])
@pytest.mark.parametrize("kind", ["float", "tensor", "raises"])
def test_a_scheduler_is_stepped_where_the_program_steps_it(kind, end):
    def make():
        torch.manual_seed(0)
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5) if kind == "tensor" else 0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (3 - n) if kind == "raises" else 0.5 ** n)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return end(scheduler, loss, optimizer)
        return net, optimizer, scheduler, step

    def outcome(step, *arguments):
        try:
            return step(*arguments)
        except ZeroDivisionError as error:
            return torch.tensor(float(len(str(error))))
    (net, optimizer, scheduler, step), (twin, other, its, eager) = make(), make()
    compiled = minicompile.compile(step)
    for number, arguments in enumerate(batches(5)):
        torch.testing.assert_close(outcome(compiled, *arguments), outcome(eager, *arguments), **TOLERANCE)
        torch.testing.assert_close(scheduler.state_dict()["_last_lr"], its.state_dict()["_last_lr"])
        assert scheduler.last_epoch == its.last_epoch and scheduler._step_count == its._step_count
        compare(net, optimizer, twin, other, f"step {number}")


def test_a_scheduler_that_is_made_for_a_compiled_step():
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    optimizer, other = torch.optim.AdamW(net.parameters(), lr=0.1), torch.optim.AdamW(twin.parameters(), lr=0.1)
    optimizer.step = minicompile.compile(optimizer.step, fullgraph=True)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, other)]
    for number, (x, y) in enumerate(batches(4)):
        for n, o, scheduler in zip((net, twin), (optimizer, other), schedulers):
            o.zero_grad()
            F.cross_entropy(n(x), y).backward()
            o.step()
            scheduler.step()
        compare(net, optimizer, twin, other, f"step {number}")


@pytest.mark.parametrize("fused", [True, False])
def test_gradient_scalers(fused):
    """Infinite gradients skip a step. Where the optimizer asks the device for that, it is one graph; else the graph breaks."""
    def make():
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach(), norm
        return net, optimizer, scaler, step
    (net, optimizer, scaler, step), (twin, other, its, eager) = make(), make()
    twin.load_state_dict(net.state_dict())
    compiled = minicompile.compile(step, fullgraph=fused)
    for number, (x, y) in enumerate(batches(7)):
        if number == 3:
            x[0, 0] = torch.inf
        torch.testing.assert_close(compiled(x, y), eager(x, y), **TOLERANCE, equal_nan=True)
        for p, q in zip(net.parameters(), twin.parameters()):
            torch.testing.assert_close(p, q, **TOLERANCE)
        assert scaler.state_dict() == its.state_dict(), number
        for p, q in zip(net.parameters(), twin.parameters()):
            torch.testing.assert_close(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"], **TOLERANCE)
            assert optimizer.state[p]["step"] == other.state[q]["step"]
    assert (explain(step)(*batches(1)[0]).graph_count == 1) is fused


def test_a_loaded_state_is_used():
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    optimizer, other = torch.optim.Adam(net.parameters(), lr=0.01), torch.optim.Adam(twin.parameters(), lr=0.01)
    compiled, eager = minicompile.compile(training(net, optimizer), fullgraph=True), training(twin, other)
    for number, (x, y) in enumerate(batches(6)):
        if number == 3:
            saved = copy.deepcopy(other.state_dict())
            saved["state"][0]["step"] += 7
            optimizer.load_state_dict(copy.deepcopy(saved))
            other.load_state_dict(copy.deepcopy(saved))
            net.load_state_dict(twin.state_dict())
        compiled(x, y), eager(x, y)
        compare(net, optimizer, twin, other, f"step {number}")


def test_groups_and_frozen_parameters():
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    for n in (net, twin):
        n[0].bias.requires_grad_(False)
    make = lambda n: torch.optim.AdamW([{"params": n[0].parameters(), "lr": 0.1}, {"params": n[2].parameters(), "weight_decay": 0.3}])
    optimizer, other = make(net), make(twin)

    def training(net, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        return step
    compiled, eager = minicompile.compile(training(net, optimizer), fullgraph=True), training(twin, other)
    for x, y in batches(4):
        compiled(x, y), eager(x, y)
        for p, q in zip(net.parameters(), twin.parameters()):
            torch.testing.assert_close(p, q, **TOLERANCE)


def test_the_step_alone():
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    optimizer, other = torch.optim.AdamW(net.parameters(), lr=0.1), torch.optim.AdamW(twin.parameters(), lr=0.1)
    optimizer.step = minicompile.compile(optimizer.step, fullgraph=True)
    for x, y in batches(5):
        for n, o in ((net, optimizer), (twin, other)):
            F.cross_entropy(n(x), y).backward()
            o.step()
            o.zero_grad()
        for p, q in zip(net.parameters(), twin.parameters()):
            torch.testing.assert_close(p, q, **TOLERANCE)


def test_hooks_of_a_step_run():
    net = network()
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    optimizer.register_step_post_hook(lambda *args: seen.append(1))
    compiled = minicompile.compile(training(net, optimizer))
    for x, y in batches(3):
        compiled(x, y)
    assert len(seen) == 3


@pytest.mark.parametrize("change", [lambda step: step.add_(0.5), lambda step: step.fill_(2.0**24), lambda step: step.data.add_(3)])
def test_counters_that_are_changed_from_outside(change):
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    optimizer, other = torch.optim.Adam(net.parameters(), lr=0.01), torch.optim.Adam(twin.parameters(), lr=0.01)
    compiled, eager = minicompile.compile(training(net, optimizer)), training(twin, other)
    for number, (x, y) in enumerate(batches(7)):
        if number in (3, 5):
            for n, o in ((net, optimizer), (twin, other)):
                change(o.state[n[0].weight]["step"])
        compiled(x, y), eager(x, y)
        compare(net, optimizer, twin, other, f"step {number}")


def test_two_steps_in_one_call():
    """The second step reads the counters again."""
    net = network()
    twin = copy.deepcopy(net)
    one, two = (torch.optim.Adam(n.parameters(), lr=torch.tensor(0.05), foreach=False) for n in (net, twin))

    def step(net, optimizer, x):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.step()
    compiled = minicompile.compile(step, backend="eager", fullgraph=True)
    for x, _ in batches(4):
        compiled(net, one, x)
        step(twin, two, x)
        compare(net, one, twin, two, "two steps")


def test_a_counter_that_two_parameters_share():
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    optimizer, other = torch.optim.Adam(net.parameters(), lr=0.01), torch.optim.Adam(twin.parameters(), lr=0.01)
    compiled, eager = minicompile.compile(training(net, optimizer)), training(twin, other)
    for number, (x, y) in enumerate(batches(6)):
        if number == 2:
            for n, o in ((net, optimizer), (twin, other)):
                o.state[n[2].weight]["step"] = o.state[n[0].weight]["step"].detach()
        compiled(x, y), eager(x, y)
        compare(net, optimizer, twin, other, f"step {number}")


def test_old_gradients_are_gone_before_the_graph_runs():
    net, alive = network(), []

    def spy(gm, inputs):
        def run(*args):
            alive.append([p.grad is not None for p in net.parameters()])
            return gm(*args)
        return run
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = minicompile.compile(training(net, optimizer), backend=spy, fullgraph=True)
    for x, y in batches(3):
        compiled(x, y)
    assert alive == [[False] * 4] * 3 and all(p.grad is not None for p in net.parameters())


DATABASE = {info.optim_cls.__name__: info for info in optim_db}


def forms(info):
    """What an optimizer is made with: PyTorch's own samples, each in every implementation."""
    for sample in info.optim_inputs_func(device="cpu"):
        yield sample.kwargs
        for how in {"foreach", "fused"} & set(info.supported_impls) if not sample.kwargs.keys() & {"foreach", "fused"} else ():
            yield {**sample.kwargs, how: True}


@pytest.mark.parametrize("name", sorted(DATABASE.keys() - {"Adafactor", "LBFGS", "SparseAdam"}))      # these decide on values
def test_every_optimizer_of_the_database_is_one_graph(name):
    for options in forms(DATABASE[name]):
        minicompile.reset()
        net = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=name != "Muon") for _ in range(2)))
        twin = copy.deepcopy(net)
        optimizer, other = (DATABASE[name].optim_cls(n.parameters(), **options) for n in (net, twin))
        compiled = minicompile.compile(training(net, optimizer), backend="eager", fullgraph=True)
        for number, (x, y) in enumerate(batches(3)):
            compiled(x, y), training(twin, other)(x, y)
            compare(net, optimizer, twin, other, f"{options}, step {number}")


@pytest.mark.parametrize("start", [1.0, 0.1, 2.0**24 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_a_tensor_is_rounded_as_the_tensor_is(start, dtype, monkeypatch):
    from minicompile.ch12_training import optimizers
    monkeypatch.setattr(optimizers, "is_library", lambda filename: True)

    def f(x, count, by):
        count *= by
        count += 1
        count.add_(by)
        return x * count.item(), count + 0
    compiled = minicompile.compile(f, fullgraph=True, dynamic=True)
    for by in (0.9, 1.1, 3.3):
        found, expected = ([t.clone() for t in (torch.ones(2, dtype=torch.float64), torch.tensor(start, dtype=dtype))] for _ in range(2))
        for a, b in zip(compiled(*found, by), f(*expected, by)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_optimizers_that_compute_with_other_values_still_work(name):
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    optimizer, other = getattr(torch.optim, name)(net.parameters()), getattr(torch.optim, name)(twin.parameters())
    x, y = batches(1)[0]

    def run(n, o):
        def closure():
            o.zero_grad()
            loss = F.cross_entropy(n(x), y)
            loss.backward()
            return loss
        return o.step(closure)
    compiled = minicompile.compile(run)
    for _ in range(3):
        torch.testing.assert_close(compiled(net, optimizer), run(twin, other), **TOLERANCE)


def differentiated(p, gradient, make):
    """A step that is itself differentiated, for the parameter and for its gradient."""
    p = p.clone()
    p.grad = gradient
    make([p]).step()
    return p


def given_a_gradient(p, gradient, make):
    p = p * 2
    p.grad = gradient * 3
    kept = p.grad
    p.grad = None
    seen = p.grad is None
    p.grad = kept
    return p, seen, p.grad is kept


@pytest.mark.parametrize("rung", ["eager", "default"])
@pytest.mark.parametrize("program", [differentiated, given_a_gradient])
@pytest.mark.parametrize("name", sorted(DATABASE.keys() - {"Adafactor", "ASGD", "LBFGS", "Muon", "SparseAdam"}))
def test_differentiable_optimizers(name, program, rung):
    make = functools.partial(DATABASE[name].optim_cls, lr=0.1, differentiable=True)
    start, slope = (torch.rand(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    results = []
    for function in (program, minicompile.compile(program, backend=rung, fullgraph=True)):
        for _ in range(2):
            found = function(start, slope, make)
            new, *rest = found if isinstance(found, tuple) else [found]
        gradient = None if new.grad is None else new.grad.detach()
        results.append((new.detach(), *rest, gradient, *torch.autograd.grad(new.square().sum(), (start, slope), allow_unused=True)))
    torch.testing.assert_close(*results)


def test_one_graph():
    net = network()
    step = training(net, torch.optim.AdamW(net.parameters()))
    assert explain(step)(*batches(1)[0]).graph_count == 1


def test_a_step_is_one_graph_where_torch_compile_was_used_before(monkeypatch):
    import torch._dynamo
    for owner, name in ((torch.optim.Optimizer, "zero_grad"), (torch.optim.Adam, "_init_group")):      # it does so when it is first used
        monkeypatch.setattr(owner, name, torch._dynamo.disable(getattr(owner, name)))
    net = network()
    step = training(net, torch.optim.Adam(net.parameters()))
    assert explain(step)(*batches(1)[0]).graph_count == 1


def test_parameters_of_several_dtypes():
    def network():
        return torch.nn.ModuleList([torch.nn.Linear(4, 8), torch.nn.Linear(8, 3, dtype=torch.float64)])
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    optimizer, other = (torch.optim.AdamW(n.parameters(), lr=0.01, foreach=True) for n in (net, twin))

    def step(net, optimizer, x, y):
        optimizer.zero_grad()
        F.cross_entropy(net[1](net[0](x).double()), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=True)
        optimizer.step()
        return norm
    compiled = minicompile.compile(step, fullgraph=True)
    for number, (x, y) in enumerate(batches(4)):
        torch.testing.assert_close(compiled(net, optimizer, x, y), step(twin, other, x, y), **TOLERANCE)
        compare(net, optimizer, twin, other, f"step {number}")


def test_foreach_map_and_marks_of_steps():
    from torch._higher_order_ops import foreach_map

    def program(a, b):
        torch.compiler.cudagraph_mark_step_begin()
        return foreach_map(lambda x, y, s: x * y + s, a, b, 3.0), foreach_map(torch.add, a, 2)
    a, b = [torch.randn(3), torch.randn(2, 4)], [torch.randn(3), torch.randn(2, 4)]
    found = minicompile.compile(program, fullgraph=True)(a, b)
    torch.testing.assert_close(found, ([x * y + 3 for x, y in zip(a, b)], [x + 2 for x in a]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", ["rows", "flat", "one"])
def test_ctc_loss_with_lengths_that_are_numbers(form, reduction):
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 5)
    twin = copy.deepcopy(layer)
    inputs, lengths = (10,) if form == "one" else (10, 3), [3] if form == "one" else [3, 2]
    targets = {"rows": torch.tensor([[1, 2, 3], [4, 4, 0]]), "flat": torch.tensor([1, 2, 3, 4, 4]), "one": torch.tensor([1, 2, 3])}[form]

    def program(layer, x):
        loss = F.ctc_loss(layer(x).log_softmax(-1), targets, inputs, lengths, reduction=reduction, zero_infinity=form == "rows")
        loss.sum().backward()
        return loss.detach()
    compiled = minicompile.compile(program, fullgraph=True)
    for _ in range(3):
        x = torch.randn(10, 6) if form == "one" else torch.randn(10, 2, 6)
        torch.testing.assert_close(compiled(layer, x), program(twin, x), **TOLERANCE)
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad, **TOLERANCE)


def test_ctc_loss_with_lengths_that_are_tensors_is_a_break_at_its_line():
    def program(x, targets, lengths):
        return F.ctc_loss(x.log_softmax(-1), targets, lengths, lengths - 7)
    given = torch.randn(10, 2, 5), torch.randint(1, 5, (2, 3)), torch.tensor([10, 9])
    with pytest.raises(minicompile.GraphBreakError, match="lengths that are tensors(.|\n)*return F.ctc_loss"):
        minicompile.compile(program, fullgraph=True)(*given)
    torch.testing.assert_close(minicompile.compile(program)(*given), program(*given))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_bias_correction_of_fused_optimizers_keeps_its_digits(kind):
    """1 - 0.999 ** step has in float32 three digits less than PyTorch's kernel computes with."""
    def steps(compile_):
        p = torch.zeros(4, requires_grad=True)
        optimizer = kind([p], lr=0.05, fused=True)

        def step(x):
            optimizer.zero_grad()
            (p * x).sum().backward()
            optimizer.step()
        step = compile_(step)
        for _ in range(3):
            step(torch.tensor([1e-3, 2e-2, 0.3, -0.4]))
        return p.detach()
    torch.testing.assert_close(steps(minicompile.compile), steps(lambda f: f), rtol=5e-7, atol=0)


def test_clipping_without_gradients_is_an_error_as_in_eager():
    p = torch.ones(2, requires_grad=True)
    for f in (torch.nn.utils.clip_grad_value_, minicompile.compile(torch.nn.utils.clip_grad_value_),
              minicompile.compile(lambda ps, limit: torch.nn.utils.clip_grad_value_(ps, limit))):
        with pytest.raises(RuntimeError, match="empty"):
            f([p], 0.1)


@pytest.mark.parametrize("kind", [torch.optim.Adamax, torch.optim.SGD, torch.optim.AdamW])
def test_a_check_leaves_no_trace_in_the_state(kind):
    p = torch.ones(2, requires_grad=True)
    optimizer = kind([p], lr=0.1, **(dict(momentum=0.9) if kind is torch.optim.SGD else {}))
    step = minicompile.compile(lambda: optimizer.step())
    for _ in range(2):
        p.grad = torch.ones(2)
        step()
    optimizer.state.clear()
    p.grad = None
    step()
    assert not optimizer.state


@pytest.mark.parametrize("dtype,operand,number", [
    (torch.int32, torch.int32, 1.7), (torch.uint8, torch.uint8, 0.7), (torch.float32, torch.float16, 1.7),
    (torch.float32, torch.float32, True), (torch.float32, torch.float32, 2j), (torch.float32, torch.float32, 2),
    (torch.complex64, torch.complex64, 0.5)])
def test_a_scale_that_is_a_tensor(dtype, operand, number):
    """Eager takes its number, in the dtype of the result: that of integers is an integer, and not everything may be one."""
    forms = (lambda x, y, n: x.addcmul(y, y, value=n), lambda x, y, n: x.add(y, alpha=n), lambda x, y, n: x.clone().add_(y, alpha=n))

    def outcome(f):
        try:
            return f(torch.arange(5).to(dtype), torch.arange(5).to(operand), torch.tensor(number))
        except RuntimeError as error:
            return str(error)
    for form in forms:
        ours, eagers = outcome(minicompile.compile(form, backend="eager")), outcome(form)
        assert ours == eagers if isinstance(eagers, str) else ours.dtype == eagers.dtype and torch.equal(ours, eagers)
