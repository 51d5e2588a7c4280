"""Writes a random Python module as text: `program(seed)`.

The grammar is two tables of templates, one of expressions by type and one of statements. In a template

    $T          an expression of type T                       %T      an existing variable of type T
    @1          a fresh name                                  @1:T    the same; the name is in scope after this line
    $i{@1:i}    an expression that may use the name @1        $S      a block of statements (alone on its line)

Types: i f b s: int, float, bool, str. T V Z J: float tensors of shape (n, 3), (3,) and (), an int64 tensor (n, 3). L Q S D: list,
deque, set of ints, dict str -> int. LT DT: list of T, dict str -> T. DD: defaultdict(list). U: (int, int). UT: (T, int). O H P N
E: objects of the module's classes: plain, with slots, dataclass, named tuple, enum. M: nn.Module. F: function T -> T. FI: function
int -> int.
I: iterator of ints.
Most values are whole numbers, so that sums in another order stay equal. A program need not succeed: its exception is compared, too."""
from __future__ import annotations

import random
import re

from .idioms import FAMILIES

HEADER = """\
import collections, contextlib, copy, dataclasses, enum, functools, itertools, math, operator
from collections import OrderedDict, defaultdict, deque, Counter
from dataclasses import dataclass, field
from typing import NamedTuple
import torch
import torch.nn as nn
import torch.nn.functional as F
"""

# ---- expressions: type -> templates; "3|..." has weight 3 ----------------------------------------------------------------------------

