"""Each generator has one table of scalar operations, and they agree with what the loop IR has."""
from minicompile.ch07_loops.builder import FOLDED, ON_INDEX, PREDICATES
from minicompile.ch07_loops.pointwise import HEAVY
from minicompile.ch07_loops.reference import SCALAR
from minicompile.ch07_loops.rules.pointwise import CALLED, ON_BOOL, SHARP
from minicompile.ch07_loops.verify import STRUCTURAL
from minicompile.ch09_triton.rules.scalars import OPS
from minicompile.ch10_cpp.ops import CPP_OPS


def test_generators_have_the_operations_of_the_reference():
    of_integers_too = {"fmod", "remainder", "floordiv"}
    assert set(OPS) - STRUCTURAL == set(SCALAR)
    assert set(CPP_OPS) - STRUCTURAL == set(SCALAR) - (CALLED - of_integers_too)


def test_lists_of_operations_name_known_ones():
    for names in (FOLDED, ON_INDEX, PREDICATES, HEAVY, SHARP, ON_BOOL, ON_BOOL.values()):
        assert set(names) <= set(SCALAR)
