"""Every tunable of the kernels, from one pure function of a request and a device.

``config_for`` reads the table below and fits the tile to the device's shared memory; ``overrides`` has what the
FLASHMAP_SPLITKV_* variables force. No torch, no triton: tests call it with made-up devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flashmap import env
from flashmap.core.implementations.triton_shared.shapes import head_split, power_of_two
from flashmap.core.request import DeviceInfo, VerifyRequest

_ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
# Request counts are rounded up to these, so that few kernels are compiled: the schedule is a vector over requests.
_REQUEST_BLOCKS = (1, 64, 512)


@dataclass(frozen=True, slots=True)
class Config:
    """One launch, but for the lengths.

    Attributes:
        kernel: "split" (kernels.py, Triton) or "latent_sm90" (latent_sm90.py, Gluon).
        m, row_blocks: rows of a program, and programs that cover a KV head's G * max_query_len rows.
        block_n, block_l: keys in a tile of the prefix, and of the draft tokens.
        warps, stages: of the split kernel.
        waves: programs per SM that the splits aim for.
        min_chunk: fewest keys in a split; max_splits: most splits of a request.
        span, rest: the head dimension in two dots, of the first ``span`` columns and of ``rest`` (padded; 0: none).
        d1, dv: ``span`` and the value dimension, padded to powers of two.
        merged, block_s, merge_warps: rows of a program of the merge, splits that it reads at once, and its warps.
        registers: most of a thread, where what the compiler chooses for itself is too few; None: it chooses.
        pairs: an fp8 prefix is read as 16-bit words and multiplied in fp16, also where q is bf16.
        last_merges: no second kernel, but the last of a request's programs merges. Only where it is forced.
        pdl: programmatic dependent launch, by which the merge starts before the split kernel ends.
    """

    kernel: str
    m: int
    row_blocks: int
    block_n: int
    block_l: int
    warps: int
    stages: int
    waves: int
    min_chunk: int
    max_splits: int
    span: int
    d1: int
    rest: int
    dv: int
    merged: int
    block_s: int
    merge_warps: int
    registers: int | None
    pairs: bool
    last_merges: bool
    pdl: bool

    def target(self, kv_heads: int, sm_count: int) -> int:
        """Splits that fill the device ``waves`` times, over all requests, for one KV head's row block.

        Up to three more waves are taken where whole splits would leave a tenth of the device idle: 34 row blocks on
        132 SMs are 3 splits (102 programs) in one wave, but 7 (238 programs) in two.
        """
        blocks = kv_heads * self.row_blocks
        for waves in range(self.waves, self.waves + 4):
            splits = waves * sm_count // blocks
            if splits * blocks >= 0.9 * waves * sm_count:
                return splits
        return max(1, self.waves * sm_count // blocks)

    def launched_splits(self, request: VerifyRequest, sm_count: int) -> int:
        """Splits in the launch grid: an upper bound of what the device can hand out, from host constants alone."""
        requests, target = request.num_requests, self.target(request.kv_heads, sm_count)
        bound = target if requests == 1 else target + requests
        if request.max_kv_len is not None:
            bound = min(bound, requests * max(1, -(-request.max_kv_len // self.block_n)))
        return max(bound, 1)

    @property
    def min_tiles(self) -> int:
        return -(-self.min_chunk // self.block_n)


@dataclass(frozen=True, slots=True)
class _Tuned:
    """A row of the table: for up to ``rows`` rows of a program, in batches of up to ``requests`` requests."""

    rows: int
    block_n: int
    warps: int
    stages: int
    waves: int
    min_chunk: int
    requests: int = 1 << 30
    registers: int | None = None


# Measured on one H200 with torch 2.11.0+cu130 and Triton 3.6.0, bf16, page 64: benchmarks/results/.
_TABLE: dict[str, tuple[_Tuned, ...]] = {
    "gqa": (
        _Tuned(16, 64, 4, 5, 2, 128, requests=16),
        _Tuned(16, 128, 4, 3, 2, 128, registers=255),
        _Tuned(32, 64, 4, 5, 2, 128),
        _Tuned(64, 64, 4, 5, 2, 128, registers=255),
    ),
    "gqa_fp8": (
        _Tuned(16, 64, 4, 5, 2, 128, requests=4),
        _Tuned(16, 128, 4, 5, 2, 128, registers=255),
        _Tuned(32, 128, 4, 5, 2, 128, registers=255),
        _Tuned(64, 64, 4, 5, 2, 128),
    ),
    "mla": (
        _Tuned(16, 64, 4, 3, 1, 128),
        _Tuned(32, 64, 8, 3, 1, 128),
        _Tuned(64, 64, 8, 2, 1, 128),
    ),
    "latent_sm90": (_Tuned(64, 64, 8, 2, 1, 128),),  # the rows, keys and warps that the kernel is written for
    # fp32 has no tensor cores at full precision: small tiles, which the compiler keeps in registers.
    "fp32": (_Tuned(16, 32, 4, 2, 2, 128), _Tuned(32, 32, 4, 2, 2, 128)),
}


def config_for(request: VerifyRequest, device: DeviceInfo, forced: Mapping[str, int] | None = None) -> Config | None:
    """The configuration for ``request`` on ``device``, or None when no tile fits its shared memory. ``forced``: see ``overrides``."""
    forced = forced or {}
    rows = request.group * max(request.max_query_len, 1)
    span, d1, rest, dv = head_split(request)
    if _has_latent_sm90(request, device) and not forced.keys() & {"block_n", "warps", "stages"}:
        kind = "latent_sm90"
    else:
        kind = "fp32" if request.dtype == "fp32" else "mla" if request.latent else "gqa_fp8" if _has_pairs(request, device) else "gqa"
    tuned = _pick(_TABLE[kind], rows, request.num_requests)
    m = tuned.rows
    block_n = forced.get("block_n", tuned.block_n)
    merged, block_s, merge_warps = _merge(request.num_requests * request.kv_heads * rows, dv)
    config = Config(
        kernel="latent_sm90" if kind == "latent_sm90" else "split",
        m=m,
        row_blocks=-(-rows // m),
        block_n=block_n,
        block_l=min(64, max(16, power_of_two(request.max_query_len))),
        warps=forced.get("warps", tuned.warps),
        stages=forced.get("stages", tuned.stages),
        waves=forced.get("waves", tuned.waves),
        min_chunk=forced.get("min_chunk", tuned.min_chunk),
        max_splits=forced.get("max_splits", 1 << 30),
        span=span,
        d1=d1,
        rest=rest,
        dv=dv,
        merged=merged,
        block_s=block_s,
        merge_warps=merge_warps,
        registers=None if "warps" in forced else tuned.registers,
        pairs=_has_pairs(request, device),
        last_merges=bool(forced.get("last_merges")) and kind != "latent_sm90",
        pdl=device.type == "cuda" and device.capability >= (9, 0) and device.has_triton(3, 6),
    )
    if kind == "latent_sm90":
        return config
    return config if device.type != "cuda" else _fit(config, request, device, forced)


def request_block(num_requests: int) -> int:
    """The length of the kernels' vectors over requests."""
    for block in _REQUEST_BLOCKS:
        if num_requests <= block:
            return block
    return power_of_two(num_requests)