EXPRESSIONS = {
    "i": """
        3|%i
        3|#i
        $i + $i
        $i - $i
        $i * $i % 97
        $i // ($i % 5 + 1)
        $i % ($i % 7 + 1)
        -$i
        abs($i)
        $i & 15 | $i & 7
        $i ^ 3
        len($L)
        len($s)
        $T.shape[0]
        $T.shape[-1]
        $T.size(1)
        $T.dim()
        $T.numel()
        $T.ndim
        len($T)
        $O.n
        $H.n
        $P.n
        $N.a
        Row($i, $i)['a']
        len(Row($i))
        sum(Row($i))
        sum(Items($i, $i))
        Items($i, $i).first()
        Bag(b=$i)[$s]
        len(Registry(b=$i))
        $E.value
        $E.weight()
        $O.prop
        $O[$i]
        len($O)
        int($O)
        $O.bump()
        $O.lazy
        $O.missing_attr
        $M.count
        $D.get($s, $i)
        $D['a']
        $L[0] if $L else $i
        $L[$i % 3]
        sum($L)
        max($L, default=$i)
        min($i, $i)
        max($i, $i, key=lambda @1: -@1)
        $i if $b else $i
        $b + $i
        ($i or $i)
        ($i and $i)
        int($f)
        int($s or '0', 36) % 50
        round($f)
        divmod($i, 4)[1]
        pow($i % 5, 2)
        $U[0]
        $U[-1]
        $UT[1]
        ord(($s + 'q')[0])
        sum($i{@1:i} for @1 in $L)
        sum(@1 * 2 for @1 in $L if @1 > $i)
        functools.reduce(lambda @1, @2: @1 * 2 + @2, $L, $i) % 1000
        functools.reduce(operator.add, [$i, $i])
        next((@1 for @1 in $L if @1 > $i), $i)
        next($I, -1)
        next(iter($L), 5)
        $FI($i)
        (lambda @1: $i{@1:i})($i)
        (lambda @1, @2=$i: @1 - @2)($i)
        len([@1 for @1 in $L if @1 % 2])
        len({@1 % 3 for @1 in $L})
        len($S)
        len($D)
        $s.count('a')
        $s.find('b')
        operator.itemgetter(0)(($i, $i))
        operator.attrgetter('n')($O)
        getattr($O, 'n')
        getattr($O, 'nope', $i)
        getattr($O, $s, $i)
        len($Q)
        $Q[-1] if $Q else 0
        math.gcd($i, 12)
        math.floor($f)
        sum(1 for @1 in $DD.values() for @2 in @1)
        Counter($s)['a']
        sum(Counter($L).values())
        len(list(itertools.chain($L, $L)))
        len(list(zip($L, $L)))
        sum(@1 * @2 for @1, @2 in zip($L, $L))
        sum(@1 for @1, @2 in enumerate($L) if @2)
        isinstance($X, int) + 1
        callable($X) + 0
        hash($i)
        hash($O) % 97
        $H.empty
        $O.broken
        getattr($O, 'broken', $i)
        0.5|Base[$i]
        0.5|Child[$i]
        math.isqrt(abs($i)) + math.gcd($i, 6)
        math.prod($L[:2]) % 97
        $L.index($L[0]) if $L else 0
        $L.count($i)
        int(any(@1 > 2 for @1 in $L))
        0.25|int($Z)
        0.25|$Z.item() // 1 % 50
        0.1|int($T.max())
        0.25|len($T.tolist())
        0.15|g_count
        G_LIST[0] if G_LIST else 0
        G_DICT.get($s, 4)
        0.3|#helper_i
        """,
    "f": """
        2|%f
        2|#f
        $f + $i
        $f * 0.5
        $i / 2
        float($i)
        $O.f
        $P.f
        abs($f)
        math.sqrt(abs($f))
        round($f, 1)
        max($f, 0.0)
        $f if $b else $f
        0.2|float($Z)
        """,
    "b": """
        2|%b
        bool(Row($i))
        $s in Registry(a=$i)
        $i > $i
        $i == $i
        $i <= $i < $i
        $i != $i and $b
        $b or $b
        not $b
        $s == $s
        $s in $D
        $i in $L
        $i not in $S
        $s.startswith('a')
        $L == $L
        bool($L)
        $T.shape[0] > $i
        $T.requires_grad
        $T is $T
        $T is not None
        $O is $O
        $O == $O
        $O < $O
        $i in $O
        $O != $i
        bool($O)
        $P == $P
        $E is Color.RED
        $N == $N
        isinstance($X, (int, str))
        isinstance($X, torch.Tensor)
        isinstance($O, Base)
        isinstance($O, Child)
        issubclass(Child, Base)
        hasattr($O, 'extra')
        hasattr($O, 'prop')
        hasattr($X, '__len__')
        all(@1 > $i for @1 in $L)
        any($b{@1:i} for @1 in $L)
        $T.dtype == torch.float32
        $T.shape == $T.shape
        $S <= $S
        $S.isdisjoint($S)
        $M.training
        torch.is_grad_enabled()
        type($X) is int
        $U < $U
        None is $i
        torch.is_tensor($X)
        $T.is_contiguous()
        '' != $s
        0.3|bool(($Z > $i))
        0.1|bool(torch.equal($T, $T))
        0.1|bool(($T > $i).any())
        """,
    "s": """
        2|%s
        3|#s
        ($s + $s)[-6:]
        f'{%i}{%s}'[:8]
        f'{%i:>3}|{%f:.2f}'
        f'{%s!r}'[:9]
        f'{%T.shape}'
        f'{%i > 2} {Color.RED.name}'
        '%d-%s' % ($i, $s)
        '{}{}'.format($i, $s)[:8]
        '{a}'.format(a=$i)
        $s.upper()
        $s.replace('a', 'b')
        $s[::-1]
        $s[$i % 3:]
        $s * ($i % 3)
        ','.join(str(@1) for @1 in $L)[:20]
        '-'.join([$s, $s])
        str($i)
        repr($U)
        str($L)[:20]
        repr($P)
        repr($N)
        repr($O)
        str($O)
        f'{%O}'
        $E.name
        $O.name
        $s if $b else $s
        type($X).__name__
        $O.__class__.__name__
        str($D)[:20]
        sorted($D)[0] if $D else ''
        $s.strip().title()
        $s.partition('b')[0]
        'abc'[$i % 3]
        max($s or 'k', 'b')
        '%s' % $T.dtype
        $s.join(['x', 'y'])
        chr(97 + abs($i) % 26)
        0.1|str($Z)
        """,
    "T": """
        8|%T
        2|$T + $T
        $T - $T
        $T * $i
        $i * $T
        $i - $T
        $T + $f
        $T * $T
        $T / 2
        $T // 2
        $T % 7
        -$T
        $T + $V
        $V + $T
        $T * $Z
        $T @ torch.ones(3, 3)
        $T.relu()
        torch.relu($T)
        F.relu($T)
        $T.abs().clamp(max=20)
        $T.clamp(-8, 8)
        torch.where($T > $i, $T, $T)
        torch.where($T > $T, $T, $i)
        torch.stack([$T, $T]).sum(0)
        torch.cat([$T, $T], 1)[:, :3]
        torch.cat([$T, $T], dim=-1)[..., 1:4]
        $T.flip(1)
        $T.t().t()
        $T.view(-1, 3)
        $T.reshape($T.shape)
        $T.reshape(3, -1).t()
        $T[:]
        $T[:, [2, 1, 0]]
        $T.clone()
        $T.detach()
        $T.float()
        $T.to(torch.float64).to(torch.float32)
        $J.float()
        $J * 0.5
        $T.masked_fill($T > 2, $i)
        $T.expand(-1, 3)
        $T.roll(1, 0)
        $T.transpose(0, 1).mT
        $T.permute(1, 0).T
        $T.unsqueeze(0).squeeze(0)
        $T + $T.sum(0)
        $T - $T.mean(dim=1, keepdim=True)
        $T.sum(dim=0, keepdim=True) + $T
        torch.zeros_like($T) + $i
        torch.full($T.shape, $i).float()
        torch.ones($T.shape[0], 3) * $i
        $T.new_zeros($T.shape) + $V
        torch.tensor([1.0, 2.0, 3.0]) + $T
        torch.tensor([$i, $i, $i]) + $T
        $T.sigmoid()
        torch.tanh($T)
        $T.softmax(-1)
        (($T > 0) & ($T < 5)).float()
        torch.maximum($T, $T)
        $T.cumsum(1)
        $T ** 2 % 31
        $T[$i % 1:]
        torch.einsum('ij,kj->ij', $T, $T) % 13
        F.linear($T, torch.eye(3), $V)
        F.dropout($T, 0.5, False)
        $T if $b else $T
        $F($T)
        $UT[0]
        $LT[0]
        $LT[-1] if $LT else $T
        sum($LT)
        sum($LT, $T)
        $DT['k']
        $DT.get($s, $T)
        $O.scale($T)
        $O($T)
        $O.scale($T, k=$i)
        $O @ $T
        $T * $O
        $H.apply($T)
        $M($T)
        $M.helper($T)
        $P.scaled($T)
        Base.twice($T)
        type($O).twice($T)
        $O.static($T)
        functools.reduce(torch.add, $LT)
        functools.reduce(lambda @1, @2: @1 + @2, [$T, $T])
        functools.partial(torch.add, $T)($T)
        (lambda @1: $T{@1:T})($T)
        [$T{@1:i} for @1 in $L][0]
        [@1 * $i for @1 in ($T, $T)][-1]
        {@1: $T{@1:i} for @1 in range(2)}[1]
        torch.stack([@1 + $i for @1 in $T.unbind(0)])
        torch.stack(list($T))
        torch.stack([$T{@1:i} for @1 in range(2)]).amax(0)
        max([$T], key=lambda @1: @1.ndim)
        operator.add($T, $i)
        operator.mul(*($T, $i))
        torch.add($T, other=$T, alpha=$i)
        torch.add(*[$T, $T])
        torch.clamp($T, **{'min': $i % 3})
        next(iter([$T]))
        next(@1 for @1 in $LT)
        getattr($T, 'abs')()
        getattr(torch, 'neg')($T)
        $T.split(1, dim=0)[0] + $T
        $T.chunk(2, 1)[0][:, :1] + $T
        $T.topk(3, dim=1)[0]
        $T.sort(dim=1).values
        $T.max(dim=1, keepdim=True).values + $T
        G_FUNCS['neg']($T)
        G_FUNCS[$s]($T)
        0.4|#helper_T
        0.15|$T * $Z.item()
        0.1|$T[$T[:, 0] > 1]
        0.05|$T.reshape(5, 5)
        0.05|$T @ $T
        0.1|torch.tensor($T.tolist())
        0.05|$T.numpy().sum() + $T
        """,
    "V": """
        3|%V
        $V + $V
        $V * $i
        $T.sum(0)
        $T[0]
        $T[-1]
        $T[:, 0].sum() + $V
        $T.mean(0)
        $T.amax(dim=0)
        torch.arange(3) + $V
        torch.arange(3.0)
        torch.ones(3) * $i
        torch.tensor([1.0, -1.0, 2.0])
        $O.v
        $M.weight.sum(0)
        $M.scale
        $M.bias
        $P.t
        G_T
        $V.flip(0)
        torch.stack([$Z, $Z, $Z])
        $V if $b else $V
        """,
    "Z": """
        2|%Z
        $T.sum()
        $V.sum()
        $T.max()
        $V[0]
        $T[0, 1]
        $T.mean()
        ($T > $i).sum()
        torch.tensor($i)
        torch.tensor(2.0)
        torch.tensor($f)
        $Z + $i
        $Z * $Z
        $T.abs().amax()
        $V @ $V
        """,
    "J": """
        2|%J
        $T.long()
        $T.to(torch.int64)
        $J + $i
        $J * 2
        $J % 5
        $J // 2
        ($T > $i).long()
        $T.int().long()
        $T.argsort(1)
        -$J
        $J & 3
        $T.shape[0] + $J
        """,
    "L": """
        3|%L
        [$i, $i, $i]
        [$i, *$L]
        $L + [$i]
        $L[:3]
        $L[1:]
        $L[::-1]
        [$i{@1:i} for @1 in $L][:5]
        [$i{@1:i} for @1 in range($i % 4) if $b{@1:i}]
        [@1 + @2 for @1 in $L for @2 in $U][:5]
        list(range($i % 4))
        sorted($L)
        sorted($L, key=lambda @1: -@1)
        sorted($L, reverse=True)[:4]
        sorted($D.values())
        list(map(lambda @1: $i{@1:i}, $L))[:5]
        list(map(operator.add, $L, $L))
        list(filter(None, $L))
        list(filter(lambda @1: @1 > $i, $L))
        list($T.shape)
        list($U)
        list($S)[:0] + sorted($S)
        list(reversed($L))
        list(itertools.islice(itertools.count($i), 3))
        list(itertools.accumulate($L))
        list(itertools.chain.from_iterable([$L, $L]))[:5]
        list(itertools.takewhile(lambda @1: @1 < 4, $L))
        [@1 for @1, in itertools.combinations($L[:3], 1)]
        [sum(@1) for @1 in itertools.product($L[:2], $U)]
        list(itertools.zip_longest($L, $U, fillvalue=0)) and [1]
        list($Q)
        list($I)[:5]
        list($O)
        [*$U, *$L][:5]
        $O.items
        $DD['a']
        list(dict.fromkeys($L))
        $L.copy()
        copy.copy($L)
        copy.deepcopy($L)
        G_LIST
        list(@1 for @1 in $L)
        [len(@1) for @1 in ($s, $s)]
        $L if $b else $L
        ($L * 2)[:5]
        [int(@1) for @1 in str(abs($i))][:4]
        0.1|[int(@1) for @1 in $V.tolist()]
        """,
    "Q": """
        2|%Q
        deque($L, maxlen=4)
        deque($L)
        """,
    "S": """
        2|%S
        {$i, $i}
        set($L)
        {@1 % 4 for @1 in $L}
        $S | $S
        $S & $S
        $S - {$i}
        $S ^ {$i}
        frozenset($L)
        set($D.values())
        """,
    "D": """
        3|%D
        {'a': $i, 'b': $i}
        {**$D, $s: $i}
        {@1: $i{@1:s} for @1 in 'abc'}
        {@1: @2 + $i for @1, @2 in $D.items()}
        dict(a=$i, c=$i)
        dict(zip('abc', $L), a=1)
        OrderedDict(a=$i)
        $D | {'a': $i}
        dict($D)
        $O.d
        vars($P) and $D
        {str(@1): @1 for @1 in $L} | {'a': 0}
        G_DICT
        $D.copy()
        dict(sorted($D.items()))
        Registry(a=$i)
        Registry($D)
        Bag($D)
        Bag($D).copy()
        """,
    "LT": """
        3|%LT
        [$T, $T]
        [$T, *$LT][:3]
        $LT + [$T]
        [@1 + $i for @1 in $LT]
        [$T{@1:i} for @1 in range(2)]
        [@1 * @2 for @1, @2 in zip($LT, $L)] or [$T]
        list(map(torch.neg, $LT))
        [$O.scale(@1) for @1 in $LT]
        sorted([$T], key=lambda @1: @1.dim())
        $LT[::-1]
        list($DT.values())
        list($T.split(1)) and [$T]
        [@1 for @1 in $LT if @1 is not None]
        """,
    "DT": """
        3|%DT
        {'k': $T}
        {'k': $T, $s: $T}
        {**$DT, 'k': $T}
        {@1: @2 + $i for @1, @2 in $DT.items()}
        dict(k=$T)
        OrderedDict(k=$T, j=$T)
        """,
    "DD": "2|%DD\ndefaultdict(list)\ndefaultdict(list, a=$L)",
    "U": """
        2|%U
        ($i, $i)
        tuple($L[:2]) or (1, 2)
        ($i,) + ($i,)
        divmod($i, 3)
        $U[::-1]
        (lambda *@1: @1)($i, $i)
        Items($i, $i)
        """,
    "UT": "2|%UT\n($T, $i)\n(lambda @1, @2: (@1, @2))($T, $i)\n($T, $i) if $b else ($T, 3)",
    "O": """
        5|%O
        Base($i)
        Child($i)
        Child($i, name=$s)
        $O + $i
        copy.copy($O)
        $O if $b else $O
        Base.make($i)
        Child.make($i)
        """,
    "H": "3|%H\nSlots($i)",
    "P": """
        3|%P
        Point($i)
        Point(n=$i, f=$f)
        dataclasses.replace($P, n=$i)
        Point($i, tags=$L)
        """,
    "N": "3|%N\nPair($i, $i)\nPair(a=$i)\n$N._replace(a=$i)\nPair(*$U)",
    "E": "2|%E\nColor.RED\nColor($i % 2 + 1)\nColor['BLUE']\n$E.other()\nlist(Color)[0]",
    "M": "8|%M\nG_MODEL",
    "F": """
        2|%F
        torch.relu
        (lambda @1: $T{@1:T})
        functools.partial(torch.add, other=$i)
        functools.partial(operator.mul, $i)
        $O.scale
        $O
        $M
        G_FUNCS['neg']
        Base.twice
        $O.make_adder($i)
        compose(torch.neg, $F)
        """,
    "FI": "2|%FI\n(lambda @1: $i{@1:i})\nabs\n(lambda @1, *, @2=$i: @1 * @2 % 50)\nfunctools.partial(max, $i)\n$O.add\ncached",
    "I": """
        2|%I
        iter($L)
        countdown($i % 5)
        (@1 * 2 for @1 in $L)
        (@1 for @1 in $L if @1 > $i)
        map(abs, $L)
        itertools.chain($L, $L)
        zip_sum($L, $L)
        reversed($L)
        delegating($L)
        """,
    "X": "$i\n$f\n$b\n$s\n$T\n$L\n$D\n$O\n$U\nNone\n$V\n$P\n$E\n$F\n$S\n$J\n$M\n$Z",
}

