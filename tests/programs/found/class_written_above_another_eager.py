import torch


class Base:
    created = 0


class Child(Base):
    pass


def entry(x):
    Base.created += 1
    Child.created += 1
    return x + Child.created


def inherits(x):
    Base.created = 5
    return x + Child().created


def drive(compile_, call):
    for function in compile_(entry), compile_(inherits):
        for _ in range(2):
            call(function, torch.ones(2))
            Base.created = 0
        del Child.created
        call(function, torch.ones(2))
        Child.created = 1
        call(function, torch.ones(2))
