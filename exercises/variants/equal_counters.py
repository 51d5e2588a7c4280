from minicompile.ch02_guards.sources import CallSource
from minicompile.ch03_capture.inputs import wrap_dynamic_number


def _counter(tx, source, number, *, share=True, note="all"):
    key = number if share else (number, source)
    if key not in tx.symbols.counters:
        tx.symbols.counters[key] = wrap_dynamic_number(tx, number, CallSource(source, "item")), [source] if note == "first" else []
    symbol, sources = tx.symbols.counters[key]
    if note == "all":
        sources.append(source)
    return symbol


def wrong_fractions_are_constants(tx, source, number):
    from minicompile.ch03_capture.values import Const
    return Const(value=number) if number != number // 1 else _counter(tx, source, number)


def wrong_first_source_only(tx, source, number):
    return _counter(tx, source, number, note="first")


def wrong_no_sources(tx, source, number):
    return _counter(tx, source, number, note="none")


def wrong_nothing_shared(tx, source, number):
    return _counter(tx, source, number, share=False)


def wrong_one_for_all(tx, source, number):
    if not tx.symbols.counters:
        return _counter(tx, source, number)
    symbol, sources = next(iter(tx.symbols.counters.values()))
    sources.append(source)
    return symbol


def wrong_the_number_itself(tx, source, number):
    from minicompile.ch03_capture.values import Const
    return Const(value=number)


def wrong_none_is_shared(tx, source, number):
    symbol = wrap_dynamic_number(tx, number, CallSource(source, "item"))
    tx.symbols.counters.setdefault(number, (symbol, []))[1].append(source)
    return symbol


def right_with_setdefault(tx, source, number):
    if number not in tx.symbols.counters:
        tx.symbols.counters[number] = wrap_dynamic_number(tx, number, CallSource(source, "item")), []
    tx.symbols.counters[number][1].append(source)
    return tx.symbols.counters[number][0]
