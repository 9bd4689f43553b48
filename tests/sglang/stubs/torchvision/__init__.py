"""An empty stand-in: SGLang imports torchvision at module level, and its CUDA builds do not load beside a CPU build of torch."""

__version__ = "0"
