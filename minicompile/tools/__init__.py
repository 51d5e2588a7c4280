"""What people use to look at the compiler. No stage imports it.

`explain.py` reports what was made of one call, and `explore/` shows it as a page. `bisect.py` finds the stage, the graph
and the operation that are wrong: it compares answers (`answers.py`, `restore.py`) of programs that run in processes of
their own (`apart.py`), and makes the graph small (`shrink.py`). `target.py` and `standin.py` serve the command line:
`FILE:FUNCTION ARGUMENTS`, and scripts that ask for `torch.compile`.
"""
