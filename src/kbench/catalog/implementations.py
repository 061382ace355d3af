"""Who computes which operation, and what each can be asked for.

Owns the registry that built-ins and plug-ins share. It knows names and capabilities, imports no implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points

from kbench.catalog.ops import OPS
from kbench.errors import UsageError

DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("NHD", "HND")
HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Implementation:
    """Who computes an operation, and what it can be asked for. `entry` is `module:attribute`, imported when used."""

    name: str
    ops: tuple[str, ...]
    entry: str
    summary: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = DTYPES
    page_multiple_of: int = 1
    page_sizes: tuple[int, ...] = ()
    layouts: tuple[str, ...] = LAYOUTS
    head_dims: tuple[int, ...] = ()
    power_of_two_head_dim: bool = False
    graph: bool = False
    expects_kernel: str = ""
    features: tuple[str, ...] = ()
    """What it adds to plain attention: window, softcap, sinks, lse (the log-sum-exp beside the output)."""
    installed: bool = False
    """Brought by a package through an entry point: `entry` is a plug-in reference."""
    requires: tuple[str, ...] = ()
    """Packages that must be installed."""

    def serves(self, op: str) -> bool:
        """`gemm` serves `gemm.qkv` too."""
        return op in self.ops or op.partition(".")[0] in self.ops


ENTRY_POINTS = "kbench.kernels"
_IMPLEMENTATIONS: dict[str, Implementation] = {}


def register(implementation: Implementation, *, override: bool = False) -> None:
    """Make an implementation known, built-in or plug-in; a second one of a name needs `override`.

    A name is unique among all operations: `triton-rmsnorm`, not `triton`.
    """
    if implementation.name in _IMPLEMENTATIONS and not override:
        raise UsageError(f"an implementation named {implementation.name!r} is registered already", remedy="rename it")
    unknown = [op for op in implementation.ops if op not in OPS]
    if unknown or not implementation.ops:
        raise UsageError(f"{implementation.name}: unknown op {unknown}", remedy=f"one of {', '.join(OPS)}")
    _IMPLEMENTATIONS[implementation.name] = implementation


@lru_cache(maxsize=1)
def _discover() -> None:
    """Entry points of the group `kbench.kernels`, named NAME@OP, e.g. `mine@norm.rmsnorm = "mine.norms:fn"`.

    Only their names are read. One that names no operation of ours, or a name that is taken, is left out: a package that
    somebody installed for another reason must not break a run.
    """
    for point in entry_points(group=ENTRY_POINTS):
        name, _, op = point.name.partition("@")
        if name and op in OPS and name not in _IMPLEMENTATIONS:
            summary = f"from {point.dist.name}" if point.dist is not None else "installed"
            _IMPLEMENTATIONS[name] = Implementation(name, (op,), point.value, summary, graph=True, installed=True)


def implementations(op: str | None = None) -> list[Implementation]:
    _discover()
    return [impl for impl in _IMPLEMENTATIONS.values() if op is None or impl.serves(op)]


def implementation(name: str, op: str | None = None) -> Implementation:
    found = _IMPLEMENTATIONS.get(name)
    if found is None:
        _discover()
        found = _IMPLEMENTATIONS.get(name)
    if found is None or (op is not None and not found.serves(op)):
        names = ", ".join(impl.name for impl in implementations(op)) or "none"
        raise UsageError(
            f"no implementation {name!r}" + (f" of {op}" if op else ""),
            remedy=f"one of {names}; see kbench list kernels",
        )
    return found


for _built_in in (
    Implementation(
        "reference",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.reference:ReferenceAttention",
        "plain softmax(QK)V, one sequence at a time, scores materialised",
        features=("window", "softcap", "sinks", "lse"),
    ),
    Implementation(
        "sdpa",
        ("attention.prefill",),
        "kbench.kernels.sdpa:SdpaPrefill",
        "gathers each sequence's pages, then torch scaled_dot_product_attention",
    ),
    Implementation(
        "sdpa-gather",
        ("attention.decode",),
        "kbench.kernels.sdpa:SdpaGatherDecode",
        "gathers the whole batch's pages into one padded tensor, then scaled_dot_product_attention",
    ),
    Implementation(
        "blocked",
        ("attention.decode",),
        "kbench.kernels.blocked:BlockedDecode",
        "streams tiles of pages with a running softmax; never builds the gathered tensor",
        page_multiple_of=16,
    ),
    Implementation(
        "blocked-tuned",
        ("attention.decode",),
        "kbench.kernels.blocked_tuned:BlockedTunedDecode",
        "as blocked, with the size of a tile left to the tuner",
        page_multiple_of=16,
    ),
    Implementation(
        "triton-paged",
        ("attention.decode",),
        "kbench.kernels.triton_paged:TritonPagedDecode",
        "split-KV paged decode in Triton",
        devices=("cuda",),
        power_of_two_head_dim=True,
        page_multiple_of=16,
        graph=True,
        expects_kernel="_paged_decode",
    ),
    Implementation(
        "torch-rmsnorm",
        ("norm.rmsnorm",),
        "kbench.kernels.norms:TorchRmsNorm",
        "torch.nn.functional.rms_norm",
        graph=True,
    ),
    Implementation(
        "torch-add-rmsnorm",
        ("norm.add_rmsnorm",),
        "kbench.kernels.norms:TorchAddRmsNorm",
        "the addition, then the norm: two kernels at least",
        graph=True,
    ),
    Implementation(
        "sdpa-flash",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.sdpa_backends:SdpaFlash",
        "scaled_dot_product_attention by FlashAttention, on contiguous keys and values",
        devices=("cuda",),
        dtypes=HALF,
        expects_kernel="flash",
    ),
    Implementation(
        "sdpa-cudnn",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.sdpa_backends:SdpaCudnn",
        "scaled_dot_product_attention by cuDNN, on contiguous keys and values",
        devices=("cuda",),
        dtypes=HALF,
        expects_kernel="cudnn",
    ),
    Implementation(
        "sdpa-math",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.sdpa_backends:SdpaMath",
        "scaled_dot_product_attention in plain operations, on contiguous keys and values",
    ),
    Implementation(
        "flex",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.flex:FlexAttention",
        "compiled FlexAttention, on contiguous keys and values",
        devices=("cuda",),
        power_of_two_head_dim=True,
        features=("window", "softcap", "sinks", "lse"),
    ),
    Implementation(
        "triton-paged-features",
        ("attention.decode",),
        "kbench.kernels.triton_features:TritonFeaturesDecode",
        "split-KV paged decode in Triton with window, soft cap, sinks and log-sum-exp",
        devices=("cuda",),
        power_of_two_head_dim=True,
        graph=True,
        expects_kernel="_decode_split",
        features=("window", "softcap", "sinks", "lse"),
    ),
    Implementation(
        "triton-prefill",
        ("attention.prefill",),
        "kbench.kernels.triton_features:TritonPrefill",
        "paged prefill in Triton, ragged, causal, with window, soft cap, sinks and log-sum-exp",
        devices=("cuda",),
        power_of_two_head_dim=True,
        graph=True,
        expects_kernel="_prefill",
        features=("window", "softcap", "sinks", "lse"),
    ),
    Implementation(
        "flashinfer-decode",
        ("attention.decode",),
        "kbench.kernels.adapters_attention:FlashInferDecode",
        "FlashInfer's BatchDecodeWithPagedKVCacheWrapper",
        devices=("cuda",),
        dtypes=HALF,
        head_dims=(64, 128, 256),
        features=("window", "softcap", "lse"),
        requires=("flashinfer",),
    ),
    Implementation(
        "flashinfer-prefill",
        ("attention.prefill",),
        "kbench.kernels.adapters_attention:FlashInferPrefill",
        "FlashInfer's BatchPrefillWithPagedKVCacheWrapper",
        devices=("cuda",),
        dtypes=HALF,
        head_dims=(64, 128, 256),
        features=("window", "softcap", "lse"),
        requires=("flashinfer",),
    ),
    Implementation(
        "fa2",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.adapters_attention:Flash2",
        "flash_attn_varlen_func of FlashAttention 2 with block tables",
        devices=("cuda",),
        dtypes=HALF,
        layouts=("NHD",),
        page_multiple_of=256,
        features=("window", "softcap"),
        requires=("flash_attn",),
    ),
    Implementation(
        "fa3",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.adapters_attention:Flash3",
        "flash_attn_with_kvcache of FlashAttention 3 with page tables",
        devices=("cuda",),
        dtypes=HALF,
        layouts=("NHD",),
        features=("window", "softcap"),
        requires=("flash_attn_interface",),
    ),
    Implementation(
        "vllm-fa2",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.adapters_attention:VllmFlash2",
        "vLLM's build of FlashAttention 2 with block tables",
        devices=("cuda",),
        dtypes=HALF,
        layouts=("NHD",),
        page_multiple_of=16,
        features=("window", "softcap"),
        requires=("vllm",),
    ),
    Implementation(
        "vllm-fa3",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.adapters_attention:VllmFlash3",
        "vLLM's build of FlashAttention 3 with block tables",
        devices=("cuda",),
        dtypes=HALF,
        layouts=("NHD",),
        page_multiple_of=16,
        features=("window", "softcap"),
        requires=("vllm",),
    ),
    Implementation(
        "vllm-paged",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.adapters_attention:VllmPaged",
        "vLLM's unified attention in Triton",
        devices=("cuda",),
        dtypes=HALF,
        layouts=("NHD",),
        page_multiple_of=16,
        features=("window", "softcap", "sinks"),
        requires=("vllm",),
    ),
    Implementation(
        "sglang-decode",
        ("attention.decode",),
        "kbench.kernels.adapters_attention:SglangDecode",
        "SGLang's split-KV decode in Triton",
        devices=("cuda",),
        dtypes=HALF,
        layouts=("NHD",),
        features=("softcap", "sinks"),
        requires=("sglang",),
    ),
    Implementation(
        "torch-mla",
        ("attention.mla_decode",),
        "kbench.kernels.latent:TorchMla",
        "gathers the batch's pages, then two batched products and a softmax",
    ),
    Implementation(
        "reference-mla",
        ("attention.mla_decode",),
        "kbench.kernels.latent:PlainMla",
        "the definition, one sequence at a time",
    ),
    Implementation(
        "torch-merge",
        ("attention.cascade_merge",),
        "kbench.kernels.merging:TorchMerge",
        "log-sum-exp, then a weighted sum, in plain torch",
        graph=True,
    ),
    Implementation(
        "triton-merge",
        ("attention.cascade_merge",),
        "kbench.kernels.merging:TritonMerge",
        "one pass over the parts, in Triton",
        devices=("cuda",),
        graph=True,
        expects_kernel="_merge",
    ),
    Implementation(
        "compile-rmsnorm",
        ("norm.rmsnorm",),
        "kbench.kernels.norms:CompiledRmsNorm",
        "the norm through torch.compile",
        graph=True,
    ),
    Implementation(
        "triton-rmsnorm",
        ("norm.rmsnorm",),
        "kbench.kernels.norms:TritonRmsNorm",
        "the norm in one pass, in Triton",
        devices=("cuda",),
        graph=True,
        expects_kernel="_rmsnorm",
    ),
    Implementation(
        "flashinfer-rmsnorm",
        ("norm.rmsnorm",),
        "kbench.kernels.adapters_norm:FlashInferRmsNorm",
        "flashinfer.norm.rmsnorm",
        devices=("cuda",),
        dtypes=HALF,
        requires=("flashinfer",),
    ),
    Implementation(
        "liger-rmsnorm",
        ("norm.rmsnorm",),
        "kbench.kernels.adapters_norm:LigerRmsNorm",
        "Liger's Triton kernel of the norm",
        devices=("cuda",),
        requires=("liger_kernel",),
    ),
    Implementation(
        "compile-add-rmsnorm",
        ("norm.add_rmsnorm",),
        "kbench.kernels.norms:CompiledAddRmsNorm",
        "the addition and the norm through torch.compile",
        graph=True,
    ),
    Implementation(
        "triton-add-rmsnorm",
        ("norm.add_rmsnorm",),
        "kbench.kernels.norms:TritonAddRmsNorm",
        "the addition and the norm in one pass, in Triton",
        devices=("cuda",),
        graph=True,
        expects_kernel="_rmsnorm",
    ),
    Implementation(
        "liger-add-rmsnorm",
        ("norm.add_rmsnorm",),
        "kbench.kernels.adapters_norm:LigerAddRmsNorm",
        "Liger's Triton kernel of the addition and the norm",
        devices=("cuda",),
        requires=("liger_kernel",),
    ),
    Implementation(
        "flashinfer-top-k",
        ("sampling.top_k",),
        "kbench.kernels.adapters_sampling:FlashInferTopK",
        "flashinfer.sampling.top_k_mask_logits",
        devices=("cuda",),
        requires=("flashinfer",),
    ),
    Implementation(
        "flashinfer-draw",
        ("sampling.draw",),
        "kbench.kernels.adapters_sampling:FlashInferDraw",
        "flashinfer.sampling.sampling_from_logits, with its own generator",
        devices=("cuda",),
        requires=("flashinfer",),
    ),
    Implementation(
        "torch-gemm",
        ("gemm",),
        "kbench.kernels.torch_gemm:TorchGemm",
        "torch.mm: cuBLAS on CUDA",
        graph=True,
    ),
    Implementation(
        "torch-gemm-packed",
        ("gemm",),
        "kbench.kernels.torch_gemm:TorchPackedGemm",
        "torch.mm with the weight stored [k, n]",
        graph=True,
    ),
    Implementation(
        "torch-compile-gemm",
        ("gemm",),
        "kbench.kernels.torch_gemm:TorchCompileGemm",
        "torch.nn.functional.linear through torch.compile, symbolic sizes",
        devices=("cuda",),
        graph=True,
    ),
    Implementation(
        "triton-gemm",
        ("gemm",),
        "kbench.kernels.triton_gemm:TritonGemm",
        "tiles chosen by shape, split along k where rows are few, in Triton",
        devices=("cuda",),
        graph=True,
        expects_kernel="_gemm_tile",
    ),
    Implementation(
        "torch-grouped-loop",
        ("moe.grouped_gemm",),
        "kbench.kernels.torch_gemm:TorchGroupedLoop",
        "one torch.mm for each expert that has rows; the host knows the offsets",
        graph=True,
    ),
    Implementation(
        "torch-grouped-padded",
        ("moe.grouped_gemm",),
        "kbench.kernels.torch_gemm:TorchGroupedPadded",
        "every expert padded to the busiest one, then torch.bmm",
        graph=True,
    ),
    Implementation(
        "torch-grouped-mm",
        ("moe.grouped_gemm",),
        "kbench.kernels.torch_gemm:TorchGroupedMm",
        "torch.nn.functional.grouped_mm",
        dtypes=("bfloat16",),
        graph=True,
    ),
    Implementation(
        "triton-grouped",
        ("moe.grouped_gemm",),
        "kbench.kernels.triton_moe:TritonGrouped",
        "tiles of rows of one expert each, in Triton; the host knows no offsets",
        devices=("cuda",),
        graph=True,
        expects_kernel="_grouped_tile",
    ),
    Implementation(
        "torch-router",
        ("moe.router",),
        "kbench.kernels.torch_moe:TorchRouter",
        "softmax, topk, division by the sum",
        graph=True,
    ),
    Implementation(
        "triton-router",
        ("moe.router",),
        "kbench.kernels.triton_moe:TritonRouter",
        "softmax and top k of a token in one program, in Triton",
        devices=("cuda",),
        graph=True,
        expects_kernel="_route",
    ),
    Implementation(
        "torch-permute",
        ("moe.permute",),
        "kbench.kernels.torch_moe:TorchPermute",
        "stable sort, search, gather",
        graph=True,
    ),
    Implementation(
        "triton-permute",
        ("moe.permute",),
        "kbench.kernels.triton_moe:TritonPermute",
        "a counting sort without atomics and a gather, in Triton",
        devices=("cuda",),
        graph=True,
        expects_kernel="_sort_by_expert",
    ),
    Implementation(
        "torch-moe",
        ("moe.fused",),
        "kbench.kernels.torch_moe:TorchMoe",
        "a loop over experts, as Hugging Face models write it; the host waits for the router",
    ),
    Implementation(
        "triton-moe",
        ("moe.fused",),
        "kbench.kernels.triton_moe:TritonMoe",
        "route, sort, gather in the first grouped GEMM, SiLU-mul, second grouped GEMM, weighted sum, in Triton",
        devices=("cuda",),
        graph=True,
        expects_kernel="_grouped_tile",
    ),
    Implementation(
        "torch-penalties",
        ("sampling.penalties",),
        "kbench.kernels.sampling:TorchPenalties",
        "gathers the history's logits, penalises, scatters back",
        graph=True,
    ),
    Implementation(
        "torch-mask",
        ("sampling.mask",),
        "kbench.kernels.sampling:TorchMask",
        "unpacks the bits to booleans, then masked_fill",
        graph=True,
    ),
    Implementation(
        "torch-top-k",
        ("sampling.top_k",),
        "kbench.kernels.sampling:TorchTopK",
        "torch.topk for the largest k of any row, then a threshold a row",
        graph=True,
    ),
    Implementation(
        "torch-top-p",
        ("sampling.top_p",),
        "kbench.kernels.sampling:TorchTopP",
        "a whole sort, softmax, cumulative sum",
        graph=True,
    ),
    Implementation(
        "torch-draw",
        ("sampling.draw",),
        "kbench.kernels.sampling:TorchDraw",
        "cumulative softmax and a binary search for the uniform",
        graph=True,
    ),
    Implementation(
        "torch-draw-exponential",
        ("sampling.draw",),
        "kbench.kernels.sampling:TorchDrawExponential",
        "a race of exponentials from torch's own generator",
    ),
    Implementation(
        "torch-chain",
        ("sampling.chain",),
        "kbench.kernels.sampling:TorchChain",
        "one step after the other over the whole vocabulary, float32",
        graph=True,
    ),
    Implementation(
        "torch-short-chain",
        ("sampling.chain",),
        "kbench.kernels.sampling:TorchShortChain",
        "a partial sort first; top-p and the draw see the k largest only",
        graph=True,
    ),
    Implementation(
        "compiled-chain",
        ("sampling.chain",),
        "kbench.kernels.sampling:CompiledChain",
        "torch-chain through torch.compile",
        graph=True,
    ),
    Implementation(
        "triton-fused-sampling",
        ("sampling.chain",),
        "kbench.kernels.triton_sampling:TritonFusedSampling",
        "the whole chain in one kernel: thresholds by bisection, no sort",
        devices=("cuda",),
        graph=True,
        expects_kernel="_sample_row",
    ),
    Implementation(
        "torch-kv-append",
        ("kv.append",),
        "kbench.kernels.movers:TorchAppend",
        "an indexed write",
        graph=True,
    ),
    Implementation(
        "triton-kv-append",
        ("kv.append",),
        "kbench.kernels.triton_movers:TritonAppend",
        "one program a token",
        devices=("cuda",),
        graph=True,
        expects_kernel="_append",
    ),
    Implementation(
        "torch-copy-pages",
        ("kv.copy_pages",),
        "kbench.kernels.movers:TorchCopyPages",
        "index_select, then index_copy_",
        graph=True,
    ),
    Implementation(
        "torch-convert",
        ("kv.convert_pages", "kv.convert_layout"),
        "kbench.kernels.movers:TorchConvert",
        "slots of both sides in the plan, then a gather and a scatter",
        graph=True,
    ),
    Implementation(
        "triton-convert-pages",
        ("kv.convert_pages", "kv.convert_layout"),
        "kbench.kernels.triton_movers:TritonConvert",
        "blocks of tokens from table to table, any page sizes and layouts",
        devices=("cuda",),
        graph=True,
        expects_kernel="_convert",
    ),
    Implementation(
        "torch-rope",
        ("rope",),
        "kbench.kernels.elementwise:TorchRope",
        "rows of the tables by position, then halves or pairs, float32",
        graph=True,
    ),
    Implementation(
        "compiled-rope",
        ("rope",),
        "kbench.kernels.elementwise:CompiledRope",
        "torch-rope through torch.compile",
        graph=True,
    ),
    Implementation(
        "triton-rope",
        ("rope",),
        "kbench.kernels.triton_elementwise:TritonRope",
        "one program a token, queries and keys",
        devices=("cuda",),
        graph=True,
        expects_kernel="_rope",
    ),
    Implementation(
        "torch-silu-mul",
        ("activation.silu_mul",),
        "kbench.kernels.elementwise:TorchSiluMul",
        "silu, then the product, in float32",
        graph=True,
    ),
    Implementation(
        "compiled-silu-mul",
        ("activation.silu_mul",),
        "kbench.kernels.elementwise:CompiledSiluMul",
        "torch-silu-mul through torch.compile",
        graph=True,
    ),
    Implementation(
        "triton-silu-mul",
        ("activation.silu_mul",),
        "kbench.kernels.triton_elementwise:TritonSiluMul",
        "one pass in Triton",
        devices=("cuda",),
        graph=True,
        expects_kernel="_silu_mul",
    ),
    Implementation(
        "torch-quant-fp8",
        ("quant.per_token_fp8",),
        "kbench.kernels.elementwise:TorchQuantFp8",
        "largest of each row, division, conversion",
        graph=True,
    ),
    Implementation(
        "compiled-quant-fp8",
        ("quant.per_token_fp8",),
        "kbench.kernels.elementwise:CompiledQuantFp8",
        "torch-quant-fp8 through torch.compile",
        graph=True,
    ),
    Implementation(
        "triton-quant-fp8",
        ("quant.per_token_fp8",),
        "kbench.kernels.triton_elementwise:TritonQuantFp8",
        "one program a row",
        devices=("cuda",),
        graph=True,
        expects_kernel="_quant_row",
    ),
):
    register(_built_in)
