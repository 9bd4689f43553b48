"""Implementations that are wrong on purpose: the tests must notice them."""

from flashmap.core import registry
from flashmap.core.interface import Implementation


class Zeros(Implementation):
    def run(self, call):
        call.out.zero_()


class Another(Implementation):
    """Each request gets what the next one of the batch should have. Where the batch is one request, that is right."""

    def run(self, call):
        registry.get("torch_dense").run(call)
        starts = call.cu_seqlens_q.tolist()
        rows = [range(start, end) for start, end in zip(starts, starts[1:], strict=False) if end > start]
        right = call.out.clone()
        for own, other in zip(rows, rows[1:] + rows[:1], strict=True):
            for row, i in enumerate(own):
                call.out[i] = right[other[min(row, len(other) - 1)]]


ZEROS, ANOTHER = Zeros("zeros"), Another("another_request")