def _pick(table: tuple[_Tuned, ...], rows: int, requests: int) -> _Tuned:
    """The smallest row block that holds all rows, which then read K and V once; else the largest."""
    for tuned in table:
        if rows <= tuned.rows and requests <= tuned.requests:
            return tuned
    return table[-1]


def _merge(rows: int, dv: int) -> tuple[int, int, int]:
    """(rows of a program of the merge, splits it reads at once, its warps), for ``rows`` of all KV heads and requests.

    Many programs wait for one another, so that each takes more rows; few have the device for themselves, and each reads more at once.
    """
    if rows >= 2048:
        return (4, 4, 4 if dv >= 256 else 2) if rows >= 4096 else (2, 8, 4 if dv >= 256 else 2)
    if dv > 256 and rows <= 1024:
        return (1, 32, 8) if rows <= 320 else (1, 16, 4)
    return (1, 8, 4) if dv >= 256 else (1, 16, 2)


def _has_pairs(request: VerifyRequest, device: DeviceInfo) -> bool:
    """Whether the columns of an fp8 cache are read two by two: an address of a word is even, and a product takes 16 columns or more.

    Of GPUs on Hopper alone, where it was measured: what it takes of shared memory elsewhere is not known.
    """
    _, d1, rest, _ = head_split(request)
    return (
        (device.type != "cuda" or device.capability[0] == 9)
        and request.kv_dtype.startswith("fp8")
        and request.dtype != "fp32"
        and request.aligned
        and request.head_dim % 2 == request.v_head_dim % 2 == 0
        and d1 >= 32
        and rest != 16
    )


