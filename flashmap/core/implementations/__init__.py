"""The implementations of the op, one file or folder each. They never import each other."""
