"""Handlers by key, registered where they are written."""


class Table(dict):
    """`@table.of(key, ...)` registers a function for these keys. What is one expression is a row of `table.update({...})`."""

    def of(self, *keys):
        def register(function):
            self.update(dict.fromkeys(keys, function))
            return function
        return register