CONSTANTS = {
    "i": ["0", "1", "2", "3", "-1", "5", "7"], "f": ["0.5", "1.0", "-2.5", "3.0", "0.0"],
    "s": ["'a'", "'b'", "'ab'", "''", "'k'", "'neg'", "'n'", "'abc'"],
}

# ---- statements ----------------------------------------------------------------------------------------------------------------------

STATEMENTS = [text.strip("\n") for text in """
5|@1:T = $T
---
3|%T = $T
---
2|@1:i = $i
---
2|%i = $i
---
@1:L = $L
---
@1:s = $s
---
@1:LT = $LT
---
@1:DT = $DT
---
@1:D = $D
---
@1:O = $O
---
@1:J = $J
---
@1:V = $V
---
@1:Z = $Z
---
@1:f = $f
---
@1:b = $b
---
@1:S = $S
---
@1:Q = $Q
---
@1:DD = $DD
---
@1:P = $P
---
@1:H = $H
---
@1:N = $N
---
@1:E = $E
---
@1:F = $F
---
@1:FI = $FI
---
@1:I = $I
---
@1:UT = $UT
---
@1:T, @2:i = $UT
---
@1:i, @2:i = $U
---
@1:i, *@2:L = [$i, *$L]
---
(@1:i, @2:i), @3:T = $U, $T
---
%i, %i = %i, %i
---
%T, %T = %T, %T
---
@1:V, *@2 = $T
---
@1:T = @2:T = $T
---
@1:i, @2:i = [$i{@1:i} if 0 else $i for _ in '12']
---
%i += $i
---
%i -= 1
---
%i = %i * $i % 61
---
2|%T += $i
---
%T = %T * $i
---
%T *= 2
---
%T -= $T
---
%s += $s
%s = %s[-5:]
---
@1 = %L
@1 += [$i]
del @1[8:]
---
%L *= 1
---
%D |= {'z': $i}
---
3|if $b:
    $S
---
3|if $b:
    $S
else:
    $S
---
if $b:
    $S
elif $i > $i:
    $S
else:
    $S
---
0.6|if $T.sum() > $i:
    $S
---
0.3|if $Z > $i:
    $S
else:
    $S
---
0.2|if $T[0, 0]:
    $S
---
if (@1:i := $i) > $i:
    $S
---
2|for @1:i in range($i % 4):
    $SL
---
2|for @1:i in $L:
    $SL
---
for @1:i, @2:i in enumerate($L):
    $SL
---
for @1:s, @2:i in $D.items():
    $SL
---
for @1:s in $D:
    $SL
---
for @1:s, @2:T in $DT.items():
    $SL
---
for @1:T, @2:i in zip($LT, $L):
    $SL
---
2|for @1:T in $LT:
    $SL
---
for @1:T in list($T.unsqueeze(1)):
    $SL
---
0.5|for @1:V in $T:
    $SL
---
for @1:i in $I:
    $SL
---
for @1:i in sorted($S):
    $SL
---
for @1:i in $L:
    $SL
else:
    $S
---
for @1:i, (@2:i, @3:i) in enumerate(itertools.product($L[:2], (1, 2))):
    $SL
---
for @1:i in countdown(3):
    $SL
---
for @1:T in (%T, $T):
    $SL
---
for @1:i in $Q:
    $SL
---
for @1:E in Color:
    $SL
---
for @1:F in (torch.neg, $F):
    %T = @1(%T)
---
@1 = 0
while @1 < $i % 4:
    @1 += 1
    $SL
---
@1 = 3
while @1:
    @1 -= 1
    $SL
else:
    $S
---
@1 = 0
while True:
    @1 += 1
    if @1 > 3:
        break
    $SL
    if $b:
        break
---
0.4|@1:T = $T.abs() + 1
@2 = 0
while @1.sum() < 40 and @2 < 4:
    @1 = @1 * 2
    @2 += 1
    $SL
---
!break|if $b:
    break
---
!break|if $i > $i:
    continue
---
!break|0.2|break
---
!break|0.2|continue
---
2|try:
    $S
except $EXC:
    $S
---
try:
    $S
    $RAISE
except $EXC as @1:
    @2:s = str(@1)[:40]
    $S
---
try:
    $S
    $RAISE
except $EXC as @1:
    @2:s = type(@1).__name__
    $S
else:
    $S
finally:
    $S
---
try:
    $S
finally:
    $S
---
try:
    $S
except Exception:
    $S
    raise
---
try:
    try:
        $S
        $RAISE
    except $EXC as @1:
        raise Problem('inner', $i) from @1
except (Problem, ValueError) as @2:
    @3:s = repr(@2.args)[:30] + str(type(@2.__cause__))
---
try:
    $S
    $RAISE
except ValueError:
    $S
except (TypeError, KeyError) as @1:
    $S
except Exception:
    @2:s = 'other'
---
try:
    @1:T = $T.view(7, 7)
except RuntimeError as @2:
    @1:T = $T
---
try:
    @1:i = $L[$i]
except IndexError:
    @1:i = 0
---
try:
    @1:i = $D[$s]
except KeyError as @2:
    @1:i = len(str(@2))
---
@1 = $X
try:
    @1 += $X
except TypeError as @2:
    @3:s = str(@2)
---
@1 = $X
try:
    @1 -= $s
except TypeError as @2:
    @3:s = str(@2)
---
@1 = $X
try:
    @1 *= $f
except TypeError as @2:
    @3:s = str(@2)
---
0.5|try:
    @1:s = str(divmod($X, $s))
except TypeError as @2:
    @1:s = str(@2)
---
0.5|try:
    from math import nothing
except ImportError as @1:
    @2:s = @1.name
---
0.5|try:
    raise ValueError from $X
except (TypeError, ValueError) as @1:
    @2:s = str(@1)
---
0.5|try:
    %H.other = $i
except AttributeError as @1:
    @2:s = str(@1)
---
0.3|del %H.empty
---
0.3|%H.empty = $i
---
0.3|$RAISE
---
0.4|if $b:
    $RAISE
---
0.3|assert $i < 60, $s
---
with torch.no_grad():
    $S
---
with torch.enable_grad():
    $S
---
with torch.set_grad_enabled($b):
    $S
---
with Recorder($i) as @1:i:
    $S
---
with Recorder($i):
    $S
    $RAISE
---
with Suppress():
    $S
    $RAISE
    $S
---
with managed($i) as @1:i:
    $S
---
with contextlib.suppress(ValueError, KeyError):
    $S
    $RAISE
---
with contextlib.nullcontext($i) as @1:i, Recorder(2):
    $S
---
with contextlib.ExitStack() as @1:
    @1.callback($D.update, q=$i)
    $S
---
match $i:
    case 0 | 1:
        $S
    case @1:i if @1 > 3:
        $S
    case _:
        $S
---
match $L:
    case []:
        $S
    case [@1:i]:
        $S
    case [@2:i, *@3:L]:
        $S
---
match $D:
    case {'a': @1:i, **@2:D}:
        $S
    case _:
        $S
---
match $s:
    case 'a' | 'b' as @1:s:
        $S
    case str():
        $S
---
match $P:
    case Point(@1:i, f=0.5):
        $S
    case Point(n=@2:i):
        $S
---
match $X:
    case int(@1:i):
        $S
    case torch.Tensor():
        $S
    case None | str():
        $S
    case (@2, @3):
        $S
---
match $E:
    case Color.RED:
        $S
    case Color.BLUE:
        $S
---
2|@1 = %L
@1.append($i)
del @1[8:]
---
@1 = %L
@1.extend($L)
del @1[6:]
---
@1 = %L
@1.insert(0, $i)
del @1[8:]
---
%L[0] = $i
---
@1 = %L
@1[1:2] = [$i, $i]
del @1[8:]
---
%L.sort(key=lambda @1: (@1 % 3, @1))
---
%L.sort(reverse=True)
---
%L.reverse()
---
if %L:
    @1:i = %L.pop()
---
@1:i = %L.pop(0) if len(%L) > 3 else $i
---
if $i in %L:
    %L.remove($i)
---
%L.remove($i)
---
%L.clear()
---
del %L[:1]
---
%LT.append($T)
del %LT[4:]
---
%LT[0] = $T
---
%LT[-1] += $i
---
%LT[0].add_($i)
---
%DT[$s] = $T
---
%DT['k'] = %DT['k'] + $i
---
for @1:s in list(%DT):
    %DT[@1] = %DT[@1] * 2
---
2|%D[$s] = $i
---
%D['a'] += $i
---
%D.update(q=$i)
---
%D.update({$s: $i})
---
@1:i = %D.setdefault($s, $i)
---
@1:i = %D.pop($s, $i)
---
del %D[$s]
---
if 'b' in %D:
    del %D['b']
---
@1 = %DD[$s]
@1.append($i)
del @1[8:]
---
@1 = %DD
@1['a'] += [$i]
del @1['a'][8:]
---
%S.add($i)
---
%S.discard($i)
---
%S |= {$i}
---
%Q.append($i)
---
%Q.appendleft($i)
---
%Q.rotate(1)
---
if %Q:
    @1:i = %Q.popleft()
---
2|%O.n = $i
---
%O.n += 1
---
%O.v = $V
---
%O.v += $i
---
%O.extra = $i
---
%O.extra = $T
---
if hasattr(%O, 'extra'):
    del %O.extra
---
setattr(%O, 'n', $i)
---
setattr(%O, $s or 'q', $i)
---
%O.prop = $i
---
%O.items.append($i)
del %O.items[5:]
---
%O.items = $L
---
%O.d[$s] = $i
---
%O[$i] = $i
---
del %O[$i]
---
%O += $i
---
%O.__dict__['n'] = $i
---
%O.other = %O
---
%H.n = $i
---
%H.t = $T
---
%P.n = $i
---
%P.tags.append($i)
---
%P.t = $V
---
%M.count += 1
---
%M.scale += 1
---
%M.scale = %M.scale + $i
---
%M.last = $T
---
%M.scale.add_($i)
---
with torch.no_grad():
    %M.weight.add_(1)
---
$O.log($i)
---
Child.created += 1
---
0.6|g_count = $i
---
0.6|g_count += 1
---
0.4|g_tensor = $T
---
0.3|@1:T = g_tensor
---
G_LIST.append($i)
del G_LIST[6:]
---
G_DICT[$s] = $i
---
2|%T.add_($i)
---
%T.mul_(2)
---
%T[0] = $i
---
%T[:, 1] = $V.sum()
---
%T[0] += $V
---
%T[$T > 1] = 0
---
%T.copy_($T)
---
%T.zero_()
---
%T.clamp_(-9, 9)
---
@1:V = %T[0]
@1.add_($i)
---
@1:T = %T.view(-1, 3)
@1.mul_(2)
---
@1:T = %T[:]
@1[0, 0] = 9
---
%J += 1
---
%V.add_(1)
---
%T.sub_($T)
---
%T.t().add_(1)
---
torch.add(%T, 1, out=%T)
---
@1:T = %T
@1 += 1
---
%T.data.add_(1)
---
0.4|%T.requires_grad_()
---
1.2|print($X)
---
print($i, $s, sep='/')
---
print(f'{%i} {%s}')
---
0.5|print($T)
---
print($L, $D, end=';')
---
def @1(@2, @3=$i, *@4, @5=$s, **@6):
    $BT{@2:T @3:i @4:L @5:s @6:D}
%T = @1(%T)
%T = @1(%T, $i, $i, @5=$s, q=$i)
---
@1:i = $i
def @2(@3):
    nonlocal @1
    @1 += 1
    $BT{@1:i @3:T}
%T = @2(%T)
%T = @2(%T)
---
@1:L = [$i]
def @2(@3, *, @4=None):
    @1.append(@3)
    del @1[8:]
    $Bi{@1:L @3:i}
%i = @2($i)
@5:FI = @2
---
def @1(@2):
    def @3(@4):
        $BT{@2:i @4:T}
    return @3
%T = @1($i)(%T)
@5:F = @1($i)
---
@1:FI = lambda @2: $i{@2:i}
---
@1:F = lambda @2, @3=$i: $T{@2:T @3:i}
---
def @1(@2):
    for @3 in range(@2):
        $B1{@2:i @3:i}
        yield @3 + $i{@2:i @3:i}
@4:L = list(@1($i % 4))
@5:I = @1(2)
---
@1 = [lambda @2, @3=@3: @2 * @3 for @3 in $L[:3]]
for @4 in @1:
    %T = @4(%T)
---
@1 = [lambda: @2 for @2 in range(3)]
@3:i = sum(@4() for @4 in @1)
---
class @1:
    k = $i
    def __init__(self, v):
        self.v = v
    def run(self, @2):
        return @2 * self.k + self.v
%T = @1($i).run(%T)
---
@1:T = torch.zeros(2, 3)
for @2 in range(2):
    @1[@2] = $V{@2:i}
---
@1:T, @2:i = helper_star($T, *$L, **{'w': $i})
---
@1:T = helper_star($T, $i, w=$i)[0]
---
@1:T = recurse($T, $i % 4)
---
@1 = countdown(3)
@2:i = next(@1)
@3:L = [*@1]
---
@1 = echo()
next(@1)
@2:i = @1.send($i)
@1.close()
---
@1:D = {}
for @2, @3 in itertools.groupby(sorted($L, key=lambda @4: @4 % 2), key=lambda @4: @4 % 2):
    @1[str(@2)] = len(list(@3))
@1['a'] = 1
---
@1:D = dict(Counter(str(@2) for @2 in $L).most_common(2)) | {'a': 1}
---
0.3|del %T
---
!return|1.5|if $b:
    return $R
---
!return|0.3|return $R
---
!return|0.4|if $T.sum() > $i:
    return $R
---
@1:i = 0 if $T is None else $T.shape[0]
---
0.3|@1:i = int($Z)
---
0.3|@1:f = $T.sum().item()
---
0.2|@1:L = [int(v) for v in $V.tolist()]
---
0.4|@1:T = $T.requires_grad_(False) if not $T.requires_grad else $T
---
@1:T = $T.detach()
@1 += 1
---
pass
---
@1:T = torch.utils._pytree.tree_map(lambda @2: @2 + 1, {'t': $T})['t']
---
@1 = functools.wraps(compose)(lambda @2: @2 + $i)
%T = @1(%T)
---
@1:s = max($D.items(), key=lambda @2: (@2[1], @2[0]))[0] if $D else 'e'
---
@1:L = sorted([(@2 % 3, @2) for @2 in $L], key=operator.itemgetter(0, 1)) and [$i]
---
@1 = {'w': $i}
@2:T = with_options($T, **@1)
@3:T = with_options($T, flag=$b)
---
@1:i = sum(1 for _ in $I)
---
@1:L = [@2 for @2 in %L if (@3:i := @2 % 5) > 1]
---
@1:T = (@2:T := $T) + @2
---
@1:i = (@2:i := $i) + @2
""".split("---\n")]

