from minicompile.ch02_guards.sources import CallSource
from minicompile.ch03_capture.inputs import wrap_dynamic_number


def _counter(tx, source, number, limit, *, share=True, whole=True, small=True, note="all", key=None):
    if limit and (whole and number != number // 1 or small and not -limit < number < limit):
        return None
    key = (number, limit) if share else (number, limit, source)
    if key not in tx.symbols.counters:
        tx.symbols.counters[key] = wrap_dynamic_number(tx, number, CallSource(source, "item")), [source] if note == "first" else []
    symbol, sources = tx.symbols.counters[key]
    if note == "all":
        sources.append(source)
    return symbol


def wrong_fractions(tx, source, number, limit):
    return _counter(tx, source, number, limit, whole=False)


def wrong_large_numbers(tx, source, number, limit):
    return _counter(tx, source, number, limit, small=False)


def wrong_first_source_only(tx, source, number, limit):
    return _counter(tx, source, number, limit, note="first")


def wrong_no_sources(tx, source, number, limit):
    return _counter(tx, source, number, limit, note="none")


def wrong_one_for_all(tx, source, number, limit):
    if not tx.symbols.counters:
        return _counter(tx, source, number, limit)
    symbol, sources = next(iter(tx.symbols.counters.values()))
    sources.append(source)
    return symbol


def wrong_the_number_itself(tx, source, number, limit):
    from minicompile.ch03_capture.values import Const
    return Const(value=number)


def wrong_none_is_shared(tx, source, number, limit):
    symbol = wrap_dynamic_number(tx, number, CallSource(source, "item"))
    tx.symbols.counters.setdefault((number, limit), (symbol, []))[1].append(source)
    return symbol


def right_with_setdefault(tx, source, number, limit):
    if limit and not (abs(number) < limit and float(number).is_integer()):
        return None
    key = number, limit
    if key not in tx.symbols.counters:
        tx.symbols.counters[key] = wrap_dynamic_number(tx, number, CallSource(source, "item")), []
    tx.symbols.counters[key][1].append(source)
    return tx.symbols.counters[key][0]
