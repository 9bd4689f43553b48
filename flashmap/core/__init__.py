"""The op, free of engines: ``from flashmap.core import verify_attention``."""

from flashmap.core.inputs import PagedKV, SlotKV, TreeMask
from flashmap.core.interface import Capability, Declined, Implementation, Reason, VerifyAttention
from flashmap.core.op import prepare, verify_attention
from flashmap.core.request import DeviceInfo, Limits, VerifyRequest

__all__ = [
    "Capability",
    "Declined",
    "DeviceInfo",
    "Implementation",
    "Limits",
    "PagedKV",
    "Reason",
    "SlotKV",
    "TreeMask",
    "VerifyAttention",
    "VerifyRequest",
    "prepare",
    "verify_attention",
]
