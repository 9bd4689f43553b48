"""An implementation that is wrong on purpose: the tests must notice it."""

from flashmap.core.interface import Implementation


class Zeros(Implementation):
    def run(self, call):
        call.out.zero_()


IMPLEMENTATION = Zeros("zeros")
