from chapters.tiny import find, step


def wrong_never_compiled(compiled, m):
    while m.frames:
        step(m)
    return m.result


def wrong_only_once(compiled, m):
    if body := find(compiled, m.frames):
        m.frames, m.result = body()
    while m.frames:
        step(m)
    return m.result


def wrong_twice(compiled, m):
    while m.frames:
        if body := find(compiled, m.frames):
            m.frames, m.result = body()
            m.frames, m.result = find(compiled, m.frames)() if m.frames and len(m.frames[-1].stack) > 9 else (m.frames, m.result)
        for _ in range(2 if body else 1):
            if m.frames:
                step(m)
    return m.result


def wrong_result_lost(compiled, m):
    while m.frames:
        if body := find(compiled, m.frames):
            m.frames, _ = body()
        while m.frames:
            step(m)
            if body:
                break
    return m.result


def wrong_always_expects_code(compiled, m):
    while m.frames:
        m.frames, m.result = find(compiled, m.frames)()
        if m.frames:
            step(m)
    return m.result


def wrong_looks_again_after_too_many(compiled, m):
    while m.frames:
        if body := find(compiled, m.frames):
            m.frames, m.result = body()
        if m.frames:
            step(m)
    return m.result


def wrong_skips_the_instruction(compiled, m):
    while m.frames:
        if body := find(compiled, m.frames):
            m.frames, m.result = body()
        while m.frames:
            if body:
                m.frames[-1].at += 1
                break
            step(m)
    return m.result


def right_two_loops(compiled, m):
    body = find(compiled, m.frames)
    while body:
        m.frames, m.result = body()
        if not m.frames:
            return m.result
        step(m)
        if not m.frames:
            return m.result
        body = find(compiled, m.frames)
    while m.frames:
        step(m)
    return m.result
