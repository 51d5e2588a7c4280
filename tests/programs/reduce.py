"""Makes a failing program small: deletes statements, unpacks blocks, puts parts of expressions in the place of the whole, as long
as it fails in the same way."""
from __future__ import annotations

import ast
import copy
import time

BLOCKS = ("body", "orelse", "finalbody")


def reduce(text: str, check, kind: str, seconds: float = 20.0) -> str:
    deadline = time.time() + seconds
    tree = ast.parse(text)

    def fails(candidate) -> bool:
        try:
            found = check(ast.unparse(ast.fix_missing_locations(candidate)))
        except Exception:
            return False
        return found is not None and found[0] == kind

    if not fails(tree):
        return text
    tree = one_result(tree, fails, deadline)
    changed = True
    while changed and time.time() < deadline:
        changed = False
        for smaller in (drop_runs, unpack, simplify):
            tree, better = smaller(tree, fails, deadline)
            changed = changed or better
    return ast.unparse(tree)


def one_result(tree, fails, deadline):
    """Of a program that returns a tuple: one of its items, and the statements that this needs or that write something."""
    entry = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "entry"), None)
    if entry is None or not isinstance(entry.body[-1], ast.Return) or not isinstance(entry.body[-1].value, ast.Tuple):
        return tree
    place = tree.body.index(entry)
    for item in entry.body[-1].value.elts:
        candidate = copy.deepcopy(tree)
        body = candidate.body[place].body
        body[-1].value = copy.deepcopy(item)
        needed = {n.id for n in ast.walk(item) if isinstance(n, ast.Name)}
        for statement in body[-2::-1]:
            names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and statement.targets[0].id not in needed:
                body.remove(statement)
            else:
                needed |= names
        if time.time() < deadline and fails(candidate):
            return candidate
    return tree


def blocks(tree) -> list:
    """(path of the owner in walking order, field) of every list of statements, largest first."""
    found = []
    for number, node in enumerate(ast.walk(tree)):
        for field in (*BLOCKS, "handlers", "cases"):
            items = getattr(node, field, None)
            if isinstance(items, list) and items:
                found.append((number, field))
    return found


def node_at(tree, number):
    return next(n for i, n in enumerate(ast.walk(tree)) if i == number)


def drop_runs(tree, fails, deadline):
    better, place = False, 0
    while place < len(blocks(tree)) and time.time() < deadline:
        number, field = blocks(tree)[place]
        length = len(getattr(node_at(tree, number), field))
        size = max(1, length // 2)
        while size >= 1 and time.time() < deadline:
            first = len(getattr(node_at(tree, number), field)) - size
            while first >= 0 and time.time() < deadline:
                candidate = copy.deepcopy(tree)
                items = getattr(node_at(candidate, number), field)
                removed = items[first:first + size]
                del items[first:first + size]
                if not items and field == "body" and not isinstance(candidate, ast.Module):
                    items.append(ast.Pass())
                if not all(isinstance(r, ast.Pass) for r in removed) and fails(candidate):
                    tree, better = candidate, True
                first -= size
            size //= 2
        place += 1
    return tree, better


def unpack(tree, fails, deadline):
    """A compound statement becomes its body."""
    better, number = False, 0
    while time.time() < deadline:
        nodes = list(ast.walk(tree))
        if number >= len(nodes):
            return tree, better
        for field in BLOCKS:
            items = getattr(nodes[number], field, None)
            for i in range(len(items) if isinstance(items, list) else 0):
                if isinstance(items[i], (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                    candidate = copy.deepcopy(tree)
                    inner = getattr(node_at(candidate, number), field)
                    inner[i:i + 1] = inner[i].body
                    if fails(candidate):
                        tree, better = candidate, True
                        nodes = list(ast.walk(tree))
                        items = getattr(nodes[number], field)
                        break
        number += 1
    return tree, better


def simplify(tree, fails, deadline):
    """An expression becomes one of its parts, or 1."""
    better, number = False, 0
    while time.time() < deadline:
        nodes = list(ast.walk(tree))
        if number >= len(nodes):
            return tree, better
        node = nodes[number]
        for name, value in ast.iter_fields(node):
            options = value if isinstance(value, list) else [value]
            for i, child in enumerate(options):
                if not isinstance(child, ast.expr) or isinstance(getattr(child, "ctx", None), (ast.Store, ast.Del)):
                    continue
                parts = [p for p in ast.iter_child_nodes(child) if isinstance(p, ast.expr)][:4]
                if isinstance(value, list) and name in ("args", "elts", "targets", "decorator_list") and not isinstance(node,
                    ast.arguments):
                    parts.insert(0, None)
                if not isinstance(child, (ast.Constant, ast.Name)):
                    parts.append(ast.Constant(1))
                for part in parts:
                    candidate = copy.deepcopy(tree)
                    twin = node_at(candidate, number)
                    if isinstance(value, list):
                        if part is None:
                            del getattr(twin, name)[i]
                        else:
                            getattr(twin, name)[i] = copy.deepcopy(part)
                    else:
                        setattr(twin, name, copy.deepcopy(part))
                    if fails(candidate):
                        tree, better = candidate, True
                        break
                else:
                    continue
                break
            else:
                continue
            break
        else:
            number += 1
            continue
        if time.time() > deadline:
            break
    return tree, better