EXCEPTIONS = ["ValueError", "KeyError", "Exception", "(ValueError, RuntimeError)", "RuntimeError", "Problem", "LookupError", "TypeError",
              "ZeroDivisionError", "IndexError", "AttributeError", "BaseException"]
RAISES = ["raise ValueError($s)", "raise KeyError($s)", "raise Problem($s, $i)", "raise RuntimeError('r', $i)", "raise ValueError",
          "[][$i]",
          "{}[$s]", "1 // 0", "$T.view(5, 11)", "$T + torch.ones(7)", "undefined_name", "None.foo", "raise IndexError", "$i + $s",
          "int('x')",
          "pass", "pass", "pass", "pass", "pass", "pass", "pass", "pass", "raiser($i)", "torch.cat([$T, torch.ones(1)])",
          "raise StopIteration", "$L[99]", "raise type('Q', (ValueError,), {})('q')",
          "next(iter(()))"]

CLASSES = """
class Problem(Exception):
    def __init__(self, text, code=0):
        super().__init__(text)
        self.code = code

class Base:
    factor = ~2
    created = 0
    registry = []

    def __init__(self, n, name='base'):
        self.n = n
        self.name = name
        self.f = n / 2
        self.v = torch.tensor([1.0, 2.0, 3.0]) * ~2
        self.items = [n, 1]
        self.d = {'a': n}

    @property
    def prop(self):
        $Bi{self:O}

    @prop.setter
    def prop(self, value):
        self.n = value + ~2

    @property
    def broken(self):
        return self.name.nothing

    def __class_getitem__(cls, key):
        cls.created += key
        return cls.factor + key

    @staticmethod
    def static(t):
        $BT{t:T}

    @classmethod
    def make(cls, n):
        cls.created += 1
        return cls(n + cls.factor)

    @staticmethod
    def twice(t):
        return t * 2

    @functools.cached_property
    def lazy(self):
        return self.n * 3

    def __getattr__(self, name):
        if name in ('missing_attr', 'broken'):
            return 11
        raise AttributeError(name)

    def __len__(self):
        return len(self.items)

    def __bool__(self):
        return self.n > 0

    def __eq__(self, other):
        return isinstance(other, Base) and self.n == other.n

    def __hash__(self):
        return self.n - 2 ** 62

    def __lt__(self, other):
        return self.n < other.n

    def __contains__(self, item):
        return item in self.items

    def __getitem__(self, k):
        $Bi{self:O k:i}

    def __setitem__(self, k, value):
        self.d[str(k)] = value

    def __delitem__(self, k):
        del self.d[str(k)]

    def __iter__(self):
        for item in self.items:
            yield item + 1

    def __int__(self):
        return self.n

    def __add__(self, k):
        new = copy.copy(self)
        new.n = self.n + k
        return new

    def __iadd__(self, k):
        self.n += k
        return self

    def __matmul__(self, t):
        return t + self.v

    def __rmul__(self, t):
        return t * self.n

    def __call__(self, t):
        $BT{self:O t:T}

    def __repr__(self):
        return f'{type(self).__name__}({self.n})'

    def scale(self, t, k=2):
        $BT{self:O t:T k:i}

    def add(self, k):
        return self.n + k

    def bump(self):
        self.n += 1
        return self.n

    def log(self, k):
        self.registry.append(k)
        del self.registry[3:]

    def make_adder(self, k):
        return lambda t: t + self.n + k


class Child(Base):
    def __init__(self, n, name='child'):
        super().__init__(n, name)
        self.kind = 'c'

    @property
    def prop(self):
        return super().prop + 1

    @prop.setter
    def prop(self, value):
        Base.prop.fset(self, value)

    def scale(self, t, k=2):
        t = super().scale(t, k)
        $BT{self:O t:T k:i}

    def bump(self):
        return super().bump() + self.factor

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def __str__(self):
        return 'child' + str(self.n)


class Slots:
    __slots__ = ('n', 't', 'empty')

    def __init__(self, n):
        self.n = n

    def __getattr__(self, name):
        if name == 'empty':
            return 7
        raise AttributeError(name)

    def apply(self, t):
        self.t = t
        $BT{self:H t:T}


@dataclass
class Point:
    n: int = 1
    f: float = 0.5
    tags: list = field(default_factory=list)
    t: object = None

    def __post_init__(self):
        if self.t is None:
            self.t = torch.ones(3) * self.n

    def scaled(self, t):
        $BT{self:P t:T}


class Pair(NamedTuple):
    a: int
    b: int = 2


class Row(Pair):
    __slots__ = ()

    def __getitem__(self, key):
        return getattr(self, key) if isinstance(key, str) else super().__getitem__(key)

    def __len__(self):
        return 2 + ~2

    def __iter__(self):
        yield ~2
        yield from super().__iter__()


class Items(tuple):
    def __new__(cls, *items):
        return super().__new__(cls, items)

    def first(self):
        return self[0]


class Registry(OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value + ~2)

    def __contains__(self, key):
        G_DICT['asked'] = len(key)
        return super().__contains__(key)


class Bag(dict):
    def __missing__(self, key):
        return ~2

    def __iter__(self):
        return iter(sorted(super().__iter__(), reverse=~b))


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    def weight(self):
        return self.value * ~2

    def other(self):
        return Color.BLUE if self is Color.RED else Color.RED


class Recorder:
    def __init__(self, k):
        self.k = k

    def __enter__(self):
        G_LIST.append(self.k)
        return self.k

    def __exit__(self, kind, value, trace):
        G_LIST.append(0 if kind is None else 1)
        del G_LIST[6:]
        return ~b


class Suppress:
    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        return kind is not None and issubclass(kind, Exception)


@contextlib.contextmanager
def managed(k):
    G_DICT['m'] = k
    try:
        yield k + 1
    finally:
        G_DICT['m'] = -1


class Model(nn.Module):
    def __init__(self, n=3):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) * 2)
        self.bias = nn.Parameter(torch.ones(3))
        self.register_buffer('scale', torch.ones(3))
        self.count = 0
        self.n = n
        self.parts = nn.ModuleList([nn.ReLU(), nn.Identity()])
        self.seq = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        with torch.no_grad():
            self.seq[0].weight.copy_(torch.eye(3))
            self.seq[0].bias.fill_(1)

    def helper(self, t):
        $BT{self:M t:T}

    def forward(self, t):
        $BM{self:M t:T}
        t = t @ self.weight + self.bias
        for part in self.parts:
            t = part(t)
        return t * self.scale if self.training else self.seq(t)


def compose(f, g):
    return lambda t: f(g(t))

@functools.lru_cache(maxsize=None)
def cached(n):
    return n * 2 + 1

def countdown(n):
    while n > 0:
        yield n
        n -= 1

def echo():
    got = 0
    while True:
        got = (yield got) or 0

def zip_sum(a, b):
    for u, v in zip(a, b):
        yield u + v

def delegating(items):
    got = yield from items
    yield 5

def raiser(n):
    raise Problem('raiser', n)

def recurse(t, n):
    if n <= 0:
        return t
    return recurse(t + n, n - 1) * 1

def helper_star(t, *args, w=1, **rest):
    return t * w + sum(args) + len(rest), len(args)

def with_options(t, flag=True, **options):
    if flag:
        t = t + options.get('w', 1)
    return with_inner(t, **options)

def with_inner(t, w=3, q=4):
    return t * w - q
"""

