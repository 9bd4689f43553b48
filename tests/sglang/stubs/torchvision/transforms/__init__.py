from torchvision.transforms.functional import InterpolationMode


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


__all__ = ["InterpolationMode"]
