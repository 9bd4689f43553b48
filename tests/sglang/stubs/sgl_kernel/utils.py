def is_arch_support_pdl() -> bool:
    return False


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: None
