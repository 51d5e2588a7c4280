"""Doors: ways to what a program reads. Each is an expression, with the writes after which it may give another number (V)."""
SETTING = """
import abc, array, collections, contextvars, copy, dataclasses, enum, functools, inspect, itertools, operator, os, string, sys, threading
import decimal, types, typing, weakref
import numpy as np
import torch
class Meta(type):
    m = 1
    @property
    def mp(cls): return cls._mp
    def __getattr__(cls, name):
        if name == 'dyn': return cls._mp
        raise AttributeError(name)
class B(metaclass=Meta):
    _mp = 1
    a = 1
    def __init__(self): self.z = 1; self._p = 1
    @property
    def p(self): return self._p
    @p.setter
    def p(self, v): self._p = v
class D(B): pass
class P:
    a = 1
    def go(self): "doc"; return 1
    def __init__(self): self.z = 1
class PD(P): pass
obj, pobj = D(), P()
pdobj = PD()
def fn(q=1, *, k=1): "doc"; return q + k
def deco(f):
    @functools.wraps(f)
    def inner(*a, **k): return f(*a, **k)
    inner.extra = 1
    return inner
wrapped = deco(fn)
def mk():
    c = 1
    def inner(): return c
    def setc(v):
        nonlocal c
        c = v
    return inner, setc
clo, setc = mk()
part = functools.partial(fn, 1, k=1)
part.extra = 1
class E(enum.Enum):
    X = 1
    Y = 2
E.X.extra = 1
E.extra = 5
class FE(enum.Enum):
    X = (1, 2)
    def __init__(self, a, b): self.aa = a; self.li = [1]
NT = collections.namedtuple('NT', 'a b', defaults=(1,))
nt = NT(1, 2)
@dataclasses.dataclass
class DC:
    a: int = 1
    b: int = 2
    c: list = dataclasses.field(default_factory=list)
dc = DC()
@dataclasses.dataclass(frozen=True)
class FDC:
    a: int = 1
fdc = FDC()
wr = weakref.ref(pobj)
wd = weakref.WeakValueDictionary(k=pobj)
wk = weakref.WeakKeyDictionary({pobj: 1})
cv = contextvars.ContextVar('cv', default=1)
os.environ['MCT'] = 'x'
for name in ('MCTQ', 'MCTZ'):
    os.environ.pop(name, None)
sys.modules.pop('q', None)
loc = threading.local(); loc.v = 1
mod = types.ModuleType('modx'); mod.a = 1
exec("def __getattr__(name):\\n    if name == 'lazy': return state['v']\\n    raise AttributeError(name)\\nstate = {'v': 1}", mod.__dict__)
sys.modules['modx'] = mod
bare = types.ModuleType('bare')
class Slots:
    __slots__ = ('s', 't')
sl = Slots(); sl.s = 1
lst = [1]; dct = {'a': 1}; st = {1}; dq = collections.deque([1]); cm = collections.ChainMap(dct, {'b': 2}); ctr = collections.Counter('aab')
dd = collections.defaultdict(lambda: 7, a=1); od = collections.OrderedDict(a=1)
ud = collections.UserDict(a=1); ul = collections.UserList([1])
mp = types.MappingProxyType(dct)
ns = types.SimpleNamespace(a=1)
g = 1
class Desc:
    def __init__(self): self.v = 1
    def __get__(self, o, t=None): return self.v
    def __set__(self, o, v): self.v = v
class HasDesc:
    d = Desc()
hd = HasDesc()
@functools.singledispatch
def sd(x): return 1
@functools.cache
def cached0(): return [1]
class CP:
    n = 1
    @functools.cached_property
    def cp(self): return self.n
cpo = CP()
class Ann:
    a: int = 1
class Pm:
    def f(self, a, b): return a + b
    pm = functools.partialmethod(f, 1)
pmo = Pm()
method = pobj.go
ar = array.array('i', [1, 2])
ba = bytearray(b'ab')
na = np.array([1, 2])
ex = ValueError(1); ex.extra = 1
lin = torch.nn.Linear(2, 2)
lin.extra = 1
lin.register_buffer('buf', torch.ones(1))
tt = torch.ones(2); tt.extra = 1
seq = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())
pl = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))])
class Idx:
    def __init__(self): self.i = 0
    def __index__(self): return self.i
ix = Idx()
class It:
    def __init__(self): self.n = 2
    def __iter__(self): return iter(range(self.n))
ito = It()
class Callable_:
    k = 1
    def __call__(self): return self.k
cl = Callable_()
class Hsh:
    def __init__(self, v): self.v = v
    def __hash__(self): return hash(self.v)
    def __eq__(self, o): return self.v == o.v
h1, h2 = Hsh(1), Hsh(1)
hdct = {h1: 1}
class Fmt:
    v = 1
    def __format__(self, s): return 'x' * self.v
    def __repr__(self): return 'r' * self.v
fmt = Fmt()
class Ab(abc.ABC): pass
class Other:
    a = 7
class Named(type):
    flag = 1
    def __repr__(cls): return 'x' * cls.flag
class NamedC(metaclass=Named): pass
class Inst(type):
    flag = 1
    def __instancecheck__(cls, o): return cls.flag == 3
class InstC(metaclass=Inst): pass
@typing.runtime_checkable
class Pro(typing.Protocol):
    def zap(self): ...
"""
DOORS = {
    "int(isinstance(pobj, Ab))": ["Ab.register(P)"],
    "int(issubclass(P, Ab)) + issubclass(P, (int, Ab))": ["Ab.register(P)"],
    "int(isinstance(pobj, Pro))": ["P.zap = lambda s: 1"],
    "int(isinstance(pobj, InstC))": ["Inst.flag = V"],
    "vars(type(pobj))['a']": ["P.a = V"],
    "P.__dict__['a']": ["P.a = V"],
    "vars(P).get('a')": ["P.a = V"],
    "vars(P).get('new', 0)": ["P.new = V"],
    "len(vars(P))": ["setattr(P, 'n%d' % V, 1)"],
    "sum(1 for k in vars(P) if not k.startswith('_'))": ["setattr(P, 'n%d' % V, 1)"],
    "int('q' in vars(P))": ["P.q = V"],
    "dict(vars(P))['a']": ["P.a = V"],
    "[v for k, v in P.__dict__.items() if k == 'a'][0]": ["P.a = V"],
    "PD.__dict__.get('a', 0)": ["PD.a = V"],
    "vars(P)['go'](1)": ["P.go = lambda s: V"],
    "vars(PD).get('go', lambda s: 0)(1)": ["PD.go = lambda s: V"],
    "{**vars(P)}['a']": ["P.a = V"],
    "getattr(P, 'a')": ["P.a = V"],
    "P.__dict__['go'].__name__.__len__()": ["P.go.__name__ = 'x' * V"],
    "inspect.getattr_static(pobj, 'a')": ["P.a = V"],
    "inspect.getattr_static(pobj, 'z')": ["pobj.z = V"],
    "inspect.getattr_static(P, 'a')": ["P.a = V"],
    "inspect.getattr_static(pobj, 'nn', 0)": ["pobj.nn = V"],
    "type.__getattribute__(P, 'a')": ["P.a = V"],
    "object.__getattribute__(pobj, 'a')": ["P.a = V", "pobj.a = V"],
    "type.__dict__['__name__'].__get__(P).__len__()": ["P.__name__ = 'x' * V"],
    "len(P.__name__)": ["P.__name__ = 'x' * V"],
    "len(P.__qualname__)": ["P.__qualname__ = 'x' * V"],
    "len(P.__doc__ or '')": ["P.__doc__ = 'x' * V"],
    "len(P.__module__)": ["P.__module__ = 'x' * V"],
    "len(type(pobj).__name__)": ["P.__name__ = 'x' * V"],
    "len(f'{type(pobj).__name__}')": ["P.__name__ = 'x' * V"],
    "len(pobj.__class__.__qualname__)": ["P.__qualname__ = 'x' * V"],
    "len(PD.__mro__)": ["PD.__bases__ = (type('N%d' % V, (P,), {}),) if V == 3 else (P,)"],
    "len(PD.__bases__[0].__name__)": ["PD.__bases__ = (type('N' * V, (P,), {}),)"],
    "len(pobj.__doc__ or '')": ["P.__doc__ = 'x' * V"],
    "len(fn.__name__)": ["fn.__name__ = 'x' * V"],
    "len(fn.__qualname__)": ["fn.__qualname__ = 'x' * V"],
    "len(fn.__module__)": ["fn.__module__ = 'x' * V"],
    "len(fn.__doc__)": ["fn.__doc__ = 'x' * V"],
    "fn.__defaults__[0]": ["fn.__defaults__ = (V,)"],
    "fn.__kwdefaults__['k']": ["fn.__kwdefaults__ = {'k': V}", "fn.__kwdefaults__['k'] = V"],
    "fn()": ["fn.__defaults__ = (V,)", "fn.__kwdefaults__ = {'k': V}", "fn.__kwdefaults__['k'] = V"],
    "fn.__code__.co_argcount": ["fn.__code__ = (lambda a, b, c: 1).__code__"],
    "len(fn.__annotations__)": ["fn.__annotations__['x%d' % V] = 1"],
    "fn.__dict__.get('e', 0)": ["fn.e = V"],
    "len(vars(fn))": ["setattr(fn, 'e%d' % V, 1)"],
    "getattr(fn, 'e', 0)": ["fn.e = V"],
    "wrapped.extra": ["wrapped.extra = V"],
    "wrapped.__wrapped__(1)": ["wrapped.__wrapped__ = lambda a: a + V"],
    "wrapped.__wrapped__.__defaults__[0]": ["fn.__defaults__ = (V,)"],
    "inspect.unwrap(wrapped)(1)": ["wrapped.__wrapped__ = lambda a: a + V"],
    "clo.__closure__[0].cell_contents": ["setc(V)", "clo.__closure__[0].cell_contents = V"],
    "clo()": ["setc(V)"],
    "inspect.getclosurevars(clo).nonlocals['c']": ["setc(V)"],
    "part.args[0]": ["part.__setstate__((fn, (V,), {'k': 1}, {}))"],
    "part.keywords['k']": ["part.keywords['k'] = V"],
    "part()": ["part.keywords['k'] = V", "part.__setstate__((fn, (V,), {'k': 1}, {}))"],
    "part.func(1)": ["part.__setstate__((lambda q: q + V, (1,), {}, {}))"],
    "part.extra": ["part.extra = V"],
    "len(vars(part))": ["setattr(part, 'e%d' % V, 1)"],
    "E.X.value": ["E.X._value_ = V"],
    "E.X.extra": ["E.X.extra = V"],
    "E.extra": ["E.extra = V"],
    "len(E.X.name)": ["E.X._name_ = 'x' * V"],
    "E['X'].value": ["E.X._value_ = V"],
    "FE.X.aa": ["FE.X.aa = V"],
    "len(FE.X.li)": ["FE.X.li.append(V)", "FE.X.li = [1] * V"],
    "sum(e.value for e in E)": ["E.X._value_ = V"],
    "getattr(E.X, 'nx', 0)": ["E.X.nx = V"],
    "E(1).extra": ["E.X.extra = V"],
    "vars(E.X)['extra']": ["E.X.extra = V"],
    "getattr(E, 'nw', 0)": ["E.nw = V"],
    "obj.p": ["obj.p = V", "obj._p = V", "B.p = property(lambda s: V)"],
    "D.mp": ["B._mp = V", "D._mp = V", "Meta.mp = property(lambda c: V)"],
    "D.m": ["Meta.m = V", "B.m = V", "D.m = V"],
    "D.dyn": ["D._mp = V", "D.dyn = V"],
    "type(D).m": ["Meta.m = V"],
    "getattr(D, 'zz', 0)": ["D.zz = V", "Meta.zz = V"],
    "vars(Meta)['m']": ["Meta.m = V"],
    "mod.a": ["mod.a = V"],
    "mod.lazy": ["mod.state['v'] = V", "mod.lazy = V", "mod.state = {'v': V}"],
    "sys.modules['modx'].a": ["mod.a = V", "sys.modules['modx'] = types.SimpleNamespace(a=V)"],
    "getattr(mod, 'nn', 0)": ["mod.nn = V"],
    "vars(mod)['a']": ["mod.a = V"],
    "mod.__dict__.get('w', 0)": ["mod.w = V"],
    "__import__('modx').a": ["mod.a = V"],
    "int('q' in sys.modules)": ["sys.modules['q'] = mod"],
    "len(mod.__name__)": ["mod.__name__ = 'x' * V"],
    "globals()['g']": ["globals()['g'] = V"],
    "globals().get('gg', 0)": ["globals()['gg'] = V"],
    "int('gg' in globals())": ["globals()['gg'] = V"],
    "g": ["globals()['g'] = V"],
    "fn.__globals__['g']": ["globals()['g'] = V"],
    "eval('g')": ["globals()['g'] = V"],
    "len(NT._fields)": ["NT._fields = ('a',) * V"],
    "NT._field_defaults['b']": ["NT._field_defaults['b'] = V", "NT._field_defaults = {'b': V}"],
    "NT(1).b": ["NT.__new__.__defaults__ = (V,)"],
    "len(nt._fields)": ["NT._fields = ('a',) * V"],
    "nt.a": ["NT.a = property(lambda s: V)"],
    "dataclasses.fields(dc)[0].default": ["dataclasses.fields(DC)[0].default = V"],
    "DC.__dataclass_fields__['a'].default": ["DC.__dataclass_fields__['a'].default = V"],
    "dataclasses.asdict(dc)['a']": ["dc.a = V"],
    "dataclasses.astuple(dc)[0]": ["dc.a = V"],
    "dataclasses.replace(dc, b=3).a": ["dc.a = V"],
    "DC().a": ["DC.__init__.__defaults__ = (V, 2, DC.__init__.__defaults__[2])"],
    "sum(getattr(dc, f.name) for f in dataclasses.fields(dc) if f.name != 'c')": ["dc.a = V"],
    "fdc.a": ["object.__setattr__(fdc, 'a', V)"],
    "dc.__match_args__.__len__()": ["DC.__match_args__ = ('a',) * V"],
    "DC.a": ["DC.a = V"],
    "int(dc == DC(a=3))": ["dc.a = V"],
    "wr().z": ["pobj.z = V"],
    "wd['k'].z": ["pobj.z = V", "keep = P(); keep.z = V; wd['k'] = keep; globals()['keep'] = keep"],
    "wk[pobj]": ["wk[pobj] = V"],
    "len(wd)": ["wd['k%d' % V] = pobj"],
    "len(wk)": ["wk[obj] = 1"],
    "cv.get()": ["cv.set(V)"],
    "len(os.environ['MCT'])": ["os.environ['MCT'] = 'x' * V"],
    "len(os.environ.get('MCTQ', ''))": ["os.environ['MCTQ'] = 'x' * V"],
    "len(os.getenv('MCT'))": ["os.environ['MCT'] = 'x' * V"],
    "int('MCTZ' in os.environ)": ["os.environ['MCTZ'] = '1'"],
    "loc.v": ["loc.v = V"],
    "getattr(loc, 'w', 0)": ["loc.w = V"],
    "vars(loc)['v']": ["loc.v = V"],
    "operator.attrgetter('a')(pobj)": ["P.a = V", "pobj.a = V"],
    "operator.itemgetter('a')(dct)": ["dct['a'] = V"],
    "operator.methodcaller('go')(pobj)": ["P.go = lambda s: V", "pobj.go = lambda: V"],
    "operator.itemgetter(0)(lst)": ["lst[0] = V"],
    "operator.length_hint(lst)": ["lst.append(V)"],
    "sl.s": ["sl.s = V"],
    "getattr(sl, 't', 0)": ["sl.t = V"],
    "Slots.s.__get__(sl)": ["sl.s = V"],
    "type(sl).__dict__['s'].__get__(sl)": ["sl.s = V"],
    "cm['a']": ["dct['a'] = V", "cm.maps[0] = {'a': V}"],
    "len(cm)": ["dct['k%d' % V] = 1"],
    "ctr['a']": ["ctr['a'] = V", "ctr.update('aaa')"],
    "ctr['zz']": ["ctr['zz'] = V"],
    "ctr.most_common(1)[0][1]": ["ctr['b'] = V + 5"],
    "sum(ctr.values())": ["ctr['a'] = V"],
    "dd['a']": ["dd['a'] = V"],
    "dd.get('n', 0)": ["dd['n'] = V"],
    "od['a']": ["od['a'] = V"],
    "next(iter(od.values()))": ["od['b'] = V; od.move_to_end('b', last=False)"],
    "ud['a']": ["ud['a'] = V", "ud.data = {'a': V}"],
    "len(ud)": ["ud['z%d' % V] = 1"],
    "ul[0]": ["ul[0] = V"],
    "len(ul)": ["ul.append(1)"],
    "mp['a']": ["dct['a'] = V"],
    "len(mp)": ["dct['z%d' % V] = 1"],
    "mp.get('q', 0)": ["dct['q'] = V"],
    "ns.a": ["ns.a = V"],
    "vars(ns)['a']": ["ns.a = V"],
    "len(vars(ns))": ["setattr(ns, 'n%d' % V, 1)"],
    "dq[0]": ["dq[0] = V", "dq.appendleft(V)"],
    "len(dq)": ["dq.append(1)"],
    "sum(dq)": ["dq.append(V)"],
    "hd.d": ["hd.d = V", "vars(HasDesc)['d'].v = V", "HasDesc.d = V"],
    "HasDesc.d": ["vars(HasDesc)['d'].v = V", "HasDesc.d = V"],
    "vars(HasDesc)['d'].v": ["vars(HasDesc)['d'].v = V"],
    "HasDesc.__dict__['d'].__get__(hd)": ["vars(HasDesc)['d'].v = V"],
    "sd(1)": ["sd.register(int, lambda x: V)"],
    "sd.dispatch(int)(1)": ["sd.register(int, lambda x: V)"],
    "cpo.cp": ["cpo.cp = V"],
    "cpo.__dict__.get('cp', 0)": ["cpo.cp = V"],
    "len(Ann.__annotations__)": ["Ann.__annotations__['z%d' % V] = int"],
    "len(typing.get_type_hints(Ann))": ["Ann.__annotations__['z%d' % V] = int"],
    "method.__self__.z": ["pobj.z = V"],
    "method.__func__.__name__.__len__()": ["P.go.__name__ = 'x' * V"],
    "len(method.__name__)": ["P.go.__name__ = 'x' * V"],
    "len(inspect.signature(fn).parameters)": ["fn.__code__ = (lambda a, b, c: 1).__code__"],
    "inspect.signature(fn).parameters['q'].default": ["fn.__defaults__ = (V,)"],
    "ar[0]": ["ar[0] = V"],
    "len(ba)": ["ba.append(1)"],
    "ba[0]": ["ba[0] = V"],
    "int(na[0])": ["na[0] = V"],
    "int(na.sum())": ["na[0] = V"],
    "ex.args[0]": ["ex.args = (V,)"],
    "ex.extra": ["ex.extra = V"],
    "len(str(ex))": ["ex.args = ('x' * V,)"],
    "lin.extra": ["lin.extra = V"],
    "lin.in_features": ["lin.in_features = V"],
    "len(list(lin.named_buffers()))": ["lin.register_buffer('b%d' % V, torch.ones(1))"],
    "lin.buf[0]": ["lin.buf.fill_(V)", "lin.buf = torch.full((1,), float(V))"],
    "vars(lin)['extra']": ["lin.extra = V"],
    "lin._buffers['buf'][0]": ["lin.buf = torch.full((1,), float(V))"],
    "len(lin._modules)": ["lin.add_module('m%d' % V, torch.nn.ReLU())"],
    "int(lin.training)": ["lin.eval()", "lin.train(V == 3)"],
    "len(lin.state_dict())": ["lin.register_buffer('b%d' % V, torch.ones(1))"],
    "len(lin._forward_hooks)": ["lin.register_forward_hook(lambda *a: None)"],
    "getattr(lin, 'nope', 0)": ["lin.nope = V"],
    "getattr(tt, 'extra', 0)": ["tt.extra = V"],
    "getattr(tt, 'more', 0)": ["tt.more = V"],
    "len(vars(tt))": ["setattr(tt, 'm%d' % V, 1)"],
    "len(seq)": ["seq.append(torch.nn.ReLU())"],
    "len(list(seq.children()))": ["seq.append(torch.nn.ReLU())"],
    "len(pl)": ["pl.append(torch.nn.Parameter(torch.ones(1)))"],
    "pl[0][0]": ["pl[0] = torch.nn.Parameter(torch.full((1,), float(V)))"],
    "int(tt.requires_grad)": ["tt.requires_grad_(V == 3)"],
    "int(tt.grad is None)": ["tt.grad = torch.ones(2)"],
    "len(seq._modules)": ["seq.append(torch.nn.ReLU())"],
    "int(hasattr(lin, 'q2'))": ["lin.q2 = V"],
    "lin.get_buffer('buf')[0]": ["lin.buf = torch.full((1,), float(V))"],
    "len(dict(lin.named_parameters()))": ["lin.register_parameter('p%d' % V, torch.nn.Parameter(torch.ones(1)))"],
    "[5, 6, 7, 8, 9, 1, 2][ix]": ["ix.i = V"],
    "len(list(ito))": ["ito.n = V"],
    "cl()": ["cl.k = V", "Callable_.k = V", "Callable_.__call__ = lambda s: V"],
    "hdct[h2]": ["hdct[h1] = V"],
    "hdct.get(h2, 0)": ["h2.v = V"],
    "int(h1 == h2)": ["h2.v = V"],
    "len(f'{fmt}')": ["fmt.v = V", "Fmt.v = V"],
    "len(f'{fmt!r}')": ["fmt.v = V"],
    "len('%s' % fmt)": ["fmt.v = V"],
    "len('{}'.format(fmt))": ["fmt.v = V"],
    "sorted([3, 1, pobj.z])[0]": ["pobj.z = V - 8"],
    "len(str(lst))": ["lst.append(V)"],
    "len(repr(dct))": ["dct['zz'] = V"],
    "len(str(pobj.z))": ["pobj.z = 10 ** V"],
    "len(copy.copy(lst))": ["lst.append(V)"],
    "copy.copy(pobj).z": ["pobj.z = V"],
    "copy.deepcopy(dct)['a']": ["dct['a'] = V"],
    "len(st)": ["st.add(V)"],
    "int(3 in st)": ["st.add(3)"],
    "sum(st)": ["st.add(V)"],
    "max(lst)": ["lst.append(V)"],
    "any(v > 3 for v in lst)": ["lst.append(V)"],
    "next(itertools.islice(iter(dct.values()), 0, 1))": ["dct['a'] = V"],
    "list(itertools.chain(lst, lst))[-1]": ["lst.append(V)"],
    "functools.reduce(operator.add, lst)": ["lst.append(V)"],
    "sum(map(operator.neg, lst))": ["lst.append(V)"],
    "len(list(zip(lst, lst)))": ["lst.append(V)"],
    "list(reversed(lst))[0]": ["lst.append(V)"],
    "list(enumerate(lst))[-1][1]": ["lst.append(V)"],
    "len([*lst, *lst])": ["lst.append(V)"],
    "lst == [1, 3]": ["lst.append(V)"],
    "int(dct == {'a': 3})": ["dct['a'] = V"],
    "lst.count(3)": ["lst.append(V)"],
    "lst.index(lst[-1])": ["lst.append(V)"],
    "int(bool(lst[1:]))": ["lst.append(V)"],
    "dct.setdefault('a', 9)": ["dct['a'] = V"],
    "len(dct.keys() & {'a', 'b'})": ["dct['b'] = V"],
    "len(dct | {'q': 1})": ["dct['q%d' % V] = 1"],
    "len(list(dct.items())[0][0])": ["dct.clear(); dct['x' * V] = 1"],
    "int(callable(pobj.z))": ["pobj.z = fn"],
    "len(dir(pobj))": ["setattr(pobj, 'e%d' % V, 1)"],
    "len(dir(P))": ["setattr(P, 'e%d' % V, 1)"],
    "int(isinstance(pobj.z, int))": ["pobj.z = 'x'"],
    "id(pobj.z) == id(lst)": ["pobj.z = lst"],
    "hash(pobj.z) % 7": ["pobj.z = V"],
    "len(string.Template('$a').substitute(a=pobj.z))": ["pobj.z = 'x' * V"],
    "len(cached0())": ["cached0().append(V)"],
    "super(PD, pdobj).go()": ["P.go = lambda s: V"],
    "getattr(super(PD, pdobj), 'a')": ["P.a = V"],
    "P.a + PD.a": ["P.a = V", "PD.a = V"],
    "pdobj.a": ["P.a = V", "PD.a = V", "pdobj.a = V"],
    "type('T', (P,), {}).a": ["P.a = V"],
    "type('T', (P,), {})().go()": ["P.go = lambda s: V"],
    "pobj.__reduce_ex__(2)[2]['z']": ["pobj.z = V"],
    "len(pobj.__dir__())": ["setattr(pobj, 'e%d' % V, 1)"],
    "pobj.__getattribute__('z')": ["pobj.z = V"],
    "P.__getattribute__(pobj, 'z')": ["pobj.z = V"],
    "pobj.__dict__['z']": ["pobj.z = V"],
    "len(P.__subclasses__())": ["globals()['N%d' % V] = type('N', (P,), {})"],
    "len(PD.__base__.__name__)": ["PD.__bases__ = (type('N' * V, (P,), {}),)"],
    "P.go.__code__.co_argcount": ["P.go.__code__ = (lambda a, b, c: 1).__code__"],
    "int(P.go.__doc__ == 'doc')": ["P.go.__doc__ = 'x'"],
    "len(P.go.__qualname__)": ["P.go.__qualname__ = 'x' * V"],
    "len(inspect.getdoc(fn))": ["fn.__doc__ = 'x' * V"],
    "len(inspect.getmembers(ns))": ["setattr(ns, 'n%d' % V, 1)"],
    "int(inspect.isfunction(pobj.z))": ["pobj.z = fn"],
    "len(inspect.getmro(PD))": ["PD.__bases__ = (type('N%d' % V, (P,), {}),) if V == 3 else (P,)"],
    "len(str(P))": ["P.__qualname__ = 'x' * V", "P.__module__ = 'x' * V"],
    "len(f'{P}' + '%s' % P)": ["P.__qualname__ = 'x' * V"],
    "len('{}'.format(P) + repr([P]) + str({'a': (1, P)}))": ["P.__qualname__ = 'x' * V"],
    "len(str(NamedC))": ["Named.flag = V"],
    "len(repr(mod))": ["mod.__name__ = 'x' * V"],
    "len(str(E))": ["E.__name__ = 'x' * V"],
    "int(issubclass(PD, Other))": ["PD.__bases__ = (Other,) if V == 3 else (P,)"],
    "int(isinstance(pdobj, (int, Other)))": ["PD.__bases__ = (Other,) if V == 3 else (P,)"],
    "super(PD, pdobj).a": ["PD.__bases__ = (Other,) if V == 3 else (P,)"],
    "len(E._member_names_) + len(E)": ["E._member_names_.append('X')"],
    "[e for e in E][-1].value": ["E._member_names_.append('X')"],
    "len(E.__members__) + ('Q3' in E.__members__)": ["E._member_map_['Q%d' % V] = E.X"],
    "E['Y'].value": ["E._member_map_['Y'] = E.X"],
    "E(2).value": ["E._value2member_map_[2] = E.X"],
    "float(decimal.Decimal(1) / 3)": ["decimal.setcontext(decimal.Context(prec=V))"],
    "cv.get(7)": ["cv.set(V)"],
    "getattr(mod, 'later', 1)": ["mod.__getattr__ = lambda name: V", "mod.later = V"],
    "getattr(bare, 'later', 1)": ["bare.later = V", "bare.__getattr__ = lambda name: V"],
}
