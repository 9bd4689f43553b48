"""FlashMap: cheap verification attention for speculative decoding, in any inference engine.

Importing this package loads nothing else: an engine imports a plugin in every process it starts.
The op lives in :mod:`flashmap.core`, the engine plugins in :mod:`flashmap.adapters`.
"""

__version__ = "0.1.0"
