"""The implementations of the op, one file or folder each. They never import each other; triton_shared is there for all."""
