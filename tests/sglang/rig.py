"""SGLang's own attention backends on a CPU, with a model runner and batches made by hand, and a dense reference in torch.

``Rig`` makes a backend and its cache; ``verify`` and ``draft_extend`` give batches as SGLang's workers do; ``forward`` runs the
backend on one, ``Graph`` as a CUDA graph would: what was called at capture is called again, on the same tensors.
"""

import importlib.util
import math
from types import SimpleNamespace
from unittest import mock

import sglang.srt.runtime_context as context
import torch
from sgl_kernel.flash_attn import flash_attn_with_kvcache
from sglang.kernels.ops.attention import flash_attention
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from flashmap.core import stats

TRANSLATES = importlib.util.find_spec("sglang.srt.mem_cache.kv_index_translator") is not None  # 0.5.23: indices go through a plan
CONTEXT = 192
SLOTS = 512
CLOSE = {"rtol": 0, "atol": 2e-5}
IMPLS = ["torch_dense", "triton_splitkv"]


class Rig:
    """One backend ("triton" or "fa3") with one layer. GQA: 4/2 heads of 32; MLA: 4 heads, latent 32 and 16 more columns."""

    def __init__(
        self, name, *, mla=False, topk=4, page=1, width=5, steps=3, lens=(37, 20), window=None, softcap=0.0, kv_dtype=torch.float32,
        scales=None, draft=False, seed=0, dtype=torch.float32, **server,
    ):  # fmt: skip
        self.name, self.mla, self.topk, self.page, self.width, self.window = name, mla, topk, page, width, window
        self.heads, self.kv_heads, self.dk, self.dv = (4, 1, 48, 32) if mla else (4, 2, 32, 32)
        self.softcap, self.scales, self.dtype, self.draw = softcap, scales, dtype, torch.Generator().manual_seed(seed)
        self.lens, self.steps = list(lens), steps
        arguments = {
            "speculative_num_draft_tokens": width, "speculative_num_steps": steps, "speculative_eagle_topk": topk,
            "speculative_algorithm": "EAGLE", "chunked_prefill_size": -1, "attention_backend": name, "page_size": page, **server,
        }  # fmt: skip
        self.server_args = context.get_context().override_server_args(**arguments).install()
        self.table = ReqToTokenPool(size=8, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
        if mla:
            self.pool = MLATokenToKVPool(SLOTS, page, kv_dtype, 32, 16, 1, "cpu", False)
        else:
            self.pool = MHATokenToKVPool(SLOTS, page, kv_dtype, self.kv_heads, self.dk, 1, "cpu", False, enable_alt_stream=False)
        self.runner = self._runner(kv_dtype, draft)
        self.layer = RadixAttention(
            self.heads, self.dk, self.dk**-0.5, self.kv_heads, 0, v_head_dim=self.dv, logit_cap=softcap, sliding_window_size=window or -1
        )
        if scales:
            self.layer.k_scale, self.layer.v_scale = (torch.tensor(s) for s in scales)
            self.layer.k_scale_float, self.layer.v_scale_float = scales
        self._fill()
        self.backend = self._backend()

    # -- what a step looks like ---------------------------------------------------------------------------------------

    def trees(self):
        """[L, L] masks: chains for topk 1, else trees that differ from request to request; and each row's depth."""
        masks, depths = [], []
        for _ in self.lens:
            mask, depth = torch.eye(self.width, dtype=torch.bool), [0]
            for t in range(1, self.width):
                parent = t - 1 if self.topk == 1 else int(torch.randint(0, t, (1,), generator=self.draw))
                mask[t] |= mask[parent]
                depth.append(depth[parent] + 1)
            masks.append(mask)
            depths.append(torch.tensor(depth))
        return masks, depths

    def verify(self, padded=0, qlen=False):
        """A batch of TARGET_VERIFY; the last ``padded`` requests are a graph's filling. SGLang's lengths leave the draft tokens out."""
        masks, depths = self.trees()
        lens = self.lens + [1] * padded
        masks += [torch.ones(self.width, self.width, dtype=torch.bool)] * padded
        depths += [torch.zeros(self.width, dtype=torch.long)] * padded
        flat = [m if qlen else torch.cat((torch.ones(self.width, n, dtype=torch.bool), m), 1) for n, m in zip(lens, masks, strict=True)]
        spec = SimpleNamespace(
            custom_mask=torch.cat([m.flatten() for m in flat]),
            positions=torch.cat([n + d for n, d in zip(lens, depths, strict=True)]),
            draft_token_num=self.width,
            num_tokens_per_req=self.width,
            kv_indptr=None,
        )
        return self._batch(ForwardMode.TARGET_VERIFY, lens, spec, masks, padded)

    def draft_extend(self, padded=0, accepted=None):
        """A batch of DRAFT_EXTEND_V2: lengths have the window in them. How many tokens were accepted is said, and must not matter."""
        lens = [n + self.width for n in self.lens] + [1] * padded
        window = torch.full((len(lens),), self.width, dtype=torch.int32)
        accepted = torch.tensor(accepted or [self.width] * len(lens), dtype=torch.int32)
        spec = SimpleNamespace(
            extend_seq_lens_tensor=window, extend_seq_lens_cpu=window.tolist(), num_tokens_per_req=self.width, custom_mask=None,
            num_accept_tokens=accepted, num_correct_drafts=accepted - 1, positions=torch.zeros(len(lens) * self.width, dtype=torch.long),
        )  # fmt: skip
        causal = [torch.ones(self.width, self.width).tril().bool()] * len(lens)
        batch = self._batch(ForwardMode.DRAFT_EXTEND_V2, lens, spec, causal, padded)
        batch.extend_seq_lens = window
        batch.extend_prefix_lens = (batch.seq_lens - self.width).clamp(min=0).int()
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = window.tolist(), batch.extend_prefix_lens.tolist()
        return batch

    def drafting(self, padded=0):
        """SGLang's backend of a drafter's steps, and a batch of DECODE for them: ``topk`` branches a request, each with the slots of its steps."""
        from sglang.srt.layers.attention.triton_backend import TritonMultiStepDraftBackend

        steps = TritonMultiStepDraftBackend(self.runner, self.topk, self.steps)
        lens = self.lens + [1] * padded
        positions = torch.tensor(lens).repeat_interleave(self.topk)
        spec = SimpleNamespace(kv_indptr=None, kv_indices=None, positions=positions, window_kv_indptr=None, window_kv_indices=None)
        batch = self._batch(ForwardMode.DECODE, lens, spec, None, padded)
        tokens = len(lens) * self.topk
        batch.q = self.normal(tokens, self.heads, self.dk)
        batch.k = batch.v = None  # written already
        return steps, batch

    def decode(self, backend, batch, **more):
        """[T, Hq, Dv] of one step's backend, on the metadata that it has."""
        done = backend.forward_decode(batch.q.flatten(1), batch.k, batch.v, self.layer, batch, save_kv_cache=False, **more)
        return done.view(-1, self.heads, self.dv)

    def decoded(self, batch, step, sinks=None):
        """The same in dense torch, of the requests that are no filling: a branch sees its prefix and its own tokens so far."""
        k_pool, v_pool = self.pool.get_key_buffer(0).float(), self.pool.get_value_buffer(0).float()[..., : self.dv]
        k_scale, v_scale = self.scales or (1.0, 1.0)
        outs = []
        for row, q in enumerate(batch.q[: len(self.lens) * self.topk].float()):
            request, branch = divmod(row, self.topk)
            length, table = self.lens[request], self.table.req_to_token[request + 1].long()
            own = length + branch * self.steps  # pages of one token, or a chain: what SGLang lists behind the prefix
            slots = torch.cat((table[:length], table[own : own + step + 1]))
            group = self.heads // self.kv_heads
            x = torch.einsum("hd,khd->hk", q, (k_pool[slots] * k_scale).repeat_interleave(group, 1)) * self.dk**-0.5
            if self.softcap:
                x = self.softcap * torch.tanh(x / self.softcap)
            if sinks is not None:
                x = torch.cat((x, sinks.float()[:, None]), -1)
            seen = x.softmax(-1)[:, : len(slots)]
            outs.append(torch.einsum("hk,khd->hd", seen, (v_pool[slots] * v_scale).repeat_interleave(group, 1)))
        return torch.stack(outs)

    def forward(self, batch, metadata=True, **more):
        """[T, Hq, Dv] of the backend, its metadata made anew unless ``metadata`` is False."""
        if metadata:
            self.backend.init_forward_metadata(batch)
        q, k, v = batch.q, batch.k, batch.v
        if self.mla and self.name == "fa3":  # SGLang's models hand the two parts of a latent row over one by one
            more |= {"q_rope": q[..., self.dv :].contiguous(), "k_rope": k[..., self.dv :]}
            q, k, v = q[..., : self.dv].contiguous(), k[..., : self.dv], k[..., : self.dv]
        done = self.backend.forward_extend(q.flatten(1), k, v, self.layer, batch, save_kv_cache=False, **more)
        return done.view(-1, self.heads, self.dv)

    def reference(self, batch, sinks=None):
        """The same in dense torch, for the requests that are no filling: draft K/V as the backend has them."""
        k_pool, v_pool = self.pool.get_key_buffer(0), self.pool.get_value_buffer(0)
        k_scale, v_scale = (self.scales or (1.0, 1.0)) if self.name == "triton" else (1.0, 1.0)
        outs = []
        for r, (length, mask) in enumerate(zip(self.lens, batch.masks, strict=False)):
            rows = slice(r * self.width, (r + 1) * self.width)
            slots = self.table.req_to_token[r + 1, :length].long()
            k = torch.cat((k_pool[slots].float() * k_scale, batch.k[rows].float()))
            v = torch.cat((v_pool[slots].float()[..., : self.dv] * v_scale, batch.v[rows].float()))
            group = self.heads // self.kv_heads
            x = torch.einsum("qhd,khd->hqk", batch.q[rows].float(), k.repeat_interleave(group, 1)) * self.dk**-0.5
            if self.softcap:
                x = self.softcap * torch.tanh(x / self.softcap)
            depth = mask.sum(-1) - 1
            keys = torch.cat((torch.arange(length), length + depth))
            seen = torch.cat((torch.ones(self.width, length, dtype=torch.bool), mask), 1)
            if self.window:
                seen &= (length + depth)[:, None] - keys <= self.window
            x = x.masked_fill(~seen, -math.inf)
            if sinks is not None:
                x = torch.cat((x, sinks.float()[:, None, None].expand(-1, self.width, 1)), -1)
            outs.append(torch.einsum("hqk,khd->qhd", x.softmax(-1)[..., : len(keys)], v.repeat_interleave(group, 1)))
        return torch.cat(outs)

    # -- what SGLang would have made ----------------------------------------------------------------------------------

    def _backend(self):
        if self.name == "triton":
            from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

            return TritonAttnBackend(self.runner)
        from sglang.srt.layers.attention import flashattention_backend as module

        flash_attention.fa3_flash_attn_with_kvcache = flash_attn_with_kvcache  # SGLang's wrapper of it asks for a GPU
        with mock.patch.object(module, "get_device_capability", lambda *a, **k: (9, 0)):
            return module.FlashAttentionBackend(self.runner)

    def _runner(self, kv_dtype, draft):
        text = SimpleNamespace(architectures=["X"], num_attention_heads=self.heads)
        text.get_text_config = lambda *a, **k: text
        model = SimpleNamespace(
            attention_arch=AttentionArch.MLA if self.mla else AttentionArch.MHA, num_attention_heads=self.heads, head_dim=self.dk,
            get_max_num_attention_heads=lambda: self.heads, get_num_kv_heads=lambda *a: self.kv_heads, v_head_dim=self.dv,
            swa_v_head_dim=self.dv, context_len=CONTEXT, is_encoder_decoder=False, qk_nope_head_dim=32, qk_rope_head_dim=16,
            kv_lora_rank=32, hf_config=text, hf_text_config=text, is_local_attention_model=False, linear_attn_registry_result=None,
        )  # fmt: skip
        runner = SimpleNamespace(
            req_to_token_pool=self.table, token_to_kv_pool=self.pool, token_to_kv_pool_allocator=SimpleNamespace(),
            sliding_window_size=self.window, page_size=self.page, model_config=model, device="cpu", gpu_id=0, is_draft_worker=draft,
            spec_algorithm=SpeculativeAlgorithm.EAGLE, kv_cache_dtype=kv_dtype, kv_cache_dtype_str="auto", server_args=self.server_args,
            attention_chunk_size=None, is_embedding=False, dtype=self.dtype, decode_num_tokens_per_req=lambda **k: self.width,
            ps=SimpleNamespace(attn_cp_size=1, attn_cp_rank=0, attn_tp_size=1, tp_size=1),
        )  # fmt: skip
        if TRANSLATES:
            from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

            runner.kv_index_translator = KVIndexTranslator(
                req_to_token=self.table.req_to_token, token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
                token_to_kv_pool=self.pool, page_size=self.page, device="cpu",
            )  # fmt: skip
        return runner

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.draw).to(self.dtype)

    def _fill(self):
        """Shuffled pages for every request; noise in the whole cache."""
        buffers = [self.pool.get_key_buffer(0)] + ([] if self.mla else [self.pool.get_value_buffer(0)])
        for buffer in buffers:
            buffer.copy_(self.normal(*buffer.shape))
        pages = 1 + torch.randperm(SLOTS // self.page - 1, generator=self.draw)
        for r, length in enumerate(self.lens):
            count = -(-(length + self.width) // self.page)
            own, pages = pages[:count], pages[count:]
            slots = (own[:, None] * self.page + torch.arange(self.page)).flatten()[:CONTEXT]
            self.table.req_to_token[r + 1, : len(slots)] = slots.int()

    def _batch(self, mode, lens, spec, masks, padded):
        rows = torch.tensor([*range(1, len(self.lens) + 1), *[0] * padded])
        slots = [self.table.req_to_token[r + 1, n : n + self.width].long() for r, n in enumerate(self.lens)]
        slots = torch.cat([*slots, torch.zeros(padded * self.width, dtype=torch.long)])
        tokens = len(lens) * self.width
        k = self.normal(tokens, self.kv_heads, self.dk)
        v = k[..., : self.dv].contiguous() if self.mla else self.normal(tokens, self.kv_heads, self.dv)
        real = len(self.lens) * self.width
        for buffer, draft in ((self.pool.get_key_buffer(0), k), (self.pool.get_value_buffer(0), v)):  # SGLang's store is a CUDA kernel
            buffer[slots[:real]] = draft[:real].to(buffer.dtype)
        seq_lens = torch.tensor(lens)
        batch = SimpleNamespace(
            forward_mode=mode, batch_size=len(lens), req_pool_indices=rows, seq_lens=seq_lens, seq_lens_cpu=seq_lens.clone(),
            seq_lens_sum=sum(lens), out_cache_loc=slots, out_cache_loc_is_physical=True, out_cache_loc_virtual=None,
            positions=spec.positions, spec_info=spec, spec_algorithm=SpeculativeAlgorithm.EAGLE, encoder_lens=None, mha_one_shot=False,
            attn_attend_prefix_cache=None, extend_seq_lens=None, extend_seq_lens_cpu=None, extend_prefix_lens=None,
            extend_prefix_lens_cpu=None, extend_start_loc=None, extend_num_tokens=None, global_num_tokens_cpu=None, dcp_kv_mask=None, attn_cp_metadata=None,
            kv_loc_plan=None, kv_loc_cols=None, masks=masks, q=self.normal(tokens, self.heads, self.dk), k=k, v=v,
        )  # fmt: skip
        return self.plan(batch)

    def plan(self, batch):
        if TRANSLATES:
            batch.kv_loc_plan = self.runner.kv_index_translator.own_plan(batch)
        return batch


def check_served(rig, batch, install, impl, theirs=True):
    """Once installed, ``impl`` gives what dense torch gives, and (``theirs``) what SGLang gave before."""
    before = rig.forward(batch) if theirs else None
    install(impl)
    ours = rig.forward(batch)
    torch.testing.assert_close(ours, rig.reference(batch), **CLOSE)
    if before is not None:
        torch.testing.assert_close(ours, before, **CLOSE)
    assert counts() == {(impl, "routed", ""): 1}


def counts():
    return {key: n for key, n in stats.snapshot().items() if key[1] in ("routed", "left")}


def left(code):
    """The counts of one call that SGLang kept."""
    return {("sglang", "left", code): 1}


class Graph:
    """A CUDA graph's life without one: static tensors, a capture on filling alone, and replays in which no Python of the adapter runs.

    ``capture`` notes every call of the op; ``replay`` copies a batch into the static tensors, lets SGLang refill its own metadata, and
    runs the noted calls again with the tensors that they had.
    """

    def __init__(self, rig, batch):
        self.rig, self.static = rig, batch
        for name in ("seq_lens", "req_pool_indices", "out_cache_loc", "positions", "q", "k", "v"):
            setattr(batch, name, getattr(batch, name).clone())
        rig.backend.init_cuda_graph_state(batch.batch_size, batch.batch_size * rig.width)

    def capture(self):
        from flashmap.adapters import serving
        from flashmap.adapters.sglang import translate

        batch, backend = self.static, self.rig.backend
        batch.seq_lens.fill_(1)
        batch.req_pool_indices.zero_()
        if batch.forward_mode.is_target_verify():  # the runner's own mask, in the size that it has in _allocate_decode_buffers
            keys = batch.batch_size * (backend.get_cuda_graph_seq_len_fill_value() + self.rig.width)
            batch.spec_info.custom_mask = torch.ones(keys * self.rig.width, dtype=torch.bool)
        self.rig.plan(batch)
        self.calls, self.made = [], []
        run, make = serving.verify_attention, translate.Tree.of

        def noted(*args, **kwargs):
            self.calls.append((args, kwargs))
            return run(*args, **kwargs)

        def noted_tree(*args):
            tree = make(*args)
            self.made.append((args, tree))
            return tree

        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        with mock.patch.object(serving, "verify_attention", noted), mock.patch.object(translate.Tree, "of", noted_tree):
            backend.init_forward_metadata_in_graph(batch)
            self.out = self.rig.forward(batch, metadata=False)
        self.run, self.make = run, make
        return self

    def replay(self, live):
        static = self.static
        for name in ("seq_lens", "req_pool_indices", "out_cache_loc", "positions", "q", "k", "v"):
            getattr(static, name).copy_(getattr(live, name))
        static.spec_info, static.seq_lens_cpu, static.seq_lens_sum = live.spec_info, None, None
        self.rig.plan(static)
        backend = self.rig.backend
        backend.init_forward_metadata_out_graph(static, in_capture=False)
        if static.forward_mode.is_draft_extend_v2():  # SGLang records a kernel of its own here
            backend.init_forward_metadata_in_graph(static)
        for args, tree in self.made:
            again = self.make(*args)
            tree.slots.copy_(again.slots)
            tree.mask.copy_(again.mask)
        for args, kwargs in self.calls:
            if args[0].data_ptr() != static.q.data_ptr():  # joined from its two parts by a copy, which the graph would repeat
                args[0].copy_(static.q)
            self.run(*args, **kwargs)
        return self.out
