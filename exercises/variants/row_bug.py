from minicompile.ch10_cpp.reductions import accumulator_type, start_text
from minicompile.ch10_cpp.rows import RowStep, fresh, register_type


def _extreme(e, r, x, row_statement, result):
    kind = r.args[0]
    t, n, start = register_type(accumulator_type(r)), fresh(e, "_"), start_text(kind, accumulator_type(r))
    sign = ">" if kind == "max" else "<"
    acc, part = f"acc{n}", f"part{n}"
    return RowStep(f"{t} {acc} = {start}; int nan{n} = 0;", f"{t} {part} = {start}; int bad{n} = 0;",
                   f"{part} = {x} {sign} {part} ? {x} : {part}; bad{n} |= {x} != {x};",
                   [f"{acc} = {part} {sign} {acc} ? {part} : {acc};", row_statement.format(n=n)],
                   f" reduction({kind}:{part}) reduction(|:bad{n})",
                   result.format(n=n, t=t, acc=acc))


def wrong_forgets_all(e, r, x, lane):
    return _extreme(e, r, x, ";", "(nan{n} ? ({t})MC_NAN : {acc})")


def wrong_only_first_chunk(e, r, x, lane):
    return _extreme(e, r, x, "nan{n} = nan{n} & bad{n};", "(nan{n} ? ({t})MC_NAN : {acc})")


right_counts = [('nan{n} |= bad{n};', 'nan{n} += bad{n} != 0;'), ('(nan{n} ? ', '(nan{n} != 0 ? ')]


def wrong_no_cpp(e, r, x, lane):
    return RowStep("no", "C++", "at", ["all"], "", "!")
