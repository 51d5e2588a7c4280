from minicompile.ch03_capture.tensors import emit
from minicompile.ch03_capture.values import Const
from minicompile.ch12_training.slots import gradient_of, set_gradient


def wrong_always_assigned(tx, leaf, gradient, create_graph):
    set_gradient(tx, leaf, gradient)


def wrong_sum_is_assigned(tx, leaf, gradient, create_graph):
    present = gradient_of(tx, leaf)
    set_gradient(tx, leaf, gradient if type(present) is Const else emit(tx, "add", [present, gradient]))


def wrong_old_is_added_to_new(tx, leaf, gradient, create_graph):
    present = gradient_of(tx, leaf)
    if type(present) is not Const:
        emit(tx, "add_", [gradient, present])
    set_gradient(tx, leaf, gradient)


def wrong_first_is_kept(tx, leaf, gradient, create_graph):
    if type(gradient_of(tx, leaf)) is Const:
        set_gradient(tx, leaf, gradient)


def wrong_real_gradient(tx, leaf, gradient, create_graph):
    if leaf.real is None or leaf.real.grad is None:
        set_gradient(tx, leaf, gradient)
    else:
        emit(tx, "add_", [gradient_of(tx, leaf), gradient])


def wrong_added_twice(tx, leaf, gradient, create_graph):
    present = gradient_of(tx, leaf)
    if type(present) is Const:
        set_gradient(tx, leaf, gradient)
    else:
        emit(tx, "add_", [present, gradient])
        emit(tx, "add_", [present, gradient])


def wrong_overwritten_with_a_history(tx, leaf, gradient, create_graph):
    present = gradient_of(tx, leaf)
    if type(present) is Const:
        set_gradient(tx, leaf, gradient)
    else:
        emit(tx, "add_", [present, gradient])


def right_with_a_return(tx, leaf, gradient, create_graph):
    if type(present := gradient_of(tx, leaf)) is not Const:
        if not create_graph:
            emit(tx, "add_", [present, gradient])
            return
        gradient = emit(tx, "add", [present, gradient])
    set_gradient(tx, leaf, gradient)