def _has_latent_sm90(request: VerifyRequest, device: DeviceInfo) -> bool:
    """Whether latent_sm90.py serves the request: Hopper, DeepSeek's dimensions in 16 bits, no window, a Triton with its Gluon.

    Also an fp8 cache, if the draft tokens lie in it too: what lies elsewhere may not fit into fp16.
    """
    return (
        device.type == "cuda"
        and device.capability[0] == 9
        and request.latent
        and (request.head_dim, request.v_head_dim) == (576, 512)
        and (request.dtype == request.kv_dtype or (request.kv_dtype.startswith("fp8") and request.draft != "dense"))
        and request.dtype != "fp32"
        and request.window is None
        and request.aligned  # it copies 16 bytes at a time
        and device.has_triton(3, 6)
    )


def _fit(config: Config, request: VerifyRequest, device: DeviceInfo, forced: Mapping[str, int]) -> Config | None:
    """Shorten the pipeline, then halve the tiles, the longer one first, until the operands fit in shared memory; what is forced is left as it is."""
    while shared_memory(config, request, device) > device.shared_memory:
        if config.stages > 2 and "stages" not in forced:
            config = replace(config, stages=config.stages - 1)
        elif config.block_n > 16 and config.block_n >= config.block_l and "block_n" not in forced:
            config = replace(config, block_n=config.block_n // 2)
        elif config.block_l > 16:
            config = replace(config, block_l=config.block_l // 2)
        elif config.m > 16:
            rows = request.group * max(request.max_query_len, 1)
            config = replace(config, m=config.m // 2, row_blocks=-(-rows // (config.m // 2)))
        else:
            return None
    return config


def shared_memory(config: Config, request: VerifyRequest, device: DeviceInfo) -> int:
    """Bytes that the split kernel takes: Q, P, and K and V tiles of the pipeline or of the draft tokens.

    As Triton 3.6 allocates (tests/core/test_compile.py compares, for each generation): the page ids are one more level of loads, so that
    two stages buy one tile ahead; 64 rows and more use the warpgroup product of Hopper or that of Blackwell, which do not read P from
    shared memory, hold one more tile, and need fp8 tiles converted in a buffer of their own. A latent V is a view of K's tile there and in
    fp32, unless Blackwell takes it as it was copied; other products want it beside K, in another layout, and Q once more where only the cache is fp8.
    """
    size, kv_size, major = _ITEMSIZE[request.dtype], _ITEMSIZE[request.kv_dtype], device.capability[0]
    converted = kv_size != size
    large = config.m >= 64 and request.dtype != "fp32" and major in (9, 10)
    view = request.latent and (request.dtype == "fp32" or (large and (major == 9 or converted)))
    k_columns = config.d1 + config.rest
    columns = k_columns + (0 if view else config.dv)
    query = config.m * k_columns * size
    weights = 0 if large else config.m * max(config.block_n, config.block_l) * size
    ahead = max(1, (config.stages - 1) // 2)
    if large and not converted:
        ahead += 1
    tiles = ahead * config.block_n * columns * kv_size
    if converted:
        dense = request.draft == "dense"
        if large:
            tiles += config.block_n * columns * size
        elif request.dtype == "fp32":
            tiles += config.block_n * (config.dv + config.rest) * size
        elif request.latent:
            tiles += query if dense else 0
        else:
            tiles += config.block_l * (columns + config.rest if dense else config.dv) * size
    if config.last_merges:  # partial results, three splits ahead
        tiles += 3 * config.m * config.dv * 4
    return query + weights + max(tiles, config.block_l * columns * size) + 2048


def overrides() -> dict[str, int]:
    """The fields of Config that FLASHMAP_SPLITKV_* variables force. Read where a launch is planned: choosing is pure."""
    names = ("waves", "max_splits", "min_chunk", "block_n", "warps", "stages", "last_merges")
    found = {name: env.get(f"FLASHMAP_SPLITKV_{name.upper()}") for name in names}
    return {name: value for name, value in found.items() if value is not None}
