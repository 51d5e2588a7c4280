import pathlib
import sys

import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_collection_modifyitems(config, items):
    """Tests of a GPU are not collected where there is none."""
    if not torch.cuda.is_available():
        out = [i for i in items if i.get_closest_marker("gpu") and HERE in i.path.parents]
        items[:] = [i for i in items if i not in out]
        config.hook.pytest_deselected(items=out)
