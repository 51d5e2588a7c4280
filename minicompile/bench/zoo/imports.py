"""What takes long to import: loaded once, in the process that the models' processes are forked from."""
import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in ("minicompile.bench.zoo.worker", "minicompile", "torchvision", "timm", "transformers", "transformers.modeling_utils",
                 "transformers.models.llama.modeling_llama", "transformers.models.vit.modeling_vit"):
        try:
            importlib.import_module(name)
        except ImportError:
            pass                         # its models are listed as not installed