GLOBALS = """
g_count = ~3
g_tensor = torch.zeros(2, 3)
G_LIST = [1, ~5]
G_DICT = {'a': 1, 'k': ~3}
G_T = torch.tensor([1.0, 0.0, 2.0])
G_FUNCS = {'neg': torch.neg, 'a': lambda t: t + 1}
G_MODEL = Model()
"""

ARGUMENTS = {"i": ["~4", "0", "1", "~9"], "f": ["0.5", "~3.0", "1.5"], "s": ["'a'", "'b'", "'k'", "'neg'"], "b": ["True", "False"],
             "L": ["[1, 2]", "[]", "[3, ~4, 1]", "[~2]"], "D": ["{'a': ~3}", "{'a': 1, 'b': 2}", "{}"], "S": ["{1, ~5}"], "U": ["(1, ~4)"],
             "O": ["Base(~3)", "Child(~3)"], "P": ["Point(~3)", "Point(2, 1.5)"], "H": ["Slots(~3)"], "N": ["Pair(1, ~3)"],
             "M": ["Model()"],
             "E": ["Color.RED", "Color.BLUE"], "F": ["torch.sin", "lambda t: t - 1"], "DT": ["{'k': $tensor}"], "LT": ["[$tensor, $tensor]",
                 "[$tensor]"],
             "UT": ["($tensor, ~3)"], "Q": ["deque([1, 2], maxlen=3)"], "DD": ["defaultdict(list, a=[1])"],
             "J": ["torch.arange(3 * ^).reshape(^, 3)"],
             "V": ["torch.tensor([1.0, -1.0, ~3.0])", "torch.ones(3)"], "Z": ["torch.tensor(~3.0)", "torch.tensor(~5)"]}
