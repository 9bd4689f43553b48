from torchvision.transforms.functional import __getattr__

__all__ = ["__getattr__"]
