"""Who computes the steps from logits to a token, and the whole chain of them."""

from __future__ import annotations

from kbench.catalog.capability import AMPERE, GraphSupport, Implementation

ALWAYS = GraphSupport.ALWAYS

ENTRIES = (
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
        "torch-penalties",
        ("sampling.penalties",),
        "kbench.kernels.sampling:TorchPenalties",
        "gathers the history's logits, penalises, scatters back",
        graph=ALWAYS,
        expects_operator="scatter_add",
    ),
    Implementation(
        "torch-mask",
        ("sampling.mask",),
        "kbench.kernels.sampling:TorchMask",
        "unpacks the bits to booleans, then masked_fill",
        graph=ALWAYS,
        expects_operator="__rshift__",
    ),
    Implementation(
        "torch-top-k",
        ("sampling.top_k",),
        "kbench.kernels.sampling:TorchTopK",
        "torch.topk for the largest k of any row, then a threshold a row",
        graph=ALWAYS,
        expects_operator="aten::topk",
    ),
    Implementation(
        "torch-top-p",
        ("sampling.top_p",),
        "kbench.kernels.sampling:TorchTopP",
        "a whole sort, softmax, cumulative sum",
        graph=ALWAYS,
        expects_operator="aten::cumsum",
    ),
    Implementation(
        "torch-draw",
        ("sampling.draw",),
        "kbench.kernels.sampling:TorchDraw",
        "cumulative softmax and a binary search for the uniform",
        graph=ALWAYS,
        expects_operator="aten::cumsum",
    ),
    Implementation(
        "torch-draw-exponential",
        ("sampling.draw",),
        "kbench.kernels.sampling:TorchDrawExponential",
        "a race of exponentials from torch's own generator",
        expects_operator="exponential_",
    ),
    Implementation(
        "torch-chain",
        ("sampling.chain",),
        "kbench.kernels.sampling:TorchChain",
        "one step after the other over the whole vocabulary, float32",
        graph=ALWAYS,
        expects_operator="aten::sort",
    ),
    Implementation(
        "torch-short-chain",
        ("sampling.chain",),
        "kbench.kernels.sampling:TorchShortChain",
        "a partial sort first; top-p and the draw see the k largest only",
        graph=ALWAYS,
        expects_operator="aten::topk",
    ),
    Implementation(
        "compiled-chain",
        ("sampling.chain",),
        "kbench.kernels.sampling:CompiledChain",
        "torch-chain through torch.compile",
        graph=ALWAYS,
    ),
    Implementation(
        "triton-fused-sampling",
        ("sampling.chain",),
        "kbench.kernels.triton_sampling:TritonFusedSampling",
        "the whole chain in one kernel: thresholds by bisection, no sort",
        devices=("cuda",),
        lowest_capability=AMPERE,
        priority=20,
        graph=ALWAYS,
        expects_kernel="_sample_row",
    ),
)
