"""Families of what programs do, for random Python programs. A program draws on three of them, so that what belongs together meets often.
A family is what its module has in front (`~2` is a number, as in `generate.py`), and statements in the grammar of `generate.py`."""

FAMILIES = {
    "exceptions": ("""
class Carries(Exception):
    def __init__(self, tensor, **more):
        super().__init__('carries', tensor.dim())
        self.tensor, self.more = tensor, more

class Retry(Carries, ValueError):
    pass

def checked(t, limit=~3):
    if t.shape[0] > limit:
        raise Carries(t * 2, limit=limit)
    return t + limit

def first_of(*attempts):
    for attempt in attempts:
        try:
            return attempt()
        except (ZeroDivisionError, KeyError) as error:
            G_LIST.append(len(error.args))
            continue
        finally:
            del G_LIST[6:]
    raise LookupError('none')
""", """
try:
    @1:T = checked($T)
except Carries as @2:
    @1:T = @2.tensor + @2.more['limit']
---
try:
    raise Retry($T, k=$i)
except ValueError as @1:
    @2:T, @3:i = @1.tensor, @1.more['k']
    @4:s = f'{@1} {@1.args[1]}'
---
try:
    try:
        raise Carries($T)
    except Carries as @1:
        @1.tensor = @1.tensor * 2
        raise
except Exception as @2:
    @3:T = @2.tensor
---
try:
    try:
        $S
        $RAISE
    finally:
        @1:T = $T + 1
except Exception as @2:
    @3:s = type(@2.__context__).__name__ + str(@2.__suppress_context__)
---
def @1(@2):
    try:
        return @2 * 2
    finally:
        @2.add_($i)
%T = @1($T + 0)
---
def @1(@2):
    for @3 in range(3):
        try:
            if @3 == $i:
                return @2 + @3
            @2 = @2 * 2
        finally:
            if @3 == 1:
                break
    return @2
%T = @1(%T)
---
@1:T = first_of(lambda: $T / (1 // $i), lambda: $DT[$s], lambda: $T)
---
try:
    assert $T.shape[0] == $i, f'{%T.shape[0]} rows, {%s}'
except AssertionError as @1:
    @2:s = str(@1)
---
@1 = ValueError($s, $i)
@1.add_note($s)
try:
    raise @1 from KeyError($i)
except (ValueError, TypeError) as @2:
    @3:s = ','.join(@2.__notes__) + repr(@2.__cause__)
    @4:i = @2.args[-1]
---
@1 = None
try:
    $S
    $RAISE
except Exception as @2:
    @1 = @2
@3:s = type(@1).__name__
---
try:
    raise ExceptionGroup('g', [ValueError($s), KeyError($i), TypeError($s)])
except* ValueError as @1:
    @2:i = len(@1.exceptions)
except* (KeyError, TypeError) as @3:
    @4:s = str([type(@5).__name__ for @5 in @3.exceptions])
---
try:
    @1:T = $T @ $V.reshape(1, 3)
except (RuntimeError, IndexError) as @2:
    @1:T = $T
---
try:
    @1:i = [@2 for @2 in $L if 6 // @2][0]
except (ZeroDivisionError, IndexError) as @3:
    @1:i, @4:s = 0, str(@3)
""", """
checked.__defaults__ = (~5,)
Carries.__str__ = lambda self: 'other'
"""),
    "closures": ("""
def counter(start=~3):
    count, seen = start, []
    def up(by=1):
        nonlocal count
        count += by
        seen.append(count)
        return count
    def get():
        return count, list(seen)
    return up, get

def remember(function):
    @functools.wraps(function)
    def inner(t, *args, **options):
        inner.calls += 1
        inner.last = args
        return function(t, *args, **options)
    inner.calls, inner.last = 0, ()
    return inner

def times(n, *, plus=0):
    def decorate(function):
        @functools.wraps(function)
        def inner(*args, **options):
            return function(*args, **options) * n + plus
        return inner
    return decorate

@remember
@times(~3, plus=1)
def decorated(t, k=2, *, flag=False):
    return t - k if flag else t + k

def collect(item, into=[]):
    into.append(item)
    del into[:-3]
    return len(into)

def even(n):
    return True if n <= 0 else odd(n - 1)

def odd(n):
    return False if n <= 0 else even(n - 1)

G_UP, G_GET = counter()
""", """
@1, @2 = counter($i)
@3:i = @1() + @1($i)
@4:i, @5:L = @2()
---
@1:i = G_UP($i)
---
@1:i, @2:L = G_GET()
---
%T = decorated(%T, $i)
---
%T = decorated(%T, flag=$b)
@1:i = decorated.calls
@2:i = len(decorated.last)
---
@1:i = collect($i)
---
@1:i = collect($i, $L) + len(collect.__defaults__[0])
---
@1:b = even(abs($i) % 9)
---
@1 = $i
@2 = lambda: @1
@1 = @1 + 1
@3:i = @2()
---
@1:T = $T
def @2(@3=@1, *, @4=$i):
    return @3 * @4
@1 = @1 + 1
%T = @2() + @2(@1, @4=2)
---
@1 = []
for @2:i in range($i % 4):
    @1.append(lambda @3, @4=@2: @3 + @4 * @2)
@5:L = [@6(1) for @6 in @1]
---
def @1(@2):
    @3 = 0
    def @4(@5):
        nonlocal @3, @2
        @3 += 1
        @2 = @2 + @5
        return @3
    @6 = [@4(@7) for @7 in $L[:3]]
    return @2, @3
%T, @8:i = @1(%T)
---
@1 = times(2, plus=$i)
@2:F = @1(lambda @3: $T{@3:T})
%T = @2(%T)
---
@1 = functools.partial(decorated, k=$i)
%T = functools.partial(@1, flag=$b)(%T)
@2:s = str(@1.keywords)
---
def @1(@2, /, @3, *@4, @5=$i, **@6):
    return @2 * @3 + len(@4) + @5 + sum(@6.values())
%T = @1(%T, *$L[:2] or [1], **{'q': $i, 'r': 1})
---
decorated.calls = $i
---
def @1(@2):
    return 1 if @2 < 2 else @2 * @1(@2 - 1)
@3:i = @1(abs($i) % 6) % 101
---
(lambda @1: [@1.append(@2) for @2 in (1, 2)])(%L)
del %L[6:]
""", """
G_UP(~3)
collect.__defaults__ = ([],)
decorated.calls = ~4
decorated.__wrapped__.__kwdefaults__ = {'flag': True}
"""),
    "generators": ("""
def halves(t, n):
    got = 'begun'
    try:
        for i in range(n):
            t = t * 0.5 if i % 2 else t + i
            more = yield t
            if more is not None:
                t = t + more
    except ValueError as error:
        yield t * len(error.args)
    finally:
        G_LIST.append(n)
        del G_LIST[6:]
    return n

def outer(t, n):
    count = yield from halves(t, n)
    yield t + count

def rows(t):
    yield from t
    for row in t.unbind(1):
        yield row.sum() + t[0]

def window(items, n=2):
    last = deque(maxlen=n)
    for item in items:
        last.append(item)
        if len(last) == n:
            yield tuple(last)

class Batches:
    def __init__(self, t, size=1):
        self.t, self.size, self.at = t, size, 0
    def __iter__(self):
        self.at = 0
        return self
    def __next__(self):
        if self.at >= self.t.shape[0]:
            raise StopIteration
        self.at += self.size
        return self.t[self.at - self.size:self.at]
    def __len__(self):
        return -(-self.t.shape[0] // self.size)
    def __reversed__(self):
        return (self.t[i:i + 1] for i in range(self.t.shape[0] - 1, -1, -1))
""", """
@1:LT = list(halves($T, $i % 4)) or [$T]
---
@1 = halves($T, 3)
@2:T = next(@1)
@3:T = @1.send($i)
@1.close()
---
@1 = halves($T, 3)
next(@1)
@2:T = @1.throw(ValueError($i, $s))
@3:i = sum(1 for _ in @1)
---
@1:T = sum(outer($T, $i % 3))
---
@1:V = sum(rows($T))
---
for @1:V in rows($T):
    $SL
---
for @1:T in halves(%T, 3):
    $SL
    if $b:
        break
---
@1:L = [@2 - @3 for @2, @3 in window($L)] or [0]
---
for @1:i, @2:i in window($L):
    $SL
---
for @1:T in Batches($T, 2):
    $SL
---
@1 = Batches($T)
@2:T = torch.cat([*@1]) + len(@1)
@3:T = torch.cat(list(reversed(@1)))
---
@1 = iter(Batches($T))
@2:T = next(@1)
@3:T = next(@1, $T)
---
@1:T, *@2:LT = halves($T, 3)
---
@1:T = torch.stack([@2 * @3 for @2, @3 in zip($T, (@4 + $i for @4 in $T))])
---
@1:V = max((@2 for @2 in $T), key=lambda @3: @3.shape[0]) + 0
---
@1:b = any(@2.shape[0] > $i for @2 in halves($T, 2)) or all($b for @3 in $L)
---
@1, @2 = itertools.tee($L)
@3:i = sum(@1) - next(@2, 0)
---
@1:L = list(iter(lambda @2=iter($L): next(@2, 3), 3))[:5]
---
@1:L = [*map(lambda @2, @3: @2 - @3, $L, reversed($L))]
---
@1:L = list(itertools.compress($L, (True, $b, False))) + list(itertools.starmap(pow, [(2, 3)]))
---
@1:L = list(itertools.dropwhile(lambda @2: @2 < $i, $L)) + [@3 for @3, @4 in itertools.pairwise($L)]
---
@1 = itertools.cycle($L or [1])
@2:L = [next(@1) for @3 in range(4)]
---
@1 = (@2 * $i for @2 in $LT)
@3:T = next(@1)
@4:i = len([*@1])
---
try:
    @1:L = [@2 + @3 for @2, @3 in zip($L, $U, strict=True)]
except ValueError as @4:
    @5:s = str(@4)
---
@1:D = {@2: @3 for @3, @2 in enumerate('ab', start=$i)}
""", """
halves.__defaults__ = None
Batches.__len__ = lambda self: 7
"""),
    "classes": ("""
class Checked:
    def __set_name__(self, owner, name):
        self.name = '_' + name
        owner.checked = (*getattr(owner, 'checked', ()), name)
    def __get__(self, obj, owner=None):
        return self if obj is None else getattr(obj, self.name, ~3)
    def __set__(self, obj, value):
        if value is None:
            raise ValueError(self.name)
        setattr(obj, self.name, value)

class Plugin:
    known = {}
    def __init_subclass__(cls, key=None, **options):
        super().__init_subclass__(**options)
        Plugin.known[key or cls.__name__] = cls
    def run(self, t):
        return t

class Single(type):
    made = {}
    def __call__(cls, *args, **options):
        if cls not in Single.made:
            Single.made[cls] = super().__call__(*args, **options)
        return Single.made[cls]

class Left(Plugin, key='left'):
    size = Checked()
    def run(self, t):
        return super().run(t) * 2

class Right(Plugin):
    rate = ~2
    def run(self, t):
        return super().run(t) + self.rate

class Both(Left, Right, key='both'):
    def run(self, t, *, times=1):
        for _ in range(times):
            t = super().run(t)
        return t

class Config(metaclass=Single):
    def __init__(self, depth=~3):
        self.depth = depth

class Vector:
    __match_args__ = ('x', 'y')
    def __init__(self, x, y=0):
        self.x, self.y = x, y
    def __eq__(self, other):
        return (self.x, self.y) == (other.x, other.y) if isinstance(other, Vector) else NotImplemented
    def __hash__(self):
        return hash((self.x, self.y))
    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y) if isinstance(other, Vector) else NotImplemented
    def __radd__(self, other):
        return self if other == 0 else NotImplemented
    def __neg__(self):
        return Vector(-self.x, -self.y)
    def __lt__(self, other):
        return (self.x, self.y) < (other.x, other.y)
    def __index__(self):
        return self.x
    def __format__(self, how):
        return f'<{self.x:{how or "d"}}>'
    def __getitem__(self, at):
        return (self.x, self.y)[at]
    @functools.singledispatchmethod
    def times(self, k):
        return self.x * k
    @times.register
    def _(self, k: str):
        return k * abs(self.y)

class Level(enum.IntEnum):
    LOW = 1
    HIGH = enum.auto()

class Mode(enum.Flag):
    A = enum.auto()
    B = enum.auto()
""", """
@1 = Both()
@2:T = @1.run($T, times=$i % 3)
@3:s = ','.join(@4.__name__ for @4 in type(@1).__mro__)
---
@1:T = Plugin.known[('left', 'Right', 'both')[$i % 3]]().run($T)
---
@1 = Left()
@1.size = $i
@2:i = @1.size + Both().size
@3:i = len(Left.checked)
---
try:
    @1 = Left()
    @1.size = $i or None
except ValueError as @2:
    @3:s = str(@2)
---
Right.rate = $i
---
@1:i = Config($i).depth
---
Config().depth += 1
---
@1 = Vector($i, $i)
@2:i = (@1 + Vector(1, 2)).x + sum([@1, Vector($i)]).y
---
@1:i = max(Vector($i), Vector($i, 1)).y + min([Vector(1, $i), Vector(1)], key=lambda @2: @2.y)[1]
---
@1:i = len({Vector($i): 1, Vector($i): 2, Vector(1, 0): 3})
---
@1:s = f'{Vector(%i):>4}' + format(-Vector($i))
---
@1:i = [1, 2, 3, 4][Vector($i % 3)] + len(range(Vector(abs($i) % 4)))
---
@1:b = Vector($i) == Vector($i) or Vector(1) == $i or $i != Vector(2)
---
try:
    @1 = Vector($i) + $i
except TypeError as @2:
    @3:s = str(@2)
---
@1:i = Vector($i).times(3)
@2:s = Vector(1, $i % 4).times($s)
---
match Vector($i, $i):
    case Vector(0 | 1, @1:i) if @1 > 0:
        $S
    case Vector(@2:i, y=@3:i):
        $S
---
@1:i = Level.HIGH + $i
@2:b = Level.LOW < $i
@3:s = f'{Level(1 + %i % 2)!r}'
---
@1 = Mode.A | Mode(1 + $i % 2)
@2:b = Mode.B in @1
@3:i = len(list(Mode)) + @1.value
---
class @1(Right):
    rate = $i
    def run(self, @2, @3=$i):
        @4 = super().run(@2)
        return [super(@1, self).run(@4) + @3 for _ in '1'][0]
%T = @1().run(%T)
---
@1:T = Right.run(Both(), $T)
---
@1 = type('Made', (Left,), {'run': lambda self, @2: Left.run(self, @2) + $i})
%T = @1().run(%T)
---
@1 = operator.methodcaller('run', $T)
@2:T = @1(Right()) + @1(Left())
---
@1 = Right().run
@2:T = @1($T)
@3:b = @1 == Right().run or @1.__self__.rate == Right.rate
""", """
Right.rate = ~4
Left.run = lambda self, t: t
Config().depth = ~5
Both.__bases__ = Right, Left
Plugin.known['left'] = Right
Vector.__lt__ = lambda self, other: False
"""),
    "records": ("""
@dataclass(frozen=True, order=True)
class Frozen:
    a: int
    b: float = 0.5
    rest: tuple = ()

@dataclass(kw_only=True, slots=True)
class Options:
    size: int = ~3
    name: str = 'n'
    parts: dict = field(default_factory=lambda: {'p': ~2})

@dataclass
class Output:
    first: torch.Tensor
    second: object = None
    scale: dataclasses.InitVar[int] = 1
    total: int = field(init=False, default=0)
    def __post_init__(self, scale):
        self.first = self.first * scale
        self.total = scale + self.first.dim()
    def __getitem__(self, key):
        return getattr(self, key) if isinstance(key, str) else dataclasses.astuple(self)[key]

@dataclass
class Wide(Output):
    third: list = field(default_factory=list)
    def both(self):
        return self.first + (0 if self.second is None else self.second)

class Result(OrderedDict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
    def __setattr__(self, name, value):
        self[name] = value
    def to_tuple(self):
        return tuple(self[k] for k in self.keys())

class Fields(NamedTuple):
    t: torch.Tensor
    n: int = 1
    def moved(self, by):
        return self._replace(t=self.t + by, n=self.n + 1)

Old = collections.namedtuple('Old', 'x y z', defaults=(~3, None))
""", """
@1 = Frozen($i, $f)
@2:b = @1 < Frozen($i) or @1 == Frozen($i, $f)
@3:i = len({@1, Frozen($i, $f)})
---
try:
    Frozen($i).a = 2
except dataclasses.FrozenInstanceError as @1:
    @2:s = str(@1)
---
@1 = Options(size=$i)
@1.size += 1
@1.parts[$s] = @1.size
@2:s = repr(@1)
---
@1 = dataclasses.replace(Options(), name=$s)
@2:D = dataclasses.asdict(@1)['parts'] | {'a': 1}
@3:s = ','.join(@4.name for @4 in dataclasses.fields(@1))
---
try:
    @1 = Options($i)
except TypeError as @2:
    @3:s = str(@2)
---
@1 = Output($T, scale=$i)
@2:T, @3:i = @1.first, @1.total
@4:T = @1['first'] - @1[0]
---
@1 = Wide($T, $T, third=$L)
@2:T = @1.both()
@1.second = None
@3:T = @1.both() * len(@1.third)
---
@1 = Result(loss=$Z, out=$T)
@1.extra = $i
@2:T = @1.out * @1.extra + @1.to_tuple()[0]
@3:i = getattr(@1, 'nothing', $i)
---
@1 = Fields($T, $i).moved(by=$i)
@2:T, @3:i = @1
@4:T = @1.t + @1[1]
---
@1, @2:i = Fields($T).moved(1)._asdict().values()
---
@1:i, *_, @2 = Old($i)
@3:s = f'{Old(%i, z=%s)}'
@4:i = Old._make($L[:3] * 3 + [1, 2, 3])[2] if 0 else Old(1).y
---
match Fields($T, $i):
    case Fields(t=torch.Tensor() as @1:T, n=0 | 1):
        $S
    case (@2, @3:i) if @3 > 2:
        $S
    case Fields(n=@4:i):
        $S
---
match {'x': $T, 'n': $i, 'o': [$i, $i]}:
    case {'n': 0 | 1 as @1:i, **@2}:
        $S
    case {'x': torch.Tensor() as @3:T, 'o': [@4:i, *_]}:
        $S
---
match (Frozen($i), $L):
    case (Frozen(a=1) | Frozen(b=0.0), _):
        $S
    case (Frozen(@1:i, @2:f), [@3:i, *_, @4:i]):
        $S
    case _:
        $S
---
from types import SimpleNamespace as @1
@2 = @1(a=$i, t=$T)
@2.b = @2.a + 1
@3:T = @2.t * @2.b
@4:D = {@5: 1 for @5 in vars(@2)} | {'a': 2}
---
@1 = collections.ChainMap({'a': $i}, $D)
@2:i = @1['a'] + len(@1)
@1['b'] = $i
@3:D = dict(@1)
---
@1:D = $D
@2:i = len(@1.keys() & {'a', $s}) + len(@1.items() - {('a', 1)})
---
@1 = dict($D)
if @1:
    @2:s, @3:i = @1.popitem()
---
@1:S = {*$L} - {*$U} ^ {$i}
@1.update($L, (1,))
@2:b = @1 >= {1} or {2} < @1
---
@1 = {frozenset($L): $T, ($i, $s): $T}
@2:T = @1.get(($i, $s), $T)
---
@1 = {$T: $i, $T: 2}
@2:i = len(@1) + sum(@1.values())
""", """
Options.__init__.__kwdefaults__['size'] = ~5
Output.total = ~3
Fields.moved = lambda self, by: self
Old.__new__.__defaults__ = (~3, 1)
"""),
    "numbers": ("""
BIG = 2 ** 63
def ceil_div(a, b):
    return -(-a // b)

def rows_of(t, part=2):
    n, m = t.shape
    return t[:max(1, n // part)], ceil_div(n * m, part)

class Count(int):
    def __radd__(self, other):
        return 'radd'
    __rmul__ = __rpow__ = __gt__ = __eq__ = __radd__
    __hash__ = int.__hash__

class Share(float):
    def __rsub__(self, other):
        return 'rsub'
    __rtruediv__ = __rmod__ = __lt__ = __rsub__
""", """
@1:s = str([~2 + Count(~3), $f * Count(~2), True ** Count($i % 4), $i - Share(~2), 2j / Share(~3), 1.5 < Count(~1), 2 == Count(2)])
---
@1 = $T * Count(~3) if $i % 2 else $T - Share(~3)
@2:s = type(@1).__name__
---
@1:i = (BIG + $i) % 1009
---
@1:i = (($i << 66) | 5) >> 64
---
@1:i = hash(BIG * $i) % 97 + (BIG * $i).bit_length()
---
@1:i = (($i * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFF) % 1000
---
@1:T = $T + (BIG - 2 ** 63 + $i)
---
try:
    @1:J = $J + BIG
except (OverflowError, RuntimeError) as @2:
    @3:s = type(@2).__name__
---
@1:f = float('inf') * ($i or 1)
@2:b = math.isinf(@1) and @1 > BIG
---
@1:f = min(float('nan'), $f, 1.0) if 0 else max($f, -0.0)
@2:s = str(math.copysign(1, -0.0 * abs($i)))
---
@1:f = ($i + 1) ** -1 if $i != -1 else 2 ** 0.5
@2:f = @1 // 0.3 + @1 % 0.3
---
try:
    @1:f = $i / ($i % 2)
except ZeroDivisionError as @2:
    @3:s = str(@2)
---
@1:i = int($f * 1e17) % 1013
@2:i = round($i, -1) + round($f)
---
@1:s = f'{%f:.3e}|{%i:08b}|{%i:+,}|{abs(%i):x}' + '%5.1f' % $f
---
@1:i = int(f'{abs(%i)}') + int('0b11', 0) + int(True) - ~$i
---
@1:b = (0.1 + 0.2 == 0.3) or $f.is_integer() or $i is True
---
@1 = complex($i, $f)
@2:f = (@1 * @1.conjugate()).real + abs(@1)
---
@1:i = $i
@1 <<= 2
@1 ^= 5
@1 //= 3
@1 **= 2
@1 %= 89
---
@1:T, @2:i = rows_of($T)
---
@1:T = $T[$T.shape[0] // 2:]
@2:T = $T[:$T.shape[0] - 1] if $T.shape[0] > 1 else $T
---
@1, @2 = $T.shape
@3:i = @1 * @2 // 2 + @1 % 2
@4:T = $T.reshape(@2, @1).reshape(-1, 3)
---
@1 = $T.shape + (1,)
@2:T = $T.reshape(@1)[..., 0]
@3:i = @1.numel() + len(@1) + @1[-1]
---
@1:T = $T.new_full(($T.shape[0], 3), $T.shape[0] / 2)
---
@1:T = torch.arange($T.numel()).reshape($T.shape).float() / $T.shape[0]
---
@1:T = torch.cat([$T[@2:@2 + 1] * @2 for @2 in range(0, $T.shape[0], 2)])
---
if $T.shape[0] % 2 == 0 and $T.numel() > 5:
    $S
else:
    $S
---
if not $T.shape[0] < $i <= $T.shape[1] * 2:
    $S
---
@1 = slice(None, $i % 3 + 1)
@2:T = $T[@1, ...]
@3:i = len(range(10)[@1])
---
@1:T = $T[(slice(None), *[slice(0, 3)])]
---
@1:T = F.pad($T, (0, 0, 0, $T.shape[0] % 2))
---
@1:T = $T * (1 if $T.shape[0] == $T.size(0) else 0) + math.sqrt($T.shape[-1])
---
@1:T = torch.linspace(0, $T.shape[0] - 1, $T.numel()).view(*$T.shape)
---
@1:i = sum($T.shape) + math.prod($T.shape) - min(*$T.size())
---
for @1:i in range($T.shape[0] - 1, -1, -1):
    $SL
---
while (@1:i := len($L) - $i) > 2:
    $SL
    break
---
@1:s = str(tuple($T.shape)) + f'{%T.shape[0] * 2:>4}'
@2:D = {f'{%T.shape[0]}x': $T.shape[0]} | {'a': 1}
""", """
global:BIG = ~9
global:BIG = 2 ** 64
rows_of.__defaults__ = (1,)
"""),
    "contexts": ("""
class Scope:
    depth = 0
    def __init__(self, k=~3, swallow=()):
        self.k, self.swallow = k, swallow
    def __enter__(self):
        Scope.depth += 1
        return self
    def __exit__(self, kind, value, trace):
        Scope.depth -= 1
        self.seen = kind and kind.__name__
        return kind is not None and issubclass(kind, self.swallow)
    def __call__(self, function):
        @functools.wraps(function)
        def inner(*args):
            with self:
                return function(*args) + self.k
        return inner

@contextlib.contextmanager
def patched(obj, **values):
    old = {k: getattr(obj, k, None) for k in values}
    for k, v in values.items():
        setattr(obj, k, v)
    try:
        yield obj
    except LookupError:
        G_DICT['patched'] = 1
    finally:
        for k, v in old.items():
            setattr(obj, k, v)

@torch.no_grad()
def without(t):
    return t * 2

@Scope(~2)
def scoped(t):
    return t + Scope.depth

G_SCOPE = Scope()
""", """
with Scope($i) as @1:
    @2:i = @1.k + Scope.depth
    $S
@3:s = str(@1.seen)
---
with Scope(1, swallow=(ValueError, LookupError)) as @1:
    $S
    $RAISE
@2:s = str(@1.seen)
---
with G_SCOPE, Scope() as @1, G_SCOPE:
    $S
    @2:i = Scope.depth
---
with patched(%O, n=$i, f=0.25) as @1:
    @2:i = @1.n
    $S
---
with patched(G_SCOPE, k=$i):
    $S
    $RAISE
---
%T = without(%T)
---
%T = scoped(%T)
---
@1:T = Scope($i)(torch.neg)($T)
---
with torch.autocast('cpu', dtype=torch.bfloat16, enabled=$b):
    @1:T = ($T @ torch.eye(3)).float()
    $S
---
with torch.autocast('cpu'):
    @1 = F.linear($T, torch.eye(3))
    with torch.autocast('cpu', enabled=False):
        @2:T = @1.float() + $T
    @3:s = str(@1.dtype)
---
with torch.no_grad():
    @1:T = $T * 2
    with torch.enable_grad():
        @2:T = $T * 3
    @3:b = torch.is_grad_enabled()
---
@1 = torch.is_grad_enabled()
torch.set_grad_enabled($b)
try:
    $S
finally:
    torch.set_grad_enabled(@1)
---
with contextlib.ExitStack() as @1:
    @2:i = @1.enter_context(Scope($i)).k
    @1.callback(G_LIST.append, $i)
    @1.push(lambda *@3: @3[0] is ValueError)
    $S
    $RAISE
---
with contextlib.ExitStack() as @1:
    @2 = [@1.enter_context(Scope(@3)) for @3 in range($i % 3)]
    $S
    @4 = @1.pop_all()
@5:i = Scope.depth
@4.close()
---
@1 = contextlib.nullcontext() if $b else Scope()
with @1:
    $S
---
with (Scope() if $b else torch.no_grad()):
    $S
    @1:b = torch.is_grad_enabled()
---
def @1(@2):
    with Scope(), torch.no_grad():
        return @2 * Scope.depth
%T = @1(%T)
---
for @1:i in range(3):
    with Scope(swallow=ZeroDivisionError):
        if @1 == $i:
            continue
        @2:f = 1 / (@1 - 1)
        $SL
---
@1 = contextlib.closing(type('C', (), {'close': lambda self: G_LIST.append(8), 'n': $i})())
with @1 as @2:
    @3:i = @2.n
---
import io as @1
with contextlib.redirect_stdout(@1.StringIO()) as @2:
    print($i, $s)
@3:s = @2.getvalue().strip()
---
with torch.device('cpu'):
    @1:T = torch.ones($T.shape)
---
@1 = torch.get_default_dtype()
@2:T = torch.tensor([1.5, 2.0, $f], dtype=@1) + $T
""", """
Scope.depth = ~3
G_SCOPE.k = ~4
G_SCOPE.swallow = ValueError
"""),
    "modules": ("""
class Gate(nn.Module):
    table = {}
    def __init__(self, width=3, depth=2, act=nn.ReLU):
        super().__init__()
        self.width, self.depth = width, depth
        self.layers = nn.ModuleDict({f'l{i}': nn.Linear(width, width, bias=bool(i)) for i in range(depth)})
        self.gains = nn.ParameterDict({'a': nn.Parameter(torch.ones(width)), 'b': nn.Parameter(torch.full((width,), 2.0))})
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(width)) for _ in range(depth)])
        self.register_buffer('seen', torch.zeros(()), persistent=False)
        self.register_parameter('none', None)
        self.act, self.cache, self.on = act(), None, True
        for p in self.parameters():
            nn.init.constant_(p, 1.0 if p.dim() == 1 else 0.5)
    @property
    def device(self):
        return next(self.parameters()).device
    def extra_repr(self):
        return f'width={self.width}'
    def reset(self):
        self.cache = None
        return self
    def step(self, t, key='a'):
        self.seen += 1
        return t * self.gains[key]
    def forward(self, t, *, key='a', skip=None):
        if self.cache is None:
            self.cache = t.detach().sum(0)
        for i, (name, layer) in enumerate(self.layers.items()):
            if name == skip:
                continue
            t = self.act(layer(t)) + self.shifts[i]
        if self.none is not None:
            t = t + self.none
        return self.step(t, key) if self.on else t

class Tied(Gate):
    def __init__(self):
        super().__init__(depth=1)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.layers['l0'].weight
        self.register_forward_hook(lambda module, args, out: out + module.width)
        self.head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    def forward(self, t, **options):
        return self.head(super().forward(t, **options))

G_GATE, G_TIED = Gate(), Tied()
""", """
@1:T = G_GATE($T)
---
@1:T = G_GATE($T, key='b', skip='l0')
---
@1:T = G_TIED($T)
---
@1:T = (G_TIED if $b else G_GATE)($T)
---
@1:T = G_GATE.reset()($T) + G_GATE.seen
---
@1:T = $T + G_GATE.cache if G_GATE.cache is not None else $T
---
G_GATE.on = $b
---
G_GATE.gains['a'].data.mul_(2)
---
with torch.no_grad():
    for @1 in G_GATE.shifts:
        @1.add_($i)
---
@1:i = sum(@2.numel() for @2 in G_TIED.parameters()) + len(list(G_GATE.named_buffers()))
@3:s = ' '.join(@4 for @4, @5 in G_TIED.named_parameters(remove_duplicate=$b))
---
@1:s = ','.join(type(@2).__name__ for @2 in G_TIED.modules())
@3:i = len([*G_GATE.children()]) + ('head' in dict(G_TIED.named_children()))
---
@1:T = sum(@2.sum() for @2 in G_GATE.state_dict().values()) + $T
---
for @1:s, @2 in G_GATE.layers.items():
    %T = @2(%T)
    $S
---
for @1 in G_GATE.gains.values():
    %T = %T + @1
---
@1 = copy.deepcopy(G_GATE)
@1.width = $i
@2:T = @1($T)
---
G_GATE.train($b)
@1:T = F.dropout($T, 0.5, G_GATE.training and False)
---
@1 = G_GATE.register_forward_hook(lambda *@2: @2[-1] * 2)
@3:T = G_GATE($T)
@1.remove()
---
G_GATE.table[$s] = $i
---
G_GATE.note = $s
@1:s = getattr(G_GATE, 'note', '') + str(G_GATE.device)
---
G_GATE.seen = G_GATE.seen + $i
---
G_TIED.width += 1
---
try:
    @1 = G_GATE.nothing
except AttributeError as @2:
    @3:s = str(@2)
---
G_TIED.apply(lambda @1: setattr(@1, 'mark', $i))
@2:i = G_TIED.head.mark
---
@1:b = isinstance(G_TIED.head.weight, nn.Parameter) and G_TIED.head.weight is G_TIED.layers['l0'].weight
---
for @1 in G_GATE.parameters():
    @1.requires_grad_($b)
---
@1:T = nn.Sequential(nn.Identity(), *G_GATE.layers.values())($T)
---
@1:T = torch.func.functional_call(G_GATE, {'gains.a': torch.ones(3) * $i}, ($T,))
---
@1:T = torch.utils.checkpoint.checkpoint(G_GATE, $T, use_reentrant=False)
---
$T.mean().backward() if 0 else None
@1:b = G_GATE.gains['a'].grad is None
---
G_GATE.layers.update({'l0': nn.Identity()}) if 0 else None
@1:i = len(G_GATE.layers) + len(G_GATE.shifts)
""", """
G_GATE.on = False
G_GATE.reset()
G_GATE.gains['a'] = nn.Parameter(torch.ones(3) * ~4)
G_GATE.layers['l2'] = nn.Identity()
G_TIED.width = ~5
G_TIED.eval()
G_GATE.seen.zero_()
G_GATE.none = nn.Parameter(torch.ones(3))
G_GATE.requires_grad_(False)
G_GATE.act = nn.Identity()
G_TIED.head.weight = nn.Parameter(torch.eye(3))
G_GATE.load_state_dict(copy.deepcopy(G_GATE.state_dict()))
G_GATE.step = lambda t, key: t
"""),
    "texts": ("""
import re, heapq, bisect, inspect, types
PATTERN = re.compile(r'([a-z])(\\d+)')
@functools.lru_cache(maxsize=~3 or None)
def parsed(text, *, upper=False):
    found = PATTERN.findall(text)
    return tuple((k.upper() if upper else k, int(n)) for k, n in found)

@functools.singledispatch
def show(x):
    return 'other'
@show.register
def _(x: int):
    return f'int {x}'
@show.register(torch.Tensor)
def _(x):
    return f'tensor {x.dim()}'
@show.register(list)
@show.register(tuple)
def _(x):
    return '[' + ', '.join(map(show, x)) + ']'
""", """
@1:s = str(parsed(f'a{abs(%i)}b2', upper=$b))
---
@1:D = {k: n for k, n in parsed(f'x{abs(%i)}a1')} | {'a': 0}
@2:i = parsed.cache_info().hits * 0
---
@1:s = show($X) + show([$i, $T])
---
@1:s = re.sub('[ab]', lambda @2: @2[0].upper() * 2, $s)
---
@1 = re.match(r'(?P<k>[a-z]+)', $s)
@2:s = @1['k'] if @1 else 'none'
---
@1:s = ' '.join(sorted($s.split('b'), key=lambda @2: (-len(@2), @2)))
---
@1:s = '{0!r:>6}|{k[a]}|{o.n}'.format($s, k=$D, o=$O)
---
@1:s = f'{%i=}' + f'{%s!r:>{abs(%i) % 7}}'
---
@1:s = $s.encode().hex() + str(bytes([65 + $i % 3]), 'ascii')
---
@1:s = $s.translate(str.maketrans('ab', 'xy')).zfill(3).center(5, '*')
---
@1:s, _, @2:s = $s.rpartition('a')
---
@1 = []
for @2 in $L:
    heapq.heappush(@1, (-@2, @2))
@3:L = [heapq.heappop(@1)[1] for _ in range(min(3, len(@1)))]
---
@1:L = sorted($L)
@2:i = bisect.bisect_left(@1, $i)
bisect.insort(@1, $i)
del @1[7:]
---
@1:L = sorted($L, key=functools.cmp_to_key(lambda @2, @3: @3 - @2))
---
@1:L = [@2 for _, @2 in sorted(zip(map(abs, $L), $L), reverse=$b)]
---
@1:s = min($D, key=$D.get, default='k')
---
@1 = {'neg': torch.neg, 'a': lambda @2: @2 + 1, 'b': $F}
%T = @1.get($s, torch.relu)(%T)
---
@1 = sorted([$O, $O], key=lambda @2: @2.n)
@3:i = @1[0].n
---
@1:i = len(inspect.signature(parsed).parameters) + isinstance(show, types.FunctionType)
---
@1:b = isinstance($X, collections.abc.Sized) or isinstance($X, collections.abc.Mapping)
---
@1:s = str(sorted({**$D, $s: 0}.items(), key=lambda @2: (@2[1], @2[0])))[:20]
---
@1 = Counter($s) + Counter(a=$i)
@2:i = @1.total() + (@1 & Counter('aab'))['a']
---
@1:s = ''.join(dict.fromkeys($s + 'ab')) if $s not in ('a', 'b') else $s.swapcase()
---
if $s.isalpha() and 'a' < $s <= 'b' or not $s:
    $S
else:
    $S
---
if {'a': 1}.keys() <= $D.keys() and not $S.isdisjoint({1, 2}):
    $S
---
@1, *@2 = $s or 'k'
@3:s = @1 * len(@2)
---
@1 = globals()['G_DICT']
@1['via'] = $i
@2:b = 'G_LIST' in globals() and 'a0' in locals()
---
%L[1:], @1 = [$i, $i], len(%L)
@2:i = @1
---
@1 = [[0] * 2 for _ in range(2)]
@1[$i % 2][$i % 2] += $i
@2:L = [*itertools.chain(*@1)]
---
@1 = $T
@1.tag = $i
@2:i = getattr(@1, 'tag', 0) + hasattr($T, 'tag')
""", """
parsed.cache_clear()
show.register(str, len)
global:PATTERN = re.compile('(a)(1)')
"""),
    "arrays": ("""
import numpy as np
class Place(enum.IntEnum):
    FIRST = 0
    SECOND = 1
G_ROW, G_TABLE = np.array([0.5, 1.5, ~3], dtype=np.float32), np.arange(6.0).reshape(2, 3)
G_PLACES = [np.int64(1), np.int32(0), np.uint8(1), np.int64(-1), Place.SECOND, 1]
G_SCALARS = [np.float32(0.5), np.float64(1.5), np.int64(2), np.float16(2), np.bool_(True), 0.5]
""", """
@1:T = $T * float(G_ROW[G_PLACES[$i % 6]])
---
@1:f = float(G_TABLE[G_PLACES[$i % 6], 1] + G_TABLE[1][G_PLACES[$i % 6]])
---
@1:T = $T + G_SCALARS[$i % 4]
---
@1:T = $T[G_PLACES[$i % 6]:]
---
try:
    @1:T = $T[[G_PLACES[$i % 6]]] + $T[..., [G_PLACES[$i % 6]]]
except (IndexError, TypeError) as @2:
    @1:T = $T
    @3:s = type(@2).__name__
---
@1 = $T.clone()
try:
    @1[0:1] = G_SCALARS[$i % 6]
    @1[..., G_PLACES[$i % 6]] = $f
except (IndexError, TypeError) as @2:
    @3:s = type(@2).__name__
---
@1:T = sum((@2 * float(@3) for @2, @3 in zip([$T, $T], G_ROW)), start=torch.zeros(()))
---
@1:i = int(G_SCALARS[2]) + G_TABLE.shape[G_PLACES[1]]
---
try:
    @1:V = $T.unbind(0)[G_PLACES[$i % 6]]
except IndexError:
    @1:V = $V
""", """
G_ROW[1] = ~4
G_TABLE[1] += ~3
G_PLACES[0] = np.int64(~2)
G_PLACES.reverse()
G_SCALARS[0] = np.float32(~4)
"""),
}