TENSORS = ["torch.arange(3.0 * ^).reshape(^, 3)", "torch.ones(^, 3)", "torch.arange(3.0 * ^).reshape(^, 3) - ~4", "torch.zeros(^, 3)",
           "torch.arange(3.0 * ^).reshape(3, ^).t()", "torch.arange(3.0 * ^).reshape(^, 3).requires_grad_()",
           "torch.arange(3.0 * ^).reshape(^, 3) % 4",
           "torch.arange(3.0 * ^).flip(0).reshape(^, 3)", "torch.full((^, 3), ~4.0)"]
BETWEEN = ["%O.n += 1", "%O.n = ~4", "%O.extra = ~3", "%O.items.append(~3)", "%O.d['b'] = 1", "%O.f = 2.0", "%O.v = torch.ones(3) * ~3",
           "vars(%O).pop('extra', None)", "%O.__class__ = Base", "%P.n += 1", "%P.tags.append(1)", "%M.eval()", "%M.train()",
           "%M.scale.add_(1)",
           "%M.count += 1", "%M.parts.append(nn.ReLU())", "%M.scale = torch.ones(3) * 2", "%L.append(~4)", "%D['b'] = ~3",
           "%D.pop('a', None)",
           "global:g_count = ~6", "global:g_count += 1", "G_LIST.append(~3)", "G_LIST.clear()", "G_DICT['b'] = 1", "G_DICT.pop('k', None)",
           "global:G_T = torch.ones(3)", "global:G_T = torch.zeros(3, dtype=torch.float64)", "Base.factor = ~4", "Child.factor = 1",
           "Child.bump = lambda self: 1", "Base.__len__ = lambda self: 2", "Child.__getattr__ = lambda self, name: 3", "Base.lazy = 4",
           "Child.__class_getitem__ = classmethod(lambda cls, key: key)",
           "%H.empty = ~3", "G_FUNCS['neg'] = torch.relu", "G_MODEL.eval()", "global:cached = abs", "Base.created = 0",
           "G_MODEL.scale.mul_(2)", "%H.n += 1", "entry.__defaults__ = entry.__defaults__", "%LT.append(%LT[0])", "%DT.update(j=%DT['k'])",
           "global:helper_i = lambda *a, **k: 3", "%M.register_forward_hook(lambda m, a, out: out + 1)", "%S.add(~5)",
           "torch.manual_seed(0)"]


def weighted(text: str) -> tuple[float, str]:
    head, bar, rest = text.partition("|")
    return (float(head), rest) if bar and re.fullmatch(r"[\d.]+", head) else (1.0, text)


def table(texts) -> tuple[list, list]:
    pairs = [weighted(t) for t in texts]
    return [t for _, t in pairs], [w for w, _ in pairs]


