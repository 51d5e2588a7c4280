"""What takes long to import: loaded once, in the process that the models' processes are forked from."""
import importlib
import warnings

import minicompile.bench.zoo.worker  # noqa: F401

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in ("torchvision", "timm", "transformers", "transformers.modeling_utils",
                 "transformers.models.llama.modeling_llama", "transformers.models.vit.modeling_vit"):
        try:
            importlib.import_module(name)
        except Exception:
            pass                         # not installed, or not for this torch: its models' own rows say so
