"""GPU tests are deselected, and counted as such, on machines without one; `-m gpu` asks for them anyway."""
import torch


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available() or "gpu" in (config.option.markexpr or ""):
        return
    without = [item for item in items if item.get_closest_marker("gpu")]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