TEMPLATES = {kind: table(line.strip() for line in text.strip().splitlines()) for kind, text in EXPRESSIONS.items()}
LEAVES = {"i": "1", "f": "0.5", "b": "True", "s": "'a'", "T": "torch.ones(2, 3)", "V": "torch.ones(3)", "Z": "torch.tensor(1.0)",
          "L": "[1, 2]",
          "J": "torch.ones(2, 3, dtype=torch.int64)", "Q": "deque([1])", "S": "{1}", "D": "{'a': 1}", "LT": "[torch.ones(2, 3)]",
          "DT": "{'k': torch.ones(2, 3)}", "DD": "defaultdict(list)", "U": "(1, 2)", "UT": "(torch.ones(2, 3), 1)", "O": "Base(1)",
          "H": "Slots(1)",
          "P": "Point(1)", "N": "Pair(1)", "E": "Color.RED", "M": "G_MODEL", "F": "torch.neg", "FI": "abs", "I": "iter([1, 2])", "X": "1"}
PLAIN, IN_LOOP, RETURNS = [], [], []
for _text in STATEMENTS:
    if _text.startswith("!break|"):
        IN_LOOP.append(weighted(_text[7:]))
    elif _text.startswith("!return|"):
        RETURNS.append(weighted(_text[8:]))
    else:
        PLAIN.append(weighted(_text))

FAMILIES = {name: (front, [weighted(text.strip("\n")) for text in statements.split("---\n")], between.strip().split("\n"))
            for name, (front, statements, between) in FAMILIES.items()}

HOLE = re.compile(r"([$%])([A-Z][A-Za-z1]*|[a-z])(?:\{([^}']*)\})?|#(\w+)|@(\d)")
NAME = re.compile(r"(\$\w+\{[^}]*\})|@(\d)(?::([A-Z]+|[ifbs])(?!\w))?")


SOMETIMES = ("if", "elif", "else:", "match", "while", "except", "except*")     # what is defined below these may be missing afterwards


class Impossible(Exception):
    """A template needs a variable of a type that is not in scope."""


class Writer:
    """The state while a program is written. scope: variable -> type; names: how many fresh names were given; methods: False inside
    of classes, whose bodies must not call each other without end; kind: what the function at hand returns."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.scope: dict = {}
        self.names = 0
        self.methods = False
        self.helpers: list = []
        self.kind = "X"
        self.budget = 0
        self.families = [FAMILIES[name] for name in self.rng.sample(list(FAMILIES), 3)]
        self.favourites = [(5.0 * weight, text) for _, statements, _ in self.families for weight, text in statements]

    def fresh(self) -> str:
        self.names += 1
        return f"v{self.names}"

    def variable(self, kind: str) -> str:
        found = [n for n, k in self.scope.items() if k == kind]
        if not found:
            raise Impossible
        return self.rng.choice(found[-4:] if self.rng.random() < 0.7 else found)

    def expand(self, template: str, depth: int) -> str:
        """The text of a template."""
        local = {}

        def name(digit):
            if digit not in local:
                local[digit] = self.fresh()
            return local[digit]

        def hole(m):
            sigil, kind, extra, constant, digit = m.groups()
            if digit:
                return name(digit)
            if constant:
                return self.special(constant, depth)
            if sigil == "%":
                return self.variable(kind)
            outer = self.scope
            if extra:
                self.scope = dict(outer)
                for pair in extra.split():
                    n, k = pair.split(":")
                    self.scope[name(n[1:]) if n[0] == "@" else n] = k
            try:
                return self.expression(kind, depth - 1)
            finally:
                self.scope = outer
        return HOLE.sub(hole, template)

    def special(self, what: str, depth: int) -> str:
        if what in CONSTANTS:
            return self.rng.choice(CONSTANTS[what])
        fitting = [h for h in self.helpers if h[1] == what[-1]]
        if not fitting:
            raise Impossible
        helper, _, params = self.rng.choice(fitting)
        args = [self.expression(p, depth - 1) for p in params]
        return f"{helper}({', '.join(args)})"

    def expression(self, kind: str, depth: int) -> str:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.3:
            try:
                return self.variable(kind)
            except Impossible:
                if kind in CONSTANTS:
                    return rng.choice(CONSTANTS[kind])
                if depth <= 0:
                    return LEAVES[kind]
        texts, weights = TEMPLATES[kind]
        for _ in range(6):
            template = rng.choices(texts, weights)[0]
            if not self.methods and re.search(r"\$[OMPH](?!\.(n|f|v|items|d|count|scale|weight\.|bias|tags|t|name)\b)|^(Base|Child)\.",
                                              template):
                continue
            try:
                text = self.expand(template, depth)
            except Impossible:
                continue
            return f"({text})" if re.search(r" (if|or|and|in|is|not|<|>|==|<=|!=|\+|-|\*|/|//|%|@|&|\||\^|:=|\*\*) |^[-(]?lambda|^-|^not ",
                                            text) \
                and not (text.startswith("(") and text.endswith(")") and text.count("(") == 1) else text
        return LEAVES[kind]

    def block(self, indent: str, count: int, depth: int, loop: bool, extra=()) -> list:
        outer, self.scope = self.scope, {**self.scope, **dict(extra)}
        lines = []
        for _ in range(count):
            if self.budget <= 0:
                break
            lines += self.statement(indent, depth, loop)
        if self.rng.random() > 0.04:             # now and then, a name of the block is used after it
            self.scope = outer
        return lines or [indent + "pass"]

    def statement(self, indent: str, depth: int, loop: bool) -> list:
        self.budget -= 1
        choices = PLAIN + (self.favourites if self.methods else []) + (IN_LOOP * 6 if loop else []) + (RETURNS if self.kind else [])
        for _ in range(20):
            weight, template = self.rng.choices(choices, [w for w, _ in choices])[0]
            if depth <= 0 and "\n" in template and "    $" in template:
                continue
            before, names = dict(self.scope), self.names
            try:
                return self.lines(template, indent, depth, loop)
            except Impossible:
                self.scope, self.names = before, names
        return [indent + "pass"]

    def lines(self, template: str, indent: str, depth: int, loop: bool) -> list:
        local, out, first, certain, perhaps = {}, [], "", set(), set()
        if not self.methods and re.search(r"\$[OMPH]\b(?!\.(n|f|v|items|d)\b)|%O\.prop|%[OPH]\b.*[+\[]", template):
            raise Impossible
        for digit in dict.fromkeys(re.findall(r"@(\d)", template)):
            local[digit] = self.fresh()
        for line in template.split("\n"):
            spaces = indent + line[:len(line) - len(line.lstrip())]
            text = line.strip()
            m = re.fullmatch(r"\$(SL|S|BT|Bi|BM|B1)(?:\{(.*)\})?", text)
            if m:
                extra = [re.sub(r"@(\d)", lambda d: local[d[1]], pair).split(":") for pair in (m[2] or "").split()]
                inner_loop = m[1] == "SL" or m[1] == "S" and loop
                if m[1] in ("BT", "Bi"):
                    out += self.body(spaces, depth, m[1][1], extra)
                elif m[1] in ("BM", "B1"):
                    kind, self.kind = self.kind, None
                    out += self.block(spaces, self.rng.randint(0, 2), depth - 1, False, extra)
                    self.kind = kind
                else:
                    out += self.block(spaces, self.rng.choice((1, 1, 2, 2, 3)), depth - 1, inner_loop)
                continue
            if text == "$RAISE":
                text = self.rng.choice(RAISES)
            text = text.replace("$EXC", self.rng.choice(EXCEPTIONS))
            if "$R" in text:
                text = text.replace("$R", self.result())
            defined = {local[d]: k for _, d, k in NAME.findall(text) if k}
            text = NAME.sub(lambda m: re.sub(r"@(\d)", lambda d: local[d[1]], m[1]) if m[1] else local[m[2]], text)
            text = self.expand(text, 3)
            out.append(spaces + text)
            self.scope.update(defined)
            first = first if line[:1] == " " else text.split(" ")[0]
            (perhaps if line[:1] == " " and first in SOMETIMES else certain).update(defined)
        for name in sorted(perhaps - certain):
            if self.rng.random() > 0.1:
                self.scope.pop(name, None)
        return out

    def body(self, indent: str, depth: int, kind: str, extra) -> list:
        """A function's body that ends with a return."""
        outer, old = self.scope, (self.kind, self.methods)
        self.scope, self.kind = {**{n: k for n, k in outer.items() if n.startswith("v")}, **dict(extra)}, kind
        if len(extra) and extra[0][0] in ("self", "t"):
            self.scope = dict(extra)
        writable, reads = dict(extra), dict(self.scope)
        # Assigning to a name of the enclosing function would make it local: only own names are written
        count = self.rng.choice((0, 0, 1, 2, 3)) if depth > 0 else 0
        self.scope = writable
        lines = []
        for _ in range(count):
            if self.budget > 0:
                lines += self.statement(indent, min(depth - 1, 2), False)
        self.scope = {**reads, **self.scope}
        lines.append(f"{indent}return {self.expression(kind, 3)}")
        self.scope, (self.kind, self.methods) = outer, old
        return lines

    def result(self) -> str:
        if self.kind in ("T", "i"):
            return self.expression(self.kind, 2)
        rng, names = self.rng, list(self.scope)
        picked = [rng.choice(names[-12:]) if rng.random() < 0.8 else rng.choice(names) for _ in range(rng.randint(1, 5))]
        kind = rng.random()
        if kind < 0.1:
            return self.expression("T", 2)
        if kind < 0.2:
            return "{" + ", ".join(f"'{n}': {n}" for n in picked) + "}"
        if kind < 0.3:
            return f"[{', '.join(picked)}, {self.expression('X', 2)}]"
        return f"({', '.join(picked)}, {self.expression('T', 2)})"

    def constants(self, text: str, n: int) -> str:
        text = text.replace("^", str(n))
        while "$tensor" in text:
            text = text.replace("$tensor", self.rng.choice(TENSORS).replace("^", str(n)), 1)
        text = re.sub(r"~b", lambda m: str(self.rng.random() < 0.2), text)
        return re.sub(r"~(\d+)", lambda m: str(self.rng.randint(0, int(m[1]))), text)

    # ---- the module ----------------------------------------------------------------------------------------------------------------

    def template_text(self, text: str) -> list:
        out = []
        for line in self.constants(text, 2).split("\n"):
            m = re.fullmatch(r"( *)\$(BT|Bi|BM)\{(.*)\}", line)
            if not m:
                out.append(line)
                continue
            self.budget = 4 if self.rng.random() < 0.3 else 0
            out += self.lines(m[0][len(m[1]):], m[1], 2, False)
        return out

    def function(self, name: str, kind: str | None, budget: int, params: list, header: str) -> list:
        self.scope = {n: k for n, k in params}
        self.kind = kind or "X"
        self.budget = budget
        lines = [header, "    global g_count, g_tensor"]
        while self.budget > 0:
            lines += self.statement("    ", 3, False)
        lines.append(f"    return {self.result()}")
        return lines

    def module(self) -> str:
        rng = self.rng
        fronts = [line for front, _, _ in self.families for line in self.template_text(front)]
        lines = [HEADER] + self.template_text(CLASSES) + self.template_text(GLOBALS) + fronts
        self.methods = True
        for n in range(rng.randint(0, 2)):
            kind, params = rng.choice("TTi"), [f"p{i}" for i in range(rng.randint(1, 3))]
            kinds = ["T"] + [rng.choice(["i", "T", "L", "O", "s", "D", "LT"]) for _ in params[1:]]
            name = f"helper{n}"
            lines += ["", *self.function(name, kind, rng.randint(1, 5), list(zip(params, kinds)), f"def {name}({', '.join(params)}):")]
            self.helpers.append((name, kind, kinds))
        kinds = ["T"] + [rng.choice(list(ARGUMENTS) + ["T", "T", "i", "O"]) for _ in range(rng.randint(0, 4))]
        params = [f"a{i}" for i in range(len(kinds))]
        texts, extra = list(params), []
        if rng.random() < 0.3:
            texts.append("d0=3")
            extra.append(("d0", "i"))
        if rng.random() < 0.2:
            texts.append("*rest")
            extra.append(("rest", "LR"))
        if rng.random() < 0.2:
            texts += ([] if texts[-1] == "*rest" else ["*"]) + ["kw=2"]
            extra.append(("kw", "i"))
        lines += ["", *self.function("entry", None, rng.randint(4, 14), [*zip(params, kinds), *extra], f"def entry({', '.join(texts)}):")]
        return "\n".join([*lines, "", *self.drive(params, kinds, dict(extra)), ""])

    def drive(self, params, kinds, extra) -> list:
        rng, n = self.rng, 2
        lines = ["def drive(compile_, call):", "    global g_count, G_T, cached, helper_i, BIG, PATTERN", "    fn = compile_(entry)"]
        objects = [k for k in kinds if k in ("O", "P", "M", "H", "L", "D", "S", "LT", "DT", "Q", "DD")]
        held = {}
        for name, kind in zip(params, kinds):
            if kind in objects and rng.random() < 0.7:
                held[name] = kind
                lines.append(f"    h_{name} = {self.constants(rng.choice(ARGUMENTS[kind]), n)}")
        fixed = {}
        for turn in range(rng.choice((2, 3, 3, 4))):
            if turn and rng.random() < 0.3:
                n = rng.choice((3, 4, 1, 5))
            if turn and rng.random() < 0.7:
                for _ in range(rng.randint(1, 3)):
                    self.scope = {f"h_{a}": k for a, k in held.items()} | {"G_MODEL": "M"}
                    text = self.constants(rng.choice(rng.choice([BETWEEN, *(between for _, _, between in self.families)])), n)
                    try:
                        text = re.sub(r"%([A-Z]+)", lambda m: self.variable(m[1]), text)
                    except Impossible:
                        continue
                    lines.append("    " + text.removeprefix("global:"))
            args = []
            for name, kind in zip(params, kinds):
                if name in held:
                    args.append(f"h_{name}")
                elif kind == "T":
                    if args and rng.random() < 0.12:
                        args.append(rng.choice(["x0", "x0.view(-1, 3)", "x0[:]", "x0.detach()", "x0.clone()"]))
                    else:
                        dtype = "" if rng.random() < 0.93 else rng.choice([".double()", ".long()", ".half()"])
                        text = self.constants(rng.choice(TENSORS), n)
                        lines.append(f"    x{len(args)} = ({text}){dtype}" if dtype else f"    x{len(args)} = {text}")
                        args.append(f"x{len(args)}")
                else:
                    if name not in fixed or rng.random() < 0.5:
                        fixed[name] = rng.choice(ARGUMENTS[kind])
                        if kind in ("i", "s", "f", "b", "E", "U"):
                            fixed[name] = self.constants(fixed[name], n)
                    args.append(self.constants(fixed[name], n))
            if "d0" in extra and rng.random() < 0.4:
                args.append(str(rng.randint(0, 4)))
                if "rest" in extra and rng.random() < 0.6:
                    args += ["7"] * rng.randint(1, 2)
            if "kw" in extra and rng.random() < 0.5:
                args.append(f"kw={rng.randint(0, 3)}")
            lines.append(f"    call(fn, {', '.join(args)})")
        return lines


def program(seed: int) -> str:
    """The text of a module with a function `drive(compile_, call)`: `compile_(f)` gives what `call(f, *args)` will call."""
    return Writer(seed).module()
